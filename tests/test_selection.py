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
    assert select_topk(logits, 9).tolist() == [[1, 2, 4, 0, 3], [1, 3, -1, -1, -1], [-1] * 5]
    ties = torch.zeros(2, 5000)  # long enough for a sort that is not stable to shuffle them
    assert torch.equal(select_topk(ties, 4000), torch.arange(4000, dtype=torch.int32).expand(2, -1))


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
