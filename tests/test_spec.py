"""What ``attention_spec`` reads out of a config: published models, old and new spellings, refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import tiny_models

from mla_convert.errors import BadInputError, CannotError
from mla_convert.runtime.spec import (
    LinearScaling,
    LongRopeScaling,
    QueryGrowth,
    RopeSpec,
    YarnScaling,
    attention_spec,
)

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
V3 = {"model_type": "deepseek_v3", "rope_theta": 10000, "rms_norm_eps": 1e-6, "rope_scaling": YARN}
V32 = {**V3, "model_type": "deepseek_v32", "index_topk": 2048}
GLM5 = {
    "model_type": "glm_moe_dsa",
    "rms_norm_eps": 1e-5,
    "index_topk": 2048,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
DIMS = {
    "hidden": 7168,
    "heads": 128,
    "nope": 128,
    "rope": 64,
    "v": 128,
    "rank": 512,
    "q_rank": 1536,
    "layer": 3,
    "has_indexer": False,
}
INDEXED = {"has_indexer": True, "index_heads": 64, "index_dim": 128}


def spec_of(config: dict[str, Any], **changes: Any) -> Any:
    return attention_spec(config, **{**DIMS, **changes})


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}


def test_deepseek_v3() -> None:
    spec = spec_of(V3)
    assert spec.softmax_scale == pytest.approx(0.13523, abs=5e-6)
    scaling = YarnScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert spec.rope_spec == RopeSpec(64, interleaved=True, theta=10000.0, scaling=scaling)
    assert (spec.qk_dim, spec.kv_dim, spec.rms_eps) == (192, 576, 1e-6)
    assert (spec.query_multiplier, spec.latent_multiplier, spec.indexer, spec.unmodelled) == (1, 1, None, ())


def test_published_softmax_scales() -> None:
    v2 = changed(
        V3, model_type="deepseek_v2", rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
    )
    assert spec_of(v2).softmax_scale == pytest.approx(0.11472, abs=5e-6)
    assert spec_of(GLM5, nope=192, v=256).softmax_scale == 0.0625
    without = changed(V3, rope_scaling={**YARN, "mscale_all_dim": 0})
    assert spec_of(without).softmax_scale == 192**-0.5
    unscaled = changed(V3, rope_scaling=None)
    assert spec_of(unscaled).softmax_scale == 192**-0.5
    assert spec_of(unscaled).rope_spec.scaling is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000.0, "rope_scaling": {**YARN, "rope_type": "yarn"}},
        {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 10000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 10000}, "rope_theta": 7, "rope_scaling": {"type": "x"}},
        {"rope_theta": 10000.0, "rope_scaling": {**YARN, "type": "deepseek_yarn"}},
        {"rope_theta": 1e4, "rope_scaling": {**YARN, "original_max_position_embeddings": None}}
        | {"max_position_embeddings": 4096},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"original_max_position_embeddings": 9}}
        | {"original_max_position_embeddings": 4096},
        {"rope_theta": 1e4, "rope_scaling": {**YARN, "factor": None}, "max_position_embeddings": 163840},
    ],
    ids=["flat", "nested", "nested wins", "alias", "original = full", "top-level original", "derived factor"],
)
def test_spellings_of_the_same_rope(rope: dict[str, Any]) -> None:
    config = {"model_type": "deepseek_v3", "rms_norm_eps": 1e-6, **rope}
    assert spec_of(config).rope_spec == spec_of(V3).rope_spec


def test_rope_per_layer_type() -> None:
    config = {
        "model_type": "dots3_note_text",
        "rms_norm_eps": 1e-5,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "rope_parameters": {
            "indexed_attention": {"rope_type": "default", "rope_theta": 8e7},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
    }
    assert [spec_of(config, layer=layer).rope_spec.theta for layer in (0, 1)] == [8e7, 5e4]
    with pytest.raises(BadInputError, match="layer_types"):
        spec_of(config, layer=2)


def test_rope_layout_of_main_attention_and_indexer() -> None:
    v32, glm5 = spec_of(V32, **INDEXED), spec_of(GLM5, **INDEXED)
    assert (v32.rope_spec.interleaved, v32.indexer.rope_interleaved) == (True, False)
    assert (glm5.rope_spec.interleaved, glm5.indexer.rope_interleaved) == (True, True)
    assert (v32.indexer.heads, v32.indexer.dim, v32.indexer.topk, v32.indexer.rope_dim) == (64, 128, 2048, 64)
    assert v32.indexer.k_norm_eps == 1e-6 and not v32.indexer.rope_last
    assert spec_of(changed(V32, indexer_rope_interleave=True), **INDEXED).indexer.rope_interleaved
    assert not spec_of(changed(GLM5, indexer_rope_interleave=False), **INDEXED).indexer.rope_interleaved
    assert not spec_of(changed(V3, rope_interleave=False)).rope_spec.interleaved
    assert not spec_of(changed(V3, model_type="minicpm3")).rope_spec.interleaved
    assert spec_of(GLM5).indexer is None  # a layer that shares another's selection


def test_linear_and_longrope() -> None:
    linear = changed(V3, rope_scaling={"type": "linear", "factor": 4})
    assert spec_of(linear).rope_spec.scaling == LinearScaling(4.0)
    longrope = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2] * 32, "factor": 2.0}
    scaling = spec_of(changed(V3, rope_scaling=longrope, max_position_embeddings=4096)).rope_spec.scaling
    factor = math.sqrt(1 + math.log(2) / math.log(4096))
    assert scaling == LongRopeScaling((1.0,) * 32, (2.0,) * 32, 4096, factor)


def test_unrotated_families_need_no_theta() -> None:
    spec = spec_of({"model_type": "kimi_linear", "rms_norm_eps": 1e-5})
    assert spec.rope_spec == RopeSpec(64, interleaved=True, theta=0.0, rotated=False)
    assert spec.kv_dim == 576
    assert not spec_of({"model_type": "mistral_large4_text", "rms_norm_eps": 1e-5}, rope=0).rope_spec.rotated


def test_multipliers_and_query_growth() -> None:
    longcat = spec_of(changed(V3, model_type="longcat_flash", rope_scaling=None), hidden=6144)
    assert (longcat.query_multiplier, longcat.latent_multiplier) == (2.0, math.sqrt(12))
    mistral4 = changed(V3, model_type="mistral4", rope_scaling={**YARN, "llama_4_scaling_beta": 0.1})
    assert spec_of(mistral4).query_growth == QueryGrowth(0.1, 4096)


UNMODELLED = {
    "bailing_hybrid": "g_proj",
    "hy_v4": "learnable_sink_param",
    "hy_v4_vl": "learnable_sink_param",
    "axk2": "gate",
    "dots3_note_text": "k_rope_only_layernorm",
    "glm5_next": "index_kpool",
    "mistral_large4": "ssmax_scaling",
}


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_every_family_is_known(name: str) -> None:
    config = tiny_models.text_config(tiny_models.build(name))
    unmodelled = spec_of(config, layer=0, rope=8).unmodelled
    assert UNMODELLED.get(name, "") in " ".join(unmodelled)
    assert bool(unmodelled) == (name in UNMODELLED)


def test_unknown_families_are_read_as_deepseek_v3_and_say_so() -> None:
    spec = spec_of(changed(V3, model_type="novel"))
    assert spec.rope_spec == spec_of(V3).rope_spec
    assert spec.unmodelled == ("whatever sets 'novel' apart from DeepSeek-V3",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": None}, "config.json: rope_theta is missing; it must be a positive number."),
        ({"rope_theta": "1e4"}, "config.json: rope_theta is '1e4'; it must be a positive number."),
        ({"rope_theta": True}, "config.json: rope_theta is True; it must be a positive number."),
        ({"rope_theta": -1}, "config.json: rope_theta is -1; it must be a positive number."),
        ({"rope_theta": math.nan}, "config.json: rope_theta is nan; it must be a positive number."),
        ({"index_topk": None}, "config.json: index_topk is missing; it must be a positive number."),
        ({"index_topk": 0}, "config.json: index_topk is 0; it must be a positive number."),
        ({"rope_interleave": "yes"}, "config.json: rope_interleave is 'yes'; it must be true or false."),
        ({"rope_scaling": "yarn"}, "config.json: rope_parameters is 'yarn'; it must be a mapping."),
        (
            {"rope_scaling": {**YARN, "factor": 0}},
            "config.json: factor is 0; it must be a positive number.",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1]}, "max_position_embeddings": 64},
            "config.json: short_factor is [1]; it must be a list of 32 numbers.",
        ),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        spec_of(changed(V32, **changes), **INDEXED)
    assert caught.value.message == message


def test_unsupported_scaling_is_refused_by_name() -> None:
    for kind in ("dynamic", "llama3", "proportional"):
        with pytest.raises(CannotError, match=f"'{kind}'"):
            spec_of(changed(V3, rope_scaling={"type": kind, "factor": 2.0}))


def test_odd_rope_is_refused() -> None:
    with pytest.raises(BadInputError, match="63 dims"):
        spec_of(V3, rope=63)


def test_shard_divides_heads_or_lists_what_would_fit() -> None:
    spec = spec_of(V3, heads=20)
    assert spec.shard(3, 4).heads == 5
    assert spec.shard(0, 1) == spec
    with pytest.raises(CannotError) as caught:
        spec.shard(0, 8)
    assert caught.value.message == "20 heads cannot be divided over 8 ranks."
    assert caught.value.hint == "Tensor-parallel sizes that fit: 1, 2, 4, 5, 10, 20."
    with pytest.raises(ValueError, match="rank 4 of 4"):
        spec.shard(4, 4)


def test_importing_specs_does_not_import_torch() -> None:
    code = "import sys, mla_convert.runtime.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
