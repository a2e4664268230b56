"""A checkpoint to reshard over ranks, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import unflushed  # noqa: F401
from conversions import contents, memory_folder
from sharded_models import MODELS, write_model

from mla_convert import api
from mla_convert.engine import RunOptions
from mla_convert.sharding import ReshardOptions


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", MODELS["deepseek_v3-fp8"])


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What one process makes."""
    api.reshard(source, tmp_path / "reference", ReshardOptions(8), run=RunOptions(workers=1))
    return contents(tmp_path / "reference")
