"""Times the TileLang kernels beside FlashMLA and plain torch, and checks every row against float64.

    python -m benchmarks.kernels [--only PART,...] [--rows PATTERN] [--flashmla LIBRARY] [--results FILE] [--json FILE]

Needs a Hopper GPU. Prints one table: time, TFLOP/s or TB/s and their share of the ceiling measured in the same run, the
ratio to each baseline, errors and goals. Times are medians over CUDA events in one process; a row and its baselines
take turns, under load that lasts and once more on a card that rests between calls. Exit code 0 if every row was
measured, 1 if not, 2 for options that cannot be, 4 without such a GPU, 130 if interrupted (Ctrl-C), with the table of
the rows until then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch

from benchmarks.kernels import backward, decode, dense, flashmla, selection, sparse
from benchmarks.kernels.common import Case, Ceilings, Row, as_json, ceilings, table, where

PARTS: dict[str, ModuleType] = {
    "sparse": sparse,
    "selection": selection,
    "backward": backward,
    "decode": decode,
    "dense": dense,
}


def parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").partition("\n\n")[0]
    )
    made.add_argument(
        "--only", type=parts, default=list(PARTS), metavar="PART,...", help=f"parts, of {', '.join(PARTS)}"
    )
    made.add_argument(
        "--rows", type=pattern, default=pattern(""), metavar="PATTERN",
        help="only rows in whose name this regular expression is found",
    )  # fmt: skip
    made.add_argument("--list", action="store_true", help="print the names of the rows, and measure nothing")
    made.add_argument(
        "--flashmla", type=Path, metavar="LIBRARY",
        help="FlashMLA as a library of torch operators, to time beside (flashmla_ops.abi3.so of sglang-kernel)",
    )  # fmt: skip
    made.add_argument(
        "--results", type=Path, metavar="FILE", help="write the table as Markdown, with the command"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines: the card, then one a row")
    return made


def measure(part: str, case: Case) -> Row:
    """Measures a row. One that fails costs no other, except by an error that a CUDA context does not survive."""
    try:
        found = case.measure()
        if any(math.isnan(error) for error in found.errors.values()):
            raise ArithmeticError("the result has NaN")
    except Exception as error:
        print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return Row(part, case, failure=f"{type(error).__name__}: {error}".partition("\n")[0])
    beside = "".join(f", {name} {other.ms:.3f}" for name, other in found.baselines.items())
    print(f"{case.name}: {found.ms:.3f} ms{beside}", file=sys.stderr, flush=True)
    return Row(part, case, found)


def report(rows: list[Row], limits: Ceilings, command: str) -> str:
    """The table between what it was measured on and how to read it."""
    card, product = where(limits), f"{limits.product_tflops:.0f} TFLOP/s"
    lines = [
        f"`{command}`",
        "",
        f"{card['device']}, torch {card['torch']}, {card['date']}. Ceilings in the same run: copy"
        f" {limits.copy_terabytes:.2f} TB/s, read plus written; bf16 8192³ product {product}.",
        "",
        table(rows, limits),
        "",
        'Errors are 1 - cosine with float64 on a sample of queries, for "keys" the share of keys; "times" is how'
        " many times as fast a row is as the baseline. Times are those under load that lasts, which lowers the clock"
        ' of the card; "rested" ones those of 2 ms of calls on a card that has had a pause of 20 ms.',
    ]
    for part in dict.fromkeys(row.part for row in rows):
        _, _, text = (PARTS[part].__doc__ or "").strip().partition("\n\n")
        lines += ["", f"**{part}**: {' '.join(text.split())}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    chosen = [
        (part, case)
        for part in options.only
        for case in PARTS[part].cases()
        if options.rows.search(case.name)
    ]
    if not chosen:
        parser().error(f"--rows {options.rows.pattern!r} is in no name; --list prints them")
    if options.list:
        print("\n".join(f"{part}: {case.name}" for part, case in chosen))
        return 0

    from mla_convert.runtime.dispatch import available

    runs, reason = available("cuda")
    if not runs:
        print(f"benchmarks.kernels: {reason}", file=sys.stderr)
        return 4
    try:
        if options.flashmla:
            flashmla.load(options.flashmla)
        for path in (options.results, options.json):
            if path:
                path.open("a").close()  # now, not when everything is measured
    except OSError as error:
        print(f"benchmarks.kernels: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    limits = ceilings()
    rows = []
    with contextlib.ExitStack() as stack:
        lines: TextIO | None = stack.enter_context(options.json.open("w")) if options.json else None
        _write(lines, where(limits))
        with contextlib.suppress(KeyboardInterrupt):
            for part, case in chosen:
                rows.append(measure(part, case))
                _write(lines, as_json(rows[-1], limits))
    text = report(rows, limits, _command(options))
    print(text)
    if options.results:
        options.results.write_text(f"# Kernels\n\n{text}\n", encoding="utf-8")
    if len(rows) < len(chosen):
        print(f"benchmarks.kernels: interrupted after {len(rows)} of {len(chosen)} rows", file=sys.stderr)
        return 130
    return 0 if all(row.found for row in rows) else 1


def _write(lines: TextIO | None, document: dict[str, object]) -> None:
    """Flushed, so that a run that is cut off leaves the rows it had."""
    if lines:
        print(json.dumps(document), file=lines, flush=True)


def _command(options: argparse.Namespace) -> str:
    """As somebody else would give it: without the folders of this machine."""
    words = ["python", "-m", "benchmarks.kernels"]
    if options.only != list(PARTS):
        words += ["--only", ",".join(options.only)]
    if options.rows.pattern:
        words += ["--rows", options.rows.pattern]
    if options.flashmla:
        words += ["--flashmla", options.flashmla.name]
    return shlex.join(words)


if __name__ == "__main__":
    raise SystemExit(main())
