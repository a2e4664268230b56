"""Megatron's ``torch_dist`` checkpoints: what is in one, read without PyTorch and without Megatron.

A save folder has a tracker file and a folder for each iteration; an iteration has::

    .metadata        pickle: global shape of every tensor, its chunks, and where each chunk or object is stored
    metadata.json    {"sharded_backend": "torch_dist", ...}
    __R_I.distcp     items one after the other, each an archive of torch.save
    common.pt        state that all ranks share (arguments, iteration); from Megatron 0.19 an item of the checkpoint
    integrity.json   sha256 of every file, if it was asked for

A tensor's key holds no rank: ranks show only as chunks. Objects have keys like ``NAME/shard_0_1``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert import storage
from mla_convert.catalogue import OtherFile, SourceFile
from mla_convert.errors import BadInputError, CannotError, UsageError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.formats.pickles import Allowed, Instance
from mla_convert.formats.safetensors import SafetensorsHeader
from mla_convert.formats.torch_dist_metadata import SAVE_AGAIN, Chunk, DistMetadata, Item, read_metadata
from mla_convert.formats.torch_save import TENSOR_GLOBALS, StoredValue, open_archive
from mla_convert.storage import identify, os_errors
from mla_convert.strict_json import open_regular, read_json, read_up_to

METADATA = ".metadata"
BACKEND = "metadata.json"
COMMON = "common.pt"
INTEGRITY = "integrity.json"
TRACKER = "latest_checkpointed_iteration.txt"
#: The item that holds the common state where there is no ``common.pt``.
COMMON_KEY = "common_state/shard_0_1"
SUFFIX = ".distcp"

_PLAIN_TYPES = frozenset({"set", "frozenset", "bytearray", "complex", "slice", "range"})
#: What the common state may name: plain classes, arrays, and any of Megatron's own (enumerations, option classes).
COMMON_GLOBALS: Allowed = {
    **TENSOR_GLOBALS,
    "argparse": frozenset({"Namespace"}),
    "types": frozenset({"SimpleNamespace"}),
    "pathlib": frozenset({"PosixPath"}),
    "signal": frozenset({"Signals"}),
    "_io": frozenset({"BytesIO"}),
    "_codecs": frozenset({"encode"}),
    "numpy": frozenset({"ndarray", "dtype"}),
    "numpy.dtypes": frozenset({"UInt32DType"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "collections": frozenset({"OrderedDict"}),
    "builtins": _PLAIN_TYPES,
    "__builtin__": _PLAIN_TYPES,
    "megatron": frozenset({"*"}),
}

_MAX_JSON = 1 << 20
_ITERATION = re.compile(r"iter_(\d{7,})|release")
_OWN = re.compile(rf"(?:(?:{_ITERATION.pattern})/)?{re.escape(METADATA)}|{re.escape(TRACKER)}")


@dataclass(frozen=True, slots=True)
class TorchDist:
    """A torch_dist checkpoint.

    Attributes:
        root: The folder that was given: a save folder, or one iteration.
        prefix: What stands before the names of the iteration's files: ``iter_0001000/``, or nothing.
        files: The ``.distcp`` files, by name relative to ``root``.
        others: Every other file that is carried over, ``.metadata`` and ``common.pt`` among them.
        metadata: What ``.metadata`` says.
        common: The common state; empty if there is none.
        has_common_file: True if it is in ``common.pt``, as releases before 0.19 write it.
        warnings: Sentences worth showing the user.
        origin: ``hf://org/name@commit`` if ``root`` is a commit's place in the Hub's cache.
    """

    root: Path
    prefix: str
    files: Mapping[str, SourceFile]
    others: tuple[OtherFile, ...]
    metadata: DistMetadata
    common: Mapping[str, Any]
    has_common_file: bool
    warnings: tuple[str, ...]
    origin: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the iteration."""
        return self.root / self.prefix

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, as far as the common state has them."""
        args = self.common.get("args")
        state = args.state if isinstance(args, Instance) else None
        return state if isinstance(state, dict) else {}


def is_torch_dist(path: Path) -> bool:
    """True for a save folder with a tracker or iterations, and for an iteration with ``.metadata``."""
    if not path.is_dir():
        return False
    if (path / METADATA).exists() or (path / TRACKER).exists():
        return True
    with os_errors(path, "list"):
        return any(
            _ITERATION.fullmatch(entry.name) and (entry / METADATA).exists() for entry in path.iterdir()
        )


def lists_torch_dist(names: Iterable[str]) -> bool:
    """True if files of these names are such a checkpoint."""
    return any(_OWN.fullmatch(name) for name in names)


def open_torch_dist(path: Path, origin: str | None = None, notes: tuple[str, ...] = ()) -> TorchDist:
    """Read what a checkpoint says about itself; of its weights nothing.

    Args:
        path: A save folder (the iteration its tracker names is read) or the folder of one iteration.
        origin: What it is on the Hub, if it comes from there.
        notes: What the user should know about how it was found.

    Raises:
        UsageError: There is nothing at ``path``.
        BadInputError: It is damaged, incomplete, or asks for what no checkpoint needs.
        CannotError: It is a checkpoint of Megatron in another format.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a folder", hint="give the save folder, or the folder of one iteration"
        )
    prefix, warnings = _iteration(path)
    folder = path / prefix
    _check_backend(folder)
    metadata = read_metadata(folder / METADATA)
    names = {entry: prefix + entry for entry in _file_names(folder)}
    files = {
        names[name]: SourceFile(names[name], folder / name, no_header(size), found)
        for name in sorted(names)
        if name.endswith(SUFFIX)
        for found in (identify(folder / name),)
        for size in (found.size,)
    }
    _check_items(
        metadata, folder, {name.removeprefix(prefix): file.identity.size for name, file in files.items()}
    )
    common, has_file = _read_common(folder, metadata)
    taken = {*files, MANIFEST_NAME}
    others = tuple(
        OtherFile(name, path / name, identify(path / name))
        for name in sorted(_walk(path, prefix))
        if name not in taken
    )
    said = (*notes, *warnings)
    return TorchDist(path, prefix, files, others, metadata, common, has_file, said, origin)


