"""Dense attention of absorbed MLA: every query attends to a span of the cached tokens.

The programs are in ``_dense_few``, ``_dense_few_fp8``, ``_dense_many_blocks``, ``_dense_many_gather`` and
``_dense_plan``; here are ``dense_mla`` and the launch that it shares with ``decode_mla``.

Shapes: S queries, T tokens, H heads, E = d_v + rope (one cached token), B requests, N = B·S·H rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.checks import check_dense
from mla_convert.runtime.kernels import _dense_plan as programs
from mla_convert.runtime.kernels._common import (
    DTYPES,
    LOG2E,
    Argument,
    Signature,
    arguments,
    as_int32,
    compiled,
    launchable,
    launcher,
    multiprocessors,
    pad_features,
    planned,
    run_on,
    scale_problem,
    signature,
    unread,
)
from mla_convert.runtime.kernels._dense import BLOCK, PLAN_COLUMNS
from mla_convert.runtime.kernels._dense_few import few_rows
from mla_convert.runtime.kernels._dense_few_fp8 import MOST_COLUMNS as FP8_COLUMNS
from mla_convert.runtime.kernels._dense_few_fp8 import few_fp8_rows
from mla_convert.runtime.kernels._dense_many import TILE
from mla_convert.runtime.kernels._dense_many_blocks import many_rows_by_blocks
from mla_convert.runtime.kernels._dense_many_gather import many_rows_gathered

MAX_RANK = 512
MAX_WIDTH = 576
FEW = 32
"""Requests of up to this many rows have the tokens on the M side of the products."""
MOST_LANES = 12
SOME_PARTS, MANY_PARTS = 4, 24  # of an item, on average, from which on they are merged in other ways
SMALLEST_SHARE, SMALLEST_SHARE_OF_64 = 1, 2
"""Blocks that are worth a thread block: tiles of 64 rows cost more to merge."""
ALLOWANCE = 8
"""Blocks, at most a sixteenth, that a share of 64 rows may have above its equal part so that nothing is cut: parts and
their merge take as long."""
MOST_SCHEDULES = 4096  # that are kept

_schedules: dict[Hashable, Tensor] = {}


def dense_mla(
    q: Tensor,
    kv: Tensor,
    scale: float,
    *,
    rows_S: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    attn_sink: Tensor | None = None,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries to spans of the cached tokens, on a Hopper GPU.

    Query s sees the tokens from ``starts[s]`` (default 0) up to but not including ``ends[s]``; both are taken as
    if clipped to the T tokens there are. Default is causal attention of the last S tokens: ``ends[s]`` = T - S + s
    + 1. ``spans.causal_spans`` makes the spans of packed sequences. Neighbours
    with like spans share the work of fetching them, so keep the queries of a sequence together.

    Scores, softmax and both sums are float32; probabilities are rounded to the dtype of ``q`` before they meet
    the values. Two runs give equal bits; last bits depend on what else a call holds, which decides where the
    work is cut into parts. It carries no gradient.

    Args:
        q: [S, H, E] bfloat16 or float16, any number of heads.
        kv: [T, E] or [T, 1, E] in the dtype of q; the first ``d_v`` dims are the values as well.
        scale: Factor on the scores, positive.
        rows_S: Position of each query among the tokens: the same as ``ends`` = rows + 1.
        starts, ends: int32 or int64 [S].
        attn_sink: Logits [H] float32 that take a share of the softmax; ``lse`` stays as it is.
        d_v: 64, 128, … 512 with E - d_v in 0, 32, 64 … (E at most 576) run as they are; with S·H above 32 from 128
            and in 0, 64 … on. Other sizes are zero-padded to the next such in copies of q and kv.

    Returns:
        out [S, H, d_v] in q's dtype and the natural log-sum-exp [S, H] float32. A query that sees nothing gives 0
        and -inf. Tokens that no query of the call sees may be NaN.

    Raises:
        CannotError: A size, dtype or scale that the kernels do not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    kv = kv.squeeze(1) if kv.ndim == 3 else kv
    work = _plan(signature(q, kv, rows_S, starts, ends, attn_sink), d_v)
    if reason := scale_problem(scale):
        raise CannotError(f"The dense attention kernel cannot run: {reason}.")
    if work is None:
        queries, heads, _ = q.shape
        lse_SH = q.new_full((queries, heads), -torch.inf, dtype=torch.float32)
        return q.new_zeros(queries, heads, d_v), lse_SH

    if rows_S is not None:
        ends = rows_S + 1
    if starts is None and ends is None:
        spans = Spans(causal=True)
    else:
        if ends is None:
            tokens = work.capacity
            ends = torch.arange(
                tokens - work.queries_each + 1, tokens + 1, dtype=torch.int32, device=work.device
            )
        ends_S = launchable(as_int32(ends))
        starts_S = torch.zeros_like(ends_S) if starts is None else launchable(as_int32(starts))
        spans = Spans(starts_S=starts_S, ends_S=ends_S)
    if work.padded:
        q, kv = (pad_features(x, d_v, work.rank, work.rope) for x in (q, kv))
    out_NR, lse_N = run_on(work.device, attend, work, q, launchable(kv), None, spans, scale, attn_sink)
    out_SHR = out_NR.view(work.queries_each, work.heads, work.rank)
    lse_SH = lse_N.view(work.queries_each, work.heads)
    return (out_SHR if work.rank == d_v else out_SHR[..., :d_v].contiguous()), lse_SH


@planned
def _plan(known: Signature, d_v: int) -> Work | None:
    """For q, kv, rows_S, starts, ends and attn_sink; None if there is nothing to attend to."""
    q, kv, rows_S, starts, ends, attn_sink = arguments(known)
    check_dense(q, kv, rows_S, starts, ends, attn_sink, d_v)
    if reason := unsupported(q, d_v, 1.0):
        raise CannotError(f"The dense attention kernel cannot run: {reason}.")
    (queries, heads, _), tokens = q.shape, kv.shape[0]
    if not (queries and heads and tokens):
        return None
    return work_for(q, d_v, heads, 1, queries, page=tokens, capacity=tokens)


class Work(NamedTuple):
    """What the sizes of a call decide.

    Token p of request b, p < ``capacity``, is row ``table_BP[b, p // page] * page + p % page`` of the cache; without
    a table the request itself is the page.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    requests: int
    queries_each: int
    rows: int
    rank: int  # native sizes
    rope: int
    padded: bool
    fp8: bool  # rows of the cache are 656 bytes
    page: int
    capacity: int
    tile: int
    lanes: int  # tiles side by side
    items_each: int  # of a request
    items: int
    shares: int  # of the work
    plan: Callable[..., None]
    attend: Callable[..., None]
    combine: Callable[..., None] | None


def work_for(
    q: Argument,
    d_v: int,
    heads: int,
    requests: int,
    queries_each: int,
    *,
    page: int,
    capacity: int,
    table: bool = False,
    fp8: bool = False,
) -> Work:
    """How requests of so many queries each are shared out, and the kernels that attend to them."""
    rows_each = queries_each * heads
    rank, rope = native(rows_each, d_v, q.shape[-1] - d_v)
    tile, lanes, items_each, shares = tiling(rows_each, fp8, q.device)
    items = requests * items_each
    parts = "many" if items * MANY_PARTS <= shares else "some" if items * SOME_PARTS <= shares else "few"
    # Tiles of 64 rows fetch whole blocks where none crosses a page.
    blocks = tile == TILE and not fp8 and (not table or page % BLOCK == 0)
    return Work(
        q.device,
        q.dtype,
        heads,
        requests,
        queries_each,
        requests * rows_each,
        rank,
        rope,
        (rank, rope) != (d_v, q.shape[-1] - d_v),
        fp8,
        page,
        capacity,
        tile,
        lanes,
        items_each,
        items,
        shares,
        _entry("plan"),
        _entry("attend", tile, rank, rope, q.dtype, fp8, blocks, paired(rows_each, fp8)),
        _entry("combine", tile, rank, q.dtype, parts) if shares > 1 else None,
    )


class Spans(NamedTuple):  # a tuple, as one is made in every call
    """What each query of each request sees: [starts, ends) or all before the length; that is the capacity if not given.

    With ``causal`` the last query of a request sees its whole length and each query before it one token less.
    ``kept``: the schedule for the capacity is the same in many calls.
    """

    lengths_B: Tensor | None = None
    causal: bool = False
    kept: bool = False
    starts_S: Tensor | None = None
    ends_S: Tensor | None = None


def attend(
    work: Work,
    q: Tensor,
    rows_TE: Tensor,
    table_BP: Tensor | None,
    spans: Spans,
    scale: float,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Plan, attend, combine: rows of ``q`` [..., H, E], request by request, to out [N, rank] and lse [N].

    q and the cache's rows are of native sizes; the device is the current one.
    """
    rows, rank, device = work.rows, work.rank, work.device
    q_NE = launchable(q).view(rows, rank + work.rope)
    # Sizes one by one, as torch takes half a microsecond longer to read them from a tuple.
    part = torch.empty(2 * work.shares * work.lanes, work.tile, rank + 4, dtype=torch.float32, device=device)
    out_NR = torch.empty(rows, rank, dtype=work.dtype, device=device)
    lse_N = torch.empty(rows, dtype=torch.float32, device=device)
    has_sink = int(attn_sink is not None)
    sink_H = (
        unread(torch.float32, device, work.heads)
        if attn_sink is None
        else launchable(attn_sink.to(torch.float32))
    )
    values = scales = ropes = rows_TE
    if work.fp8:
        values, scales, ropes = (
            values.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
        )
    plan = schedule(work, spans)
    work.attend(
        q_NE,
        values,
        scales,
        ropes,
        plan[: work.requests]
        if table_BP is None
        else table_BP,  # has a line for each request, though none is read
        plan,
        int(table_BP is not None),
        work.page,
        work.items,
        work.shares,
        work.items_each,
        work.lanes,
        sink_H,
        has_sink,
        scale * LOG2E,
        out_NR,
        lse_N,
        part,
    )
    if work.combine is not None:
        work.combine(
            plan,
            part,
            sink_H,
            has_sink,
            work.items,
            work.shares,
            work.queries_each * work.heads,
            work.items_each,
            work.lanes,
            out_NR,
            lse_N,
        )
    return out_NR, lse_N


def schedule(work: Work, spans: Spans) -> Tensor:
    """The plan, int32 [lines, PLAN_COLUMNS]: made on the device in every call, unless it is kept.

    What is kept is never freed, since a captured graph may read it, and is made before any stream goes on.
    """
    requests, device, rows_item = work.requests, work.device, work.tile * work.lanes
    key = None
    if spans.kept:
        key = (
            requests,
            work.queries_each,
            spans.causal,
            work.capacity,
            work.heads,
            rows_item,
            work.items_each,
            work.shares,
            device,
        )
        if (kept := _schedules.get(key)) is not None:
            return kept
    if spans.ends_S is not None:
        assert spans.starts_S is not None
        use_lengths, lengths, starts, ends = 0, spans.ends_S, spans.starts_S, spans.ends_S
    else:
        use_lengths, lengths = 2, unread(torch.int32, device, 1)
        if spans.lengths_B is not None:
            use_lengths, lengths = 1, spans.lengths_B
        starts = ends = lengths
    lines = work.items + work.shares + 1 + requests * work.queries_each
    plan = torch.empty(lines, PLAN_COLUMNS, dtype=torch.int32, device=device)
    work.plan(
        lengths,
        starts,
        ends,
        use_lengths,
        int(spans.causal),
        work.heads,
        work.queries_each,
        rows_item,
        work.items_each,
        work.items,
        work.shares,
        work.capacity,
        SMALLEST_SHARE if work.tile < TILE else SMALLEST_SHARE_OF_64,
        0 if work.tile < TILE else ALLOWANCE,
        plan,
    )
    if key is not None and len(_schedules) < MOST_SCHEDULES and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
        _schedules[key] = plan
    return plan


@functools.cache
def _entry(what: str, *key: Any) -> Callable[..., None]:
    """What launches a kernel; looked up once, since the way there costs a small launch more than the launch."""
    builders: dict[str, Callable[..., Any]] = {
        "plan": plan_kernel,
        "attend": compile_for,
        "combine": combine_kernel,
    }
    return launcher(builders[what](*key))


@functools.cache
def tiling(rows_each: int, fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """For requests of so many rows: rows of a tile, tiles side by side, items of a request, and shares of the work."""
    tile = tile_rows(rows_each, fp8)
    lanes = lanes_of(-(-rows_each // tile))
    return tile, lanes, -(-rows_each // (tile * lanes)), max(multiprocessors(device) // lanes, 1)


def tile_rows(rows: int, fp8: bool = False) -> int:
    """The tile for requests of ``rows`` rows."""
    return TILE if rows > (FP8_COLUMNS if fp8 else FEW) else max(8, 1 << (rows - 1).bit_length())


def paired(rows: int, fp8: bool) -> bool:
    """Whether two thread blocks convert FP8 rows for each other: there are two that want the same ones."""
    return fp8 and lanes_of(-(-rows // TILE)) % 2 == 0


def lanes_of(tiles: int) -> int:
    """How many tiles of a request walk its tokens together: all of them, unless they are too many."""
    return tiles if tiles <= MOST_LANES else 4


def native(rows: int, d_v: int, rope: int) -> tuple[int, int]:
    """The sizes that the kernels run for ``d_v`` and ``rope``: multiples of 64 and of 32.

    In tiles of 64 rows, two warpgroups share the value dims, 64 of them each at least, and probabilities take the
    place of 64 rope dims.
    """
    if rows > FEW:
        return max(-(-d_v // 64) * 64, 128), -(-rope // 64) * 64
    return -(-d_v // 64) * 64, -(-rope // 32) * 32


def unsupported(q: Tensor | Argument, d_v: int, scale: float) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    if reason := scale_problem(scale):
        return reason
    if q.dtype not in DTYPES:
        return f"dtype {str(q.dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    rope = q.shape[-1] - d_v
    rank, padded = native(FEW + 1, d_v, rope)
    if rank > MAX_RANK or rank + padded > MAX_WIDTH:
        return f"{d_v} + {rope} dims a token, more than {MAX_RANK} for values or {MAX_WIDTH} in all"
    return None


def compile_for(
    tile: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    fp8: bool = False,
    blocks: bool = False,
    pair: bool = False,
) -> Any:
    """The attention kernel for a tile (8, 16, 32 or 64 rows) and native sizes; compiles without a GPU.

    For tiles of 64 rows, ``blocks`` is for 16-bit caches where no block of tokens crosses a page, and ``pair`` for FP8
    rows of an even number of tiles side by side.
    """
    name = DTYPES[dtype]
    if tile == TILE:
        if blocks:
            return compiled(
                ("dense by blocks", rank, rope, name),
                lambda: many_rows_by_blocks(rank, rope, name),
                insert_barriers=False,
            )
        return compiled(
            ("dense gathered", rank, rope, name, fp8, pair),
            lambda: many_rows_gathered(rank, rope, name, fp8, pair),
            insert_barriers=False,
        )
    if fp8:
        return compiled(("dense fp8", tile), lambda: few_fp8_rows(tile), insert_barriers=False)
    return compiled(("dense", tile, rank, rope, name), lambda: few_rows(tile, rank, rope, name))


def plan_kernel() -> Any:
    """The kernel that shares the work out."""
    return compiled("dense plan", programs.plan)


def combine_kernel(tile: int, rank: int, dtype: torch.dtype, parts: str) -> Any:
    """The kernel that merges the parts of what was cut: "few" of an item, "some" or "many"."""
    key = ("dense combine", tile, rank, dtype, parts)
    return compiled(key, lambda: programs.combine(tile, rank, DTYPES[dtype], parts), safe_access=False)
