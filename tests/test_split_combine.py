"""``split`` and ``combine`` on whole checkpoints, judged by torch and the official safetensors library."""

from __future__ import annotations

import json
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from checkpoints import (
    ALIGNED,
    GLM,
    RUN,
    Recipe,
    Stored,
    combine,
    digests,
    halves,
    load,
    split,
    unflushed,  # noqa: F401
    write_checkpoint,
    write_file,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mla_convert import api
from mla_convert.combining import CombineOptions
from mla_convert.errors import CannotError
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.geometry import find_blocks
from mla_convert.splitting import SplitOptions

FP8: dict[str, Recipe] = {
    "aligned": Recipe(**ALIGNED, scales="block"),
    "aligned-e8m0": Recipe(**ALIGNED, scales="block", scale_dtype="F8_E8M0"),
    "aligned-bf16-scale": Recipe(**ALIGNED, scales="block", scale_dtype="BF16"),
    "glm-192-256": Recipe(**GLM, scales="block"),
    "glm-e8m0": Recipe(**GLM, scales="block", scale_dtype="F8_E8M0", shards=3),
    "64-64": Recipe(heads=5, nope=64, v=64, rank=128, dtype="F8_E4M3", scales="block"),
    "24-32": Recipe(heads=4, nope=24, v=32, rank=200, dtype="F8_E4M3", scales="block"),
    "one-head": Recipe(heads=1, nope=64, v=64, rank=128, dtype="F8_E4M3", scales="block"),
    "one-head-64-192": Recipe(heads=1, nope=64, v=192, rank=128, dtype="F8_E4M3", scales="block"),
    "odd-9-5": Recipe(heads=3, nope=9, v=5, rank=100, dtype="F8_E4M3", scales="block"),
    "64x64-blocks": Recipe(**GLM, layers=1, scales="block", block=(64, 64)),
    "channel": Recipe(dtype="F8_E4M3", scales="channel"),
    "tensor": Recipe(dtype="F8_E4M3", scales="tensor", input_scale=True),
    "native-qscale": Recipe(dtype="F8_E4M3", scales="tensor", scale_field="qscale_weight", native=True),
    "scales-apart": Recipe(**GLM, scales="block", scales_apart=True, shards=2),
    "scales-apart-no-index": Recipe(**GLM, scales="block", scales_apart=True, shards=2, index=False),
    "mtp": Recipe(**GLM, scales="block", mtp=True, shards=3),
}
PLAIN: dict[str, Recipe] = {
    "bf16": Recipe(),
    "f16": Recipe(dtype="F16"),
    "f32": Recipe(dtype="F32"),
    "mtp": Recipe(mtp=True, shards=3),
    "nested": Recipe(prefix="language_model.model.", shards=2),
    "two-attentions": Recipe(attentions=("self_attn.0", "self_attn.1"), shards=2),
    "layers-without": Recipe(layers=5, without_mla=frozenset({0, 1, 3}), shards=4),
    "native": Recipe(native=True, prefix="", attentions=("attention",)),
    "no-query-lora": Recipe(q_rank=None),
    "single-file": Recipe(index=False),
    "no-index": Recipe(index=False, shards=3),
    "unpadded": Recipe(shards=3, shard_name="model-{number}-of-{count}.safetensors"),
    "own-names": Recipe(shards=2, shard_name="foo{number}.safetensors"),
    "no-metadata": Recipe(metadata=None, shards=2),
    "more-metadata": Recipe(metadata={"format": "pt", "note": "ü \n"}),
    "wrong-total": Recipe(total_size=1369062772000),
    "no-rope": Recipe(rope=0, nope=24),
}
ALL = {f"plain-{name}": recipe for name, recipe in PLAIN.items()} | {
    f"fp8-{name}": recipe for name, recipe in FP8.items()
}
every = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
every_fp8 = pytest.mark.parametrize("recipe", FP8.values(), ids=FP8)


def names(recipe: Recipe) -> tuple[str, str, str]:
    return ("wkv_b", "wk_b", "wv_b") if recipe.native else ("kv_b_proj", "k_b_proj", "v_b_proj")


def combined_fields(tensors: dict[str, Stored], module: str) -> dict[str, Stored]:
    return {name.removeprefix(module): t for name, t in tensors.items() if name.startswith(module)}


def split_block_rows(recipe: Recipe) -> int:
    rows = recipe.block[0]
    return rows if recipe.nope % rows == recipe.v % rows == 0 else gcd(recipe.nope, recipe.v, rows)


def scales_of_elements(scale: Stored, shape: tuple[int, ...], recipe: Recipe, rows: int) -> torch.Tensor:
    """The scale of every element of a weight, in float64."""
    wide = scale.torch().to(torch.float64)
    if recipe.scales == "tensor":
        return wide.reshape(1, 1).expand(shape)
    if recipe.scales == "channel":
        return wide.reshape(-1, 1).expand(shape)
    wide = wide.repeat_interleave(rows, 0).repeat_interleave(recipe.block[1], 1)
    return wide[: shape[0], : shape[1]]


@every
def test_split(recipe: Recipe, tmp_path: Path) -> None:
    """Row for row; everything else is carried over."""
    source = write_checkpoint(tmp_path / "source", recipe)
    before, after = load(source), load(split(source))
    expected_names = set(before)
    kv, *half_names = names(recipe)
    assert len(recipe.modules()) == recipe.block_count > 0
    for module in recipe.modules():
        old = combined_fields(before, f"{module}{kv}.")
        weight = old.pop("weight")
        parts = halves(weight.rows(), recipe.heads, recipe.nope, recipe.v)
        expected_names -= {f"{module}{kv}.weight", *(f"{module}{kv}.{name}" for name in old)}
        for half, expected in zip(half_names, parts, strict=True):
            found = after[f"{module}{half}.weight"]
            assert found.dtype == weight.dtype
            assert found.shape == (expected.shape[0], recipe.rank)
            assert torch.equal(found.rows(), expected)
            expected_names |= {f"{module}{half}.weight", *(f"{module}{half}.{name}" for name in old)}
            for name in old:
                assert after[f"{module}{half}.{name}"].dtype == old[name].dtype
    assert set(after) == expected_names
    for name in set(before) & set(after):
        assert after[name] == before[name]


@every_fp8
def test_split_scales_mean_the_same(recipe: Recipe, tmp_path: Path) -> None:
    """code x scale, in float64, is bit for bit what it was, for random scale bytes too."""
    source = write_checkpoint(tmp_path / "source", Recipe(**{**vars(recipe), "wild_scales": True}))
    before, after = load(source), load(split(source))
    kv, *half_names = names(recipe)
    for module in recipe.modules():
        old = combined_fields(before, f"{module}{kv}.")
        weight = old.pop("weight")
        scale_name = next(name for name in old if name not in ("input_scale",))
        value = weight.torch().to(torch.float64) * scales_of_elements(
            old[scale_name], weight.shape, recipe, recipe.block[0]
        )
        parts = halves(value, recipe.heads, recipe.nope, recipe.v)
        for half, expected in zip(half_names, parts, strict=True):
            new = after[f"{module}{half}.weight"]
            scale = after[f"{module}{half}.{scale_name}"]
            rows = split_block_rows(recipe)
            found = new.torch().to(torch.float64) * scales_of_elements(scale, new.shape, recipe, rows)
            assert torch.equal(found.view(torch.int64), expected.view(torch.int64))
            if recipe.input_scale:
                assert after[f"{module}{half}.input_scale"] == old["input_scale"]


@every
def test_split_is_a_sound_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", recipe)
    target = split(source)
    for path in target.glob("*.safetensors"):
        original = source / path.name
        with safe_open(path, framework="pt") as new, safe_open(original, framework="pt") as old:
            assert new.metadata() == old.metadata() == recipe.metadata
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        starts = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
        if path.read_bytes() != original.read_bytes():
            for name, tensor in load(target).items():
                if name in starts and tensor.dtype in ("F32", "I64", "BF16", "F16"):
                    assert (8 + length + starts[name]) % {"F32": 4, "I64": 8}.get(tensor.dtype, 2) == 0, name
    tensors = load(target)
    assert (target / "model.safetensors.index.json").exists() == recipe.index
    if recipe.index:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in tensors.values())
        assert set(index["weight_map"]) == set(tensors)
        for name, file in index["weight_map"].items():
            with safe_open(target / file, framework="pt") as opened:
                assert name in opened.keys()  # noqa: SIM118
    config = json.loads((target / "config.json").read_text())
    assert config["mla_convert"] == {"layout": "split"}
    for name in ("tokenizer.json", "modeling_deepseek.py", "assets/chat.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert all(str(block.layout) == "split" for block in find_blocks(open_checkpoint(target)))


@every
@pytest.mark.parametrize("keep_combined", [False, True], ids=["split", "both"])
def test_combine_brings_every_file_back(recipe: Recipe, keep_combined: bool, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", Recipe(**{**vars(recipe), "wild_scales": True}))
    assert digests(combine(split(source, keep_combined=keep_combined))) == digests(source)


@every
@pytest.mark.parametrize("keep_combined", [False, True], ids=["split", "both"])
def test_combine_without_the_manifest(recipe: Recipe, keep_combined: bool, tmp_path: Path) -> None:
    """Every tensor comes back byte for byte, and the configuration in meaning."""
    source = write_checkpoint(tmp_path / "source", Recipe(**{**vars(recipe), "wild_scales": True}))
    target = split(source, keep_combined=keep_combined)
    (target / "mla-convert.json").unlink()
    back = combine(target)
    assert load(back) == load(source)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for path in back.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == recipe.metadata


@every_fp8
@pytest.mark.parametrize("keep_combined", [False, True], ids=["split", "both"])
def test_dequantize(recipe: Recipe, keep_combined: bool, tmp_path: Path) -> None:
    """float32 product, cast to bfloat16 by torch, but for the payload of a NaN; and back again."""
    source = write_checkpoint(tmp_path / "source", recipe)
    target = split(source, dequantize=True, keep_combined=keep_combined)
    before, after = load(source), load(target)
    kv, *half_names = names(recipe)
    for module in recipe.modules():
        old = combined_fields(before, f"{module}{kv}.")
        weight = old.pop("weight")
        scale = next(tensor for name, tensor in old.items() if name not in ("input_scale",))
        wide = scales_of_elements(scale, weight.shape, recipe, recipe.block[0]).to(torch.float32)
        value = (weight.torch().to(torch.float32) * wide).to(torch.bfloat16)
        parts = halves(value, recipe.heads, recipe.nope, recipe.v)
        for half, expected in zip(half_names, parts, strict=True):
            assert not [name for name in after if name.startswith(f"{module}{half}.") and "scale" in name]
            found = after[f"{module}{half}.weight"].torch()
            assert found.dtype is torch.bfloat16
            number = ~expected.isnan()
            assert torch.equal(found.isnan(), ~number)
            assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))
        if not keep_combined:
            assert f"{module}{kv}.weight" not in after
    assert digests(combine(target)) == digests(source)


