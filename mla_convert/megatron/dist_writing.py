"""Lays out weights as a new torch_dist checkpoint: keys, chunks, extra states, and the files they go into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mla_convert.errors import BadInputError
from mla_convert.formats.pickle_writing import write_pickle
from mla_convert.formats.torch_dist import BACKEND, COMMON, METADATA, TRACKER
from mla_convert.formats.torch_dist_metadata import Chunk, Item
from mla_convert.formats.torch_dist_new import new_metadata
from mla_convert.formats.torch_save_writing import Envelope, envelope, write_archive
from mla_convert.pieces import cut
from mla_convert.plan import Copy, GeneratedFile, Inline, RewrittenFile, TargetTensor
from mla_convert.strict_json import dump_json
from mla_convert.tensors import TensorSpec, rows

#: A checkpoint of weights alone lies in this folder: Megatron then expects no optimizer and begins at iteration 0.
RELEASE = "release"
#: Bytes that go into one file, and into one chunk where a tensor may be cut.
FILE_BYTES = 2 << 30
CHUNK_BYTES = 1 << 30
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
#: Modules without an extra state: none of them is a layer of Transformer Engine, whatever the spec.
_STATELESS = re.compile(r"embedding\.word_embeddings|output_layer|.*\.mlp\.router", re.DOTALL)


@dataclass(slots=True)
class DistWriter:
    """Collects the tensors and objects of a new checkpoint.

    Attributes:
        prefix: What stands before the names of its files.
    """

    prefix: str
    _tensors: dict[str, tuple[TensorSpec, list[Chunk]]] = field(default_factory=dict)
    _objects: dict[str, Item] = field(default_factory=dict)
    _held: list[tuple[Item, TargetTensor, Envelope]] = field(default_factory=list)
    _used: int = 0
    _file: int = 0

    def add_all(self, weights: Mapping[str, TargetTensor], *, stacked: bool) -> None:
        """Add weights by name: routed experts become one tensor, and all layers of the decoder if ``stacked``.

        Raises:
            BadInputError: Weights that are to be one tensor differ in shape or dtype, or some are missing.
        """
        groups: dict[str, dict[tuple[int, ...], TargetTensor]] = {}
        for name, target in weights.items():
            key, index = disk_key(name, stacked=stacked)
            groups.setdefault(key, {})[index] = target
        for key, members in groups.items():
            shape = _lead_shape(key, members)
            spec = next(iter(members.values())).spec
            chunks = [chunk for index, target in members.items() for chunk in self._chunks(target, index)]
            self._tensors[key] = TensorSpec(key, spec.dtype, (*shape, *spec.shape)), chunks

    def add_empty_states(self, keys: Iterable[str]) -> None:
        """Extra states as Transformer Engine 2 saves them where there is none; one item serves all keys."""
        item: Item | None = None
        for key in keys:
            if item is None:
                target = TargetTensor(TensorSpec("_extra_state", "U8", (0,)), (Inline(b""),))
                item = self._put(target, envelope("U8", (0,), in_list=True))
            self._objects[key] = item

    def files(self) -> Iterator[RewrittenFile]:
        """The files with tensors."""
        by_file: dict[str, list[tuple[TargetTensor, Envelope]]] = {}
        for item, target, around in self._held:
            by_file.setdefault(item.file, []).append((target, around))
        for name, held in by_file.items():
            targets, envelopes = tuple(t for t, _ in held), tuple(e for _, e in held)
            yield RewrittenFile(self.prefix + name, b"", targets, envelopes)

    def generated(self, common: Mapping[str, Any]) -> Iterator[GeneratedFile]:
        """The other files of the checkpoint, for a common state."""
        where = self.prefix + METADATA
        yield GeneratedFile(where, new_metadata(self._tensors.values(), self._objects, where))
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backend |= {"common_backend": "torch", "common_backend_version": 1}
        yield GeneratedFile(self.prefix + BACKEND, dump_json(backend))
        pickle = write_pickle(dict(common), self.prefix + COMMON, protocol=2)
        yield GeneratedFile(self.prefix + COMMON, write_archive(pickle, {}))
        yield GeneratedFile(TRACKER, self.prefix.rstrip("/").encode())

    # Inside

    def _chunks(self, target: TargetTensor, index: tuple[int, ...]) -> Iterator[Chunk]:
        """A weight as chunks of a tensor in which it stands at ``index``."""
        lead = (1,) * len(index)
        for at, part in _cut_rows(target):
            around = envelope(part.spec.dtype, (*lead, *part.spec.shape))
            item = self._put(part, around)
            yield Chunk((*index, *at), (*lead, *part.spec.shape), item)

    def _put(self, target: TargetTensor, around: Envelope) -> Item:
        length = len(around) + target.spec.nbytes
        if self._used and self._used + length > FILE_BYTES:
            self._file, self._used = self._file + 1, 0
        item = Item(f"__0_{self._file}.distcp", self._used, length)
        self._used += length
        self._held.append((item, target, around))
        return item


def disk_key(name: str, *, stacked: bool) -> tuple[str, tuple[int, ...]]:
    """The key that a weight lies under, and its index in the first dimensions of that tensor."""
    index: tuple[int, ...] = ()
    expert = _EXPERT.search(name)
    if expert:
        name = f"{name[: expert.start()]}.mlp.experts.experts.{name[expert.end() :]}"
        index = (int(expert[1]),)
    layer = _LAYER.match(name) if stacked else None
    if layer:
        name, index = f"decoder.layers.{name[layer.end() :]}", (int(layer[1]), *index)
    return name, index


def _lead_shape(key: str, members: Mapping[tuple[int, ...], TargetTensor]) -> tuple[int, ...]:
    """How many layers and experts a tensor counts, if all of them are there and alike."""
    specs = {(target.spec.dtype, target.spec.shape) for target in members.values()}
    shape = tuple(max(numbers) + 1 for numbers in zip(*members, strict=True))
    count = 1
    for size in shape:
        count *= size
    if len(specs) > 1 or count != len(members):
        raise BadInputError(
            f"{key} would be one tensor of {'x'.join(map(str, shape))} parts, but {len(members)} are there, in "
            f"{len(specs)} shapes",
            hint="the checkpoint is incomplete, or its experts differ",
        )
    return shape


def _cut_rows(target: TargetTensor) -> Iterator[tuple[tuple[int, ...], TargetTensor]]:
    """A large weight in slices of rows, each with its offsets; one that has to be computed stays whole."""
    spec, copies = target.spec, [piece for piece in target.pieces if isinstance(piece, Copy)]
    count = CHUNK_BYTES // max(1, spec.row_nbytes)
    if not spec.shape or spec.nbytes <= CHUNK_BYTES or len(copies) < len(target.pieces) or not count:
        yield (0,) * len(spec.shape), target
        return
    for start in range(0, spec.shape[0], count):
        stop = min(start + count, spec.shape[0])
        part = replace(spec, name=f"{spec.name}[{start}:{stop}]", shape=(stop - start, *spec.shape[1:]))
        pieces = tuple(cut(copies, rows(spec, start, stop)))
        yield (start, *(0,) * (len(spec.shape) - 1)), TargetTensor(part, pieces)


def extra_state_keys(weights: Iterable[str], *, stacked: bool) -> Iterator[str]:
    """The extra states that a model of Transformer Engine's layers has, by key.

    A model of Megatron's own layers asks for some of them, and leaves the others unread.
    """
    modules: dict[tuple[str, tuple[int, ...]], None] = {}
    for name in weights:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and not _STATELESS.fullmatch(module):
            modules.setdefault(disk_key(module + ".", stacked=stacked))
            if module.endswith("self_attention.linear_proj"):
                core = module.removesuffix("linear_proj") + "core_attention."
                modules.setdefault(disk_key(core, stacked=stacked))
    sizes: dict[str, tuple[int, ...]] = {}
    for key, index in modules:
        highest = sizes.get(key, (0,) * len(index))
        sizes[key] = tuple(max(a, b + 1) for a, b in zip(highest, index, strict=True))
    for key, index in modules:
        offsets, shape = (index, sizes[key]) if index else ((0,), (1,))
        yield f"{key}_extra_state/shard_{_dotted(offsets)}_{_dotted(shape)}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
