"""State dicts of the attention blocks, and blocks loaded from checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from blocks import SPARSE, error, make, same_bits, weights_for
from safetensors.torch import load_file
from test_reference import SPEC, draw
from torch import nn

from mla_convert import api
from mla_convert.attention import load_attention
from mla_convert.errors import BadInputError, CannotError
from mla_convert.runtime.block import MultiLatentAttention
from mla_convert.runtime.module import AbsorbedMLA, StandardMLA
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.weights import split_kv_rows

# State dicts


def odd_bits(block: nn.Module) -> None:
    """Signed zeros and NaN payloads, which survive only where bits are moved."""
    with torch.no_grad():
        for parameter in block.parameters():
            flat = parameter.view(-1).view(torch.int16)
            flat[:3] = torch.tensor([-32768, 0x7FC1, -63], dtype=torch.int16)


def in_bfloat16(kind: type[MultiLatentAttention], spec: AttentionSpec = SPARSE) -> Any:
    return make(kind, spec).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("layout", ["split", "combined"])
def test_either_layout_comes_back_bit_for_bit(kind: type[MultiLatentAttention], layout: str) -> None:
    source = in_bfloat16(AbsorbedMLA)
    odd_bits(source)
    combined, split = source.export_state_dict("combined"), source.export_state_dict("split")
    assert {"kv_b_proj.weight"} == combined.keys() - split.keys()
    assert {"k_b_proj.weight", "v_b_proj.weight"} == split.keys() - combined.keys()
    halves = split_kv_rows(combined["kv_b_proj.weight"], SPARSE)
    assert same_bits({"k_b_proj.weight": halves[0]}, {"k_b_proj.weight": split["k_b_proj.weight"]})
    loaded = in_bfloat16(kind)
    assert loaded.load_state_dict({"split": split, "combined": combined}[layout]) == ([], [])
    assert same_bits(loaded.export_state_dict("split"), split)
    assert same_bits(loaded.export_state_dict("combined", whole=True), combined)
    assert loaded.export_state_dict().keys() == loaded.state_dict().keys()


def test_loading_within_a_model_and_in_other_names() -> None:
    source, model = in_bfloat16(StandardMLA), nn.ModuleDict({"attn": in_bfloat16(AbsorbedMLA)})
    nn.init.zeros_(model["attn"].k_b_proj.weight)
    state = source.state_dict()
    model.load_state_dict({f"attn.{name}": tensor for name, tensor in state.items()})
    assert same_bits(model["attn"].export_state_dict("combined"), source.export_state_dict())
    native = {"q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b", "kv_b_proj": "wkv_b"}
    native |= {"kv_a_proj_with_mqa": "wkv_a", "kv_a_layernorm": "kv_norm", "o_proj": "wo"}
    renamed = {}
    for name, tensor in state.items():
        module, _, field = name.rpartition(".")
        renamed[f"{native.get(module, module)}.{field}"] = tensor
    assert "wq_b.weight" in renamed and "indexer.wq_b.weight" in renamed
    block = in_bfloat16(AbsorbedMLA)
    nn.init.zeros_(block.q_b_proj.weight)
    block.load_state_dict(renamed)
    assert same_bits(block.export_state_dict("combined"), source.export_state_dict())


def test_both_layouts_side_by_side_have_to_agree() -> None:
    source, block = in_bfloat16(AbsorbedMLA), in_bfloat16(AbsorbedMLA)
    both = source.export_state_dict("split") | source.export_state_dict("combined")
    for loading in (block, in_bfloat16(StandardMLA)):
        loading.load_state_dict(both)
        assert same_bits(loading.export_state_dict("split"), source.export_state_dict("split"))
    both["v_b_proj.weight"] = both["v_b_proj.weight"].flip(0)
    with pytest.raises(BadInputError, match="do not hold the rows of kv_b_proj"):
        block.load_state_dict(both)


def test_what_cannot_be_loaded_is_refused() -> None:
    block = in_bfloat16(AbsorbedMLA)
    state = block.export_state_dict("combined")
    coded = state | {"kv_b_proj.weight": state["kv_b_proj.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(BadInputError, match=r"kv_b_proj\.weight is quantised"):
        block.load_state_dict(coded)
    with pytest.raises(BadInputError, match=r"o_proj\.weight_scale_inv is quantised"):
        block.load_state_dict(state | {"o_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(BadInputError, match=r"kv_b_proj.weight has shape \[\]; it must be a matrix"):
        block.load_state_dict(state | {"kv_b_proj.weight": torch.ones(())})
    with pytest.raises(ValueError, match="no layout 'both'; there are split and combined"):
        block.export_state_dict("both")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="kv_b has shape"):
        block.load_state_dict(state | {"kv_b_proj.weight": state["kv_b_proj.weight"][1:]})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*o_proj\.bias.*Unexpected key.*wrong\.weight"):
        block.load_state_dict(
            {k: v for k, v in state.items() if k != "o_proj.bias"} | {"wrong.weight": state["o_proj.bias"]}
        )


def test_weights_that_do_not_fit_the_spec() -> None:
    weights, w_kv_b = weights_for(SPEC)
    with pytest.raises(BadInputError, match="k_b has shape"):
        AbsorbedMLA(SPEC, weights, split_kv_rows(w_kv_b, SPEC)[::-1])
    with pytest.raises(BadInputError, match="q_a is missing"):
        AbsorbedMLA(SPEC, replace(weights, q_a=None), w_kv_b)
    with pytest.raises(BadInputError, match="indexer's weights are missing"):
        AbsorbedMLA(SPARSE, weights, w_kv_b)


# Checkpoints


def test_a_layer_of_a_checkpoint_in_either_layout(tmp_path: Path) -> None:
    original = tiny_models.save("glm_moe_dsa", tmp_path / "model")
    split = api.split(original).output
    x = draw(30, 2, 64, seed=7)
    outputs = [
        load_attention(folder, layer, kind=kind, dtype=torch.float64)(x)[0]
        for folder in (original, split)
        for kind in (None, StandardMLA)
        for layer in (1, "1", "model.layers.1.self_attn")
    ]
    assert all(error(output, outputs[0]) <= 1e-13 for output in outputs)
    stored = load_attention(split, 1).state_dict()
    tensors = load_file(split / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(tensor, tensors[f"model.layers.1.self_attn.{name}"])


def test_layers_that_are_not_there_or_not_one(tmp_path: Path) -> None:
    original = tiny_models.save("longcat_flash", tmp_path / "model")
    for dtype in (torch.int32, torch.float8_e4m3fn):
        with pytest.raises(CannotError, match=f"cannot be {str(dtype)[6:]}"):
            load_attention(original, 0, dtype=dtype)
    with pytest.raises(CannotError, match="There is no MLA block 7") as caught:
        load_attention(original, 7)
    assert caught.value.hint == "Layers with MLA: 0, 1."
    with pytest.raises(CannotError, match="Layer 1 has 2 attention blocks") as caught:
        load_attention(original, 1)
    assert "model.layers.1.self_attn.0, model.layers.1.self_attn.1" in str(caught.value.hint)
