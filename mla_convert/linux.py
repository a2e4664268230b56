"""What Linux can do that Python's ``os`` does not offer, and what its error codes mean in words.

Sharing blocks, reserving space and renaming with flags, each with its fallback where there is an honest one.
Failures leave here as the kernel's ``OSError``; ``ENOSYS`` also stands for another kernel or an old C
library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

#: Error codes by which a file system says that it does not have an operation.
NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})

_ROOM = "Free some space or choose an output on another disk; what is finished is kept."
_REMOUNT = "Mount it again, then run the command again."

#: For each error code a user can meet: the reason, and what to do next.
REASONS: dict[int, tuple[str, str | None]] = {
    errno.ENOSPC: ("no space is left on the device", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EFBIG: (
        "the file would be larger than is allowed",
        "Raise the limit (ulimit -f), use a file system without one, or write smaller shards.",
    ),
    errno.EROFS: ("the file system is mounted read-only", "Choose an output on a writable file system."),
    errno.EACCES: ("permission is denied", "Check its owner and mode, and those of the folders above it."),
    errno.EPERM: ("the system does not permit it", "It may be immutable, or owned by someone else."),
    errno.EIO: ("the device reported an error", "Check the disk (dmesg) before trusting other files on it."),
    errno.EMFILE: ("too many files are open", "Raise the limit (ulimit -n) or use fewer --workers."),
    errno.ENFILE: ("too many files are open on this machine", "Use fewer --workers, or try again later."),
    errno.ENOMEM: ("the kernel is out of memory", "Use fewer --workers."),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "Choose a shorter output path."),
    errno.ENOENT: ("it does not exist", None),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", None),
    errno.EISDIR: ("it is a folder, not a file", None),
    errno.EEXIST: ("it exists already", None),
    errno.ENOTEMPTY: ("it exists already and is not empty", None),
    errno.ELOOP: ("its symbolic links go in a circle", None),
    errno.EXDEV: ("the two paths are on different file systems", None),
    errno.EMLINK: ("the file has as many links as the file system allows", None),
    errno.EBUSY: ("it is in use (a mount point?)", None),
    errno.ENODEV: ("the device is gone", None),
    errno.ESTALE: ("the network file system lost track of it", _REMOUNT),
    errno.ENOTCONN: ("the network file system is not connected", _REMOUNT),
    errno.ETIMEDOUT: ("the network file system did not answer", "Run the command again when it does."),
}

# linux/fs.h: _IOW(0x94, 9, int) and _IOW(0x94, 13, struct file_clone_range).
_FICLONE = 0x40049409
_FICLONERANGE = 0x4020940D
_BLOCK = 4096  # what XFS and btrfs align to unless they were made with larger blocks
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def share_file(source_fd: int, target_fd: int) -> None:
    """Make the target file share every block of the source file (``FICLONE``), replacing what it held."""
    _require_linux()
    fcntl.ioctl(target_fd, _FICLONE, source_fd)


def share_blocks(
    source_fd: int, source_offset: int, target_fd: int, target_offset: int, length: int
) -> tuple[int, int]:
    """Share the whole blocks inside a range of bytes (``FICLONERANGE``).

    The file system needs both offsets equal modulo its block. A partial last block can be shared only when it
    is the end of the source and does not end inside the target.

    Returns:
        Start and stop, relative to the range, of what is shared now; (0, 0) if the range has no whole block
        on both sides, or for whatever reason the kernel would not.
    """
    own_block = os.fstatvfs(target_fd).f_bsize  # ZFS and large-block XFS align to this
    at_end = source_offset + length == os.fstat(source_fd).st_size
    at_end = at_end and target_offset + length >= os.fstat(target_fd).st_size
    for block in (_BLOCK, own_block) if own_block > _BLOCK else (_BLOCK,):
        start = -source_offset % block
        stop = length if at_end else length - (source_offset + length) % block
        if start >= stop or (source_offset - target_offset) % block:
            continue
        request = struct.pack("=qQQQ", source_fd, source_offset + start, stop - start, target_offset + start)
        with suppress(OSError):
            _require_linux()
            fcntl.ioctl(target_fd, _FICLONERANGE, request)
            return start, stop
    return 0, 0


def reserve_space(fd: int, size: int) -> None:
    """Allocate blocks for the first ``size`` (> 0) bytes of a file and extend it to that (``fallocate``).

    Not ``os.posix_fallocate``: where the file system cannot reserve, glibc imitates it with a write to every
    block, which takes minutes for a shard on a network file system.
    """
    while True:
        with suppress(InterruptedError):
            _call("fallocate", ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size))
            return


def rename_new(source: Path, target: Path) -> None:
    """Rename a folder to a name that must be free: ``EEXIST`` if anything is there, be it an empty folder."""
    try:
        _renameat2(source, target, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        # mkdir claims the name or fails; rename(2) replaces that folder, and only while it is empty.
        target.mkdir()
        try:
            source.rename(target)
        except BaseException:
            target.rmdir()
            raise


def exchange(staged: Path, final: Path, aside: Path) -> Path:
    """Swap two folders in one step and return where the old ``final`` is now: ``staged``.

    Without such a call it moves to ``aside`` first (a free name), and comes back if the second rename fails.
    """
    try:
        _renameat2(staged, final, _RENAME_EXCHANGE)
        return staged
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    final.rename(aside)
    try:
        staged.rename(final)
    except BaseException:
        aside.rename(final)
        raise
    return aside


def descriptor_path(fd: int) -> str:
    """The path of an open descriptor, for messages only; ``descriptor N`` if the kernel will not say."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return f"descriptor {fd}"


def _renameat2(source: Path, target: Path, flags: int) -> None:
    here = ctypes.c_int(_AT_FDCWD)
    old, new = ctypes.c_char_p(os.fsencode(source)), ctypes.c_char_p(os.fsencode(target))
    _call("renameat2", here, old, here, new, ctypes.c_uint(flags))


def sync_filesystem(fd: int) -> None:
    """syncfs(2), or sync(2) where there is none."""
    try:
        _call("syncfs", ctypes.c_int(fd))
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        os.sync()


def _call(name: str, *arguments: ctypes.c_int | ctypes.c_uint | ctypes.c_int64 | ctypes.c_char_p) -> None:
    """Call a C function that returns 0, or sets errno."""
    _require_linux()
    try:
        function = _libc()[name]
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name) from None
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _require_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
