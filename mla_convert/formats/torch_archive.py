"""Writes archives of ``torch.save`` around whole dictionaries of tensors, whose bytes are filled in later.

`torch_save` writes one tensor an archive, as torch_dist needs it. Here an archive holds any plain value and any number
of tensors, and may be larger than 4 GiB: Megatron's older format keeps a rank's model in one.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mla_convert.errors import CannotError
from mla_convert.formats.pickle_writing import write_pickle
from mla_convert.formats.pickles import Global, Instance, Persistent
from mla_convert.formats.torch_save import STORAGES
from mla_convert.formats.torch_save_writing import Envelope
from mla_convert.tensors import TensorSpec

_ALIGNMENT = 64
_WIDE = 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_STREAMED = 0x808  # sizes and CRC follow the bytes; names are UTF-8
_KNOWN = 0x800
_STORAGE_OF = {spelling: name for name, spelling in STORAGES.items()}


def tensor_value(spec: TensorSpec, key: str) -> Instance:
    """How a pickle describes a contiguous tensor whose bytes are the record ``data/KEY``.

    Raises:
        CannotError: PyTorch has no storage of this dtype.
    """
    storage = _STORAGE_OF.get(spec.dtype)
    if storage is None:
        raise CannotError(f"{spec.name}: {spec.dtype} cannot be written to a torch checkpoint")
    stride = tuple(prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape)))
    stored = Persistent(("storage", Global("torch", storage), key, "cpu", spec.numel))
    args: tuple[Any, ...] = (stored, 0, tuple(spec.shape), stride, False, {})
    return Instance(Global("torch._utils", "_rebuild_tensor_v2"), args, is_call=True)


# Archives


@dataclass(frozen=True, slots=True)
class _Record:
    """A record: its path, where its local header begins, its size, and its CRC-32 where it is known already."""

    path: bytes
    at: int
    size: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class Directory:
    """The end of an archive, which lists the CRC-32 of every record and so can only be written last."""

    at: int
    records: tuple[_Record, ...]
    size: int

    def closing(self, crcs: Sequence[int]) -> bytes:
        """Its bytes, for the CRC-32 of each tensor in their order."""
        waiting = iter(crcs)
        entries = b"".join(
            _entry(record, next(waiting) if record.crc is None else record.crc) for record in self.records
        )
        return entries + _end(len(self.records), len(entries), self.at)


def archive(value: Any, sizes: Sequence[int], where: str) -> tuple[bytes, tuple[Envelope, ...], Directory]:
    """An archive's beginning, what lies around the bytes of each of its tensors, and its end.

    Args:
        value: What ``data.pkl`` describes; tensor number N as :func:`tensor_value` with the key ``str(N)``.
        sizes: Bytes of each tensor.
        where: What it is, for messages.
    """
    beginning, records = _small_records(value, where)
    envelopes = []
    at = len(beginning)
    for number, size in enumerate(sizes):
        path = f"archive/data/{number}".encode()
        records.append(_Record(path, at, size, None))
        header = _local_header(path, at, _STREAMED, 0, 0)
        wide = "<4sIQQ" if size >= _WIDE else "<4sIII"
        after = struct.pack(wide, b"PK\x07\x08", 0, size, size)
        envelopes.append(Envelope(header, after, (4,)))
        at += len(header) + size + len(after)
    directory = Directory(at, tuple(records), 0)
    return (
        beginning,
        tuple(envelopes),
        Directory(at, tuple(records), len(directory.closing([0] * len(sizes)))),
    )


def _small_records(value: Any, where: str) -> tuple[bytes, list[_Record]]:
    small = (
        (b"archive/data.pkl", write_pickle(value, where, protocol=2)),
        (b"archive/.format_version", b"1"),
        (b"archive/.storage_alignment", str(_ALIGNMENT).encode()),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    )
    out = io.BytesIO()
    records = []
    for path, data in small:
        crc = zlib.crc32(data)
        records.append(_Record(path, out.tell(), len(data), crc))
        out.write(_local_header(path, out.tell(), _KNOWN, crc, len(data)) + data)
    return out.getvalue(), records


def _local_header(path: bytes, at: int, flags: int, crc: int, size: int) -> bytes:
    """A record's header at ``at`` of the archive, padded so that its bytes start at a multiple of 64."""
    padding = -(at + _LOCAL.size + len(path) + 4) % _ALIGNMENT
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return (
        _LOCAL.pack(b"PK\x03\x04", 45, flags, 0, 0, 0, crc, size, size, len(path), len(extra)) + path + extra
    )


def _entry(record: _Record, crc: int) -> bytes:
    numbers = (record.size, record.size, record.at)
    wide = [number for number in numbers if number >= _WIDE]
    size, packed, at = (min(number, _WIDE) for number in numbers)
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    flags = _STREAMED if record.crc is None else _KNOWN
    return (
        _ENTRY.pack(
            b"PK\x01\x02",
            45,
            45,
            flags,
            0,
            0,
            0,
            crc,
            size,
            packed,
            len(record.path),
            len(extra),
            0,
            0,
            0,
            0,
            at,
        )
        + record.path
        + extra
    )


def _end(count: int, size: int, at: int) -> bytes:
    """The 64-bit end, which every reader of archives of torch.save knows, and the plain one."""
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, at)
    locator = _LOCATOR64.pack(b"PK\x06\x07", 0, at + size, 1)
    short = min(count, 0xFFFF)
    return wide + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _WIDE), min(at, _WIDE), 0)
