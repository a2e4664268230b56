"""Lists with runs of invalid entries anywhere, of which kernels skip whole blocks of 64."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, TILE, WINDOW = 64, 16, 2048
"""Entries: what is skipped, what pairs of warps skip, and what a look at a list takes in."""
EMPTY = 5
"""The pattern without a valid entry."""


def gapped(queries: int, entries: int, tokens: int) -> Tensor:
    """Lists int32 [queries, entries] on the GPU, of the ``patterns`` in turn: query ``EMPTY`` has no valid entry."""
    valid = patterns(entries, "cuda")
    lists = torch.randint(0, tokens, (queries, entries), device="cuda", dtype=torch.int32)
    return torch.where(valid[torch.arange(queries) % len(valid)], lists, invalid_like(lists, tokens))


def invalid_like(indices: Tensor, tokens: int) -> Tensor:
    """Entries that are not valid, of every kind."""
    kinds = torch.tensor(
        [-1, -2, -(2**31), tokens, tokens + 1, 2**31 - 1], device=indices.device, dtype=torch.int32
    )
    return kinds[torch.randint(0, len(kinds), indices.shape, device=indices.device)]


def patterns(entries: int, device: str = "cpu") -> Tensor:
    """[lists, entries]: which entries are valid."""
    at = torch.arange(entries, device=device)
    block, tile = at // BLOCK, at // TILE
    last = entries - 1
    rows = [
        block % 2 == 0,
        block % 2 == 1,
        at == 0,
        at == last,
        at == last // 2,
        at < 0,
        at >= 0,
        (at == 0) | (at == last),
        block % 3 == 2,
        block % 5 < 2,
        tile % 2 == 1,
        tile % 9 == 8,
        at % 64 == 63,
        at % 200 == 199,
        (block >= 3) & (at % 3 == 0),
        block == block[-1],
        block == block[-1] // 2,
        (block < 2) | (block > block[-1] - 2),
        block >= block[-1] // 2,
        block < block[-1] // 2,
        (at >= WINDOW) & (at < WINDOW + 5),
        at == WINDOW - 1,
        (at - WINDOW) % (2 * WINDOW) < BLOCK,
    ]
    rows += [torch.rand(entries, device=device) < share for share in (0.9, 0.1, 0.02, 0.003)]
    for share in (0.8, 0.3, 0.05):
        kept = (torch.rand(entries, device=device) < share)[block]
        rows.append(kept & (torch.rand(entries, device=device) < 0.7))
    return torch.stack(rows)
