"""What ``inspect`` says about a torch_dist checkpoint, from ``.metadata`` and the common state alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mla_convert.geometry import AttentionBlock, text_config
from mla_convert.inspection import (
    bytes_by_dtype,
    describe_group,
    group_blocks,
    layers_without,
    sparse_attention,
    up_projection_bytes,
)
from mla_convert.megatron.eras import NORM_KEYS, Norms
from mla_convert.megatron.migration import find_evidence, has_indexer
from mla_convert.megatron.model import MegatronModel, is_optimizer_key
from mla_convert.names import Part
from mla_convert.shard import candidate_sizes


def megatron_document(model: MegatronModel, blocks: Sequence[AttentionBlock]) -> dict[str, Any]:
    """Everything ``inspect --json`` prints: what it prints of any checkpoint, and ``megatron``."""
    catalogue, metadata = model.logical, model.source.metadata
    text = text_config(catalogue.config.value if catalogue.config else {})
    layouts = {block.layout for block in blocks}
    sizes = {
        size: [block.heads for block in blocks if block.heads % size]
        for size in candidate_sizes(block.heads for block in blocks)
    }
    return {
        "path": catalogue.label,
        "format": "torch_dist",
        "ranks": 1,
        "model_type": None,
        "text_model_type": None,
        "layout": str(next(iter(layouts))) if len(layouts) == 1 else "mixed",
        "files": len(catalogue.files),
        "tensors": len(metadata.tensors),
        "bytes": {
            "files": catalogue.nbytes,
            "tensors": sum(tensor.spec.nbytes for tensor in metadata.tensors.values()),
            "up_projections": up_projection_bytes(catalogue, blocks),
            "stated_total_size": None,
        },
        "dtypes": bytes_by_dtype(tensor.spec for tensor in metadata.tensors.values()),
        "attention": [describe_group(catalogue, group) for group in group_blocks(catalogue, blocks)],
        "layers_without_mla": layers_without(catalogue, blocks),
        "sparse_attention": _sparse(model, text, blocks),
        "tensor_parallel": {
            "legal": [size for size, cut in sizes.items() if not cut],
            "illegal": {
                str(size): f"{cut[0]} heads do not divide by {size}" for size, cut in sizes.items() if cut
            },
        },
        "megatron": _facts(model),
        "warnings": list(catalogue.warnings),
    }


def _facts(model: MegatronModel) -> dict[str, Any]:
    source = model.source
    iteration = source.common.get("iteration")
    optimizer = [t.spec.nbytes for key, t in source.metadata.tensors.items() if is_optimizer_key(key)]
    return {
        "iteration": iteration if type(iteration) is int else None,
        "folder": source.prefix.rstrip("/") or None,
        "common_state": "common.pt" if source.has_common_file else "item" if source.common else None,
        "objects": len(source.metadata.objects),
        "layers": "stacked" if any(key.is_stacked for key in model.keys.values()) else "one tensor a layer",
        "norms": _norms(model),
        "indexer": _indexer(model),
        "optimizer": {
            "bytes": sum(optimizer),
            "states": list(model.states),
            "by_name": model.is_optimizer_by_name,
        }
        if model.optimizer_keys
        else None,
    }


def _sparse(
    model: MegatronModel, text: Mapping[str, Any], blocks: Sequence[AttentionBlock]
) -> dict[str, Any] | None:
    """Facts on sparse attention; heads and their width from shapes where the arguments are silent."""
    found = sparse_attention(text, blocks)
    owner = next((block for block in blocks if block.has_indexer), None)
    if found is None or owner is None:
        return found
    query, key = (model.logical.spec(owner.tensor(part)) for part in (Part.INDEX_Q, Part.INDEX_K))
    if query and key and key.shape[0]:
        found["index_dim"] = found["index_dim"] or key.shape[0]
        found["index_heads"] = found["index_heads"] or query.shape[0] // key.shape[0]
    return found


def _norms(model: MegatronModel) -> str | None:
    """Where the norms of the latents are."""
    found = {(key.module.rpartition(".")[2], key.field) for key in model.keys.values()}
    places = [
        place
        for place, keys in ((Norms.FUSED, NORM_KEYS.keys()), (Norms.STANDALONE, NORM_KEYS.values()))
        if found & set(keys)
    ]
    return " and ".join(places) or None


def _indexer(model: MegatronModel) -> dict[str, Any] | None:
    """The order of the indexer's rows, as far as the checkpoint tells."""
    if not has_indexer(model):
        return None
    evidence = find_evidence(model)
    rows = {one.rows for one in evidence}
    return {
        "rows": str(rows.pop()) if len(rows) == 1 else None,
        "evidence": [f"{one.rows}: {one.why}" for one in evidence],
    }
