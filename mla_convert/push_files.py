"""What a push sends: the files of a manifest, each checked against it, and the manifest as others may see it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mla_convert import storage
from mla_convert.errors import (
    BadInputError,
    CannotError,
    DifferenceError,
    LocalIOError,
    MlaConvertError,
    UsageError,
)
from mla_convert.filling import sha256_of_range
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.formats.torch_dist import is_torch_dist, open_torch_dist
from mla_convert.formats.torch_legacy import is_torch, open_torch
from mla_convert.manifest import Manifest, read_manifest, sha256_of
from mla_convert.megatron.model import is_optimizer_key
from mla_convert.progress import Progress
from mla_convert.sharing import LINK_THRESHOLD
from mla_convert.storage import plain
from mla_convert.strict_json import dump_json, parse_json, read_bytes

README = "README.md"
#: Stands for the source's path in what is pushed: no folder is called so, and so none is found.
UNPUBLISHED = "(not published)"
_FORBIDDEN = frozenset({"", ".", "..", ".git", ".cache"})
_WEIGHTS = (".safetensors", ".distcp", ".pt")


@dataclass(frozen=True, slots=True)
class PushFile:
    """One file to push: from ``path`` on disk, or ``data``. ``sha256`` is what its bytes had when checked."""

    name: str
    size: int
    sha256: str
    path: Path | None
    data: bytes | None

    @classmethod
    def of(cls, name: str, data: bytes) -> PushFile:
        """A file made of bytes."""
        return cls(name, len(data), sha256_of(data), None, data)

    def git_oid(self) -> str:
        """The oid git gives it, by which the Hub knows files that are no LFS objects."""
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        data = self.data if self.data is not None else self.path.read_bytes() if self.path else b""
        digest.update(data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Publication:
    """A checked checkpoint.

    Attributes:
        manifest: The manifest, with the sha256 of every file.
        files: Every file of the manifest by name; not the manifest itself.
        verification: What ``verify`` recorded, or None.
        warnings: What the user should know.
    """

    manifest: Manifest
    files: Mapping[str, PushFile]
    verification: Mapping[str, Any] | None
    warnings: tuple[str, ...]

    @property
    def verified(self) -> bool:
        """Has ``verify`` passed?"""
        return self.verification is not None and self.verification.get("passed") is True

    @property
    def withheld(self) -> bool:
        """Does the source's path lead out of the folder, so that it is not for others to see?"""
        return leads_outside(self.manifest.value["source"]["path"])

    def with_readme(self, readme: bytes | None) -> dict[str, PushFile]:
        """Every file to push: with another README if there is one, and with the manifest as others may see it."""
        files = dict(self.files)
        if readme is not None:
            files[README] = PushFile.of(README, readme)
        value = dict(self.manifest.value)
        value["files"] = {
            file.name: {"size": file.size, "sha256": file.sha256}
            for file in sorted(files.values(), key=lambda file: file.name)
            if file.name in self.files
        }
        if self.withheld:
            value["source"] = {**value["source"], "path": UNPUBLISHED}
        files[MANIFEST_NAME] = PushFile.of(MANIFEST_NAME, dump_json(value))
        return dict(sorted(files.items()))


def leads_outside(path: str) -> bool:
    """Does a path relative to the checkpoint leave it, and so tell something of this machine?"""
    normal = os.path.normpath(path)
    return normal == ".." or normal.startswith("../") or os.path.isabs(normal)  # noqa: PTH117 - a str


def read_publication(folder: Path, *, unverified: bool, record: bool, progress: Progress) -> Publication:
    """Read the manifest of ``folder`` and check every file of it: size first, then sha256.

    Args:
        folder: An output of this tool.
        unverified: Go on without a verification.
        record: Note in the manifest the hashes that it lacked.
        progress: Who is told about hashing.

    Raises:
        UsageError: There is no such folder.
        CannotError: There is no manifest, or nothing has verified what it lists.
        DifferenceError: A file was changed.
        BadInputError, LocalIOError: Something cannot be read.
    """
    if not folder.exists():
        raise UsageError(f"{plain(folder)} does not exist")
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None:
        raise CannotError(
            f"{plain(folder)} has no {MANIFEST_NAME}, so it is not known which files are meant",
            hint="push an output of mla-convert; for other folders there is hf upload",
        )
    _check_names(manifest)
    _check_sizes(folder, manifest)
    recorded = manifest.value.get("verification")
    verification = recorded if isinstance(recorded, dict) else None
    if not unverified:
        _require_verified(folder, manifest, verification)
    files = _read_files(folder, manifest, progress)
    completed = _completed(manifest, files, record=record)
    return Publication(completed, files, verification, tuple(_warnings(folder, completed)))


def _check_names(manifest: Manifest) -> None:
    for name in manifest.files:
        parts = name.split("/")
        if _FORBIDDEN & set(parts) or "\0" in name or "\\" in name or name == MANIFEST_NAME:
            raise BadInputError(
                f"{plain(manifest.path)} lists {name!r}, which is no name of a file in a repository",
                hint="the manifest was edited; convert again",
            )


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    changed = []
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            changed.append(f"{name} is missing")
            continue
        except OSError as error:
            raise LocalIOError(f"cannot examine {plain(folder / name)}: {error.strerror}") from error
        if size != entry["size"]:
            changed.append(f"{name} has {size} bytes, the manifest says {entry['size']}")
    _refuse_changes(folder, changed)


