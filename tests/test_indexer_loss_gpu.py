"""The indexer's loss and gradients by kernels against float64, computed from the same inputs, on a Hopper GPU.

Also a script, for a GPU host without pytest: ``python tests/test_indexer_loss_gpu.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gapped_lists import gapped
from torch import Tensor

from mla_convert.runtime.dispatch import available, resolve_backend
from mla_convert.runtime.indexer_loss import indexer_loss

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

LOSS = 2e-4  # relative
COSINE = 1e-5  # 1 - cosine of each gradient
NAN = float("nan")


Case = tuple[list[Tensor], Tensor, Tensor, float]


def case(
    *,
    queries: int = 37,
    tokens: int = 700,
    heads: int = 64,
    width: int = 576,
    index_heads: int = 64,
    index_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Inputs of the indexer, q, kv and the scale; scores of the attention have a spread of 1.3."""
    q = torch.randn(queries, heads, width, device="cuda", dtype=dtype) * 10
    kv = torch.randn(tokens, width, device="cuda", dtype=dtype) / 10
    index = [
        torch.randn(queries, index_heads, index_dim, device="cuda", dtype=dtype),
        torch.randn(tokens, index_dim, device="cuda", dtype=dtype),
        torch.randn(queries, index_heads, device="cuda") * (index_heads * index_dim) ** -0.5,
    ]
    return index, q, kv, 1.3 * width**-0.5


def lists(queries: int, tokens: int, topk: int) -> Tensor:
    """A tenth of the entries is padding, and one list is empty."""
    indices = torch.randint(0, tokens, (queries, topk), device="cuda", dtype=torch.int32)
    indices[torch.rand(queries, topk, device="cuda") < 0.1] = -1
    indices[queries // 2] = -1
    return indices


def run(inputs: Case, *, kernels: bool, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    index, q, kv, scale = inputs
    wide = (lambda x: x) if kernels else (lambda x: x.double())
    index = [wide(x).detach().requires_grad_() for x in index]
    options = {"reduction": "sum"} | options
    if kernels:
        blocks = [torch.full_like(x, NAN) for x in index]
        blocks += [torch.full(q.shape[:2], NAN, device="cuda") for _ in range(2)]
        del blocks  # what the allocator hands out next
    loss = indexer_loss(*index, wide(q), wide(kv), scale, kernels=kernels, **options)
    return loss.detach(), torch.autograd.grad(loss, index)


def check(inputs: Case, *, row_cosine: float = 20 * COSINE, **options: Any) -> tuple[Tensor, ...]:
    loss, gradients = run(inputs, kernels=True, **options)
    want, wanted = run(inputs, kernels=False, **options)
    assert abs(float(loss - want)) <= LOSS * abs(float(want)), f"loss {float(loss)}, expected {float(want)}"
    for got, expected, source in zip(gradients, wanted, inputs[0], strict=True):
        assert got.shape == source.shape and got.dtype == source.dtype and got.isfinite().all()
        got = got.double()
        if not expected.any():
            assert not got.any()
            continue
        size = got.square().sum() + expected.square().sum()
        assert 1 - float(2 * (got * expected).sum() / size) < COSINE
        rows = got.square().sum(-1) + expected.square().sum(-1)
        kept = expected.square().sum(-1) > 1e-6 * expected.square().sum(-1).max()
        by_row = (1 - 2 * (got * expected).sum(-1) / rows.clamp_min(1e-30))[kept]
        assert float(by_row.max()) < row_cosine, f"a row's 1 - cosine is {float(by_row.max()):.1e}"
    return gradients


@pytest.mark.parametrize("topk", [1, 64, 300, 2048])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_listed_keys(heads: int, topk: int) -> None:
    check(case(heads=heads), indices=lists(37, 700, topk))


@pytest.mark.parametrize(
    ("heads", "width", "index_heads", "index_dim"),
    [(1, 64, 1, 8), (3, 576, 5, 60), (24, 320, 24, 64), (20, 512, 32, 128), (100, 100, 12, 100)],
)
def test_every_size(heads: int, width: int, index_heads: int, index_dim: int) -> None:
    sizes = {"heads": heads, "width": width, "index_heads": index_heads, "index_dim": index_dim}
    check(case(**sizes), indices=lists(37, 700, 130))
    check(case(**sizes), ends=torch.arange(200, 237, device="cuda"))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 64])
