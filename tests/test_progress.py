"""Progress listeners: what each prints, when, and from how many threads. The clock is injected."""

from __future__ import annotations

import io
import json
import sys
import threading
from typing import Any

import pytest
from rich.console import Console as RichConsole

from mla_convert.progress import (
    WINDOW_SECONDS,
    BarProgress,
    HeartbeatProgress,
    JsonProgress,
    Meter,
    Progress,
    SilentProgress,
    format_bytes,
    format_duration,
)

GB = 10**9


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.00 MB"),
        (1_320_000_000, "1.32 GB"),
        (41_200_000_000, "41.2 GB"),
        (260_100_000_000, "260.1 GB"),
        (1_020_000_000_000, "1.02 TB"),
        (12_345_600_000_000_000, "12345.6 TB"),
    ],
)
def test_bytes_use_decimal_units(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than 1 s"),
        (0.99, "less than 1 s"),
        (1, "1 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (166, "2 min 46 s"),
        (3600, "1 h 0 min"),
        (11_520, "3 h 12 min"),
        (97_200, "1 d 3 h"),
    ],
)
def test_durations_use_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# The meter


def test_rate_follows_a_change_of_pace_within_one_window() -> None:
    clock = Clock()
    meter = Meter("split", 1000 * GB, "bytes", clock)
    for seconds, per_second in ((60, 1 * GB), (60, 3 * GB)):
        for _ in range(seconds):
            clock.now += 1
            meter.advance(per_second)
    now = meter.snapshot()
    assert now.done == 240 * GB
    assert now.rate == 3 * GB
    assert now.eta == 760 / 3


def test_rate_is_smooth_when_whole_4_gb_files_arrive_from_four_workers() -> None:
    clock = Clock()
    meter = Meter("split", 163 * 4 * GB, "bytes", clock)
    rates = []
    for file in range(163):
        clock.now += 1.0 if file % 4 else 1.5  # four workers: one file about each second
        meter.advance(4 * GB)
        if file >= 20:
            rates.append(meter.snapshot().rate or 0)
    assert min(rates) > 3.2 * GB
    assert max(rates) < 4.0 * GB
    assert meter.snapshot().percent == "100 %"


def test_stall_brings_the_rate_to_zero_and_leaves_no_eta() -> None:
    clock = Clock()
    meter = Meter("split", 100, "items", clock)
    clock.now += 10
    meter.advance(50)
    assert meter.snapshot().rate == 5
    clock.now += 10
    assert meter.snapshot().rate == 2.5
    clock.now += WINDOW_SECONDS
    assert meter.snapshot().rate == 0
    assert meter.snapshot().eta is None


def test_no_rate_before_time_has_passed() -> None:
    meter = Meter("split", 100, "items", Clock())
    meter.advance(50)
    now = meter.snapshot()
    assert (now.rate, now.eta) == (None, None)
    assert now.line() == "split: 50 of 100 (50 %)"


def test_total_zero_is_no_division() -> None:
    clock = Clock()
    meter = Meter("split", 0, "bytes", clock)
    clock.now += 10
    now = meter.snapshot()
    assert now.eta is None
    assert now.line() == "split: 0 B, 0 B/s"
    assert now.summary() == "split: 0 B in 10 s, 0 B/s"


def test_memory_is_bounded_however_often_it_advances() -> None:
    clock = Clock()
    meter = Meter("split", 10**9, "items", clock)
    for _ in range(20_000):
        clock.now += 0.01
        meter.advance(1)
        if meter.snapshot().done % 5000 == 0:
            assert len(meter._samples) < 50


def test_a_signal_handler_may_ask_while_its_thread_counts() -> None:
    meter = Meter("split", 2, "items", Clock())
    meter.advance(1)
    done: list[int] = []

    def interrupted() -> None:
        with meter._lock:
            done.append(meter.snapshot().done)

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(5)
    assert done == [1]


def test_percent_is_rounded_down_and_never_above_100() -> None:
    meter = Meter("split", 1000, "items", Clock())
    meter.advance(999)
    assert meter.snapshot().percent == "99 %"
    meter.advance(500)
    assert meter.snapshot().percent == "100 %"


def test_work_taken_back_never_shows_a_negative_rate() -> None:
    clock = Clock()
    meter = Meter("split", 100, "items", clock)
    clock.now += 1
    meter.advance(-3)
    assert meter.snapshot().rate == 0


