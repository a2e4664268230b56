"""Sparse attention of absorbed MLA: every query attends to the tokens on its own list.

The programs are in ``_sparse_mla`` and the modules beside it; here is what a caller needs. Three of them attend: one
for many queries of up to 8 heads, one for up to 32 heads, neither of which pads the heads to the 64 rows of a matrix
instruction, and one for tiles of 64. With few queries, several thread blocks share a list (``parts``) and another
program merges their results.

Shapes: S queries, T tokens, H heads, E = d_v + rope (one cached token), K entries on a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.checks import check_sparse
from mla_convert.runtime.kernels import _sparse_mla as programs
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
from mla_convert.runtime.kernels._sparse_mla_few import few_heads
from mla_convert.runtime.kernels._sparse_mla_many import many_heads
from mla_convert.runtime.kernels._sparse_mla_pairs import HEADS, PAIRS, pair_heads

MAX_RANK = 512
MAX_WIDTH = 576
FEW = 32  # up to so many heads are the columns of a product
PAIRED = HEADS  # up to so many heads, and given queries enough, pairs of warps have queries of their own


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    *,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries to the cached tokens listed for each, on a Hopper GPU.

    Scores, softmax and both sums are float32; probabilities are rounded to the dtype of ``q`` before they
    meet the values. The result does not depend on timing (two runs give equal bits), but its last bits depend on
    how many queries one call has, which decides whether lists are split. It carries no gradient.

    Args:
        q: [S, H, E] bfloat16 or float16, any number of heads, which are never padded in memory.
        kv: [T, E] or [T, 1, E] in the dtype of q; the first ``d_v`` dims are the values as well.
        indices: [S, K] or [S, 1, K], int32 or int64 (converted once), any K. Entry j of a query counts if
            0 <= index < T and j < topk_length; a token listed twice counts twice.
        scale: Factor on the scores, positive.
        topk_length: How many entries of each query to read, int [S]; None reads all.
        attn_sink: Logits [H] float32 that take a share of the softmax; ``lse`` stays as it is.
        d_v: 64, 128, … 512 with E - d_v in 0, 32, 64 … (E at most 576) run as they are; more than 32 heads from
            128 and in 0, 64 … on. Other sizes are zero-padded to the next such in copies of q and kv, which is
            meant for tiny models.

    Returns:
        out [S, H, d_v] in q's dtype and the natural log-sum-exp [S, H] float32. A query without valid entries
        gives 0 and -inf. A token that is not listed affects nothing, NaN or not.

    Raises:
        CannotError: A size, dtype or scale that the kernels do not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    kv = kv.squeeze(1) if kv.ndim == 3 else kv
    indices = indices.squeeze(1) if indices.ndim == 3 else indices
    plan = _plan(signature(q, kv, indices, topk_length, attn_sink), d_v)
    if reason := scale_problem(scale):
        raise CannotError(f"The sparse attention kernel cannot run: {reason}.")
    if plan is None:
        queries, heads, _ = q.shape
        lse_SH = q.new_full((queries, heads), -torch.inf, dtype=torch.float32)
        return q.new_zeros(queries, heads, d_v), lse_SH

    return attend(plan, q, kv, indices, topk_length, attn_sink, scale, d_v)


class _Share(NamedTuple):
    """Some queries of a call, and the launch or two that attend to their lists: what ``_share`` decides."""

    queries: slice
    rows: int  # of results: a part of a list for each query, ``parts`` of them
    parts: int
    grid: int
    attend: Callable[..., None]
    merge: Callable[..., None] | None  # where parts share a list
    whole: int = 0  # up to ``FEW`` heads: how many queries go first, whose lists have one part


class Plan(NamedTuple):
    """What the sizes of a call decide."""

    device: torch.device
    dtype: torch.dtype
    queries: int
    heads: int
    tokens: int
    rank: int
    rope: int
    padded: bool
    shares: tuple[_Share, ...]


@planned
def _plan(known: Signature, d_v: int) -> Plan | None:
    """For q, kv, indices, topk_length and attn_sink; None if there is nothing to attend to."""
    q, kv, indices, topk_length, attn_sink = arguments(known)
    check_sparse(q, kv, indices, topk_length, attn_sink, d_v)
    if reason := unsupported(q, d_v, 1.0):
        raise CannotError(f"The sparse attention kernel cannot run: {reason}.")
    return plan_for(q, kv.shape[0], indices.shape[1], d_v)


def plan_for(q: Argument, tokens: int, entries: int, d_v: int) -> Plan | None:
    """How queries [S, H, E] and their lists are shared out; None if there is nothing to attend to."""
    queries, heads, width = q.shape
    if not (queries and heads and tokens and entries):
        return None
    rank, rope = native(heads, d_v, width - d_v)
    whole, parts, rest_parts = _division(
        queries, heads, -(-entries // programs.BLOCK), multiprocessors(q.device)
    )
    if heads <= FEW:
        shares = [_few(queries, whole if parts == 1 else 0, max(parts, rest_parts), heads, rank, rope, q)]
    else:
        shares = [_share(slice(0, whole), parts, heads, rank, rope, q)]
    if shares[0].queries.stop < queries:
        shares.append(_share(slice(whole, queries), rest_parts, heads, rank, rope, q))
    return Plan(
        q.device,
        q.dtype,
        queries,
        heads,
        tokens,
        rank,
        rope,
        (rank, rope) != (d_v, width - d_v),
        tuple(shares),
    )


def _share(rows: slice, parts: int, heads: int, rank: int, rope: int, q: Argument) -> _Share:
    """How ``rows`` are attended to, ``parts`` thread blocks a list."""
    queries = rows.stop - rows.start
    return _Share(
        rows,
        queries * parts,
        parts,
        min(queries * parts * _tiles(heads), multiprocessors(q.device)),
        _entry("attend", heads, rank, rope, q.dtype, parts > 1),
        _entry("combine", rank, q.dtype) if parts > 1 else None,
    )


def _few(queries: int, whole: int, parts: int, heads: int, rank: int, rope: int, q: Argument) -> _Share:
    """The same for up to ``FEW`` heads, where one launch takes ``whole`` lists and, of the others, ``parts`` parts."""
    rows, width = (queries - whole) * parts, multiprocessors(q.device)
    return _Share(
        slice(0, queries),
        rows,
        parts,
        min(whole + rows, width),
        _entry("pairs", rank, rope, q.dtype)
        if _paired(heads, queries, width)
        else _entry("attend", heads, rank, rope, q.dtype, False),
        _entry("combine", rank, q.dtype) if rows else None,
        whole,
    )


def attend(
    plan: Plan,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    """Queries [S, H, E] to the tokens [T, E] of their lists [S, K], as ``plan_for`` has planned it."""
    if plan.padded:
        q, kv = (pad_features(x, d_v, plan.rank, plan.rope) for x in (q, kv))
    q, kv = launchable(q), launchable(kv)
    indices = launchable(as_int32(indices))
    limits_S = None if topk_length is None else launchable(as_int32(topk_length))
    sink_H = None if attn_sink is None else launchable(attn_sink.to(torch.float32))
    out_SHR, lse_SH = run_on(plan.device, _launch, plan, q, kv, indices, limits_S, sink_H, scale)
    return (out_SHR if plan.rank == d_v else out_SHR[..., :d_v].contiguous()), lse_SH


def _launch(
    plan: Plan,
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    limits_S: Tensor | None,
    sink_H: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run the kernels on tensors of native sizes, all of them packed, on the current device."""
    queries, heads, device = plan.queries, plan.heads, plan.device
    # Sizes one by one, here and below: torch takes half a microsecond longer to read them from a tuple.
    out_SHR = torch.empty(queries, heads, plan.rank, dtype=plan.dtype, device=device)
    lse_SH = torch.empty(queries, heads, dtype=torch.float32, device=device)
    has_sink = int(sink_H is not None)
    sink_H = unread(torch.float32, device, heads) if sink_H is None else sink_H
    for share in plan.shares:
        q, lists, limits, out, lse = q_SHE, indices_SK, limits_S, out_SHR, lse_SH
        if len(plan.shares) > 1:
            q, lists, out, lse = (x[share.queries] for x in (q, lists, out, lse))
            limits = None if limits is None else limits[share.queries]
        many = _attend if share.merge is None else _attend_in_parts
        attend = _attend_few if plan.heads <= FEW else many
        attend(share, plan, q, kv_TE, lists, limits, sink_H, has_sink, scale * LOG2E, out, lse)
    return out_SHR, lse_SH


