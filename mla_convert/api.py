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
from mla_convert.catalogue import Catalogue
from mla_convert.combining import CombineOptions
from mla_convert.engine import RunOptions, RunReport, run_plan
from mla_convert.errors import BadInputError, LocalIOError, UsageError
from mla_convert.formats.huggingface import (
    INDEX_SUFFIX,
)
from mla_convert.geometry import AttentionBlock, find_blocks
from mla_convert.hub_source import HubCheckpoint, HubId, cache_folder, hub_id
from mla_convert.inspection import describe_group, group_blocks
from mla_convert.meeting import all_ranks, one_report
from mla_convert.megatron.changes import MegatronOptions
from mla_convert.plan import Plan
from mla_convert.progress import Progress, SilentProgress
from mla_convert.ranks import Ranks
from mla_convert.resharding import plan_reshard
from mla_convert.sharding import ReshardOptions
from mla_convert.sources import Planned, Source, local_path, open_source
from mla_convert.splitting import SplitOptions
from mla_convert.staging import check_replaceable, check_target, finished_already, staging_folder
from mla_convert.whole import Format

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
    return open_source(source, "inspect", progress or SilentProgress()).inspect(trust_shapes=trust_shapes)


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
    options, megatron = options or SplitOptions(), megatron or MegatronOptions()

    def plan(source: Source) -> Planned:
        return source.plan_split(options, megatron)

    return _convert("split", source, output, "-split", plan, run, progress, dry_run, options.trust_shapes)


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
    options, megatron = options or CombineOptions(), megatron or MegatronOptions()

    def plan(source: Source) -> Planned:
        return source.plan_combine(options, megatron)

    return _convert(
        "combine", source, output, "-combined", plan, run, progress, dry_run, options.trust_shapes
    )


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

    def plan(source: Source) -> Planned:
        return source.plan_migrate(wanted, trust_shapes=trust_shapes)

    return _convert("migrate", source, output, "-migrated", plan, run, progress, dry_run, trust_shapes)


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

    def plan(source: Source) -> Planned:
        whole = source.whole(options.indexer_from)
        return plan_reshard(whole, options), whole.logical

    suffix = f"-{options.to}" if options.to and options.to.is_megatron else ""
    suffix += f"-tp{options.tp}" if options.tp > 1 or not suffix else ""
    return _convert("reshard", source, output, suffix, plan, run, progress, dry_run, options.trust_shapes)


def _convert(
    command: str,
    source: str | Path,
    output: Path | None,
    suffix: str,
    make_plan: Callable[[Source], Planned],
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
        path = cache_folder(asked) if asked else local_path(Path(source))
        check_target(path, target, overwrite=run.overwrite)
        opened = open_source(source, command, progress)

        if opened.hub and opened.is_archive:
            if dry_run:
                opened.require_here()
            run = replace(run, resume_command=_pinned(run.resume_command, opened.hub))
            _download(opened.hub, progress, run.resume_command, ranks)

        def planned() -> tuple[Plan, Catalogue, tuple[AttentionBlock, ...]]:
            with _without_collector():
                plan, inventory = make_plan(opened)
                return plan, inventory, find_blocks(inventory, trust_shapes=trust_shapes)

        plan, inventory, blocks = planned()
        is_finished = finished_already(target, plan.digest())
        if not is_finished:
            output_folder.require_distinct(target.parent, plan.names, "the output")
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
            _download(opened.hub, progress, run.resume_command, ranks)
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


def _download(checkpoint: HubCheckpoint, progress: Progress, command: str | None, ranks: Ranks) -> None:
    """Rank 0 brings what is missing into the cache, which all share."""
    if ranks.leads:
        checkpoint.download(progress, command)
    ranks.tell()
    missing = checkpoint.missing()
    if missing:
        raise LocalIOError(
            f"{len(missing)} files of {checkpoint.origin} that rank 0 has downloaded are not in {checkpoint.root}",
            hint="HF_HOME has to lie on a file system that all ranks share",
            details=missing,
        )


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
