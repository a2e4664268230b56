"""Times ``mla-convert reshard`` against ``cp -r`` of the same folder, and measures its memory.

    python -m benchmarks.reshard --size 8GB --dir /scratch

From one Hugging Face folder to eight ranks in both formats, and back to one folder. Every tensor is in one pass of
its own: column-parallel slices are long runs, row-parallel ones (``o_proj``, ``down_proj``) a run for each row. The
commands take turns; before each, everything is flushed and, where permitted, the page cache is dropped. The figures
are medians. What came back is compared with the original by ``mla-convert diff``. Needs three and a half times
``--size`` of space and removes all of it afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import checkpoint
from benchmarks.split import (
    RESULTS,
    BenchmarkError,
    Contender,
    Outcome,
    Series,
    _drop_caches,
    _file_system,
    _machine,
    _once,
    _remove,
    _rows,
    _tool,
)

RANKS = 8


@dataclass(slots=True)
class Found:
    """What the benchmark found: the samples of every command, and the outcome of the comparison."""

    outcome: Outcome
    workers: int
    shares: dict[str, float] = field(default_factory=dict)
    diff: int = -1


def run(size: int, directory: Path, rounds: int, *, experts: int, workers: int, keep_cache: bool) -> Found:
    """Run the benchmark in a new folder inside ``directory``, and remove that folder.

    Raises:
        BenchmarkError: A command failed, or the space does not suffice.
    """
    directory.mkdir(parents=True, exist_ok=True)
    need, free = size * 7 // 2 + (1 << 30), shutil.disk_usage(directory).free
    if need > free:
        raise BenchmarkError(f"needs {need / 1e9:.1f} GB of space; {free / 1e9:.1f} GB are free")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mla-benchmark-", dir=directory) as folder:
        root = Path(folder)
        command = [sys.executable, "-m", "benchmarks.checkpoint", str(root / "model"), "--size", str(size)]
        command += ["--experts", str(experts), "--ranks", str(RANKS), "--json"]
        made = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        if made.returncode:
            raise BenchmarkError(f"cannot make the checkpoint: {made.stderr.strip()}")
        found = Found(Outcome(json.loads(made.stdout), not keep_cache and _drop_caches()), workers)
        found.shares = _shares(size, experts)
        _measure(root, rounds, found)
        diff = [sys.executable, "-m", "mla_convert", "diff", str(root / "model"), str(root / "back"), "-q"]
        found.diff = subprocess.run(diff, capture_output=True).returncode
    found.outcome.load = (load, os.getloadavg()[0])
    return found


def _shares(size: int, experts: int) -> dict[str, float]:
    """Part of the bytes in row-parallel weights that are cut: those of which every row is a run of its own."""
    tensors = [t for shard in checkpoint.shards(checkpoint.fit(size, experts, RANKS)) for t in shard]
    total = sum(tensor.nbytes for tensor in tensors)
    cut = [
        tensor.nbytes
        for tensor in tensors
        if ".o_proj." in tensor.name or (".down_proj." in tensor.name and ".experts." not in tensor.name)
    ]
    return {"row_parallel": sum(cut) / total}


def _measure(root: Path, rounds: int, found: Found) -> None:
    more = ("--workers", str(found.workers))
    tp = ("--tp", str(RANKS))
    copy = Contender("cp -r", ("cp", "-r", root / "model", root / "copied"), root / "copied")
    folders = _tool("reshard", root / "model", root / "folders", *tp, *more)
    files = _tool("reshard", root / "model", root / "files", *tp, "--to", "deepseek", *more)
    back = _tool("reshard", root / "files", root / "back", "--tp", "1", "--to", "huggingface", *more)
    contenders = [copy, folders, files, back]
    series = [Series(_file_system(root), contender.shown) for contender in contenders]
    found.outcome.series += series
    for number in range(rounds):
        for contender, one in zip(contenders, series, strict=True):
            one.samples.append(_once(contender, root, found.outcome))
            if contender in (copy, folders):
                _remove(contender.output)
        _remove(files.output)
        if number < rounds - 1:
            _remove(back.output)


def markdown(found: Found, command: str) -> str:
    """The report: what was run, on what, and the figures."""
    outcome = found.outcome
    counts, rounds = outcome.checkpoint, len(outcome.series[0].samples)
    caches = "dropped" if outcome.caches_dropped else "not dropped"
    same = (
        "equal the original's" if found.diff == 0 else f"DIFFER from the original's (exit code {found.diff})"
    )
    return "\n".join(
        [
            f"# Reshard against copying, {date.today().isoformat()}",
            "",
            f"    {command}",
            "",
            f"{_machine()}. Load average {outcome.load[0]:.1f} before and {outcome.load[1]:.1f} after.",
            "",
            f"A synthetic checkpoint in the shard structure of DeepSeek-V3: {counts['bytes'] / 1e9:.2f} GB, "
            f"{counts['tensors']} tensors, {counts['files']} shards; {found.shares['row_parallel']:.0%} of the "
            f"bytes in row-parallel weights, of which each of {RANKS} ranks holds a part of every row.",
            "",
            f"Median of {rounds} (lowest to highest), commands in turn, page cache {caches} before each. `reshard` "
            "flushes every file it writes; `cp` does not, so *synced* includes a final flush of the file system. "
            f"Ratios are to `cp`. Peak memory is that of the process, with {found.workers} workers.",
            "",
            "| file system | command | seconds | ratio | seconds, synced | ratio | CPU seconds | peak memory |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
            *_rows(outcome.series),
            "",
            *_paired(outcome.series),
            "",
            f"Sharded and put together again, the tensors {same} (`mla-convert diff`).",
            "",
        ]
    )


def _paired(series: Sequence[Series]) -> Iterator[str]:
    """Ratios within each round: what else the machine did meanwhile changes from round to round."""
    base = series[0].samples
    for one in series[1:]:
        ratios = [mine.synced / theirs.synced for mine, theirs in zip(one.samples, base, strict=True)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        median = statistics.median(ratios)
        yield f"- `{one.command}`, synced, against the `cp` of its round: {shown}; median {median:.2f}."


def document(found: Found) -> dict[str, Any]:
    """The outcome as plain data, for ``--json``."""
    return {**asdict(found), "machine": _machine(), "date": date.today().isoformat()}


def main() -> None:
    """Entry point of ``python -m benchmarks.reshard``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--size", type=checkpoint.size_argument, default="8GB", help="bytes of weights (default 8GB)"
    )
    parser.add_argument("--dir", type=Path, help="where to work; default: the folder for temporary files")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default 3)")
    parser.add_argument("--experts", type=int, default=8, help="experts a layer (default 8)")
    parser.add_argument("--workers", type=int, default=4, help="workers of reshard (default 4, as its own)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    parser.add_argument("--keep-cache", action="store_true", help="leave the machine's page cache alone")
    parser.add_argument("--json", action="store_true", help="print all samples as JSON, not the table")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that files go away
    try:
        found = run(
            options.size,
            options.dir or Path(tempfile.gettempdir()),
            options.rounds,
            experts=options.experts,
            workers=options.workers,
            keep_cache=options.keep_cache,
        )
    except BenchmarkError as error:
        sys.exit(f"{parser.prog}: {error}")
    size = f"{options.size / 1e9:g}GB"
    more = f" --experts {options.experts} --workers {options.workers}" + (
        " --keep-cache" if options.keep_cache else ""
    )
    text = markdown(found, f"{parser.prog} --size {size} --rounds {options.rounds}{more}")
    options.results.mkdir(parents=True, exist_ok=True)
    name = f"reshard-{size}-experts{options.experts}-{date.today().isoformat()}.md"
    (options.results / name).write_text(text)
    print(json.dumps(document(found), indent=2) if options.json else text, end="")
    sys.exit(1 if found.diff else 0)


if __name__ == "__main__":
    main()
