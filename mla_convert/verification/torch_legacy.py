"""Megatron's older format, for checking: PyTorch opens each rank's file, and each rank runs from its own.

Only what lies where is known from this tool's own reader. Bytes come from ``torch.load(weights_only=True)``, mapped
into memory; slices are put together in torch, by how Megatron cuts each kind of tensor (`megatron.names`).

A rank's file also holds arguments, which name classes that PyTorch does not allow and that may not be installed:
Megatron's enumerations, ``argparse.Namespace``, NumPy in random states. Those that the format needs are listed in
`formats.torch_legacy`; each is allowed as an empty class made here, so nothing but PyTorch's own functions ever runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.catalogue import SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.pickles import Allowed
from mla_convert.formats.torch_legacy import RANK_GLOBALS, model_names
from mla_convert.formats.torch_save import TORCH_DTYPES
from mla_convert.megatron.eras import row_order
from mla_convert.megatron.names import Dictionary, Entry, place_of
from mla_convert.megatron.reading import MegatronSource
from mla_convert.megatron.translation import IndexerChange, is_indexer_rows
from mla_convert.names import Sharding
from mla_convert.plan import Replicas
from mla_convert.verification.sharded import ShardedReader
from mla_convert.verification.weights import TensorReader
from mla_convert.whole import Whole

_FUSED = "self_attention.linear_qkv_down_proj."


@dataclass(frozen=True, slots=True)
class _Origin:
    """The Megatron weight that a Hugging Face tensor is part number ``part`` of ``parts`` of."""

    name: str
    entry: Entry
    part: int
    parts: int


class TorchReader(ShardedReader):
    """Reads whole tensors by their Hugging Face names; ``rank`` gives what one tensor-parallel rank holds."""

    def __init__(self, whole: Whole) -> None:
        if whole.megatron is None:
            raise ValueError(f"{whole.source.root} is no checkpoint of Megatron")
        self.catalogue, self.whole = whole.logical, whole
        self._megatron = whole.megatron
        self._origins = _origins(whole.megatron, whole)
        self._ranks: dict[int, TensorReader] = {}
        self._models: dict[str, list[Mapping[str, Any]]] = {}
        self._keys: list[dict[str, str]] = [{} for _ in range(whole.ranks)]
        self._held: list[dict[str, SourceTensor]] = [{} for _ in range(whole.ranks)]
        holders = _holders(whole.megatron)
        for name, origin in self._origins.items():
            for rank, key in holders[origin.name].items():
                stored = whole.source.tensors[key]
                rows, *rest = stored.spec.shape
                spec = replace(stored.spec, name=name, shape=(rows // origin.parts, *rest))
                self._keys[rank][name] = key
                self._held[rank][name] = replace(stored, spec=spec)

    def rank(self, number: int) -> TensorReader:
        """What one tensor-parallel rank holds, of all its pipeline and expert ranks, by Hugging Face names."""
        if number not in self._ranks:
            self._ranks[number] = _RankReader(self, number, self._held[number])
        return self._ranks[number]

    def dense(self, module: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A whole projection; this format has no scales.

        Raises:
            BadInputError: It is missing.
        """
        return self.get(f"{module}.weight").to(device).to(dtype)

    def parts(self, name: str) -> list[Tensor]:
        """What the tensor-parallel ranks hold of a tensor, of those that hold any."""
        return [self.part(rank, name) for rank, held in enumerate(self._held) if name in held]

    def part(self, rank: int, name: str) -> Tensor:
        """What one tensor-parallel rank holds of a tensor; of the indexer, in Hugging Face's order of rows."""
        origin, tensor = self._origins[name], self._stored(self._keys[rank][name])
        if origin.parts > 1:
            tensor = tensor.reshape(origin.parts, -1, *tensor.shape[1:])[origin.part]
        change = self._megatron.indexer_change
        if change is None or not is_indexer_rows(origin.name):
            return tensor
        key = f"{origin.name.rpartition('.indexer.')[0]}.indexer.linear_wk.weight"
        return _reordered(tensor, change, self._megatron.weights.specs[key].shape[0])

    def copies(self, one: Replicas) -> list[tuple[str, Tensor]]:
        """All copies of a tensor, each with the label of its rank: tensor, pipeline and expert rank."""
        return [(key.partition(":")[0], self._stored(key)) for key in one.keys]

    def cut_along(self, name: str) -> int | None:
        """The dimension along which ranks hold parts of a tensor; None if whoever holds it holds all of it."""
        sharding = self._origins[name].entry.sharding
        held = [held[name].spec.shape for held in self._held if name in held]
        if sharding is Sharding.REPLICATED or len(held) == 1:
            return None
        along = 1 if sharding in (Sharding.ROW, Sharding.HEADS_IN) else 0
        is_cut = (
            sharding is Sharding.VOCABULARY or held[0][along] < self.catalogue.tensors[name].spec.shape[along]
        )
        return along if is_cut else None

    def is_gathered(self, name: str) -> bool:
        """True for a down-projection that is cut by rows: Megatron gathers its output, so ranks need all of it."""
        return self._origins[name].entry.sharding is Sharding.UNKNOWN and self.cut_along(name) is not None

    def _stored(self, key: str) -> Tensor:
        """A tensor of a rank's file, by its key: ``LABEL:STAGE:NAME``.

        Raises:
            BadInputError: PyTorch finds none there, or another one than this tool's reader.
        """
        _, stage, name = key.split(":", 2)
        described = self.whole.source.tensors[key]
        path = self.whole.source.files[described.file].path
        if described.file not in self._models:
            self._models[described.file] = load_models(path)
        tensor = _find(self._models[described.file][int(stage)], name, described.spec.shape[0])
        dtype = TORCH_DTYPES.get(str(tensor.dtype).removeprefix("torch.")) if tensor is not None else None
        if tensor is None or (dtype, tuple(tensor.shape)) != (described.spec.dtype, described.spec.shape):
            raise BadInputError(
                f"{path}: PyTorch does not find {described.spec.dtype} {described.spec.shape} as {name}"
            )
        return tensor


