"""Top-k, the FP8 indexer and chunked selection on a Hopper GPU: keys exactly those of a stable sort of float64.

Also a script, for a GPU host without pytest: ``python tests/test_selection_gpu.py``.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from mla_convert.runtime import reference
from mla_convert.runtime.dispatch import available, resolve_backend

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

INF, NAN = math.inf, math.nan
SHARED, ALONE = 3, 140  # rows that several thread blocks share if they are long, rows that have one each


def sorted_topk(logits: Tensor, k: int, starts: Tensor | None, ends: Tensor | None) -> Tensor:
    """The definition, by torch's stable sort of float64, where a denormal is none and 0.0 is added to -0.0."""
    logits = (logits.double() + 0.0).masked_fill(logits.isnan(), NAN)
    behind = logits.shape[1]
    keys = torch.arange(behind, device="cuda")
    if starts is not None:
        logits = logits.masked_fill(keys < starts[:, None], -INF)
    if ends is not None:
        logits = logits.masked_fill(keys >= ends[:, None], -INF)
    values, order = logits.sort(dim=1, descending=True, stable=True)
    chosen = order[:, :k].masked_fill(values[:, :k].isneginf(), behind).sort(1).values
    return chosen.masked_fill(chosen == behind, -1).int()


def run_topk(logits: Tensor, k: int, starts: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    from mla_convert.runtime.kernels.topk import select_topk

    shape = (logits.shape[0], min(k, logits.shape[1]))
    del_me = torch.full(
        shape, 7_000_000, dtype=torch.int32, device="cuda"
    )  # what the allocator hands out next
    del del_me
    chosen = select_topk(logits, k, starts=starts, ends=ends)
    assert chosen.shape == shape and chosen.dtype == torch.int32
    want = sorted_topk(logits, k, starts, ends)
    different = (chosen != want).sum(1)
    assert not different.any(), (
        f"{int((different > 0).sum())} rows differ, row {int(different.argmax())} most"
    )
    return chosen


def adversarial(kind: str, rows: int, tokens: int) -> Tensor:
    """Rows that are hard for a radix selection, or for its idea of equal."""
    random = torch.randn(rows, tokens, device="cuda")
    if kind == "random":
        return random
    if kind == "equal":
        return torch.full_like(random, -2.5)
    if kind == "few values":
        return torch.randint(-1, 2, random.shape, device="cuda").float()
    if kind == "one bucket":  # far more than the list in shared memory holds share 12 and 22 leading bits
        return (
            1
            + torch.rand_like(random) * torch.tensor([1e-5, 0.1], device="cuda")[torch.arange(rows) % 2, None]
        )
    if kind == "neighbours":  # adjacent float32 numbers
        return (torch.randint(0, 3, random.shape, device="cuda") + 1065353216).int().view(torch.float32)
    if kind == "zeros":
        return torch.where(random < 0, -0.0, 0.0)
    if kind == "denormals":
        return (
            torch.randint(-40, 40, random.shape, device="cuda")
            * torch.tensor(1.4e-45, device="cuda").double()
        )
    if kind == "huge":
        return (random * 1e38).clamp(-3.4e38, 3.4e38).masked_fill(random > 3, INF)
    if kind == "holes":
        return random.masked_fill(torch.rand_like(random) < 0.7, -INF)
    if kind == "nan":
        signs = torch.where(random < 0, -NAN, NAN)
        return torch.where(torch.rand_like(random) < torch.rand(rows, 1, device="cuda") / 5, signs, random)
    if kind == "descending":
        return -torch.arange(tokens, device="cuda").float().expand(rows, -1).contiguous()
    if kind == "negative":
        return -random.abs() - 100
    raise AssertionError(kind)


KINDS = [
    "random",
    "equal",
    "few values",
    "one bucket",
    "neighbours",
    "zeros",
    "denormals",
    "huge",
    "holes",
    "nan",
]
KINDS += ["descending", "negative"]


@pytest.mark.parametrize("rows", [SHARED, ALONE])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_adversarial(kind: str, rows: int) -> None:
    for tokens, k in ((17_000, 2048), (20_000, 300)):
        run_topk(adversarial(kind, rows, tokens).float(), k)


@pytest.mark.parametrize("k", [1, 2, 31, 64, 2047, 2048, 4097, 9000, 12_345, 20_000])
def test_topk_every_k(k: int) -> None:
    for rows, tokens in ((4, 12_345), (150, 9001)):
        run_topk(torch.randn(rows, tokens, device="cuda"), k)
        run_topk(torch.randint(0, 50, (rows, tokens), device="cuda").float(), k)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 511, 4095, 4096, 4097, 16_383, 131_071, 131_073, 300_001])
