"""The reference's own contract: what ``sparse_mla`` does at the edges, tensor parallelism, chunks, dtypes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_convert.errors import BadInputError
from mla_convert.runtime import numerics
from mla_convert.runtime.reference import (
    AttentionWeights,
    absorbed_attention,
    absorbed_mla,
    combine_kv_rows,
    dense_mla,
    output_projection,
    project,
    shard_rows,
    sparse_mla,
    split_kv_rows,
    standard_attention,
    standard_mla,
)
from mla_convert.runtime.spec import AttentionSpec, RopeSpec

SPEC = AttentionSpec(
    hidden=64,
    heads=4,
    nope=12,
    rope=8,
    v=20,
    rank=32,
    q_rank=24,
    rms_eps=1e-6,
    softmax_scale=0.2,
    rope_spec=RopeSpec(8, interleaved=True, theta=10000.0),
)
NO_Q_LORA = replace(SPEC, q_rank=None)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make_weights(spec: AttentionSpec, bias: bool = False) -> tuple[AttentionWeights, Tensor]:
    """Random weights and a combined kv_b with outputs of unit size."""
    count = iter(range(1, 100))

    def linear(rows: int, columns: int) -> Tensor:
        return draw(rows, columns, seed=next(count)) * columns**-0.5

    q_rows = spec.heads * spec.qk_dim
    lora = spec.q_rank is not None
    weights = AttentionWeights(
        q=None if lora else linear(q_rows, spec.hidden),
        q_a=linear(spec.q_rank, spec.hidden) if lora else None,
        q_a_norm=1 + 0.1 * draw(spec.q_rank, seed=next(count)) if lora else None,
        q_b=linear(q_rows, spec.q_rank) if lora else None,
        q_a_bias=draw(spec.q_rank, seed=next(count)) if lora and bias else None,
        kv_a=linear(spec.kv_dim, spec.hidden),
        kv_a_norm=1 + 0.1 * draw(spec.rank, seed=next(count)),
        kv_a_bias=draw(spec.kv_dim, seed=next(count)) if bias else None,
        o=linear(spec.hidden, spec.heads * spec.v),
        o_bias=draw(spec.hidden, seed=next(count)) if bias else None,
    )
    return weights, linear(spec.heads * (spec.nope + spec.v), spec.rank)


def random_indices(queries: int, keys: int, tokens: int, seed: int = 0) -> Tensor:
    """Distinct keys for each query, some of them after it, some replaced by -1."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(tokens, generator=generator)[:keys] for _ in range(queries)]
    indices = torch.stack(rows).to(torch.int32)
    return indices.masked_fill(torch.rand(indices.shape, generator=generator) < 0.2, -1)


