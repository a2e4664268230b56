"""The commands: options in, one library call, one result out. Nothing here touches a tensor.

Heavy modules are imported inside the commands, so that ``--help`` and shell completion stay quick and ``split``
and ``combine`` never load PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mla_convert import __version__
from mla_convert.console import Console
from mla_convert.errors import DifferenceError, ExitCode, UsageError
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
    Location,
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
    parse_layers,
    parse_location,
)
from mla_convert.reporting import reporting, resume_command
from mla_convert.storage import LinkMode
from mla_convert.streams import guard_broken_pipe

if TYPE_CHECKING:
    from mla_convert.api import Conversion

app = typer.Typer(
    name="mla-convert",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Split, combine, reshard and verify Multi-head Latent Attention checkpoints.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mla-convert {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Split, combine, reshard and verify Multi-head Latent Attention checkpoints."""


@app.command()
def inspect(
    path: Source,
    trust_shapes: TrustShapes = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Show what a checkpoint holds, from its headers alone.

    Layout, geometry of every attention block, quantisation, sparse attention, MTP layers, sizes, and the legal
    tensor-parallel sizes with the reason for each illegal one. No weight is read.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.render import show_inspection

        _, document = api.inspect(path, trust_shapes=trust_shapes, progress=console.progress())
        for warning in document["warnings"]:
            console.warning(warning)
        console.result(document, human=lambda out: show_inspection(out, document), quiet=document["layout"])


@app.command()
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
        from mla_convert.engine import RunOptions
        from mla_convert.splitting import SplitOptions

        run = RunOptions(
            workers or DEFAULT_WORKERS, link, overwrite, restart, checksum, resume_command(), together=True
        )
        options = SplitOptions(keep_combined, dequantize is not None, trust_shapes)
        megatron = megatron_options(norms, indexer, indexer_from, drop_optimizer, drop_fp8_state)
        progress = console.progress()
        _report(
            console,
            api.split(path, output, options, megatron=megatron, run=run, progress=progress, dry_run=dry_run),
        )


@app.command()
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
        from mla_convert.engine import RunOptions

        run = RunOptions(
            workers or DEFAULT_WORKERS, link, overwrite, restart, checksum, resume_command(), together=True
        )
        options = CombineOptions(ignore_manifest, trust_shapes)
        megatron = megatron_options(norms, indexer, indexer_from, drop_optimizer, drop_fp8_state)
        progress = console.progress()
        _report(
            console,
            api.combine(
                path, output, options, megatron=megatron, run=run, progress=progress, dry_run=dry_run
            ),
        )


@app.command()
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
        from mla_convert.engine import RunOptions

        run = RunOptions(
            workers or DEFAULT_WORKERS, link, overwrite, restart, checksum, resume_command(), together=True
        )
        options = megatron_options(norms, indexer, indexer_from, drop_optimizer)
        progress = console.progress()
        _report(
            console,
            api.migrate(
                path, output, options, trust_shapes=trust_shapes, run=run, progress=progress, dry_run=dry_run
            ),
        )


@app.command()
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
        from mla_convert.engine import RunOptions
        from mla_convert.geometry import Layout
        from mla_convert.megatron.translation import LayerSpec
        from mla_convert.shard import Experts
        from mla_convert.sharding import ReshardOptions
        from mla_convert.whole import Format

        run = RunOptions(
            workers or DEFAULT_WORKERS, link, overwrite, restart, checksum, resume_command(), together=True
        )
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


@app.command()
def diff(
    a: Annotated[
        Location,
        typer.Argument(
            help="A checkpoint in any format, on any ranks; hf://org/name[@revision] too.",
            metavar="A",
            parser=parse_location,
        ),
    ],
    b: Annotated[
        Location,
        typer.Argument(
            help="The checkpoint to compare it with, named likewise.", metavar="B", parser=parse_location
        ),
    ],
    workers: Workers = None,
    trust_shapes: TrustShapes = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Compare two checkpoints, tensor by tensor.

    Formats, numbers of ranks and layouts may differ: tensors are compared whole, under their Hugging Face names, K
    and V put together. Symbols: = the same, * the same but stored in another layout or in other scale blocks,
    ! different, - only in A, + only in B. Exits with 10 if anything is different, or there on one side only.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert.comparing import compare
        from mla_convert.render import show_comparison

        result = compare(
            a,
            b,
            workers=workers or DEFAULT_WORKERS,
            trust_shapes=trust_shapes,
            progress=console.progress(),
        )
        console.result(
            result.document(),
            human=lambda out: show_comparison(out, result, everything=verbose > 0),
            quiet="same" if result.is_same else "different",
        )
        if not result.is_same:
            raise DifferenceError(f"{a} and {b} differ", details=result.differences())


@app.command("verify")
def verify_command(
    path: Annotated[
        Location | None,
        typer.Argument(
            help="A checkpoint, hf://org/name[@revision] too; without one: the checkpoint in this folder, else the "
            "built-in demo model.",
            metavar="PATH",
            parser=parse_location,
        ),
    ] = None,
    against: Annotated[
        Location | None,
        typer.Option(
            "--against",
            help="The original to compare with, hf://org/name[@revision] too; default: where the manifest says it "
            "was.",
            metavar="PATH",
            parser=parse_location,
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            "--tp",
            min=1,
            help="Tensor-parallel ranks, which share the heads of each block; a checkpoint that lies on ranks has its "
            "own.",
            metavar="N",
        ),
    ] = 1,
    cp: Annotated[
        int,
        typer.Option(
            "--cp", min=1, help="Context-parallel ranks, which share the tokens of the sequence.", metavar="N"
        ),
    ] = 1,
    backward: Annotated[
        bool, typer.Option("--backward", help="Compare the gradients of every weight of a block, too.")
    ] = False,
    launch: Annotated[
        bool,
        typer.Option(
            "--launch",
            help="Start one process a rank, each with a GPU if there are enough; default: ranks are folded on the "
            "devices there are, unless torchrun has started this.",
        ),
    ] = False,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers to run, e.g. 0,3,60-61; default: chosen by size.")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option("--seq", min=1, help="Tokens; default: past the top-k of a sparse model.", metavar="N"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "float64"],
        typer.Option(
            "--dtype",
            help="Compute type: auto (bfloat16 on a GPU, float32 on a CPU), bfloat16, float16, float32, float64.",
            metavar="TYPE",
        ),
    ] = "auto",
    backend: Annotated[
        Literal["auto", "reference", "tilelang"],
        typer.Option(
            "--backend", help="What runs absorbed attention: auto, reference or tilelang.", metavar="NAME"
        ),
    ] = "auto",
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option("--device", help="cpu or cuda; default: the GPU if there is one.", metavar="DEVICE"),
    ] = None,
    skip_carried: Annotated[
        bool, typer.Option("--skip-carried", help="Do not compare the bytes of untouched tensors.")
    ] = False,
    no_control: Annotated[
        bool, typer.Option("--no-control", help="Do not plant a corruption to see that it is caught.")
    ] = False,
    no_record: Annotated[
        bool, typer.Option("--no-record", help="Do not note the outcome in the checkpoint's manifest.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random hidden states.", metavar="N")] = 0,
    trust_shapes: TrustShapes = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Prove a conversion by structure, bytes and numbers.

    Compares inventories and bytes with the original, then runs standard attention with the combined weights
    against absorbed attention with the split ones, both against float64. Exits with 10 on a difference.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert.launch import run_ranks, to_launch

        if launch and to_launch(tp * cp):
            raise typer.Exit(run_ranks(sys.argv[1:], tp * cp))

        from mla_convert.demo import checkpoint_or_demo
        from mla_convert.render import show_verification
        from mla_convert.verification.processes import real_ranks
        from mla_convert.verify import VerifyOptions, verify

        options = VerifyOptions(
            tp=tp,
            cp=cp,
            layers=parse_layers(layers) if layers is not None else None,
            tokens=seq,
            dtype=dtype,
            backend=backend,
            device=device,
            carried=not skip_carried,
            backward=backward,
            control=not no_control,
            record=not no_record,
            trust_shapes=trust_shapes,
            seed=seed,
        )
        with real_ranks(options.grid, gpu=options.on_gpu) as ranks:
            if ranks is not None and ranks.rank > 0:
                ranks.serve()
                return
            with checkpoint_or_demo(path, console.info) as (checkpoint, original):
                report = verify(checkpoint, against or original, options, console.progress(), ranks)
        console.result(
            report.document(),
            human=lambda out: show_verification(out, report),
            quiet="passed" if report.passed else "failed",
        )
        if not report.passed:
            raise DifferenceError(f"{report.path} does not verify", details=report.failures)


@app.command()
def demo(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Keep the checkpoints in this new folder.", metavar="OUT"),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="Tensor-parallel ranks to verify with.", metavar="N")
    ] = 8,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Try everything on a small built-in model.

    Makes a DSA checkpoint with FP8 weights and an MTP layer, splits it, verifies it, combines it again and
    compares every byte.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert.demo import run_demo
        from mla_convert.render import show_demo

        result = run_demo(output, tp=tp, progress=console.progress())
        console.result(
            result.document(),
            human=lambda out: show_demo(out, result),
            quiet="passed" if result.passed else "failed",
        )
        if not result.passed:
            raise DifferenceError("the demo found a difference", details=result.failures)


@app.command("push")
def push_command(
    path: Annotated[Path, typer.Argument(help="An output of split or combine.", metavar="PATH")],
    repo_id: Annotated[
        str, typer.Argument(help="The repository, USER/NAME; created if it is missing.", metavar="REPO_ID")
    ],
    revision: Annotated[
        str,
        typer.Option("--revision", help="Branch to commit to; created if it is missing.", metavar="BRANCH"),
    ] = "main",
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of committing to the branch.")
    ] = False,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Visibility of a new repository; default: the Hub's.",
            show_default=False,
        ),
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", help="First line of the commit.", metavar="TEXT")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card/--no-card", help="Write a section about the conversion into README.md.")
    ] = True,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Push without a passed verification; the card says so.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the files and ask the Hub, and change nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Push exactly the verified files to the Hugging Face Hub, in one commit.

    Sends what the manifest lists and nothing else, after checking every file against it. Run again after an
    interruption, it sends only what is missing; with nothing to send it makes no commit. HF_TOKEN, HF_ENDPOINT,
    HF_HOME and HF_HUB_OFFLINE work as they do for hf.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert.push import PushOptions, push
        from mla_convert.render import show_push

        options = PushOptions(revision, create_pr, private, message, card, unverified, dry_run)
        result = push(path, repo_id, options, console.progress())
        for warning in result.warnings:
            console.warning(warning)
        console.result(result.document(), human=lambda out: show_push(out, result), quiet=result.url)


def _report(console: Console, result: Conversion) -> None:
    from mla_convert.meeting import is_leading
    from mla_convert.render import show_conversion

    if not is_leading():
        return
    document = result.document()
    for warning in document["warnings"]:
        console.warning(warning)
    console.result(document, human=lambda out: show_conversion(out, result), quiet=str(result.output))


def main() -> None:
    """Entry point of the ``mla-convert`` command."""
    with guard_broken_pipe():
        try:
            code = app(prog_name="mla-convert", standalone_mode="--json" not in sys.argv)
        except typer.TyperException as error:  # a usage error: Typer shows it itself, but never as JSON
            hint = "mla-convert --help lists the commands, mla-convert COMMAND --help their options"
            Console.create(json=True).error(UsageError(error.format_message(), hint=hint))
            code = ExitCode.USAGE
        sys.exit(code)
