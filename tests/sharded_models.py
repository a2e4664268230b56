"""Small models with every kind of tensor that is dealt out to ranks, as bytes, and what a rank should hold of them.

What a rank holds is worked out here anew, in torch, from a table of regular expressions: nothing of the package's
rules is used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import Stored, random_bytes, random_scales, randomness, write_file

from mla_convert.whole import Format


@dataclass(frozen=True)
class Model:
    """A model to write. Eight heads and eight experts unless that is asked otherwise."""

    heads: int = 8
    nope: int = 16
    rope: int = 8
    v: int = 16
    rank: int = 32
    hidden: int = 64
    q_rank: int = 24
    experts: int = 8
    vocabulary: int = 48
    layers: int = 2
    first: int = 0  # number of the first layer
    stem: str = "model."
    indexer: bool = False
    mtp: bool = False
    bias: bool = False
    longcat: bool = False
    fp8: tuple[int, int] | None = None  # scale block
    model_type: str = "deepseek_v3"
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shards: int = 3
    reblock: bool = False  # what eight ranks need

    @property
    def numbers(self) -> range:
        """Layers, the MTP layer included."""
        return range(self.first, self.first + self.layers + self.mtp)


#: The two formats that hold tensors by name and slice; Megatron's have tests of their own.
FORMATS = (Format.HUGGINGFACE, Format.DEEPSEEK)

V3 = Model()
MODELS: dict[str, Model] = {
    "deepseek_v3": Model(mtp=True),
    "deepseek_v3-fp8": Model(mtp=True, fp8=(4, 4)),
    "deepseek_v3-bias": Model(bias=True),
    "deepseek_v32": Model(indexer=True, model_type="deepseek_v32"),
    "deepseek_v32-fp8": Model(indexer=True, mtp=True, model_type="deepseek_v32", fp8=(4, 4)),
    "glm_moe_dsa": Model(nope=24, v=32, indexer=True, mtp=True, bias=True, model_type="glm_moe_dsa"),
    "glm_moe_dsa-fp8": Model(
        nope=24, v=32, indexer=True, fp8=(16, 8), reblock=True, model_type="glm_moe_dsa"
    ),
    "glm4_moe_lite": Model(nope=24, v=32, mtp=True, model_type="glm4_moe_lite"),
    "kimi-fp8": Model(stem="language_model.model.", mtp=True, bias=True, fp8=(4, 4)),
    "glm4_moe_lite-fp8": Model(nope=24, v=32, bias=True, fp8=(4, 4), model_type="glm4_moe_lite"),
    "kimi": Model(stem="language_model.model.", extra={"vision_tower.patch_embed.proj.weight": (3, 5)}),
    "longcat": Model(longcat=True, extra={"model.layers.0.mlp.router.classifier.weight": (10, 64)}),
    "longcat-fp8": Model(longcat=True, fp8=(4, 4)),
}


def tensors_of(model: Model) -> dict[str, Stored]:
    """Every tensor, in the order of the model."""
    rng = randomness()
    found: dict[str, Stored] = {}

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        found[name] = random_bytes(rng, dtype, shape)

    def linear(name: str, rows: int, columns: int) -> None:
        if model.fp8:
            add(f"{name}.weight", rows, columns, dtype="F8_E4M3")
            shape = (-(-rows // model.fp8[0]), -(-columns // model.fp8[1]))
            found[f"{name}.weight_scale_inv"] = random_scales(rng, "F32", shape, wild=False)
        else:
            add(f"{name}.weight", rows, columns)

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, model.hidden)
        linear(f"{name}.up_proj", width, model.hidden)
        linear(f"{name}.down_proj", model.hidden, width)

    def attention(name: str) -> None:
        linear(f"{name}.q_a_proj", model.q_rank, model.hidden)
        add(f"{name}.q_a_layernorm.weight", model.q_rank)
        linear(f"{name}.q_b_proj", model.heads * (model.nope + model.rope), model.q_rank)
        linear(f"{name}.kv_a_proj_with_mqa", model.rank + model.rope, model.hidden)
        add(f"{name}.kv_a_layernorm.weight", model.rank)
        linear(f"{name}.kv_b_proj", model.heads * (model.nope + model.v), model.rank)
        linear(f"{name}.o_proj", model.hidden, model.heads * model.v)
        if model.bias:
            add(f"{name}.q_a_proj.bias", model.q_rank)
            add(f"{name}.kv_a_proj_with_mqa.bias", model.rank + model.rope)
            add(f"{name}.o_proj.bias", model.hidden)
        if model.indexer:
            linear(f"{name}.indexer.wq_b", 64, model.q_rank)
            linear(f"{name}.indexer.wk", 16, model.hidden)
            add(f"{name}.indexer.k_norm.weight", 16, dtype="F32")
            add(f"{name}.indexer.k_norm.bias", 16, dtype="F32")
            add(f"{name}.indexer.weights_proj.weight", 4, model.hidden)

    add(f"{model.stem}embed_tokens.weight", model.vocabulary, model.hidden)
    for number in model.numbers:
        layer = f"{model.stem}layers.{number}"
        twice = range(2) if model.longcat else [None]
        for half in twice:
            dot = "" if half is None else f".{half}"
            add(f"{layer}.input_layernorm{dot}.weight", model.hidden)
            attention(f"{layer}.self_attn{dot}")
            add(f"{layer}.post_attention_layernorm{dot}.weight", model.hidden)
            if half is not None:
                mlp(f"{layer}.mlps.{half}", 96)
        if number == model.first and not model.longcat:
            mlp(f"{layer}.mlp", 96)
        else:
            if not model.longcat:
                add(f"{layer}.mlp.gate.weight", model.experts, model.hidden)
                add(f"{layer}.mlp.gate.e_score_correction_bias", model.experts, dtype="F32")
                mlp(f"{layer}.mlp.shared_experts", 32)
            for expert in range(model.experts):
                mlp(f"{layer}.mlp.experts.{expert}", 32)
        if number >= model.first + model.layers:
            add(f"{layer}.embed_tokens.weight", model.vocabulary, model.hidden)
            add(f"{layer}.eh_proj.weight", model.hidden, 2 * model.hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                add(f"{layer}.{norm}.weight", model.hidden)
            add(f"{layer}.shared_head.head.weight", model.vocabulary, model.hidden)
    add(f"{model.stem}norm.weight", model.hidden)
    add(f"{model.stem.removesuffix('model.')}lm_head.weight", model.vocabulary, model.hidden)
    for name, shape in model.extra.items():
        add(name, *shape)
    return found


def config_of(model: Model) -> dict[str, Any]:
    """The configuration that belongs to it."""
    text: dict[str, Any] = {
        "model_type": model.model_type,
        "num_hidden_layers": model.first + model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "kv_lora_rank": model.rank,
        "q_lora_rank": model.q_rank,
        "qk_nope_head_dim": model.nope,
        "qk_rope_head_dim": model.rope,
        "v_head_dim": model.v,
        "vocab_size": model.vocabulary,
    }
    config = {"model_type": "kimi_k25", "text_config": text} if "language" in model.stem else text
    if model.fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(model.fp8)}
    return config


def write_model(folder: Path, model: Model, tensors: dict[str, Stored] | None = None) -> Path:
    """A Hugging Face folder of it: shards, index, configuration, a tokenizer."""
    tensors = tensors_of(model) if tensors is None else tensors
    folder.mkdir()
    names = list(tensors)
    size = -(-len(names) // model.shards)
    weight_map = {}
    for number in range(model.shards):
        part = names[number * size : (number + 1) * size]
        file = f"model-{number + 1:05d}-of-{model.shards:06d}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in part}, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(len(t.data) for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=2))
    (folder / "tokenizer.json").write_text("{}")
    return folder


# What a rank holds, by DeepSeek's published rules, as a table

#: A tensor's name without ``model.`` -> its published name and the dimension that is cut (None: whole).
PUBLISHED: tuple[tuple[str, str, int | None], ...] = (
    (r"embed_tokens\.weight", "embed.weight", 0),
    (r"lm_head\.weight", "head.weight", 0),
    (r"norm\.weight", "norm.weight", None),
    (r"(layers\.\d+)\.input_layernorm\.(\w+)", r"\1.attn_norm.\2", None),
    (r"(layers\.\d+)\.post_attention_layernorm\.(\w+)", r"\1.ffn_norm.\2", None),
    (
        r"(layers\.\d+)\.self_attn\.indexer\.(wq_b|wk|k_norm|weights_proj)\.(\w+)",
        r"\1.attn.indexer.\2.\3",
        None,
    ),
    (r"(layers\.\d+)\.self_attn\.q_proj\.(\w+)", r"\1.attn.wq.\2", 0),
    (r"(layers\.\d+)\.self_attn\.q_a_proj\.(\w+)", r"\1.attn.wq_a.\2", None),
    (r"(layers\.\d+)\.self_attn\.q_a_layernorm\.(\w+)", r"\1.attn.q_norm.\2", None),
    (r"(layers\.\d+)\.self_attn\.q_b_proj\.(\w+)", r"\1.attn.wq_b.\2", 0),
    (r"(layers\.\d+)\.self_attn\.kv_a_proj_with_mqa\.(\w+)", r"\1.attn.wkv_a.\2", None),
    (r"(layers\.\d+)\.self_attn\.kv_a_layernorm\.(\w+)", r"\1.attn.kv_norm.\2", None),
    (r"(layers\.\d+)\.self_attn\.kv_b_proj\.(\w+)", r"\1.attn.wkv_b.\2", 0),
    (r"(layers\.\d+)\.self_attn\.o_proj\.(\w+)", r"\1.attn.wo.\2", 1),
    (r"(layers\.\d+)\.mlp\.gate\.e_score_correction_bias", r"\1.ffn.gate.bias", None),
    (r"(layers\.\d+)\.mlp\.gate\.weight", r"\1.ffn.gate.weight", None),
    (r"(layers\.\d+)\.mlp\.((?:shared_experts\.|experts\.\d+\.)?)gate_proj\.(\w+)", r"\1.ffn.\2w1.\3", 0),
    (r"(layers\.\d+)\.mlp\.((?:shared_experts\.|experts\.\d+\.)?)down_proj\.(\w+)", r"\1.ffn.\2w2.\3", 1),
    (r"(layers\.\d+)\.mlp\.((?:shared_experts\.|experts\.\d+\.)?)up_proj\.(\w+)", r"\1.ffn.\2w3.\3", 0),
)


def published(tensors: dict[str, Stored], experts: int, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """The bytes of what rank ``rank`` holds, [..., bytes of an element], by the published rules."""
    found = {}
    for name, stored in tensors.items():
        plain = name.removeprefix("model.")
        matches = [(re.fullmatch(p, plain), new, d) for p, new, d in PUBLISHED]
        match, new, dimension = next(entry for entry in matches if entry[0])
        assert match
        target = re.sub(r"weight_scale_inv$", "scale", match.expand(new))
        expert = re.search(r"\.experts\.(\d+)\.", plain)
        cube = stored.bytes_by_element()
        if expert:
            each = experts // ranks
            if not rank * each <= int(expert[1]) < (rank + 1) * each:
                continue
        elif dimension is not None:
            each, rest = divmod(cube.shape[dimension], ranks)
            assert not rest
            cube = cube.narrow(dimension, rank * each, each)
        found[target] = cube
    return found
