"""Weights of one side as weights of the other: which rows of which tensors, as pieces. Nothing is read but headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mla_convert.errors import BadInputError, CannotError
from mla_convert.megatron.eras import INDEXER_MODULES, IndexerRows, Norms, row_moves
from mla_convert.megatron.names import Dictionary
from mla_convert.pieces import MadeOf, compose, cut, dequantised
from mla_convert.plan import Copy, Dequantise, EqualTensors, Piece, TargetTensor
from mla_convert.quant import FP8_DTYPES, SCALE_FIELDS, require_dequantisable
from mla_convert.tensors import Box, TensorSpec, rows


class LayerSpec(StrEnum):
    """Which of Megatron's layer specifications a checkpoint is written for; they differ in where norms lie."""

    TE = "te"  # Transformer Engine: a norm is fused with the projection behind it where there is one
    LOCAL = "local"  # Megatron's own modules: every norm is one of its own


# To Hugging Face


@dataclass(slots=True)
class HuggingFaceWeights:
    """A model's tensors by Hugging Face names, with the pieces of stored tensors that each is made of."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    made_of: dict[str, tuple[Copy, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexerChange:
    """How the indexer's rows go over: their order before and after, and the rotary channels of a head."""

    before: IndexerRows
    after: IndexerRows
    rope: int


def to_huggingface(
    specs: Mapping[str, TensorSpec],
    made_of: MadeOf,
    dictionary: Dictionary,
    *,
    indexer: IndexerChange | None = None,
    vocabulary: int | None = None,
    shared: Iterable[str] = (),
) -> HuggingFaceWeights:
    """Megatron's weights as Hugging Face's.

    Args:
        specs: Megatron's weights by name, with full shapes.
        made_of: What each is made of.
        dictionary: Translates names.
        indexer: How to permute the indexer's rows; None leaves them.
        vocabulary: Rows that the vocabulary has without padding; None leaves it.
        shared: Copies of the embedding and the head to give MTP layers, by Hugging Face names.

    Raises:
        CannotError: A weight has no place in a Hugging Face checkpoint.
        BadInputError: A weight does not divide into the tensors it is made of.
    """
    found = HuggingFaceWeights()
    unknown = [name for name in specs if dictionary.to_huggingface(name) is None]
    if unknown:
        raise CannotError(
            f"{len(unknown)} of {len(specs)} weights have no name in a Hugging Face checkpoint, {unknown[0]} among "
            "them",
            hint="known are the parts of DeepSeek-V2/V3, Kimi and GLM-5: latent attention, indexer, experts, MTP",
            details=unknown,
        )
    for name, spec in specs.items():
        pieces: Iterable[Copy] = made_of[name]
        targets = dictionary.to_huggingface(name) or ()
        if indexer and is_indexer_rows(name):
            pieces = compose(_permuted(name, specs, indexer), {name: list(pieces)})
        pieces = tuple(pieces)
        if not spec.shape or spec.shape[0] % len(targets):
            raise BadInputError(
                f"{name} is {list(spec.shape)}, which is not {len(targets)} matrices of equal rows"
            )
        each = spec.shape[0] // len(targets)
        if vocabulary is not None and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            each = min(each, vocabulary)
        for number, target in enumerate(targets):
            found.specs[target] = TensorSpec(target, spec.dtype, (each, *spec.shape[1:]))
            found.made_of[target] = tuple(cut(pieces, rows(spec, number * each, (number + 1) * each)))
    for name in shared:
        original = dictionary.shared_with(name)
        theirs = dictionary.to_huggingface(original)[0] if original else ""  # type: ignore[index]
        if theirs in found.specs:
            found.specs[name] = replace(found.specs[theirs], name=name)
            found.made_of[name] = found.made_of[theirs]
    return found


def is_indexer_rows(name: str) -> bool:
    """True for a tensor of the indexer whose rows have an order that changed between releases."""
    module = name.rpartition(".")[0]
    return ".core_attention.indexer." in name and module.rpartition(".")[2] in INDEXER_MODULES


def _permuted(name: str, specs: Mapping[str, TensorSpec], change: IndexerChange) -> Iterator[Copy]:
    """The rows of a tensor of the indexer in another order, as pieces of it."""
    spec = specs[name]
    key = specs.get(f"{name.rpartition('.indexer.')[0]}.indexer.linear_wk.weight")
    width = key.shape[0] if key else 0
    if not width or spec.shape[0] % width or change.rope > width or change.rope % 2:
        raise BadInputError(
            f"{name} has {spec.shape[0]} rows; heads of {width} with {change.rope} rotary channels do not fit"
        )
    rest = (0,) * (len(spec.shape) - 1)
    for head in range(0, spec.shape[0], width):
        for before, after, count in row_moves(change.before, change.after, width, change.rope):
            box = rows(spec, head + before, head + before + count)
            yield Copy(name, box, (head + after, *rest))


