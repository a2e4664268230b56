"""What Transformer Engine keeps beside a linear layer (``_extra_state``), as far as a conversion has to know it."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from mla_convert import storage
from mla_convert.formats.pickles import Allowed, Instance, read_pickle
from mla_convert.formats.torch_dist_metadata import Item
from mla_convert.formats.torch_save import TENSOR_GLOBALS, Archive, open_archive
from mla_convert.reading import read_at

_STATE_GLOBALS: Allowed = {
    **TENSOR_GLOBALS,
    "_io": frozenset({"BytesIO"}),
    "torch.storage": frozenset({"UntypedStorage", "_load_from_bytes"}),
    "megatron": frozenset({"*"}),  # its own safe_load_from_bytes, from 0.19
    "transformer_engine": frozenset({"*"}),
    "transformer_engine_torch": frozenset({"*"}),
    "numpy": frozenset({"ndarray", "dtype"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "_codecs": frozenset({"encode"}),
}
#: What only delayed scaling keeps: scales and histories of one tensor, which no other tensor can take over.
_HISTORIES = ("scale_fwd", "amax_history_fwd")


class Fp8State(StrEnum):
    """What an extra state says."""

    EMPTY = "empty"
    RECIPE = "recipe"  # settings alone, the same for any layer
    DELAYED = "delayed scaling"
    UNKNOWN = "unknown"


def read_fp8_state(folder: Path, key: str, item: Item) -> Fp8State:
    """What the extra state in an item says.

    Raises:
        BadInputError: It is damaged, or asks for what no extra state needs.
    """
    path = folder / item.file
    where = f"{path}: {storage.plain(key)}"
    fd = storage.open_source(path)
    try:
        archive = open_archive(fd, item.offset, item.length, where)
        value = archive.value(_STATE_GLOBALS)
        while type(value) is list and len(value) == 1:
            value = value[0]
        return _meaning(archive, value, where)
    finally:
        os.close(fd)


def _meaning(archive: Archive, value: Any, where: str) -> Fp8State:
    if value is None:
        return Fp8State.EMPTY
    if isinstance(value, Instance) and value.of.name == "BytesIO":
        return _saved_in_memory(value, where)
    tensor = archive.tensor(value, "_extra_state")
    if not tensor.spec.nbytes:
        return Fp8State.EMPTY
    if tensor.spec.dtype != "U8":
        return Fp8State.UNKNOWN
    data = read_at(archive.fd, tensor.spec.nbytes, tensor.start, where)
    return _of_state(read_pickle(data, _STATE_GLOBALS, where))


def _of_state(state: Any) -> Fp8State:
    if state is None:
        return Fp8State.EMPTY
    if type(state) is not dict:
        return Fp8State.UNKNOWN
    return Fp8State.DELAYED if any(name in state for name in _HISTORIES) else Fp8State.RECIPE


def _saved_in_memory(value: Instance, where: str) -> Fp8State:
    """Before 2.0: what torch.save wrote to memory. Protocol 2 has no bytes, so they are text to be encoded."""
    data = value.state[0] if type(value.state) is tuple and value.state else b""
    if isinstance(data, Instance) and data.of.name == "encode" and data.args and type(data.args[0]) is str:
        data = data.args[0].encode("latin-1", "replace")
    if type(data) is not bytes:
        return Fp8State.UNKNOWN
    if not data:
        return Fp8State.EMPTY
    fd = os.memfd_create("extra_state", os.MFD_CLOEXEC)
    try:
        storage.write_at(fd, 0, data)
        return _of_state(open_archive(fd, 0, len(data), where).value(_STATE_GLOBALS))
    finally:
        os.close(fd)
