"""Takes a torch_dist checkpoint from one release's conventions to another's (see ``eras``)."""

from __future__ import annotations

from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.torch_dist import COMMON_KEY
from mla_convert.formats.torch_dist_metadata import Item
from mla_convert.geometry import Layout
from mla_convert.megatron.changes import Changes, parse_state_key
from mla_convert.megatron.common_state import store_common_state
from mla_convert.megatron.eras import (
    INDEXER_MODULES,
    NORM_KEYS,
    Evidence,
    IndexerRows,
    Norms,
    indexer_evidence,
    indexer_rows,
    row_moves,
)
from mla_convert.megatron.frames import frame
from mla_convert.megatron.model import Key, MegatronModel

_INDEXER = "core_attention.indexer"
_FUSED_QUERY_NORM = "linear_q_up_proj.layer_norm_weight"


def migrate(changes: Changes) -> None:
    """Norms and indexer, as the options have it.

    Raises:
        CannotError: The checkpoint does not tell how it is, or the norms cannot be where they are wanted.
        BadInputError: It contradicts itself.
    """
    if changes.options.norms is not None:
        _move_norms(changes, changes.options.norms)
    if changes.options.indexer is not None:
        _permute_indexer(changes, changes.options.indexer)


# Norms


def _move_norms(changes: Changes, wanted: Norms) -> None:
    renames = dict(NORM_KEYS) if wanted is Norms.STANDALONE else {new: old for old, new in NORM_KEYS.items()}
    renamed = {}
    for key in changes.stored():
        base, _, leaf = key.module.rpartition(".")
        new = renames.get((leaf, key.field))
        if new is None or not f".{base}".endswith(".self_attention"):
            continue
        target = key.renamed(f"{base}.{new[0]}", new[1])
        if target in changes.metadata.tensors:
            raise BadInputError(f"{key.text} and {target} are both there: one norm with two values")
        renamed[key.text] = target
    kv = [text for text in renamed if "kv_layernorm" in text]
    if wanted is Norms.FUSED and changes.layout is not Layout.COMBINED and kv:
        raise CannotError(
            "--norms fused: a norm can only be fused with a combined up-projection, and they are split",
            hint="combine the checkpoint, with --norms fused",
        )
    changes.edits.renamed |= renamed
    _move_norm_states(changes, wanted, renamed)


def _move_norm_states(changes: Changes, wanted: Norms, renamed: dict[str, str]) -> None:
    """A norm of Transformer Engine has an extra state of its own, which is empty; one that is fused has none."""
    norms = {old[0]: new[0] for old, new in NORM_KEYS.items()}
    empty: Item | None = None
    for text in changes.metadata.objects:
        state = parse_state_key(text)
        if state is None:
            continue
        if wanted is Norms.FUSED:
            if state.module in norms.values():
                changes.edits.removed.add(text)
        elif state.module in norms and f"{state.base}{state.module}.layer_norm_weight" in renamed:
            empty = empty or changes.rearranger.add_empty_state(f"{norms[state.module]}._extra_state")
            changes.edits.objects.setdefault(text, {})[state.of(norms[state.module])] = empty


# Indexer


def _permute_indexer(changes: Changes, wanted: IndexerRows) -> None:
    keys = [key for key in changes.stored() if _is_indexer(key)]
    if not keys:
        raise CannotError("--indexer: there is no indexer in the checkpoint", hint="leave the option out")
    rows = indexer_rows(find_evidence(changes.model), changes.options.indexer_from)
    if rows is wanted:
        return
    for key in keys:
        tensor = changes.metadata.tensors[key.text]
        shape = (tensor.original or tensor.spec.shape)[key.row_axis :]
        width, rope = _head_width(changes, key), _rope(changes, key)
        if not width or shape[0] % width or rope > width or rope % 2:
            raise BadInputError(
                f"{key.text} has {shape[0]} rows, which are no heads of {width} with {rope} rotary dims"
            )
        stored = frame(key, tensor, shape[0] // width, width, shape[1] if len(shape) > 1 else None)
        moves = [
            stored.rows(head * width + before, head * width + after, count)
            for head in range(stored.heads)
            for before, after, count in row_moves(rows, wanted, width, rope)
        ]
        spec, original = stored.resized(key.text, width)
        new = changes.rearranger.add(spec, moves, stored.axis, stored.grid(spec, width), key.text, original)
        changes.replace(key.text, [new])
    store_common_state(changes, wanted)
    if rows is IndexerRows.ROPE_LAST and _has_fused_query_norm(changes.model):
        changes.warn(
            "to 0.18 the indexer read the query latent before its norm where that was fused, from 0.19 it reads it "
            "after: its scores change by the norm's weight, which no order of rows can undo; compare selections"
        )


def _is_indexer(key: Key) -> bool:
    module, _, leaf = key.module.rpartition(".")
    return leaf in INDEXER_MODULES and f".{module}".endswith(f".{_INDEXER}")


def _head_width(changes: Changes, key: Key) -> int:
    """Rows of one head of the indexer: those of its key projection, which has one head."""
    module, _, _ = key.module.rpartition(".")
    name = f"{module}.linear_wk.weight"
    tensor = changes.metadata.tensors.get(name)
    if tensor is None:
        raise BadInputError(f"{key.text} is there but {name} is missing", hint="the checkpoint is incomplete")
    return (tensor.original or tensor.spec.shape)[key.row_axis]


def _rope(changes: Changes, key: Key) -> int:
    return changes.block(key, changes.first_layer(key).partition(_INDEXER)[0]).rope


def find_evidence(model: MegatronModel) -> list[Evidence]:
    """What a checkpoint says about the order of its indexer's rows."""
    source = model.source
    return indexer_evidence(
        source.arguments,
        has_common_file=source.has_common_file,
        has_common_item=COMMON_KEY in source.metadata.objects,
        has_fused_query_norm=has_indexer(model) and _has_fused_query_norm(model),
    )


def has_indexer(model: MegatronModel) -> bool:
    """True if some layer has an indexer."""
    return any(_is_indexer(key) for key in model.keys.values())


def _has_fused_query_norm(model: MegatronModel) -> bool:
    return any(key.name.endswith(_FUSED_QUERY_NORM) for key in model.keys.values())
