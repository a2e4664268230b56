"""The built-in demo model: a small DeepSeek-V3.2 in all that matters, the same bytes on every machine.

Three layers and an MTP layer with DeepSeek Sparse Attention, FP8 weights with 128x128 block scales, one MoE layer,
three shards and an index; one FP8 scale lies in another shard than its weight, as in the published files. No
random number library is used: bytes come from SHAKE-256 and are mapped to weights by the quantiles of a normal
distribution, so the checkpoint does not depend on any version of anything.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

from mla_convert.formats.safetensors import build_header
from mla_convert.strict_json import dump_json
from mla_convert.tensors import TensorSpec

HIDDEN, HEADS, NOPE, ROPE, V = 512, 8, 128, 64, 128
Q_RANK, KV_RANK = 256, 256
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 8, 128, 64
LAYERS, EXPERTS, INTERMEDIATE, VOCABULARY = 3, 4, 256, 512
BLOCK = 128

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": INDEX_TOPK,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "torch_dtype": "bfloat16",
}

_NORMAL = [NormalDist().inv_cdf((code + 0.5) / 256) for code in range(256)]


def write_demo_checkpoint(folder: Path) -> None:
    """Write the demo checkpoint into ``folder``, which must not exist. About 10 MB.

    Raises:
        FileExistsError: The folder is there already.
    """
    folder.mkdir(parents=True)
    shards: dict[int, list[tuple[TensorSpec, bytes]]] = {1: [], 2: [], 3: []}
    weight_map: dict[str, str] = {}
    total = 0
    for name, dtype, shape, shard, make in _tensors():
        spec = TensorSpec(name, dtype, shape)
        shards[shard].append((spec, make(spec)))
        weight_map[name] = f"model-{shard:05d}-of-00003.safetensors"
        total += spec.nbytes
    for shard, tensors in shards.items():
        header = build_header([spec for spec, _ in tensors], {"format": "pt"})
        data = b"".join(data for _, data in tensors)
        (folder / f"model-{shard:05d}-of-00003.safetensors").write_bytes(header + data)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_bytes(dump_json(index))
    (folder / "config.json").write_bytes(dump_json(CONFIG))
    (folder / "tokenizer_config.json").write_bytes(dump_json({"model_max_length": 4096}))


_Tensor = tuple[str, str, tuple[int, ...], int, Callable[[TensorSpec], bytes]]


def _tensors() -> Iterator[_Tensor]:
    yield _bf16("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 1)
    for layer in range(LAYERS + 1):
        shard = min(layer + 1, 3)
        prefix = f"model.layers.{layer}."
        yield from _attention(prefix + "self_attn.", shard)
        yield _norm(prefix + "input_layernorm.weight", HIDDEN, shard)
        yield _norm(prefix + "post_attention_layernorm.weight", HIDDEN, shard)
        if layer < 2:
            yield from _mlp(prefix + "mlp.", shard)
        else:
            yield _bf16(prefix + "mlp.gate.weight", (EXPERTS, HIDDEN), shard)
            yield _norm(prefix + "mlp.gate.e_score_correction_bias", EXPERTS, shard)
            for expert in range(EXPERTS):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", shard)
            yield from _mlp(prefix + "mlp.shared_experts.", shard)
    mtp = f"model.layers.{LAYERS}."
    yield _bf16(mtp + "eh_proj.weight", (HIDDEN, 2 * HIDDEN), 3)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield _norm(f"{mtp}{norm}.weight", HIDDEN, 3)
    yield _norm("model.norm.weight", HIDDEN, 3)
    yield _bf16("lm_head.weight", (VOCABULARY, HIDDEN), 3)


def _attention(prefix: str, shard: int) -> Iterator[_Tensor]:
    yield from _fp8(prefix + "q_a_proj", (Q_RANK, HIDDEN), shard)
    yield _norm(prefix + "q_a_layernorm.weight", Q_RANK, shard)
    yield from _fp8(prefix + "q_b_proj", (HEADS * (NOPE + ROPE), Q_RANK), shard)
    yield from _fp8(prefix + "kv_a_proj_with_mqa", (KV_RANK + ROPE, HIDDEN), shard)
    yield _norm(prefix + "kv_a_layernorm.weight", KV_RANK, shard)
    # In the published checkpoints a weight and its scale may lie in different shards.
    yield from _fp8(
        prefix + "kv_b_proj", (HEADS * (NOPE + V), KV_RANK), shard, scale_shard=2 if shard == 1 else shard
    )
    yield from _fp8(prefix + "o_proj", (HIDDEN, HEADS * V), shard)
    yield from _fp8(prefix + "indexer.wq_b", (INDEX_HEADS * INDEX_DIM, Q_RANK), shard)
    yield from _fp8(prefix + "indexer.wk", (INDEX_DIM, HIDDEN), shard)
    yield _norm(prefix + "indexer.k_norm.weight", INDEX_DIM, shard)
    yield (prefix + "indexer.k_norm.bias", "F32", (INDEX_DIM,), shard, lambda spec: _f32(spec, 0.0, 0.1))
    yield _bf16(prefix + "indexer.weights_proj.weight", (INDEX_HEADS, HIDDEN), shard)


def _mlp(prefix: str, shard: int) -> Iterator[_Tensor]:
    for name, shape in (
        ("gate_proj", (INTERMEDIATE, HIDDEN)),
        ("up_proj", (INTERMEDIATE, HIDDEN)),
        ("down_proj", (HIDDEN, INTERMEDIATE)),
    ):
        yield from _fp8(prefix + name, shape, shard)


def _fp8(
    module: str, shape: tuple[int, int], shard: int, *, scale_shard: int | None = None
) -> Iterator[_Tensor]:
    """An E4M3 weight with standard deviation about 1/sqrt(columns) once its scales are applied."""
    blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    scale = shape[1] ** -0.5 / 64
    yield module + ".weight", "F8_E4M3", shape, shard, _codes
    yield (
        module + ".weight_scale_inv",
        "F32",
        blocks,
        scale_shard or shard,
        lambda spec: _f32(spec, scale, scale / 8),
    )


def _bf16(name: str, shape: tuple[int, int], shard: int) -> _Tensor:
    words = [_bf16_word(value * shape[1] ** -0.5) for value in _NORMAL]
    low, high = bytes(word & 255 for word in words), bytes(word >> 8 for word in words)

    def make(spec: TensorSpec) -> bytes:
        codes = _stream(spec.name, spec.numel)
        data = bytearray(spec.nbytes)
        data[0::2], data[1::2] = codes.translate(low), codes.translate(high)
        return bytes(data)

    return name, "BF16", shape, shard, make


def _norm(name: str, size: int, shard: int) -> _Tensor:
    return name, "F32", (size,), shard, lambda spec: _f32(spec, 1.0, 0.1)


def _stream(name: str, count: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(count)


def _f32(spec: TensorSpec, mean: float, deviation: float) -> bytes:
    values = [mean + deviation * _NORMAL[code] for code in _stream(spec.name, spec.numel)]
    return struct.pack(f"<{spec.numel}f", *values)


def _codes(spec: TensorSpec) -> bytes:
    return _stream(spec.name, spec.numel).translate(_E4M3_NORMAL)


def _bf16_word(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def _e4m3_code(value: float) -> int:
    """The E4M3 code nearest to ``value``, which must be a normal number of it."""
    sign, value = (0x80 if value < 0 else 0), abs(value)
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    mantissa = round((value - 1) * 8)
    return sign | ((exponent + 7) * 8 + mantissa)


_E4M3_NORMAL = bytes(_e4m3_code(value * 64) for value in _NORMAL)
