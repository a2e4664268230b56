"""The commands as library calls: what ``cli`` runs, without printing. Import and use them from Python as they are."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mla_convert import storage
from mla_convert.catalogue import Catalogue, OtherFile, SourceFile
from mla_convert.combining import CombineOptions, plan_combine
from mla_convert.engine import RunOptions, RunReport, run_plan
from mla_convert.errors import BadInputError, UsageError
from mla_convert.formats.huggingface import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Folder,
    no_such_path,
    open_checkpoint,
    read_catalogue,
)
from mla_convert.geometry import AttentionBlock, find_blocks
from mla_convert.hub_source import HubCheckpoint, HubId, cache_folder, hub_id
from mla_convert.inspection import describe_group, group_blocks, inspect_document
from mla_convert.manifest import read_manifest
from mla_convert.plan import Plan
from mla_convert.progress import Progress, SilentProgress
from mla_convert.resharding import plan_reshard
from mla_convert.sharding import ReshardOptions
from mla_convert.splitting import SplitOptions, plan_split
from mla_convert.staging import check_replaceable, check_target, finished_already, staging_folder
from mla_convert.storage import plain
from mla_convert.whole import Format, Whole, open_whole, read_whole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that was planned and, unless it was a dry run, carried out.

    Attributes:
        plan: What was to be done.
        output: The output folder.
        blocks: The attention blocks of the source.
        inventory: Its tensors as one checkpoint, which the blocks are blocks of.
        report: What was done; None for a dry run.
    """

    plan: Plan
    output: Path
    blocks: tuple[AttentionBlock, ...]
    inventory: Catalogue
    report: RunReport | None

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints: the outcome, and the whole plan for a dry run."""
        plan, report = self.plan, self.report
        document: dict[str, Any] = {
            "command": plan.operation,
            "dry_run": report is None,
            "source": plan.catalogue.label,
            "output": str(self.output),
            "plan": plan.digest(),
            "layout": plan.manifest["layout"],
            "attention": [
                describe_group(self.inventory, group) for group in group_blocks(self.inventory, self.blocks)
            ],
            "files": {
                "rewritten": len(plan.rewritten),
                "carried": len(plan.carried),
                "generated": len(plan.generated),
            },
            "bytes": {
                "total": plan.bytes_total,
                "rewritten": plan.bytes_rewritten,
                "carried": plan.bytes_carried,
            },
            "warnings": [*plan.warnings, *(report.warnings if report else [])],
        }
        if plan.operation == "reshard":
            document["options"] = dict(plan.options)
        if report is None:
            document["steps"] = plan.describe()
        else:
            document["bytes"]["by_way"] = dict(report.bytes_by_way)
            document["already_done"] = report.already_done
            document["resumed_files"] = report.resumed_files
            document["seconds"] = round(report.seconds, 3)
        return document


def default_output(source: Path, suffix: str) -> Path:
    """``PATH-split`` beside ``PATH``; a file loses its extension.

    Raises:
        UsageError: ``PATH`` lies in the Hub's cache, where only the Hub's own library should write.
    """
    name = Path(os.path.abspath(source))  # noqa: PTH100 - links keep their own names
    if any(part.startswith("models--") for part in name.parts):
        raise UsageError(
            f"{source} lies in the Hub's cache, where no output should be", hint="choose an output with -o"
        )
    return name.with_name((name.stem if name.is_file() else name.name) + suffix)


def inspect(
    source: str | Path, *, trust_shapes: bool = False, progress: Progress | None = None
) -> tuple[Catalogue, dict[str, Any]]:
    """Read a checkpoint's inventory and describe it, reading no weight.

    Args:
        source: A Hugging Face checkpoint folder, one ``.safetensors`` file, or ``hf://org/name[@revision]``.
        trust_shapes: Let tensor shapes win where the configuration contradicts them.
        progress: Who is told about headers read from the Hub.

    Raises:
        MlaConvertError: As :func:`open_checkpoint` and :func:`find_blocks` do; HubError besides.
    """
    whole = _Source.of(source, progress or SilentProgress()).whole()
    return whole.logical, inspect_document(whole, find_blocks(whole.logical, trust_shapes=trust_shapes))


def split(
    source: str | Path,
    output: Path | None = None,
    options: SplitOptions | None = None,
    *,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Split every combined KV up-projection of ``source`` into K and V, into ``output``.

    Args:
        source: A Hugging Face checkpoint folder, one ``.safetensors`` file, or ``hf://org/name[@revision]``, which
            is downloaded into the Hub's cache first.
        output: The new folder; ``SOURCE-split`` if None, for the Hub's ``./NAME-split``.
        options: What to do.
        run: How to do it.
        progress: Who is told about progress.
        dry_run: Plan only; nothing is written.

    Raises:
        MlaConvertError: The subclass says of which kind; nothing half-done is left under the output's name.
    """
    options = options or SplitOptions()

    def plan(source: _Source) -> tuple[Plan, Catalogue]:
        catalogue = source.catalogue()
        return plan_split(catalogue, options), catalogue

    return _convert(source, output, "-split", plan, run, progress, dry_run, options.trust_shapes)


