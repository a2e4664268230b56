"""What the engine asks of the file system for a file: share, copy, reserve, write, flush, and say what failed.

Two rules hold throughout. Sharing blocks and copying inside the kernel are optimisations: whatever they
refuse, plain reads and writes repeat, so the error that reaches the user names the file and the offset. And
every ``OSError`` leaves here as a `FileSystemError` that says in words what is wrong and what to do.

A file's data is fsynced where the docstring says so; its folder is the caller's to flush, once for many
files.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from . import linux
from .errors import BadInputError, LocalIOError

OnBytes = Callable[[int], object]
Way = Literal["reflink", "hard", "copy"]

#: Every temporary name made here begins with this, so that a sweep can tell ours from the user's files.
TEMPORARY_PREFIX = ".mla-convert-"

_KERNEL_CHUNK = 64 << 20  # bytes a copy_file_range: often enough for progress and for ^C
_BUFFER = 1 << 20  # bytes a read; 8 MiB was a third slower, 32 MiB four times (fresh pages every time)


class LinkMode(StrEnum):
    """How an unchanged file is given to the output; ``auto`` is the first that the file system can do.

    A reflink shares blocks until one side is written, so the files stay independent. A hard link *is* the
    source file under a second name: editing one in place edits both. A copy moves the bytes, though a file
    system that shares blocks may share them here too.
    """

    AUTO = "auto"
    REFLINK = "reflink"
    HARD = "hard"
    COPY = "copy"


class FileSystemError(LocalIOError):
    """A system call failed; ``errno`` is its code."""

    def __init__(self, message: str, *, hint: str | None = None, errno: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells whether a file is still the one that was read: size in bytes, mtime in ns, inode, device.

    The device number belongs to the mount and may differ after a reboot though the file does not.
    """

    size: int
    mtime_ns: int
    inode: int
    device: int


def plain(path: str | os.PathLike[str]) -> str:
    """``path`` as text for a message: control characters and undecodable bytes become backslash escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in os.fspath(path))


def human_bytes(count: int) -> str:
    """A size to read and to compare: ``1.04 GB (1 040 187 392 bytes)``, in decimal units."""
    exact = f"{count:,} byte{'' if count == 1 else 's'}".replace(",", " ")
    value, units = float(count), ["", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.995 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.2f} {units[0]} ({exact})" if units[0] else exact


@contextmanager
def os_errors(path: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Turn an ``OSError`` into a `FileSystemError`: "cannot ``doing`` ``path``: reason", hint and errno."""
    try:
        yield
    except OSError as error:
        raise _explained(error, path, doing) from error


def _explained(error: OSError, path: str | os.PathLike[str], doing: str) -> FileSystemError:
    code = error.errno or 0
    reason, hint = linux.REASONS.get(code, (error.strerror or str(error), None))
    name = f" ({errno.errorcode[code]})" if code in errno.errorcode else ""
    return FileSystemError(f"cannot {doing} {plain(path)}: {reason}{name}", hint=hint, errno=error.errno)


# Sources


