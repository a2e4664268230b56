"""Times ``mla-convert split`` against ``cp -r`` of the same folder, and measures its memory.

    python -m benchmarks.split --size 8GB --dir /scratch

Two file systems: the one under ``--dir``, and an XFS with reflinks in a file there (as root, with ``mkfs.xfs``; it
is left out otherwise, with the reason). On each, the commands take turns; before each the last output is removed,
everything is flushed and, where permitted, the page cache is dropped. The figures are medians. What was split is
combined again, and every file compared with the original by SHA-256. Needs two and a half times ``--size`` of space
and removes all of it afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import size_argument

RESULTS = Path(__file__).with_name("results")
_TOOL = (sys.executable, "-m", "mla_convert")


class BenchmarkError(Exception):
    """A command under measurement failed, or there is no room to run it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a command.

    Attributes:
        seconds: Wall time until it ended.
        synced: Wall time until its file system was flushed as well.
        cpu: User and system time of the process.
        peak: Largest resident set of the process, in bytes.
    """

    seconds: float
    synced: float
    cpu: float
    peak: int


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one command on one file system. The first series of a file system is what others compare to."""

    file_system: str
    command: str
    samples: list[Sample] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Median of one field of the samples."""
        return float(statistics.median(getattr(sample, name) for sample in self.samples))


@dataclass(frozen=True, slots=True)
class Contender:
    """A command to be measured: how it is shown, what is run, and the folder it makes."""

    shown: str
    arguments: Sequence[str | Path]
    output: Path


@dataclass(slots=True)
class Outcome:
    """Everything the benchmark found."""

    checkpoint: dict[str, int]
    caches_dropped: bool
    load: tuple[float, float] = (0.0, 0.0)
    series: list[Series] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    skipped: str | None = None


def run(
    size: int,
    directory: Path,
    rounds: int,
    *,
    keep_cache: bool = False,
    only: str | None = None,
    experts: int | None = None,
) -> Outcome:
    """Run the benchmark in a new folder inside ``directory``, and remove that folder.

    ``only`` leaves out one of the file systems: ``plain`` measures under ``directory``, ``reflink`` on the XFS.

    Raises:
        BenchmarkError: A command failed, or the space does not suffice.
    """
    directory.mkdir(parents=True, exist_ok=True)
    need, free = size * 5 // 2 + (1 << 30), shutil.disk_usage(directory).free
    if need > free:
        raise BenchmarkError(f"needs {need / 1e9:.1f} GB of space; {free / 1e9:.1f} GB are free")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mla-benchmark-", dir=directory) as folder:
        work = Path(folder)
        plain = work / "plain"
        outcome = Outcome({}, not keep_cache and _drop_caches())
        if only != "reflink":
            outcome.checkpoint = _make(plain / "model", size, experts)
            _measure_plain(plain, size, rounds, outcome, experts)
            shutil.rmtree(plain)
        try:
            if only == "plain":
                raise _SkippedError("left out as asked")
            with _reflink_file_system(work, 2 * size + (2 << 30)) as root:
                outcome.checkpoint = _make(root / "model", size, experts)
                _measure_reflink(root, rounds, outcome)
        except _SkippedError as reason:
            if only == "reflink":
                raise BenchmarkError(f"nothing to measure: {reason}") from None
            outcome.skipped = str(reason)
    outcome.load = (load, os.getloadavg()[0])
    return outcome


def _measure_plain(root: Path, size: int, rounds: int, outcome: Outcome, experts: int | None) -> None:
    copy = Contender("cp -r", ("cp", "-r", root / "model", root / "copied"), root / "copied")
    split = _tool("split", root / "model", root / "split")
    moved = _tool("split", root / "model", root / "moved", "--link", "copy")
    series = _alternate(root, [copy, split, moved], rounds, outcome)
    _remove(copy.output, moved.output)
    _round_trip(root, outcome)
    small = _make(root / "small", size // 8, experts)
    peak = _once(_tool("split", root / "small", root / "small-split"), root, outcome).peak
    whole = outcome.checkpoint
    for counts, found in ((small, peak), (whole, int(max(sample.peak for sample in series[1].samples)))):
        outcome.memory.append({"bytes": counts["bytes"], "tensors": counts["tensors"], "peak": found})


def _measure_reflink(root: Path, rounds: int, outcome: Outcome) -> None:
    never = ("cp", "-r", "--reflink=never", root / "model", root / "copied")
    copy = Contender("cp -r --reflink=never", never, root / "copied")
    split = _tool("split", root / "model", root / "split")
    combine = _tool("combine", root / "split", root / "combined")
    _alternate(root, [copy, split, combine], rounds, outcome)
    _remove(copy.output)
    _compare(root, outcome)


def _round_trip(root: Path, outcome: Outcome) -> None:
    _once(_tool("combine", root / "split", root / "combined"), root, outcome)
    _compare(root, outcome)
    _remove(root / "split", root / "combined")


def _compare(root: Path, outcome: Outcome) -> None:
    """Compare every file of ``model`` and ``combined`` by SHA-256, names included."""
    original, combined = root / "model", root / "combined"
    names = sorted({path.relative_to(top).as_posix() for top in (original, combined) for path in _files(top)})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        before = pool.map(_sha256, [original / name for name in names])
        after = pool.map(_sha256, [combined / name for name in names])
        different = [name for name, a, b in zip(names, before, after, strict=True) if a != b]
    # The manifest of the conversion itself is the one file that the original does not have.
    outcome.different += [name for name in different if name != "mla-convert.json"]
    outcome.compared[_file_system(root)] = len(names) - ("mla-convert.json" in names)


def _files(top: Path) -> Iterator[Path]:
    return (path for path in top.rglob("*") if path.is_file())


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Measuring


def _tool(command: str, source: Path, output: Path, *options: str) -> Contender:
    shown = " ".join(("mla-convert", command, *options))
    return Contender(shown, (*_TOOL, command, source, "-o", output, "-q", *options), output)


def _alternate(root: Path, contenders: Sequence[Contender], rounds: int, outcome: Outcome) -> list[Series]:
    """Run the contenders in turn, ``rounds`` times; the outputs of the last round stay."""
    kind = _file_system(root)
    series = [Series(kind, contender.shown) for contender in contenders]
    outcome.series += series
    for _ in range(rounds):
        _remove(*(contender.output for contender in contenders))
        for contender, found in zip(contenders, series, strict=True):
            found.samples.append(_once(contender, root, outcome))
    return series


def _once(contender: Contender, root: Path, outcome: Outcome) -> Sample:
    _flush(root)
    if outcome.caches_dropped:
        _drop_caches()
    # The resident set that the kernel reports begins with that of the parent, so this process stays small.
    started = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(contender.arguments, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise BenchmarkError(f"{contender.shown} ended with {process.returncode}: {said}")
    _flush(root)
    synced = time.perf_counter() - started
    return Sample(seconds, synced, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _drop_caches() -> bool:
    """Drop the page cache; False where that is not permitted."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def _flush(root: Path) -> None:
    subprocess.run(["sync", "--file-system", root], check=True)


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _make(folder: Path, size: int, experts: int | None) -> dict[str, int]:
    """Make a checkpoint in a process of its own, so that this one's memory stays small."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", str(folder), "--size", str(size), "--json"]
    if experts is not None:
        command += ["--experts", str(experts)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if made.returncode:
        raise BenchmarkError(f"cannot make the checkpoint: {made.stderr.strip()}")
    counts: dict[str, int] = json.loads(made.stdout)
    return counts


# File systems


class _SkippedError(Exception):
    """Why a part of the benchmark cannot run here."""


@contextmanager
def _reflink_file_system(work: Path, size: int) -> Iterator[Path]:
    """An XFS with reflinks, in a sparse file on a loop device that goes past the page cache if it can."""
    if os.geteuid() != 0:
        raise _SkippedError("mounting a file system needs root")
    if shutil.which("mkfs.xfs") is None:
        raise _SkippedError("mkfs.xfs is missing (package xfsprogs)")
    image, root = work / "image", work / "reflink"
    with image.open("wb") as file:
        file.truncate(size)
    root.mkdir()
    with contextlib.ExitStack() as undo:
        try:
            _system("mkfs.xfs", "-q", "-m", "reflink=1", image)
            try:
                device = _system("losetup", "--find", "--show", "--direct-io=on", image)
            except _SkippedError:
                device = _system("losetup", "--find", "--show", image)
            undo.callback(_system, "losetup", "--detach", device)
            _system("mount", device, root)
        except OSError as error:
            raise _SkippedError(f"cannot mount an XFS here: {error}") from error
        undo.callback(_system, "umount", root)
        yield root


def _system(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise _SkippedError(f"{command[0]}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def _file_system(path: Path) -> str:
    """The type of the file system that holds ``path``: the mount point with the longest matching prefix."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found = line.split(" ")[:3]
        if path.is_relative_to(point) and len(point) > len(best):
            best, kind = point, found
    return kind


