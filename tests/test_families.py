"""The reference runtime against transformers, family by family, in float64.

Each attention module of a tiny model is run again on the inputs it received, with every float32 step of its
code lifted to float64; the reference gets the same hidden states and has to give the same output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mla_convert.runtime.reference import (
    AttentionWeights,
    IndexerWeights,
    absorbed_attention,
    absorbed_mla,
    index_queries_keys,
    indexer_logits,
    project,
    select_topk,
    selection_agreement,
    sparse_mla,
    split_kv_rows,
    standard_attention,
    standard_mla,
)
from mla_convert.runtime.spec import AttentionSpec, attention_spec

GATE = 1e-12
TOKENS = 48  # six times index_topk
LONG = {"mistral4": 150, "mistral3_mistral4": 150}  # past twice the length where query scaling starts

WHOLE = (
    *("deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "deepseek_v3_yarn", "deepseek_v3_bias"),
    *("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_shared", "glm4_moe_lite", "minicpm3", "youtu"),
    *("longcat_flash", "mistral4", "mistral3_mistral4", "sarvam_mla", "axk1", "kimi_linear", "kimi_k25"),
)
INDEXED = (
    "deepseek_v32",
    "glm_moe_dsa",
    "glm_moe_dsa_shared",
    "axk2",
    "hy_v4",
    "hy_v4_vl",
    "dots3_note_text",
)


class Float32IsDouble(TorchFunctionMode):
    """Runs code that computes parts in float32 entirely in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def lift(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(lift, args), **{key: lift(value) for key, value in (kwargs or {}).items()})


@dataclass(frozen=True)
class Block:
    """One attention module: its spec and weights for us, what it received, and what it gave back."""

    spec: AttentionSpec
    weights: AttentionWeights
    w_kv_b: Tensor
    module: torch.nn.Module
    x_SD: Tensor
    output_SD: Tensor
    before_o_SX: Tensor
    topk_SK: Tensor | None
    shared_SK: Tensor | None
    q_latent_SQ: Tensor | None

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.x_SD.shape[0])

    @property
    def split(self) -> tuple[Tensor, Tensor]:
        return split_kv_rows(self.w_kv_b, self.spec)


@functools.cache
def blocks_of(name: str) -> tuple[Block, ...]:
    model = tiny_models.build(name)
    config = tiny_models.text_config(model)
    calls: dict[Any, tuple[Any, Any]] = {}
    modules = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    for module in modules:
        module.register_forward_pre_hook(
            lambda module, args, kwargs: calls.setdefault(module, (args, kwargs)) and None, with_kwargs=True
        )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 250, (1, LONG.get(name, TOKENS)), generator=generator)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
        return tuple(_run_again(module, *calls[module], config) for module in modules)


def _run_again(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], config: dict[str, Any]) -> Block:
    seen: dict[str, Tensor] = {}
    module.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(before_o=inputs[0][0]))
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        indexer.register_forward_hook(
            lambda _, inputs, output: seen.update(
                topk=output[0], q_latent=inputs[1][0] if len(inputs) > 1 else None
            )
        )
    with Float32IsDouble():
        output = module(*args, **kwargs)[0]
    x = args[0] if args else kwargs["hidden_states"]
    shared = kwargs.get("prev_topk_indices") if indexer is None else None
    return Block(
        spec_of(module, config),
        weights_of(module),
        module.kv_b_proj.weight.detach(),
        module,
        x[0],
        output[0],
        seen["before_o"],
        seen.get("topk"),
        None if shared is None else shared[0],
        seen.get("q_latent"),
    )


def spec_of(module: Any, config: dict[str, Any]) -> AttentionSpec:
    indexer = getattr(module, "indexer", None)
    return attention_spec(
        config,
        hidden=module.o_proj.out_features,
        heads=module.num_heads,
        nope=module.qk_nope_head_dim,
        rope=module.qk_rope_head_dim,
        v=module.v_head_dim,
        rank=module.kv_b_proj.in_features,
        q_rank=None if getattr(module, "q_proj", None) is not None else module.q_lora_rank,
        layer=module.layer_idx,
        has_indexer=indexer is not None,
        index_heads=None if indexer is None else indexer.n_heads,
        index_dim=None if indexer is None else indexer.head_dim,
    )


