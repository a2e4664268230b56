"""Real megatron-core for tests: finds its releases, and asks a process that has one of them to save and load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: To 0.15 ``.metadata`` names classes of Megatron; to 0.18 the common state is in common.pt, later in the checkpoint.
VERSIONS = ("0.15.3", "0.16.1", "0.19.2")
_SCRIPT = Path(__file__).with_name("megatron_process.py")


@dataclass(frozen=True)
class Recipe:
    """A small model to save.

    Attributes:
        stacked: One tensor for all layers, as dense models have it; else one a layer.
        layout: ``combined`` or ``split``.
        norms: ``fused`` (a field of the up-projection) or ``standalone``.
        optimizer: ``none``, ``fully_reshardable``, ``whole`` (not distributed), ``dp_reshardable``, or ``model_space``
            (``fully_sharded_model_space``, which releases to 0.15 save).
        extra: Extra states: ``none``, ``empty`` or ``delayed`` (FP8 with delayed scaling).
        arguments: Further arguments in the common state; None for no arguments at all.
    """

    stacked: bool = False
    layout: str = "combined"
    norms: str = "standalone"
    optimizer: str = "none"
    extra: str = "empty"
    layers: int = 3
    tp: int = 2
    dsa: bool = True
    moe: bool = True
    mtp: bool = True
    seed: int = 0
    arguments: dict[str, Any] | None = field(default_factory=dict)


STACKED = Recipe(stacked=True, dsa=False, moe=False, mtp=False)


@dataclass(frozen=True)
class Loaded:
    """What Megatron loaded: tensors by key (as saved in a safetensors file), objects and the common state as text."""

    tensors: dict[str, Any]
    objects: dict[str, str]
    common: str


class Megatron:
    """One release of megatron-core, in a process of its own for each data-parallel rank."""

    def __init__(self, version: str, folder: Path, scratch: Path, ranks: int = 1) -> None:
        self.version, self._scratch, self._count = version, scratch, 0
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", _SCRIPT, str(rank), str(ranks), scratch / "store"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(scratch / f"stderr-{rank}").open("w"),
                env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(ranks)
        ]

    def save(self, folder: Path, recipe: Recipe) -> dict[str, Any]:
        """Save a model; its tensors, whole, by key."""
        tensors = self._file()
        self._ask({"do": "save", "recipe": asdict(recipe), "out": str(folder), "tensors": str(tensors)})
        return _read(tensors)

    def load(self, folder: Path) -> Loaded:
        """All that Megatron finds in a folder, loaded by it."""
        tensors = self._file()
        answer = self._ask({"do": "load", "path": str(folder), "tensors": str(tensors)})
        return Loaded(_read(tensors), answer["objects"], answer["common"])

    def indexer(self, weights: dict[str, Any], interleaved: bool | None = None) -> dict[str, Any]:
        """Scores, and the keys chosen by them, of this release's indexer with these weights."""
        from safetensors.torch import save_file

        source, result = self._file(), self._file()
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, source)
        self._ask(
            {"do": "indexer", "weights": str(source), "tensors": str(result), "interleaved": interleaved}
        )
        return _read(result)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=60)

    def _file(self) -> Path:
        self._count += 1
        return self._scratch / f"{self._count}.safetensors"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first rank's answer. Every rank writes its tensors, the same, to a file of its own but the first."""
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            own = {**request, "tensors": request["tensors"] + ("" if rank == 0 else f".{rank}")}
            process.stdin.write(json.dumps(own) + "\n")
            process.stdin.flush()
        answers = [self._answer(rank) for rank in range(len(self._processes))]
        return answers[0]

    def _answer(self, rank: int) -> dict[str, Any]:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError((self._scratch / f"stderr-{rank}").read_text()[-4000:])
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"megatron-core {self.version}: {answer['error']}")
        return answer


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def release_folder(version: str) -> Path | None:
    """Where a release is unpacked: ``MEGATRON_CORE/VERSION``, or beside the interpreter, where ``make`` puts it."""
    for base in (os.environ.get("MEGATRON_CORE"), Path(sys.prefix) / "megatron-core"):
        if base and (Path(base) / version / "megatron" / "core").is_dir():
            return Path(base) / version
    return None


@contextmanager
def megatron_process(version: str, scratch: Path, ranks: int = 1) -> Iterator[Megatron]:
    """A release, for as long as the ``with`` statement lasts; skips where it is not there."""
    folder = release_folder(version)
    if folder is None:
        pytest.skip(f"megatron-core {version} is not there; `make test` unpacks it")
    release = Megatron(version, folder, scratch, ranks)
    try:
        yield release
    finally:
        release.close()
