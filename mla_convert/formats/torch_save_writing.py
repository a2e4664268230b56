"""Writes the archive of ``torch.save`` (see ``torch_save``) around a tensor's bytes, which others put in their place.

    local header, name, padding      to a multiple of 64 from the beginning of the archive
    bytes of the storage
    descriptor                       CRC-32 and size again: a writer that streams knows them only now
    central directory, end

Archives that are written here are smaller than 4 GiB, which plain zip can express.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from mla_convert.errors import CannotError
from mla_convert.formats.torch_save import END, ENTRY, LOCAL, MAX_PLAIN, STORAGES
from mla_convert.tensors import TensorSpec

_ALIGNMENT = 64
_DESCRIPTOR = struct.Struct("<4sIII")


@dataclass(frozen=True, slots=True)
class Envelope:
    """An archive around one tensor's bytes. The CRC-32 of those goes to each of ``crc_at`` in ``after``."""

    before: bytes
    after: bytes
    crc_at: tuple[int, ...]

    def __len__(self) -> int:
        """Bytes that it adds to the tensor's."""
        return len(self.before) + len(self.after)

    def closing(self, crc: int) -> bytes:
        """What follows the tensor's bytes, whose CRC-32 is ``crc``."""
        closed = bytearray(self.after)
        for at in self.crc_at:
            struct.pack_into("<I", closed, at, crc)
        return bytes(closed)


def envelope(dtype: str, shape: tuple[int, ...], *, in_list: bool = False) -> Envelope:
    """The archive that ``torch.save`` would write for a contiguous tensor, or a list of one, less its bytes.

    Raises:
        CannotError: PyTorch has no storage of this dtype, or the tensor is too large for a plain zip.
    """
    storage = next((name for name, spelling in STORAGES.items() if spelling == dtype), None)
    spec = TensorSpec("", dtype, shape)
    if storage is None or spec.nbytes > MAX_PLAIN - (1 << 16):
        raise CannotError(
            f"cannot write a tensor of {dtype} {list(shape)} as one item of a torch_dist checkpoint"
        )
    small = [
        ("data.pkl", _tensor_pickle(storage, shape, in_list)),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
    ]
    before = b""
    entries = []
    for name, data in small:
        entries.append((name, len(before), data))
        before += _local_header(name, len(before)) + data + _descriptor(_crc(data), len(data))
    data_at = len(before)
    before += _local_header("data/0", data_at)
    after = _descriptor(0, spec.nbytes)
    crc_at = [4]
    version_at = len(before) + spec.nbytes + len(after)
    after += _local_header("version", version_at) + b"3\n" + _descriptor(_crc(b"3\n"), 2)
    directory_at = len(before) + spec.nbytes + len(after)
    directory = b"".join(_entry(name, at, _crc(data), len(data)) for name, at, data in entries)
    crc_at.append(len(after) + len(directory) + 16)
    directory += _entry("data/0", data_at, 0, spec.nbytes) + _entry("version", version_at, _crc(b"3\n"), 2)
    count = len(entries) + 2
    after += directory + END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), directory_at, 0)
    return Envelope(before, after, tuple(crc_at))


def write_archive(pickle: bytes, storages: Mapping[str, bytes]) -> bytes:
    """A whole archive: ``data.pkl`` and the storages that it refers to (``data/N``)."""
    records = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": b"little",
        **storages,
        "version": b"3\n",
    }
    written, directory = bytearray(), b""
    for name, data in records.items():
        directory += _entry(name, len(written), _crc(data), len(data))
        written += _local_header(name, len(written)) + data + _descriptor(_crc(data), len(data))
    count, at = len(records), len(written)
    return bytes(written) + directory + END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), at, 0)


def _crc(data: bytes) -> int:
    return zlib.crc32(data)


def _local_header(name: str, at: int) -> bytes:
    """A record's header at ``at`` of the archive, padded so that its bytes start at a multiple of 64."""
    path = f"archive/{name}".encode()
    padding = -(at + LOCAL.size + len(path) + 4) % _ALIGNMENT
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return LOCAL.pack(b"PK\x03\x04", 0, 0x808, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra


def _descriptor(crc: int, size: int) -> bytes:
    return _DESCRIPTOR.pack(b"PK\x07\x08", crc, size, size)


def _entry(name: str, at: int, crc: int, size: int) -> bytes:
    path = f"archive/{name}".encode()
    return (
        ENTRY.pack(b"PK\x01\x02", 0, 0, 0x808, 0, 0, 0, crc, size, size, len(path), 0, 0, 0, 0, 0, at) + path
    )


def _tensor_pickle(storage: str, shape: tuple[int, ...], in_list: bool) -> bytes:
    """``data.pkl`` of one contiguous tensor, in the protocol that PyTorch expects (2)."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    numel = prod(shape)
    return b"".join(
        (
            b"\x80\x02" + (b"]" if in_list else b""),
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            _word("storage"),
            b"ctorch\n" + storage.encode() + b"\n",
            _word("0"),
            _word("cpu"),
            _number(numel),
            b"tQ",
            _number(0),
            _numbers(shape),
            _numbers(stride),
            b"\x89ccollections\nOrderedDict\n)RtR" + (b"a." if in_list else b"."),
        )
    )


def _word(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x08" + value.to_bytes(8, "little")


def _numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(_number(value) for value in values) + b"t"
