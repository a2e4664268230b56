"""JSON from strangers, read strictly: one meaning or an error with the line and the column.

The standard parser lets through what two programs may read differently: a key given twice, ``NaN``,
``1e999``, half a surrogate pair. Here each of these is an error, and so are a text that is too large and one
that is nested too deeply. A leading byte order mark is skipped (some editors write one); any encoding other
than UTF-8 is an error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mla_convert.errors import BadInputError, LocalIOError

#: Largest text accepted unless the caller says otherwise. The index of a 1 TB checkpoint is about 10 MB.
MAX_BYTES = 64 << 20
#: Deepest nesting of arrays and objects. A model's config needs about 5.
MAX_DEPTH = 64
#: Longest integer. Longer ones don't fit a float64 anywhere else, and take quadratic time to read.
MAX_DIGITS = 300

_HINT = "Correct the file, or download it again."
_BOM = b"\xef\xbb\xbf"
# The closing quote is optional so that a text cut inside a string is still scanned once, not once per quote.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRING_BYTES = re.compile(_STRING.encode(), re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_TOKEN = re.compile(rf"(?P<string>{_STRING})|(?P<bracket>[\[\]{{}}])|(?P<word>[^\s,:\[\]{{}}\"]+)", re.DOTALL)
_COLON = re.compile(r"\s*:")
_INTEGER = re.compile(r"-?[0-9]+")
_AS_ROUND = bytes.maketrans(b"[]{}", b"()()")
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class _RefusedError(ValueError):
    """Valid for the standard parser, refused here; ``_first_fault`` finds out where and why."""


def parse_json(
    data: bytes, *, where: str, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, hint: str = _HINT
) -> Any:
    """Parse ``data`` as one JSON value.

    ``-0`` is read as the float -0.0, since the integer 0 would lose its sign.

    Args:
        data: The text, UTF-8.
        where: What the text is, for messages: usually the path.
        max_bytes: Largest accepted size.
        max_depth: Deepest accepted nesting; ``[]`` has depth 1.
        hint: What to tell the user to do about any fault.

    Raises:
        BadInputError: the text is not strict JSON; the message names ``where``, line and column, from 1.
    """

    def fail(index: int, problem: str) -> NoReturn:
        line = text.count("\n", 0, index) + 1
        column = index - text.rfind("\n", 0, index)
        raise BadInputError(f"{where}: line {line}, column {column}: {problem}", hint=hint)

    _require_small(len(data), max_bytes, where, hint)
    data = data.removeprefix(_BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data[: error.start].decode("utf-8")
        fail(len(text), f"byte 0x{data[error.start]:02x} is not UTF-8")
    if not _is_within(data, max_depth) or _SURROGATE_ESCAPE.search(data):
        fault = _first_fault(text, max_depth)
        if fault is not None:
            fail(*fault)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse,
            parse_float=_finite_float,
            # A hook for each integer is slow, and few texts hold one that needs it.
            parse_int=_integer if _has_odd_integer(data) else None,
        )
    except json.JSONDecodeError as syntax:
        fail(syntax.pos, _lower_first(syntax.msg))
    except (ValueError, RecursionError):
        fail(*(_first_fault(text, max_depth) or (0, "not strict JSON")))


def read_json(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, hint: str = _HINT
) -> Any:
    """Parse the file at ``path``; arguments and errors are those of ``parse_json`` and ``read_bytes``."""
    data = read_bytes(path, max_bytes=max_bytes, hint=hint)
    return parse_json(data, where=os.fspath(path), max_bytes=max_bytes, max_depth=max_depth, hint=hint)


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, hint: str = _HINT) -> bytes:
    """Read a small regular file whole.

    Raises:
        BadInputError: larger than ``max_bytes``, or as ``open_regular``.
        LocalIOError: as ``open_regular`` and ``read_up_to``.
    """
    where = os.fspath(path)
    with open_regular(path) as file:
        # One byte more than allowed shows that a file is too large without reading the rest of it.
        data = read_up_to(file, max_bytes + 1, where=where)
    _require_small(len(data), max_bytes, where, hint)
    return data


def dump_json(value: Any) -> bytes:
    """Render ``value`` for a file: UTF-8, indented by 2, key order kept, final newline.

    Raises:
        ValueError: a float is not finite, or a string is not Unicode.
    """
    return (_indented(value, "\n") + "\n").encode("utf-8")


def _indented(value: Any, newline: str) -> str:
    """What ``json.dumps(indent=2)`` gives, sooner: that takes the encoder in Python, twenty times slower."""
    deeper = newline + "  "
    if isinstance(value, dict) and value:
        if not any(isinstance(item, (dict, list, tuple)) for item in value.values()):
            flat = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=("," + deeper, ": "))
            return f"{{{deeper}{flat[1:-1]}{newline}}}"
        # A key alone goes through the encoder too, because it may be a number or null.
        members = (
            json.dumps({key: 0}, ensure_ascii=False, allow_nan=False)[1:-2] + _indented(item, deeper)
            for key, item in value.items()
        )
        return f"{{{deeper}{(',' + deeper).join(members)}{newline}}}"
    if isinstance(value, (list, tuple)) and value:
        return f"[{deeper}{(',' + deeper).join(_indented(item, deeper) for item in value)}{newline}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, following links, without ever blocking on a FIFO or waking a device.

    Raises:
        BadInputError: nothing is there, the links lead nowhere or in a circle, or it is not a regular file.
        LocalIOError: the file system refused (permission, too many open files, a device error).
    """
    where = os.fspath(path)
    try:
        _require_regular(Path(path).stat(), where)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        _raise_for_open(error, where)
    except ValueError:
        raise BadInputError(f"{shown(where)}: not a possible path: it contains a NUL character") from None
    try:
        _require_regular(os.fstat(descriptor), where)  # it may have been replaced since the first look
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_up_to(file: BinaryIO, count: int, *, where: str) -> bytes:
    """Read ``count`` bytes, fewer only at the end of the file.

    Raises:
        LocalIOError: the device failed; the message names the offset.
    """
    start = file.tell()
    try:
        return file.read(count)
    except OSError as error:
        raise LocalIOError(
            f"{where}: reading {count} bytes at offset {start} failed: {error.strerror}",
            hint="Check the disk or the network mount, then run again.",
        ) from error


