"""What a run has finished, on disk: each line is a checksum and a JSON object, so that a torn or edited line is known
for one."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_convert import storage

JournalEntry = Mapping[str, Any]

#: How many bytes may have to be written again after a power failure because a journal was not flushed.
FLUSHED_BYTES = 64 << 20
_CHECK_DIGITS = 16


class Journal:
    """A journal open for appending, from any thread.

    Args:
        path: The file; made if missing.
        end: Where the next line goes; nothing that follows a torn line could be read.
    """

    def __init__(self, path: Path, end: int = 0) -> None:
        self.path = path
        self._writing = threading.Lock()
        self._at_stake = 0
        with storage.os_errors(path, "open"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, end)

    def append(self, entry: JournalEntry, *, worth: int) -> None:
        """Write one line, and flush the file once its new lines are worth ``FLUSHED_BYTES`` of work."""
        data = line(entry)
        with self._writing, storage.os_errors(self.path, "write"):
            while data:
                data = data[os.write(self._fd, data) :]
            self._at_stake += worth
            if self._at_stake >= FLUSHED_BYTES:
                storage.fsync_fd(self._fd)
                self._at_stake = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def line(entry: JournalEntry) -> bytes:
    """An entry as it stands in the file."""
    text = json.dumps(entry, separators=(",", ":")).encode("ascii")
    return _check(text) + b" " + text + b"\n"


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The entries up to the first damaged line, and where that begins; a kill may have cut the last."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    entries: list[dict[str, Any]] = []
    end = 0
    for found in data.split(b"\n")[:-1]:
        check, _, text = found.partition(b" ")
        if check != _check(text):
            break
        entries.append(json.loads(text))
        end += len(found) + 1
    return entries, end


def _check(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_CHECK_DIGITS].encode("ascii")
