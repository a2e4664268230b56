"""The commands as library calls: what ``cli`` runs, without printing. Import and use them from Python as they are."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mla_convert import output_folder
from mla_convert.catalogue import Catalogue, OtherFile, SourceFile
from mla_convert.combining import CombineOptions, plan_combine
from mla_convert.engine import RunOptions, RunReport, run_plan
from mla_convert.errors import BadInputError, CannotError, LocalIOError, UsageError
from mla_convert.formats.huggingface import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Folder,
    no_such_path,
    open_checkpoint,
    read_catalogue,
)
from mla_convert.formats.torch_dist import is_torch_dist, open_torch_dist
from mla_convert.formats.torch_legacy import is_torch
from mla_convert.geometry import AttentionBlock, Layout, find_blocks
from mla_convert.hub_source import HubCheckpoint, HubId, cache_folder, hub_id
from mla_convert.inspection import describe_group, group_blocks, inspect_document
from mla_convert.manifest import read_manifest
from mla_convert.meeting import all_ranks, one_report
from mla_convert.megatron.changes import MegatronOptions
from mla_convert.megatron.conversion import plan_in_place
from mla_convert.megatron.eras import IndexerRows
from mla_convert.megatron.inspecting import megatron_document
from mla_convert.megatron.model import MegatronModel, read_model
from mla_convert.megatron.planning import plan_megatron_combine, plan_megatron_split, plan_migrate
from mla_convert.plan import Plan
from mla_convert.progress import Progress, SilentProgress
from mla_convert.ranks import Ranks
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
    if name.name.endswith(INDEX_SUFFIX):
        name = name.parent  # an index stands for its folder
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
    opened = _Source.of(source, progress or SilentProgress())
    model = opened.megatron()
    if model is not None:
        blocks = find_blocks(model.logical, trust_shapes=trust_shapes)
        return model.logical, megatron_document(model, blocks)
    whole = opened.whole()
    return whole.logical, inspect_document(whole, find_blocks(whole.logical, trust_shapes=trust_shapes))


def split(
    source: str | Path,
    output: Path | None = None,
    options: SplitOptions | None = None,
    *,
    megatron: MegatronOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Split every combined KV up-projection of ``source`` into K and V, into ``output``.

    Args:
        source: A Hugging Face checkpoint folder, one ``.safetensors`` file, or ``hf://org/name[@revision]``, which
            is downloaded into the Hub's cache first; or a checkpoint of Megatron, as its save folder or as the folder
            of one iteration.
        output: The new folder; ``SOURCE-split`` if None, for the Hub's ``./NAME-split``.
        options: What to do.
        megatron: What else to do, for torch_dist alone.
        run: How to do it.
        progress: Who is told about progress.
        dry_run: Plan only; nothing is written.

    Raises:
        MlaConvertError: The subclass says of which kind; nothing half-done is left under the output's name.
    """
    options = options or SplitOptions()

    def plan(source: _Source) -> tuple[Plan, Catalogue]:
        model = source.megatron()
        if model is not None:
            return _megatron_split(model, options, megatron), model.logical
        if is_torch(source.path):
            return _older_megatron(source, Layout.SPLIT, megatron, options.trust_shapes)
        _require_torch_dist(source.path, megatron)
        catalogue = source.catalogue()
        return plan_split(catalogue, options), catalogue

    return _convert(source, output, "-split", plan, run, progress, dry_run, options.trust_shapes)


