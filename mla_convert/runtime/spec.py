"""Everything about an attention block that is not a tensor, from its shapes and the model's config. No torch.

Dims come from tensor shapes, because configs lie about them; the softmax scale, the rotary layout, the norm's
epsilon and the family's habits come from the config, through one table keyed by ``model_type``. The
conventions are those of transformers 5.24, read from its modeling files.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mla_convert.errors import BadInputError, CannotError


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071), with DeepSeek's ``mscale`` fields.

    ``attention_factor`` None means: derive it from ``factor``, ``mscale`` and ``mscale_all_dim``.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def table_factor(self) -> float:
        """What multiplies cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): one divisor a frequency, and other divisors for long inputs."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    attention_factor: float


RopeScaling = YarnScaling | LinearScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the last ``dim`` dims of each query and of the shared key.

    ``interleaved`` pairs dims (2i, 2i+1); otherwise (i, i + dim/2). With ``rotated`` false the dims exist but
    are used as they are (Kimi-Linear), and ``theta`` means nothing.
    """

    dim: int
    interleaved: bool
    theta: float
    scaling: RopeScaling | None = None
    rotated: bool = True


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The lightning indexer of DeepSeek Sparse Attention: ``heads`` queries and one key of ``dim`` a token.

    It rotates the first ``rope_dim`` dims (the last with ``rope_last``) and keeps ``topk`` keys a query.
    """

    heads: int
    dim: int
    topk: int
    rope_dim: int
    rope_interleaved: bool
    rope_last: bool
    rotated: bool
    k_norm_eps: float


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Llama-4 query scaling: 1 + beta * ln(1 + floor(position / original_max_position))."""

    beta: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention block: ``heads`` of query ``nope + rope`` and value ``v`` over a latent of ``rank``.

    ``unmodelled`` names what the real block does beyond this description (gates, sinks, windows…): both sides
    of a comparison leave it out, and a report has to say so.
    """

    hidden: int
    heads: int
    nope: int
    rope: int
    v: int
    rank: int
    q_rank: int | None
    rms_eps: float
    softmax_scale: float
    rope_spec: RopeSpec
    query_multiplier: float = 1.0
    latent_multiplier: float = 1.0
    query_growth: QueryGrowth | None = None
    indexer: IndexerSpec | None = None
    unmodelled: tuple[str, ...] = ()

    @property
    def qk_dim(self) -> int:
        """Width of one head's query, expanded."""
        return self.nope + self.rope

    @property
    def kv_dim(self) -> int:
        """Width of one cached token, and of one absorbed query: latent then rotary key."""
        return self.rank + self.rope

    def shard(self, rank: int, world: int) -> AttentionSpec:
        """The block as one of ``world`` tensor-parallel ranks sees it.

        Raises:
            CannotError: the heads do not divide.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        if self.heads % world:
            legal = [size for size in range(1, self.heads + 1) if self.heads % size == 0]
            raise CannotError(
                f"{self.heads} heads cannot be divided over {world} ranks.",
                hint=f"Tensor-parallel sizes that fit: {', '.join(map(str, legal))}.",
            )
        return replace(self, heads=self.heads // world)


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type does that its config does not say. ``eps`` None: the config's ``rms_norm_eps``."""

    interleaved: bool = True
    rotated: bool = True
    eps: float | None = 1e-6
    mscale: bool = True
    lora_multipliers: bool = False
    query_growth: bool = False
    indexer_interleaved: bool = False
    indexer_rope_last: bool = False
    indexer_modelled: bool = True
    k_norm_eps: float | None = 1e-6
    unmodelled: tuple[str, ...] = ()


_HY4 = _Family(
    interleaved=False,
    indexer_rope_last=True,
    k_norm_eps=None,
    unmodelled=("attention sink (learnable_sink_param)", "element-wise output gate (linear_gate)"),
)
_HY4_VL = replace(_HY4, interleaved=True, indexer_interleaved=True, eps=None)
_DOTS3 = _Family(
    eps=None,
    mscale=False,
    lora_multipliers=True,
    indexer_interleaved=True,
    unmodelled=(
        "norm of the rotary key (k_rope_only_layernorm)",
        "head-wise output gate (g_proj)",
        "sliding window of the sliding_attention layers",
    ),
)
_GLM5_NEXT = _Family(
    rotated=False,
    eps=None,
    mscale=False,
    indexer_modelled=False,
    unmodelled=("indexer over pools of keys (index_kpool)",),
)
_MISTRAL_LARGE4 = _Family(
    eps=None,
    indexer_interleaved=True,
    indexer_modelled=False,
    unmodelled=(
        "softmax scaling per head and position (ssmax_scaling)",
        "indexer with its own query norm (q_input_norm)",
        "keys shared between layers (kv_source_layers)",
    ),
)
_BAILING = _Family(unmodelled=("head-wise output gate (g_proj)",))

