"""What a conversion will do, decided from headers alone: pure, deterministic, printable, hashable.

A plan names every file of the output. A rewritten file is a header and, for each tensor, the ordered pieces of
source tensors that make it up. Running the same plan twice gives the same bytes, so "resume" means "skip what is
finished of the same plan", and a dry run is the plan itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_convert.catalogue import Catalogue
from mla_convert.formats.safetensors import data_offsets
from mla_convert.tensors import Box, TensorSpec

#: Raised whenever the same inputs would lead to other bytes than before, so that old journals are not resumed.
PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Copy:
    """``box`` of a source tensor, unchanged, at index ``at`` of the target."""

    source: str
    box: Box
    at: tuple[int, ...]

    def describe(self) -> list[Any]:
        """Canonical form for the plan's hash and for ``--json``."""
        return ["copy", self.source, [list(extent) for extent in self.box], list(self.at)]


@dataclass(frozen=True, slots=True)
class Dequantise:
    """``count`` rows of FP8 codes times one row of scales, as BF16 rows from ``at``."""

    source: str
    scale: str
    row: int
    count: int
    at: int
    scale_row: int
    block_columns: int

    def describe(self) -> list[Any]:
        """Canonical form for the plan's hash and for ``--json``."""
        rows = [self.row, self.count, self.at, self.scale_row]
        return ["dequantise", self.source, self.scale, *rows, self.block_columns]


@dataclass(frozen=True, slots=True)
class Requantise:
    """``count`` BF16 rows back to the FP8 codes they came from; ``scales`` are the original scale bytes."""

    source: str
    row: int
    count: int
    at: int
    scales: bytes
    scale_dtype: str
    block_columns: int

    def describe(self) -> list[Any]:
        """Canonical form for the plan's hash and for ``--json``."""
        rows = [self.row, self.count, self.at]
        return ["requantise", self.source, *rows, self.scale_dtype, self.scales.hex(), self.block_columns]


@dataclass(frozen=True, slots=True)
class Inline:
    """A whole tensor whose bytes the plan itself carries (scales kept in a manifest)."""

    data: bytes

    def describe(self) -> list[Any]:
        """Canonical form for the plan's hash and for ``--json``."""
        return ["inline", hashlib.sha256(self.data).hexdigest()]


@dataclass(frozen=True, slots=True)
class Zeros:
    """``count`` rows of zeros from row ``at`` of the target: padding of a vocabulary."""

    at: int
    count: int

    def describe(self) -> list[Any]:
        """Canonical form for the plan's hash and for ``--json``."""
        return ["zeros", self.at, self.count]


Piece = Copy | Dequantise | Requantise | Inline | Zeros


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor of the output and what it is made of. ``sha256`` is what its bytes must hash to, if known."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]
    sha256: str | None = None

    @property
    def is_carried(self) -> bool:
        """True if it is one source tensor under its own name, whole."""
        if len(self.pieces) != 1:
            return False
        piece, spec = self.pieces[0], self.spec
        return (
            isinstance(piece, Copy)
            and piece.source == spec.name
            and piece.box == spec.full_box()
            and not any(piece.at)
        )

    def describe(self) -> dict[str, Any]:
        """Canonical form; a tensor that is carried over whole needs no pieces."""
        described: dict[str, Any] = {
            "name": self.spec.name,
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
        }
        if not self.is_carried:
            described["pieces"] = [piece.describe() for piece in self.pieces]
        return described


def whole(spec: TensorSpec) -> Copy:
    """The piece that copies all of ``spec``."""
    return Copy(spec.name, spec.full_box(), (0,) * len(spec.shape))


