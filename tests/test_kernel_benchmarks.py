"""``python -m benchmarks.kernels`` without a GPU: its options, its rows, and what it writes of what was measured."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # the benchmarks are not installed

from benchmarks.kernels import __main__ as command  # noqa: E402
from benchmarks.kernels.common import (  # noqa: E402
    Baseline,
    Case,
    Ceilings,
    Goal,
    Measurement,
    Row,
    cosine_error,
    in_graph,
    medians_ms,
    rested_ms,
    table,
)

LIMITS = Ceilings(copy_terabytes=4.0, product_tflops=800.0)
# 400 TFLOP/s and 2 TB/s: half of both ceilings. On a rested card 500 TFLOP/s.
FOUND = Measurement(
    2.0,
    {"out": 2e-6},
    flop=8e11,
    bytes_read=4e9,
    baselines={"FlashMLA": Baseline(1.9, 1e-6, rested_ms=1.5), "torch": Baseline(20.0)},
    rested_ms=1.6,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_help_needs_no_gpu_and_no_tilelang() -> None:
    blocked = "import sys; sys.modules['tilelang'] = None; import runpy; sys.argv[1:] = ['--help'];"
    blocked += "runpy.run_module('benchmarks.kernels', run_name='__main__')"
    found = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for option in ("--only", "--rows", "--list", "--flashmla", "--results", "--json"):
        assert option in found.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    found = run("--only", "sparse")
    assert (found.returncode, found.stdout) == (4, "")
    assert found.stderr == "benchmarks.kernels: no CUDA device\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "sparse,forward"],
            "no part 'forward'; there are sparse, selection, backward, decode, dense",
        ),
        (["--rows", "("], "'(' is not a regular expression"),
        (["--rows", "heads of lettuce"], "'heads of lettuce' is in no name"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert command.main([*arguments, "--list"]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_row_has_a_name_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    names = [line.partition(": ")[2] for line in listed(capsys)]
    assert len(set(names)) == len(names) > 80
    assert not any("|" in name for name in names)


@pytest.mark.parametrize(
    "name",
    [
        *(f"sparse: sparse forward, {heads} heads" for heads in (8, 16, 20, 32, 40, 64, 96, 128)),
        *(f"sparse: sparse forward, 128 heads, {case}" for case in ("top-k 512", "top-k 1024", "512 queries")),
        "sparse: sparse forward, 128 heads, 32768 queries",
        "sparse: sparse forward, 64 heads, causal lists",
        "sparse: sparse forward, 16 heads, 64 queries",
        *(f"backward: sparse backward, {heads} heads" for heads in (16, 64, 128)),
        *(f"backward: sparse backward, {heads} heads, deterministic" for heads in (16, 64, 128)),
        *(f"selection: indexer logits, {kind}, 32768 x 32768 causal" for kind in ("bf16", "fp8")),
        *(f"selection: top-k, 4096 x {keys}" for keys in (32768, 131072)),
        *(f"decode: decode, {rows}128 x 8192, {heads} heads" for rows in ("", "FP8 rows, ") for heads in (16, 128)),
        "dense: dense forward, 8192 causal, 128 heads",
    ],
)  # fmt: skip
def test_rows_that_the_table_must_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in listed(capsys)


def test_parts_and_patterns_choose_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--only", "dense,sparse", "--rows", "^(sparse|dense) forward.* (16|64) heads$")
    assert found == [
        "sparse: sparse forward, 64 heads",
        "sparse: sparse forward, 16 heads",
        "dense: dense forward, 8192 causal, 64 heads",
        "dense: dense forward, 8192 causal, 16 heads",
    ]


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal(0.95, "x FlashMLA"), True),
        (Goal(0.96, "x FlashMLA"), False),
        (Goal(10, "x torch"), True),
        (Goal(10.1, "x torch"), False),
        (Goal(400, "TFLOP/s"), True),
        (Goal(401, "TFLOP/s"), False),
        (Goal(0.5, "of copy"), True),
        (Goal(0.51, "of copy"), False),
    ],
    ids=str,
)
def test_goals(goal: Goal, met: bool) -> None:
    assert goal.met(FOUND, LIMITS) is met


@pytest.mark.parametrize("unit", ["x FlashMLA", "x torch", "TFLOP/s", "of copy"])
def test_a_goal_without_its_measurement_is_neither_met_nor_missed(unit: str) -> None:
    assert Goal(0, unit).met(Measurement(1.0, {"out": 0.0}), LIMITS) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [1.1e-4, float("nan")])
def test_a_wrong_result_meets_no_goal(error: float) -> None:
    found = Measurement(1.0, {"dq": 0.0, "dkv": error}, flop=1e15)
    assert Goal(400, "TFLOP/s").met(found, LIMITS) is False


def test_errors_see_a_wrong_length() -> None:
    right = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    assert cosine_error(right, right.double()) < 1e-12
    assert cosine_error(2 * right, right.double()) == pytest.approx(0.2)


def fails() -> Measurement:
    raise RuntimeError("out of shared memory\nat line 5")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command where two rows of the dense part exist, one of which fails."""
    cases = [Case("good", lambda: FOUND, (Goal(300, "TFLOP/s"), Goal(500, "TFLOP/s"))), Case("bad", fails)]
    monkeypatch.setattr(command.dense, "cases", lambda: iter(cases))
    monkeypatch.setattr(command, "ceilings", lambda: LIMITS)
    monkeypatch.setattr("mla_convert.runtime.dispatch.available", lambda device: (True, ""))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    return lambda *arguments: command.main(["--only", "dense", *arguments])


