"""Any checkpoint, sharded over ranks or not, seen as one: the input of ``reshard``, ``diff`` and ``inspect``.

A `Whole` names every tensor as Hugging Face does, with its full shape, and says which pieces of which stored tensors
it is made of. Stored tensors of a sharded checkpoint have keys of the form ``rank:name``. Nothing is read but headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile, OtherFile, SourceFile, SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.deepseek import DEFAULT_STEM, from_deepseek, parse_rank_file, rank_file
from mla_convert.formats.huggingface import (
    entries,
    open_checkpoint,
    other_files,
    parse_rank_folder,
    rank_folder,
    read_config,
    source_file,
)
from mla_convert.formats.huggingface_edit import MARK
from mla_convert.geometry import quantization_config
from mla_convert.names import Naming
from mla_convert.pieces import compose, cut, repeated, side_by_side, thinned
from mla_convert.plan import Copy, EqualTensors, Replicas, TargetTensor, Zeros, whole
from mla_convert.quant import SCALE_FIELDS, config_block
from mla_convert.shard import Experts, Module
from mla_convert.tensors import TensorSpec


class Format(StrEnum):
    """How a checkpoint lies on disk."""

    HUGGINGFACE = "huggingface"
    DEEPSEEK = "deepseek"


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


@dataclass(frozen=True, slots=True)
class Whole:
    """A checkpoint as if it lay in one Hugging Face folder.

    Attributes:
        source: What is stored; keys are ``rank:name`` where there are ranks.
        logical: The same inventory by Hugging Face names and full shapes. Its tensors have no place in a file.
        made_of: For each logical tensor, the pieces of stored tensors it is made of.
        homes: The file name each logical tensor belongs in, where the format tells.
        format: How it lies on disk.
        ranks: Over how many ranks.
        experts: How routed experts lie on ranks; None where one rank or no expert leaves it open.
        mark: What the configuration notes about its sharding.
        replicas: Tensors that every rank holds, which must be the same on all.
        guards: What else must hold for ``made_of`` to lose nothing.
    """

    source: Catalogue
    logical: Catalogue
    made_of: Mapping[str, tuple[Copy, ...]]
    homes: Mapping[str, str]
    format: Format
    ranks: int
    experts: Experts | None
    mark: ShardingMark
    replicas: tuple[Replicas, ...] = ()
    guards: tuple[EqualTensors, ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration; empty if there is none."""
        return self.logical.config.value if self.logical.config else {}

    @property
    def block(self) -> tuple[int, int]:
        """FP8 block size that the configuration states, or the usual one."""
        return config_block(quantization_config(self.config))


def open_whole(path: Path) -> Whole:
    """Read the inventory of a checkpoint in any format.

    Raises:
        MlaConvertError: As :func:`open_checkpoint` does; BadInputError also if ranks are missing or contradict each
            other.
    """
    if path.is_dir():
        names = entries(path)
        files = {name: found for name in names if (found := parse_rank_file(name))}
        folders = {
            name: found for name in names if (found := parse_rank_folder(name)) and (path / name).is_dir()
        }
        if files:
            return _open_deepseek(path, files, [n for n in names if n.endswith(".safetensors")])
        if folders:
            return _open_folders(path, folders)
    catalogue = open_checkpoint(path)
    return Whole(
        source=catalogue,
        logical=catalogue,
        made_of={name: (whole(tensor.spec),) for name, tensor in catalogue.tensors.items()},
        homes={name: tensor.file for name, tensor in catalogue.tensors.items()},
        format=Format.HUGGINGFACE,
        ranks=1,
        experts=None,
        mark=ShardingMark(stem=_stem(Naming.of(catalogue.tensors))),
    )


def _stem(naming: Naming) -> str:
    return naming.stems[0] if naming.stems else DEFAULT_STEM


def _open_deepseek(path: Path, files: Mapping[str, tuple[int, int]], weights: Sequence[str]) -> Whole:
    ranks = _all_ranks(path, files, rank_file)
    strangers = [name for name in weights if name not in files]
    if strangers:
        raise BadInputError(
            f"{path} holds {len(files)} rank files and {len(strangers)} other weight files",
            hint="keep the weights of one checkpoint in the folder",
            details=strangers,
        )
    config = read_config(path)
    mark = ShardingMark.read(config)
    found = {name: source_file(path, name) for name in files}
    by_rank = [found[rank_file(rank, ranks)] for rank in range(ranks)]
    stored = [
        {t.spec.name: SourceTensor(t.spec, file.name, t.start, t.stop) for t in file.header.tensors}
        for file in by_rank
    ]
    others, warnings = other_files(path, found, None)

    def name_of(name: str) -> str:
        return from_deepseek(name, mark.stem)

    return _merged(path, found, stored, config, others, warnings, Format.DEEPSEEK, name_of, mark)


