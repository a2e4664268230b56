"""Multi-head latent attention in plain torch: the readable definition that kernels are checked against.

Two paths from the same projections. *Standard* expands the latent to keys and values of every head with the
combined weight; *absorbed* moves the key half into the query and the value half behind the softmax, so that
all heads attend to one shared latent. In exact arithmetic they are equal. Every function takes any float
dtype on any device; sums run in float32 for 16-bit inputs and in float64 for float64.

Shape suffixes: S queries, T keys, D hidden, H heads, N nope dims, P rotary dims, V value dims, R kv rank,
Q query rank, E = R + P (one cached token), K keys selected for a query, I indexer heads, J indexer dims.

Causality: query s of S sees the keys up to its own, which is key T - S + s unless ``rows_S`` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from mla_convert.runtime.checks import check_dense, check_sparse
from mla_convert.runtime.numerics import chunks, compute_dtype, recomputed, rms_norm
from mla_convert.runtime.rope import rotate
from mla_convert.runtime.selection import (
    SelectionAgreement,
    index_queries_keys,
    indexer_logits,
    indexer_select,
    quantise_rows,
    select_topk,
    selection_agreement,
)
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.weights import (
    AttentionWeights,
    IndexerWeights,
    combine_kv_rows,
    expect,
    shard_rows,
    split_kv_rows,
)

__all__ = [
    "AttentionWeights",
    "DenseAttention",
    "IndexerWeights",
    "Projected",
    "SelectionAgreement",
    "SparseAttention",
    "absorbed_attention",
    "absorbed_mla",
    "cache_entries",
    "combine_kv_rows",
    "compute_dtype",
    "dense_mla",
    "index_queries_keys",
    "indexer_logits",
    "indexer_select",
    "output_projection",
    "project",
    "quantise_rows",
    "queries_by_head",
    "query_latent",
    "rms_norm",
    "select_topk",
    "selection_agreement",
    "shard_rows",
    "sparse_mla",
    "split_kv_rows",
    "standard_attention",
    "standard_mla",
]


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries, and what the cache holds of the keys, of the same or of other tokens.

    ``latent_SR`` is normed and carries the latent multiplier, the rotary parts are rotated, queries carry
    their multipliers; ``q_latent_SQ`` (normed) feeds the indexer and is None without a query rank.
    """

    q_nope_SHN: Tensor
    q_rope_SHP: Tensor
    latent_SR: Tensor
    k_rope_SP: Tensor
    q_latent_SQ: Tensor | None = None

    def take_queries(self, rows_S: Tensor) -> Projected:
        """Some of the queries against all of the keys; pass the same ``rows_S`` to the attention."""
        q_latent = None if self.q_latent_SQ is None else self.q_latent_SQ[rows_S]
        q_nope, q_rope = self.q_nope_SHN[rows_S], self.q_rope_SHP[rows_S]
        return replace(self, q_nope_SHN=q_nope, q_rope_SHP=q_rope, q_latent_SQ=q_latent)


class DenseAttention(Protocol):
    """What ``dense_mla`` and the kernel that can stand in for it look like."""

    def __call__(
        self, q: Tensor, kv: Tensor, scale: float, *, rows_S: Tensor, d_v: int
    ) -> tuple[Tensor, Tensor]:
        """Attend to all keys up to each query's own: (out [S, H, d_v], lse [S, H])."""
        ...


class SparseAttention(Protocol):
    """What ``sparse_mla`` and every kernel that can stand in for it look like."""

    def __call__(
        self, q: Tensor, kv: Tensor, indices: Tensor, scale: float, *, d_v: int
    ) -> tuple[Tensor, Tensor]:
        """Attend to the listed keys: (out [S, H, d_v], lse [S, H])."""
        ...


