"""The command that compiles kernels ahead: warmup."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mla_convert.console import Console
from mla_convert.options import Color, Json, Quiet, Source, TrustShapes, Verbose
from mla_convert.reporting import reporting


def warmup_command(
    path: Source,
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="Ranks that will share the heads of each block.", metavar="N")
    ] = 1,
    dtype: Annotated[
        Literal["bfloat16", "float16"],
        typer.Option(
            "--dtype", help="What the kernels will compute in: bfloat16 or float16.", metavar="TYPE"
        ),
    ] = "bfloat16",
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=256,
            help="Compilers at a time; default: one a processor, 16 at most.",
            metavar="N",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the kernels, and compile none.")] = False,
    trust_shapes: TrustShapes = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Compile a model's kernels ahead.

    Prefill, decode, selection and gradients, for one number of ranks, into TileLang's cache (TILELANG_CACHE_DIR),
    where verify and the Python modules find them. Needs nvcc and no GPU; reads headers alone.
    """
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert.render import show_warmup
        from mla_convert.warmup import warmup

        report = warmup(
            path,
            tp=tp,
            dtype=dtype,
            workers=workers,
            trust_shapes=trust_shapes,
            dry_run=dry_run,
            progress=console.progress(),
        )
        console.result(report.document(), human=lambda out: show_warmup(out, report), quiet=str(report.cache))
