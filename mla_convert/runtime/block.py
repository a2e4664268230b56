"""What absorbed and standard MLA blocks share: projections, tokens, selection, parallelism, state dicts.

Shape suffixes as in ``reference``: S this rank's queries, T keys, E = kv rank + rotary dims, K listed keys.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mla_convert.errors import BadInputError, CannotError
from mla_convert.names import HUGGINGFACE, Part
from mla_convert.runtime import reference
from mla_convert.runtime.cache import LatentCache
from mla_convert.runtime.dispatch import Backend, Requested, resolve_backend
from mla_convert.runtime.inputs import check_hidden_states, lengths_between, lists_of
from mla_convert.runtime.parallel import (
    Parallel,
    all_gather,
    copy_to_group,
    gather_rows,
    sum_over_group,
    sum_scatter_rows,
)
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.state import Layout, State, as_layout, gathered, prepared
from mla_convert.runtime.tokens import Tokens, place_in_cache, place_tokens
from mla_convert.runtime.weights import (
    AttentionWeights,
    IndexerWeights,
    combine_kv_rows,
    expect,
    shard_rows,
    split_kv_rows,
)

_INDEXER_FIELDS = {
    Part.INDEX_Q: "wq_b",
    Part.INDEX_K: "wk",
    Part.INDEX_K_NORM: "k_norm_weight",
    Part.INDEX_WEIGHTS: "weights_proj",
}
_BY_HEAD = (Part.Q, Part.Q_B, Part.K_B, Part.V_B, Part.KV_B)
_REPLICATED = (Part.Q_A, Part.Q_A_NORM, Part.KV_A, Part.KV_A_NORM)


class Attended(NamedTuple):
    """What a block returns: hidden states like the input, and the keys that it selected.

    ``indices`` [s, b, K] or packed [t, K], int32, relative to each sequence, padded with -1: for the blocks that
    share this one's indexer. They cover the rank's queries as they are inside attention (not cut by sequence
    parallelism). None where all keys were attended to.
    """

    output: Tensor
    indices: Tensor | None


class _Leaf(nn.Module):
    """A weight and perhaps a bias under one name, as checkpoints have them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trained)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=trained)


