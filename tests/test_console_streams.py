"""Streams that break, are closed or are full: exit codes and what is still said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from consoles import (
    environment,
    plain_environment,  # noqa: F401
    run,
)

from mla_convert.errors import LocalIOError
from mla_convert.streams import guard_broken_pipe

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