def test_dequantized_copies_are_dropped_with_a_warning(tmp_path: Path) -> None:
    recipe = Recipe(**ALIGNED, scales="block")
    target = split(write_checkpoint(tmp_path / "source", recipe), dequantize=True, keep_combined=True)
    result = api.combine(target, tmp_path / "combined", CombineOptions(ignore_manifest=True), run=RUN)
    assert [warning for warning in result.plan.warnings if "K and V of 2 blocks are dequantised" in warning]
    assert load(tmp_path / "combined") == load(tmp_path / "source")


def test_dequantized_weights_combine_to_bf16_without_the_manifest(tmp_path: Path) -> None:
    recipe = Recipe(**GLM, scales="block")
    source = write_checkpoint(tmp_path / "source", recipe)
    target = split(source, dequantize=True)
    halves_ = load(target)
    found = load(combine(target, ignore_manifest=True))
    for module in recipe.modules():
        weight = found[f"{module}kv_b_proj.weight"]
        assert weight.dtype == "BF16"
        parts = halves(weight.rows(), recipe.heads, recipe.nope, recipe.v)
        for half, rows in zip(("k_b_proj", "v_b_proj"), parts, strict=True):
            assert torch.equal(rows, halves_[f"{module}{half}.weight"].rows())
        assert f"{module}kv_b_proj.weight_scale_inv" not in found


