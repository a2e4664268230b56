"""What a console prints in each mode, on which stream, and what it does to awkward names."""

from __future__ import annotations

import dataclasses
import json
import re
from enum import Enum
from pathlib import Path

import pytest
from consoles import (
    plain_environment,  # noqa: F401
    run,
    run_on_terminal,
)
from rich.console import Console as RichConsole

from mla_convert import __version__
from mla_convert.console import Console, facts, table
from mla_convert.errors import BadInputError, DifferenceError
from mla_convert.streams import visible

MARKUP = "[bold]x[/x]"
WEIRD = "path/[weird].safetensors"


def show_file(out: RichConsole) -> None:
    out.print(f"wrote {WEIRD}")


# Results


def test_result_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create().result({"path": "out"}, human=show_file, quiet="out")
    assert capsys.readouterr() == ("wrote path/[weird].safetensors\n", "")


def test_result_as_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create(json=True).result({"path": MARKUP, "n": [1, "é"]}, human=show_file, quiet="out")
    stdout, stderr = capsys.readouterr()
    assert stdout == '{\n  "path": "[bold]x[/x]",\n  "n": [\n    1,\n    "é"\n  ]\n}\n'
    assert stderr == ""


@pytest.mark.parametrize(("quiet", "stdout"), [(1, "path/[weird].safetensors\n"), (2, ""), (3, "")])
def test_quiet_result(quiet: int, stdout: str, capsys: pytest.CaptureFixture[str]) -> None:
    Console.create(quiet=quiet).result({}, human=show_file, quiet=WEIRD)
    assert capsys.readouterr() == (stdout, "")


