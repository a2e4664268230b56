"""The attention blocks with caches: prefill and decode equal the whole."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from blocks import LENGTHS, SPARSE, SPECS, error, make, packed_input
from test_reference import SPEC, draw

from mla_convert.errors import BadInputError, CannotError
from mla_convert.runtime.block import MultiLatentAttention
from mla_convert.runtime.module import AbsorbedMLA, LatentCache, StandardMLA


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("steps", [(12, 1, 1, 1, 1), (3, 1, 9, 3), (16,)])
def test_prefill_and_decode_equal_the_whole(
    kind: type[MultiLatentAttention], name: str, steps: tuple[int, ...]
) -> None:
    spec, block = SPECS[name], make(kind, SPECS[name])
    x = draw(sum(steps), 3, spec.hidden, seed=7)
    with torch.no_grad():
        want, _ = block(x)
        cache = LatentCache(spec, 3, 20, dtype=torch.float64)
        got = torch.cat([block(part, cache=cache)[0] for part in x.split(steps)])
    assert error(got, want) <= 1e-13
    assert cache.lengths == [sum(steps)] * 3


@pytest.mark.parametrize("name", SPECS)
def test_packed_decode_of_unequal_sequences(name: str) -> None:
    spec, block = SPECS[name], make(AbsorbedMLA, SPECS[name])
    x, bounds = packed_input()
    with torch.no_grad():
        want = block(x, cu_seqlens=bounds)[0]
        whole = [want[start:end] for start, end in itertools.pairwise(bounds)]
        sequences = [x[start:end] for start, end in itertools.pairwise(bounds)]
        cache = LatentCache(spec, len(LENGTHS), 48, dtype=torch.float64)
        done = [0] * len(LENGTHS)
        for step in ((9, 1, 0, 30, 2), (1, 0, 0, 1, 1), (0, 0, 0, 4, 4), (13, 0, 0, 5, 0)):
            parts = [s[d : d + n] for s, d, n in zip(sequences, done, step, strict=True)]
            ends = torch.tensor([0, *step]).cumsum(0)
            got = block(torch.cat(parts), cu_seqlens=ends, cache=cache)[0]
            expected = [w[d : d + n] for w, d, n in zip(whole, done, step, strict=True)]
            assert error(got, torch.cat(expected)) <= 1e-13
            done = [d + n for d, n in zip(done, step, strict=True)]
    assert cache.lengths == list(LENGTHS)


def test_shared_indices_still_fill_the_indexers_cache() -> None:
    block, x = make(AbsorbedMLA, SPARSE), draw(20, 1, SPARSE.hidden, seed=7)
    with torch.no_grad():
        want, indices = block(x)
        cache = LatentCache(SPARSE, 1, 20, dtype=torch.float64)
        block(x[:19], cache=cache, indices=indices[:19])
        assert error(block(x[19:], cache=cache)[0], want[19:]) <= 1e-13


def test_a_cache_refuses_what_it_cannot_hold() -> None:
    block, x = make(AbsorbedMLA, SPEC), draw(5, 2, SPEC.hidden)
    cache = LatentCache(SPEC, 2, 8, dtype=torch.float64)
    with pytest.raises(CannotError, match="keeps no gradients"):
        block(x, cache=cache)
    with torch.no_grad():
        block(x, cache=cache)
        with pytest.raises(CannotError, match=r"Sequence 0 has 5 .* and 5 more .* capacity of 8"):
            block(x, cache=cache)
        assert cache.lengths == [5, 5]
        with pytest.raises(BadInputError, match="3 sequences for a cache of 2"):
            block(draw(1, 3, SPEC.hidden), cache=cache)
        for other, message in (
            (LatentCache(replace(SPEC, rank=16), 2, 8, dtype=torch.float64), "holds 24 dims .* needs 40"),
            (LatentCache(SPEC, 2, 8, dtype=torch.float64, device="meta"), "on meta and x on cpu"),
        ):
            with pytest.raises(BadInputError, match=message):
                block(x, cache=other)
        no_keys = LatentCache(SPEC, 2, 8, dtype=torch.float64)  # later steps could not select
        with pytest.raises(BadInputError, match="0 of an indexer; the block needs 40 and 16") as refused:
            make(AbsorbedMLA, SPARSE)(x, cache=no_keys)
        assert "block.spec" in (refused.value.hint or "")
    with pytest.raises(BadInputError, match="holds nothing"):
        LatentCache(SPEC, 0, 8, dtype=torch.float64)
