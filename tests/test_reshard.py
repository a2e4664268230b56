"""``reshard`` on whole checkpoints: there and back, against the published rules, and every route the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    RUN,
    digests,
    load,
    unflushed,  # noqa: F401
)
from resharded import DEEPSEEK, HUGGINGFACE, rank_tensors, reshard
from safetensors import safe_open
from sharded_models import FORMATS, MODELS, V3, Model, config_of, published, tensors_of, write_model

from mla_convert import api
from mla_convert.comparing import compare
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.geometry import Layout
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format, open_whole

# There and back


@pytest.mark.parametrize("layout", [Layout.COMBINED, Layout.SPLIT])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, layout: Layout, tmp_path: Path) -> None:
    model = MODELS[name]
    source = write_model(tmp_path / "source", model)
    at = source
    for ranks, format in ((4, DEEPSEEK), (2, HUGGINGFACE), (8, DEEPSEEK)):
        at = reshard(at, ranks, to=format, layout=layout, reblock=model.reblock)
        assert len(list(at.glob("model*-mp*" if format is DEEPSEEK else "rank*"))) == ranks
        kv = [n for n in open_whole(at).logical.tensors if n.endswith("kv_b_proj.weight")]
        assert bool(kv) is (layout is Layout.COMBINED)
    back = reshard(at, 1, to=HUGGINGFACE, layout=Layout.COMBINED)
    assert load(back) == load(source)
    assert compare(source, at).is_same
    assert json.loads((back / "config.json").read_bytes()) == config_of(model)
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert len(open_checkpoint(back).tensors) == len(tensors_of(model))


def test_files_keep_their_names_on_huggingface_routes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", V3)
    back = reshard(reshard(reshard(source, 4), 2), 1)
    names = {path.name for path in source.glob("*.safetensors")}
    assert {path.name for path in back.glob("*.safetensors")} == names
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="pt") as old, safe_open(back / path.name, framework="pt") as new:
            assert set(old.keys()) == set(new.keys())


def test_many_files_where_one_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_convert.resharding.FILE_BYTES", 40_000)
    source = write_model(tmp_path / "source", V3)
    back = reshard(reshard(source, 2, to=DEEPSEEK), 1, to=HUGGINGFACE)
    files = sorted(back.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 5
    assert load(back) == load(source)
    assert open_checkpoint(back).index is not None


# The published rules


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["bf16", "fp8", "v32"])
def test_equal_to_the_published_rules(name: str, ranks: int, tmp_path: Path) -> None:
    model = {
        "bf16": V3,
        "fp8": Model(fp8=(4, 4)),
        "v32": Model(indexer=True, fp8=(4, 4), model_type="deepseek_v32"),
    }[name]
    tensors = tensors_of(model)
    target = reshard(write_model(tmp_path / "source", model, tensors), ranks, to=DEEPSEEK)
    for rank in range(ranks):
        wanted = published(tensors, model.experts, ranks, rank)
        found = rank_tensors(target, rank, ranks)
        assert found.keys() == wanted.keys()
        for key, cube in wanted.items():
            assert torch.equal(found[key].bytes_by_element(), cube), key
    dtypes = {stored.dtype for stored in tensors.values()}
    assert {stored.dtype for stored in found.values()} == dtypes


def test_published_shards_without_a_configuration_merge(tmp_path: Path) -> None:
    """What DeepSeek's own script wrote: names and shapes are all there is."""
    source = write_model(tmp_path / "source", V3)
    target = reshard(source, 4, to=DEEPSEEK)
    for name in ("config.json", "mla-convert.json", "tokenizer.json"):
        (target / name).unlink()
    back = reshard(target, 1, "back", to=HUGGINGFACE)
    assert load(back) == load(source)
    assert not (back / "config.json").exists()


