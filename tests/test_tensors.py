"""Byte runs move exactly the bytes that slicing a torch tensor moves, in as few runs as possible."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_convert.tensors import DTYPE_BITS, Box, Run, TensorSpec, box_shape, byte_runs, rows

# A loaded machine is not a fault: hypothesis must not judge by the clock.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TORCH_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}


def copy(source: bytes, target: bytearray, runs: list[Run]) -> None:
    for run in runs:
        target[run.target : run.target + run.length] = source[run.source : run.source + run.length]


@st.composite
def copies(
    draw: st.DrawFn, max_dims: int = 3
) -> tuple[tuple[int, ...], Box, tuple[int, ...], tuple[int, ...]]:
    """A source shape, a box in it, a target shape that has room for the box, and where in the target it goes."""
    source, box, target, at = [], [], [], []
    for _ in range(draw(st.integers(1, max_dims))):
        size = draw(st.integers(0, 5))
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        if draw(st.booleans()):  # whole on both sides, which random numbers seldom hit
            start, stop, before, after = 0, size, 0, 0
        source.append(size)
        box.append((start, stop))
        target.append(before + stop - start + after)
        at.append(before)
    return tuple(source), tuple(box), tuple(target), tuple(at)


@settings(UNTIMED, max_examples=150)
@given(st.sampled_from(list(TORCH_DTYPES)), copies())
def test_runs_equal_torch_slicing(
    dtype: str, case: tuple[tuple[int, ...], Box, tuple[int, ...], tuple[int, ...]]
) -> None:
    source_shape, box, target_shape, at = case
    source_spec = TensorSpec("source", dtype, source_shape)
    target_spec = TensorSpec("target", dtype, target_shape)
    size = DTYPE_BITS[dtype] // 8
    # Work on the elements' bytes as a last dimension: every bit pattern is then compared, NaN included.
    source = torch.randint(256, (*source_shape, size), dtype=torch.uint8)
    expected = torch.randint(256, (*target_shape, size), dtype=torch.uint8)
    target = bytearray(expected.numpy().tobytes())

    runs = list(byte_runs(source_spec, box, target_spec, at))
    copy(source.numpy().tobytes(), target, runs)
    expected[tuple(slice(o, o + n) for o, n in zip(at, box_shape(box), strict=True))] = source[
        tuple(slice(*bounds) for bounds in box)
    ]
    assert bytes(target) == expected.numpy().tobytes()

    # In source order, disjoint on both sides, none empty: that is what a sequential reader needs.
    assert all(run.length > 0 for run in runs)
    for before, after in pairwise(runs):
        assert before.source + before.length <= after.source
        assert before.target + before.length <= after.target
        joined = (
            before.source + before.length == after.source and before.target + before.length == after.target
        )
        assert not joined, f"{before} and {after} are one run"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 3)], ids=["1d", "2d", "3d"])
def test_spec_sizes_are_those_of_torch(dtype: str, shape: tuple[int, ...]) -> None:
    spec, tensor = TensorSpec("a", dtype, shape), torch.zeros(shape).to(TORCH_DTYPES[dtype])
    assert (spec.numel, spec.nbytes, spec.row_nbytes) == (tensor.numel(), tensor.nbytes, tensor[0].nbytes)


def test_spec_sizes_at_the_edges() -> None:
    scalar = TensorSpec("a", "F32", ())
    assert (scalar.numel, scalar.nbytes, scalar.row_nbytes, scalar.full_box()) == (1, 4, 4, ())
    empty = TensorSpec("a", "F32", (0, 5))
    assert (empty.numel, empty.nbytes, empty.row_nbytes) == (0, 0, 0)
    assert TensorSpec("a", "F4", (3, 2)).nbytes == 3
    assert TensorSpec("a", "F6_E2M3", (4,)).nbytes == 3


# ---- how many runs ----

K_B = TensorSpec("kv_b", "BF16", (8, 6, 4))  # heads, rows of a head, rank


def runs_of(source: TensorSpec, box: Box, target_shape: tuple[int, ...], at: tuple[int, ...]) -> list[Run]:
    return list(byte_runs(source, box, TensorSpec("target", source.dtype, target_shape), at))


def test_a_whole_tensor_is_one_run() -> None:
    assert runs_of(K_B, K_B.full_box(), K_B.shape, (0, 0, 0)) == [Run(0, 0, 384)]


def test_a_slice_of_rows_is_one_run() -> None:
    assert rows(K_B, 2, 5) == ((2, 5), (0, 6), (0, 4))
    assert runs_of(K_B, rows(K_B, 2, 5), (10, 6, 4), (7, 0, 0)) == [Run(96, 336, 144)]


def test_the_split_of_each_head_is_one_run_a_head() -> None:
    runs = runs_of(K_B, ((0, 8), (4, 6), (0, 4)), (8, 2, 4), (0, 0, 0))
    assert runs == [Run(head * 48 + 32, head * 16, 16) for head in range(8)]


def test_a_slice_of_columns_is_one_run_a_row() -> None:
    matrix = TensorSpec("o_proj", "F32", (3, 8))
    assert runs_of(matrix, ((0, 3), (2, 4)), (3, 2), (0, 0)) == [Run(8, 0, 8), Run(40, 8, 8), Run(72, 16, 8)]


def test_columns_into_a_wider_target_are_one_run_a_row() -> None:
    matrix = TensorSpec("a", "U8", (2, 3))
    assert runs_of(matrix, matrix.full_box(), (2, 5), (0, 1)) == [Run(0, 1, 3), Run(3, 6, 3)]


def test_a_scalar_is_one_run() -> None:
    assert runs_of(TensorSpec("a", "F32", ()), (), (), ()) == [Run(0, 0, 4)]


@pytest.mark.parametrize(
    "box", [((2, 2), (0, 6), (0, 4)), ((0, 8), (0, 0), (0, 4)), ((8, 8), (6, 6), (4, 4))]
)
def test_an_empty_box_has_no_runs(box: Box) -> None:
    assert runs_of(K_B, box, K_B.shape, (0, 0, 0)) == []


def test_runs_are_made_one_at_a_time() -> None:
    huge = TensorSpec("a", "U8", (1 << 40, 2))
    assert next(byte_runs(huge, ((0, 1 << 40), (1, 2)), TensorSpec("b", "U8", (1 << 40, 1)), (0, 0))) == Run(
        1, 0, 1
    )


# ---- packed types ----


@settings(UNTIMED, max_examples=100)
@given(copies(max_dims=2))
def test_packed_runs_equal_slicing_of_nibbles_or_are_refused(
    case: tuple[tuple[int, ...], Box, tuple[int, ...], tuple[int, ...]],
) -> None:
    source_shape, box, target_shape, at = case
    source_spec, target_spec = (
        TensorSpec("source", "F4", source_shape),
        TensorSpec("target", "F4", target_shape),
    )
    source, expected = torch.randint(16, source_shape), torch.zeros(target_shape, dtype=torch.int64)
    target = bytearray(pack(expected))
    try:
        copy(pack(source), target, list(byte_runs(source_spec, box, target_spec, at)))
    except ValueError as error:
        assert "cuts inside a byte" in str(error)
        return
    expected[tuple(slice(o, o + n) for o, n in zip(at, box_shape(box), strict=True))] = source[
        tuple(slice(*bounds) for bounds in box)
    ]
    assert bytes(target) == pack(expected)


def pack(nibbles: torch.Tensor) -> bytes:
    """Two 4-bit elements a byte, the first in the low bits."""
    flat = [*nibbles.flatten().tolist(), 0]
    return bytes(flat[index] | flat[index + 1] << 4 for index in range(0, len(flat) - 1, 2))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_rows_move_whole(dtype: str) -> None:
    spec = TensorSpec("a", dtype, (4, 8))
    assert runs_of(spec, rows(spec, 1, 3), (2, 8), (0, 0)) == [
        Run(DTYPE_BITS[dtype], 0, 2 * DTYPE_BITS[dtype])
    ]


CUTS: dict[str, tuple[tuple[int, ...], Box, tuple[int, ...], tuple[int, ...]]] = {
    "start-inside-a-byte": ((4, 8), ((0, 4), (1, 3)), (4, 2), (0, 0)),
    "length-not-whole-bytes": ((4, 8), ((0, 4), (0, 3)), (4, 3), (0, 0)),
    "target-inside-a-byte": ((4, 8), ((0, 4), (0, 2)), (4, 8), (0, 1)),
    "odd-rows": ((4, 3), ((1, 3), (0, 3)), (2, 3), (0, 0)),
    "second-run-inside-a-byte": ((2, 3), ((0, 2), (0, 2)), (2, 2), (0, 0)),
}


@pytest.mark.parametrize(("source", "box", "target", "at"), CUTS.values(), ids=CUTS)
def test_cutting_a_packed_byte_is_refused(
    source: tuple[int, ...], box: Box, target: tuple[int, ...], at: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="cuts inside a byte"):
        list(byte_runs(TensorSpec("a", "F4", source), box, TensorSpec("b", "F4", target), at))


def test_whole_bytes_of_a_packed_row_may_be_cut() -> None:
    assert runs_of(TensorSpec("a", "F4", (2, 8)), ((0, 2), (2, 6)), (2, 4), (0, 0)) == [
        Run(1, 0, 2),
        Run(5, 2, 2),
    ]


# ---- what does not fit ----

MATRIX = TensorSpec("a", "U8", (4, 6))
MISFITS: dict[str, tuple[Box, TensorSpec, tuple[int, ...], str]] = {
    "other-dtype": (((0, 4), (0, 6)), TensorSpec("b", "I8", (4, 6)), (0, 0), "does not fit"),
    "box-of-other-rank": (((0, 4),), MATRIX, (0, 0), "does not fit"),
    "target-of-other-rank": (
        ((0, 4), (0, 6)),
        TensorSpec("b", "U8", (24,)),
        (0,),
        "does not fit",
    ),
    "place-of-other-rank": (((0, 4), (0, 6)), MATRIX, (0,), "does not fit"),
    "box-past-the-end": (
        ((0, 5), (0, 6)),
        TensorSpec("b", "U8", (9, 9)),
        (0, 0),
        "leaves TensorSpec.name='a'",
    ),
    "box-before-the-start": (((-1, 2), (0, 6)), MATRIX, (0, 0), "leaves TensorSpec.name='a'"),
    "reversed-box": (((3, 1), (0, 6)), MATRIX, (0, 0), "leaves TensorSpec.name='a'"),
    "target-too-small": (
        ((0, 4), (0, 6)),
        TensorSpec("b", "U8", (4, 5)),
        (0, 0),
        "leaves TensorSpec.name='b'",
    ),
    "place-past-the-end": (((0, 4), (0, 6)), MATRIX, (1, 0), "leaves TensorSpec.name='a'"),
    "place-before-the-start": (((0, 1), (0, 6)), MATRIX, (-1, 0), "leaves TensorSpec.name='a'"),
    "empty-box-outside": (((5, 5), (0, 6)), MATRIX, (0, 0), "leaves TensorSpec.name='a'"),
}


@pytest.mark.parametrize(("box", "target", "at", "words"), MISFITS.values(), ids=MISFITS)
def test_misfits_are_refused(box: Box, target: TensorSpec, at: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(byte_runs(MATRIX, box, target, at))