def test_blocks_without_a_valid_entry(heads: int, deterministic: bool) -> None:
    """With NaN where the logits will lie, of which those of the blocks that are skipped are read, too."""
    inputs = case(heads=heads)
    for entries in (64, 1000):
        indices = gapped(37, entries, 700)
        limits = torch.randint(0, entries + 1, (37,), device="cuda")
        for length in (None, limits):
            blocks = [torch.full(indices.shape, NAN, device="cuda") for _ in range(6)]
            del blocks
            check(inputs, indices=indices, topk_length=length, deterministic=deterministic)


def test_limits_int64_and_means() -> None:
    limits = torch.randint(0, 200, (37,), device="cuda")
    check(case(), indices=lists(37, 700, 200).long()[:, None], topk_length=limits, reduction="mean")


@pytest.mark.parametrize("tokens", [1, 65, 3000])
def test_all_keys(tokens: int) -> None:
    check(case(tokens=tokens))
    ends = torch.randint(-5, tokens + 5, (37,), device="cuda")
    check(case(tokens=tokens), starts=ends - torch.randint(-2, tokens, (37,), device="cuda"), ends=ends)


@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_convert.runtime.kernels import indexer_loss as kernels

    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 4 * 5 * 200 * (128 if deterministic else 4))
    check(case(), indices=lists(37, 700, 200), deterministic=deterministic)
    check(case(tokens=200), ends=torch.arange(3, 40, device="cuda"), deterministic=deterministic)


def test_given_log_sum_exp() -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    inputs = case(heads=128)
    _, q, kv, scale = inputs
    indices = lists(37, 700, 200)
    lse = sparse_mla(q, kv, indices, scale, d_v=512)[1]
    with_lse, computed = (run(inputs, kernels=True, indices=indices, lse=x) for x in (lse, None))
    torch.testing.assert_close(with_lse[0], computed[0], rtol=1e-4, atol=0)
    check(inputs, indices=indices, lse=lse)


def test_deterministic_runs_are_bitwise_equal() -> None:
    inputs, indices = case(), lists(37, 700, 600)
    first, second = (run(inputs, kernels=True, indices=indices, deterministic=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_heads_spread_over_ranks() -> None:
    inputs, indices = case(heads=96), lists(37, 700, 130)
    index, q, kv, scale = inputs
    others: list[Tensor] = []
    run(
        (index, q[:, 64:], kv, scale),
        kernels=True,
        indices=indices,
        sum_over_ranks=lambda x: others.append(x) or x,
    )
    loss, gradients = run(
        (index, q[:, :64], kv, scale),
        kernels=True,
        indices=indices,
        sum_over_ranks=lambda x: x + others.pop(),
    )
    want, wanted = run(inputs, kernels=True, indices=indices)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    for got, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-4)


def test_unlisted_rows_never_leak_and_duplicates_count_twice() -> None:
    inputs, indices = case(), lists(37, 700, 130)
    index, kv = inputs[0], inputs[2]
    indices[indices == 5] = 6
    indices[:, 7] = indices[:, 9] = 11
    wanted = check(inputs, indices=indices, deterministic=True)
    kv[5] = NAN
    index[1][5] = NAN
    got = run(inputs, kernels=True, indices=indices, deterministic=True)[1]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_only_the_loss_and_nothing_to_see() -> None:
    inputs = case()
    index, q, kv, scale = inputs
    with torch.no_grad():
        loss = indexer_loss(*index, q, kv, scale, indices=lists(37, 700, 100), kernels=True)
    assert loss.item() > 0
    for options in (
        {"indices": torch.full((37, 100), -1, device="cuda")},
        {"ends": torch.zeros(37, device="cuda").int()},
    ):
        loss, gradients = run(inputs, kernels=True, reduction="mean", **options)
        assert loss.item() == 0 and not any(x.any() for x in gradients)


def test_float16_and_dispatch() -> None:
    inputs = case(dtype=torch.float16, heads=16, index_heads=32)
    # The gradients of many scores are below 6e-5, where float16 has fewer bits.
    check(inputs, indices=lists(37, 700, 130), row_cosine=2e-3)
    index, q, kv, scale = case()
    backend = resolve_backend("auto", "cuda")
    for convert in (lambda x: x, lambda x: x.float()):
        loss = backend.indexer_loss(
            *map(convert, index), convert(q), convert(kv), scale, ends=torch.arange(1, 38, device="cuda")
        )
        assert loss.isfinite()
    assert backend.ran["indexer_loss: tilelang"] == 1
    assert sum(backend.ran.values()) == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *(["-x"] if os.environ.get("FAIL_FAST") else [])]))
