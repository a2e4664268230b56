"""What commands read: one class for each way that checkpoints are read, and the table of what commands take.

``SUPPORT`` says which command reads which kind of checkpoint, ``OPTIONS`` which kinds have which of Megatron's options.
Commands ask neither: they open a source for what they are about to do, and what cannot be done is refused here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from mla_convert.catalogue import Catalogue, OtherFile, SourceFile
from mla_convert.combining import CombineOptions, plan_combine
from mla_convert.errors import BadInputError, CannotError, UsageError
from mla_convert.formats.deepseek import parse_rank_file
from mla_convert.formats.folder import Folder
from mla_convert.formats.huggingface import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    folder_of,
    no_such_path,
    open_checkpoint,
    parse_rank_folder,
    read_catalogue,
)
from mla_convert.formats.torch_dist import is_torch_dist, lists_torch_dist, open_torch_dist
from mla_convert.formats.torch_legacy import is_torch, lists_torch
from mla_convert.geometry import Layout, find_blocks
from mla_convert.hub_source import HubCheckpoint, cache_folder, hub_id
from mla_convert.inspection import inspect_document
from mla_convert.manifest import read_manifest
from mla_convert.megatron.changes import MegatronOptions
from mla_convert.megatron.conversion import plan_in_place
from mla_convert.megatron.eras import IndexerRows
from mla_convert.megatron.inspecting import megatron_document
from mla_convert.megatron.model import MegatronModel, read_model
from mla_convert.megatron.planning import plan_megatron_combine, plan_megatron_split, plan_migrate
from mla_convert.plan import Plan
from mla_convert.progress import Progress
from mla_convert.sharding import ReshardOptions
from mla_convert.splitting import SplitOptions, plan_split
from mla_convert.storage import human_bytes, plain
from mla_convert.whole import Whole, open_whole, read_whole

T = TypeVar("T")

#: A plan, and the inventory of the source as one checkpoint.
Planned = tuple[Plan, Catalogue]


class Kind(StrEnum):
    """How a checkpoint lies on disk."""

    HUGGINGFACE = "a Hugging Face checkpoint"
    RANK_FILES = "a checkpoint in DeepSeek's rank files"
    RANK_FOLDERS = "a checkpoint in one folder a rank"
    TORCH_DIST = "a torch_dist checkpoint of Megatron"
    TORCH = "a checkpoint in Megatron's older format"


_ALL = frozenset(Kind)
_ON_RANKS = frozenset({Kind.RANK_FILES, Kind.RANK_FOLDERS})
#: Which command reads which kinds.
SUPPORT: Mapping[str, frozenset[Kind]] = {
    "inspect": _ALL,
    "split": _ALL - _ON_RANKS,
    "combine": _ALL - _ON_RANKS,
    "migrate": frozenset({Kind.TORCH_DIST}),
    "reshard": _ALL,
    "diff": _ALL,
    "verify": _ALL,
}
#: Which kinds take which of Megatron's options, by the names of ``MegatronOptions``.
OPTIONS: Mapping[str, frozenset[Kind]] = {
    "norms": frozenset({Kind.TORCH_DIST}),
    "indexer": frozenset({Kind.TORCH_DIST}),
    "indexer_from": frozenset({Kind.TORCH_DIST, Kind.TORCH}),
    "drop_optimizer": frozenset({Kind.TORCH_DIST, Kind.TORCH}),
    "drop_fp8_state": frozenset({Kind.TORCH_DIST}),
}


@dataclass(frozen=True, slots=True)
class Source(ABC):
    """A checkpoint that a command reads.

    Attributes:
        kind: How it lies.
        path: Where it lies, or would lie in the Hub's cache.
        hub: The commit that it is, if it comes from the Hub.
        progress: Who is told about headers read from there.
    """

    kind: Kind
    path: Path
    hub: HubCheckpoint | None
    progress: Progress

    @property
    def is_archive(self) -> bool:
        """True if what it holds is only known from inside its files: all of them have to be here to be read."""
        return self.kind in (Kind.TORCH_DIST, Kind.TORCH)

    def require_here(self) -> None:
        """
        Raises:
            CannotError: It would have to be downloaded to be read.
        """
        if self.hub and self.is_archive and (missing := self.hub.missing()):
            size = human_bytes(sum(self.hub.files[name].size for name in missing))
            raise CannotError(
                f"{self.hub.asked} is {self.kind}, whose tensors are described inside its archives: it cannot be looked"
                f" at before it is downloaded ({len(missing)} files, {size})",
                hint=f"hf download {self.hub.asked.repository}, then the same again; or convert it without --dry-run",
            )

    @abstractmethod
    def plan_split(self, options: SplitOptions, megatron: MegatronOptions) -> Planned:
        """Plan ``split``."""

    @abstractmethod
    def plan_combine(self, options: CombineOptions, megatron: MegatronOptions) -> Planned:
        """Plan ``combine``."""

    def plan_migrate(self, options: MegatronOptions, *, trust_shapes: bool) -> Planned:
        """Plan ``migrate``.

        Raises:
            CannotError: Checkpoints of this kind have no conventions that changed.
        """
        raise _not_read(self.path, self.kind, "migrate")

    def whole(self, indexer_from: IndexerRows | None = None) -> Whole:
        """The inventory, seen as one checkpoint."""
        return _listable(self._read_whole(indexer_from), lambda found: found.source)

    def _read_whole(self, indexer_from: IndexerRows | None) -> Whole:
        return self._read(
            lambda folder: read_whole(folder, indexer_from), lambda path: open_whole(path, indexer_from)
        )

    def _read(self, folder: Callable[[Folder], T], path: Callable[[Path], T]) -> T:
        return self.hub.read(folder, self.progress, (MANIFEST_NAME,)) if self.hub else path(self.path)

    def inspect(self, *, trust_shapes: bool) -> tuple[Catalogue, dict[str, Any]]:
        """The inventory, and what ``inspect`` says."""
        self.require_here()
        whole = self.whole()
        return whole.logical, inspect_document(whole, find_blocks(whole.logical, trust_shapes=trust_shapes))

    def _refuse_options(self, megatron: MegatronOptions, why: str, hint: str | None = None) -> None:
        """
        Raises:
            UsageError: An option is given that checkpoints of this kind do not have.
        """
        unset = MegatronOptions()
        for name, kinds in OPTIONS.items():
            if self.kind not in kinds and getattr(megatron, name) != getattr(unset, name):
                raise UsageError(why, hint=hint)


class SafetensorsSource(Source):
    """Hugging Face's folder or file, DeepSeek's rank files, or one folder a rank."""

    def plan_split(self, options: SplitOptions, megatron: MegatronOptions) -> Planned:
        catalogue = self._catalogue(megatron)
        return plan_split(catalogue, options), catalogue

    def plan_combine(self, options: CombineOptions, megatron: MegatronOptions) -> Planned:
        catalogue = self._catalogue(megatron)
        manifest = None if options.ignore_manifest else read_manifest(catalogue.root)
        return plan_combine(catalogue, manifest, options), catalogue

    def _catalogue(self, megatron: MegatronOptions) -> Catalogue:
        self._refuse_options(
            megatron,
            f"--norms, --indexer, --drop-optimizer and --drop-fp8-state are for torch_dist checkpoints of Megatron, "
            f"and {self.path} is none",
        )
        return _listable(self._read(read_catalogue, open_checkpoint), lambda found: found)


class TorchDistSource(Source):
    """Megatron's torch_dist: edited as it is, with whatever training left in it."""

    def inspect(self, *, trust_shapes: bool) -> tuple[Catalogue, dict[str, Any]]:
        self.require_here()
        model = self._model()
        return model.logical, megatron_document(model, find_blocks(model.logical, trust_shapes=trust_shapes))

    def plan_split(self, options: SplitOptions, megatron: MegatronOptions) -> Planned:
        if options.dequantize:
            raise CannotError("--dequantize: a torch_dist checkpoint has no quantised weights")
        model = self._model()
        plan = plan_megatron_split(
            model, megatron, keep_combined=options.keep_combined, trust_shapes=options.trust_shapes
        )
        return plan, model.logical

    def plan_combine(self, options: CombineOptions, megatron: MegatronOptions) -> Planned:
        model = self._model()
        plan = plan_megatron_combine(
            model,
            None if options.ignore_manifest else read_manifest(model.source.root),
            megatron,
            ignore_manifest=options.ignore_manifest,
            trust_shapes=options.trust_shapes,
        )
        return plan, model.logical

    def plan_migrate(self, options: MegatronOptions, *, trust_shapes: bool) -> Planned:
        model = self._model()
        return plan_migrate(model, options, trust_shapes=trust_shapes), model.logical

    def _model(self) -> MegatronModel:
        found = self._read(
            lambda folder: open_torch_dist(folder.root, folder.origin, folder.warnings), open_torch_dist
        )
        return _listable(read_model(found), lambda found: found.logical)


