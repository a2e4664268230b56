"""What every part needs: timing by CUDA events, the ceilings, a measured row, its goals, and the table.

Shapes are those of DeepSeek-V3.2: a token is 512 + 64 dims, and the indexer has 64 heads of 128 dims.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE
SCALE = WIDTH**-0.5
INDEXER_HEADS, INDEXER_DIM = 64, 128
TOPK = 2048
FORWARD_FLOP = 2 * (2 * RANK + ROPE)  # a pair of query and token, a head

ERROR_LIMIT = 1e-4  # what is further off is no baseline, and meets no goal


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a row is set beside. ``error`` is the largest of its errors; None where it does other work.

    ``rested_ms`` as in ``Measurement``; None where it was not measured.
    """

    ms: float
    error: float | None = None
    rested_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Rival:
    """A baseline that is still to be timed."""

    call: Callable[[], object]
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row's figures.

    ``ms`` is the time under load that lasts, ``rested_ms`` that of a call on a card that has had a pause. ``errors``
    are against float64, by what they are of: 1 - cosine, or for "keys" a share of the keys. ``flop`` and
    ``bytes_read`` are those the call cannot do without.
    """

    ms: float
    errors: dict[str, float]
    flop: float | None = None
    bytes_read: float | None = None
    baselines: dict[str, Baseline] = field(default_factory=dict)
    rested_ms: float | None = None

    @property
    def tflops(self) -> float | None:
        return None if self.flop is None else self.flop / self.ms / 1e9

    @property
    def terabytes(self) -> float | None:
        """TB/s."""
        return None if self.bytes_read is None else self.bytes_read / self.ms / 1e9

    def times(self, baseline: str) -> float | None:
        """How many times as fast as the baseline, if that was measured."""
        return self.baselines[baseline].ms / self.ms if baseline in self.baselines else None

    def rested(self) -> Measurement | None:
        """The same figures with the times of a rested card, and the baselines whose times those are known of."""
        if self.rested_ms is None:
            return None
        baselines = {
            name: replace(baseline, ms=baseline.rested_ms)
            for name, baseline in self.baselines.items()
            if baseline.rested_ms is not None
        }
        return replace(self, ms=self.rested_ms, baselines=baselines, rested_ms=None)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in the same run: a device-to-device copy (bytes read plus written) and a bf16 8192³ product."""

    copy_terabytes: float
    product_tflops: float


@dataclass(frozen=True, slots=True)
class Goal:
    """At least ``value`` times a baseline's speed, TFLOP/s or of the copy's bandwidth."""

    value: float
    unit: Literal["x FlashMLA", "x torch", "TFLOP/s", "of copy"]

    def __str__(self) -> str:
        return f"{self.value:.0%} of copy" if self.unit == "of copy" else f"{self.value:g} {self.unit}"

    def met(self, found: Measurement, limits: Ceilings) -> bool | None:
        """None where what it speaks of was not measured. A wrong result meets nothing."""
        value: float | None
        if self.unit == "TFLOP/s":
            value, least = found.tflops, self.value
        elif self.unit == "of copy":
            value, least = found.terabytes, self.value * limits.copy_terabytes
        else:
            value, least = found.times(self.unit.removeprefix("x ")), self.value
        if value is None:
            return None
        return value >= least and all(error <= ERROR_LIMIT for error in found.errors.values())


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table, and what measures it. Several goals are steps: the later ones are more."""

    name: str
    measure: Callable[[], Measurement]
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A case that was measured or, with the reason, could not be."""

    part: str
    case: Case
    found: Measurement | None = None
    failure: str | None = None


ROUNDS = 4
SETTLE_MS = 30
ROUND_MS = 40
SAMPLE_MS = 4
RESTED_SAMPLES = 5
REST_MS = 20
RESTED_MS = 2
WAIT_CYCLES = 2_000_000  # a millisecond


