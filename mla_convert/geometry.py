"""The attention blocks of a checkpoint: where they are, how they are stored, and their heads and dimensions.

Geometry is per block: in several families heads, ranks and dims differ by layer, and some layers have no latent
attention at all. It comes from tensor shapes and is cross-checked with the configuration (``head_dims``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mla_convert.catalogue import Catalogue
from mla_convert.errors import BadInputError, CannotError
from mla_convert.head_dims import FIELD_PREFIXES, HeadDims, contradiction, solve_head_dims
from mla_convert.names import Dialect, Part, layer_number, parse_up_projection
from mla_convert.quant import (
    DEFAULT_BLOCK,
    FLOAT_DTYPES,
    FP8_DTYPES,
    Quantisation,
    plain_weight,
    read_quantisation,
    stated_block,
)
from mla_convert.split_kv import KVLayout, scale_block_rows
from mla_convert.tensors import TensorSpec


class Layout(StrEnum):
    """How a block stores its KV up-projection."""

    COMBINED = "combined"
    SPLIT = "split"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One Multi-head Latent Attention block of a checkpoint.

    Attributes:
        prefix: Everything before the projections' module names, e.g. ``model.layers.3.self_attn.``.
        dialect: The naming scheme of its tensors.
        layer: Layer number in the names, None if they carry none.
        layout: Combined, split, or both.
        heads, nope, rope, v, rank: Dimensions, as ``head_dims`` explains them.
        hidden: Width of the block's input and output.
        q_rank: Rank of the query LoRA, None if the query projection is one matrix.
        quantisation: Storage by up-projection part that exists.
        has_indexer: True if the block carries its own DSA indexer.
        is_mtp: True for a multi-token-prediction layer.
        note: A sentence on anything that was inferred rather than read.
    """

    prefix: str
    dialect: Dialect
    layer: int | None
    layout: Layout
    heads: int
    nope: int
    rope: int
    v: int
    rank: int
    hidden: int | None
    q_rank: int | None
    quantisation: Mapping[Part, Quantisation]
    has_indexer: bool
    is_mtp: bool
    note: str | None = None

    @property
    def kv(self) -> KVLayout:
        """The row layout of the KV up-projection."""
        return KVLayout(self.heads, self.nope, self.v)

    def module(self, part: Part) -> str:
        """Full module name of ``part`` as this block's dialect writes it."""
        return self.prefix + self.dialect.module(part)

    def tensor(self, part: Part, field: str = "weight") -> str:
        """Full tensor name of a field of ``part``."""
        return f"{self.module(part)}.{field}"

    def find(self, catalogue: Catalogue, part: Part, field: str = "weight") -> str | None:
        """The name under which a part is stored, in any of the dialect's spellings; None if it is absent."""
        for module in self.dialect.modules[part]:
            name = f"{self.prefix}{module}.{field}"
            if name in catalogue.tensors:
                return name
        return None

    @property
    def dims(self) -> str:
        """The dimensions in one phrase."""
        return f"{self.heads} heads, nope {self.nope}, rope {self.rope}, v {self.v}, rank {self.rank}"


def text_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The part of a config that describes the language model: the level that holds ``kv_lora_rank``."""
    if not config:
        return {}
    if config.get("kv_lora_rank") is not None:
        return config
    for value in config.values():
        if isinstance(value, dict) and value.get("kv_lora_rank") is not None:
            return value
    return config


def layer_config(config: Mapping[str, Any] | None, layer: int | None) -> Mapping[str, Any]:
    """The language model's fields as they hold for one layer (``per_layer_config`` overrides the rest)."""
    text = text_config(config)
    overrides = text.get("per_layer_config")
    own = overrides.get(str(layer)) if isinstance(overrides, dict) else None
    return {**text, **own} if isinstance(own, dict) else text


