"""Deals a checkpoint's tensors out to ranks: what each rank of an output holds, and why some numbers are impossible."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mla_convert.errors import CannotError, UsageError
from mla_convert.geometry import AttentionBlock, Layout
from mla_convert.layouts import LaidOut, lay_out
from mla_convert.megatron.eras import IndexerRows
from mla_convert.megatron.translation import LayerSpec
from mla_convert.names import Naming, Sharding
from mla_convert.pieces import compose, cut, dequantised, repeated
from mla_convert.plan import Copy, Piece, TargetTensor, Zeros
from mla_convert.quant import SCALE_FIELDS, SHARED_FIELDS, require_dequantisable
from mla_convert.shard import (
    Demand,
    Experts,
    Module,
    candidate_sizes,
    demands,
    finer_block,
    modules_of,
    owner_of,
    rank_range,
    why_not,
)
from mla_convert.tensors import TensorSpec, box_shape
from mla_convert.whole import Format, Whole


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """What ``reshard`` may be asked for.

    Attributes:
        tp: Number of ranks.
        to: Format of the output; None keeps that of the source.
        layout: Layout of the KV up-projections; None keeps it.
        experts: How routed experts are dealt out.
        reblock: Make FP8 scale blocks finer where ranks would cut through one.
        dequantize: Store a weight as BF16 where ranks would cut through its FP8 scale blocks, or the layout does; in
            Megatron's formats, every FP8 weight.
        pad_vocabulary: Add rows of zeros where the vocabulary does not divide.
        trust_shapes: Let tensor shapes win over config.json.
        spec: Which of Megatron's layer specifications to write for, in one of its formats.
        indexer_from: The order of a Megatron checkpoint's indexer rows, where it does not tell.
        drop_optimizer: Leave a Megatron checkpoint's optimizer state out.
    """

    tp: int
    to: Format | None = None
    layout: Layout | None = None
    experts: Experts = Experts.EP
    reblock: bool = False
    pad_vocabulary: bool = False
    trust_shapes: bool = False
    dequantize: bool = False
    spec: LayerSpec | None = None
    indexer_from: IndexerRows | None = None
    drop_optimizer: bool = False

    def described(self, format: Format) -> dict[str, Any]:
        """The options that change bytes."""
        return {
            "tp": self.tp,
            "to": str(format),
            "layout": str(self.layout) if self.layout else None,
            "experts": str(self.experts),
            "reblock": self.reblock,
            "dequantize": "bf16" if self.dequantize else None,
            "pad_vocabulary": self.pad_vocabulary,
        }


_NUMBER = re.compile(r"(\d+)")


def natural_order(name: str) -> list[object]:
    """Sort key that puts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]


def count_ranks(count: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} rank{'' if count == 1 else 's'}"


def reshard_demands(
    whole: Whole, blocks: Sequence[AttentionBlock], experts: Experts = Experts.EP
) -> tuple[Demand, ...]:
    """What a checkpoint, as it is laid out, demands of a number of ranks."""
    laid_out = lay_out(whole.logical, whole.made_of, blocks, None)
    options = ReshardOptions(1, experts=experts)
    return Sharder.of(whole, laid_out, options, {block.prefix: block.heads for block in blocks}).demands


def _has_cut_blocks(module: Module, options: ReshardOptions, block: tuple[int, int]) -> bool:
    """True if a module's scale blocks are finer than the configuration's, or must become so for the ranks."""
    if module.block != block:
        return True
    along = module.place.sharding.dimension
    if along is None or options.tp == 1 or module.has_owner(options.experts):
        return False
    return finer_block(module, along, options.tp) is not None


