"""A checkpoint to convert and what splitting it gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import (
    contents,
    memory_folder,
    write_checkpoint,
)

from mla_convert import api


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> dict[str, bytes]:
    """The output of an undisturbed split."""
    api.split(model, tmp_path / "reference")
    return contents(tmp_path / "reference")
