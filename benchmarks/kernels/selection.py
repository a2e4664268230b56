"""Time the indexer's logits, top-k and the two together beside plain torch, and check each result.

    python -m benchmarks.kernels_selection [--only SUBSTRING] [--markdown FILE] [--jsonl FILE]

Needs a Hopper GPU. Times are medians over CUDA events as in ``benchmarks.kernels``; rows of few queries replay a
captured call, without what its launches cost the host. Keys of top-k must be exactly those of a stable sort, and
logits are compared with float64 on a sample of queries.
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

import torch
from torch import Tensor

from benchmarks.kernels.sparse import ceilings, cosine_error, in_graph, median_ms, torch_indexer

HEADS, DIM, TOPK = 64, 128, 2048
GRAPH_QUERIES = 256  # up to this many, calls are replayed from a graph


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``rate`` in ``unit``, ``share`` of the ceiling measured in the same run."""

    name: str
    ms: float
    rate: float
    unit: str
    share: float
    torch_ms: float | None
    error: float


def measurements(copy: float, gemm: float) -> Iterator[tuple[str, Callable[[str], Row]]]:
    """The name of each row and what measures it."""
    for keys in (8192, 32768):
        yield f"logits, bf16, {keys} x {keys} causal", functools.partial(logits_row, keys, keys, False, gemm)
        yield f"logits, fp8, {keys} x {keys} causal", functools.partial(logits_row, keys, keys, True, gemm)
    yield "logits, bf16, 1 x 131072", functools.partial(logits_row, 1, 131072, False, gemm)
    for queries, keys in ((4096, 32768), (4096, 131072), (64, 32768), (128, 131072), (1, 32768), (1, 131072)):
        yield f"top-k, {queries} x {keys}", functools.partial(topk_row, queries, keys, "normal", copy)
    yield "top-k, 4096 x 32768, close together", functools.partial(topk_row, 4096, 32768, "close", copy)
    yield "top-k, 4096 x 32768, all equal", functools.partial(topk_row, 4096, 32768, "equal", copy)
    yield "top-k, 4096 x 32768, causal", functools.partial(topk_row, 4096, 32768, "causal", copy)
    for queries, keys in ((32768, 32768), (4096, 131072), (1, 131072)):
        name = f"logits and top-k, bf16, the last {queries} of {keys} causal"
        yield name, functools.partial(select_row, queries, keys, gemm)


def wrapped(queries: int, call: Callable[[], object]) -> Callable[[], object]:
    return in_graph(call) if queries <= GRAPH_QUERIES else call


def indexer_inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(queries, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(keys, DIM, dtype=torch.bfloat16, device="cuda")
    ends = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device="cuda")
    return q, k, torch.randn(queries, HEADS, device="cuda"), ends


