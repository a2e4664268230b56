"""Which form of a block's attention costs least where every token is seen, and the form that is not absorbed.

The same result can be had in two ways. *Multi-head*: expand keys and values of every head from the latent, then
attention with nope + rope and v dims a head (192 and 128), for which torch has fast kernels. *Absorbed*: all heads
attend to the latent, rank + rope and rank dims a head (576 and 512): 3.4 times the work for a pair of tokens, but
nothing to expand. A selection leaves no choice, unless there are no more tokens than it selects.

Counted are multiplications and additions of the products; the kernels for both forms run at like rates.

S queries, T tokens, H heads, N nope dims, P rotary dims, V value dims, X = N + P, R kv rank, E = R + P, B sequences
of one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.tokens import Segment, Tokens
from mla_convert.runtime.weights import expect

FormName = Literal["multi-head", "absorbed dense", "absorbed sparse"]

CALL = 20_000_000_000
"""Operations in the time that one more size of sequences costs multi-head beside its own, about 40 us."""

LARGEST_MASK = 1 << 28
"""Entries of a mask [S, T], a byte each, beyond which multi-head needs too much memory."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form that was chosen, and why: a clause with the numbers, without a full stop."""

    name: FormName
    reason: str


def choose_form(spec: AttentionSpec, tokens: Tokens) -> Form:
    """The form with the fewest operations for queries that see all tokens up to their own."""
    sizes = [segment.size for segment in tokens.segments]
    queries, keys = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    pairs = sum(segment.pairs for segment in tokens.segments)
    expand, attend = 2 * spec.heads * spec.rank * (spec.nope + spec.v), 2 * spec.heads * pairs
    absorbed = queries * expand + attend * (2 * spec.rank + spec.rope)
    expanded = keys * expand + attend * (spec.qk_dim + spec.v) + CALL * max(0, len(set(sizes)) - 1)
    of = f"{queries} queries and {keys} tokens"
    if any(size[0] < size[1] and size[0] * size[1] > LARGEST_MASK for size in sizes):
        return Form("absorbed dense", f"{of} would need too large a mask in the multi-head form")
    if expanded < absorbed:
        return Form("multi-head", f"{of} take {_amount(expanded)} so and {_amount(absorbed)} absorbed")
    return Form("absorbed dense", f"{of} take {_amount(absorbed)} so and {_amount(expanded)} multi-head")


def multi_head(
    q_nope_SHN: Tensor,
    q_rope_SHP: Tensor,
    kv_TE: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    spec: AttentionSpec,
    tokens: Tokens,
) -> Tensor:
    """Expanded keys and values through torch's own attention, sequences of one size together: o [S, H, V].

    Args:
        kv_TE: Normed latent and rotated key of every token.
        w_uk: [H·N, R]. w_uv: [H·V, R].
    """
    w_uk = expect("k_b", w_uk, spec.heads * spec.nope, spec.rank)
    w_uv = expect("v_b", w_uv, spec.heads * spec.v, spec.rank)
    q_SHX = torch.cat([q_nope_SHN, q_rope_SHP], dim=-1)
    by_size: dict[tuple[int, int], list[Segment]] = {}
    for segment in tokens.segments:
        by_size.setdefault(segment.size, []).append(segment)
    found: dict[int, Tensor] = {}
    for (_, keys), segments in by_size.items():
        q_BSHX = torch.stack([q_SHX[segment.queries] for segment in segments])
        kv_BTE = torch.stack([kv_TE[segment.keys] for segment in segments])
        latent_BTR, k_rope_BTP = kv_BTE[..., : spec.rank], kv_BTE[..., spec.rank :]
        k_nope_BTHN = F.linear(latent_BTR, w_uk).view(len(segments), keys, spec.heads, spec.nope)
        k_rope_BTHP = k_rope_BTP[:, :, None].expand(-1, -1, spec.heads, -1)
        value_BTHV = F.linear(latent_BTR, w_uv).view(len(segments), keys, spec.heads, spec.v)
        out_BHSV = F.scaled_dot_product_attention(
            q_BSHX.transpose(1, 2),
            torch.cat([k_nope_BTHN, k_rope_BTHP], dim=-1).transpose(1, 2),
            value_BTHV.transpose(1, 2),
            **_causal(segments[0], keys, tokens),
            scale=spec.softmax_scale,
        )
        found |= zip((segment.keys.start for segment in segments), out_BHSV.transpose(1, 2), strict=True)
    return tokens.by_segment(lambda segment: found[segment.keys.start])


def _causal(segment: Segment, keys: int, tokens: Tokens) -> dict[str, Any]:
    """How ``scaled_dot_product_attention`` is told what the queries of a sequence see, whatever part they are."""
    if segment.queries.numel() == keys:
        return {"is_causal": True}
    own_S = tokens.positions_S[segment.queries]
    return {"attn_mask": torch.arange(keys, device=own_S.device) <= own_S[:, None]}


def _amount(operations: int) -> str:
    """Operations with a unit that keeps them readable."""
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if operations >= size:
            return f"{operations / size:.3g} {unit}"
    return f"{operations / 1e6:.3g} MFLOP"
