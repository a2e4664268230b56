"""State dicts of one attention block: names of every dialect, either layout, whole or one rank's part.

Rows are moved and never computed, so every bit stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from mla_convert.errors import BadInputError
from mla_convert.names import DIALECTS, HUGGINGFACE, Part
from mla_convert.quant import SCALE_FIELDS
from mla_convert.runtime.parallel import Group, all_gather
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.weights import combine_kv_rows, shard_rows, split_kv_rows

Layout = Literal["split", "combined"]
State = dict[str, Tensor]

_SPELLINGS = {
    spelling: part for dialect in DIALECTS for part, found in dialect.modules.items() for spelling in found
}
_WEIGHTS = {part: HUGGINGFACE.module(part) + ".weight" for part in Part}
_KV_B, _K_B, _V_B = (_WEIGHTS[part] for part in (Part.KV_B, Part.K_B, Part.V_B))
_BY_HEAD = tuple(_WEIGHTS[part] for part in (Part.Q, Part.Q_B, Part.KV_B, Part.K_B, Part.V_B))
_O = _WEIGHTS[Part.O]


def prepared(
    state: Mapping[str, Tensor], layout: Layout, spec: AttentionSpec, rank: int, world: int
) -> State:
    """What a block of this layout holds, out of what a checkpoint stores.

    Args:
        state: Tensors by their names within the block, of the whole block or of one tensor-parallel rank; names
            that no dialect knows stay.
        spec: The whole block.

    Raises:
        BadInputError: a weight is quantised, has a shape that does not fit, or K and V stand beside a combined
            tensor that says something else.
    """
    ready: State = {}
    for name, tensor in state.items():
        module, _, field = name.rpartition(".")
        part = _SPELLINGS.get(module)
        if part is not None:
            if field in SCALE_FIELDS or (field == "weight" and tensor.element_size() == 1):
                raise BadInputError(
                    f"{name} is quantised ({tensor.dtype}); a block computes with the dequantised weight.",
                    hint="Load the layer with mla_convert.attention.load_attention, which applies the scales.",
                )
            name = f"{HUGGINGFACE.module(part)}.{field}"
        ready[name] = tensor
    ready = as_layout(ready, layout, _fitting(ready, spec, rank, world))
    if world > 1:
        for name in _BY_HEAD:
            rows = _rows(name, spec)
            if name in ready and ready[name].shape[0] == rows:
                ready[name] = shard_rows(ready[name], spec.heads, rank, world)
        if _O in ready and ready[_O].shape[1] == spec.heads * spec.v:
            ready[_O] = ready[_O].chunk(world, 1)[rank]
    return ready


def as_layout(state: State, layout: Layout, spec: AttentionSpec) -> State:
    """The same weights with the up-projection split or combined; ``spec`` has the heads that they have."""
    if layout not in get_args(Layout):
        raise ValueError(f"no layout {layout!r}; there are {' and '.join(get_args(Layout))}")
    state = dict(state)
    combined = state.get(_KV_B)
    halves = (state[_K_B], state[_V_B]) if _K_B in state and _V_B in state else None
    if combined is not None and halves is not None:
        rejoined = combine_kv_rows(*halves, spec)
        if rejoined.dtype != combined.dtype or not _same_bits(rejoined, combined):
            raise BadInputError(f"{_K_B} and {_V_B} do not hold the rows of {_KV_B} beside them.")
    if layout == "split" and combined is not None:
        state[_K_B], state[_V_B] = halves or split_kv_rows(combined, spec)
        del state[_KV_B]
    elif layout == "combined" and halves is not None:
        state[_KV_B] = combine_kv_rows(*halves, spec) if combined is None else combined
        del state[_K_B], state[_V_B]
    return state


def gathered(state: State, group: Group | None) -> State:
    """The weights of all heads, from every tensor-parallel rank's part."""
    if group is None:
        return state
    whole = dict(state)
    for name in _BY_HEAD:
        if name in whole:
            whole[name] = all_gather(whole[name], group)
    whole[_O] = all_gather(whole[_O].T.contiguous(), group).T.contiguous()
    return whole


def _fitting(state: Mapping[str, Tensor], spec: AttentionSpec, rank: int, world: int) -> AttentionSpec:
    """The spec whose heads the up-projection has: of the block, or of one rank."""
    local = spec.shard(rank, world)
    for name in (_KV_B, _K_B, _V_B):
        if name in state:
            if state[name].ndim != 2:
                raise BadInputError(f"{name} has shape {list(state[name].shape)}; it must be a matrix.")
            return local if state[name].shape[0] == _rows(name, local) else spec
    return spec


def _rows(name: str, spec: AttentionSpec) -> int:
    each = {_KV_B: spec.nope + spec.v, _K_B: spec.nope, _V_B: spec.v}
    return spec.heads * each.get(name, spec.qk_dim)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
