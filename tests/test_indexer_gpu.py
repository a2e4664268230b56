"""The indexer's logits in TileLang against float64, computed from the same inputs, on a Hopper GPU.

Every comparison draws fresh inputs, and the memory that the logits will occupy is filled with NaN first.
"""

from __future__ import annotations

import pytest
import torch
from test_kernels_gpu import poison
from torch import Tensor

from mla_convert.runtime.dispatch import available

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]


def indexer_case(queries: int, keys: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(queries, heads, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(keys, dim, device="cuda", dtype=torch.bfloat16)
    return q, k, torch.randn(queries, heads, device="cuda")


def indexer_reference(q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    scores = torch.einsum("sij,tj->sit", q.double(), k.double()).relu()
    logits = torch.einsum("sit,si->st", scores, weights.double())
    keys = torch.arange(k.shape[0], device="cuda")
    return logits.masked_fill((keys < starts[:, None]) | (keys >= ends[:, None]), -torch.inf)


def run_indexer(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    queries, keys = q.shape[0], k.shape[0]
    poison(((queries, keys), torch.float32))
    logits = indexer_logits(q, k, weights, starts=starts, ends=ends)
    assert logits.shape == (queries, keys) and logits.dtype == torch.float32
    starts = torch.zeros(queries, device="cuda") if starts is None else starts
    ends = torch.full((queries,), keys, device="cuda") if ends is None else ends
    want = indexer_reference(q, k, weights, starts, ends)
    assert torch.equal(logits.isneginf(), want.isneginf()), "-inf in the wrong places"
    finite = ~want.isneginf()
    if finite.any():
        got, want = logits[finite].double(), want[finite]
        scale = q.shape[1] ** 0.5 * q.shape[2] ** 0.5
        assert float((got - want).abs().max()) < 2e-5 * scale
        assert 1 - float((2 * got * want).sum() / (got.square() + want.square()).sum()) < 1e-9
    return logits


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("heads", [1, 4, 16, 32, 64, 128])
def test_indexer_every_size(heads: int, dim: int) -> None:
    run_indexer(*indexer_case(77, 333, heads, dim))


@pytest.mark.parametrize("heads", [3, 24, 100])
def test_indexer_odd_heads_and_dims(heads: int) -> None:
    run_indexer(*indexer_case(50, 200, heads, 128))
    run_indexer(*indexer_case(50, 200, heads, 20))
    run_indexer(*indexer_case(1, 700, heads, 128))


@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5000), (300, 64), (513, 2049), (1, 100_000)])
def test_indexer_causal_and_ragged(heads: int, queries: int, keys: int) -> None:
    args = indexer_case(queries, keys, heads, 64)
    position = torch.arange(queries, device="cuda", dtype=torch.int32)
    run_indexer(*args, ends=position + 1)
    run_indexer(*args, ends=(position + 1 + keys - queries).clamp_min(0))
    starts = torch.randint(-50, keys + 50, (queries,), device="cuda", dtype=torch.int32)
    ends = starts + torch.randint(-100, keys, (queries,), device="cuda", dtype=torch.int32)
    run_indexer(*args, starts=starts, ends=ends)
    run_indexer(*args, starts=starts.long(), ends=ends.long())


def test_indexer_empty_ranges() -> None:
    args = indexer_case(130, 900, 64, 128)
    zero = torch.zeros(130, device="cuda", dtype=torch.int32)
    assert run_indexer(*args, ends=zero).isneginf().all()
    assert run_indexer(*args, starts=zero + 900).isneginf().all()


def test_indexer_nan_is_kept_where_it_belongs() -> None:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    q, k, weights = indexer_case(20, 300, 64, 128)
    k[170] = float("nan")
    ends = torch.arange(160, 180, device="cuda", dtype=torch.int32)
    logits = indexer_logits(q, k, weights, ends=ends)
    expected = torch.zeros(20, 300, dtype=torch.bool, device="cuda")
    expected[11:, 170] = True
    assert torch.equal(logits.isnan(), expected)


def test_indexer_two_runs_are_bitwise_equal() -> None:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    args = indexer_case(700, 3000, 64, 128)
    assert torch.equal(indexer_logits(*args), indexer_logits(*args))


def test_indexer_output_beyond_int32_offsets() -> None:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    q, k, weights = indexer_case(40_000, 60_000, 1, 16)
    ends = torch.arange(20_000, 60_000, device="cuda", dtype=torch.int32)
    logits = indexer_logits(q, k, weights, ends=ends)
    rows = torch.tensor([0, 1, 20_000, 35_800, 39_999], device="cuda")
    want = indexer_reference(q[rows], k, weights[rows], torch.zeros(5, device="cuda"), ends[rows])
    assert torch.equal(logits[rows].isneginf(), want.isneginf())
    finite = ~want.isneginf()
    assert float((logits[rows][finite].double() - want[finite]).abs().max()) < 1e-4
    assert not logits.isnan().any()
