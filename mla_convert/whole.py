"""Any checkpoint, sharded over ranks or not, seen as one: the input of ``reshard``, ``diff`` and ``inspect``.

A `Whole` names every tensor as Hugging Face does, with its full shape, and says which pieces of which stored tensors
it is made of. Stored tensors of a sharded checkpoint have keys of the form ``rank:name``. Nothing is read but headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile, SourceFile, SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.deepseek import DEFAULT_STEM, from_deepseek, parse_rank_file, rank_file
from mla_convert.formats.folder import Folder
from mla_convert.formats.huggingface import (
    folder_of,
    open_checkpoint,
    other_files,
    parse_rank_folder,
    rank_folder,
    read_catalogue,
    read_config,
)
from mla_convert.formats.torch_dist import is_torch_dist, open_torch_dist
from mla_convert.formats.torch_legacy import is_torch, open_torch
from mla_convert.geometry import quantization_config
from mla_convert.megatron.eras import IndexerRows
from mla_convert.megatron.legacy_reading import read_torch_source
from mla_convert.megatron.reading import MegatronSource, read_dist_source
from mla_convert.merging import Merger, ShardingMark
from mla_convert.names import Naming
from mla_convert.plan import Copy, EqualTensors, Replicas, whole
from mla_convert.quant import config_block
from mla_convert.shard import Experts


class Format(StrEnum):
    """How a checkpoint lies on disk."""

    HUGGINGFACE = "huggingface"
    DEEPSEEK = "deepseek"
    TORCH_DIST = "torch_dist"  # Megatron's, by the names of its --ckpt-format
    TORCH = "torch"

    @property
    def is_megatron(self) -> bool:
        """True for the two formats of Megatron."""
        return self in (Format.TORCH_DIST, Format.TORCH)


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
        megatron: The same in Megatron's terms, if it is one of its checkpoints.
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
    megatron: MegatronSource | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration; empty if there is none."""
        return self.logical.config.value if self.logical.config else {}

    @property
    def block(self) -> tuple[int, int]:
        """FP8 block size that the configuration states, or the usual one."""
        return config_block(quantization_config(self.config))


def open_whole(path: Path, indexer_from: IndexerRows | None = None) -> Whole:
    """Read the inventory of a checkpoint in any format.

    Args:
        path: Where it lies.
        indexer_from: The order of a Megatron checkpoint's indexer rows, where it does not tell.

    Raises:
        MlaConvertError: As :func:`open_checkpoint` does; BadInputError also if ranks are missing or contradict each
            other.
    """
    if is_megatron(path):
        return _of_megatron(Folder(path), indexer_from)
    folder = folder_of(path)
    return read_whole(folder) if folder else _unsharded(open_checkpoint(path))


def read_whole(folder: Folder, indexer_from: IndexerRows | None = None) -> Whole:
    """The inventory of the checkpoint in a folder; errors are those of :func:`open_whole`."""
    if is_megatron(folder.root):
        return _of_megatron(folder, indexer_from)
    names = folder.entries()
    files = {name: found for name in names if (found := parse_rank_file(name))}
    folders = {
        name: found for name in names if (found := parse_rank_folder(name)) and folder.holds_folder(name)
    }
    if files:
        return _read_deepseek(folder, files, [name for name in names if name.endswith(".safetensors")])
    if folders:
        return _read_folders(folder, folders)
    return _unsharded(read_catalogue(folder))


def _unsharded(catalogue: Catalogue) -> Whole:
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


def _of_megatron(folder: Folder, indexer_from: IndexerRows | None) -> Whole:
    is_legacy = is_torch(folder.root)
    if is_legacy:
        found = read_torch_source(open_torch(folder.root, folder.origin, folder.warnings), indexer_from)
    else:
        found = read_dist_source(open_torch_dist(folder.root, folder.origin, folder.warnings), indexer_from)
    return Whole(
        source=found.weights.source,
        logical=found.logical,
        made_of=found.made_of,
        homes={},
        format=Format.TORCH if is_legacy else Format.TORCH_DIST,
        ranks=found.ranks,
        experts=None,
        mark=found.mark,
        replicas=tuple(found.weights.replicas),
        guards=tuple(found.weights.guards),
        megatron=found,
    )


