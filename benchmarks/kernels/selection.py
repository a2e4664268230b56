"""Rows of the indexer: its logits, top-k 2048 and the two together, beside plain torch.

64 heads of 128 dims, unless said. FLOP count the keys inside the ranges; FP8 is set against the bf16 product, too. The
bytes of top-k are those of reading each logit once. Rows of up to 256 queries replay a captured call. Logits are random
and normal, unless said; "causal" has ranges, of which all are read. The error of top-k is the share of keys that a
stable sort does not choose; of "logits and top-k", the share of a float64 selection's keys that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.common import (
    INDEXER_DIM,
    INDEXER_HEADS,
    TOPK,
    Case,
    Goal,
    Measurement,
    Rival,
    cosine_error,
    in_graph,
    measured,
    sampled,
)

GRAPH_QUERIES = 256  # up to this many, calls are replayed from a graph

LOGITS_GOALS = (Goal(430, "TFLOP/s"), Goal(520, "TFLOP/s"))
TOPK_GOALS = {
    (4096, 32768): (Goal(2, "x torch"),),
    (4096, 131072): (Goal(2, "x torch"),),
}


def cases() -> Iterator[Case]:
    for keys in (32768, 8192):
        for fp8 in (False, True):
            goals = LOGITS_GOALS if keys == 32768 and not fp8 else ()
            name = f"indexer logits, {'fp8' if fp8 else 'bf16'}, {keys} x {keys} causal"
            yield Case(name, partial(logits_row, keys, keys, fp8), goals)
    for heads in (32, 16):
        name = f"indexer logits, bf16, {heads} heads, 32768 x 32768 causal"
        yield Case(name, partial(logits_row, 32768, 32768, False, heads))
    yield Case("indexer logits, bf16, 1 x 131072", partial(logits_row, 1, 131072, False))
    for queries, keys in ((4096, 32768), (4096, 131072), (64, 32768), (128, 131072), (1, 32768), (1, 131072)):
        measure = partial(topk_row, queries, keys, "normal")
        yield Case(f"top-k, {queries} x {keys}", measure, TOPK_GOALS.get((queries, keys), ()))
    yield Case("top-k, 4096 x 32768, close together", partial(topk_row, 4096, 32768, "close"))
    yield Case("top-k, 4096 x 32768, all equal", partial(topk_row, 4096, 32768, "equal"))
    yield Case("top-k, 4096 x 32768, causal", partial(topk_row, 4096, 32768, "causal"))
    for queries, keys in ((32768, 32768), (4096, 131072), (1, 131072)):
        name = f"logits and top-k, bf16, the last {queries} of {keys} causal"
        yield Case(name, partial(select_row, queries, keys))


def wrapped(queries: int, call: Callable[[], object]) -> Callable[[], object]:
    return in_graph(call) if queries <= GRAPH_QUERIES else call


def indexer_inputs(
    queries: int, keys: int, heads: int = INDEXER_HEADS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(queries, heads, INDEXER_DIM, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(keys, INDEXER_DIM, dtype=torch.bfloat16, device="cuda")
    ends = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device="cuda")
    return q, k, torch.randn(queries, heads, device="cuda"), ends


def indexer_flop(ends: Tensor, heads: int = INDEXER_HEADS) -> int:
    return 2 * heads * INDEXER_DIM * int(ends.long().sum())


def torch_indexer(q: Tensor, k: Tensor, weights: Tensor, ends: Tensor, chunk: int = 512) -> Tensor:
    """Product, relu and weighted sum in bf16, some queries at a time: what one writes without a kernel."""
    logits = torch.empty(q.shape[0], k.shape[0], device="cuda")
    keys = torch.arange(k.shape[0], device="cuda")
    for rows in range(0, q.shape[0], chunk):
        part = slice(rows, rows + chunk)
        scores = torch.einsum("sij,tj->sit", q[part], k).relu_()
        summed = torch.einsum("sit,si->st", scores, weights[part].to(q.dtype))
        logits[part] = summed.float().masked_fill_(keys >= ends[part, None], -torch.inf)
    return logits


def logits_row(queries: int, keys: int, fp8: bool, heads: int = INDEXER_HEADS) -> Measurement:
    """The error is to float64 from the same inputs, for FP8 the quantised ones; torch's is from bf16 alone."""
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    q, k, weights, ends = indexer_inputs(queries, keys, heads)
    some = sampled(queries)

    def error(got: Tensor, want: Tensor) -> float:
        seen = ~want.isneginf()
        return cosine_error(got[seen], want[seen])

    beside: dict[str, Rival] = {}
    if queries <= 8192:
        exact = reference.indexer_logits(
            q[some].double(), k.double(), weights[some].double(), ends=ends[some]
        )
        got = torch_indexer(q[some], k, weights[some], ends[some])
        unscaled = (q, k)
        call = wrapped(queries, lambda: torch_indexer(*unscaled, weights, ends))
        beside["torch"] = Rival(call, error(got, exact))
    options: dict[str, Tensor] = {}
    if fp8:
        q, options["q_scale"] = reference.quantise_rows(q)
        k, options["k_scale"] = reference.quantise_rows(k)
    wide = {name: scale.double() for name, scale in options.items()}
    if fp8:
        wide["q_scale"] = wide["q_scale"][some]
    want = reference.indexer_logits(q[some].double(), k.double(), weights[some], ends=ends[some], **wide)
    got = indexer_logits(q, k, weights, ends=ends, **options)[some]
    return measured(
        wrapped(queries, lambda: indexer_logits(q, k, weights, ends=ends, **options)),
        {"logits": error(got, want)},
        flop=indexer_flop(ends, heads),
        beside=beside,
    )


def topk_row(queries: int, keys: int, kind: str) -> Measurement:
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.topk import select_topk

    logits = torch.randn(queries, keys, device="cuda")
    ends = None
    if kind == "close":
        logits = 8 + logits / 10  # all in the same eighth of an octave, where the first digit tells little
    elif kind == "equal":
        logits.zero_()
    elif kind == "causal":
        ends = torch.arange(1, queries + 1, dtype=torch.int32, device="cuda") * (keys // queries)
    some = sampled(queries)
    got = select_topk(logits, TOPK, ends=ends)[some]
    want = reference.select_topk(logits[some], TOPK, ends=None if ends is None else ends[some])
    return measured(
        wrapped(queries, lambda: select_topk(logits, TOPK, ends=ends)),
        {"keys": float((got != want).double().mean())},
        bytes_read=4 * (logits.numel() if ends is None else int(ends.long().sum())),
        beside={"torch": Rival(wrapped(queries, lambda: torch.topk(logits, TOPK, sorted=False)))},
    )


def select_row(queries: int, keys: int) -> Measurement:
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.indexer_select import indexer_select

    q, k, weights, ends = indexer_inputs(queries, keys)
    some = sampled(queries)
    chosen = indexer_select(q, k, weights, TOPK, ends=ends)[some]
    logits = reference.indexer_logits(q[some].double(), k.double(), weights[some], ends=ends[some])
    found = reference.selection_agreement(logits, chosen, reference.select_topk(logits, TOPK), 1e-3)
    if not found.agrees:
        raise RuntimeError(f"selected keys differ by {found.worst_gap:.1e} in their logits")
    return measured(
        wrapped(queries, lambda: indexer_select(q, k, weights, TOPK, ends=ends)),
        {"keys": found.missed / found.expected},
        flop=indexer_flop(ends),
    )
