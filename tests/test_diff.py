"""``diff``: the symbol of every tensor, across formats, ranks and layouts, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import RUN, Stored, load, split, unflushed, write_file  # noqa: F401
from conversions import run
from safetensors import safe_open
from sharded_models import FORMATS, MODELS, V3, Model, tensors_of, write_model

from mla_convert import api
from mla_convert.comparing import Comparison, compare
from mla_convert.geometry import Layout
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format


def reshard(source: Path, tp: int, name: str, **options: Any) -> Path:
    """Reshard into a folder beside the source."""
    api.reshard(source, source.with_name(name), ReshardOptions(tp, **options), run=RUN)
    return source.with_name(name)


def symbols(result: Comparison) -> dict[str, str]:
    """Symbol by name."""
    assert len({line.name for line in result.lines}) == len(result.lines)
    return {line.name: line.symbol for line in result.lines}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", MODELS["deepseek_v3-fp8"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["deepseek_v32-fp8", "kimi", "longcat"])
def test_the_same_across_formats_and_ranks(name: str, format: Format, tmp_path: Path) -> None:
    model = MODELS[name]
    source = write_model(tmp_path / "source", model)
    result = compare(source, reshard(source, 4, "b", to=format))
    assert symbols(result) == dict.fromkeys(tensors_of(model), "=")
    assert result.is_same


def test_another_layout(source: Path) -> None:
    sharded = reshard(source, 8, "b", to=Format.DEEPSEEK, layout=Layout.SPLIT)
    for result in (compare(source, sharded), compare(sharded, source)):
        assert result.is_same
        for name, symbol in symbols(result).items():
            assert symbol == ("*" if ".kv_b_proj." in name else "="), name
    assert {line.symbol for line in compare(sharded, split(source)).lines} == {"="}


def test_finer_scale_blocks(tmp_path: Path) -> None:
    model = MODELS["glm_moe_dsa-fp8"]
    source = write_model(tmp_path / "source", model)
    result = compare(source, reshard(source, 8, "b", reblock=True))
    assert result.is_same
    found = symbols(result)
    assert found["model.layers.0.mlp.gate_proj.weight_scale_inv"] == "*"
    assert found["model.layers.0.mlp.gate_proj.weight"] == "="


def test_every_kind_of_difference(source: Path) -> None:
    sharded = reshard(source, 4, "b", to=Format.DEEPSEEK)
    tensors = load(source)
    changed = "model.layers.1.mlp.experts.6.down_proj.weight"
    last = tensors[changed]
    tensors[changed] = Stored(last.dtype, last.shape, last.data[:-1] + bytes([last.data[-1] ^ 128]))
    dtype = "model.layers.0.input_layernorm.weight"
    tensors[dtype] = Stored("F16", tensors[dtype].shape, tensors[dtype].data)
    del tensors["model.norm.weight"]
    tensors["more.weight"] = Stored("U8", (2,), b"ab")
    other = write_model(source.with_name("other"), MODELS["deepseek_v3-fp8"], tensors)
    result = compare(sharded, other)
    assert not result.is_same
    different = {name: symbol for name, symbol in symbols(result).items() if symbol != "="}
    assert different == {changed: "!", dtype: "!", "model.norm.weight": "-", "more.weight": "+"}
    notes = {line.name: line.note for line in result.lines}
    assert notes[changed] == "the bytes differ"
    assert notes[dtype] == "BF16 [64] in A, F16 [64] in B"


def test_ranks_that_contradict_each_other(source: Path) -> None:
    sharded = reshard(source, 2, "b")
    path = next((sharded / "rank1-of-2").glob("model-00001*"))
    tensors = load(sharded / "rank1-of-2")
    name = "model.layers.0.self_attn.q_a_layernorm.weight"
    assert name in tensors
    with safe_open(path, framework="pt") as file:
        kept = {n: tensors[n] for n in file.keys()}  # noqa: SIM118 - not a mapping
    kept[name] = Stored("BF16", kept[name].shape, bytes(len(kept[name].data)))
    write_file(path, kept)
    result = compare(source, sharded)
    assert [(x.symbol, x.name, x.note) for x in result.lines if x.symbol != "="] == [
        ("!", name, "rank 1 differs from rank 0 in B")
    ]


def test_both_layouts_that_contradict_each_other(tmp_path: Path) -> None:
    """The combined tensors are compared; K and V beside them must say the same."""
    source = write_model(tmp_path / "source", V3)
    both = split(source, "both", keep_combined=True)
    assert compare(source, both).is_same
    name = "model.layers.1.self_attn.v_b_proj.weight"
    for path in both.glob("*.safetensors"):
        data = path.read_bytes()
        value = load(both)[name].data
        if data.find(value) > 0:
            path.write_bytes(data.replace(value, bytes(len(value))))
    result = compare(source, both)
    assert not result.is_same
    (line,) = [line for line in result.lines if line.symbol == "!"]
    assert line.name == "model.layers.1.self_attn.kv_b_proj.weight"
    assert line.note == f"{name} row 0 differs from {line.name} row 16 in B"


def test_scales_of_k_and_v_that_contradict_each_other(tmp_path: Path) -> None:
    """A combined tensor has one scale for a block of K and V; what it would not show must not pass as the same."""
    source = write_model(
        tmp_path / "source", Model(heads=2, nope=24, v=40, rank=32, fp8=(64, 32), indexer=True)
    )
    halved = split(source)
    assert compare(source, halved).is_same
    name = "model.layers.0.self_attn.v_b_proj.weight_scale_inv"
    value = load(halved)[name].data
    for path in halved.glob("*.safetensors"):
        data = path.read_bytes()
        at = data.find(value)
        if at > 0:
            path.write_bytes(data[:at] + b"\1\2\3\4" + data[at + 4 :])
    result = compare(source, halved)
    assert [(x.symbol, "belong to one block" in x.note) for x in result.lines if x.symbol not in "=*"] == [
        ("!", True)
    ]


def test_a_checkpoint_without_mla(tmp_path: Path) -> None:
    for folder, byte in (("a", b"\1"), ("b", b"\2")):
        (tmp_path / folder).mkdir()
        write_file(tmp_path / folder / "model.safetensors", {"x": Stored("U8", (1,), byte)})
    assert compare(tmp_path / "a", tmp_path / "a").is_same
    assert symbols(compare(tmp_path / "a", tmp_path / "b")) == {"x": "!"}


def test_the_command(source: Path, tmp_path: Path) -> None:
    sharded = reshard(source, 2, "b", layout=Layout.SPLIT)
    done = run("diff", source, sharded, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["same"]) == (0, True)
    count = len(tensors_of(MODELS["deepseek_v3-fp8"]))
    assert document["counts"] == {"=": count - 6, "*": 6, "!": 0, "-": 0, "+": 0}
    assert run("diff", source, sharded, "-q").stdout == "same\n"
    shown = run("diff", source, sharded).stdout
    assert "* model.layers.0.self_attn.kv_b_proj.weight" in " ".join(shown.split())
    assert "model.norm.weight" not in shown
    assert "= model.norm.weight" in " ".join(run("diff", source, sharded, "-v").stdout.split())

    other = write_model(tmp_path / "other", Model(mtp=True))
    done = run("diff", source, other)
    assert done.returncode == 10
    assert "they DIFFER" in done.stdout
    assert "differ" in done.stderr
    done = run("diff", source, other, "--json")
    assert (done.returncode, json.loads(done.stdout)["same"]) == (10, False)
    assert run("diff", source, tmp_path / "nowhere").returncode == 2
