"""The indexer's logits, top-k with a fixed rule for ties, and the comparison of two selections."""

from __future__ import annotations

import math

import pytest
import torch

from mla_convert.errors import BadInputError
from mla_convert.runtime import numerics
from mla_convert.runtime.selection import (
    index_queries_keys,
    indexer_logits,
    indexer_select,
    quantise_rows,
    select_topk,
    selection_agreement,
)
from mla_convert.runtime.spec import AttentionSpec, RopeSpec
from mla_convert.runtime.weights import IndexerWeights

NEG = -math.inf


def test_logits_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # one query, two heads
    k = torch.tensor([[3.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    w = torch.tensor([[10.0, -1.0]])
    assert indexer_logits(q, k, w).tolist() == [[30.0, -2.0, 8.0]]


@pytest.mark.parametrize("limit", [1 << 27, 1])
def test_logits_are_minus_infinity_outside_the_range(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", limit)
    q, k, w = torch.rand(3, 2, 4), torch.rand(5, 4), torch.rand(3, 2)
    starts, ends = torch.tensor([0, 2, 3]), torch.tensor([1, 5, 3])
    logits = indexer_logits(q.bfloat16(), k.bfloat16(), w, starts=starts, ends=ends)
    assert logits.dtype == torch.float32
    assert logits.isfinite().tolist() == [[True] + [False] * 4, [False] * 2 + [True] * 3, [False] * 5]
    assert (logits[~logits.isfinite()] == NEG).all()


def test_topk_prefers_the_lower_key_on_a_tie_and_pads() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [NEG, 2.0, NEG, 0.0, NEG], [NEG] * 5])
    assert select_topk(logits, 3).tolist() == [[1, 2, 4], [1, 3, -1], [-1, -1, -1]]
    assert select_topk(logits, 3).dtype == torch.int32
    assert select_topk(logits, 2).tolist() == [[1, 2], [1, 3], [-1, -1]]
    assert select_topk(logits, 9).tolist() == [[0, 1, 2, 3, 4], [1, 3, -1, -1, -1], [-1] * 5]
    ties = torch.zeros(2, 5000)  # long enough for a sort that is not stable to shuffle them
    assert torch.equal(select_topk(ties, 4000), torch.arange(4000, dtype=torch.int32).expand(2, -1))


def test_topk_gives_keys_in_ascending_order() -> None:
    assert select_topk(torch.tensor([[0.0, 5.0, 1.0, 9.0, 7.0]]), 3).tolist() == [[1, 3, 4]]


def test_topk_of_special_numbers() -> None:
    """NaN of either sign is the highest, 0.0 is -0.0, and a denormal is no zero."""
    logits = torch.tensor([[math.inf, math.nan, 9.0, -math.nan], [-0.0, 0.0, 1e-45, -1e-45]])
    assert select_topk(logits, 2).tolist() == [[1, 3], [0, 2]]
    assert select_topk(logits, 3).tolist() == [[0, 1, 3], [0, 1, 2]]


@pytest.mark.parametrize("limit", [1 << 27, 1])
def test_topk_in_ranges(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", limit)
    logits = torch.tensor([[9.0, 1.0, 2.0, 3.0, 8.0]]).repeat(4, 1)
    starts, ends = torch.tensor([1, -3, 3, 2]), torch.tensor([4, 2, 99, 1])
    assert select_topk(logits, 2, starts=starts, ends=ends).tolist() == [[2, 3], [0, 1], [3, 4], [-1, -1]]
    assert select_topk(logits, 2, starts=starts).tolist() == [[3, 4], [0, 4], [3, 4], [3, 4]]


@pytest.mark.parametrize("k", [0, -1])
def test_topk_needs_a_positive_k(k: int) -> None:
    with pytest.raises(ValueError, match=f"top-k of {k} keys"):
        select_topk(torch.zeros(1, 5), k)


@pytest.mark.parametrize("limit", [1 << 27, 1])
def test_selection_in_chunks(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against logits of the whole: also for queries that see nothing, and for a chunk in which no query does."""
    torch.manual_seed(0)
    q, k, w = torch.randn(7, 3, 8), torch.randn(20, 8), torch.randn(7, 3)
    starts, ends = torch.tensor([0, 3, 0, 5, 9, 9, 0]), torch.tensor([20, 9, 2, 5, 4, 18, -1])
    want = select_topk(indexer_logits(q, k, w, starts=starts, ends=ends), 4)
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", limit)
    assert torch.equal(indexer_select(q, k, w, 4, starts=starts, ends=ends), want)
    assert torch.equal(indexer_select(q, k, w, 30), select_topk(indexer_logits(q, k, w), 30))


def test_scales_of_rows() -> None:
    """The smallest power of two that brings a row within 448; codes are exact where they can be."""
    rows = torch.tensor([[448.0, -1.0], [449.0, 0.0], [0.0, 0.0], [3.5, -1.75], [1e-30, 0.0]])
    codes, scale = quantise_rows(rows)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (5,)
    assert scale[:4].tolist() == [1.0, 2.0, 1.0, 2.0**-7]
    assert (codes.float() * scale[:, None])[[0, 2, 3]].tolist() == rows[[0, 2, 3]].tolist()
    x = torch.randn(50, 6, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    codes, scale = quantise_rows(x)
    assert not codes.float().isnan().any() and (codes.float().abs().amax(-1) >= 224).all()
    assert ((codes.double() * scale[..., None] - x).abs() <= x.abs() / 16 + 2.0**-10 * scale[..., None]).all()


def test_logits_of_quantised_rows() -> None:
    torch.manual_seed(0)
    q, k, w = torch.randn(6, 4, 32) * 50, torch.randn(9, 32) / 50, torch.randn(6, 4)
    (q8, q_scale), (k8, k_scale) = quantise_rows(q), quantise_rows(k)
    ends = torch.arange(3, 9)
    got = indexer_logits(q8, k8, w, ends=ends, q_scale=q_scale, k_scale=k_scale)
    q, k = q8.double() * q_scale[..., None], k8.double() * k_scale[:, None]
    torch.testing.assert_close(got, indexer_logits(q, k, w, ends=ends).float())
    chosen = indexer_select(q8, k8, w, 3, ends=ends, q_scale=q_scale, k_scale=k_scale)
    assert torch.equal(chosen, select_topk(got, 3))


LOGITS = torch.tensor([[4.0, 3.0, 2.0, 1.99, 0.0, NEG, NEG]])


@pytest.mark.parametrize(
    ("chosen", "missed", "gap"),
    [
        ([0, 1, 2], 0, 0.0),
        ([2, 0, 1], 0, 0.0),
        ([0, 1, 3], 1, 0.01),
        ([0, 1, 4], 1, 2.0),
        ([0, 1, -1], 1, math.inf),  # too few
        ([0, 1, 1], 1, math.inf),  # twice the same
        ([0, 1, 5], 1, math.inf),  # masked
        ([0, 1, 7], 1, math.inf),  # not a key
    ],
)
def test_agreement(chosen: list[int], missed: int, gap: float) -> None:
    expected = torch.tensor([[0, 1, 2]])
    agreement = selection_agreement(LOGITS, torch.tensor([chosen]), expected, 0.02)
    assert (agreement.queries, agreement.expected, agreement.missed) == (1, 3, missed)
    assert agreement.worst_gap == pytest.approx(gap, abs=1e-6)
    assert agreement.agrees == (gap < 0.02)
    # A worse choice must not pass for being the one that was expected.
    mirrored = selection_agreement(LOGITS, expected, torch.tensor([chosen]), 0.02)
    assert mirrored.agrees == agreement.agrees


def test_masked_keys_are_no_tie() -> None:
    agreement = selection_agreement(LOGITS, torch.tensor([[0, 5]]), torch.tensor([[0, 6]]), 1.0)
    assert agreement.worst_gap == math.inf and not agreement.agrees


def test_agreement_counts_queries() -> None:
    logits = LOGITS.expand(3, -1)
    chosen = torch.tensor([[0, 1], [0, 4], [0, -1]])
    agreement = selection_agreement(logits, chosen, torch.tensor([[0, 1]]).expand(3, -1), 0.5)
    assert (agreement.queries, agreement.expected, agreement.missed) == (3, 6, 2)
    assert agreement.wrong_queries == 2 and not agreement.agrees


def test_a_block_without_indexer_is_refused() -> None:
    spec = AttentionSpec(
        hidden=8,
        heads=1,
        nope=4,
        rope=4,
        v=4,
        rank=8,
        q_rank=8,
        rms_eps=1e-6,
        softmax_scale=1.0,
        rope_spec=RopeSpec(4, interleaved=True, theta=10000.0),
    )
    x = torch.rand(2, 8)
    weights = IndexerWeights(wq_b=x, wk=x, k_norm_weight=x, weights_proj=x)
    with pytest.raises(BadInputError, match="no indexer"):
        index_queries_keys(x, x, weights, spec, torch.arange(2))
