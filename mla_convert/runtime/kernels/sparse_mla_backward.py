"""Gradients of ``sparse_mla`` on a Hopper GPU; the programs are in ``_sparse_mla_backward`` and ``…_rows``.

Shapes: S queries, T tokens, H heads, R = d_v value dims, E = d_v + rope (one cached token), K entries on a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.checks import check_sparse_backward
from mla_convert.runtime.kernels._common import (
    DTYPES,
    as_int32,
    compiled,
    launchable,
    launcher,
    pad_features,
)
from mla_convert.runtime.kernels._sparse_mla import BLOCK
from mla_convert.runtime.kernels._sparse_mla_backward import backward
from mla_convert.runtime.kernels._sparse_mla_backward_cuda import in_quads
from mla_convert.runtime.kernels._sparse_mla_backward_rows import (
    GROUP,
    UNION_ENTRIES,
    UNION_TOKENS,
    blocks_of,
    prepare,
    slot_dtype,
    sum_parts,
    sum_slots,
    unite,
)
from mla_convert.runtime.kernels.sparse_mla import list_lengths
from mla_convert.runtime.kernels.sparse_mla import unsupported as forward_unsupported

MAX_ROPE = 64
SLOT_BYTES = 1 << 30
"""What the deterministic mode may hold at once of the gradients of single entries, before their sum."""


def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    out_SHR: Tensor,
    lse_SH: Tensor,
    d_out_SHR: Tensor,
    *,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    d_v: int,
    d_lse: Tensor | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``sparse_mla`` with respect to q, kv and attn_sink, on a Hopper GPU.

    Products take bfloat16 (or float16) and sum in float32: probabilities and the gradients of scores are rounded
    between two products. dkv is summed in a float32 workspace of kv's size.

    Args:
        q, kv, indices, scale, topk_length, attn_sink, d_v: As given to ``sparse_mla``.
        out_SHR, lse_SH: What it returned.
        d_out_SHR, d_lse: Gradients of both; None: that of lse is 0.
        deterministic: False adds to dkv with atomics, in an order that differs from run to run. True stores every
            entry's gradient ([entries, E] bfloat16, float32 if q is float16, ``SLOT_BYTES`` at a time) and sums them
            in float32 in a fixed order: two runs give equal bits, at about one and a half times the time. None: what
            ``torch.are_deterministic_algorithms_enabled`` says.

    Returns:
        dq and dkv in shape and dtype of q and kv, and d_sink [H] in the dtype of attn_sink, or None. dq and d_sink
        are the same in every run. A token listed twice gets two gradients. Up to 32 heads, neighbouring queries share
        products: where something is not finite in one of them, their gradients are not finite either.

    Raises:
        CannotError: A size, dtype or scale that the kernels do not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    flat_kv_TE = kv.squeeze(1) if kv.ndim == 3 else kv
    indices = indices.squeeze(1) if indices.ndim == 3 else indices
    check_sparse_backward(
        q, flat_kv_TE, indices, out_SHR, lse_SH, d_out_SHR, topk_length, attn_sink, d_v, d_lse
    )
    queries, heads, width = q.shape
    if reason := unsupported(q, d_v, scale):
        raise CannotError(f"The backward pass of sparse attention cannot run: {reason}.")
    if not (queries and heads and flat_kv_TE.shape[0] and indices.shape[1]):
        d_sink = None if attn_sink is None else torch.zeros_like(attn_sink)
        return torch.zeros_like(q), torch.zeros_like(kv), d_sink
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()

    rank, rope = native(d_v, width - d_v)
    q = launchable(pad_features(q, d_v, rank, rope))
    flat_kv_TE = launchable(pad_features(flat_kv_TE, d_v, rank, rope))
    out_SHR, d_out_SHR = (launchable(pad_features(x.to(q.dtype), d_v, rank, 0)) for x in (out_SHR, d_out_SHR))
    lse_SH = launchable(lse_SH.to(torch.float32))
    with torch.cuda.device(q.device):
        rows = _row_terms(out_SHR, d_out_SHR, lse_SH, d_lse, attn_sink, scale)
        limits_S = None if topk_length is None else launchable(as_int32(topk_length))
        launch = _deterministic if deterministic else _atomic
        indices = launchable(as_int32(indices))
        dq_SHE, dkv_TE = launch(q, flat_kv_TE, indices, limits_S, d_out_SHR, rows, scale)
    d_sink_H = None
    if attn_sink is not None:
        taken_SH = torch.sigmoid(attn_sink.to(torch.float32) - lse_SH).masked_fill(lse_SH.isneginf(), 0)
        d_sink_H = -(rows.delta_SH * taken_SH).sum(0).to(attn_sink.dtype)
    dq_SHE = _unpad_features(dq_SHE, d_v, rank, width - d_v)
    dkv_TE = _unpad_features(dkv_TE, d_v, rank, width - d_v)
    return dq_SHE, dkv_TE.to(kv.dtype).reshape(kv.shape), d_sink_H


class _RowTerms:
    """What the gradient of a score needs of its row, float32 [S, H] each; see ``_sparse_mla_backward_rows.prepare``."""

    __slots__ = ("delta_SH", "lse2_SH", "offset_SH", "share_SH")

    def __init__(self, like_SH: Tensor) -> None:
        self.lse2_SH, self.share_SH, self.delta_SH, self.offset_SH = (
            torch.empty_like(like_SH) for _ in range(4)
        )

    def __getitem__(self, rows: slice) -> _RowTerms:
        some = _RowTerms.__new__(_RowTerms)
        for name in self.__slots__:
            setattr(some, name, getattr(self, name)[rows])
        return some


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists int32 [L, K] of ``group`` queries each, their lengths int32 [L], their blocks with valid entries as
    ``listed_blocks`` gives them, and how often each query of a list names each entry, uint16 [L, GROUP, K] (of no
    meaning where ``group`` is 1)."""

    indices: Tensor
    lengths: Tensor
    blocks: Tensor
    counts: Tensor
    group: int

    def __getitem__(self, some: slice) -> _Lists:
        counts = self.counts[some] if self.group > 1 else self.counts
        return _Lists(self.indices[some], self.lengths[some], self.blocks[some], counts, self.group)


