"""Processes that run the command as the ranks of one run, and faults for one of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert import engine, meeting
from mla_convert.cli import main

#: Seconds without a sign of life: ten times what a busy machine needs, and what each lost rank costs a test.
PATIENCE = 4.0


def words(source: Path, *more: str) -> tuple[str, ...]:
    """The command of most tests: 24 files of weights and one other."""
    return ("reshard", str(source), "--tp", "8", "-o", str(source.with_name("out")), "--workers", "1", *more)


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code, minus the signal if one killed it, and what it printed."""

    code: int
    out: str
    err: str


Patch = Callable[[], object]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def torchrun(count: int) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun sets it."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), **common} for rank in range(count)]


def srun(count: int, job: str = "7") -> list[dict[str, str]]:
    """The same by srun: nothing says where rank 0 is."""
    common = {"SLURM_NTASKS": str(count), "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
    return [{"SLURM_PROCID": str(rank), **common} for rank in range(count)]


class Fleet:
    """Processes forked from this one, each running the command as one rank."""

    def __init__(
        self, command: tuple[str, ...], environments: list[dict[str, str]], patches: Mapping[int, Patch]
    ) -> None:
        self._outputs = []
        self.pids: list[int] = []
        for rank, variables in enumerate(environments):
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            self._outputs.append((out, err))
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                self._run(command, {meeting.PATIENCE: str(PATIENCE), **variables}, patches.get(rank))
            self.pids.append(pid)

    @staticmethod
    def _run(command: tuple[str, ...], variables: dict[str, str], patch: Patch | None) -> None:
        code = 99
        try:
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update(variables)
            sys.argv = ["mla-convert", *command]
            if patch:
                patch()
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, limit: float = 90) -> list[Ended]:
        """All of them, once they have ended; a rank that hangs is killed and fails the test."""
        end = time.monotonic() + limit
        codes: dict[int, int] = {}
        while len(codes) < len(self.pids):
            for pid in self.pids:
                if pid not in codes:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        codes[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                hung = [pid for pid in self.pids if pid not in codes]
                for pid in hung:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                raise AssertionError(f"ranks {[self.pids.index(pid) for pid in hung]} hang")
            time.sleep(0.01)
        ended = []
        for pid, streams in zip(self.pids, self._outputs, strict=True):
            texts = []
            for stream in streams:
                stream.seek(0)
                texts.append(stream.read().decode())
                stream.close()
            ended.append(Ended(codes[pid], *texts))
        return ended


def together(
    command: tuple[str, ...],
    environments: list[dict[str, str]] | int = 4,
    patches: Mapping[int, Patch] | None = None,
) -> list[Ended]:
    """Run the command on ranks and wait for them."""
    if isinstance(environments, int):
        environments = torchrun(environments)
    ended = Fleet(command, environments, patches or {}).wait()
    for one in ended:
        assert "Traceback" not in one.err, one.err
    return ended


def at_step(name: str, number: int, action: Callable[[], object]) -> Patch:
    """Act when this rank comes to a step for the n-th time."""

    def patch() -> None:
        left = [number]

        def step(self: Any, found: str) -> None:
            left[0] -= found == name
            if not left[0] and found == name:
                action()

        engine._Run._step = step  # type: ignore[method-assign]

    return patch


def killed_at(name: str, number: int) -> Patch:
    return at_step(name, number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def codes(ended: list[Ended]) -> list[int]:
    return [one.code for one in ended]


def silent(ended: list[Ended]) -> bool:
    return all(one.out == one.err == "" for one in ended)