class TorchSource(Source):
    """Megatron's older format: split and combined rank by rank."""

    def plan_split(self, options: SplitOptions, megatron: MegatronOptions) -> Planned:
        return self._in_place(Layout.SPLIT, megatron, trust_shapes=options.trust_shapes)

    def plan_combine(self, options: CombineOptions, megatron: MegatronOptions) -> Planned:
        return self._in_place(Layout.COMBINED, megatron, trust_shapes=options.trust_shapes)

    def _in_place(self, layout: Layout, megatron: MegatronOptions, *, trust_shapes: bool) -> Planned:
        self._refuse_options(
            megatron,
            f"--norms, --indexer and --drop-fp8-state are for torch_dist; {self.path} is in Megatron's older format",
            hint="`mla-convert reshard --to torch_dist` makes one of it",
        )
        whole = self.whole(megatron.indexer_from)
        options = ReshardOptions(
            whole.ranks, layout=layout, trust_shapes=trust_shapes, drop_optimizer=megatron.drop_optimizer
        )
        return plan_in_place(whole, options), whole.logical


def open_source(source: str | Path, command: str, progress: Progress) -> Source:
    """Find what ``source`` names, and how it lies.

    Args:
        source: A folder, a file, an index, or ``hf://org/name[@revision]``.
        command: What is to be done with it: a key of ``SUPPORT``.
        progress: Who is told about headers read from the Hub.

    Raises:
        UsageError: There is nothing.
        CannotError: The command does not read checkpoints of that kind.
        HubError: The Hub or the network refused.
    """
    asked = hub_id(source)
    hub = HubCheckpoint(asked) if asked else None
    path = cache_folder(asked) if asked else local_path(Path(source))
    kind = kind_of(hub.files) if hub else _kind_at(path)
    if kind not in SUPPORT[command]:
        raise _not_read(source, kind, command)
    return _CLASSES.get(kind, SafetensorsSource)(kind, path, hub, progress)


