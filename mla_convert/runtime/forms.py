"""Which form of one block's attention costs least for a call, and running it.

The same result can be had in three ways. *Multi-head*: expand keys and values of every head from the latent, then
attention with nope + rope and v dims a head (192 and 128), for which torch has fast kernels. *Absorbed dense*: all
heads attend to the latent, rank + rope and rank dims a head (576 and 512): 3.4 times the work for a pair of tokens,
but nothing to expand. *Absorbed sparse*: the same for the selected tokens alone. A selection that leaves nothing
out may be ignored, so with no more tokens than top-k all three are open.

Counted are multiplications and additions of the products; the kernels for the three forms run at like rates.

S queries, T tokens, H heads, N nope dims, P rotary dims, V value dims, R kv rank, K tokens selected for a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from mla_convert.runtime.dispatch import Backend
from mla_convert.runtime.reference import Projected
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.weights import expect

FormName = Literal["multi-head", "absorbed dense", "absorbed sparse"]


@dataclass(frozen=True, slots=True)
class Form:
    """The form that was chosen, and why: a clause with the numbers, without a full stop."""

    name: FormName
    reason: str


def choose_form(spec: AttentionSpec, queries: int, tokens: int, *, topk: int | None = None) -> Form:
    """The form with the fewest operations for the last ``queries`` of ``tokens`` tokens, causal.

    Args:
        topk: How many tokens a query may see at most; None if it sees all up to itself.
    """
    pairs = sum_of_spans(queries, tokens, tokens)
    expand = 2 * tokens * spec.heads * spec.rank * (spec.nope + spec.v)
    absorb = 2 * queries * spec.heads * spec.rank * (spec.nope + spec.v)
    each = 2 * spec.heads * (2 * spec.rank + spec.rope)
    cost: dict[FormName, int] = {}
    selects = topk is not None and tokens > topk
    if not selects:
        cost["multi-head"] = expand + 2 * spec.heads * (spec.qk_dim + spec.v) * pairs
        cost["absorbed dense"] = absorb + each * pairs
    if topk is not None:
        cost["absorbed sparse"] = absorb + each * sum_of_spans(queries, tokens, topk)
    name = min(cost, key=lambda form: cost[form])
    reason = f"{queries} queries and {tokens} tokens take {_amount(cost[name])} so"
    others = [f"{_amount(cost[form])} {form}" for form in cost if form != name]
    reason += f" and {' or '.join(others)}" if others else ""
    if topk is not None:
        reason += f" (top-k {topk} {'leaves tokens out' if selects else 'selects every token'})"
    return Form(name, reason)


def sum_of_spans(queries: int, tokens: int, most: int) -> int:
    """Pairs of a query and a token it sees: query s sees tokens - queries + s + 1 of them, at most ``most``."""
    first = tokens - queries + 1
    capped = max(0, min(queries, tokens - most))
    growing = queries - capped
    return growing * first + growing * (growing - 1) // 2 + capped * most


def attend(
    backend: Backend,
    projected: Projected,
    w_uk: Tensor,
    w_uv: Tensor,
    spec: AttentionSpec,
    *,
    indices: Tensor | None = None,
    topk: int | None = None,
) -> Tensor:
    """Causal attention of the last S of T tokens in the form that costs least: o [S, H, V].

    ``backend.ran`` counts the forms, and ``backend.explain()`` gives the numbers of the last choice of each.

    Args:
        projected: S queries and all T tokens.
        w_uk: [H·N, R]. w_uv: [H·V, R].
        indices: Tokens that each query may see [S, K], as the indexer selects them: from those up to the query,
            all where there are no more than K. Entries after the query are dropped.
        topk: K where ``indices`` is not given since no query has more than K tokens before it.
    """
    queries, tokens = projected.q_nope_SHN.shape[0], projected.latent_SR.shape[0]
    if indices is not None:
        topk = indices.shape[1]
    form = choose_form(spec, queries, tokens, topk=topk)
    if form.name == "absorbed sparse" and indices is None:
        raise ValueError(f"{tokens} tokens are more than top-k {topk}: the selection is needed")
    backend.note_form(form.name, form.reason)
    if form.name == "multi-head":
        return multi_head(projected, w_uk, w_uv, spec)
    w_uk_HNR = expect("k_b", w_uk, spec.heads * spec.nope, spec.rank).reshape(spec.heads, spec.nope, -1)
    w_uv_HVR = expect("v_b", w_uv, spec.heads * spec.v, spec.rank).reshape(spec.heads, spec.v, -1)
    q_nope_SHR = torch.einsum("shn,hnr->shr", projected.q_nope_SHN, w_uk_HNR)
    q_SHE = torch.cat([q_nope_SHR, projected.q_rope_SHP], dim=-1)
    kv_TE = torch.cat([projected.latent_SR, projected.k_rope_SP], dim=-1)
    if form.name == "absorbed dense" or indices is None:
        out_SHR, _ = backend.dense_mla(q_SHE, kv_TE, spec.softmax_scale, d_v=spec.rank)
    else:
        rows_S = torch.arange(tokens - queries, tokens, device=indices.device)
        indices = indices.masked_fill(indices > rows_S[:, None], -1)
        out_SHR, _ = backend.sparse_mla(q_SHE, kv_TE, indices, spec.softmax_scale, d_v=spec.rank)
    return torch.einsum("shr,hvr->shv", out_SHR, w_uv_HVR)


def multi_head(projected: Projected, w_uk: Tensor, w_uv: Tensor, spec: AttentionSpec) -> Tensor:
    """Expanded keys and values through torch's own attention, causal for the last S of T tokens: o [S, H, V]."""
    p, tokens = projected, projected.latent_SR.shape[0]
    queries = p.q_nope_SHN.shape[0]
    w_uk = expect("k_b", w_uk, spec.heads * spec.nope, spec.rank)
    w_uv = expect("v_b", w_uv, spec.heads * spec.v, spec.rank)
    k_nope_THN = F.linear(p.latent_SR, w_uk).view(tokens, spec.heads, spec.nope)
    value_THV = F.linear(p.latent_SR, w_uv).view(tokens, spec.heads, spec.v)
    k_THX = torch.cat([k_nope_THN, p.k_rope_SP[:, None].expand(-1, spec.heads, -1)], dim=-1)
    q_SHX = torch.cat([p.q_nope_SHN, p.q_rope_SHP], dim=-1)
    mask = None
    if queries < tokens:
        rows_S = torch.arange(tokens - queries, tokens, device=q_SHX.device)
        mask = torch.arange(tokens, device=q_SHX.device) <= rows_S[:, None]
    q, k, value = (x.transpose(0, 1)[None] for x in (q_SHX, k_THX, value_THV))
    out_HSV = F.scaled_dot_product_attention(
        q, k, value, attn_mask=mask, is_causal=mask is None, scale=spec.softmax_scale
    )
    return out_HSV[0].transpose(0, 1)


def _amount(operations: int) -> str:
    """Operations with a unit that keeps them readable."""
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if operations >= size:
            return f"{operations / size:.3g} {unit}"
    return f"{operations / 1e6:.3g} MFLOP"