def weights_of(module: Any) -> AttentionWeights:
    def get(path: str) -> Tensor | None:
        value = module
        for part in path.split("."):
            value = getattr(value, part, None)
        return None if value is None else value.detach()

    indexer = None
    if get("indexer.wq_b.weight") is not None:
        indexer = IndexerWeights(
            wq_b=get("indexer.wq_b.weight"),
            wk=get("indexer.wk.weight"),
            k_norm_weight=get("indexer.k_norm.weight"),
            k_norm_bias=get("indexer.k_norm.bias"),
            weights_proj=get("indexer.weights_proj.weight"),
        )
    return AttentionWeights(
        q=get("q_proj.weight"),
        q_a=get("q_a_proj.weight"),
        q_a_bias=get("q_a_proj.bias"),
        q_a_norm=get("q_a_layernorm.weight"),
        q_b=get("q_b_proj.weight"),
        kv_a=get("kv_a_proj_with_mqa.weight"),
        kv_a_bias=get("kv_a_proj_with_mqa.bias"),
        kv_a_norm=get("kv_a_layernorm.weight"),
        o=get("o_proj.weight"),
        o_bias=get("o_proj.bias"),
        indexer=indexer,
    )


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def logits_of(block: Block, spec: AttentionSpec | None = None) -> Tensor:
    q, k, w = index_queries_keys(
        block.x_SD, block.q_latent_SQ, block.weights.indexer, spec or block.spec, block.positions
    )
    return indexer_logits(q, k, w, ends=block.positions + 1)


def selection_of(block: Block, spec: AttentionSpec | None = None) -> Tensor:
    return select_topk(logits_of(block, spec), block.spec.indexer.topk)


def causal(topk_SK: Tensor) -> Tensor:
    """transformers fills short rows with masked keys; those are not a choice."""
    return topk_SK.masked_fill(topk_SK > torch.arange(topk_SK.shape[0])[:, None], -1)


def indices_of(block: Block) -> Tensor | None:
    """What transformers selected for a block, so that ties, broken at random there, do not matter here."""
    chosen = block.shared_SK if block.topk_SK is None else block.topk_SK
    return None if chosen is None else causal(chosen)


@pytest.mark.parametrize("name", WHOLE)
def test_standard_and_absorbed_equal_transformers(name: str) -> None:
    blocks = blocks_of(name)
    assert blocks
    worst_standard = worst_absorbed = 0.0
    for block in blocks:
        assert block.spec.unmodelled == ()
        indices = indices_of(block)
        got = standard_mla(block.x_SD, block.weights, block.w_kv_b, block.spec, block.positions, indices)
        absorbed = absorbed_mla(block.x_SD, block.weights, *block.split, block.spec, block.positions, indices)
        worst_standard = max(worst_standard, error(got, block.output_SD))
        worst_absorbed = max(worst_absorbed, error(absorbed, got))
    print(f"\n{name}: {len(blocks)} blocks, standard {worst_standard:.1e}, absorbed {worst_absorbed:.1e}")
    assert worst_standard <= (1e-6 if name.startswith("deepseek_v2") else GATE)
    assert worst_absorbed <= GATE


def test_longcat_runs_two_attentions_a_layer_with_multipliers() -> None:
    blocks = blocks_of("longcat_flash")
    assert len(blocks) == 4
    assert blocks[0].spec.query_multiplier == pytest.approx((64 / 48) ** 0.5)
    assert blocks[0].spec.latent_multiplier == pytest.approx((64 / 32) ** 0.5)


def test_head_gate_is_all_that_bailing_adds() -> None:
    for block in blocks_of("bailing_hybrid"):
        assert block.spec.unmodelled == ("head-wise output gate (g_proj)",)
        projected = project(block.x_SD, block.weights, block.spec, block.positions)
        o_SHV = standard_attention(projected, block.w_kv_b, block.spec)
        gate_SH = torch.sigmoid(block.module.g_proj(block.x_SD))
        assert error((o_SHV * gate_SH[..., None]).flatten(1), block.before_o_SX) <= GATE
        assert error(absorbed_attention(projected, *block.split, block.spec), o_SHV) <= GATE


@pytest.mark.parametrize("name", ["hy_v4", "hy_v4_vl"])
def test_sink_and_gate_are_all_that_hy4_adds(name: str) -> None:
    for block in blocks_of(name):
        assert block.spec.unmodelled == (
            "attention sink (learnable_sink_param)",
            "element-wise output gate (linear_gate)",
        )
        projected = project(block.x_SD, block.weights, block.spec, block.positions)
        with_sink = functools.partial(sparse_mla, attn_sink=block.module.sinks)
        o_SHV = absorbed_attention(
            projected, *block.split, block.spec, indices=indices_of(block), attention=with_sink
        )
        gate = torch.sigmoid(block.module.gate_proj(block.x_SD))
        assert error(o_SHV.flatten(1) * gate, block.before_o_SX) <= GATE