# To Megatron


@dataclass(slots=True)
class MegatronTensors:
    """A model's weights by Megatron's names.

    Attributes:
        tensors: Each weight and what it is made of.
        guards: What must hold for nothing to be lost.
        shared: Copies of the embedding and the head that MTP layers had, which Megatron's share.
        dequantised: How many FP8 tensors are computed.
    """

    tensors: dict[str, TargetTensor] = field(default_factory=dict)
    guards: list[EqualTensors] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    dequantised: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows and columns that one FP8 scale covers: of most modules, and of those that differ."""

    usual: tuple[int, int]
    own: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int, int]:
        """Of one module."""
        return self.own.get(module, self.usual)


def to_megatron(
    tensors: Mapping[str, TargetTensor],
    dictionary: Dictionary,
    spec: LayerSpec,
    blocks: Blocks | None,
) -> MegatronTensors:
    """Hugging Face's tensors as Megatron's weights.

    Args:
        tensors: Tensors by Hugging Face names, each made of copies of stored ones.
        dictionary: Translates names.
        spec: Which layer specification to write for.
        blocks: The scale blocks of FP8 weights, to multiply them out; None refuses such weights.

    Raises:
        CannotError: A tensor has no place in Megatron's model, or is quantised.
        BadInputError: Part of a weight is missing.
    """
    found = MegatronTensors()
    parts: dict[str, dict[int, TargetTensor]] = {}
    counts: dict[str, int] = {}
    unknown = []
    norms = _Norms.of(tensors, dictionary, spec)
    for name, target in tensors.items():
        field_name = name.rpartition(".")[2]
        weight = tensors.get(name.removesuffix(field_name) + "weight")
        if field_name in SCALE_FIELDS and weight and weight.spec.dtype in FP8_DTYPES:
            continue
        original = dictionary.shared_with(name)
        if original:
            theirs = (dictionary.to_huggingface(original) or ("",))[0]
            found.shared.append(name)
            if theirs not in tensors:
                raise CannotError(f"{name} is there, but {theirs} is not: Megatron has no place for it")
            found.guards.append(
                EqualTensors(
                    tensors[theirs],
                    target,
                    f"{name} is not the same as {theirs}, and Megatron's MTP layers share that",
                )
            )
            continue
        place = dictionary.to_megatron(name, norms.of_layer(name))
        if place is None:
            unknown.append(name)
            continue
        megatron, number, count = place
        parts.setdefault(megatron, {})[number] = target
        counts[megatron] = count
    if unknown:
        raise CannotError(
            f"{len(unknown)} of {len(tensors)} tensors have no place in Megatron's model, {unknown[0]} among them",
            hint="known are the parts of DeepSeek-V2/V3, Kimi and GLM-5: latent attention, indexer, experts, MTP",
            details=unknown,
        )
    for megatron, held in parts.items():
        if len(held) < counts[megatron]:
            raise BadInputError(
                f"{megatron} needs {counts[megatron]} matrices; only {next(iter(held.values())).spec.name} is there"
            )
        plain = [_plain(held[number], tensors, blocks, found) for number in sorted(held)]
        found.tensors[megatron] = _stacked(megatron, plain)
    return found


@dataclass(frozen=True, slots=True)
class _Norms:
    """Where norms go, layer by layer."""

    dictionary: Dictionary
    latent: Norms
    dense: Norms
    dense_layers: frozenset[int | None]

    @classmethod
    def of(cls, tensors: Mapping[str, TargetTensor], dictionary: Dictionary, spec: LayerSpec) -> _Norms:
        is_absorbed = any(
            name.endswith((".indexer.wk.weight", ".k_b_proj.weight", ".v_b_proj.weight")) for name in tensors
        )
        fused = spec is LayerSpec.TE
        dense = {
            layer
            for layer, below in map(dictionary.layer_of, tensors)
            if layer is not None and below == "mlp.gate_proj.weight"
        }
        return cls(
            dictionary,
            Norms.FUSED if fused and not is_absorbed else Norms.STANDALONE,
            Norms.FUSED if fused else Norms.STANDALONE,
            frozenset(dense),
        )

    def of_layer(self, name: str) -> dict[str, Norms]:
        """For each norm with two places, the one it has in the layer of the tensor ``name``."""
        layer, _ = self.dictionary.layer_of(name)
        return {
            "self_attn.q_a_layernorm.weight": self.latent,
            "self_attn.kv_a_layernorm.weight": self.latent,
            "post_attention_layernorm.weight": self.dense if layer in self.dense_layers else Norms.STANDALONE,
        }


def _stacked(name: str, parts: Sequence[TargetTensor]) -> TargetTensor:
    """One weight of the rows of several tensors."""
    kinds = {(part.spec.dtype, part.spec.shape) for part in parts}
    first = parts[0].spec
    if len(kinds) > 1:
        found = ", ".join(f"{p.spec.name} {p.spec.dtype} {list(p.spec.shape)}" for p in parts)
        raise BadInputError(f"{name} would be made of tensors that differ: {found}")
    if len(parts) == 1:
        return TargetTensor(replace(first, name=name), parts[0].pieces)
    count = first.shape[0]
    pieces = [_moved(piece, number * count) for number, part in enumerate(parts) for piece in part.pieces]
    return TargetTensor(TensorSpec(name, first.dtype, (len(parts) * count, *first.shape[1:])), tuple(pieces))


def _moved(piece: Piece, down: int) -> Piece:
    if isinstance(piece, Copy):
        return replace(piece, at=(piece.at[0] + down, *piece.at[1:]))
    if isinstance(piece, Dequantise):
        return replace(piece, at=(piece.at[0] + down, piece.at[1]))
    raise ValueError(f"{piece} cannot be moved")


# FP8


def _plain(
    target: TargetTensor, tensors: Mapping[str, TargetTensor], blocks: Blocks | None, found: MegatronTensors
) -> TargetTensor:
    """A tensor as it is, or, if it is FP8, multiplied out to BF16."""
    if target.spec.dtype not in FP8_DTYPES:
        return target
    name = target.spec.name
    if blocks is None:
        raise CannotError(
            f"{name} is {target.spec.dtype}: Megatron's checkpoints hold plain weights",
            hint="--dequantize bf16 multiplies FP8 weights with their scales",
        )
    module = name.removesuffix("weight")
    scale = next((tensors[module + f] for f in SCALE_FIELDS if module + f in tensors), None)
    if scale is None:
        raise BadInputError(f"{name} is {target.spec.dtype} and has no scale")
    require_dequantisable(target.spec, scale.spec)
    block = _block(target.spec, scale.spec, blocks.of(module.rstrip(".")))
    found.dequantised += 1
    pieces = dequantised(_copies(target), _copies(scale), block, target.spec.full_box())
    return TargetTensor(replace(target.spec, dtype="BF16"), tuple(pieces))


def _copies(target: TargetTensor) -> tuple[Copy, ...]:
    return tuple(piece for piece in target.pieces if isinstance(piece, Copy))


def _block(weight: TensorSpec, scale: TensorSpec, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that one scale covers."""
    height, width = weight.shape
    if scale.shape == (-(-height // block[0]), -(-width // block[1])):
        return block
    if scale.shape == (height, 1):
        return 1, width
    raise CannotError(
        f"{scale.name} is {list(scale.shape)}; {weight.name} {list(weight.shape)} has blocks of {block[0]}x{block[1]}",
        hint="scales in blocks and by row can be multiplied with",
    )


def cut_values(piece: Dequantise, box: Box) -> Dequantise | None:
    """The part of a piece that lies in ``box`` of its target, placed relative to that; None if nothing does."""
    (low, high), (left, right) = box
    rows_at, columns_at = piece.at
    first = max(rows_at, low), max(columns_at, left)
    last = (
        min(rows_at + piece.box[0][1] - piece.box[0][0], high),
        min(columns_at + piece.box[1][1] - piece.box[1][0], right),
    )
    if first[0] >= last[0] or first[1] >= last[1]:
        return None
    begin = tuple(start + first[d] - piece.at[d] for d, (start, _) in enumerate(piece.box))
    into = piece.skip + first[1] - columns_at
    return replace(
        piece,
        box=tuple((begin[d], begin[d] + last[d] - first[d]) for d in (0, 1)),
        at=(first[0] - low, first[1] - left),
        scale_at=(piece.scale_at[0], piece.scale_at[1] + into // piece.block_columns),
        skip=into % piece.block_columns,
    )
