"""Hugging Face checkpoints: a folder of safetensors shards with or without an index, or one file.

Shards may carry any name, but names are checked, so an index cannot point outside its folder, although symbolic links
are followed (``folder``).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_convert.catalogue import Catalogue, JsonFile, OtherFile, SourceFile, SourceTensor
from mla_convert.errors import BadInputError, CannotError, UsageError
from mla_convert.formats.deepseek import parse_rank_file
from mla_convert.formats.folder import Folder
from mla_convert.names import parse_up_projection
from mla_convert.reading import read_at
from mla_convert.strict_json import MAX_BYTES, open_regular, parse_json, read_up_to

MANIFEST_NAME = "mla-convert.json"
INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_NAMES = ("config.json", "params.json")
#: Bytes of two copies of a tensor that are compared at a time.
_COMPARED = 4 << 20
_SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)\.safetensors")
_RANK_FOLDER = re.compile(r"rank(\d+)-of-(\d+)")
_MEGATRON = re.compile(r"\.metadata$|latest_checkpointed_iteration\.txt$|mp_rank_\d|iter_\d|.*\.distcp$")


def no_such_path(path: Path) -> UsageError:
    """What to say where nothing is; a repository's name is easily taken for a path."""
    is_repository = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(path)) is not None
    hint = f"if you mean the repository on the Hub: hf://{path}" if is_repository else None
    if str(path).startswith("hf:/"):
        hint = "give what is on the Hub as text; a Path loses one of the two slashes"
    return UsageError(f"{path} does not exist", hint=hint)


def rank_folder(rank: int, ranks: int) -> str:
    """The folder of one rank of a checkpoint that lies sharded under Hugging Face names."""
    return f"rank{rank}-of-{ranks}"


def parse_rank_folder(name: str) -> tuple[int, int] | None:
    """(rank, ranks) of a folder's name; None if it is no such folder."""
    found = _RANK_FOLDER.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def open_checkpoint(path: Path) -> Catalogue:
    """Read the inventory of a checkpoint: headers, index and configuration, never a weight.

    Args:
        path: A folder, a ``.safetensors`` file, an index file, or a Hub cache folder with one snapshot.

    Raises:
        UsageError: There is nothing at ``path``.
        BadInputError: The checkpoint is damaged or contradicts itself.
        CannotError: It is a checkpoint of a kind this reader does not handle.
    """
    folder = folder_of(path)
    return read_catalogue(folder) if folder else _open_file(path)


def folder_of(path: Path) -> Folder | None:
    """The folder that ``path`` stands for: itself, that of an index, a cache's snapshot; None for another file.

    Raises:
        UsageError: There is nothing at ``path``, or a cache without one snapshot to choose.
    """
    if not os.path.lexists(path):
        raise no_such_path(path)
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        path = path.parent
    return Folder(_snapshot(path)) if path.is_dir() else None


def read_catalogue(folder: Folder) -> Catalogue:
    """The inventory of the checkpoint in a folder; errors are those of :func:`open_checkpoint`."""
    names = _weight_names(folder)
    index = _read_index(folder)
    weights, warnings = _indexed(folder, names, index) if index else (names, [])
    if not index:
        _require_whole_series(folder, names)
    folder.announce(weights)
    files = {name: folder.weights(name) for name in sorted(weights)}
    tensors, copies = _tensors(files, index)
    warnings += _require_equal(folder, files, tensors, copies)
    if index:
        _check_index(index, tensors)
        index.value["weight_map"] = {
            sys.intern(name): file for name, file in index.value["weight_map"].items()
        }
    others, more = other_files(folder, files, index)
    return Catalogue(
        root=folder.root,
        single_file=False,
        files=files,
        tensors=tensors,
        config=read_config(folder.root),
        index=index,
        others=others,
        warnings=(*folder.warnings, *warnings, *more),
        origin=folder.origin,
        copies={name: tuple(copy.file for copy in found) for name, found in copies.items()},
    )


def _open_file(path: Path) -> Catalogue:
    if path.suffix != ".safetensors":
        raise CannotError(
            f"{path} is not a .safetensors file or a folder",
            hint="give the checkpoint's folder, or one .safetensors file",
        )
    files = {path.name: Folder(path.parent).weights(path.name)}
    return Catalogue(
        root=path.parent,
        single_file=True,
        files=files,
        tensors=_tensors(files, None)[0],
        config=read_config(path.parent),
        index=None,
        others=(),
    )


def _snapshot(path: Path) -> Path:
    """A Hub cache folder (``models--org--name``) stands for the snapshot that it holds."""
    snapshots = path / "snapshots"
    if not snapshots.is_dir() or any(name.endswith(".safetensors") for name in Folder(path).entries()):
        return path
    found = sorted(entry for entry in snapshots.iterdir() if entry.is_dir())
    main = path / "refs" / "main"
    if main.is_file():
        revision = main.read_text(errors="replace").strip()
        found = [entry for entry in found if entry.name == revision] or found
    if len(found) != 1:
        raise UsageError(
            f"{path} is a Hub cache with {len(found)} snapshots",
            hint="name one of them",
            details=[str(entry) for entry in found],
        )
    return found[0]


