"""Decode and dense attention in plain torch against torch's own attention on gathered caches, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from mla_convert.runtime.decode import decode_mla
from mla_convert.runtime.kv_cache import FP8_ROW, cache_rows, pack_fp8, unpack_fp8
from mla_convert.runtime.reference import dense_mla, sparse_mla
from mla_convert.runtime.spans import causal_spans

NAN = float("nan")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(
    q_SHE: Tensor, keys_TE: Tensor, mask_ST: Tensor, scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    """torch's attention for queries that see something; the log-sum-exp from the scores."""
    heads = q_SHE.shape[1]
    k = keys_TE[None].expand(heads, -1, -1)
    out = F.scaled_dot_product_attention(
        q_SHE.transpose(0, 1), k, k[..., :d_v], attn_mask=mask_ST[None], scale=scale
    )
    scores = torch.einsum("she,te->sht", q_SHE, keys_TE) * scale
    return out.transpose(0, 1), scores.masked_fill(~mask_ST[:, None], -math.inf).logsumexp(-1)


def paged(caches: list[Tensor], page: int, width: int) -> tuple[Tensor, Tensor]:
    """The requests' tokens in shuffled pages; unused pages and tails are NaN."""
    counts = [-(-cache.shape[0] // page) for cache in caches]
    blocks = sum(counts) + 3
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(page)).tolist()
    pool = torch.full((blocks, page, 1, width), NAN, dtype=torch.float64)
    table = torch.full((len(caches), max(*counts, 1) + 1), -1, dtype=torch.int32)
    for b, cache in enumerate(caches):
        for n in range(counts[b]):
            table[b, n] = order.pop()
            part = cache[n * page : (n + 1) * page]
            pool[table[b, n], : part.shape[0], 0] = part
    return pool, table


LENGTHS = [1, 37, 64, 5, 130]


def requests(width: int = 20) -> list[Tensor]:
    return [draw(length, width, seed=10 + b) for b, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page", [16, 48, 64, None])
@pytest.mark.parametrize("queries", [1, 3])
def test_dense_decode_is_attention_to_the_gathered_cache(
    queries: int, page: int | None, causal: bool
) -> None:
    caches = requests()
    q = draw(len(caches), queries, 3, 20)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    if page is None:
        cache = torch.full((len(caches), 200, 20), NAN, dtype=torch.float64)
        for b, tokens in enumerate(caches):
            cache[b, : tokens.shape[0]] = tokens
        table = None
    else:
        cache, table = paged(caches, page, 20)
    out, lse = decode_mla(
        q, cache, cache_seqlens=lengths, block_table=table, scale=0.3, causal=causal, d_v=16
    )
    assert out.shape == (5, queries, 3, 16) and lse.shape == (5, 3, queries)
    for b, tokens in enumerate(caches):
        length = tokens.shape[0]
        ends = torch.arange(length - queries + 1, length + 1) if causal else torch.full((queries,), length)
        mask = torch.arange(length) < ends[:, None]
        seen = ends > 0
        want, want_lse = attention(q[b], tokens, mask, 0.3, 16)
        assert torch.allclose(out[b][seen], want[seen], rtol=0, atol=1e-12)
        assert torch.allclose(lse[b].T[seen], want_lse[seen], rtol=0, atol=1e-12)
        assert not out[b][~seen].any() and lse[b].T[~seen].isneginf().all()


def test_a_request_without_tokens_gives_nothing() -> None:
    cache = torch.full((2, 8, 20), NAN, dtype=torch.float64)
    cache[1, :8] = draw(8, 20)
    out, lse = decode_mla(
        draw(2, 2, 3, 20), cache, cache_seqlens=torch.tensor([0, 8]), scale=1.0, causal=True, d_v=16
    )
    assert not out[0].any() and lse[0].isneginf().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_lengths_beyond_the_cache_are_clipped() -> None:
    cache, q = draw(2, 8, 20), draw(2, 2, 3, 20, seed=1)
    want = decode_mla(q, cache, cache_seqlens=torch.tensor([8, 8]), scale=1.0, d_v=16)
    got = decode_mla(q, cache, cache_seqlens=torch.tensor([9, 900]), scale=1.0, d_v=16)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("page", [16, None])
def test_sparse_decode_is_attention_to_the_listed_tokens(page: int | None) -> None:
    caches = requests()
    q = draw(len(caches), 2, 3, 20)
    generator = torch.Generator().manual_seed(5)
    positions = torch.full((len(caches), 2, 9), -1)
    for b, length in enumerate(LENGTHS):
        positions[b] = torch.randint(0, length, (2, 9), generator=generator)
    positions[0, 0] = -1
    positions[1, 1, 4:] = -5
    if page is None:
        cache, table = torch.full((5, 140, 20), NAN, dtype=torch.float64), None
        for b, tokens in enumerate(caches):
            cache[b, : tokens.shape[0]] = tokens
        rows = cache_rows(positions, None, 140)
    else:
        cache, table = paged(caches, page, 20)
        rows = cache_rows(positions, table, page)
    rows[2, 0, 3] = cache.shape[0] * cache.shape[1]
    limits = torch.tensor([9, 9, 9, 4, 0])
    out, lse = decode_mla(q, cache, scale=0.4, indices=rows, topk_length=limits, d_v=16)
    for b, tokens in enumerate(caches):
        for s in range(2):
            listed = [int(p) for j, p in enumerate(positions[b, s]) if p >= 0 and j < limits[b]]
            if (b, s) == (2, 0):
                del listed[3]
            if not listed:
                assert not out[b, s].any() and lse[b, :, s].isneginf().all()
                continue
            keys = tokens[listed]
            want, want_lse = attention(
                q[b, s : s + 1], keys, torch.ones(1, len(listed), dtype=torch.bool), 0.4, 16
            )
            assert torch.allclose(out[b, s], want[0], rtol=0, atol=1e-12)
            assert torch.allclose(lse[b, :, s], want_lse[0], rtol=0, atol=1e-12)
    by_token = limits[:, None].expand(5, 2)
    again = decode_mla(q, cache, scale=0.4, indices=rows, topk_length=by_token, d_v=16)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_sink_scales_the_output_and_leaves_lse() -> None:
    q, cache, sink = draw(2, 2, 3, 20), draw(2, 30, 20, seed=1), torch.tensor([0.7, -3.0, math.inf])
    options = {"cache_seqlens": torch.tensor([30, 11]), "scale": 0.3, "d_v": 16}
    plain, lse = decode_mla(q, cache, **options)
    out, lse_too = decode_mla(q, cache, attn_sink=sink, **options)
    share = lse.exp() / (lse.exp() + sink.double().exp()[:, None])
    assert torch.allclose(out, plain * share.transpose(1, 2)[..., None], rtol=0, atol=1e-12)
    assert torch.equal(lse, lse_too) and not out[:, :, 2].any()


def test_positions_as_rows_of_the_cache() -> None:
    table = torch.tensor([[3, 1], [0, 2]])
    positions = torch.tensor([[0, 5, 7, -1], [3, 4, 8, 2]])
    assert cache_rows(positions, table, 4).tolist() == [[12, 5, 7, -1], [3, 8, -1, 2]]
    assert cache_rows(positions, None, 8).tolist() == [[0, 5, 7, -1], [11, 12, -1, 10]]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_rows_keep_values_to_the_precision_of_their_format(power_of_two: bool) -> None:
    kv = draw(7, 5, 576).float()
    kv[0, 0, :128] *= 1e-3
    kv[0, 1, 128:256] = 0
    kv[2, 2] *= 1e4
    rows = pack_fp8(kv, power_of_two=power_of_two)
    assert rows.shape == (7, 5, FP8_ROW) and rows.dtype == torch.uint8
    back = unpack_fp8(rows, torch.float32)
    assert torch.equal(back[..., 512:], kv[..., 512:].bfloat16().float())
    groups, decoded = (x[..., :512].unflatten(-1, (4, 128)) for x in (kv, back))
    top = groups.abs().amax(-1, keepdim=True)
    # Half of a step: 2**-4 of the value, or of the smallest normal code (2**-6) of the group's scale.
    scale = (top / 448).clamp_min(1e-4) * (2 if power_of_two else 1)
    limit = torch.maximum(groups.abs() * 2**-4, scale * 2**-10)
    assert bool(((groups - decoded).abs() <= limit).all())
    scales = rows[..., 512:528].contiguous().view(torch.float32)
    if power_of_two:
        assert bool((torch.frexp(scales).mantissa == 0.5).all())
        assert bool((scales * 448 >= top[..., 0]).all())
        assert torch.equal(unpack_fp8(rows), back.bfloat16()) and torch.equal(unpack_fp8(rows).float(), back)
    assert torch.equal(unpack_fp8(rows.view(torch.float8_e4m3fn)), unpack_fp8(rows))


def test_fp8_scales_that_are_powers_of_two_already_stay() -> None:
    top = torch.tensor([448.0, 449.0, 56.0, 1e-9])
    kv = torch.zeros(576)
    kv[[5, 130, 300, 400]] = top
    scales = pack_fp8(kv)[512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, torch.tensor([1.0, 2.0, 2**-3, 2**-13]))  # 2**-13: the first power above 1e-4


def test_fp8_layout_byte_by_byte() -> None:
    """One row written by hand from the layout's description."""
    row = bytearray(FP8_ROW)
    row[0], row[128], row[511] = 0x38, 0xC0, 0x7E  # e4m3 codes of 1, -2 and 448
    for group, scale in enumerate((0.5, 3.0, 1.0, 0.25)):
        row[512 + 4 * group : 516 + 4 * group] = torch.tensor([scale]).view(torch.uint8).tolist()
    row[528:530] = torch.tensor([1.5], dtype=torch.bfloat16).view(torch.uint8).tolist()
    row[654:656] = torch.tensor([-7.0], dtype=torch.bfloat16).view(torch.uint8).tolist()
    kv = unpack_fp8(torch.frombuffer(row, dtype=torch.uint8), torch.float64)
    assert kv.shape == (576,)
    want = torch.zeros(576, dtype=torch.float64)
    want[[0, 128, 511, 512, 575]] = torch.tensor([0.5, -6.0, 112.0, 1.5, -7.0], dtype=torch.float64)
    assert torch.equal(kv, want)


@pytest.mark.parametrize("sparse", [False, True])
def test_decode_from_fp8_is_decode_from_what_the_rows_hold(sparse: bool) -> None:
    kv, q = draw(6, 16, 1, 576, seed=3), draw(2, 2, 3, 576).bfloat16()
    rows = pack_fp8(kv)
    table = torch.tensor([[5, 0, 2], [1, 3, 4]], dtype=torch.int32)
    options: dict[str, object] = {
        "cache_seqlens": torch.tensor([33, 48]),
        "block_table": table,
        "causal": True,
    }
    if sparse:
        options = {"indices": torch.randint(-1, 96, (2, 2, 7), generator=torch.Generator().manual_seed(1))}
    got = decode_mla(q, rows, scale=0.05, d_v=512, **options)
    want = decode_mla(q, unpack_fp8(rows), scale=0.05, d_v=512, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    true, _ = decode_mla(q.double(), kv, scale=0.05, d_v=512, **options)
    assert float((got[0].double() - true).norm() / true.norm()) < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": None}, "needs cache_seqlens"),
        ({"cache_seqlens": torch.ones(3)}, r"cache_seqlens \[3\] for 2 requests"),
        ({"block_table": torch.zeros(1, 4, dtype=torch.int32)}, r"block_table \[1, 4\] for 2 requests"),
        ({"topk_length": torch.ones(2)}, "topk_length needs indices"),
        ({"indices": torch.zeros(2, 1, 4), "causal": True}, "causal is for dense attention"),
        ({"indices": torch.zeros(2, 2, 4)}, r"indices \[2, 2, 4\] for 2 x 1 tokens"),
        ({"kv_cache": torch.zeros(3, 8, 20)}, "a contiguous cache of 3 requests for 2"),
        ({"kv_cache": torch.zeros(2, 8, 21)}, "q has 20 dims a head and the cache 21"),
        ({"kv_cache": torch.zeros(2, 8, 20).double()}, "q is torch.float32 and the cache torch.float64"),
        ({"kv_cache": torch.zeros(2, 8, 656, dtype=torch.uint8)}, r"FP8 rows hold 512 \+ 64 dims"),
        ({"attn_sink": torch.zeros(4)}, r"attn_sink \[4\] for 3 heads"),
        ({"d_v": 21}, "d_v is 21"),
        ({"cache_seqlens": torch.ones(2)}, "cache_seqlens is torch.float32, expected int32 or int64"),
        ({"indices": torch.zeros(2, 1, 4)}, "indices is torch.float32, expected int32 or int64"),
        ({"cache_seqlens": torch.ones(2).int().to("meta")}, "cache_seqlens is on meta, and not on cpu"),
    ],
)
def test_arguments_that_contradict_each_other(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "kv_cache": torch.zeros(2, 8, 20),
        "cache_seqlens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
        "d_v": 16,
    }
    with pytest.raises(ValueError, match=message):
        decode_mla(torch.zeros(2, 1, 3, 20), **(arguments | change))


def test_dense_spans_against_torch() -> None:
    q, kv = draw(9, 3, 20), draw(31, 20, seed=1)
    starts = torch.tensor([0, 0, 3, 10, 20, 7, -4, 30, 12])
    ends = torch.tensor([1, 31, 9, 10, 15, 40, 2, 31, 13])
    kv[25] = 0
    mask = (torch.arange(31) >= starts[:, None]) & (torch.arange(31) < ends[:, None])
    seen = mask.any(1)
    out, lse = dense_mla(q, kv, 0.3, starts=starts, ends=ends, d_v=16)
    want, want_lse = attention(q[seen], kv, mask[seen], 0.3, 16)
    assert seen.tolist() == [True, True, True, False, False, True, True, True, True]
    assert torch.allclose(out[seen], want, rtol=0, atol=1e-12)
    assert torch.allclose(lse[seen], want_lse, rtol=0, atol=1e-12)
    assert not out[~seen].any() and lse[~seen].isneginf().all()


def test_dense_never_reads_what_no_query_sees() -> None:
    q, kv = draw(3, 2, 20), draw(12, 20, seed=1)
    ends = torch.tensor([4, 6, 5])
    want = dense_mla(q, kv, 0.3, starts=torch.tensor([1, 1, 2]), ends=ends, d_v=16)
    kv[0], kv[6:] = NAN, NAN
    got = dense_mla(q, kv, 0.3, starts=torch.tensor([1, 1, 2]), ends=ends, d_v=16)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_rows_are_ends_less_one() -> None:
    q, kv, rows = draw(3, 2, 20), draw(12, 20, seed=1), torch.tensor([4, 6, 11])
    by_rows, by_ends = (
        dense_mla(q, kv, 1.0, d_v=16, **span) for span in ({"rows_S": rows}, {"ends": rows + 1})
    )
    assert all(torch.equal(a, b) for a, b in zip(by_rows, by_ends, strict=True))
    with pytest.raises(ValueError, match="pass one of them"):
        dense_mla(q, kv, 1.0, rows_S=rows, ends=rows + 1, d_v=16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_spans_of_packed_sequences(dtype: torch.dtype) -> None:
    cu_q = torch.tensor([0, 2, 2, 5, 6], dtype=dtype)
    starts, ends = causal_spans(cu_q, queries=8)
    assert starts.tolist()[:6] == [0, 0, 2, 2, 2, 5] and ends.tolist()[:6] == [1, 2, 3, 4, 5, 6]
    assert bool((starts[6:] >= ends[6:]).all()) and starts.dtype == ends.dtype == torch.int32
    cu_k = torch.tensor([0, 5, 7, 8, 20], dtype=dtype)  # the third has fewer keys than queries
    starts, ends = causal_spans(cu_q, cu_k, queries=6)
    assert starts.tolist() == [0, 0, 7, 7, 7, 8] and ends.tolist() == [4, 5, 7, 7, 8, 20]


def test_packed_sequences_equal_one_at_a_time() -> None:
    counts, keys = [3, 1, 6], [9, 4, 6]
    q, kv = draw(10, 2, 20), draw(19, 20, seed=1)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in (counts, keys))
    starts, ends = causal_spans(cu_q, cu_k, queries=10)
    out, _ = dense_mla(q, kv, 0.5, starts=starts, ends=ends, d_v=16)
    for n in range(3):
        part, _ = dense_mla(q[cu_q[n] : cu_q[n + 1]], kv[cu_k[n] : cu_k[n + 1]], 0.5, d_v=16)
        assert torch.allclose(out[cu_q[n] : cu_q[n + 1]], part, rtol=0, atol=1e-13)


def test_sparse_and_dense_sinks_agree() -> None:
    q, kv, sink = draw(4, 3, 20), draw(9, 20, seed=1), torch.tensor([0.5, 2.0, -1.0])
    every = torch.arange(9).expand(4, -1)
    dense = dense_mla(q, kv, 0.4, ends=torch.full((4,), 9), attn_sink=sink, d_v=16)
    listed = sparse_mla(q, kv, every, 0.4, attn_sink=sink, d_v=16)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(dense, listed, strict=True))
