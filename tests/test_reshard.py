"""``reshard`` on whole checkpoints: there and back, against the published rules, and every route the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    RUN,
    Stored,
    digests,
    load,
    random_bytes,
    randomness,
    unflushed,  # noqa: F401
    untouched,
    write_file,
)
from safetensors import safe_open
from sharded_models import FORMATS, MODELS, V3, Model, config_of, published, tensors_of, write_model

from mla_convert import api
from mla_convert.comparing import compare
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.geometry import Layout
from mla_convert.shard import Experts
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format, open_whole

DEEPSEEK, HUGGINGFACE = Format.DEEPSEEK, Format.HUGGINGFACE


def reshard(source: Path, tp: int, name: str | None = None, **options: Any) -> Path:
    """Reshard into a folder beside the source, which must stay as it is; returns the folder."""
    target = source.with_name(name or f"tp{tp}")
    with untouched(source):
        api.reshard(source, target, ReshardOptions(tp, **options), run=RUN)
    return target


def rank_tensors(folder: Path, rank: int, ranks: int) -> dict[str, Stored]:
    """What one rank of a DeepSeek folder holds, read by the official library."""
    found = {}
    with safe_open(folder / f"model{rank}-mp{ranks}.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = Stored(file.get_slice(name).get_dtype(), tuple(tensor.shape), data)
    return found


def write_rank(path: Path, tensors: dict[str, Stored]) -> None:
    """The file of one rank."""
    write_file(path, tensors, {"format": "pt"})


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


# Experts, vocabulary, scales


def test_experts_in_slices_and_back(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", MODELS["deepseek_v3-fp8"])
    sliced = reshard(source, 4, "sliced", to=DEEPSEEK, experts=Experts.TP)
    name = "layers.1.ffn.experts.5.w2.weight"
    whole = load(source)["model.layers.1.mlp.experts.5.down_proj.weight"].bytes_by_element()
    for rank in range(4):
        found = rank_tensors(sliced, rank, 4)[name].bytes_by_element()
        assert torch.equal(found, whole[:, rank * 8 : rank * 8 + 8])
    assert open_whole(sliced).experts is Experts.TP
    dealt = reshard(sliced, 4, "dealt", experts=Experts.EP)
    assert digests(dealt) == digests(reshard(source, 4, "direct", to=DEEPSEEK))
    assert load(reshard(sliced, 1, "back", to=HUGGINGFACE)) == load(source)


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", Model(experts=6))
    with pytest.raises(
        CannotError, match=r"6 experts of model\.layers\.1\.mlp\.experts do not divide by 4"
    ) as caught:
        reshard(source, 4)
    assert "--experts tp" in (caught.value.hint or "")
    assert load(reshard(reshard(source, 4, experts=Experts.TP), 1)) == load(source)


def test_stacked_experts_go_by_their_first_dimension(tmp_path: Path) -> None:
    stacked = {
        "model.layers.0.mlp.experts.gate_up_proj": (8, 4, 6),
        "model.layers.0.mlp.experts.down_proj": (8, 6, 2),
    }
    source = write_model(tmp_path / "source", Model(extra=stacked))
    target = reshard(source, 4)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    part = load(target / "rank3-of-4")[name]
    assert (part.shape, part.data) == ((2, 4, 6), load(source)[name].data[-96:])
    assert load(reshard(target, 1)) == load(source)


def test_vocabulary(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", Model(vocabulary=45, mtp=True))
    with pytest.raises(
        CannotError, match=r"45 rows of model\.embed_tokens do not divide by 8; --pad-vocabulary"
    ):
        reshard(source, 8)
    result = api.reshard(source, tmp_path / "p", ReshardOptions(8, pad_vocabulary=True, to=DEEPSEEK), run=RUN)
    assert any("45 rows are padded with zeros to 48" in warning for warning in result.document()["warnings"])
    last = rank_tensors(tmp_path / "p", 7, 8)["head.weight"]
    assert last.shape == (6, 64)
    assert last.data[-3 * 128 :] == bytes(3 * 128)
    assert last.data[: 3 * 128] == load(source)["lm_head.weight"].data[-3 * 128 :]
    once_more = reshard(tmp_path / "p", 2, pad_vocabulary=True)
    assert load(reshard(once_more, 1, to=HUGGINGFACE)) == load(source)
    tensors = rank_tensors(tmp_path / "p", 7, 8)
    tensors["head.weight"] = Stored(last.dtype, last.shape, last.data[:-1] + b"\1")
    write_rank(tmp_path / "p" / "model7-mp8.safetensors", tensors)
    with pytest.raises(BadInputError, match=r"padding of lm_head\.weight after row 45 is not zero"):
        reshard(tmp_path / "p", 1, "lost")


def test_finer_scales_on_request(tmp_path: Path) -> None:
    """Blocks of 128 over four ranks of 32 rows and of 32 columns: refused, or each element keeps its own scale."""
    model = Model(heads=4, nope=8, v=24, rank=64, fp8=(128, 128), hidden=160)
    source = write_model(tmp_path / "source", model)
    with pytest.raises(CannotError, match=r"64 rows of \S+q_b_proj over 4 ranks are 16 each") as caught:
        reshard(source, 4)
    assert [d for d in caught.value.details if "128 rows of model.layers.0.self_attn.kv_b_proj" in d]
    assert "legal here: --tp 1; --reblock" in (caught.value.hint or "")
    assert len(caught.value.details) > 3
    target = reshard(source, 4, reblock=True)
    whole = load(source)
    for module, dimension in (("self_attn.kv_b_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        name = f"model.layers.0.{module}.weight"
        scale = whole[name + "_scale_inv"].torch()
        rows, columns = whole[name].shape
        by_element = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        config = json.loads((target / "config.json").read_bytes())["quantization_config"]
        block = config["module_weight_block_size"][f"model.layers.0.{module}"]
        for rank in range(4):
            part = load(target / f"rank{rank}-of-4")
            each = whole[name].shape[dimension] // 4
            own = part[name + "_scale_inv"].torch()
            shape = part[name].shape
            fine = own.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[
                :, : shape[1]
            ]
            assert torch.equal(fine, by_element.narrow(dimension, rank * each, each)), (name, rank)
    assert load(reshard(target, 1)) == load(source)
    config = json.loads((tmp_path / "tp1" / "config.json").read_bytes())
    assert config == config_of(model)


def test_finer_scales_that_differ_do_not_merge(tmp_path: Path) -> None:
    model = Model(heads=4, nope=8, v=24, rank=64, fp8=(128, 128), hidden=160)
    target = reshard(write_model(tmp_path / "source", model), 4, reblock=True, to=DEEPSEEK)
    tensors = rank_tensors(target, 2, 4)
    name = "layers.0.attn.wkv_b.scale"
    scale = tensors[name]
    tensors[name] = Stored(scale.dtype, scale.shape, b"\0" + scale.data[1:])
    write_rank(target / "model2-mp4.safetensors", tensors)
    with pytest.raises(BadInputError, match=r"scales of \S+kv_b_proj that belong to one block of 128 differ"):
        reshard(target, 1, "lost", to=HUGGINGFACE)


@pytest.mark.parametrize("shape", [("r",), ("r", 1), (), (1,)])
def test_scales_by_channel_and_by_tensor(shape: tuple[Any, ...], tmp_path: Path) -> None:
    tensors = tensors_of(V3)
    rng = randomness()
    for leaf in ("q_b_proj", "kv_b_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{leaf}.weight"
        rows = tensors[name].shape[0]
        tensors[name] = random_bytes(rng, "F8_E4M3", tensors[name].shape)
        tensors[name + "_scale"] = random_bytes(rng, "F32", tuple(rows if s == "r" else s for s in shape))
        tensors[f"model.layers.0.self_attn.{leaf}.input_scale"] = random_bytes(rng, "F32", ())
    source = write_model(tmp_path / "source", V3, tensors)
    target = reshard(source, 4, to=DEEPSEEK)
    found = rank_tensors(target, 1, 4)
    whole = tensors["model.layers.0.self_attn.kv_b_proj.weight_scale"]
    part = found["layers.0.attn.wkv_b.weight_scale"]
    size = len(whole.data) // 4
    assert part.data == (whole.data[size : 2 * size] if "r" in shape else whole.data)
    assert found["layers.0.attn.wo.weight_scale"] == tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    assert load(reshard(target, 1, to=HUGGINGFACE)) == load(source)


def test_packed_weights(tmp_path: Path) -> None:
    """Whole experts may be stored in any way; what must be cut may not."""
    packed = {"model.layers.1.mlp.experts.3.up_proj.weight_packed": (32, 8),
              "model.layers.1.mlp.experts.3.up_proj.weight_shape": (2,)}  # fmt: skip
    source = write_model(tmp_path / "source", Model(extra=packed))
    target = reshard(source, 4, to=DEEPSEEK)
    assert "layers.1.ffn.experts.3.w3.weight_packed" in rank_tensors(target, 1, 4)
    assert load(reshard(target, 1, to=HUGGINGFACE)) == load(source)
    with pytest.raises(CannotError, match=r"weight_packed .* no rule says how to cut it"):
        reshard(source, 4, "sliced", experts=Experts.TP)


# Refusals, before a weight is read


def test_twenty_heads_on_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8960 rows divide by 8; heads do not. The published script gives each rank two and a half."""
    model = Model(heads=20, nope=192, v=256, rope=8, rank=16, layers=1, model_type="glm4_moe_lite")
    source = write_model(tmp_path / "source", model)

    def read(*_: Any) -> bytes:
        raise AssertionError("a weight was read")

    with monkeypatch.context() as patched:
        for name in ("pread", "copy_file_range"):
            patched.setattr(f"os.{name}", read)
        with pytest.raises(CannotError) as caught:
            api.reshard(source, tmp_path / "t", ReshardOptions(8), run=RUN)
    assert "20 heads of model.layers.0.self_attn do not divide by 8" in caught.value.message
    assert caught.value.hint == "legal here: --tp 1, 2, 4"
    assert not (tmp_path / "t").exists()
    assert load(reshard(reshard(source, 4), 1)) == load(source)


