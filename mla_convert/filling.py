"""Fills a file from the pieces that a plan made it of, in bounded memory.

Ranges that stay as they are move inside the kernel (reflink or copy_file_range), so Python touches almost none of
the bytes. Only computed pieces, at most a block of rows each, and hashed ranges pass through it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mla_convert import storage
from mla_convert.catalogue import Catalogue
from mla_convert.errors import BadInputError
from mla_convert.plan import Copy, Dequantise, Inline, Requantise, RewrittenFile, TargetTensor
from mla_convert.quant import decode_scales, dequantise_rows, requantise_rows
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
    shared = _move_ranges(fd, file, catalogue, reflink, on_bytes)
    for target, offset in file.placed():
        for piece in target.pieces:
            if isinstance(piece, Copy):
                continue
            data, row = _computed(piece, target, catalogue)
            storage.write_at(fd, offset + row * target.spec.row_nbytes, data)
            on_bytes(len(data))
    return shared


def _move_ranges(fd: int, file: RewrittenFile, catalogue: Catalogue, reflink: bool, on_bytes: OnBytes) -> int:
    shared = 0
    opened: dict[str, int] = {}
    try:
        for piece in _merged(_ranges(file, catalogue)):
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


def _ranges(file: RewrittenFile, catalogue: Catalogue) -> Iterator[_Range]:
    for target, offset in file.placed():
        if target.is_carried:
            whole = catalogue.tensors[target.spec.name]
            yield _Range(whole.file, Run(whole.start, offset, whole.stop - whole.start))
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
    piece: Dequantise | Requantise | Inline, target: TargetTensor, catalogue: Catalogue
) -> tuple[bytes, int]:
    """The bytes of one computed piece and the row they start at."""
    if isinstance(piece, Inline):
        return piece.data, 0
    columns = target.spec.shape[1]
    codes = memoryview(read_rows(catalogue, piece.source, piece.row, piece.count))
    if isinstance(piece, Dequantise):
        scale = catalogue.tensors[piece.scale].spec
        stored = read_rows(catalogue, piece.scale, piece.scale_row if scale.numel > 1 else 0, 1)
        scales = decode_scales(stored, scale.dtype)
        return bytes(dequantise_rows(codes, columns, scales, piece.block_columns)), piece.at
    scales = decode_scales(piece.scales, piece.scale_dtype)
    return bytes(requantise_rows(codes, columns, scales, piece.block_columns, target.spec.name)), piece.at


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
