"""How the ranks of one run find each other: which of them this process is, and the store between them.

torchrun and srun say it by environment variables. Without the address of rank 0, rank 0 opens a port and leaves its
address in a file beside the output, which all ranks can see. PyTorch is imported only where there are several.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from mla_convert import storage
from mla_convert.errors import UsageError
from mla_convert.many_ranks import COMING, ElsewhereError, LostRankError, ManyRanks, Store, described
from mla_convert.ranks import Ranks

#: Environment variable: seconds without a sign of life after which a rank is lost.
PATIENCE = "MLA_CONVERT_RANK_TIMEOUT"
_PATIENCE_SECONDS = 60.0


def place_in_run(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and number of ranks that torchrun or srun gave this process; None where it is alone.

    The script of a batch job, outside of srun, has SLURM's variables too, but is no step with several tasks.
    """
    pairs = [("RANK", "WORLD_SIZE")]
    if not environment.get("SLURM_JOB_ID") or environment.get("SLURM_STEP_ID"):
        pairs += [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS")]
    for rank, count in pairs:
        texts = environment.get(rank), environment.get(count)
        if None in texts:
            continue
        if not all(text and text.isdigit() for text in texts) or int(texts[0] or 0) >= int(texts[1] or 0):
            raise UsageError(f"{rank} is {texts[0]!r} and {count} is {texts[1]!r}: no rank of a run")
        return (int(texts[0] or 0), int(texts[1] or 0)) if int(texts[1] or 0) > 1 else None
    return None


@contextmanager
def all_ranks(target: Path, *, command: str | None) -> Iterator[Ranks]:
    """The ranks of this run, met and, at the end, taken leave of.

    Args:
        target: The output; ranks that were given no address meet through a file beside it.
        command: What to type to go on after an interruption, for messages.

    Raises:
        LostRankError: A rank did not come, or is gone.
        ElsewhereError: On every rank but 0: the run failed on another.
    """
    place = place_in_run()
    if place is None:
        yield Ranks()
        return
    number, count = place
    patience = _patience()
    store, meeting = _store(number, count, target, patience)
    with ManyRanks(number, count, store, patience, command) as ranks:
        if meeting:
            meeting.unlink(missing_ok=True)
        yield ranks


@contextmanager
def one_report() -> Iterator[None]:
    """Leave it to rank 0 to say what went wrong: on others, an error becomes ElsewhereError, unless rank 0 is lost."""
    try:
        yield
    except (LostRankError, ElsewhereError):
        raise
    except BaseException as error:
        if is_leading():
            raise
        raise ElsewhereError(described(error, 0)["exit_code"]) from error


def is_leading() -> bool:
    """True unless this process is another rank than 0: those print nothing of what all ranks have to say."""
    place = place_in_run()
    return place is None or place[0] == 0


def _patience() -> float:
    text = os.environ.get(PATIENCE, "")
    try:
        found = float(text) if text else _PATIENCE_SECONDS
    except ValueError:
        found = 0.0
    if not 0.5 <= found <= 86400:
        raise UsageError(f"{PATIENCE} is {text!r}: expected seconds, from 0.5 to 86400")
    return found


def _store(number: int, count: int, target: Path, patience: float) -> tuple[Store, Path | None]:
    """The store of this run, and of this attempt of torchrun to run it; and a file to remove once all have met."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is ours to report, in one line
    dist: Any = importlib.import_module("torch.distributed")

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    limit = timedelta(seconds=COMING * patience)
    meeting = None
    try:
        if address is None:
            step = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
            path = target.parent / f".{target.name}.mla-convert-ranks-{step}"
            store: Any = _meet(number, count, path, limit)
            meeting = path if number == 0 else None
        elif not port.isdigit():
            raise UsageError(f"MASTER_ADDR is set, but MASTER_PORT is {port!r}", hint="set both, or neither")
        else:
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
            leads = number == 0 and not hosted
            store = dist.TCPStore(address, int(port), count, leads, limit, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=patience))
    except RuntimeError as error:
        where = f"{address}:{port}" if address else "rank 0"
        raise LostRankError(
            f"rank {number} of {count} does not reach {where}: {str(error).splitlines()[0]}",
            hint="MASTER_ADDR and MASTER_PORT name a host that every rank reaches, and a free port there",
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"mla-convert/{attempt}", store), meeting


def _meet(number: int, count: int, path: Path, limit: timedelta) -> Any:
    """Without an address, rank 0 opens a port and leaves its address in a file beside the output."""
    dist: Any = importlib.import_module("torch.distributed")

    if number == 0:
        store = dist.TCPStore("localhost", 0, count, True, limit, wait_for_workers=False)
        with storage.os_errors(path.parent, "make"):
            path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_file_atomic(path, json.dumps([_reachable_name(), store.port]).encode())
        return store
    end = time.monotonic() + limit.total_seconds()
    while time.monotonic() < end:
        try:
            host, port = json.loads(path.read_bytes())
            return dist.TCPStore(host, port, count, False, timedelta(seconds=5), wait_for_workers=False)
        except (OSError, ValueError, RuntimeError):  # not there yet, or left by a step that was killed
            time.sleep(0.1)
    raise LostRankError(
        f"rank {number} of {count}: rank 0 did not leave its address in {path} within {limit.total_seconds():g} s",
        hint="the output has to lie on a file system that all ranks share; or set MASTER_ADDR and MASTER_PORT",
    )


def _reachable_name() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"
    return name
