"""What a run makes sure of, and the hashes it takes: guards hold, copies agree, the source stayed as it was."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from mla_convert import storage
from mla_convert.catalogue import Catalogue, OtherFile, SourceFile
from mla_convert.errors import BadInputError, DifferenceError
from mla_convert.filling import equal_tensors, opened_tensor, read_rows, sha256_of_range
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.manifest import read_manifest
from mla_convert.plan import EqualRows, Plan, Replicas, RewrittenFile
from mla_convert.reading import read_at
from mla_convert.storage import OnBytes
from mla_convert.strict_json import dump_json

# Before


def check_guards(plan: Plan) -> None:
    """Refuse a source that does not fulfil what the plan takes for granted.

    Raises:
        BadInputError: With the sentence of the guard that does not hold.
    """
    for guard in plan.guards:
        if not isinstance(guard, EqualRows):
            if not equal_tensors(plan.catalogue, guard.left, guard.right):
                raise BadInputError(guard.otherwise, hint="the checkpoint was changed since it was sharded")
            continue
        left = read_rows(plan.catalogue, guard.left, guard.left_row, guard.count)
        if left != read_rows(plan.catalogue, guard.right, guard.right_row, guard.count):
            raise BadInputError(
                guard.otherwise, hint="the split checkpoint was changed; combine cannot choose for you"
            )


def differing_replicas(replicas: Iterable[Replicas], sha256: Mapping[str, str]) -> list[str]:
    """A sentence for each tensor that is not the same on all ranks, by the hashes of its copies."""
    details = []
    for one in replicas:
        ranks = [key.partition(":")[0] for key in one.keys if sha256[key] != sha256[one.keys[0]]]
        if ranks:
            details.append(f"{one.name}: rank {', '.join(ranks)} differs from rank 0")
    return details


# Meanwhile


def hash_tensor(catalogue: Catalogue, name: str, on_bytes: OnBytes) -> str:
    """Hex sha256 of a source tensor's bytes."""
    tensor = catalogue.tensors[name]
    with opened_tensor(catalogue, name) as fd:
        return sha256_of_range(fd, tensor.start, tensor.spec.nbytes, name, on_bytes)


def read_tensor(catalogue: Catalogue, name: str) -> bytes:
    """All bytes of a source tensor, which is to be small."""
    tensor = catalogue.tensors[name]
    with opened_tensor(catalogue, name) as fd:
        return read_at(fd, tensor.spec.nbytes, tensor.start, name)


def hash_file(path: Path, on_bytes: OnBytes) -> str:
    """Hex sha256 of a file."""
    fd = storage.open_source(path)
    try:
        return sha256_of_range(fd, 0, os.fstat(fd).st_size, path.name, on_bytes)
    finally:
        os.close(fd)


def check_restored(fd: int, file: RewrittenFile, on_bytes: OnBytes) -> None:
    """A restored tensor of a file just written must be the one that was taken apart.

    Raises:
        DifferenceError: It is another.
    """
    for target, offset in file.placed():
        if target.sha256 is None:
            continue
        found = sha256_of_range(fd, offset, target.spec.nbytes, target.spec.name, on_bytes)
        if found != target.sha256:
            raise DifferenceError(
                f"{target.spec.name} does not come back as it was: sha256 {found[:16]}…, "
                f"recorded {target.sha256[:16]}…",
                hint="K or V was changed since the split; --ignore-manifest combines it as it is now",
            )


# After


def changed_sources(catalogue: Catalogue) -> list[str]:
    """Names of the source's files that are not what they were when the catalogue was read."""
    sources: tuple[SourceFile | OtherFile, ...] = (*catalogue.files.values(), *catalogue.others)
    with storage.os_errors(catalogue.root, "examine"):
        changed = [file.name for file in sources if not _is_unchanged(file)]
        jsons = [file for file in (catalogue.index, catalogue.config) if file]
        changed += [file.name for file in jsons if not _holds(catalogue.root / file.name, file.data)]
    return list(dict.fromkeys(changed))


def _is_unchanged(file: SourceFile | OtherFile) -> bool:
    then = file.identity
    try:
        now = file.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (now.st_size, now.st_mtime_ns, now.st_ino) == (then.size, then.mtime_ns, then.inode)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except (FileNotFoundError, NotADirectoryError):
        return False


def complete_checksums(target: Path) -> None:
    """Add to the manifest of a finished output the hashes that it lacks."""
    manifest = read_manifest(target)
    if manifest is None or all(entry.get("sha256") for entry in manifest.files.values()):
        return
    files = {
        name: {**entry, "sha256": entry.get("sha256") or hash_file(target / name, lambda _: None)}
        for name, entry in manifest.files.items()
    }
    storage.write_file_atomic(target / MANIFEST_NAME, dump_json({**manifest.value, "files": files}))