def test_a_real_layer_61_is_kept(tmp_path: Path) -> None:
    """GLM-5 has 78 layers; a script that drops every layer 61 as DeepSeek-V3's MTP layer loses one of them."""
    model = Model(first=60, layers=3, mtp=True, indexer=True, model_type="glm_moe_dsa")
    source = write_model(tmp_path / "source", model)
    target = reshard(source, 8, to=DEEPSEEK)
    found = rank_tensors(target, 5, 8)
    for layer in (60, 61, 62, 63):
        assert f"layers.{layer}.attn.wkv_b.weight" in found
    assert found["layers.63.embed.weight"].shape == (6, 64)
    assert found["layers.63.shared_head.head.weight"].shape == (6, 64)
    assert found["layers.63.eh_proj.weight"].shape == (64, 128)
    assert load(reshard(target, 1, to=HUGGINGFACE)) == load(source)


def test_wq_b_is_two_things(tmp_path: Path) -> None:
    model = Model(indexer=True)
    source = write_model(tmp_path / "source", model)
    target = reshard(source, 8, to=DEEPSEEK)
    whole = load(source)["model.layers.0.self_attn.indexer.wq_b.weight"]
    for rank in range(8):
        found = rank_tensors(target, rank, 8)
        assert found["layers.0.attn.indexer.wq_b.weight"] == whole
        assert found["layers.0.attn.wq_b.weight"].shape == (24, model.q_rank)


def test_row_parallel_biases_lie_whole_on_every_rank(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", Model(bias=True))
    result = api.reshard(source, tmp_path / "t", ReshardOptions(4, to=DEEPSEEK), run=RUN)
    assert [
        w for w in result.document()["warnings"] if "2 biases of row-parallel" in w and "after the sum" in w
    ]
    bias = load(source)["model.layers.0.self_attn.o_proj.bias"]
    assert all(rank_tensors(tmp_path / "t", r, 4)["layers.0.attn.wo.bias"] == bias for r in range(4))


def test_a_column_parallel_bias_is_cut(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_b_proj.bias"
    source = write_model(tmp_path / "source", Model(extra={name: (192,)}))
    target = reshard(source, 4, to=DEEPSEEK)
    bias = load(source)[name]
    assert rank_tensors(target, 1, 4)["layers.0.attn.wq_b.bias"].data == bias.data[96:192]


# Layout and ranks compose


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["deepseek_v3-fp8", "longcat", "glm_moe_dsa-fp8"])
def test_split_and_shard_in_any_order(name: str, format: Format, tmp_path: Path) -> None:
    model = MODELS[name]
    source = write_model(tmp_path / "source", model)
    more: dict[str, Any] = {"to": format, "reblock": model.reblock}
    at_once = reshard(source, 8, "at-once", layout=Layout.SPLIT, **more)
    api.split(source, tmp_path / "split", run=RUN)
    split_first = reshard(tmp_path / "split", 8, "split-first", **more)
    shard_first = reshard(
        reshard(source, 8, "sharded", **more), 8, "shard-first", layout=Layout.SPLIT, **more
    )
    assert digests(at_once) == digests(split_first)
    assert digests(at_once) == digests(shard_first)


def test_one_plan_is_one_pass(tmp_path: Path) -> None:
    """Every byte of the output is written once, and there is no folder between."""
    source = write_model(tmp_path / "source", V3)
    result = api.reshard(source, tmp_path / "t", ReshardOptions(8, to=DEEPSEEK, layout=Layout.SPLIT), run=RUN)
    report = result.report
    assert report is not None
    sizes = [path.stat().st_size for path in (tmp_path / "t").glob("*.safetensors")]
    assert report.bytes_by_way["rewrite"] == sum(sizes) == result.plan.bytes_rewritten
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "t"]


def test_both_layouts_and_either_of_them(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", V3)
    api.split(source, tmp_path / "both", api.SplitOptions(keep_combined=True), run=RUN)
    sharded = reshard(tmp_path / "both", 4, to=DEEPSEEK)
    assert {"layers.0.attn.wkv_b.weight", "layers.0.attn.wk_b.weight"} <= rank_tensors(sharded, 0, 4).keys()
    assert load(reshard(sharded, 1, "c", to=HUGGINGFACE, layout=Layout.COMBINED)) == load(source)
    api.split(source, tmp_path / "split", run=RUN)
    assert load(reshard(sharded, 1, "s", to=HUGGINGFACE, layout=Layout.SPLIT)) == load(tmp_path / "split")
