"""Megatron's torch_dist checkpoints, for checking: PyTorch opens every item, and slices of it make up a weight.

Only ``.metadata`` is read by this tool's own reader: PyTorch's would run what is in it.
"""

from __future__ import annotations

import io
from collections import OrderedDict

import torch
from torch import Tensor

from mla_convert import storage
from mla_convert.errors import BadInputError
from mla_convert.formats.torch_dist import open_torch_dist
from mla_convert.formats.torch_dist_metadata import Chunk
from mla_convert.plan import Copy
from mla_convert.verification.weights import TensorReader
from mla_convert.whole import Whole

#: Bytes of opened items that are kept: a layer's weights are read one after the other.
_KEPT = 1 << 30


class TorchDistReader(TensorReader):
    """Reads whole tensors by their Hugging Face names."""

    def __init__(self, whole: Whole) -> None:
        self.catalogue, self.whole, self._files = whole.logical, whole, {}
        self._dist = open_torch_dist(whole.source.root)
        self._opened: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self.catalogue.tensors

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self.catalogue.tensors)

    def get(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            BadInputError: There is none of this name, or PyTorch cannot read a part of it.
        """
        if name not in self:
            raise BadInputError(f"tensor {name} is missing from {self.catalogue.root}")
        shape = self.catalogue.tensors[name].spec.shape
        found: Tensor | None = None
        for piece in self.whole.made_of[name]:
            if not isinstance(piece, Copy):
                raise BadInputError(f"{name} is not stored, but made up")
            part = self._stored(piece.source)
            found = torch.empty(shape, dtype=part.dtype) if found is None else found
            target = tuple(
                slice(at, at + stop - start) for at, (start, stop) in zip(piece.at, piece.box, strict=True)
            )
            found[target] = part[tuple(slice(start, stop) for start, stop in piece.box)]
        if found is None:
            raise BadInputError(f"tensor {name} has no part that is stored")
        return found

    def optional(self, name: str | None) -> Tensor | None:
        """A whole tensor, or None."""
        return self.get(name) if name is not None and name in self else None

    def _stored(self, name: str) -> Tensor:
        """One layer's (and expert's) part of a chunk, by the name it has in a plan: ``KEY@INDEX,OFFSETS``."""
        key, _, numbers = name.rpartition("@")
        place = tuple(map(int, numbers.split(","))) if numbers else ()
        tensor = self._dist.metadata.tensors[key]
        lead = len(place) - len(self.whole.source.tensors[name].spec.shape)
        for chunk in tensor.chunks:
            inside = all(
                o <= p < o + s for p, o, s in zip(place[:lead], chunk.offsets, chunk.sizes, strict=False)
            )
            if inside and place[lead:] == chunk.offsets[lead:]:
                return self._item(key, chunk)[
                    tuple(p - o for p, o in zip(place[:lead], chunk.offsets, strict=False))
                ]
        raise BadInputError(f"{self._dist.folder}: {name} is in no chunk")

    def _item(self, key: str, chunk: Chunk) -> Tensor:
        place = (chunk.item.file, chunk.item.offset)
        if place in self._opened:
            self._opened.move_to_end(place)
            return self._opened[place]
        path = self._dist.folder / chunk.item.file
        with storage.os_errors(path, "read"), path.open("rb") as file:
            file.seek(chunk.item.offset)
            data = file.read(chunk.item.length)
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise BadInputError(
                f"{path}: PyTorch cannot read {key} at {list(chunk.offsets)} ({error})"
            ) from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise BadInputError(
                f"{path}: {key} at {list(chunk.offsets)} is not the tensor that .metadata describes"
            )
        self._opened[place] = tensor
        while len(self._opened) > 1 and sum(t.nbytes for t in self._opened.values()) > _KEPT:
            self._opened.popitem(last=False)
        return tensor
