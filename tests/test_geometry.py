"""Heads and dims of attention blocks: from shapes, against configurations that agree, are silent, or lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Recipe, Stored, load, make_config, write_checkpoint, write_file

from mla_convert.errors import BadInputError, CannotError, ExitCode
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.geometry import (
    AttentionBlock,
    Layout,
    find_blocks,
    layer_config,
    quantization_config,
    text_config,
)
from mla_convert.names import Part

BASE = Recipe(layers=1, heads=4, nope=16, rope=8, v=24, rank=32)
PREFIX = "model.layers.0.self_attn."


def blocks_of(folder: Path, *, trust_shapes: bool = False) -> tuple[AttentionBlock, ...]:
    return find_blocks(open_checkpoint(folder), trust_shapes=trust_shapes)


def with_config(folder: Path, recipe: Recipe = BASE, **changes: Any) -> Path:
    return write_checkpoint(folder, Recipe(**{**vars(recipe), "config": changes}))


def with_tensors(folder: Path, recipe: Recipe, **changes: Stored | None) -> Path:
    """A checkpoint with tensors of its first block replaced, added (``k_b_proj``) or, for None, removed."""
    write_checkpoint(folder, Recipe(**{**vars(recipe), "index": False}))
    tensors = load(folder)
    for name, tensor in changes.items():
        full = f"{PREFIX}{name}.weight"
        if tensor is None:
            del tensors[full]
        else:
            tensors[full] = tensor
    write_file(folder / "model.safetensors", tensors)
    return folder


def matrix(*shape: int) -> Stored:
    count = 2
    for size in shape:
        count *= size
    return Stored("BF16", shape, bytes(count))


def dims(block: AttentionBlock) -> tuple[int, int, int, int, int]:
    return block.heads, block.nope, block.rope, block.v, block.rank


def test_every_attribute(tmp_path: Path) -> None:
    (block,) = blocks_of(with_config(tmp_path / "m"))
    assert dims(block) == (4, 16, 8, 24, 32)
    assert (block.hidden, block.q_rank, block.layer, block.prefix) == (24, 12, 0, PREFIX)
    assert (block.layout, block.is_mtp, block.has_indexer, block.note) == (
        Layout.COMBINED,
        False,
        False,
        None,
    )
    assert (block.kv.combined_rows, block.kv.k_rows, block.kv.v_rows) == (160, 64, 96)
    assert block.tensor(Part.K_B) == f"{PREFIX}k_b_proj.weight"
    assert block.dims == "4 heads, nope 16, rope 8, v 24, rank 32"


@pytest.mark.parametrize("q_rank", [None, 12])
def test_shapes_alone_are_enough(q_rank: int | None, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", Recipe(**{**vars(BASE), "q_rank": q_rank}))
    (folder / "config.json").unlink()
    (block,) = blocks_of(folder)
    assert dims(block) == (4, 16, 8, 24, 32)
    assert block.q_rank == q_rank
    assert "no configuration states them" in (block.note or "")


def test_a_configuration_without_the_fields(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", BASE)
    (folder / "config.json").write_text('{"model_type": "something"}')
    assert dims(blocks_of(folder)[0]) == (4, 16, 8, 24, 32)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "swapped": ({"qk_nope_head_dim": 24, "v_head_dim": 16}, "qk_nope_head_dim 24"),
    "heads": ({"num_attention_heads": 8}, "num_attention_heads 8"),
    "heads-beside-true-kv-heads": ({"num_attention_heads": 8, "num_key_value_heads": 4}, "heads 8"),
    "half-the-heads": ({"num_attention_heads": 2, "qk_nope_head_dim": 32, "v_head_dim": 48}, "heads 2"),
    "rank": ({"kv_lora_rank": 64}, "kv_lora_rank 64"),
    "rope": ({"qk_rope_head_dim": 16}, "qk_rope_head_dim 16"),
    "nope": ({"qk_nope_head_dim": 17}, "qk_nope_head_dim 17"),
    "rank-of-no-number": ({"kv_lora_rank": [32]}, r"kv_lora_rank \[32\]"),
    "heads-of-no-number": ({"num_attention_heads": "4"}, "num_attention_heads 4"),
}


@pytest.mark.parametrize(("changes", "stated"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions(changes: dict[str, Any], stated: str, tmp_path: Path) -> None:
    folder = with_config(tmp_path / "m", **changes)
    with pytest.raises(BadInputError, match=f"config.json contradicts the weights.*{stated}") as caught:
        blocks_of(folder)
    assert caught.value.message.startswith(PREFIX)
    assert "--trust-shapes" in (caught.value.hint or "")
    assert "rank 32" in caught.value.message or "4 heads, nope 16, rope 8, v 24" in caught.value.message
    (block,) = blocks_of(folder, trust_shapes=True)
    assert dims(block) == (4, 16, 8, 24, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 7},
        {"head_dim": 576},
        {"num_attention_heads": None},
        {"v_head_dim": 0},
        {"qk_nope_head_dim": True},
        {"swa_kv_lora_rank": 64},
        {"num_attention_heads": None, "n_heads": 4},
    ],
)
def test_what_means_nothing_does_no_harm(changes: dict[str, Any], tmp_path: Path) -> None:
    assert dims(blocks_of(with_config(tmp_path / "m", **changes))[0]) == (4, 16, 8, 24, 32)


@pytest.mark.parametrize("heads", [0, -1])
def test_no_heads(heads: int, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=f"num_attention_heads {heads}"):
        blocks_of(with_config(tmp_path / "m", num_attention_heads=heads))
    (block,) = blocks_of(with_config(tmp_path / "n", num_attention_heads=heads, v_head_dim=None))
    assert dims(block) == (4, 16, 8, 24, 32)


def test_v_defaults_to_hidden_over_heads(tmp_path: Path) -> None:
    recipe = Recipe(**{**vars(BASE), "v": 6})
    (block,) = blocks_of(with_config(tmp_path / "m", recipe, v_head_dim=None))
    assert block.v == 6 == recipe.hidden // recipe.heads


def test_no_rotary_dims(tmp_path: Path) -> None:
    recipe = Recipe(**{**vars(BASE), "rope": 0})
    (block,) = blocks_of(write_checkpoint(tmp_path / "m", recipe))
    assert dims(block) == (4, 16, 0, 24, 32)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(CannotError, match="shapes alone do not fix the head dimensions") as caught:
        blocks_of(tmp_path / "m")
    assert "config.json" in (caught.value.hint or "")


def test_layers_without_rotary_dims_are_wider(tmp_path: Path) -> None:
    """Mistral-Large-4: where a layer has no rotary part, nope grows by it."""
    recipe = Recipe(**{**vars(BASE), "nope": 24, "rope": 0})
    (block,) = blocks_of(with_config(tmp_path / "m", recipe, qk_nope_head_dim=16, qk_rope_head_dim=8))
    assert dims(block) == (4, 24, 0, 24, 32)


def test_a_query_projection_with_a_gate(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "m", BASE, q_b_proj=matrix(4 * (16 + 8 + 24), 12))
    for trust_shapes in (False, True):
        (block,) = blocks_of(folder, trust_shapes=trust_shapes)
        assert dims(block) == (4, 16, 8, 24, 32)
        assert "gate" in (block.note or "")


def test_only_the_up_projection(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    (block,) = blocks_of(with_tensors(tmp_path / "m", BASE, **nothing))
    assert dims(block) == (4, 16, 8, 24, 32)
    assert block.hidden is None


def test_another_kind_of_layer(tmp_path: Path) -> None:
    """Fields with a prefix describe layers of their own; what they leave out is as for the others."""
    recipe = Recipe(**{**vars(BASE), "heads": 2, "nope": 24, "rank": 64})
    own = {"swa_num_attention_heads": 2, "swa_qk_nope_head_dim": 24, "swa_kv_lora_rank": 64}
    config = {
        key: make_config(BASE)[key] for key in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
    }
    (block,) = blocks_of(with_config(tmp_path / "m", recipe, **config, **own))
    assert dims(block) == (2, 24, 8, 24, 64)
    folder = with_config(tmp_path / "n", recipe, **config, **{**own, "swa_num_attention_heads": 3})
    with pytest.raises(BadInputError, match="contradicts"):
        blocks_of(folder)


def test_fields_of_one_layer(tmp_path: Path) -> None:
    recipe = Recipe(**{**vars(BASE), "layers": 2})
    folder = with_config(tmp_path / "m", recipe, v_head_dim=9, per_layer_config={
        "0": {"v_head_dim": 24}, "1": {"v_head_dim": 24}})  # fmt: skip
    assert [block.v for block in blocks_of(folder)] == [24, 24]
    assert layer_config({"kv_lora_rank": 1, "a": 1, "per_layer_config": {"3": {"a": 2}}}, 3)["a"] == 2
    assert layer_config({"kv_lora_rank": 1, "a": 1, "per_layer_config": {"3": {"a": 2}}}, 4)["a"] == 1


def test_where_the_language_model_is_described() -> None:
    inner = {"kv_lora_rank": 8}
    assert text_config({"text_config": inner, "vision_config": {}}) == inner
    assert text_config({"language_config": inner}) == inner
    assert text_config({**inner, "text_config": {}}) == {**inner, "text_config": {}}
    assert text_config(None) == {}
    assert quantization_config({"text_config": {**inner, "quantization_config": {"a": 1}}}) == {"a": 1}
    assert quantization_config({"compression_config": {"b": 1}}) == {"b": 1}
    assert quantization_config({"quantization_config": None}) is None


def test_order_and_mtp(tmp_path: Path) -> None:
    recipe = Recipe(layers=11, without_mla=frozenset(range(1, 10)), mtp=True)
    found = blocks_of(write_checkpoint(tmp_path / "m", recipe))
    assert [(block.layer, block.is_mtp) for block in found] == [(0, False), (10, False), (11, True)]


@pytest.mark.parametrize("prefix", ["model.mtp.", "model.mtp_"])
def test_mtp_by_name(prefix: str, tmp_path: Path) -> None:
    found = blocks_of(write_checkpoint(tmp_path / "m", Recipe(layers=1, prefix=prefix)))
    assert [block.is_mtp for block in found] == [True]


def test_two_attentions_a_layer(tmp_path: Path) -> None:
    recipe = Recipe(attentions=("self_attn.0", "self_attn.1"))
    found = blocks_of(write_checkpoint(tmp_path / "m", recipe))
    assert [block.prefix for block in found] == recipe.modules()
    assert [block.layer for block in found] == [0, 0, 1, 1]


def test_an_indexer(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "m", BASE, **{"indexer.wq_b": matrix(8, 12)})
    assert blocks_of(folder)[0].has_indexer


FAULTS: dict[str, tuple[dict[str, Stored | None], str]] = {
    "no v": ({"kv_b_proj": None, "k_b_proj": matrix(64, 32)}, "the v_b up-projection is missing"),
    "no k": ({"kv_b_proj": None, "v_b_proj": matrix(96, 32)}, "the k_b up-projection is missing"),
    "kv and k": ({"k_b_proj": matrix(64, 32)}, "the v_b up-projection is missing"),
    "ranks": ({"k_b_proj": matrix(64, 32), "v_b_proj": matrix(96, 16)}, "rank: .*32.*16"),
    "k rows": ({"k_b_proj": matrix(65, 32), "v_b_proj": matrix(96, 32)}, "k_b has 65 rows"),
    "kv rows": ({"kv_b_proj": matrix(161, 32)}, "kv_b 161 rows"),
    "no rows": ({"kv_b_proj": matrix(0, 32)}, "kv_b 0 rows"),
    "kv_a": ({"kv_a_proj_with_mqa": matrix(31, 24)}, "has 31 rows, fewer than the rank 32"),
    "o": ({"o_proj": matrix(24, 95)}, "o 95 columns"),
    "q": ({"q_b_proj": matrix(95, 12)}, "q 95"),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS)
def test_shapes_that_contradict_each_other(
    changes: dict[str, Stored | None], message: str, tmp_path: Path
) -> None:
    folder = with_tensors(tmp_path / "m", BASE, **changes)
    with pytest.raises(BadInputError, match=message) as caught:
        blocks_of(folder)
    assert "model.layers.0.self_attn" in caught.value.message
    assert "--trust-shapes" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "num_key_value_heads": 8}, "not an MLA checkpoint.*num_key_value_heads 8"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4 has no KV up-projection"),
        (None, "not an MLA checkpoint: none of its 2 tensors.*no config.json"),
    ],
)
def test_not_mla(config: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.attn.wkv.weight")
    write_file(tmp_path / "model.safetensors", {name: matrix(4, 4) for name in names})
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotError, match=message) as caught:
        blocks_of(tmp_path)
    assert caught.value.exit_code is ExitCode.CANNOT


def test_packed_formats(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "m", BASE, kv_b_proj=Stored("U8", (160, 16), bytes(160 * 16)))
    with pytest.raises(CannotError, match="kv_b_proj is stored as U8"):
        blocks_of(folder)
