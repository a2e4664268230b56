"""Where the tokens of one call stand: sequence and position of every query, and the keys it may see.

Queries keep the order of the input, rows [s, b] flattened or packed; keys lie sequence behind sequence, in a
cache or in a tensor of their own. S queries, T keys, as in ``reference``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_convert.runtime.parallel import context_rows

#: With more new tokens a sequence than this, a step is a prefill.
MOST_DECODED = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence: the rows of its queries, int64, where its keys lie, and the pairs of a query and a key it sees."""

    queries: Tensor
    keys: slice
    pairs: int

    @property
    def size(self) -> tuple[int, int]:
        """How many queries and keys."""
        return self.queries.numel(), self.keys.stop - self.keys.start


@dataclass(frozen=True, slots=True)
class Decoding:
    """A few new tokens of every sequence of a cache, as many of each.

    ``lengths_B`` int32 counts the cached tokens, the new ones among them.
    """

    lengths_B: Tensor
    count: int
    packed: bool

    def by_sequence(self, x: Tensor) -> Tensor:
        """Rows [S, …] as [B, count, …]."""
        batch = self.lengths_B.numel()
        if self.packed:
            return x.reshape(batch, self.count, *x.shape[1:])
        return x.reshape(self.count, batch, *x.shape[1:]).transpose(0, 1)

    def by_row(self, x: Tensor) -> Tensor:
        """The inverse of ``by_sequence``."""
        return (x if self.packed else x.transpose(0, 1)).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The queries of one rank and all keys.

    Attributes:
        keys_S: Each query's own key.
        starts_S: The first key of each query's sequence.
        segments: The sequences, those without a query here left out.
        restore_S: Puts rows that lie segment behind segment back into the order of the input; None if they are.
        order_T: Where each key lies among the rows that the context-parallel ranks hold, one rank's behind the
            other's; None if they are in order, or go into a cache.
        longest: The most keys that a query may see.
        decoding: Set where a decode kernel fits.
    """

    keys_S: Tensor
    starts_S: Tensor
    segments: tuple[Segment, ...]
    restore_S: Tensor | None
    order_T: Tensor | None
    longest: int
    decoding: Decoding | None = None

    @property
    def positions_S(self) -> Tensor:  # noqa: N802 - shape-suffixed
        """Each query's position in its sequence."""
        return self.keys_S - self.starts_S

    def rows(self, rank: int, world: int) -> slice:
        """One of ``world`` equal parts of the queries."""
        size = self.keys_S.numel() // world
        return slice(rank * size, (rank + 1) * size)

    def by_segment(self, function: Callable[[Segment], Tensor]) -> Tensor:
        """One result row a query, from a function that gives those of one segment."""
        parts = [function(segment) for segment in self.segments]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self.restore_S is None else joined.index_select(0, self.restore_S)

    def flat(self, indices_SK: Tensor) -> Tensor:
        """Lists of keys relative to each sequence's first as lists of keys, what is not visible as -1."""
        visible_SK = (indices_SK >= 0) & (indices_SK <= self.positions_S[:, None])
        return torch.where(visible_SK, indices_SK + self.starts_S[:, None], -1).to(torch.int32)

    def every_key(self, rows: slice) -> Tensor:
        """The keys that each of some queries may see, int32 [rows, longest], padded with -1."""
        steps = torch.arange(self.longest, device=self.keys_S.device)
        keys_SK = self.starts_S[rows, None] + steps
        return keys_SK.masked_fill(keys_SK > self.keys_S[rows, None], -1).to(torch.int32)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # what is kept must serve a training step as well
def place_tokens(
    lengths: tuple[int, ...], packed: bool, rank: int, world: int, device: torch.device
) -> Tokens:
    """The tokens of whole sequences, of which context-parallel rank ``rank`` of ``world`` holds its pieces.

    Args:
        lengths: Tokens of each sequence; all equal unless ``packed``.
        packed: Rows are sequence behind sequence; else [s, b].
    """
    if not any(lengths):
        return _no_tokens(device)
    held = [_held(lengths, packed, number, world) for number in range(world)]
    starts = _starts(lengths)
    order_T = torch.argsort(torch.cat(held))
    in_order = bool((order_T == torch.arange(order_T.numel(), device="cpu")).all())
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    return _tokens(held[rank], starts, ends, None if in_order else order_T, device)


def place_in_cache(
    past: Sequence[int], counts: Sequence[int], packed: bool, capacity: int, device: torch.device
) -> Tokens:
    """New tokens behind those of a cache, which has ``capacity`` rows a sequence and holds ``past`` of them."""
    if not any(counts):
        return _no_tokens(device)
    starts = [number * capacity for number in range(len(past))]
    firsts = [start + length for start, length in zip(starts, past, strict=True)]
    rows = [
        torch.arange(first, first + count, device="cpu") for first, count in zip(firsts, counts, strict=True)
    ]
    keys = torch.cat(rows) if packed else torch.stack(rows, 1).flatten()
    ends = [first + count for first, count in zip(firsts, counts, strict=True)]
    tokens = _tokens(keys, starts, ends, None, device)
    if len(set(counts)) != 1 or not 0 < counts[0] <= MOST_DECODED:
        return tokens
    lengths = [length + counts[0] for length in past]
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    return replace(tokens, decoding=Decoding(lengths_B, counts[0], packed))


def _no_tokens(device: torch.device) -> Tokens:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Tokens(nothing, nothing, (), None, None, longest=0)


def _held(lengths: tuple[int, ...], packed: bool, rank: int, world: int) -> Tensor:
    if packed:
        return context_rows(lengths, rank, world)
    rows = context_rows(lengths[:1], rank, world)
    return (rows[:, None] + torch.arange(len(lengths), device="cpu") * lengths[0]).flatten()


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts


def _tokens(
    keys_S: Tensor, starts: Sequence[int], ends: Sequence[int], order_T: Tensor | None, device: torch.device
) -> Tokens:
    segment_S = torch.searchsorted(torch.tensor(starts, device="cpu"), keys_S, right=True) - 1
    by_segment = segment_S.argsort(stable=True)
    in_order = bool((by_segment == torch.arange(by_segment.numel(), device="cpu")).all())
    rows = torch.split(by_segment, segment_S.bincount(minlength=len(starts)).tolist())
    segments = tuple(_segments(rows, keys_S, starts, ends, device))
    return Tokens(
        keys_S.to(device),
        torch.tensor(starts, device="cpu")[segment_S].to(device),
        segments,
        None if in_order else by_segment.argsort().to(device),
        None if order_T is None else order_T.to(device),
        max((segment.keys.stop - segment.keys.start for segment in segments), default=0),
    )


def _segments(
    rows: Sequence[Tensor], keys_S: Tensor, starts: Sequence[int], ends: Sequence[int], device: torch.device
) -> Iterator[Segment]:
    for part, start, end in zip(rows, starts, ends, strict=True):
        if part.numel():
            pairs = int((keys_S[part] - start + 1).sum())
            yield Segment(part.to(device), slice(start, end), pairs)
