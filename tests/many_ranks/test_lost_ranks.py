"""Ranks that die, hang or never come, and other runs beside: the rest end, and the next run resumes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conversions import contents, leftovers, run
from fleets import PATIENCE, Fleet, at_step, codes, killed_at, silent, srun, together, torchrun, words

from mla_convert import meeting, output_folder

# Lost ranks


@pytest.mark.parametrize("launcher", [torchrun, srun])
@pytest.mark.parametrize("next_run", [1, 4, 2])
def test_a_killed_rank(
    next_run: int,
    launcher: Callable[[int], list[dict[str, str]]],
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
) -> None:
    if launcher is srun and next_run != 4:
        pytest.skip("once is enough")
    fleet = Fleet(words(source), launcher(4), {2: killed_at("written", 3)})
    ended = fleet.wait()
    assert codes(ended) == [130, 130, -signal.SIGKILL, 130]
    assert silent(ended[1:])
    assert ended[0].out == ""
    assert f"error: rank 2 of 4 (process {fleet.pids[2]} on {socket.gethostname()}) is lost: " in ended[0].err
    assert f"it gave no sign of life for {PATIENCE:g} s\n" in ended[0].err
    assert "the same command resumes, with any number of ranks: mla-convert reshard " in ended[0].err
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == [".out.mla-convert-lock.2", ".out.mla-convert-partial"]
    ended = together(words(source, "--json"), next_run) if next_run > 1 else []
    done = json.loads(ended[0].out if ended else run(*words(source, "--json")).stdout)
    assert 15 <= done["resumed_files"] < 25
    assert contents(tmp_path / "out") == expected
    assert leftovers(tmp_path) == []


def test_rank_0_is_killed(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    ended = together(words(source), patches={0: killed_at("written", 2)})
    assert codes(ended) == [-signal.SIGKILL, 130, 130, 130]
    for one in ended[1:]:
        assert "error: rank 0 of 4 (process " in one.err
        assert one.out == ""
    assert run(*words(source)).returncode == 0
    assert contents(tmp_path / "out") == expected
    assert leftovers(tmp_path) == []


def test_a_rank_that_stands_still_is_lost_too(source: Path, tmp_path: Path) -> None:
    """A machine that hangs: nothing breaks, and nothing comes."""
    fleet = Fleet(
        words(source),
        torchrun(3),
        {1: at_step("written", 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))},
    )
    threading.Timer(4 * PATIENCE, os.kill, (fleet.pids[1], signal.SIGKILL)).start()
    started = time.monotonic()
    while not (tmp_path / ".out.mla-convert-partial").exists():
        assert time.monotonic() < started + 60
    ended = fleet.wait()
    assert codes(ended) == [130, -signal.SIGKILL, 130]
    assert "rank 1 of 3" in ended[0].err


def test_a_rank_that_never_comes(source: Path, tmp_path: Path) -> None:
    environments = [{**variables, meeting.PATIENCE: "2"} for variables in torchrun(4)[:3]]
    ended = together(words(source), environments)
    assert codes(ended) == [130, 130, 130]
    assert "error: rank 3 of 4 did not come within 10 s\n" in ended[0].err
    assert silent(ended[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_rank_0_never_comes(source: Path, tmp_path: Path) -> None:
    for launcher in (torchrun, srun):
        environments = [{**variables, meeting.PATIENCE: "0.5"} for variables in launcher(3)[1:]]
        for one in together(words(source), environments):
            assert one.code == 130
            assert "error: rank " in one.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# One run at a time


def test_no_second_run_while_a_rank_is_left(source: Path, tmp_path: Path) -> None:
    """Rank 0 died, and rank 5 of its run has not noticed yet: it may still be writing."""
    with output_folder.Lock(tmp_path / ".out.mla-convert-lock.5", subject=tmp_path / "out"):
        pids = f"process {os.getpid()} on {socket.gethostname()}"
        done = run(*words(source))
        assert done.returncode == 5
        assert f"out is being written by {pids}" in done.stderr
        ended = together(words(source), 3)
        assert codes(ended) == [5, 5, 5]
        assert f"out is being written by {pids}" in ended[0].err
        assert silent(ended[1:])
        ended = together(words(source), 6)
        assert codes(ended) == [5] * 6
        assert f"rank 5: {tmp_path / 'out'} is being written by {pids}" in ended[0].err
    assert run(*words(source)).returncode == 0


def test_a_single_run_keeps_ranks_out(source: Path, tmp_path: Path) -> None:
    with output_folder.Lock(tmp_path / ".out.mla-convert-lock", subject=tmp_path / "out"):
        ended = together(words(source), 2)
    assert codes(ended) == [5, 5]
    assert "is being written by process" in ended[0].err
