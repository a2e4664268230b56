"""How long-running work reports where it is, without knowing who listens.

Library code takes a ``Progress``, calls ``start``, then ``advance`` from any thread, then ``finish``. Which
of the four listeners it talks to, ``console.Console.progress`` decides. Units are decimal throughout (1 GB is
10**9 bytes), for amounts and rates alike.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.text import Text

Unit = Literal["bytes", "items"]
Clock = Callable[[], float]
WriteLine = Callable[[str], None]

#: Rates look back this far: long enough to span several 4 GB files, short enough to follow a change of pace.
WINDOW_SECONDS = 20.0
#: Below this age a rate is noise, and none is shown.
MIN_RATE_SECONDS = 0.5


class Progress(Protocol):
    """What the engine and the verifier call. Every method may be called from any thread."""

    def start(self, label: str, total: int, unit: Unit) -> None:
        """Begin a stage of ``total`` bytes or items; a stage still open is finished first."""

    def advance(self, n: int) -> None:
        """``n`` more bytes or items are done; negative takes back what has to be done again."""

    def note(self, text: str) -> None:
        """Something worth a line happened, such as a finished file."""

    def finish(self) -> None:
        """End the stage, complete or not; harmless when none is open."""


def format_bytes(n: float) -> str:
    """``1_320_000_000`` -> ``1.32 GB``: decimal units, three or four digits."""
    if abs(n) < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007
        n /= 1000
        if abs(n) < 999.95:
            break
    return f"{n:.2f} {unit}" if abs(n) < 9.995 else f"{n:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """``166`` -> ``2 min 46 s``: the two largest units, whole numbers."""
    if seconds < 1:
        return "less than 1 s"
    whole = int(seconds)
    for size, name, smaller_size, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller_size} {smaller_name}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def _format_rate(rate: float, unit: Unit) -> str:
    if unit == "bytes":
        return f"{format_bytes(rate)}/s"
    return f"{rate:.2f}/s" if rate < 9.995 else f"{rate:.0f}/s"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One stage at one moment. ``rate`` is units per second over the last ``WINDOW_SECONDS``."""

    label: str
    total: int
    unit: Unit
    done: int
    elapsed: float
    rate: float | None

    @property
    def eta(self) -> float | None:
        """Seconds left at this rate; None while nothing moves or nothing is known."""
        if not self.rate or self.total <= 0:
            return None
        return max(0, self.total - self.done) / self.rate

    @property
    def amount(self) -> str:
        """``41.2 GB of 260.1 GB``, or ``12 of 163``."""
        if self.unit == "bytes":
            done, total = format_bytes(self.done), format_bytes(self.total)
        else:
            done, total = str(self.done), str(self.total)
        return f"{done} of {total}" if self.total > 0 else done

    @property
    def percent(self) -> str:
        """Whole percent, rounded down so that 100 % means done; empty without a total."""
        return f"{min(100, self.done * 100 // self.total)} %" if self.total > 0 else ""

    @property
    def pace(self) -> tuple[str, ...]:
        """Rate and time left, as far as they are known."""
        rate = "" if self.rate is None else _format_rate(self.rate, self.unit)
        left = "" if self.eta is None else f"{format_duration(self.eta)} left"
        return tuple(part for part in (rate, left) if part)

    def line(self) -> str:
        """The stage under way: ``split: 41.2 GB of 260.1 GB (15 %), 1.32 GB/s, 2 min 46 s left``."""
        percent = f" ({self.percent})" if self.percent else ""
        return ", ".join((f"{self.label}: {self.amount}{percent}", *self.pace))

    def summary(self) -> str:
        """The stage when it has ended, with its mean rate; says so when it ended early."""
        if self.done < self.total:
            return (
                f"{self.label}: stopped after {self.amount} ({self.percent}), {format_duration(self.elapsed)}"
            )
        amount = (
            format_bytes(self.done)
            if self.unit == "bytes"
            else f"{self.done} {'item' if self.done == 1 else 'items'}"
        )
        text = f"{self.label}: {amount} in {format_duration(self.elapsed)}"
        if self.elapsed < MIN_RATE_SECONDS:
            return text
        return f"{text}, {_format_rate(self.done / self.elapsed, self.unit)}"