def _weight_names(folder: Folder) -> list[str]:
    entries = folder.entries()
    names = [name for name in entries if name.endswith(".safetensors")]
    ranks = [name for name in names if (found := parse_rank_file(name)) and found[1] > 1]
    folders = [name for name in entries if parse_rank_folder(name) and folder.holds_folder(name)]
    if ranks or folders:
        what = f"{len(ranks)} tensor-parallel rank files" if ranks else f"{len(folders)} folders of ranks"
        raise CannotError(
            f"{folder} holds {what}, {(ranks or folders)[0]} among them",
            hint="inspect, reshard and diff read it; `mla-convert reshard --tp 1` makes one checkpoint of it",
        )
    if names:
        return names
    if any(_MEGATRON.match(name) for name in entries):
        raise CannotError(
            f"{folder} looks like a Megatron checkpoint, not a Hugging Face one",
            hint="give its save folder, or the folder of one iteration",
        )
    for suffix, what in ((".bin", "PyTorch pickle"), (".pt", "PyTorch pickle"), (".gguf", "GGUF")):
        if any(name.endswith(suffix) for name in entries):
            raise CannotError(
                f"{folder} holds {what} files and no .safetensors",
                hint="convert it to safetensors first; this tool never unpickles a model",
            )
    raise BadInputError(
        f"{folder} holds no .safetensors files ({len(entries)} entries)", hint="is the download complete?"
    )


def _require_whole_series(folder: Folder, names: Sequence[str]) -> None:
    """Without an index, only their numbers show whether all shards are there."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in names:
        found = _SHARD.fullmatch(name)
        if found:
            series.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    for (stem, count), numbers in series.items():
        if len(numbers) < count:
            raise BadInputError(
                f"{folder}: {stem}*-of-{count} has {len(numbers)} shards of {count}, and there is no index",
                hint="download the missing shards and the index before converting",
                details=[f"shard {number}" for number in sorted(numbers)],
            )


def _read_index(folder: Folder) -> JsonFile | None:
    found = [name for name in folder.entries() if name.endswith(INDEX_SUFFIX)]
    if not found:
        return None
    name = "model" + INDEX_SUFFIX if "model" + INDEX_SUFFIX in found else found[0]
    if len(found) > 1 and not name.startswith("model."):
        raise BadInputError(
            f"{folder} has {len(found)} indexes and none is model{INDEX_SUFFIX}",
            hint="keep the weights of one checkpoint in the folder",
            details=found,
        )
    path = folder.root / name
    index = _read_json_object(folder.root, name)
    weight_map = index.value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError(f"{path}: there is no weight_map in it", hint="download the index again")
    safe: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in safe:
            weight_map[tensor] = safe[file]  # one string a file, not one a tensor
        elif _is_safe_name(file):
            safe[file] = file
        else:
            raise BadInputError(
                f"{path}: unsafe file name {file!r} for tensor {tensor!r}",
                hint="a weight_map value must be a bare .safetensors file name",
            )
    if not isinstance(index.value.get("metadata", {}), dict):
        raise BadInputError(f"{path}: metadata is not an object")
    return index


def _is_safe_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and len(name) > len(".safetensors")
        and not any(char in name for char in "/\\\0")
        and name not in (".", "..")
    )


def _indexed(folder: Folder, names: list[str], index: JsonFile) -> tuple[list[str], list[str]]:
    """The shards that an index names, and a warning for each other one that is no part of the model."""
    weight_map: Mapping[str, str] = index.value["weight_map"]
    wanted = set(weight_map.values())
    missing = sorted(wanted - set(names))
    if missing:
        lost = sum(file in set(missing) for file in weight_map.values())
        raise BadInputError(
            f"{folder}: {len(missing)} of {len(wanted)} shards named by {index.name} are missing "
            f"({lost} tensors)",
            hint="download them before converting",
            details=missing,
        )
    warnings = []
    for name in sorted(set(names) - wanted):
        tensors = folder.weights(name).header.tensors
        if not tensors:
            wanted.add(name)  # a shard whose tensors a conversion took away: it may come back
            continue
        held = [tensor.spec.name for tensor in tensors if parse_up_projection(tensor.spec.name)]
        if held and not name.startswith("consolidated"):
            raise BadInputError(
                f"{folder}/{name} is not in {index.name}, but it holds {len(tensors)} tensors, "
                f"{len(held)} of them KV up-projections",
                hint="the index is stale, or the file is left over: regenerate the one or remove the other",
                details=held,
            )
        warnings.append(f"{name} is not in {index.name}; it is carried over unchanged")
    return sorted(wanted), warnings


def _tensors(
    files: Mapping[str, SourceFile], index: JsonFile | None
) -> tuple[dict[str, SourceTensor], dict[str, list[SourceTensor]]]:
    """Every tensor by name, and of those that are in several shards the other copies: the index's one counts."""
    weight_map: Mapping[str, str] = index.value["weight_map"] if index else {}
    tensors: dict[str, SourceTensor] = {}
    copies: dict[str, list[SourceTensor]] = {}
    for file in files.values():
        for stored in file.header.tensors:
            name = stored.spec.name
            found = SourceTensor(stored.spec, file.name, stored.start, stored.stop)
            first = tensors.setdefault(name, found)
            if first is found:
                continue
            if weight_map.get(name) == file.name:
                tensors[name], found = found, first
            copies.setdefault(name, []).append(found)
    if not tensors:
        raise BadInputError(f"none of the {len(files)} weight files holds a tensor")
    return tensors, copies


