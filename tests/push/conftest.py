"""A fake Hub, an output to push to it, and a client that pushes again and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import memory_folder
from fake_hub import FakeHub, running_hub
from pushing import Client, make_output


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def hub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeHub]:
    """Its parameter is how bytes travel: "lfs" (also without one), "multipart" or "xet"."""
    way = getattr(request, "param", "lfs")
    mode = "xet" if way == "xet" else "lfs"
    with running_hub(tmp_path / "hub", mode, multipart=10_000 if way == "multipart" else 0) as hub:
        yield hub


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return make_output(tmp_path)


@pytest.fixture
def client(hub: FakeHub) -> Iterator[Client]:
    with Client(hub) as client:
        yield client