def quantization_config(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The quantisation block of a config, at the top or beside the language model's fields."""
    for level in (config or {}, text_config(config)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(level.get(key), dict):
                return dict(level[key])
    return None


def find_blocks(catalogue: Catalogue, *, trust_shapes: bool = False) -> tuple[AttentionBlock, ...]:
    """Every MLA block of a checkpoint, in order of layer.

    Args:
        catalogue: The checkpoint.
        trust_shapes: Let tensor shapes win where config.json contradicts them.

    Raises:
        CannotError: There is no MLA block, or one is stored in a way that cannot be handled.
        BadInputError: Shapes contradict each other or the configuration.
    """
    config = catalogue.config.value if catalogue.config else None
    found: dict[tuple[str, str], dict[Part, dict[str, TensorSpec]]] = {}
    dialects: dict[str, Dialect] = {}
    for name, tensor in catalogue.tensors.items():
        parsed = parse_up_projection(name)
        if parsed:
            dialects[parsed.dialect.name] = parsed.dialect
            parts = found.setdefault((parsed.prefix, parsed.dialect.name), {})
            parts.setdefault(parsed.part, {})[parsed.field] = tensor.spec
    for (prefix, _), parts in found.items():
        _require_both_halves(prefix, parts)
    blocks = [
        _block(catalogue, prefix, dialects[dialect], parts, config, trust_shapes)
        for (prefix, dialect), parts in found.items()
    ]
    if not blocks:
        raise CannotError(
            _why_not_mla(catalogue, config), hint="this tool converts Multi-head Latent Attention only"
        )
    return tuple(sorted(blocks, key=_order))


def check_ranks_divide(blocks: Sequence[AttentionBlock], tp: int) -> None:
    """Refuse a number of tensor-parallel ranks over which a block's heads do not divide.

    Raises:
        CannotError: They do not; with the sizes that all blocks allow.
    """
    bad = next((block for block in blocks if block.heads % tp), None)
    if bad is None:
        return
    most = min(block.heads for block in blocks)
    legal = [size for size in range(1, most + 1) if all(block.heads % size == 0 for block in blocks)]
    raise CannotError(
        f"--tp {tp}: {bad.heads} heads of {bad.prefix.rstrip('.')} do not divide by {tp}",
        hint=f"sizes that fit: {', '.join(map(str, legal))}",
    )


def _order(block: AttentionBlock) -> tuple[int, str]:
    return (block.layer if block.layer is not None else 1 << 30, block.prefix)


def _require_both_halves(prefix: str, parts: Mapping[Part, object]) -> None:
    if (Part.K_B in parts) != (Part.V_B in parts):
        missing, present = (Part.V_B, Part.K_B) if Part.K_B in parts else (Part.K_B, Part.V_B)
        raise BadInputError(
            f"{prefix}: the {present} up-projection is there but the {missing} up-projection is missing",
            hint="the checkpoint is incomplete; download or convert it again",
        )


def _why_not_mla(catalogue: Catalogue, config: Mapping[str, Any] | None) -> str:
    text = text_config(config)
    kind = text.get("model_type") or (config or {}).get("model_type")
    if str(kind).startswith("deepseek_v4"):
        return f"{kind} has no KV up-projection: it stores one shared wkv, so there is nothing to split"
    heads = text.get("num_key_value_heads")
    found = f"model_type {kind}, num_key_value_heads {heads}" if config else "no config.json"
    return (
        f"not an MLA checkpoint: none of its {len(catalogue.tensors)} tensors is a KV up-projection "
        f"(kv_b_proj, wkv_b, or split k_b_proj and v_b_proj); {found}"
    )


def _block(
    catalogue: Catalogue,
    prefix: str,
    dialect: Dialect,
    parts: Mapping[Part, Mapping[str, TensorSpec]],
    config: Mapping[str, Any] | None,
    trust_shapes: bool,
) -> AttentionBlock:
    weights = {part: plain_weight(fields, prefix + dialect.module(part)) for part, fields in parts.items()}
    has_split = Part.K_B in parts and Part.V_B in parts
    layout = (
        Layout.BOTH if has_split and Part.KV_B in parts else Layout.SPLIT if has_split else Layout.COMBINED
    )
    ranks = {part: spec.shape[1] for part, spec in weights.items()}
    if len(set(ranks.values())) != 1:
        raise BadInputError(f"{prefix}: the up-projections disagree on the rank: {_listed(ranks)}")
    rank = next(iter(ranks.values()))

    def stored(part: Part) -> TensorSpec | None:
        for module in dialect.modules[part]:
            spec = catalogue.spec(f"{prefix}{module}.weight")
            # A packed weight's shape says nothing about its rows and columns.
            if spec and len(spec.shape) == 2 and spec.dtype in FLOAT_DTYPES | FP8_DTYPES:
                return spec
        return None

    query, q_a, kv_a, out = (
        stored(Part.Q_B) or stored(Part.Q),
        stored(Part.Q_A),
        stored(Part.KV_A),
        stored(Part.O),
    )
    rows = {part: spec.shape[0] for part, spec in weights.items()}
    if kv_a and kv_a.shape[0] < rank:
        raise BadInputError(f"{kv_a.name} has {kv_a.shape[0]} rows, fewer than the rank {rank} of {prefix}")
    kv_rows = rows[Part.KV_B] if Part.KV_B in rows else rows[Part.K_B] + rows[Part.V_B]
    layer = layer_number(prefix)
    text = layer_config(config, layer)
    dims, note = solve_head_dims(
        prefix,
        kv_rows=kv_rows,
        rope=kv_a.shape[0] - rank if kv_a else None,
        q_rows=query.shape[0] if query else None,
        o_columns=out.shape[1] if out else rows.get(Part.V_B),
        text=text,
        trust_shapes=trust_shapes,
    )
    _check_split_rows(prefix, rows, dims)
    stated_ranks = [
        text[p + "kv_lora_rank"] for p in FIELD_PREFIXES if text.get(p + "kv_lora_rank") is not None
    ]
    if stated_ranks and rank not in stated_ranks and not trust_shapes:
        stated = " or ".join(str(value) for value in stated_ranks)
        raise contradiction(prefix, f"rank {rank} by its tensors", f"kv_lora_rank {stated}")
    quantisation = _quantisation(prefix, dialect, parts, dims, config)
    return AttentionBlock(
        prefix=prefix,
        dialect=dialect,
        layer=layer,
        layout=layout,
        heads=dims.heads,
        nope=dims.nope,
        rope=dims.rope,
        v=dims.v,
        rank=rank,
        hidden=kv_a.shape[1] if kv_a else out.shape[0] if out else None,
        q_rank=q_a.shape[0] if q_a else None,
        quantisation=quantisation,
        has_indexer=any(f"{prefix}{m}.weight" in catalogue.tensors for m in dialect.modules[Part.INDEX_Q]),
        is_mtp=_is_mtp(prefix, layer, config),
        note=note,
    )


def _quantisation(
    prefix: str,
    dialect: Dialect,
    parts: Mapping[Part, Mapping[str, TensorSpec]],
    dims: HeadDims,
    config: Mapping[str, Any] | None,
) -> dict[Part, Quantisation]:
    stated = stated_block(quantization_config(config))
    block = stated or DEFAULT_BLOCK
    finer = scale_block_rows(KVLayout(dims.heads, dims.nope, dims.v), block[0])
    return {
        part: read_quantisation(
            fields,
            block,
            prefix + dialect.module(part),
            split_rows=None if part is Part.KV_B else finer,
            is_blocked=stated is not None,
        )
        for part, fields in parts.items()
    }


def _is_mtp(prefix: str, layer: int | None, config: Mapping[str, Any] | None) -> bool:
    if ".mtp" in f".{prefix}":
        return True
    layers = text_config(config).get("num_hidden_layers")
    return type(layers) is int and layer is not None and layer >= layers


def _check_split_rows(prefix: str, rows: Mapping[Part, int], dims: HeadDims) -> None:
    expected = {
        Part.KV_B: dims.heads * (dims.nope + dims.v),
        Part.K_B: dims.heads * dims.nope,
        Part.V_B: dims.heads * dims.v,
    }
    for part, count in rows.items():
        if count != expected[part]:
            raise BadInputError(f"{prefix}: {part} has {count} rows; {dims} needs {expected[part]}")


def _listed(values: Mapping[Part, int]) -> str:
    return ", ".join(f"{part} {value}" for part, value in values.items())
