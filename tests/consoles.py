"""Scripts run with a console on pipes and on a pseudo-terminal, in an environment that does not change its output."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from typing import Any

import pytest

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
