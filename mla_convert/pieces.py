"""Arithmetic on pieces: a part of a tensor that is itself made of parts. It lets layout changes, merging and
slicing follow one another in one plan, so that no step needs a copy of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mla_convert.plan import Copy, Dequantise
from mla_convert.tensors import Box, TensorSpec

MadeOf = Mapping[str, Sequence[Copy]]


def cut(pieces: Iterable[Copy], box: Box) -> Iterator[Copy]:
    """The pieces of ``box``, out of the pieces of the whole tensor; they are placed relative to the box."""
    for piece in pieces:
        source: list[tuple[int, int]] = []
        at: list[int] = []
        for (start, stop), begin, (low, high) in zip(piece.box, piece.at, box, strict=True):
            first, last = max(begin, low), min(begin + stop - start, high)
            if first >= last:
                break
            source.append((start + first - begin, start + last - begin))
            at.append(first - low)
        else:
            yield Copy(piece.source, tuple(source), tuple(at))


def compose(pieces: Iterable[Copy], made_of: MadeOf) -> Iterator[Copy]:
    """The same tensor out of what the pieces' sources are made of."""
    for piece in pieces:
        for inner in cut(made_of[piece.source], piece.box):
            at = tuple(outer + offset for outer, offset in zip(piece.at, inner.at, strict=True))
            yield Copy(inner.source, inner.box, at)


def side_by_side(sources: Sequence[tuple[str, TensorSpec]], along: int) -> tuple[Copy, ...]:
    """The pieces of tensors joined along a dimension, in this order; each is given by its key and spec."""
    pieces, offset = [], 0
    for key, spec in sources:
        at = tuple(offset if dimension == along else 0 for dimension in range(len(spec.shape)))
        pieces.append(Copy(key, spec.full_box(), at))
        offset += spec.shape[along]
    return tuple(pieces)


def repeated(scale: TensorSpec, along: int, coarse: int, fine: int, count: int) -> tuple[Copy, ...]:
    """Scales of ``count`` blocks of ``fine`` elements, each a copy of that of the block of ``coarse`` it lies in."""
    return tuple(
        Copy(scale.name, _one(scale, along, index * fine // coarse), (index, 0) if along == 0 else (0, index))
        for index in range(count)
    )


def thinned(scale: TensorSpec, along: int, coarse: int, fine: int, count: int) -> tuple[Copy, ...]:
    """The inverse of :func:`repeated`: ``count`` coarse scales, each the first of its finer copies."""
    return tuple(
        Copy(scale.name, _one(scale, along, index * coarse // fine), (index, 0) if along == 0 else (0, index))
        for index in range(count)
    )


def dequantised(
    weight: Iterable[Copy], scale: Sequence[Copy], block: tuple[int, int], box: Box
) -> Iterator[Dequantise]:
    """The BF16 values of ``box`` of an FP8 matrix, placed relative to it.

    Args:
        weight: The pieces of the whole matrix.
        scale: The pieces of its scales, one for each block.
        block: Rows and columns of a block.
        box: What is wanted of the matrix, whether it cuts through blocks or not.
    """
    (top, _), (left, _) = box
    for piece in cut(weight, box):
        (begin, end), (first, last) = piece.box
        row, column = top + piece.at[0], left + piece.at[1]  # of the whole matrix
        width, below = last - first, row + end - begin
        blocks = (column // block[1], -(-(column + width) // block[1]))
        while row < below:
            stop = min((row // block[0] + 1) * block[0], below)
            start = begin + row - (top + piece.at[0])
            scales = ((row // block[0], row // block[0] + 1), blocks)
            for part in cut(scale, scales):
                near = (blocks[0] + part.at[1]) * block[1]  # where the first of these blocks begins
                far = near + (part.box[1][1] - part.box[1][0]) * block[1]
                near, skip = max(near, column), max(0, column - near)
                far = min(far, column + width)
                yield Dequantise(
                    piece.source,
                    part.source,
                    ((start, start + stop - row), (first + near - column, first + far - column)),
                    (row - top, near - left),
                    (part.box[0][0], part.box[1][0]),
                    block[1],
                    skip,
                )
            row = stop


def _one(spec: TensorSpec, along: int, index: int) -> Box:
    box = list(spec.full_box())
    box[along] = (index, index + 1)
    return tuple(box)
