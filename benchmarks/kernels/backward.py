"""Rows of the backward of sparse attention, and of the indexer's loss with its gradients, beside plain torch.

Shapes are those of the sparse forward. FLOP count five products of 576 or 512 dims a valid entry and head,
2 * (3 * 576 + 2 * 512). Errors are those of the gradients of the first 64 queries alone (of the loss: the last 64). The
loss has 64 indexer heads of 128 dims and 64 heads of attention, and FLOP count one product of the attention and four of
the indexer a key that a query sees. Over selected keys the log-sum-exp of the attention is given; over all it is not,
and the kernel multiplies twice. Its torch is the same function by torch's products, a chunk of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.common import (
    INDEXER_DIM,
    INDEXER_HEADS,
    RANK,
    SCALE,
    TOPK,
    WIDTH,
    Case,
    Goal,
    Measurement,
    Rival,
    cosine_error,
    measured,
)
from benchmarks.kernels.sparse import QUERIES, TOKENS, lists

BACKWARD_FLOP = 2 * (3 * WIDTH + 2 * RANK)  # a pair of query and token, a head
SAMPLE = 64
LOSS_QUERIES, LOSS_HEADS = 4096, 64


def cases() -> Iterator[Case]:
    def sparse(name: str, *goals: Goal, **case: Any) -> Case:
        return Case(f"sparse backward, {name}", partial(sparse_row, **case), goals)

    for heads in (64, 16, 128, 32):
        goals = [Goal(350, "TFLOP/s"), Goal(450, "TFLOP/s")] if heads == 64 else []
        yield sparse(f"{heads} heads", *goals, heads=heads)
    for heads in (64, 16, 128):
        yield sparse(f"{heads} heads, deterministic", heads=heads, deterministic=True)
    for heads in (16, 64):
        yield sparse(f"{heads} heads, causal lists", heads=heads, causal=True)
        yield sparse(f"{heads} heads, top-k 512", heads=heads, topk=512)
    yield sparse("64 heads, 512 queries", heads=64, queries=512)
    yield sparse("64 heads, top-k 1024", heads=64, topk=1024)
    yield sparse("64 heads, top-k 1024 in every second block of 64", heads=64, topk=1024, spread=True)
    for selected, deterministic in ((True, False), (True, True), (False, False)):
        over = f"top-k {TOPK}" if selected else f"all keys of {LOSS_QUERIES}, causal"
        name = f"indexer loss with gradients, {over}" + (", deterministic" if deterministic else "")
        yield Case(name, partial(loss_row, selected=selected, deterministic=deterministic))


def torch_backward(
    q: Tensor, kv: Tensor, indices: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather, five batched products, an addition by index: what one writes without a kernel."""
    dq, dkv = torch.empty_like(q), torch.zeros(kv.shape, device="cuda")
    for first in range(0, q.shape[0], 64):
        rows = slice(first, first + 64)
        chosen = indices[rows]
        keys = kv[chosen.clamp_min(0)]
        scores = torch.bmm(q[rows], keys.transpose(1, 2)).float() * SCALE
        p = (scores - lse[rows, :, None]).exp().masked_fill(chosen[:, None] < 0, 0)
        delta = (out[rows].float() * d_out[rows].float()).sum(-1, keepdim=True)
        ds = torch.bmm(d_out[rows], keys[..., :RANK].transpose(1, 2)).float() - delta
        ds = (p * ds * SCALE).to(q.dtype)
        dq[rows] = torch.bmm(ds, keys)
        part = torch.bmm(ds.transpose(1, 2), q[rows])
        part[..., :RANK] += torch.bmm(p.to(q.dtype).transpose(1, 2), d_out[rows])
        dkv.index_add_(0, chosen.clamp_min(0).flatten(), part.flatten(0, 1).float())
    return dq, dkv.to(kv.dtype)


