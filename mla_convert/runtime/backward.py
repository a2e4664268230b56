"""Gradients of ``reference.sparse_mla`` in plain torch, as formulas rather than through autograd.

What the kernels' backward is checked against, and what runs where they do not: autograd through the forward keeps
every query's gathered keys until the end, while here memory stays bounded by a chunk of queries.

Shape suffixes: S queries, T tokens, H heads, R value dims (``d_v``), E dims of one cached token, K entries of a
list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.runtime.checks import check_sparse_backward
from mla_convert.runtime.numerics import chunks, compute_dtype


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
    """Gradients of ``sparse_mla`` with respect to q, kv and attn_sink.

    With p = exp(scale * q . k - lse) over the valid entries, share = exp(lse) / (exp(lse) + exp(sink)) (1 without
    a sink) and delta = d_out . out, the gradient of a score is p * (share * (d_out . v - delta) + d_lse) * scale,
    that of a value p * share * d_out, and that of the sink -delta * (1 - share).

    Args:
        q, kv, indices, scale, topk_length, attn_sink, d_v: As given to ``sparse_mla``.
        out_SHR, lse_SH: What it returned.
        d_out_SHR, d_lse: Gradients of both; None: that of lse is 0.
        deterministic: Whether two runs on a GPU give equal bits; None: what
            ``torch.are_deterministic_algorithms_enabled`` says.

    Returns:
        dq and dkv in shape and dtype of q and kv (sums in at least float32), and d_sink or None. A token listed
        twice gets two gradients; entries that are not valid, and queries without valid ones, get none.

    Raises:
        ValueError: tensors that do not belong together.
    """
    flat_kv_TE = kv.squeeze(1) if kv.ndim == 3 else kv
    indices = indices.squeeze(1) if indices.ndim == 3 else indices
    check_sparse_backward(
        q, flat_kv_TE, indices, out_SHR, lse_SH, d_out_SHR, topk_length, attn_sink, d_v, d_lse
    )
    (queries, heads, width), (tokens, entries) = q.shape, (flat_kv_TE.shape[0], indices.shape[1])
    dtype = compute_dtype(q.dtype)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    dq_SHE = torch.zeros_like(q)
    dkv_TE = torch.zeros(tokens, width, dtype=dtype, device=q.device)
    d_sink_H = None if attn_sink is None else torch.zeros(heads, dtype=dtype, device=q.device)
    for rows in chunks(queries if tokens and entries else 0, entries * (3 * width + 4 * heads)):
        chosen_SK = indices[rows].long()
        valid_SK = (chosen_SK >= 0) & (chosen_SK < tokens)
        if topk_length is not None:
            valid_SK &= torch.arange(entries, device=q.device) < topk_length[rows, None]
        chosen_SK = chosen_SK.masked_fill(~valid_SK, 0)
        kv_SKE = flat_kv_TE[chosen_SK].to(dtype).masked_fill(~valid_SK[..., None], 0)
        part_q_SHE, d_part_SHR = q[rows].to(dtype), d_out_SHR[rows].to(dtype)
        lse_HS = lse_SH[rows].to(dtype).T
        empty_HS = lse_HS.isneginf()
        logits_HSK = torch.einsum("she,ske->hsk", part_q_SHE, kv_SKE) * scale
        p_HSK = (logits_HSK - lse_HS.masked_fill(empty_HS, 0)[..., None]).exp()
        p_HSK = p_HSK.masked_fill(~valid_SK | empty_HS[..., None], 0)
        delta_HS = (d_part_SHR * out_SHR[rows].to(dtype)).sum(-1).T
        share_HS = torch.ones_like(lse_HS)
        if attn_sink is not None and d_sink_H is not None:
            share_HS = torch.sigmoid(lse_HS - attn_sink.to(dtype)[:, None]).masked_fill(empty_HS, 0)
            d_sink_H -= (delta_HS * (1 - share_HS)).masked_fill(empty_HS, 0).sum(-1)
        d_logits_HSK = torch.einsum("shr,skr->hsk", d_part_SHR, kv_SKE[..., :d_v]) - delta_HS[..., None]
        d_logits_HSK = d_logits_HSK * share_HS[..., None]
        if d_lse is not None:
            d_logits_HSK = d_logits_HSK + d_lse[rows].to(dtype).T[..., None]
        d_logits_HSK = p_HSK * d_logits_HSK * scale
        dq_SHE[rows] = torch.einsum("hsk,ske->she", d_logits_HSK, kv_SKE).to(dq_SHE.dtype)
        dkv_SKE = torch.einsum("hsk,she->ske", d_logits_HSK, part_q_SHE)
        dkv_SKE[..., :d_v] += torch.einsum("hsk,shr->skr", p_HSK * share_HS[..., None], d_part_SHR)
        where, what = chosen_SK[valid_SK], dkv_SKE[valid_SK]
        if deterministic:
            dkv_TE.index_put_((where,), what, accumulate=True)
        else:
            dkv_TE.index_add_(0, where, what)
    d_sink = None if attn_sink is None or d_sink_H is None else d_sink_H.to(attn_sink.dtype)
    return dq_SHE, dkv_TE.to(kv.dtype).reshape(kv.shape), d_sink
