"""storage.py against real file systems and real faults: words, sources, small files and flushing."""

from __future__ import annotations

import errno
import os
import pickle
import socket
from pathlib import Path

import pytest
from filesystems import (
    Descriptors,
    fails,
    file_of,
    ignore,
    in_child,
    meanwhile,
    public_folder,
)

from mla_convert import output_folder, storage
from mla_convert.errors import BadInputError, LocalIOError
from mla_convert.storage import FileSystemError, LinkMode, clone_file

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
