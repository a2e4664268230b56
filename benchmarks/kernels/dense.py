"""Rows of the dense absorbed forward, causal, beside FlashMLA's dense decode of as many queries and torch.

FLOP count the pairs of a query and a token it sees. Torch is its attention in the multi-head form (192 and 128 dims a
head), keys and values expanded beforehand: other work with the same result, and 3.4 times fewer FLOP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.kernels import flashmla
from benchmarks.kernels.common import (
    FORWARD_FLOP,
    RANK,
    SCALE,
    WIDTH,
    Case,
    Goal,
    Measurement,
    Rival,
    cosine_error,
    measured,
    sampled,
)
from benchmarks.kernels.decode import PAGE


def cases() -> Iterator[Case]:
    for heads in (128, 64, 16):
        goals = (Goal(600, "TFLOP/s"),) if heads == 128 else ()
        measure = partial(dense_row, queries=8192, context=8192, heads=heads)
        yield Case(f"dense forward, 8192 causal, {heads} heads", measure, goals)
    measure = partial(dense_row, queries=512, context=32768, heads=128)
    yield Case("dense forward, 512 behind 32256, 128 heads", measure)


def dense_row(*, queries: int, context: int, heads: int) -> Measurement:
    """The last ``queries`` of ``context`` tokens."""
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.dense_mla import dense_mla

    q = torch.randn(queries, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(context, WIDTH, device="cuda", dtype=torch.bfloat16)
    some = sampled(queries)
    ends = some + context - queries + 1
    want, _ = reference.dense_mla(q[some].double(), kv.double(), SCALE, ends=ends, d_v=RANK)
    beside = {"torch": Rival(multi_head(queries, heads))} if queries == context else {}
    options = {
        "cache_seqlens": torch.tensor([context], device="cuda", dtype=torch.int32),
        "block_table": torch.arange(context // PAGE, device="cuda", dtype=torch.int32)[None],
        "causal": True,
    }
    beside |= flashmla.rival(
        lambda: flashmla.dense_decode(q[None], kv.view(-1, PAGE, 1, WIDTH), options),
        lambda out: cosine_error(out[0][some], want),
    )
    pairs = sum(range(context - queries + 1, context + 1))
    return measured(
        lambda: dense_mla(q, kv, SCALE, d_v=RANK),
        {"out": cosine_error(dense_mla(q, kv, SCALE, d_v=RANK)[0][some], want)},
        flop=FORWARD_FLOP * heads * pairs,
        beside=beside,
    )


def multi_head(queries: int, heads: int) -> Callable[[], Tensor]:
    q, k = (torch.randn(1, heads, queries, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, heads, queries, 128, device="cuda", dtype=torch.bfloat16)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
