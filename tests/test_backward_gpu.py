"""Gradients by the TileLang kernels against float64, computed from the same inputs, on a Hopper GPU.

Every comparison draws fresh inputs, and the memory that the results will occupy is filled with NaN first. 1 - cosine
stays below 1e-4 over all elements; in a single row (of a query and head, or of a token) the difference stays below
3 % of the row, plus what rounding leaves of a row whose gradient cancels.

Also a script, for a GPU host without pytest: ``python tests/test_backward_gpu.py``.
"""

from __future__ import annotations

import os

import pytest
import torch
from gapped_lists import EMPTY, gapped
from test_kernels_gpu import sparse_case
from torch import Tensor

from mla_convert.runtime import backward, reference
from mla_convert.runtime.dispatch import available

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

HEADS = [1, 8, 16, 24, 48, 64, 96, 128]
TOPK = [1, 64, 100, 192, 2048]
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@pytest.fixture
def _forced_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many thread blocks share a list, whatever the number of queries."""
    from mla_convert.runtime.kernels import sparse_mla_backward

    monkeypatch.setattr(sparse_mla_backward, "_parts", lambda *sizes: request.getfixturevalue("parts"))


def poison(*tensors: Tensor) -> None:
    """Leave NaN in the memory that the allocator hands out next for tensors like these."""
    blocks = [torch.full_like(tensor, float("nan")) for tensor in tensors]
    del blocks


def check_close(got: Tensor, want: Tensor, floor: Tensor | float = 0.0) -> None:
    """``floor`` [...] is an absolute difference that a row may have whatever its size."""
    assert got.shape == want.shape and not got.isnan().any(), f"{int(got.isnan().sum())} NaN"
    got, want = got.double(), want.double()
    difference, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    if (size > floor).any():
        cosine = 2 * (got * want).sum() / (got.square() + want.square()).sum()
        assert 1 - float(cosine) < 1e-4, f"1 - cosine {1 - float(cosine):.1e}"
    excess = difference - 0.03 * size - 2e-3 * size.max() - floor
    worst = int(excess.argmax())
    message = f"row {worst}: {float(difference.flatten()[worst]):.1e} of {float(size.flatten()[worst]):.1e}"
    assert float(excess.max()) <= 0, message


def run(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    d_v: int = 512,
    length: Tensor | None = None,
    sink: Tensor | None = None,
    with_d_lse: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward and backward by the kernels, the latter compared with float64: its dq and dkv."""
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    options = {"topk_length": length, "attn_sink": sink, "d_v": d_v}
    out, lse = sparse_mla(q, kv, indices, scale, **options)
    d_out = torch.randn_like(out)
    d_lse = torch.randn_like(lse) if with_d_lse else None
    poison(q, kv, kv.float(), lse)
    dq, dkv, d_sink = sparse_mla_backward(
        q, kv, indices, scale, out, lse, d_out, d_lse=d_lse, deterministic=deterministic, **options
    )
    assert dq.dtype == q.dtype and dkv.dtype == kv.dtype and dkv.shape == kv.shape
    wide = (q.double(), kv.double(), indices, scale)
    want_out, want_lse = reference.sparse_mla(*wide, **options)
    want_dq, want_dkv, want_d_sink = backward.sparse_mla_backward(
        *wide, want_out, want_lse, d_out.double(), d_lse=d_lse, **options
    )
    # Where d_out . v and its mean cancel, what is left is the rounding of out to 8 bits.
    finite = torch.where(kv.isfinite(), kv, 0).double().flatten(1)
    key_size = finite.norm(dim=-1).max()
    floor = 2**-6 * scale * d_out.double().norm(dim=-1) * want_out.norm(dim=-1) * key_size * d_v**-0.5
    check_close(dq, want_dq, floor)
    check_close(dkv, want_dkv)
    if sink is not None and d_sink is not None and want_d_sink is not None:
        size_SH = d_out.double().norm(dim=-1) * want_out.norm(dim=-1) * d_v**-0.5
        taken_SH = torch.sigmoid(sink.double() - want_lse).masked_fill(want_lse.isneginf(), 0)
        floor = (
            2**-6 * (size_SH * taken_SH).square().sum(0).sqrt()
        )  # each query's d_out . out may cancel, too
        excess = (d_sink.double() - want_d_sink).abs() - 0.03 * want_d_sink.abs() - floor
        assert float(excess.max()) <= 0
    return dq, dkv


