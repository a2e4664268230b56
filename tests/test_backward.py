"""Gradients of sparse attention and of the indexer's loss, against torch's autograd through plain definitions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.runtime import autograd, backward, numerics, reference
from mla_convert.runtime.indexer_loss import indexer_loss

S, H, R, P, T, K, SCALE = 7, 3, 8, 4, 20, 9, 0.3


def attention_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, kv and lists with entries out of range on both sides, one without valid entries and one of one token."""
    q = torch.randn(S, H, R + P, dtype=dtype, requires_grad=True)
    kv = torch.randn(T, R + P, dtype=dtype, requires_grad=True)
    indices = torch.randint(-3, T + 3, (S, K))
    indices[2] = -1
    indices[3] = 4
    return q, kv, indices


def plain_attention(
    q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None = None, length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Query by query, from the valid entries alone: no masks."""
    outs, lses = [], []
    for s in range(q.shape[0]):
        entries = indices[s] if length is None else indices[s, : int(length[s])]
        keys = kv[entries[(entries >= 0) & (entries < kv.shape[0])]]
        logits = q[s] @ keys.T * SCALE
        lse = logits.logsumexp(-1) if len(keys) else q.new_full((q.shape[1],), -torch.inf)
        total = lse if sink is None else torch.logaddexp(lse, sink)
        outs.append((logits - total[:, None]).exp() @ keys[:, :R])
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def gradients(results: tuple[Tensor, Tensor], inputs: list[Tensor], seed: int = 0) -> tuple[Tensor, ...]:
    """Of a random linear function of out and of every lse that is finite."""
    torch.manual_seed(seed)
    out, lse = results
    lse = lse.masked_fill(lse.isneginf(), 0)
    loss = (out * torch.randn_like(out)).sum() + (lse * torch.randn_like(lse)).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_gradients_are_those_of_the_definition(
    limited: bool, with_sink: bool, deterministic: bool
) -> None:
    q, kv, indices = attention_case()
    sink = torch.randn(H, dtype=torch.float64, requires_grad=True) if with_sink else None
    length = torch.tensor([0, 1, 9, 5, 4, 9, 9]) if limited else None
    inputs = [q, kv, *([sink] if sink is not None else [])]
    want = gradients(plain_attention(q, kv, indices, sink, length), inputs)
    results = autograd.sparse_mla(
        q, kv, indices, SCALE, topk_length=length, attn_sink=sink, d_v=R, deterministic=deterministic
    )
    for got, expected in zip(gradients(results, inputs), want, strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_sparse_gradcheck() -> None:
    q, kv, indices = attention_case()
    indices[2, 0] = 1  # a finite lse in every row: numerical differences of -inf are NaN
    sink = torch.randn(H, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, kv: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return autograd.sparse_mla(q, kv, indices, SCALE, attn_sink=sink, d_v=R)

    assert torch.autograd.gradcheck(run, (q, kv, sink))


def test_sparse_gradients_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, indices = attention_case()
    whole = gradients(autograd.sparse_mla(q, kv, indices, SCALE, d_v=R), [q, kv])
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", 2 * K * (3 * (R + P) + 4 * H))
    in_chunks = gradients(autograd.sparse_mla(q, kv, indices, SCALE, d_v=R), [q, kv])
    for got, want in zip(in_chunks, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_a_token_listed_twice_gets_both_gradients() -> None:
    q, kv, _ = attention_case()
    pair = torch.tensor([[5, 6]]).expand(S, -1)
    out, lse = autograd.sparse_mla(q, kv, pair, SCALE, d_v=R)
    twice = kv.detach().clone()
    twice[6] = twice[5]
    two_rows = twice.requires_grad_()
    (apart,) = torch.autograd.grad(autograd.sparse_mla(q, two_rows, pair, SCALE, d_v=R)[0].sum(), two_rows)
    same = torch.full_like(pair, 5)
    (together,) = torch.autograd.grad(autograd.sparse_mla(q, two_rows, same, SCALE, d_v=R)[0].sum(), two_rows)
    torch.testing.assert_close(together[5], apart[5] + apart[6], rtol=0, atol=1e-13)
    assert together[6].eq(0).all() and out.isfinite().all() and lse.isfinite().all()


def test_unlisted_nan_stays_out_and_empty_rows_get_nothing() -> None:
    q, kv, indices = attention_case()
    indices[indices == 0] = 1  # what stands in for an entry that is not valid must not matter either
    listed = torch.zeros(T + 1, dtype=torch.bool)
    listed[torch.where((indices >= 0) & (indices < T), indices, T)] = True
    poisoned = kv.detach().clone()
    poisoned[~listed[:T]] = float("nan")
    poisoned.requires_grad_()
    assert not listed[:T].all()
    dq, dkv = gradients(autograd.sparse_mla(q, poisoned, indices, SCALE, d_v=R), [q, poisoned])
    assert dq.isfinite().all() and dkv.isfinite().all()
    assert dq[2].eq(0).all() and dkv[~listed[:T]].eq(0).all()


def test_an_invalid_entry_beside_scores_far_below_zero() -> None:
    """exp(0 - lse) of such an entry overflows."""
    q = torch.full((1, H, R + P), -50.0, dtype=torch.float64, requires_grad=True)
    kv = torch.full((T, R + P), 20.0, dtype=torch.float64, requires_grad=True)
    out, lse = autograd.sparse_mla(q, kv, torch.tensor([[3, -1, 4]]), 1.0, d_v=R)
    assert lse.max() < -10_000
    dq, dkv = torch.autograd.grad(out.sum(), [q, kv])
    assert dq.isfinite().all() and dkv.isfinite().all() and dkv[[3, 4], :R].abs().min() > 0


def test_shapes_dtypes_and_one_result_without_gradient() -> None:
    q, kv, indices = attention_case(torch.bfloat16)
    wide_kv = kv.detach()[:, None].requires_grad_()
    sink = torch.randn(H, requires_grad=True)
    out, lse = autograd.sparse_mla(q, wide_kv, indices[:, None].int(), SCALE, attn_sink=sink, d_v=R)
    dq, dkv, d_sink = torch.autograd.grad(out.float().sum(), [q, wide_kv, sink], retain_graph=True)
    assert (dq.shape, dq.dtype) == (q.shape, torch.bfloat16)
    assert (dkv.shape, dkv.dtype) == (wide_kv.shape, torch.bfloat16)
    assert (d_sink.shape, d_sink.dtype) == (sink.shape, torch.float32)
    dq, _, d_sink = torch.autograd.grad(lse[0].sum(), [q, wide_kv, sink])
    assert dq[0].abs().max() > 0 and dq[1:].eq(0).all() and d_sink.eq(0).all()


def test_nothing_to_differentiate() -> None:
    q, kv, indices = attention_case()
    out, lse = reference.sparse_mla(q[:0], kv, indices[:0], SCALE, d_v=R)
    dq, dkv, d_sink = backward.sparse_mla_backward(q[:0], kv, indices[:0], SCALE, out, lse, out, d_v=R)
    assert dq.shape == (0, H, R + P) and dkv.shape == kv.shape and dkv.eq(0).all() and d_sink is None
    for some_kv, lists in ((kv[:0], indices), (kv, indices[:, :0])):
        out, lse = reference.sparse_mla(q, some_kv, lists, SCALE, d_v=R)
        dq, dkv, _ = backward.sparse_mla_backward(q, some_kv, lists, SCALE, out, lse, out, d_v=R)
        assert dq.shape == q.shape and dq.eq(0).all() and dkv.shape == some_kv.shape and dkv.eq(0).all()


def test_kernel_columns_lie_so_that_a_thread_has_four_neighbours() -> None:
    """Of a row of an accumulator, thread c of four has columns 2 c and 2 c + 1 of each eight."""
    from mla_convert.runtime.kernels._sparse_mla_backward_cuda import in_quads

    columns = torch.arange(192, dtype=torch.int16).expand(3, 192).contiguous()
    for row in in_quads(columns):
        for first in range(0, 192, 16):
            for thread in range(4):
                at = [first + eight + 2 * thread + i for eight in (0, 8) for i in (0, 1)]
                assert row[at].tolist() == list(range(first + 4 * thread, first + 4 * thread + 4))


I, J = 5, 6  # noqa: E741


def index_case(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((S, I, J), (T, J), (S, I))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plain_loss(index: list[Tensor], q: Tensor, kv: Tensor, entries: list[Tensor], reduction: str) -> Tensor:
    """Query by query over the keys it sees, with torch's own KL divergence."""
    index_q, index_k, weights = index
    terms = []
    for s, keys in enumerate(entries):
        if not len(keys):
            continue
        target = (q[s] @ kv[keys].T * SCALE).softmax(-1).sum(0)
        target = (target / target.sum()).detach()
        logits = (weights[s, :, None] * (index_q[s] @ index_k[keys].T).relu()).sum(0)
        divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="sum")
        terms.append(divergence)
    total = torch.stack(terms).sum()
    return total / len(terms) if reduction == "mean" else total


