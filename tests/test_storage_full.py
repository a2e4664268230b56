"""Disks that are full, read-only, another's or limited: real ones."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from filesystems import (
    MIB,
    Descriptors,
    fails,
    file_of,
    ignore,
    in_child,
    noise,
    public_folder,
    remount_read_only,
)

from mla_convert import linux, output_folder, storage
from mla_convert.storage import FileSystemError, LinkMode, clone_file, copy_range


def test_a_full_disk_shows_before_a_byte_is_written(tiny: Path, tmp_path: Path) -> None:
    source = file_of(tmp_path / "a", noise(2 * MIB))
    told: list[int] = []
    error = fails(errno.ENOSPC, lambda: clone_file(source, tiny / "b", LinkMode.AUTO, on_bytes=told.append))
    assert "2.10 MB (2 097 152 bytes)" in error.message and str(tiny / "b") in error.message
    assert told == []
    assert list(tiny.iterdir()) == []


def test_a_disk_that_fills_up_halfway_names_the_offset(
    tiny: Path, tmp_path: Path, opened: Descriptors
) -> None:
    source_fd = opened(file_of(tmp_path / "a", noise(2 * MIB)), os.O_RDONLY)
    target_fd = opened(tiny / "b")
    storage.preallocate(target_fd, 2 * MIB, reserve=False)
    told: list[int] = []
    error = fails(
        errno.ENOSPC,
        lambda: copy_range(source_fd, 0, target_fd, 0, 2 * MIB, reflink=True, on_bytes=told.append),
    )
    assert 0 < sum(told) <= MIB
    assert f"write byte {sum(told)} of {tiny / 'b'}" in error.message


def test_a_full_disk_leaves_the_old_small_file(tiny: Path) -> None:
    path = file_of(tiny / "journal", b"old")
    fails(errno.ENOSPC, lambda: storage.write_file_atomic(path, bytes(2 * MIB)))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tiny.iterdir()] == ["journal"]


def test_a_lock_can_be_taken_on_a_full_disk(tiny: Path) -> None:
    with (tiny / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
    with output_folder.Lock(tiny / "lock") as lock:
        assert lock.supported


def test_reserved_space_is_really_taken(tiny: Path, opened: Descriptors) -> None:
    fd = opened(tiny / "a")
    storage.preallocate(fd, MIB // 2)
    assert os.fstat(fd).st_blocks * 512 == MIB // 2
    fails(errno.ENOSPC, lambda: storage.preallocate(opened(tiny / "b"), MIB))
    sparse = opened(tiny / "c")
    storage.preallocate(sparse, 10 * MIB, reserve=False)
    assert (os.fstat(sparse).st_size, os.fstat(sparse).st_blocks) == (10 * MIB, 0)
    storage.preallocate(opened(tiny / "d"), 0)


def test_where_space_cannot_be_reserved_the_file_is_sparse(
    tmp_path: Path, opened: Descriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate")

    monkeypatch.setattr(linux, "reserve_space", refuse)
    fd = opened(tmp_path / "a")
    storage.preallocate(fd, MIB)
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (MIB, 0)


def test_a_read_only_file_system(tiny: Path, tmp_path: Path) -> None:
    source = file_of(tmp_path / "a", b"x")
    (tiny / "staged").mkdir()
    remount_read_only(tiny)
    for call in (
        lambda: output_folder.ensure_writable(tiny / "out" / "deep"),
        lambda: storage.write_file_atomic(tiny / "b", b"x"),
        lambda: clone_file(source, tiny / "b", LinkMode.AUTO, on_bytes=ignore),
        lambda: output_folder.publish_directory(tiny / "staged", tiny / "final", replace=False),
        lambda: output_folder.Lock(tiny / "lock").__enter__(),
    ):
        assert "mounted read-only" in fails(errno.EROFS, call).message


def test_a_folder_of_someone_else(tmp_path: Path) -> None:
    with public_folder() as root:
        if os.geteuid() != 0:
            root.chmod(0o555)
        source = file_of(root / "a", b"x") if os.geteuid() == 0 else file_of(tmp_path / "a", b"x")

        def refused(call: Callable[[], object]) -> None:
            fails(errno.EACCES, lambda: in_child(call, nobody=True))

        refused(lambda: output_folder.ensure_writable(root / "out"))
        refused(lambda: storage.write_file_atomic(root / "b", b"x"))
        refused(lambda: clone_file(source, root / "b", LinkMode.AUTO, on_bytes=ignore))
        refused(lambda: output_folder.Lock(root / "lock").__enter__())
        assert [entry.name for entry in root.iterdir()] == (["a"] if os.geteuid() == 0 else [])


def test_a_folder_that_may_be_written_but_not_read() -> None:
    with public_folder() as root:
        drop = root / "drop"
        drop.mkdir()
        drop.chmod(0o333)
        assert in_child(lambda: storage.fsync_directory(drop), nobody=True) is False
        in_child(lambda: storage.write_file_atomic(drop / "a", b"x"), nobody=True)
        drop.chmod(0o755)
        assert (drop / "a").read_bytes() == b"x"


def test_the_file_size_limit(tmp_path: Path) -> None:
    source = file_of(tmp_path / "a", noise(MIB))

    def limited(call: Callable[[], object]) -> FileSystemError:
        def run() -> object:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            return call()

        return fails(errno.EFBIG, lambda: in_child(run))

    def halfway() -> None:
        target_fd = os.open(tmp_path / "c", os.O_RDWR | os.O_CREAT)
        copy_range(os.open(source, os.O_RDONLY), 0, target_fd, 0, MIB, reflink=False, on_bytes=ignore)

    assert (
        "reserve 1.05 MB"
        in limited(lambda: clone_file(source, tmp_path / "b", LinkMode.COPY, on_bytes=ignore)).message
    )
    assert not (tmp_path / "b").exists()
    error = limited(halfway)
    assert "write byte 100000 of" in error.message
    assert error.hint is not None and "ulimit -f" in error.hint
