"""``reshard --dequantize bf16``: weights whose FP8 blocks would be cut, as BF16, against torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import RUN, Stored, digests, load, random_bytes, randomness, unflushed  # noqa: F401
from conversions import fails, run
from sharded_models import FORMATS, MODELS, Model, config_of, tensors_of, write_model

from mla_convert import api, gathering
from mla_convert.errors import CannotError, UsageError
from mla_convert.geometry import Layout
from mla_convert.manifest import read_manifest
from mla_convert.shard import Experts
from mla_convert.sharding import ReshardOptions
from mla_convert.verify import VerifyOptions, verify
from mla_convert.whole import Format, open_whole

#: Blocks that no border of two ranks cuts, but some border of four ranks does.
MODEL = Model(heads=4, nope=16, v=24, rank=64, fp8=(16, 16), hidden=160, mtp=True)
#: Row-parallel weights, by the end of their names.
IN = ("o_proj.weight", "down_proj.weight")
#: Column-parallel ones.
OUT = ("q_b_proj.weight", "kv_b_proj.weight", "gate_proj.weight", "up_proj.weight")


def reshard(source: Path, tp: int, name: str, **options: Any) -> Path:
    """Reshard into a folder beside the source."""
    api.reshard(source, source.with_name(name), ReshardOptions(tp, **options), run=RUN)
    return source.with_name(name)


def values(tensors: dict[str, Stored], name: str, block: tuple[int, int]) -> torch.Tensor:
    """The BF16 values of a weight, as torch works them out: codes times scales in float32, then rounded."""
    codes = tensors[name].torch().to(torch.float32)
    scale = tensors[name + "_scale_inv"].torch()
    rows, columns = codes.shape
    wide = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (codes * wide).to(torch.bfloat16)


def same(found: Stored, expected: torch.Tensor) -> bool:
    """Bit for bit; of NaN only that it is one."""
    ours = found.torch()
    number = ~expected.isnan()
    return (
        found.dtype == "BF16"
        and ours.shape == expected.shape
        and bool((ours.isnan() == ~number).all())
        and torch.equal(ours.view(torch.int16)[number], expected.contiguous().view(torch.int16)[number])
    )


def is_expert(name: str) -> bool:
    return ".experts." in name


def cut_of(name: str) -> int | None:
    return 0 if name.endswith(OUT) else 1 if name.endswith(IN) else None


@pytest.fixture(params=[1, 1 << 20], ids=["band1", "band1M"])
def bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "BAND", request.param)
    monkeypatch.setattr(gathering, "READ", request.param)


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("experts", Experts)
def test_each_rank_holds_its_part_of_the_values(experts: Experts, tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    source = write_model(tmp_path / "source", MODEL, tensors)
    target = reshard(source, 4, "t", dequantize=True, experts=experts)
    seen = set()
    for rank in range(4):
        held = load(target / f"rank{rank}-of-4")
        for name in tensors:
            if not name.endswith(OUT + IN) or (is_expert(name) and experts is Experts.EP):
                continue
            dimension = cut_of(name)
            assert dimension is not None
            block = MODEL.fp8 or (0, 0)
            size = tensors[name].shape[dimension] // 4
            if size % block[dimension] == 0:
                assert held[name].dtype == "F8_E4M3"
                continue
            assert name + "_scale_inv" not in held
            expected = values(tensors, name, block).narrow(dimension, rank * size, size)
            assert same(held[name], expected), name
            seen.add(name.rpartition(".layers.")[2].partition(".")[2].rpartition(".experts.")[2])
        for name in held:
            if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
                assert held[name] == tensors[name]
                assert held[name + "_scale_inv"] == tensors[name + "_scale_inv"]
    assert {
        "self_attn.q_b_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    } < seen
    assert any(name[0].isdigit() for name in seen) is (experts is Experts.TP)


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("format", FORMATS)
def test_from_ranks_that_lie_otherwise(format: Format, tmp_path: Path) -> None:
    """Values of which codes lie on several ranks, with scales that were made finer there: still the same."""
    source = write_model(tmp_path / "source", MODEL)
    expected = digests(reshard(source, 4, "direct", to=Format.DEEPSEEK, dequantize=True), without=())
    for ranks, options in ((2, {}), (4, {"reblock": True})):
        between = reshard(source, ranks, f"tp{ranks}", to=format, **options)
        again = reshard(between, 4, f"again{ranks}", to=Format.DEEPSEEK, dequantize=True)
        found = digests(again, without=())
        assert found.pop("mla-convert.json") != expected["mla-convert.json"]
        assert found == {name: digest for name, digest in expected.items() if name != "mla-convert.json"}


def test_values_merge_like_any_other(tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    source = write_model(tmp_path / "source", MODEL, tensors)
    back = load(reshard(reshard(source, 4, "t", dequantize=True), 1, "back"))
    for name, stored in back.items():
        if stored.dtype == "BF16" and tensors[name].dtype == "F8_E4M3":
            assert same(stored, values(tensors, name, MODEL.fp8 or (0, 0)))
        else:
            assert stored == tensors[name]
    assert {name for name in tensors if name not in back} == {
        f"{name}_scale_inv"
        for name in back
        if tensors[name].dtype == "F8_E4M3" and back[name].dtype == "BF16"
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_the_layout_cuts(ranks: int, tmp_path: Path) -> None:
    """GLM-5's K and V lie across its blocks: split, they become BF16; all else keeps its codes."""
    model = Model(heads=2, experts=2, nope=24, v=40, rank=32, fp8=(16, 8), model_type="glm_moe_dsa")
    tensors = tensors_of(model)
    source = write_model(tmp_path / "source", model, tensors)
    target = reshard(source, ranks, "t", layout=Layout.SPLIT, dequantize=True, to=Format.HUGGINGFACE)
    ours = load(target if ranks == 1 else target / "rank0-of-2")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    both = values(tensors, name, (16, 8)).view(2, 64, 32)[: 2 // ranks]
    for leaf, expected in (("k_b_proj", both[:, :24]), ("v_b_proj", both[:, 24:])):
        assert same(ours[name.replace("kv_b_proj", leaf)], expected.reshape(-1, 32))
    assert not [n for n in ours if "k_b_proj" in n and "scale" in n]
    if ranks == 1:
        api.split(source, tmp_path / "s", api.SplitOptions(dequantize=True), run=RUN)
        assert load(tmp_path / "s") == ours


def test_the_configuration(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", MODEL)
    target = reshard(source, 4, "t", dequantize=True)
    found = json.loads((target / "config.json").read_bytes())["quantization_config"]
    skipped = found.pop("modules_to_not_convert")
    assert found == config_of(MODEL)["quantization_config"]
    held = load(target / "rank0-of-4")
    plain = {name.removesuffix(".weight") for name in held if name.endswith(OUT + IN)}
    plain = {name for name in plain if f"{name}.weight_scale_inv" not in held}
    assert set(skipped) == plain
    assert "model.layers.0.self_attn.kv_b_proj" in plain
    assert open_whole(target).mark.reblocked == {}
    _, document = api.inspect(target)
    assert document["attention"][0]["storage"] == "BF16"


def test_where_nothing_is_quantised_any_more(tmp_path: Path) -> None:
    """BF16 weights under an FP8 configuration are refused by engines: the statement goes away."""
    tensors = tensors_of(MODEL)
    rng = randomness()
    for name in [name for name in tensors if name.endswith(("q_a_proj.weight", "with_mqa.weight"))]:
        tensors[name] = random_bytes(rng, "BF16", tensors[name].shape)
        del tensors[name + "_scale_inv"]
    source = write_model(tmp_path / "source", MODEL, tensors)
    target = reshard(source, 4, "t", dequantize=True, experts=Experts.TP)
    assert not [name for name in load(target / "rank0-of-4") if "scale" in name]
    config = json.loads((target / "config.json").read_bytes())
    assert "quantization_config" not in config
    options = VerifyOptions(layers=(0,), tokens=32, record=False)
    outcome = [c.passed for c in verify(target, source, options).checks if c.name == "config"]
    assert outcome == [True]
    config["quantization_config"] = config_of(MODEL)["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    outcome = [c.passed for c in verify(target, source, options).checks if c.name == "config"]
    assert outcome == [False]


def test_the_manifest_keeps_what_is_lost(tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    source = write_model(tmp_path / "source", MODEL, tensors)
    target = reshard(source, 4, "t", dequantize=True)
    manifest = read_manifest(target)
    assert manifest is not None
    gone = {name for name in tensors if "scale" in name} - load(target / "rank0-of-4").keys()
    gone = {name for name in gone if not is_expert(name)}
    assert manifest.restore_tensors == {name: tensors[name].data for name in gone}
    assert manifest.tensor_sha256.keys() == gone | {name.removesuffix("_scale_inv") for name in gone}


def test_a_run_without_cut_blocks(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", MODELS["deepseek_v3-fp8"])
    result = api.reshard(source, tmp_path / "t", ReshardOptions(8, dequantize=True), run=RUN)
    assert "no FP8 scale block is cut: --dequantize changes nothing" in result.document()["warnings"]
    plain = digests(reshard(source, 8, "plain"))
    assert digests(tmp_path / "t") == plain


def test_what_is_stored_as_bf16_is_said(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", MODEL)
    stderr = run("reshard", source, "--tp", "4", "--dequantize", "bf16", "--dry-run").stderr
    said = (
        "modules whose FP8 scale blocks would be cut are stored as BF16, model.layers.0.mlp.down_proj among"
    )
    assert said in " ".join(stderr.split())


def test_refusals(tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    source = write_model(tmp_path / "source", MODEL, tensors)
    assert "--dequantize bf16 stores these weights as BF16" in fails(4, "reshard", source, "--tp", "4")
    with pytest.raises(UsageError, match="two ways"):
        reshard(source, 4, "t", dequantize=True, reblock=True)
    stderr = fails(4, "reshard", source, "--tp", "8", "--dequantize", "bf16")
    assert "4 heads of model.layers.0.self_attn do not divide by 8" in stderr
    assert "legal here: --tp 1, 2, 4" in stderr
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = Stored("F8_E5M2", tensors[name].shape, tensors[name].data)
    other = write_model(tmp_path / "other", MODEL, tensors)
    with pytest.raises(CannotError, match=rf"reads F8_E4M3; {name} is F8_E5M2"):
        reshard(other, 4, "t", dequantize=True)
    zero = tensors_of(MODEL)
    scale = zero[name + "_scale_inv"]
    zero[name + "_scale_inv"] = Stored(scale.dtype, scale.shape, bytes(len(scale.data)))
    with pytest.raises(CannotError, match="could not be undone"):
        reshard(write_model(tmp_path / "zero", MODEL, zero), 4, "t", dequantize=True)
    assert not (tmp_path / "t").exists()
