"""Decode attention of absorbed MLA: new tokens against the latent cache, contiguous or paged, dense or sparse.

The programs are those of ``dense_mla``, which share the work out by the lengths of requests or lists. Lists of more
than 32 heads whose lengths are not given, of 16-bit rows, go to those of ``sparse_mla``, which are faster.

B requests, S new tokens of each, T cached tokens, H heads, E = d_v + rope (one cached token), K entries on a list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.decode import check
from mla_convert.runtime.kernels import sparse_mla
from mla_convert.runtime.kernels._common import (
    Argument,
    Signature,
    arguments,
    as_int32,
    launchable,
    pad_features,
    planned,
    run_on,
    scale_problem,
    signature,
)
from mla_convert.runtime.kernels.dense_mla import Spans, Work, attend, work_for
from mla_convert.runtime.kernels.dense_mla import unsupported as dense_unsupported
from mla_convert.runtime.kv_cache import is_fp8


def decode_mla(
    q: Tensor,
    kv_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float,
    causal: bool = False,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    """``decode.decode_mla`` on a Hopper GPU, the same arguments and results.

    Nothing waits for the device or depends on a length on the host, so calls can be captured in a graph. The S·H
    rows of a request share the reading of its cache; with ``indices``, the H rows of a token share that of its list.
    Scores, softmax and sums are float32; probabilities, and values of FP8 rows, are rounded to q's dtype before a
    product. Two runs give equal bits; last bits depend on what else a call holds. It carries no gradient.

    bfloat16 or float16 queries, any number of heads and tokens, pages of any size. The cache must be packed (it is
    copied if not), and FP8 rows need bfloat16 queries.

    Raises:
        CannotError: A size, dtype or scale that the kernels do not take; ``unsupported`` says which.
        ValueError: Arguments that contradict each other.
    """
    work = _plan(
        signature(q, kv_cache, cache_seqlens, block_table, indices, topk_length, attn_sink), causal, d_v
    )
    if reason := scale_problem(scale):
        raise CannotError(f"The decode kernel cannot run: {reason}.")
    batch, queries, heads, _ = q.shape
    if work is None:
        lse_BHS = q.new_full((batch, heads, queries), -torch.inf, dtype=torch.float32)
        return q.new_zeros(batch, queries, heads, d_v), lse_BHS

    rows_TE = kv_cache.reshape(-1, kv_cache.shape[-1])
    if isinstance(work, sparse_mla.Plan):
        assert indices is not None
        q_NHE, indices_NK = q.reshape(batch * queries, heads, -1), indices.reshape(batch * queries, -1)
        out_NHV, lse_NH = sparse_mla.attend(work, q_NHE, rows_TE, indices_NK, None, attn_sink, scale, d_v)
        return out_NHV.view(batch, queries, heads, d_v), lse_NH.view(batch, queries, heads).transpose(1, 2)

    if work.fp8:
        rows_TE = rows_TE.view(torch.uint8)
    elif work.padded:
        q, rows_TE = (pad_features(x, d_v, work.rank, work.rope) for x in (q, rows_TE))
    if indices is not None:
        table_BP: Tensor | None = launchable(as_int32(indices).reshape(batch * queries, work.capacity))
        lengths = None if topk_length is None else _list_lengths(topk_length, batch, queries)
        spans = Spans(lengths, kept=lengths is None)
    else:
        assert cache_seqlens is not None
        table_BP = None if block_table is None else launchable(as_int32(block_table))
        spans = Spans(launchable(as_int32(cache_seqlens)), causal and queries > 1)
    out_NR, lse_N = run_on(
        work.device, attend, work, q, launchable(rows_TE), table_BP, spans, scale, attn_sink
    )
    out_BSHR = out_NR.view(batch, queries, heads, work.rank)
    lse_BHS = (
        lse_N.view(batch, heads, 1) if queries == 1 else lse_N.view(batch, queries, heads).transpose(1, 2)
    )
    return (out_BSHR if work.rank == d_v else out_BSHR[..., :d_v].contiguous()), lse_BHS


@planned
def _plan(known: Signature, causal: bool, d_v: int) -> Work | sparse_mla.Plan | None:
    """For q and kv_cache, cache_seqlens, block_table, indices, topk_length and attn_sink; None if there is nothing to
    attend to."""
    q, kv_cache, cache_seqlens, block_table, indices, topk_length, attn_sink = arguments(known)
    check(q, kv_cache, cache_seqlens, block_table, causal, indices, topk_length, attn_sink, d_v)
    if reason := unsupported(q, kv_cache, d_v, 1.0):
        raise CannotError(f"The decode kernel cannot run: {reason}.")
    batch, queries, heads, _ = q.shape
    given = [x.shape for x in (q, kv_cache, block_table, indices) if x is not None]
    if any(0 in shape for shape in given):
        return None
    fp8, page = is_fp8(kv_cache), kv_cache.shape[1]
    if indices is not None:
        tokens, entries = batch * queries, indices.shape[2]
        if heads > sparse_mla.FEW and not fp8 and topk_length is None:
            q = Argument(torch.Size((tokens, *q.shape[2:])), q.dtype, q.device)
            return sparse_mla.plan_for(q, kv_cache.shape[0] * page, entries, d_v)
        # Each token is a request of its own, and its list a table of pages of one row.
        return work_for(q, d_v, heads, tokens, 1, page=1, capacity=entries, table=True, fp8=fp8)
    paged = block_table is not None
    capacity = page * (block_table.shape[1] if paged else 1)
    return work_for(q, d_v, heads, batch, queries, page=page, capacity=capacity, table=paged, fp8=fp8)


def unsupported(q_BSHE: Tensor, kv_cache: Tensor, d_v: int, scale: float) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    if is_fp8(kv_cache) and q_BSHE.dtype != torch.bfloat16:
        return f"FP8 rows need bfloat16 queries, not {str(q_BSHE.dtype).removeprefix('torch.')}"
    return dense_unsupported(q_BSHE, d_v, scale)


def _list_lengths(topk_length: Tensor, batch: int, queries: int) -> Tensor:
    """Entries to read of each token's list, int32 [B·S]."""
    limits = as_int32(topk_length)
    if limits.ndim == 1:
        limits = limits[:, None].expand(batch, queries)
    return launchable(limits.reshape(batch * queries))