def sparse_row(
    *,
    heads: int,
    queries: int = QUERIES,
    topk: int = TOPK,
    causal: bool = False,
    deterministic: bool = False,
    spread: bool = False,
) -> Measurement:
    """``spread``: the lists are twice as long, and every second block of 64 entries holds no valid one."""
    from mla_convert.runtime import backward, reference
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    q = torch.randn(queries, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
    indices = lists(queries, topk, causal)
    if spread:
        listed = indices.view(queries, -1, 1, 64)
        indices = torch.cat((torch.full_like(listed, -1), listed), dim=2).view(queries, 2 * topk)
    out, lse = sparse_mla(q, kv, indices, SCALE, d_v=RANK)
    d_out = torch.randn_like(out)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        dq, dkv, _ = sparse_mla_backward(
            q[rows], kv, indices[rows], SCALE, out[rows], lse[rows], d_out[rows], d_v=RANK,
            deterministic=deterministic,
        )  # fmt: skip
        return dq, dkv

    def run_torch(rows: slice) -> tuple[Tensor, Tensor]:
        return torch_backward(q[rows], kv, indices[rows], out[rows], lse[rows], d_out[rows])

    some = slice(0, SAMPLE)
    wide = (q[some].double(), kv.double(), indices[some], SCALE)
    exact = reference.sparse_mla(*wide, d_v=RANK)
    want = backward.sparse_mla_backward(*wide, *exact, d_out[some].double(), d_v=RANK)

    def errors(got: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {what: cosine_error(g, w) for what, g, w in zip(("dq", "dkv"), got, want[:2], strict=True)}

    return measured(
        lambda: run(slice(None)),
        errors(run(some)),
        flop=BACKWARD_FLOP * heads * int((indices >= 0).sum()),
        beside={"torch": Rival(lambda: run_torch(slice(None)), max(errors(run_torch(some)).values()))},
    )


def loss_row(*, selected: bool, deterministic: bool) -> Measurement:
    from mla_convert.runtime.indexer_loss import indexer_loss
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    queries, tokens = LOSS_QUERIES, TOKENS if selected else LOSS_QUERIES
    q = torch.randn(queries, LOSS_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device="cuda")
    index_q = torch.randn(queries, INDEXER_HEADS, INDEXER_DIM, dtype=torch.bfloat16, device="cuda")
    index_k = torch.randn(tokens, INDEXER_DIM, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(queries, INDEXER_HEADS, device="cuda") * (INDEXER_HEADS * INDEXER_DIM) ** -0.5
    limits: dict[str, Tensor] = {"ends": torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")}
    if selected:
        indices = lists(queries, TOPK, causal=False)
        limits = {"indices": indices, "lse": sparse_mla(q, kv, indices, SCALE, d_v=RANK)[1]}

    def run(rows: slice, *index: Tensor, kernels: bool) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (index[0][rows], index[1], index[2][rows])]
        main = [x.to(inputs[0].dtype) for x in (q[rows], kv)]
        options = {name: limit[rows] for name, limit in limits.items()}
        loss = indexer_loss(
            *inputs, *main, SCALE, reduction="sum", deterministic=deterministic, kernels=kernels, **options
        )
        return torch.autograd.grad(loss, inputs)

    index = (index_q, index_k, weights)
    wide = [x.double() for x in index]
    everything, some = slice(None), slice(queries - SAMPLE, queries)
    want = run(some, *wide, kernels=False)

    def errors(got: tuple[Tensor, ...]) -> dict[str, float]:
        return {what: cosine_error(g, w) for what, g, w in zip(("dq", "dk", "dw"), got, want, strict=True)}

    pairs = queries * TOPK if selected else queries * (queries + 1) // 2
    torch_error = max(errors(run(some, *index, kernels=False)).values())
    return measured(
        lambda: run(everything, *index, kernels=True),
        errors(run(some, *index, kernels=True)),
        flop=2 * (LOSS_HEADS * WIDTH + 4 * INDEXER_HEADS * INDEXER_DIM) * pairs,
        beside={"torch": Rival(lambda: run(everything, *index, kernels=False), torch_error)},
    )
