"""Decode attention in plain torch: new tokens against the latent cache, contiguous or paged, dense or sparse.

The definition that ``kernels.decode_mla`` is checked against. B requests, S new tokens of each, T cached tokens,
H heads, E = d_v + rope (one cached token), K entries on a list.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mla_convert.runtime.kv_cache import cache_rows, is_fp8, unpack_fp8
from mla_convert.runtime.numerics import compute_dtype
from mla_convert.runtime.reference import dense_mla, sparse_mla


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
    """Attention of new tokens to the latent cache, which holds them already (FlashMLA's decode contract).

    Args:
        q: [B, S, H, E].
        kv_cache: Without ``block_table``: [B, T, E] or [B, T, 1, E]. With it: [blocks, page, E] or
            [blocks, page, 1, E]. Or FP8 rows (``kv_cache``), uint8 or float8_e4m3fn with 656 in place of E.
        cache_seqlens: Cached tokens of each request, the new ones among them, int [B]. Sparse attention ignores it.
        block_table: Token p of request b is in block ``block_table[b, p // page]`` at p % page, int
            [B, blocks a request]. Entries beyond a request's length are not read.
        causal: New token s does not see the S - 1 - s behind it. Without, all see the whole length.
        indices: Sparse attention: rows of the whole cache, block * page + offset (with a contiguous cache: request *
            T + position; ``kv_cache.cache_rows`` makes either from positions), int [B, S, K]. Entry j counts if it
            is a row and j < ``topk_length``; a row listed twice counts twice.
        topk_length: How many entries to read, int [B] or [B, S]; None reads all.
        attn_sink: Logits [H] that take a share of the softmax; ``lse`` stays as it is.

    Returns:
        out [B, S, H, d_v] in q's dtype, and the natural log-sum-exp [B, H, S] (heads before tokens, as FlashMLA has
        it) in float32 (float64 for float64). A token that sees nothing gives 0 and -inf. Rows that no token sees
        affect nothing, NaN or not.

    Raises:
        ValueError: arguments that contradict each other.
    """
    check(q, kv_cache, cache_seqlens, block_table, causal, indices, topk_length, attn_sink, d_v)
    batch, queries, heads = q.shape[:3]
    page = kv_cache.shape[1]
    rows = kv_cache.reshape(-1, kv_cache.shape[-1])

    def read(chosen: Tensor) -> Tensor:
        return unpack_fp8(rows[chosen], torch.bfloat16).to(q.dtype) if is_fp8(rows) else rows[chosen]

    out_BSHV = q.new_zeros(batch, queries, heads, d_v)
    lse_BSH = q.new_full((batch, queries, heads), -torch.inf, dtype=compute_dtype(q.dtype))
    for b in range(batch):
        if indices is not None:
            listed_SK = indices[b].long()
            known_SK = (listed_SK >= 0) & (listed_SK < rows.shape[0])
            used, place_SK = torch.unique(listed_SK.masked_fill(~known_SK, 0), return_inverse=True)
            limits_S = None if topk_length is None else topk_length[b].expand(queries)
            out_BSHV[b], lse_BSH[b] = sparse_mla(
                q[b],
                read(used),
                place_SK.masked_fill(~known_SK, -1),
                scale,
                topk_length=limits_S,
                attn_sink=attn_sink,
                d_v=d_v,
            )
            continue
        assert cache_seqlens is not None
        capacity = page if block_table is None else page * block_table.shape[1]
        length = min(int(cache_seqlens[b]), capacity)
        if length <= 0:
            continue
        positions_BT = torch.arange(length, device=q.device)[None]
        table = None if block_table is None else block_table[b : b + 1]
        chosen = cache_rows(positions_BT, table, page)[0] + (b * page if block_table is None else 0)
        ends_S = torch.full((queries,), length, device=q.device)
        if causal:
            ends_S = int(cache_seqlens[b]) - queries + 1 + torch.arange(queries, device=q.device)
        out_BSHV[b], lse_BSH[b] = dense_mla(
            q[b], read(chosen.long()), scale, ends=ends_S, attn_sink=attn_sink, d_v=d_v
        )
    return out_BSHV, lse_BSH.transpose(1, 2)


def check(
    q_BSHE: Tensor,
    kv_cache: Tensor,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    indices: Tensor | None,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
) -> None:
    """Raise ValueError for arguments of ``decode_mla`` that do not belong together."""
    for problem in _problems(
        q_BSHE, kv_cache, cache_seqlens, block_table, causal, indices, topk_length, attn_sink, d_v
    ):
        raise ValueError(problem)


def _problems(
    q_BSHE: Tensor,
    kv_cache: Tensor,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    indices: Tensor | None,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
) -> Iterator[str]:
    """What is wrong; what comes later takes what came before for granted."""
    if q_BSHE.ndim != 4 or not (kv_cache.ndim == 3 or (kv_cache.ndim == 4 and kv_cache.shape[2] == 1)):
        yield (
            f"q {list(q_BSHE.shape)}, kv_cache {list(kv_cache.shape)}: expected [B, S, H, E] and [B, T, E], "
            "[B, T, 1, E], [blocks, page, E] or [blocks, page, 1, E]"
        )
    batch, queries, heads, width = q_BSHE.shape
    if is_fp8(kv_cache):
        if (width, d_v) != (576, 512):
            yield f"FP8 rows hold 512 + 64 dims; q has {width} and d_v is {d_v}"
    elif kv_cache.shape[-1] != width:
        yield f"q has {width} dims a head and the cache {kv_cache.shape[-1]} a token"
    elif kv_cache.dtype != q_BSHE.dtype:
        yield f"q is {q_BSHE.dtype} and the cache {kv_cache.dtype}"
    if not 0 < d_v <= width:
        yield f"d_v is {d_v} and a token has {width} dims"
    if indices is None:
        if topk_length is not None:
            yield "topk_length needs indices"
        if cache_seqlens is None:
            yield "dense decode needs cache_seqlens"
        elif cache_seqlens.shape != (batch,):
            yield f"cache_seqlens {list(cache_seqlens.shape)} for {batch} requests"
        if block_table is not None and (block_table.ndim != 2 or block_table.shape[0] != batch):
            yield f"block_table {list(block_table.shape)} for {batch} requests"
        if block_table is None and kv_cache.shape[0] != batch:
            yield f"a contiguous cache of {kv_cache.shape[0]} requests for {batch}; a paged one needs block_table"
    else:
        if causal:
            yield "causal is for dense attention: with indices, the lists say what a token sees"
        if indices.ndim != 3 or indices.shape[:2] != (batch, queries):
            yield f"indices {list(indices.shape)} for {batch} x {queries} tokens"
        if topk_length is not None and topk_length.shape not in ((batch,), (batch, queries)):
            yield f"topk_length {list(topk_length.shape)} for {batch} x {queries} tokens"
    if attn_sink is not None and attn_sink.shape != (heads,):
        yield f"attn_sink {list(attn_sink.shape)} for {heads} heads"
    whole = {
        "cache_seqlens": cache_seqlens,
        "block_table": block_table,
        "indices": indices,
        "topk_length": topk_length,
    }
    for name, tensor in whole.items():
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            yield f"{name} is {tensor.dtype}, expected int32 or int64"
    for name, tensor in {"kv_cache": kv_cache, **whole, "attn_sink": attn_sink}.items():
        if tensor is not None and tensor.device != q_BSHE.device:
            yield f"{name} is on {tensor.device}, and not on {q_BSHE.device}"