def _open_folders(path: Path, folders: Mapping[str, tuple[int, int]]) -> Whole:
    ranks = _all_ranks(path, folders, rank_folder)
    config = read_config(path)
    files: dict[str, SourceFile] = {}
    stored = []
    indexes = set()
    for rank in range(ranks):
        folder = rank_folder(rank, ranks)
        opened = open_checkpoint(path / folder)
        files |= {f"{folder}/{name}": replace(f, name=f"{folder}/{name}") for name, f in opened.files.items()}
        stored.append({name: replace(t, file=f"{folder}/{t.file}") for name, t in opened.tensors.items()})
        if opened.index:
            indexes.add(f"{folder}/{opened.index.name}")
    others, warnings = other_files(path, files, None)
    others = tuple(other for other in others if other.name not in indexes)
    mark = ShardingMark.read(config)
    return _merged(path, files, stored, config, others, warnings, Format.HUGGINGFACE, str, mark)


def _all_ranks(path: Path, found: Mapping[str, tuple[int, int]], name_of: Callable[[int, int], str]) -> int:
    """How many ranks there are, if all of them are there."""
    counts = sorted({ranks for _, ranks in found.values()})
    if len(counts) > 1:
        raise BadInputError(
            f"{path} holds ranks of several checkpoints: of {' and of '.join(map(str, counts))} ranks",
            hint="keep the weights of one checkpoint in the folder",
        )
    present = {rank for rank, _ in found.values()}
    missing = [name_of(rank, counts[0]) for rank in range(min(counts[0], 65536)) if rank not in present]
    if missing or len(found) != counts[0]:
        raise BadInputError(
            f"{path}: {len(missing)} of {counts[0]} ranks are missing",
            hint="every rank holds a part of every layer; copy the missing ones here",
            details=missing,
        )
    return counts[0]


# Merging


def _merged(
    path: Path,
    files: Mapping[str, SourceFile],
    stored: Sequence[Mapping[str, SourceTensor]],
    config: JsonFile | None,
    others: tuple[OtherFile, ...],
    warnings: Sequence[str],
    format: Format,
    name_of: Callable[[str], str],
    mark: ShardingMark,
) -> Whole:
    ranks = [{name_of(name): (f"{r}:{name}", t) for name, t in held.items()} for r, held in enumerate(stored)]
    names = list(dict.fromkeys(name for held in ranks for name in held))
    merger = _Merger(path, ranks, Naming.of(names), config)
    for name in names:
        merger.add(name)
    tensors = {f"{r}:{name}": t for r, held in enumerate(stored) for name, t in held.items()}
    for name, rows in mark.vocabulary.items():
        merger.trim(name, rows)
    for module, blocks in mark.reblocked.items():
        merger.coarsen(module, blocks)
    logical = {name: SourceTensor(spec, "", 0, spec.nbytes) for name, spec in merger.specs.items()}
    source = Catalogue(path, False, files, tensors, config, None, others, tuple(warnings))
    homes = {}
    if format is Format.HUGGINGFACE:
        homes = {
            name: tensors[pieces[0].source].file.partition("/")[2]
            for name, pieces in merger.made_of.items()
            if pieces
        }
    return Whole(
        source=source,
        logical=replace(source, tensors=logical),
        made_of=merger.made_of,
        homes=homes,
        format=format,
        ranks=len(ranks),
        experts=merger.experts,
        mark=mark,
        replicas=tuple(merger.replicas),
        guards=tuple(merger.guards),
    )


class _Merger:
    """Puts the ranks' tensors together: each rank's by Hugging Face name, with their keys."""

    def __init__(
        self,
        path: Path,
        ranks: Sequence[Mapping[str, tuple[str, SourceTensor]]],
        naming: Naming,
        config: JsonFile | None,
    ) -> None:
        self.path, self.ranks, self.naming = path, ranks, naming
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
                    f"{self.path}: expert tensor {name} lies on ranks {', '.join(map(str, held))}; other experts lie "
                    "on one rank only"
                )
        elif len(self.ranks) > 1:
            missing = [rank for rank in range(len(self.ranks)) if rank not in held]
            if missing:
                raise BadInputError(
                    f"{self.path}: {name} is missing on rank {', '.join(map(str, missing))} of {len(self.ranks)}",
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
            f"{self.path}: the ranks hold {name} in shapes that do not fit together",
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