def combine(
    source: str | Path,
    output: Path | None = None,
    options: CombineOptions | None = None,
    *,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Put K and V of ``source`` together again, into ``output`` (``SOURCE-combined`` if None).

    With the manifest that ``split`` wrote, the original files come back byte for byte. Arguments and errors are
    those of :func:`split`.
    """
    options = options or CombineOptions()

    def plan(source: _Source) -> tuple[Plan, Catalogue]:
        catalogue = source.catalogue()
        manifest = None if options.ignore_manifest else read_manifest(catalogue.root)
        return plan_combine(catalogue, manifest, options), catalogue

    return _convert(source, output, "-combined", plan, run, progress, dry_run, options.trust_shapes)


def reshard(
    source: str | Path,
    output: Path | None = None,
    options: ReshardOptions | None = None,
    *,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Deal ``source`` out to tensor-parallel ranks, or put its ranks together, into ``output`` (``SOURCE-tpN``).

    Without options, it becomes one Hugging Face checkpoint. Arguments and errors are those of :func:`split`.
    """
    options = options or ReshardOptions(1, to=Format.HUGGINGFACE)

    def plan(source: _Source) -> tuple[Plan, Catalogue]:
        whole = source.whole()
        return plan_reshard(whole, options), whole.logical

    return _convert(source, output, f"-tp{options.tp}", plan, run, progress, dry_run, options.trust_shapes)


@dataclass(frozen=True, slots=True)
class _Source:
    """What a command reads: what lies at ``path``, or a commit on the Hub and its place in the cache."""

    path: Path
    hub: HubCheckpoint | None
    progress: Progress

    @classmethod
    def of(cls, source: str | Path, progress: Progress) -> _Source:
        asked = hub_id(source)
        if asked is None:
            return cls(_local_source(Path(source)), None, progress)
        return cls(cache_folder(asked), HubCheckpoint(asked), progress)

    def catalogue(self) -> Catalogue:
        """The inventory of a Hugging Face checkpoint."""
        found = self._read(read_catalogue, open_checkpoint)
        _check_names(found)
        return found

    def whole(self) -> Whole:
        """The inventory of a checkpoint in any format."""
        found = self._read(read_whole, open_whole)
        _check_names(found.source)
        return found

    def _read(self, folder: Callable[[Folder], T], path: Callable[[Path], T]) -> T:
        return self.hub.read(folder, self.progress, (MANIFEST_NAME,)) if self.hub else path(self.path)


def _convert(
    source: str | Path,
    output: Path | None,
    suffix: str,
    make_plan: Callable[[_Source], tuple[Plan, Catalogue]],
    run: RunOptions | None,
    progress: Progress | None,
    dry_run: bool,
    trust_shapes: bool,
) -> Conversion:
    run, progress = run or RunOptions(), progress or SilentProgress()
    asked = hub_id(source)
    path = _local_source(Path(source)) if asked is None else cache_folder(asked)
    target = output or (default_output(path, suffix) if asked is None else _default_here(asked, suffix))
    if target.name in ("", ".."):
        target = target.resolve()
    check_target(path, target, overwrite=run.overwrite)
    opened = _Source.of(source, progress)

    def planned() -> tuple[Plan, Catalogue, tuple[AttentionBlock, ...]]:
        with _without_collector():
            plan, inventory = make_plan(opened)
            return plan, inventory, find_blocks(inventory, trust_shapes=trust_shapes)

    plan, inventory, blocks = planned()
    is_finished = finished_already(target, plan.digest())
    if not is_finished and (dry_run or opened.hub):
        check_replaceable(target, overwrite=run.overwrite)
    if dry_run:
        return Conversion(plan, target, blocks, inventory, None)
    if opened.hub and not is_finished and opened.hub.missing():  # all that headers can tell is in order
        run = replace(run, resume_command=_pinned(run.resume_command, opened.hub))
        _check_space(opened.hub, plan, target)
        del plan, inventory, blocks  # they take as much memory as those that follow
        opened.hub.download(progress, run.resume_command)
        plan, inventory, blocks = planned()
    return Conversion(plan, target, blocks, inventory, run_plan(plan, target, run, progress))


def _local_source(path: Path) -> Path:
    if not os.path.lexists(path):
        raise no_such_path(path)
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        return path.parent  # an index stands for its folder, which the output must not be in
    return path


def _default_here(asked: HubId, suffix: str) -> Path:
    """``./NAME-split``, for a repository that has no place of its own on this disk."""
    here = Path.cwd()
    if any(part.startswith("models--") for part in here.parts):
        raise UsageError(
            "this folder lies in the Hub's cache, where no output should be", hint="choose an output with -o"
        )
    return here / (asked.name + suffix)


def _pinned(command: str | None, checkpoint: HubCheckpoint) -> str | None:
    """The command that goes on with this commit, also if the branch moves on."""
    return command and command.replace(str(checkpoint.asked), checkpoint.origin)


def _check_space(checkpoint: HubCheckpoint, plan: Plan, target: Path) -> None:
    """Refuse before a long download what is known not to fit; the engine looks again, with all details."""
    if storage.on_same_disk(checkpoint.root, target.parent):
        checkpoint.check_space(more=sum(tensor.spec.nbytes for tensor in plan.changed))
        return
    checkpoint.check_space()
    if not staging_folder(target).exists():  # else part of it is there already
        storage.preflight(target.parent, plan.bytes_total)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Plans are made of very many small objects without cycles; looking for some takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_names(catalogue: Catalogue) -> None:
    files: tuple[SourceFile | OtherFile, ...] = (*catalogue.files.values(), *catalogue.others)
    for file in files:
        if not _is_text(file.name):
            raise BadInputError(
                f"{plain(file.path)}: the name is not UTF-8, so no manifest can list it",
                hint="rename it, or move it out of the checkpoint",
            )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
