"""The files of a checkpoint's folder: which there are, weights with their headers, and everything else.

Symbolic links are followed, because the Hub's cache is made of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from mla_convert.catalogue import OtherFile, SourceFile
from mla_convert.errors import BadInputError
from mla_convert.formats.safetensors import read_open_header
from mla_convert.storage import identify, os_errors, prefetch
from mla_convert.strict_json import open_regular

#: Bytes that hold most headers.
_HEADER_LENGTH = 256 << 10
_SKIPPED_FOLDERS = frozenset({".git", ".cache", ".huggingface", "__pycache__"})


class Folder:
    """Where the files of a checkpoint are: on disk, under ``root``. Names are relative to it, with slashes.

    ``hub_source`` answers the same questions for a repository whose weights are not here.

    Attributes:
        root: The folder.
        origin: ``hf://org/name@commit`` if ``root`` is a commit's place in the Hub's cache.
        warnings: What the user should know about where the files come from.
    """

    def __init__(self, root: Path, origin: str | None = None, warnings: tuple[str, ...] = ()) -> None:
        self.root, self.origin, self.warnings = root, origin, warnings

    def __str__(self) -> str:
        return self.origin or str(self.root)

    def entries(self) -> list[str]:
        """What is at the top, in order."""
        with os_errors(self.root, "list"):
            return sorted(entry.name for entry in self.root.iterdir())

    def walk(self) -> Iterator[str]:
        """Every file that a conversion has to account for."""
        return _walk(self.root, "")

    def within(self, name: str) -> Folder:
        """The folder of that name in this one."""
        return Folder(self.root / name, self.origin and f"{self.origin}/{name}")

    def holds_folder(self, name: str) -> bool:
        """True if there is a folder of that name in this one."""
        return (self.root / name).is_dir()

    def announce(self, names: Sequence[str]) -> None:
        """Let the system fetch the headers of weight files that are about to be read, all at once."""
        for name in names:
            prefetch(self.root / name, _HEADER_LENGTH)

    def weights(self, name: str) -> SourceFile:
        """A weight file, with its header."""
        path = self.root / name
        with open_regular(path) as file:  # once: another file of this name would be noticed before publishing
            return SourceFile(name, path, read_open_header(file, str(path)), identify(file.fileno()))

    def is_here(self, name: str) -> bool:
        """True if the bytes of a file can be read."""
        return True

    def other(self, name: str) -> OtherFile:
        """A file that is carried over as it is."""
        path = self.root / name
        status = _status(path)
        if not stat.S_ISREG(status.st_mode):
            raise BadInputError(
                f"{path} is a {_kind(status.st_mode)}, not a file that can be carried over",
                hint="move it out of the checkpoint",
            )
        return OtherFile(name, path, identify(path))


def is_skipped(name: str) -> bool:
    """True for a file in a folder that is no part of a checkpoint, such as ``.git``."""
    return not _SKIPPED_FOLDERS.isdisjoint(name.split("/")[:-1])


def _walk(root: Path, folder: str) -> Iterator[str]:
    with os_errors(root / folder, "list"):
        entries = sorted(os.scandir(root / folder), key=lambda found: found.name)
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(root, name)
        else:
            yield name


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise BadInputError(
            f"{path} is a link that leads nowhere ({error.strerror})",
            hint="download the file, or remove the link",
        ) from error


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "link to a folder"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"))
    return next((kind for test, kind in kinds if test(mode)), "device")
