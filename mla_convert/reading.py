"""Reads exact byte ranges of files, whatever the kernel gives at a time."""

from __future__ import annotations

import os

from mla_convert import storage
from mla_convert.errors import BadInputError


def read_at(fd: int, count: int, offset: int, name: str) -> bytes:
    """Exactly ``count`` bytes from ``offset``; ``name`` is the file's, for messages."""
    with storage.os_errors(name, f"read byte {offset} of"):
        parts = []
        while count:
            part = os.pread(fd, count, offset)
            if not part:
                raise BadInputError(
                    f"{storage.plain(name)} ends early, at byte {offset}", hint="was it truncated meanwhile?"
                )
            parts.append(part)
            offset += len(part)
            count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(fd: int, view: memoryview, offset: int, name: str) -> None:
    """Fill all of ``view`` with the bytes from ``offset``; ``name`` is the file's, for messages."""
    with storage.os_errors(name, f"read byte {offset} of"):
        while view:
            count = os.preadv(fd, [view], offset)
            if not count:
                raise BadInputError(
                    f"{storage.plain(name)} ends early, at byte {offset}", hint="was it truncated meanwhile?"
                )
            view, offset = view[count:], offset + count
