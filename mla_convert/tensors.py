"""What a stored tensor is, and the arithmetic of cutting it: dtypes, specs, boxes, byte runs.

Everything here is pure and knows no file format. A *box* is a half-open range per dimension, in elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

#: Bits per element of every dtype that safetensors names. Sub-byte types are packed, lowest bits first.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, dtype (safetensors spelling, e.g. ``BF16``) and shape, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored size in bytes, row-major and packed."""
        return _stored_nbytes(self.dtype, self.shape)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension (the whole tensor for a scalar)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    def full_box(self) -> Box:
        """The box that covers the whole tensor."""
        return _whole_box(self.shape)


# A checkpoint has 100 000 tensors of a few dozen shapes: what follows from a shape is worked out once.


@lru_cache(maxsize=4096)
def _stored_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return (prod(shape) * DTYPE_BITS[dtype] + 7) // 8


@lru_cache(maxsize=4096)
def _whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def rows(spec: TensorSpec, start: int, stop: int) -> Box:
    """The box of rows ``start`` to ``stop`` of ``spec``, whole in every other dimension."""
    return ((start, stop), *((0, size) for size in spec.shape[1:]))


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent of a box per dimension."""
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` contiguous bytes at ``source`` of one tensor that become ``target`` of another (both in bytes)."""

    source: int
    target: int
    length: int


def byte_runs(source: TensorSpec, box: Box, target: TensorSpec, at: tuple[int, ...]) -> Iterator[Run]:
    """Lower "copy ``box`` of ``source`` to index ``at`` of ``target``" to contiguous byte runs, in source order.

    Both tensors are row-major with the same dtype and rank. Trailing dimensions that are whole on both sides
    merge into one run, so a slice of rows is a single run and a slice of columns is one run a row.

    Raises:
        ValueError: a box leaves its tensor, or cuts a packed sub-byte row inside a byte.
    """
    extent = box_shape(box)
    if source.dtype != target.dtype or not len(box) == len(source.shape) == len(at) == len(target.shape):
        raise ValueError(f"box {box} of {source} does not fit {target} at {at}")
    for (start, stop), size in zip(box, source.shape, strict=True):
        if not 0 <= start <= stop <= size:
            raise ValueError(f"box {box} leaves {source}")
    for offset, length, size in zip(at, extent, target.shape, strict=True):
        if not 0 <= offset <= offset + length <= size:
            raise ValueError(f"{extent} at {at} leaves {target}")
    if not prod(extent):
        return
    bits = DTYPE_BITS[source.dtype]

    # Innermost dimension that is cut on either side: everything from there on is one run.
    cut = len(extent)
    while cut and extent[cut - 1] == source.shape[cut - 1] == target.shape[cut - 1]:
        cut -= 1
    outer, run_dims = (extent[: cut - 1], extent[cut - 1 :]) if cut else ((), extent)
    run_bits = prod(run_dims) * bits
    source_strides, target_strides = _strides(source.shape), _strides(target.shape)
    source_base = sum(start * stride for (start, _), stride in zip(box, source_strides, strict=True))
    target_base = sum(offset * stride for offset, stride in zip(at, target_strides, strict=True))
    for index in _indices(outer):
        source_bits = (source_base + _dot(index, source_strides)) * bits
        target_bits = (target_base + _dot(index, target_strides)) * bits
        if (source_bits | target_bits | run_bits) & 7:
            raise ValueError(f"box {box} of {source} cuts inside a byte")
        yield Run(source_bits >> 3, target_bits >> 3, run_bits >> 3)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _dot(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=False))


def _indices(extent: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not extent:
        yield ()
        return
    for head in range(extent[0]):
        for tail in _indices(extent[1:]):
            yield (head, *tail)