def naive(q: Tensor, kv: Tensor, indices: list[list[int]], scale: float, d_v: int) -> tuple[Tensor, Tensor]:
    """Attention over explicit lists of valid keys, one query and head at a time."""
    out, lse = (
        torch.zeros(*q.shape[:2], d_v, dtype=q.dtype),
        torch.full(q.shape[:2], -math.inf, dtype=q.dtype),
    )
    for s, keys in enumerate(indices):
        for h in range(q.shape[1]):
            logits = [float(q[s, h] @ kv[key]) * scale for key in keys]
            if logits:
                total = sum(map(math.exp, logits))
                lse[s, h] = math.log(total)
                for key, logit in zip(keys, logits, strict=True):
                    out[s, h] += math.exp(logit) / total * kv[key, :d_v]
    return out, lse


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> bool:
    return torch.allclose(got, want.to(got.dtype), rtol=0, atol=tolerance * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("packed", [False, True], ids=["flat", "with a head dim"])
def test_sparse_mla_reads_exactly_the_valid_entries(index_dtype: torch.dtype, packed: bool) -> None:
    q, kv = draw(7, 3, 20), draw(6, 20, seed=1)
    indices = [
        [0, 1, 2, -1, 3],  # padding in the middle
        [5, 6, 0, 2**31 - 1, 1],  # beyond the last key
        [2, 2, 4, 2, -7],  # a key three times, a negative index
        [-1, -1, -1, -1, -1],
        [6, 7, 8, 9, -1],
        [0, 1, 2, 3, 4],
        [3, -1, 5, 5, 9],
    ]
    valid = [[0, 1, 2, 3], [5, 0, 1], [2, 2, 4, 2], [], [], [0, 1, 2, 3, 4], [3, 5, 5]]
    table = torch.tensor(indices, dtype=index_dtype)
    args = (kv[:, None], table[:, None]) if packed else (kv, table)
    out, lse = sparse_mla(q, *args, 0.3, d_v=16)
    want_out, want_lse = naive(q, kv, valid, 0.3, 16)
    assert close(out, want_out)
    assert torch.equal(out[3:5], torch.zeros(2, 3, 16, dtype=torch.float64))
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    assert close(lse[lse.isfinite()], want_lse[want_lse.isfinite()])


def test_topk_length_ends_a_row() -> None:
    q, kv = draw(4, 2, 10), draw(9, 10, seed=1)
    table = torch.tensor([[4, 5, -1, 6], [4, 5, -1, 6], [4, 5, 7, 6], [4, 5, 7, 6]], dtype=torch.int32)
    length = torch.tensor([4, 3, 1, 0], dtype=torch.int32)
    out, lse = sparse_mla(q, kv, table, 1.0, topk_length=length, d_v=8)
    want_out, want_lse = naive(q, kv, [[4, 5, 6], [4, 5], [4], []], 1.0, 8)
    assert close(out, want_out)
    assert close(lse[:3], want_lse[:3]) and lse[3].isneginf().all()


def test_attn_sink_scales_the_output_and_leaves_lse() -> None:
    q, kv = draw(3, 4, 10), draw(9, 10, seed=1)
    table = torch.tensor([[1, 2], [3, -1], [-1, -1]])
    sink = torch.tensor([0.7, -3.0, -math.inf, math.inf], dtype=torch.float64)
    out, lse = sparse_mla(q, kv, table, 1.0, attn_sink=sink, d_v=8)
    plain, plain_lse = sparse_mla(q, kv, table, 1.0, d_v=8)
    assert torch.equal(lse, plain_lse)
    share = lse.exp() / (lse.exp() + sink.exp())
    assert close(out[:2], plain[:2] * share[:2, :, None].nan_to_num())
    assert torch.equal(out[:, 2], plain[:, 2])  # exp(-inf): no sink
    assert not out[2].any() and not out[:, 3].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_are_not_selected_cannot_leak(poison: float) -> None:
    q, kv = draw(3, 2, 10), draw(8, 10, seed=1)
    table = torch.tensor([[1, 2, -1], [3, -1, 9], [-1, -1, -1]])
    want = sparse_mla(q, kv, table, 1.0, d_v=8)
    kv[[0, 4, 5, 6, 7]] = poison  # key 0 is where an invalid index would be clamped to
    got = sparse_mla(q, kv, table, 1.0, d_v=8)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    kv[1] = math.nan  # the check can fail
    assert sparse_mla(q, kv, table, 1.0, d_v=8)[0][0].isnan().all()


def test_fewer_keys_than_entries_and_none_at_all() -> None:
    q, kv = draw(3, 2, 10), draw(2, 10, seed=1)
    table = torch.arange(5).expand(3, -1)
    want_out, want_lse = naive(q, kv, [[0, 1]] * 3, 1.0, 8)
    out, lse = sparse_mla(q, kv, table, 1.0, d_v=8)
    assert close(out, want_out) and close(lse, want_lse)
    for empty in (sparse_mla(q, kv[:0], table, 1.0, d_v=8), sparse_mla(q, kv, table[:, :0], 1.0, d_v=8)):
        assert not empty[0].any() and empty[1].isneginf().all()
    assert sparse_mla(q[:0], kv, table[:0], 1.0, d_v=8)[0].shape == (0, 2, 8)


def test_gradients_of_empty_rows_are_zero() -> None:
    q, kv = draw(3, 2, 10).requires_grad_(), draw(4, 10, seed=1).requires_grad_()
    table = torch.tensor([[1, 2], [-1, -1], [-1, 3]])
    out, _ = sparse_mla(q, kv, table, 1.0, d_v=8)
    out.square().sum().backward()
    assert q.grad.isfinite().all() and kv.grad.isfinite().all()
    assert not q.grad[1].any() and q.grad[0].any() and not kv.grad[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    q, kv, table = draw(5, 2, 10, dtype=dtype), draw(9, 10, seed=1, dtype=dtype), random_indices(5, 6, 9)
    want, want_lse = sparse_mla(q.double(), kv.double(), table, 1.0, d_v=8)
    out, lse = sparse_mla(q, kv, table, 1.0, d_v=8)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert close(out, want, torch.finfo(dtype).eps) and close(lse, want_lse, 1e-6)


def test_dense_is_sparse_over_the_causal_list() -> None:
    q, kv = draw(6, 2, 10), draw(9, 10, seed=1)
    table = torch.arange(9).expand(6, -1).masked_fill(torch.arange(9) > torch.arange(3, 9)[:, None], -1)
    for dense, sparse in zip(dense_mla(q, kv, 0.5, d_v=8), sparse_mla(q, kv, table, 0.5, d_v=8), strict=True):
        assert close(dense, sparse)


@pytest.mark.parametrize("spec", [SPEC, NO_Q_LORA], ids=["q-lora", "q"])
@pytest.mark.parametrize("selected", [False, True], ids=["dense", "sparse"])
def test_absorbed_equals_standard(spec: AttentionSpec, selected: bool) -> None:
    weights, w_kv_b = make_weights(spec, bias=True)
    x, positions = draw(33, spec.hidden), torch.arange(33)
    indices = random_indices(33, 9, 33) if selected else None
    want = standard_mla(x, weights, w_kv_b, spec, positions, indices)
    split = split_kv_rows(w_kv_b, spec)
    assert close(absorbed_mla(x, weights, *split, spec, positions, indices), want)
    kernel = functools.partial(sparse_mla, topk_length=torch.full((33,), 33))
    assert close(absorbed_mla(x, weights, *split, spec, positions, indices, attention=kernel), want)


@pytest.mark.parametrize("selected", [False, True], ids=["dense", "sparse"])
def test_some_queries_against_all_keys(selected: bool) -> None:
    """What context parallelism and decoding need: each rank or step has its own rows."""
    weights, w_kv_b = make_weights(SPEC)
    projected = project(draw(20, SPEC.hidden), weights, SPEC, torch.arange(20))
    indices = random_indices(20, 9, 20) if selected else None
    whole = standard_attention(projected, w_kv_b, SPEC, indices=indices)
    rows = torch.tensor([17, 0, 5, 11])
    some = {"indices": None if indices is None else indices[rows], "rows_S": rows}
    part = projected.take_queries(rows)
    assert torch.equal(part.q_latent_SQ, projected.q_latent_SQ[rows])
    assert close(standard_attention(part, w_kv_b, SPEC, **some), whole[rows])
    assert close(absorbed_attention(part, *split_kv_rows(w_kv_b, SPEC), SPEC, **some), whole[rows])
    last = projected.take_queries(torch.tensor([18, 19]))  # the default: the last rows
    tail = None if indices is None else indices[18:]
    assert close(standard_attention(last, w_kv_b, SPEC, indices=tail), whole[18:])
    assert close(absorbed_attention(last, *split_kv_rows(w_kv_b, SPEC), SPEC, indices=tail), whole[18:])


@pytest.mark.parametrize("spec", [SPEC, NO_Q_LORA], ids=["q-lora", "q"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_sum_to_the_whole(spec: AttentionSpec, world: int) -> None:
    weights, w_kv_b = make_weights(spec, bias=True)
    x, positions, indices = draw(25, spec.hidden), torch.arange(25), random_indices(25, 9, 25)
    want = standard_mla(x, weights, w_kv_b, spec, positions, indices)
    split = split_kv_rows(w_kv_b, spec)
    standard, absorbed = torch.zeros_like(want), torch.zeros_like(want)
    for rank in range(world):
        part, own = spec.shard(rank, world), weights.shard(spec, rank, world)
        own_kv_b = shard_rows(w_kv_b, spec.heads, rank, world)
        own_split = [shard_rows(w, spec.heads, rank, world) for w in split]
        assert all(map(torch.equal, split_kv_rows(own_kv_b, part), own_split))
        standard += standard_mla(x, own, own_kv_b, part, positions, indices)
        absorbed += absorbed_mla(x, own, *own_split, part, positions, indices)
    assert close(standard, want) and close(absorbed, want)


def test_results_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, w_kv_b = make_weights(SPEC)
    projected = project(draw(30, SPEC.hidden), weights, SPEC, torch.arange(30))
    split, indices = split_kv_rows(w_kv_b, SPEC), random_indices(30, 9, 30)
    runs = {}
    for limit in (1 << 27, 3000, 1):
        monkeypatch.setattr(numerics, "CHUNK_ELEMENTS", limit)
        runs[limit] = [
            attend(projected, *kv_b, SPEC, indices=chosen)
            for attend, kv_b in ((standard_attention, (w_kv_b,)), (absorbed_attention, split))
            for chosen in (None, indices)
        ]
    for limit in (3000, 1):
        assert all(map(close, runs[limit], runs[1 << 27]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_kv_rows_split_and_combine_bitwise(dtype: torch.dtype) -> None:
    rows = SPEC.heads * (SPEC.nope + SPEC.v)
    w_kv_b = draw(rows, SPEC.rank).to(dtype)
    w_uk, w_uv = split_kv_rows(w_kv_b, SPEC)
    stride = SPEC.nope + SPEC.v
    head = w_kv_b[2 * stride : 3 * stride].view(torch.uint8)  # head 2: K rows, then V rows
    assert torch.equal(w_uk[2 * SPEC.nope : 3 * SPEC.nope].view(torch.uint8), head[: SPEC.nope])
    assert torch.equal(w_uv[2 * SPEC.v : 3 * SPEC.v].view(torch.uint8), head[SPEC.nope :])
    again = combine_kv_rows(w_uk, w_uv, SPEC)
    assert torch.equal(again.view(torch.uint8), w_kv_b.view(torch.uint8))


def test_weights_that_do_not_fit_are_named() -> None:
    weights, w_kv_b = make_weights(SPEC)
    x, positions = draw(5, SPEC.hidden), torch.arange(5)
    with pytest.raises(BadInputError, match=r"^q_b is missing; the block needs it with shape \[80, 24\]\.$"):
        project(x, replace(weights, q_b=None), SPEC, positions)
    with pytest.raises(
        BadInputError, match=r"^kv_a has shape \[39, 64\]; the block's geometry needs \[40, 64\]"
    ):
        project(x, replace(weights, kv_a=weights.kv_a[1:]), SPEC, positions)
    with pytest.raises(BadInputError, match=r"^kv_b has shape \[127, 32\]"):
        split_kv_rows(w_kv_b[1:], SPEC)
    with pytest.raises(BadInputError, match=r"^k_b has shape \[80, 32\]"):
        combine_kv_rows(*reversed(split_kv_rows(w_kv_b, SPEC)), SPEC)
    with pytest.raises(BadInputError, match=r"^80 rows of 4 heads cannot be cut for rank 0 of 3\.$"):
        shard_rows(weights.q_b, 4, 0, 3)


def test_weights_move_together() -> None:
    weights, _ = make_weights(SPEC, bias=True)
    moved = weights.to(dtype=torch.float32)
    assert moved.q is None and moved.o_bias.dtype == moved.kv_a.dtype == torch.float32
    assert output_projection(draw(3, 4, 20, dtype=torch.float32), moved).dtype == torch.float32


def test_no_queries_and_no_tokens() -> None:
    weights, w_kv_b = make_weights(SPEC)
    nothing = draw(0, SPEC.hidden)
    positions = torch.arange(0)
    assert standard_mla(nothing, weights, w_kv_b, SPEC, positions).shape == (0, SPEC.hidden)
    halves = split_kv_rows(w_kv_b, SPEC)
    assert absorbed_mla(nothing, weights, *halves, SPEC, positions).shape == (0, SPEC.hidden)