def test_pooled_indexer_is_all_that_glm5_next_adds() -> None:
    (block,) = blocks_of("glm5_next")
    assert block.spec.indexer is None
    assert block.spec.unmodelled == ("indexer over pools of keys (index_kpool)",)
    given = {"indices": block.topk_SK}  # with -1 inside and at the end
    projected = project(block.x_SD, block.weights, block.spec, block.positions)
    o_SHV = standard_attention(projected, block.w_kv_b, block.spec, **given)
    assert error(o_SHV.flatten(1), block.before_o_SX) <= GATE
    assert error(absorbed_attention(projected, *block.split, block.spec, **given), o_SHV) <= GATE


@pytest.mark.parametrize("name", ["axk2", "dots3_note_text", "mistral_large4"])
def test_the_rest_say_what_they_leave_out(name: str) -> None:
    assert all(block.spec.unmodelled for block in blocks_of(name))


@pytest.mark.parametrize("name", INDEXED)
def test_indexer_selects_what_transformers_selects(name: str) -> None:
    indexed = [block for block in blocks_of(name) if block.topk_SK is not None]
    assert indexed
    for block in indexed:
        agreement = selection_agreement(logits_of(block), selection_of(block), causal(block.topk_SK), 1e-12)
        assert agreement.agrees, agreement
        assert agreement.expected == 36 + 40 * 8  # rows 0…7 see fewer than eight keys
        assert agreement.missed <= 12  # exact ties: no head likes either key, so both score 0


def test_shared_layers_reuse_the_full_layer_before() -> None:
    blocks = blocks_of("glm_moe_dsa_shared")
    assert [block.spec.indexer is not None for block in blocks] == [True, True, False, True, False]
    assert [block.shared_SK is not None for block in blocks] == [False, False, True, False, True]
    for full, shared in ((blocks[1], blocks[2]), (blocks[3], blocks[4])):
        # The shared layer was handed a selection that was scored in float32.
        agreement = selection_agreement(logits_of(full), selection_of(full), causal(shared.shared_SK), 1e-6)
        assert agreement.agrees and agreement.missed <= 12, agreement


# Each of these mistakes leaves shapes intact and has been made by a released program.


def _swap_heads(w: Tensor, dims: int) -> Tensor:
    return torch.cat([w[dims : 2 * dims], w[:dims], w[2 * dims :]])


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
@pytest.mark.parametrize("fault", ["key heads swapped", "value heads swapped", "K and V exchanged", "scale"])
def test_faults_are_far_above_the_gate(name: str, fault: str) -> None:
    block = blocks_of(name)[1]
    indices = indices_of(block)
    spec, (w_uk, w_uv) = block.spec, block.split
    if fault == "key heads swapped":
        w_uk = _swap_heads(w_uk, spec.nope)
    elif fault == "value heads swapped":
        w_uv = _swap_heads(w_uv, spec.v)
    elif fault == "K and V exchanged":
        heads = block.w_kv_b.reshape(spec.heads, -1, spec.rank)
        w_uv, w_uk = heads[:, : spec.v].flatten(0, 1), heads[:, spec.v :].flatten(0, 1)
    else:
        spec = replace(spec, softmax_scale=spec.kv_dim**-0.5)
    got = absorbed_mla(block.x_SD, block.weights, w_uk, w_uv, spec, block.positions, indices)
    assert error(got, block.output_SD) > 1e-2


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3", "kimi_linear", "deepseek_v3_yarn"])
def test_wrong_rope_layout_is_far_above_the_gate(name: str) -> None:
    block = blocks_of(name)[-1]
    rope = block.spec.rope_spec
    wrong = replace(rope, interleaved=not rope.interleaved, scaling=None, rotated=True, theta=10000.0)
    spec = replace(block.spec, rope_spec=wrong)
    got = standard_mla(block.x_SD, block.weights, block.w_kv_b, spec, block.positions)
    assert error(got, block.output_SD) > 1e-2


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("field", ["rope_interleaved", "rope_last", "rotated"])
def test_wrong_indexer_rope_layout_selects_other_keys(name: str, field: str) -> None:
    block = next(block for block in blocks_of(name) if block.topk_SK is not None)
    indexer = block.spec.indexer
    wrong = replace(block.spec, indexer=replace(indexer, **{field: not getattr(indexer, field)}))
    selection = selection_of(block, wrong)
    agreement = selection_agreement(logits_of(block), selection, causal(block.topk_SK), 1e-3)
    assert agreement.wrong_queries > 10 and agreement.worst_gap > 0.02, agreement
    if block.spec.unmodelled == ():
        args = (block.x_SD, block.weights, block.w_kv_b, block.spec, block.positions, selection)
        assert error(standard_mla(*args), block.output_SD) > 1e-2
