"""Headers of safetensors files: a strict reader and a deterministic writer, for bytes that others move.

Layout of a file, all integers little-endian::

    offset      size        content
    0           8           N, unsigned: length of the JSON text, padding included
    8           N           JSON object in UTF-8; begins with "{", may end in spaces (0x20)
    8 + N       to the end  data: the tensors, row-major and packed, without gaps; ``data_start`` is 8 + N

    {"__metadata__": {"key": "value", ...},                                    optional, strings only
     "name": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [start, stop]}, ...}

Offsets in the JSON count from ``data_start``; those in ``StoredTensor`` from the beginning of the file.

The reader refuses all that the official library refuses, and also what that library takes although two
programs may disagree about it: a key given twice, fields that the format doesn't have, a tensor given as an
array, space before the ``{``, anything but spaces after the ``}``, empty names and names with NUL. Other
names are kept exactly, however odd: they are data here, never paths.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from mla_convert.errors import BadInputError
from mla_convert.strict_json import open_regular, parse_json, read_up_to, shown
from mla_convert.tensors import DTYPE_BITS, TensorSpec

#: Longest JSON text the official library reads, in bytes.
MAX_HEADER_LENGTH = 100_000_000

_LENGTH_BYTES = 8
_INTEGERS = {int}  # not bool, and not the float that equals it
_METADATA = "__metadata__"
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELDS = dict.fromkeys(("dtype", "shape", "data_offsets"))
_MAX_INT = 2**63 - 1
_DEPTH = 3  # the header, a tensor, its shape
_DAMAGED = "The file is damaged or was not written by a safetensors library; download it again."
_INCOMPLETE = "The file is incomplete or damaged; download it again."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its bytes: ``start`` to ``stop`` (exclusive), counted from the beginning of the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What the header of one file says; valid by construction when ``parse_header`` made it.

    Attributes:
        raw: The first ``data_start`` bytes of the file: length, JSON and padding, so that the file can be
            rebuilt byte for byte from it and its tensors.
        metadata: The ``__metadata__`` strings in file order, or None where the header has none.
        tensors: In the order of their data; tensors of zero size at one offset are in header order.
        data_start: Where the data begins.
        file_size: Size of the whole file.
    """

    raw: bytes
    metadata: Mapping[str, str] | None
    tensors: tuple[StoredTensor, ...]
    data_start: int
    file_size: int


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of the file at ``path``, and nothing else of it.

    Raises:
        BadInputError: not a regular file, or not a sound safetensors file of the right size.
        LocalIOError: the file system refused to open or read it.
    """
    with open_regular(path) as file:
        return read_open_header(file, os.fspath(path))


def read_open_header(file: BinaryIO, where: str) -> SafetensorsHeader:
    """:func:`read_header` of an open file, from its beginning; ``where`` is its name, for messages."""
    file_size = os.fstat(file.fileno()).st_size
    prefix = read_up_to(file, _LENGTH_BYTES, where=where)
    length = _json_length(prefix, file_size, where)
    raw = prefix + read_up_to(file, length, where=where)
    return parse_header(raw, file_size, where)


def parse_header(raw: bytes, file_size: int, where: str) -> SafetensorsHeader:
    """Check a header and lay out its tensors.

    Args:
        raw: The beginning of the file; bytes after the header are ignored.
        file_size: Size of the whole file in bytes.
        where: The file's name, for messages.

    Raises:
        BadInputError: the header is not sound, or does not describe a file of ``file_size`` bytes.
    """
    length = _json_length(raw, file_size, where)
    data_start = _LENGTH_BYTES + length
    if len(raw) < data_start:
        raise BadInputError(
            f"{where}: the header ends early: expected {data_start} bytes, found {len(raw)}", hint=_INCOMPLETE
        )
    raw = bytes(raw[:data_start])
    text = raw[_LENGTH_BYTES:].rstrip(b" ")
    if text[:1] != b"{":
        raise _damaged(where, f"the header begins with {text[:1]!r}, expected b'{{'")
    if text[-1:] != b"}":
        raise _damaged(
            where, f"the header ends with {text[-1:]!r}, expected b'}}' and then nothing but spaces"
        )
    entries = parse_json(
        text, where=f"{where}: header", max_bytes=MAX_HEADER_LENGTH, max_depth=_DEPTH, hint=_DAMAGED
    )
    metadata = _check_metadata(entries.pop(_METADATA), where) if _METADATA in entries else None
    tensors = [_check_tensor(name, entry, data_start, where) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_layout(tensors, data_start, file_size, where)
    return SafetensorsHeader(raw, metadata, tuple(tensors), data_start, file_size)


def build_header(
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str] | None = None,
    *,
    congruent_to: int | None = None,
    modulus: int = 4096,
) -> bytes:
    """Build the header of a file that holds ``specs`` in this order; equal arguments give equal bytes.

    The JSON has no spaces, and the header is padded to a multiple of 8 bytes, as the official library does.

    Args:
        specs: The tensors, in the order of their data.
        metadata: Strings to store under ``__metadata__``; None stores no such key.
        congruent_to: Another file's ``data_start``. The padding then makes the new one congruent to it
            modulo ``modulus``, so that equal data can share blocks on disk. Where ``congruent_to`` is not a
            multiple of 8, neither is the new ``data_start``.
        modulus: Block size of the file system.

    Raises:
        ValueError: a name is given twice or can't be stored, a spec is impossible, or the header is too long.
    """
    members: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(item, str) for pair in metadata.items() for item in pair):
            raise ValueError(f"metadata must map strings to strings: {metadata!r}")
        members[_METADATA] = dict(metadata)
    start = 0
    for spec in specs:
        fault = _name_fault(spec.name) or _spec_fault(spec.dtype, spec.shape)
        if fault is None and spec.name in members:
            fault = "the name is given twice"
        if fault is not None:
            raise ValueError(f"tensor {shown(spec.name)}: {fault}")
        stop = start + spec.nbytes
        members[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    unpadded = _LENGTH_BYTES + len(text)
    padding = -unpadded % 8 if congruent_to is None else (congruent_to - unpadded) % modulus
    length = len(text) + padding
    if length > MAX_HEADER_LENGTH:
        raise ValueError(f"the header would be {length} bytes long, more than {MAX_HEADER_LENGTH}")
    return length.to_bytes(_LENGTH_BYTES, "little") + text + b" " * padding


def _json_length(raw: bytes, file_size: int, where: str) -> int:
    """The length N at the head of ``raw``, checked before anything of that size is read."""
    if len(raw) < _LENGTH_BYTES:
        raise BadInputError(
            f"{where}: too short for a safetensors file: expected {_LENGTH_BYTES} bytes or more, "
            f"found {len(raw)}",
            hint=_INCOMPLETE,
        )
    if raw.startswith(b"version "):
        raise BadInputError(
            f"{where}: a Git LFS pointer of {file_size} bytes, not the file it stands for",
            hint="Fetch the file: git lfs pull.",
        )
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_LENGTH:
        raise _damaged(where, f"the header claims {length} bytes; at most {MAX_HEADER_LENGTH} are allowed")
    if length == 0:
        raise _damaged(where, "the header claims 0 bytes; the shortest is 2")
    if _LENGTH_BYTES + length > file_size:
        raise BadInputError(
            f"{where}: the file ends inside its header: expected {_LENGTH_BYTES + length} bytes or more, "
            f"found {file_size}",
            hint=_INCOMPLETE,
        )
    return length


def _check_metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _damaged(where, f"{_METADATA} is {_kind(value)}, expected an object of strings")
    for key, item in value.items():
        if not isinstance(item, str):
            raise _damaged(where, f"{_METADATA} {shown(key)} is {_kind(item)}, expected a string")
    return value


def _check_tensor(name: str, entry: Any, data_start: int, where: str) -> StoredTensor:
    """The tensor that a header's entry describes: quickly if it is sound, as nearly all are."""
    try:
        start, stop = entry["data_offsets"]
        nbytes = _sound_nbytes(entry["dtype"], tuple(entry["shape"]))
        if (
            len(entry) == 3
            and type(start) is type(stop) is int
            and 0 <= start <= stop <= _MAX_INT
            and stop - start == nbytes
            and type(entry["shape"]) is type(entry["data_offsets"]) is list
            and set(map(type, entry["shape"])) <= _INTEGERS
            and _name_fault(name) is None
        ):
            # The index holds the same names, and a few dtypes and shapes serve every tensor.
            spec = TensorSpec(sys.intern(name), sys.intern(entry["dtype"]), _shape(tuple(entry["shape"])))
            return StoredTensor(spec, data_start + start, data_start + stop)
    except (TypeError, ValueError, KeyError):
        pass
    return _check_tensor_slowly(name, entry, data_start, where)


