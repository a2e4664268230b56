"""Puts the tensors of several ranks together: what each whole tensor is made of, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mla_convert.catalogue import JsonFile, SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.deepseek import DEFAULT_STEM
from mla_convert.formats.huggingface_edit import MARK
from mla_convert.geometry import quantization_config
from mla_convert.names import Naming
from mla_convert.pieces import compose, cut, repeated, side_by_side, thinned
from mla_convert.plan import Copy, EqualTensors, Replicas, TargetTensor, Zeros, whole
from mla_convert.quant import SCALE_FIELDS, config_block
from mla_convert.shard import Experts, Module
from mla_convert.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class ShardingMark:
    """What ``config.json`` notes about a sharded checkpoint that its names and shapes do not tell.

    Attributes:
        stem: What stood before ``layers.`` in the names of the original.
        vocabulary: True row count of tensors that were padded, by name.
        reblocked: Scale block (rows, columns) before and after, of modules whose scales were made finer.
    """

    stem: str = DEFAULT_STEM
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    reblocked: Mapping[str, tuple[int, int, int, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``config.json``."""
        return {
            "stem": self.stem,
            "vocabulary": dict(self.vocabulary),
            "reblocked": {name: list(blocks) for name, blocks in self.reblocked.items()},
        }

    @classmethod
    def read(cls, config: JsonFile | None) -> ShardingMark:
        """Out of ``config.json``; the default if it says nothing.

        Raises:
            BadInputError: The note is damaged.
        """
        mark = config.value.get(MARK) if config else None
        found = mark.get("tensor_parallel") if isinstance(mark, dict) else None
        if config is None or found is None:
            return cls()
        try:
            stem = found["stem"]
            vocabulary = {name: int(rows) for name, rows in found["vocabulary"].items()}
            reblocked = {name: _four(blocks) for name, blocks in found["reblocked"].items()}
            if not isinstance(stem, str) or min([1, *vocabulary.values()]) < 1:
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadInputError(
                f"{config.name}: {MARK}.tensor_parallel is damaged", hint="shard the original again"
            ) from None
        return cls(stem, vocabulary, reblocked)


def _four(blocks: Any) -> tuple[int, int, int, int]:
    coarse_rows, coarse_columns, rows, columns = (int(size) for size in blocks)
    if min(rows, columns) < 1 or coarse_rows % rows or coarse_columns % columns:
        raise ValueError
    return coarse_rows, coarse_columns, rows, columns


