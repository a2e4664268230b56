"""The row layout against torch: what every inference engine does with a combined projection."""

from __future__ import annotations

from itertools import chain
from math import gcd

import pytest
import torch
from checkpoints import halves
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.split_kv import KVLayout, RowMove, k_moves, scale_block_rows, scale_moves, v_moves

LAYOUTS = st.builds(KVLayout, st.integers(1, 6), st.integers(1, 300), st.integers(1, 300))
#: (heads, nope, v) of published models.
PUBLISHED = {
    "deepseek_v3": KVLayout(128, 128, 128),
    "glm_5": KVLayout(64, 192, 256),
    "minicpm3": KVLayout(40, 64, 64),
    "mistral4": KVLayout(32, 64, 128),
    "tiny_glm": KVLayout(4, 24, 32),
}


def applied(moves: list[RowMove], combined: torch.Tensor, rows: int) -> torch.Tensor:
    split = torch.full((rows, combined.shape[1]), -1, dtype=combined.dtype)
    for move in moves:
        split[move.split : move.split + move.count] = combined[move.combined : move.combined + move.count]
    return split


@given(LAYOUTS)
def test_moves_are_view_and_narrow(layout: KVLayout) -> None:
    combined = torch.arange(layout.combined_rows).unsqueeze(1)
    k, v = halves(combined, layout.heads, layout.nope, layout.v)
    assert torch.equal(applied(list(k_moves(layout)), combined, layout.k_rows), k)
    assert torch.equal(applied(list(v_moves(layout)), combined, layout.v_rows), v)


def test_two_heads_spelt_out() -> None:
    layout = KVLayout(heads=2, nope=3, v=1)
    assert list(k_moves(layout)) == [RowMove(0, 0, 3), RowMove(4, 3, 3)]
    assert list(v_moves(layout)) == [RowMove(3, 0, 1), RowMove(7, 1, 1)]
    assert (layout.stride, layout.combined_rows, layout.k_rows, layout.v_rows) == (4, 8, 6, 2)


@pytest.mark.parametrize(
    ("model", "rows"),
    [("deepseek_v3", 128), ("glm_5", 64), ("minicpm3", 64), ("mistral4", 64), ("tiny_glm", 8)],
)
def test_block_rows_of_published_models(model: str, rows: int) -> None:
    assert scale_block_rows(PUBLISHED[model], 128) == rows


@given(LAYOUTS, st.sampled_from([1, 32, 64, 96, 128]))
def test_split_blocks_are_as_large_as_they_can_be(layout: KVLayout, block_rows: int) -> None:
    rows = scale_block_rows(layout, block_rows)
    assert rows == gcd(layout.nope, layout.v, block_rows)


@given(LAYOUTS, st.sampled_from([1, 32, 64, 96, 128]))
def test_every_row_keeps_its_scale(layout: KVLayout, block_rows: int) -> None:
    """The scale that a split row finds in its block is the one it had in the combined tensor."""
    scales = torch.arange(-(-layout.combined_rows // block_rows)).unsqueeze(1)
    of_row = scales.repeat_interleave(block_rows, 0)[: layout.combined_rows]
    rows = scale_block_rows(layout, block_rows)
    expected = halves(of_row, layout.heads, layout.nope, layout.v)
    for moves, count, wanted in zip(
        (k_moves(layout), v_moves(layout)), (layout.k_rows, layout.v_rows), expected, strict=True
    ):
        split = applied(list(scale_moves(moves, block_rows, rows)), scales, count // rows)
        assert torch.equal(split.repeat_interleave(rows, 0), wanted)


@pytest.mark.parametrize("layout", PUBLISHED.values(), ids=PUBLISHED)
def test_every_combined_scale_is_used(layout: KVLayout) -> None:
    rows = scale_block_rows(layout, 128)
    moves = chain(scale_moves(k_moves(layout), 128, rows), scale_moves(v_moves(layout), 128, rows))
    used = {row for move in moves for row in range(move.combined, move.combined + move.count)}
    assert used == set(range(-(-layout.combined_rows // 128)))


def test_a_block_that_holds_k_and_v_is_replicated() -> None:
    layout = KVLayout(heads=1, nope=192, v=256)
    assert list(scale_moves(k_moves(layout), 128, 64)) == [
        RowMove(0, 0, 1),
        RowMove(0, 1, 1),
        RowMove(1, 2, 1),
    ]
    assert [move.combined for move in scale_moves(v_moves(layout), 128, 64)] == [1, 2, 2, 3]


def test_aligned_scales_move_in_one_piece_a_head() -> None:
    layout = KVLayout(heads=2, nope=256, v=128)
    assert list(scale_moves(k_moves(layout), 128, 128)) == [RowMove(0, 0, 2), RowMove(3, 2, 2)]
