"""The commands: options in, one library call, one result out. Nothing here touches a tensor.

Heavy modules are imported inside the commands, so that ``--help`` and shell completion stay quick and ``split``
and ``combine`` never load PyTorch.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mla_convert import __version__
from mla_convert.console import Console, guard_broken_pipe
from mla_convert.errors import ExitCode, InterruptedRunError, MlaConvertError
from mla_convert.storage import LinkMode

if TYPE_CHECKING:
    from mla_convert.api import Conversion

app = typer.Typer(
    name="mla-convert",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Split, combine and verify the KV up-projection of Multi-head Latent Attention checkpoints.",
)

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout, and events as JSON lines on stderr."),
]
Quiet = Annotated[
    int,
    typer.Option("-q", "--quiet", count=True, help="Print only the result; twice: only errors.", metavar=""),
]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="Print more; twice: tracebacks too.", metavar="")
]
Color = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(
        "--color", help="When to use colour; NO_COLOR and FORCE_COLOR are honoured.", metavar="WHEN"
    ),
]
Source = Annotated[
    Path, typer.Argument(help="A checkpoint folder, or one .safetensors file.", metavar="PATH")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder to write; default: beside PATH.", metavar="OUT")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output of this tool, atomically.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an unfinished run instead of resuming it.")]
Workers = Annotated[
    int,
    typer.Option(
        "--workers", min=1, max=256, envvar="MLA_CONVERT_WORKERS", help="Files moved at a time.", metavar="N"
    ),
]
Link = Annotated[
    LinkMode,
    typer.Option(
        "--link",
        help="How unchanged weight files reach the output: auto, reflink, hard or copy.",
        metavar="MODE",
    ),
]
Checksum = Annotated[
    bool, typer.Option("--checksum", help="Read every file and record its sha256 in the manifest.")
]
TrustShapes = Annotated[
    bool, typer.Option("--trust-shapes", help="Let tensor shapes win where config.json contradicts them.")
]

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)


@contextmanager
def reporting(console: Console) -> Iterator[None]:
    """Turn whatever ends a command into a message and an exit code."""
    try:
        yield
    except MlaConvertError as error:
        console.error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        console.error(InterruptedRunError("interrupted", hint=f"run it again: {command_line()}"))
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        console.unexpected(error)
        raise typer.Exit(ExitCode.UNEXPECTED) from None


def command_line() -> str:
    """The command as the user could type it again."""
    return shlex.join(["mla-convert", *sys.argv[1:]])


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
    """Split, combine and verify the KV up-projection of Multi-head Latent Attention checkpoints."""


@app.command()
def inspect(
    path: Source,
    trust_shapes: TrustShapes = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Show a checkpoint's layout, geometry, quantisation and legal tensor-parallel sizes; reads headers only."""
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.render import show_inspection

        _, document = api.inspect(path, trust_shapes=trust_shapes)
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
    trust_shapes: TrustShapes = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    workers: Workers = DEFAULT_WORKERS,
    link: Link = LinkMode.AUTO,
    checksum: Checksum = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Split the combined KV up-projections into separate K and V, bit for bit, into a new folder."""
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.engine import RunOptions
        from mla_convert.splitting import SplitOptions

        run = RunOptions(workers, link, overwrite, restart, checksum, command_line())
        options = SplitOptions(keep_combined, dequantize is not None, trust_shapes)
        _report(
            console, api.split(path, output, options, run=run, progress=console.progress(), dry_run=dry_run)
        )


@app.command()
def combine(
    path: Source,
    output: Output = None,
    ignore_manifest: Annotated[
        bool, typer.Option("--ignore-manifest", help="Combine by structure alone; headers may then differ.")
    ] = False,
    trust_shapes: TrustShapes = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    workers: Workers = DEFAULT_WORKERS,
    link: Link = LinkMode.AUTO,
    checksum: Checksum = False,
    json: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
    color: Color = "auto",
) -> None:
    """Put split K and V together again; with the manifest of the split, the original files byte for byte."""
    console = Console.create(json=json, quiet=quiet, verbose=verbose, color=color)
    with reporting(console):
        from mla_convert import api
        from mla_convert.combining import CombineOptions
        from mla_convert.engine import RunOptions

        run = RunOptions(workers, link, overwrite, restart, checksum, command_line())
        options = CombineOptions(ignore_manifest, trust_shapes)
        _report(
            console, api.combine(path, output, options, run=run, progress=console.progress(), dry_run=dry_run)
        )


def _report(console: Console, result: Conversion) -> None:
    from mla_convert.render import show_conversion

    document = result.document()
    for warning in document["warnings"]:
        console.warning(warning)
    console.result(document, human=lambda out: show_conversion(out, result), quiet=str(result.output))


def main() -> None:
    """Entry point of the ``mla-convert`` command."""
    with guard_broken_pipe():
        app(prog_name="mla-convert")
