"""The command that publishes: push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_convert.console import Console
from mla_convert.options import (
    Color,
    Json,
    Quiet,
    Verbose,
)
from mla_convert.reporting import reporting


def push_command(
    path: Annotated[
        Path,
        typer.Argument(
            help="An output of split, combine, migrate or reshard, in any format.", metavar="PATH"
        ),
    ],
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
