"""Several processes share one plan: the same bytes as from one, one report, and where each finds its place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conversions import contents, environment, leftovers, run, write_checkpoint
from fleets import codes, killed_at, silent, srun, together, torchrun, words

from mla_convert import api, many_ranks, meeting
from mla_convert.errors import UsageError
from mla_convert.meeting import place_in_run
from mla_convert.ranks import deal

# The same bytes, one report


@pytest.mark.parametrize("launcher", [torchrun, srun])
def test_the_same_as_one_process(
    launcher: Callable[[int], list[dict[str, str]]],
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
) -> None:
    ended = together(words(source, "--json"), launcher(4))
    assert codes(ended) == [0, 0, 0, 0]
    assert silent(ended[1:])
    document = json.loads(ended[0].out)
    sizes = sum(len(data) for name, data in expected.items() if name.endswith(".safetensors"))
    assert document["bytes"]["by_way"]["rewrite"] == sizes
    last = json.loads(ended[0].err.splitlines()[-1])
    assert (last["event"], last["complete"], last["done"]) == ("finish", True, document["bytes"]["total"])
    assert contents(tmp_path / "out") == expected
    assert leftovers(tmp_path) == []
    again = together(words(source), launcher(4))
    assert codes(again) == [0, 0, 0, 0]
    assert "already done" in again[0].out


def test_split_and_combine(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    api.split(model, tmp_path / "reference")
    done = together(("split", str(model), "-o", str(tmp_path / "out"), "--checksum"), 3)
    assert codes(done) == [0, 0, 0]
    ours, theirs = contents(tmp_path / "out"), contents(tmp_path / "reference")
    manifest = json.loads(ours.pop("mla-convert.json"))
    assert all(entry["sha256"] for entry in manifest["files"].values())
    assert manifest["tensor_sha256"] == json.loads(theirs.pop("mla-convert.json"))["tensor_sha256"]
    assert ours == theirs
    assert codes(together(("combine", str(tmp_path / "out"), "-o", str(tmp_path / "back")), 3)) == [0, 0, 0]
    back = contents(tmp_path / "back")
    del back["mla-convert.json"]
    assert back == contents(model)


def test_every_rank_has_a_share(source: Path, tmp_path: Path) -> None:
    """By bytes, so that all end at the same time; the journals say who made what."""
    done = together(words(source), patches={0: killed_at("finalised", 1)})
    assert codes(done) == [-signal.SIGKILL, 130, 130, 130]
    root = tmp_path / ".out.mla-convert-partial"
    made: list[list[str]] = []
    for name in ("journal", "journal.1", "journal.2", "journal.3"):
        lines = [json.loads(line.partition(" ")[2]) for line in (root / name).read_text().splitlines()]
        made.append([line["file"] for line in lines if "file" in line])
    assert len({file for files in made for file in files}) == sum(map(len, made)) == 25
    loads = [sum((root / "files" / name).stat().st_size for name in files) for files in made]
    assert max(loads) < 1.2 * min(loads)


@pytest.mark.parametrize(
    ("sizes", "load", "loads"),
    [
        ([7, 1, 5, 3, 2, 2], [], [10, 10]),
        ([5, 4, 3], [9], [12, 9]),
        ([1], [], [1, 0]),
        ([], [], [0, 0]),
        ([0, 0, 0], [], [0, 0]),
    ],
)
def test_dealing(sizes: list[int], load: list[int], loads: list[int]) -> None:
    hands = deal(sizes, 2, load)
    assert sorted(index for hand in hands for index in hand) == list(range(len(sizes)))
    before = [*load, *[0] * (2 - len(load))]
    found = [extra + sum(sizes[i] for i in hand) for hand, extra in zip(hands, before, strict=True)]
    assert found == loads


# Where a process finds its place


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1"}, None),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, None),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, (0, 4)),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "4",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_JOB_ID": "1",
            },
            None,
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 2)),
    ],
)
def test_places(variables: dict[str, str], place: tuple[int, int] | None) -> None:
    assert place_in_run(variables) == place


@pytest.mark.parametrize("variables", [{"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "-1", "WORLD_SIZE": "2"},
    {"RANK": "x", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "9", "SLURM_NTASKS": "4"}])  # fmt: skip
def test_no_places(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="no rank of a run"):
        place_in_run(variables)


def test_settings_that_cannot_be(source: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run(*words(source), env=variables)
    assert (done.returncode, "MASTER_PORT is ''" in done.stderr) == (2, True)
    done = run(*words(source), env={**variables, "MASTER_PORT": "1", meeting.PATIENCE: "soon"})
    assert (done.returncode, f"{meeting.PATIENCE} is 'soon'" in done.stderr) == (2, True)


def test_the_library_takes_part_only_if_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training script's rank 1 may split a checkpoint of its own."""
    for name, value in torchrun(4)[1].items():
        monkeypatch.setenv(name, value)
    model = write_checkpoint(tmp_path / "model")
    assert api.split(model, tmp_path / "out").report is not None
    assert contents(tmp_path / "out")


# The real launcher, and the store


def test_torchrun(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launcher, "-m", "mla_convert", *words(source, "--json")],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"]["rewritten"] == 24
    assert contents(tmp_path / "out") == expected


def test_values_larger_than_the_store_takes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    value = {"name": "x" * 9_000_000, "empty": [], "ü": None}
    found: list[Any] = []

    def other() -> None:
        second = dist.TCPStore("127.0.0.1", store.port, 2, is_master=False)
        with many_ranks.ManyRanks(1, 2, second, 20, None) as member:
            member.gather(value)
            found.append(member.tell())

    thread = threading.Thread(target=other)
    thread.start()
    with many_ranks.ManyRanks(0, 2, store, 20, None) as leader:
        assert leader.gather(1) == [1, value]
        leader.tell(value)
    thread.join()
    assert found == [value]


def test_only_rank_0_downloads(tmp_path: Path) -> None:
    from fake_hub import running_hub

    model = write_checkpoint(tmp_path / "name")
    api.split(model, tmp_path / "reference")
    with running_hub(tmp_path / "hub") as hub:
        hub.add_repository("org/name", contents(model))
        here = tmp_path / "here"
        here.mkdir()
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "mla_convert", "split", "hf://org/name"],
                cwd=here,
                env=environment(**hub.environment(), **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for variables in torchrun(2)
        ]
        said = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        whole = [c for c in hub.called("GET", "/_content/") if c.headers.get("Range") is None]
        assert len({call.path for call in whole}) == len(whole) >= 5
    ours, theirs = contents(here / "name-split"), contents(tmp_path / "reference")
    del ours["mla-convert.json"], theirs["mla-convert.json"]
    ours.pop(".gitattributes")
    assert ours == theirs
