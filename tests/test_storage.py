"""storage.py against real file systems and real faults; only missing kernel features are simulated."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filesystems import (
    BLOCK,
    MIB,
    Descriptors,
    fails,
    file_of,
    ignore,
    in_child,
    meanwhile,
    noise,
    public_folder,
    remount_read_only,
    shared_bytes,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_convert import linux, output_folder, storage
from mla_convert.errors import BadInputError, ExitCode, LocalIOError
from mla_convert.storage import FileSystemError, LinkMode, clone_file, copy_range

# Words


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB (1 000 bytes)"),
        (999_994, "999.99 kB (999 994 bytes)"),
        (999_995, "1.00 MB (999 995 bytes)"),
        (1_040_187_392, "1.04 GB (1 040 187 392 bytes)"),
        (688_586_727_753, "688.59 GB (688 586 727 753 bytes)"),
        (5 * 10**18, "5000.00 PB (5 000 000 000 000 000 000 bytes)"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert storage.human_bytes(count) == text


def test_plain_keeps_text_and_escapes_the_rest() -> None:
    assert storage.plain("/a b/模型/[bold]x[/bold]") == "/a b/模型/[bold]x[/bold]"
    assert storage.plain(os.fsdecode(b"a\xff\n\x1b[31m\t")) == r"a\udcff\n\x1b[31m\t"
    assert storage.plain("a\u202eb\\c") == "a\\u202eb\\c"


def test_os_errors_says_what_where_why_and_next() -> None:
    with pytest.raises(FileSystemError) as caught, storage.os_errors("out/a\nb", "write"):
        raise OSError(errno.ENOSPC, "whatever")
    assert caught.value.message == r"cannot write out/a\nb: no space is left on the device (ENOSPC)"
    assert caught.value.hint is not None
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)


def test_os_errors_falls_back_to_the_systems_words() -> None:
    with (
        pytest.raises(FileSystemError, match=r"cannot read x: Protocol error \(EPROTO\)"),
        storage.os_errors("x", "read"),
    ):
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
    with (
        pytest.raises(FileSystemError, match="cannot read x: no code at all"),
        storage.os_errors("x", "read"),
    ):
        raise OSError("no code at all")


def test_an_error_survives_the_way_back_from_a_worker_process() -> None:
    error = FileSystemError("m", hint="h", errno=5)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.message, copy.hint, copy.errno) == ("m", "h", 5)


# Sources


def test_open_source_follows_links(tmp_path: Path, opened: Descriptors) -> None:
    blob = file_of(tmp_path / "blob", b"weights")
    (tmp_path / "link").symlink_to(blob)
    fd = storage.open_source(tmp_path / "link")
    opened.opened.append(fd)
    assert os.read(fd, 10) == b"weights"
    assert not os.get_inheritable(fd)


def test_open_source_refuses_what_is_not_a_file_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    file_of(tmp_path / "file", b"")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for name, words in {
            "pipe": "is a pipe",
            "folder": "is a folder",
            "socket": "is a socket",
            "dangling": "does not exist",
            "circle": "go in a circle",
            "missing": "does not exist",
            "file/below": "part of the path is a file",
            "/dev/null": "is a device",
        }.items():
            with pytest.raises(BadInputError, match=words):
                in_child(lambda name=name: storage.open_source(tmp_path / name), seconds=5)


def test_open_source_looks_again_after_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path may have become a pipe between the look and the open: still no wait, and no descriptor lost."""
    os.mkfifo(tmp_path / "pipe")
    regular = file_of(tmp_path / "file", b"").stat()

    def race() -> tuple[str, bool]:
        monkeypatch.setattr(Path, "stat", lambda self: regular)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.stat is not itself here
        with pytest.raises(BadInputError) as caught:
            storage.open_source(tmp_path / "pipe")
        return caught.value.message, len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

    message, closed = in_child(race, seconds=5)
    assert "is a pipe" in message
    assert closed


def test_open_source_without_permission() -> None:
    with public_folder() as root:
        file_of(root / "secret", b"x").chmod(0o600 if os.geteuid() == 0 else 0)
        error = fails(
            errno.EACCES, lambda: in_child(lambda: storage.open_source(root / "secret"), nobody=True)
        )
    assert "permission is denied" in error.message


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    source = file_of(tmp_path / "a", b"x" * 5000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BadInputError):
        storage.open_source(tmp_path)
    clone_file(source, tmp_path / "b", LinkMode.COPY, on_bytes=ignore)
    with pytest.raises(FileSystemError):
        clone_file(source, tmp_path / "b", LinkMode.COPY, on_bytes=ignore)
    storage.write_file_atomic(tmp_path / "c", b"x")
    with output_folder.Lock(tmp_path / "lock"), pytest.raises(LocalIOError):
        output_folder.Lock(tmp_path / "lock").__enter__()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_identify_sees_every_kind_of_change(tmp_path: Path, opened: Descriptors) -> None:
    path = file_of(tmp_path / "a", b"1234")
    (tmp_path / "link").symlink_to(path)
    first = storage.identify(path)
    assert first == storage.identify(tmp_path / "link") == storage.identify(opened(path, os.O_RDONLY))
    assert first.size == 4
    os.utime(path, ns=(0, first.mtime_ns + 1))
    assert storage.identify(path) != first
    os.utime(path, ns=(0, first.mtime_ns))
    assert storage.identify(path) == first
    file_of(tmp_path / "new", b"1234").replace(path)
    os.utime(path, ns=(0, first.mtime_ns))
    assert storage.identify(path) != first
    fails(errno.ENOENT, lambda: storage.identify(tmp_path / "missing"))


# Ranges

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


# Whole files


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


# No space, no permission


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


# Small files and flushing


def test_write_file_atomic_shows_old_or_new_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    versions = [bytes([65 + index]) * 300_000 for index in range(2)]
    storage.write_file_atomic(path, versions[0])
    torn = []

    def look() -> None:
        if (seen := path.read_bytes()) not in versions:
            torn.append(seen)

    with meanwhile(look):
        for index in range(30):
            storage.write_file_atomic(path, versions[index % 2])
    assert not torn
    assert [entry.name for entry in tmp_path.iterdir()] == ["journal"]


def test_write_file_atomic_takes_the_longest_name(tmp_path: Path) -> None:
    storage.write_file_atomic(tmp_path / ("n" * 255), b"x")
    error = fails(errno.ENAMETOOLONG, lambda: storage.write_file_atomic(tmp_path / ("n" * 256), b"x"))
    assert "too long" in error.message
    assert len(list(tmp_path.iterdir())) == 1


def test_write_file_atomic_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    fails(errno.EISDIR, lambda: storage.write_file_atomic(tmp_path / "a", b"x"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_flushing_goes_on_where_there_is_nothing_to_flush(tmp_path: Path, opened: Descriptors) -> None:
    assert storage.fsync_directory(tmp_path) is True
    assert storage.fsync_fd(opened(tmp_path / "a")) is True
    reader, writer = os.pipe()  # fsync of a pipe is a true EINVAL
    opened.opened += [reader, writer]
    assert storage.fsync_fd(writer) is False
    fails(errno.ENOTDIR, lambda: storage.fsync_directory(tmp_path / "a"))
