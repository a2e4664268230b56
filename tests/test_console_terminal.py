"""What a console does on a terminal and in a pipe: signs, colours and progress."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest
from consoles import (
    plain_environment,  # noqa: F401
    run,
    run_on_terminal,
)

from mla_convert.console import Console
from mla_convert.progress import BarProgress, HeartbeatProgress, JsonProgress, SilentProgress

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