def is_megatron(path: Path) -> bool:
    """True for a checkpoint in one of Megatron's formats."""
    return is_torch(path) or is_torch_dist(path)


def _stem(naming: Naming) -> str:
    return naming.stems[0] if naming.stems else DEFAULT_STEM


def _read_deepseek(folder: Folder, files: Mapping[str, tuple[int, int]], weights: Sequence[str]) -> Whole:
    ranks = _all_ranks(folder, files, rank_file)
    strangers = [name for name in weights if name not in files]
    if strangers:
        raise BadInputError(
            f"{folder} holds {len(files)} rank files and {len(strangers)} other weight files",
            hint="keep the weights of one checkpoint in the folder",
            details=strangers,
        )
    config = read_config(folder.root)
    mark = ShardingMark.read(config)
    found = {name: folder.weights(name) for name in files}
    by_rank = [found[rank_file(rank, ranks)] for rank in range(ranks)]
    stored = [
        {t.spec.name: SourceTensor(t.spec, file.name, t.start, t.stop) for t in file.header.tensors}
        for file in by_rank
    ]

    def name_of(name: str) -> str:
        return from_deepseek(name, mark.stem)

    return _merged(folder, found, stored, config, (), Format.DEEPSEEK, name_of, mark)


def _read_folders(folder: Folder, folders: Mapping[str, tuple[int, int]]) -> Whole:
    ranks = _all_ranks(folder, folders, rank_folder)
    config = read_config(folder.root)
    files: dict[str, SourceFile] = {}
    stored = []
    indexes = []
    for rank in range(ranks):
        inner = rank_folder(rank, ranks)
        opened = read_catalogue(folder.within(inner))
        files |= {f"{inner}/{name}": replace(f, name=f"{inner}/{name}") for name, f in opened.files.items()}
        stored.append({name: replace(t, file=f"{inner}/{t.file}") for name, t in opened.tensors.items()})
        if opened.index:
            indexes.append(f"{inner}/{opened.index.name}")
    mark = ShardingMark.read(config)
    return _merged(folder, files, stored, config, indexes, Format.HUGGINGFACE, str, mark)


def _all_ranks(
    folder: Folder, found: Mapping[str, tuple[int, int]], name_of: Callable[[int, int], str]
) -> int:
    """How many ranks there are, if all of them are there."""
    counts = sorted({ranks for _, ranks in found.values()})
    if len(counts) > 1:
        raise BadInputError(
            f"{folder} holds ranks of several checkpoints: of {' and of '.join(map(str, counts))} ranks",
            hint="keep the weights of one checkpoint in the folder",
        )
    present = {rank for rank, _ in found.values()}
    missing = [name_of(rank, counts[0]) for rank in range(min(counts[0], 65536)) if rank not in present]
    if missing or len(found) != counts[0]:
        raise BadInputError(
            f"{folder}: {len(missing)} of {counts[0]} ranks are missing",
            hint="every rank holds a part of every layer; copy the missing ones here",
            details=missing,
        )
    return counts[0]


# Merging


def _merged(
    folder: Folder,
    files: Mapping[str, SourceFile],
    stored: Sequence[Mapping[str, SourceTensor]],
    config: JsonFile | None,
    indexes: Sequence[str],
    format: Format,
    name_of: Callable[[str], str],
    mark: ShardingMark,
) -> Whole:
    ranks = [{name_of(name): (f"{r}:{name}", t) for name, t in held.items()} for r, held in enumerate(stored)]
    names = list(dict.fromkeys(name for held in ranks for name in held))
    merger = Merger(str(folder), ranks, Naming.of(names), config)
    for name in names:
        merger.add(name)
    tensors = {f"{r}:{name}": t for r, held in enumerate(stored) for name, t in held.items()}
    for name, rows in mark.vocabulary.items():
        merger.trim(name, rows)
    for module, blocks in mark.reblocked.items():
        merger.coarsen(module, blocks)
    logical = {name: SourceTensor(spec, "", 0, spec.nbytes) for name, spec in merger.specs.items()}
    others, warnings = other_files(folder, files, None)
    source = Catalogue(
        root=folder.root,
        single_file=False,
        files=files,
        tensors=tensors,
        config=config,
        index=None,
        others=tuple(other for other in others if other.name not in indexes),
        warnings=(*folder.warnings, *warnings),
        origin=folder.origin,
    )
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
