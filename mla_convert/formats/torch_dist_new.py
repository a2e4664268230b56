"""Writes ``.metadata`` of a torch_dist checkpoint that did not exist before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mla_convert.errors import CannotError
from mla_convert.formats.pickle_writing import write_pickle
from mla_convert.formats.pickles import Global, Instance
from mla_convert.formats.torch_dist_edit import (
    BYTES,
    CHUNK,
    METADATA_MODULE,
    metadata_index,
    storage_info,
    torch_size,
)
from mla_convert.formats.torch_dist_metadata import Chunk, Item
from mla_convert.formats.torch_save import TORCH_DTYPES
from mla_convert.tensors import TensorSpec

_DTYPE_OF = {spelling: name for name, spelling in TORCH_DTYPES.items()}
#: How PyTorch numbers ``torch.contiguous_format``.
_CONTIGUOUS = 0


def new_metadata(
    tensors: Iterable[tuple[TensorSpec, Iterable[Chunk]]], objects: Mapping[str, Item], where: str
) -> bytes:
    """The bytes of ``.metadata`` for tensors by key and global shape, and for objects by key.

    Raises:
        CannotError: PyTorch has no name for a tensor's dtype.
    """
    described: dict[str, Instance] = {}
    stored: dict[Instance, Instance] = {}
    for spec, chunks in tensors:
        listed = []
        for chunk in chunks:
            sizes = {"offsets": torch_size(chunk.offsets), "sizes": torch_size(chunk.sizes)}
            listed.append(Instance(CHUNK, state=sizes))
            stored[metadata_index(spec.name, chunk.offsets)] = storage_info(chunk.item)
        fields = {"properties": _properties(spec), "size": torch_size(spec.shape), "chunks": listed}
        described[spec.name] = Instance(Global(METADATA_MODULE, "TensorStorageMetadata"), state=fields)
    for key, item in objects.items():
        described[key] = Instance(BYTES)
        stored[metadata_index(key, None)] = storage_info(item)
    state: dict[str, Any] = {
        "state_dict_metadata": described,
        "planner_data": None,
        "storage_data": stored,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return write_pickle(Instance(Global(METADATA_MODULE, "Metadata"), state=state), where)


def _properties(spec: TensorSpec) -> Instance:
    dtype = _DTYPE_OF.get(spec.dtype)
    if dtype is None:
        raise CannotError(f"{spec.name}: PyTorch has no dtype {spec.dtype}")
    layout = Instance(Global("torch.serialization", "_get_layout"), ("torch.strided",), is_call=True)
    order = Instance(Global(METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (_CONTIGUOUS,), is_call=True)
    state = (Global("torch", dtype), layout, False, order, False)
    return Instance(Global(METADATA_MODULE, "TensorProperties"), state=state)
