"""Copied and shared ranges of bytes, against real file systems; only missing kernel features are simulated."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from filesystems import (
    BLOCK,
    MIB,
    Descriptors,
    fails,
    file_of,
    ignore,
    noise,
    shared_bytes,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_convert import output_folder, storage
from mla_convert.errors import ExitCode
from mla_convert.storage import FileSystemError, LinkMode, clone_file, copy_range

near_blocks = st.builds(
    lambda blocks, delta: max(0, blocks * BLOCK + delta),
    st.integers(0, 6),
    st.sampled_from([-1, 0, 0, 0, 1, 513]),
)


@given(data=st.data(), size=near_blocks, target_size=near_blocks, preallocated=st.booleans())
@settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_ranges_equal_a_bytes_model(
    folder: Path, data: st.DataObject, size: int, target_size: int, preallocated: bool
) -> None:
    content = noise(size, seed=size)
    model = bytearray(target_size)
    source = file_of(folder / "source", content)
    (folder / "target").unlink(missing_ok=True)
    source_fd = os.open(source, os.O_RDONLY)
    target_fd = os.open(folder / "target", os.O_RDWR | os.O_CREAT)
    try:
        storage.preallocate(target_fd, target_size, reserve=preallocated)
        assert os.fstat(target_fd).st_size == target_size
        for _ in range(data.draw(st.integers(1, 4), label="ranges")):
            source_offset = min(data.draw(near_blocks, label="source offset"), size)
            target_offset = data.draw(near_blocks, label="target offset")
            length = min(data.draw(near_blocks, label="length"), size - source_offset)
            told: list[int] = []
            shared = copy_range(
                source_fd,
                source_offset,
                target_fd,
                target_offset,
                length,
                reflink=data.draw(st.booleans(), label="reflink"),
                on_bytes=told.append,
            )
            if length:
                model.extend(bytes(max(0, target_offset - len(model))))
                model[target_offset : target_offset + length] = content[
                    source_offset : source_offset + length
                ]
            assert sum(told) == length
            assert 0 <= shared <= length
        assert (folder / "target").read_bytes() == model
        assert source.read_bytes() == content
    finally:
        os.close(source_fd)
        os.close(target_fd)


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "length", "expected"),
    [
        pytest.param(0, 0, 8 * BLOCK, 8 * BLOCK, id="aligned"),
        pytest.param(BLOCK, 3 * BLOCK, 4 * BLOCK, 4 * BLOCK, id="moved by blocks"),
        pytest.param(100, BLOCK + 100, 4 * BLOCK, 3 * BLOCK, id="congruent"),
        pytest.param(1, 1, BLOCK - 1 + BLOCK, BLOCK, id="one whole block"),
        pytest.param(1, 1, 2 * BLOCK - 2, 0, id="no whole block"),
        pytest.param(0, 100, 8 * BLOCK, 0, id="not congruent"),
        pytest.param(0, 512, 8 * BLOCK, 0, id="sector is not enough"),
    ],
)
@pytest.mark.parametrize("reserve", [True, False], ids=["preallocated", "sparse"])
def test_reflinked_ranges_are_shared(
    xfs_root: Path,
    opened: Descriptors,
    source_offset: int,
    target_offset: int,
    length: int,
    expected: int,
    reserve: bool,
) -> None:
    content = noise(12 * BLOCK)
    source = file_of(xfs_root / f"source-{time.monotonic_ns()}", content)
    target = xfs_root / f"target-{time.monotonic_ns()}"
    target_fd = opened(target)
    storage.preallocate(target_fd, 16 * BLOCK, reserve=reserve)
    source_fd = opened(source, os.O_RDONLY)
    told: list[int] = []
    shared = copy_range(
        source_fd, source_offset, target_fd, target_offset, length, reflink=True, on_bytes=told.append
    )
    assert shared == expected
    assert shared_bytes(target) == shared_bytes(source) == expected
    assert sum(told) == length
    model = bytearray(16 * BLOCK)
    model[target_offset : target_offset + length] = content[source_offset : source_offset + length]
    assert target.read_bytes() == model


def test_the_end_of_the_source_is_shared_only_as_the_end_of_the_target(
    xfs_root: Path, opened: Descriptors
) -> None:
    content = noise(4 * BLOCK + 77)
    source_fd = opened(file_of(xfs_root / "tail-source", content), os.O_RDONLY)
    for target_size, expected in ((len(content), len(content)), (len(content) + 1, 4 * BLOCK)):
        target = xfs_root / f"tail-{target_size}"
        target_fd = opened(target)
        storage.preallocate(target_fd, target_size, reserve=False)
        shared = copy_range(source_fd, 0, target_fd, 0, len(content), reflink=True, on_bytes=ignore)
        assert shared == expected
        assert target.read_bytes() == content.ljust(target_size, b"\0")


def test_sharing_takes_no_space_and_writing_does_not_reach_the_source(
    xfs_root: Path, opened: Descriptors
) -> None:
    content = noise(MIB) * 40
    source = file_of(xfs_root / "big", content)
    os.sync()
    free = output_folder.free_bytes(xfs_root)
    target_fd = opened(xfs_root / "big-range")
    storage.preallocate(target_fd, len(content), reserve=False)
    copy_range(opened(source, os.O_RDONLY), 0, target_fd, 0, len(content), reflink=True, on_bytes=ignore)
    clone_file(source, xfs_root / "big-clone", LinkMode.REFLINK, on_bytes=ignore)
    os.sync()
    now = output_folder.free_bytes(xfs_root)
    assert free is not None and now is not None
    assert free - now < MIB
    os.pwrite(target_fd, b"changed", 0)
    assert source.read_bytes() == content
    source.unlink()
    assert (xfs_root / "big-clone").read_bytes() == content
    (xfs_root / "big-clone").unlink()
    (xfs_root / "big-range").unlink()


@pytest.mark.parametrize("reflink", [True, False])
def test_a_source_that_ends_early_names_the_offset(folder: Path, opened: Descriptors, reflink: bool) -> None:
    source_fd = opened(file_of(folder / "source", noise(3 * BLOCK + 5)), os.O_RDONLY)
    target_fd = opened(folder / "target")
    told: list[int] = []
    with pytest.raises(FileSystemError, match=rf"source ended at byte {3 * BLOCK + 5}; \d+ bytes") as caught:
        copy_range(source_fd, BLOCK, target_fd, BLOCK, 5 * BLOCK, reflink=reflink, on_bytes=told.append)
    assert caught.value.exit_code == ExitCode.LOCAL_IO
    assert sum(told) == 2 * BLOCK + 5


def test_a_device_error_names_the_offset(tmp_path: Path, opened: Descriptors) -> None:
    # Nothing is mapped at address 8192 of a process, and the kernel says so with a true EIO.
    source_fd = opened("/proc/self/mem", os.O_RDONLY)
    target_fd = opened(tmp_path / "target")
    error = fails(
        errno.EIO, lambda: copy_range(source_fd, 8192, target_fd, 0, 100, reflink=True, on_bytes=ignore)
    )
    assert "cannot read byte 8192 of /proc/" in error.message
    assert "the device reported an error (EIO)" in error.message


def test_what_the_kernel_will_not_copy_is_read_and_written(tmp_path: Path, opened: Descriptors) -> None:
    # copy_file_range refuses /proc or calls it empty; the bytes are there all the same.
    expected = Path("/proc/version").read_bytes()
    source_fd, target_fd = opened("/proc/version", os.O_RDONLY), opened(tmp_path / "target")
    copy_range(source_fd, 0, target_fd, 10, len(expected), reflink=True, on_bytes=ignore)
    assert (tmp_path / "target").read_bytes() == bytes(10) + expected


def test_chunks_are_bounded_both_ways(
    tmp_path: Path, opened: Descriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(3 * MIB + 1)
    source_fd = opened(file_of(tmp_path / "source", content), os.O_RDONLY)
    monkeypatch.setattr(storage, "_KERNEL_CHUNK", MIB)
    monkeypatch.setattr(storage, "_BUFFER", MIB // 2)
    for attempt, limit in enumerate((MIB, MIB // 2)):
        told: list[int] = []
        target = tmp_path / f"target-{attempt}"
        copy_range(source_fd, 0, opened(target), 0, len(content), reflink=False, on_bytes=told.append)
        assert target.read_bytes() == content
        assert max(told) == limit and sum(told) == len(content)
        monkeypatch.delattr(os, "copy_file_range", raising=False)  # the second time by way of memory