def _require_small(size: int, max_bytes: int, where: str, hint: str) -> None:
    if size > max_bytes:
        raise BadInputError(f"{where}: larger than the {max_bytes} bytes expected of it at most", hint=hint)


def _require_regular(status: os.stat_result, where: str) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    kind = kinds.get(stat.S_IFMT(status.st_mode), "a special file")
    raise BadInputError(f"{where}: {kind}, not a regular file", hint="Give the path of a regular file.")


def _raise_for_open(error: OSError, where: str) -> NoReturn:
    if error.errno == errno.ENOENT:
        link = Path(where)
        if link.is_symlink():
            raise BadInputError(
                f"{where}: a symbolic link to {link.readlink()}, which does not exist",
                hint="Restore the target of the link, or download the file again.",
            ) from None
        raise BadInputError(f"{where}: no such file", hint="Check the path.") from None
    if error.errno == errno.ELOOP:
        raise BadInputError(
            f"{where}: its symbolic links form a loop", hint="Replace the links by the file itself."
        ) from None
    if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG):
        raise BadInputError(f"{where}: {error.strerror}", hint="Check the path.") from None
    raise LocalIOError(
        f"{where}: cannot be opened: {error.strerror}", hint="Check its permissions and the file system."
    ) from error


def _is_within(data: bytes, max_depth: int) -> bool:
    """Whether brackets outside strings nest at most ``max_depth`` deep."""
    brackets = _STRING_BYTES.sub(b"", data).translate(None, _NOT_BRACKETS)
    pairs = brackets.translate(_AS_ROUND)
    for _ in range(max_depth):  # each round takes the innermost pairs off, which is quick in a sound text
        pairs = pairs.replace(b"()", b"")
        if not pairs:
            return True
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in brackets)
    return max(depths, default=0) <= max_depth


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _RefusedError
    return members


def _refuse(literal: str) -> NoReturn:
    raise _RefusedError(literal)


def _finite_float(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise _RefusedError(literal)
    return value


def _has_odd_integer(data: bytes) -> bool:
    """Whether there may be a ``-0`` or an integer that is too long."""
    return b"-0" in data or b"0" * (MAX_DIGITS + 1) in data.translate(_DIGITS)


def _integer(literal: str) -> int | float:
    if len(literal) > MAX_DIGITS:
        raise _RefusedError(literal)
    return -0.0 if literal == "-0" else int(literal)


def _first_fault(text: str, max_depth: int) -> tuple[int, str] | None:
    """The first thing in ``text`` that is refused although the standard parser takes it: index and reason.

    Slow, so called only when something is known or suspected to be wrong. Syntax errors are not its business:
    it looks at tokens and stops at the first it can't judge.
    """
    keys: list[set[str]] = []  # one set per open bracket
    for token in _TOKEN.finditer(text):
        index, word = token.start(), token[0]
        if token.lastgroup == "string":
            try:
                string = json.loads(word)
            except ValueError:
                return None
            if any("\ud800" <= char <= "\udfff" for char in string):
                return index, f"{shown(string)} contains half a surrogate pair, which no UTF-8 text can hold"
            if keys and _COLON.match(text, token.end()):
                if string in keys[-1]:
                    return index, f"the key {shown(string)} is given twice in one object"
                keys[-1].add(string)
        elif word in "[{":
            keys.append(set())
            if len(keys) > max_depth:
                return index, f"nested more than {max_depth} levels deep"
        elif word in "]}":
            if keys:
                keys.pop()
        elif word in ("NaN", "Infinity", "-Infinity"):
            return index, f"{word} is not a JSON number"
        elif _INTEGER.fullmatch(word):
            if len(word) > MAX_DIGITS:
                return index, f"an integer of {len(word)} digits, more than {MAX_DIGITS}"
        elif _FLOAT.fullmatch(word):
            if math.isinf(float(word)):
                return index, f"{shown(word)} is too large for a float64"
        elif word not in ("true", "false", "null"):
            return None
    return None


def _lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def shown(name: str, limit: int = 120) -> str:
    """``name`` for a message: quoted, control characters escaped, and cut in the middle when long."""
    quoted = repr(name)
    if len(quoted) <= limit:
        return quoted
    half = (limit - 3) // 2
    return f"{quoted[:half]}...{quoted[-half:]} ({len(name)} characters)"
