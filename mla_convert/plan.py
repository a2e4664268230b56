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
from mla_convert.formats.torch_archive import Directory
from mla_convert.formats.torch_save_writing import Envelope
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
    """``box`` of a source's FP8 codes times its scales, as BF16 at index ``at`` of the target.

    The box lies in one row of scale blocks. Its first column lies ``skip`` columns into the block whose scale stands
    at ``scale_at`` (row, column); the scales of the blocks to its right follow in that row.
    """

    source: str
    scale: str
    box: Box
    at: tuple[int, int]
    scale_at: tuple[int, int]
    block_columns: int
    skip: int = 0

    def describe(self) -> list[Any]:
        """Canonical form for the plan's hash and for ``--json``."""
        places = [[list(extent) for extent in self.box], list(self.at), list(self.scale_at)]
        return ["dequantise", self.source, self.scale, *places, self.block_columns, self.skip]


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
    """One tensor of the output and what it is made of.

    Attributes:
        spec: Its name, dtype and shape.
        pieces: What it is made of.
        sha256: What its bytes must hash to, if known.
        is_carried: It is one source tensor under its own name, whole; made by :meth:`carried`.
    """

    spec: TensorSpec
    pieces: tuple[Piece, ...]
    sha256: str | None = None
    is_carried: bool = False

    @classmethod
    def carried(cls, spec: TensorSpec) -> TargetTensor:
        """The source's tensor of that name, dtype and shape."""
        return cls(spec, (whole(spec),), None, True)

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
    """A weight file with a new header, or with an envelope around each tensor. Its tensors are in data order.

    Where all envelopes are parts of one archive, ``header`` is its beginning and ``directory`` its end.
    """

    name: str
    header: bytes
    tensors: tuple[TargetTensor, ...]
    envelopes: tuple[Envelope, ...] = ()
    directory: Directory | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out the size, in bytes, once: a shard may hold thousands of tensors."""
        size = len(self.header) + sum(target.spec.nbytes for target in self.tensors)
        size += sum(len(envelope) for envelope in self.envelopes)
        size += self.directory.size if self.directory else 0
        object.__setattr__(self, "size", size)

    def placed(self) -> Iterator[tuple[TargetTensor, int]]:
        """Every tensor with its absolute offset in the file."""
        at = len(self.header)
        if self.envelopes:
            for target, envelope in zip(self.tensors, self.envelopes, strict=True):
                yield target, at + len(envelope.before)
                at += len(envelope) + target.spec.nbytes
            return
        for target in self.tensors:
            yield target, at
            at += target.spec.nbytes


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

    @property
    def names(self) -> list[str]:
        """Every file of the output, but for the manifest."""
        files: tuple[RewrittenFile | CarriedFile | GeneratedFile, ...] = (
            *self.rewritten,
            *self.carried,
            *self.generated,
        )
        return [file.name for file in files]

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
