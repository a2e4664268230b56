"""Runs that are killed, from progress or at a step, and the run that finishes them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from conversions import leftovers

from mla_convert import api
from mla_convert.engine import RunOptions, RunReport
from mla_convert.progress import SilentProgress

PARTIAL = ".out.mla-convert-partial"

Convert = Callable[..., api.Conversion]


class Killer(SilentProgress):
    """Kills its own process at the n-th piece of progress, or from ``step`` at the n-th step."""

    def __init__(self, pieces: int = 0, steps: int = 0) -> None:
        self.pieces, self.steps = pieces, steps

    def advance(self, n: int) -> None:
        self.pieces -= 1
        if self.pieces == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, name: str) -> None:
        self.steps -= 1
        if self.steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def in_killed_child(work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked process; True if it was killed, False if it finished."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def killed(convert: Convert, source: Path, target: Path, *, pieces: int = 0, steps: int = 0) -> bool:
    killer = Killer(pieces, steps)
    run = RunOptions(workers=1, on_step=killer.step)
    return in_killed_child(lambda: convert(source, target, run=run, progress=killer))


def finish(convert: Convert, source: Path, target: Path, **options: object) -> RunReport:
    report = convert(source, target, run=RunOptions(workers=2, **options)).report  # type: ignore[arg-type]
    assert report is not None
    assert leftovers(target.parent) == []
    return report
