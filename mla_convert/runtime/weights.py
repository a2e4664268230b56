"""The tensors of one attention block, and how they are cut: by K and V rows, and by tensor-parallel rank.

Letters in shapes are those of ``reference``. Projections keep the checkpoint's [out, in] layout; w_kv_b is
[H*(N+V), R], head by head, N rows of K and then V rows of V.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from mla_convert.errors import BadInputError
from mla_convert.runtime.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Tensors, some of them absent, that move together."""

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """The same weights in another dtype or on another device."""
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = None if value is None else value.to(dtype=dtype, device=device)
        return type(self)(**moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights(_Weights):
    """wq_b [I*J, Q], wk [J, D], k_norm_weight [J], k_norm_bias [J] or None, weights_proj [I, D]."""

    wq_b: Tensor
    wk: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor | None = None
    weights_proj: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights(_Weights):
    """Every weight of one block except kv_b, which is passed beside it, combined or split.

    Either q_a [Q, D], q_a_norm [Q] and q_b [H*(N+P), Q], or q [H*(N+P), D]; kv_a [R+P, D], kv_a_norm [R],
    o [D, H*V]; biases where the checkpoint has them.
    """

    kv_a: Tensor
    kv_a_norm: Tensor
    o: Tensor
    q: Tensor | None = None
    q_a: Tensor | None = None
    q_a_norm: Tensor | None = None
    q_b: Tensor | None = None
    q_a_bias: Tensor | None = None
    kv_a_bias: Tensor | None = None
    o_bias: Tensor | None = None
    indexer: IndexerWeights | None = None

    def shard(self, spec: AttentionSpec, rank: int, world: int) -> AttentionWeights:
        """What tensor-parallel rank ``rank`` of ``world`` holds: its heads of q and of o, the rest whole.

        Args:
            spec: The whole block's spec, as before ``spec.shard``.

        The output bias goes to rank 0 alone, so that the ranks' outputs can simply be summed.
        """
        columns = spec.shard(rank, world).heads * spec.v
        return replace(
            self,
            q=None if self.q is None else shard_rows(self.q, spec.heads, rank, world),
            q_b=None if self.q_b is None else shard_rows(self.q_b, spec.heads, rank, world),
            o=self.o[:, rank * columns : (rank + 1) * columns],
            o_bias=self.o_bias if rank == 0 else None,
        )

    def check(self, spec: AttentionSpec) -> None:
        """Raise BadInputError if a weight is missing or does not have the shape that ``spec`` implies."""
        q_rows = spec.heads * spec.qk_dim
        if spec.q_rank is None:
            expect("q", self.q, q_rows, spec.hidden)
        else:
            expect("q_a", self.q_a, spec.q_rank, spec.hidden)
            expect("q_a_norm", self.q_a_norm, spec.q_rank)
            expect("q_b", self.q_b, q_rows, spec.q_rank)
        expect("kv_a", self.kv_a, spec.kv_dim, spec.hidden)
        expect("kv_a_norm", self.kv_a_norm, spec.rank)
        expect("o", self.o, spec.hidden, spec.heads * spec.v)


def shard_rows(w: Tensor, heads: int, rank: int, world: int) -> Tensor:
    """The rows of a head-major weight [heads*x, …] that belong to one rank's heads, as a view.

    Raises:
        BadInputError: the rows are not whole heads, or the heads do not divide.
    """
    if w.shape[0] % heads or heads % world or not 0 <= rank < world:
        raise BadInputError(
            f"{w.shape[0]} rows of {heads} heads cannot be cut for rank {rank} of {world}.",
        )
    rows = w.shape[0] // world
    return w[rank * rows : (rank + 1) * rows]


def split_kv_rows(w_kv_b: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Combined [H*(N+V), R] to w_uk [H*N, R] and w_uv [H*V, R]; rows move, bits stay as they are."""
    expect("kv_b", w_kv_b, spec.heads * (spec.nope + spec.v), w_kv_b.shape[-1])
    w_HXR = w_kv_b.reshape(spec.heads, spec.nope + spec.v, -1)
    return w_HXR[:, : spec.nope].flatten(0, 1), w_HXR[:, spec.nope :].flatten(0, 1)


def combine_kv_rows(w_uk: Tensor, w_uv: Tensor, spec: AttentionSpec) -> Tensor:
    """The inverse of ``split_kv_rows``."""
    expect("k_b", w_uk, spec.heads * spec.nope, w_uv.shape[-1])
    expect("v_b", w_uv, spec.heads * spec.v, w_uk.shape[-1])
    w_uk_HNR, w_uv_HVR = (w.reshape(spec.heads, -1, w.shape[-1]) for w in (w_uk, w_uv))
    return torch.cat((w_uk_HNR, w_uv_HVR), dim=1).flatten(0, 1)


def expect(name: str, weight: Tensor | None, *shape: int) -> Tensor:
    """``weight`` itself, if it is there and has this shape.

    Raises:
        BadInputError: it does not; the message names the tensor and both shapes.
    """
    if weight is None:
        raise BadInputError(f"{name} is missing; the block needs it with shape {list(shape)}.")
    if tuple(weight.shape) != shape:
        raise BadInputError(
            f"{name} has shape {list(weight.shape)}; the block's geometry needs {list(shape)}."
        )
    return weight
