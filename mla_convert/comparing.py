"""``diff``: two checkpoints, tensor by tensor, whatever formats, ranks and layouts they are stored in.

Both are seen as one Hugging Face checkpoint in combined layout, and each tensor's bytes are made up from wherever they
lie, a band of rows at a time. Nothing is written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.errors import CannotError
from mla_convert.filling import equal_bands, equal_tensors
from mla_convert.gathering import Gatherer
from mla_convert.geometry import AttentionBlock, Layout, find_blocks
from mla_convert.hub_source import downloaded, hub_id
from mla_convert.layouts import LaidOut, lay_out
from mla_convert.names import Naming
from mla_convert.plan import Replicas, TargetTensor, whole
from mla_convert.progress import Progress, SilentProgress
from mla_convert.quant import SCALE_FIELDS
from mla_convert.tensors import TensorSpec
from mla_convert.whole import Whole, open_whole, read_whole

#: What each symbol means.
SYMBOLS: Mapping[str, str] = {
    "=": "the same",
    "*": "the same, stored in another layout",
    "!": "different",
    "-": "only in A",
    "+": "only in B",
}


@dataclass(frozen=True, slots=True)
class Line:
    """The outcome for one tensor: a symbol of ``SYMBOLS``, and what there is to say."""

    symbol: str
    name: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of ``diff``, in order of the first checkpoint, then what only the second has."""

    left: str
    right: str
    lines: tuple[Line, ...]

    @property
    def is_same(self) -> bool:
        """True if both hold the same tensors with the same bytes."""
        return all(line.symbol in "=*" for line in self.lines)

    def differences(self) -> list[str]:
        """A sentence for each difference."""
        return [
            f"{x.symbol} {x.name}" + (f": {x.note}" if x.note else "")
            for x in self.lines
            if x.symbol not in "=*"
        ]

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "command": "diff",
            "a": self.left,
            "b": self.right,
            "same": self.is_same,
            "counts": {symbol: sum(line.symbol == symbol for line in self.lines) for symbol in SYMBOLS},
            "tensors": [{"symbol": x.symbol, "name": x.name, "note": x.note or None} for x in self.lines],
        }


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint in combined layout."""

    whole: Whole
    laid_out: LaidOut
    replicas: Mapping[str, Replicas]

    @classmethod
    def open(cls, source: str | Path, trust_shapes: bool, progress: Progress) -> _Side:
        asked = hub_id(source)
        found = downloaded(asked, progress).read(read_whole, progress) if asked else open_whole(Path(source))
        blocks: tuple[AttentionBlock, ...] = ()
        if Naming.of(found.logical.tensors).blocks:
            blocks = find_blocks(found.logical, trust_shapes=trust_shapes)
        try:
            laid_out = lay_out(found.logical, found.made_of, blocks, Layout.COMBINED)
        except CannotError:  # K and V that no combined tensor can hold are compared as they are
            laid_out = lay_out(found.logical, found.made_of, blocks, None)
        return cls(found, laid_out, {one.name: one for one in found.replicas})

    def stored(self, name: str) -> str:
        """In which form the tensor lies there, in however many slices."""
        if name not in self.whole.logical.tensors:
            return "split"
        module, _, field = name.rpartition(".")
        is_finer = field in SCALE_FIELDS and module in self.whole.mark.reblocked
        return "in finer scale blocks" if is_finer else "as it is"

    def fault(self, name: str) -> str | None:
        """Why the tensor's own copies contradict each other; None if they do not."""
        one = self.replicas.get(self.laid_out.came_from.get(name, name))
        if one is None:
            return None
        tensors = self.whole.source.tensors
        first = _as_target(tensors[one.keys[0]].spec, one.keys[0])
        for key in one.keys[1:]:
            if not equal_tensors(self.whole.source, first, _as_target(tensors[key].spec, key)):
                return f"rank {key.partition(':')[0]} differs from rank 0"
        return None


def _as_target(spec: TensorSpec, key: str) -> TargetTensor:
    return TargetTensor(spec, (whole(TensorSpec(key, spec.dtype, spec.shape)),))


def compare(
    left: str | Path,
    right: str | Path,
    *,
    workers: int = 2,
    trust_shapes: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every tensor of two checkpoints.

    Args:
        left: A checkpoint in any format; ``hf://org/name[@revision]`` is downloaded into the Hub's cache.
        right: What to compare it with, named likewise.
        workers: Tensors compared at a time.
        trust_shapes: Let tensor shapes win where a configuration contradicts them.
        progress: Who is told about progress.

    Raises:
        MlaConvertError: One of them cannot be read.
    """
    progress = progress or SilentProgress()
    a, b = (_Side.open(source, trust_shapes, progress) for source in (left, right))
    names = [*a.laid_out.tensors, *(name for name in b.laid_out.tensors if name not in a.laid_out.tensors)]
    total = sum(target.spec.nbytes for target in a.laid_out.tensors.values())
    progress.start("diff", total, "bytes")
    stop = threading.Event()

    def one(name: str) -> Line:
        if stop.is_set():
            return Line("!", name)
        line = _compare_one(a, b, name)
        if name in a.laid_out.tensors:
            progress.advance(a.laid_out.tensors[name].spec.nbytes)
        return line

    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            try:
                lines = tuple(pool.map(one, names))
            except BaseException:
                stop.set()
                raise
        broken = _broken_guards(b, "B") | _broken_guards(a, "A")
    finally:
        progress.finish()
    lines = tuple(_with_fault(line, broken.pop(line.name, None)) for line in lines)
    return Comparison(
        str(left), str(right), (*lines, *(Line("!", name, fault) for name, fault in broken.items()))
    )


def _with_fault(line: Line, fault: str | None) -> Line:
    return Line("!", line.name, fault) if fault and line.symbol in "=*" else line


def _compare_one(a: _Side, b: _Side, name: str) -> Line:
    mine, theirs = a.laid_out.tensors.get(name), b.laid_out.tensors.get(name)
    if mine is None or theirs is None:
        return Line("+" if mine is None else "-", name)
    if (mine.spec.dtype, mine.spec.shape) != (theirs.spec.dtype, theirs.spec.shape):
        was, now = (f"{spec.dtype} {list(spec.shape)}" for spec in (mine.spec, theirs.spec))
        return Line("!", name, f"{was} in A, {now} in B")
    for which, side in (("A", a), ("B", b)):
        fault = side.fault(name)
        if fault:
            return Line("!", name, f"{fault} in {which}")
    with Gatherer(a.whole.source) as left, Gatherer(b.whole.source) as right:
        if not equal_bands(left.bands(mine), right.bands(theirs)):
            return Line("!", name, "the bytes differ")
    ways = [side.stored(name) for side in (a, b)]
    if ways[0] == ways[1]:
        return Line("=", name)
    return Line("*", name, f"{ways[0]} in A, {ways[1]} in B")


def _broken_guards(side: _Side, which: str) -> dict[str, str]:
    """By tensor: the first condition that does not hold, of those under which its combined, coarse form is whole."""
    broken: dict[str, str] = {}
    for guard in (*side.whole.guards, *side.laid_out.guards):
        name = guard.right.spec.name
        name = name if name in side.laid_out.tensors else next(iter(_successors(side, name)), name)
        if name not in broken and not equal_tensors(side.whole.source, guard.left, guard.right):
            broken[name] = f"{guard.otherwise} in {which}"
    return broken


def _successors(side: _Side, name: str) -> list[str]:
    """The tensors that stand in the place of one that another layout does not have."""
    return [new for new, old in side.laid_out.came_from.items() if old == name]