# Showing


def markdown(outcome: Outcome, command: str) -> str:
    """The report: what was run, on what, and the figures."""
    counts = outcome.checkpoint
    rounds = len(outcome.series[0].samples)
    caches = "dropped" if outcome.caches_dropped else "not dropped"
    lines = [
        f"# Split against copying, {date.today().isoformat()}",
        "",
        f"    {command}",
        "",
        f"{_machine()}. Load average {outcome.load[0]:.1f} before and {outcome.load[1]:.1f} after.",
        "",
        f"A synthetic checkpoint in the shard structure of DeepSeek-V3: {counts['bytes'] / 1e9:.2f} GB, "
        f"{counts['tensors']} tensors, {counts['files']} shards, of which {counts['kv_b_shards']} hold a KV "
        f"up-projection ({counts['kv_b_bytes'] / counts['bytes']:.2%} of the bytes).",
        "",
        f"Median of {rounds} (lowest to highest), commands in turn, page cache {caches} before each. "
        "`split` and `combine` flush every file they write; `cp` does not, so *synced* includes a final "
        "flush of the file system. Ratios are to the `cp` of the same file system.",
        "",
        "| file system | command | seconds | ratio | seconds, synced | ratio | CPU seconds | peak memory |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        *_rows(outcome.series),
        "",
        "| checkpoint | tensors | peak memory of split |",
        "|--:|--:|--:|",
        *(
            f"| {row['bytes'] / 1e9:.2f} GB | {row['tensors']} | {row['peak'] / 1e6:.0f} MB |"
            for row in outcome.memory
        ),
        "",
        _comparison(outcome),
    ]
    if outcome.skipped:
        lines += ["", f"No reflink file system was measured: {outcome.skipped}."]
    return "\n".join(lines) + "\n"