def test_result_without_a_human_form_prints_the_short_one(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create().result({}, quiet="out")
    assert capsys.readouterr().out == "out\n"


def test_json_is_printed_even_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create(json=True, quiet=2).result({"n": 1})
    assert json.loads(capsys.readouterr().out) == {"n": 1}


def test_a_second_result_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.create(json=True)
    console.result({})
    with pytest.raises(RuntimeError, match="one result"):
        console.result({})
    assert capsys.readouterr().out == "{}\n"


def test_json_holds_paths_enums_dataclasses_sets_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    class Kind(Enum):
        SPLIT = "split"

    @dataclasses.dataclass(frozen=True, slots=True)
    class Report:
        kind: Kind
        shape: tuple[int, ...]
        cosine: float

    document = {
        "path": Path("a") / "b",
        "report": Report(Kind.SPLIT, (2, 3), float("nan")),
        "names": {"b", "a"},
        "worst": float("-inf"),
        "exit": 0.5,
    }
    Console.create(json=True).result(document)
    assert json.loads(capsys.readouterr().out) == {
        "path": "a/b",
        "report": {"kind": "split", "shape": [2, 3], "cosine": None},
        "names": ["a", "b"],
        "worst": None,
        "exit": 0.5,
    }


# Messages


def say_everything(console: Console) -> None:
    console.info(f"reading {WEIRD}")
    console.detail("17 shards")
    console.warning(f"no tokenizer beside {MARKUP}", "copy it first")
    console.warning("short")


EVERYTHING = {
    "info": "reading path/[weird].safetensors\n",
    "detail": "17 shards\n",
    "warning": (
        "warning: no tokenizer beside [bold]x[/x]\n"  # a hint is a line of its own
        "hint: copy it first\n"
        "warning: short\n"
    ),
}


@pytest.mark.parametrize(
    ("quiet", "verbose", "shown"),
    [
        (0, 0, ("info", "warning")),
        (0, 1, ("info", "detail", "warning")),
        (1, 0, ("warning",)),
        (1, 1, ("warning",)),
        (2, 0, ()),
    ],
)
def test_messages_for_people(
    quiet: int, verbose: int, shown: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    say_everything(Console.create(quiet=quiet, verbose=verbose))
    assert capsys.readouterr() == ("", "".join(EVERYTHING[name] for name in shown))


def test_messages_as_json_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(Console.create(json=True, verbose=1))
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert [json.loads(line) for line in stderr.splitlines()] == [
        {"event": "info", "message": "reading path/[weird].safetensors"},
        {"event": "detail", "message": "17 shards"},
        {"event": "warning", "message": "no tokenizer beside [bold]x[/x]", "hint": "copy it first"},
        {"event": "warning", "message": "short", "hint": None},
    ]


@pytest.mark.parametrize("quiet", [0, 1, 2])
def test_error_for_people_caps_the_details(quiet: int, capsys: pytest.CaptureFixture[str]) -> None:
    details = [f"{WEIRD}: {MARKUP}.{i}" for i in range(10)]
    Console.create(quiet=quiet).error(
        BadInputError(f"{WEIRD}: 10 tensors overlap", hint="download it again", details=details)
    )
    expected = ["error: path/[weird].safetensors: 10 tensors overlap"]
    expected += [f"  path/[weird].safetensors: [bold]x[/x].{i}" for i in range(8)]
    expected += ["  … and 2 more (all with --json)", "hint: download it again"]
    assert capsys.readouterr() == ("", "\n".join(expected) + "\n")


def test_error_with_eight_details_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create().error(DifferenceError("8 differ", details=[str(i) for i in range(8)]))
    assert capsys.readouterr().err == "error: 8 differ\n" + "".join(f"  {i}\n" for i in range(8))


def test_error_as_json_has_every_detail(capsys: pytest.CaptureFixture[str]) -> None:
    details = [f"{MARKUP}.{i}" for i in range(10)]
    Console.create(json=True).error(BadInputError("overlap", hint="again", details=details))
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.count("\n") == 1
    assert json.loads(stderr) == {
        "event": "error",
        "error": "BadInputError",
        "exit_code": 3,
        "message": "overlap",
        "hint": "again",
        "details": details,
    }


def fail() -> BaseException:
    try:
        raise KeyError(MARKUP)
    except KeyError as error:
        return error


def test_unexpected_shows_no_traceback_and_asks_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create(verbose=1).unexpected(fail())
    assert capsys.readouterr() == (
        "",
        "error: unexpected KeyError: '[bold]x[/x]'\n"
        f"hint: this is a bug in mla-convert {__version__}: please report it with the command "
        "and the traceback (-vv or MLA_CONVERT_DEBUG=1 shows it)\n",
    )


@pytest.mark.parametrize(("verbose", "debug"), [(2, None), (0, "1")])
def test_unexpected_shows_the_traceback_on_request(
    verbose: int,
    debug: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if debug:
        monkeypatch.setenv("MLA_CONVERT_DEBUG", debug)
    Console.create(verbose=verbose).unexpected(fail())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "    raise KeyError(MARKUP)" in lines
    assert lines[-2] == "error: unexpected KeyError: '[bold]x[/x]'"
    assert lines[-1].endswith("please report it with the command and the traceback")


def test_unexpected_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create(json=True).unexpected(RuntimeError())
    record = json.loads(capsys.readouterr().err)
    assert (record["error"], record["exit_code"]) == ("RuntimeError", 1)
    assert (record["message"], record["details"]) == ("unexpected RuntimeError", [])
    Console.create(json=True, verbose=2).unexpected(fail())
    record = json.loads(capsys.readouterr().err)
    assert record["details"][0] == "Traceback (most recent call last):"


# Names


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain é 模型", "plain é 模型"),
        ("a\nerror: b", "a\\nerror: b"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\u202eb", "a\\u202eb"),
        ("\udcff", "\\udcff"),
        ("a\x9bb\x7f", "a\\x9bb\\x7f"),
    ],
)
def test_control_characters_are_visible_everywhere(
    name: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert visible(name) == shown
    console = Console.create(verbose=1)
    console.info(name)
    console.warning(name, name)
    console.error(BadInputError(name, hint=name, details=[name]))
    progress = console.progress()
    progress.start(name.replace("\n", " "), 1, "items")
    progress.note(name.replace("\n", " "))
    console.result({}, human=lambda out: out.print(table(["n"], [[name]])))
    stdout, stderr = capsys.readouterr()
    assert stdout == f"n\n{shown}\n"
    assert stderr.startswith(
        f"{shown}\nwarning: {shown}\nhint: {shown}\nerror: {shown}\n  {shown}\nhint: {shown}\n"
    )
    assert not re.search(r"[^\n -~é模型]", stderr)


def test_a_path_that_is_not_utf8_survives_as_data() -> None:
    script = "Console.create(quiet={}, json={}).result({{'path': '\\udcff'}}, quiet='\\udcff')"
    quiet = run(script.format(1, False), text=False, encoding=None)
    assert quiet.stdout == b"\xff\n"
    document = run(script.format(0, True))
    assert json.loads(document.stdout) == {"path": "\udcff"}


# Tables


def test_table_off_a_terminal_is_neither_cut_nor_wrapped_nor_padded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = f"model.layers.0.self_attn.{MARKUP}." + "deep." * 30 + "weight"
    rows = [[name, 12, True, "✓"], ["b", 3456, None, ""]]
    Console.create().result(
        {}, human=lambda out: out.print(table(["name", "rows", "mla", "ok"], rows, right=["rows"]))
    )
    width = len(name)
    assert capsys.readouterr().out.splitlines() == [
        "name".ljust(width) + "  rows  mla  ok",
        name + "    12  yes  ✓",
        "b".ljust(width) + "  3456  -",
    ]


def test_facts_and_title(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [("format", "huggingface"), (MARKUP, WEIRD), ("模型", None)]
    Console.create().result({}, human=lambda out: out.print(facts(pairs, title="Checkpoint [x]")))
    assert capsys.readouterr().out == (
        "Checkpoint [x]\nformat       huggingface\n[bold]x[/x]  path/[weird].safetensors\n模型         -\n"
    )


def test_empty_table_is_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create().result({}, human=lambda out: out.print(table(["name", "bytes"], [])))
    assert capsys.readouterr().out == "name  bytes\n"


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells where the table has 2 columns"):
        table(["a", "b"], [["x"]])


TABLE_SCRIPT = """
rows = [["model.layers.0.self_attn.kv_b_proj.weight", 123456, "✓"]]
sizes = table(["name", "rows", "ok"], rows, right=["rows"])
Console.create(color="never").result({}, human=lambda out: out.print(sizes))
"""


@pytest.mark.parametrize("env", [{"COLUMNS": "40"}, {}])
def test_table_folds_on_a_narrow_terminal_and_loses_nothing(env: dict[str, str]) -> None:
    lines = run_on_terminal(TABLE_SCRIPT, env, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[1].rstrip().endswith("  123456  ✓")
    folded = [line.partition("  123456")[0].strip() for line in lines[1:]]
    assert "".join(folded) == "model.layers.0.self_attn.kv_b_proj.weight"
