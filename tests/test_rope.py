"""Rotary tables against transformers, bit for bit, and the properties that a rotation has."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_convert.runtime.rope import (
    apply_rope,
    inverse_frequencies,
    rope_tables,
    rotate,
    table_factor,
)
from mla_convert.runtime.spec import LinearScaling, LongRopeScaling, RopeSpec, YarnScaling

PLAIN = RopeSpec(64, interleaved=True, theta=10000.0)
V3 = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
V2 = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
K2 = YarnScaling(64.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
SHORT, LONG = tuple(1 + i / 64 for i in range(32)), tuple(2 + i for i in range(32))

CASES: dict[str, tuple[RopeSpec, dict[str, Any]]] = {
    "default": (PLAIN, {"rope_type": "default"}),
    "linear": (replace(PLAIN, scaling=LinearScaling(4.0)), {"rope_type": "linear", "factor": 4.0}),
    "yarn v3": (replace(PLAIN, scaling=V3), {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn v2": (replace(PLAIN, scaling=V2), {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "yarn k2": (
        replace(PLAIN, scaling=K2, theta=50000.0),
        {"factor": 64.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "yarn without mscale": (replace(PLAIN, scaling=YarnScaling(8.0, 4096)), {"factor": 8.0}),
    "yarn uneven mscale": (
        replace(PLAIN, scaling=replace(V3, mscale=0.5)),
        {"factor": 40.0, "mscale": 0.5, "mscale_all_dim": 1.0},
    ),
    "yarn not truncated": (
        replace(PLAIN, scaling=YarnScaling(8.0, 4096, attention_factor=1.5, truncate=False)),
        {"factor": 8.0, "attention_factor": 1.5, "truncate": False},
    ),
    "yarn without a ramp": (
        replace(PLAIN, scaling=YarnScaling(8.0, 6, beta_fast=1.0)),  # both its ends fall on pair 0
        {"factor": 8.0, "beta_fast": 1.0, "original_max_position_embeddings": 6},
    ),
    "longrope": (
        replace(PLAIN, scaling=LongRopeScaling(SHORT, LONG, 4096, 1.25)),
        {
            "rope_type": "longrope",
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
            "attention_factor": 1.25,
        },
    ),
}


@pytest.mark.parametrize("last", [300, 9000], ids=["short", "long"])
@pytest.mark.parametrize("case", CASES)
def test_tables_equal_transformers_bitwise(case: str, last: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    spec, parameters = CASES[case]
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **parameters}
    config = DeepseekV3Config(
        rope_parameters={**parameters, "rope_theta": spec.theta}, max_position_embeddings=16384
    )
    positions = torch.arange(0, last, 7)
    want_cos, want_sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    cos, sin = rope_tables(spec, positions)
    assert torch.equal(cos, want_cos[0, :, :32]) and torch.equal(sin, want_sin[0, :, :32])


def test_yarn_changes_only_slow_pairs() -> None:
    plain, yarn = inverse_frequencies(PLAIN), inverse_frequencies(replace(PLAIN, scaling=V3))
    assert torch.equal(yarn[:10], plain[:10])
    assert torch.allclose(yarn[-8:], plain[-8:] / 40)
    assert table_factor(replace(PLAIN, scaling=V3)) == 1.0
    assert table_factor(replace(PLAIN, scaling=YarnScaling(40.0, 4096))) == 0.1 * math.log(40) + 1


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_by_hand(interleaved: bool) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # a quarter turn, and none
    got = apply_rope(x, cos, sin, interleaved=interleaved).tolist()
    assert got == ([[-2.0, 1.0, 3.0, 4.0]] if interleaved else [[-3.0, 2.0, 1.0, 4.0]])


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_distance_alone(interleaved: bool) -> None:
    spec = RopeSpec(8, interleaved, theta=100.0)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 8, generator=generator, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> float:
        turned_q, turned_k = (rotate(x, torch.tensor([at]), spec) for x, at in ((q, at_q), (k, at_k)))
        assert turned_q.norm().item() == pytest.approx(q.norm().item(), rel=1e-6)
        return (turned_q @ turned_k.T).item()

    assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-5)
    assert abs(score(7, 3) - score(3, 7)) > 0.1
    assert score(5, 5) == pytest.approx((q @ k.T).item(), abs=1e-6)


def test_heads_share_a_position() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([9, 0, 4, 4, 100])
    turned = rotate(x, positions, PLAIN)
    for head in range(3):
        assert torch.equal(turned[:, head], rotate(x[:, head], positions, PLAIN))
    assert torch.equal(turned[1], x[1])


def test_unrotated_dims_and_no_dims_come_back_as_they_are() -> None:
    x = torch.randn(5, 3, 64)
    assert rotate(x, torch.arange(5), replace(PLAIN, rotated=False, theta=0.0)) is x
    empty = torch.randn(5, 0)
    assert rotate(empty, torch.arange(5), RopeSpec(0, True, 0.0, rotated=False)).shape == (5, 0)


def test_sixteen_bit_inputs_are_rotated_in_float32() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(50)
    got = rotate(x, positions, PLAIN)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), positions, PLAIN).bfloat16())