def open_source(path: Path) -> int:
    """Open a regular file for reading, links followed, without ever waiting on a pipe or waking a device.

    Raises:
        BadInputError: it is missing, a dangling or circular link, or not a regular file.
        FileSystemError: the system would not open it.
    """
    try:
        _require_regular(path.stat(), path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _require_regular(os.fstat(fd), path)  # again: the path may lead elsewhere by now
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        explained = _explained(error, path, "open")
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            hint = "It is a symbolic link to a file that is gone." if path.is_symlink() else None
            raise BadInputError(explained.message, hint=hint) from error
        raise explained from error
    return fd


def prefetch(path: Path, length: int) -> None:
    """Ask the kernel to read the beginning of a file into the page cache, without waiting for it; or do nothing."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):
        if not stat.S_ISREG(path.stat().st_mode):
            return
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "device")
        raise BadInputError(f"cannot read {plain(path)}: it is a {kind}, not a regular file")


def identify(path: Path | int) -> FileIdentity:
    """The identity of a file, given its path (links followed) or an open descriptor."""
    with os_errors(linux.descriptor_path(path) if isinstance(path, int) else path, "examine"):
        status = os.fstat(path) if isinstance(path, int) else path.stat()
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


# Bytes


def clone_file(source: Path, target: Path, mode: LinkMode, *, on_bytes: OnBytes) -> Way:
    """Give the whole of ``source`` to ``target``, which must not exist while its folder does.

    Links in ``source`` are followed (a Hugging Face snapshot is links into a folder of blobs). Whichever way
    it went, ``on_bytes`` has been told the full size, and a target that failed is gone. A copy is on disk
    afterwards; a reflink or hard link is once the file system was flushed (`sync_filesystem`). A target that is
    a file of its own has mode 0666 less the umask.

    Returns:
        How it was done.

    Raises:
        BadInputError: ``source`` is not a regular file.
        FileSystemError: the file system cannot do what ``mode`` asks for, or has no space, and so on.
    """
    source_fd = open_source(source)

    def share(target_fd: int) -> None:
        linux.share_file(source_fd, target_fd)

    def copy(target_fd: int) -> None:
        preallocate(target_fd, size)
        copy_range(source_fd, 0, target_fd, 0, size, reflink=False, on_bytes=on_bytes)

    try:
        size = os.fstat(source_fd).st_size
        ways: dict[Way, Callable[[], None]] = {
            "reflink": lambda: create_file(target, share, flush=False),
            "hard": lambda: _hard_link(source, source_fd, target),
            "copy": lambda: create_file(target, copy),
        }
        allowed = [way for way in ways if mode in (LinkMode.AUTO, way)]
        for way in allowed[:-1]:
            with suppress(OSError):
                ways[way]()
                break
        else:
            way = allowed[-1]
            try:
                ways[way]()
            except OSError as error:
                raise _refused(error, way, source, target) from error
        if way != "copy":
            on_bytes(size)
        return way
    finally:
        os.close(source_fd)


def create_file(target: Path, fill: Callable[[int], None], *, flush: bool = True) -> None:
    """Create a file, fill it through its descriptor, and fsync it; if that fails it is gone again."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            fill(fd)
            if flush:
                fsync_fd(fd)
        finally:
            os.close(fd)
    except BaseException:
        with suppress(OSError):
            target.unlink()
        raise


def _hard_link(source: Path, source_fd: int, target: Path) -> None:
    fsync_fd(source_fd)  # its bytes are about to be ours, and a fresh download may be in memory only
    target.hardlink_to(os.path.realpath(source))
    if not os.path.samestat(target.stat(), os.fstat(source_fd)):
        target.unlink()
        raise BadInputError(f"{plain(source)} was replaced by another file while it was being linked")


def _refused(error: OSError, way: Way, source: Path, target: Path) -> FileSystemError:
    if way == "copy":
        return _explained(error, target, "write")
    if error.errno in linux.NOT_SUPPORTED:
        error = OSError(error.errno, "the file system has no such operation")
    doing = f"{'reflink' if way == 'reflink' else 'hard-link'} {plain(source)} to"
    return FileSystemError(
        _explained(error, target, doing).message,
        hint="Choose --link copy, or --link auto to use whatever the file system can do.",
        errno=error.errno,
    )


def copy_range(
    source_fd: int,
    source_offset: int,
    target_fd: int,
    target_offset: int,
    length: int,
    *,
    reflink: bool,
    on_bytes: OnBytes,
) -> int:
    """Copy ``length`` bytes between two files; offsets in bytes, file positions neither used nor moved.

    With ``reflink``, the whole blocks inside the range share those of the source, if the file system can and
    both offsets are equal modulo its block (4096 as a rule); the edges are copied. The target may be
    preallocated or sparse. Nothing is fsynced. Join neighbouring ranges first: each costs a few system calls.

    Returns:
        The bytes shared by reflink. (Copying inside the kernel may share more, uncounted.)

    Raises:
        FileSystemError: the source ended early, or a read or write failed; names the file and the offset.
    """
    start, stop = 0, 0
    if reflink:
        start, stop = linux.share_blocks(source_fd, source_offset, target_fd, target_offset, length)
        if stop > start:
            on_bytes(stop - start)
    for begin, end in ((0, start), (stop, length)):
        _copy_bytes(source_fd, source_offset + begin, target_fd, target_offset + begin, end - begin, on_bytes)
    return stop - start


def _copy_bytes(
    source_fd: int, source_offset: int, target_fd: int, target_offset: int, length: int, on_bytes: OnBytes
) -> None:
    stop = source_offset + length
    in_kernel = hasattr(os, "copy_file_range")
    while source_offset < stop:
        count, chunk = 0, min(stop - source_offset, _KERNEL_CHUNK)
        if in_kernel:
            try:
                count = os.copy_file_range(source_fd, target_fd, chunk, source_offset, target_offset)
            except InterruptedError:
                continue
            except OSError:
                in_kernel = False
        if not count:  # refused, or the end of the file, which some file systems report wrongly
            data = _read(source_fd, source_offset, min(chunk, _BUFFER))
            write_at(target_fd, target_offset, data)
            count = len(data)
        source_offset, target_offset = source_offset + count, target_offset + count
        on_bytes(count)


def _read(fd: int, offset: int, length: int) -> bytes:
    """Between one and ``length`` bytes."""
    name = linux.descriptor_path(fd)
    with os_errors(name, f"read byte {offset} of"):
        data = os.pread(fd, length, offset)
        if not data:
            size = min(offset, os.fstat(fd).st_size)
            raise FileSystemError(
                f"{plain(name)} ended at byte {size}; {length} bytes were expected from byte {offset} on",
                hint="It was cut short while being read: check that nothing else writes to it.",
            )
    return data


def write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` at ``offset``, however little the kernel takes at a time."""
    view = memoryview(data)
    while view:
        with os_errors(linux.descriptor_path(fd), f"write byte {offset} of"):
            count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def preallocate(fd: int, size: int, *, reserve: bool = True) -> None:
    """Give a new file its final size with the space reserved, so that a full disk shows now and not halfway.

    Args:
        fd: A file open for writing.
        size: Its final size in bytes.
        reserve: False when most of the file will be reflinked: shared blocks need no space of their own, and
            reserving it would refuse a conversion that fits. The file is sparse then, as it is where the file
            system cannot reserve.

    Raises:
        FileSystemError: no space, over quota, or over the file size limit.
    """
    with os_errors(linux.descriptor_path(fd), f"reserve {human_bytes(size)} for"):
        if reserve and size:
            try:
                linux.reserve_space(fd, size)
            except OSError as error:
                if error.errno not in linux.NOT_SUPPORTED:
                    raise
        os.ftruncate(fd, size)


def write_file_atomic(path: Path, data: bytes) -> None:
    """Write and flush a small file so that ``path`` holds its old content or all of ``data``, come what may.

    Mode 0666 less the umask, also over an existing file. A symbolic link at ``path`` is replaced, not
    followed.
    """
    temporary = temporary_in(path.parent)
    with os_errors(path, "write"):
        create_file(temporary, lambda fd: write_at(fd, 0, data))
        try:
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    fsync_directory(path.parent)


def temporary_in(directory: Path) -> Path:
    """A new name in a folder, which begins with ``TEMPORARY_PREFIX``."""
    # Not built from the file's own name, which may be as long as names can be already.
    return directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}.tmp"


def fsync_fd(fd: int) -> bool:
    """Flush a file to disk. False where the file system has no fsync: the caller may warn, once."""
    with os_errors(linux.descriptor_path(fd), "flush"):
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in linux.NOT_SUPPORTED:
                raise
            return False
    return True


def sync_filesystem(path: Path) -> None:
    """Flush the whole file system that holds the folder ``path``: one wait for any number of new links."""
    with os_errors(path, "flush"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            linux.sync_filesystem(fd)
        finally:
            os.close(fd)


def fsync_directory(path: Path) -> bool:
    """Flush a folder's entries to disk, so that its names survive a power cut.

    False where that is not supported, or where we may write to the folder but not read it.
    """
    with os_errors(path, "flush"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            return False
        try:
            return fsync_fd(fd)
        finally:
            os.close(fd)
