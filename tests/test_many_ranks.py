"""Several processes share one plan: the same bytes as from one, whoever dies meanwhile, and one report."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import unflushed  # noqa: F401
from conversions import contents, environment, leftovers, memory_folder, run, write_checkpoint
from sharded_models import MODELS, write_model

from mla_convert import api, engine, many_ranks, meeting, output_folder
from mla_convert.cli import main
from mla_convert.engine import RunOptions
from mla_convert.errors import LocalIOError, UsageError
from mla_convert.meeting import place_in_run
from mla_convert.ranks import deal
from mla_convert.sharding import ReshardOptions

#: Seconds without a sign of life: ten times what a busy machine needs, and what each lost rank costs a test.
PATIENCE = 4.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", MODELS["deepseek_v3-fp8"])


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What one process makes."""
    api.reshard(source, tmp_path / "reference", ReshardOptions(8), run=RunOptions(workers=1))
    return contents(tmp_path / "reference")


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


# Errors


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
