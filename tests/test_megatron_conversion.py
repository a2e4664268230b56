"""Hugging Face to Megatron and back, with genuine megatron-core in between: every bit, and what the model says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dist_checkpoints
import megatron_checkpoints as made
import pytest
import torch
from conversions import run
from megatron_models import Model, megatron_model

from mla_convert import api
from mla_convert.comparing import compare
from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.torch_dist_metadata import read_metadata
from mla_convert.geometry import Layout
from mla_convert.megatron.changes import MegatronOptions
from mla_convert.megatron.eras import IndexerRows, Norms
from mla_convert.megatron.names import LAYER, MTP, OUTER, Dictionary, place_of
from mla_convert.megatron.translation import LayerSpec
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format

TO_DIST = ReshardOptions(1, to=Format.TORCH_DIST)
LOCAL = ReshardOptions(1, to=Format.TORCH_DIST, spec=LayerSpec.LOCAL)
BACK = ReshardOptions(1, to=Format.HUGGINGFACE)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with megatron_model("0.19.2", tmp_path_factory.mktemp("megatron")) as model:
        yield model


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with megatron_model("0.16.1", tmp_path_factory.mktemp("megatron")) as model:
        yield model


def keys(folder: Path) -> set[str]:
    return set(read_metadata(folder / "release" / ".metadata").tensors)


# There and back


@pytest.mark.parametrize("spec", list(LayerSpec))
@pytest.mark.parametrize("family", made.FAMILIES)
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, family: str, spec: LayerSpec) -> None:
    tensors, config = made.make(family)
    source = made.write(tmp_path / "hf", tensors, config)
    api.reshard(source, tmp_path / "megatron", ReshardOptions(1, to=Format.TORCH_DIST, spec=spec))
    api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    made.require_equal(made.read(tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_without_copies_none_come_back(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3", shared=False)
    source = made.write(tmp_path / "hf", tensors, config)
    api.reshard(source, tmp_path / "megatron", TO_DIST)
    api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    made.require_equal(made.read(tmp_path / "back"), tensors)


def test_split_on_the_way_and_combined_on_the_way_back(tmp_path: Path) -> None:
    tensors, config = made.make("glm_moe_dsa")
    source = made.write(tmp_path / "hf", tensors, config)
    options = ReshardOptions(1, to=Format.TORCH_DIST, layout=Layout.SPLIT)
    api.reshard(source, tmp_path / "megatron", options)
    assert "decoder.layers.2.self_attention.linear_k_up_proj.weight" in keys(tmp_path / "megatron")
    back = ReshardOptions(1, to=Format.HUGGINGFACE, layout=Layout.COMBINED)
    api.reshard(tmp_path / "megatron", tmp_path / "back", back)
    made.require_equal(made.read(tmp_path / "back"), tensors)


def test_diff_sees_through_the_formats(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v32")
    source = made.write(tmp_path / "hf", tensors, config)
    api.reshard(source, tmp_path / "dist", TO_DIST)
    api.reshard(source, tmp_path / "torch", ReshardOptions(2, to=Format.TORCH))
    for other in ("dist", "torch"):
        assert compare(source, tmp_path / other).is_same
    rank = next((tmp_path / "torch" / "release").glob("mp_rank_01/*.pt"))
    data = bytearray(rank.read_bytes())
    at = data.index(bits_of(tensors["model.layers.1.self_attn.o_proj.weight"][:1, 32:]))
    data[at] ^= 1
    rank.write_bytes(data)
    found = compare(source, tmp_path / "torch")
    assert [line.name for line in found.lines if line.symbol != "="] == [
        "model.layers.1.self_attn.o_proj.weight"
    ]


def bits_of(tensor: torch.Tensor) -> bytes:
    return made.bits(tensor).numpy().tobytes()


@pytest.mark.parametrize("is_quantised", [False, True])
def test_deepseek_s_ranks_go_over_as_one(tmp_path: Path, is_quantised: bool) -> None:
    source = tmp_path / "hf"
    if is_quantised:
        write_demo_checkpoint(source)
    else:
        made.write(source, *made.make("deepseek_v32"))
    options = ReshardOptions(1, to=Format.TORCH_DIST, dequantize=is_quantised)
    api.reshard(source, tmp_path / "wanted", options)
    api.reshard(source, tmp_path / "ranks", ReshardOptions(2, to=Format.DEEPSEEK))
    api.reshard(tmp_path / "ranks", tmp_path / "found", options)
    assert compare(tmp_path / "wanted", tmp_path / "found").is_same


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_older_release_s_rows_and_norms_come_back_as_they_were(tmp_path: Path, family: str) -> None:
    tensors, config = made.make(family)
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", TO_DIST)
    older = MegatronOptions(norms=Norms.FUSED, indexer=IndexerRows.ROPE_LAST)
    api.migrate(tmp_path / "megatron", tmp_path / "older", older)
    assert "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight" in keys(tmp_path / "older")
    api.reshard(tmp_path / "older", tmp_path / "back", BACK)
    made.require_equal(made.read(tmp_path / "back"), tensors)


def test_an_indexer_whose_order_nothing_tells_is_not_guessed(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v32", mtp=False)
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", TO_DIST)
    state = torch.load(tmp_path / "megatron" / "release" / "common.pt", weights_only=False)
    for name in [name for name in vars(state["args"]) if name.startswith("dsa_")]:
        delattr(state["args"], name)
    torch.save(state, tmp_path / "megatron" / "release" / "common.pt")
    with pytest.raises(CannotError, match="nothing in the checkpoint tells the order"):
        api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    stated = ReshardOptions(1, to=Format.HUGGINGFACE, indexer_from=IndexerRows.ROPE_FIRST)
    api.reshard(tmp_path / "megatron", tmp_path / "back", stated)
    made.require_equal(made.read(tmp_path / "back"), tensors)


# What Megatron makes of it


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_megatron_loads_every_tensor(tmp_path: Path, newer: Model, family: str) -> None:
    tensors, config = made.make(family, dtype=torch.float32)
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", LOCAL)
    state, _ = newer.load_model(path=tmp_path / "megatron" / "release")
    made.require_equal(state, made.in_megatron(tensors))


def test_the_older_release_loads_it_too(tmp_path: Path, older: Model) -> None:
    tensors, config = made.make("deepseek_v3", dtype=torch.float32)
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", LOCAL)
    state, _ = older.load_model(path=tmp_path / "megatron" / "release")
    made.require_equal(state, made.in_megatron(tensors, inner="transformer_layer"))


def test_layers_that_share_an_indexer_have_none_in_megatron_either(tmp_path: Path, newer: Model) -> None:
    tensors, config = made.make("glm_moe_dsa", dtype=torch.float32, mtp=False)
    config |= {
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    }  # layers 1 and 3 select, layer 2 does as layer 1
    tensors = {name: value for name, value in tensors.items() if ".layers.1.self_attn.indexer." not in name}
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", LOCAL)
    state, _ = newer.load_model(path=tmp_path / "megatron" / "release")
    made.require_equal(state, made.in_megatron(tensors))


def test_layers_that_are_all_alike_are_stacked(tmp_path: Path, newer: Model) -> None:
    tensors, config = made.make("deepseek_v3", dtype=torch.float32, experts=False, mtp=False)
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", LOCAL)
    assert "decoder.layers.self_attention.linear_proj.weight" in keys(tmp_path / "megatron")
    state, _ = newer.load_model(path=tmp_path / "megatron" / "release")
    made.require_equal(state, made.in_megatron(tensors))
    api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    made.require_equal(made.read(tmp_path / "back"), tensors)


def test_megatron_reads_a_rank_of_the_older_format(tmp_path: Path, newer: Model) -> None:
    tensors, config = made.make("deepseek_v32", dtype=torch.float32)
    options = ReshardOptions(1, to=Format.TORCH, spec=LayerSpec.LOCAL)
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", options)
    state, _ = newer.load_model(file=tmp_path / "megatron" / "release" / "mp_rank_00" / "model_optim_rng.pt")
    made.require_equal(state, made.in_megatron(tensors))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_megatron_says_what_transformers_says(tmp_path: Path, newer: Model, family: str) -> None:
    """Logits of a real Megatron model from our conversion: names, rows, norms, routing and selection all count."""
    from transformers import AutoModelForCausalLM

    tensors, config = made.make(family, dtype=torch.float32)
    source = made.write(tmp_path / "hf", tensors, config)
    api.reshard(source, tmp_path / "megatron", LOCAL)
    tokens = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].double()
    _, logits = newer.load_model(path=tmp_path / "megatron" / "release", tokens=tokens)
    found = torch.tensor(logits, dtype=torch.float64)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


# FP8


def test_fp8_is_multiplied_out_on_request_alone(tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path / "hf")
    with pytest.raises(CannotError, match="F8_E4M3"):
        api.reshard(tmp_path / "hf", tmp_path / "megatron", TO_DIST)
    options = ReshardOptions(
        4, to=Format.TORCH, dequantize=True
    )  # 256 columns over 4 ranks cut blocks of 128
    api.reshard(tmp_path / "hf", tmp_path / "megatron", options)
    api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    stored, found = made.read(tmp_path / "hf"), made.read(tmp_path / "back")
    assert found.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name, tensor in found.items():
        scale = stored.get(f"{name}_scale_inv")
        wanted = stored[name]
        if scale is not None:
            grid = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                : wanted.shape[0], : wanted.shape[1]
            ]
            wanted = (wanted.float() * grid).bfloat16()
        assert torch.equal(made.bits(tensor), made.bits(wanted)), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


# Stacked


def test_layers_and_experts_in_one_chunk_come_apart(tmp_path: Path) -> None:
    """All layers and experts in one tensor, saved whole by PyTorch: Megatron's own ranks save them one by one."""
    tensors, config = made.make("deepseek_v3", mtp=False)
    layers = range(made.DENSE, made.LAYERS)
    whole = made.in_megatron(tensors)
    stacked = {name: value for name, value in whole.items() if not name.startswith("decoder.layers.")}
    for name in whole:
        below = name.removeprefix("decoder.layers.1.")
        if below == name or ".local_experts." in name:
            continue
        values = [whole[f"decoder.layers.{layer}.{below}"] for layer in layers]
        stacked[f"decoder.layers.{below}"] = torch.stack(values)
    for leaf in ("linear_fc1", "linear_fc2"):
        experts = [
            torch.stack(
                [whole[f"decoder.layers.{n}.mlp.experts.local_experts.{e}.{leaf}.weight"] for e in range(4)]
            )
            for n in layers
        ]
        stacked[f"decoder.layers.mlp.experts.experts.{leaf}.weight"] = torch.stack(experts)
    dist_checkpoints.write(tmp_path / "megatron", stacked, {"iteration": 1})
    config["num_hidden_layers"] = len(layers)
    (tmp_path / "megatron" / "config.json").write_text(json.dumps(config))
    api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    wanted = {n: t for n, t in tensors.items() if not n.startswith("model.layers.0.")}
    wanted = {re.sub(r"layers\.(\d)", lambda m: f"layers.{int(m[1]) - 1}", n): t for n, t in wanted.items()}
    made.require_equal(made.read(tmp_path / "back"), wanted)


