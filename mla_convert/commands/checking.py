"""Commands that look: inspect, diff, verify, and the demo of everything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mla_convert.console import Console
from mla_convert.errors import DifferenceError, MlaConvertError
from mla_convert.options import (
    DEFAULT_WORKERS,
    Color,
    Json,
    Location,
    Quiet,
    Source,
    TrustShapes,
    Verbose,
    Workers,
    parse_layers,
    parse_location,
)
from mla_convert.reporting import reporting


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

        wanted = parse_layers(layers) if layers is not None else None
        if launch and to_launch(tp * cp):
            _refuse_ranks(path, tp, wanted, trust_shapes=trust_shapes)
            raise typer.Exit(run_ranks(sys.argv[1:], tp * cp))

        from mla_convert.demo import checkpoint_or_demo
        from mla_convert.render import show_verification
        from mla_convert.verification.processes import real_ranks
        from mla_convert.verify import VerifyOptions, verify

        options = VerifyOptions(
            tp=tp,
            cp=cp,
            layers=wanted,
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


def _refuse_ranks(
    path: Location | None, tp: int, layers: tuple[int, ...] | None, *, trust_shapes: bool
) -> None:
    """Say that a local checkpoint's heads do not divide before a process is started for each rank.

    Rank 0 says whatever else may be wrong with it. It also decides where some blocks divide: it may run only those.

    Raises:
        CannotError: No block's heads divide.
    """
    from mla_convert.geometry import check_ranks_divide, find_blocks
    from mla_convert.whole import open_whole

    if not isinstance(path, Path):
        return
    try:
        blocks = find_blocks(open_whole(path).logical, trust_shapes=trust_shapes)
    except MlaConvertError:
        return
    chosen = [block for block in blocks if layers is None or block.layer in layers]
    if chosen and all(block.heads % tp for block in chosen):
        check_ranks_divide(chosen, tp)


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
