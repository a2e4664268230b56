"""``demo``, and ``verify`` without a path: the whole tool run on the built-in model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mla_convert import storage
from mla_convert.api import Conversion, combine, split
from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.errors import UsageError
from mla_convert.progress import Progress

if TYPE_CHECKING:
    from mla_convert.verification.result import VerifyReport

_PREFIX = "mla-convert-demo-"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What ``demo`` did and found. ``identical`` tells for each original file whether it came back."""

    original: Path
    split: Conversion
    verification: VerifyReport
    combine: Conversion
    identical: dict[str, bool]
    kept: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """True if the split verifies and every original file came back byte for byte."""
        return self.verification.passed and all(self.identical.values())

    @property
    def failures(self) -> list[str]:
        """One line for each thing that failed."""
        changed = [name for name, same in self.identical.items() if not same]
        return self.verification.failures + [f"{name} did not come back byte for byte" for name in changed]

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "command": "demo",
            "passed": self.passed,
            "folder": str(self.original.parent) if self.kept else None,
            "split": self.split.document(),
            "verify": self.verification.document(),
            "combine": self.combine.document(),
            "identical": self.identical,
            "seconds": round(self.seconds, 3),
        }


def run_demo(output: Path | None = None, *, tp: int = 8, progress: Progress | None = None) -> DemoResult:
    """Make the demo checkpoint, split it, verify the split, combine it again and compare every file.

    Args:
        output: A new folder to keep everything in; None uses a temporary one.
        tp: Tensor-parallel ranks to verify with.
        progress: Who is told about progress.

    Raises:
        UsageError: ``output`` exists already.
    """
    from mla_convert.verify import VerifyOptions, verify

    started = time.monotonic()
    if output is not None and output.exists():
        raise UsageError(f"{output} exists already", hint="name a new folder with -o")
    with TemporaryDirectory(prefix=_PREFIX) as temporary:
        original = (output or Path(temporary)) / "demo"
        with storage.os_errors(original, "write"):
            write_demo_checkpoint(original)
        parted = split(original, progress=progress)
        report = verify(parted.output, original, VerifyOptions(tp=tp), progress)
        whole = combine(parted.output, progress=progress)
        identical = {
            path.name: path.read_bytes() == (whole.output / path.name).read_bytes()
            for path in sorted(original.iterdir())
        }
    seconds = time.monotonic() - started
    return DemoResult(original, parted, report, whole, identical, output is not None, seconds)


@contextmanager
def checkpoint_or_demo(
    path: str | Path | None, say: Callable[[str], None]
) -> Iterator[tuple[str | Path, Path | None]]:
    """The checkpoint to verify and, for the demo model, its original; says which one it chose.

    Without ``path`` it is the checkpoint in the current folder, and where there is none the built-in demo model,
    split in a temporary folder.
    """
    if path is not None:
        yield path, None
    elif any(Path().glob("*.safetensors")):
        say(f"no PATH given: verifying the checkpoint in this folder, {Path().resolve()}")
        yield Path(), None
    else:
        say("no PATH given and no checkpoint in this folder: verifying the built-in demo model")
        with TemporaryDirectory(prefix=_PREFIX) as folder:
            original = Path(folder) / "demo"
            write_demo_checkpoint(original)
            yield split(original).output, original
