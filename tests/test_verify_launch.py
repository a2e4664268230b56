"""``verify`` on real ranks: what they find equals the folded run, and whatever goes wrong ends all of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import command, environment, fails, run_process
from ranks import run_ranks
from test_verify import ATTENTION, edit_tensors, swap_two_heads

from mla_convert import api
from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.errors import CannotError, MlaConvertError, UsageError
from mla_convert.formats.huggingface import MANIFEST_NAME, open_checkpoint
from mla_convert.geometry import find_blocks
from mla_convert.launch import RENDEZVOUS, own_rank
from mla_convert.verify import VerifyOptions, verify

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FLOAT64 = ("--dtype", "float64", "--layers", "0,1", "--seq", "96", "--no-record", "--device", "cpu")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo checkpoint and its split."""
    original = tmp_path_factory.mktemp("launch") / "demo"
    write_demo_checkpoint(original)
    return original, api.split(original).output


def test_launched_ranks_find_what_folded_ranks_find(demo: tuple[Path, Path]) -> None:
    options = ("--tp", "2", "--cp", "2", "--backward", "--launch", *FLOAT64)
    done = run_process("verify", demo[1], *options, "--json", env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert all(json.loads(line)["event"] for line in done.stderr.splitlines())
    settings = document["settings"]
    assert (settings["tp"], settings["cp"], settings["processes"]) == (2, 2, 4)
    assert settings["process_group"] == "gloo"
    assert settings["devices"] == [f"rank {rank}: CPU" for rank in range(4)]

    asked = VerifyOptions(tp=2, cp=2, backward=True, dtype="float64", layers=(0, 1), tokens=96, record=False)
    folded = json.loads(json.dumps(verify(demo[1], demo[0], replace(asked, device="cpu")).document()))
    assert [check["name"] for check in document["checks"]] == [check["name"] for check in folded["checks"]]
    assert all(check["passed"] for check in document["checks"])
    assert document["ran"] == folded["ran"]
    for ours, theirs in zip(document["layers"], folded["layers"], strict=True):
        assert ours["passed"] and len(ours["gradients"]) == 9
        assert ours["standard"] == theirs["standard"] and ours["limit"] == theirs["limit"]
        assert ours["selection"] == theirs["selection"]
        for got, want in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert got["weight"] == want["weight"] and got["absorbed"]["relative"] < 1e-14
            assert got["absorbed"]["cosine"] == pytest.approx(want["absorbed"]["cosine"], abs=1e-14)
        assert ours["absorbed"]["relative"] < 1e-14
    control = next(check for check in document["checks"] if check["level"] == "control")
    assert control == next(check for check in folded["checks"] if check["level"] == "control")


def test_torchrun(demo: tuple[Path, Path]) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mla_convert"]
    done = subprocess.run(
        [sys.executable, *words, "verify", demo[1], "--tp", "2", *FLOAT64],
        env=environment(**ONE_THREAD, GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout and "gloo" in done.stdout
    assert done.stdout.count("✓ verified") == 1  # rank 0 alone reports


def test_a_difference_has_its_own_exit_code(demo: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "corrupted"
    shutil.copytree(demo[1], copy)
    (copy / MANIFEST_NAME).unlink()
    edit_tensors(copy, swap_two_heads, ATTENTION + "k_b_proj.weight")
    arguments = ("verify", copy, "--against", demo[0], "--launch", "--tp", "2", *FLOAT64, "-q")
    done = run_process(*arguments, env=ONE_THREAD)
    assert (done.returncode, done.stdout) == (10, "failed\n")
    assert "does not verify" in done.stderr
    assert "model.layers.0.self_attn: absorbed error" in done.stderr


def test_the_demo_model_is_made_once_for_all_ranks(tmp_path: Path) -> None:
    arguments = ("verify", "--launch", "--cp", "2", "--layers", "0", "--device", "cpu", "--json")
    done = run_process(*arguments, cwd=tmp_path, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"]["tokens"] == 128


# Errors


def test_one_error_however_many_ranks(demo: tuple[Path, Path]) -> None:
    arguments = ("verify", demo[1], "--launch", "--tp", "3", "--device", "cpu")
    said = fails(4, *arguments, real=True, env=ONE_THREAD)
    assert said.count("do not divide by 3") == 1


def test_ranks_that_cannot_be_are_not_started(
    demo: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr("mla_convert.launch.run_ranks", started)
    said = fails(4, "verify", demo[1], "--launch", "--tp", "3", "--device", "cpu")
    assert "8 heads" in said and "sizes that fit: 1, 2, 4, 8" in said


def test_requests_that_contradict_themselves(demo: tuple[Path, Path]) -> None:
    assert "--launch starts one process a rank" in fails(2, "verify", demo[1], "--launch")
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    said = fails(2, "verify", demo[1], "--tp", "2", "--device", "cpu", env=torchrun)
    assert "4 processes were started; --tp 2 with --cp 1 needs 2" in said
    assert "torchrun has started" in fails(2, "verify", demo[1], "--tp", "4", "--launch", env=torchrun)


def test_which_rank_a_process_is() -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert own_rank({"RANK": "1", "WORLD_SIZE": "2", **address}) == (1, 2)
    assert own_rank({"RANK": "0", "WORLD_SIZE": "3", RENDEZVOUS: "/somewhere"}) == (0, 3)
    for alone in (
        {},
        {"RANK": "0", "WORLD_SIZE": "1", **address},
        {"RANK": "0", "WORLD_SIZE": "2"},  # left over from something else: there is nowhere to meet
        {"WORLD_SIZE": "2", **address},
    ):
        assert own_rank(alone) is None
    with pytest.raises(UsageError, match="no rank of a run"):
        own_rank({"RANK": "2", "WORLD_SIZE": "2", **address})


# Deaths


def launched(demo: tuple[Path, Path], *arguments: str) -> subprocess.Popen[str]:
    words = command("verify", demo[1], "--launch", "--tp", "2", "--device", "cpu", "--no-record", *arguments)
    return subprocess.Popen(
        words, env=environment(**ONE_THREAD), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ranks_of(supervisor: int) -> dict[int, int]:
    """Rank -> process of the ranks that a supervisor has started and that still run."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if state[:2] == ["Z", str(supervisor)] or state[1] != str(supervisor):
            continue
        rank = next((v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None and any(v.startswith(RENDEZVOUS.encode()) for v in variables):
            found[int(rank)] = int(folder.name)
    return found


def wait_for_ranks(supervisor: subprocess.Popen[str]) -> dict[int, int]:
    until = time.monotonic() + 60
    while time.monotonic() < until and supervisor.poll() is None:
        if len(found := ranks_of(supervisor.pid)) == 2:
            return found
        time.sleep(0.01)
    raise AssertionError(f"no two ranks: {supervisor.communicate()}")


def wait_for_event(supervisor: subprocess.Popen[str], label: str) -> None:
    assert supervisor.stderr is not None
    for line in supervisor.stderr:
        if json.loads(line).get("label") == label:
            return
    raise AssertionError(f"{label} was never begun")


def ended(supervisor: subprocess.Popen[str], ranks: dict[int, int]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that must end soon, and leave nothing behind."""
    out, err = supervisor.communicate(timeout=60)
    until = time.monotonic() + 10
    while any(Path(f"/proc/{process}").exists() for process in ranks.values()):
        assert time.monotonic() < until, "a rank outlived the command"
        time.sleep(0.05)
    return supervisor.returncode, out, err


@pytest.mark.parametrize(
    ("when", "victim"), [("at once", 1), ("while attention runs", 0), ("while attention runs", 1)]
)
def test_a_rank_that_dies_ends_the_run(demo: tuple[Path, Path], when: str, victim: int) -> None:
    supervisor = launched(demo, "--seq", "1536", "--dtype", "float64", "--json")
    ranks = wait_for_ranks(supervisor)
    if when != "at once":
        wait_for_event(supervisor, "run attention")
    os.kill(ranks[victim], signal.SIGKILL)
    code, out, err = ended(supervisor, ranks)
    assert (code, out) == (1, "")
    error = json.loads(err.splitlines()[-1])
    assert error["event"] == "error" and error["exit_code"] == 1
    assert error["message"] == f"rank {victim} of 2 was killed by SIGKILL; nothing was proved"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(demo: tuple[Path, Path], number: signal.Signals) -> None:
    supervisor = launched(demo, "--seq", "1536", "--dtype", "float64", "--json")
    ranks = wait_for_ranks(supervisor)
    wait_for_event(supervisor, "run attention")
    supervisor.send_signal(number)
    code, out, err = ended(supervisor, ranks)
    assert (code, out) == (130, "")
    assert json.loads(err.splitlines()[-1])["message"] == "interrupted"


# What ranks tell each other


def rank_failures(folder: str, original: str) -> list[str]:
    """Errors of one rank as rank 0 sees them; the ranks can go on afterwards."""
    import torch.distributed as dist

    from mla_convert.runtime.dispatch import resolve_backend
    from mla_convert.verification.absorbed import Grid, RankPart
    from mla_convert.verification.cases import Draw, make_case
    from mla_convert.verification.processes import RealRanks
    from mla_convert.verification.weights import TensorReader, block_spec, load_block

    rank = dist.get_rank()
    cpu = torch.device("cpu")
    ranks = RealRanks(Grid(tp=2), rank, cpu, "gloo")
    attend, planted = RankPart.attend, [ValueError("a slip"), CannotError("no such thing", hint="none"), None]

    def sometimes(part: Any, kv: Any) -> None:
        error = planted.pop(0)
        if error is not None and rank == 1:
            raise error
        attend(part, kv)

    RankPart.attend = sometimes  # type: ignore[method-assign]
    if rank:
        ranks.serve()
        return [f"left: {len(planted)}"]
    catalogue = open_checkpoint(Path(folder))
    block = find_blocks(catalogue)[0]
    loaded = load_block(TensorReader(catalogue), block, block_spec(catalogue, block), cpu)
    case = make_case(loaded, Draw(16, 16, torch.float64, backward=True), cpu)
    said = []
    ranks.served_by(resolve_backend("reference", cpu), "reference", Path(folder), False).load(loaded)
    for _ in range(2):
        try:
            ranks.run(loaded, case, None)
        except MlaConvertError as error:
            said.append(f"{type(error).__name__} {error.exit_code} {error.message} {error.hint}")
    said.append(str(ranks.run(loaded, case, None).output_SD.shape))
    ranks.served_by(resolve_backend("reference", cpu), "reference", Path(folder) / "gone", False)
    try:
        ranks.load(loaded)
    except MlaConvertError as error:
        said.append(type(error).__name__)
    said.append(str(sorted(ranks.ran())))
    ranks.end()
    return said


def test_rank_0_reports_what_another_rank_could_not_do(demo: tuple[Path, Path]) -> None:
    leader, other = run_ranks("test_verify_launch", "rank_failures", 2, str(demo[1]), str(demo[0]))
    assert leader == [
        "RankError 1 rank 1: ValueError: a slip None",
        "CannotError 4 rank 1: no such thing none",
        "torch.Size([16, 512])",
        "UsageError",
        "['dense_mla: reference']",
    ]
    assert other == ["left: 0"]


def rank_hangs(folder: str) -> str:
    """What rank 0 says of a rank that takes longer than ranks wait for each other."""
    import torch.distributed as dist

    from mla_convert.runtime.dispatch import resolve_backend
    from mla_convert.verification import processes
    from mla_convert.verification.absorbed import Grid
    from mla_convert.verification.cases import Draw, make_case
    from mla_convert.verification.weights import TensorReader, block_spec, load_block

    processes.PATIENCE = timedelta(seconds=5)
    rank, cpu = dist.get_rank(), torch.device("cpu")
    dist.barrier()  # importing takes one rank longer than the other
    ranks = processes.RealRanks(Grid(tp=2), rank, cpu, "gloo")
    if rank:
        time.sleep(12)
        return ""
    catalogue = open_checkpoint(Path(folder))
    block = find_blocks(catalogue)[0]
    loaded = load_block(TensorReader(catalogue), block, block_spec(catalogue, block), cpu)
    ranks.served_by(resolve_backend("reference", cpu), "reference", Path(folder), False)
    try:
        ranks.run(loaded, make_case(loaded, Draw(16, 16, torch.float64), cpu), None)
    except MlaConvertError as error:
        assert ranks.lost
        ranks.end()  # tells nobody, and does not wait for anyone
        return f"{type(error).__name__}: {error.message}"
    return "waited"


def test_a_rank_that_hangs_is_not_waited_for(demo: tuple[Path, Path]) -> None:
    leader, _ = run_ranks("test_verify_launch", "rank_hangs", 2, str(demo[1]))
    assert leader.startswith("RankError: rank 0 lost the other ranks: ")
