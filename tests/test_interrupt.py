"""^C and its relatives, sent to the real command in a process of its own, on a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import contents, environment, leftovers, memory_folder, run, write_checkpoint
from filesystems import in_child

from mla_convert import api, engine
from mla_convert.engine import RunOptions
from mla_convert.errors import InterruptedRunError

PARTIAL = ".out.mla-convert-partial"
#: The command, made to wait in the middle of the second file. ``stuck``: as if the kernel did not return.
SLOW = """
import sys, time
from pathlib import Path
from mla_convert import filling
from mla_convert.cli import main

mode, here = sys.argv.pop(1), Path(sys.argv.pop(1))
copy_range, count = filling.storage.copy_range, 0

def slow(*arguments, on_bytes, **options):
    global count
    count += 1
    if count == 10:
        (here / "waiting").touch()
        while True:
            time.sleep(0.01)
            if mode != "stuck":
                on_bytes(0)
    return copy_range(*arguments, on_bytes=on_bytes, **options)

filling.storage.copy_range = slow
main()
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    write_checkpoint(tmp_path / "my model")
    api.split(tmp_path / "my model", tmp_path / "reference")
    return contents(tmp_path / "reference")


def slow_command(mode: str, here: Path, *more: str) -> list[str]:
    arguments = ["split", "my model", "-o", "out", "--workers", "1", *more]
    return [sys.executable, "-c", SLOW, mode, str(here), *arguments]


def start(mode: str, here: Path, *more: str, before: str = "") -> subprocess.Popen[str]:
    words = slow_command(mode, here, *more)
    process = subprocess.Popen(
        ["sh", "-c", f'{before} exec "$@"', "sh", *words],
        cwd=here,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_signals,
    )
    wait_for(here / "waiting", process)
    return process


def _hear_signals() -> None:
    """The tests themselves may run under ``nohup``, whose children ignore SIGHUP."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for(path: Path, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def type_resume_command(stderr: str, here: Path) -> subprocess.CompletedProcess[str]:
    """Do what the message says, literally, in a shell."""
    found = re.search(r"^hint: resume with: (.*)$", stderr, re.MULTILINE)
    assert found, stderr
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        found[1].rstrip("\r"),
        shell=True,
        executable="/bin/bash",
        cwd=here,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_in_good_order_and_the_printed_command_resumes(
    tmp_path: Path, expected: dict[str, bytes], number: signal.Signals
) -> None:
    process = start("patient", tmp_path)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "error: stopped; 1 of 8 files are finished and kept\n" in stderr
    assert "hint: resume with: mla-convert split 'my model' -o out --workers 1\n" in stderr
    assert "Traceback" not in stderr
    assert leftovers(tmp_path) == [PARTIAL]
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / PARTIAL / "files").iterdir())) == 1  # the half-written file is gone already
    done = type_resume_command(stderr, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed    1 file finished by an earlier run\n" in done.stdout
    assert contents(tmp_path / "out") == expected
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(
    tmp_path: Path, expected: dict[str, bytes], number: signal.Signals
) -> None:
    process = start("stuck", tmp_path)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)  # it waits for the file to end
    process.send_signal(number)
    assert process.wait(timeout=60) == -number
    assert not (tmp_path / "out").exists()
    done = run("split", "my model", "-o", "out", cwd=tmp_path)
    assert "resumed" in done.stdout
    assert contents(tmp_path / "out") == expected


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path, expected: dict[str, bytes]) -> None:
    process = start("patient", tmp_path, before="trap '' HUP;")  # what nohup does
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.terminate()
    assert process.wait(timeout=60) == 130


def test_the_printed_command_does_not_discard(tmp_path: Path, expected: dict[str, bytes]) -> None:
    process = start("patient", tmp_path, "--restart")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "resume with: mla-convert split 'my model' -o out --workers 1\n" in stderr
    done = type_resume_command(stderr, tmp_path)
    assert "resumed    1 file finished by an earlier run\n" in done.stdout


def test_an_interrupted_run_as_json(tmp_path: Path, expected: dict[str, bytes]) -> None:
    process = start("patient", tmp_path, "--json")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert '"error": "InterruptedRunError", "exit_code": 130' in stderr.splitlines()[-1]


def on_terminal(mode: str, here: Path, signals: int) -> tuple[int, str]:
    """Run the command as the foreground process of a terminal and type ^C; wait status and all it printed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here)
        words = slow_command(mode, here)
        os.execvpe(words[0], words, environment(TERM="xterm"))
    wait_for(here / "waiting")
    output = b""
    for _ in range(signals):
        os.write(terminal, b"\x03")
        until = time.monotonic() + 1
        while (left := until - time.monotonic()) > 0 and select.select([terminal], [], [], left)[0]:
            output += read(terminal)
    while select.select([terminal], [], [], 60)[0]:
        if not (part := read(terminal)):
            break
        output += part
    else:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(terminal)
    return status, output.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end has closed
        time.sleep(0.01)
        return b""