def project(x_SD: Tensor, weights: AttentionWeights, spec: AttentionSpec, positions_S: Tensor) -> Projected:
    """From layer-normed hidden states to queries and cache entries: everything before kv_b.

    Raises:
        BadInputError: a weight is missing or does not have the shape that ``spec`` implies.
    """
    weights.check(spec)
    q_latent_SQ = query_latent(x_SD, weights, spec)
    q_nope_SHN, q_rope_SHP = queries_by_head(
        x_SD if q_latent_SQ is None else q_latent_SQ, weights, spec, positions_S
    )
    return Projected(q_nope_SHN, q_rope_SHP, *cache_entries(x_SD, weights, spec, positions_S), q_latent_SQ)


def query_latent(x_SD: Tensor, weights: AttentionWeights, spec: AttentionSpec) -> Tensor | None:
    """Normed query latent [S, Q]; None for a block without a query rank."""
    if weights.q_a is None or weights.q_a_norm is None:
        return None
    return rms_norm(F.linear(x_SD, weights.q_a, weights.q_a_bias), weights.q_a_norm, spec.rms_eps)


def queries_by_head(
    source: Tensor, weights: AttentionWeights, spec: AttentionSpec, positions_S: Tensor
) -> tuple[Tensor, Tensor]:
    """From the query latent [S, Q], or hidden states where there is none: q_nope [S, H, N] and q_rope [S, H, P]."""
    w_q = weights.q if weights.q_b is None else weights.q_b
    flat_S = F.linear(source, expect("q", w_q, spec.heads * spec.qk_dim, source.shape[-1]))
    q_SHX = flat_S.reshape(-1, spec.heads, spec.qk_dim) * spec.query_multiplier
    if spec.query_growth is not None:
        spans_S = torch.floor(positions_S / spec.query_growth.original_max_position)
        growth_S = 1 + spec.query_growth.beta * torch.log(1 + spans_S)
        q_SHX = q_SHX * growth_S.to(q_SHX.dtype)[:, None, None]
    return q_SHX[..., : spec.nope], rotate(q_SHX[..., spec.nope :], positions_S, spec.rope_spec)


def cache_entries(
    x_SD: Tensor, weights: AttentionWeights, spec: AttentionSpec, positions_S: Tensor
) -> tuple[Tensor, Tensor]:
    """What a cache holds of each token: latent [S, R], normed and with its multiplier, and rotated key [S, P]."""
    compressed = F.linear(x_SD, weights.kv_a, weights.kv_a_bias)
    latent_SR = rms_norm(compressed[:, : spec.rank], weights.kv_a_norm, spec.rms_eps)
    k_rope_SP = rotate(compressed[:, spec.rank :], positions_S, spec.rope_spec)
    return latent_SR * spec.latent_multiplier, k_rope_SP


def standard_attention(
    projected: Projected,
    w_kv_b: Tensor,
    spec: AttentionSpec,
    *,
    indices: Tensor | None = None,
    rows_S: Tensor | None = None,
) -> Tensor:
    """Expand keys and values for every head, then softmax attention: o [S, H, V].

    Causal; with ``indices`` [S, K] a query sees only keys that are listed as well (an entry outside 0…T-1
    lists nothing, duplicates count once). A query that sees nothing gives 0. Heads are expanded a few at a
    time.
    """
    p, tokens, stride = projected, projected.latent_SR.shape[0], spec.nope + spec.v
    dtype = compute_dtype(p.q_nope_SHN.dtype)
    w_HXR = expect("kv_b", w_kv_b, spec.heads * stride, spec.rank).reshape(spec.heads, stride, spec.rank)
    rows_S = _query_rows(p, rows_S)
    k_rope_TP = p.k_rope_SP.to(dtype)
    output_SHV = p.q_nope_SHN.new_empty(rows_S.shape[0], spec.heads, spec.v)
    for heads in chunks(spec.heads, tokens * stride * 2):
        expanded = F.linear(p.latent_SR, w_HXR[heads].flatten(0, 1))
        expanded = expanded.reshape(tokens, heads.stop - heads.start, stride).to(dtype)
        k_nope_THN, value_THV = expanded[..., : spec.nope], expanded[..., spec.nope :]
        for queries in chunks(rows_S.shape[0], tokens * (heads.stop - heads.start) * 3):
            seen_ST = _visible(rows_S[queries], tokens, None if indices is None else indices[queries])
            q_nope_SHN, q_rope_SHP = (q[queries, heads].to(dtype) for q in (p.q_nope_SHN, p.q_rope_SHP))
            part_SHV = recomputed(
                _expanded_attention,
                *(q_nope_SHN, q_rope_SHP, k_nope_THN, k_rope_TP, value_THV, seen_ST),
                spec.softmax_scale,
            )
            output_SHV[queries, heads] = part_SHV.to(output_SHV.dtype)
    return output_SHV


