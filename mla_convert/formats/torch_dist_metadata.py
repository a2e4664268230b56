"""``.metadata`` of a torch_dist checkpoint: a pickle of what tensors there are, and where each part of one is stored.

Every tensor has its global shape and a list of chunks, boxes of it that ranks had. Every chunk, and every object that
is no tensor, is an item at an offset of a ``.distcp`` file. ``torch_dist_edit`` writes it anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from mla_convert import storage
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.pickles import Allowed, Global, Instance, read_pickle
from mla_convert.formats.torch_save import TORCH_DTYPES
from mla_convert.strict_json import open_regular, read_up_to
from mla_convert.tensors import TensorSpec

_DCP = "torch.distributed.checkpoint"
_MEGATRON_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"
#: What ``.metadata`` may name: PyTorch's own classes, and two of Megatron that releases before 0.16 pickle.
METADATA_GLOBALS: Allowed = {
    f"{_DCP}.metadata": frozenset(
        {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    f"{_DCP}.filesystem": frozenset({"_StorageInfo"}),
    f"{_DCP}.planner": frozenset(
        {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"}
    ),
    _MEGATRON_STRATEGY: frozenset({"MCoreMetadata", "MCoreSavePlan"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", *TORCH_DTYPES}),
    "pathlib": frozenset({"PosixPath"}),
    "collections": frozenset({"OrderedDict"}),
}

#: What Megatron adds to ``Metadata``, and the only field of it: by key, the shape that a flattened tensor had.
MEGATRON_DATA = "mcore_data"
ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"

_MAX_METADATA = 4 << 30
SAVE_AGAIN = "the save did not finish, or the copy of it is not complete"


@dataclass(frozen=True, slots=True)
class Item:
    """Where one chunk or object is stored."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A tensor by its global shape, and the chunks that make it up.

    Attributes:
        spec: Its key, dtype and shape as stored.
        chunks: The boxes that make it up.
        described: How the pickle states it.
        original: The shape that it had before its fragments were flattened (see ``megatron.frames``); else None.
    """

    spec: TensorSpec
    chunks: tuple[Chunk, ...]
    described: Instance
    original: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DistMetadata:
    """What ``.metadata`` says.

    Attributes:
        raw: The file's bytes.
        root: The object it describes.
        tensors: Tensors by key.
        objects: Items of everything that is no tensor, by key.
        stored: How the pickle states where each item is, by the key and the chunk's offsets (None for an object).
    """

    raw: bytes
    root: Instance
    tensors: Mapping[str, DistTensor]
    objects: Mapping[str, Item]
    stored: Mapping[tuple[str, tuple[int, ...] | None], tuple[Instance, Instance]]


def read_metadata(path: Path) -> DistMetadata:
    """Read and check ``.metadata``.

    Raises:
        BadInputError: It is damaged, contradicts itself, or asks for what no checkpoint needs.
        CannotError: It holds tensors of a kind this version does not know.
    """
    where = str(path)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_METADATA:
            raise BadInputError(f"{where} has {size} bytes; more than {_MAX_METADATA} are not read")
        raw = read_up_to(file, size, where=where)
    return parse_metadata(raw, where)


def parse_metadata(raw: bytes, where: str) -> DistMetadata:
    """Check the bytes of a ``.metadata``; errors are those of :func:`read_metadata`."""
    root = read_pickle(raw, METADATA_GLOBALS, where)
    if not isinstance(root, Instance) or root.of.name not in ("Metadata", "MCoreMetadata"):
        raise BadInputError(f"{where} does not describe a checkpoint")
    if isinstance(root.state, dict):
        root.state.pop("all_local_plans", None)  # what each rank planned to save, as long as all the rest
    described, located = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(described, dict) or not isinstance(located, dict):
        raise BadInputError(f"{where} lists no tensors, or not where they are")
    stored: dict[tuple[str, tuple[int, ...] | None], tuple[Instance, Instance]] = {}
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, info in located.items():
        key = _index_key(index, where)
        if key in items:
            raise BadInputError(f"{where}: {storage.plain(key[0])} is stored twice at {key[1]}")
        items[key], stored[key] = _item(info, key[0], where), (index, info)
    tensors: dict[str, DistTensor] = {}
    objects: dict[str, Item] = {}
    originals = _originals(root, where)
    for name, value in described.items():
        if type(name) is not str or not isinstance(value, Instance):
            raise BadInputError(f"{where}: an entry is no tensor and no object")
        if value.of.name == "BytesStorageMetadata":
            if (name, None) not in items:
                raise BadInputError(f"{where}: {storage.plain(name)} is stored nowhere", hint=SAVE_AGAIN)
            objects[name] = items[name, None]
        elif value.of.name == "TensorStorageMetadata":
            tensors[name] = replace(_tensor(name, value, items, where), original=originals.get(name))
        else:
            raise BadInputError(f"{where}: {storage.plain(name)} is a {value.of}")
    return DistMetadata(raw, root, tensors, objects, stored)


def _originals(root: Instance, where: str) -> dict[str, tuple[int, ...]]:
    """Shapes before flattening, which Megatron adds to PyTorch's own metadata."""
    added = root.get(MEGATRON_DATA)
    if not isinstance(added, dict):
        return {}
    return {
        key: _size(value[ORIGINAL_SHAPE], where)
        for key, value in added.items()
        if isinstance(value, dict) and ORIGINAL_SHAPE in value
    }


