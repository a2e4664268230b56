"""What the engine asks of the file system for an output folder: room, a lock, and its final name in one step.

Errors are those of ``storage``: a `FileSystemError` that says in words what is wrong and what to do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from mla_convert import linux
from mla_convert.errors import LocalIOError
from mla_convert.storage import (
    FileSystemError,
    create_file,
    fsync_directory,
    human_bytes,
    os_errors,
    plain,
    temporary_in,
)

Relation = Literal["same", "inside", "around"]


def publish_directory(staged: Path, final: Path, *, replace: bool) -> Path | None:
    """Give a finished folder its final name in one step, and flush the folder above.

    Args:
        staged: The finished folder, its files fsynced, on the same file system as ``final``.
        final: The name it gets. Resolve it first: a link is never replaced.
        replace: False: anything at ``final``, even an empty folder, is an error. True: a folder there trades
            places with ``staged``; only where the kernel cannot do that is the name free for an instant.

    Returns:
        Where the replaced folder is now, for the caller to remove; None if nothing was replaced.

    Raises:
        FileSystemError: ``final`` exists (errno EEXIST) or the rename failed, and both folders are as before;
            or flushing the folder above failed, after the rename.
    """
    old = None
    with os_errors(final, "publish"):
        if replace and os.path.lexists(final):
            if not stat.S_ISDIR(final.lstat().st_mode):
                reason = "what is there is not a folder, so it is not replaced"
                raise FileSystemError(f"cannot publish {plain(final)}: {reason}", errno=errno.EEXIST)
            old = linux.exchange(staged, final, temporary_in(final.parent))
        else:
            linux.rename_new(staged, final)
    for parent in {staged.parent, final.parent}:
        fsync_directory(parent)
    return old


class Lock:
    """One writer at a time: ``with Lock(path): ...`` holds an exclusive lock on a file, and removes it after.

    Put it beside the staging folder, not inside, or it is published too. The lock belongs to the open file
    and ends with the process, however that ends: a file left by a killed process blocks nobody.

    Args:
        path: The lock file; made if missing.
        subject: What the message says is being written; ``path`` by default.

    Attributes:
        supported: False, once entered, if the file system has no locks: nothing is guarded then, so warn.
    """

    def __init__(self, path: Path, *, subject: Path | None = None) -> None:
        self.path = path
        self.subject = subject or path
        self.supported = True
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Take the lock, or raise `LocalIOError` naming the process and the host that have it."""
        with os_errors(self.path, "lock"):
            while self._fd is None:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    self._take(fd)
                    if self._is_at_path(fd):
                        self._fd = fd
                finally:
                    if self._fd is None:  # held, or removed by its last holder after our open: look again
                        os.close(fd)
        with suppress(OSError):  # for the message only: a full disk must not stop it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            with suppress(OSError):
                if self._is_at_path(self._fd):
                    self.path.unlink()
            os.close(self._fd)
            self._fd = None

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, host = os.pread(fd, 512, 0).decode("utf-8", "replace").strip().partition(" ")
            holder = f"process {plain(pid)} on {plain(host)}" if host else "another process"
            raise LocalIOError(
                f"{plain(self.subject)} is being written by {holder}",
                hint="Wait for it to finish, stop it, or choose another output.",
            ) from None
        except OSError as error:
            if error.errno not in linux.NOT_SUPPORTED | {errno.ENOLCK}:
                raise
            self.supported = False

    def _is_at_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(fd))
        except FileNotFoundError:
            return False


# Looking before leaping


def free_bytes(path: Path) -> int | None:
    """Bytes this user may still write where ``path`` is or would be; None if the file system does not say."""
    with os_errors(path, "examine"):
        status = os.statvfs(_nearest_existing(path))
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def on_same_disk(a: Path, b: Path) -> bool:
    """Whether what is written at ``a`` and at ``b`` takes space of one file system. Neither has to exist."""
    with os_errors(a, "compare"):
        return _nearest_existing(a).stat().st_dev == _nearest_existing(b).stat().st_dev


