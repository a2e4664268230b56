"""A model's configuration in Megatron's words and in Hugging Face's.

Megatron notes its command line in a checkpoint (``args``), compares some of it when it loads, and takes the model's
dimensions from it with ``--use-checkpoint-args``. Only what describes the model goes over; how it is trained is left to
the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_convert.formats.pickles import Global, Instance
from mla_convert.geometry import text_config
from mla_convert.megatron.eras import INTERLEAVED

#: Numbers that both sides have: Hugging Face's name, Megatron's.
_SAME: tuple[tuple[str, str], ...] = (
    ("num_hidden_layers", "num_layers"),
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("rms_norm_eps", "norm_epsilon"),
    ("q_lora_rank", "q_lora_rank"),
    ("kv_lora_rank", "kv_lora_rank"),
    ("qk_nope_head_dim", "qk_head_dim"),
    ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    ("v_head_dim", "v_head_dim"),
)
_EXPERTS: tuple[tuple[str, str], ...] = (
    ("n_routed_experts", "num_experts"),
    ("moe_intermediate_size", "moe_ffn_hidden_size"),
    ("num_experts_per_tok", "moe_router_topk"),
    ("routed_scaling_factor", "moe_router_topk_scaling_factor"),
    ("n_group", "moe_router_num_groups"),
    ("topk_group", "moe_router_group_topk"),
)
_INDEXER: tuple[tuple[str, str], ...] = (
    ("index_n_heads", "dsa_indexer_n_heads"),
    ("index_head_dim", "dsa_indexer_head_dim"),
    ("index_topk", "dsa_indexer_topk"),
)
_YARN: tuple[tuple[str, str], ...] = (
    ("factor", "rotary_scaling_factor"),
    ("original_max_position_embeddings", "original_max_position_embeddings"),
    ("beta_fast", "beta_fast"),
    ("beta_slow", "beta_slow"),
    ("mscale", "mscale"),
    ("mscale_all_dim", "mscale_all_dim"),
)
#: Families whose indexer rotates pairs side by side unless the configuration says otherwise.
_INTERLEAVED_FAMILIES = frozenset({"glm_moe_dsa"})
#: dtype of most weights -> what Megatron calls it.
_PARAMS_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def indexer_is_interleaved(config: Mapping[str, Any]) -> bool:
    """True if the indexer's rotary channels are pairs side by side (GLM-5), false if in two halves (V3.2)."""
    text = text_config(config)
    stated = text.get("indexer_rope_interleave")
    return stated if type(stated) is bool else text.get("model_type") in _INTERLEAVED_FAMILIES


def to_arguments(
    config: Mapping[str, Any],
    *,
    moe_layers: tuple[bool, ...],
    mtp_layers: int,
    has_indexer: bool,
    has_expert_bias: bool,
    vocabulary: int,
    tensor_parallel: int,
    dtype: str,
) -> dict[str, Any]:
    """Megatron's arguments for a Hugging Face configuration.

    Args:
        config: The configuration; empty if there is none.
        moe_layers: Of each layer, whether it has experts.
        mtp_layers: How many multi-token prediction layers there are.
        has_indexer: The model has DeepSeek Sparse Attention.
        has_expert_bias: Its routers have a correction bias.
        vocabulary: Rows of the embedding as it is written.
        tensor_parallel: Ranks that share a weight.
        dtype: dtype of most weights.
    """
    text = text_config(config)
    found: dict[str, Any] = {
        "num_layers": len(moe_layers),
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "group_query_attention": False,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "untie_embeddings_and_output_weights": text.get("tie_word_embeddings") is not True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "padded_vocab_size": vocabulary,
        "make_vocab_size_divisible_by": _divisor(vocabulary, tensor_parallel),
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "mtp_num_layers": mtp_layers or None,
        **_copied(text, _SAME),
        **_rope(text),
    }
    found["num_query_groups"] = found.get("num_attention_heads")
    found["kv_channels"] = found.get("v_head_dim")
    found["seq_length"] = found.get("max_position_embeddings")
    if dtype in _PARAMS_DTYPE:
        found["params_dtype"] = Global("torch", _PARAMS_DTYPE[dtype])
        found["bf16"], found["fp16"] = dtype == "BF16", dtype == "F16"
    if any(moe_layers):
        is_softmax = text.get("scoring_func", "sigmoid" if has_expert_bias else "softmax") == "softmax"
        shared = text.get("n_shared_experts") or 0
        found |= {
            "moe_layer_freq": [int(is_moe) for is_moe in moe_layers],
            "moe_router_score_function": "softmax" if is_softmax else "sigmoid",
            "moe_router_pre_softmax": is_softmax,
            "moe_router_enable_expert_bias": has_expert_bias,
            "moe_shared_expert_intermediate_size": shared * (text.get("moe_intermediate_size") or 0) or None,
            "moe_grouped_gemm": True,
            **_copied(text, _EXPERTS),
        }
    if has_indexer:
        found |= {
            "experimental_attention_variant": "dsa",
            INTERLEAVED: indexer_is_interleaved(config),
            "dsa_indexer_topk_freq": text.get("index_topk_freq") or 1,
            "dsa_indexer_skip_topk_offset": text.get("index_skip_topk_offset") or 0,
            **_copied(text, _INDEXER),
        }
    return found


