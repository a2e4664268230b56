"""Time the TileLang kernels beside plain torch on the same inputs, and check both against float64.

    python -m benchmarks.kernels [--only SUBSTRING] [--flashmla LIBRARY] [--markdown FILE] [--jsonl FILE]

Needs a Hopper GPU. Times are the median over CUDA events, after warm-up, in one process, of as many calls in a row
as take about a millisecond; rows "in a graph" replay a captured call, without what its launch costs the host.
TFLOP/s count only the entries that are valid. The two ceilings are measured first: a device-to-device copy (bytes
read plus bytes written) and a bf16 matrix product.

``--flashmla`` takes a shared library with FlashMLA's sparse prefill as a torch operator, such as
``flashmla_ops.abi3.so`` of the sglang-kernel 0.4.4 wheel. Its queries are padded to 64 or 128 heads beforehand.
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
from typing import Any

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
    flashmla_ms: float | None
    error: float
    torch_error: float


def median_ms(call: Callable[[], object], seconds: float = 0.1) -> float:
    """Median time of a call by CUDA events: two calls to warm up, then at least five samples for ``seconds``.

    A sample is the mean of calls in a row, as many as make up a millisecond.
    """
    call()
    once = _sample_ms(call, 1)
    calls = max(1, min(50, int(1 / once)))
    samples = max(5, min(50, int(seconds * 1e3 / (once * calls))))
    return statistics.median(_sample_ms(call, calls) for _ in range(samples))


def _sample_ms(call: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def in_graph(call: Callable[[], object]) -> Callable[[], object]:
    """The same call captured once, to be replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


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


def flashmla(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> Callable[[], Tensor]:
    """A call of FlashMLA's sparse prefill with the heads padded to 64 or 128, as it requires."""
    padded = q.new_zeros(q.shape[0], 64 if q.shape[1] <= 64 else 128, q.shape[2])
    padded[:, : q.shape[1]] = q
    run = torch.ops.sgl_kernel.sparse_prefill_fwd
    return lambda: run(padded, kv[:, None], indices[:, None], scale, RANK, None, None)[0]


def measurements(library: Path | None) -> Iterator[tuple[str, Callable[[str], Row]]]:
    """The name of each row and what measures it."""
    if library:
        torch.ops.load_library(str(library))

    def sparse(name: str, **case: Any) -> tuple[str, Callable[[str], Row]]:
        return name, functools.partial(sparse_row, beside=library is not None, **case)

    for heads in (8, 16, 20, 32, 40, 64, 96, 128):
        yield sparse(f"sparse forward, {heads} heads", heads=heads)
    for heads in (16, 64, 128):
        yield sparse(f"sparse forward, {heads} heads, causal lists", heads=heads, causal=True)
    for topk in (512, 1024):
        for heads in (16, 64, 128):
            yield sparse(f"sparse forward, {heads} heads, top-k {topk}", heads=heads, topk=topk)
    for heads, queries in (
        (16, 1),
        (16, 64),
        (64, 64),
        (128, 64),
        (16, 512),
        (128, 512),
        (16, 32768),
        (128, 32768),
    ):
        name = f"sparse forward, {heads} heads, {queries} quer{'y' if queries == 1 else 'ies'}"
        yield sparse(name, heads=heads, queries=queries)
        if queries <= 64:
            yield sparse(f"{name}, in a graph", heads=heads, queries=queries, graph=True)
    keys = INDEXER_KEYS
    yield f"indexer logits, {INDEXER_HEADS} x {INDEXER_DIM}, {keys} x {keys} causal", indexer_row


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
    name: str,
    *,
    beside: bool,
    heads: int,
    queries: int = QUERIES,
    topk: int = TOPK,
    causal: bool = False,
    graph: bool = False,
) -> Row:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q = torch.randn(queries, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(TOKENS, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    indices = lists(queries, topk, causal)
    scale = (RANK + ROPE) ** -0.5
    wrap = in_graph if graph else lambda call: call
    ms = median_ms(wrap(lambda: sparse_mla(q, kv, indices, scale, d_v=RANK)))
    torch_ms = median_ms(wrap(lambda: torch_sparse(q, kv, indices, scale)))
    sample = torch.tensor(sorted({0, min(1, queries - 1), queries // 3, queries - 1}), device="cuda")
    chosen = indices[sample]
    keys = kv[chosen.clamp_min(0)].double()
    logits = torch.einsum("shd,skd->shk", q[sample].double(), keys) * scale
    p = logits.masked_fill(chosen[:, None] < 0, -torch.inf).softmax(-1)
    want = torch.einsum("shk,skv->shv", p, keys[..., :RANK])
    flashmla_ms = None
    if beside:
        other = flashmla(q, kv, indices, scale)
        flashmla_ms = median_ms(wrap(other))
        if (error := cosine_error(other()[sample][:, :heads], want)) > 1e-4:
            raise RuntimeError(f"{name}: FlashMLA's 1 - cosine is {error:.1e}, so it is no baseline")
    flops = 2 * heads * (2 * RANK + ROPE) * int((indices >= 0).sum())
    return Row(
        name,
        ms,
        flops / ms / 1e9,
        torch_ms,
        flashmla_ms,
        cosine_error(sparse_mla(q, kv, indices, scale, d_v=RANK)[0][sample], want),
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
    return Row(name, ms, flops / ms / 1e9, torch_ms, None, *errors)


def table(rows: list[Row], copy: float, gemm: float) -> str:
    """The results as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}."
        f" Ceilings: copy {copy:.2f} TB/s, bf16 8192³ product {gemm:.0f} TFLOP/s.",
        "",
        f"Sparse forward: {QUERIES} queries, {TOKENS} tokens, top-k {TOPK}, {RANK} + {ROPE} dims, bf16, all entries"
        " valid, unless said.",
        "",
        "| kernel | ms | TFLOP/s | of product | FlashMLA ms | times FlashMLA | torch ms | times torch | 1 - cosine"
        " | torch's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        beside, ratio = "", ""
        if row.flashmla_ms is not None:
            beside, ratio = f"{row.flashmla_ms:.3f}", f"{row.flashmla_ms / row.ms:.2f}"
        lines.append(
            f"| {row.name} | {row.ms:.3f} | {row.tflops:.0f} | {row.tflops / gemm:.0%} | {beside} | {ratio}"
            f" | {row.torch_ms:.2f} | {row.torch_ms / row.ms:.1f} | {row.error:.1e} | {row.torch_error:.1e} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    parser.add_argument(
        "--flashmla", type=Path, help="FlashMLA as a library of torch operators, to time beside"
    )
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
    for name, measure in measurements(options.flashmla):
        if options.only in name:
            rows.append(measure(name))
            beside = f", FlashMLA {rows[-1].flashmla_ms:.3f}" if rows[-1].flashmla_ms else ""
            print(f"{name}: {rows[-1].ms:.3f} ms{beside}", file=sys.stderr, flush=True)
    text = table(rows, copy, gemm)
    print(text)
    if options.markdown:
        command = "python -m benchmarks.kernels" + (f" --only '{options.only}'" if options.only else "")
        command += f" --flashmla {options.flashmla.name}" if options.flashmla else ""
        options.markdown.write_text(f"# Kernels\n\n`{command}`\n\n{text}\n", encoding="utf-8")
    if options.jsonl:
        lines = [json.dumps(asdict(row)) + "\n" for row in rows]
        options.jsonl.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
