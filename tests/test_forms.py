"""Forms of a block's attention: equal results, the choice between them, and what is said about it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_convert.runtime import forms
from mla_convert.runtime.dispatch import resolve_backend
from mla_convert.runtime.forms import attend, choose_form, multi_head, sum_of_spans
from mla_convert.runtime.reference import Projected, absorbed_attention, combine_kv_rows, standard_attention
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
DEEPSEEK = replace(SPEC, hidden=7168, heads=128, nope=128, rope=64, v=128, rank=512, q_rank=1536)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(queries: int, tokens: int) -> tuple[Projected, Tensor, Tensor]:
    projected = Projected(
        draw(queries, SPEC.heads, SPEC.nope, seed=1),
        draw(queries, SPEC.heads, SPEC.rope, seed=2),
        draw(tokens, SPEC.rank, seed=3),
        draw(tokens, SPEC.rope, seed=4),
    )
    w_uk = draw(SPEC.heads * SPEC.nope, SPEC.rank, seed=5) / 6
    return projected, w_uk, draw(SPEC.heads * SPEC.v, SPEC.rank, seed=6) / 6


@pytest.mark.parametrize("name", ["multi-head", "absorbed dense"])
@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (9, 9), (1, 30), (5, 30)])
def test_dense_forms_are_standard_attention(
    queries: int, tokens: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    projected, w_uk, w_uv = case(queries, tokens)
    monkeypatch.setattr(forms, "choose_form", lambda *sizes, topk: forms.Form(name, "a test said so"))
    backend = resolve_backend("reference", "cpu")
    got = attend(backend, projected, w_uk, w_uv, SPEC, topk=40)
    w_kv_b = combine_kv_rows(w_uk, w_uv, SPEC)
    want = standard_attention(projected, w_kv_b, SPEC)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert backend.ran[f"attention: {name}"] == 1
    assert f"The {name} form was last chosen: a test said so." in backend.explain()


@pytest.mark.parametrize(("tokens", "chosen"), [(7, "multi-head"), (30, "absorbed sparse")])
def test_a_selection_counts_where_it_leaves_tokens_out(tokens: int, chosen: str) -> None:
    projected, w_uk, w_uv = case(tokens, tokens)
    rows = torch.arange(tokens)[:, None]
    scores = draw(tokens, tokens, seed=7).masked_fill(torch.arange(tokens) > rows, -torch.inf)
    best = scores.topk(min(8, tokens))
    indices = torch.full((tokens, 8), -1)
    indices[:, : best.indices.shape[1]] = best.indices.masked_fill(best.values.isneginf(), -1)
    backend = resolve_backend("reference", "cpu")
    got = attend(backend, projected, w_uk, w_uv, SPEC, indices=indices)
    want = absorbed_attention(projected, w_uk, w_uv, SPEC, indices=indices)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert backend.ran[f"attention: {chosen}"] == 1


def test_entries_after_the_query_are_dropped() -> None:
    projected, w_uk, w_uv = case(6, 30)
    indices = torch.stack(
        [torch.randperm(30, generator=torch.Generator().manual_seed(s))[:9] for s in range(6)]
    )
    got = attend(resolve_backend("reference", "cpu"), projected, w_uk, w_uv, SPEC, indices=indices)
    assert bool((indices > torch.arange(24, 30)[:, None]).any())
    want = standard_attention(projected, combine_kv_rows(w_uk, w_uv, SPEC), SPEC, indices=indices)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_more_tokens_than_topk_need_the_selection() -> None:
    projected, w_uk, w_uv = case(30, 30)
    with pytest.raises(ValueError, match="30 tokens are more than top-k 8"):
        attend(resolve_backend("reference", "cpu"), projected, w_uk, w_uv, SPEC, topk=8)


def test_multi_head_has_gradients() -> None:
    projected, w_uk, w_uv = case(5, 5)
    w_uk.requires_grad_()
    multi_head(projected, w_uk, w_uv, SPEC).sum().backward()
    assert w_uk.grad is not None and w_uk.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("queries", "tokens", "topk", "chosen"),
    [
        (2048, 2048, 2048, "multi-head"),  # top-k selects everything
        (4096, 4096, None, "multi-head"),
        (32768, 32768, 2048, "absorbed sparse"),
        (2049, 2049, 2048, "absorbed sparse"),  # the selection decides, not the cost
        (1, 2000, 2048, "absorbed dense"),  # nothing to expand for one query
        (1, 100_000, 2048, "absorbed sparse"),
        (64, 32768, None, "absorbed dense"),
        (4096, 8192, None, "multi-head"),
    ],
)
def test_the_cheapest_form_is_chosen(queries: int, tokens: int, topk: int | None, chosen: str) -> None:
    assert choose_form(DEEPSEEK, queries, tokens, topk=topk).name == chosen


def test_the_reason_has_the_numbers() -> None:
    # 2 * 128 * 320 * 8390656 pairs + 2 * 4096 * 128 * 512 * 256; 2 * 128 * 1088 * 8390656 + the same.
    form = choose_form(DEEPSEEK, 4096, 4096)
    assert form.reason == "4096 queries and 4096 tokens take 825 GFLOP so and 2.47 TFLOP absorbed dense"
    form = choose_form(DEEPSEEK, 1, 4096, topk=2048)
    assert form.reason == "1 queries and 4096 tokens take 604 MFLOP so (top-k 2048 leaves tokens out)"


def test_pairs_are_counted_one_by_one() -> None:
    for queries, tokens, most in itertools.product(range(6), range(9), range(1, 10)):
        if queries <= tokens:
            spans = [min(tokens - queries + s + 1, most) for s in range(queries)]
            assert sum_of_spans(queries, tokens, most) == sum(spans)
