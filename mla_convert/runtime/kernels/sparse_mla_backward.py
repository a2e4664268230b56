"""Gradients of ``sparse_mla`` on a Hopper GPU; the programs are in ``_sparse_mla_backward`` and ``…_rows``.

Shapes: S queries, T tokens, H heads, R = d_v value dims, E = d_v + rope (one cached token), K entries on a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.kernels._common import (
    DTYPES,
    as_int32,
    compiled,
    launchable,
    launcher,
    pad_features,
    require,
)
from mla_convert.runtime.kernels._sparse_mla_backward import backward
from mla_convert.runtime.kernels._sparse_mla_backward_rows import prepare, sum_slots
from mla_convert.runtime.kernels.sparse_mla import list_lengths
from mla_convert.runtime.kernels.sparse_mla import unsupported as forward_unsupported

MAX_ROPE = 64
SLOT_BYTES = 1 << 30
"""What the deterministic mode may hold at once of the gradients of single entries, before their sum."""


def sparse_mla_backward(
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
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
        q_SHE, kv_TE, indices_SK, scale, topk_length, attn_sink, d_v: As given to ``sparse_mla``.
        out_SHR, lse_SH: What it returned.
        d_out_SHR, d_lse: Gradients of both; None: that of lse is 0.
        deterministic: False adds to dkv with atomics, in an order that differs from run to run. True stores every
            entry's gradient ([entries, E] float32, ``SLOT_BYTES`` at a time) and sums them in a fixed order: two
            runs give equal bits, at about twice the time. None: what
            ``torch.are_deterministic_algorithms_enabled`` says.

    Returns:
        dq and dkv in shape and dtype of q and kv, and d_sink [H] in the dtype of attn_sink, or None. dq and d_sink
        are the same in every run. A token listed twice gets two gradients.

    Raises:
        CannotError: A size, dtype or scale that the kernels do not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    flat_kv_TE = kv_TE.squeeze(1) if kv_TE.ndim == 3 else kv_TE
    indices_SK = indices_SK.squeeze(1) if indices_SK.ndim == 3 else indices_SK
    queries, heads, width = q_SHE.shape
    _check(q_SHE, flat_kv_TE, indices_SK, out_SHR, lse_SH, d_out_SHR, topk_length, attn_sink, d_v, d_lse)
    if reason := unsupported(q_SHE, d_v, scale):
        raise CannotError(f"The backward pass of sparse attention cannot run: {reason}.")
    if not (queries and heads and flat_kv_TE.shape[0] and indices_SK.shape[1]):
        d_sink = None if attn_sink is None else torch.zeros_like(attn_sink)
        return torch.zeros_like(q_SHE), torch.zeros_like(kv_TE), d_sink
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()

    rank, rope = native(d_v, width - d_v)
    q_SHE = launchable(pad_features(q_SHE, d_v, rank, rope))
    flat_kv_TE = launchable(pad_features(flat_kv_TE, d_v, rank, rope))
    out_SHR, d_out_SHR = (
        launchable(pad_features(x.to(q_SHE.dtype), d_v, rank, 0)) for x in (out_SHR, d_out_SHR)
    )
    lse_SH = launchable(lse_SH.to(torch.float32))
    with torch.cuda.device(q_SHE.device):
        rows = _row_terms(out_SHR, d_out_SHR, lse_SH, d_lse, attn_sink, scale)
        limits_S = None if topk_length is None else launchable(as_int32(topk_length))
        launch = _deterministic if deterministic else _atomic
        indices_SK = launchable(as_int32(indices_SK))
        dq_SHE, dkv_TE = launch(q_SHE, flat_kv_TE, indices_SK, limits_S, d_out_SHR, rows, scale)
    d_sink_H = None
    if attn_sink is not None:
        taken_SH = torch.sigmoid(attn_sink.to(torch.float32) - lse_SH).masked_fill(lse_SH.isneginf(), 0)
        d_sink_H = -(rows.delta_SH * taken_SH).sum(0).to(attn_sink.dtype)
    dq_SHE = _unpad_features(dq_SHE, d_v, rank, width - d_v)
    dkv_TE = _unpad_features(dkv_TE, d_v, rank, width - d_v)
    return dq_SHE, dkv_TE.to(kv_TE.dtype).reshape(kv_TE.shape), d_sink_H


class _RowTerms:
    """What the gradient of a score needs of its row, float32 [S, H] each; see ``_sparse_mla_backward_rows.prepare``."""

    __slots__ = ("delta_SH", "lse2_SH", "offset_SH", "share_SH")

    def __init__(self, like_SH: Tensor) -> None:
        self.lse2_SH, self.share_SH, self.delta_SH, self.offset_SH = (
            torch.empty_like(like_SH) for _ in range(4)
        )


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
    lengths_S = list_lengths(indices_SK, limits_S, kv_TE.shape[0])
    _main(q_SHE, d_out_SHR.shape[2], slots=False)(
        q_SHE, kv_TE, indices_SK, lengths_S, d_out_SHR, terms.lse2_SH, terms.share_SH, terms.offset_SH, scale,
        dq_SHE, dkv_TE,
    )  # fmt: skip
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
    (queries, heads, width), (tokens, entries) = q_SHE.shape, (kv_TE.shape[0], indices_SK.shape[1])
    tiles = -(-heads // 64)
    dq_SHE = torch.empty_like(q_SHE)
    dkv_TE = torch.zeros(kv_TE.shape, dtype=torch.float32, device=kv_TE.device)
    lengths_S = list_lengths(indices_SK, limits_S, tokens)
    step = min(queries, max(1, SLOT_BYTES // (4 * width * entries * tiles)))
    wave = max(1, torch.cuda.get_device_properties(q_SHE.device).multi_processor_count // tiles)
    step = step // wave * wave if wave <= step < queries else step
    slots = torch.empty(step * tiles * entries, width, dtype=torch.float32, device=kv_TE.device)
    for first in range(0, queries, step):
        rows = slice(first, min(first + step, queries))
        chosen_SK = indices_SK[rows]
        order, begin = entry_order(chosen_SK, lengths_S[rows], tokens)
        _main(q_SHE, d_out_SHR.shape[2], slots=True)(
            q_SHE[rows], kv_TE, chosen_SK, lengths_S[rows], d_out_SHR[rows], terms.lse2_SH[rows],
            terms.share_SH[rows], terms.offset_SH[rows], scale, dq_SHE[rows], slots,
        )  # fmt: skip
        _entry("sum", width, tiles)(slots, order, begin, entries, dkv_TE)
    return dq_SHE, dkv_TE


def entry_order(indices_SK: Tensor, lengths_S: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The entries of all lists by the token they name, and where each token's begin: what ``sum_kernel`` takes.

    Returns:
        order int64 [S * K]: positions in ``indices_SK``, flattened; those that name one token keep their order, those
        that are not valid are last. begin int64 [T + 1]: token t has order[begin[t]:begin[t + 1]].
    """
    positions_K = torch.arange(indices_SK.shape[1], device=indices_SK.device)
    valid_SK = (indices_SK >= 0) & (indices_SK < tokens) & (positions_K < lengths_S[:, None])
    sorted_tokens, order = torch.where(valid_SK, indices_SK, tokens).flatten().sort(stable=True)
    every_token = torch.arange(tokens + 1, dtype=torch.int32, device=indices_SK.device)
    return order, torch.searchsorted(sorted_tokens, every_token)