class Merger:
    """Puts the ranks' tensors together: each rank's by Hugging Face name, with their keys."""

    def __init__(
        self,
        where: str,
        ranks: Sequence[Mapping[str, tuple[str, SourceTensor]]],
        naming: Naming,
        config: JsonFile | None,
    ) -> None:
        self.where, self.ranks, self.naming = where, ranks, naming
        self.specs: dict[str, TensorSpec] = {}
        self.made_of: dict[str, tuple[Copy, ...]] = {}
        self.replicas: list[Replicas] = []
        self.guards: list[EqualTensors] = []
        self.experts: Experts | None = None
        self._block = config_block(quantization_config(config.value if config else None))
        if len(ranks) > 1:
            routed = [n for held in ranks for n in held if naming.place(n).expert is not None]
            if routed:
                everywhere = all(name in held for name in routed for held in ranks)
                self.experts = Experts.TP if everywhere else Experts.EP

    def add(self, name: str) -> None:
        """Merge one tensor.

        Raises:
            BadInputError: It is missing on a rank, lies on too many, or its slices do not fit together.
        """
        held = {rank: tensors[name] for rank, tensors in enumerate(self.ranks) if name in tensors}
        place = self.naming.place(name)
        specs = [tensor.spec for _, tensor in held.values()]
        keys = [key for key, _ in held.values()]
        along = None
        if place.expert is not None and self.experts is Experts.EP:
            if len(held) > 1:
                raise BadInputError(
                    f"{self.where}: expert tensor {name} lies on ranks {', '.join(map(str, held))}; other experts lie "
                    "on one rank only"
                )
        elif len(self.ranks) > 1:
            missing = [rank for rank in range(len(self.ranks)) if rank not in held]
            if missing:
                raise BadInputError(
                    f"{self.where}: {name} is missing on rank {', '.join(map(str, missing))} of {len(self.ranks)}",
                    hint="the ranks are of different checkpoints, or one is incomplete; shard the original again",
                )
            along = self._module(name).dimension(place.field)
        if along is not None:
            self._require_like(name, specs, along)
            shape = list(specs[0].shape)
            shape[along] = sum(spec.shape[along] for spec in specs)
            self.specs[name] = TensorSpec(name, specs[0].dtype, tuple(shape))
            self.made_of[name] = side_by_side(list(zip(keys, specs, strict=True)), along)
            return
        if len({(spec.dtype, spec.shape) for spec in specs}) > 1:
            raise self._unlike(name, specs)
        self.specs[name] = replace(specs[0], name=name)
        self.made_of[name] = (replace(whole(specs[0]), source=keys[0]),)
        if len(keys) > 1:
            self.replicas.append(Replicas(name, tuple(keys)))

    def _module(self, name: str) -> Module:
        """The module of a tensor, as rank 0 holds it."""
        place = self.naming.place(name)
        held = self.ranks[0]
        fields = {
            field: replace(held[full][1].spec, name=full)
            for field in (place.field, "weight", *SCALE_FIELDS)
            if (full := f"{place.module}.{field}") in held
        }
        weight, scale = fields.get("weight"), next((fields[f] for f in SCALE_FIELDS if f in fields), None)
        block = None
        if weight and scale and len(scale.shape) == 2 and len(weight.shape) == 2:
            is_channel = scale.shape == (weight.shape[0], 1) and self._block[0] != 1
            block = None if is_channel else self._block
        return Module(place, fields, block)

    def _require_like(self, name: str, specs: Sequence[TensorSpec], along: int) -> None:
        def rest(spec: TensorSpec) -> tuple[object, ...]:
            return (spec.dtype, len(spec.shape), spec.shape[:along], spec.shape[along + 1 :])

        if len({rest(spec) for spec in specs}) > 1:
            raise self._unlike(name, specs)

    def _unlike(self, name: str, specs: Sequence[TensorSpec]) -> BadInputError:
        found = [f"rank {rank}: {spec.dtype} {list(spec.shape)}" for rank, spec in enumerate(specs)]
        return BadInputError(
            f"{self.where}: the ranks hold {name} in shapes that do not fit together",
            hint="the ranks are of different checkpoints; shard the original again",
            details=found,
        )

    def trim(self, name: str, rows: int) -> None:
        """Take the padding of a vocabulary away again; it must be zeros."""
        spec = self.specs.get(name)
        if spec is None or not spec.shape or rows > spec.shape[0]:
            raise BadInputError(f"config.json notes {rows} true rows of {name}, which it does not have")
        rest = spec.shape[1:]
        padding = replace(spec, shape=(spec.shape[0] - rows, *rest))
        found = TargetTensor(
            padding, tuple(cut(self.made_of[name], ((rows, spec.shape[0]), *((0, s) for s in rest))))
        )
        zeros = TargetTensor(padding, (Zeros(0, padding.shape[0]),))
        self.guards.append(EqualTensors(found, zeros, f"the padding of {name} after row {rows} is not zero"))
        self.specs[name] = replace(spec, shape=(rows, *rest))
        self.made_of[name] = tuple(cut(self.made_of[name], self.specs[name].full_box()))

    def coarsen(self, module: str, blocks: tuple[int, int, int, int]) -> None:
        """Put scales back to the blocks they had; finer scales of one block must be equal."""
        name = next((n for f in SCALE_FIELDS if (n := f"{module}.{f}") in self.specs), None)
        weight = self.specs.get(f"{module}.weight")
        if name is None or weight is None or len(weight.shape) != 2:
            raise BadInputError(f"config.json notes finer scales of {module}, which has none")
        for along, (coarse, fine) in enumerate(zip(blocks[:2], blocks[2:], strict=True)):
            if coarse == fine:
                continue
            spec = self.specs[name]
            count = -(-weight.shape[along] // coarse)
            shape = tuple(count if d == along else size for d, size in enumerate(spec.shape))
            if spec.shape[along] != -(-weight.shape[along] // fine):
                raise BadInputError(
                    f"{name} has shape {list(spec.shape)}; config.json notes blocks of {blocks[2]}x{blocks[3]}"
                )
            thin = replace(spec, shape=shape)
            pieces = tuple(compose(thinned(spec, along, coarse, fine, count), self.made_of))
            again = tuple(compose(repeated(thin, along, coarse, fine, spec.shape[along]), {name: pieces}))
            self.guards.append(
                EqualTensors(
                    TargetTensor(spec, again),
                    TargetTensor(spec, self.made_of[name]),
                    f"scales of {module} that belong to one block of {coarse} differ",
                )
            )
            self.specs[name], self.made_of[name] = thin, pieces
