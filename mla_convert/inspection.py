"""What ``inspect`` says about a checkpoint, from headers and configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_convert.catalogue import Catalogue
from mla_convert.geometry import AttentionBlock, text_config
from mla_convert.megatron.legacy_reading import rank_facts
from mla_convert.names import UP_PROJECTIONS
from mla_convert.shard import candidate_sizes, why_not
from mla_convert.sharding import reshard_demands
from mla_convert.tensors import TensorSpec
from mla_convert.whole import Whole


@dataclass(frozen=True, slots=True)
class TensorParallelSize:
    """One tensor-parallel size and, if it is illegal, why."""

    size: int
    reason: str | None

    @property
    def is_legal(self) -> bool:
        """True if every block can be sharded over this many ranks."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Attention blocks that are alike, and the layers they stand in."""

    blocks: tuple[AttentionBlock, ...]

    @property
    def first(self) -> AttentionBlock:
        """Any of them."""
        return self.blocks[0]

    @property
    def layers(self) -> str:
        """The layers as ranges, e.g. ``0-2, 6, 61``; prefixes where names carry no layer."""
        numbers = sorted({block.layer for block in self.blocks if block.layer is not None})
        return _ranges(numbers) or ", ".join(block.prefix for block in self.blocks)

    def storage(self, catalogue: Catalogue) -> str:
        """How the up-projection is stored, in one phrase."""
        block = self.first
        phrases = []
        for part in UP_PROJECTIONS:
            if part in block.quantisation:
                dtype = catalogue.tensors[block.tensor(part)].spec.dtype
                phrases.append(block.quantisation[part].describe(dtype))
        return " / ".join(dict.fromkeys(phrases))


def group_blocks(catalogue: Catalogue, blocks: Iterable[AttentionBlock]) -> tuple[BlockGroup, ...]:
    """Blocks with the same geometry, storage and role, in order of their first layer."""
    groups: dict[tuple[Any, ...], list[AttentionBlock]] = {}
    for block in blocks:
        dtypes = tuple(catalogue.tensors[block.tensor(p)].spec.dtype for p in block.quantisation)
        quantisation = tuple(block.quantisation.items())
        key = (block.dims, block.layout, block.has_indexer, block.is_mtp, dtypes, quantisation)
        groups.setdefault(key, []).append(block)
    return tuple(BlockGroup(tuple(members)) for members in groups.values())


def tensor_parallel_sizes(
    whole: Whole, blocks: Sequence[AttentionBlock], also: Iterable[int] = ()
) -> tuple[TensorParallelSize, ...]:
    """Every size that divides some block's heads, and the powers of two up to the largest: legal or why not.

    A size is legal if ``reshard`` would do it: whole heads, experts and FP8 scale blocks for each rank (``shard``).
    """
    wanted = reshard_demands(whole, blocks)
    sizes = candidate_sizes((block.heads for block in blocks), also)
    return tuple(TensorParallelSize(size, next(iter(why_not(wanted, size)), None)) for size in sizes)


def inspect_document(whole: Whole, blocks: Sequence[AttentionBlock]) -> dict[str, Any]:
    """Everything ``inspect --json`` prints."""
    catalogue = whole.logical
    config = catalogue.config.value if catalogue.config else {}
    text = text_config(config)
    stored = sum(tensor.spec.nbytes for tensor in catalogue.tensors.values())
    index = catalogue.index.value if catalogue.index else {}
    stated = index.get("metadata", {}).get("total_size")
    sizes = tensor_parallel_sizes(whole, blocks)
    layouts = {block.layout for block in blocks}
    return {
        "path": catalogue.label,
        "format": str(whole.format),
        "ranks": whole.ranks,
        "model_type": config.get("model_type"),
        "text_model_type": text.get("model_type"),
        "layout": str(next(iter(layouts))) if len(layouts) == 1 else "mixed",
        "files": len(catalogue.files),
        "tensors": len(catalogue.tensors),
        "bytes": {
            "files": catalogue.nbytes,
            "tensors": stored,
            "up_projections": up_projection_bytes(catalogue, blocks),
            "stated_total_size": stated,
        },
        "dtypes": bytes_by_dtype(tensor.spec for tensor in catalogue.tensors.values()),
        "attention": [describe_group(catalogue, group) for group in group_blocks(catalogue, blocks)],
        "layers_without_mla": layers_without(catalogue, blocks),
        "sparse_attention": sparse_attention(text, blocks),
        "tensor_parallel": {
            "legal": [size.size for size in sizes if size.is_legal],
            "illegal": {str(size.size): size.reason for size in sizes if not size.is_legal},
        },
        **({"megatron": rank_facts(whole.megatron)} if whole.megatron and whole.megatron.layout else {}),
        "warnings": list(catalogue.warnings),
    }


def describe_group(catalogue: Catalogue, group: BlockGroup) -> dict[str, Any]:
    """One group of like blocks as plain data."""
    block = group.first
    return {
        "layers": group.layers,
        "blocks": len(group.blocks),
        "prefix": block.prefix,
        "heads": block.heads,
        "nope": block.nope,
        "rope": block.rope,
        "v": block.v,
        "rank": block.rank,
        "q_rank": block.q_rank,
        "hidden": block.hidden,
        "layout": str(block.layout),
        "storage": group.storage(catalogue),
        "indexer": block.has_indexer,
        "mtp": block.is_mtp,
        "note": block.note,
    }


def up_projection_bytes(catalogue: Catalogue, blocks: Iterable[AttentionBlock]) -> int:
    """Bytes of all KV up-projection weights, in whichever layouts they are stored."""
    return sum(
        catalogue.tensors[block.tensor(part)].spec.nbytes for block in blocks for part in block.quantisation
    )


def sparse_attention(text: Mapping[str, Any], blocks: Sequence[AttentionBlock]) -> dict[str, Any] | None:
    """Facts on DeepSeek Sparse Attention; None for a dense model."""
    with_indexer = [block for block in blocks if block.has_indexer]
    if not with_indexer and text.get("index_topk") is None:
        return None
    return {
        "topk": text.get("index_topk"),
        "index_heads": text.get("index_n_heads"),
        "index_dim": text.get("index_head_dim"),
        "layers_with_indexer": len(with_indexer),
        "layers_sharing_one": len(blocks) - len(with_indexer),
    }


def bytes_by_dtype(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Bytes of each dtype, the most first."""
    found: dict[str, int] = {}
    for spec in specs:
        found[spec.dtype] = found.get(spec.dtype, 0) + spec.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def layers_without(catalogue: Catalogue, blocks: Sequence[AttentionBlock]) -> list[int]:
    """Layers that have no latent attention, if the configuration says how many there are."""
    config = catalogue.config.value if catalogue.config else None
    count = text_config(config).get("num_hidden_layers")
    if type(count) is not int or count > 100_000:
        return []
    return sorted(set(range(count)) - {block.layer for block in blocks if block.layer is not None})


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