def test_twenty_heads_on_twenty_ranks(tmp_path: Path) -> None:
    model = Model(heads=20, experts=20, vocabulary=40, model_type="glm4_moe_lite")
    source = write_model(tmp_path / "source", model)
    with pytest.raises(CannotError, match=r"96 rows of model\.layers\.0\.mlp\.gate_proj do not divide by 20"):
        reshard(source, 20)
    at = reshard(reshard(source, 4, to=DEEPSEEK), 2)
    assert load(reshard(at, 1, to=HUGGINGFACE)) == load(source)


@pytest.mark.parametrize(("ranks", "format"), [(1, HUGGINGFACE), (4, HUGGINGFACE), (4, DEEPSEEK)])
def test_nothing_to_do(ranks: int, format: Format, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", V3)
    target = source if ranks == 1 else reshard(source, ranks, to=format)
    with pytest.raises(CannotError, match=f"in {format} format on {ranks} ranks? already"):
        reshard(target, ranks, "again")


def test_a_name_that_deepseek_has_not(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", Model(extra={"layers.9.self_attn.extra.weight": (2, 2)}))
    with pytest.raises(
        CannotError, match=r"layers\.9\.self_attn\.extra\.weight has no name in DeepSeek's"
    ) as caught:
        reshard(source, 2, to=DEEPSEEK)
    assert "--to huggingface keeps every name" in (caught.value.hint or "")
    assert load(reshard(reshard(source, 2), 1)) == load(source)


def test_what_no_rule_names_lies_whole_and_is_reported(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "source", Model(extra={"model.layers.0.self_attn.linear_gate.weight": (8, 8)})
    )
    result = api.reshard(source, tmp_path / "t", ReshardOptions(2), run=RUN)
    name = "model.layers.0.self_attn.linear_gate.weight"
    module = name.removesuffix(".weight")
    warning = f"1 modules have no sharding rule and lie whole on every rank, such as {module}"
    assert warning in result.document()["warnings"]
    assert load(tmp_path / "t" / "rank1-of-2")[name] == load(source)[name]


# Merging: what the ranks must agree on


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return reshard(write_model(tmp_path / "source", V3), 4, to=DEEPSEEK)


def test_replicas_that_differ_are_named(sharded: Path) -> None:
    for rank, name in ((3, "layers.0.attn.q_norm.weight"), (2, "layers.1.ffn.gate.bias"), (3, "norm.weight")):
        path = sharded / f"model{rank}-mp4.safetensors"
        tensors = rank_tensors(sharded, rank, 4)
        old = tensors[name]
        tensors[name] = Stored(old.dtype, old.shape, bytes([old.data[0] ^ 1]) + old.data[1:])
        write_rank(path, tensors)
    with pytest.raises(
        BadInputError, match=r"3 of \d+ tensors that every rank holds are not the same"
    ) as caught:
        reshard(sharded, 2, "out")
    assert sorted(caught.value.details) == [
        "model.layers.0.self_attn.q_a_layernorm.weight: rank 3 differs from rank 0",
        "model.layers.1.mlp.gate.e_score_correction_bias: rank 2 differs from rank 0",
        "model.norm.weight: rank 3 differs from rank 0",
    ]
    assert not (sharded.parent / "out").exists()


def test_a_missing_rank(sharded: Path) -> None:
    (sharded / "model2-mp4.safetensors").unlink()
    with pytest.raises(BadInputError, match="1 of 4 ranks are missing") as caught:
        reshard(sharded, 1)
    assert caught.value.details == ("model2-mp4.safetensors",)


def test_a_missing_folder(tmp_path: Path) -> None:
    target = reshard(write_model(tmp_path / "source", V3), 4)
    shutil.rmtree(target / "rank0-of-4")
    with pytest.raises(BadInputError, match="1 of 4 ranks are missing") as caught:
        reshard(target, 1)
    assert caught.value.details == ("rank0-of-4",)


def test_ranks_of_two_checkpoints(sharded: Path) -> None:
    shutil.copy(sharded / "model0-mp4.safetensors", sharded / "model0-mp2.safetensors")
    with pytest.raises(BadInputError, match="of 2 and of 4 ranks"):
        reshard(sharded, 1)


def test_other_weights_beside_the_ranks(sharded: Path) -> None:
    shutil.copy(sharded / "model0-mp4.safetensors", sharded / "model.safetensors")
    with pytest.raises(BadInputError, match="4 rank files and 1 other weight files"):
        reshard(sharded, 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm.weight", None, "model.norm.weight is missing on rank 1 of 4"),
        ("layers.0.attn.wkv_b.weight", None, r"kv_b_proj\.weight is missing on rank 1 of 4"),
        ("layers.0.attn.wo.weight", (8, 8), r"o_proj\.weight in shapes that do not fit together"),
        ("norm.weight", (8,), r"model\.norm\.weight in shapes that do not fit together"),
    ],
)
def test_ranks_that_do_not_fit(
    name: str, change: tuple[int, ...] | None, message: str, sharded: Path
) -> None:
    tensors = rank_tensors(sharded, 1, 4)
    del tensors[name]
    if change:
        tensors[name] = random_bytes(randomness(), "BF16", change)
    write_rank(sharded / "model1-mp4.safetensors", tensors)
    with pytest.raises(BadInputError, match=message):
        reshard(sharded, 1)


def test_an_expert_on_two_ranks(sharded: Path) -> None:
    name = "layers.1.ffn.experts.0.w1.weight"
    tensors = rank_tensors(sharded, 1, 4) | {name: rank_tensors(sharded, 0, 4)[name]}
    write_rank(sharded / "model1-mp4.safetensors", tensors)
    with pytest.raises(BadInputError, match=r"experts\.0\.gate_proj\.weight lies on ranks 0, 1"):
        reshard(sharded, 1)


@pytest.mark.parametrize("mark", [{}, {"stem": 1, "vocabulary": {}, "reblocked": {}}, {"stem": "", "vocabulary": [],
    "reblocked": {}}, {"stem": "", "vocabulary": {}, "reblocked": {"x": [128, 128, 3, 128]}}])  # fmt: skip
def test_a_damaged_note(mark: dict[str, Any], sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_bytes())
    config["mla_convert"]["tensor_parallel"] = mark
    (sharded / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="tensor_parallel is damaged"):
        reshard(sharded, 1)


def test_other_commands_point_here(sharded: Path, tmp_path: Path) -> None:
    for folder in (sharded, reshard(tmp_path / "source", 2)):
        with pytest.raises(CannotError) as caught:
            api.split(folder, tmp_path / "out")
        assert "`mla-convert reshard --tp 1` makes one checkpoint of it" in (caught.value.hint or "")


def test_inspect_reads_sharded_checkpoints(sharded: Path, tmp_path: Path) -> None:
    _, plain = api.inspect(tmp_path / "source")
    for folder, format in ((sharded, "deepseek"), (reshard(tmp_path / "source", 2), "huggingface")):
        _, document = api.inspect(folder)
        assert (document["format"], document["ranks"]) == (format, 4 if format == "deepseek" else 2)
        for key in ("attention", "tensors", "tensor_parallel", "dtypes", "layout"):
            assert document[key] == plain[key]
