"""Time the backward pass of sparse attention and the indexer's loss beside plain torch, and check them in float64.

    python -m benchmarks.kernels_backward [--only SUBSTRING] [--markdown FILE] [--jsonl FILE]

Needs a Hopper GPU. Times are medians as in ``benchmarks.kernels``. TFLOP/s count five products of 576 or 512 dims a
valid entry and head, 2 * (3 * 576 + 2 * 512). Errors are 1 - cosine of dq and dkv for the first ``SAMPLE`` queries
alone, against float64 from the same inputs. For the indexer's loss they are those of its gradients to q and k, and
no rate is given.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.sparse import (
    INDEXER_DIM,
    INDEXER_HEADS,
    QUERIES,
    RANK,
    ROPE,
    TOKENS,
    TOPK,
    ceilings,
    cosine_error,
    lists,
    median_ms,
)

SAMPLE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    ms: float
    tflops: float | None
    torch_ms: float | None
    error_q: float
    error_k: float


def measurements() -> Iterator[tuple[str, Callable[[str], Row]]]:
    """The name of each row and what measures it."""

    def sparse(name: str, **case: Any) -> tuple[str, Callable[[str], Row]]:
        return f"sparse backward, {name}", functools.partial(sparse_row, **case)

    for heads in (16, 32, 64, 128):
        yield sparse(f"{heads} heads", heads=heads)
    for heads in (16, 64):
        yield sparse(f"{heads} heads, deterministic", heads=heads, deterministic=True)
        yield sparse(f"{heads} heads, causal lists", heads=heads, causal=True)
        yield sparse(f"{heads} heads, top-k 512", heads=heads, topk=512)
    yield sparse("64 heads, 512 queries", heads=64, queries=512)
    for selected in (True, False):
        over = f"top-k {TOPK}" if selected else f"all keys of {LOSS_QUERIES}, causal"
        yield f"indexer loss with gradients, {over}", functools.partial(loss_row, selected=selected)


def torch_backward(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather, five batched products, an addition by index: what one writes without a kernel."""
    dq, dkv = torch.empty_like(q), torch.zeros(kv.shape, device="cuda")
    for first in range(0, q.shape[0], 64):
        rows = slice(first, first + 64)
        chosen = indices[rows]
        keys = kv[chosen.clamp_min(0)]
        scores = torch.bmm(q[rows], keys.transpose(1, 2)).float() * scale
        p = (scores - lse[rows, :, None]).exp().masked_fill(chosen[:, None] < 0, 0)
        delta = (out[rows].float() * d_out[rows].float()).sum(-1, keepdim=True)
        ds = torch.bmm(d_out[rows], keys[..., :RANK].transpose(1, 2)).float() - delta
        ds = (p * ds * scale).to(q.dtype)
        dq[rows] = torch.bmm(ds, keys)
        part = torch.bmm(ds.transpose(1, 2), q[rows])
        part[..., :RANK] += torch.bmm(p.to(q.dtype).transpose(1, 2), d_out[rows])
        dkv.index_add_(0, chosen.clamp_min(0).flatten(), part.flatten(0, 1).float())
    return dq, dkv.to(kv.dtype)