class MultiLatentAttention(nn.Module):
    """An MLA attention block; ``module`` has the two that can be made.

    Parameters have the names of a Hugging Face checkpoint (``kv_a_proj_with_mqa.weight``), this rank's part of
    each. ``load_state_dict`` takes combined or split up-projections, of the whole block or of this rank, in any
    dialect of ``names``.

    Args:
        spec: The whole block.
        weights: Its weights, whole; parameters share their memory where nothing is cut.
        kv_b: The up-projection: combined [H*(N+V), R], or K [H*N, R] and V [H*V, R].
        parallel: The groups of this rank; None for one rank.
        backend: What runs the attention; ``auto`` takes the kernels where the device has them.
        reduce_gradients: Sum the gradients of parameters over the ranks that hold different tokens, in the
            backward pass. False leaves each rank its part, for a wrapper that sums over the same ranks.

    Raises:
        BadInputError: a weight is missing or does not have the shape that ``spec`` implies.
        CannotError: the heads do not divide over the tensor-parallel ranks.
    """

    layout: ClassVar[Layout]

    def __init__(
        self,
        spec: AttentionSpec,
        weights: AttentionWeights,
        kv_b: Tensor | tuple[Tensor, Tensor],
        *,
        parallel: Parallel | None = None,
        backend: Requested | Backend = "auto",
        reduce_gradients: bool = True,
    ) -> None:
        super().__init__()
        weights.check(spec)
        self.whole_spec, self.parallel = spec, parallel or Parallel()
        self.spec = spec.shard(self.parallel.tp_rank, self.parallel.tp_size)
        self.reduce_gradients = reduce_gradients
        self._asked: Requested | Backend = backend
        self._backends: dict[str, Backend] = {}
        for part, up_projection in zip(self._up_parts(), self._up_projections(spec, kv_b), strict=True):
            self._add(part, up_projection)
        for part in (Part.Q, Part.Q_B, Part.O, *_REPLICATED):
            tensor = getattr(weights, part.value)
            if tensor is not None:
                self._add(part, tensor, getattr(weights, f"{part.value}_bias", None))
        if spec.indexer is not None:
            if weights.indexer is None:
                raise BadInputError("The indexer's weights are missing; the block's spec has an indexer.")
            self.indexer = nn.Module()
            for part, field in _INDEXER_FIELDS.items():
                bias = weights.indexer.k_norm_bias if part is Part.INDEX_K_NORM else None
                self._add(part, getattr(weights.indexer, field), bias)
        self.register_load_state_dict_pre_hook(_prepare)  # type: ignore[no-untyped-call]

    def _add(self, part: Part, whole: Tensor, bias: Tensor | None = None) -> None:
        rank, world = self.parallel.tp_rank, self.parallel.tp_size
        own = whole
        if world > 1 and part in _BY_HEAD:
            own = shard_rows(whole, self.whole_spec.heads, rank, world).clone()
        elif world > 1 and part is Part.O:
            own = whole.chunk(world, 1)[rank].contiguous()
        path, _, name = HUGGINGFACE.module(part).rpartition(".")
        home = self.get_submodule(path) if path else self
        # A choice of keys has no gradient, so nothing here trains the indexer.
        trained = own.is_floating_point() and part not in _INDEXER_FIELDS
        home.add_module(name, _Leaf(own, bias, trained))

    @classmethod
    def _up_parts(cls) -> tuple[Part, ...]:
        return (Part.KV_B,) if cls.layout == "combined" else (Part.K_B, Part.V_B)

    @classmethod
    def _up_projections(cls, spec: AttentionSpec, kv_b: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        if cls.layout == "combined":
            w_kv_b = kv_b if isinstance(kv_b, Tensor) else combine_kv_rows(*kv_b, spec)
            return (expect("kv_b", w_kv_b, spec.heads * (spec.nope + spec.v), spec.rank),)
        w_uk, w_uv = split_kv_rows(kv_b, spec) if isinstance(kv_b, Tensor) else kv_b
        expect("k_b", w_uk, spec.heads * spec.nope, spec.rank)
        return w_uk, expect("v_b", w_uv, spec.heads * spec.v, spec.rank)

    # Running

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        indices: Tensor | None = None,
        cache: LatentCache | None = None,
    ) -> Attended:
        """Causal attention of every sequence.

        Args:
            x: Layer-normed hidden states [s, b, D]; with ``cu_seqlens`` packed, [t, D] or [t, 1, D]. With context
                or sequence parallelism, the tokens of this rank (``parallel.take_context``).
            cu_seqlens: Where each packed sequence starts, and after the last one the total: of whole sequences,
                whatever part of them this rank has; with a cache, of the new tokens.
            indices: Keys to use in place of the block's own selection, as another block returned them.
            cache: Takes the tokens and holds those before; not for training.

        Raises:
            BadInputError: shapes that do not fit the block or each other.
            CannotError: tokens that the ranks cannot divide, or a cache with context parallelism or gradients.
        """
        x_SD, tokens = self._tokens(x, cu_seqlens, cache)
        parallel, spec, weights = self.parallel, self.spec, self._weights()
        own = tokens.rows(parallel.tp_rank, parallel.tp_size) if parallel.cuts_tokens else slice(None)
        positions_S = tokens.positions_S
        latent_SR, k_rope_SP = reference.cache_entries(x_SD, weights, spec, positions_S[own])
        kv_SE = torch.cat([latent_SR, k_rope_SP], dim=-1)
        kv_TE = self._all_keys(kv_SE, tokens, None if cache is None else cache.kv_TE)
        q_latent_SQ = reference.query_latent(x_SD, weights, spec)
        if indices is not None:
            indices_SK: Tensor | None = lists_of(indices, tokens)
            if cache is not None and spec.indexer is not None:
                self._index(
                    x_SD, q_latent_SQ, weights, tokens, own, cache
                )  # later steps may select themselves
        else:
            indices_SK = self._select(x_SD, q_latent_SQ, weights, tokens, own, cache)
        source = self._enter(x_SD if q_latent_SQ is None else q_latent_SQ)
        q_nope_SHN, q_rope_SHP = reference.queries_by_head(source, weights, spec, positions_S)
        if tokens.segments:
            o_SHV = self._attend(q_nope_SHN, q_rope_SHP, kv_TE, indices_SK, tokens)
        else:
            o_SHV = self._attend_to_nothing(q_nope_SHN, q_rope_SHP, kv_TE)
        partial_SD = reference.output_projection(o_SHV, replace(weights, o_bias=None))
        output_SD = self._leave(partial_SD)
        if weights.o_bias is not None:
            output_SD = output_SD + weights.o_bias
        if cache is not None:
            cache.grow(self._counts(x, cu_seqlens, cache))
        if indices is None and indices_SK is not None:
            outer = (-1,) if cu_seqlens is not None else (-1, x.shape[1])
            indices = indices_SK.reshape(*outer, indices_SK.shape[-1])
        return Attended(output_SD.reshape(x.shape), indices)

    @abstractmethod
    def _attend(
        self,
        q_nope_SHN: Tensor,
        q_rope_SHP: Tensor,
        kv_TE: Tensor,
        indices_SK: Tensor | None,
        tokens: Tokens,
    ) -> Tensor:
        """o [S, H, V] of this rank's heads."""

    def _attend_to_nothing(self, q_nope_SHN: Tensor, *others: Tensor) -> Tensor:
        """o [0, H, V] of a call without tokens: every input and weight has a part in it, so all get gradients."""
        parts = (q_nope_SHN, *others, *map(self.needed, self._up_parts()))
        whole = torch.stack([part.sum().to(q_nope_SHN.dtype) for part in parts]).sum()
        return whole.expand(0, self.spec.heads, self.spec.v)

    def backend(self, device: torch.device | str) -> Backend:
        """What runs the attention on a device, and what it has run so far."""
        if isinstance(self._asked, Backend):
            return self._asked
        if str(device) not in self._backends:
            self._backends[str(device)] = resolve_backend(self._asked, device)
        return self._backends[str(device)]

    def _tokens(
        self, x: Tensor, cu_seqlens: Tensor | Sequence[int] | None, cache: LatentCache | None
    ) -> tuple[Tensor, Tokens]:
        packed = cu_seqlens is not None
        weight = self.get_parameter(f"{HUGGINGFACE.module(Part.KV_A)}.weight")
        check_hidden_states(x, packed, self.spec.hidden, weight)
        lengths = self._counts(x, cu_seqlens, cache)
        if cache is not None:
            if self.parallel.cp_size > 1:
                raise CannotError(
                    "A cache cannot be used with context parallelism.", hint="Decode without it."
                )
            if torch.is_grad_enabled() and (
                x.requires_grad or any(p.requires_grad for p in self.parameters())
            ):
                raise CannotError("A cache keeps no gradients.", hint="Call the block under torch.no_grad().")
            cache.check_block(self.spec, x.device)
            cache.check(lengths)
            tokens = place_in_cache(cache.lengths, lengths, packed, cache.capacity, x.device)
        else:
            parallel = self.parallel
            tokens = place_tokens(lengths, packed, parallel.cp_rank, parallel.cp_size, x.device)
        x_SD = x.reshape(-1, self.spec.hidden)
        parts = self.parallel.tp_size if self.parallel.cuts_tokens else 1
        if x_SD.shape[0] * parts != tokens.keys_S.numel():
            raise BadInputError(
                f"x has {x_SD.shape[0]} tokens on each of {parts} ranks that cut them; the sequences give this "
                f"rank's group {tokens.keys_S.numel()}."
            )
        return x_SD, tokens

    def _counts(
        self, x: Tensor, cu_seqlens: Tensor | Sequence[int] | None, cache: LatentCache | None
    ) -> tuple[int, ...]:
        """Tokens of each sequence in this call, over all ranks."""
        if cu_seqlens is None:
            parts = self.parallel.tp_size if self.parallel.cuts_tokens else 1
            return (x.shape[0] * parts * self.parallel.cp_size,) * x.shape[1]
        return lengths_between(cu_seqlens)

    def _enter(self, x: Tensor) -> Tensor:
        """From what each tensor-parallel rank has of the tokens to what its heads need: all of them."""
        group = self.parallel.tp
        return gather_rows(x, group) if self.parallel.cuts_tokens else copy_to_group(x, group)

    def _leave(self, partial: Tensor) -> Tensor:
        """From each rank's share of every token to the sum of its own tokens."""
        group = self.parallel.tp
        return (
            sum_scatter_rows(partial, group) if self.parallel.cuts_tokens else sum_over_group(partial, group)
        )

    def _all_keys(self, own: Tensor, tokens: Tokens, cached: Tensor | None) -> Tensor:
        """Rows of this rank's tokens to rows of all keys, in the order that ``tokens`` counts them in."""
        rows = gather_rows(self._enter(own), self.parallel.cp)
        if cached is None:
            return rows if tokens.order_T is None else rows.index_select(0, tokens.order_T)
        cached.index_copy_(0, tokens.keys_S, rows.to(cached.dtype))
        return cached

    @torch.no_grad()
    def _index(
        self,
        x_SD: Tensor,
        q_latent_SQ: Tensor | None,
        weights: AttentionWeights,
        tokens: Tokens,
        own: slice,
        cache: LatentCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's queries and head weights of this rank's tokens, and the keys of all."""
        if weights.indexer is None:
            raise BadInputError("The block has no indexer.")
        q_SIJ, k_SJ, w_SI = reference.index_queries_keys(
            x_SD, q_latent_SQ, weights.indexer, self.spec, tokens.positions_S[own]
        )
        return q_SIJ, self._all_keys(k_SJ, tokens, None if cache is None else cache.index_TJ), w_SI

    @torch.no_grad()
    def _select(
        self,
        x_SD: Tensor,
        q_latent_SQ: Tensor | None,
        weights: AttentionWeights,
        tokens: Tokens,
        own: slice,
        cache: LatentCache | None,
    ) -> Tensor | None:
        """Keys of each query [S, K], relative to its sequence; None if the block is dense or all are selected.

        With sequence parallelism each rank selects for its own tokens.
        """
        indexer = self.spec.indexer
        if indexer is None or (cache is None and tokens.longest <= indexer.topk):
            return None
        q_SIJ, k_TJ, w_SI = self._index(x_SD, q_latent_SQ, weights, tokens, own, cache)
        if tokens.longest <= indexer.topk:
            return None
        k_TJ = k_TJ.to(q_SIJ.dtype)  # a cache may hold another, and autocast converts
        chosen_SK = torch.full((q_SIJ.shape[0], indexer.topk), -1, dtype=torch.int32, device=x_SD.device)
        for queries, keys in self._spans(tokens, own, x_SD.device):
            first = keys.start or 0
            starts_S, ends_S = tokens.starts_S[own][queries] - first, tokens.keys_S[own][queries] + 1 - first
            found_SK = self.backend(x_SD.device).indexer_select(
                q_SIJ[queries],
                k_TJ[keys],
                w_SI[queries],
                indexer.topk,
                starts=starts_S.to(torch.int32),
                ends=ends_S.to(torch.int32),
            )
            relative_SK = found_SK - starts_S[:, None].to(torch.int32)
            chosen_SK[queries, : found_SK.shape[1]] = relative_SK.masked_fill(found_SK < 0, -1)
        return all_gather(chosen_SK, self.parallel.tp) if self.parallel.cuts_tokens else chosen_SK

    def _spans(
        self, tokens: Tokens, own: slice, device: torch.device
    ) -> Iterator[tuple[Tensor | slice, slice]]:
        """Some of this rank's queries, and all keys that one of them may see.

        Kernels skip what a query does not see, and take all at once; the reference goes sequence by sequence.
        """
        if self.backend(device).name == "tilelang":
            yield slice(None), slice(None)
            return
        first, count = own.start or 0, tokens.keys_S[own].numel()
        for segment in tokens.segments:
            queries = segment.queries - first
            queries = queries[(queries >= 0) & (queries < count)]
            if queries.numel():
                yield queries, segment.keys

    # Weights

    def _weight(self, part: Part, field: str = "weight") -> Tensor | None:
        """A parameter whose gradient will be the sum over all ranks that contribute to it."""
        leaf = self._modules.get(HUGGINGFACE.module(part))
        parameter = None if leaf is None else getattr(leaf, field)
        if parameter is None or not self.reduce_gradients:
            return parameter
        cut = field == "weight" and (part in _BY_HEAD or part is Part.O)
        if self.parallel.cuts_tokens and not cut:
            parameter = copy_to_group(parameter, self.parallel.tp)
        return copy_to_group(parameter, self.parallel.cp)

    def needed(self, part: Part) -> Tensor:
        """A weight that the block has, as ``_weight`` gives it.

        Raises:
            BadInputError: it has not.
        """
        weight = self._weight(part)
        if weight is None:
            raise BadInputError(f"The block has no {HUGGINGFACE.module(part)}.")
        return weight

    def _weights(self) -> AttentionWeights:
        found: dict[str, Any] = {}
        for part in (Part.Q, Part.Q_B, Part.O, *_REPLICATED):
            found[part.value] = self._weight(part)
            if part in (Part.Q_A, Part.KV_A, Part.O):
                found[f"{part.value}_bias"] = self._weight(part, "bias")
        indexer = None
        if self.spec.indexer is not None:
            leaves = {
                field: self.get_submodule(HUGGINGFACE.module(p)) for p, field in _INDEXER_FIELDS.items()
            }
            tensors = {field: leaf.weight for field, leaf in leaves.items()}
            indexer = IndexerWeights(**tensors, k_norm_bias=leaves["k_norm_weight"].bias)  # type: ignore[arg-type]
        return AttentionWeights(**found, indexer=indexer)

    def export_state_dict(self, layout: Layout | None = None, *, whole: bool = False) -> State:
        """The weights under checkpoint names, in either layout, bit for bit.

        Args:
            layout: ``split`` or ``combined``; None as the block holds them.
            whole: All heads, gathered over the tensor-parallel ranks, which all have to ask; else this rank's.
        """
        state: State = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        spec = self.spec
        if whole:
            state, spec = gathered(state, self.parallel.tp), self.whole_spec
        return as_layout(state, layout or self.layout, spec)


def _prepare(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Turn what is being loaded into what the block holds, see ``state.prepared``."""
    if not isinstance(module, MultiLatentAttention):
        raise TypeError(f"{type(module).__name__} is no attention block")
    own: Mapping[str, Tensor] = {
        name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)
    }
    ready = prepared(own, module.layout, module.whole_spec, module.parallel.tp_rank, module.parallel.tp_size)
    state.update({prefix + name: tensor for name, tensor in ready.items()})