def _refuse_changes(folder: Path, changed: list[str]) -> None:
    if changed:
        count = f"{len(changed)} file" + ("s are" if len(changed) > 1 else " is")
        raise DifferenceError(
            f"{count} not as the manifest of {plain(folder)} says; nothing was pushed",
            hint="undo the change, or convert again",
            details=changed,
        )


def _require_verified(folder: Path, manifest: Manifest, verification: Mapping[str, Any] | None) -> None:
    hint = "verify it first: mla-convert verify PATH; or push it with --unverified, and the card says so"
    if verification is None:
        raise CannotError(f"{plain(folder)} has not been verified", hint=hint)
    if verification.get("passed") is not True:
        raise CannotError(f"{plain(folder)} was verified and did not pass", hint=hint)
    # What has no hash yet was last known by the one who wrote the manifest: the verification, as a rule.
    written = storage.identify(manifest.path).mtime_ns
    later = [
        name
        for name, entry in manifest.files.items()
        if not entry.get("sha256") and storage.identify(folder / name).mtime_ns > written
    ]
    if later:
        raise CannotError(
            f"{plain(folder)} has files without a recorded sha256 that are newer than its verification",
            hint=hint.replace("first", "again"),
            details=later,
        )


def _read_files(folder: Path, manifest: Manifest, progress: Progress) -> dict[str, PushFile]:
    stop = threading.Event()

    def advance(count: int) -> None:
        if stop.is_set():
            raise InterruptedError
        progress.advance(count)

    entries = manifest.files
    progress.start("check files", sum(entry["size"] for entry in entries.values()), "bytes")
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="mla-convert")
    try:
        futures = {name: pool.submit(_read_file, folder, name, advance) for name in entries}
        wait(futures.values(), return_when=FIRST_EXCEPTION)
        for future in futures.values():
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                raise error
        files = {name: future.result() for name, future in futures.items()}
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        progress.finish()
    changed = [
        f"{name} has sha256 {file.sha256}, the manifest says {entries[name]['sha256']}"
        for name, file in files.items()
        if entries[name].get("sha256") not in (None, file.sha256) or file.size != entries[name]["size"]
    ]
    _refuse_changes(folder, changed)
    return files


def _read_file(folder: Path, name: str, advance: Callable[[int], None]) -> PushFile:
    """Hash a file. What is small and no weights is kept, so that what is sent is what was hashed."""
    path = folder / name
    size = storage.identify(path).size
    if size <= LINK_THRESHOLD and not name.endswith(_WEIGHTS):
        data = read_bytes(path, max_bytes=LINK_THRESHOLD)
        advance(len(data))
        return PushFile(name, len(data), sha256_of(data), path, data)
    fd = storage.open_source(path)
    try:
        return PushFile(name, size, sha256_of_range(fd, 0, size, plain(path), advance), path, None)
    finally:
        os.close(fd)


def _completed(manifest: Manifest, files: Mapping[str, PushFile], *, record: bool) -> Manifest:
    """The manifest with every sha256, also on disk if ``record``: nobody need read the files again to know them."""
    if all(entry.get("sha256") for entry in manifest.files.values()):
        return manifest
    entries = {name: {**entry, "sha256": files[name].sha256} for name, entry in manifest.files.items()}
    value = {**manifest.value, "files": entries}
    if record:
        with suppress(LocalIOError):  # it may be read-only; what is pushed has the hashes all the same
            storage.write_file_atomic(manifest.path, dump_json(value))
    return Manifest(manifest.path, value)


def _warnings(folder: Path, manifest: Manifest) -> list[str]:
    warnings = _megatron_warnings(folder)
    entry = manifest.files.get("config.json")
    if entry and entry["size"] <= LINK_THRESHOLD:
        config = parse_json(read_bytes(folder / "config.json"), where="config.json")
        name = config.get("_name_or_path") if isinstance(config, dict) else None
        if isinstance(name, str) and PurePosixPath(name).is_absolute():
            warnings.append(
                f"config.json names a local path under _name_or_path, and is pushed as it is: {name}"
            )
    return warnings


def _megatron_warnings(folder: Path) -> list[str]:
    """What a checkpoint of Megatron tells besides weights, and perhaps should not."""
    arguments: Mapping[str, Any] = {}
    has_optimizer = False
    try:
        if is_torch(folder):
            ranks = open_torch(folder)
            arguments, has_optimizer = ranks.arguments, any(rank.has_optimizer for rank in ranks.ranks)
        elif is_torch_dist(folder):
            found = open_torch_dist(folder)
            arguments = found.arguments
            has_optimizer = any(is_optimizer_key(key) for key in found.metadata.tensors)
    except MlaConvertError:  # what is pushed unverified may be in any state
        return []
    warnings = []
    if has_optimizer:
        warnings.append(
            "the optimizer's state is pushed with the weights; `mla-convert split --drop-optimizer` leaves it out"
        )
    local = sorted(name for name, value in arguments.items() if _names_a_path(value))
    if local:
        warnings.append(
            f"Megatron's arguments name local paths, and are pushed as they are: {', '.join(local[:5])}"
            + (f" and {len(local) - 5} more" if local[5:] else "")
        )
    return warnings


def _names_a_path(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and PurePosixPath(each).is_absolute() for each in values)