def no_header(size: int) -> SafetensorsHeader:
    """The header of a weight file that has none."""
    return SafetensorsHeader(b"", None, (), 0, size)


# The folder


def _iteration(path: Path) -> tuple[str, list[str]]:
    """The iteration to read, as a prefix of names, and what to say about the others."""
    if (path / METADATA).exists():
        return "", []
    with os_errors(path, "list"):
        found = sorted(e.name for e in path.iterdir() if e.is_dir() and _ITERATION.fullmatch(e.name))
    tracker = path / TRACKER
    if not tracker.exists():
        if any(_is_legacy(path / name) for name in found) or _is_legacy(path):
            raise _legacy(path)
        if (path / (METADATA + ".tmp")).exists():
            raise BadInputError(f"{path} has {METADATA}.tmp but no {METADATA}", hint=SAVE_AGAIN)
        raise BadInputError(
            f"{path} has neither {METADATA} nor {TRACKER}",
            hint="give the folder of one iteration" if found else SAVE_AGAIN,
            details=found,
        )
    with open_regular(tracker) as file:
        text = read_up_to(file, 64, where=str(tracker)).decode("utf-8", "replace").strip()
    name = f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else text
    if _ITERATION.fullmatch(name) is None:
        raise BadInputError(
            f"{tracker} says {text!r}, which is neither a number nor release",
            hint="correct it, or give the folder of one iteration",
            details=found,
        )
    if name not in found:
        raise BadInputError(
            f"{tracker} names {name}, which is not there; there are {len(found)} other iterations",
            hint="give the folder of one of them, or copy the missing one here",
            details=found,
        )
    if _is_legacy(path / name):
        raise _legacy(path / name)
    if not (path / name / METADATA).exists():
        raise BadInputError(f"{path / name} has no {METADATA}", hint=SAVE_AGAIN)
    left = [other for other in found if other != name]
    return f"{name}/", [f"only {name} is read; {len(left)} other iterations stay behind"] if left else []


def _is_legacy(path: Path) -> bool:
    return any(entry.name.startswith("mp_rank_") for entry in path.iterdir()) if path.is_dir() else False


