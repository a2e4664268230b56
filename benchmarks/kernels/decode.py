"""Time decode and dense attention beside FlashMLA and plain torch on the same inputs, and check against float64.

    python -m benchmarks.kernels_decode [--only SUBSTRING] [--flashmla LIBRARY] [--markdown FILE] [--jsonl FILE]

Needs a Hopper GPU. Decode calls are captured in a CUDA graph and replayed, as servers run them (rows "from the host"
are not); medians as in ``benchmarks.kernels``. Every request has the same length and its pages of 64 tokens lie
anywhere in the cache, unless said. Bytes are those of the cache that a call has to read once; TFLOP/s count pairs of
a query and a token it sees.

``--flashmla`` takes FlashMLA as torch operators, as there. Its schedule is made beforehand and is not in its time;
these kernels make theirs in every call. Its sparse decode takes FP8 rows alone and pads heads to 64 or 128.
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
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.kernels.sparse import ceilings, cosine_error, in_graph, median_ms

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE
PAGE = 64
TOPK = 2048
SCALE = WIDTH**-0.5
FLOP = 2 * (2 * RANK + ROPE)  # a pair of query and token, a head


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; ``error`` is 1 - cosine against float64 on a sample of requests or queries."""

    name: str
    ms: float
    terabytes: float
    tflops: float
    flashmla_ms: float | None
    torch_ms: float | None
    error: float


def measurements(beside: bool) -> Iterator[tuple[str, Callable[[str], Row]]]:
    """The name of each row and what measures it."""

    def decode(name: str, **case: Any) -> tuple[str, Callable[[str], Row]]:
        return name, functools.partial(decode_row, beside=beside, **case)

    for heads in (8, 16, 32, 64, 128):
        yield decode(f"decode, 128 x 8192, {heads} heads", batch=128, context=8192, heads=heads)
    yield decode("decode, 128 x 8192, 16 heads, 2 tokens", batch=128, context=8192, heads=16, tokens=2)
    yield decode("decode, 128 x 8192, 128 heads, 2 tokens", batch=128, context=8192, heads=128, tokens=2)
    yield decode("decode, 128 of 1 to 16384, 16 heads", batch=128, context=16384, heads=16, mixed=True)
    yield decode("decode, 128 of 1 to 16384, 128 heads", batch=128, context=16384, heads=128, mixed=True)
    for heads in (16, 128):
        yield decode(f"decode, 32 x 4096, {heads} heads", batch=32, context=4096, heads=heads)
        yield decode(f"decode, 1 x 32768, {heads} heads", batch=1, context=32768, heads=heads)
    yield decode("decode, 1 x 4096, 16 heads", batch=1, context=4096, heads=16)
    yield decode("decode, 1 x 4096, 16 heads, from the host", batch=1, context=4096, heads=16, graph=False)
    for heads in (16, 128):
        yield decode(
            f"decode, FP8 rows, 128 x 8192, {heads} heads", batch=128, context=8192, heads=heads, fp8=True
        )
    for batch in (8, 128):
        for heads in (16, 128):
            for fp8 in (False, True):
                kind = "FP8 rows" if fp8 else "bf16"
                yield decode(
                    f"sparse decode, {kind}, {batch} x {TOPK}, {heads} heads",
                    batch=batch,
                    context=8192,
                    heads=heads,
                    fp8=fp8,
                    sparse=True,
                )
    for heads in (16, 64, 128):
        yield (
            f"dense forward, 8192 causal, {heads} heads",
            functools.partial(dense_row, beside=beside, queries=8192, context=8192, heads=heads),
        )
    yield (
        "dense forward, 512 behind 32256, 128 heads",
        functools.partial(dense_row, beside=beside, queries=512, context=32768, heads=128),
    )


def decode_row(
    name: str,
    *,
    beside: bool,
    batch: int,
    context: int,
    heads: int,
    tokens: int = 1,
    mixed: bool = False,
    fp8: bool = False,
    sparse: bool = False,
    graph: bool = True,
) -> Row:
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
    ms = median_ms(wrap(lambda: decode_mla(q, held, **options)))

    sample = sorted({0, batch - 1})
    some = {key: x[sample] if isinstance(x, Tensor) else x for key, x in options.items()}
    want, _ = reference(q[sample].double(), held if fp8 else cache.double(), **some)
    error = cosine_error(decode_mla(q, held, **options)[0][sample], want)

    flashmla_ms = torch_ms = None
    if not (sparse or mixed or fp8):
        near = cache[table.long()].view(batch, context, WIDTH)
        torch_ms = median_ms(wrap(lambda: torch_decode(q, near)))
    if beside and sparse == fp8:
        try:
            other = flashmla_sparse(q, held, options) if sparse else flashmla_dense(q, cache, options)
            flashmla_ms = median_ms(wrap(other))
        except RuntimeError as error:
            print(f"{name}: no baseline, since FlashMLA says: {error}", file=sys.stderr)
        else:
            if (off := cosine_error(other()[sample][:, :, :heads], want)) > 1e-4:
                raise RuntimeError(f"{name}: FlashMLA's 1 - cosine is {off:.1e}, so it is no baseline")
    read = rows * (656 if fp8 else 2 * WIDTH)
    return Row(name, ms, read / ms / 1e9, seen * heads * FLOP / ms / 1e9, flashmla_ms, torch_ms, error)


def torch_decode(q: Tensor, near: Tensor) -> Tensor:
    """Two batched products around a float32 softmax on a contiguous cache: what one writes without a kernel."""
    batch, tokens, heads, _ = q.shape
    scores = torch.bmm(q.view(batch, -1, WIDTH), near.transpose(1, 2)).float() * SCALE
    return torch.bmm(scores.softmax(-1).to(q.dtype), near[..., :RANK]).view(batch, tokens, heads, RANK)


