"""Decode and dense attention kernels against float64, computed from the same inputs, on a Hopper GPU.

As ``test_kernels_gpu``: fresh inputs, NaN in the memory of the outputs, FlashMLA's limits over all and row by row. Rows
of the cache that no token may see hold NaN.
"""

from __future__ import annotations

import os

import pytest
import torch
from gapped_lists import gapped
from test_dense_gpu import HEADS, dense_case, run_dense
from test_kernels_gpu import check_close, check_lse, poison
from torch import Tensor

from mla_convert.runtime import decode
from mla_convert.runtime.dispatch import available
from mla_convert.runtime.kv_cache import cache_rows, is_fp8, pack_fp8, unpack_fp8

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

LENGTHS = [0, 1, 63, 64, 65, 129, 700, 1999]
NAN = float("nan")


def paged(
    lengths: list[int], page: int, width: int = 576, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Requests in shuffled pages: NaN in pages that no request has and behind the end of each."""
    counts = [-(-length // page) for length in lengths]
    blocks = sum(counts) + 3
    order = torch.randperm(blocks).tolist()
    pool = torch.full((blocks, page, 1, width), NAN, device="cuda", dtype=dtype)
    table = torch.full((len(lengths), max(*counts, 1) + 1), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for n in range(counts[b]):
            table[b, n] = order.pop()
            used = min(page, length - n * page)
            pool[int(table[b, n]), :used] = torch.randn(used, 1, width, device="cuda") / 10
    return pool, table.cuda()


def queries(
    batch: int, tokens: int, heads: int, width: int = 576, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.randn(batch, tokens, heads, width, device="cuda", dtype=dtype) * 10


def run_decode(q: Tensor, cache: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Run on poisoned memory, compare with float64, return the kernel's results."""
    from mla_convert.runtime.kernels.decode_mla import decode_mla

    d_v = options.setdefault("d_v", 512)
    options.setdefault("scale", 1.3 * q.shape[-1] ** -0.5)
    batch, tokens, heads = q.shape[:3]
    poison(((batch * tokens * heads, d_v), q.dtype), ((batch * tokens * heads,), torch.float32))
    out, lse = decode_mla(q, cache, **options)
    assert out.shape == (batch, tokens, heads, d_v) and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (batch, heads, tokens) and lse.dtype == torch.float32
    wide = unpack_fp8(cache) if is_fp8(cache) else cache
    want, want_lse = decode.decode_mla(q.double(), wide.double(), **options)
    check_close(out, want)
    check_lse(lse, want_lse)
    return out, lse


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_every_head_count(heads: int, tokens: int) -> None:
    cache, table = paged(LENGTHS, 64)
    lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    q = queries(len(LENGTHS), tokens, heads)
    run_decode(q, cache, cache_seqlens=lengths, block_table=table, causal=True)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("page", [1, 16, 48, 64, 256])
@pytest.mark.parametrize("heads", [4, 16, 64, 128])
class TestPages:
    def test_pages(self, heads: int, page: int, tokens: int) -> None:
        cache, table = paged(LENGTHS, page)
        q = queries(len(LENGTHS), tokens, heads)
        for causal in (False, True):
            lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int64)
            run_decode(q, cache, cache_seqlens=lengths, block_table=table, causal=causal)