def _index_key(index: Any, where: str) -> tuple[str, tuple[int, ...] | None]:
    if (
        not isinstance(index, Instance)
        or index.of.name != "MetadataIndex"
        or type(index.get("fqn")) is not str
    ):
        raise BadInputError(f"{where}: an item has no key")
    offset = index.get("offset")
    return index.get("fqn"), None if offset is None else _size(offset, where)


def _size(value: Any, where: str) -> tuple[int, ...]:
    """A ``torch.Size``."""
    if isinstance(value, Instance) and value.of == Global("torch", "Size") and len(value.args) == 1:
        value = value.args[0]
    if type(value) not in (tuple, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise BadInputError(f"{where}: a shape or an offset is no list of numbers")
    return tuple(value)


def _item(info: Any, key: str, where: str) -> Item:
    name = storage.plain(key)
    if not isinstance(info, Instance) or info.of.name != "_StorageInfo":
        raise BadInputError(f"{where}: it is not said where {name} is stored")
    file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if type(file) is not str or not file or file in (".", "..") or any(c in file for c in "/\\\0"):
        raise BadInputError(
            f"{where}: unsafe file name {file!r} for {name}", hint="it must be a bare file name"
        )
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise BadInputError(f"{where}: {name} is stored at {offset!r}, {length!r} bytes")
    if info.get("transform_descriptors"):
        raise CannotError(f"{where}: {name} is stored compressed, which this version does not read")
    return Item(file, offset, length)


def _tensor(
    name: str, value: Instance, items: Mapping[tuple[str, tuple[int, ...] | None], Item], where: str
) -> DistTensor:
    properties = value.get("properties")
    state = properties.state if isinstance(properties, Instance) else None
    dtype = (
        state.get("dtype")
        if isinstance(state, dict)
        else state[0]
        if isinstance(state, tuple) and state
        else None
    )
    spelling = TORCH_DTYPES.get(dtype.name) if isinstance(dtype, Global) and dtype.module == "torch" else None
    if spelling is None:
        raise CannotError(
            f"{where}: {storage.plain(name)} has the dtype {dtype}, which this version does not know"
        )
    shape = _size(value.get("size"), where)
    spec = TensorSpec(name, spelling, shape)
    listed = value.get("chunks")
    if type(listed) is not list:
        raise BadInputError(f"{where}: {storage.plain(name)} has no list of chunks")
    chunks = []
    for chunk in listed:
        if not isinstance(chunk, Instance) or chunk.of.name != "ChunkStorageMetadata":
            raise BadInputError(f"{where}: {storage.plain(name)} has a chunk that is none")
        offsets, sizes = _size(chunk.get("offsets"), where), _size(chunk.get("sizes"), where)
        inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= extent for offset, size, extent in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise BadInputError(
                f"{where}: {storage.plain(name)} is {list(shape)}, and a chunk of it {list(sizes)} at {list(offsets)}"
            )
        if (name, offsets) not in items:
            raise BadInputError(
                f"{where}: the chunk of {storage.plain(name)} at {list(offsets)} is stored nowhere",
                hint=SAVE_AGAIN,
            )
        chunks.append(Chunk(offsets, sizes, items[name, offsets]))
    if sum(prod(chunk.sizes) for chunk in chunks) != spec.numel:
        raise BadInputError(
            f"{where}: the {len(chunks)} chunks of {storage.plain(name)} do not make up {list(shape)}",
            hint=SAVE_AGAIN,
        )
    return DistTensor(spec, tuple(chunks), value)