@dataclass(slots=True)
class Sharder:
    """Cuts the tensors of a laid-out checkpoint for the ranks of an output."""

    laid_out: LaidOut
    options: ReshardOptions
    naming: Naming
    modules: Mapping[str, Module]
    heads: Mapping[str, int]
    block: tuple[int, int]
    demands: tuple[Demand, ...]
    dequantised: frozenset[str] = frozenset()
    vocabulary: dict[str, int] = field(default_factory=dict)
    reblocked: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    _experts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, whole: Whole, laid_out: LaidOut, options: ReshardOptions, heads: Mapping[str, int]
    ) -> Sharder:
        """Sort the tensors into modules, and find what they demand.

        Raises:
            UsageError: Options contradict each other.
            CannotError: A weight is stored in a way that ``dequantize`` does not read.
        """
        if options.reblock and options.dequantize:
            raise UsageError("--reblock and --dequantize are two ways to do the same", hint="choose one")
        naming = Naming.of(laid_out.tensors)
        modules = modules_of(laid_out.specs, naming, laid_out.module_blocks, whole.block)
        wanted = demands(
            modules.values(),
            heads,
            options.experts,
            reblock=options.reblock or options.dequantize,
            pad_vocabulary=options.pad_vocabulary,
        )
        chosen = frozenset(
            module.name
            for module in modules.values()
            if options.dequantize and module.block and _has_cut_blocks(module, options, whole.block)
        )
        for name in chosen:
            fields = modules[name].fields
            require_dequantisable(fields["weight"], fields[modules[name].scale_field or "weight"])
        return cls(laid_out, options, naming, modules, heads, whole.block, wanted, chosen)

    def require_legal(self) -> None:
        """Raise CannotError, with the legal sizes, if the number of ranks that was asked for is impossible."""
        ranks = self.options.tp
        reasons = why_not(self.demands, ranks)
        if not reasons:
            return
        legal = [size for size in candidate_sizes(self.heads.values()) if not why_not(self.demands, size)]
        ways = [f"legal here: --tp {', '.join(map(str, legal))}"]
        if any("FP8 blocks" in reason for reason in reasons):
            ways.append("--reblock makes scale blocks finer without changing a weight")
            ways.append("--dequantize bf16 stores these weights as BF16")
        if self.options.experts is Experts.EP and any(" experts of " in reason for reason in reasons):
            ways.append("--experts tp slices each expert")
        raise CannotError(
            f"{count_ranks(ranks)} are not possible: {reasons[0]}", hint="; ".join(ways), details=reasons
        )

    def warnings(self) -> Iterator[str]:
        """What the user should know about the output."""
        if self.dequantised:
            count, first = len(self.dequantised), min(self.dequantised, key=natural_order)
            yield f"{count} modules whose FP8 scale blocks would be cut are stored as BF16, {first} among them"
        elif self.options.dequantize:
            yield "no FP8 scale block is cut: --dequantize changes nothing"
        unknown = [m.name for m in self.modules.values() if m.place.sharding is Sharding.UNKNOWN]
        unknown = [name for name in unknown if not self._owner_counts(name)]
        if self.options.tp == 1:
            return
        if unknown:
            yield (
                f"{len(unknown)} modules have no sharding rule and lie whole on every rank, such as {unknown[0]}"
            )
        biased = [
            m.name
            for m in self.modules.values()
            if m.place.sharding.dimension == 1
            and "bias" in m.fields
            and not m.has_owner(self.options.experts)
        ]
        if biased:
            yield (
                f"{len(biased)} biases of row-parallel projections lie whole on every rank ({biased[0]}.bias among "
                "them): add each once, after the sum over ranks"
            )
        for name, rows in self.vocabulary.items():
            yield f"{name}: {rows} rows are padded with zeros to {-(-rows // self.options.tp) * self.options.tp}"

    def _owner_counts(self, name: str) -> bool:
        return self.modules[name].has_owner(self.options.experts)

    def on_rank(self, rank: int, name: str) -> TargetTensor | None:
        """What one rank holds of a tensor, out of stored tensors; None if nothing."""
        target, copies = self.laid_out.tensors[name], self.laid_out.copies(name)
        place = self.naming.place(name)
        module, ranks = self.modules[place.module], self.options.tp
        if module.name in self.dequantised:
            if place.field == "weight":
                return self._values_on_rank(rank, module)
            if place.field in SCALE_FIELDS or place.field in SHARED_FIELDS:
                return None
        if ranks == 1:
            return target
        if module.has_owner(self.options.experts):
            return target if self._owner(module) == rank else None
        along = module.dimension(place.field)
        if along is None:
            return target
        spec = target.spec
        if place.field == module.scale_field and module.block:
            spec, copies = self._refined(module, spec, copies, along)
        size = spec.shape[along]
        if module.place.sharding is Sharding.VOCABULARY and size % ranks:
            self.vocabulary[name] = size
        start, stop = rank_range(size, ranks, rank)
        box = tuple((start, stop) if d == along else (0, extent) for d, extent in enumerate(spec.shape))
        each = -(-size // ranks)
        shape = tuple(each if d == along else extent for d, extent in enumerate(spec.shape))
        pieces: list[Piece] = list(cut(copies, box))
        if stop - start < each:
            pieces.append(Zeros(stop - start, each - (stop - start)))
        return TargetTensor(replace(spec, shape=shape), tuple(pieces))

    def _values_on_rank(self, rank: int, module: Module) -> TargetTensor | None:
        """A rank's part of a weight whose FP8 codes become BF16."""
        spec, ranks, along = module.fields["weight"], self.options.tp, module.dimension("weight")
        if ranks > 1 and module.has_owner(self.options.experts) and self._owner(module) != rank:
            return None
        box = spec.full_box()
        if ranks > 1 and along is not None and not module.has_owner(self.options.experts):
            box = tuple(
                rank_range(size, ranks, rank) if d == along else (0, size)
                for d, size in enumerate(spec.shape)
            )
        scale, block = module.fields.get(module.scale_field or ""), module.block
        if scale is None or block is None:
            raise ValueError(f"{module.name} has no scale blocks")
        pieces = dequantised(self.laid_out.copies(spec.name), self.laid_out.copies(scale.name), block, box)
        return TargetTensor(TensorSpec(spec.name, "BF16", box_shape(box)), tuple(pieces))

    @property
    def lost(self) -> list[str]:
        """Keys of the stored tensors that no output tensor holds in the form they had."""
        names = [
            spec.name
            for module in sorted(self.dequantised)
            for field, spec in self.modules[module].fields.items()
            if field == "weight" or field in SCALE_FIELDS or field in SHARED_FIELDS
        ]
        return sorted({piece.source for name in names for piece in self.laid_out.copies(name)})

    def _owner(self, module: Module) -> int:
        group = module.name.partition(".experts.")[0]
        if not self._experts:
            for other in self.modules.values():
                if other.place.expert is not None:
                    key = other.name.partition(".experts.")[0]
                    self._experts[key] = max(self._experts.get(key, 0), other.place.expert + 1)
        return owner_of(module.place.expert or 0, self._experts[group], self.options.tp)

    def _refined(
        self, module: Module, spec: TensorSpec, copies: tuple[Copy, ...], along: int
    ) -> tuple[TensorSpec, tuple[Copy, ...]]:
        """Scales in blocks that no rank's border cuts through."""
        finer = finer_block(module, along, self.options.tp)
        if finer is None or module.block is None:
            return spec, copies
        self.reblocked[module.name] = (*module.block, *finer)
        count = -(-module.fields["weight"].shape[along] // finer[along])
        shape = tuple(count if d == along else size for d, size in enumerate(spec.shape))
        fine = repeated(spec, along, module.block[along], finer[along], count)
        return replace(spec, shape=shape), tuple(compose(fine, {spec.name: copies}))
