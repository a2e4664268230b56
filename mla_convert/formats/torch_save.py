"""The archive that ``torch.save`` writes: found inside a file, and read without PyTorch.

A zip of stored (never compressed) records under one folder: ``data.pkl`` describes a value, ``data/N`` are the raw
bytes of its storages, little-endian unless ``byteorder`` says otherwise. An item of a torch_dist checkpoint is one
such archive, at an offset of a ``.distcp`` file. ``torch_save_writing`` writes them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.pickles import Allowed, Global, Instance, Persistent, read_pickle
from mla_convert.reading import read_at
from mla_convert.tensors import TensorSpec

#: dtype of PyTorch -> spelling of safetensors, which the rest of the tool uses.
TORCH_DTYPES: Mapping[str, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
#: Storage classes, which name a dtype in pickles of tensors.
STORAGES: Mapping[str, str] = {
    "BFloat16Storage": "BF16",
    "HalfStorage": "F16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}
#: What a pickle of tensors names.
TENSOR_GLOBALS: Allowed = {
    "torch._utils": frozenset(
        {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"}
    ),
    "torch": frozenset({*STORAGES, *TORCH_DTYPES, "Size", "device"}),
    "torch.storage": frozenset({"UntypedStorage"}),
    "collections": frozenset({"OrderedDict"}),
}
#: Longest ``data.pkl`` that is read. That of a whole model's state takes about 300 bytes a tensor.
MAX_PICKLE = 1 << 30

MAX_PLAIN = (1 << 32) - 1
_TAIL = 64 << 10
END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<4sHHHHHIIIHH")


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an archive: its bytes are ``start`` to ``start + size`` of the file."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A tensor as an archive describes it; ``start`` and ``stop`` are offsets in the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive in a file, its directory read and checked. Records are named without their common folder."""

    fd: int
    where: str
    records: Mapping[str, Record]

    def read(self, name: str, limit: int = MAX_PICKLE) -> bytes:
        """All of one record.

        Raises:
            BadInputError: There is no such record, or it is longer than ``limit`` bytes.
        """
        record = self.records.get(name)
        if record is None:
            raise BadInputError(
                f"{self.where}: there is no {name} in the archive", hint="was it saved by torch.save?"
            )
        if record.size > limit:
            raise BadInputError(
                f"{self.where}: {name} has {record.size} bytes, more than the {limit} that are read"
            )
        return read_at(self.fd, record.size, record.start, self.where)

    def value(self, allowed: Allowed) -> Any:
        """What ``data.pkl`` describes; tensors stay descriptions, for :meth:`tensor`.

        Raises:
            BadInputError: It is damaged, or asks for what is not allowed.
            CannotError: It was saved on a big-endian machine.
        """
        if "byteorder" in self.records and self.read("byteorder", 16) != b"little":
            raise CannotError(
                f"{self.where} was saved on a big-endian machine, which this version does not read"
            )
        return read_pickle(self.read("data.pkl"), allowed, self.where)

    def tensor(self, value: Any, name: str) -> StoredValue:
        """The dtype, shape and place of a tensor out of :meth:`value`.

        Raises:
            BadInputError: It is no tensor, or contradicts its storage.
            CannotError: It is a view whose elements do not lie in order.
        """
        dtype, key, numel, offset, shape, stride = self._described(value, name)
        spec = TensorSpec(name, dtype, shape)
        expected = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        if any(a != b for a, b, size in zip(stride, expected, shape, strict=True) if size > 1):
            raise CannotError(f"{self.where}: {name} is saved as a view, with strides {list(stride)}")
        record = self.records.get(f"data/{key}")
        if record is None:
            raise BadInputError(f"{self.where}: the bytes of {name} are missing (data/{key})")
        width = spec.nbytes // max(1, spec.numel) if spec.numel else 1
        if record.size != numel * width or offset < 0 or offset + spec.numel > numel:
            raise BadInputError(
                f"{self.where}: {name} is {dtype} {list(shape)} at element {offset} of {numel}, but its storage has "
                f"{record.size} bytes"
            )
        start = record.start + offset * width
        return StoredValue(spec, start, start + spec.nbytes)

    def _described(
        self, value: Any, name: str
    ) -> tuple[str, str, int, int, tuple[int, ...], tuple[int, ...]]:
        """(dtype, storage key, its elements, offset, shape, stride)."""
        problem = BadInputError(f"{self.where}: {name} is not a tensor")
        if isinstance(value, Instance) and value.of.name == "_rebuild_parameter" and value.args:
            value = value.args[0]
        if not isinstance(value, Instance) or value.of.module != "torch._utils" or len(value.args) < 4:
            raise problem
        storage, offset, shape, stride = value.args[:4]
        if isinstance(shape, Instance) and shape.of == Global("torch", "Size") and len(shape.args) == 1:
            shape = shape.args[0]
        if not isinstance(storage, Persistent) or type(storage.id) is not tuple or len(storage.id) != 5:
            raise problem
        kind, of, key, _, numel = storage.id
        numbers = (offset, numel, *(shape if type(shape) is tuple else (None,)), *(stride or ()))
        if (
            kind != "storage"
            or type(key) is not str
            or type(stride) is not tuple
            or len(stride) != len(shape)
        ):
            raise problem
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            raise problem
        dtype = STORAGES.get(of.name) if isinstance(of, Global) else None
        if (
            value.of.name == "_rebuild_tensor_v3"
            and len(value.args) > 6
            and isinstance(value.args[6], Global)
        ):
            dtype = TORCH_DTYPES.get(value.args[6].name)
            width = TensorSpec("", dtype, (1,)).nbytes if dtype else 1
            numel = numel // width if isinstance(of, Global) and of.name == "UntypedStorage" else numel
        if dtype is None:
            raise CannotError(f"{self.where}: {name} has a dtype that this version does not know: {of}")
        return dtype, key, numel, offset, shape, stride


