"""Rows of the sparse forward, beside FlashMLA's sparse prefill and a gather in plain torch.

4096 queries, 8192 tokens, top-k 2048, bf16 and all entries valid, unless said. FLOP count valid entries. "Causal
lists" are those of the first positions: the first 2047 are short and hold -1 at the end. Where "every second block is
empty", half of the 2048 entries are -1, 64 of them in a row; the same lists without those are a baseline in the JSON
file, "packed". Rows "in a graph" replay a captured call, without what its launch costs the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import flashmla
from benchmarks.kernels.common import (
    FORWARD_FLOP,
    RANK,
    SCALE,
    TOPK,
    WIDTH,
    Case,
    Goal,
    Measurement,
    Rival,
    cosine_error,
    in_graph,
    measured,
    sampled,
)

QUERIES, TOKENS = 4096, 8192

# By number of heads: FlashMLA pads to 64 or 128.
GOALS = {8: (1.7,), 16: (1.4,), 32: (1.2,), 64: (0.95, 1.05), 128: (0.95, 1.05)}


def cases() -> Iterator[Case]:
    def sparse(name: str, *goals: Goal, **case: Any) -> Case:
        return Case(f"sparse forward, {name}", partial(sparse_row, **case), goals)

    for heads in (128, 64, 32, 16, 8, 20, 40, 96):
        goals = [Goal(times, "x FlashMLA") for times in GOALS.get(heads, ())]
        yield sparse(f"{heads} heads", *goals, heads=heads)
    for heads in (16, 64, 128):
        yield sparse(f"{heads} heads, causal lists", heads=heads, causal=True)
    for heads in (16, 64):
        yield sparse(f"{heads} heads, every second block empty", heads=heads, gaps=True)
    for topk in (512, 1024):
        for heads in (16, 64, 128):
            yield sparse(f"{heads} heads, top-k {topk}", heads=heads, topk=topk)
    for heads, queries in ((16, 1), (16, 64), (64, 64), (128, 64)):
        name = f"{heads} heads, {queries} quer{'y' if queries == 1 else 'ies'}"
        goals = [Goal(1, "x FlashMLA")] if (heads, queries) == (16, 64) else []
        yield sparse(name, *goals, heads=heads, queries=queries)
        yield sparse(f"{name}, in a graph", *goals, heads=heads, queries=queries, graph=True)
    for queries in (512, 32768):
        for heads in (16, 128):
            yield sparse(f"{heads} heads, {queries} queries", heads=heads, queries=queries)


def torch_sparse(q: Tensor, kv: Tensor, indices: Tensor, chunk: int = 128) -> Tensor:
    """Gather, then two batched products around a float32 softmax: what one writes without a kernel."""
    outs = []
    for rows in range(0, q.shape[0], chunk):
        chosen = indices[rows : rows + chunk]
        keys = kv[chosen.clamp_min(0)]
        scores = torch.bmm(q[rows : rows + chunk], keys.transpose(1, 2)).float() * SCALE
        p = scores.masked_fill(chosen[:, None] < 0, -torch.inf).softmax(-1)
        outs.append(torch.bmm(p.to(q.dtype), keys[..., :RANK]))
    return torch.cat(outs)


def lists(queries: int, topk: int, causal: bool) -> Tensor:
    """``topk`` different tokens a query; causal: of the query's own position and before, -1 behind them.

    A causal query is one of the first positions, so that the first ``topk`` - 1 lists are short.
    """
    parts = []
    for first in range(0, queries, 4096):
        rows = min(4096, queries - first)
        scores = torch.rand(rows, TOKENS, device="cuda")
        if causal:
            position = torch.arange(first, first + rows, device="cuda")[:, None]
            scores.masked_fill_(torch.arange(TOKENS, device="cuda") > position, -1)
        picked = scores.topk(topk, sorted=False)
        part = picked.indices.int().masked_fill(picked.values < 0, -1)
        parts.append(part.sort(dim=1, descending=True).values if causal else part)
    return torch.cat(parts)


def sparse_row(
    *,
    heads: int,
    queries: int = QUERIES,
    topk: int = TOPK,
    causal: bool = False,
    gaps: bool = False,
    graph: bool = False,
) -> Measurement:
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q = torch.randn(queries, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
    indices = lists(queries, topk, causal)
    if gaps:
        indices.view(queries, -1, 2, 64)[:, :, 1] = -1
    wrap = in_graph if graph else lambda call: call
    some = sampled(queries)
    want, _ = reference.sparse_mla(q[some].double(), kv.double(), indices[some], SCALE, d_v=RANK)
    torch_error = cosine_error(torch_sparse(q[some], kv, indices[some]), want)
    beside = {"torch": Rival(wrap(lambda: torch_sparse(q, kv, indices)), torch_error)}
    beside |= flashmla.rival(
        lambda: flashmla.sparse_prefill(q, kv, indices),
        lambda out: cosine_error(out[some][:, :heads], want),
        wrap,
    )
    if gaps:
        packed = indices.view(queries, -1, 2, 64)[:, :, 0].reshape(queries, -1)
        beside["packed"] = Rival(wrap(lambda: sparse_mla(q, kv, packed, SCALE, d_v=RANK)))
    got = sparse_mla(q, kv, indices, SCALE, d_v=RANK)[0][some]
    return measured(
        wrap(lambda: sparse_mla(q, kv, indices, SCALE, d_v=RANK)),
        {"out": cosine_error(got, want)},
        flop=FORWARD_FLOP * heads * int((indices >= 0).sum()),
        beside=beside,
    )
