"""Rows of decode over a paged cache and over lists, beside FlashMLA and plain torch.

"128 x 8192" is 128 requests of 8192 tokens each, in pages of 64 tokens that lie anywhere in the cache. Calls replay
a CUDA graph, as servers run them; the one "from the host" does not. Bytes are those of the cache that a call has to
read once: 1152 a token in bf16 and 656 in FP8. FLOP count the pairs of a query and a token it sees. These kernels plan
in every call, and FlashMLA's schedule is made beforehand; beside lists of bf16 rows is its sparse prefill, since its
sparse decode takes FP8 rows alone. Torch is two batched products on a contiguous cache.
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
)

PAGE = 64
FP8_ROW, BF16_ROW = 656, 2 * WIDTH  # bytes a token

# By number of heads, for 128 requests of 8192 tokens in bf16: the bandwidth bounds few heads, the products many.
GOALS = {
    16: (Goal(0.75, "of copy"), Goal(0.85, "of copy")),
    128: (Goal(600, "TFLOP/s"), Goal(1, "x FlashMLA")),
}


def cases() -> Iterator[Case]:
    def decode(name: str, *goals: Goal, **case: Any) -> Case:
        return Case(f"decode, {name}", partial(decode_row, **case), goals)

    for heads in (16, 128, 8, 32, 64):
        name = f"128 x 8192, {heads} heads"
        yield decode(name, *GOALS.get(heads, ()), batch=128, context=8192, heads=heads)
    for heads in (16, 128):
        name = f"FP8 rows, 128 x 8192, {heads} heads"
        yield decode(name, batch=128, context=8192, heads=heads, fp8=True)
    for heads in (16, 128):
        yield decode(f"128 x 8192, {heads} heads, 2 tokens", batch=128, context=8192, heads=heads, tokens=2)
        yield decode(f"128 of 1 to 16384, {heads} heads", batch=128, context=16384, heads=heads, mixed=True)
        yield decode(f"32 x 4096, {heads} heads", batch=32, context=4096, heads=heads)
        yield decode(f"1 x 32768, {heads} heads", batch=1, context=32768, heads=heads)
    yield decode("1 x 4096, 16 heads", batch=1, context=4096, heads=16)
    yield decode("1 x 4096, 16 heads, from the host", batch=1, context=4096, heads=16, graph=False)
    for batch in (8, 128):
        for heads in (16, 64, 128):
            for fp8 in (False, True):
                name = f"sparse decode, {'FP8 rows' if fp8 else 'bf16'}, {batch} x {TOPK}, {heads} heads"
                case: dict[str, Any] = {
                    "batch": batch,
                    "context": 8192,
                    "heads": heads,
                    "fp8": fp8,
                    "sparse": True,
                }
                yield Case(name, partial(decode_row, **case))


def decode_row(
    *,
    batch: int,
    context: int,
    heads: int,
    tokens: int = 1,
    mixed: bool = False,
    fp8: bool = False,
    sparse: bool = False,
    graph: bool = True,
) -> Measurement:
    """``mixed``: lengths from 1 to ``context``; ``sparse``: lists of ``TOPK`` tokens anywhere in the cache."""
    from mla_convert.runtime.decode import decode_mla as reference
    from mla_convert.runtime.kernels.decode_mla import decode_mla
    from mla_convert.runtime.kv_cache import pack_fp8

    pages = batch * context // PAGE
    cache = torch.randn(pages, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    if mixed:
        lengths = torch.randint(1, context + 1, (batch,), device="cuda", dtype=torch.int32)
    q = torch.randn(batch, tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    held = pack_fp8(cache) if fp8 else cache
    options: dict[str, Any] = {"scale": SCALE, "d_v": RANK}
    if sparse:
        options["indices"] = torch.randint(0, pages * PAGE, (batch, tokens, TOPK), device="cuda").int()
        seen = batch * tokens * TOPK
        rows = seen
    else:
        options |= {"cache_seqlens": lengths, "block_table": table, "causal": tokens > 1}
        rows = int(lengths.sum())
        seen = rows * tokens - batch * tokens * (tokens - 1) // 2
    wrap = in_graph if graph else lambda call: call

    some = sorted({0, batch - 1})
    chosen = {key: x[some] if isinstance(x, Tensor) else x for key, x in options.items()}
    want, _ = reference(q[some].double(), held if fp8 else cache.double(), **chosen)

    beside: dict[str, Rival] = {}
    if not (sparse or mixed or fp8):
        near = cache[table.long()].view(batch, context, WIDTH)
        error = None if tokens > 1 else cosine_error(torch_decode(q[some], near[some]), want)
        beside["torch"] = Rival(wrap(lambda: torch_decode(q, near)), error)
    if sparse or not fp8:
        make = flashmla.sparse_decode if sparse else flashmla.dense_decode
        beside |= flashmla.rival(
            lambda: make(q, held, options), lambda out: cosine_error(out[some][:, :, :heads], want), wrap
        )
    return measured(
        wrap(lambda: decode_mla(q, held, **options)),
        {"out": cosine_error(decode_mla(q, held, **options)[0][some], want)},
        flop=FORWARD_FLOP * heads * seen,
        bytes_read=rows * (FP8_ROW if fp8 else BF16_ROW),
        beside=beside,
    )


def torch_decode(q: Tensor, near: Tensor) -> Tensor:
    """Two batched products around a float32 softmax: what one writes without a kernel. It masks no later token."""
    batch, tokens, heads, _ = q.shape
    scores = torch.bmm(q.view(batch, -1, WIDTH), near.transpose(1, 2)).float() * SCALE
    return torch.bmm(scores.softmax(-1).to(q.dtype), near[..., :RANK]).view(batch, tokens, heads, RANK)
