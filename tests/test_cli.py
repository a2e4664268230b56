"""The command as scripts and people meet it: exit codes, streams, JSON, awkward names, awkward streams."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversions import (
    REWRITTEN,
    command,
    contents,
    environment,
    fails,
    manifest,
    memory_folder,
    run,
    run_process,
    snapshot,
    write_checkpoint,
)

from mla_convert import __version__

#: Names that a terminal, a markup language or a shell would make something else of.
WEIRD_TENSORS = ("[bold]x[/x]", "two\nlines", "\x1b[31mred", "tab\there", "ünïcode ✓", "'; rm -rf $HOME")
COMMANDS = ("inspect", "split", "combine", "verify", "demo")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def document(*arguments: str | Path, **options: Any) -> dict[str, Any]:
    """The one JSON document on stdout; stderr must hold JSON lines only."""
    done = run(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    value, end = json.JSONDecoder().raw_decode(done.stdout)
    assert done.stdout[end:] == "\n"
    for line in done.stderr.splitlines():
        assert json.loads(line)["event"] in ("start", "progress", "note", "finish", "warning"), line
    assert isinstance(value, dict)
    return value


# Asking for help, and getting it wrong


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_everywhere(name: str) -> None:
    for flag in ("-h", "--help"):
        done = run(*name.split(), flag)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: mla-convert {name}".rstrip())


def test_version() -> None:
    done = run_process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"mla-convert {__version__}\n", "")


def test_help_loads_no_heavy_module() -> None:
    """Start-up and completion must stay quick: no torch, and Rich only where something is shown."""
    script = (
        "import sys\nfrom mla_convert.cli import main\nsys.argv[1:] = ['split', '-h']\n"
        "try:\n    main()\nfinally:\n    print([m for m in ('torch', 'numpy', 'huggingface_hub', 'tilelang') "
        "if m in sys.modules], file=sys.stderr)"
    )
    words = [command()[0].replace("mla-convert", "python"), "-c", script]
    assert subprocess.run(words, capture_output=True, text=True).stderr == "[]\n"


def test_splitting_does_not_load_torch(model: Path) -> None:
    script = (
        "import sys\nfrom mla_convert.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    words = [command()[0].replace("mla-convert", "python"), "-c", script, "split", str(model), "-qq"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["splt"], "No such command 'splt'"),
        (["split", "--wrong", "x"], "No such option: --wrong"),
        (["split"], "Missing argument"),
        (["split", "model", "--workers", "0"], "--workers"),
        (["split", "model", "--workers", "many"], "--workers"),
        (["split", "model", "--link", "soft"], "--link"),
        (["split", "model", "--dequantize", "fp4"], "--dequantize"),
        (["split", "model", "--color", "pink"], "--color"),
        (["inspect", "model", "more"], "unexpected extra argument"),
        (["inspect", "absent"], "error: absent does not exist"),
        (["split", "absent"], "error: absent does not exist"),
        (["combine", "absent", "--dry-run"], "error: absent does not exist"),
        (["split", "model", "-o", "model"], "error: the output model is the input model"),
    ],
)
def test_usage_errors(model: Path, arguments: list[str], message: str) -> None:
    before = snapshot(model.parent)
    assert message in fails(2, *arguments, cwd=model.parent)
    last = fails(2, *arguments, "--json", cwd=model.parent).splitlines()[-1]
    error = json.loads(last)
    assert (error["event"], error["error"], error["exit_code"]) == ("error", "UsageError", 2)
    assert message.removeprefix("error: ") in error["message"]
    assert snapshot(model.parent) == before


def test_no_arguments_show_the_help() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: mla-convert [OPTIONS] COMMAND")


def test_each_kind_of_error_has_its_code(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert "error: " in fails(2, "split", model, "-o", model / "out")
    assert "holds no .safetensors files" in fails(3, "split", tmp_path / "empty")
    assert "nothing to combine" in fails(4, "combine", model)
    assert "is a file, not a folder" in fails(5, "split", model, "-o", tmp_path / "file" / "out")
    data = (model / REWRITTEN[0]).read_bytes()
    (model / REWRITTEN[0]).write_bytes(data[:-1])
    error = json.loads(fails(3, "inspect", model, "--json").splitlines()[-1])
    assert (error["event"], error["error"], error["exit_code"]) == ("error", "BadInputError", 3)
    assert error["hint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "model"]


def test_a_bug_is_admitted_without_a_traceback(model: Path) -> None:
    script = (
        "from mla_convert import cli, api\n"
        "def inspect(*_, **__): raise ZeroDivisionError('oops')\n"
        "api.inspect = inspect\ncli.main()"
    )
    python = command()[0].replace("mla-convert", "python")
    for flags, has_traceback in ((), False), (("-vv",), True):
        words = [python, "-c", script, "inspect", str(model), *flags]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert "error: unexpected ZeroDivisionError: oops\n" in done.stderr
        assert "please report it" in done.stderr
        assert ("Traceback" in done.stderr) == has_traceback


def test_what_the_system_refuses_unexplained_is_local_io(model: Path) -> None:
    script = (
        "from mla_convert import cli, api\n"
        "def inspect(*_, **__): open('/nowhere/at all')\n"
        "api.inspect = inspect\ncli.main()"
    )
    words = [command()[0].replace("mla-convert", "python"), "-c", script, "inspect", str(model)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (5, "error: /nowhere/at all: No such file or directory\n")


# JSON and quiet


def test_one_json_document_on_stdout(model: Path) -> None:
    inspected = document("inspect", model)
    assert (inspected["layout"], inspected["tensor_parallel"]["legal"]) == ("combined", [1, 2, 4])
    planned = document("split", model, "--dry-run")
    assert (planned["command"], planned["dry_run"]) == ("split", True)
    assert planned["steps"]["operation"] == "split"
    done = document("split", model)
    assert (done["dry_run"], done["already_done"], done["resumed_files"]) == (False, False, 0)
    assert done["plan"] == planned["plan"] == manifest(Path(done["output"]))["plan"]
    assert sum(done["bytes"]["by_way"].values()) == done["bytes"]["rewritten"] + done["bytes"]["carried"]
    assert document("split", model)["already_done"]
    output = Path(done["output"])
    planned = document("combine", output, "--dry-run")
    done = document("combine", output)
    assert done["plan"] == planned["plan"] == manifest(Path(done["output"]))["plan"]
    assert (done["command"], done["layout"]) == ("combine", "combined")


def test_quiet_prints_the_path_only(model: Path, tmp_path: Path) -> None:
    for arguments, path in (
        (["split", "model", "-q"], f"{tmp_path}/model-split"),
        (["split", "model", "-q", "-o", "out"], "out"),
        (["combine", "out", "--quiet"], f"{tmp_path}/out-combined"),
        (["inspect", "out", "-q"], "split"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")


def test_twice_quiet_prints_nothing_but_errors(model: Path) -> None:
    done = run("split", model, "-qq")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "nothing to combine" in fails(4, "combine", model, "-qq")


# A dry run


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    for arguments in (["split", model], ["split", model, "--keep-combined", "-o", tmp_path / "a" / "b"]):
        for flags in ((), ("--json",), ("-q",)):
            assert run(*arguments, *flags, "--dry-run").returncode == 0
            assert snapshot(tmp_path) == before
    run("split", model, "-o", tmp_path / "parted")
    before = snapshot(tmp_path)
    assert run("combine", tmp_path / "parted", "--dry-run").returncode == 0
    assert snapshot(tmp_path) == before


def test_a_dry_run_leaves_an_unfinished_run_alone(model: Path, tmp_path: Path) -> None:
    staged = tmp_path / ".model-split.mla-convert-partial"
    staged.mkdir()
    (staged / "journal").write_text("whatever")
    before = snapshot(tmp_path)
    assert run("split", model, "--dry-run").returncode == 0
    assert snapshot(tmp_path) == before


# Names


def test_weird_names_survive_everywhere(tmp_path: Path) -> None:
    """In a folder called ``[bold]x[/x]``: literal or escaped for people, intact in JSON and on disk."""
    home = tmp_path / "[bold]x[/x] it's"
    source = write_checkpoint(home / "a\nb\x1b[31m", extra=WEIRD_TENSORS)
    done = run("split", source, "-v")
    assert done.returncode == 0, done.stderr
    assert f"split {home}/a\\nb\\x1b[31m\n" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    following = done.stdout.splitlines()[-1].removeprefix("next: mla-convert verify ")
    shown = subprocess.run(["bash", "-c", f"printf %s {following}"], capture_output=True)
    output = Path(os.fsdecode(shown.stdout))
    assert output == source.with_name(source.name + "-split")
    planned = document("combine", output, "--dry-run")
    assert planned["output"] == f"{output}-combined"
    inspected = run("inspect", output)
    assert f"{home}/a\\nb\\x1b[31m-split\n" in inspected.stdout
    assert document("inspect", output)["path"] == str(output)
    assert run("combine", output).returncode == 0
    whole = contents(Path(f"{output}-combined"))
    del whole["mla-convert.json"]
    assert whole == contents(source)


def test_weird_tensor_names_in_errors(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", extra=WEIRD_TENSORS)
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    for name in WEIRD_TENSORS:
        del value["weight_map"][name]
    index.write_text(json.dumps(value))
    stderr = fails(3, "inspect", source)
    for name in ("[bold]x[/x]", "two\\nlines", "\\x1b[31mred", "tab\\there", "ünïcode ✓", "'; rm -rf $HOME"):
        assert f"  not listed: {name}\n" in stderr
    error = json.loads(fails(3, "inspect", source, "--json"))
    assert sorted(error["details"]) == sorted(f"not listed: {name}" for name in WEIRD_TENSORS)


# Streams


def test_no_color_and_no_terminal_mean_no_escape_codes(model: Path) -> None:
    for env in ({"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, {}):
        assert "\x1b" not in run("inspect", model, env=env).stdout
    assert "\x1b" in run("inspect", model, "--color", "always").stdout
    assert "\x1b" not in fails(4, "combine", model, env={"NO_COLOR": "1"})


@pytest.mark.parametrize(
    "arguments", ["inspect model", "inspect model --json", "split --help", "split model"]
)
def test_a_reader_that_leaves_is_no_error(model: Path, arguments: str) -> None:
    line = f"set -o pipefail; '{command()[0]}' {arguments} | head -1 > /dev/null"
    done = subprocess.run(
        ["bash", "-c", line], cwd=model.parent, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr


def test_a_full_stdout_is_told(model: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_process("inspect", model, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 5
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
def test_streams_that_are_not_utf8(tmp_path: Path, env: dict[str, str]) -> None:
    source = write_checkpoint(tmp_path / "modèl ✓")
    done = run_process("split", source, env=env)
    assert done.returncode == 0, done.stderr
    assert "output" in done.stdout
    value = json.loads(run_process("inspect", source, "--json", env=env).stdout)
    assert value["path"] == str(source)
    quiet = run_process("split", source, "-q", env=env)
    assert quiet.stdout == f"{source}-split\n"
    error = fails(4, "combine", source, env=env, real=True)
    assert error.startswith("error: ")


def test_messages_go_to_stderr_and_results_to_stdout(model: Path) -> None:
    done = run("split", model)
    assert done.stdout.startswith(f"split {model}\n")
    assert done.stderr.startswith("split: 1")
    assert "less than 1 s" in done.stderr or " s, " in done.stderr


def test_the_number_of_workers_can_come_from_the_environment(model: Path) -> None:
    assert "MLA_CONVERT_WORKERS" in fails(2, "split", model, env={"MLA_CONVERT_WORKERS": "0"})
    assert run("split", model, "-qq", env={"MLA_CONVERT_WORKERS": "3"}).returncode == 0


def test_python_dash_m(model: Path) -> None:
    python = command()[0].replace("mla-convert", "python")
    words = [python, "-m", "mla_convert", "inspect", str(model), "-q"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "combined\n")