def test_table_and_files(
    measured: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, lines = tmp_path / "table.md", tmp_path / "rows.jsonl"
    assert measured("--results", str(results), "--json", str(lines)) == 1
    printed = capsys.readouterr()
    assert (
        "| good | 2.000 | 400 (50%) | 2.00 (50%) | 1.900 (0.95) | 20.000 (10.00) | 1.600 (1.500, 0.94) | out 2.0e-06"
        " | 1.0e-06 |  | 300 TFLOP/s: met; 500 TFLOP/s: missed (rested: met) |\n"
    ) in printed.out
    assert "Not measured:\n\n- bad: RuntimeError: out of shared memory\n" in printed.out
    assert "copy 4.00 TB/s, read plus written; bf16 8192³ product 800 TFLOP/s" in printed.out
    assert "bad: RuntimeError: out of shared memory" in printed.err
    assert results.read_text() == f"# Kernels\n\n{printed.out}"
    assert str(tmp_path) not in printed.out
    card, good, bad = map(json.loads, lines.read_text().splitlines())
    assert card["device"] == "a card"
    assert (card["copy_terabytes"], card["product_tflops"]) == (4.0, 800.0)
    assert good == {
        "part": "dense",
        "name": "good",
        "ms": 2.0,
        "tflops": 400.0,
        "of_product": 0.5,
        "terabytes_per_second": 2.0,
        "of_copy": 0.5,
        "errors": {"out": 2e-6},
        "baselines": {
            "FlashMLA": {"ms": 1.9, "error": 1e-6, "rested_ms": 1.5, "times": 0.95},
            "torch": {"ms": 20.0, "error": None, "rested_ms": None, "times": 10.0},
        },
        "rested_ms": 1.6,
        "goals": [
            {"goal": "300 TFLOP/s", "met": True, "met_rested": True},
            {"goal": "500 TFLOP/s", "met": False, "met_rested": True},
        ],
    }
    assert bad == {"part": "dense", "name": "bad", "failure": "RuntimeError: out of shared memory"}


@pytest.mark.parametrize("option", ["--flashmla", "--results", "--json"])
def test_files_that_cannot_be_are_said_before_anything_is_measured(
    option: str,
    measured: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "ceilings", lambda: pytest.fail("measured"))
    assert measured(option, "/nowhere/file") == 2
    assert "/nowhere/file" in capsys.readouterr().err


def test_an_interrupted_run_prints_the_rows_until_then(
    measured: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> Measurement:
        raise KeyboardInterrupt

    cases = [Case("good", lambda: FOUND), Case("slow", interrupt), Case("never", fails)]
    monkeypatch.setattr(command.dense, "cases", lambda: iter(cases))
    assert measured() == 130
    printed = capsys.readouterr()
    assert "| good | 2.000 |" in printed.out
    assert "slow" not in printed.out and "never" not in printed.out
    assert printed.err.endswith("benchmarks.kernels: interrupted after 1 of 3 rows\n")


def test_a_result_with_nan_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    row = command.measure("dense", Case("lost", lambda: Measurement(1.0, {"out": float("nan")})))
    assert (row.found, row.failure) == (None, "ArithmeticError: the result has NaN")
    assert capsys.readouterr().err == "lost: ArithmeticError: the result has NaN\n"


def test_all_rows_measured_is_success(
    measured: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured("--rows", "good") == 0
    assert "Not measured" not in capsys.readouterr().out


def test_rows_of_a_table_have_a_cell_a_column() -> None:
    bare = Row("dense", Case("bare", fails), Measurement(1.0, {"dq": 1e-6, "dkv": 2e-6}))
    full = Row("dense", Case("full", fails, (Goal(1, "x torch"),)), FOUND)
    counts = {line.count("|") for line in table([bare, full], LIMITS).splitlines()}
    assert len(counts) == 1


class Card:
    """Events and calls on a card where a call takes twice its time in the first 15 ms after another or a pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.load, self.last = 0.0, 0.0, 0.0
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = card.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr("benchmarks.kernels.common.time.sleep", lambda seconds: self.rest())

    def rest(self) -> None:
        self.load = 0.0

    def call(self, ms: float) -> None:
        if ms != self.last:
            self.rest()
        self.now += 2 * ms if self.load < 15 else ms
        self.load, self.last = self.load + ms, ms


def test_times_under_load_and_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    calls = [partial(card.call, ms) for ms in (1.0, 7.0, 30.0)]
    assert medians_ms(calls) == pytest.approx([1.0, 7.0, 30.0])
    assert rested_ms(calls) == pytest.approx([2.0, 14.0, 60.0])


def test_a_captured_call_keeps_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that was made before the capture is read in every replay."""

    class Graph:
        def replay(self) -> None: ...

    class Schedule: ...

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    schedule = Schedule()
    alive = weakref.ref(schedule)
    replay = in_graph(partial(id, schedule))
    del schedule
    gc.collect()
    replay()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None