# transformers gives the two latent norms an epsilon of 1e-6 in most families, whatever rms_norm_eps says.
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "sarvam_mla", "axk1"), _Family()),
    **dict.fromkeys(("glm4_moe_lite", "youtu", "deepseek_vl_v2", "kimi_vl", "deepseek_v32"), _Family()),
    "glm_moe_dsa": _Family(indexer_interleaved=True),
    "longcat_flash": _Family(lora_multipliers=True),
    "minicpm3": _Family(interleaved=False),
    "mistral4": _Family(query_growth=True),
    "axk2": _Family(unmodelled=("output gate, fused into the query projection (q_b_proj)",)),
    "kimi_linear": _Family(rotated=False, mscale=False),
    "kimi_k3": _Family(rotated=False, mscale=False, unmodelled=("output gate (g_proj)",)),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v2_5", "bailing_moe_v3"), _BAILING),
    "hy_v4": _HY4,
    **dict.fromkeys(("hy_v4_vl", "hy_v4_vl_text"), _HY4_VL),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _DOTS3),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), _GLM5_NEXT),
    **dict.fromkeys(("mistral_large4", "mistral_large4_text"), _MISTRAL_LARGE4),
}


def attention_spec(
    config: Mapping[str, Any],
    *,
    hidden: int,
    heads: int,
    nope: int,
    rope: int,
    v: int,
    rank: int,
    q_rank: int | None,
    layer: int,
    has_indexer: bool,
    index_heads: int | None = None,
    index_dim: int | None = None,
) -> AttentionSpec:
    """Describe the attention block of ``layer``.

    Args:
        config: The Hugging Face config of the text model (``text_config`` of a wrapper), as JSON gives it.
        hidden: Width of the residual stream; this and the other dims come from tensor shapes.
        has_indexer: The block stores indexer weights; ``index_heads`` and ``index_dim`` are then needed.

    Raises:
        BadInputError: a field is missing, or holds what it cannot hold.
        CannotError: the rotary scaling is one that this package does not implement.
    """
    model_type = str(config.get("model_type", "unknown"))
    family = _FAMILIES.get(model_type)
    unmodelled = family.unmodelled if family else (f"whatever sets {model_type!r} apart from DeepSeek-V3",)
    family = family or _Family()
    parameters = _rope_parameters(config, layer)
    rope_spec = _rope_spec(config, parameters, family, rope)

    scale = (nope + rope) ** -0.5
    scaled = _rope_type(parameters) != "default"
    mscale_all_dim = _number(parameters, "mscale_all_dim", 0.0) if scaled and family.mscale else 0.0
    if mscale_all_dim:
        scale *= yarn_mscale(_factor(config, parameters), mscale_all_dim) ** 2

    growth = None
    if family.query_growth and parameters.get("llama_4_scaling_beta") is not None:
        original = int(_number(parameters, "original_max_position_embeddings"))
        growth = QueryGrowth(_number(parameters, "llama_4_scaling_beta"), original)

    indexer = None
    if has_indexer and family.indexer_modelled:
        if index_heads is None or index_dim is None:
            raise ValueError("a block with an indexer needs index_heads and index_dim")
        indexer = IndexerSpec(
            heads=index_heads,
            dim=index_dim,
            topk=int(_number(config, "index_topk")),
            rope_dim=rope_spec.dim,
            rope_interleaved=_flag(config, "indexer_rope_interleave", family.indexer_interleaved),
            rope_last=family.indexer_rope_last,
            rotated=rope_spec.rotated,
            k_norm_eps=_number(config, "rms_norm_eps") if family.k_norm_eps is None else family.k_norm_eps,
        )
    multipliers = family.lora_multipliers
    return AttentionSpec(
        hidden=hidden,
        heads=heads,
        nope=nope,
        rope=rope,
        v=v,
        rank=rank,
        q_rank=q_rank,
        rms_eps=_number(config, "rms_norm_eps") if family.eps is None else family.eps,
        softmax_scale=scale,
        rope_spec=rope_spec,
        query_multiplier=math.sqrt(hidden / q_rank) if multipliers and q_rank else 1.0,
        latent_multiplier=math.sqrt(hidden / rank) if multipliers else 1.0,
        query_growth=growth,
        indexer=indexer,
        unmodelled=unmodelled,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_parameters(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Rotary fields of one layer, whether nested (transformers 5), flat (older), or given per layer type."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise _bad("rope_parameters", nested, "a mapping")
    if nested and all(isinstance(value, Mapping) or value is None for value in nested.values()):
        layer_types = config.get("layer_types")
        if not isinstance(layer_types, (list, tuple)) or not 0 <= layer < len(layer_types):
            raise _bad("layer_types", layer_types, f"a list that covers layer {layer}")
        nested = nested.get(layer_types[layer]) or {}
    parameters = dict(nested)
    if parameters.get("rope_theta") is None and config.get("rope_theta") is not None:
        parameters["rope_theta"] = config["rope_theta"]
    # As in transformers: a top-level original length beats the nested one; without either, the full length.
    original = config.get("original_max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    elif parameters.get("original_max_position_embeddings") is None and "max_position_embeddings" in config:
        parameters["original_max_position_embeddings"] = config["max_position_embeddings"]
    return parameters


def _rope_type(parameters: Mapping[str, Any]) -> str:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return {"deepseek_yarn": "yarn", "mrope": "default", "su": "longrope"}.get(kind, kind)


def _rope_spec(
    config: Mapping[str, Any], parameters: Mapping[str, Any], family: _Family, dim: int
) -> RopeSpec:
    interleaved = _flag(config, "rope_interleave", family.interleaved)
    if not family.rotated or dim == 0:
        return RopeSpec(dim, interleaved, theta=0.0, rotated=False)
    if dim % 2:
        raise BadInputError(f"The rotary part of a head has {dim} dims; rotations need an even number.")
    scaling = _scaling(config, parameters, dim)
    return RopeSpec(dim, interleaved, _number(parameters, "rope_theta"), scaling)


def _factor(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> float:
    """How much longer the context became; old configs leave it to be worked out."""
    if parameters.get("factor") is not None:
        return _number(parameters, "factor")
    original = _number(parameters, "original_max_position_embeddings")
    return _number(config, "max_position_embeddings") / original


def _scaling(config: Mapping[str, Any], parameters: Mapping[str, Any], dim: int) -> RopeScaling | None:
    kind = _rope_type(parameters)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_number(parameters, "factor"))
    if kind not in ("yarn", "longrope"):
        raise CannotError(
            f"The config asks for rotary scaling {kind!r}, which mla-convert cannot compute.",
            hint="Splitting and resharding do not need it; only verification does.",
        )
    original = int(_number(parameters, "original_max_position_embeddings"))
    given = parameters.get("attention_factor")
    attention_factor = None if given is None else _number(parameters, "attention_factor")
    factor = _factor(config, parameters)
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position=original,
            beta_fast=_number(parameters, "beta_fast", 32.0),
            beta_slow=_number(parameters, "beta_slow", 1.0),
            mscale=_number(parameters, "mscale", 0.0) or None,
            mscale_all_dim=_number(parameters, "mscale_all_dim", 0.0) or None,
            attention_factor=attention_factor,
            truncate=_flag(parameters, "truncate", True),
        )
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_numbers(parameters, field, dim // 2) for field in ("short_factor", "long_factor"))
    return LongRopeScaling(short, long, original, attention_factor)


def _bad(field: str, value: object, wanted: str) -> BadInputError:
    problem = "is missing" if value is None else f"is {reprlib.repr(value)}"
    return BadInputError(f"config.json: {field} {problem}; it must be {wanted}.")


def _number(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = fields.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(field, value, "a positive number")
    # Zero is how configs switch an optional field off, so it is allowed exactly where a default is.
    if value < 0 or (value == 0 and default is None):
        raise _bad(field, value, "a positive number")
    return float(value)


def _numbers(fields: Mapping[str, Any], field: str, count: int) -> tuple[float, ...]:
    values = fields.get(field)
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise _bad(field, values, f"a list of {count} numbers")
    return tuple(_number({field: value}, field) for value in values)


def _flag(fields: Mapping[str, Any], field: str, default: bool) -> bool:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad(field, value, "true or false")
    return value
