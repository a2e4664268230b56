"""The command line: every command under one name, and how a usage error is told."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mla_convert import __version__
from mla_convert.commands.checking import demo, diff, inspect, verify_command
from mla_convert.commands.converting import combine, migrate, reshard, split
from mla_convert.commands.publishing import push_command
from mla_convert.commands.warming import warmup_command
from mla_convert.console import Console
from mla_convert.errors import ExitCode, UsageError
from mla_convert.streams import guard_broken_pipe

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


for command in (inspect, split, combine, migrate, reshard, diff):
    app.command()(command)
app.command("verify")(verify_command)
app.command("warmup")(warmup_command)
app.command()(demo)
app.command("push")(push_command)


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
