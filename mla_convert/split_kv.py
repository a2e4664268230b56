"""Which rows of the combined KV up-projection are K and which are V: the layout this project exists for.

Every public checkpoint stores ``kv_b`` head-major: for each head first ``nope`` rows of K, then ``v`` rows of V,
``[H*(nope+v), rank]``. Split, they are ``K [H*nope, rank]`` and ``V [H*v, rank]``, rows in the same order and
never transposed (a transposed K would cut across every quantisation group along the rank).

The functions are pure: they return moves of rows, and the plan turns those into pieces of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Head count and row counts a head of one attention block's KV up-projection."""

    heads: int
    nope: int
    v: int

    @property
    def stride(self) -> int:
        """Rows of the combined projection that belong to one head."""
        return self.nope + self.v

    @property
    def combined_rows(self) -> int:
        """Rows of the combined projection."""
        return self.heads * self.stride

    @property
    def k_rows(self) -> int:
        """Rows of the split K projection."""
        return self.heads * self.nope

    @property
    def v_rows(self) -> int:
        """Rows of the split V projection."""
        return self.heads * self.v


@dataclass(frozen=True, slots=True)
class RowMove:
    """``count`` rows that stand at ``combined`` in the combined tensor and at ``split`` in K or V."""

    combined: int
    split: int
    count: int


def k_moves(layout: KVLayout) -> Iterator[RowMove]:
    """One move a head for K."""
    for head in range(layout.heads):
        yield RowMove(head * layout.stride, head * layout.nope, layout.nope)


def v_moves(layout: KVLayout) -> Iterator[RowMove]:
    """One move a head for V."""
    for head in range(layout.heads):
        yield RowMove(head * layout.stride + layout.nope, head * layout.v, layout.v)


def scale_block_rows(layout: KVLayout, block_rows: int) -> int:
    """Row block of the split scales: ``block_rows`` where K and V fall on its boundaries, else a finer one.

    A scale block that covers rows of both K and V is replicated to blocks of ``gcd(nope, v, block_rows)`` rows.
    Each finer block then lies inside one original block, so every element keeps exactly its own scale.
    """
    if layout.nope % block_rows == 0 and layout.v % block_rows == 0:
        return block_rows
    return gcd(layout.nope, layout.v, block_rows)


def scale_moves(moves: Iterator[RowMove], block_rows: int, split_block_rows: int) -> Iterator[RowMove]:
    """Turn moves of weight rows into moves of scale rows.

    Args:
        moves: Moves of weight rows, each a multiple of ``split_block_rows`` long.
        block_rows: Rows that one scale row covers in the combined tensor.
        split_block_rows: Rows that one scale row covers in K or V (see :func:`scale_block_rows`).

    Yields:
        Moves of scale rows. Where blocks are replicated each move is one row long and the same combined row
        appears several times.
    """
    for move in moves:
        if split_block_rows == block_rows:
            yield RowMove(move.combined // block_rows, move.split // block_rows, move.count // block_rows)
            continue
        for offset in range(0, move.count, split_block_rows):
            yield RowMove(
                (move.combined + offset) // block_rows, (move.split + offset) // split_block_rows, 1
            )