class Meter:
    """Counts one stage and knows its recent rate. Thread-safe, and its lock is never held while printing."""

    def __init__(self, label: str, total: int, unit: Unit, clock: Clock) -> None:
        self._label, self._total, self._unit, self._clock = label, total, unit, clock
        self._lock = threading.RLock()  # a signal handler may draw while its thread is in advance
        self._began = clock()
        self._done = 0
        self._samples = deque([(self._began, 0)])  # (time, amount done at that time)

    def advance(self, n: int) -> None:
        """Add ``n``; samples closer than 1/40 of the window are merged, so that memory stays bounded."""
        with self._lock:
            self._done += n
            now = self._clock()
            if now - self._samples[-1][0] >= WINDOW_SECONDS / 40:
                self._samples.append((now, self._done))

    def snapshot(self) -> Snapshot:
        """The state now. A stall lowers the rate as it lasts, down to 0 after one window."""
        with self._lock:
            now = self._clock()
            # The oldest sample kept is the last one at or before the window's edge.
            while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
                self._samples.popleft()
            (then, before), done = self._samples[0], self._done
        age = now - then
        rate = max(0.0, (done - before) / age) if age >= MIN_RATE_SECONDS else None
        return Snapshot(self._label, self._total, self._unit, done, now - self._began, rate)


class SilentProgress:
    """Listens to nothing."""

    def start(self, label: str, total: int, unit: Unit) -> None: ...
    def advance(self, n: int) -> None: ...
    def note(self, text: str) -> None: ...
    def finish(self) -> None: ...