class _RankReader(TensorReader):
    def __init__(self, reader: TorchReader, rank: int, held: Mapping[str, SourceTensor]) -> None:
        self.catalogue = replace(reader.catalogue, tensors=held)
        self._reader, self._rank = reader, rank
        self._files = {name: (tensor.file, name) for name, tensor in held.items()}

    def get(self, name: str) -> Tensor:
        if name not in self:
            raise BadInputError(f"tensor {name} is missing from rank {self._rank} of {self.catalogue.root}")
        if self._reader.is_gathered(name):
            return self._reader.get(name)
        return self._reader.part(self._rank, name)


# What is where


def _origins(source: MegatronSource, whole: Whole) -> dict[str, _Origin]:
    """What each Hugging Face tensor is made from."""
    places = {name: place for name in source.weights.specs if (place := place_of(name))}
    layers = max((p.layer + 1 for p in places.values() if p.layer is not None and not p.is_mtp), default=0)
    dictionary = Dictionary(layers, whole.mark.stem)
    found: dict[str, _Origin] = {}
    by_megatron: dict[str, _Origin] = {}
    for name, place in places.items():
        names = dictionary.to_huggingface(name) or ()
        for part, huggingface in enumerate(names):
            found[huggingface] = by_megatron[name] = _Origin(name, place.entry, part, len(names))
    for name in whole.logical.tensors:
        if name not in found:  # a copy that an MTP layer of the original held
            found[name] = by_megatron[dictionary.shared_with(name) or name]
    return found


def _holders(source: MegatronSource) -> dict[str, dict[int, str]]:
    """For each weight, the key under which each tensor-parallel rank holds it, or its part of it."""
    copies: dict[str, list[str]] = {}
    for one in source.weights.replicas:
        copies.setdefault(one.keys[0], []).extend(one.keys)
    found: dict[str, dict[int, str]] = {}
    for name, pieces in source.weights.made_of.items():
        ranks = found.setdefault(name, {})
        for piece in pieces:
            for key in (piece.source, *copies.get(piece.source, ())):
                ranks.setdefault(int(key.partition(".")[0]), key)
    return found


def _find(model: Mapping[str, Any], name: str, rows: int) -> Tensor | None:
    """A tensor of a module, where two down-projections may be fused with each other and with the norm before them."""
    found = model.get(name)
    if name not in model:
        norm = name.removesuffix("input_layernorm.weight")
        base, _, leaf = name.rpartition("self_attention.")
        if norm != name:
            found = model.get(f"{norm}{_FUSED}layer_norm_weight")
        else:
            fused = model.get(f"{base}{_FUSED}weight")
            if isinstance(fused, Tensor):
                found = fused[:rows] if leaf == "linear_q_down_proj.weight" else fused[-rows:]
    return found.detach() if isinstance(found, Tensor) else None


def _reordered(tensor: Tensor, change: IndexerChange, width: int) -> Tensor:
    """The rows of the indexer's heads of ``width`` rows each, in another order."""
    by_head = tensor.reshape(-1, width, *tensor.shape[1:])
    before, after = (
        torch.tensor(row_order(rows, width, change.rope)) for rows in (change.before, change.after)
    )
    return by_head[:, before.argsort()[after]].reshape(tensor.shape)


# Opening


def load_models(path: Path) -> list[Mapping[str, Any]]:
    """The state dicts in a rank's file, one for each virtual pipeline stage.

    Raises:
        BadInputError: PyTorch cannot read it, or it names what the format does not need.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        refused = [name for name in named if not _is_allowed(name, RANK_GLOBALS)]
        if not refused:
            with torch.serialization.safe_globals([(_stand_in(name), name) for name in named]):
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise BadInputError(f"{path}: PyTorch cannot read it ({error})") from error
    if refused:
        raise BadInputError(f"{path} names {refused[0]}, which this format does not need", details=refused)
    if not isinstance(state, dict):
        raise BadInputError(f"{path} is no dictionary, as a rank's file must be")
    models = [state[name] for name in model_names(state)]
    if not models or not all(isinstance(model, dict) for model in models):
        raise BadInputError(f"{path} holds no model")
    return models


def _is_allowed(name: str, allowed: Allowed) -> bool:
    module, _, leaf = name.rpartition(".")
    if leaf in allowed.get(module, ()):
        return True
    parents = module.split(".")
    return any("*" in allowed.get(".".join(parents[:n]), ()) for n in range(1, len(parents) + 1))


def _stand_in(name: str) -> type:
    """An empty class that takes whatever a pickle gives the one it stands for."""

    def ignore(self: Any, *args: Any, **named: Any) -> None:
        pass

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        return object.__new__(cls)

    return type(name, (), {"__new__": new, "__init__": ignore, "__setstate__": ignore})
