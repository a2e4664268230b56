"""Starts one process a rank, watches over them, and ends them together. No torch: a supervisor computes nothing.

Every rank runs the command that was given, and learns from its environment which rank it is, as under torchrun. Rank
0 has this process's streams and reports; what another rank says is shown only if it dies. Whatever happens, no rank
outlives the command, and no rank waits for one that is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mla_convert.errors import ExitCode, InterruptedRunError, MlaConvertError, UsageError
from mla_convert.meeting import place_in_run

#: A file through which the ranks of one machine find each other, where no address and port are given.
RENDEZVOUS = "MLA_CONVERT_RENDEZVOUS"
#: How long a rank that ends may leave the others to end by themselves, in seconds.
GRACE = 5.0
_LINES = 12


class RankError(MlaConvertError):
    """A rank died, or the ranks lost each other; nothing was proved."""


def own_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and number of ranks of this process; None where it is alone, or has nowhere to meet others.

    Raises:
        UsageError: The environment names a rank that cannot be.
    """
    meets = RENDEZVOUS in environment or ("MASTER_ADDR" in environment and "MASTER_PORT" in environment)
    return place_in_run(environment) if meets else None


def to_launch(count: int) -> bool:
    """Whether ``--launch`` has ``count`` ranks to start: not in a process that it has started itself.

    Raises:
        UsageError: There is one rank only, or torchrun has started them.
    """
    if own_rank() is None:
        if count < 2:
            raise UsageError(
                "--launch starts one process a rank, and there is one rank",
                hint="say how many with --tp or --cp",
            )
        return True
    if RENDEZVOUS not in os.environ:
        raise UsageError("torchrun has started the ranks already", hint="leave out --launch")
    return False


def run_ranks(arguments: Sequence[str], count: int) -> int:
    """Run ``mla-convert ARGUMENTS`` as ``count`` ranks.

    Returns:
        The exit code of rank 0, which has reported whatever there is to report.

    Raises:
        RankError: A rank died.
        InterruptedRunError: A signal came, and rank 0 did not end by itself.
    """
    with tempfile.TemporaryDirectory(prefix="mla-convert-ranks-") as folder, _signals():
        ranks = _Ranks(arguments, count, Path(folder))
        try:
            return ranks.watch()
        except KeyboardInterrupt:
            return ranks.interrupt()
        finally:
            ranks.kill()


class _Ranks:
    def __init__(self, arguments: Sequence[str], count: int, folder: Path) -> None:
        self._said: list[IO[bytes]] = [
            tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by kill
            for _ in range(count)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                self._processes.append(self._start(arguments, rank, count, folder))
        except BaseException:
            self.kill()
            raise

    def _start(
        self, arguments: Sequence[str], rank: int, count: int, folder: Path
    ) -> subprocess.Popen[bytes]:
        threads = str(max(1, (os.cpu_count() or 1) // count))
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
            "OMP_NUM_THREADS": threads,
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
            "TMPDIR": str(folder),  # whatever a rank leaves behind when it is killed goes with the folder
            RENDEZVOUS: str(folder / "rendezvous"),
        }
        streams = (None, None) if rank == 0 else (subprocess.DEVNULL, self._said[rank])
        return subprocess.Popen(
            [sys.executable, "-m", "mla_convert", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,  # ^C comes to the supervisor alone, which passes it on
        )

    def watch(self) -> int:
        """Until rank 0 has ended, or another one dies."""
        while True:
            codes = [process.poll() for process in self._processes]
            if codes[0] is not None:
                return self._ended(codes[0])
            dead = next((rank for rank, code in enumerate(codes) if code), None)
            if dead is not None:
                return self._died(dead)
            time.sleep(0.02)

    def _ended(self, code: int) -> int:
        if code < 0:
            raise self._error(0)
        self._wait(GRACE)
        return code

    def _died(self, rank: int) -> int:
        """Rank 0 may have the same reason to end and says it better; else it waits in vain."""
        code = self._wait_for(self._processes[0], GRACE)
        if code is not None and code > 0:
            return code
        raise self._error(rank)

    def interrupt(self) -> int:
        """Pass a signal on to rank 0, which says that it was interrupted."""
        self._processes[0].send_signal(signal.SIGINT)
        if self._wait_for(self._processes[0], GRACE) == ExitCode.INTERRUPTED:
            return ExitCode.INTERRUPTED
        raise InterruptedRunError("interrupted")

    def kill(self) -> None:
        """End whoever is left."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for said in self._said:
            said.close()

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            self._wait_for(process, end - time.monotonic())

    @staticmethod
    def _wait_for(process: subprocess.Popen[bytes], seconds: float) -> int | None:
        try:
            return process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def _error(self, rank: int) -> RankError:
        code = self._processes[rank].poll() or 0
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        said = self._said[rank]
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()[-_LINES:]
        return RankError(
            f"rank {rank} of {len(self._processes)} {how}; nothing was proved",
            hint="SIGKILL often means that memory ran out" if code == -signal.SIGKILL else None,
            details=[f"rank {rank}: {line}" for line in lines if line.strip()],
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the ranks as ^C does. A signal that is ignored stays so."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