@pytest.mark.parametrize("heads", [3, 16, 30, 64, 128])
class TestDecode:
    def test_contiguous(self, heads: int) -> None:
        cache = torch.full((len(LENGTHS), 2000, 576), NAN, device="cuda", dtype=torch.bfloat16)
        for b, length in enumerate(LENGTHS):
            cache[b, :length] = torch.randn(length, 576, device="cuda") / 10
        lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
        for tokens in (1, 2):
            run_decode(queries(len(LENGTHS), tokens, heads), cache, cache_seqlens=lengths, causal=True)

    def test_one_long_request(self, heads: int) -> None:
        cache, table = paged([20_011], 64)
        lengths = torch.tensor([20_011], device="cuda", dtype=torch.int32)
        run_decode(queries(1, 1, heads), cache, cache_seqlens=lengths, block_table=table)
        run_decode(queries(1, 3, heads), cache, cache_seqlens=lengths, block_table=table, causal=True)

    def test_many_short_requests(self, heads: int) -> None:
        sizes = torch.randint(0, 300, (500,)).tolist()
        cache, table = paged(sizes, 16)
        lengths = torch.tensor(sizes, device="cuda", dtype=torch.int32)
        run_decode(queries(500, 1, heads), cache, cache_seqlens=lengths, block_table=table)

    def test_one_long_among_short(self, heads: int) -> None:
        sizes = [3, 9000, 0, 70, 5, 1]
        cache, table = paged(sizes, 64)
        lengths = torch.tensor(sizes, device="cuda", dtype=torch.int32)
        run_decode(queries(6, 2, heads), cache, cache_seqlens=lengths, block_table=table, causal=True)

    def test_lengths_beyond_the_cache(self, heads: int) -> None:
        cache = torch.randn(2, 100, 576, device="cuda", dtype=torch.bfloat16) / 10
        run_decode(queries(2, 2, heads), cache, cache_seqlens=torch.tensor([101, 4000], device="cuda"))

    def test_sink(self, heads: int) -> None:
        cache, table = paged(LENGTHS, 64)
        lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
        sink = torch.randn(heads, device="cuda") * 5
        sink[0] = -torch.inf
        q = queries(len(LENGTHS), 2, heads)
        options = {"cache_seqlens": lengths, "block_table": table}
        _, lse = run_decode(q, cache, attn_sink=sink, **options)
        assert torch.equal(lse, run_decode(q, cache, **options)[1])

    def test_large_scores(self, heads: int) -> None:
        cache, table = paged(LENGTHS, 64)
        lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
        run_decode(
            queries(len(LENGTHS), 2, heads), cache, cache_seqlens=lengths, block_table=table, scale=1.0
        )

    def test_rising_scores(self, heads: int) -> None:
        """Every block exceeds all before it, so that the reference of the exponentials moves each time."""
        cache, table = paged([3000], 3008)
        q = queries(1, 1, heads)
        order = (cache[int(table[0, 0]), :3000, 0].float() @ q[0, 0, 0].float()).argsort()
        cache[int(table[0, 0]), :3000] = cache[int(table[0, 0]), :3000][order]
        lengths = torch.tensor([3000], device="cuda", dtype=torch.int32)
        run_decode(q, cache, cache_seqlens=lengths, block_table=table, scale=0.5)

    def test_strided_and_unaligned(self, heads: int) -> None:
        cache, table = paged([70, 200], 64)
        lengths = torch.tensor([70, 200], device="cuda", dtype=torch.int32)
        q = queries(2, 1, heads)
        plain = run_decode(q, cache, cache_seqlens=lengths, block_table=table)
        wide_q = torch.full((2, 1, heads + 2, 601), NAN, device="cuda", dtype=q.dtype)
        wide_q[:, :, 1 : heads + 1, 3:579] = q
        wide_cache = torch.full((*cache.shape[:3], 600), NAN, device="cuda", dtype=q.dtype)
        wide_cache[..., 7:583] = cache
        strided = run_decode(
            wide_q[:, :, 1 : heads + 1, 3:579],
            wide_cache[..., 7:583],
            cache_seqlens=lengths.long(),
            block_table=table.long(),
        )
        assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))

    @pytest.mark.parametrize("fp8", [False, True])
    def test_two_runs_are_equal(self, heads: int, fp8: bool) -> None:
        """To the bit, whatever other kernels leave in shared memory."""
        from mla_convert.runtime.kernels.decode_mla import decode_mla

        cache, table = paged([5000, 100, 2048] * 20, 64)
        cache = pack_fp8(cache.nan_to_num()) if fp8 else cache
        lengths = torch.tensor([5000, 100, 2048] * 20, device="cuda", dtype=torch.int32)
        q = queries(60, 1, heads)
        options = {"cache_seqlens": lengths, "block_table": table, "d_v": 512}
        out, lse = decode_mla(q, cache, scale=0.05, **options)
        for _ in range(10):
            decode_mla(queries(60, 1, 8), cache, scale=0.3, **options)
            torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")
            again, lse_again = decode_mla(q, cache, scale=0.05, **options)
            assert torch.equal(again, out) and torch.equal(lse_again, lse)

    def test_in_a_graph_with_lengths_that_change(self, heads: int) -> None:
        from mla_convert.runtime.kernels.decode_mla import decode_mla

        cache, table = paged([900, 901, 902], 64)
        lengths = torch.tensor([900, 1, 64], device="cuda", dtype=torch.int32)
        q = queries(3, 2, heads)
        options = {"cache_seqlens": lengths, "block_table": table, "causal": True, "scale": 0.05, "d_v": 512}
        decode_mla(q, cache, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = decode_mla(q, cache, **options)
        lengths.copy_(torch.tensor([3, 900, 500], dtype=torch.int32))
        for out in got:
            out.fill_(NAN)
        graph.replay()
        want = decode.decode_mla(q.double(), cache.double(), **options)
        check_close(got[0], want[0])
        check_lse(got[1], want[1])

    def test_nothing_to_do(self, heads: int) -> None:
        from mla_convert.runtime.kernels.decode_mla import decode_mla

        q, lengths = queries(2, 1, heads), torch.zeros(2, device="cuda", dtype=torch.int32)
        cache = torch.full((2, 64, 576), NAN, device="cuda", dtype=torch.bfloat16)
        for args, options in (
            ((q, cache), {"cache_seqlens": lengths}),
            ((q, cache[:, :0]), {"cache_seqlens": lengths}),
            ((q[:0], cache[:0]), {"cache_seqlens": lengths[:0]}),
            ((q, cache), {"indices": torch.zeros(2, 1, 0, device="cuda", dtype=torch.int32)}),
            ((q, cache), {"indices": torch.full((2, 1, 70), -1, device="cuda", dtype=torch.int32)}),
        ):
            out, lse = decode_mla(*args, scale=1.0, d_v=512, **options)
            assert out.shape == (args[0].shape[0], 1, heads, 512) and not out.any() and lse.isneginf().all()


def listed(batch: int, tokens: int, entries: int, rows: int, invalid: float = 0.1) -> Tensor:
    indices = torch.randint(0, rows, (batch, tokens, entries), device="cuda", dtype=torch.int32)
    indices[torch.rand(indices.shape, device="cuda") < invalid] = -1
    return indices


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [1, 8, 16, 24, 40, 64, 128])
class TestSparse:
    def cache(self, fp8: bool, blocks: int = 40, page: int = 64) -> Tensor:
        cache = torch.randn(blocks, page, 1, 576, device="cuda", dtype=torch.bfloat16) / 10
        return pack_fp8(cache) if fp8 else cache

    def test_lists(self, heads: int, fp8: bool) -> None:
        for entries in (1, 63, 64, 200, 2048):
            indices = listed(5, 2, entries, 40 * 64)
            run_decode(queries(5, 2, heads), self.cache(fp8), indices=indices)

    def test_invalid_entries(self, heads: int, fp8: bool) -> None:
        indices = listed(3, 2, 300, 40 * 64, invalid=0)
        for start, value in enumerate([-1, 40 * 64, -(2**31), 2**31 - 1, -2]):
            indices[:, :, 7 + start :: 11] = value
        indices[0, 0] = -1
        indices[1, 1, :128] = -1
        out, lse = run_decode(queries(3, 2, heads), self.cache(fp8), indices=indices)
        assert not out[0, 0].any() and lse[0, :, 0].isneginf().all()

    def test_blocks_without_a_valid_entry(self, heads: int, fp8: bool) -> None:
        """Such blocks are not copied, so that other lists' rows may still lie where theirs would."""
        cache = self.cache(fp8)
        for batch, entries in ((24, 64), (24, 1000), (150, 700), (3, 20_000)):
            indices = gapped(batch, entries, 40 * 64)[:, None]
            q = queries(batch, 1, heads)
            out, lse = run_decode(q, cache, indices=indices)
            empty = (indices < 0).logical_or(indices >= 40 * 64).all(-1)[:, 0]
            assert not out[empty].any() and lse[empty].isneginf().all()
            length = torch.randint(0, entries + 1, (batch,), device="cuda")
            run_decode(q, cache, indices=indices, topk_length=length)

    def test_unlisted_rows_never_leak(self, heads: int, fp8: bool) -> None:
        cache = self.cache(fp8)
        indices = listed(3, 1, 90, 40 * 64, invalid=0.3)
        indices[indices == 0] = -1
        unlisted = torch.ones(40 * 64, dtype=torch.bool, device="cuda")
        unlisted[indices[indices >= 0].long()] = False
        if fp8:
            cache.view(-1, 656)[unlisted] = 0x7F  # NaN as e4m3, as float32 and as bfloat16
        else:
            cache.view(-1, 576)[unlisted] = NAN
        run_decode(queries(3, 1, heads), cache, indices=indices)

    def test_topk_length(self, heads: int, fp8: bool) -> None:
        indices = listed(4, 2, 200, 40 * 64)
        q, cache = queries(4, 2, heads), self.cache(fp8)
        run_decode(q, cache, indices=indices, topk_length=torch.tensor([0, 1, 65, 200], device="cuda"))
        by_token = torch.tensor([[0, 200], [64, 1], [65, 300], [100, 128]], device="cuda", dtype=torch.int32)
        sink = torch.randn(heads, device="cuda")
        run_decode(q, cache, indices=indices.long(), topk_length=by_token, attn_sink=sink)

    def test_dense_from_the_same_cache(self, heads: int, fp8: bool) -> None:
        cache, table = paged(LENGTHS, 64)
        if fp8:
            packed = pack_fp8(cache.nan_to_num())
            packed[cache.isnan().any(-1)] = 0x7F
            cache = packed
        lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
        q = queries(len(LENGTHS), 2, heads)
        run_decode(q, cache, cache_seqlens=lengths, block_table=table, causal=True)

    def test_positions_of_a_paged_cache(self, heads: int, fp8: bool) -> None:
        cache, table = paged([500, 500], 16)
        cache = cache.nan_to_num()
        cache = pack_fp8(cache) if fp8 else cache
        positions = torch.randperm(500, device="cuda").expand(2, 1, -1)
        q = queries(2, 1, heads)
        lengths = torch.tensor([500, 500], device="cuda", dtype=torch.int32)
        dense = run_decode(q, cache, cache_seqlens=lengths, block_table=table)
        sparse = run_decode(q, cache, indices=cache_rows(positions, table, 16))
        assert torch.allclose(dense[0].float(), sparse[0].float(), atol=2e-3)
        assert torch.allclose(dense[1], sparse[1], atol=1e-4)