def preflight(target_parent: Path, need: int) -> None:
    """Refuse before any work if ``need`` bytes do not fit under ``target_parent``.

    Raises:
        LocalIOError: with the space free, the space needed and the difference.
    """
    free = free_bytes(target_parent)
    if free is not None and need > free:
        raise LocalIOError(
            f"{plain(target_parent)} has {human_bytes(free)} free; the output needs {human_bytes(need)}",
            hint=f"Free {human_bytes(need - free)}, or choose an output on another disk.",
        )


def ensure_writable(directory: Path) -> None:
    """Check, leaving no trace, that files can be made in ``directory``, or that it can be made.

    Raises:
        FileSystemError: permission, a read-only file system, or a part of the path that is not a folder.
    """
    with os_errors(directory, "write to"):
        nearest = _nearest_existing(directory)
        if not nearest.is_dir():
            reason = f"{plain(nearest)} is a file, not a folder"
            raise FileSystemError(f"cannot write to {plain(directory)}: {reason}", errno=errno.ENOTDIR)
        if hasattr(os, "O_TMPFILE"):  # a file without a name: not even the folder's mtime changes
            try:
                os.close(os.open(nearest, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
                return
            except OSError as error:
                if error.errno not in linux.NOT_SUPPORTED | {errno.EISDIR}:
                    raise
        probe = temporary_in(nearest)
        create_file(probe, lambda fd: None)
        probe.unlink()


def require_distinct(directory: Path, names: Iterable[str], what: str) -> None:
    """Refuse names that would be one name in ``directory``, if its file system ignores case.

    Args:
        directory: Where the files will be; it need not exist.
        names: Names of files relative to it, with slashes.
        what: Whose files they are, for the message.

    Raises:
        LocalIOError: Two would be; with every such pair.
    """
    pairs = colliding(names)
    if pairs and ignores_case(directory):
        raise LocalIOError(
            f"{plain(directory)} is on a file system that ignores case, and in {what} names differ in nothing else: "
            f"{pairs[0][0]} and {pairs[0][1]}",
            hint="choose a folder on another file system",
            details=[f"{one} and {other}" for one, other in pairs],
        )


def colliding(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of names that differ only in case or in how Unicode spells a letter, also a file's and a folder's."""
    files = sorted(names)
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents[:-1]}
    found: list[tuple[str, str]] = []
    taken: dict[str, str] = {}
    for name in files:
        first = taken.setdefault(_folded(name), name)
        if first is not name:
            found.append((first, name))
    return found + [(taken[_folded(name)], name) for name in sorted(folders) if _folded(name) in taken]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def ignores_case(directory: Path) -> bool:
    """Whether a file in ``directory``, or in the closest folder above it that exists, has its name in any case."""
    with os_errors(directory, "write to"):
        probe = temporary_in(_nearest_existing(directory))
        create_file(probe, lambda fd: None)
        try:
            return os.path.lexists(probe.with_name(probe.name.swapcase()))
        finally:
            probe.unlink()


def _nearest_existing(path: Path) -> Path:
    """``path``, or the closest path above it that exists; a dangling link raises: it blocks what is below."""
    path = path.absolute()
    for candidate in (path, *path.parents):
        try:
            candidate.stat()
            return candidate
        except (FileNotFoundError, NotADirectoryError) as error:
            if candidate.is_symlink():
                reason = "is a symbolic link to a path that does not exist"
                raise FileSystemError(f"{plain(candidate)} {reason}", errno=error.errno) from error
    return Path(path.anchor)


def same_or_nested(a: Path, b: Path) -> Relation | None:
    """Whether ``a`` is the ``same`` as ``b``, ``inside`` it or ``around`` it, links resolved; None if apart.

    Neither has to exist. Existing paths are also compared by inode, which sees through bind mounts, hard
    links and file systems that ignore case.
    """
    with os_errors(a, "compare"):
        real_a, real_b = Path(os.path.realpath(a)), Path(os.path.realpath(b))
        if _same(real_a, real_b):
            return "same"
        if any(_same(parent, real_b) for parent in real_a.parents):
            return "inside"
        if any(_same(parent, real_a) for parent in real_b.parents):
            return "around"
    return None


def _same(a: Path, b: Path) -> bool:
    try:
        return a == b or a.samefile(b)
    except (FileNotFoundError, NotADirectoryError):
        return False
