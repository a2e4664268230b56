"""How the rows of a weight lie in a stored tensor: as they are, or flattened.

``fully_sharded_model_space``, as Megatron to 0.14 saves the state of a distributed optimizer, cuts a tensor into a grid
of equal fragments (one for each tensor-parallel rank, and for each layer where they are stacked), flattens each, and
lets data-parallel ranks have ranges of it: ``[rows, columns]`` on t ranks is stored as ``[t, 1, rows/t * columns]``,
and ``.metadata`` keeps the shape it had. Rows of a fragment are then runs of ``columns`` elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mla_convert.errors import CannotError
from mla_convert.formats.torch_dist_metadata import DistTensor
from mla_convert.megatron.model import Key
from mla_convert.megatron.rearranging import RowsFrom, rescaled_grid
from mla_convert.tensors import Box, TensorSpec


@dataclass(frozen=True, slots=True)
class Frame:
    """A stored tensor whose rows come in equal groups, one for each head.

    Attributes:
        key: Its key.
        tensor: What ``.metadata`` says of it.
        row_axis: The dimension of the weight that counts rows.
        head_rows: Rows of one head.
        heads: Heads that each fragment holds; all of them where nothing is flattened.
    """

    key: str
    tensor: DistTensor
    row_axis: int
    head_rows: int
    heads: int

    @property
    def is_flat(self) -> bool:
        """True if its fragments are flattened."""
        return self.tensor.original is not None

    @property
    def axis(self) -> int:
        """The dimension of the stored tensor along which rows lie."""
        return len(self.tensor.spec.shape) - 1 if self.is_flat else self.row_axis

    @property
    def unit(self) -> int:
        """Elements of a row along that dimension."""
        return prod(self.tensor.original[self.row_axis + 1 :]) if self.tensor.original else 1

    def rows(self, row: int, at: int, count: int) -> RowsFrom:
        """``count`` rows from ``row``, as rows from ``at`` of another tensor of the same form."""
        return RowsFrom(self.key, row * self.unit, at * self.unit, count * self.unit)

    def resized(self, key: str, head_rows: int) -> tuple[TensorSpec, tuple[int, ...] | None]:
        """A tensor of the same form whose heads have ``head_rows`` rows: its spec, and its shape before flattening."""
        shape, original = self.tensor.spec.shape, self.tensor.original
        count = self.heads * head_rows * self.unit
        spec = TensorSpec(key, self.tensor.spec.dtype, (*shape[: self.axis], count, *shape[self.axis + 1 :]))
        if original is None:
            return spec, None
        rows = original[self.row_axis] // self.head_rows * head_rows
        return spec, (*original[: self.row_axis], rows, *original[self.row_axis + 1 :])

    def grid(self, spec: TensorSpec, head_rows: int) -> list[Box]:
        """The chunks of such a tensor: a rank's heads together, or one chunk a fragment."""
        if not self.is_flat:
            return rescaled_grid(self.tensor.chunks, self.axis, self.head_rows, head_rows, spec.shape)
        boxes: list[Box] = [()]
        for extent in spec.shape[:-1]:
            boxes = [(*box, (index, index + 1)) for box in boxes for index in range(extent)]
        return [(*box, (0, spec.shape[-1])) for box in boxes]

    def is_like(self, other: Frame) -> bool:
        """True if rows of both can make one tensor."""
        ours, theirs = self.tensor.spec, other.tensor.spec
        return (ours.dtype, ours.shape[: self.axis], self.is_flat, self.heads) == (
            theirs.dtype,
            theirs.shape[: other.axis],
            other.is_flat,
            other.heads,
        )


def frame(key: Key, tensor: DistTensor, heads: int, head_rows: int, columns: int | None) -> Frame:
    """How the rows of a weight of ``heads`` times ``head_rows`` rows lie in a tensor.

    Args:
        key: The tensor's key.
        tensor: What ``.metadata`` says of it.
        heads: Heads of the weight.
        head_rows: Rows of each.
        columns: Columns of the weight; None for a vector.

    Raises:
        CannotError: Its shape is not the weight's, or its fragments cut through heads or columns.
    """
    axis, whole = key.row_axis, tensor.original or tensor.spec.shape
    expected = (heads * head_rows,) if columns is None else (heads * head_rows, columns)
    if whole[axis:] != expected:
        raise CannotError(
            f"{key.text} is {list(whole)}; it has to be {list(whole[:axis] + expected)}, as the weight that it follows"
        )
    if tensor.original is None:
        return Frame(key.text, tensor, axis, head_rows, heads)
    fragments = tensor.spec.shape[:-1]
    layers, ranks = fragments[:axis], fragments[axis]
    is_grid = (
        len(fragments) == len(whole)
        and layers == whole[:axis]
        and all(count == 1 for count in fragments[axis + 1 :])
        and ranks > 0
        and heads % ranks == 0
        and tensor.spec.numel == prod(whole)
    )
    if not is_grid:
        raise CannotError(
            f"{key.text} {list(whole)} is stored in fragments of {list(tensor.spec.shape)}, which are not whole heads",
            hint="give --drop-optimizer and go on with --no-load-optim",
        )
    return Frame(key.text, tensor, axis, head_rows, heads // ranks)