@pytest.mark.parametrize(("heads", "batch"), [(40, 3), (64, 160), (64, 300), (128, 16), (128, 80)])
def test_lists_of_many_heads_take_the_sparse_forward(heads: int, batch: int) -> None:
    """Those without lengths, in parts, whole, and whole ones before others in parts; with lengths, a plan is made."""
    from mla_convert.runtime.kernels.decode_mla import decode_mla
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    cache = torch.randn(40, 64, 1, 576, device="cuda", dtype=torch.bfloat16) / 10
    q, sink = queries(batch, 1, heads), torch.randn(heads, device="cuda")
    indices = listed(batch, 1, 2048, 40 * 64)
    options = {"scale": 0.05, "attn_sink": sink, "d_v": 512}
    out, lse = decode_mla(q, cache, indices=indices, **options)
    want, want_lse = sparse_mla(q[:, 0], cache.view(-1, 576), indices[:, 0], **options)
    assert torch.equal(out[:, 0], want) and torch.equal(lse[..., 0], want_lse)
    lengths = torch.full((batch,), 2048, device="cuda")
    planned, planned_lse = decode_mla(q, cache, indices=indices, topk_length=lengths, **options)
    assert not torch.equal(planned, out)
    check_close(out, planned.double())
    check_lse(lse, planned_lse.double())
    some = [0, batch // 2, batch - 1]
    run_decode(q[some], cache, indices=indices[some], attn_sink=sink)


@pytest.mark.parametrize("shares", [1, 7, 66, 132])
@pytest.mark.parametrize(
    "lengths",
    [
        [2048] * 8,
        [512],
        [0] * 9,
        LENGTHS,
        [8192] * 128,
        [8192] * 64 + [8100] * 64,
        [64] * 198,
        [64] * 200,
        [200] * 300,
        [700] * 66,
        [3, 9000, 0, 70, 5, 1],
        list(range(1, 4000, 9)),
    ],
)
def test_shares_of_a_plan(lengths: list[int], shares: int) -> None:
    """Every block is in one share; few items have shares of their own, and if that makes none much longer nothing is
    cut."""
    from mla_convert.runtime.kernels._common import launcher
    from mla_convert.runtime.kernels._dense import BLOCK, OVERHEAD
    from mla_convert.runtime.kernels.dense_mla import plan_kernel

    items = len(lengths)
    given = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    blocks = [-(-length // BLOCK) for length in lengths]
    for smallest, allowance in ((1, 0), (2, 8), (4, 8)):
        plan = torch.full((items + shares + 1 + items, 6), -99, device="cuda", dtype=torch.int32)
        launcher(plan_kernel())(
            given,
            given,
            given,
            1,
            0,
            16,
            1,
            16,
            1,
            items,
            shares,
            max(lengths) + 5,
            smallest,
            allowance,
            plan,
        )
        found = plan.tolist()
        share = found[items + shares][0]
        equal = max(-(-(sum(blocks) + OVERHEAD * items) // shares), smallest)
        fewest = max(-(-sum(blocks) // shares), smallest)
        fitting = [n for n in range(fewest, equal + 1) if sum(-(-max(b, 1) // n) for b in blocks) <= shares]
        apart = bool(fitting) and items <= shares
        limit, used, filled = equal + min(allowance, equal // 16), 1, 0
        for count in blocks:
            used, filled = (used, filled) if filled + count + OVERHEAD <= limit else (used + 1, 0)
            filled += count + OVERHEAD
        uncut = allowance > 0 and max(blocks) + OVERHEAD <= limit and used <= shares and items <= 256
        assert share == (fitting[0] if apart else limit if uncut else equal)
        seen: list[list[int]] = [[] for _ in lengths]
        for place, (first, last) in enumerate(row[:2] for row in found[items : items + shares]):
            assert not apart or first >= last
            for item in range(first, last + 1):
                unit, stop = found[item][:2]
                begin = stop - blocks[item]
                taken = range(max(place * share, begin), min((place + 1) * share, stop))
                assert max(place * share, unit) < min((place + 1) * share, stop)
                assert apart or not uncut or len(taken) == blocks[item]
                seen[item] += [number - begin for number in taken]
        assert seen == [list(range(count)) for count in blocks]


def test_fp8_scales_that_are_no_powers_of_two() -> None:
    cache = pack_fp8(torch.randn(30, 64, 1, 576, device="cuda") / 10, power_of_two=False)
    for heads in (16, 64):
        run_decode(queries(3, 1, heads), cache, indices=listed(3, 1, 500, 30 * 64))


def test_cache_beyond_int32_offsets() -> None:
    from mla_convert.runtime.kernels.decode_mla import decode_mla

    pages = 60_000  # 2.2e9 elements
    cache = torch.empty(pages, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    for part in cache.split(5000):
        part.normal_(std=0.1)
    table = torch.tensor([[0, pages - 1, 59_000], [pages - 2, 30_000, 7]], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([192, 150], device="cuda", dtype=torch.int32)
    small, near = cache[table.long().flatten()], torch.arange(6, device="cuda").view(2, 3)
    for heads in (16, 128):
        q = queries(2, 1, heads)
        out, lse = decode_mla(q, cache, cache_seqlens=lengths, block_table=table, scale=0.05, d_v=512)
        want = decode.decode_mla(
            q.double(), small.double(), cache_seqlens=lengths, block_table=near, scale=0.05, d_v=512
        )
        check_close(out, want[0])
        check_lse(lse, want[1])


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [
        (16, 512, 0),
        (64, 512, 0),
        (16, 512, 32),
        (64, 256, 64),
        (8, 128, 32),
        (64, 128, 32),
        (8, 64, 0),
        (12, 64, 64),
    ],
)
def test_every_width(heads: int, rank: int, rope: int) -> None:
    run_dense(*dense_case(1, heads, 1000, rank + rope), d_v=rank)
    run_dense(*dense_case(70, heads, 100, rank + rope), d_v=rank)
    cache, table = paged(LENGTHS, 64, rank + rope)
    lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    q = queries(len(LENGTHS), 1, heads, rank + rope)
    run_decode(q, cache, cache_seqlens=lengths, block_table=table, d_v=rank)


@pytest.mark.parametrize(("heads", "rank", "rope"), [(4, 32, 8), (6, 48, 16), (40, 32, 8)])
def test_small_widths_are_padded(heads: int, rank: int, rope: int) -> None:
    run_dense(*dense_case(1, heads, 100, rank + rope), d_v=rank)
    run_dense(*dense_case(70, heads, 100, rank + rope), d_v=rank)


def test_float16() -> None:
    for heads in (16, 64):
        cache, table = paged(LENGTHS, 64, dtype=torch.float16)
        lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
        q = queries(len(LENGTHS), 1, heads, dtype=torch.float16)
        run_decode(q, cache, cache_seqlens=lengths, block_table=table)
    run_dense(*dense_case(100, 16, 150, dtype=torch.float16))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *(["-x"] if os.environ.get("FAIL_FAST") else [])]))