def _copied(source: Mapping[str, Any], names: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {ours: source[theirs] for theirs, ours in names if isinstance(source.get(theirs), int | float)}


def _divisor(vocabulary: int, ranks: int) -> int:
    """A value of --make-vocab-size-divisible-by with which Megatron pads to exactly this vocabulary."""
    return 128 if vocabulary % (128 * ranks) == 0 else max(1, vocabulary // ranks)


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {**_dictionary(text.get("rope_scaling")), **_dictionary(text.get("rope_parameters"))}
    base = parameters.get("rope_theta", text.get("rope_theta"))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": base} if isinstance(base, int | float) else {}
    if kind == "yarn":
        return {**found, "rope_type": "yarn", **_copied(parameters, _YARN)}
    return {**found, "rope_type": "rope", "rotary_scaling_factor": 1.0}


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def namespace(arguments: Mapping[str, Any]) -> Instance:
    """Arguments as a checkpoint holds them."""
    return Instance(Global("argparse", "Namespace"), state=dict(arguments))


def to_config(arguments: Mapping[str, Any], *, has_indexer: bool, vocabulary: int) -> dict[str, Any]:
    """A Hugging Face configuration from Megatron's arguments: that of the DeepSeek or GLM family they describe.

    Args:
        arguments: The arguments; nothing is known if they do not say ``kv_lora_rank``.
        has_indexer: The model has DeepSeek Sparse Attention.
        vocabulary: Rows of the embedding.
    """
    if type(arguments.get("kv_lora_rank")) is not int:
        return {}
    is_sigmoid = arguments.get("moe_router_score_function") == "sigmoid"
    if has_indexer:
        is_glm = arguments.get(INTERLEAVED) is True
        kind, name = ("glm_moe_dsa", "GlmMoeDsa") if is_glm else ("deepseek_v32", "DeepseekV32")
    else:
        kind, name = ("deepseek_v3", "DeepseekV3") if is_sigmoid else ("deepseek_v2", "DeepseekV2")
    found: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "tie_word_embeddings": arguments.get("untie_embeddings_and_output_weights") is False,
        **_back(arguments, _SAME),
        "q_lora_rank": arguments.get("q_lora_rank"),
        "num_key_value_heads": arguments.get("num_attention_heads"),
        "rope_theta": arguments.get("rotary_base", 10000),
    }
    if arguments.get("rope_type", "yarn") == "yarn" and (arguments.get("rotary_scaling_factor") or 1) > 1:
        found["rope_scaling"] = {"type": "yarn", **_back(arguments, _YARN)}
    if arguments.get("num_experts"):
        size, shared = (
            arguments.get("moe_ffn_hidden_size"),
            arguments.get("moe_shared_expert_intermediate_size"),
        )
        found |= {
            **_back(arguments, _EXPERTS),
            "scoring_func": "sigmoid" if is_sigmoid else "softmax",
            "n_shared_experts": (shared or 0) // size if isinstance(size, int) and size else 0,
            "first_k_dense_replace": _dense_layers(arguments.get("moe_layer_freq")),
            "moe_layer_freq": 1,
            "norm_topk_prob": is_sigmoid,
        }
    if has_indexer:
        found |= _back(arguments, _INDEXER)
        found["indexer_rope_interleave"] = arguments.get(INTERLEAVED) is True
        frequency = arguments.get("dsa_indexer_topk_freq") or 1
        if frequency > 1:
            found["index_topk_freq"] = frequency
            found["index_skip_topk_offset"] = arguments.get("dsa_indexer_skip_topk_offset") or 0
    if arguments.get("mtp_num_layers"):
        found["num_nextn_predict_layers"] = arguments["mtp_num_layers"]
    return found


def _back(arguments: Mapping[str, Any], names: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {theirs: arguments[ours] for theirs, ours in names if isinstance(arguments.get(ours), int | float)}


def _dense_layers(pattern: Any) -> int:
    """How many layers at the beginning have no experts."""
    if not isinstance(pattern, list):
        return 0
    return next((number for number, is_moe in enumerate(pattern) if is_moe), len(pattern))