def test_dequantize_that_could_not_be_undone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", Recipe(**ALIGNED, scales="block"))
    path = next(source.glob("*.safetensors"))
    tensors = load(source)
    scale = tensors["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"]
    tensors["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"] = Stored(
        scale.dtype, scale.shape, bytes(len(scale.data))
    )
    write_file(path, tensors)
    with pytest.raises(CannotError, match="could not be undone"):
        split(source, dequantize=True)
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"not quantised \(BF16\)"),
        (
            {"dtype": "F8_E4M3", "scales": "block", "scale_dtype": "F64", "wild_scales": True},
            r"scale_inv is F64",
        ),
    ],
)
def test_dequantize_refused_beforehand(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", Recipe(**fields))
    with pytest.raises(CannotError, match=message):
        api.split(source, tmp_path / "split", SplitOptions(dequantize=True), dry_run=True)


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Foreign files, with headers and order of the official writer; geometry as the model's modules have it."""
    model = tiny_models.build(name, torch.bfloat16)
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size="100KB")
    truth = sorted(
        (module.num_heads, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim, rank)
        for module in model.modules()
        if (up := getattr(module, "kv_b_proj", None) or getattr(module, "wkv_b", None)) is not None
        for rank in [up.weight.shape[1]]
    )
    blocks = find_blocks(open_checkpoint(source))
    assert sorted((b.heads, b.nope, b.rope, b.v, b.rank) for b in blocks) == truth
    before, target = load(source), split(source)
    after = load(target)
    for block in blocks:
        native = block.dialect.name == "native"
        kv, k, v = names(Recipe(native=native))
        parts = halves(before[f"{block.prefix}{kv}.weight"].rows(), block.heads, block.nope, block.v)
        assert torch.equal(after[f"{block.prefix}{k}.weight"].rows(), parts[0])
        assert torch.equal(after[f"{block.prefix}{v}.weight"].rows(), parts[1])
    assert len(after) == len(before) + len(blocks)
    assert digests(combine(target)) == digests(source)


