"""Whole files, linked, reflinked or copied, against real file systems."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from filesystems import (
    BLOCK,
    fails,
    file_of,
    ignore,
    in_child,
    noise,
    shared_bytes,
)

from mla_convert import storage
from mla_convert.errors import BadInputError
from mla_convert.storage import LinkMode, clone_file


def test_auto_reflinks_where_it_can(xfs_root: Path, tmp_path: Path) -> None:
    place = xfs_root / tmp_path.name
    place.mkdir()
    content = noise(5 * BLOCK + 3)
    (place / "link").symlink_to(file_of(place / "blob", content))
    told: list[int] = []
    assert clone_file(place / "link", place / "out", LinkMode.AUTO, on_bytes=told.append) == "reflink"
    assert (place / "out").read_bytes() == content
    assert not (place / "out").is_symlink()
    assert shared_bytes(place / "out") == 6 * BLOCK
    assert (place / "out").stat().st_ino != (place / "blob").stat().st_ino
    assert told == [len(content)]


def test_auto_hard_links_where_it_cannot_reflink(tiny: Path) -> None:
    (tiny / "link").symlink_to(file_of(tiny / "blob", noise(5000)))
    told: list[int] = []
    assert clone_file(tiny / "link", tiny / "out", LinkMode.AUTO, on_bytes=told.append) == "hard"
    assert (tiny / "out").samefile(tiny / "blob")
    assert not (tiny / "out").is_symlink()
    assert told == [5000]


def test_auto_copies_across_file_systems(tiny: Path, tmp_path: Path) -> None:
    source = file_of(tiny / "a", noise(100_000))
    told: list[int] = []
    assert clone_file(source, tmp_path / "out", LinkMode.AUTO, on_bytes=told.append) == "copy"
    assert (tmp_path / "out").read_bytes() == source.read_bytes()
    assert sum(told) == 100_000


@pytest.mark.parametrize("mode", list(LinkMode))
@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * BLOCK + 7])
def test_every_mode_gives_the_same_bytes(xfs_root: Path, mode: LinkMode, size: int) -> None:
    source = file_of(xfs_root / f"source-{mode}-{size}", noise(size))
    told: list[int] = []
    way = clone_file(source, xfs_root / f"out-{mode}-{size}", mode, on_bytes=told.append)
    assert way == (mode if mode is not LinkMode.AUTO else "reflink")
    assert (xfs_root / f"out-{mode}-{size}").read_bytes() == source.read_bytes()
    assert sum(told) == size


def test_a_link_that_cannot_be_made_is_refused_with_a_way_out(tiny: Path, tmp_path: Path) -> None:
    source = file_of(tiny / "a", b"x")
    told: list[int] = []
    for mode, target, code, words in (
        (LinkMode.REFLINK, tiny / "out", errno.EOPNOTSUPP, "the file system has no such operation"),
        (LinkMode.REFLINK, tmp_path / "out", errno.EXDEV, "different file systems"),
        (LinkMode.HARD, tmp_path / "out", errno.EXDEV, "different file systems"),
    ):
        error = fails(code, lambda m=mode, t=target: clone_file(source, t, m, on_bytes=told.append))
        assert words in error.message and str(source) in error.message and str(target) in error.message
        assert error.hint is not None and "--link copy" in error.hint
        assert not target.exists()
    assert told == []


@pytest.mark.parametrize("mode", list(LinkMode))
def test_an_existing_target_is_never_touched(folder: Path, mode: LinkMode) -> None:
    source = file_of(folder / "a", b"new")
    target = file_of(folder / "b", b"old")
    fails(errno.EEXIST, lambda: clone_file(source, target, mode, on_bytes=ignore))
    assert target.read_bytes() == b"old"
    (folder / "dangling").symlink_to(folder / "elsewhere")
    fails(errno.EEXIST, lambda: clone_file(source, folder / "dangling", mode, on_bytes=ignore))
    assert not (folder / "elsewhere").exists()


@pytest.mark.parametrize("mode", list(LinkMode))
def test_a_pipe_is_not_cloned(tmp_path: Path, mode: LinkMode) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInputError, match="pipe"):
        in_child(lambda: clone_file(tmp_path / "pipe", tmp_path / "out", mode, on_bytes=ignore), seconds=5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_new_files_honour_the_umask(xfs_root: Path, tmp_path: Path, umask: int, mode: int) -> None:
    place = xfs_root / tmp_path.name
    place.mkdir()
    source = file_of(place / "a", b"x")
    source.chmod(0o400)
    old = file_of(place / "old", b"")
    old.chmod(0o600)

    def write() -> None:
        os.umask(umask)
        clone_file(source, place / "copy", LinkMode.COPY, on_bytes=ignore)
        clone_file(source, place / "reflink", LinkMode.REFLINK, on_bytes=ignore)
        storage.write_file_atomic(place / "new", b"x")
        storage.write_file_atomic(old, b"x")

    in_child(write)
    for name in ("copy", "reflink", "new", "old"):
        assert (place / name).stat().st_mode & 0o7777 == mode, name
