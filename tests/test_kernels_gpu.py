"""The sparse forward in TileLang, and dispatch, against float64, computed from the same inputs, on a Hopper GPU.

Every comparison draws fresh inputs, and the memory that the outputs will occupy is filled with NaN first. Limits
are FlashMLA's: an element may differ by 8e-4 or by 3.01/128 of its value, and 1 - cosine stays below 7e-6 over
all elements, and below ``ROW_COSINE`` in every row of one query and head, so that one bad row cannot hide.
"""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.dispatch import available

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

ROW_COSINE = 2e-5
HEADS = [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128]
TOPK = [1, 32, 64, 96, 128, 192, 2048]
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def poison(*shapes: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Leave NaN in the memory that the allocator hands out next for these shapes."""
    blocks = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape, dtype in shapes]
    del blocks


def sparse_reference(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, length: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition in float64, a few queries at a time."""
    topk = indices.shape[1]
    outs, lses = [], []
    step = max(1, 2**25 // (topk * q.shape[2]))
    for rows in torch.arange(q.shape[0], device="cuda").split(step):
        chosen = indices[rows].long()
        valid = (chosen >= 0) & (chosen < kv.shape[0])
        if length is not None:
            valid &= torch.arange(topk, device="cuda") < length[rows, None]
        keys = kv[torch.where(valid, chosen, 0)].double().masked_fill(~valid[..., None], 0)
        scores = torch.einsum("shd,skd->shk", q[rows].double(), keys) * scale
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
        out = torch.einsum("shk,skv->shv", p, keys[..., :d_v])
        if sink is not None:
            share = torch.sigmoid(lse - sink.double()).masked_fill(lse.isneginf(), 0)  # -inf less -inf is NaN
            out = out * share[..., None]
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def check_close(out: Tensor, want: Tensor) -> None:
    assert not out.isnan().any(), f"{int(out.isnan().sum())} NaN"
    assert want.isfinite().all(), "what is compared with has to be a number"
    out = out.double()
    diff = (out - want).abs()
    bad = (diff > 8e-4) & (diff > want.abs() * 3.01 / 128)
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} off, worst {float(diff.max()):.2e}"
    if want.abs().max() > 0:
        total = 1 - float((2 * out * want).sum() / (out.square() + want.square()).sum())
        assert total < 7e-6, f"1 - cosine {total:.1e}"
        size = out.square().sum(-1) + want.square().sum(-1)
        rows = 1 - (2 * out * want).sum(-1) / size.clamp_min(1e-30)
        worst = float(rows.masked_fill(want.square().sum(-1) < 1e-12, 0).max())
        assert worst < ROW_COSINE, f"worst row's 1 - cosine {worst:.1e}"


def check_lse(lse: Tensor, want: Tensor) -> None:
    assert torch.equal(lse.isneginf(), want.isneginf())
    lse, want = (x.double().masked_fill(want.isneginf(), 0) for x in (lse, want))
    diff = (lse - want).abs()
    bad = (diff > 1e-5) & (diff > want.abs() * 2.01 / 65536)
    assert not bad.any(), f"lse off by {float(diff.max()):.2e}"


def sparse_case(
    *,
    queries: int = 37,
    heads: int = 16,
    tokens: int = 3000,
    topk: int = 128,
    rank: int = 512,
    rope: int = 64,
    invalid: float = 0.1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Inputs whose scores have a spread of 1.3 and whose values, like FlashMLA's, are of size 0.1."""
    q = torch.randn(queries, heads, rank + rope, device="cuda", dtype=dtype) * 10
    kv = torch.randn(tokens, rank + rope, device="cuda", dtype=dtype) / 10
    indices = torch.randint(0, tokens, (queries, topk), device="cuda", dtype=torch.int32)
    indices[torch.rand(queries, topk, device="cuda") < invalid] = -1
    return q, kv, indices, 1.3 * (rank + rope) ** -0.5


def force_parts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Let this many thread blocks share a list, whatever the number of queries."""
    from mla_convert.runtime.kernels import sparse_mla

    monkeypatch.setattr(sparse_mla, "_parts", lambda *sizes: parts)
    # A plan that was kept would say otherwise, and one made now would be kept for the tests behind.
    monkeypatch.setattr(sparse_mla, "_plan", inspect.unwrap(sparse_mla._plan))


def force_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pairs of warps take the queries of up to 8 heads, whatever their number."""
    from mla_convert.runtime.kernels import sparse_mla

    monkeypatch.setattr(sparse_mla, "_paired", lambda heads, *sizes: heads <= sparse_mla.PAIRED)
    force_parts(monkeypatch, 1)


def run_sparse(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    d_v: int = 512,
    length: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run on poisoned memory, compare with float64, return the kernel's results."""
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    queries, heads = q.shape[:2]
    poison(((queries, heads, d_v), q.dtype), ((queries, heads), torch.float32))
    out, lse = sparse_mla(q, kv, indices, scale, topk_length=length, attn_sink=sink, d_v=d_v)
    assert out.shape == (queries, heads, d_v) and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (queries, heads) and lse.dtype == torch.float32
    flat_kv, flat_indices = kv.reshape(kv.shape[0], -1), indices.reshape(queries, -1)
    want, want_lse = sparse_reference(q, flat_kv, flat_indices, scale, d_v, length, sink)
    check_close(out, want)
    check_lse(lse, want_lse)
    return out, lse


@pytest.mark.parametrize("topk", TOPK)
@pytest.mark.parametrize("heads", HEADS)
def test_sparse_every_head_count_and_list_length(heads: int, topk: int) -> None:
    run_sparse(*sparse_case(queries=9 if topk == 2048 else 150, heads=heads, topk=topk))


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [
        (16, 512, 0), (64, 512, 0), (16, 512, 32), (64, 512, 32), (16, 256, 64), (128, 256, 64),
        (8, 128, 32), (64, 128, 32), (16, 64, 64), (64, 64, 0), (8, 64, 0), (4, 32, 8), (40, 32, 8), (6, 48, 16),
    ],
)  # fmt: skip
def test_sparse_every_width(heads: int, rank: int, rope: int) -> None:
    run_sparse(*sparse_case(heads=heads, rank=rank, rope=rope, topk=200), d_v=rank)


@pytest.mark.parametrize("heads", HEADS)
def test_sparse_whole_lists(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_parts(monkeypatch, 1)
    run_sparse(*sparse_case(queries=9, heads=heads, topk=2048))
    run_sparse(*sparse_case(queries=150, heads=heads, topk=192))


@pytest.mark.parametrize("heads", HEADS)
def test_sparse_split_lists(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in (2, 5, 32):
        force_parts(monkeypatch, parts)
        run_sparse(*sparse_case(queries=9, heads=heads, topk=2048))


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize(
    ("rank", "rope"), [(512, 64), (512, 0), (512, 32), (192, 64), (128, 32), (64, 0), (64, 64), (32, 8)]
)
def test_sparse_pairs_of_warps(heads: int, rank: int, rope: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force_pairs(monkeypatch)
    for topk in (1, 15, 33, 200):
        run_sparse(*sparse_case(queries=150, heads=heads, rank=rank, rope=rope, topk=topk), d_v=rank)


def test_sparse_many_queries_of_few_heads() -> None:
    """More queries than pairs of warps, and as many as make them the choice."""
    from mla_convert.runtime.kernels.sparse_mla import _paired

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    queries = next(n for n in range(1, 10_000) if _paired(8, n, multiprocessors)) * 2 + 5
    for dtype in (torch.bfloat16, torch.float16):
        run_sparse(*sparse_case(queries=queries, heads=8, topk=700, dtype=dtype))


@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
def test_sparse_a_few_queries_over(heads: int) -> None:
    """The queries left over when every multiprocessor has as many have their lists split."""
    from mla_convert.runtime.kernels.sparse_mla import _division

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    queries = 4 * multiprocessors + 3
    whole, parts, rest_parts = _division(queries, heads, 32, multiprocessors)
    assert whole == queries - 3 and parts == 1 and rest_parts > 1
    sink = torch.randn(heads, device="cuda")
    for length in (None, torch.randint(0, 2049, (queries,), device="cuda")):
        run_sparse(*sparse_case(queries=queries, heads=heads, topk=2048), length=length, sink=sink)


@pytest.mark.parametrize(
    ("heads", "parts"), [(8, 1), *((heads, parts) for heads in (16, 64, 128) for parts in (1, 2, 7))]
)
class TestSparseLists:
    @pytest.fixture(autouse=True)
    def _parts(self, heads: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        if heads == 8:
            force_pairs(monkeypatch)
        else:
            force_parts(monkeypatch, parts)

    def test_fewer_tokens_than_entries(self, heads: int) -> None:
        run_sparse(*sparse_case(heads=heads, tokens=5, topk=192))

    def test_whole_row_empty(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads)
        indices[3] = -1
        indices[36] = kv.shape[0]
        out, lse = run_sparse(q, kv, indices, scale)
        assert not out[[3, 36]].any() and lse[[3, 36]].isneginf().all()

    def test_first_block_empty(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, topk=320)
        indices[:, :64] = -1
        indices[5, :-1] = -1
        run_sparse(q, kv, indices, scale)

    def test_gaps_and_far_out_of_range(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, topk=256, invalid=0)
        for start, value in enumerate([-1, kv.shape[0], INT_MIN, INT_MAX, -2, kv.shape[0] + 1]):
            indices[:, 7 + start :: 11] = value
        indices[0, 64:128] = -1
        run_sparse(q, kv, indices, scale)

    def test_unselected_rows_never_leak(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, tokens=1000, invalid=0.3)
        unselected = torch.ones(1000, dtype=torch.bool, device="cuda")
        unselected[indices[indices >= 0].long()] = False
        unselected[[0, 999]] = True
        indices[(indices == 0) | (indices == 999)] = -1
        kv[unselected] = float("nan")
        kv[0] = float("inf")
        out, lse = run_sparse(q, kv, indices, scale)
        assert out.isfinite().all() and lse.isfinite().all()

    def test_duplicates_count_twice(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads)
        indices[:, ::2] = indices[:, 1::2]
        indices[1] = 7
        run_sparse(q, kv, indices, scale)

    def test_topk_length(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, topk=300)
        length = torch.randint(0, 301, (37,), device="cuda", dtype=torch.int32)
        length[:4] = torch.tensor([0, 1, 64, 65], dtype=torch.int32)
        out, lse = run_sparse(q, kv, indices, scale, length=length)
        assert not out[0].any() and lse[0].isneginf().all()

    def test_sink_rescales_the_output_only(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads)
        indices[2] = -1
        sink = torch.randn(heads, device="cuda") * 5
        sink[0] = -torch.inf
        _, lse = run_sparse(q, kv, indices, scale, sink=sink)
        assert torch.equal(lse, run_sparse(q, kv, indices, scale)[1])

    def test_large_scores(self, heads: int) -> None:
        q, kv, indices, _ = sparse_case(heads=heads, topk=256)
        run_sparse(q, kv, indices, 1.0)

    def test_strided_unaligned_and_int64(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads)
        wide_q = torch.full((37, heads + 3, 600), float("nan"), device="cuda", dtype=q.dtype)
        wide_q[:, 2 : heads + 2, 5:581] = q
        wide_kv = torch.full((kv.shape[0], 601), float("nan"), device="cuda", dtype=q.dtype)
        wide_kv[:, 9:585] = kv
        far = indices.long()
        far[:, 5] = 2**32 + 5
        far[:, 6] = -(2**40)
        wide_far = torch.full((37, 140), 3, device="cuda")
        wide_far[:, 4:132] = far
        plain = run_sparse(q, kv, far.clamp(-1, INT_MAX).int(), scale)
        args = (wide_q[:, 2 : heads + 2, 5:581], wide_kv[:, 9:585][:, None], wide_far[:, None, 4:132])
        strided = run_sparse(*args, scale)
        assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))

    def test_one_query(self, heads: int) -> None:
        run_sparse(*sparse_case(heads=heads, queries=1, topk=2048))

    def test_two_runs_are_bitwise_equal(self, heads: int) -> None:
        from mla_convert.runtime.kernels.sparse_mla import sparse_mla

        q, kv, indices, scale = sparse_case(heads=heads, queries=700, topk=512)
        runs = [sparse_mla(q, kv, indices, scale, d_v=512) for _ in range(3)]
        for out, lse in runs[1:]:
            assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])

    def test_list_lengths_mixed_in_one_launch(self, heads: int) -> None:
        q, kv, indices, scale = sparse_case(heads=heads, queries=1200, topk=400, invalid=0)
        length = torch.arange(1200, device="cuda", dtype=torch.int32) % 401
        run_sparse(q, kv, indices, scale, length=length)


def test_sparse_float16() -> None:
    run_sparse(*sparse_case(dtype=torch.float16))
    run_sparse(*sparse_case(queries=600, dtype=torch.float16))


def test_sparse_rising_scores() -> None:
    """Every block exceeds all before it, so that the reference of the exponentials moves each time."""
    for heads in (8, 16, 32, 64):
        q, kv, _indices, _ = sparse_case(heads=heads, topk=512, invalid=0)
        order = (q[:, 0].float() @ kv.float().T).argsort(dim=1)
        run_sparse(q, kv, order[:, -512:].int(), 0.5)
        run_sparse(q[:3].repeat(400, 1, 1), kv, order[:3, -512:].int().repeat(400, 1), 0.5)


def test_sparse_in_a_graph() -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q, kv, indices, scale = sparse_case(topk=512)
    want = sparse_mla(q, kv, indices, scale, d_v=512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sparse_mla(q, kv, indices, scale, d_v=512)
    for out in got:
        out.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_sparse_calls_of_equal_sizes() -> None:
    """What is kept of a call does not stand in the way of one that differs in what a signature leaves out."""
    q, kv, indices, scale = sparse_case(queries=21, heads=16)
    run_sparse(q, kv, indices, scale)
    run_sparse(
        torch.stack([q, q], dim=2)[:, :, 1],
        torch.stack([kv, kv], dim=1)[:, 1],
        indices.t().contiguous().t(),
        scale,
    )
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    run_sparse(shifted.copy_(q), kv, indices, scale / 2)
    run_sparse(q.clone().requires_grad_(), kv, indices, scale)
    for _ in range(2):  # an error is found each time, and no call behind it is
        with pytest.raises(ValueError, match="20 queries and 21 lists"):
            run_sparse(q[:20], kv, indices, scale)
        with pytest.raises(CannotError, match=r"scale -1\.0 is not"):
            run_sparse(q, kv, indices, -1.0)
        run_sparse(q, kv, indices, scale)


def test_sparse_threads_with_streams_of_their_own() -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    cases = [sparse_case(queries=50, topk=700) for _ in range(4)]
    want = [sparse_mla(*case, d_v=512) for case in cases]

    def calls(case: tuple[Tensor, Tensor, Tensor, float]) -> list[tuple[Tensor, Tensor]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results = [sparse_mla(*case, d_v=512) for _ in range(30)]
        stream.synchronize()
        return results

    with ThreadPoolExecutor(len(cases)) as pool:
        for (out, lse), results in zip(want, pool.map(calls, cases), strict=True):
            assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in results)


def test_sparse_nothing_to_do() -> None:
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q, kv, indices, scale = sparse_case()
    for args in ((q[:0], kv, indices[:0]), (q, kv[:0], indices), (q, kv, indices[:, :0])):
        out, lse = sparse_mla(*args, scale, d_v=512)
        assert out.shape == (args[0].shape[0], 16, 512) and not out.any() and lse.isneginf().all()


def test_sparse_query_beyond_int32_offsets() -> None:
    queries = 30_000  # 2.2e9 elements of q
    q, kv, indices, scale = sparse_case(queries=queries, heads=128, tokens=500, topk=64)
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    out, lse = sparse_mla(q, kv, indices, scale, d_v=512)
    rows = torch.tensor([0, 1, 15_000, queries - 2, queries - 1], device="cuda")
    want, want_lse = sparse_reference(q[rows], kv, indices[rows], scale, 512, None, None)
    check_close(out[rows], want)
    check_lse(lse[rows], want_lse)


def test_dispatch_runs_the_kernels() -> None:
    from test_indexer_gpu import indexer_case

    from mla_convert.runtime import reference
    from mla_convert.runtime.dispatch import resolve_backend

    backend = resolve_backend("auto", "cuda")
    assert backend.name == "tilelang" and "H" in backend.reason
    q, kv, indices, scale = sparse_case()
    out, lse = backend.sparse_mla(q, kv, indices, scale, d_v=512)
    want, want_lse = reference.sparse_mla(q.double(), kv.double(), indices, scale, d_v=512)
    check_close(out, want)
    check_lse(lse, want_lse)
    args = indexer_case(100, 700, 64, 128)
    assert torch.allclose(backend.indexer_logits(*args), reference.indexer_logits(*args), atol=5e-3)
    backend.sparse_mla(q.float(), kv.float(), indices, scale, d_v=512)
    assert backend.ran["sparse_mla: tilelang"] == backend.ran["indexer_logits: tilelang"] == 1
    assert backend.ran["sparse_mla: reference, dtype float32 is neither bfloat16 nor float16"] == 1