def _require_equal(
    folder: Folder,
    files: Mapping[str, SourceFile],
    tensors: Mapping[str, SourceTensor],
    copies: Mapping[str, Sequence[SourceTensor]],
) -> list[str]:
    """A warning for tensors that are in several shards, all copies alike.

    Raises:
        BadInputError: Two copies differ.
    """
    later = 0
    for name, found in copies.items():
        for copy in found:
            same = _are_equal(folder, files, tensors[name], copy)
            if same is False:
                raise BadInputError(
                    f"tensor {name} is in two shards, and not the same: {tensors[name].file} and {copy.file}",
                    hint="keep the weights of one checkpoint in the folder",
                    details=[f"{x.file}: {x.spec.dtype} {list(x.spec.shape)}" for x in (tensors[name], copy)],
                )
            later += same is None
    if not copies:
        return []
    name, (first, *_) = next(iter(copies.items()))
    what = f"{len(copies)} tensors are" if len(copies) > 1 else "a tensor is"
    how = "their bytes are compared once they are downloaded" if later else "the copies are equal"
    return [f"{what} in two shards ({name} in {tensors[name].file} and {first.file}); {how}"]


def _are_equal(
    folder: Folder, files: Mapping[str, SourceFile], one: SourceTensor, other: SourceTensor
) -> bool | None:
    """None if the bytes are not here."""
    if (one.spec.dtype, one.spec.shape) != (other.spec.dtype, other.spec.shape):
        return False
    if not (folder.is_here(one.file) and folder.is_here(other.file)):
        return None
    with open_regular(files[one.file].path) as left, open_regular(files[other.file].path) as right:
        for at in range(0, one.spec.nbytes, _COMPARED):
            count = min(_COMPARED, one.spec.nbytes - at)
            if read_at(left.fileno(), count, one.start + at, one.file) != read_at(
                right.fileno(), count, other.start + at, other.file
            ):
                return False
    return True


def _check_index(index: JsonFile, tensors: Mapping[str, SourceTensor]) -> None:
    weight_map: Mapping[str, str] = index.value["weight_map"]
    absent = sorted(set(weight_map) - set(tensors))
    unlisted = sorted(set(tensors) - set(weight_map))
    moved = sorted(
        name for name, file in weight_map.items() if name in tensors and tensors[name].file != file
    )
    if not (absent or unlisted or moved):
        return
    raise BadInputError(
        f"{index.name} does not describe the shards: {len(absent)} tensors it lists are in none of them, "
        f"{len(unlisted)} are not listed, {len(moved)} lie in another shard",
        hint="the index is stale or a shard is from another model; download both again",
        details=[
            *(f"listed only: {name}" for name in absent),
            *(f"not listed: {name}" for name in unlisted),
            *(f"{name}: listed in {weight_map[name]}, found in {tensors[name].file}" for name in moved),
        ],
    )


def _read_json_object(root: Path, name: str) -> JsonFile:
    with open_regular(root / name) as file:
        data = read_up_to(file, MAX_BYTES + 1, where=str(root / name))
    value = parse_json(data, where=str(root / name))
    if not isinstance(value, dict):
        raise BadInputError(f"{root / name}: expected a JSON object, found {type(value).__name__}")
    return JsonFile(name, data, value)


def read_config(root: Path) -> JsonFile | None:
    """``config.json`` or ``params.json``, if there is one."""
    for name in CONFIG_NAMES:
        if os.path.lexists(root / name):
            return _read_json_object(root, name)
    return None


def other_files(
    folder: Folder, files: Mapping[str, SourceFile], index: JsonFile | None
) -> tuple[tuple[OtherFile, ...], list[str]]:
    """Every file that is neither weights nor rewritten, found recursively; our own manifest is not carried."""
    taken = {*files, MANIFEST_NAME, *([index.name] if index else [])}
    others, warnings = [], []
    for name in folder.walk():
        if name in taken:
            continue
        others.append(folder.other(name))
        if "/" not in name and name.endswith(".index.json"):
            warnings.append(f"{name} is carried over unchanged")
    return tuple(others), warnings
