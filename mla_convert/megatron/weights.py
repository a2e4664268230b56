"""A Megatron checkpoint's weights, one by one and whole: what each is made of, in terms of what is stored.

torch_dist stores a tensor for all layers, or all experts, or both, in chunks; the older format stores slices on ranks.
Either way a weight here has a name of ``formats.megatron_names`` and its full shape, and the pieces that it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from mla_convert.catalogue import Catalogue, SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.torch_dist import TorchDist, locate
from mla_convert.formats.torch_dist_metadata import Chunk, DistTensor
from mla_convert.plan import Copy, EqualTensors, Replicas
from mla_convert.tensors import TensorSpec

_STACK = re.compile(r"((?:.*?\.)?layers\.)(?!\d+\.)(.+)", re.DOTALL)
_EXPERTS = "mlp.experts.experts."
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
#: Halves of a gated projection that are stored as tensors of their own (``singleton_local_shards``).
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])", re.DOTALL)


@dataclass(slots=True)
class MegatronWeights:
    """The weights of a checkpoint.

    Attributes:
        source: What is stored, by keys of its own.
        specs: dtype and full shape of each weight.
        made_of: The pieces of stored tensors that each is made of.
        arguments: Megatron's arguments, as far as the checkpoint has them.
        common: The rest of what it says about itself.
        left_behind: How many tensors belong to the optimizer, which a weight's name does not reach.
        replicas: Weights that several ranks hold and that must be the same on all.
        guards: What else must hold.
    """

    source: Catalogue
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    made_of: dict[str, tuple[Copy, ...]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    left_behind: int = 0
    replicas: list[Replicas] = field(default_factory=list)
    guards: list[EqualTensors] = field(default_factory=list)


def is_optimizer_key(key: str) -> bool:
    """True for anything that belongs to the optimizer."""
    return _OPTIMIZER.match(key) is not None


def read_dist_weights(dist: TorchDist, source: Catalogue) -> MegatronWeights:
    """The weights of a torch_dist checkpoint.

    Args:
        dist: The checkpoint.
        source: Its inventory, whose tensors this fills in.

    Raises:
        BadInputError: A chunk is damaged, or halves of a weight do not fit together.
    """
    weights = MegatronWeights(source, arguments=dist.arguments, common=dist.common)
    stored: dict[str, SourceTensor] = {}
    halves: dict[str, dict[str, DistTensor]] = {}
    for key, tensor in dist.metadata.tensors.items():
        if is_optimizer_key(key):
            weights.left_behind += 1
            continue
        half = _HALF.fullmatch(key)
        if half:
            halves.setdefault(half[1], {})[half[2]] = tensor
            continue
        for name, spec, pieces in _unstacked(dist, key, tensor, stored):
            weights.specs[name], weights.made_of[name] = spec, pieces
    for key, parts in halves.items():
        if set(parts) != {"w", "v"}:
            raise BadInputError(f"{dist.folder}: of {key} only {key}_{next(iter(parts))} is there")
        both = [list(_unstacked(dist, f"{key}_{half}", parts[half], stored, key)) for half in "wv"]
        for (name, gate, of_gate), (_, up, of_up) in zip(*both, strict=True):
            weights.specs[name], weights.made_of[name] = _on_top(gate, of_gate, up, of_up)
    weights.source = replace(source, tensors=stored)
    return weights


def _on_top(
    first: TensorSpec, of_first: tuple[Copy, ...], second: TensorSpec, of_second: tuple[Copy, ...]
) -> tuple[TensorSpec, tuple[Copy, ...]]:
    """A tensor of the rows of two, and its pieces."""
    if (first.dtype, first.shape[1:]) != (second.dtype, second.shape[1:]):
        raise BadInputError(f"the halves of {first.name} are {list(first.shape)} and {list(second.shape)}")
    rows = first.shape[0]
    moved = tuple(Copy(p.source, p.box, (p.at[0] + rows, *p.at[1:])) for p in of_second)
    return replace(first, shape=(rows + second.shape[0], *first.shape[1:])), (*of_first, *moved)


def _unstacked(
    dist: TorchDist, key: str, tensor: DistTensor, stored: dict[str, SourceTensor], renamed: str | None = None
) -> Iterator[tuple[str, TensorSpec, tuple[Copy, ...]]]:
    """Every weight that a tensor holds: its name, spec and pieces.

    Layers and experts are the first dimensions, so each weight's part of a chunk lies in one run of bytes: it becomes
    a stored tensor of its own, whose shape is the weight's.
    """
    pattern, lead = _pattern(renamed or key)
    shape = tensor.spec.shape
    if len(shape) <= lead:
        raise BadInputError(f"{dist.folder}: {key} is {list(shape)}, with no dimension left for a weight")
    inner = shape[lead:]
    pieces: dict[tuple[int, ...], list[Copy]] = {index: [] for index in product(*map(range, shape[:lead]))}
    for chunk in tensor.chunks:
        for index, piece in _parts(dist, key, chunk, tensor.spec.dtype, lead, stored):
            pieces[index].append(piece)
    for index, copies in pieces.items():
        name = pattern.format(*index)
        yield name, TensorSpec(name, tensor.spec.dtype, inner), tuple(copies)


def _parts(
    dist: TorchDist, key: str, chunk: Chunk, dtype: str, lead: int, stored: dict[str, SourceTensor]
) -> Iterator[tuple[tuple[int, ...], Copy]]:
    found = locate(dist.folder, key, chunk, dtype)
    sizes, offsets = chunk.sizes[lead:], chunk.offsets[lead:]
    ranges = [range(o, o + s) for o, s in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True)]
    nbytes = TensorSpec("", dtype, sizes).nbytes
    for number, index in enumerate(product(*ranges)):
        name = f"{key}@{','.join(map(str, (*index, *offsets)))}"
        start = found.start + number * nbytes
        spec = TensorSpec(name, dtype, sizes)
        stored[name] = SourceTensor(spec, dist.prefix + chunk.item.file, start, start + nbytes)
        yield index, Copy(name, spec.full_box(), offsets)


def _pattern(key: str) -> tuple[str, int]:
    """A key as a pattern of weight names, and how many of its first dimensions the names number."""
    key = key.replace("{", "{{").replace("}", "}}")
    lead = 0
    before, found, after = key.partition(_EXPERTS)
    if found:
        number, dot, _ = after.partition(".")
        if dot and number.isdecimal():
            key = f"{before}mlp.experts.{after}"  # each expert has a tensor of its own
        else:
            key, lead = f"{before}mlp.experts.{{}}.{after}", 1
    stack = _STACK.fullmatch(key)
    if stack:
        key, lead = f"{stack[1]}{{}}.{stack[2]}", lead + 1
    return key, lead