# Refusals


def test_copies_that_differ_from_what_they_copy_are_refused(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3")
    tensors[f"model.layers.{made.LAYERS}.embed_tokens.weight"][3, 3] += 1
    source = made.write(tmp_path / "hf", tensors, config)
    with pytest.raises(BadInputError, match=r"embed_tokens\.weight is not the same"):
        api.reshard(source, tmp_path / "megatron", TO_DIST)
    assert not (tmp_path / "megatron").exists()


def test_what_megatron_has_no_place_for_is_named(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3")
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(made.HIDDEN)
    source = made.write(tmp_path / "hf", tensors, config)
    with pytest.raises(CannotError, match=r"1 of \d+ tensors have no place") as refused:
        api.reshard(source, tmp_path / "megatron", TO_DIST)
    assert refused.value.details == ("model.layers.1.self_attn.o_proj.bias",)


def test_half_of_a_gated_projection_is_refused(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3")
    del tensors["model.layers.2.mlp.experts.1.up_proj.weight"]
    source = made.write(tmp_path / "hf", tensors, config)
    with pytest.raises(BadInputError, match=r"experts\.1\.linear_fc1\.weight needs 2 matrices"):
        api.reshard(source, tmp_path / "megatron", TO_DIST)


def test_an_expert_that_is_missing_is_noticed(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3")
    gone = [name for name in tensors if name.startswith("model.layers.2.mlp.experts.1.")]
    source = made.write(tmp_path / "hf", {n: t for n, t in tensors.items() if n not in gone}, config)
    with pytest.raises(BadInputError, match="4 parts, but 3 are there"):
        api.reshard(source, tmp_path / "megatron", TO_DIST)


def test_resharding_torch_dist_alone_is_left_to_megatron(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3")
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", TO_DIST)
    done = run("reshard", str(tmp_path / "megatron"), "--tp", "2")
    assert done.returncode == 4
    assert "Megatron deals it out to any number" in done.stderr
    assert "--to torch" in done.stderr


# Vocabulary and arguments


def test_a_padded_vocabulary_loses_its_padding_again(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v3", vocabulary=250)
    source = made.write(tmp_path / "hf", tensors, config)
    options = ReshardOptions(1, to=Format.TORCH_DIST, pad_vocabulary=True)
    api.reshard(source, tmp_path / "megatron", options)
    metadata = read_metadata(tmp_path / "megatron" / "release" / ".metadata")
    assert metadata.tensors["embedding.word_embeddings.weight"].spec.shape == (256, made.HIDDEN)
    api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    made.require_equal(made.read(tmp_path / "back"), tensors)


def test_without_a_configuration_one_is_made_of_the_arguments(tmp_path: Path) -> None:
    tensors, config = made.make("glm_moe_dsa")
    api.reshard(made.write(tmp_path / "hf", tensors, config), tmp_path / "megatron", TO_DIST)
    (tmp_path / "megatron" / "config.json").unlink()
    done = api.reshard(tmp_path / "megatron", tmp_path / "back", BACK)
    assert any("no config.json" in warning for warning in done.plan.warnings)
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    same = set(config) - {"model_type"}
    assert {name: found.get(name) for name in same} == {name: config[name] for name in same}
    assert found["model_type"] == "glm_moe_dsa"  # by its interleaved indexer
    copies = {f"model.layers.{made.LAYERS}.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    made.require_equal(made.read(tmp_path / "back"), {n: t for n, t in tensors.items() if n not in copies})


def test_the_same_conversion_gives_the_same_bytes(tmp_path: Path) -> None:
    tensors, config = made.make("deepseek_v32")
    source = made.write(tmp_path / "hf", tensors, config)
    for name in ("one", "two"):
        api.reshard(source, tmp_path / name, TO_DIST)
    for file in sorted(
        path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()
    ):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


# The table


def test_the_table_translates_back_what_it_translates() -> None:
    dictionary = Dictionary(5, "language_model.model.")
    for base in ("decoder.layers.2.", "mtp.layers.1.transformer_layer."):
        for entry in LAYER:
            name = base + entry.megatron.format(3)
            norms = dict.fromkeys(entry.huggingface, entry.placement) if entry.placement else {}
            for part, theirs in enumerate(dictionary.to_huggingface(name) or ()):
                assert dictionary.to_megatron(theirs, norms) == (name, part, len(entry.huggingface))
    for name in (*(f"mtp.layers.0.{entry.megatron}" for entry in MTP), *(entry.megatron for entry in OUTER)):
        (theirs,) = dictionary.to_huggingface(name) or ("",)
        assert dictionary.to_megatron(theirs, {}) == (name, 0, 1)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.x.input_layernorm.weight",
        "mtp.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight",
        "decoder.layers.0.enorm.weight",
    ],
)
def test_other_names_are_not_in_the_table(name: str) -> None:
    assert place_of(name) is None


# Memory


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A conversion's peak, in a process of its own, for 8 and for 64 MB of experts."""
    peaks = []
    for number, width in enumerate((1 << 10, 1 << 13)):
        folder = tmp_path / str(number)
        tensors, config = made.make("deepseek_v3", mtp=False)
        config["moe_intermediate_size"] = width
        for name in list(tensors):
            if ".experts." in name:
                shape = (made.HIDDEN, width) if "down_proj" in name else (width, made.HIDDEN)
                tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
        made.write(folder, tensors, config)
        peaks.append(peak_of("reshard", folder, "--to", "torch_dist", "-o", tmp_path / f"out{number}"))
    assert peaks[1] < peaks[0] + (12 << 20)


_MEASURE = """
from mla_convert.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_of(*words: Any) -> int:
    """Peak resident bytes of a run of the command."""
    command = [sys.executable, "-c", _MEASURE, *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) * 1024
