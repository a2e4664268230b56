"""``mla-convert.json``: what made an output folder, what is in it, and how to get the original back.

The manifest lies beside the weights. It records every file's size (and sha256 where it is known), the sha256 of
each combined KV up-projection, and the original bytes of everything that a conversion replaced: headers, index,
configuration and, after ``--dequantize``, scales. ``combine`` rebuilds the original files from it byte for byte.

A sha256 of a large untouched file is ``null`` until somebody reads the file anyway: ``split --checksum`` or
``verify`` fill it in. Linking a terabyte takes seconds, hashing it does not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert import __version__
from mla_convert.errors import BadInputError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.strict_json import dump_json, read_json

MANIFEST_VERSION = 1
_MAX_RESTORED = 1 << 30


def pack(data: bytes) -> str:
    """Bytes as compressed base64 text."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def unpack(text: Any, where: str) -> bytes:
    """The inverse of :func:`pack`, bounded in size.

    Raises:
        BadInputError: The text is not what ``pack`` makes.
    """
    try:
        decoder = zlib.decompressobj()
        data = decoder.decompress(base64.b64decode(text, validate=True), _MAX_RESTORED)
    except (binascii.Error, zlib.error, TypeError, ValueError) as error:
        raise BadInputError(f"{where}: damaged restore data ({error})") from error
    if not decoder.eof:
        raise BadInputError(f"{where}: damaged restore data (truncated)")
    return data


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest as read from disk. ``value`` is the whole document."""

    path: Path
    value: Mapping[str, Any]

    @property
    def operation(self) -> str:
        """The conversion that made this folder."""
        return str(self.value["operation"])

    @property
    def plan(self) -> str:
        """Digest of the plan that made this folder."""
        return str(self.value["plan"])

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Size and sha256 of every file, by name."""
        files: Mapping[str, Mapping[str, Any]] = self.value["files"]
        return files

    @property
    def restore_headers(self) -> dict[str, bytes]:
        """Original headers of the rewritten weight files."""
        return self._unpacked("headers")

    @property
    def restore_files(self) -> dict[str, bytes]:
        """Original bytes of index and configuration."""
        return self._unpacked("files")

    @property
    def restore_tensors(self) -> dict[str, bytes]:
        """Original bytes of tensors that the output does not hold in any form."""
        return self._unpacked("tensors")

    @property
    def tensor_sha256(self) -> Mapping[str, str]:
        """sha256 of each source tensor that the conversion took apart or put together, by name."""
        hashes: Mapping[str, str] = self.value["tensor_sha256"]
        return hashes

    def _unpacked(self, kind: str) -> dict[str, bytes]:
        where = str(self.path)
        return {name: unpack(text, where) for name, text in self.value["restore"][kind].items()}

    @property
    def source_origin(self) -> str | None:
        """``hf://org/name@commit`` if the original is on the Hub, where it can't have changed."""
        path: str = self.value["source"]["path"]
        return path if path.startswith("hf://") else None

    def source_folder(self, at: Path | None = None) -> Path | None:
        """The original checkpoint, if it still lies where it lay and its files have the recorded sizes.

        Args:
            at: Where to look instead, such as the Hub's cache.
        """
        recorded = self.value["source"]
        path = at or (self.path.parent / recorded["path"]).resolve()
        for name, (size, _) in recorded["files"].items():
            try:
                if (path / name).stat().st_size != size:
                    return None
            except OSError:
                return None
        return path


def new_manifest(
    *,
    operation: str,
    options: Mapping[str, Any],
    layout: str,
    plan: str,
    source: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    restore: Mapping[str, Mapping[str, str]],
    blocks: list[dict[str, Any]],
    tensor_sha256: Mapping[str, str],
) -> bytes:
    """Render a manifest. Nothing in it depends on the clock, so equal conversions give equal manifests."""
    return dump_json(
        {
            "manifest": MANIFEST_VERSION,
            "tool": {"name": "mla-convert", "version": __version__},
            "operation": operation,
            "options": dict(options),
            "layout": layout,
            "plan": plan,
            "source": dict(source),
            "blocks": blocks,
            "tensor_sha256": dict(tensor_sha256),
            "files": {name: dict(entry) for name, entry in sorted(files.items())},
            "restore": {kind: dict(restore.get(kind, {})) for kind in ("headers", "files", "tensors")},
        }
    )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none.

    Raises:
        BadInputError: It is damaged, or written by a newer version.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    value = read_json(path)
    hint = f"remove {MANIFEST_NAME} to go on without it; the original headers are then lost"
    if not isinstance(value, dict) or type(value.get("manifest")) is not int:
        raise BadInputError(f"{path} is not a manifest of this tool", hint=hint)
    if value["manifest"] > MANIFEST_VERSION:
        raise BadInputError(
            f"{path} has format {value['manifest']}; this version reads up to {MANIFEST_VERSION}",
            hint="use a newer mla-convert",
        )
    shape: dict[str, type] = {
        "operation": str,
        "plan": str,
        "source": dict,
        "blocks": list,
        "tensor_sha256": dict,
        "files": dict,
        "restore": dict,
    }
    for field, kind in shape.items():
        if not isinstance(value.get(field), kind):
            raise BadInputError(f"{path}: {field} is missing or not {kind.__name__}", hint=hint)
    if not all(isinstance(value["restore"].get(kind), dict) for kind in ("headers", "files", "tensors")):
        raise BadInputError(f"{path}: restore is incomplete", hint=hint)
    if not all(isinstance(e, dict) and type(e.get("size")) is int for e in value["files"].values()):
        raise BadInputError(f"{path}: files is damaged", hint=hint)
    source = value["source"]
    sizes = source.get("files")
    if (
        not isinstance(source.get("path"), str)
        or not isinstance(sizes, dict)
        or not all(_is_identity(entry) for entry in sizes.values())
    ):
        raise BadInputError(f"{path}: source is damaged", hint=hint)
    if not all(isinstance(digest, str) for digest in value["tensor_sha256"].values()):
        raise BadInputError(f"{path}: tensor_sha256 is damaged", hint=hint)
    return Manifest(path, value)


def _is_identity(entry: Any) -> bool:
    """True for ``[size, mtime_ns]``."""
    return isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)


def sha256_of(data: bytes) -> str:
    """Hex sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()
