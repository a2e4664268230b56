"""Checkpoints that lie on ranks, for checking: each rank's part from its own files, and all of them put together.

What lies where is read off shapes: a tensor that is smaller on a rank than as a whole is cut there, and its parts lie
side by side. Files are read by the official safetensors library.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_convert.catalogue import Catalogue, SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.deepseek import from_deepseek
from mla_convert.geometry import AttentionBlock
from mla_convert.plan import Replicas
from mla_convert.quant import SCALE_FIELDS
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.verification.absorbed import BY_HEAD, named
from mla_convert.verification.result import Check
from mla_convert.verification.weights import LoadedBlock, TensorReader, load_block, raw_bytes
from mla_convert.whole import Format, Whole


def is_sharded(whole: Whole) -> bool:
    """True if the checkpoint lies on ranks, be it a single one."""
    return whole.ranks > 1 or whole.format is Format.DEEPSEEK


class ShardedReader(TensorReader):
    """Reads whole tensors by their Hugging Face names; ``rank`` gives one rank's part."""

    def __init__(self, whole: Whole) -> None:
        self.catalogue, self.whole = whole.logical, whole
        self._ranks: dict[int, TensorReader] = {}
        self._held: list[dict[str, SourceTensor]] = [{} for _ in range(whole.ranks)]
        for key, tensor in whole.source.tensors.items():
            rank, _, stored = key.partition(":")
            name = self._name_of(stored)
            self._held[int(rank)][name] = replace(tensor, spec=replace(tensor.spec, name=name))

    def _name_of(self, stored: str) -> str:
        is_deepseek = self.whole.format is Format.DEEPSEEK
        return from_deepseek(stored, self.whole.mark.stem) if is_deepseek else stored

    def rank(self, number: int) -> TensorReader:
        """What one rank holds, by Hugging Face names; only its files are opened."""
        if number not in self._ranks:
            held = self._held[number]
            files = {tensor.file for tensor in held.values()}
            source = self.whole.source
            own: Catalogue = replace(
                source, files={name: source.files[name] for name in sorted(files)}, tensors=held
            )
            self._ranks[number] = TensorReader(own, self._name_of)
        return self._ranks[number]

    def __contains__(self, name: str) -> bool:
        return name in self.catalogue.tensors

    @property
    def names(self) -> frozenset[str]:
        """Every whole tensor's name."""
        return frozenset(self.catalogue.tensors)

    def get(self, name: str) -> Tensor:
        """A whole tensor, as stored but for its cuts: finer scales and padding are taken back.

        Raises:
            BadInputError: There is none of this name.
        """
        if name not in self:
            raise BadInputError(f"tensor {name} is missing from {self.catalogue.root}")
        shape = self.catalogue.tensors[name].spec.shape
        joined = self._joined(name, self.parts(name))
        for along, size in enumerate(shape):
            if joined.shape[along] != size:
                joined = joined.index_select(along, self._kept(name, along, size))
        return joined

    def optional(self, name: str | None) -> Tensor | None:
        return self.get(name) if name is not None and name in self else None

    def dense(self, module: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A whole projection: each rank's weight with that rank's scales applied, side by side."""
        name = f"{module}.weight"
        if name not in self:
            raise BadInputError(f"tensor {name} is missing from {self.catalogue.root}")
        holders = [rank for rank, held in enumerate(self._held) if name in held]
        parts = [self.rank(rank).dense(module, device, dtype) for rank in holders]
        return self._joined(name, parts)

    def _scale_block(self, module: str) -> tuple[int, int]:
        """Of scales put together, which are as coarse as they were before ranks needed finer ones."""
        before = self.whole.mark.reblocked.get(module)
        return before[:2] if before else super()._scale_block(module)

    def parts(self, name: str) -> list[Tensor]:
        """What the ranks hold of a tensor, as stored, of those that hold any."""
        return [self.rank(rank).get(name) for rank, held in enumerate(self._held) if name in held]

    def copies(self, one: Replicas) -> list[tuple[str, Tensor]]:
        """All copies of a tensor that every rank should hold alike, each with the name of its rank."""
        return [(str(rank), part) for rank, part in enumerate(self.parts(one.name))]

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        along = self.cut_along(name)
        return parts[0] if along is None else _side_by_side(parts, along)

    def cut_along(self, name: str) -> int | None:
        """The dimension along which ranks hold parts of a tensor; None if whoever holds it holds all of it."""
        module, _, field = name.rpartition(".")
        if field in SCALE_FIELDS and module in self.whole.mark.reblocked:
            name = f"{module}.weight"  # of finer scales a part may have as many as the whole has coarse ones
        shape = self.catalogue.tensors[name].spec.shape
        held = next(held[name] for held in self._held if name in held).spec.shape
        return next((along for along, size in enumerate(shape) if held[along] < size), None)

    def _kept(self, name: str, along: int, size: int) -> Tensor:
        """Which of the joined rows or columns the whole tensor has."""
        module, _, field = name.rpartition(".")
        if field not in SCALE_FIELDS or module not in self.whole.mark.reblocked:
            return torch.arange(size)
        blocks = self.whole.mark.reblocked[module]
        coarse, fine = blocks[along], blocks[2 + along]
        return torch.arange(size) * coarse // fine


def _side_by_side(parts: list[Tensor], along: int) -> Tensor:
    if parts[0].element_size() > 1:
        return torch.cat(parts, along)
    return torch.cat([part.view(torch.uint8) for part in parts], along).view(parts[0].dtype)


# Blocks


def load(
    reader: TensorReader, block: AttentionBlock, spec: AttentionSpec, device: torch.device
) -> LoadedBlock:
    """Read one block in float64; where it lies on ranks, whole and as each rank holds it.

    Raises:
        BadInputError: A part is missing or does not have the shape its block needs.
    """
    loaded = load_block(reader, block, spec, device)
    if not isinstance(reader, ShardedReader) or not is_sharded(reader.whole):
        return loaded
    ranks = range(reader.whole.ranks)
    return replace(loaded, by_rank=tuple(_of_rank(reader, block, spec, rank, device) for rank in ranks))


def load_one_rank(
    reader: ShardedReader, block: AttentionBlock, spec: AttentionSpec, rank: int, device: torch.device
) -> LoadedBlock:
    """Read one rank's part of a block from its own files; of the whole block there are only shapes.

    Raises:
        BadInputError: A part is missing or does not have the shape its block needs.
    """
    count = reader.whole.ranks
    part = _of_rank(reader, block, spec, rank, device, with_bias=True)

    def outline(tensor: Tensor, along: int | None) -> Tensor:
        shape = [size * count if d == along else size for d, size in enumerate(tensor.shape)]
        return torch.empty(shape, device="meta")

    shapes: dict[str, Any] = {
        name: outline(weight, 0 if name in BY_HEAD else 1 if name == "o" else None)
        for name, weight in named(part.weights).items()
    }
    by_rank: list[LoadedBlock | None] = [None] * count
    by_rank[rank] = _without_bias(part, rank)
    return replace(
        part,
        block=block,
        spec=spec,
        weights=replace(part.weights, **shapes),
        w_kv_b=outline(part.w_kv_b, 0),
        w_uk=outline(part.w_uk, 0),
        w_uv=outline(part.w_uv, 0),
        by_rank=tuple(by_rank),
    )


def _of_rank(
    reader: ShardedReader,
    block: AttentionBlock,
    spec: AttentionSpec,
    rank: int,
    device: torch.device,
    *,
    with_bias: bool = False,
) -> LoadedBlock:
    count = reader.whole.ranks
    own = replace(block, heads=spec.shard(rank, count).heads)
    part = load_block(reader.rank(rank), own, spec.shard(rank, count), device)
    part.weights.check(part.spec)
    return part if with_bias else _without_bias(part, rank)


def _without_bias(part: LoadedBlock, rank: int) -> LoadedBlock:
    """Every rank holds the bias of the output, which is added once: by rank 0."""
    return part if rank == 0 else replace(part, weights=replace(part.weights, o_bias=None))


# Checks


def check_ranks(reader: ShardedReader) -> Check:
    """What every rank holds is the same on all of them, and what was added for the ranks changes nothing."""
    bad, same = [], 0
    for one in reader.whole.replicas:
        (rank, first), *others = ((rank, raw_bytes(copy)) for rank, copy in reader.copies(one))
        differing = [other for other, copy in others if not torch.equal(first, copy)]
        same += not differing
        if differing:
            bad.append(f"{one.name}: rank {', '.join(differing)} differs from rank {rank}")
    for name in _with_additions(reader):
        if not _adds_nothing(reader, name):
            bad.append(f"{name}: the ranks hold more than the whole, and not copies or zeros")
    found = f"{same} tensors that several ranks hold are the same"
    if bad:
        return Check("bytes", "ranks", False, f"{len(bad)} differences; {found}", tuple(bad))
    return Check("bytes", "ranks", True, found)


def _with_additions(reader: ShardedReader) -> list[str]:
    mark = reader.whole.mark
    scales = [f"{module}.{field}" for module in mark.reblocked for field in SCALE_FIELDS]
    return [*mark.vocabulary, *(name for name in scales if name in reader)]


def _adds_nothing(reader: ShardedReader, name: str) -> bool:
    """True if padding is zeros, and finer scales are those of the blocks they lie in."""
    along = reader.cut_along(name)
    if along is None:
        return True
    joined, whole = _side_by_side(reader.parts(name), along), reader.get(name)
    blocks = reader.whole.mark.reblocked.get(name.rpartition(".")[0])
    if blocks is None:
        padding = joined.narrow(along, whole.shape[along], joined.shape[along] - whole.shape[along])
        return not bool(raw_bytes(padding).any())
    at = torch.arange(joined.shape[along]) * blocks[2 + along] // blocks[along]
    return torch.equal(raw_bytes(whole.index_select(along, at)), raw_bytes(joined))
