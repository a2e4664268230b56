"""Small Hugging Face checkpoints of the families that Megatron has names for, and what Megatron calls their tensors.

The second is written by hand, tensor by tensor, from Megatron's modules: an account of the names that does not come
from the table it checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS, DENSE, HIDDEN, HEADS, ROPE, RANK, Q_RANK = 3, 1, 64, 4, 8, 32, 48
INTERMEDIATE, EXPERTS, EXPERT_WIDTH, INDEX_HEADS, INDEX_WIDTH = 96, 4, 32, 4, 16
FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def head(family: str) -> tuple[int, int]:
    """(nope, v) of a head."""
    return (24, 32) if family == "glm_moe_dsa" else (16, 16)


def is_sparse(family: str) -> bool:
    return family in ("deepseek_v32", "glm_moe_dsa")


def make(
    family: str,
    *,
    mtp: bool = True,
    shared: bool = True,
    experts: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    vocabulary: int = 256,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Random tensors and a configuration.

    Args:
        family: One of ``FAMILIES``.
        mtp: With an MTP layer.
        shared: Which holds copies of the embedding and the head, as published ones do.
        experts: With experts; else every layer is dense.
        dtype: dtype of the matrices.
        vocabulary: Rows of the embedding.
    """
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    nope, v = head(family)

    def add(name: str, *shape: int, dtype: torch.dtype = dtype) -> None:
        values = torch.randn(shape, generator=generator) * 0.05 + (len(shape) == 1)
        tensors[name] = values.to(dtype)

    def add_mlp(prefix: str, width: int) -> None:
        add(prefix + "gate_proj.weight", width, HIDDEN)
        add(prefix + "up_proj.weight", width, HIDDEN)
        add(prefix + "down_proj.weight", HIDDEN, width)

    add("model.embed_tokens.weight", vocabulary, HIDDEN)
    for layer in range(LAYERS + mtp):
        prefix, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        add(prefix + "input_layernorm.weight", HIDDEN)
        add(prefix + "post_attention_layernorm.weight", HIDDEN)
        add(attention + "q_a_proj.weight", Q_RANK, HIDDEN)
        add(attention + "q_a_layernorm.weight", Q_RANK)
        add(attention + "q_b_proj.weight", HEADS * (nope + ROPE), Q_RANK)
        add(attention + "kv_a_proj_with_mqa.weight", RANK + ROPE, HIDDEN)
        add(attention + "kv_a_layernorm.weight", RANK)
        add(attention + "kv_b_proj.weight", HEADS * (nope + v), RANK)
        add(attention + "o_proj.weight", HIDDEN, HEADS * v)
        if is_sparse(family):
            add(attention + "indexer.wq_b.weight", INDEX_HEADS * INDEX_WIDTH, Q_RANK)
            add(attention + "indexer.wk.weight", INDEX_WIDTH, HIDDEN)
            add(attention + "indexer.k_norm.weight", INDEX_WIDTH, dtype=torch.float32)
            add(attention + "indexer.k_norm.bias", INDEX_WIDTH, dtype=torch.float32)
            add(attention + "indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        if not experts or layer < DENSE:
            add_mlp(prefix + "mlp.", INTERMEDIATE)
            continue
        add(prefix + "mlp.gate.weight", EXPERTS, HIDDEN)
        if family != "deepseek_v2":
            add(prefix + "mlp.gate.e_score_correction_bias", EXPERTS, dtype=torch.float32)
        for expert in range(EXPERTS):
            add_mlp(f"{prefix}mlp.experts.{expert}.", EXPERT_WIDTH)
        add_mlp(prefix + "mlp.shared_experts.", EXPERT_WIDTH)
    add("model.norm.weight", HIDDEN)
    add("lm_head.weight", vocabulary, HIDDEN)
    if mtp:
        prefix = f"model.layers.{LAYERS}."
        add(prefix + "eh_proj.weight", HIDDEN, 2 * HIDDEN)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            add(f"{prefix}{norm}.weight", HIDDEN)
        if shared:
            tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": v,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if experts:
        config |= {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": DENSE,
            "routed_scaling_factor": 2.5,
            "scoring_func": "softmax" if family == "deepseek_v2" else "sigmoid",
        }
    if is_sparse(family):
        config |= {"index_topk": 8, "index_head_dim": INDEX_WIDTH, "index_n_heads": INDEX_HEADS}
    if mtp:
        config["num_nextn_predict_layers"] = 1
    return tensors, config


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint of two shards, its index, configuration and a tokenizer file."""
    folder.mkdir()
    names = list(tensors)
    weight_map = {}
    for number, half in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in half}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(other), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def in_megatron(
    tensors: dict[str, torch.Tensor], *, inner: str = "mtp_model_layer"
) -> dict[str, torch.Tensor]:
    """What a Megatron model of local layers calls the tensors of :func:`make`, and what is in them."""
    found: dict[str, torch.Tensor] = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    layers = sorted({int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")})
    for layer in layers:
        held = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        base = f"decoder.layers.{layer}."
        if layer >= LAYERS:
            outside = f"mtp.layers.{layer - LAYERS}."
            base = f"{outside}{inner}."
            found[outside + "eh_proj.weight"] = held["eh_proj.weight"]
            found[outside + "enorm.weight"] = held["enorm.weight"]
            found[outside + "hnorm.weight"] = held["hnorm.weight"]
            found[outside + "final_layernorm.weight"] = held["shared_head.norm.weight"]
        found[base + "input_layernorm.weight"] = held["input_layernorm.weight"]
        found[base + "pre_mlp_layernorm.weight"] = held["post_attention_layernorm.weight"]
        attention = base + "self_attention."
        found[attention + "linear_q_down_proj.weight"] = held["self_attn.q_a_proj.weight"]
        found[attention + "q_layernorm.weight"] = held["self_attn.q_a_layernorm.weight"]
        found[attention + "linear_q_up_proj.weight"] = held["self_attn.q_b_proj.weight"]
        found[attention + "linear_kv_down_proj.weight"] = held["self_attn.kv_a_proj_with_mqa.weight"]
        found[attention + "kv_layernorm.weight"] = held["self_attn.kv_a_layernorm.weight"]
        found[attention + "linear_kv_up_proj.weight"] = held["self_attn.kv_b_proj.weight"]
        found[attention + "linear_proj.weight"] = held["self_attn.o_proj.weight"]
        if "self_attn.indexer.wk.weight" in held:
            indexer = attention + "core_attention.indexer."
            found[indexer + "linear_wq_b.weight"] = held["self_attn.indexer.wq_b.weight"]
            found[indexer + "linear_wk.weight"] = held["self_attn.indexer.wk.weight"]
            found[indexer + "k_norm.weight"] = held["self_attn.indexer.k_norm.weight"]
            found[indexer + "k_norm.bias"] = held["self_attn.indexer.k_norm.bias"]
            found[indexer + "linear_weights_proj.weight"] = held["self_attn.indexer.weights_proj.weight"]
        mlps = {"mlp.": "mlp."}
        if "mlp.gate.weight" in held:
            found[base + "mlp.router.weight"] = held["mlp.gate.weight"]
            if "mlp.gate.e_score_correction_bias" in held:
                found[base + "mlp.router.expert_bias"] = held["mlp.gate.e_score_correction_bias"]
            mlps = {f"mlp.experts.local_experts.{e}.": f"mlp.experts.{e}." for e in range(EXPERTS)}
            mlps["mlp.shared_experts."] = "mlp.shared_experts."
        for ours, theirs in mlps.items():
            gate, up = held[theirs + "gate_proj.weight"], held[theirs + "up_proj.weight"]
            found[f"{base}{ours}linear_fc1.weight"] = torch.cat((gate, up))
            found[f"{base}{ours}linear_fc2.weight"] = held[theirs + "down_proj.weight"]
    return found