def logits_row(queries: int, keys: int, fp8: bool, gemm: float, name: str) -> Row:
    """Operations count the keys inside the ranges; FP8 is set against the bf16 product, too."""
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    q, k, weights, ends = indexer_inputs(queries, keys)
    torch_ms = None
    if queries <= 8192:
        torch_ms = median_ms(wrapped(queries, lambda: torch_indexer(q, k, weights, ends)))
    options: dict[str, Tensor] = {}
    if fp8:
        q, options["q_scale"] = reference.quantise_rows(q)
        k, options["k_scale"] = reference.quantise_rows(k)
    ms = median_ms(wrapped(queries, lambda: indexer_logits(q, k, weights, ends=ends, **options)))
    sample = torch.tensor(sorted({0, queries // 3, queries - 1}), device="cuda")
    wide = {name: scale.double() for name, scale in options.items()}
    if fp8:
        wide["q_scale"] = wide["q_scale"][sample]
    want = reference.indexer_logits(
        q[sample].double(), k.double(), weights[sample], ends=ends[sample], **wide
    )
    seen = ~want.isneginf()
    error = cosine_error(indexer_logits(q, k, weights, ends=ends, **options)[sample][seen], want[seen])
    rate = 2 * HEADS * DIM * int(ends.long().sum()) / ms / 1e9
    return Row(name, ms, rate, "TFLOP/s", rate / gemm, torch_ms, error)


def topk_row(queries: int, keys: int, kind: str, copy: float, name: str) -> Row:
    """Bytes are those of reading each logit once; ``error`` is the share of keys that are not the sort's."""
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.topk import select_topk

    logits = torch.randn(queries, keys, device="cuda")
    ends = None
    if kind == "close":
        logits = 8 + logits / 10
    elif kind == "equal":
        logits.zero_()
    elif kind == "causal":
        ends = torch.arange(1, queries + 1, dtype=torch.int32, device="cuda") * (keys // queries)
    ms = median_ms(wrapped(queries, lambda: select_topk(logits, TOPK, ends=ends)))
    torch_ms = median_ms(wrapped(queries, lambda: torch.topk(logits, TOPK, sorted=False)))
    sample = torch.tensor(sorted({0, queries // 3, queries - 1}), device="cuda")
    got = select_topk(logits, TOPK, ends=ends)[sample]
    want = reference.select_topk(logits[sample], TOPK, ends=None if ends is None else ends[sample])
    read = 4 * (logits.numel() if ends is None else int(ends.long().sum()))
    rate = read / ms / 1e9
    return Row(name, ms, rate, "TB/s", rate / (copy / 2), torch_ms, float((got != want).double().mean()))


def select_row(queries: int, keys: int, gemm: float, name: str) -> Row:
    """``error`` is the share of keys that a float64 selection has and this one has not."""
    from mla_convert.runtime import reference
    from mla_convert.runtime.kernels.indexer_select import indexer_select

    q, k, weights, ends = indexer_inputs(queries, keys)
    ms = median_ms(wrapped(queries, lambda: indexer_select(q, k, weights, TOPK, ends=ends)))
    sample = torch.tensor(sorted({0, queries // 3, queries - 1}), device="cuda")
    chosen = indexer_select(q, k, weights, TOPK, ends=ends)[sample]
    logits = reference.indexer_logits(q[sample].double(), k.double(), weights[sample], ends=ends[sample])
    expected = reference.select_topk(logits, TOPK)
    found = reference.selection_agreement(logits, chosen, expected, 1e-3)
    if not found.agrees:
        raise RuntimeError(f"{name}: selected keys differ by {found.worst_gap:.1e} in their logits")
    rate = 2 * HEADS * DIM * int(ends.long().sum()) / ms / 1e9
    return Row(name, ms, rate, "TFLOP/s", rate / gemm, None, found.missed / found.expected)


def table(rows: list[Row], copy: float, gemm: float) -> str:
    """The results as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}."
        f" Ceilings: copy {copy:.2f} TB/s, read plus written, bf16 8192³ product {gemm:.0f} TFLOP/s.",
        "",
        f"{HEADS} indexer heads of {DIM} dims, top-k {TOPK}. The ceiling is the bf16 product for TFLOP/s and, for TB/s,"
        " one reading of the logits at half the rate of the copy, which also writes.",
        "",
        "| | ms | rate | of ceiling | torch ms | times torch | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        beside = f"{row.torch_ms:.3f} | {row.torch_ms / row.ms:.1f}" if row.torch_ms else " | "
        rate = f"{row.rate:.2f}" if row.unit == "TB/s" else f"{row.rate:.0f}"
        lines.append(
            f"| {row.name} | {row.ms:.3f} | {rate} {row.unit} | {row.share:.0%} | {beside} | {row.error:.1e} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels_selection", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="run only rows whose name contains this")
    parser.add_argument("--markdown", type=Path, help="write the table, with the command, to this file")
    parser.add_argument("--jsonl", type=Path, help="write one JSON object a row to this file")
    options = parser.parse_args()

    from mla_convert.runtime.dispatch import available

    runs, reason = available("cuda")
    if not runs:
        print(f"benchmarks.kernels_selection: {reason}", file=sys.stderr)
        return 4
    torch.manual_seed(0)
    copy, gemm = ceilings()
    rows = []
    for name, measure in measurements(copy, gemm):
        if options.only in name:
            rows.append(measure(name))
            print(f"{name}: {rows[-1].ms:.3f} ms", file=sys.stderr, flush=True)
    text = table(rows, copy, gemm)
    print(text)
    if options.markdown:
        command = "python -m benchmarks.kernels_selection"
        command += f" --only '{options.only}'" if options.only else ""
        options.markdown.write_text(f"# Selection\n\n`{command}`\n\n{text}\n", encoding="utf-8")
    if options.jsonl:
        lines = [json.dumps(asdict(row)) + "\n" for row in rows]
        options.jsonl.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
