"""Fixtures that several modules share. One thread a process: tests run side by side, and small tensors gain nothing."""

import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# In the background of a script SIGINT is ignored, also by all children; tests send it to themselves and to those.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from filesystems import Descriptors, tmpfs, xfs


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """On a GPU every test draws inputs of its own, the same in every run."""
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module")
def xfs_root() -> Iterator[Path]:
    with xfs() as root:
        yield root


@pytest.fixture
def tiny() -> Iterator[Path]:
    with tmpfs("1m") as root:
        yield root


@pytest.fixture(params=["native", "xfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty folder on the machine's own file system, then on XFS."""
    if request.param == "native":
        yield tmp_path
        return
    place = request.getfixturevalue("xfs_root") / tmp_path.name
    place.mkdir()
    yield place


@pytest.fixture
def opened() -> Iterator[Descriptors]:
    descriptors = Descriptors()
    yield descriptors
    for fd in descriptors.opened:
        os.close(fd)