def _expanded_attention(
    q_nope_SHN: Tensor,
    q_rope_SHP: Tensor,
    k_nope_THN: Tensor,
    k_rope_TP: Tensor,
    value_THV: Tensor,
    seen_ST: Tensor,
    scale: float,
) -> Tensor:
    logits_HST = torch.einsum("shn,thn->hst", q_nope_SHN, k_nope_THN)
    logits_HST = logits_HST + torch.einsum("shp,tp->hst", q_rope_SHP, k_rope_TP)
    weights_HST, _ = _softmax(logits_HST * scale, seen_ST)
    return torch.einsum("hst,thv->shv", weights_HST, value_THV)


def absorbed_attention(
    projected: Projected,
    w_uk: Tensor,
    w_uv: Tensor,
    spec: AttentionSpec,
    *,
    indices: Tensor | None = None,
    rows_S: Tensor | None = None,
    attention: SparseAttention | None = None,
    dense: DenseAttention | None = None,
) -> Tensor:
    """Fold w_uk into the query, attend to the shared latent, then apply w_uv: o [S, H, V].

    Args:
        indices: Keys that a query may see [S, K]; those after the query are dropped. None: all up to itself.
        attention: Stands in for ``sparse_mla``. Without indices and ``dense`` it gets the causal list of all keys,
            [S, T] entries.
        dense: Stands in for ``dense_mla``, which needs no list.
    """
    p = projected
    w_uk_HNR = expect("k_b", w_uk, spec.heads * spec.nope, spec.rank).reshape(spec.heads, spec.nope, -1)
    w_uv_HVR = expect("v_b", w_uv, spec.heads * spec.v, spec.rank).reshape(spec.heads, spec.v, -1)
    q_SHE = torch.cat([torch.einsum("shn,hnr->shr", p.q_nope_SHN, w_uk_HNR), p.q_rope_SHP], dim=-1)
    kv_TE = torch.cat([p.latent_SR, p.k_rope_SP], dim=-1)
    rows_S = _query_rows(p, rows_S)
    if indices is None and (attention is None or dense is not None):
        run_dense: DenseAttention = dense_mla if dense is None else dense
        out_SHR, _ = run_dense(q_SHE, kv_TE, spec.softmax_scale, rows_S=rows_S, d_v=spec.rank)
    else:
        if indices is None:
            every_T = torch.arange(kv_TE.shape[0], dtype=torch.int32, device=kv_TE.device)
            indices = every_T.expand(rows_S.shape[0], -1)
        indices = indices.masked_fill(indices > rows_S[:, None], -1)
        run: SparseAttention = sparse_mla if attention is None else attention
        out_SHR, _ = run(q_SHE, kv_TE, indices, spec.softmax_scale, d_v=spec.rank)
    return torch.einsum("shr,hvr->shv", out_SHR, w_uv_HVR)


def output_projection(o_SHV: Tensor, weights: AttentionWeights) -> Tensor:
    """Heads to hidden states [S, D]."""
    return F.linear(o_SHV.flatten(1), weights.o, weights.o_bias)


def standard_mla(
    x_SD: Tensor,
    weights: AttentionWeights,
    w_kv_b: Tensor,
    spec: AttentionSpec,
    positions_S: Tensor,
    indices: Tensor | None = None,
) -> Tensor:
    """The whole block with the combined weight: layer-normed hidden states in, [S, D] out."""
    projected = project(x_SD, weights, spec, positions_S)
    return output_projection(standard_attention(projected, w_kv_b, spec, indices=indices), weights)