def sparse_row(
    name: str,
    *,
    heads: int,
    queries: int = QUERIES,
    topk: int = TOPK,
    causal: bool = False,
    deterministic: bool = False,
) -> Row:
    from mla_convert.runtime import backward, reference
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    q = torch.randn(queries, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(TOKENS, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    indices = lists(queries, topk, causal)
    scale = (RANK + ROPE) ** -0.5
    out, lse = sparse_mla(q, kv, indices, scale, d_v=RANK)
    d_out = torch.randn_like(out)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        dq, dkv, _ = sparse_mla_backward(
            q[rows], kv, indices[rows], scale, out[rows], lse[rows], d_out[rows], d_v=RANK,
            deterministic=deterministic,
        )  # fmt: skip
        return dq, dkv

    ms = median_ms(lambda: run(slice(None)))
    torch_ms = median_ms(lambda: torch_backward(q, kv, indices, scale, out, lse, d_out), seconds=0)
    some = slice(0, SAMPLE)
    wide = (q[some].double(), kv.double(), indices[some], scale)
    exact = reference.sparse_mla(*wide, d_v=RANK)
    want = backward.sparse_mla_backward(*wide, *exact, d_out[some].double(), d_v=RANK)
    errors = [cosine_error(g, w) for g, w in zip(run(some), want[:2], strict=True)]
    flops = 2 * heads * (3 * (RANK + ROPE) + 2 * RANK) * int((indices >= 0).sum())
    return Row(name, ms, flops / ms / 1e9, torch_ms, *errors)


LOSS_QUERIES, LOSS_HEADS = 4096, 64


def loss_row(name: str, *, selected: bool) -> Row:
    from mla_convert.runtime.indexer_loss import indexer_loss

    queries, tokens = LOSS_QUERIES, TOKENS if selected else LOSS_QUERIES
    q = torch.randn(queries, LOSS_HEADS, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(tokens, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    index_q = torch.randn(queries, INDEXER_HEADS, INDEXER_DIM, dtype=torch.bfloat16, device="cuda")
    index_k = torch.randn(tokens, INDEXER_DIM, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(queries, INDEXER_HEADS, device="cuda") * (INDEXER_HEADS * INDEXER_DIM) ** -0.5
    indices = lists(queries, TOPK, causal=False) if selected else None
    ends = None if selected else torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")

    def run(rows: slice, *index: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (index[0][rows], index[1], index[2][rows])]
        main = [x.to(inputs[0].dtype) for x in (q[rows], kv)]
        limits = {"ends": None if ends is None else ends[rows]}
        if indices is not None:
            limits["indices"] = indices[rows]
        loss = indexer_loss(*inputs, *main, (RANK + ROPE) ** -0.5, reduction="sum", **limits)
        return torch.autograd.grad(loss, inputs)

    index = (index_q, index_k, weights)
    ms = median_ms(lambda: run(slice(None), *index), seconds=0)
    some = slice(queries - SAMPLE, queries)
    want = run(some, *(x.double() for x in index))
    errors = [cosine_error(g, w) for g, w in zip(run(some, *index)[:2], want[:2], strict=True)]
    return Row(name, ms, None, None, *errors)


def table(rows: list[Row], copy: float, gemm: float) -> str:
    """The results as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}."
        f" Ceilings: copy {copy:.2f} TB/s, bf16 8192³ product {gemm:.0f} TFLOP/s.",
        "",
        f"{QUERIES} queries, {TOKENS} tokens, top-k {TOPK}, {RANK} + {ROPE} dims, bf16, all entries valid, unless"
        f" said. Loss: {INDEXER_HEADS} indexer heads x {INDEXER_DIM}, {LOSS_HEADS} heads of attention.",
        "",
        "| what | ms | TFLOP/s | of product | torch ms | times torch | 1 - cosine of dq | of dkv |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = ("", "") if row.tflops is None else (f"{row.tflops:.0f}", f"{row.tflops / gemm:.0%}")
        beside = ("", "") if row.torch_ms is None else (f"{row.torch_ms:.1f}", f"{row.torch_ms / row.ms:.1f}")
        cells = (row.name, f"{row.ms:.2f}", *rate, *beside, f"{row.error_q:.1e}", f"{row.error_k:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels_backward", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    parser.add_argument("--markdown", type=Path, help="write the table, with the command, to this file")
    parser.add_argument("--jsonl", type=Path, help="write one JSON object a row to this file")
    options = parser.parse_args()

    from mla_convert.runtime.dispatch import available

    runs, reason = available("cuda")
    if not runs:
        print(f"benchmarks.kernels_backward: {reason}", file=sys.stderr)
        return 4
    torch.manual_seed(0)
    copy, gemm = ceilings()
    rows = []
    for name, measure in measurements():
        if options.only in name:
            rows.append(measure(name))
            print(f"{name}: {rows[-1].ms:.3f} ms", file=sys.stderr, flush=True)
    text = table(rows, copy, gemm)
    print(text)
    if options.markdown:
        command = "python -m benchmarks.kernels_backward" + (
            f" --only '{options.only}'" if options.only else ""
        )
        options.markdown.write_text(f"# Backward\n\n`{command}`\n\n{text}\n", encoding="utf-8")
    if options.jsonl:
        lines = [json.dumps(asdict(row)) + "\n" for row in rows]
        options.jsonl.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