def measured(
    call: Callable[[], object],
    errors: dict[str, float],
    *,
    flop: float | None = None,
    bytes_read: float | None = None,
    beside: Mapping[str, Rival] | None = None,
) -> Measurement:
    """Times the call and those beside it."""
    beside = beside or {}
    ms, *others = medians_ms([call, *(rival.call for rival in beside.values())])
    rivals = [name for name in beside if name != "torch"]  # whose calls may take a hundred times as long
    rested, *rested_others = rested_ms([call, *(beside[name].call for name in rivals)])
    rested_by_name = dict(zip(rivals, rested_others, strict=True))
    baselines = {
        name: Baseline(other, rival.error, rested_by_name.get(name))
        for (name, rival), other in zip(beside.items(), others, strict=True)
    }
    return Measurement(ms, errors, flop, bytes_read, baselines, rested)


def medians_ms(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median time of each call by CUDA events.

    The calls take turns, forwards and backwards, since the card lowers its clock under load: in each of four rounds a
    call runs for 30 ms that do not count, in which the clock becomes the call's own, and for 40 ms that do. A sample
    is the mean of calls in a row, as many as make up 4 ms. The host does not wait between them, so that its work is
    part of the time only where it takes longer than the GPU's.
    """
    once = [_once_ms(call) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS):
        for at in range(len(calls)) if number % 2 == 0 else reversed(range(len(calls))):
            samples[at] += _turn_ms(calls[at], once[at])
    return [statistics.median(found) for found in samples]


def _once_ms(call: Callable[[], object]) -> float:
    """The time of a second call, by which to say how many make a sample."""
    call()
    return _sample_ms(call, 1)


def _turn_ms(call: Callable[[], object], once: float) -> list[float]:
    """The samples of one turn, each of calls in a row, at least one."""
    in_a_row = max(1, min(100, math.ceil(SAMPLE_MS / once)))
    events = [
        torch.cuda.Event(enable_timing=True) for _ in range(1 + max(1, int(ROUND_MS / (once * in_a_row))))
    ]
    for _ in range(math.ceil(SETTLE_MS / once)):
        call()
    events[0].record()
    for event in events[1:]:
        for _ in range(in_a_row):
            call()
        event.record()
    events[-1].synchronize()
    return [float(start.elapsed_time(end)) / in_a_row for start, end in pairwise(events)]


def rested_ms(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median time of each call on a card that rests for 20 ms before, so that no load before it lowers the clock.

    Five samples each, in turns, of calls in a row, as many as make up 2 ms. A short call is made once before they
    count, and the GPU waits for a millisecond before a long one, so that the host's work for the first is no part of
    the time.
    """
    once = [_once_ms(call) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(RESTED_SAMPLES):
        for call, expected, found in zip(calls, once, samples, strict=True):
            torch.cuda.synchronize()
            time.sleep(REST_MS / 1e3)
            in_a_row = max(1, math.ceil(RESTED_MS / expected))
            short = expected < RESTED_MS
            found.append(_sample_ms(call, in_a_row, after_another=short, waiting=not short))
    return [statistics.median(found) for found in samples]


def _sample_ms(
    call: Callable[[], object], in_a_row: int, *, after_another: bool = False, waiting: bool = False
) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if after_another:
        call()
    elif waiting:
        torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    for _ in range(in_a_row):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / in_a_row


def in_graph(call: Callable[[], object]) -> Callable[[], object]:
    """The same call captured once, to be replayed. It keeps the call, and so what that has made beforehand, alive."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda kept=call: graph.replay()


def ceilings() -> Ceilings:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy_ms, product_ms = medians_ms([lambda: target.copy_(source), lambda: a @ b])
    return Ceilings(2 * source.numel() / copy_ms / 1e9, 2 * 8192**3 / product_ms / 1e9)


def sampled(count: int) -> Tensor:
    """The queries (or requests) whose results are compared: the first two, one inside and the last. int64."""
    return torch.tensor(sorted({0, min(1, count - 1), count // 3, count - 1}), device="cuda")


def cosine_error(got: Tensor, want: Tensor) -> float:
    """1 - the similarity 2ab / (aa + bb), which a wrong length lowers, too."""
    got, want = got.double().flatten(), want.double().flatten()
    return 1 - float(2 * (got @ want) / (got @ got + want @ want))


def as_json(row: Row, limits: Ceilings) -> dict[str, Any]:
    """One line of the JSON file: ms, TFLOP/s, TB/s, shares of the ceilings, errors, baselines, goals."""
    about: dict[str, Any] = {"part": row.part, "name": row.case.name}
    if (found := row.found) is None:
        return about | {"failure": row.failure}
    tflops, terabytes, rested = found.tflops, found.terabytes, found.rested()
    return about | {
        "ms": found.ms,
        "tflops": tflops,
        "of_product": tflops and tflops / limits.product_tflops,
        "terabytes_per_second": terabytes,
        "of_copy": terabytes and terabytes / limits.copy_terabytes,
        "errors": found.errors,
        "baselines": {
            name: asdict(baseline) | {"times": found.times(name)}
            for name, baseline in found.baselines.items()
        },
        "rested_ms": found.rested_ms,
        "goals": [
            {
                "goal": str(goal),
                "met": goal.met(found, limits),
                "met_rested": rested and goal.met(rested, limits),
            }
            for goal in row.case.goals
        ],
    }


def where(limits: Ceilings) -> dict[str, Any]:
    """The first line of the JSON file: the card, the day and the ceilings."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        **asdict(limits),
    }


COLUMNS = (
    "kernel", "ms", "TFLOP/s (of product)", "TB/s (of copy)", "FlashMLA ms (times)", "torch ms (times)",
    "rested ms (FlashMLA's, times)", "error", "FlashMLA's", "torch's", "goal",
)  # fmt: skip


def table(rows: list[Row], limits: Ceilings) -> str:
    """The rows as a Markdown table, and below it those that could not be measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_cells(row.case, row.found, limits))} |" for row in rows if row.found]
    failures = [f"- {row.case.name}: {row.failure}" for row in rows if not row.found]
    return "\n".join([*lines, *(["", "Not measured:", "", *failures] if failures else [])])


def _cells(case: Case, found: Measurement, limits: Ceilings) -> list[str]:
    rate, bandwidth, rested = found.tflops, found.terabytes, found.rested()
    beside = [found.baselines.get(name) for name in ("FlashMLA", "torch")]
    return [
        case.name,
        f"{found.ms:.3f}",
        "" if rate is None else f"{rate:.0f} ({rate / limits.product_tflops:.0%})",
        "" if bandwidth is None else f"{bandwidth:.2f} ({bandwidth / limits.copy_terabytes:.0%})",
        *("" if other is None else f"{other.ms:.3f} ({other.ms / found.ms:.2f})" for other in beside),
        "" if rested is None else _rested_cell(rested),
        ", ".join(f"{what} {error:.1e}" for what, error in found.errors.items()),
        *("" if other is None or other.error is None else f"{other.error:.1e}" for other in beside),
        "; ".join(_verdict(goal, found, rested, limits) for goal in case.goals),
    ]


def _rested_cell(rested: Measurement) -> str:
    other = rested.baselines.get("FlashMLA")
    beside = "" if other is None else f" ({other.ms:.3f}, {other.ms / rested.ms:.2f})"
    return f"{rested.ms:.3f}{beside}"


def _verdict(goal: Goal, found: Measurement, rested: Measurement | None, limits: Ceilings) -> str:
    """Whether a goal is met under load and, where they differ, on a rested card."""
    verdicts = {True: "met", False: "missed", None: "not measured"}
    met = goal.met(found, limits)
    met_rested = met if rested is None else goal.met(rested, limits)
    other = "" if met_rested in (met, None) else f" (rested: {verdicts[met_rested]})"
    return f"{goal}: {verdicts[met]}{other}"
