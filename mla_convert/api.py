"""The commands as library calls: what ``cli`` runs, without printing. Import and use them from Python as they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.catalogue import Catalogue, OtherFile, SourceFile
from mla_convert.combining import CombineOptions, plan_combine
from mla_convert.engine import RunOptions, RunReport, run_plan
from mla_convert.errors import BadInputError, UsageError
from mla_convert.formats.huggingface import INDEX_SUFFIX, open_checkpoint
from mla_convert.geometry import AttentionBlock, find_blocks
from mla_convert.inspection import describe_group, group_blocks, inspect_document
from mla_convert.manifest import read_manifest
from mla_convert.plan import Plan
from mla_convert.progress import Progress, SilentProgress
from mla_convert.resharding import plan_reshard
from mla_convert.sharding import ReshardOptions
from mla_convert.splitting import SplitOptions, plan_split
from mla_convert.staging import check_replaceable, check_target, finished_already
from mla_convert.storage import plain
from mla_convert.whole import Format, open_whole


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


def inspect(source: Path, *, trust_shapes: bool = False) -> tuple[Catalogue, dict[str, Any]]:
    """Read a checkpoint's inventory and describe it, reading no weight.

    Raises:
        MlaConvertError: As :func:`open_checkpoint` and :func:`find_blocks` do.
    """
    whole = open_whole(source)
    return whole.logical, inspect_document(whole, find_blocks(whole.logical, trust_shapes=trust_shapes))


def split(
    source: Path,
    output: Path | None = None,
    options: SplitOptions | None = None,
    *,
    run: RunOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Split every combined KV up-projection of ``source`` into K and V, into ``output``.

    Args:
        source: A Hugging Face checkpoint folder, or one ``.safetensors`` file.
        output: The new folder; ``SOURCE-split`` if None.
        options: What to do.
        run: How to do it.
        progress: Who is told about progress.
        dry_run: Plan only; nothing is written.

    Raises:
        MlaConvertError: The subclass says of which kind; nothing half-done is left under the output's name.
    """
    options = options or SplitOptions()

    def plan(path: Path) -> tuple[Plan, Catalogue]:
        catalogue = open_checkpoint(path)
        return plan_split(catalogue, options), catalogue

    return _convert(source, output, "-split", plan, run, progress, dry_run, options.trust_shapes)


def combine(
    source: Path,
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

    def plan(path: Path) -> tuple[Plan, Catalogue]:
        catalogue = open_checkpoint(path)
        manifest = None if options.ignore_manifest else read_manifest(catalogue.root)
        return plan_combine(catalogue, manifest, options), catalogue

    return _convert(source, output, "-combined", plan, run, progress, dry_run, options.trust_shapes)


def reshard(
    source: Path,
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

    def plan(path: Path) -> tuple[Plan, Catalogue]:
        whole = open_whole(path)
        return plan_reshard(whole, options), whole.logical

    return _convert(source, output, f"-tp{options.tp}", plan, run, progress, dry_run, options.trust_shapes)


def _convert(
    source: Path,
    output: Path | None,
    suffix: str,
    make_plan: Callable[[Path], tuple[Plan, Catalogue]],
    run: RunOptions | None,
    progress: Progress | None,
    dry_run: bool,
    trust_shapes: bool,
) -> Conversion:
    run = run or RunOptions()
    if not os.path.lexists(source):
        raise UsageError(f"{source} does not exist")
    if source.name.endswith(INDEX_SUFFIX) and source.is_file():
        source = source.parent  # an index stands for its folder, which the output must not be in
    target = output or default_output(source, suffix)
    if target.name in ("", ".."):
        target = target.resolve()
    check_target(source, target, overwrite=run.overwrite)
    plan, inventory = make_plan(source)
    _check_names(plan.catalogue)
    blocks = find_blocks(inventory, trust_shapes=trust_shapes)
    if not dry_run:
        report = run_plan(plan, target, run, progress or SilentProgress())
        return Conversion(plan, target, blocks, inventory, report)
    if not finished_already(target, plan.digest()):
        check_replaceable(target, overwrite=run.overwrite)
    return Conversion(plan, target, blocks, inventory, None)


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
