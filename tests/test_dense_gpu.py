"""Dense attention kernels against float64, computed from the same inputs, on a Hopper GPU.

As ``test_decode_gpu``, which has the sizes that both take.
"""

from __future__ import annotations

import pytest
import torch
from test_kernels_gpu import check_close, check_lse, poison
from torch import Tensor

from mla_convert.runtime import reference
from mla_convert.runtime.dispatch import available
from mla_convert.runtime.spans import causal_spans

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

HEADS = [1, 2, 3, 8, 12, 16, 20, 32, 33, 40, 64, 96, 100, 128]
NAN = float("nan")


def run_dense(
    q: Tensor, kv: Tensor, *, d_v: int = 512, scale: float | None = None, **options: Tensor
) -> None:
    from mla_convert.runtime.kernels.dense_mla import dense_mla

    scale = 1.3 * q.shape[-1] ** -0.5 if scale is None else scale
    tokens, heads = q.shape[:2]
    poison(((tokens * heads, d_v), q.dtype), ((tokens * heads,), torch.float32))
    out, lse = dense_mla(q, kv, scale, d_v=d_v, **options)
    assert out.shape == (tokens, heads, d_v) and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (tokens, heads) and lse.dtype == torch.float32
    want, want_lse = reference.dense_mla(q.double(), kv.double(), scale, d_v=d_v, **options)
    check_close(out, want)
    check_lse(lse, want_lse)


def dense_case(
    tokens: int, heads: int, cached: int, width: int = 576, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(tokens, heads, width, device="cuda", dtype=dtype) * 10,
        torch.randn(cached, width, device="cuda", dtype=dtype) / 10,
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "cached"), [(1, 1), (1, 3000), (67, 67), (300, 300), (130, 2000)])
def test_dense_causal(tokens: int, cached: int, heads: int) -> None:
    run_dense(*dense_case(tokens, heads, cached))


@pytest.mark.parametrize("heads", [1, 5, 16, 64, 128])
def test_dense_spans(heads: int) -> None:
    q, kv = dense_case(200, heads, 900)
    starts = torch.randint(-50, 950, (200,), device="cuda", dtype=torch.int32)
    ends = starts + torch.randint(-100, 600, (200,), device="cuda", dtype=torch.int32)
    ends[3], ends[100:150] = 2000, 0
    run_dense(q, kv, starts=starts, ends=ends)
    run_dense(q, kv, starts=starts.long(), ends=ends.long(), attn_sink=torch.randn(heads, device="cuda"))
    kv[870:] = NAN
    run_dense(q, kv, starts=starts, ends=ends.clamp_max(870))


@pytest.mark.parametrize(
    ("queries", "heads"), [(60, 5), (60, 40), (60, 64), (60, 128), (2, 1), (8, 1), (2, 8), (2, 16), (10, 3)]
)
def test_dense_tokens_that_no_query_sees(queries: int, heads: int) -> None:
    """NaN before, between and behind the spans: neighbours see [100, 210) and [500, 700)."""
    from mla_convert.runtime.kernels.dense_mla import dense_mla

    q, kv = dense_case(queries, heads, 900)
    starts = torch.tensor([100, 500] * (queries // 2), device="cuda", dtype=torch.int32)
    ends = torch.tensor([210, 700] * (queries // 2), device="cuda", dtype=torch.int32)
    want, want_lse = reference.dense_mla(q.double(), kv.double(), 0.05, starts=starts, ends=ends, d_v=512)
    kv[:100] = kv[210:500] = kv[700:] = NAN
    out, lse = dense_mla(q, kv, 0.05, starts=starts, ends=ends, d_v=512)
    check_close(out, want)
    check_lse(lse, want_lse)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_dense_packed_sequences(heads: int) -> None:
    counts = [1, 100, 0, 257, 64]
    cu = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    starts, ends = causal_spans(cu, queries=sum(counts))
    run_dense(*dense_case(sum(counts), heads, sum(counts)), starts=starts, ends=ends)


def test_dense_queries_beyond_int32_offsets() -> None:
    from mla_convert.runtime.kernels.dense_mla import dense_mla

    tokens = 30_000  # 2.2e9 elements of q
    q, kv = dense_case(tokens, 128, 300)
    ends = torch.randint(0, 301, (tokens,), device="cuda", dtype=torch.int32)
    out, lse = dense_mla(q, kv, 0.05, ends=ends, d_v=512)
    rows = torch.tensor([0, 1, 15_000, tokens - 2, tokens - 1], device="cuda")
    want, want_lse = reference.dense_mla(q[rows].double(), kv.double(), 0.05, ends=ends[rows], d_v=512)
    check_close(out[rows], want)
    check_lse(lse[rows], want_lse)