def _main(q_SHE: Tensor, rank: int, *, slots: bool) -> Callable[..., None]:
    return _entry("main", q_SHE.shape[1], rank, q_SHE.shape[2] - rank, q_SHE.dtype, slots)


@functools.cache
def _entry(what: str, *key: Any) -> Callable[..., None]:
    builders: dict[str, Callable[..., Any]] = {
        "prepare": prepare_kernel,
        "main": compile_for,
        "sum": sum_kernel,
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


def compile_for(heads: int, rank: int, rope: int, dtype: torch.dtype, slots: bool = False) -> Any:
    """The five products for a head count and native sizes; compiles without a GPU, once per variant.

    ``slots`` is for the deterministic mode, whose results go to ``sum_kernel``.
    """
    tiles, name = -(-heads // 64), DTYPES[dtype]
    key = ("sparse_mla_backward", tiles, rank, rope, name, slots)
    return compiled(
        key,
        lambda: backward(tiles, rank, rope, name, slots),
        safe_access=False,
        insert_barriers=False,
    )


def prepare_kernel(rank: int, dtype: torch.dtype) -> Any:
    """The kernel of the terms that belong to a query and head."""
    return compiled(("sparse_mla_backward_prepare", rank, dtype), lambda: prepare(rank, DTYPES[dtype]))


def sum_kernel(width: int, tiles: int) -> Any:
    """The kernel that sums entries' gradients in a fixed order."""
    return compiled(("sparse_mla_backward_sum", width, tiles), lambda: sum_slots(width, tiles))


def native(d_v: int, rope: int) -> tuple[int, int]:
    """The sizes that the kernels run for ``d_v`` and ``rope``: two warpgroups share the value dims."""
    return max(-(-d_v // 64) * 64, 128), -(-rope // 64) * 64


def _unpad_features(tensor: Tensor, head: int, padded_head: int, tail: int) -> Tensor:
    if tensor.shape[-1] == head + tail:
        return tensor
    return torch.cat((tensor[..., :head], tensor[..., padded_head : padded_head + tail]), dim=-1)


def _check(
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    out_SHR: Tensor,
    lse_SH: Tensor,
    d_out_SHR: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
    d_lse: Tensor | None,
) -> None:
    """Raise ValueError for shapes, dtypes or devices that do not belong together."""
    require(
        q_SHE.ndim == 3 and kv_TE.ndim == 2 and indices_SK.ndim == 2,
        f"q {list(q_SHE.shape)}, kv {list(kv_TE.shape)}, indices {list(indices_SK.shape)}:"
        " expected [S, H, E], [T, E] or [T, 1, E], [S, K] or [S, 1, K]",
    )
    queries, heads, width = q_SHE.shape
    require(kv_TE.shape[1] == width, f"q has {width} dims a head and kv {kv_TE.shape[1]} a token")
    require(kv_TE.dtype == q_SHE.dtype, f"q is {q_SHE.dtype} and kv {kv_TE.dtype}")
    require(0 < d_v <= width, f"d_v is {d_v} and a token has {width} dims")
    expected = {
        "indices": (indices_SK, (queries, indices_SK.shape[1])),
        "out": (out_SHR, (queries, heads, d_v)),
        "d_out": (d_out_SHR, (queries, heads, d_v)),
        "lse": (lse_SH, (queries, heads)),
        "d_lse": (d_lse, (queries, heads)),
        "topk_length": (topk_length, (queries,)),
        "attn_sink": (attn_sink, (heads,)),
        "kv": (kv_TE, tuple(kv_TE.shape)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None:
            require(tuple(tensor.shape) == shape, f"{name} is {list(tensor.shape)}, expected {list(shape)}")
            require(tensor.device == q_SHE.device, f"q is on {q_SHE.device} and {name} is not")