def flashmla_dense(q: Tensor, cache: Tensor, options: dict[str, Any]) -> Callable[[], Tensor]:
    run = torch.ops.sgl_kernel.dense_decode_fwd
    where = (options["cache_seqlens"], options["block_table"], SCALE, options["causal"])
    *_, schedule, splits = run(q, cache, RANK, *where, None, None)
    return lambda: run(q, cache, RANK, *where, schedule, splits)[0]


def flashmla_sparse(q: Tensor, rows: Tensor, options: dict[str, Any]) -> Callable[[], Tensor]:
    """With the heads padded to 64 or 128 beforehand, as it requires."""
    run = torch.ops.sgl_kernel.sparse_decode_fwd
    padded = q.new_zeros(*q.shape[:2], 64 if q.shape[2] <= 64 else 128, WIDTH)
    padded[:, :, : q.shape[2]] = q
    fixed = (padded, rows.view(torch.float8_e4m3fn), options["indices"], None, None)
    rest = (None, None, None, RANK, SCALE)
    *_, schedule, splits = run(*fixed, None, None, *rest)
    return lambda: run(*fixed, schedule, splits, *rest)[0]


def dense_row(name: str, *, beside: bool, queries: int, context: int, heads: int) -> Row:
    from mla_convert.runtime.kernels.dense_mla import dense_mla
    from mla_convert.runtime.reference import dense_mla as reference

    q = torch.randn(queries, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(context, WIDTH, device="cuda", dtype=torch.bfloat16)
    ms = median_ms(lambda: dense_mla(q, kv, SCALE, d_v=RANK))
    sample = torch.tensor([0, 1, queries // 3, queries - 1], device="cuda")
    ends = sample + context - queries + 1
    want, _ = reference(q[sample].double(), kv.double(), SCALE, ends=ends, d_v=RANK)
    error = cosine_error(dense_mla(q, kv, SCALE, d_v=RANK)[0][sample], want)
    flashmla_ms = None
    if beside:
        options = {
            "cache_seqlens": torch.tensor([context], device="cuda", dtype=torch.int32),
            "block_table": torch.arange(context // PAGE, device="cuda", dtype=torch.int32)[None],
            "causal": True,
        }
        other = flashmla_dense(q[None], kv.view(-1, PAGE, 1, WIDTH), options)
        flashmla_ms = median_ms(other)
        if (off := cosine_error(other()[0][sample], want)) > 1e-4:
            raise RuntimeError(f"{name}: FlashMLA's 1 - cosine is {off:.1e}, so it is no baseline")
    torch_ms = multi_head_ms(queries, heads) if queries == context else None
    pairs = sum(range(context - queries + 1, context + 1))
    return Row(
        name,
        ms,
        2 * context * WIDTH / ms / 1e9,
        pairs * heads * FLOP / ms / 1e9,
        flashmla_ms,
        torch_ms,
        error,
    )


def multi_head_ms(queries: int, heads: int) -> float:
    """torch's attention in the multi-head form (192 and 128 dims), keys and values expanded beforehand."""
    q, k = (torch.randn(1, heads, queries, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, heads, queries, 128, device="cuda", dtype=torch.bfloat16)
    return median_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def table(rows: list[Row], copy: float, gemm: float) -> str:
    """The results as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}."
        f" Ceilings: copy {copy:.2f} TB/s, bf16 8192³ product {gemm:.0f} TFLOP/s.",
        "",
        f"{RANK} + {ROPE} dims a token, pages of {PAGE} tokens in random places, bf16 unless said. Torch is two"
        " batched products on a contiguous cache, and for the dense forward its attention in the multi-head form"
        " (192 and 128 dims), keys and values expanded beforehand.",
        "",
        "| kernel | ms | TB/s | of copy | TFLOP/s | of product | FlashMLA ms | times FlashMLA | torch ms"
        " | 1 - cosine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        beside = ratio = torch_ms = ""
        if row.flashmla_ms is not None:
            beside, ratio = f"{row.flashmla_ms:.3f}", f"{row.flashmla_ms / row.ms:.2f}"
        if row.torch_ms is not None:
            torch_ms = f"{row.torch_ms:.3f}"
        lines.append(
            f"| {row.name} | {row.ms:.3f} | {row.terabytes:.2f} | {row.terabytes / copy:.0%} | {row.tflops:.0f}"
            f" | {row.tflops / gemm:.0%} | {beside} | {ratio} | {torch_ms} | {row.error:.1e} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels_decode", description=__doc__.split("\n\n")[0]
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
        print(f"benchmarks.kernels_decode: {reason}", file=sys.stderr)
        return 4
    if options.flashmla:
        torch.ops.load_library(str(options.flashmla))
    torch.manual_seed(0)
    copy, gemm = ceilings()
    rows = []
    for name, measure in measurements(options.flashmla is not None):
        if options.only in name:
            rows.append(measure(name))
            beside = f", FlashMLA {rows[-1].flashmla_ms:.3f}" if rows[-1].flashmla_ms else ""
            print(f"{name}: {rows[-1].ms:.3f} ms{beside}", file=sys.stderr, flush=True)
    text = table(rows, copy, gemm)
    print(text)
    if options.markdown:
        command = "python -m benchmarks.kernels_decode" + (
            f" --only '{options.only}'" if options.only else ""
        )
        command += f" --flashmla {options.flashmla.name}" if options.flashmla else ""
        options.markdown.write_text(
            f"# Decode and dense forward\n\n`{command}`\n\n{text}\n", encoding="utf-8"
        )
    if options.jsonl:
        lines = [json.dumps(asdict(row)) + "\n" for row in rows]
        options.jsonl.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