def check_loss(options: dict[str, Any], entries: list[Tensor], reduction: str = "mean") -> None:
    q, kv, _ = attention_case()
    index = index_case()
    want = plain_loss(index, q, kv, entries, reduction)
    got = indexer_loss(*index, q, kv, SCALE, reduction=reduction, **options)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    wanted_gradients = torch.autograd.grad(want * 3, index)
    for gradient, expected in zip(torch.autograd.grad(got * 3, index), wanted_gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("elements", [1, 400, 1 << 27])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_over_all_keys(reduction: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", elements)
    ends = torch.tensor([0, 1, 5, 12, 20, 25, 20])
    starts = torch.tensor([0, 0, -2, 7, 3, 19, 20])
    ranges = list(zip(starts.clamp(0), ends.clamp(0, T), strict=True))
    check_loss({"starts": starts, "ends": ends}, [torch.arange(T)[a:b] for a, b in ranges], reduction)
    check_loss({}, [torch.arange(T)] * S, reduction)


@pytest.mark.parametrize("elements", [1, 3000, 1 << 27])
@pytest.mark.parametrize("deterministic", [False, True])
def test_loss_over_selected_keys(deterministic: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", elements)
    indices = attention_case()[2]
    length = torch.tensor([3, 9, 9, 9, 0, 1, 8])
    for limit in (None, length):
        entries = [row if limit is None else row[: int(limit[s])] for s, row in enumerate(indices)]
        entries = [row[(row >= 0) & (row < T)] for row in entries]
        options = {"indices": indices[:, None], "topk_length": limit, "deterministic": deterministic}
        check_loss(options, entries)


def test_loss_with_the_log_sum_exp_given() -> None:
    q, kv, indices = attention_case()
    index = index_case()
    lse = reference.sparse_mla(q, kv, indices, SCALE, d_v=R)[1]
    given, computed = (indexer_loss(*index, q, kv, SCALE, indices=indices, lse=x) for x in (lse, None))
    torch.testing.assert_close(given, computed, rtol=1e-13, atol=0)
    ends = torch.tensor([0, 1, 5, 12, 20, 25, 20])
    lse = reference.dense_mla(q, kv, SCALE, ends=ends, d_v=R)[1]
    given, computed = (indexer_loss(*index, q, kv, SCALE, ends=ends, lse=x) for x in (lse, None))
    torch.testing.assert_close(given, computed, rtol=1e-13, atol=0)


def test_loss_gradcheck_and_no_gradient_to_the_attention() -> None:
    q, kv, indices = attention_case()
    index = index_case()

    def run(*index: Tensor) -> Tensor:
        return indexer_loss(*index, q, kv, SCALE, indices=indices)

    assert torch.autograd.gradcheck(run, index)
    run(*index).backward()
    assert q.grad is None and kv.grad is None and all(x.grad is not None for x in index)
    with torch.no_grad():
        assert run(*index).item() > 0


def test_loss_of_heads_spread_over_ranks() -> None:
    """The sum of two processes' heads, handed in as a collective would."""
    q, kv, indices = attention_case()
    index = index_case()
    others: list[Tensor] = []
    indexer_loss(*index, q[:, 1:], kv, SCALE, indices=indices, sum_over_ranks=lambda x: others.append(x) or x)
    together = indexer_loss(
        *index, q[:, :1], kv, SCALE, indices=indices, sum_over_ranks=lambda x: x + others.pop()
    )
    torch.testing.assert_close(
        together, indexer_loss(*index, q, kv, SCALE, indices=indices), rtol=1e-13, atol=0
    )


def test_loss_where_nothing_is_seen_or_unlisted_keys_are_nan() -> None:
    q, kv, indices = attention_case()
    index = index_case()
    nothing = indexer_loss(*index, q, kv, SCALE, indices=torch.full_like(indices, -1))
    assert nothing.item() == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(nothing, index))
    assert indexer_loss(*index, q, kv, SCALE, ends=torch.zeros(S, dtype=torch.int64)).item() == 0
    indices[indices == 0] = 1
    poisoned_kv, poisoned_k = (x.detach().clone() for x in (kv, index[1]))
    poisoned_kv[0] = poisoned_k[0] = float("nan")
    poisoned = [index[0], poisoned_k.requires_grad_(), index[2]]
    loss = indexer_loss(*poisoned, q, poisoned_kv, SCALE, indices=indices)
    torch.testing.assert_close(loss, indexer_loss(*index, q, kv, SCALE, indices=indices))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, poisoned))


