"""Forms of a block's attention: equal results, the choice between them, and what is said about it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from blocks import SPARSE, error, gradients, make, packed_input, recombined
from test_module import GATE, check_gradients
from test_reference import SPEC, draw
from torch import Tensor

from mla_convert.runtime import forms
from mla_convert.runtime.forms import choose_form
from mla_convert.runtime.module import AbsorbedMLA, LatentCache, StandardMLA
from mla_convert.runtime.tokens import Tokens, place_in_cache, place_tokens

CPU = torch.device("cpu")
DEEPSEEK = replace(SPEC, hidden=7168, heads=128, nope=128, rope=64, v=128, rank=512, q_rank=1536)


def behind(past: int, new: int, sequences: int = 1) -> Tokens:
    """So many new tokens of each sequence behind those of a cache."""
    return place_in_cache([past] * sequences, [new] * sequences, False, past + new, CPU)


def chosen(block: AbsorbedMLA) -> set[str]:
    return set(block.backend("cpu").forms)


def whole(*lengths: int) -> Tokens:
    return place_tokens(lengths, True, 0, 1, CPU)


@pytest.mark.parametrize("shape", ["sbhd", "packed"])
def test_multi_head_equals_standard_and_so_do_its_gradients(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "CALL", 0)  # sequences of many sizes, each on its own
    x, given = (draw(30, 3, SPEC.hidden, seed=7), {}) if shape == "sbhd" else packed_input()
    given = given if isinstance(given, dict) else {"cu_seqlens": given}
    absorbed = make(AbsorbedMLA, SPEC)
    output, want = gradients(make(StandardMLA, SPEC), x, **given)
    got_output, got = gradients(absorbed, x, **given)
    assert chosen(absorbed) == {"multi-head"} and absorbed.backend("cpu").ran == {"multi_head: torch": 1}
    assert error(got_output, output) <= GATE
    check_gradients(recombined(got, SPEC), want)


def test_multi_head_behind_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = make(AbsorbedMLA, SPEC), draw(60, 2, SPEC.hidden, seed=7)
    with torch.no_grad():
        want = make(StandardMLA, SPEC)(x)[0]
        cache = LatentCache(SPEC, 2, 70, dtype=torch.float64)
        got = torch.cat([block(part, cache=cache)[0] for part in x.split((20, 40))])
    assert chosen(block) == {"multi-head"}
    assert error(got, want) <= 1e-13


def test_a_sequence_no_longer_than_topk_may_be_multi_head() -> None:
    block, x = make(AbsorbedMLA, SPARSE), draw(6, 2, SPEC.hidden, seed=7)
    output, indices = block(x)
    assert indices is None and chosen(block) == {"multi-head"}
    assert error(output, make(StandardMLA, SPARSE)(x)[0]) <= 1e-13
    block(draw(7, 2, SPEC.hidden, seed=7))
    assert chosen(block) == {"multi-head", "absorbed sparse"}
    assert (
        "The absorbed sparse form was last chosen: 6 tokens are listed for each query."
        in block.backend("cpu").explain()
    )


def test_lists_are_heeded_however_short_the_sequence() -> None:
    block, x = make(AbsorbedMLA, SPEC), draw(5, 1, SPEC.hidden, seed=7)
    first: Tensor = torch.zeros(5, 1, 9, dtype=torch.int32) - 1
    first[..., 0] = 0
    assert error(block(x, indices=first)[0], block(x)[0]) > 1e-3
    assert chosen(block) == {"absorbed sparse", "multi-head"}


def test_the_absorbed_form_can_be_asked_for() -> None:
    block, x = make(AbsorbedMLA, SPEC), draw(30, 2, SPEC.hidden, seed=7)
    want = block(x)[0]
    block.form = "absorbed"
    assert error(block(x)[0], want) <= 1e-13
    assert (
        "The absorbed dense form was last chosen: the absorbed form was asked for."
        in block.backend("cpu").explain()
    )


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (whole(4096), "multi-head"),
        (whole(300), "multi-head"),
        (behind(1999, 1), "absorbed dense"),  # nothing to expand for one query
        (behind(32768, 64), "absorbed dense"),
        (behind(4096, 4096), "multi-head"),
        (behind(4096, 4096, 8), "multi-head"),  # of one size: one call
        (behind(100_000, 4096), "absorbed dense"),  # too large a mask
        (whole(*range(1, 60)), "absorbed dense"),  # too many calls
        (whole(*range(4000, 4030)), "multi-head"),
        (place_tokens((8192,), True, 1, 4, CPU), "multi-head"),  # a quarter of the queries, all of the keys
        (place_tokens((32768,), True, 1, 2, CPU), "absorbed dense"),
    ],
)
def test_the_cheapest_form_is_chosen(tokens: Tokens, name: str) -> None:
    assert choose_form(DEEPSEEK, tokens).name == name


def test_the_reason_has_the_numbers() -> None:
    # 2 * 128 * 320 * 8390656 pairs + 2 * 4096 * 128 * 512 * 256; 2 * 128 * 1088 * 8390656 + the same.
    form = choose_form(DEEPSEEK, whole(4096))
    assert form.reason == "4096 queries and 4096 tokens take 825 GFLOP so and 2.47 TFLOP absorbed"
    form = choose_form(DEEPSEEK, behind(4095, 1))
    assert form.reason == "1 queries and 4096 tokens take 1.17 GFLOP so and 138 GFLOP multi-head"


@pytest.mark.parametrize("world", [1, 2])
def test_pairs_are_counted_one_by_one(world: int) -> None:
    for lengths, rank in itertools.product([(4,), (8, 4)], range(world)):
        tokens = place_tokens(lengths, True, rank, world, CPU)
        seen = [int((tokens.positions_S[segment.queries] + 1).sum()) for segment in tokens.segments]
        assert [segment.pairs for segment in tokens.segments] == seen
    assert [segment.pairs for segment in behind(3, 2, 2).segments] == [9, 9]