# Off a terminal


def heartbeat(clock: Clock, **options: Any) -> tuple[HeartbeatProgress, list[str]]:
    lines: list[str] = []
    return HeartbeatProgress(lines.append, clock=clock, background=False, **options), lines


def test_heartbeat_writes_a_line_every_30_seconds_and_a_last_one() -> None:
    clock = Clock()
    progress, lines = heartbeat(clock)
    progress.start("split", 260_100_000_000, "bytes")
    for _ in range(70):
        clock.now += 1
        progress.advance(1_320_000_000)
    assert lines == [
        "split: 39.6 GB of 260.1 GB (15 %), 1.32 GB/s, 2 min 47 s left",
        "split: 79.2 GB of 260.1 GB (30 %), 1.32 GB/s, 2 min 17 s left",
    ]
    clock.now += 5
    progress.advance(260_100_000_000 - 70 * 1_320_000_000)
    progress.finish()
    assert lines[2:] == ["split: 260.1 GB in 1 min 15 s, 3.47 GB/s"]


def test_heartbeat_of_short_work_is_the_last_line_alone() -> None:
    clock = Clock()
    progress, lines = heartbeat(clock)
    progress.start("verify", 61, "items")
    for _ in range(61):
        clock.now += 0.4
        progress.advance(1)
    progress.note("model-00001-of-00061.safetensors")
    progress.finish()
    progress.finish()
    assert lines == ["verify: 61 items in 24 s, 2.50/s"]


def test_heartbeat_says_so_when_work_stops_early() -> None:
    clock = Clock()
    progress, lines = heartbeat(clock)
    progress.start("split", 260_100_000_000, "bytes")
    clock.now += 12
    progress.advance(41_200_000_000)
    progress.finish()
    assert lines == ["split: stopped after 41.2 GB of 260.1 GB (15 %), 12 s"]


def test_heartbeat_interval_and_notes_can_be_chosen() -> None:
    clock = Clock()
    progress, lines = heartbeat(clock, interval=5, show_notes=True)
    progress.start("split", 10, "items")
    clock.now += 5
    progress.advance(1)
    progress.note("path/[weird].safetensors")
    assert lines == ["split: 1 of 10 (10 %), 0.20/s, 45 s left", "path/[weird].safetensors"]


def test_starting_a_stage_finishes_the_one_before() -> None:
    clock = Clock()
    progress, lines = heartbeat(clock)
    progress.start("copy", 1, "items")
    progress.advance(1)
    progress.start("verify", 1, "items")
    progress.advance(1)
    progress.finish()
    assert lines == ["copy: 1 item in less than 1 s", "verify: 1 item in less than 1 s"]


def test_a_stall_is_reported_by_the_background_thread() -> None:
    beat = threading.Event()
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        beat.set()

    progress = HeartbeatProgress(write, interval=0.01)
    progress.start("split", 10, "items")
    assert beat.wait(10), "no line without an advance"
    progress.finish()
    assert lines[0] == "split: 0 of 10 (0 %)"
    assert lines[-1].startswith("split: stopped after 0 of 10 (0 %)")


def test_json_events_are_one_object_a_line_at_most_one_a_second() -> None:
    clock = Clock()
    lines: list[str] = []
    progress = JsonProgress(lines.append, clock=clock, background=False)
    progress.start("split [bold]x[/x]", 40, "items")
    for _ in range(20):
        clock.now += 0.125
        progress.advance(2)
    progress.note("path/[weird]\n.safetensors")
    progress.finish()
    base = {"label": "split [bold]x[/x]", "unit": "items", "total": 40}
    assert [json.loads(line) for line in lines] == [
        {"event": "start", **base, "done": 0, "rate": None, "eta_seconds": None},
        {"event": "progress", **base, "done": 16, "rate": 16.0, "eta_seconds": 1.5},
        {"event": "progress", **base, "done": 32, "rate": 16.0, "eta_seconds": 0.5},
        {"event": "note", "message": "path/[weird]\n.safetensors"},
        {
            "event": "finish",
            **base,
            "done": 40,
            "rate": 16.0,
            "eta_seconds": 0.0,
            "elapsed_seconds": 2.5,
            "complete": True,
        },
    ]
    assert all("\n" not in line for line in lines)


# On a terminal


def bar(clock: Clock, width: int, encoding: str = "utf-8", **options: Any) -> tuple[BarProgress, io.BytesIO]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = RichConsole(file=stream, force_terminal=True, color_system=None, width=width, _environ={})
    return BarProgress(console, clock=clock, **options), raw