def _legacy(path: Path) -> CannotError:
    return CannotError(
        f"{path} is a checkpoint in Megatron's older torch format (mp_rank_*), not torch_dist",
        hint="`mla-convert reshard --to torch_dist` makes one of it",
    )


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND
    if not path.exists():
        raise CannotError(
            f"{folder} has {METADATA} but no {BACKEND}: a checkpoint of PyTorch or of Megatron-FSDP",
            hint="this version reads torch_dist, which Megatron writes by default",
        )
    value = read_json(path, max_bytes=_MAX_JSON)
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    if backend != "torch_dist" or value.get("sharded_backend_version") != 1:
        raise CannotError(
            f"{path} says {backend!r}, version {value.get('sharded_backend_version')!r}; this version reads "
            "torch_dist, version 1"
            if isinstance(value, dict)
            else f"{path} is no object"
        )


def _file_names(folder: Path) -> list[str]:
    with os_errors(folder, "list"):
        return sorted(entry.name for entry in folder.iterdir() if not entry.is_dir())


def _walk(root: Path, prefix: str) -> Iterator[str]:
    """Every file to carry over: all of the iteration's folder, and the files beside it."""
    if prefix:
        yield from _file_names(root)
    for parent, folders, names in os.walk(root / prefix):
        folders.sort()
        for name in names:
            yield (Path(parent) / name).relative_to(root).as_posix()


def _check_items(metadata: DistMetadata, folder: Path, sizes: Mapping[str, int]) -> None:
    """Every item must lie in a file that is there and long enough."""
    needed: dict[str, int] = {}
    for item in (*metadata.objects.values(), *(c.item for t in metadata.tensors.values() for c in t.chunks)):
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    missing = sorted(needed.keys() - sizes.keys())
    if missing:
        raise BadInputError(
            f"{folder}: {len(missing)} of {len(needed)} files that {METADATA} names are missing",
            hint=SAVE_AGAIN,
            details=missing,
        )
    for name, end in sorted(needed.items()):
        if sizes[name] < end:
            raise BadInputError(
                f"{folder / name} has {sizes[name]} bytes; {METADATA} places items up to byte {end}",
                hint=SAVE_AGAIN,
            )


# Items


def locate(folder: Path, key: str, chunk: Chunk, dtype: str) -> StoredValue:
    """Where the raw bytes of a chunk lie in its file.

    Raises:
        BadInputError: The item is damaged, or is not what ``.metadata`` says.
        CannotError: It is stored in a way this version does not read.
    """
    path = folder / chunk.item.file
    where = f"{path}: {storage.plain(key)} at {list(chunk.offsets)}"
    fd = storage.open_source(path)
    try:
        archive = open_archive(fd, chunk.item.offset, chunk.item.length, where)
        found = archive.tensor(archive.value(TENSOR_GLOBALS), key)
    finally:
        os.close(fd)
    if (found.spec.dtype, found.spec.shape) != (dtype, chunk.sizes):
        raise BadInputError(
            f"{where} is {found.spec.dtype} {list(found.spec.shape)}; {METADATA} says {dtype} {list(chunk.sizes)}"
        )
    return found


def read_object(folder: Path, key: str, item: Item, allowed: Allowed = COMMON_GLOBALS) -> Any:
    """The object of an item: Megatron saves a list of one."""
    path = folder / item.file
    where = f"{path}: {storage.plain(key)}"
    fd = storage.open_source(path)
    try:
        value = open_archive(fd, item.offset, item.length, where).value(allowed)
    finally:
        os.close(fd)
    if type(value) is not list or len(value) != 1:
        raise BadInputError(f"{where} is no list of one object")
    return value[0]


def _read_common(folder: Path, metadata: DistMetadata) -> tuple[Mapping[str, Any], bool]:
    """The common state, and whether it is in a file of its own, which then counts."""
    path = folder / COMMON
    if path.exists():
        fd = storage.open_source(path)
        try:
            value = open_archive(fd, 0, os.fstat(fd).st_size, str(path)).value(COMMON_GLOBALS)
        finally:
            os.close(fd)
    elif COMMON_KEY in metadata.objects:
        value = read_object(folder, COMMON_KEY, metadata.objects[COMMON_KEY])
    else:
        return {}, False
    if type(value) is not dict:
        raise BadInputError(f"{path if path.exists() else folder}: the common state is no dictionary")
    return value, path.exists()
