"""What a checkpoint holds, read from its headers alone: the input of every plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_convert.formats.safetensors import SafetensorsHeader
from mla_convert.storage import FileIdentity
from mla_convert.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One stored tensor: where its bytes are. Offsets are absolute in the file."""

    spec: TensorSpec
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file, by its name relative to the checkpoint."""

    name: str
    path: Path
    header: SafetensorsHeader
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that is no part of the weights (tokenizer, code, anything unknown), carried over as it is."""

    name: str
    path: Path
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON file that a conversion may have to edit: its exact bytes and what they parse to."""

    name: str
    data: bytes
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A checkpoint's inventory.

    Attributes:
        root: The folder the names are relative to.
        single_file: True if a lone .safetensors file was given rather than a folder.
        files: Weight files by name, in name order.
        tensors: Every tensor by name.
        config: ``config.json`` (or ``params.json`` of a native checkpoint) if there is one.
        index: ``*.safetensors.index.json`` if there is one.
        others: Everything else that is carried over.
        warnings: Sentences worth showing the user.
        copies: Where a tensor is stored more than once: the other files that hold a copy, equal by dtype and shape,
            and by its bytes as far as they are here.
        origin: ``hf://org/name@commit`` if it comes from the Hub; ``root`` is then its place in the Hub's cache.
    """

    root: Path
    single_file: bool
    files: Mapping[str, SourceFile]
    tensors: Mapping[str, SourceTensor]
    config: JsonFile | None
    index: JsonFile | None
    others: tuple[OtherFile, ...]
    warnings: tuple[str, ...] = ()
    origin: str | None = None
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What to call it to the user."""
        return self.origin or str(self.root)

    @property
    def nbytes(self) -> int:
        """Size of all weight files in bytes, headers included."""
        return sum(file.identity.size for file in self.files.values())

    def spec(self, name: str) -> TensorSpec | None:
        """The spec of one tensor, or None if the checkpoint has no such tensor."""
        tensor = self.tensors.get(name)
        return tensor.spec if tensor else None
