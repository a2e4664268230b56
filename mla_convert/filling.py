"""Fills a file from the pieces that a plan made it of, in bounded memory.

Ranges that stay as they are move inside the kernel (reflink or copy_file_range), so Python touches almost none of
the bytes. Only computed pieces, at most a block of rows each, and hashed ranges pass through it.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mla_convert import storage
from mla_convert.catalogue import Catalogue
from mla_convert.gathering import Gatherer, is_strided
from mla_convert.plan import Copy, Dequantise, Inline, Requantise, RewrittenFile, TargetTensor, Zeros
from mla_convert.quant import decode_scales, requantise_rows
from mla_convert.reading import read_at
from mla_convert.storage import OnBytes
from mla_convert.tensors import Run, byte_runs

#: Bytes read at a time when bytes pass through Python.
BUFFER = 4 << 20


@dataclass(frozen=True, slots=True)
class _Range:
    """A run of bytes of one source file that becomes part of the file being written."""

    file: str
    run: Run


def fill(fd: int, file: RewrittenFile, catalogue: Catalogue, *, reflink: bool, on_bytes: OnBytes) -> int:
    """Write all of ``file``, which is empty or preallocated. Nothing is fsynced.

    Returns:
        The bytes shared with the source by reflink.

    Raises:
        BadInputError: A source file ends early or is gone.
        LocalIOError: A read or write failed.
    """
    storage.write_at(fd, 0, file.header)
    on_bytes(len(file.header))
    made = [(target, offset) for target, offset in file.placed() if not target.is_carried]
    gathered = {target.spec.name for target, _ in made if _is_gathered(target, catalogue)}
    shared = _move_ranges(fd, file, catalogue, gathered, reflink, on_bytes)
    with Gatherer(catalogue) as gatherer:
        for target, offset in made:
            if target.spec.name in gathered:
                for at, band in gatherer.bands(target):
                    storage.write_at(fd, offset + at, band)
                    on_bytes(len(band))
    for target, offset in made:
        for piece in target.pieces:
            if isinstance(piece, Copy | Dequantise) or target.spec.name in gathered:
                continue
            data, row = _computed(piece, target, catalogue)
            storage.write_at(fd, offset + row * target.spec.row_nbytes, data)
            on_bytes(len(data))
    crcs = []
    for (target, offset), envelope in zip(file.placed(), file.envelopes, strict=False):
        crcs.append(_crc32(fd, offset, target))
        storage.write_at(fd, offset - len(envelope.before), envelope.before)
        storage.write_at(fd, offset + target.spec.nbytes, envelope.closing(crcs[-1]))
        on_bytes(len(envelope))
    if file.directory:
        storage.write_at(fd, file.size - file.directory.size, file.directory.closing(crcs))
        on_bytes(file.directory.size)
    return shared


def _crc32(fd: int, offset: int, target: TargetTensor) -> int:
    """CRC-32 of a tensor that was just written; its bytes are still in the page cache."""
    crc, end = 0, offset + target.spec.nbytes
    while offset < end:
        data = read_at(fd, min(BUFFER, end - offset), offset, target.spec.name)
        crc = zlib.crc32(data, crc)
        offset += len(data)
    return crc


def _is_gathered(target: TargetTensor, catalogue: Catalogue) -> bool:
    """True if a tensor is better made up in memory than moved range by range."""
    return any(
        isinstance(piece, Dequantise)
        or (isinstance(piece, Copy) and is_strided(piece, catalogue.tensors[piece.source], target))
        for piece in target.pieces
    )


def _move_ranges(
    fd: int,
    file: RewrittenFile,
    catalogue: Catalogue,
    gathered: Collection[str],
    reflink: bool,
    on_bytes: OnBytes,
) -> int:
    shared = 0
    opened: dict[str, int] = {}
    try:
        for piece in _merged(_ranges(file, catalogue, gathered)):
            if piece.file not in opened:
                opened[piece.file] = storage.open_source(catalogue.files[piece.file].path)
            run = piece.run
            shared += storage.copy_range(
                opened[piece.file], run.source, fd, run.target, run.length, reflink=reflink, on_bytes=on_bytes
            )
    finally:
        for source in opened.values():
            os.close(source)
    return shared


def _ranges(file: RewrittenFile, catalogue: Catalogue, gathered: Collection[str]) -> Iterator[_Range]:
    for target, offset in file.placed():
        if target.is_carried:
            whole = catalogue.tensors[target.spec.name]
            yield _Range(whole.file, Run(whole.start, offset, whole.stop - whole.start))
            continue
        if target.spec.name in gathered:
            continue
        for piece in target.pieces:
            if not isinstance(piece, Copy):
                continue
            source = catalogue.tensors[piece.source]
            for run in byte_runs(source.spec, piece.box, target.spec, piece.at):
                yield _Range(source.file, Run(source.start + run.source, offset + run.target, run.length))


def _merged(ranges: Iterator[_Range]) -> Iterator[_Range]:
    """Join runs that follow one another on both sides, so that untouched stretches move in one call."""
    last: _Range | None = None
    for piece in ranges:
        if not piece.run.length:
            continue
        if last is not None and (
            piece.file == last.file
            and piece.run.source == last.run.source + last.run.length
            and piece.run.target == last.run.target + last.run.length
        ):
            last = _Range(
                last.file, Run(last.run.source, last.run.target, last.run.length + piece.run.length)
            )
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _computed(
    piece: Requantise | Inline | Zeros, target: TargetTensor, catalogue: Catalogue
) -> tuple[bytes, int]:
    """The bytes of one computed piece and the row they start at."""
    if isinstance(piece, Inline):
        return piece.data, 0
    if isinstance(piece, Zeros):
        return bytes(piece.count * target.spec.row_nbytes), piece.at
    columns = target.spec.shape[1]
    values = memoryview(read_rows(catalogue, piece.source, piece.row, piece.count))
    scales = decode_scales(piece.scales, piece.scale_dtype)
    return bytes(requantise_rows(values, columns, scales, piece.block_columns, target.spec.name)), piece.at


# Reading


@contextmanager
def opened_tensor(catalogue: Catalogue, name: str) -> Iterator[int]:
    """The file of a source tensor, open for reading."""
    fd = storage.open_source(catalogue.files[catalogue.tensors[name].file].path)
    try:
        yield fd
    finally:
        os.close(fd)


def read_rows(catalogue: Catalogue, name: str, row: int, count: int) -> bytes:
    """``count`` rows of a source tensor."""
    tensor = catalogue.tensors[name]
    size = tensor.spec.row_nbytes
    with opened_tensor(catalogue, name) as fd:
        return read_at(fd, count * size, tensor.start + row * size, tensor.file)


def equal_tensors(catalogue: Catalogue, left: TargetTensor, right: TargetTensor) -> bool:
    """True if two ways to make up a tensor, both of copies and zeros, give the same bytes."""
    if (left.spec.dtype, left.spec.shape) != (right.spec.dtype, right.spec.shape):
        return False
    with Gatherer(catalogue) as one, Gatherer(catalogue) as other:
        return equal_bands(one.bands(left), other.bands(right))


def equal_bands(left: Iterator[tuple[int, memoryview]], right: Iterator[tuple[int, memoryview]]) -> bool:
    """True if two tensors of one size, a band at a time, have the same bytes."""
    a = b = memoryview(b"")
    while True:
        a = a or next(left, (0, a))[1]
        b = b or next(right, (0, b))[1]
        count = min(len(a), len(b))
        if not count:
            return len(a) == len(b)
        if bytes(a[:count]) != bytes(b[:count]):  # by memcmp, which views do not use
            return False
        a, b = a[count:], b[count:]


def sha256_of_range(fd: int, offset: int, length: int, name: str, on_bytes: OnBytes) -> str:
    """Hex sha256 of ``length`` bytes from ``offset``, read a buffer at a time."""
    digest = hashlib.sha256()
    end = offset + length
    while offset < end:
        data = read_at(fd, min(BUFFER, end - offset), offset, name)
        digest.update(data)
        offset += len(data)
        on_bytes(len(data))
    return digest.hexdigest()
