"""Splits and combines the up-projections of a torch_dist checkpoint, and the optimizer states that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mla_convert.errors import BadInputError, CannotError
from mla_convert.geometry import AttentionBlock
from mla_convert.megatron.changes import Changes, StateKey, parse_state_key
from mla_convert.megatron.eras import Norms
from mla_convert.megatron.frames import Frame, frame
from mla_convert.megatron.model import FUSED_NORM_FIELDS, Key
from mla_convert.megatron.rearranging import RowsFrom
from mla_convert.names import MEGATRON, Part, parse_up_projection
from mla_convert.split_kv import KVLayout, k_moves, v_moves

_MODULES = {part: MEGATRON.module(part) for part in (Part.KV_B, Part.K_B, Part.V_B)}


def split_up_projections(changes: Changes, *, keep: bool) -> None:
    """Replace every combined up-projection by K and V; ``keep`` leaves it beside them."""
    _refuse_fused_norm(changes)
    for key, block in _weights(changes, Part.KV_B):
        _split(changes, key, block, keep)
    for text, state in _states(changes, Part.KV_B):
        shared = changes.shared_state(text)
        changes.edits.objects[text] = {state.of(_MODULES[part]): shared for part in (Part.K_B, Part.V_B)}
        if not keep:
            changes.edits.removed.add(text)


def combine_up_projections(changes: Changes) -> None:
    """Replace every K and V by the combined up-projection; where that is there too, they must equal it."""
    for key, block in _weights(changes, Part.K_B):
        _combine(changes, key, block)
    for text, state in _states(changes, Part.K_B):
        shared = changes.shared_state(text)
        v, combined = (state.of(_MODULES[part]) for part in (Part.V_B, Part.KV_B))
        if v in changes.metadata.objects:
            changes.shared_state(v)
            changes.edits.removed.add(v)
        if combined not in changes.metadata.objects:
            changes.edits.objects[text] = {combined: shared}
        changes.edits.removed.add(text)


def split_pairs(changes: Changes) -> Iterator[tuple[Frame, Frame, str, list[RowsFrom]]]:
    """Every K with its V, the combined tensor's key, and which of their rows make that up."""
    for key, block in _weights(changes, Part.K_B):
        k, v = _halves(changes, key, block)
        yield k, v, changes.beside(key, Part.KV_B), _combined_rows(k, v, block.kv)


def _weights(changes: Changes, part: Part) -> Iterator[tuple[Key, AttentionBlock]]:
    """The weights of an up-projection, and the states that follow them, with the block they belong to."""
    for key in changes.stored():
        parsed = parse_up_projection(key.name)
        if parsed and parsed.dialect is MEGATRON and parsed.part is part and parsed.field == "weight":
            named = parse_up_projection(changes.first_layer(key))
            yield key, changes.block(key, named.prefix if named else "")


def _states(changes: Changes, part: Part) -> Iterator[tuple[str, StateKey]]:
    for text in changes.metadata.objects:
        state = parse_state_key(text)
        if state and state.module == _MODULES[part] and text not in changes.edits.removed:
            yield text, state


def _refuse_fused_norm(changes: Changes) -> None:
    """Nothing in Megatron has both split up-projections and a norm that is fused with them."""
    if changes.options.norms is Norms.STANDALONE:
        return
    leaf = "." + _MODULES[Part.KV_B]
    fused = [
        k.text for k in changes.stored() if k.field in FUSED_NORM_FIELDS and f".{k.module}".endswith(leaf)
    ]
    if fused:
        raise CannotError(
            f"the norm of the KV latent is fused with the up-projection ({len(fused)} tensors, {fused[0]} among them); "
            "absorbed attention, which alone has split up-projections, does not read it there",
            hint="give --norms standalone to move it to kv_layernorm.weight",
            details=fused,
        )


def _split(changes: Changes, key: Key, block: AttentionBlock, keep: bool) -> None:
    kv = block.kv
    stored = frame(key, changes.metadata.tensors[key.text], kv.heads, kv.stride, block.rank)
    local = replace(kv, heads=stored.heads)
    new = []
    for part, moves, head_rows in ((Part.K_B, k_moves(local), kv.nope), (Part.V_B, v_moves(local), kv.v)):
        spec, original = stored.resized(changes.beside(key, part), head_rows)
        _require_free(changes, spec.name)
        taken = [stored.rows(move.combined, move.split, move.count) for move in moves]
        grid = stored.grid(spec, head_rows)
        new.append(changes.rearranger.add(spec, taken, stored.axis, grid, key.text, original))
    changes.replace(key.text, new, keep=keep)


def _require_free(changes: Changes, key: str) -> None:
    if key in changes.metadata.tensors:
        raise BadInputError(
            f"{key} is there already", hint="the checkpoint is half converted; start from the original"
        )


def _combine(changes: Changes, key: Key, block: AttentionBlock) -> None:
    combined = changes.beside(key, Part.KV_B)
    k, v = _halves(changes, key, block)
    moves = _combined_rows(k, v, block.kv)
    if combined in changes.metadata.tensors:
        otherwise = f"{combined} is not made of {k.key} and {v.key}"
        changes.guards += changes.rearranger.equal(combined, moves, k.axis, otherwise)
        changes.edits.removed |= {k.key, v.key}
        return
    spec, original = k.resized(combined, block.kv.stride)
    grid = k.grid(spec, block.kv.stride)
    changes.replace(k.key, [changes.rearranger.add(spec, moves, k.axis, grid, k.key, original)])
    changes.hashed += changes.rearranger.chunk_names(v.key)
    changes.edits.removed.add(v.key)


def _halves(changes: Changes, key: Key, block: AttentionBlock) -> tuple[Frame, Frame]:
    """K and V of a block, for the same layers and the same state."""
    tensors, kv = changes.metadata.tensors, block.kv
    other = changes.beside(key, Part.V_B)
    if other not in tensors:
        raise BadInputError(
            f"{key.text} is there but {other} is missing", hint="the checkpoint is incomplete"
        )
    k = frame(key, tensors[key.text], kv.heads, kv.nope, block.rank)
    v = frame(changes.model.keys[other], tensors[other], kv.heads, kv.v, block.rank)
    if not k.is_like(v):
        one, two = tensors[key.text].spec, tensors[other].spec
        raise CannotError(
            f"{key.text} is {one.dtype} {list(one.shape)} and {other} is {two.dtype} {list(two.shape)}: they do not "
            "make one tensor"
        )
    return k, v


def _combined_rows(k: Frame, v: Frame, layout: KVLayout) -> list[RowsFrom]:
    local = replace(layout, heads=k.heads)
    return [
        *(k.rows(move.split, move.combined, move.count) for move in k_moves(local)),
        *(v.rows(move.split, move.combined, move.count) for move in v_moves(local)),
    ]
