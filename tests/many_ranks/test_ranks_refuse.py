"""What one rank cannot do ends the run of all, and rank 0 says it once."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from conversions import contents, leftovers, run
from fleets import Fleet, at_step, codes, killed_at, silent, together, torchrun, words

from mla_convert import api, engine, meeting
from mla_convert.engine import RunOptions
from mla_convert.errors import LocalIOError
from mla_convert.sharding import ReshardOptions


def test_what_fails_on_one_rank_is_said_by_rank_0(source: Path, tmp_path: Path) -> None:
    def full() -> None:
        def fill(*_: Any, **__: Any) -> int:
            raise LocalIOError("the disk is full", hint="buy another")

        engine.fill = fill  # type: ignore[attr-defined]

    ended = together(words(source), patches={3: full})
    assert codes(ended) == [5, 5, 5, 5]
    assert "error: rank 3: the disk is full\nhint: buy another\n" in ended[0].err
    assert silent(ended[1:])
    assert run(*words(source)).returncode == 0


def test_an_unexpected_error_on_one_rank(source: Path) -> None:
    def broken() -> None:
        engine.fill = None  # type: ignore[attr-defined]

    ended = together(words(source), patches={1: broken})
    assert codes(ended) == [1, 1, 1, 1]
    assert "rank 1: unexpected TypeError: " in ended[0].err


def test_what_all_refuse_is_said_once(source: Path, tmp_path: Path) -> None:
    for more, code, message in (
        (("--tp", "3"), 4, "8 heads of model.layers.0.self_attn do not divide by 3"),
        (("-o", str(source / "inside")), 2, "lies inside the input"),
    ):
        ended = together((*words(source), *more), 3)
        assert codes(ended) == [code] * 3
        assert message in ended[0].err
        assert silent(ended[1:])
    ended = together((*words(source)[:1], str(tmp_path / "nowhere"), *words(source)[2:]), 2)
    assert codes(ended) == [2, 2]
    assert silent(ended[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_dry_run_is_said_once(source: Path, tmp_path: Path) -> None:
    ended = together(words(source, "--dry-run", "--json"), 2)
    assert codes(ended) == [0, 0]
    assert json.loads(ended[0].out)["dry_run"]
    assert silent(ended[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_ranks_that_would_do_different_things(source: Path, tmp_path: Path) -> None:
    def other() -> None:
        sys.argv[sys.argv.index("8")] = "4"

    ended = together(words(source), 3, {1: other})
    assert codes(ended) == [3, 3, 3]
    assert "error: rank 1 of 3 would do something else than rank 0\n" in ended[0].err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_replicas_are_checked_by_all_ranks(source: Path, tmp_path: Path) -> None:
    api.reshard(source, tmp_path / "two", ReshardOptions(2), run=RunOptions(workers=1))
    from checkpoints import Stored, load, write_file

    path = tmp_path / "two" / "rank1-of-2" / "model-00001-of-000003.safetensors"
    tensors = {
        name: stored
        for name, stored in load(path.parent).items()
        if name in path.read_bytes().decode("latin1")
    }
    names = [name for name in tensors if name.endswith("layernorm.weight")]
    assert len(names) > 2
    for name in names:
        old = tensors[name]
        tensors[name] = Stored(old.dtype, old.shape, bytes(len(old.data)))
    write_file(path, tensors, {"format": "pt"})
    command = ("reshard", str(tmp_path / "two"), "--tp", "1", "-o", str(tmp_path / "out"), "--json")
    ended = together(command, 3)
    assert codes(ended) == [3, 3, 3]
    error = json.loads(ended[0].err.splitlines()[-1])
    assert sorted(error["details"]) == sorted(f"{name}: rank 1 differs from rank 0" for name in names)
    assert leftovers(tmp_path) == []


def test_a_signal_to_one_rank_stops_all(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    ended = together(
        words(source),
        patches={1: at_step("recorded", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))},
    )
    assert codes(ended) == [130] * 4
    assert re.search(r"error: rank 1: stopped; \d+ of 25 files are finished and kept\n", ended[0].err)
    assert silent(ended[1:])
    ended = together(words(source, "--json"))
    assert json.loads(ended[0].out)["resumed_files"] >= 2
    assert contents(tmp_path / "out") == expected


def test_a_run_that_is_told_to_end_does_not_wait_for_the_dead(source: Path, tmp_path: Path) -> None:
    """As under torchrun: one rank dies, and all others get SIGTERM, half a minute before SIGKILL."""
    environments = [{**variables, meeting.PATIENCE: "60"} for variables in torchrun(3)]

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    patches = {0: at_step("recorded", 2, end), 1: at_step("recorded", 2, end), 2: killed_at("recorded", 1)}
    fleet = Fleet(words(source), environments, patches)
    ended = fleet.wait(limit=25)
    assert codes(ended) == [130, 130, -signal.SIGKILL]
    assert "files are finished and kept\n" in ended[0].err
    assert silent(ended[1:])