@lru_cache(maxsize=4096)
def _sound_nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Stored size of a possible dtype and shape; None for any other."""
    if any(type(size) is not int or not 0 <= size <= _MAX_INT for size in shape) or _spec_fault(dtype, shape):
        return None
    return TensorSpec("", dtype, shape).nbytes


@lru_cache(maxsize=4096)
def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def _check_tensor_slowly(name: str, entry: Any, data_start: int, where: str) -> StoredTensor:
    """Every check in order, each with its own message."""

    def bad(problem: str) -> BadInputError:
        return _damaged(where, f"tensor {shown(name)}: {problem}")

    fault = _name_fault(name)
    if fault is not None:
        raise bad(fault)
    if not isinstance(entry, dict):
        raise bad(f"described by {_kind(entry)}, expected an object")
    if entry.keys() != _FIELDS.keys():
        for field in _FIELDS:
            if field not in entry:
                raise bad(f"the field {field} is missing")
        unknown = next(field for field in entry if field not in _FIELDS)
        raise bad(f"unknown field {shown(unknown)}; the format has only {', '.join(_FIELDS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise bad(f"dtype is {_kind(dtype)}, expected a string")
    for field, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list):
            raise bad(f"{field} is {_kind(numbers)}, expected an array of integers")
        for number in numbers:
            if type(number) is not int or not 0 <= number <= _MAX_INT:
                raise bad(f"{field} holds {_brief(number)}; expected integers from 0 to 2**63 - 1")
    if len(offsets) != 2:
        raise bad(f"data_offsets holds {len(offsets)} numbers, expected 2")
    fault = _spec_fault(dtype, shape)
    if fault is not None:
        raise bad(fault)
    spec = TensorSpec(name, dtype, tuple(shape))
    start, stop = offsets
    if start > stop:
        raise bad(f"data_offsets are reversed: {start} to {stop}")
    nbytes = spec.nbytes
    if stop - start != nbytes:
        raise bad(
            f"{dtype} of shape {_brief(shape)} is {nbytes} bytes, but data_offsets {start} to {stop} "
            f"hold {stop - start}"
        )
    return StoredTensor(spec, data_start + start, data_start + stop)


def _check_layout(tensors: Sequence[StoredTensor], data_start: int, file_size: int, where: str) -> None:
    """Require that ``tensors``, in data order, fill the file from ``data_start`` to its end."""
    position = data_start
    for index, tensor in enumerate(tensors):
        if tensor.start != position:
            before = f"tensor {shown(tensors[index - 1].spec.name)}" if index else "the header"
            distance = abs(tensor.start - position)
            raise _damaged(
                where,
                f"{before} ends at byte {position}, but tensor {shown(tensor.spec.name)} begins at byte "
                f"{tensor.start}: {distance} bytes {'overlap' if tensor.start < position else 'are unused'}",
            )
        position = tensor.stop
    if position > file_size:
        raise BadInputError(
            f"{where}: the file ends early: expected {position} bytes, found {file_size}",
            hint=_INCOMPLETE,
        )
    if position < file_size:
        raise _damaged(
            where,
            f"{file_size - position} bytes follow the data: expected {position} bytes, found {file_size}",
        )


def _name_fault(name: str) -> str | None:
    if not name:
        return "the name is empty"
    if name == _METADATA:
        return "the name is reserved"
    if "\0" in name:
        return "the name contains a NUL character"
    if not name.isascii() and _SURROGATE.search(name):
        return "the name contains half a surrogate pair"
    return None


def _spec_fault(dtype: str, shape: Sequence[int]) -> str | None:
    if dtype not in DTYPE_BITS:
        return f"unknown dtype {shown(dtype)}; known are {', '.join(DTYPE_BITS)}"
    # A factor of zero must not hide an overflow: strides are products of the other dimensions.
    bits, numel = DTYPE_BITS[dtype], 1
    for size in shape:
        if size < 0:
            return f"shape {_brief(shape)} holds a negative size"
        numel *= max(size, 1)
        if numel * bits > _MAX_INT:
            return f"shape {_brief(shape)} of {dtype} overflows 63 bits"
    if bits % 8 and 0 not in shape and numel * bits % 8:
        return f"shape {_brief(shape)} of {dtype} is {numel * bits} bits, not a whole number of bytes"
    return None


def _damaged(where: str, problem: str) -> BadInputError:
    return BadInputError(f"{where}: {problem}", hint=_DAMAGED)


def _kind(value: Any) -> str:
    """What a JSON value is, for messages."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _brief(value: Any) -> str:
    """``value`` for a message, cut when long."""
    quoted = repr(list(value) if isinstance(value, tuple) else value)
    return quoted if len(quoted) <= 80 else f"{quoted[:77]}..."
