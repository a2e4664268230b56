"""Deals weights out to the ranks of an older-format Megatron checkpoint: one archive of ``torch.save`` for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_convert.errors import CannotError
from mla_convert.formats.torch_archive import archive, tensor_value
from mla_convert.formats.torch_dist import TRACKER
from mla_convert.formats.torch_legacy import MODEL_FILE
from mla_convert.megatron.layout import RankLayout
from mla_convert.megatron.names import Entry, MegatronPlace, place_of
from mla_convert.megatron.translation import cut_values
from mla_convert.names import Sharding
from mla_convert.pieces import cut
from mla_convert.plan import Copy, Dequantise, GeneratedFile, Piece, RewrittenFile, TargetTensor, Zeros
from mla_convert.tensors import TensorSpec

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class RankWriter:
    """Writes weights for the ranks of a layout.

    Attributes:
        weights: The weights by name, whole.
        layout: Which rank holds what.
        heads: Heads of each attention block; tensor parallelism cuts between heads only.
    """

    weights: Mapping[str, TargetTensor]
    layout: RankLayout
    heads: Mapping[str, int]

    def require_legal(self) -> None:
        """Raise CannotError if the weights do not divide by the ranks."""
        tp, ep = self.layout.tp, self.layout.ep
        reasons: dict[tuple[int, str], str] = {}
        for prefix, count in self.heads.items():
            if count % tp:
                reasons.setdefault(
                    (count, "heads"), f"{count} heads of {prefix.rstrip('.')} do not divide by {tp}"
                )
        for name, target in self.weights.items():
            place = place_of(name)
            entry = place.entry if place else None
            if entry is None or tp == 1:
                continue
            along = self._along(entry)
            if along is None:
                continue
            size, parts = target.spec.shape[along], len(entry.huggingface)
            if size % (parts * tp):
                what = "columns" if along else "rows"
                reasons.setdefault(
                    (size // parts, what), f"{size // parts} {what} of {name} do not divide by {tp}"
                )
        for module, count in self._expert_counts().items():
            if count % ep:
                reasons.setdefault((count, "experts"), f"{count} experts of {module} do not divide by {ep}")
        if reasons:
            raise CannotError(
                f"{tp} tensor-parallel ranks are not possible: {next(iter(reasons.values()))}",
                hint="--pad-vocabulary adds rows to a vocabulary; nothing else can be padded",
                details=list(reasons.values()),
            )

    def files(self, rest: Mapping[str, Any]) -> Iterator[RewrittenFile]:
        """The ranks' files.

        Args:
            rest: What is in each of them beside the model, arguments among it.
        """
        layout = self.layout
        counts = self._expert_counts()
        by_chunk: dict[tuple[int, int], list[str]] = {}
        for name in self.weights:
            for home in layout.homes.get(name) or self._default_homes(name):
                by_chunk.setdefault(home, []).append(name)
        for tp in range(layout.tp):
            for pp in range(layout.pp):
                for ep in range(layout.ep):
                    chunks = [by_chunk.get((pp, number), []) for number in range(layout.chunks)]
                    yield self._file(tp, pp, ep, chunks, rest, counts)

    def tracker(self) -> GeneratedFile:
        """The file that names the iteration."""
        folder = self.layout.folder
        text = str(int(folder.removeprefix("iter_"))) if folder.startswith("iter_") else folder
        return GeneratedFile(TRACKER, text.encode())

    # Inside

    def _default_homes(self, name: str) -> tuple[tuple[int, int], ...]:
        """Where a weight lies whose place is not listed: beside its neighbours in the layer, else on rank 0."""
        stem = name.rpartition(".")[0].rpartition(".")[0]
        for other, homes in self.layout.homes.items():
            if stem and other.startswith(stem + "."):
                return homes
        return ((0, 0),)

    def _expert_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name in self.weights:
            found = _EXPERT.search(name)
            if found:
                module = name[: found.start()] + ".mlp.experts"
                counts[module] = max(counts.get(module, 0), int(found[1]) + 1)
        return counts

    def _file(
        self,
        tp: int,
        pp: int,
        ep: int,
        chunks: Sequence[Sequence[str]],
        rest: Mapping[str, Any],
        counts: Mapping[str, int],
    ) -> RewrittenFile:
        targets: list[TargetTensor] = []
        models: dict[str, Any] = {}
        for number, names in enumerate(chunks):
            model: dict[str, Any] = {}
            for name in names:
                local = self._local_name(name, (pp, number), ep, counts)
                if local is None:
                    continue
                target = self._slice(name, tp)
                spec = replace(target.spec, name=f"{number}:{local}")
                model[local] = tensor_value(spec, str(len(targets)))
                targets.append(TargetTensor(spec, target.pieces))
            for module in self._states(names, (pp, number), ep, counts):
                model[f"{module}._extra_state"] = None
            models["model" if len(chunks) == 1 else f"model{number}"] = model
        folder = f"mp_rank_{tp:02d}"
        folder += f"_{pp:03d}" if self.layout.pp > 1 else ""
        folder += f"_{ep:03d}" if self.layout.ep > 1 else ""
        name = f"{self.layout.folder}/{folder}/{MODEL_FILE}"
        sizes = [target.spec.nbytes for target in targets]
        beginning, around, directory = archive({**rest, **models}, sizes, name)
        return RewrittenFile(name, beginning, tuple(targets), around, directory)

    def _local_name(self, name: str, home: tuple[int, int], ep: int, counts: Mapping[str, int]) -> str | None:
        """What the module on a rank calls a weight; None if it holds none of it."""
        expert = _EXPERT.search(name)
        if expert:
            module = name[: expert.start()] + ".mlp.experts"
            each = counts[module] // self.layout.ep
            owner, number = divmod(int(expert[1]), each)
            if owner != ep:
                return None
            below = name[expert.end() :]
            if self.layout.is_grouped:
                linear, _, leaf = below.rpartition(".")
                name = f"{module}.{linear}.{leaf}{number}" if leaf else f"{module}.{linear}."
            else:
                name = f"{module}.local_experts.{number}.{below}"
        name = (
            name.replace(".transformer_layer.", f".{self.layout.inner}.", 1)
            if name.startswith("mtp.")
            else name
        )
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return name
        before = self.layout.offsets.get(home, (0, 0))[layer[1] == "mtp"]
        return f"{layer[1]}.layers.{int(layer[2]) - before}.{layer[3]}"

    def _states(
        self, names: Sequence[str], home: tuple[int, int], ep: int, counts: Mapping[str, int]
    ) -> Iterator[str]:
        """Modules on a rank that have an extra state, empty here."""
        found: dict[str, None] = {}
        for name in names:
            module = name.rpartition(".")[0]
            candidates = [module]
            if module.endswith(".self_attention.linear_proj"):
                candidates.append(module.removesuffix("linear_proj") + "core_attention")
            for candidate in candidates:
                if self._has_state(candidate):
                    local = self._local_name(candidate + ".", home, ep, counts)
                    if local is not None:
                        found.setdefault(local.rstrip("."))
        yield from found

    def _has_state(self, module: str) -> bool:
        known = self.layout.states
        if known is not None:
            as_first = _EXPERT.sub(".mlp.experts.0.", module + ".").rstrip(".")
            twins = (as_first, _combined_twin(as_first))
            return any(twin in known for twin in twins)
        if module.endswith(".core_attention"):  # sparse attention is none of Transformer Engine's modules
            return f"{module}.indexer.linear_wk.weight" not in self.weights
        is_layer = ".layers." in module and not module.endswith(".router")
        return is_layer or module.startswith("decoder.final")

    def _along(self, entry: Entry) -> int | None:
        if entry.sharding is Sharding.UNKNOWN:
            return 0 if self.layout.cuts_down_projections else None
        return entry.sharding.dimension

    def _slice(self, name: str, tp: int) -> TargetTensor:
        """The part of a weight that a tensor rank holds."""
        target, ranks = self.weights[name], self.layout.tp
        place: MegatronPlace | None = place_of(name)
        along = self._along(place.entry) if place else None
        if ranks == 1 or place is None or along is None:
            return target
        parts = len(place.entry.huggingface)
        size = target.spec.shape[along] // parts
        each = size // ranks
        pieces: list[Piece] = []
        for part in range(parts):
            start = part * size + tp * each
            pieces += self._cut(target, along, start, each, part * each)
        shape = tuple(parts * each if d == along else extent for d, extent in enumerate(target.spec.shape))
        return TargetTensor(replace(target.spec, shape=shape), tuple(pieces))

    def _cut(self, target: TargetTensor, along: int, start: int, count: int, at: int) -> Iterator[Piece]:
        """The pieces of ``count`` rows or columns from ``start``, placed from ``at``."""
        copies = [piece for piece in target.pieces if isinstance(piece, Copy)]
        box = tuple((start, start + count) if d == along else (0, s) for d, s in enumerate(target.spec.shape))
        for piece in cut(copies, box):
            moved = tuple(offset + at if d == along else offset for d, offset in enumerate(piece.at))
            yield Copy(piece.source, piece.box, moved)
        for other in target.pieces:
            if isinstance(other, Zeros):
                first, last = max(other.at, start), min(other.at + other.count, start + count)
                if first < last:
                    yield Zeros(first - start + at, last - first)
            elif isinstance(other, Dequantise):
                values = cut_values(other, box)
                if values:
                    row, column = values.at
                    yield replace(values, at=(row, column + at) if along else (row + at, column))


def _combined_twin(module: str) -> str:
    """The combined up-projection that a split one stands for, and the other way round."""
    base, _, leaf = module.rpartition(".")
    twins = {"linear_k_up_proj": "linear_kv_up_proj", "linear_v_up_proj": "linear_kv_up_proj"}
    twins |= {"linear_kv_up_proj": "linear_k_up_proj"}
    return f"{base}.{twins[leaf]}" if leaf in twins else module


def padded(target: TargetTensor, count: int) -> TargetTensor:
    """A vocabulary with rows of zeros behind it, or without the last ones."""
    have = target.spec.shape[0]
    spec: TensorSpec = replace(target.spec, shape=(count, *target.spec.shape[1:]))
    if count <= have:
        copies = [piece for piece in target.pieces if isinstance(piece, Copy)]
        box = spec.full_box()
        return TargetTensor(spec, tuple(cut(copies, box)))
    return TargetTensor(spec, (*target.pieces, Zeros(have, count - have)))
