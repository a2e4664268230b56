"""How a command ends: whatever stops it becomes a message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mla_convert.console import Console
from mla_convert.errors import ExitCode, InterruptedRunError, LocalIOError, MlaConvertError
from mla_convert.many_ranks import ElsewhereError
from mla_convert.storage import plain
from mla_convert.streams import shell_word


@contextmanager
def reporting(console: Console) -> Iterator[None]:
    """Turn whatever ends a command into a message and an exit code."""
    try:
        yield
    except ElsewhereError as error:
        raise typer.Exit(error.exit_code) from None
    except MlaConvertError as error:
        console.error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        console.error(InterruptedRunError("interrupted", hint=f"run it again: {resume_command()}"))
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (typer.Exit, typer.Abort):
        raise
    except OSError as error:  # what no reader or writer has explained
        where = f"{plain(error.filename)}: " if error.filename else ""
        console.error(LocalIOError(f"{where}{error.strerror or error}"))
        raise typer.Exit(ExitCode.LOCAL_IO) from None
    except Exception as error:
        console.unexpected(error)
        raise typer.Exit(ExitCode.UNEXPECTED) from None


def resume_command() -> str:
    """This command as the user can type it to go on: ``--restart`` would discard what is finished."""
    words = sys.argv[1:]
    options = words[: words.index("--")] if "--" in words else words
    words = [word for word in options if word != "--restart"] + words[len(options) :]
    return " ".join(shell_word(word) for word in ["mla-convert", *words])