# Properties

RECIPES = st.builds(
    Recipe,
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    nope=st.sampled_from([1, 5, 8, 24, 64, 128, 192]),
    rope=st.sampled_from([0, 2, 8]),
    v=st.sampled_from([1, 3, 16, 32, 64, 128, 256]),
    rank=st.sampled_from([1, 7, 32, 130]),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    shards=st.integers(1, 5),
    mtp=st.booleans(),
    native=st.booleans(),
    index=st.booleans(),
    metadata=st.sampled_from([None, {"format": "pt"}]),
    q_rank=st.sampled_from([None, 3]),
    attentions=st.sampled_from([("self_attn",), ("self_attn.0", "self_attn.1")]),
)
QUANTISED = st.builds(
    lambda base, scales, **more: Recipe(**{**vars(base), "dtype": "F8_E4M3", "scales": scales, **more}),
    RECIPES,
    st.sampled_from(["block", "channel", "tensor"]),
    scale_dtype=st.sampled_from(["F32", "F8_E8M0", "BF16"]),
    scales_apart=st.booleans(),
    wild_scales=st.booleans(),
    block=st.sampled_from([(128, 128), (64, 128), (32, 16)]),
)
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(RECIPES | QUANTISED, st.booleans())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe, keep_combined: bool) -> None:
    source = write_checkpoint(tmp_path_factory.mktemp("round") / "source", recipe)
    target = split(source, keep_combined=keep_combined)
    assert digests(combine(target)) == digests(source)
    assert load(combine(target, "by-structure", ignore_manifest=True)) == load(source)


@settings(quick, max_examples=8)
@given(QUANTISED.filter(lambda recipe: not recipe.wild_scales))
def test_dequantize_round_trip(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    source = write_checkpoint(tmp_path_factory.mktemp("round") / "source", recipe)
    assert digests(combine(split(source, dequantize=True))) == digests(source)


@quick
@given(RECIPES | QUANTISED)
def test_two_routes_give_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    """Splitting anew what was split and combined, or dropping a layout that was kept, changes no tensor."""
    source = write_checkpoint(tmp_path_factory.mktemp("routes") / "source", recipe)
    once = split(source, "once")
    again = split(combine(once, "back"), "again")
    assert digests(again) == digests(once)
    both = split(source, "both", keep_combined=True)
    assert load(combine(both, "dropped", ignore_manifest=True)) == load(source)
    kept = load(both)
    assert {name: tensor for name, tensor in kept.items() if name in load(once)} == load(once)
