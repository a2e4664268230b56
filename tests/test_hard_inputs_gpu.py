"""What a user may do to the kernels beside a plain call, on a Hopper GPU: sizes and values.

Every result is held against float64, or against the same call as it is usually made.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_backward_gpu import check_close as check_gradient
from test_backward_gpu import run as run_backward
from test_decode_gpu import listed, paged, queries, run_decode
from test_dense_gpu import dense_case, run_dense
from test_indexer_gpu import indexer_case, indexer_reference
from test_indexer_loss_gpu import case as loss_case
from test_indexer_loss_gpu import run as run_loss
from test_kernels_gpu import (
    check_close,
    check_lse,
    force_pairs,
    force_parts,
    run_sparse,
    sparse_case,
    sparse_reference,
)
from torch import Tensor

from mla_convert.runtime import backward, reference
from mla_convert.runtime.dispatch import available, resolve_backend

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

INF, NAN = float("inf"), float("nan")

# Counts and sizes between those of the other tests


@pytest.mark.parametrize("heads", [3, 5, 7, 9, 13, 17, 31, 33, 63, 65, 100, 127])
def test_any_head_count(heads: int) -> None:
    for topk in (7, 200, 2049):
        run_sparse(*sparse_case(queries=30, heads=heads, topk=topk))
    run_backward(*sparse_case(queries=30, heads=heads, topk=200))


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [
        (16, 192, 32), (64, 192, 0), (16, 320, 64), (64, 320, 32),
        (16, 384, 0), (64, 384, 64), (16, 448, 32), (64, 448, 64), (16, 100, 20), (64, 500, 12),
    ],
)  # fmt: skip
def test_any_width(heads: int, rank: int, rope: int) -> None:
    case = sparse_case(heads=heads, rank=rank, rope=rope, topk=200)
    run_sparse(*case, d_v=rank)
    run_backward(*case, d_v=rank)
    run_dense(*dense_case(1, heads, 1000, rank + rope), d_v=rank)
    run_dense(*dense_case(70, heads, 100, rank + rope), d_v=rank)


@pytest.mark.parametrize("heads", [129, 192, 256, 300])
def test_more_heads_than_a_model_has(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dense(*dense_case(20, heads, 300))
    cache, table = paged([700, 1, 64], 64)
    lengths = torch.tensor([700, 1, 64], device="cuda", dtype=torch.int32)
    run_decode(queries(3, 2, heads), cache, cache_seqlens=lengths, block_table=table, causal=True)
    run_decode(queries(3, 1, heads), cache.nan_to_num(), indices=listed(3, 1, 90, cache.shape[0] * 64))
    run_sparse(*sparse_case(queries=5, heads=heads, topk=300))
    case = sparse_case(queries=150, heads=heads)
    with monkeypatch.context() as patch:
        force_parts(patch, 1)
        run_sparse(*case)
    for deterministic in (False, True):
        run_backward(*case, deterministic=deterministic)


def test_topk_lengths_below_zero_and_far_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    length = torch.tensor([-1, -(2**40), 2**40, 301, 300, 0, 1], device="cuda")
    for heads, parts in ((8, 0), (16, 1), (16, 3), (64, 1), (64, 3)):
        with monkeypatch.context() as patch:
            if parts:
                force_parts(patch, parts)
            else:
                force_pairs(patch)
            q, kv, indices, scale = sparse_case(queries=7, heads=heads, topk=300)
            out, lse = run_sparse(q, kv, indices, scale, length=length)
            assert not out[[0, 1, 5]].any() and lse[[0, 1, 5]].isneginf().all()
            run_backward(q, kv, indices, scale, length=length)
    cache = torch.randn(40, 64, 1, 576, device="cuda", dtype=torch.bfloat16) / 10
    run_decode(queries(7, 1, 16), cache, indices=listed(7, 1, 300, 2560), topk_length=length)


def test_lengths_below_zero() -> None:
    cache = torch.randn(3, 100, 576, device="cuda", dtype=torch.bfloat16) / 10
    for heads in (4, 64):
        lengths = torch.tensor([-5, 1, 100], device="cuda")
        out, lse = run_decode(queries(3, 2, heads), cache, cache_seqlens=lengths, causal=True)
        assert not out[0].any() and lse[0].isneginf().all()


@pytest.mark.parametrize("heads", [3, 16, 64])
def test_sinks_without_end(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """+inf takes all of the softmax, -inf nothing, of empty rows, too; the log-sum-exp and other heads stay."""
    sink = torch.randn(heads, device="cuda")
    sink[0], sink[1] = INF, -INF
    for parts in (1, 3):
        with monkeypatch.context() as patch:
            force_parts(patch, parts)
            q, kv, indices, scale = sparse_case(heads=heads)
            indices[5] = -1
            out, _ = run_sparse(q, kv, indices, scale, sink=sink)
            assert not out[:, 0].any() and not out[5].any()
    for deterministic in (False, True):
        dq, _ = run_backward(q, kv, indices, scale, sink=sink, with_d_lse=True, deterministic=deterministic)
        assert dq.isfinite().all()
    q, kv = dense_case(40, heads, 500)
    run_dense(q, kv, attn_sink=sink)
    run_dense(q[:1], kv, attn_sink=sink)
    cache, table = paged([0, 5000, 3], 64)
    lengths = torch.tensor([0, 5000, 3], device="cuda", dtype=torch.int32)
    run_decode(queries(3, 1, heads), cache, cache_seqlens=lengths, block_table=table, attn_sink=sink)
    run_decode(queries(3, 1, heads), cache.nan_to_num(), indices=listed(3, 1, 700, 64), attn_sink=sink)


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_listed_row_that_is_not_finite_shows(
    heads: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the queries that list it, and in no other."""
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q, kv, indices, scale = sparse_case(queries=150, heads=heads, topk=200, invalid=0)
    indices[indices == 17] = 18
    indices[::3, 70] = 17
    want, want_lse = sparse_reference(q, kv, indices.masked_fill(indices == 17, -1), scale, 512, None, None)
    kv[17, 3] = value
    others = torch.arange(150, device="cuda") % 3 != 0
    for split in (False, True):
        with monkeypatch.context() as patch:
            if heads == 8 and not split:
                force_pairs(patch)
            else:
                force_parts(patch, 3 if split else 1)
            out, lse = sparse_mla(q, kv, indices, scale, d_v=512)
        check_close(out[others], want[others])
        check_lse(lse[others], want_lse[others])
        assert not out[~others, :, 3].isfinite().any()


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_a_batch_of_sequences(heads: int) -> None:
    """[B, S, H, E], each with a cache of its own: entries beyond that are not valid, and gradients stay in it."""
    batch = [sparse_case(queries=20, heads=heads, tokens=90, topk=130) for _ in range(3)]
    scale, sink = batch[0][3], torch.randn(heads, device="cuda")
    q, kv, indices = (torch.stack([case[i] for case in batch]) for i in range(3))  # type: ignore[misc]
    indices[:, 3, 5] = 95
    length = torch.randint(0, 131, (3, 20), device="cuda")
    backend = resolve_backend("tilelang", "cuda")
    inputs = [x.detach().requires_grad_() for x in (q, kv)]
    options: dict[str, Any] = {"attn_sink": sink, "d_v": 512}
    out, lse = backend.sparse_mla(*inputs, indices, scale, topk_length=length, **options)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, d_out)
    assert out.shape == (3, 20, heads, 512) and lse.shape == (3, 20, heads)
    for b in range(3):
        wide = (q[b].double(), kv[b].double(), indices[b], scale)
        own = {"topk_length": length[b], **options}
        want, want_lse = reference.sparse_mla(*wide, **own)
        check_close(out[b].detach(), want)
        check_lse(lse[b].detach(), want_lse)
        want_dq, want_dkv, _ = backward.sparse_mla_backward(*wide, want, want_lse, d_out[b].double(), **own)
        for got, expected in zip(found, (want_dq, want_dkv), strict=True):
            cosine = torch.nn.functional.cosine_similarity(
                got[b].double().flatten(), expected.flatten(), dim=0
            )
            assert float(cosine) > 0.9999