def _rows(series: Sequence[Series]) -> Iterator[str]:
    reference: dict[str, Series] = {}
    for found in series:
        base = reference.setdefault(found.file_system, found)
        cells = [found.file_system, f"`{found.command}`"]
        for name in ("seconds", "synced"):
            times = [getattr(sample, name) for sample in found.samples]
            cells.append(f"{found.median(name):.2f} ({min(times):.2f} to {max(times):.2f})")
            cells.append(f"{found.median(name) / base.median(name):.2f}")
        cells.append(f"{found.median('cpu'):.2f}")
        cells.append(f"{max(sample.peak for sample in found.samples) / 1e6:.0f} MB")
        yield f"| {' | '.join(cells)} |"


def _comparison(outcome: Outcome) -> str:
    compared = " and ".join(f"{count} files on {kind}" for kind, count in outcome.compared.items())
    if outcome.different:
        return f"Split and combined again, {len(outcome.different)} of {compared} DIFFER from the original."
    return f"Split and combined again: {compared} equal the original (SHA-256)."


def _machine() -> str:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kernel = ".".join(platform.release().split(".")[:2])
    memory = f"{os.cpu_count()} CPU cores, {pages / 1e9:.0f} GB of memory"
    priority = f", at priority {os.nice(0)} (nice)" if os.nice(0) else ""
    return f"{memory}, Linux {kernel}, Python {platform.python_version()}{priority}"


def document(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain data, for ``--json``."""
    return {**asdict(outcome), "machine": _machine(), "date": date.today().isoformat()}


def main() -> None:
    """Entry point of ``python -m benchmarks.split``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", type=size_argument, default="8GB", help="bytes of weights (default 8GB)")
    parser.add_argument("--dir", type=Path, help="where to work; default: the folder for temporary files")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default 3)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    parser.add_argument("--only", choices=("plain", "reflink"), help="measure on one of the file systems")
    parser.add_argument("--experts", type=int, help="experts a layer; default 256, as in the model")
    parser.add_argument("--keep-cache", action="store_true", help="leave the machine's page cache alone")
    parser.add_argument("--json", action="store_true", help="print all samples as JSON, not the table")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that mounts and files go away
    try:
        directory = options.dir or Path(tempfile.gettempdir())
        outcome = run(
            options.size,
            directory,
            options.rounds,
            keep_cache=options.keep_cache,
            only=options.only,
            experts=options.experts,
        )
    except BenchmarkError as error:
        sys.exit(f"{parser.prog}: {error}")
    size = f"{options.size / 1e9:g}GB"
    kept = (
        (f" --experts {options.experts}" if options.experts else "")
        + (f" --only {options.only}" if options.only else "")
    ) + (" --keep-cache" if options.keep_cache else "")
    text = markdown(outcome, f"{parser.prog} --size {size} --rounds {options.rounds}{kept}")
    options.results.mkdir(parents=True, exist_ok=True)
    (
        options.results
        / f"split-{size}{kept.replace(' --', '-').replace(' ', '')}-{date.today().isoformat()}.md"
    ).write_text(text)
    print(json.dumps(document(outcome), indent=2) if options.json else text, end="")
    sys.exit(1 if outcome.different else 0)


if __name__ == "__main__":
    main()
