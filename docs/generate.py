"""Writes docs/cli-reference.md from the live help of every command; with --check it only compares.

python docs/generate.py [--check]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TARGET = Path(__file__).parent / "cli-reference.md"
COMMANDS = ("inspect", "split", "combine", "migrate", "reshard", "diff", "verify", "warmup", "push", "demo")
HEAD = """# Command reference

Generated from the live help by `make docs`; `make test` fails when it is out of date.

Exit codes: 0 done · 1 unexpected · 2 usage · 3 bad input · 4 cannot be done as asked · 5 local I/O ·
6 Hub or network · 10 verification found a difference · 130 interrupted.
"""


def help_text(*command: str) -> str:
    """The plain help of one command, 100 columns wide."""
    environment = {
        **os.environ,
        "TERMINAL_WIDTH": "100",
        "COLUMNS": "100",
        "TYPER_USE_RICH": "0",
        "NO_COLOR": "1",
    }
    environment.pop("FORCE_COLOR", None)
    run = subprocess.run(
        [sys.executable, "-m", "mla_convert", *command, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in run.stdout.strip().splitlines())


def render() -> str:
    """The whole document."""
    parts = [HEAD, f"## mla-convert\n\n```text\n{help_text()}\n```\n"]
    parts += [f"## mla-convert {name}\n\n```text\n{help_text(name)}\n```\n" for name in COMMANDS]
    return "\n".join(parts)


def main() -> int:
    """Write the file, or compare it."""
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.name} is out of date: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
