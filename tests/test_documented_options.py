"""The whole surface of the command line, frozen: whoever adds, renames or removes an option does it here too."""

from __future__ import annotations

import re

import pytest
import typer.main
from conversions import run

from mla_convert.cli import app

EVERYWHERE = {"--help -h", "--json", "--quiet -q", "--verbose -v", "--color"}
WRITING = {
    "--output -o",
    "--trust-shapes",
    "--dry-run",
    "--overwrite",
    "--restart",
    "--workers",
    "--link",
    "--checksum",
}
MEGATRON = {"--norms", "--indexer", "--indexer-from", "--drop-optimizer"}
SURFACE = {
    "": {"--help -h", "--version", "--install-completion", "--show-completion"},
    "inspect": EVERYWHERE | {"path", "--trust-shapes"},
    "split": EVERYWHERE
    | WRITING
    | MEGATRON
    | {"path", "--keep-combined", "--dequantize", "--drop-fp8-state"},
    "combine": EVERYWHERE | WRITING | MEGATRON | {"path", "--ignore-manifest", "--drop-fp8-state"},
    "migrate": EVERYWHERE | WRITING | MEGATRON | {"path"},
    "reshard": EVERYWHERE
    | WRITING
    | {"path", "--tp", "--to", "--layout", "--experts", "--reblock", "--dequantize", "--pad-vocabulary"}
    | {"--spec", "--indexer-from", "--drop-optimizer"},
    "diff": EVERYWHERE | {"a", "b", "--workers", "--trust-shapes"},
    "verify": EVERYWHERE
    | {"path", "--against", "--tp", "--layers", "--seq", "--dtype", "--backend", "--device", "--skip-carried"}
    | {"--no-control", "--no-record", "--seed", "--trust-shapes", "--cp", "--backward", "--launch"},
    "warmup": EVERYWHERE | {"path", "--tp", "--dtype", "--workers", "--dry-run", "--trust-shapes"},
    "push": EVERYWHERE
    | {"path", "repo_id", "--revision", "--create-pr", "--private", "--message", "--card", "--unverified"}
    | {"--dry-run"},
    "demo": EVERYWHERE | {"--output -o", "--tp"},
}

root = typer.main.get_command(app)
commands = {"": root, **root.commands}  # type: ignore[attr-defined]


def parameters(name: str) -> dict[str, str]:
    """Every parameter of a command, as its names, and its help."""
    context = commands[name].make_context("x", [], resilient_parsing=True, help_option_names=["-h", "--help"])
    found = {}
    for parameter in commands[name].get_params(context):
        is_option = parameter.param_type_name == "option"
        key = " ".join(sorted(parameter.opts)) if is_option else str(parameter.name)
        found[key] = parameter.help or ""
    return found


def test_the_commands_are_these() -> None:
    assert commands.keys() == SURFACE.keys()


@pytest.mark.parametrize("name", SURFACE)
def test_the_options_are_these(name: str) -> None:
    assert parameters(name).keys() == SURFACE[name]


@pytest.mark.parametrize("name", SURFACE)
def test_every_option_has_a_sentence(name: str) -> None:
    for option, text in parameters(name).items():
        assert text.endswith("."), option
        assert len(text) > 15, option


@pytest.mark.parametrize("name", SURFACE)
def test_every_command_says_what_it_does(name: str) -> None:
    first, *_ = (commands[name].help or "").splitlines()
    assert first.endswith(".")
    assert 20 < len(first) <= 100


@pytest.mark.parametrize("name", SURFACE)
def test_help_shows_every_option(name: str) -> None:
    shown = " ".join(run(*name.split(), "--help").stdout.split())
    for option, text in parameters(name).items():
        for word in option.split():
            assert re.search(rf"(?i)[ ,{{[]{re.escape(word)}[ ,}}\]]", shown), word
        assert " ".join(text.split()) in shown


def test_defaults_do_not_depend_on_the_machine() -> None:
    """Else the generated reference would differ from one machine to the next."""
    for command in commands.values():
        for parameter in command.params:
            assert parameter.name != "workers" or parameter.default is None