def combine(
    source: str | Path,
    output: Path | None = None,
    options: CombineOptions | None = None,
    *,
    megatron: MegatronOptions | None = None,
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
        model = source.megatron()
        if model is not None:
            return _megatron_combine(model, options, megatron), model.logical
        if is_torch(source.path):
            return _older_megatron(source, Layout.COMBINED, megatron, options.trust_shapes)
        _require_torch_dist(source.path, megatron)
        catalogue = source.catalogue()
        manifest = None if options.ignore_manifest else read_manifest(catalogue.root)
        return plan_combine(catalogue, manifest, options), catalogue

    return _convert(source, output, "-combined", plan, run, progress, dry_run, options.trust_shapes)


def migrate(
    source: str | Path,
    output: Path | None = None,
    options: MegatronOptions | None = None,
    *,
    trust_shapes: bool = False,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Take a torch_dist checkpoint from one Megatron release's conventions to another's, into ``output``.

    ``output`` is ``SOURCE-migrated`` if None. Other arguments and errors are those of :func:`split`.
    """
    wanted = options or MegatronOptions()

    def plan(source: _Source) -> tuple[Plan, Catalogue]:
        model = source.megatron()
        if model is None:
            raise CannotError(
                f"{source.path} is no torch_dist checkpoint of Megatron, and no other format changed its conventions"
            )
        return plan_migrate(model, wanted, trust_shapes=trust_shapes), model.logical

    return _convert(source, output, "-migrated", plan, run, progress, dry_run, trust_shapes)


def reshard(
    source: str | Path,
    output: Path | None = None,
    options: ReshardOptions | None = None,
    *,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Deal ``source`` out to tensor-parallel ranks, put its ranks together, or take it to another format.

    ``output`` is ``SOURCE-tpN`` if None, or ``SOURCE-FORMAT`` for a change of format on one rank. Without options, it
    becomes one Hugging Face checkpoint. Arguments and errors are those of :func:`split`.
    """
    options = options or ReshardOptions(1, to=Format.HUGGINGFACE)

    def plan(source: _Source) -> tuple[Plan, Catalogue]:
        whole = source.whole(options.indexer_from)
        return plan_reshard(whole, options), whole.logical

    suffix = f"-{options.to}" if options.to and options.to.is_megatron else ""
    suffix += f"-tp{options.tp}" if options.tp > 1 or not suffix else ""
    return _convert(source, output, suffix, plan, run, progress, dry_run, options.trust_shapes)


def _older_megatron(
    source: _Source, layout: Layout, megatron: MegatronOptions | None, trust_shapes: bool
) -> tuple[Plan, Catalogue]:
    """The plan to split or combine a checkpoint in Megatron's older format, rank by rank."""
    asked = megatron or MegatronOptions()
    if asked != MegatronOptions(drop_optimizer=asked.drop_optimizer, indexer_from=asked.indexer_from):
        raise UsageError(
            f"--norms, --indexer and --drop-fp8-state are for torch_dist; {source.path} is in Megatron's older format",
            hint="`mla-convert reshard --to torch_dist` makes one of it",
        )
    whole = source.whole(asked.indexer_from)
    options = ReshardOptions(
        whole.ranks, layout=layout, trust_shapes=trust_shapes, drop_optimizer=asked.drop_optimizer
    )
    return plan_in_place(whole, options), whole.logical


def _megatron_split(model: MegatronModel, options: SplitOptions, megatron: MegatronOptions | None) -> Plan:
    if options.dequantize:
        raise CannotError("--dequantize: a torch_dist checkpoint has no quantised weights")
    return plan_megatron_split(
        model,
        megatron or MegatronOptions(),
        keep_combined=options.keep_combined,
        trust_shapes=options.trust_shapes,
    )


def _megatron_combine(
    model: MegatronModel, options: CombineOptions, megatron: MegatronOptions | None
) -> Plan:
    return plan_megatron_combine(
        model,
        None if options.ignore_manifest else read_manifest(model.source.root),
        megatron or MegatronOptions(),
        ignore_manifest=options.ignore_manifest,
        trust_shapes=options.trust_shapes,
    )


def _require_torch_dist(path: Path, megatron: MegatronOptions | None) -> None:
    if megatron not in (None, MegatronOptions()):
        raise UsageError(
            f"--norms, --indexer, --drop-optimizer and --drop-fp8-state are for torch_dist checkpoints of Megatron, "
            f"and {path} is none"
        )


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

    def megatron(self) -> MegatronModel | None:
        """The inventory of a torch_dist checkpoint; None if it is of another format."""
        if self.hub or is_torch(self.path) or not is_torch_dist(self.path):
            return None
        found = read_model(open_torch_dist(self.path))
        _check_names(found.logical)
        return found

    def whole(self, indexer_from: IndexerRows | None = None) -> Whole:
        """The inventory of a checkpoint in any format."""
        found = self._read(read_whole, lambda path: open_whole(path, indexer_from))
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
    with ExitStack() as stack:
        if run.together:
            stack.enter_context(one_report())
        asked = hub_id(source)
        target = output or (_default_here(asked, suffix) if asked else default_output(Path(source), suffix))
        if target.name in ("", ".."):
            target = target.resolve()
        ranks = Ranks()
        if run.together and not dry_run:
            ranks = stack.enter_context(all_ranks(target, command=run.resume_command))
        path = cache_folder(asked) if asked else _local_source(Path(source))
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
        _require_one_plan(ranks, plan)
        if opened.hub and ranks.tell(not is_finished and bool(opened.hub.missing())):
            run = replace(run, resume_command=_pinned(run.resume_command, opened.hub))
            if ranks.leads:
                _check_space(opened.hub, plan, target)
            del plan, inventory, blocks  # they take as much memory as those that follow
            if ranks.leads:
                opened.hub.download(progress, run.resume_command)
            ranks.tell()
            _require_downloaded(opened.hub)
            plan, inventory, blocks = planned()
        with _without_collector():
            report = run_plan(plan, target, run, progress, ranks)
        return Conversion(plan, target, blocks, inventory, report)


def _require_one_plan(ranks: Ranks, plan: Plan) -> None:
    """Every rank reads the same files with the same version, or nothing is begun."""
    digests = ranks.gather(plan.digest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise BadInputError(
            f"rank {', '.join(map(str, others))} of {ranks.count} would do something else than rank 0",
            hint="all ranks need the same command, the same version of this tool, and one file system with the source",
        )


def _require_downloaded(checkpoint: HubCheckpoint) -> None:
    missing = checkpoint.missing()
    if missing:
        raise LocalIOError(
            f"{len(missing)} files of {checkpoint.origin} that rank 0 has downloaded are not in {checkpoint.root}",
            hint="HF_HOME has to lie on a file system that all ranks share",
            details=missing,
        )


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
    if output_folder.on_same_disk(checkpoint.root, target.parent):
        checkpoint.check_space(more=sum(tensor.spec.nbytes for tensor in plan.changed))
        return
    checkpoint.check_space()
    if not staging_folder(target).exists():  # else part of it is there already
        output_folder.preflight(target.parent, plan.bytes_total)


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
