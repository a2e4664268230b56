"""Makes up tensors whose rows come from cut-out columns: a few large reads, many small moves in memory.

A slice of columns is one run of bytes a row, and a matrix has thousands of rows; so are a whole matrix' rows when its
columns lie on several ranks. Rows are therefore made up in a buffer, a band of them at a time: each piece's part of
the band is read in one go, cut up in memory, and the band is written once, in order. So are FP8 codes that become
BF16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from mla_convert import storage
from mla_convert.catalogue import Catalogue, SourceTensor
from mla_convert.plan import Copy, Dequantise, TargetTensor, Zeros
from mla_convert.quant import decode_scales, dequantise_rows
from mla_convert.reading import read_at, read_into
from mla_convert.tensors import DTYPE_BITS, Box, byte_runs

#: Bytes of a band, and bytes read for one piece of a band, at most (but a row at least).
BAND = 2 << 20
READ = 8 << 20
#: Runs at least this long are worth a system call each.
_LONG_RUN = 64 << 10
#: A row with this many unwanted bytes is better skipped, read by read, than read.
_SKIP = 16 << 10


def is_strided(piece: Copy, source: SourceTensor, target: TargetTensor) -> bool:
    """True if a piece is many short runs of bytes, one for each of its rows."""
    inner = piece.box[1:]
    cut = any(
        stop - start != size or stop - start != whole
        for (start, stop), size, whole in zip(
            inner, source.spec.shape[1:], target.spec.shape[1:], strict=True
        )
    )
    if not cut or piece.box[0][1] - piece.box[0][0] < 2:
        return False
    last = next(
        d
        for d in range(len(piece.box) - 1, 0, -1)
        if not piece.box[d][1] - piece.box[d][0] == source.spec.shape[d] == target.spec.shape[d]
    )
    elements = 1
    for start, stop in piece.box[last:]:
        elements *= stop - start
    return elements * DTYPE_BITS[source.spec.dtype] < 8 * _LONG_RUN


class Gatherer:
    """Makes up tensors of copies, zeros and FP8 codes times scales; keeps the files that it reads open.

    Use it in a ``with`` statement.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._opened: dict[str, int] = {}
        self._scratch = bytearray()

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._opened.values():
            os.close(fd)
        self._opened.clear()

    def bands(self, target: TargetTensor) -> Iterator[tuple[int, memoryview]]:
        """All of a tensor's bytes, a band of rows at a time: (offset in the tensor, bytes).

        A band is only valid until the next one is asked for.
        """
        spec = target.spec
        if not spec.nbytes:
            return
        if not spec.shape:
            yield 0, self._scalar(target)
            return
        rows, row_bytes = spec.shape[0], spec.row_nbytes
        widest = max(
            (
                self._catalogue.tensors[piece.source].spec.row_nbytes
                for piece in target.pieces
                if isinstance(piece, Copy | Dequantise)
            ),
            default=1,
        )
        height = max(1, min(rows, BAND // max(1, row_bytes), READ // max(1, widest)))
        buffer = bytearray(height * row_bytes)
        for row in range(0, rows, height):
            stop = min(row + height, rows)
            view = memoryview(buffer)[: (stop - row) * row_bytes]
            for piece in target.pieces:
                self._lay(piece, target, row, stop, view)
            yield row * row_bytes, view

    def _scalar(self, target: TargetTensor) -> memoryview:
        piece = target.pieces[0]
        if not isinstance(piece, Copy):
            raise ValueError(f"{target.spec.name}: one value cannot be made of {piece}")
        tensor = self._catalogue.tensors[piece.source]
        return memoryview(read_at(self._open(tensor.file), tensor.spec.nbytes, tensor.start, tensor.file))

    def _lay(self, piece: object, target: TargetTensor, row: int, stop: int, view: memoryview) -> None:
        """Fill the part of rows ``row`` to ``stop`` that one piece makes up."""
        row_bytes = target.spec.row_nbytes
        if isinstance(piece, Zeros):
            first, last = max(row, piece.at), min(stop, piece.at + piece.count)
            if first < last:
                view[(first - row) * row_bytes : (last - row) * row_bytes] = bytes((last - first) * row_bytes)
            return
        if not isinstance(piece, Copy | Dequantise):
            raise ValueError(f"{target.spec.name} cannot be made of {piece} here")
        (begin, end), at = piece.box[0], piece.at[0]
        first, last = max(row, at), min(stop, at + end - begin)
        if first >= last:
            return
        tensor = self._catalogue.tensors[piece.source]
        box = ((begin + first - at, begin + last - at), *piece.box[1:])
        if isinstance(piece, Dequantise):
            self._lay_values(piece, tensor, box, first - row, row_bytes, view)
            return
        band = replace(target.spec, shape=(stop - row, *target.spec.shape[1:]))
        if len(box) == 2:
            self._lay_matrix(tensor, box, (first - row, piece.at[1]), band.row_nbytes, view)
            return
        fd = self._open(tensor.file)
        for run in byte_runs(tensor.spec, box, band, (first - row, *piece.at[1:])):
            data = read_at(fd, run.length, tensor.start + run.source, tensor.file)
            view[run.target : run.target + run.length] = data

    def _lay_values(
        self,
        piece: Dequantise,
        tensor: SourceTensor,
        box: Box,
        row: int,
        row_bytes: int,
        view: memoryview,
    ) -> None:
        """Codes times scales, from row ``row`` of the band."""
        (begin, end), (left, right) = box
        count, width = end - begin, right - left
        codes = memoryview(bytearray(count * width))
        self._lay_matrix(tensor, box, (0, 0), width, codes)
        values = memoryview(
            dequantise_rows(codes, width, self._scales(piece, width), piece.block_columns, piece.skip)
        )
        if 2 * width == row_bytes:
            view[row * row_bytes : (row + count) * row_bytes] = values
            return
        for number in range(count):
            at = (row + number) * row_bytes + 2 * piece.at[1]
            view[at : at + 2 * width] = values[2 * number * width : 2 * (number + 1) * width]

    def _scales(self, piece: Dequantise, width: int) -> list[float]:
        scale = self._catalogue.tensors[piece.scale]
        size = DTYPE_BITS[scale.spec.dtype] >> 3
        columns = scale.spec.shape[1] if len(scale.spec.shape) == 2 else 1
        count = -(-(piece.skip + width) // piece.block_columns)
        offset = (piece.scale_at[0] * columns + piece.scale_at[1]) * size
        data = read_at(self._open(scale.file), count * size, scale.start + offset, scale.file)
        return decode_scales(data, scale.spec.dtype)

    def _lay_matrix(
        self,
        tensor: SourceTensor,
        box: Box,
        at: tuple[int, int],
        row_bytes: int,
        view: memoryview,
    ) -> None:
        bits = DTYPE_BITS[tensor.spec.dtype]
        (row, stop), (left, right) = box
        if (left * bits | right * bits | at[1] * bits) & 7:
            raise ValueError(f"columns {left} to {right} of {tensor.spec} are cut inside a byte")
        width, stride = (right - left) * bits >> 3, tensor.spec.row_nbytes
        count, start = stop - row, tensor.start + row * stride + (left * bits >> 3)
        offset = at[0] * row_bytes + (at[1] * bits >> 3)
        fd = self._open(tensor.file)
        if width == stride == row_bytes:
            read_into(fd, view[offset : offset + count * width], start, tensor.file)
            return
        if stride - width > _SKIP:
            _announce(fd, start, (count - 1) * stride + width)
            for _ in range(count):
                read_into(fd, view[offset : offset + width], start, tensor.file)
                offset, start = offset + row_bytes, start + stride
            return
        data = self._scratch_of((count - 1) * stride + width)
        read_into(fd, data, start, tensor.file)
        if width == row_bytes:
            pieces = [data[at : at + width] for at in range(0, count * stride, stride)]
            view[offset : offset + count * width] = b"".join(pieces)
            return
        for place in range(0, count * stride, stride):
            view[offset : offset + width] = data[place : place + width]
            offset += row_bytes

    def _scratch_of(self, size: int) -> memoryview:
        """Memory that is used again and again: fresh pages for every read would cost more than the read."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    def _open(self, file: str) -> int:
        if file not in self._opened:
            self._opened[file] = storage.open_source(self._catalogue.files[file].path)
        return self._opened[file]


def _announce(fd: int, offset: int, length: int) -> None:
    """Have the kernel read a stretch ahead, in order, before it is read here and there."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