class _MeteredProgress:
    """Counting and the order of events; subclasses say what each event looks like.

    ``_lock`` orders events and may be held while printing. The bar's drawing thread therefore never takes it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._meter: Meter | None = None

    def start(self, label: str, total: int, unit: Unit) -> None:
        """Begin a stage; see ``Progress.start``."""
        with self._lock:
            self.finish()
            self._meter = Meter(label, total, unit, self._clock)
            self._on_start(self._meter.snapshot())

    def advance(self, n: int) -> None:
        """Count ``n``; without an open stage nothing happens."""
        meter = self._meter
        if meter is not None:
            meter.advance(n)
            self._on_advance()

    def note(self, text: str) -> None:
        """Pass a line on; see ``Progress.note``."""
        with self._lock:
            self._on_note(text)

    def finish(self) -> None:
        """End the stage; see ``Progress.finish``."""
        with self._lock:
            meter, self._meter = self._meter, None
            if meter is not None:
                self._on_finish(meter.snapshot())

    def _on_start(self, now: Snapshot) -> None: ...
    def _on_advance(self) -> None: ...
    def _on_note(self, text: str) -> None: ...
    def _on_finish(self, end: Snapshot) -> None: ...


class _BeatingProgress(_MeteredProgress):
    """Reports at most once an interval: as work advances, and from a thread when it stalls."""

    def __init__(
        self,
        write_line: WriteLine,
        *,
        interval: float,
        clock: Clock = time.monotonic,
        background: bool = True,
    ) -> None:
        super().__init__(clock)
        self._write_line, self._interval, self._background = write_line, interval, background
        self._last_beat = 0.0
        self._ended = threading.Event()

    def _on_start(self, now: Snapshot) -> None:
        self._last_beat = self._clock()
        if self._background:
            self._ended = threading.Event()
            threading.Thread(target=self._keep_beating, args=(self._ended,), daemon=True).start()

    def _keep_beating(self, ended: threading.Event) -> None:
        while not ended.wait(self._interval):
            self._on_advance()

    def _on_advance(self) -> None:
        if self._clock() - self._last_beat < self._interval:
            return
        with self._lock:
            now = self._clock()
            if self._meter is not None and now - self._last_beat >= self._interval:
                self._last_beat = now
                self._on_beat(self._meter.snapshot())

    def _on_finish(self, end: Snapshot) -> None:
        self._ended.set()

    def _on_beat(self, now: Snapshot) -> None: ...


class HeartbeatProgress(_BeatingProgress):
    """For logs: one plain line an interval and one at the end. Notes only when ``show_notes``.

    Args:
        write_line: Takes each line, without its newline.
        interval: Seconds between lines.
        background: Beat from a thread too, so that a stall shows; off where a test drives the clock.
    """

    def __init__(
        self, write_line: WriteLine, *, interval: float = 30.0, show_notes: bool = False, **options: Any
    ) -> None:
        super().__init__(write_line, interval=interval, **options)
        self._show_notes = show_notes

    def _on_beat(self, now: Snapshot) -> None:
        self._write_line(now.line())

    def _on_note(self, text: str) -> None:
        if self._show_notes:
            self._write_line(text)

    def _on_finish(self, end: Snapshot) -> None:
        super()._on_finish(end)
        self._write_line(end.summary())


class JsonProgress(_BeatingProgress):
    """For programs: one JSON object a line. Fields and events may be added later, never changed or removed.

    ``{"event": "start" | "progress" | "finish", "label", "unit", "done", "total", "rate", "eta_seconds"}``:
    ``rate`` is units per second; it and ``eta_seconds`` may be null. ``finish`` has ``elapsed_seconds`` and
    ``complete`` besides. Notes are ``{"event": "note", "message"}``.
    """

    def __init__(self, write_line: WriteLine, *, interval: float = 1.0, **options: Any) -> None:
        super().__init__(write_line, interval=interval, **options)

    def _emit(self, event: str, now: Snapshot, **more: Any) -> None:
        record = {"event": event, "label": now.label, "unit": now.unit, "done": now.done, "total": now.total}
        self._write_line(json.dumps({**record, "rate": now.rate, "eta_seconds": now.eta, **more}))

    def _on_start(self, now: Snapshot) -> None:
        self._emit("start", now)
        super()._on_start(now)

    def _on_beat(self, now: Snapshot) -> None:
        self._emit("progress", now)

    def _on_note(self, text: str) -> None:
        self._write_line(json.dumps({"event": "note", "message": text}))

    def _on_finish(self, end: Snapshot) -> None:
        super()._on_finish(end)
        self._emit("finish", end, elapsed_seconds=end.elapsed, complete=end.done >= end.total)


class BarProgress(_MeteredProgress):
    """For a terminal: a bar that redraws itself, the latest note below it, and one summary line at the end.

    Args:
        console: A Rich console on stderr; what is printed through it meanwhile appears above the bar.
        show_notes: Keep every note as a line above the bar.
    """

    def __init__(
        self, console: RichConsole, *, clock: Clock = time.monotonic, show_notes: bool = False
    ) -> None:
        super().__init__(clock)
        self._console, self._show_notes = console, show_notes
        self._live: Live | None = None
        self._latest_note = ""
        self._text_width = 0

    def _on_start(self, now: Snapshot) -> None:
        from rich.live import Live

        self._latest_note, self._text_width = "", 0
        # Only stderr is redirected: what goes to stdout must never end up in the bar's stream.
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
        )
        self._live.start()

    def _on_note(self, text: str) -> None:
        self._latest_note = text
        if self._show_notes:
            self._print(text)

    def _on_finish(self, end: Snapshot) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._print(end.summary())

    def _print(self, text: str) -> None:
        # A str, so that the console's own render_str makes control characters visible.
        self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def _draw(self) -> Text:
        from rich.text import Text

        meter = self._meter
        if meter is None:
            return Text("")
        now = meter.snapshot()
        width = self._console.width - 1  # the last column would make some terminals wrap
        text = "  ".join(part for part in (now.amount, now.percent, *now.pace) if part)
        self._text_width = max(self._text_width, len(text))  # a bar that keeps its width does not flicker
        label = self._console.render_str(now.label, markup=False, highlight=False, emoji=False)
        line = Text.assemble(label, "  ", no_wrap=True, overflow="ellipsis", end="")
        room = min(40, width - line.cell_len - self._text_width - 2)
        if room >= 8:
            filled = room if now.total <= 0 else min(room, max(0, room * now.done // now.total))
            full, empty = "━─" if self._console.encoding.startswith("utf") else "#-"
            line.append(full * filled, "cyan").append(empty * (room - filled), "dim").append("  ")
        elif line.cell_len + len(text) > width:
            text = "  ".join(part for part in (now.percent, *now.pace) if part)
        line.append(text)
        line.truncate(width, overflow="ellipsis")
        if self._latest_note:
            note = self._console.render_str(self._latest_note, markup=False, highlight=False, emoji=False)
            note.truncate(width, overflow="ellipsis")
            line.append("\n").append_text(note)
        return line
