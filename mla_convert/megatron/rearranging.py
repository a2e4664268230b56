"""Tensors of a torch_dist checkpoint made up anew from others' rows, chunk by chunk, and the files they go into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from mla_convert.catalogue import SourceTensor
from mla_convert.errors import BadInputError
from mla_convert.formats.torch_dist import TorchDist, locate
from mla_convert.formats.torch_dist_edit import NewTensor
from mla_convert.formats.torch_dist_metadata import Chunk, Item
from mla_convert.formats.torch_save_writing import Envelope, envelope
from mla_convert.pieces import compose, cut
from mla_convert.plan import Copy, EqualTensors, Inline, RewrittenFile, TargetTensor, whole
from mla_convert.tensors import Box, TensorSpec

#: Name of the files that new items go into, and how much goes into one.
FILE_NAME = "__mla_convert_{}.distcp"
FILE_SIZE = 1 << 30


@dataclass(frozen=True, slots=True)
class RowsFrom:
    """``count`` rows from ``row`` of the tensor ``key``, as rows from ``at`` of a new one."""

    key: str
    row: int
    at: int
    count: int


@dataclass(slots=True)
class Rearranger:
    """Collects new tensors and objects of a checkpoint. Chunks that they take rows from are located as needed.

    Attributes:
        source: The checkpoint.
        tensors: The stored chunks that were located so far, by a name of their own.
    """

    source: TorchDist
    tensors: dict[str, SourceTensor] = field(default_factory=dict)
    _items: list[tuple[TargetTensor, Envelope]] = field(default_factory=list)
    _places: list[Item] = field(default_factory=list)
    _disjoint: set[str] = field(default_factory=set)
    _used: int = 0
    _name: str = ""

    def add(
        self,
        spec: TensorSpec,
        moves: Sequence[RowsFrom],
        axis: int,
        grid: Sequence[Box],
        like: str,
        original: tuple[int, ...] | None = None,
    ) -> NewTensor:
        """A tensor made of rows of others.

        Args:
            spec: Its key, dtype and global shape.
            moves: Which rows it is made of.
            axis: The dimension that counts rows, in it and in the others.
            grid: The chunks to store it in.
            like: A tensor whose other properties it takes over.
            original: Its shape before flattening, if it is flattened.
        """
        pieces = [self._whole_rows(move, axis) for move in moves]
        chunks = []
        for box in grid:
            target = self._target(spec, pieces, box)
            chunks.append(Chunk(tuple(a for a, _ in box), target.spec.shape, self._put(target)))
        return NewTensor(spec, tuple(chunks), like, original)

    def add_empty_state(self, key: str) -> Item:
        """An extra state as Transformer Engine 2 saves it where there is none: a list of one empty tensor."""
        target = TargetTensor(TensorSpec(key, "U8", (0,)), (Inline(b""),))
        return self._put(target, in_list=True)

    def add_bytes(self, key: str, data: bytes) -> Item:
        """An object whose archive is there already."""
        target = TargetTensor(TensorSpec(key, "U8", (len(data),)), (Inline(data),))
        return self._put_in(target, Envelope(b"", b"", ()))

    def equal(self, key: str, moves: Sequence[RowsFrom], axis: int, otherwise: str) -> Iterator[EqualTensors]:
        """Conditions that a stored tensor is made of these rows of others."""
        tensor = self.source.metadata.tensors[key]
        pieces = [self._whole_rows(move, axis) for move in moves]
        for chunk in tensor.chunks:
            name = self._located(key, chunk)
            left = self._target(tensor.spec, pieces, _box(chunk))
            right = TargetTensor(self.tensors[name].spec, (whole(self.tensors[name].spec),))
            yield EqualTensors(left, right, otherwise)

    def chunk_names(self, key: str) -> list[str]:
        """The names under which a tensor's chunks are among ``tensors``."""
        return [self._located(key, chunk) for chunk in self.source.metadata.tensors[key].chunks]

    def files(self) -> list[RewrittenFile]:
        """The files that hold what was added."""
        found: dict[str, list[tuple[TargetTensor, Envelope]]] = {}
        for (target, around), item in zip(self._items, self._places, strict=True):
            found.setdefault(item.file, []).append((target, around))
        return [
            RewrittenFile(
                self.source.prefix + name, b"", tuple(t for t, _ in held), tuple(e for _, e in held)
            )
            for name, held in found.items()
        ]

    # Inside

    def _whole_rows(self, move: RowsFrom, axis: int) -> Copy:
        shape = self.source.metadata.tensors[move.key].spec.shape
        box = tuple(
            (move.row, move.row + move.count) if dimension == axis else (0, size)
            for dimension, size in enumerate(shape)
        )
        return Copy(
            move.key, box, tuple(move.at if dimension == axis else 0 for dimension in range(len(shape)))
        )

    def _target(self, spec: TensorSpec, pieces: Iterable[Copy], box: Box) -> TargetTensor:
        needed = list(cut(pieces, box))
        made_of = {
            key: list(self._stored(key, [p.box for p in needed if p.source == key]))
            for key in _sources(needed)
        }
        shape = tuple(stop - start for start, stop in box)
        name = chunk_name(spec.name, tuple(start for start, _ in box))
        return TargetTensor(TensorSpec(name, spec.dtype, shape), tuple(compose(needed, made_of)))

    def _stored(self, key: str, boxes: Sequence[Box]) -> Iterator[Copy]:
        """The chunks of a tensor that some of its boxes reach into, as pieces of it."""
        self._require_disjoint(key)
        low = [min(box[d][0] for box in boxes) for d in range(len(boxes[0]))]
        high = [max(box[d][1] for box in boxes) for d in range(len(boxes[0]))]
        for chunk in self.source.metadata.tensors[key].chunks:
            reach = zip(chunk.offsets, chunk.sizes, low, high, strict=True)
            if all(offset < last and first < offset + size for offset, size, first, last in reach):
                spec = self.tensors[self._located(key, chunk)].spec
                yield Copy(spec.name, spec.full_box(), chunk.offsets)

    def _require_disjoint(self, key: str) -> None:
        """Chunks that overlap would leave a part of the tensor out, though their sizes add up."""
        if key in self._disjoint:
            return
        self._disjoint.add(key)
        open_boxes: list[Box] = []
        for box in sorted(_box(chunk) for chunk in self.source.metadata.tensors[key].chunks):
            open_boxes = [other for other in open_boxes if other[0][1] > box[0][0]] if box else open_boxes
            for other in open_boxes:
                if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                    raise BadInputError(
                        f"{self.source.folder}: two chunks of {key} overlap",
                        hint="the checkpoint is damaged; save it again",
                        details=[str(other), str(box)],
                    )
            open_boxes.append(box)

    def _located(self, key: str, chunk: Chunk) -> str:
        name = chunk_name(key, chunk.offsets)
        if name not in self.tensors:
            dtype = self.source.metadata.tensors[key].spec.dtype
            found = locate(self.source.folder, key, chunk, dtype)
            spec = TensorSpec(name, dtype, chunk.sizes)
            self.tensors[name] = SourceTensor(
                spec, self.source.prefix + chunk.item.file, found.start, found.stop
            )
        return name

    def _put(self, target: TargetTensor, *, in_list: bool = False) -> Item:
        return self._put_in(target, envelope(target.spec.dtype, target.spec.shape, in_list=in_list))

    def _put_in(self, target: TargetTensor, around: Envelope) -> Item:
        length = len(around) + target.spec.nbytes
        if not self._name or (self._used and self._used + length > FILE_SIZE):
            self._name, self._used = self._new_name(), 0
        item = Item(self._name, self._used, length)
        self._used += length
        self._items.append((target, around))
        self._places.append(item)
        return item

    def _new_name(self) -> str:
        """A name that no file has; files of an earlier conversion may be there."""
        taken = {name.removeprefix(self.source.prefix) for name in self.source.files}
        taken |= {item.file for item in self._places}
        return next(name for number in count() if (name := FILE_NAME.format(number)) not in taken)