def _attend(
    share: _Share,
    plan: Plan,
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    limits_S: Tensor | None,
    sink_H: Tensor,
    has_sink: int,
    scale: float,
    out_SHR: Tensor,
    lse_SH: Tensor,
) -> None:
    """One launch, whose producers find where the lists end."""
    limits = unread(torch.int32, plan.device, 0) if limits_S is None else limits_S
    share.attend(q_SHE, kv_TE, indices_SK, limits, share.grid, 1, sink_H, has_sink, scale, out_SHR, lse_SH)


def _attend_in_parts(
    share: _Share,
    plan: Plan,
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    limits_S: Tensor | None,
    sink_H: Tensor,
    has_sink: int,
    scale: float,
    out_SHR: Tensor,
    lse_SH: Tensor,
) -> None:
    """Two launches: the attention by several thread blocks a list, and the merge of their results."""
    # Log-sum-exp and values in one tensor: an allocation takes the host a third of a launch.
    part_PHR = torch.empty(share.rows, plan.heads, plan.rank + 4, dtype=torch.float32, device=plan.device)
    limits = unread(torch.int32, plan.device, 0) if limits_S is None else limits_S
    assert share.merge is not None
    share.attend(
        q_SHE,
        kv_TE,
        indices_SK,
        limits,
        share.grid,
        share.parts,
        sink_H,
        0,
        scale,
        part_PHR,
        lse_SH,
    )
    share.merge(part_PHR, sink_H, has_sink, share.parts, out_SHR, lse_SH)