@dataclass(frozen=True, slots=True)
class RewrittenFile:
    """A weight file with a new header. Its tensors are in data order."""

    name: str
    header: bytes
    tensors: tuple[TargetTensor, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out the size, in bytes, once: a shard may hold thousands of tensors."""
        size = len(self.header) + sum(target.spec.nbytes for target in self.tensors)
        object.__setattr__(self, "size", size)

    def placed(self) -> Iterator[tuple[TargetTensor, int]]:
        """Every tensor with its absolute offset in the file."""
        stored = data_offsets([target.spec for target in self.tensors], len(self.header))
        for target, place in zip(self.tensors, stored, strict=True):
            yield target, place.start


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A source file that reaches the output unchanged. Weight files may be linked, others are copied."""

    name: str
    path: Path
    size: int
    is_weights: bool


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """A small file whose bytes the plan carries: index, configuration."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class EqualRows:
    """A condition on the source: two runs of rows must hold the same bytes, or the plan must not run."""

    left: str
    left_row: int
    right: str
    right_row: int
    count: int
    otherwise: str

    def describe(self) -> list[Any]:
        """Canonical form."""
        return [self.left, self.left_row, self.right, self.right_row, self.count]


@dataclass(frozen=True, slots=True)
class EqualTensors:
    """A condition on the source: two ways to make up a tensor must give the same bytes. Copies and zeros only."""

    left: TargetTensor
    right: TargetTensor
    otherwise: str

    def describe(self) -> list[Any]:
        """Canonical form."""
        return [self.left.describe(), self.right.describe()]


@dataclass(frozen=True, slots=True)
class Replicas:
    """A condition on the source: a tensor that several ranks hold in full, by its key on each, is the same on all."""

    name: str
    keys: tuple[str, ...]

    def describe(self) -> list[Any]:
        """Canonical form."""
        return ["replicas", *self.keys]


Guard = EqualRows | EqualTensors


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a conversion will do.

    Attributes:
        operation: ``split``, ``combine`` or ``reshard``.
        options: The options that change bytes, for the manifest and the hash.
        catalogue: The source.
        rewritten, carried, generated: The output's files.
        guards: Conditions on source bytes, checked before anything is written.
        replicas: Tensors that must be the same on every rank, checked before anything is written.
        hashed: Source tensors whose sha256 goes into the manifest.
        manifest: The manifest's fields that are known beforehand; the engine adds sizes and hashes.
        warnings: Sentences worth showing the user.
    """

    operation: str
    options: Mapping[str, Any]
    catalogue: Catalogue
    rewritten: tuple[RewrittenFile, ...]
    carried: tuple[CarriedFile, ...]
    generated: tuple[GeneratedFile, ...]
    guards: tuple[Guard, ...] = ()
    replicas: tuple[Replicas, ...] = ()
    hashed: tuple[str, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def bytes_rewritten(self) -> int:
        """Bytes of the files that get a new header."""
        return sum(file.size for file in self.rewritten)

    @property
    def bytes_carried(self) -> int:
        """Bytes of the files that stay as they are."""
        return sum(file.size for file in self.carried)

    @property
    def bytes_total(self) -> int:
        """Size of the whole output, without the manifest."""
        return self.bytes_rewritten + self.bytes_carried + sum(file.size for file in self.generated)

    @property
    def changed(self) -> Iterator[TargetTensor]:
        """The output tensors that are not plain carry-overs."""
        return (t for file in self.rewritten for t in file.tensors if not t.is_carried)

    def source_identity(self) -> dict[str, list[int]]:
        """Size and modification time of every source file that the plan reads.

        A commit on the Hub never changes, and when its files were downloaded says nothing: their time is 0.
        """
        identities = {f.name: f.identity for f in self.catalogue.files.values()}
        identities |= {f.name: f.identity for f in self.catalogue.others}
        pinned = self.catalogue.origin is not None
        return {
            name: [found.size, 0 if pinned else found.mtime_ns] for name, found in sorted(identities.items())
        }

    def describe(self) -> dict[str, Any]:
        """The plan as plain data: what ``--dry-run --json`` prints and what the hash is taken over."""
        return {
            "version": PLAN_VERSION,
            "operation": self.operation,
            "options": dict(self.options),
            **({"origin": self.catalogue.origin} if self.catalogue.origin else {}),
            "source": self.source_identity(),
            "rewritten": [
                {
                    "name": file.name,
                    "size": file.size,
                    "header_sha256": hashlib.sha256(file.header).hexdigest(),
                    # The header holds the name, dtype and shape of the others.
                    "tensors": [target.describe() for target in file.tensors if not target.is_carried],
                }
                for file in self.rewritten
            ],
            "carried": [{"name": file.name, "size": file.size} for file in self.carried],
            "generated": [
                {"name": file.name, "size": file.size, "sha256": hashlib.sha256(file.data).hexdigest()}
                for file in self.generated
            ],
            "guards": [guard.describe() for guard in (*self.guards, *self.replicas)],
        }

    def digest(self) -> str:
        """sha256 of :meth:`describe`: the same inputs and options always give the same digest."""
        text = json.dumps(self.describe(), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
