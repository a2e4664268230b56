"""Time the TileLang kernels beside plain torch on the same inputs, and check both against float64.

    python -m benchmarks.kernels [--only SUBSTRING] [--markdown FILE] [--jsonl FILE]

Needs a Hopper GPU. Times are the median over CUDA events, after warm-up, in one process; TFLOP/s count only the
entries that are valid. The two ceilings are measured first: a device-to-device copy (bytes read plus bytes
written) and a bf16 matrix product.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

RANK, ROPE = 512, 64
QUERIES, TOKENS, TOPK = 4096, 8192, 2048
INDEXER_HEADS, INDEXER_DIM, INDEXER_KEYS = 64, 128, 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; ``error`` is 1 - cosine against float64 on a sample of queries."""

    name: str
    ms: float
    tflops: float
    torch_ms: float
    ratio: float
    error: float
    torch_error: float


def median_ms(call: Callable[[], object], seconds: float = 0.1) -> float:
    """Median time of a call by CUDA events: two calls to warm up, then at least five, for about ``seconds``."""
    for _ in range(2):
        call()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds * 1e3 and len(times) < 100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Copy in TB/s and bf16 matrix product in TFLOP/s, measured here and now."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e9
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return copy, 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9


def cosine_error(got: Tensor, want: Tensor) -> float:
    got, want = got.double().flatten(), want.flatten()
    return 1 - float(2 * (got @ want) / (got @ got + want @ want))


def torch_sparse(q: Tensor, kv: Tensor, indices: Tensor, scale: float, chunk: int = 128) -> Tensor:
    """Gather, then two batched products around a float32 softmax: what one writes without a kernel."""
    outs = []
    for rows in range(0, q.shape[0], chunk):
        chosen = indices[rows : rows + chunk]
        keys = kv[chosen.clamp_min(0)]
        scores = torch.bmm(q[rows : rows + chunk], keys.transpose(1, 2)).float() * scale
        p = scores.masked_fill(chosen[:, None] < 0, -torch.inf).softmax(-1)
        outs.append(torch.bmm(p.to(q.dtype), keys[..., :RANK]))
    return torch.cat(outs)


def measurements() -> Iterator[tuple[str, Callable[[str], Row]]]:
    """The name of each row and what measures it."""
    for lists in ("full", "causal"):
        for heads in (16, 32, 64, 128):
            run = functools.partial(sparse_row, heads=heads, lists=lists)
            yield f"sparse forward, {heads} heads, {lists} lists", run
    keys = INDEXER_KEYS
    yield f"indexer logits, {INDEXER_HEADS} x {INDEXER_DIM}, {keys} x {keys} causal", indexer_row


def sparse_row(name: str, *, heads: int, lists: str) -> Row:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q = torch.randn(QUERIES, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(TOKENS, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    scores = torch.rand(QUERIES, TOKENS, device="cuda")
    if lists == "causal":  # the queries are the first positions: the first 2047 have short lists
        scores = scores.tril() - (scores == 0).int()
    picked = scores.topk(TOPK, sorted=False)
    indices = picked.indices.int().masked_fill(picked.values <= 0, -1)
    if lists == "causal":  # as a selection would leave them: valid entries first
        indices = indices.sort(dim=1, descending=True).values
    del scores, picked
    scale = (RANK + ROPE) ** -0.5
    ms = median_ms(lambda: sparse_mla(q, kv, indices, scale, d_v=RANK))
    torch_ms = median_ms(lambda: torch_sparse(q, kv, indices, scale))
    sample = torch.tensor([0, 1, 1500, QUERIES - 1], device="cuda")
    out = sparse_mla(q, kv, indices, scale, d_v=RANK)[0][sample]
    chosen = indices[sample]
    keys = kv[chosen.clamp_min(0)].double()
    logits = torch.einsum("shd,skd->shk", q[sample].double(), keys) * scale
    p = logits.masked_fill(chosen[:, None] < 0, -torch.inf).softmax(-1)
    want = torch.einsum("shk,skv->shv", p, keys[..., :RANK])
    flops = 2 * heads * (2 * RANK + ROPE) * int((indices >= 0).sum())
    return Row(
        name,
        ms,
        flops / ms / 1e9,
        torch_ms,
        torch_ms / ms,
        cosine_error(out, want),
        cosine_error(torch_sparse(q[sample], kv, chosen, scale), want),
    )


def torch_indexer(q: Tensor, k: Tensor, weights: Tensor, ends: Tensor, chunk: int = 512) -> Tensor:
    logits = torch.empty(q.shape[0], k.shape[0], device="cuda")
    keys = torch.arange(k.shape[0], device="cuda")
    for rows in range(0, q.shape[0], chunk):
        part = slice(rows, rows + chunk)
        scores = torch.einsum("sij,tj->sit", q[part], k).relu_()
        summed = torch.einsum("sit,si->st", scores, weights[part].to(q.dtype))
        logits[part] = summed.float().masked_fill_(keys >= ends[part, None], -torch.inf)
    return logits


def indexer_row(name: str) -> Row:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    heads, dim, keys = INDEXER_HEADS, INDEXER_DIM, INDEXER_KEYS
    q = torch.randn(keys, heads, dim, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(keys, dim, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(keys, heads, device="cuda")
    ends = torch.arange(1, keys + 1, dtype=torch.int32, device="cuda")
    ms = median_ms(lambda: indexer_logits(q, k, weights, ends=ends))
    torch_ms = median_ms(lambda: torch_indexer(q, k, weights, ends))
    sample = torch.tensor([5, 3000, keys - 1], device="cuda")
    scores = torch.einsum("sij,tj->sit", q[sample].double(), k.double()).relu()
    want = torch.einsum("sit,si->st", scores, weights[sample].double())
    seen = torch.arange(keys, device="cuda") < ends[sample, None]
    errors = [
        cosine_error(got[sample][seen], want[seen])
        for got in (indexer_logits(q, k, weights, ends=ends), torch_indexer(q, k, weights, ends))
    ]
    flops = 2 * heads * dim * int(ends.sum())
    return Row(name, ms, flops / ms / 1e9, torch_ms, torch_ms / ms, *errors)


def table(rows: list[Row], copy: float, gemm: float) -> str:
    """The results as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}."
        f" Ceilings: copy {copy:.2f} TB/s, bf16 8192³ product {gemm:.0f} TFLOP/s.",
        "",
        f"Sparse forward: {QUERIES} queries, {TOKENS} tokens, top-k {TOPK}, {RANK} + {ROPE} dims, bf16.",
        "",
        "| kernel | ms | TFLOP/s | of product | torch ms | times faster | 1 - cosine | torch's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.ms:.3f} | {row.tflops:.0f} | {row.tflops / gemm:.0%} | {row.torch_ms:.2f}"
            f" | {row.ratio:.1f} | {row.error:.1e} | {row.torch_error:.1e} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    parser.add_argument("--markdown", type=Path, help="write the table, with the command, to this file")
    parser.add_argument("--jsonl", type=Path, help="write one JSON object a row to this file")
    options = parser.parse_args()

    from mla_convert.runtime.dispatch import available

    runs, reason = available("cuda")
    if not runs:
        print(f"benchmarks.kernels: {reason}", file=sys.stderr)
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
        command = "python -m benchmarks.kernels" + (f" --only '{options.only}'" if options.only else "")
        options.markdown.write_text(f"# Kernels\n\n`{command}`\n\n{text}\n", encoding="utf-8")
    if options.jsonl:
        lines = [json.dumps(asdict(row)) + "\n" for row in rows]
        options.jsonl.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
