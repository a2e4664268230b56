"""Tiny random models of every MLA family that transformers can build, for tests: 26 recipes, 21 model types.

transformers is imported inside the functions, so that collecting tests does not pay for it. It is an
independent reference for what a model computes, and a poor writer: it drops MTP layers, and saves the layers
of ``kimi_k25`` under a wrong name.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_DENSE_FIRST = {"first_k_dense_replace": 1}
_DSA = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}
_WIDE = {"qk_nope_head_dim": 24, "v_head_dim": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_YARN_40 = {"rope_parameters": {**_YARN, "factor": 40.0}}
_LLAMA_4 = {"rope_parameters": {**_YARN, "factor": 4.0, "llama_4_scaling_beta": 0.1}}
_KDA = {"linear_head_dim": 16, "linear_num_heads": 4}
_SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_PIXTRAL = {
    **_SMALL_VISION,
    "model_type": "pixtral",
    "patch_size": 14,
    "image_size": 56,
    "hidden_act": "silu",
}


def _text(*parts: dict[str, Any], drop: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """The base fields with parts laid over them, less the fields that a config class does not know."""
    fields = dict(_BASE)
    for part in (*parts, changes):
        fields.update(part)
    return {name: value for name, value in fields.items() if name not in drop}


_SPARSE_EXPERTS = (_MOE, _DENSE_FIRST)
_DSA_WIDE = (_MOE, _DENSE_FIRST, _DSA, _WIDE)

# name -> (model type, config fields)
_RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2_lite": ("deepseek_v2", _text(*_SPARSE_EXPERTS, q_lora_rank=None, topk_method="greedy")),
    "deepseek_v2": ("deepseek_v2", _text(*_SPARSE_EXPERTS, topk_method="group_limited_greedy")),
    "deepseek_v3": ("deepseek_v3", _text(*_SPARSE_EXPERTS)),
    "deepseek_v3_mtp": ("deepseek_v3", _text(*_SPARSE_EXPERTS, num_mtp_layers=1)),
    "deepseek_v3_bias": ("deepseek_v3", _text(*_SPARSE_EXPERTS, attention_bias=True)),
    "deepseek_v3_yarn": ("deepseek_v3", _text(*_SPARSE_EXPERTS, _YARN_40)),
    "deepseek_v32": ("deepseek_v32", _text(*_SPARSE_EXPERTS, _DSA)),
    "glm_moe_dsa": ("glm_moe_dsa", _text(*_DSA_WIDE)),
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        _text(*_DSA_WIDE, num_hidden_layers=5, index_topk_freq=2, index_skip_topk_offset=2),
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _text(_MOE, _WIDE)),
    "minicpm3": ("minicpm3", _text(drop=("moe_intermediate_size",))),
    "youtu": ("youtu", _text(drop=("moe_intermediate_size",))),
    "longcat_flash": (
        "longcat_flash",
        _text(
            drop=("intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
            num_layers=2,
            ffn_hidden_size=96,
            expert_ffn_hidden_size=32,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
            head_dim=8,
        ),
    ),
    "mistral4": ("mistral4", _text(*_SPARSE_EXPERTS, _LLAMA_4)),
    "sarvam_mla": ("sarvam_mla", _text(*_SPARSE_EXPERTS, q_lora_rank=None, n_group=1)),
    "axk1": ("axk1", _text(*_SPARSE_EXPERTS)),
    "axk2": ("axk2", _text(_MOE, _DSA, gated_norm_rank=4)),
    "kimi_linear": (
        "kimi_linear",
        _text(
            _MOE,
            _KDA,
            drop=("n_routed_experts",),
            q_lora_rank=None,
            num_hidden_layers=5,
            num_local_experts=4,
            n_group=1,
        ),
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        _text(
            *_SPARSE_EXPERTS,
            drop=("n_routed_experts",),
            num_hidden_layers=4,
            num_local_experts=4,
            layer_group_size=2,
            head_dim=16,
        ),
    ),
    "hy_v4": ("hy_v4", _text(_MOE, _DSA, _WIDE, num_hidden_layers=6)),
    "dots3_note_text": (
        "dots3_note_text",
        _text(
            _MOE,
            _DSA,
            num_hidden_layers=4,
            shared_experts_intermediate_size=32,
            sliding_window=8,
            swa_num_attention_heads=2,
            swa_num_key_value_heads=2,
            swa_q_lora_rank=48,
            swa_kv_lora_rank=64,
            swa_head_dim=32,
            swa_qk_nope_head_dim=24,
            swa_v_head_dim=16,
        ),
    ),
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": _text(*_SPARSE_EXPERTS, model_type="deepseek_v3"),
            "vision_config": {**_SMALL_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "mistral3_mistral4": (
        "mistral3",
        {
            "text_config": _text(*_SPARSE_EXPERTS, _LLAMA_4, model_type="mistral4"),
            "vision_config": _PIXTRAL,
        },
    ),
    "glm5_next": (
        "glm5_next",
        {
            "text_config": _text(
                _MOE,
                _DSA,
                _KDA,
                qk_nope_head_dim=32,
                qk_rope_head_dim=0,
                v_head_dim=32,
                num_hidden_layers=4,
                index_kpool=4,
                hc_mult=2,
                hc_sinkhorn_iters=2,
            ),
            "vision_config": {
                **_SMALL_VISION,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
                "projection_intermediate_size": 64,
            },
        },
    ),
    "hy_v4_vl": (
        "hy_v4_vl",
        {
            "text_config": _text(
                _MOE,
                _DSA,
                _WIDE,
                num_hidden_layers=4,
                hc_mult=2,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 1, 1],
                },
            ),
            "vision_config": {**_SMALL_VISION, "out_hidden_size": 64, "max_image_size": 64},
        },
    ),
    "mistral_large4": (
        "mistral_large4",
        {
            "text_config": _text(
                *_SPARSE_EXPERTS,
                _DSA,
                drop=("q_lora_rank",),
                model_type="mistral_large4_text",
                num_hidden_layers=4,
            ),
            "vision_config": _PIXTRAL,
        },
    ),
}

NAMES: tuple[str, ...] = tuple(_RECIPES)


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The tiny model ``name`` on the CPU in eval mode, with the same weights each time.

    Weights are N(0, 1/fan_in) and norms 1 + N(0, 0.1²): the usual initialisation (std 0.02) gives a softmax
    so close to uniform that many a mistake would not show.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()

    model_type, fields = _RECIPES[name]
    wrapped = "text_config" in fields or model_type == "mistral4"
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **fields)
        # Grouped matrix products reject float64.
        model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
        _randomise(model)
    return model.eval().to(dtype)


def text_config(model: Any) -> dict[str, Any]:
    """The config of the text model as JSON would give it."""
    config: dict[str, Any] = model.config.to_dict()
    return config.get("text_config") or config


def save(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the tiny model ``name`` as transformers would; returns the directory."""
    build(name, dtype).save_pretrained(directory)
    return directory


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if parameter.ndim >= 2 and leaf == "weight":
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        elif leaf == "bias":
            parameter.normal_(0, 0.1)
        elif leaf == "weight" and "norm" in name:
            parameter.normal_(1, 0.1)
        elif leaf in ("sinks", "scale") or not parameter.isfinite().all():
            parameter.normal_(0, 0.5)