def absorbed_mla(
    x_SD: Tensor,
    weights: AttentionWeights,
    w_uk: Tensor,
    w_uv: Tensor,
    spec: AttentionSpec,
    positions_S: Tensor,
    indices: Tensor | None = None,
    *,
    attention: SparseAttention | None = None,
) -> Tensor:
    """The whole block with split weights: layer-normed hidden states in, [S, D] out."""
    projected = project(x_SD, weights, spec, positions_S)
    o_SHV = absorbed_attention(projected, w_uk, w_uv, spec, indices=indices, attention=attention)
    return output_projection(o_SHV, weights)


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
    """Attention of absorbed queries to spans of the cached tokens; causal attention to all of them by default.

    Query s sees the tokens from ``starts[s]`` (default 0) up to but not including ``ends[s]`` (default T - S + s + 1,
    or ``rows_S[s]`` + 1); both are taken as if clipped to the T tokens. Returns what ``sparse_mla`` returns, for
    sinks too. A token that no query sees affects nothing, NaN or not.

    Raises:
        ValueError: tensors that do not belong together, or both ``rows_S`` and ``ends``.
    """
    kv = kv.squeeze(1) if kv.ndim == 3 else kv
    check_dense(q, kv, rows_S, starts, ends, attn_sink, d_v)
    (queries, heads, _), tokens = q.shape, kv.shape[0]
    dtype = compute_dtype(q.dtype)
    if rows_S is None:
        rows_S = torch.arange(tokens - queries, tokens, device=q.device) if ends is None else ends - 1
    out_SHR = q.new_empty(queries, heads, d_v)
    lse_SH = q.new_empty(queries, heads, dtype=dtype)
    kv = kv.to(dtype)
    for rows in chunks(queries, 3 * heads * tokens):
        seen_ST = _visible(rows_S[rows], tokens, None)
        if starts is not None:
            seen_ST &= torch.arange(tokens, device=q.device) >= starts[rows, None]
        seen_TE = kv.masked_fill(~seen_ST.any(0)[:, None], 0)  # a weight of 0 would not stop a NaN
        part_SHR, lse_HS = recomputed(
            _latent_attention, q[rows].to(dtype), seen_TE, seen_TE[:, :d_v], seen_ST, scale
        )
        out_SHR[rows] = _take_sink(part_SHR, lse_HS, attn_sink).to(out_SHR.dtype)
        lse_SH[rows] = lse_HS.T
    return out_SHR, lse_SH


def _take_sink(out_SHR: Tensor, lse_HS: Tensor, attn_sink: Tensor | None) -> Tensor:
    """What is left of the output when a logit a head takes its share of the softmax."""
    if attn_sink is None:
        return out_SHR
    share_HS = torch.sigmoid(lse_HS - attn_sink.to(lse_HS.dtype)[:, None])
    return out_SHR * share_HS.masked_fill(lse_HS.isneginf(), 0).T[..., None]


