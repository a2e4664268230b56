"""Commands that make another checkpoint: split, combine, migrate, reshard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mla_convert.console import Console
from mla_convert.errors import UsageError
from mla_convert.options import (
    DEFAULT_WORKERS,
    Checksum,
    Color,
    DropFp8State,
    DropOptimizer,
    DryRun,
    IndexerFrom,
    IndexerWanted,
    Json,
    Link,
    NormsWanted,
    Output,
    Overwrite,
    Quiet,
    Restart,
    Source,
    TrustShapes,
    Verbose,
    Workers,
    megatron_options,
)
from mla_convert.reporting import reporting, resume_command
from mla_convert.storage import LinkMode

if TYPE_CHECKING:
    from mla_convert.api import Conversion
    from mla_convert.engine import RunOptions


def split(
    path: Source,
    output: Output = None,
    keep_combined: Annotated[
        bool, typer.Option("--keep-combined", help="Write both layouts: K and V beside the combined tensors.")
    ] = False,
    dequantize: Annotated[
        Literal["bf16"] | None,
        typer.Option(
            "--dequantize",
            help="Store FP8 K and V as BF16, for engines that accept only 128x128 scale blocks.",
            metavar="bf16",
        ),
    ] = None,
    norms: NormsWanted = None,
    indexer: IndexerWanted = None,
    indexer_from: IndexerFrom = None,
    drop_optimizer: DropOptimizer = False,
    drop_fp8_state: DropFp8State = False,
    trust_shapes: TrustShapes = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    workers: Workers = None,
    link: Link = LinkMode.AUTO,
    checksum: Checksum = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Split the KV up-projections into K and V.

    Writes a new folder; PATH is never written to. Rows are moved, not computed, so every bit stays. An
    interrupted run resumes when the same command is given again.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.splitting import SplitOptions

        run = _run_options(workers, link, overwrite, restart, checksum)
        options = SplitOptions(keep_combined, dequantize is not None, trust_shapes)
        megatron = megatron_options(norms, indexer, indexer_from, drop_optimizer, drop_fp8_state)
        progress = console.progress()
        _report(
            console,
            api.split(path, output, options, megatron=megatron, run=run, progress=progress, dry_run=dry_run),
        )


def combine(
    path: Source,
    output: Output = None,
    ignore_manifest: Annotated[
        bool, typer.Option("--ignore-manifest", help="Combine by structure alone; headers may then differ.")
    ] = False,
    norms: NormsWanted = None,
    indexer: IndexerWanted = None,
    indexer_from: IndexerFrom = None,
    drop_optimizer: DropOptimizer = False,
    drop_fp8_state: DropFp8State = False,
    trust_shapes: TrustShapes = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    workers: Workers = None,
    link: Link = LinkMode.AUTO,
    checksum: Checksum = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Put split K and V together again.

    With the manifest that split left, the original files come back byte for byte; without it every tensor does.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.combining import CombineOptions

        run = _run_options(workers, link, overwrite, restart, checksum)
        options = CombineOptions(ignore_manifest, trust_shapes)
        megatron = megatron_options(norms, indexer, indexer_from, drop_optimizer, drop_fp8_state)
        progress = console.progress()
        _report(
            console,
            api.combine(
                path, output, options, megatron=megatron, run=run, progress=progress, dry_run=dry_run
            ),
        )


def migrate(
    path: Source,
    output: Output = None,
    norms: NormsWanted = None,
    indexer: IndexerWanted = None,
    indexer_from: IndexerFrom = None,
    drop_optimizer: DropOptimizer = False,
    trust_shapes: TrustShapes = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    workers: Workers = None,
    link: Link = LinkMode.AUTO,
    checksum: Checksum = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Take a torch_dist checkpoint from one Megatron release's conventions to another's.

    Moves the norms of the latents between keys, and permutes the indexer's rows, which Megatron 0.19 ordered anew
    under the same names. Every bit stays, and migrating back gives every tensor back.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api

        run = _run_options(workers, link, overwrite, restart, checksum)
        options = megatron_options(norms, indexer, indexer_from, drop_optimizer)
        progress = console.progress()
        _report(
            console,
            api.migrate(
                path, output, options, trust_shapes=trust_shapes, run=run, progress=progress, dry_run=dry_run
            ),
        )


def reshard(
    path: Source,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", min=1, help="Tensor-parallel ranks of the output; default with --to: 1.", metavar="N"
        ),
    ] = None,
    output: Output = None,
    to: Annotated[
        Literal["huggingface", "deepseek", "torch_dist", "torch"] | None,
        typer.Option(
            "--to",
            help="Format of the output: huggingface (one folder a rank), deepseek (one file a rank), or Megatron's "
            "torch_dist or torch (mp_rank_* files); default: that of PATH.",
            metavar="FORMAT",
        ),
    ] = None,
    layout: Annotated[
        Literal["split", "combined"] | None,
        typer.Option(
            "--layout",
            help="Split or combine the KV up-projections on the way: split or combined; default: as they are.",
            metavar="LAYOUT",
        ),
    ] = None,
    experts: Annotated[
        Literal["ep", "tp"],
        typer.Option(
            "--experts",
            help="Deal out routed experts whole, in order (ep), or a slice of each to every rank (tp).",
            metavar="ep|tp",
        ),
    ] = "ep",
    reblock: Annotated[
        bool,
        typer.Option("--reblock", help="Make FP8 scale blocks finer where a rank's border cuts through one."),
    ] = False,
    dequantize: Annotated[
        Literal["bf16"] | None,
        typer.Option(
            "--dequantize",
            help="Store a weight as BF16 where a rank's border or the layout cuts through its FP8 scale blocks; "
            "for Megatron, every FP8 weight.",
            metavar="bf16",
        ),
    ] = None,
    pad_vocabulary: Annotated[
        bool,
        typer.Option(
            "--pad-vocabulary",
            help="Add rows of zeros to a vocabulary that does not divide by N; for Megatron, by 128 times N.",
        ),
    ] = False,
    spec: Annotated[
        Literal["te", "local"] | None,
        typer.Option(
            "--spec",
            help="Megatron: the layer spec to write for, Transformer Engine's (te, the default) or its own (local); "
            "they differ in where norms lie.",
            metavar="te|local",
        ),
    ] = None,
    indexer_from: IndexerFrom = None,
    drop_optimizer: DropOptimizer = False,
    trust_shapes: TrustShapes = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    workers: Workers = None,
    link: Link = LinkMode.AUTO,
    checksum: Checksum = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Deal a checkpoint out to tensor-parallel ranks, put ranks together, or take it to another format.

    Reads any number of ranks in any format and writes any other, in one pass and without changing a weight.
    A number of ranks that would cut through a head, an expert or an FP8 scale block is refused before a weight is
    read, with the legal ones.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.geometry import Layout
        from mla_convert.megatron.translation import LayerSpec
        from mla_convert.shard import Experts
        from mla_convert.sharding import ReshardOptions
        from mla_convert.whole import Format

        run = _run_options(workers, link, overwrite, restart, checksum)
        if tp is None and to is None:
            raise UsageError("reshard needs a number of ranks or a format", hint="--tp N, --to FORMAT")
        options = ReshardOptions(
            tp=tp or 1,
            to=Format(to) if to else None,
            layout=Layout(layout) if layout else None,
            experts=Experts(experts),
            reblock=reblock,
            pad_vocabulary=pad_vocabulary,
            trust_shapes=trust_shapes,
            dequantize=dequantize is not None,
            spec=LayerSpec(spec) if spec else None,
            indexer_from=indexer_from,
            drop_optimizer=drop_optimizer,
        )
        _report(
            console, api.reshard(path, output, options, run=run, progress=console.progress(), dry_run=dry_run)
        )


def _run_options(
    workers: int | None, link: LinkMode, overwrite: bool, restart: bool, checksum: bool
) -> RunOptions:
    """How the command line runs every conversion: together with the other ranks, if a launcher made some."""
    from mla_convert.engine import RunOptions

    return RunOptions(
        workers or DEFAULT_WORKERS, link, overwrite, restart, checksum, resume_command(), together=True
    )


def _report(console: Console, result: Conversion) -> None:
    from mla_convert.meeting import is_leading
    from mla_convert.render import show_conversion

    if not is_leading():
        return
    document = result.document()
    for warning in document["warnings"]:
        console.warning(warning)
    console.result(document, human=lambda out: show_conversion(out, result), quiet=str(result.output))
