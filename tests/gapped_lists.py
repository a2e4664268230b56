"""Lists with runs of invalid entries anywhere, of which kernels skip whole blocks of 64."""

from __future__ import annotations

import torch
from torch import Tensor

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def gapped(queries: int, entries: int, tokens: int, device: str = "cuda") -> Tensor:
    """Lists int32 [queries, entries] of twelve kinds in turn; the invalid entries are of five kinds, also in turn."""
    places = torch.arange(entries)
    blocks = places // 64
    last = int(blocks[-1])
    kept = [
        blocks % 2 == 0,
        blocks % 2 == 1,
        places == 0,
        places == entries - 1,
        places == entries // 2,
        places < 0,
        places >= 0,
        blocks == last,
        (blocks == 0) | (blocks == last),
        (blocks >= 3) & (places % 3 == 0),
        places % 64 == 63,
        blocks % 5 < 2,
    ]
    invalid = torch.tensor([-1, tokens, INT_MIN, INT_MAX, tokens + 7])
    lists = torch.randint(0, tokens, (queries, entries))
    for query in range(queries):
        hidden = ~kept[query % len(kept)]
        lists[query, hidden] = invalid[(places[hidden] + query) % 5 if query % 3 else query % 5]
    return lists.to(device, torch.int32)
