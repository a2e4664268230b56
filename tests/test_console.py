"""What a console prints in each mode, on which stream, and what it does to awkward names and streams."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from mla_convert import __version__
from mla_convert.console import Console, facts, table
from mla_convert.errors import BadInputError, DifferenceError, LocalIOError
from mla_convert.progress import BarProgress, HeartbeatProgress, JsonProgress, SilentProgress
from mla_convert.streams import guard_broken_pipe, visible

MARKUP = "[bold]x[/x]"
WEIRD = "path/[weird].safetensors"
ENV_NAMES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "MLA_CONVERT_DEBUG", "LC_ALL")
ENV_NAMES += ("PYTHONIOENCODING", "PYTHONUNBUFFERED")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what changes the output, and with ``more``."""
    return {key: value for key, value in os.environ.items() if key not in ENV_NAMES} | more


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENV_NAMES:
        monkeypatch.delenv(name, raising=False)


NAMES = "".join(f"from mla_convert.{module} import *\n" for module in ("console", "streams", "errors"))


def run(script: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that has ``console`` names imported, with pipes for stdout and stderr."""
    header = "import sys\n" + NAMES
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 60} | options
    ascii_script = (header + script).encode("ascii", "backslashreplace").decode()  # LC_ALL=C reads no more
    return subprocess.run([sys.executable, "-c", ascii_script], env=environment(**env or {}), **options)


def run_on_terminal(script: str, env: dict[str, str] | None = None, width: int = 100) -> str:
    """Run a script whose stdin, stdout and stderr are one pseudo-terminal; return all it wrote."""
    header = "import sys, time\n" + NAMES
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, width))
    process = subprocess.Popen(
        [sys.executable, "-c", header + script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(**{"TERM": "xterm"} | (env or {})),
        start_new_session=True,
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # EIO: the other end has closed
        pass
    os.close(ours)
    assert process.wait(60) == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


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


# Encodings and colours

SIGNS_SCRIPT = """
console = Console.create()
console.warning("a → b … ✗ é", "× ─")
console.error(CannotError("no", details=["x"] * 9))
console.result({"s": "✓ é 😀"}, human=lambda out: (
    out.print(table(["name", "ok"], [["é", "✓"], ["long", "✗"]])), out.print("─ ✓ [x] 😀")))
"""


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_ascii_streams_get_ascii_signs(env: dict[str, str]) -> None:
    done = run(SIGNS_SCRIPT, env, encoding="ascii")
    assert done.returncode == 0
    assert done.stdout == "name  ok\n\\xe9  ok\nlong  x\n- ok [x] \\U0001f600\n"
    assert done.stderr == (
        "warning: a -> b ... x \\xe9\nhint: x -\nerror: no\n"
        + "  x\n" * 8
        + "  ... and 1 more (all with --json)\n"
    )


def test_json_on_an_ascii_stream_is_still_json() -> None:
    script = "c = Console.create(json=True); c.info('é 😀'); c.result({'s': '✓ é 😀'})"
    done = run(script, {"PYTHONIOENCODING": "ascii"}, encoding="ascii")
    assert json.loads(done.stdout) == {"s": "✓ é 😀"}
    assert json.loads(done.stderr) == {"event": "info", "message": "é 😀"}


COLOR_SCRIPT = """
console = Console.create(color={!r})
console.warning("w", "h")
console.result({{}}, human=lambda out: out.print(table(["name"], [["✓"]])))
"""


@pytest.mark.parametrize(
    ("color", "env", "colored"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": "1"}, False),
        ("auto", {"NO_COLOR": ""}, True),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ("auto", {"TERM": "dumb"}, False),
        ("never", {"FORCE_COLOR": "1"}, False),
        ("always", {"NO_COLOR": "1"}, True),
    ],
)
def test_color_on_a_terminal(color: str, env: dict[str, str], colored: bool) -> None:
    output = run_on_terminal(COLOR_SCRIPT.format(color), env)
    assert ("\x1b" in output) is colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", output) == "warning: w\nhint: h\nname\n✓\n"


@pytest.mark.parametrize(
    ("color", "env", "colored"),
    [("auto", {}, False), ("auto", {"FORCE_COLOR": "1"}, True), ("always", {}, True), ("never", {}, False)],
)
def test_color_in_a_pipe(color: str, env: dict[str, str], colored: bool) -> None:
    done = run(COLOR_SCRIPT.format(color), env)
    assert (("\x1b" in done.stdout), ("\x1b" in done.stderr)) == (colored, colored)


# Progress

PROGRESS_SCRIPT = """
console = Console.create({})
progress = console.progress()
progress.start("split", 4_000_000_000, "bytes")
for step in range(8):
    progress.advance(500_000_000)
    if step == 3:
        progress.note("path/[weird].safetensors")
        console.warning("[bold]x[/x]")
    time.sleep(0.12)
progress.finish()
console.result({{}}, quiet="out")
"""


def test_a_terminal_shows_a_bar_and_is_left_clean() -> None:
    output = run_on_terminal(PROGRESS_SCRIPT.format(""), {"NO_COLOR": "1"})
    assert re.search(r"split  ━+─+  \d\.\d\d GB of 4\.00 GB  \d+ %  [\d.]+ .B/s  \S+.* left", output)
    assert "\npath/[weird].safetensors" in output
    assert "warning: [bold]x[/x]\n" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    # After the last erasure only the summary and the result are left.
    rest = re.split(r"\x1b\[2K", output)[-1]
    assert re.fullmatch(r"split: 4\.00 GB in [^\n]+, [\d.]+ .B/s\nout\n", rest)


def test_an_error_ends_the_bar_first() -> None:
    script = """
console = Console.create(color="never")
console.progress().start("split", 4, "items")
console.error(CannotError("no"))
"""
    output = run_on_terminal(script)
    assert output.index("\x1b[?25h") < output.index("error: no")
    assert output.endswith("s\nerror: no\n")


def test_a_pipe_gets_plain_lines() -> None:
    done = run("import time\n" + PROGRESS_SCRIPT.format(""))
    assert done.stdout == "out\n"
    assert re.fullmatch(r"warning: \[bold\]x\[/x\]\nsplit: 4\.00 GB in .+, [\d.]+ .B/s\n", done.stderr)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("flags", "terminal", "term", "kind"),
    [
        ({}, True, "xterm", BarProgress),
        ({}, True, "dumb", HeartbeatProgress),
        ({}, False, "xterm", HeartbeatProgress),
        ({"json": True}, True, "xterm", JsonProgress),
        ({"quiet": 1}, True, "xterm", SilentProgress),
        ({"json": True, "quiet": 1}, False, "xterm", SilentProgress),
    ],
)
def test_choice_of_progress(
    flags: dict[str, Any], terminal: bool, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    console = Console.create(**flags)
    assert type(console.progress()) is kind
    assert console.progress() is console.progress()


# Streams that fail

FLOOD = "console.result({'n': [*range(99999)]}, human=lambda out: [out.print('x' * 99) for _ in range(3000)])"


@pytest.mark.parametrize("flags", ["", "json=True"])
@pytest.mark.parametrize("options", ["", "-u"])
def test_head_ends_the_output_quietly_and_keeps_the_exit_code(flags: str, options: str) -> None:
    script = f"""
from mla_convert.console import *
from mla_convert.streams import *
with guard_broken_pipe():
    console = Console.create({flags})
    {FLOOD}
    raise SystemExit(10)
"""
    command = f'"$PYTHON" {options} -c "$SCRIPT" | head -1; echo "${{PIPESTATUS[0]}}"'
    env = environment(PYTHON=sys.executable, SCRIPT=script)
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == ("{" if flags else "x" * 99) + "\n10\n"


@pytest.mark.parametrize("options", ["", "-u"])
def test_guard_covers_what_bypasses_the_console(options: str) -> None:
    script = """
from mla_convert.console import *
from mla_convert.streams import *
with guard_broken_pipe():
    for _ in range(99999):
        print("x" * 99)
"""
    command = f'"$PYTHON" {options} -c "$SCRIPT" | head -1; echo "${{PIPESTATUS[0]}}"'
    env = environment(PYTHON=sys.executable, SCRIPT=script)
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "x" * 99 + "\n0\n")


def test_guard_covers_the_flush_at_exit() -> None:
    script = "with guard_broken_pipe():\n    print('x')"
    reader, writer = os.pipe()
    os.close(reader)
    done = run(script, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_guard_lets_a_broken_connection_through() -> None:
    with pytest.raises(BrokenPipeError), guard_broken_pipe():
        raise BrokenPipeError("a socket")


@pytest.mark.parametrize("flags", ["", "json=True"])
def test_work_goes_on_when_nobody_reads_the_messages(flags: str) -> None:
    script = f"""
with guard_broken_pipe():
    console = Console.create({flags})
    progress = console.progress()
    progress.start("split", 1, "items")
    for _ in range(3):
        console.warning("w")
    progress.finish()
    console.result({{}}, quiet="done")
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(script, capture_output=False, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert (done.returncode, done.stdout.strip()) == (0, "{}" if flags else "done")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_result_that_cannot_be_written_is_a_local_error() -> None:
    script = """
console = Console.create()
try:
    console.result({}, quiet="out")
except LocalIOError as error:
    console.error(error)
    raise SystemExit(error.exit_code)
"""
    with Path("/dev/full").open("w") as full:
        done = run(script, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == LocalIOError.exit_code
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


def test_closed_streams_are_no_error() -> None:
    script = "sys.stdout = sys.stderr = None\nc = Console.create(); c.warning('w'); c.result({}, quiet='x')"
    assert run(script).returncode == 0


def test_json_mode_and_the_import_do_not_need_rich() -> None:
    script = """
console = Console.create(json=True)
console.progress().start("split", 1, "items")
console.warning("w")
console.error(CannotError("no"))
console.result({})
raise SystemExit(sum(name.split(".")[0] in ("rich", "torch") for name in sys.modules))
"""
    assert run(script).returncode == 0
