"""``reshard`` where things do not divide: experts, vocabulary, scales, and what is refused before a weight is read."""

from __future__ import annotations

import json
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
)
from resharded import DEEPSEEK, HUGGINGFACE, rank_tensors, reshard, write_rank
from sharded_models import MODELS, V3, Model, config_of, tensors_of, write_model

from mla_convert import api
from mla_convert.errors import BadInputError, CannotError
from mla_convert.shard import Experts
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format, open_whole

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
