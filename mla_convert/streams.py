"""stdout and stderr as they are: text made printable, encodings that lack a sign, readers that have left."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import select
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, TextIO, cast

from mla_convert.errors import LocalIOError

_ASCII = {"✓": "ok", "✗": "x", "→": "->", "←": "<-", "…": "...", "×": "x", "·": ".", "•": "*", "–": "-"}
_ASCII |= {"—": "-", "─": "-", "━": "-", "│": "|", "≤": "<=", "≥": ">=", "≈": "~"}


def visible(text: str) -> str:
    """Show control, format and lone surrogate characters as escapes: ``\\x1b``, ``\\n``, ``\\u202e``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shell_word(text: str) -> str:
    """``text`` as one word of a command line, in printable characters (``$'...'`` where it must be)."""
    if text.isprintable():
        return shlex.quote(text)
    plain = (chr(b) if 32 <= b < 127 and b not in b"\\'" else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(plain)}'"


def encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def fit(text: str, encoding: str) -> str:
    """Replace what ``encoding`` cannot express: signs by ASCII ones, the rest by escapes."""
    if encodable(text, encoding):
        return text
    escaped = (c if encodable(c, encoding) else _ASCII.get(c) or ascii(c)[1:-1] for c in text)
    return "".join(escaped)


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it. NaN and infinities become null, since JSON has no word for them."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value


def dump(document: Any, encoding: str, indent: int | None = None) -> str:
    text = json.dumps(_plain(document), ensure_ascii=False, indent=indent)
    # Escaping everything also keeps lone surrogates (names that are not UTF-8) intact, as \udcXX.
    return text if encodable(text, encoding) else json.dumps(json.loads(text), indent=indent)


def _abandon(stream: TextIO) -> None:
    """Send what ``stream`` still buffers to nowhere, so that the flush at exit cannot fail."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):  # not a real file
        pass


def _reader_gone(stream: TextIO | None) -> bool:
    """Is ``stream`` a pipe whose reader has closed it?"""
    if stream is None:
        return False
    try:
        stream.flush()
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        return True
    except (OSError, ValueError):
        return False


@contextmanager
def guard_broken_pipe() -> Iterator[None]:
    """End quietly when the reader of stdout or stderr has left, as in ``mla-convert inspect X | head -1``.

    A ``Console`` drops what nobody reads, and the command keeps its exit code. This outermost guard is for
    the rest: help texts, and the flush at exit. A broken connection to the Hub is something else; it passes.
    """
    try:
        yield
    except BrokenPipeError:
        if not (_reader_gone(sys.stdout) or _reader_gone(sys.stderr)):
            raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            if _reader_gone(stream):
                _abandon(stream)


class Sink:
    """stdout or stderr as it is when written to. A reader that left or a poor encoding is no failure."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._dead = False

    @property
    def _stream(self) -> TextIO | None:
        stream = getattr(sys, self._name)
        return cast("TextIO | None", getattr(stream, "rich_proxied_file", stream))

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        stream = self._stream
        return stream is not None and not stream.closed and stream.isatty()

    def write(self, text: str) -> int:
        self._attempt(lambda stream: stream.write(fit(text, self.encoding)))
        return len(text)

    def write_data(self, text: str) -> None:
        """Write a path a script will use: bytes that are no text go out as they came in."""
        stream = self._stream
        if encodable(text, self.encoding) or not hasattr(stream, "buffer"):
            self.write(text)
        else:
            self._attempt(lambda stream: (stream.flush(), stream.buffer.write(os.fsencode(text))))

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def _attempt(self, action: Callable[[TextIO], object]) -> None:
        with self._lock:
            stream = self._stream
            if self._dead or stream is None:
                return
            try:
                action(stream)
            except OSError as error:
                self._dead = True
                _abandon(stream)
                # A message that cannot be shown must not stop a conversion; a lost result must be told.
                if self._name == "stdout" and not isinstance(error, BrokenPipeError):
                    raise LocalIOError(f"cannot write to standard output: {error.strerror}") from error