@pytest.mark.parametrize("topk", TOPK)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count_and_list_length(heads: int, topk: int) -> None:
    run(*sparse_case(queries=9 if topk == 2048 else 150, heads=heads, topk=topk))


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [(64, 512, 0), (16, 512, 32), (128, 256, 64), (64, 128, 32), (16, 64, 64), (64, 64, 0), (40, 32, 8), (6, 48, 16)],
)  # fmt: skip
def test_every_width(heads: int, rank: int, rope: int) -> None:
    run(*sparse_case(heads=heads, rank=rank, rope=rope, topk=200), d_v=rank)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.usefixtures("_forced_parts")
class TestLists:
    def test_fewer_tokens_than_entries(self, heads: int, deterministic: bool, parts: int) -> None:
        run(*sparse_case(heads=heads, tokens=5, topk=192), deterministic=deterministic)

    def test_whole_rows_and_first_blocks_empty(self, heads: int, deterministic: bool, parts: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, topk=320)
        indices[3] = -1
        indices[36] = kv.shape[0]
        indices[10:20, :64] = -1
        indices[5, :-1] = -1
        dq, _ = run(q, kv, indices, scale, deterministic=deterministic)
        assert not dq[[3, 36]].any()

    def test_gaps_and_far_out_of_range(self, heads: int, deterministic: bool, parts: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, topk=256, invalid=0)
        for start, value in enumerate([-1, kv.shape[0], INT_MIN, INT_MAX, -2, kv.shape[0] + 1]):
            indices[:, 7 + start :: 11] = value
        indices[0, 64:128] = -1
        run(q, kv, indices, scale, deterministic=deterministic)

    def test_blocks_without_a_valid_entry(self, heads: int, deterministic: bool, parts: int) -> None:
        for entries in (64, 1000):
            q, kv, _, scale = sparse_case(heads=heads, tokens=900)
            indices = gapped(37, entries, 900)
            options = {"deterministic": deterministic}
            dq, _ = run(q, kv, indices, scale, **options)
            assert not dq[EMPTY].any()
            length = torch.randint(0, entries + 1, (37,), device="cuda", dtype=torch.int32)
            run(q, kv, indices, scale, length=length, with_d_lse=True, **options)
            run(q[3:4], kv, indices[3:4], scale, **options)

    def test_unlisted_rows_never_leak(self, heads: int, deterministic: bool, parts: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, tokens=1000, invalid=0.3, queries=4)
        unlisted = torch.ones(1000, dtype=torch.bool, device="cuda")
        unlisted[indices[indices >= 0].long()] = False
        unlisted[0] = True
        indices[indices == 0] = -1
        plain = kv.clone()
        kv[unlisted] = float("nan")
        kv[0] = float("inf")
        dq, dkv = run(q, plain, indices, scale, deterministic=deterministic)
        dirty = gradients(q, kv, indices, scale, deterministic)
        assert dirty[0].isfinite().all() and not dirty[1][unlisted].any() and not dkv[unlisted].any()
        assert dirty[0].shape == dq.shape

    def test_duplicates_count_twice(self, heads: int, deterministic: bool, parts: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads)
        indices[:, ::2] = indices[:, 1::2]
        indices[1] = 7
        run(q, kv, indices, scale, deterministic=deterministic)

    def test_length_sink_and_gradient_of_lse(self, heads: int, deterministic: bool, parts: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, topk=300)
        length = torch.randint(0, 301, (37,), device="cuda", dtype=torch.int32)
        length[:4] = torch.tensor([0, 1, 64, 65], dtype=torch.int32)
        sink = torch.randn(heads, device="cuda") * 5
        sink[0] = -torch.inf
        run(q, kv, indices, scale, sink=sink, deterministic=deterministic)
        run(q, kv, indices, scale, length=length, with_d_lse=True, deterministic=deterministic)
        run(q, kv, indices, scale, length=length, sink=sink, with_d_lse=True, deterministic=deterministic)

    def test_strided_unaligned_and_int64(self, heads: int, deterministic: bool, parts: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads)
        wide_q = torch.full((37, heads + 3, 600), float("nan"), device="cuda", dtype=q.dtype)
        wide_q[:, 2 : heads + 2, 5:581] = q
        wide_kv = torch.full((kv.shape[0], 601), float("nan"), device="cuda", dtype=q.dtype)
        wide_kv[:, 9:585] = kv
        far = indices.long()
        far[:, 5] = 2**32 + 5
        far[:, 6] = -(2**40)
        args = (wide_q[:, 2 : heads + 2, 5:581], wide_kv[:, 9:585], far, scale)
        run(*args, deterministic=deterministic)

    def test_two_runs(
        self, heads: int, deterministic: bool, parts: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Equal bits of dq always, of dkv in the deterministic mode, whatever number of queries it takes at once."""
        from mla_convert.runtime.kernels import sparse_mla_backward

        q, kv, indices, scale = sparse_case(heads=heads, queries=700, topk=500, tokens=900)
        first = gradients(q, kv, indices, scale, deterministic)
        second = gradients(q, kv, indices, scale, deterministic)
        assert torch.equal(first[0], second[0])
        if deterministic:
            assert torch.equal(first[1], second[1])
            monkeypatch.setattr(sparse_mla_backward, "SLOT_BYTES", 300 * 500 * 576 * 4)
            third = gradients(q, kv, indices, scale, deterministic)
            assert torch.equal(first[0], third[0]) and torch.equal(first[1], third[1])


def gradients(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    out, lse = sparse_mla(q, kv, indices, scale, d_v=512)
    dq, dkv, _ = sparse_mla_backward(
        q, kv, indices, scale, out, lse, out, d_v=512, deterministic=deterministic
    )
    return dq, dkv


def test_lists_too_long_or_tokens_too_many_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_convert.runtime.kernels import sparse_mla_backward

    for name, limit in (("UNION_TOKENS", 2999), ("UNION_ENTRIES", 300), ("UNION_ENTRIES", 127)):
        with monkeypatch.context() as patch:
            patch.setattr(sparse_mla_backward, name, limit)
            run(*sparse_case())
            q, kv, _, scale = sparse_case()
            run(q, kv, gapped(37, 500, 3000), scale)


@pytest.mark.parametrize("entries", [1, 64, 130, 2048, 2049, 9000])
@pytest.mark.parametrize("limited", [False, True])
def test_blocks_of_lists(entries: int, limited: bool) -> None:
    from mla_convert.runtime.kernels.sparse_mla_backward import listed_blocks

    indices = gapped(60, entries, 500)
    limits = torch.randint(-1, entries + 99, (60,), device="cuda", dtype=torch.int32) if limited else None
    lengths, blocks = listed_blocks(indices, limits, 500)
    places = torch.arange(entries, device="cuda")
    for row, listed in enumerate(indices):
        valid = (listed >= 0) & (listed < 500)
        if limits is not None:
            valid &= places < limits[row]
        want = (places[valid] // 64).unique()
        assert int(blocks[row, 0]) == len(want) and torch.equal(blocks[row, 1 : 1 + len(want)].long(), want)
        assert int(lengths[row]) == (int(places[valid][-1]) + 1 if valid.any() else 0)


@pytest.mark.parametrize("tokens", [50, 3000, 200_000])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_union_of_lists(group: int, tokens: int) -> None:
    from mla_convert.runtime.kernels._common import launcher
    from mla_convert.runtime.kernels.sparse_mla_backward import unite_kernel

    queries, entries, device = 41, 500, "cuda"
    indices = torch.randint(-3, tokens + 3, (queries, entries), device=device, dtype=torch.int32)
    indices[7] = 5
    indices[8:12] = -1
    lengths = torch.randint(0, entries + 1, (queries,), device=device, dtype=torch.int32)
    count, width = -(-queries // group), 2048
    united = torch.full((count, width), -7, device=device, dtype=torch.int32)
    counts = torch.full((count, 4, width), 9, device=device, dtype=torch.uint16)
    found = torch.full((count,), -1, device=device, dtype=torch.int32)
    blocks = torch.full((count, 1 + width // 64), -1, device=device, dtype=torch.int32)
    launcher(unite_kernel())(indices, lengths, tokens, group, united, counts, found, blocks)
    for row in range(count):
        chosen = [
            indices[q, : lengths[q]].long() for q in range(row * group, min((row + 1) * group, queries))
        ]
        want = torch.zeros(4, tokens, device=device, dtype=torch.long)
        for query, listed in enumerate(chosen):
            want[query] = torch.bincount(listed[(listed >= 0) & (listed < tokens)], minlength=tokens)
        length = int(found[row])
        got = united[row, :length].long()
        assert torch.equal(got.sort().values, want.sum(0).nonzero()[:, 0])
        assert torch.equal(counts[row, :, :length].long(), want[:, got])
        assert not counts[row, :, length : -(-length // 64) * 64].long().any()
        assert blocks[row, : 1 - (-length // 64)].tolist() == [-(-length // 64), *range(-(-length // 64))]


def test_float16() -> None:
    run(*sparse_case(dtype=torch.float16))
    run(*sparse_case(dtype=torch.float16, heads=64), deterministic=True)


def test_list_lengths_mixed_in_one_launch() -> None:
    q, kv, indices, scale = sparse_case(heads=64, queries=1200, topk=400, invalid=0)
    run(q, kv, indices, scale, length=torch.arange(1200, device="cuda", dtype=torch.int32) % 401)


def test_nothing_to_do() -> None:
    q, kv, indices, scale = sparse_case()
    for args in ((q[:0], kv, indices[:0]), (q, kv[:0], indices), (q, kv, indices[:, :0])):
        dq, dkv = gradients(*args, scale, False)
        assert dq.shape == args[0].shape and dkv.shape == args[1].shape and not dq.any() and not dkv.any()


def test_query_beyond_int32_offsets() -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    queries = 30_000  # 2.2e9 elements of q
    q, kv, indices, scale = sparse_case(queries=queries, heads=128, tokens=500, topk=64)
    out, lse = sparse_mla(q, kv, indices, scale, d_v=512)
    dq, dkv, _ = sparse_mla_backward(q, kv, indices, scale, out, lse, out, d_v=512)
    rows = torch.tensor([0, 1, 15_000, queries - 2, queries - 1], device="cuda")
    part = (q[rows].double(), kv.double(), indices[rows], scale)
    want_out, want_lse = reference.sparse_mla(*part, d_v=512)
    want, _, _ = backward.sparse_mla_backward(*part, want_out, want_lse, out[rows].double(), d_v=512)
    check_close(dq[rows], want)
    assert dkv.isfinite().all() and dkv.abs().max() > 0


def test_dispatch_runs_forward_and_backward() -> None:
    from mla_convert.runtime.dispatch import resolve_backend

    q, kv, indices, scale = sparse_case(heads=24)
    sink = torch.randn(24, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.detach().to(d).requires_grad_() for x, d in ((q, dtype), (kv, dtype), (sink, sink.dtype))]
        backend = resolve_backend("auto", "cuda")
        out, lse = backend.sparse_mla(*inputs[:2], indices, scale, attn_sink=inputs[2], d_v=512)
        loss = out.double().square().sum() + lse.double().sum()
        results.append(torch.autograd.grad(loss, inputs))
        served = "tilelang" if dtype == torch.bfloat16 else "reference, dtype float64"
        assert next(iter(backend.ran)).startswith(f"sparse_mla: {served}")
    for got, want in zip(*results, strict=True):
        check_close(got if got.ndim > 1 else got[None], want if want.ndim > 1 else want[None])


@pytest.mark.parametrize("selected", [False, True])
def test_indexer_loss(selected: bool) -> None:
    from mla_convert.runtime.indexer_loss import indexer_loss

    q, kv, indices, scale = sparse_case(queries=300, tokens=700, heads=16, topk=128)
    index = [
        torch.randn(300, 32, 128, device="cuda", dtype=torch.bfloat16),
        torch.randn(700, 128, device="cuda", dtype=torch.bfloat16),
        torch.randn(300, 32, device="cuda") * (32 * 128) ** -0.5,
    ]
    options = {"indices": indices} if selected else {"ends": torch.arange(401, 701, device="cuda")}
    losses, found = [], []
    for convert in (lambda x: x, lambda x: x.double()):
        inputs = [convert(x).detach().requires_grad_() for x in index]
        loss = indexer_loss(*inputs, convert(q), convert(kv), scale, reduction="sum", **options)
        losses.append(float(loss))
        found.append(torch.autograd.grad(loss, inputs))
    assert abs(losses[0] / losses[1] - 1) < 2e-3
    for got, want in zip(*found, strict=True):
        cosine = 2 * (got.double() * want).sum() / (got.double().square() + want.square()).sum()
        assert 1 - float(cosine) < 1e-4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *(["-x"] if os.environ.get("FAIL_FAST") else [])]))