def _row_terms(
    out_SHR: Tensor,
    d_out_SHR: Tensor,
    lse_SH: Tensor,
    d_lse: Tensor | None,
    attn_sink: Tensor | None,
    scale: float,
) -> _RowTerms:
    terms = _RowTerms(lse_SH)
    sink_H = lse_SH[0] if attn_sink is None else launchable(attn_sink.to(torch.float32))
    d_lse_SH = lse_SH if d_lse is None else launchable(d_lse.to(torch.float32))
    _entry("prepare", out_SHR.shape[2], out_SHR.dtype)(
        out_SHR,
        d_out_SHR,
        lse_SH,
        d_lse_SH,
        int(d_lse is not None),
        sink_H,
        int(attn_sink is not None),
        scale,
        terms.lse2_SH,
        terms.share_SH,
        terms.delta_SH,
        terms.offset_SH,
    )
    return terms


def _atomic(
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    limits_S: Tensor | None,
    d_out_SHR: Tensor,
    terms: _RowTerms,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dq, and dkv in float32, which every thread block adds to."""
    dq_SHE = torch.empty_like(q_SHE)
    dkv_TE = torch.zeros(kv_TE.shape, dtype=torch.float32, device=kv_TE.device)
    lists = _shared_lists(indices_SK, limits_S, q_SHE.shape[1], kv_TE.shape[0])
    parts = _parts_for(q_SHE, lists)
    _products(q_SHE, in_quads(kv_TE), lists, parts, d_out_SHR, terms, scale, dq_SHE, dkv_TE, slots=False)
    return dq_SHE, dkv_TE


def _deterministic(
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    limits_S: Tensor | None,
    d_out_SHR: Tensor,
    terms: _RowTerms,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same, some queries at a time: every entry's gradient to its own row, then sums in the entries' order."""
    (queries, heads, width), tokens = q_SHE.shape, kv_TE.shape[0]
    lists = _shared_lists(indices_SK, limits_S, heads, tokens)
    count, entries = lists.indices.shape
    quads_TE = in_quads(kv_TE)
    tiles = -(-heads * lists.group // 64)
    dq_SHE = torch.empty_like(q_SHE)
    dkv_TE = torch.zeros(kv_TE.shape, dtype=torch.float32, device=kv_TE.device)
    parts = _parts_for(q_SHE, lists)  # of all queries, so that the step changes no bits
    dtype = slot_dtype(DTYPES[q_SHE.dtype])
    slots_of = functools.partial(torch.empty, dtype=getattr(torch, dtype), device=kv_TE.device)
    step = min(count, max(1, SLOT_BYTES // (slots_of(0).itemsize * width * entries * tiles)))
    wave = max(1, _multiprocessors(q_SHE.device) // tiles)
    step = step // wave * wave if wave <= step < count else step
    slots = slots_of(step * tiles * entries, width)
    order, begin = entry_order(lists.indices, lists.lengths, tokens, step)
    for i, first in enumerate(range(0, count, step)):
        some = lists[first : first + step]
        rows = slice(first * lists.group, min((first + step) * lists.group, queries))
        _products(
            q_SHE[rows], quads_TE, some, parts, d_out_SHR[rows], terms[rows], scale, dq_SHE[rows], slots, slots=True
        )  # fmt: skip
        _entry("sum", width, dtype)(slots, order, begin[i], first * entries, tiles, dkv_TE)
    return dq_SHE, dkv_TE


def entry_order(
    indices_SK: Tensor, lengths_S: Tensor, tokens: int, step: int | None = None
) -> tuple[Tensor, Tensor]:
    """The entries of ``step`` lists at a time (None: of all), by the token they name: what ``sum_kernel`` takes.

    Returns:
        order int64 [S * K]: positions in ``indices_SK``, flattened; those of one step that name one token keep their
        order. begin int64 [steps, T + 1]: token t has order[begin[i, t]:begin[i, t + 1]].
    """
    (lists, entries), device = indices_SK.shape, indices_SK.device
    steps = -(-lists // (step or lists))
    dtype = torch.int32 if steps * (tokens + 1) < 2**31 else torch.int64
    first_S = torch.arange(lists, dtype=dtype, device=device) // (step or lists) * (tokens + 1)
    positions_K = torch.arange(entries, dtype=torch.int32, device=device)
    valid_SK = (indices_SK >= 0) & (indices_SK < tokens) & (positions_K < lengths_S[:, None])
    named_SK = torch.where(valid_SK, indices_SK, tokens) + first_S[:, None]
    named, order = named_SK.flatten().sort(stable=True)
    every = torch.arange(steps * (tokens + 1), dtype=dtype, device=device)
    return order, torch.searchsorted(named, every).view(steps, tokens + 1)


def _products(
    q_SHE: Tensor,
    kv_TE: Tensor,
    lists: _Lists,
    parts: int,
    d_out_SHR: Tensor,
    terms: _RowTerms,
    scale: float,
    dq_SHE: Tensor,
    dkv: Tensor,
    *,
    slots: bool,
) -> None:
    """The five products of some queries: writes their dq, and adds to dkv [T, E] (or fills its ``slots``)."""
    (_, heads, width), rank = q_SHE.shape, d_out_SHR.shape[2]
    q, d_out, dq = (x.flatten(0, 1) for x in (q_SHE, d_out_SHR, dq_SHE))
    query_rows = heads if lists.group > 1 else 64  # of a tile
    part = dq
    if parts > 1:
        part = torch.empty(len(dq) * parts, width, dtype=torch.float32, device=dq.device)
    _entry("main", rank, width - rank, q.dtype, slots, parts > 1)(
        q, kv_TE, lists.indices, lists.lengths, lists.blocks, lists.counts, query_rows, heads * lists.group, parts,
        d_out, terms.lse2_SH.flatten(), terms.share_SH.flatten(), terms.offset_SH.flatten(), scale, part, dkv,
    )  # fmt: skip
    if parts > 1:
        _entry("parts", width, q.dtype)(part, parts, dq)


def _shared_lists(indices_SK: Tensor, limits_S: Tensor | None, heads: int, tokens: int) -> _Lists:
    """As many queries on a list as fill a tile of 64 heads, up to ``GROUP``: what they all list is added once."""
    (queries, entries), device = indices_SK.shape, indices_SK.device
    group = min(most_sharing(heads), queries, UNION_ENTRIES // entries)
    if group < 2 or tokens > UNION_TOKENS:
        nothing = torch.empty(1, GROUP, entries, dtype=torch.uint16, device=device)
        return _Lists(indices_SK, *listed_blocks(indices_SK, limits_S, tokens), nothing, 1)
    lengths_S = list_lengths(indices_SK, limits_S, tokens)
    count, united = -(-queries // group), -(-group * entries // BLOCK) * BLOCK
    lists = _Lists(
        torch.empty(count, united, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(count, 1 + united // BLOCK, dtype=torch.int32, device=device),
        torch.empty(count, GROUP, united, dtype=torch.uint16, device=device),
        group,
    )
    _entry("unite")(
        indices_SK, lengths_S, tokens, group, lists.indices, lists.counts, lists.lengths, lists.blocks
    )
    return lists


def listed_blocks(indices_SK: Tensor, limits_S: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """Where each list ends, int32 [S], as ``list_lengths``, and which of its blocks hold a valid entry.

    Both are int32 and packed, on the current device.

    Returns:
        lengths int32 [S], and blocks int32 [S, 1 + K / 64 rounded up]: how many blocks of 64 entries of a list hold a
        valid one, then their numbers; what lies behind has no meaning.
    """
    (lists, entries), device = indices_SK.shape, indices_SK.device
    lengths_S = torch.empty(lists, dtype=torch.int32, device=device)
    blocks = torch.empty(lists, 1 - (-entries // BLOCK), dtype=torch.int32, device=device)
    limits = lengths_S if limits_S is None else limits_S
    _entry("blocks")(indices_SK, limits, tokens, int(limits_S is not None), lengths_S, blocks)
    return lengths_S, blocks


def most_sharing(heads: int) -> int:
    """How many queries of so many heads share a list at most: those whose heads fill a tile of 64 rows."""
    return min(GROUP, 64 // heads)


def _parts_for(q_SHE: Tensor, lists: _Lists) -> int:
    (queries, heads, _), (count, entries) = q_SHE.shape, lists.indices.shape
    tiles = -(-heads * lists.group // 64)
    return _parts(count * tiles, queries * heads, -(-entries // BLOCK), _multiprocessors(q_SHE.device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=4096)
def _parts(lists: int, rows: int, blocks: int, multiprocessors: int) -> int:
    """How many thread blocks share a list: what fills the GPU soonest, in units of one block of 64 keys (5 us).

    A thread block costs about one such unit beside its keys, and the sum of the parts two and its traffic.
    """
    if lists >= 8 * multiprocessors:
        return 1

    def cost(parts: int) -> float:
        merge = 2 + rows * parts / 3000 if parts > 1 else 0
        return -(-lists * parts // multiprocessors) * (-(-blocks // parts) + 1) + merge

    return min(range(1, min(blocks, 32) + 1), key=cost)


@functools.cache
def _entry(what: str, *key: Any) -> Callable[..., None]:
    builders: dict[str, Callable[..., Any]] = {
        "prepare": prepare_kernel,
        "main": compile_for,
        "sum": sum_kernel,
        "parts": parts_kernel,
        "unite": unite_kernel,
        "blocks": blocks_kernel,
    }
    return launcher(builders[what](*key))


def unsupported(q_SHE: Tensor, d_v: int, scale: float) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    if reason := forward_unsupported(q_SHE, d_v, scale):
        return reason
    rope = q_SHE.shape[2] - d_v
    if native(d_v, rope)[1] > MAX_ROPE:
        return f"{rope} dims behind the values, more than {MAX_ROPE} for gradients"
    return None


def compile_for(rank: int, rope: int, dtype: torch.dtype, slots: bool = False, split: bool = False) -> Any:
    """The five products for native sizes, whatever the heads; compiles without a GPU, once per variant.

    ``slots`` is for the deterministic mode, whose results go to ``sum_kernel``; ``split`` for few queries, where
    several thread blocks share a list: their parts of dq go to ``parts_kernel``.
    """
    name = DTYPES[dtype]
    return compiled(
        ("sparse_mla_backward", rank, rope, name, slots, split),
        lambda: backward(rank, rope, name, slots, split),
        safe_access=False,
        insert_barriers=False,
    )


def unite_kernel() -> Any:
    """The kernel that makes one list of those of several queries."""
    return compiled("sparse_mla_backward_unite", unite)


def blocks_kernel() -> Any:
    """The kernel that finds the blocks of lists that hold a valid entry."""
    return compiled("sparse_mla_blocks", blocks_of)


def prepare_kernel(rank: int, dtype: torch.dtype) -> Any:
    """The kernel of the terms that belong to a query and head."""
    return compiled(("sparse_mla_backward_prepare", rank, dtype), lambda: prepare(rank, DTYPES[dtype]))


def sum_kernel(width: int, dtype: str) -> Any:
    """The kernel that sums entries' gradients in a fixed order."""
    return compiled(
        ("sparse_mla_backward_sum", width, dtype), lambda: sum_slots(width, dtype), safe_access=False
    )


def parts_kernel(width: int, dtype: torch.dtype) -> Any:
    """The kernel that sums the parts of dq that several thread blocks have of a list."""
    return compiled(("sparse_mla_backward_parts", width, dtype), lambda: sum_parts(width, DTYPES[dtype]))


def native(d_v: int, rope: int) -> tuple[int, int]:
    """The sizes that the kernels run for ``d_v`` and ``rope``: two warpgroups share the value dims."""
    return max(-(-d_v // 64) * 64, 128), -(-rope // 64) * 64


def _unpad_features(tensor: Tensor, head: int, padded_head: int, tail: int) -> Tensor:
    if tensor.shape[-1] == head + tail:
        return tensor
    return torch.cat((tensor[..., :head], tensor[..., padded_head : padded_head + tail]), dim=-1)