# Reading


def open_archive(fd: int, offset: int, length: int, where: str) -> Archive:
    """Read the directory of the archive that is ``length`` bytes at ``offset`` of a file.

    Raises:
        BadInputError: It is not a sound archive of stored records that lie inside it.
    """
    if length < END.size:
        raise _damaged(where, f"{length} bytes are too few for an archive")
    tail_start = max(0, length - _TAIL)
    tail = read_at(fd, length - tail_start, offset + tail_start, where)
    count, size, start = _directory(tail, tail_start, length, where)
    if start >= tail_start:
        directory = tail[start - tail_start : start - tail_start + size]
    else:
        directory = read_at(fd, size, offset + start, where)
    records: dict[str, Record] = {}
    for name, at, stored in _entries(directory, count, where):
        if at + LOCAL.size > length:
            raise _damaged(where, f"{name!r} lies outside")
        local = LOCAL.unpack(read_at(fd, LOCAL.size, offset + at, where))
        begin = at + LOCAL.size + local[9] + local[10]
        if local[0] != b"PK\x03\x04" or begin + stored > start:
            raise _damaged(where, f"{name!r} is not where the directory says, or runs into it")
        short = name.partition("/")[2]
        if short in records:
            raise _damaged(where, f"{name!r} is there twice")
        records[short] = Record(offset + begin, stored)
    return Archive(fd, where, records)


def _damaged(where: str, what: str) -> BadInputError:
    return BadInputError(
        f"{where}: not an archive of torch.save: {what}", hint="the file is damaged; copy it again"
    )


def _directory(tail: bytes, tail_start: int, length: int, where: str) -> tuple[int, int, int]:
    """(entries, bytes, start) of the central directory; torch writes no comment behind it."""
    end = END.unpack(tail[-END.size :])
    if end[0] != b"PK\x05\x06":
        raise _damaged(where, "its end is missing")
    count, size, start = end[4], end[5], end[6]
    locator_at = len(tail) - END.size - _END64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        at = _END64_LOCATOR.unpack_from(tail, locator_at)[2] - tail_start
        if not 0 <= at <= locator_at - _END64.size or tail[at : at + 4] != b"PK\x06\x06":
            raise _damaged(where, "its 64-bit end is not where it should be")
        count, size, start = _END64.unpack_from(tail, at)[7:10]
    if start + size > length or count * ENTRY.size > size:
        raise _damaged(
            where, f"a directory of {count} records and {size} bytes at {start} does not fit in {length}"
        )
    return count, size, start


def _entries(directory: bytes, count: int, where: str) -> Iterator[tuple[str, int, int]]:
    """(name, start of its local header, size) of every record."""
    at = 0
    for _ in range(count):
        if at + ENTRY.size > len(directory):
            raise _damaged(where, "its directory ends early")
        entry = ENTRY.unpack_from(directory, at)
        flags, method, packed, size, name_length, extra_length, comment = entry[3], entry[4], *entry[8:13]
        local = entry[16]
        body = at + ENTRY.size
        name = directory[body : body + name_length].decode("utf-8", "replace")
        if entry[0] != b"PK\x01\x02":
            raise _damaged(where, "its directory is damaged")
        wide = [number for number in (size, packed, local) if number == MAX_PLAIN]
        if wide:
            extra = directory[body + name_length : body + name_length + extra_length]
            numbers = iter(_wide_numbers(extra, len(wide), where))
            size, packed, local = (next(numbers) if n == MAX_PLAIN else n for n in (size, packed, local))
        if method or packed != size or flags & 1:
            raise _damaged(where, f"{name!r} is compressed or encrypted")
        yield name, local, size
        at = body + name_length + extra_length + comment


def _wide_numbers(extra: bytes, count: int, where: str) -> tuple[int, ...]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * count and at + 4 + 8 * count <= len(extra):
            return struct.unpack_from(f"<{count}Q", extra, at + 4)
        at += 4 + length
    raise _damaged(where, "a 64-bit size is missing")