def _latent_attention(
    q_SHE: Tensor, kv_TE: Tensor, value_TR: Tensor, seen_ST: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    weights_HST, lse_HS = _softmax(torch.einsum("she,te->hst", q_SHE, kv_TE) * scale, seen_ST)
    return torch.einsum("hst,tr->shr", weights_HST, value_TR), lse_HS


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
    """Attention of absorbed queries to the cached tokens listed for each (FlashMLA's sparse contract).

    Args:
        q: [S, H, E].
        kv: [T, E] or [T, 1, E]; the first ``d_v`` dims are the values as well.
        indices: [S, K] or [S, 1, K], int32 or int64. Entry j of a query counts if 0 <= index < T and
            j < topk_length; a token listed twice counts twice. Causality is up to the caller.
        topk_length: How many entries of each query to read, int [S]; None reads all.
        attn_sink: Logits [H] that take a share of the softmax: out is multiplied by
            exp(lse) / (exp(lse) + exp(sink)), and lse stays as it is.

    Returns:
        out [S, H, d_v] in q's dtype, and the natural log-sum-exp [S, H] in float32 (float64 for float64). A
        query without valid entries gives 0 and -inf. A token that is not listed affects nothing, NaN or not.

    Raises:
        ValueError: tensors that do not belong together.
    """
    kv = kv.squeeze(1) if kv.ndim == 3 else kv
    indices = indices.squeeze(1) if indices.ndim == 3 else indices
    check_sparse(q, kv, indices, topk_length, attn_sink, d_v)
    (queries, heads, width), tokens, entries = q.shape, kv.shape[0], indices.shape[1]
    dtype = compute_dtype(q.dtype)
    out_SHR = q.new_zeros(queries, heads, d_v)
    lse_SH = q.new_full((queries, heads), -torch.inf, dtype=dtype)
    if not tokens or not entries:
        return out_SHR, lse_SH
    kv = kv.to(dtype)  # before the gather, so that gradients of a token add up in this dtype
    for rows in chunks(queries, entries * (2 * width + 3 * heads)):
        chosen_SK = indices[rows].long()
        valid_SK = (chosen_SK >= 0) & (chosen_SK < tokens)
        if topk_length is not None:
            valid_SK &= torch.arange(entries, device=q.device) < topk_length[rows, None]
        part_SHR, lse_HS = recomputed(
            _listed_attention, q[rows].to(dtype), kv, chosen_SK, valid_SK, scale, d_v
        )
        out_SHR[rows] = _take_sink(part_SHR, lse_HS, attn_sink).to(out_SHR.dtype)
        lse_SH[rows] = lse_HS.T
    return out_SHR, lse_SH


def _listed_attention(
    q_SHE: Tensor, kv_TE: Tensor, chosen_SK: Tensor, valid_SK: Tensor, scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    kv_SKE = kv_TE[chosen_SK.masked_fill(~valid_SK, 0)]
    kv_SKE = kv_SKE.masked_fill(~valid_SK[..., None], 0)  # a weight of 0 would not stop a NaN
    weights_HSK, lse_HS = _softmax(torch.einsum("she,ske->hsk", q_SHE, kv_SKE) * scale, valid_SK)
    return torch.einsum("hsk,skr->shr", weights_HSK, kv_SKE[..., :d_v]), lse_HS


def _softmax(logits_HST: Tensor, seen_ST: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp over the last dim; a row that sees nothing gets 0 and -inf, and gradient 0."""
    logits_HST = logits_HST.masked_fill(~seen_ST, -torch.inf)
    highest = logits_HST.detach().amax(-1, keepdim=True)
    highest = highest.masked_fill(highest.isneginf(), 0)
    exps_HST = (logits_HST - highest).exp()
    total = exps_HST.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (total.log() + highest).masked_fill(empty, -torch.inf)
    return exps_HST / total, lse.squeeze(-1)


def _visible(rows_S: Tensor, tokens: int, indices_SK: Tensor | None) -> Tensor:
    """Which keys each query may see, bool [S, T]: those up to itself and, with indices, those listed."""
    seen_ST = torch.arange(tokens, device=rows_S.device) <= rows_S[:, None]
    if indices_SK is None:
        return seen_ST
    chosen_SK = indices_SK.flatten(1).long()
    valid_SK = (chosen_SK >= 0) & (chosen_SK < tokens)
    listed = seen_ST.new_zeros(seen_ST.shape[0], tokens + 1)  # the last column takes what lists nothing
    listed.scatter_(1, chosen_SK.masked_fill(~valid_SK, tokens), True)
    return seen_ST & listed[:, :tokens]


def _query_rows(projected: Projected, rows_S: Tensor | None) -> Tensor:
    queries, tokens = projected.q_nope_SHN.shape[0], projected.latent_SR.shape[0]
    if rows_S is None:
        return torch.arange(tokens - queries, tokens, device=projected.latent_SR.device)
    return rows_S