_CLASSES: Mapping[Kind, type[Source]] = {Kind.TORCH_DIST: TorchDistSource, Kind.TORCH: TorchSource}
_FOR_RANKS = (
    "`mla-convert reshard --layout` splits and combines on the way; `mla-convert reshard --tp 1` makes one checkpoint "
    "of it"
)


def _not_read(source: str | Path, kind: Kind, command: str) -> CannotError:
    is_on_ranks = kind in _ON_RANKS and command != "migrate"
    return CannotError(
        f"{source} is {kind}, which `{command}` does not read",
        hint=_FOR_RANKS if is_on_ranks else f"it reads: {', '.join(sorted(SUPPORT[command]))}",
    )


def kind_of(names: Iterable[str]) -> Kind:
    """The kind of a checkpoint that consists of files of these names."""
    names = list(names)
    if lists_torch(names):
        return Kind.TORCH
    if lists_torch_dist(names):
        return Kind.TORCH_DIST
    tops = {name.partition("/")[::2] for name in names}
    if any((found := parse_rank_file(top)) and found[1] > 1 for top, _ in tops):
        return Kind.RANK_FILES
    if any(parse_rank_folder(top) and below for top, below in tops):
        return Kind.RANK_FOLDERS
    return Kind.HUGGINGFACE


def _kind_at(path: Path) -> Kind:
    if is_torch(path):
        return Kind.TORCH
    if is_torch_dist(path):
        return Kind.TORCH_DIST
    folder = folder_of(path)
    if folder is None:
        return Kind.HUGGINGFACE
    return kind_of(f"{name}/*" if folder.holds_folder(name) else name for name in folder.entries())


def local_path(path: Path) -> Path:
    """``path``, or the folder of an index.

    Raises:
        UsageError: There is nothing at ``path``.
    """
    if not os.path.lexists(path):
        raise no_such_path(path)
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        return path.parent  # an index stands for its folder, which the output must not be in
    return path


def _listable(found: T, catalogue_of: Callable[[T], Catalogue]) -> T:
    """``found``, if a manifest can list its files.

    Raises:
        BadInputError: A file's name is no text.
    """
    catalogue = catalogue_of(found)
    files: tuple[SourceFile | OtherFile, ...] = (*catalogue.files.values(), *catalogue.others)
    for file in files:
        if not _is_text(file.name):
            raise BadInputError(
                f"{plain(file.path)}: the name is not UTF-8, so no manifest can list it",
                hint="rename it, or move it out of the checkpoint",
            )
    return found


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