def _attend_few(
    share: _Share,
    plan: Plan,
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    limits_S: Tensor | None,
    sink_H: Tensor,
    has_sink: int,
    scale: float,
    out_SHR: Tensor,
    lse_SH: Tensor,
) -> None:
    """The launch of up to ``FEW`` heads, and the merge if there are lists in parts."""
    if share.merge is None:
        part_PHR = unread(torch.float32, plan.device, 1, plan.heads, plan.rank + 4)
    else:
        part_PHR = torch.empty(share.rows, plan.heads, plan.rank + 4, dtype=torch.float32, device=plan.device)
    limits = unread(torch.int32, plan.device, 0) if limits_S is None else limits_S
    whole = share.whole
    share.attend(
        q_SHE,
        kv_TE,
        indices_SK,
        limits,
        share.grid,
        whole,
        share.parts,
        sink_H,
        has_sink,
        scale,
        out_SHR,
        lse_SH,
        part_PHR,
    )
    if share.merge is not None:
        out, lse = (out_SHR[whole:], lse_SH[whole:]) if whole else (out_SHR, lse_SH)
        share.merge(part_PHR, sink_H, has_sink, share.parts, out, lse)


def _division(queries: int, heads: int, blocks: int, multiprocessors: int) -> tuple[int, int, int]:
    """How many queries go first, the thread blocks that share a list of theirs, and of the rest's.

    4096 queries of 64 heads on 132 multiprocessors are 31 for each and 4 over, which would keep 4 of them busy for
    as long again as one list takes. Sharing those lists costs two launches more, about eight blocks of 64 keys; up
    to ``FEW`` heads, the merge alone, since the parts are items of the same launch.
    """
    tiles, few = _tiles(heads), heads <= FEW
    rows = queries * tiles
    parts = _parts(rows, blocks, multiprocessors, few)
    over = rows % multiprocessors
    if few:
        takers = multiprocessors * (PAIRS if _paired(heads, queries, multiprocessors) else 1)
        over = queries % takers
        if parts == 1 and over and queries > takers:
            shared = min(blocks, takers // over)
            if blocks - -(-blocks // shared) > 6:
                return queries - over, 1, shared
    elif over and over % tiles == 0 and rows > multiprocessors:
        shared = _parts(over, blocks, multiprocessors)
        apart = (
            _cost(rows - over, blocks, multiprocessors, 1) + _cost(over, blocks, multiprocessors, shared) + 8
        )
        if shared > 1 and apart < _cost(rows, blocks, multiprocessors, parts):
            return queries - over // tiles, 1, shared
    return queries, parts, 1


def _paired(heads: int, queries: int, multiprocessors: int) -> bool:
    """Whether each pair of warps takes queries of its own: if the heads are few, and there is a query for each."""
    return heads <= PAIRED and queries >= PAIRS * multiprocessors


def _tiles(heads: int) -> int:
    """How many thread blocks take one query."""
    return -(-heads // 64) if heads > 32 else 1


@functools.cache
def _entry(what: str, *key: Any) -> Callable[..., None]:
    """What launches a kernel; looked up once, since the way there costs a small launch more than the launch."""
    builders: dict[str, Callable[..., Any]] = {
        "lengths": lengths_kernel,
        "attend": compile_for,
        "pairs": pairs_kernel,
        "combine": combine_kernel,
    }
    return launcher(builders[what](*key))


def _parts(rows: int, blocks: int, multiprocessors: int, few: bool = False) -> int:
    """How many thread blocks share a list: what fills the GPU soonest, in units of one block of 64 keys."""
    if rows >= 4 * multiprocessors:
        return 1

    def cost(parts: int) -> int:
        return _cost(rows, blocks, multiprocessors, parts, few)

    return min(range(1, min(blocks, 32) + 1), key=cost)


def _cost(rows: int, blocks: int, multiprocessors: int, parts: int, few: bool = False) -> int:
    """The time of ``rows`` lists, each shared by so many thread blocks.

    Beside its keys a thread block takes about three units, seven for a part of more than ``FEW`` heads, whose results
    it stores in float32; and merging takes four.
    """
    beside = 3 if few or parts == 1 else 7
    return -(-rows * parts // multiprocessors) * (-(-blocks // parts) + beside) + (4 if parts > 1 else 0)


def unsupported(q_SHE: Tensor | Argument, d_v: int, scale: float) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    heads, width = q_SHE.shape[1:]
    if q_SHE.dtype not in DTYPES:
        return f"dtype {str(q_SHE.dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    rank, rope = native(heads, d_v, width - d_v)
    if rank > MAX_RANK or rank + rope > MAX_WIDTH:
        return f"{d_v} + {width - d_v} dims a token, more than {MAX_RANK} for values or {MAX_WIDTH} in all"
    return scale_problem(scale)


def compile_for(heads: int, rank: int, rope: int, dtype: torch.dtype, split: bool = False) -> Any:
    """The attention kernel for a head count and native sizes; compiles without a GPU, once per variant.

    ``split`` is for few queries of more than ``FEW`` heads, where several thread blocks share a list: its results go
    to ``combine_kernel``. Up to ``FEW`` heads, one program does both.
    """
    name = DTYPES[dtype]
    if heads > 32:
        return compiled(
            ("many", rank, rope, name, split),
            lambda: many_heads(rank, rope, name, split),
            safe_access=False,
            insert_barriers=False,
        )
    columns = max(8, 1 << (heads - 1).bit_length())
    return compiled(
        ("few", columns, rank, rope, name),
        lambda: few_heads(columns, rank, rope, name),
        safe_access=False,
        insert_barriers=False,
    )


def pairs_kernel(rank: int, rope: int, dtype: torch.dtype) -> Any:
    """The attention kernel for many queries of up to ``PAIRED`` heads."""
    return compiled(
        ("pairs", rank, rope, dtype),
        lambda: pair_heads(rank, rope, DTYPES[dtype]),
        safe_access=False,
        insert_barriers=False,
    )


def list_lengths(indices_SK: Tensor, limits_S: Tensor | None, tokens: int) -> Tensor:
    """Where each list ends, int32 [S]: behind its last valid entry, at ``limits_S`` at the latest.

    Both are int32 and packed, on the current device.
    """
    lengths_S = torch.empty(indices_SK.shape[0], dtype=torch.int32, device=indices_SK.device)
    limits = lengths_S if limits_S is None else limits_S
    _entry("lengths")(indices_SK, limits, tokens, int(limits_S is not None), lengths_S)
    return lengths_S


def lengths_kernel() -> Any:
    """The kernel that finds where each list ends."""
    return compiled("lengths", programs.lengths)


def combine_kernel(rank: int, dtype: torch.dtype) -> Any:
    """The kernel that merges the parts of split lists."""
    return compiled(("combine", rank, dtype), lambda: programs.combine(rank, DTYPES[dtype]))


def native(heads: int, d_v: int, rope: int) -> tuple[int, int]:
    """The sizes that the kernels run for ``d_v`` and ``rope``: multiples of 64 and of 32.

    From 33 heads on, two warpgroups share the value dims, 64 of them each at least, and probabilities take the
    place of 64 rope dims.
    """
    if heads > 32:
        return max(-(-d_v // 64) * 64, 128), -(-rope // 64) * 64
    return -(-d_v // 64) * 64, -(-rope // 32) * 32