def chunk_name(key: str, offsets: tuple[int, ...]) -> str:
    """What a chunk is called in a plan."""
    return f"{key}@{','.join(map(str, offsets))}"


def _box(chunk: Chunk) -> Box:
    return tuple((offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _sources(pieces: Iterable[Copy]) -> Iterable[str]:
    return dict.fromkeys(piece.source for piece in pieces)


def rescaled_grid(
    chunks: Sequence[Chunk], axis: int, old: int, new: int, shape: tuple[int, ...]
) -> list[Box]:
    """The chunks of a tensor whose heads have ``new`` rows, after those of one whose heads have ``old``.

    Ranks keep their heads that way. Where a chunk ends inside a head, each layer becomes one chunk instead.
    """
    boxes = []
    for chunk in chunks:
        box = list(_box(chunk))
        start, stop = box[axis]
        if start % old or stop % old:
            return one_chunk_a_layer(axis, shape)
        box[axis] = (start // old * new, stop // old * new)
        boxes.append(tuple(box))
    return boxes


def one_chunk_a_layer(axis: int, shape: tuple[int, ...]) -> list[Box]:
    """The coarsest chunks: whole weights."""
    weight = tuple((0, size) for size in shape[axis:])
    return [((layer, layer + 1), *weight) for layer in range(shape[0])] if axis else [weight]
