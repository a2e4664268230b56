"""Real file systems and real faults for tests: mounts, an unprivileged child, and a look at shared blocks.

Everything here either works or skips the test with the reason; a mount is always taken down again.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from mla_convert.errors import ExitCode
from mla_convert.storage import FileSystemError

NOBODY = 65534
BLOCK = 4096
MIB = 1 << 20
Result = TypeVar("Result")

_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP_SYNC = 1
_EXTENT_SHARED = 0x2000


@contextmanager
def tmpfs(size: str = "1m") -> Iterator[Path]:
    """A memory file system of ``size`` (mount's spelling); no reflinks, and full soon."""
    with _mounted("-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs") as root:
        yield root


@contextmanager
def xfs(size: int = 320 << 20) -> Iterator[Path]:
    """An XFS with reflinks on a loop device over a sparse file; XFS takes no less than 300 MB."""
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("mkfs.xfs is not installed")
    with tempfile.TemporaryDirectory(prefix="mla-xfs-") as folder:
        image = Path(folder, "image")
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True, capture_output=True)
        with _mounted("-o", "loop", str(image)) as root:
            yield root


@contextmanager
def ignoring_case(size: int = 16 << 20) -> Iterator[Path]:
    """A folder on an ext4 whose names are the same in any case."""
    if shutil.which("mkfs.ext4") is None or shutil.which("chattr") is None:
        pytest.skip("mkfs.ext4 or chattr is not installed")
    with tempfile.TemporaryDirectory(prefix="mla-ext4-") as folder:
        image = Path(folder, "image")
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-O", "casefold", image], check=True, capture_output=True)
        with _mounted("-o", "loop", str(image)) as root:
            (root / "any").mkdir()
            subprocess.run(["chattr", "+F", root / "any"], check=True, capture_output=True)
            yield root / "any"


@contextmanager
def bind(source: Path) -> Iterator[Path]:
    """``source`` visible at a second path that no symbolic link explains."""
    with _mounted("--bind", str(source)) as root:
        yield root


def remount_read_only(root: Path) -> None:
    """Make a mount from this module read-only."""
    subprocess.run(["mount", "-o", "remount,ro", root], check=True, capture_output=True)


@contextmanager
def _mounted(*arguments: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with tempfile.TemporaryDirectory(prefix="mla-mount-") as folder:
        root = Path(folder, "root")
        root.mkdir()
        Path(folder).chmod(0o755)  # for a test that becomes nobody
        done = subprocess.run(["mount", *arguments, root], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        try:
            yield root
        finally:
            if subprocess.run(["umount", root], capture_output=True).returncode:
                subprocess.run(["umount", "--lazy", root], check=True)  # a failed test may hold a file open


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are closed to all but their owner."""
    with tempfile.TemporaryDirectory(prefix="mla-public-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def in_child(function: Callable[[], Result], *, nobody: bool = False, seconds: int = 20) -> Result:
    """Run ``function`` in a forked process and return its result or raise its exception.

    For what must not touch this process (limits, umask) or what root is above (``nobody``: mode bits). A child that
    blocks is killed after ``seconds`` and fails the test.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            import signal

            signal.alarm(seconds)
            if nobody and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            try:
                answer: tuple[bool, object] = (True, function())
            except Exception as error:
                answer = (False, error)
            with os.fdopen(writer, "wb") as file:
                pickle.dump(answer, file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        pytest.fail("the child blocked or died")
    succeeded, value = pickle.loads(data)
    if not succeeded:
        raise value
    result: Result = value
    return result


def shared_bytes(path: Path) -> int:
    """Bytes of a file whose blocks another file uses too, as the file system itself reports (FIEMAP)."""
    count = 512
    header = struct.pack("=QQLLLL", 0, (1 << 64) - 1, _FIEMAP_SYNC, 0, count, 0)
    request = bytearray(header + bytes(56 * count))
    with path.open("rb") as file:
        fcntl.ioctl(file, _FS_IOC_FIEMAP, request)
    mapped = struct.unpack_from("=QQLLLL", request)[3]
    assert mapped < count, "more extents than this helper reads"
    total = 0
    for index in range(mapped):
        _, _, length, _, _, flags = struct.unpack_from("=QQQQQL", request, 32 + 56 * index)
        total += length if flags & _EXTENT_SHARED else 0
    return total


def ignore(count: int) -> None:
    pass


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes without zeros or repeats worth speaking of, so that a hole or a shift shows."""
    return bytes(byte or 1 for byte in random.Random(seed).randbytes(size))


def file_of(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


class Descriptors:
    """Opens files for a test and closes them after it."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def __call__(self, path: Path | str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        self.opened.append(os.open(path, flags, 0o666))
        return self.opened[-1]


def fails(code: int, call: Callable[[], object]) -> FileSystemError:
    """The error that ``call`` raises, which must carry errno ``code`` and exit 5."""
    with pytest.raises(FileSystemError) as caught:
        call()
    assert caught.value.errno == code
    assert caught.value.exit_code == ExitCode.LOCAL_IO
    return caught.value


@contextmanager
def meanwhile(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` over and over in another thread."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
