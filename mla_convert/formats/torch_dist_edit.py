"""Writes ``.metadata`` anew after some tensors moved; everything else in it stays as it was saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mla_convert.formats.pickle_writing import write_pickle
from mla_convert.formats.pickles import Global, Instance
from mla_convert.formats.torch_dist_metadata import (
    MEGATRON_DATA,
    ORIGINAL_SHAPE,
    Chunk,
    DistMetadata,
    Item,
)
from mla_convert.tensors import TensorSpec

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_SIZE = Global("torch", "Size")
CHUNK = Global(METADATA_MODULE, "ChunkStorageMetadata")
_INDEX = Global(METADATA_MODULE, "MetadataIndex")
BYTES = Global(METADATA_MODULE, "BytesStorageMetadata")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that was not there before.

    Attributes:
        spec: Its key, dtype and shape as stored.
        chunks: The boxes that make it up.
        like: The key of one whose other properties it takes over.
        original: The shape that it would have if its fragments were not flattened; None if they are not.
    """

    spec: TensorSpec
    chunks: tuple[Chunk, ...]
    like: str
    original: tuple[int, ...] | None = None


@dataclass(slots=True)
class Edits:
    """What changes. Keys are those of tensors and objects alike.

    Attributes:
        tensors: For a key, the new tensors that stand in its place.
        objects: For a key, the new objects that stand in its place, by key, and their items.
        renamed: Keys that only change their name.
        removed: Keys that go away. A key of ``tensors`` or ``objects`` stays unless it is here.
    """

    tensors: dict[str, list[NewTensor]] = field(default_factory=dict)
    objects: dict[str, dict[str, Item]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)


def edit_metadata(metadata: DistMetadata, edits: Edits, where: str) -> bytes:
    """The bytes of ``.metadata`` with some tensors replaced. The same edits always give the same bytes.

    Plans that Megatron stores to reuse at the next save are left out: they describe the save that was edited.
    """
    described = metadata.root.get("state_dict_metadata")
    new: dict[str, Instance] = {}
    for key, value in described.items():
        if key not in edits.removed:
            new[edits.renamed.get(key, key)] = value
        for tensor in edits.tensors.get(key, ()):
            new[tensor.spec.name] = _described(tensor, described[tensor.like])
        for name in edits.objects.get(key, ()):
            new[name] = Instance(BYTES)
    stored: dict[Instance, Instance] = {}
    for (key, _), (index, place) in metadata.stored.items():
        if key in edits.renamed:
            stored[replace(index, state={**index.state, "fqn": edits.renamed[key]})] = place
        elif key not in edits.removed:
            stored[index] = place
    for tensors in edits.tensors.values():
        for tensor in tensors:
            for chunk in tensor.chunks:
                stored[metadata_index(tensor.spec.name, chunk.offsets)] = storage_info(chunk.item)
    for objects in edits.objects.values():
        for name, item in objects.items():
            stored[metadata_index(name, None)] = storage_info(item)
    state = {**metadata.root.state, "state_dict_metadata": new, "storage_data": stored}
    if isinstance(state.get("planner_data"), dict):
        state["planner_data"] = _kept(state["planner_data"], edits)
    if isinstance(state.get(MEGATRON_DATA), dict):
        added = state[MEGATRON_DATA]
        new_ones = [
            tensor for tensors in edits.tensors.values() for tensor in tensors if tensor.like in added
        ]
        state[MEGATRON_DATA] = _kept(added, edits) | {
            tensor.spec.name: {ORIGINAL_SHAPE: tensor.original} if tensor.original else {}
            for tensor in new_ones
        }
    return write_pickle(replace(metadata.root, state=state), where)


def _kept(data: Mapping[str, object], edits: Edits) -> dict[str, object]:
    return {edits.renamed.get(key, key): value for key, value in data.items() if key not in edits.removed}


def _described(tensor: NewTensor, like: Instance) -> Instance:
    chunks = [
        Instance(CHUNK, state={"offsets": torch_size(chunk.offsets), "sizes": torch_size(chunk.sizes)})
        for chunk in tensor.chunks
    ]
    return replace(like, state={**like.state, "size": torch_size(tensor.spec.shape), "chunks": chunks})


def torch_size(numbers: Sequence[int]) -> Instance:
    """A ``torch.Size``."""
    return Instance(_SIZE, (tuple(numbers),), is_call=True)


def metadata_index(key: str, offsets: tuple[int, ...] | None) -> Instance:
    """The key of a chunk that begins at ``offsets``, or of an object, in the table of what is stored where."""
    place = {} if offsets is None else {"offset": torch_size(offsets)}
    return Instance(_INDEX, state={"fqn": key, **place, "index": None})


def storage_info(item: Item) -> Instance:
    """Where an item is stored."""
    return Instance(_PLACE, state={"relative_path": item.file, "offset": item.offset, "length": item.length})


def referenced_files(metadata: DistMetadata, edits: Edits) -> Collection[str]:
    """The files that some item is left in, or newly put in."""
    files = {
        place.get("relative_path")
        for (key, _), (_, place) in metadata.stored.items()
        if key not in edits.removed
    }
    for tensors in edits.tensors.values():
        files |= {chunk.item.file for tensor in tensors for chunk in tensor.chunks}
    for objects in edits.objects.values():
        files |= {item.file for item in objects.values()}
    return files
