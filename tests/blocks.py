"""Small attention blocks in float64, their inputs and their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from test_reference import NO_Q_LORA, SPEC, draw, make_weights
from torch import Tensor, nn

from mla_convert.runtime.block import MultiLatentAttention
from mla_convert.runtime.spec import AttentionSpec, IndexerSpec
from mla_convert.runtime.weights import AttentionWeights, IndexerWeights, combine_kv_rows

TOPK = 6
SPARSE = replace(
    SPEC,
    indexer=IndexerSpec(
        heads=3,
        dim=16,
        topk=TOPK,
        rope_dim=8,
        rope_interleaved=False,
        rope_last=False,
        rotated=True,
        k_norm_eps=1e-6,
    ),
)
SPECS = {"dense": SPEC, "no query LoRA": NO_Q_LORA, "sparse": SPARSE}


def weights_for(spec: AttentionSpec) -> tuple[AttentionWeights, Tensor]:
    """Random weights with biases, and those of the indexer where the spec has one."""
    weights, w_kv_b = make_weights(spec, bias=True)
    if spec.indexer is None:
        return weights, w_kv_b
    heads, dim = spec.indexer.heads, spec.indexer.dim
    indexer = IndexerWeights(
        wq_b=draw(heads * dim, spec.q_rank or spec.hidden, seed=201) * 0.2,
        wk=draw(dim, spec.hidden, seed=202) * 0.1,
        k_norm_weight=1 + 0.1 * draw(dim, seed=203),
        k_norm_bias=0.1 * draw(dim, seed=204),
        weights_proj=draw(heads, spec.hidden, seed=205) * 0.1,
    )
    return replace(weights, indexer=indexer), w_kv_b


def make(kind: type[MultiLatentAttention], spec: AttentionSpec, **options: Any) -> Any:
    return kind(spec, *weights_for(spec), **options)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    size = want.abs().max().item()
    return (got - want).abs().max().item() / (size or 1.0)


def gradients(block: nn.Module, x: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a fixed random function of it with respect to x and every parameter."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    output = block(x, **inputs)[0]
    output.backward(draw(*output.shape, seed=99).to(output))
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return output.detach(), {"x": x.grad, **found}


def recombined(found: dict[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    found = dict(found)
    halves = (found.pop("k_b_proj.weight"), found.pop("v_b_proj.weight"))
    return found | {"kv_b_proj.weight": combine_kv_rows(*halves, spec)}


LENGTHS = (23, 1, 0, 40, 7)


def packed_input(seed: int = 7) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return draw(sum(LENGTHS), SPEC.hidden, seed=seed), bounds


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )
