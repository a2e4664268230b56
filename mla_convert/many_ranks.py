"""Several processes that carry out one run: how they keep in step.

They talk through torch.distributed's key-value store alone. A collective cannot be given up while it waits, and ranks
here wait for hours, for as long as the largest file takes; with the store every wait looks meanwhile whether the
others are alive, so that a rank that is gone ends the run, by name, instead of holding it up. Values are JSON.

Every rank gives signs of life to the store; rank 0 watches all of them, and they watch rank 0. A rank that fails leaves
its reason there, and rank 0 reports it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from mla_convert import errors
from mla_convert.errors import (
    ExitCode,
    InterruptedRunError,
    MlaConvertError,
)
from mla_convert.progress import Progress, SilentProgress
from mla_convert.ranks import Ranks

#: How many times longer than for a sign of life ranks wait for each other to come in the first place.
COMING = 5
#: Seconds without a sign of life after which a run that ends anyway waits for a rank no longer.
_SILENCE = 5.0
#: What the store takes as one value; its limit is 8 MiB.
_PART = 4 << 20


class Store(Protocol):
    """What is used of a torch.distributed store. Everything raises RuntimeError once its host is gone."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class LostRankError(InterruptedRunError):
    """A rank is gone; what the run has finished is kept."""


class ElsewhereError(MlaConvertError):
    """The run failed, and rank 0 says why: this rank has nothing to add but the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank reports what happened")
        self.exit_code = ExitCode(exit_code)


class _Counter(SilentProgress):
    """Counts what another rank's progress shows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = 0

    def advance(self, n: int) -> None:
        with self._lock:
            self.done += n


class ManyRanks(Ranks):
    """Several processes, and the store between them."""

    def __init__(self, number: int, count: int, store: Store, patience: float, command: str | None) -> None:
        self.number, self.count = number, count
        self._store, self._patience, self._command = store, patience, command
        self._turn = 0
        self._counter = _Counter()
        self._progress: Progress | None = None
        self._seen = [0] * count
        self._counts_all = False
        self._crediting = threading.Lock()
        self._names = ["?"] * count
        self._lost: set[int] = set()
        self._heard: dict[int, float] = {}
        self._verdict: MlaConvertError | None = None
        self._told = False
        self._stop: threading.Event | None = None
        self._check: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    # Coming and going

    def __enter__(self) -> ManyRanks:
        self._store.set(f"name/{self.number}", f"process {os.getpid()} on {socket.gethostname()}")
        self._store.set(f"beat/{self.number}", "0 0")
        self._beating.start()
        try:
            self._wait_for_all()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _wait_for_all(self) -> None:
        limit, wanted = time.monotonic() + COMING * self._patience, range(self.count if self.leads else 1)
        with self._losing_rank_0():
            while missing := [rank for rank in wanted if not self._store.check([f"beat/{rank}"])]:
                self.check()
                if time.monotonic() > limit:
                    self._lost |= set(missing)
                    raise LostRankError(
                        f"rank {', '.join(map(str, missing))} of {self.count} did not come within "
                        f"{COMING * self._patience:g} s",
                        hint="start as many processes as WORLD_SIZE (or the job step) says, and let them reach rank 0",
                    )
                time.sleep(0.05)
            for rank in wanted:
                self._names[rank] = self._store.get(f"name/{rank}").decode()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.settle(error)
            if not self.leads:
                with suppress(RuntimeError):
                    self._store.set(f"bye/{self.number}", "")
            elif error is None:
                self._wait_for_byes()
        finally:
            self._ended.set()
            self._beating.join(self._patience)

    def settle(self, error: BaseException) -> None:
        if not self._told and self._verdict is None:
            self._told = True
            with suppress(RuntimeError):
                self._spread(error, self.number)
        if self.leads:
            self._wait_for_byes()

    def _wait_for_byes(self) -> None:
        """The store goes with this process, so it stays until the others need it no more, or are silent.

        torchrun leaves a process 30 s to end when another one died.
        """
        limit, silence = time.monotonic() + self._patience, min(_SILENCE, self._patience)
        while (now := time.monotonic()) < limit:
            left = [rank for rank in range(1, self.count) if rank not in self._lost]
            left = [rank for rank in left if now - self._heard.get(rank, now) <= silence]
            with suppress(RuntimeError):
                if all(self._store.check([f"bye/{rank}"]) for rank in left):
                    return
            time.sleep(0.02)

    # Talking

    def gather(self, value: Any) -> list[Any]:
        key = self._next("gather")
        self._put(f"{key}/{self.number}", value)
        return [self._await(f"{key}/{rank}") for rank in range(self.count)] if self.leads else []

    def tell(self, value: Any = None) -> Any:
        key = self._next("tell")
        if not self.leads:
            return self._await(key)
        self._put(key, value)
        return value

    def _next(self, verb: str) -> str:
        self._turn += 1
        return f"{verb}/{self._turn}"

    def _put(self, key: str, value: Any) -> None:
        data = json.dumps(value)
        parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
        with self._losing_rank_0():
            for number, part in enumerate(parts):
                self._store.set(f"{key}/{number}", part)
            self._store.set(f"{key}/parts", str(len(parts)))

    def _await(self, key: str) -> Any:
        pause = 0.001
        while True:
            self.check()
            if self._check:
                self._check()
            with self._losing_rank_0():
                if self._store.check([f"{key}/parts"]):
                    count = int(self._store.get(f"{key}/parts"))
                    parts = [self._store.get(f"{key}/{part}") for part in range(count)]
                    return json.loads(b"".join(parts))
            time.sleep(pause)
            pause = min(0.1, 2 * pause)

    @contextmanager
    def _losing_rank_0(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # what the store raises when its host is gone
            if self._verdict is None:
                self._decide(self._lost_rank(0, "the connection to it broke"))
            self.check()
            raise

    # Progress

    def counting(self, progress: Progress) -> Progress:
        if not self.leads:
            return self._counter
        self._progress = progress
        return progress

    def count_all(self, totals: Sequence[int] | None = None) -> None:
        self._counts_all = True
        for rank, total in enumerate(totals or ()):
            self._credit(rank, total)

    @property
    def counted(self) -> int:
        return self._counter.done

    def _credit(self, rank: int, total: int) -> None:
        if rank == 0 or not self._counts_all or self._progress is None:
            return
        with self._crediting:
            more, self._seen[rank] = max(0, total - self._seen[rank]), max(total, self._seen[rank])
        if more:
            self._progress.advance(more)

    # Signs of life

    def attach(self, stop: threading.Event, check: Callable[[], None]) -> None:
        self._stop, self._check = stop, check
        if self._verdict is not None:
            stop.set()

    def check(self) -> None:
        if self._verdict is not None:
            raise self._verdict

    def _beat(self) -> None:
        watched = range(1, self.count) if self.leads else range(1)
        last = {rank: (b"", time.monotonic()) for rank in watched}
        number = 0
        while not self._ended.wait(min(1.0, self._patience / 10)):
            number += 1
            try:
                self._store.set(f"beat/{self.number}", f"{number} {self._counter.done}")
                for rank in watched:
                    self._look(rank, last)
                if self._verdict is None and self._store.check(["stop"]):
                    self._decide(self._reported(json.loads(self._store.get("stop"))))
            except Exception as error:  # as long as this thread can, it must not leave the others waiting
                is_broken = isinstance(error, RuntimeError)
                why = (
                    "the connection to it broke" if is_broken else f"it does not make itself clear: {error!r}"
                )
                if self._verdict is None and not self._ended.is_set():
                    self._decide(self._lost_rank(0, why))
                return

    def _look(self, rank: int, last: dict[int, tuple[bytes, float]]) -> None:
        if not self._store.check([f"beat/{rank}"]):  # it is still to come
            last[rank] = (b"", time.monotonic())
            return
        found, now = self._store.get(f"beat/{rank}"), time.monotonic()
        if found != last[rank][0]:
            last[rank] = (found, now)
            self._heard[rank] = now
            self._credit(rank, int(found.split()[1]))
            return
        if now - last[rank][1] <= self._patience or rank in self._lost or self._store.check([f"bye/{rank}"]):
            return
        self._lost.add(rank)
        if self._verdict is None:
            error = self._lost_rank(rank, f"it gave no sign of life for {self._patience:g} s")
            self._spread(error, rank)
            self._decide(error)

    def _spread(self, error: BaseException, rank: int) -> None:
        """Let every rank know what ended the run; what comes first counts."""
        if self._store.add("stopping", 1) == 1:
            self._store.set("stop", json.dumps(described(error, rank)))

    def _lost_rank(self, rank: int, why: str) -> LostRankError:
        command = f": {self._command}" if self._command else ""
        return LostRankError(
            f"rank {rank} of {self.count} ({self._names[rank]}) is lost: {why}",
            hint=f"what is finished is kept; the same command resumes, with any number of ranks{command}",
        )

    def _decide(self, error: MlaConvertError) -> None:
        self._verdict = error
        if self._stop:
            self._stop.set()

    def _reported(self, stop: Mapping[str, Any]) -> MlaConvertError:
        if not self.leads:
            return ElsewhereError(stop["exit_code"])
        if stop["error"] == LostRankError.__name__:
            return self._lost_rank(stop["rank"], "another rank lost it")
        kinds: list[type[MlaConvertError]] = [
            kind
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, MlaConvertError)
        ]
        alike = [kind for kind in kinds if kind.exit_code == stop["exit_code"]]
        kind: type[MlaConvertError] = next(
            (kind for kind in kinds if kind.__name__ == stop["error"]), (*alike, MlaConvertError)[0]
        )
        return kind(f"rank {stop['rank']}: {stop['message']}", hint=stop["hint"], details=stop["details"])


def described(error: BaseException, rank: int) -> dict[str, Any]:
    if isinstance(error, MlaConvertError):
        facts = (int(error.exit_code), error.message, error.hint, list(error.details))
    elif isinstance(error, KeyboardInterrupt):
        facts = (int(ExitCode.INTERRUPTED), "interrupted", None, [])
    else:
        facts = (int(ExitCode.UNEXPECTED), f"unexpected {type(error).__name__}: {error}", None, [])
    names = ("exit_code", "message", "hint", "details")
    return {"rank": rank, "error": type(error).__name__, **dict(zip(names, facts, strict=True))}