def drawn(progress: BarProgress) -> str:
    return progress._draw().plain


def test_bar_shows_amount_percent_rate_and_time_left_in_the_same_units() -> None:
    clock = Clock()
    progress, _ = bar(clock, 110)
    progress.start("split", 260_100_000_000, "bytes")
    clock.now += 31
    progress.advance(41_200_000_000)
    text = drawn(progress)
    progress.finish()
    assert text == f"split  {'━' * 6}{'─' * 34}  41.2 GB of 260.1 GB  15 %  1.33 GB/s  2 min 44 s left"


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (72, "split  ━────────  41.2 GB of 260.1 GB  15 %  1.33 GB/s  2 min 44 s left"),
        (61, "split  41.2 GB of 260.1 GB  15 %  1.33 GB/s  2 min 44 s left"),
        (40, "split  15 %  1.33 GB/s  2 min 44 s left"),
        (20, "split  15 %  1.33 …"),
    ],
)
def test_bar_fits_narrow_terminals(width: int, text: str) -> None:
    clock = Clock()
    progress, _ = bar(clock, width)
    progress.start("split", 260_100_000_000, "bytes")
    clock.now += 31
    progress.advance(41_200_000_000)
    line = drawn(progress)
    progress.finish()
    assert line == text
    assert len(line) < width


def test_bar_is_ascii_where_the_stream_is() -> None:
    clock = Clock()
    progress, raw = bar(clock, 100, "ascii")
    progress.start("split", 2, "items")
    clock.now += 1
    progress.advance(1)
    text = drawn(progress)
    progress.finish()
    assert text == f"split  {'#' * 20}{'-' * 20}  1 of 2  50 %  1.00/s  1 s left"
    raw.getvalue().decode("ascii")


def test_stdout_stays_out_of_the_stream_of_a_live_bar() -> None:
    stdout = sys.stdout
    progress, _ = bar(Clock(), 60)
    progress.start("split", 1, "items")
    try:
        assert sys.stdout is stdout
    finally:
        progress.finish()


def test_bar_without_a_total_does_not_divide() -> None:
    progress, _ = bar(Clock(), 60)
    progress.start("split", 0, "bytes")
    text = drawn(progress)
    progress.finish()
    assert text == f"split  {'━' * 40}  0 B"


def test_bar_prints_names_literally_and_keeps_its_summary() -> None:
    progress, raw = bar(Clock(), 100, show_notes=True)
    progress.start("split [bold]x[/x]", 1, "items")
    progress.advance(1)
    progress.note("path/[weird].safetensors")
    text = drawn(progress)
    progress.finish()
    assert text.endswith("\npath/[weird].safetensors")
    assert text.startswith("split [bold]x[/x]  ━")
    end = raw.getvalue().decode()
    assert "path/[weird].safetensors\n" in end
    assert end.endswith("split [bold]x[/x]: 1 item in less than 1 s\n")


# Threads


@pytest.mark.parametrize("kind", ["heartbeat", "json", "bar", "silent"])
def test_four_workers_lose_no_count_and_do_not_deadlock(kind: str) -> None:
    lines: list[str] = []
    progress: Progress
    raw = io.BytesIO()
    if kind == "heartbeat":
        progress = HeartbeatProgress(lines.append, interval=0.001)
    elif kind == "json":
        progress = JsonProgress(lines.append, interval=0.001)
    elif kind == "bar":
        progress, raw = bar(Clock(), 100, show_notes=True)
    else:
        progress = SilentProgress()
    progress.start("split", 4 * 2000, "items")

    def work() -> None:
        for step in range(2000):
            progress.advance(1)
            if step % 100 == 0:
                progress.note(f"file {step}")

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)
    progress.finish()
    if kind == "heartbeat":
        assert lines[-1].startswith("split: 8000 items in ")
    elif kind == "json":
        last = json.loads(lines[-1])
        assert (last["event"], last["done"], last["complete"]) == ("finish", 8000, True)
    elif kind == "bar":
        assert raw.getvalue().decode().endswith("split: 8000 items in less than 1 s\n")


def test_events_outside_a_stage_are_harmless() -> None:
    progress, lines = heartbeat(Clock())
    progress.advance(1)
    progress.note("x")
    progress.finish()
    assert lines == []