# More than 2^31 elements


def in_pieces(rows: int, width: int) -> Tensor:
    kv = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
    for part in kv.split(500_000):
        part.normal_(std=0.1)
    return kv


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_tokens_beyond_int32_offsets(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    tokens = 3_800_000  # 2.2e9 elements
    kv = in_pieces(tokens, 576)
    used = torch.cat([torch.randint(0, tokens, (280,)), torch.arange(tokens - 20, tokens)]).unique().cuda()
    q, _, near, scale = sparse_case(queries=50, heads=heads, tokens=len(used), topk=200)
    indices = torch.where(near >= 0, used[near.clamp_min(0).long()].int(), near)
    few = kv[used]
    want, want_lse = sparse_reference(q, few, near, scale, 512, None, None)
    for parts in (1, 3):
        with monkeypatch.context() as patch:
            if heads == 8 and parts == 1:
                force_pairs(patch)
            else:
                force_parts(patch, parts)
            out, lse = sparse_mla(q, kv, indices, scale, d_v=512)
        check_close(out, want)
        check_lse(lse, want_lse)
    wide = (q.double(), few.double(), near, scale)
    exact = reference.sparse_mla(*wide, d_v=512)
    want_dq, want_dkv, _ = backward.sparse_mla_backward(*wide, *exact, out.double(), d_v=512)
    for deterministic in (False, True):
        dq, dkv, _ = sparse_mla_backward(
            q, kv, indices, scale, out, lse, out, d_v=512, deterministic=deterministic
        )
        key_size = few.double().norm(dim=-1).max()
        floor = 2**-6 * scale * out.double().norm(dim=-1).square() * key_size * 512**-0.5
        check_gradient(dq, want_dq, floor)
        check_gradient(dkv[used], want_dkv)
        assert int(dkv.any(1).sum()) <= len(used)


@pytest.mark.parametrize(("heads", "rank"), [(1, 64), (16, 64), (33, 128)])
def test_entries_beyond_int32_offsets(heads: int, rank: int) -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    count, topk = 1_060_000, 2048  # 2.2e9 entries
    q = torch.randn(count, heads, rank, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(5000, rank, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(-100, 5000, (count, topk), device="cuda", dtype=torch.int32)
    out, lse = sparse_mla(q, kv, indices, 0.1, d_v=rank)
    rows = torch.tensor([0, 1, 2**31 // topk - 1, 2**31 // topk, count - 1], device="cuda")
    want, want_lse = sparse_reference(q[rows], kv, indices[rows], 0.1, rank, None, None)
    check_close(out[rows], want)
    check_lse(lse[rows], want_lse)


def test_indexer_queries_beyond_int32_offsets() -> None:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits
    from mla_convert.runtime.kernels.indexer_select import indexer_select

    count = 270_000  # 2.2e9 elements
    q, k, weights = indexer_case(count, 200, 64, 128)
    rows = torch.tensor([0, 1, 262_143, 262_144, count - 1], device="cuda")
    ends = torch.arange(count, device="cuda", dtype=torch.int32) % 201
    want = indexer_reference(q[rows], k, weights[rows], torch.zeros(5, device="cuda"), ends[rows])
    logits = indexer_logits(q, k, weights, ends=ends)[rows]
    assert torch.equal(logits.isneginf(), want.isneginf())
    seen = ~want.isneginf()
    assert float((logits[seen].double() - want[seen]).abs().max()) < 2e-3
    chosen = indexer_select(q, k, weights, 20, ends=ends)[rows]
    expected = reference.select_topk(want, 20)
    assert reference.selection_agreement(want, chosen, expected, 1e-2).agrees


def test_selection_of_128k_by_128k_never_holds_all_logits() -> None:
    """They would be 64 GiB; the workspace is 1, and the selected keys, in parts and together, are 2."""
    from mla_convert.runtime.kernels.indexer_select import indexer_select

    count = 1 << 17
    q, k, weights = indexer_case(count, count, 64, 128)
    ends = torch.arange(1, count + 1, device="cuda", dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen = indexer_select(q, k, weights, 2048, ends=ends)
    assert torch.cuda.max_memory_allocated() - before < 3.2 * 2**30
    assert chosen.shape == (count, 2048)
    rows = torch.tensor([0, 2047, 2048, 70_000, count - 1], device="cuda")
    want = indexer_reference(q[rows], k, weights[rows], torch.zeros(5, device="cuda"), ends[rows])
    expected = reference.select_topk(want, 2048)
    assert reference.selection_agreement(want, chosen[rows], expected, 1e-2).agrees


@pytest.mark.parametrize("part", ["attention", "indexer"])
def test_indexer_loss_beyond_int32_offsets(part: str) -> None:
    sizes = {
        "attention": {"queries": 30_000, "heads": 128, "width": 576, "index_heads": 4, "index_dim": 64},
        "indexer": {"queries": 270_000, "heads": 1, "width": 64, "index_heads": 64, "index_dim": 128},
    }[part]
    index, q, kv, scale = loss_case(tokens=300, **sizes)
    count = sizes["queries"]
    indices = torch.randint(-20, 300, (count, 64), device="cuda", dtype=torch.int32)
    rows = torch.tensor([0, count // 2, count - 2, count - 1], device="cuda")
    _, (dq, _, dw) = run_loss((index, q, kv, scale), kernels=True, indices=indices)
    some = [index[0][rows], index[1], index[2][rows]]
    _, (want_dq, _, want_dw) = run_loss((some, q[rows], kv, scale), kernels=False, indices=indices[rows])
    for got, want in ((dq[rows], want_dq), (dw[rows], want_dw)):
        cosine = torch.nn.functional.cosine_similarity(got.double(), want, dim=-1)
        assert float(cosine.min()) > 0.999


def test_decode_takes_float8_rows_as_float8() -> None:
    from mla_convert.runtime.kv_cache import pack_fp8

    rows = pack_fp8(torch.randn(20, 64, 1, 576, device="cuda") / 10)
    for heads in (16, 64):
        q, lists = queries(3, 1, heads), listed(3, 1, 200, 1280)
        plain = run_decode(q, rows, indices=lists)
        typed = run_decode(q, rows.view(torch.float8_e4m3fn), indices=lists)
        strided = torch.zeros(20, 64, 1, 700, device="cuda", dtype=torch.uint8)
        strided[..., 9:665] = rows
        moved = run_decode(q, strided[..., 9:665], indices=lists)
        for other in (typed, moved):
            assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