def test_a_launch_has_no_more_queries_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short lists leave room for more in the workspace."""
    pytest.importorskip("tilelang", reason="TileLang is not installed (it is for Linux only)")
    from mla_convert.runtime.kernels import indexer_loss as kernels

    launched: dict[str, list[int]] = {"target": [], "loss": []}
    monkeypatch.setattr(kernels, "_entry", lambda what, *_: lambda q, *_: launched[what].append(q.shape[0]))
    monkeypatch.setattr(kernels, "listed_blocks", lambda lists, *_: (lists[:, 0], lists))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    count = 70_000
    index = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((count, 1, 8), (9, 8), (count, 1))]
    main = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((count, 1, 16), (9, 16))]
    indexer_loss(*index, *main, 0.1, indices=torch.zeros(count, 3, dtype=torch.int32), kernels=True)
    assert launched["target"] == launched["loss"] and sum(launched["loss"]) == count
    assert max(launched["target"]) <= 65535


def test_entries_in_the_order_of_their_tokens() -> None:
    """What the deterministic kernels sum by: every valid entry once, under its token, in the lists' order."""
    pytest.importorskip("tilelang", reason="TileLang is not installed (it is for Linux only)")
    from mla_convert.runtime.kernels.sparse_mla_backward import entry_order

    indices = torch.tensor([[2, -1, 0, 2], [5, 2, 0, 0], [1, 1, 7, 1]], dtype=torch.int32)
    lengths = torch.tensor([4, 3, 2], dtype=torch.int32)
    for step, want in (
        (None, [[[2, 6], [8, 9], [0, 3, 5], [], [], [4]]]),
        (2, [[[2, 6], [], [0, 3, 5], [], [], [4]], [[], [8, 9], [], [], [], []]]),
    ):
        order, begin = entry_order(indices, lengths, 6, step)
        found = [[order[first[t] : first[t + 1]].tolist() for t in range(6)] for first in begin]
        assert found == want
    assert sorted(order.tolist()) == list(range(12))