def test_ctrl_c_on_a_terminal(tmp_path: Path, expected: dict[str, bytes]) -> None:
    status, output = on_terminal("patient", tmp_path, 1)
    assert os.waitstatus_to_exitcode(status) == 130
    assert "stopped; 1 of 8 files are finished and kept" in output
    assert "Traceback" not in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is back
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert type_resume_command(plain, tmp_path).returncode == 0
    assert contents(tmp_path / "out") == expected


def test_ctrl_c_twice_on_a_terminal_leaves_it_as_it_was(tmp_path: Path, expected: dict[str, bytes]) -> None:
    status, output = on_terminal("stuck", tmp_path, 2)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert leftovers(tmp_path)[-1] == PARTIAL


@pytest.mark.parametrize("moment", ["staged", "sourced", "finalised"])
def test_ctrl_c_before_and_after_the_files(tmp_path: Path, expected: dict[str, bytes], moment: str) -> None:
    """Whenever it comes before the output has its name, there is no output and nothing is lost."""

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def work() -> str:
        check = engine._Run._check_source_unchanged
        if moment == "sourced":
            engine._Run._check_source_unchanged = lambda run: (interrupt(), check(run))[1]  # type: ignore[method-assign]
        run = RunOptions(on_step=lambda step: interrupt() if step == moment else None)
        try:
            api.split(tmp_path / "my model", tmp_path / "out", run=run)
        except (InterruptedRunError, KeyboardInterrupt) as error:
            return f"{type(error).__name__} {error}"
        return "finished"

    message = in_child(work, seconds=60)
    if moment == "staged":  # nothing is finished, so nothing stays
        assert (message, leftovers(tmp_path)) == ("KeyboardInterrupt ", [])
    else:
        assert message == "InterruptedRunError stopped; 8 of 8 files are finished and kept"
        assert leftovers(tmp_path) == [PARTIAL]
    assert not (tmp_path / "out").exists()
    report = api.split(tmp_path / "my model", tmp_path / "out").report
    assert report is not None
    assert report.resumed_files == (0 if moment == "staged" else 8)
    assert contents(tmp_path / "out") == expected


def test_ctrl_c_while_planning(tmp_path: Path) -> None:
    """Before there is anything to keep, the message still says how to run it again."""
    write_checkpoint(tmp_path / "my model")
    script = SLOW.replace("main()\n", PLANNING + "main()\n").replace("import sys", "import sys, os, signal")
    words = [sys.executable, "-c", script, "patient", str(tmp_path), "split", "my model", "-o", "it's\nout"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == (
        "error: interrupted\nhint: run it again: mla-convert split 'my model' -o $'it\\x27s\\x0aout'\n"
    )


PLANNING = """
from mla_convert import sources
sources.plan_split = lambda *_: os.kill(os.getpid(), signal.SIGINT) or time.sleep(60)
"""