def test_topk_every_length(tokens: int) -> None:
    for rows in (1, ALONE) if tokens < 200_000 else (1, 5):
        run_topk(torch.randn(rows, tokens, device="cuda"), 2048)
    run_topk(torch.zeros(2, tokens, device="cuda"), 1500)


def test_topk_of_a_long_row_in_windows() -> None:
    """So many of so many that parts save nothing: one thread block walks several windows of marks."""
    from mla_convert.runtime.kernels.topk import parts_of

    for k in (200_000, 400_000):
        assert parts_of(2, 400_123, k) == 1
        run_topk(torch.randn(2, 400_123, device="cuda"), k)
        run_topk(torch.randint(0, 9, (2, 400_123), device="cuda").float(), k)


def test_topk_beyond_20_bits_of_place() -> None:
    run_topk(torch.zeros(1, 3_000_000, device="cuda"), 1_200_000)
    run_topk(torch.randint(0, 2, (2, 1_500_000), device="cuda").float(), 900_000)


@pytest.mark.parametrize("at", [0, 1, -1])
def test_topk_tie_at_the_threshold(at: int) -> None:
    """One more, and one less, of the threshold's value than are selected; and a list that is exactly full."""
    for equal in (2560, 2561, 5000, 4096):
        logits = torch.rand(ALONE, 30_000, device="cuda") - 2
        logits[:, :1000] = 3.0
        logits[:, 12_000 : 12_000 + equal] = 1.0
        shuffled = logits[:, torch.randperm(30_000, device="cuda")]
        run_topk(shuffled, 1000 + equal + at)
        run_topk(shuffled[:SHARED], 1000 + equal // 2)


@pytest.mark.parametrize("rows", [SHARED, ALONE])
def test_topk_ranges(rows: int) -> None:
    logits = torch.randn(rows, 20_011, device="cuda")
    starts = torch.randint(-500, 20_500, (rows,), device="cuda")
    ends = starts + torch.randint(-3000, 20_000, (rows,), device="cuda")
    run_topk(logits, 1024, starts, ends)
    run_topk(logits, 1024, starts.int())
    run_topk(logits, 1024, None, ends.int())


def test_topk_does_not_read_outside_the_range() -> None:
    logits = torch.randn(ALONE, 5000, device="cuda")
    starts, ends = torch.full((2, ALONE), 1000, device="cuda")
    ends = ends + 3000
    want = run_topk(logits, 500, starts, ends)
    logits[:, :1000] = logits[:, 4000:] = NAN
    assert torch.equal(run_topk(logits, 500, starts, ends), want)


def test_topk_of_strided_rows() -> None:
    whole = torch.randn(300, 10_007, device="cuda")
    run_topk(whole[::2, 3:9000], 700)
    run_topk(whole.t()[:200, :100], 50)
    run_topk(whole[:1].expand(6, -1), 700)
    run_topk(whole[:SHARED, 1:], 10)


def test_topk_beyond_int32_offsets() -> None:
    from mla_convert.runtime.kernels.topk import select_topk

    logits = torch.randn(40_000, 60_000, device="cuda")
    rows = torch.tensor([0, 1, 35_791, 35_792, 39_999], device="cuda")
    chosen = select_topk(logits, 2048)
    assert torch.equal(chosen[rows], sorted_topk(logits[rows], 2048, None, None))


def test_topk_two_runs_are_equal_and_graphs_work() -> None:
    from mla_convert.runtime.kernels.topk import select_topk

    for rows in (2, ALONE):
        logits = torch.randint(0, 4, (rows, 30_000), device="cuda").float()
        want = select_topk(logits, 2048)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = select_topk(logits, 2048)
        for _ in range(3):
            got.fill_(-5)
            graph.replay()
            assert torch.equal(got, want)


def test_topk_of_nothing() -> None:
    from mla_convert.runtime.kernels.topk import select_topk

    assert select_topk(torch.zeros(0, 9, device="cuda"), 4).shape == (0, 4)
    assert select_topk(torch.zeros(3, 0, device="cuda"), 4).shape == (3, 0)


def indexer_case(queries: int, keys: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(queries, heads, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(keys, dim, device="cuda", dtype=torch.bfloat16)
    return q, k, torch.randn(queries, heads, device="cuda")


@pytest.mark.parametrize(
    ("heads", "dim", "queries", "keys"),
    [
        (64, 128, 77, 999),
        (64, 128, 1, 5000),
        (64, 128, 2, 130),
        (32, 64, 50, 300),
        (4, 20, 90, 200),
        (128, 128, 9, 257),
    ],
)
def test_fp8_logits(heads: int, dim: int, queries: int, keys: int) -> None:
    """Against float64 from the same codes and scales, and roughly against the numbers that were quantised."""
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    q, k, weights = indexer_case(queries, keys, heads, dim)
    q, k = q * torch.rand(queries, heads, 1, device="cuda") * 30, k * torch.rand(keys, 1, device="cuda")
    (q8, q_scale), (k8, k_scale) = reference.quantise_rows(q), reference.quantise_rows(k)
    ends = torch.randint(0, keys + 1, (queries,), device="cuda")
    options = {"ends": ends, "q_scale": q_scale, "k_scale": k_scale}
    logits = indexer_logits(q8, k8, weights, **options)
    want = reference.indexer_logits(
        q8.double(),
        k8.double(),
        weights,
        **options | {"q_scale": q_scale.double(), "k_scale": k_scale.double()},
    )
    assert torch.equal(logits.isneginf(), want.isneginf())
    seen = ~want.isneginf()
    got, want = logits[seen].double(), want[seen]
    assert 1 - float((2 * got * want).sum() / (got.square() + want.square()).sum()) < 3e-7
    unquantised = reference.indexer_logits(q.double(), k.double(), weights, ends=ends)[seen]
    assert 1 - float((2 * got * unquantised).sum() / (got.square() + unquantised.square()).sum()) < 3e-3


def test_key_scales_with_bfloat16() -> None:
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    q, k, weights = indexer_case(70, 500, 64, 128)
    q_scale, k_scale = torch.rand(70, 64, device="cuda") + 0.5, torch.rand(500, device="cuda") + 0.5
    got = indexer_logits(q, k, weights, q_scale=q_scale, k_scale=k_scale)
    want = reference.indexer_logits(
        q.double(), k.double(), weights, q_scale=q_scale.double(), k_scale=k_scale.double()
    )
    assert float((got - want).abs().max()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("queries", [1, 700])
def test_chunks_select_what_the_whole_selects(
    queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a few queries, with a workspace full of NaN: nothing outside the ranges may be looked at."""
    from mla_convert.runtime.kernels import indexer_select
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits

    keys = 3000
    q, k, weights = indexer_case(queries, keys, 64, 128)
    options: dict[str, Tensor] = {}
    if dtype != torch.bfloat16:
        q, options["q_scale"] = reference.quantise_rows(q)
        k, options["k_scale"] = reference.quantise_rows(k)
    starts = torch.randint(0, 500, (queries,), device="cuda")
    options |= {"starts": starts, "ends": starts + torch.randint(0, keys, (queries,), device="cuda")}
    want = sorted_topk(indexer_logits(q, k, weights, **options), 256, None, None)
    for rows in (1, 96, queries):
        monkeypatch.setattr(indexer_select, "WORKSPACE_BYTES", rows * keys * 4)
        poison = torch.full((min(rows, queries), keys), NAN, device="cuda")
        del poison
        assert torch.equal(indexer_select.indexer_select(q, k, weights, 256, **options), want)


def test_selection_by_dispatch() -> None:
    backend = resolve_backend("auto", "cuda")
    q, k, weights = indexer_case(40, 600, 64, 128)
    ends = torch.arange(561, 601, device="cuda")
    q.requires_grad_()
    chosen = backend.indexer_select(q, k, weights, 128, ends=ends)
    logits = reference.indexer_logits(q.detach().double(), k.double(), weights, ends=ends)
    expected = reference.select_topk(logits, 128)
    assert reference.selection_agreement(logits, chosen, expected, 1e-3).agrees
    assert torch.equal(backend.select_topk(logits.float(), 128), reference.select_topk(logits.float(), 128))
    backend.select_topk(logits, 128)
    assert backend.ran == {
        "indexer_select: tilelang": 1,
        "select_topk: tilelang": 1,
        "select_topk: reference, dtype float64 is not float32": 1,
    }


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *(["-x"] if os.environ.get("FAIL_FAST") else [])]))
