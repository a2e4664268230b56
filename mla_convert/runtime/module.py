"""MLA attention blocks as PyTorch modules: absorbed, with split weights, and standard, with combined ones.

Both take the same inputs, load and save either layout, and compute the same function; ``StandardMLA`` expands
keys and values for every head and is what the absorbed one is checked against.

    block = AbsorbedMLA(spec, weights, w_kv_b)
    block.load_state_dict(torch.load(...))  # combined or split
    output, indices = block(x)  # [s, b, hidden]
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mla_convert.names import Part
from mla_convert.runtime import reference
from mla_convert.runtime.block import Attended, MultiLatentAttention
from mla_convert.runtime.cache import LatentCache
from mla_convert.runtime.forms import Form, choose_form, multi_head
from mla_convert.runtime.numerics import chunks
from mla_convert.runtime.reference import Projected
from mla_convert.runtime.tokens import Decoding, Tokens

__all__ = ["AbsorbedMLA", "Attended", "LatentCache", "StandardMLA"]


class AbsorbedMLA(MultiLatentAttention):
    """The block with split up-projections: K folded into the query, V behind the softmax, one latent for all heads.

    The attention goes through ``dispatch.Backend``; ``backend(device).explain()`` says what ran. Where every token
    is seen and expanding keys and values costs less, as in most of training and prefill, that is done instead
    (``forms.choose_form``).

    Attributes:
        form: "absorbed" never expands keys and values.
    """

    layout = "split"
    form: Literal["auto", "absorbed"] = "auto"

    def _attend(
        self,
        q_nope_SHN: Tensor,
        q_rope_SHP: Tensor,
        kv_TE: Tensor,
        indices_SK: Tensor | None,
        tokens: Tokens,
    ) -> Tensor:
        spec, backend = self.spec, self.backend(q_nope_SHN.device)
        w_uk, w_uv, kv_TE = self.needed(Part.K_B), self.needed(Part.V_B), kv_TE.to(q_nope_SHN.dtype)
        form = self._choose(indices_SK, tokens)
        backend.note_form(form.name, form.reason)
        if form.name == "multi-head":
            return multi_head(q_nope_SHN, q_rope_SHP, kv_TE, w_uk, w_uv, spec, tokens)
        w_uk_HNR, w_uv_HVR = w_uk.view(spec.heads, spec.nope, -1), w_uv.view(spec.heads, spec.v, -1)
        q_SHE = torch.cat([torch.einsum("shn,hnr->shr", q_nope_SHN, w_uk_HNR), q_rope_SHP], dim=-1)
        flat_SK = None if indices_SK is None else tokens.flat(indices_SK)
        if tokens.decoding is not None:
            out_SHR = self._decode(q_SHE, kv_TE, flat_SK, tokens.decoding)
        elif flat_SK is not None:
            out_SHR, _ = backend.sparse_mla(q_SHE, kv_TE, flat_SK, spec.softmax_scale, d_v=spec.rank)
        else:
            out_SHR = self._dense(q_SHE, kv_TE, tokens)
        return torch.einsum("shr,hvr->shv", out_SHR, w_uv_HVR)

    def _choose(self, indices_SK: Tensor | None, tokens: Tokens) -> Form:
        if indices_SK is not None:
            return Form("absorbed sparse", f"{indices_SK.shape[1]} tokens are listed for each query")
        if tokens.decoding is not None:
            return Form("absorbed dense", f"{tokens.decoding.count} new tokens a sequence are decoded")
        if self.form == "absorbed":
            return Form("absorbed dense", "the absorbed form was asked for")
        return choose_form(self.spec, tokens)

    def _decode(self, q_SHE: Tensor, kv_TE: Tensor, flat_SK: Tensor | None, decoding: Decoding) -> Tensor:
        out_BSHR, _ = self.backend(q_SHE.device).decode_mla(
            decoding.by_sequence(q_SHE),
            kv_TE.view(decoding.lengths_B.numel(), -1, kv_TE.shape[-1]),
            cache_seqlens=decoding.lengths_B,
            scale=self.spec.softmax_scale,
            causal=flat_SK is None,
            indices=None if flat_SK is None else decoding.by_sequence(flat_SK),
            d_v=self.spec.rank,
        )
        return decoding.by_row(out_BSHR)

    def _dense(self, q_SHE: Tensor, kv_TE: Tensor, tokens: Tokens) -> Tensor:
        backend, scale, d_v = self.backend(q_SHE.device), self.spec.softmax_scale, self.spec.rank
        if backend.name == "reference":
            positions_S = tokens.positions_S
            return tokens.by_segment(
                lambda segment: backend.dense_mla(
                    q_SHE[segment.queries],
                    kv_TE[segment.keys],
                    scale,
                    rows_S=positions_S[segment.queries],
                    d_v=d_v,
                )[0]
            )
        if torch.is_grad_enabled() and (q_SHE.requires_grad or kv_TE.requires_grad):
            # Of the kernels, only that for lists has a backward pass.
            parts = [
                backend.sparse_mla(q_SHE[rows], kv_TE, tokens.every_key(rows), scale, d_v=d_v)[0]
                for rows in chunks(q_SHE.shape[0], 4 * tokens.longest)
            ]
            return torch.cat(parts)
        starts, ends = tokens.starts_S.to(torch.int32), (tokens.keys_S + 1).to(torch.int32)
        return backend.dense_mla(q_SHE, kv_TE, scale, starts=starts, ends=ends, d_v=d_v)[0]


class StandardMLA(MultiLatentAttention):
    """The block with the combined up-projection, expanded to keys and values of every head, in plain PyTorch."""

    layout = "combined"

    def _attend(
        self,
        q_nope_SHN: Tensor,
        q_rope_SHP: Tensor,
        kv_TE: Tensor,
        indices_SK: Tensor | None,
        tokens: Tokens,
    ) -> Tensor:
        w_kv_b, positions_S = self.needed(Part.KV_B), tokens.positions_S
        kv_TE, rank = kv_TE.to(q_nope_SHN.dtype), self.spec.rank
        return tokens.by_segment(
            lambda segment: reference.standard_attention(
                Projected(
                    q_nope_SHN[segment.queries],
                    q_rope_SHP[segment.queries],
                    kv_TE[segment.keys, :rank],
                    kv_TE[segment.keys, rank:],
                ),
                w_kv_b,
                self.spec,
                indices=None if indices_SK is None else indices_SK[segment.queries],
                rows_S=positions_S[segment.queries],
            )
        )
