"""The attention blocks as modules: against transformers, against each other, with caches and state dicts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from test_families import LONG, TOKENS, WHOLE, Float32IsDouble, causal, spec_of, weights_of
from test_reference import NO_Q_LORA, SPEC, draw, make_weights
from torch import Tensor, nn

from mla_convert import api
from mla_convert.attention import load_attention
from mla_convert.errors import BadInputError, CannotError
from mla_convert.runtime.block import MultiLatentAttention
from mla_convert.runtime.dispatch import Backend
from mla_convert.runtime.module import AbsorbedMLA, LatentCache, StandardMLA
from mla_convert.runtime.reference import select_topk
from mla_convert.runtime.spec import AttentionSpec, IndexerSpec
from mla_convert.runtime.weights import AttentionWeights, IndexerWeights, combine_kv_rows, split_kv_rows

GATE = 1e-10
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


def check_gradients(got: dict[str, Tensor], want: dict[str, Tensor], gate: float = GATE) -> float:
    assert got.keys() == want.keys()
    worst = max(error(got[name], want[name]) for name in want)
    assert worst <= gate, {name: error(got[name], want[name]) for name in want}
    return worst


# Against transformers


@functools.cache
def captured(name: str) -> tuple[tuple[Any, Tensor, dict[str, Any], dict[str, Any]], ...]:
    """Attention modules of a tiny model with what each one receives: module, x, other arguments, config."""
    model = tiny_models.build(name)
    calls: dict[Any, tuple[Any, dict[str, Any]]] = {}
    modules = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    for module in modules:
        module.register_forward_pre_hook(
            lambda module, args, kwargs: calls.setdefault(module, (args, kwargs)) and None, with_kwargs=True
        )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 250, (1, LONG.get(name, TOKENS)), generator=generator)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    found = []
    for module in modules:
        args, kwargs = calls[module]
        kwargs = {**dict(zip(("hidden_states",), args, strict=False)), **kwargs}
        rest = args[1:]
        found.append(
            (module, kwargs.pop("hidden_states"), {"rest": rest, **kwargs}, tiny_models.text_config(model))
        )
    return tuple(found)


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_equal_transformers_and_so_do_their_gradients(name: str) -> None:
    worst = 0.0
    for module, x_bsh, arguments, config in captured(name):
        arguments = dict(arguments)
        rest, chosen = arguments.pop("rest"), {}
        indexer = getattr(module, "indexer", None)
        if indexer is not None:
            hook = indexer.register_forward_hook(lambda _, i, out, chosen=chosen: chosen.update(topk=out[0]))
        x_bsh = x_bsh.detach().requires_grad_()
        module.zero_grad()
        with Float32IsDouble():
            output = module(x_bsh, *rest, **arguments)[0]
        output.backward(draw(*output.shape[1:], seed=99)[None])
        if indexer is not None:
            hook.remove()
        shared = arguments.get("prev_topk_indices") if indexer is None else None
        listed = chosen.get("topk", None if shared is None else shared[0])
        indices = None if listed is None else causal(listed)[:, None]

        want = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
        want["x"] = x_bsh.grad[0][:, None]
        spec = spec_of(module, config)
        gate = 1e-6 if name.startswith("deepseek_v2") else GATE
        for kind in (StandardMLA, AbsorbedMLA):
            block = kind(spec, weights_of(module), torch.zeros_like(module.kv_b_proj.weight))
            block.load_state_dict(module.state_dict())
            got_output, got = gradients(block, x_bsh[0][:, None], indices=indices)
            assert error(got_output[:, 0], output[0].detach()) <= gate
            got = recombined(got, spec) if kind is AbsorbedMLA else got
            worst = max(worst, check_gradients(got, want, gate))
    print(f"\n{name}: gradients {worst:.1e}")


# Against each other


LENGTHS = (23, 1, 0, 40, 7)


def packed_input(seed: int = 7) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return draw(sum(LENGTHS), SPEC.hidden, seed=seed), bounds


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", ["sbhd", "packed", "packed with a batch of 1"])
def test_absorbed_equals_standard(name: str, shape: str) -> None:
    spec = SPECS[name]
    if shape == "sbhd":
        x, inputs = draw(30, 3, spec.hidden, seed=7), {}
    else:
        x, bounds = packed_input()
        inputs = {"cu_seqlens": bounds}
        x = x[:, None] if "batch" in shape else x
    standard, absorbed = make(StandardMLA, spec), make(AbsorbedMLA, spec)
    output, want = gradients(standard, x, **inputs)
    got_output, got = gradients(absorbed, x, **inputs)
    assert error(got_output, output) <= GATE
    check_gradients(recombined(got, spec), want)
    assert {"o_proj.bias", "kv_a_proj_with_mqa.bias", "kv_b_proj.weight", "x"} <= want.keys()
    assert not any(key.startswith("indexer") for key in want)


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("name", SPECS)
def test_sequences_do_not_see_each_other(kind: type[MultiLatentAttention], name: str) -> None:
    block = make(kind, SPECS[name])
    x, bounds = packed_input()
    whole, indices = block(x, cu_seqlens=bounds)
    if name == "sparse":
        assert indices is not None and indices.shape == (x.shape[0], TOPK)
    for start, end in itertools.pairwise(bounds):
        if end > start:
            alone, own = block(x[start:end, None])
            assert error(alone[:, 0], whole[start:end]) <= 1e-13
            if own is not None:
                assert torch.equal(own[:, 0], indices[start:end])
    batch = torch.stack([x[:20], x[20:40]], 1)
    both, chosen = block(batch)
    second, own = block(batch[:, 1:])
    assert error(both[:, 1:], second) <= 1e-13
    assert chosen is None or torch.equal(chosen[:, 1:], own)


def test_the_selection_decides_and_can_be_shared() -> None:
    block, dense = make(AbsorbedMLA, SPARSE), make(AbsorbedMLA, SPEC)
    x = draw(30, 2, SPARSE.hidden, seed=7)
    output, indices = block(x)
    assert error(output[TOPK:], dense(x)[0][TOPK:]) > 1e-3
    assert error(output[:TOPK], dense(x)[0][:TOPK]) <= 1e-13  # as few keys as are selected
    shared = AbsorbedMLA(SPEC, *weights_for(SPEC))
    given, returned = shared(x, indices=indices)
    assert error(given, output) <= 1e-13
    assert returned is indices
    others = select_topk(draw(30, 30, seed=3).tril() - 1e9 * (1 - torch.ones(30, 30).tril()), TOPK)
    assert error(block(x, indices=others[:, None].expand(-1, 2, -1))[0], output) > 1e-3


def test_a_sequence_no_longer_than_topk_is_dense() -> None:
    x = draw(TOPK, 2, SPEC.hidden, seed=7)
    output, indices = make(AbsorbedMLA, SPARSE)(x)
    assert indices is None
    assert error(output, make(AbsorbedMLA, SPEC)(x)[0]) <= 1e-13


# Caches


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("steps", [(12, 1, 1, 1, 1), (3, 1, 9, 3), (16,)])
def test_prefill_and_decode_equal_the_whole(
    kind: type[MultiLatentAttention], name: str, steps: tuple[int, ...]
) -> None:
    spec, block = SPECS[name], make(kind, SPECS[name])
    x = draw(sum(steps), 3, spec.hidden, seed=7)
    with torch.no_grad():
        want, _ = block(x)
        cache = LatentCache(spec, 3, 20, dtype=torch.float64)
        got = torch.cat([block(part, cache=cache)[0] for part in x.split(steps)])
    assert error(got, want) <= 1e-13
    assert cache.lengths == [sum(steps)] * 3


@pytest.mark.parametrize("name", SPECS)
def test_packed_decode_of_unequal_sequences(name: str) -> None:
    spec, block = SPECS[name], make(AbsorbedMLA, SPECS[name])
    x, bounds = packed_input()
    with torch.no_grad():
        want = block(x, cu_seqlens=bounds)[0]
        whole = [want[start:end] for start, end in itertools.pairwise(bounds)]
        sequences = [x[start:end] for start, end in itertools.pairwise(bounds)]
        cache = LatentCache(spec, len(LENGTHS), 48, dtype=torch.float64)
        done = [0] * len(LENGTHS)
        for step in ((9, 1, 0, 30, 2), (1, 0, 0, 1, 1), (0, 0, 0, 4, 4), (13, 0, 0, 5, 0)):
            parts = [s[d : d + n] for s, d, n in zip(sequences, done, step, strict=True)]
            ends = torch.tensor([0, *step]).cumsum(0)
            got = block(torch.cat(parts), cu_seqlens=ends, cache=cache)[0]
            expected = [w[d : d + n] for w, d, n in zip(whole, done, step, strict=True)]
            assert error(got, torch.cat(expected)) <= 1e-13
            done = [d + n for d, n in zip(done, step, strict=True)]
    assert cache.lengths == list(LENGTHS)


def test_shared_indices_still_fill_the_indexers_cache() -> None:
    block, x = make(AbsorbedMLA, SPARSE), draw(20, 1, SPARSE.hidden, seed=7)
    with torch.no_grad():
        want, indices = block(x)
        cache = LatentCache(SPARSE, 1, 20, dtype=torch.float64)
        block(x[:19], cache=cache, indices=indices[:19])
        assert error(block(x[19:], cache=cache)[0], want[19:]) <= 1e-13


def test_a_cache_refuses_what_it_cannot_hold() -> None:
    block, x = make(AbsorbedMLA, SPEC), draw(5, 2, SPEC.hidden)
    cache = LatentCache(SPEC, 2, 8, dtype=torch.float64)
    with pytest.raises(CannotError, match="keeps no gradients"):
        block(x, cache=cache)
    with torch.no_grad():
        block(x, cache=cache)
        with pytest.raises(CannotError, match=r"Sequence 0 has 5 .* and 5 more .* capacity of 8"):
            block(x, cache=cache)
        assert cache.lengths == [5, 5]
        with pytest.raises(BadInputError, match="3 sequences for a cache of 2"):
            block(draw(1, 3, SPEC.hidden), cache=cache)
    with pytest.raises(BadInputError, match="holds nothing"):
        LatentCache(SPEC, 0, 8, dtype=torch.float64)


# State dicts


def odd_bits(block: nn.Module) -> None:
    """Signed zeros and NaN payloads, which survive only where bits are moved."""
    with torch.no_grad():
        for parameter in block.parameters():
            flat = parameter.view(-1).view(torch.int16)
            flat[:3] = torch.tensor([-32768, 0x7FC1, -63], dtype=torch.int16)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )


def in_bfloat16(kind: type[MultiLatentAttention], spec: AttentionSpec = SPARSE) -> Any:
    return make(kind, spec).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("layout", ["split", "combined"])
def test_either_layout_comes_back_bit_for_bit(kind: type[MultiLatentAttention], layout: str) -> None:
    source = in_bfloat16(AbsorbedMLA)
    odd_bits(source)
    combined, split = source.export_state_dict("combined"), source.export_state_dict("split")
    assert {"kv_b_proj.weight"} == combined.keys() - split.keys()
    assert {"k_b_proj.weight", "v_b_proj.weight"} == split.keys() - combined.keys()
    halves = split_kv_rows(combined["kv_b_proj.weight"], SPARSE)
    assert same_bits({"k_b_proj.weight": halves[0]}, {"k_b_proj.weight": split["k_b_proj.weight"]})
    loaded = in_bfloat16(kind)
    assert loaded.load_state_dict({"split": split, "combined": combined}[layout]) == ([], [])
    assert same_bits(loaded.export_state_dict("split"), split)
    assert same_bits(loaded.export_state_dict("combined", whole=True), combined)
    assert loaded.export_state_dict().keys() == loaded.state_dict().keys()


def test_loading_within_a_model_and_in_other_names() -> None:
    source, model = in_bfloat16(StandardMLA), nn.ModuleDict({"attn": in_bfloat16(AbsorbedMLA)})
    nn.init.zeros_(model["attn"].k_b_proj.weight)
    state = source.state_dict()
    model.load_state_dict({f"attn.{name}": tensor for name, tensor in state.items()})
    assert same_bits(model["attn"].export_state_dict("combined"), source.export_state_dict())
    native = {"q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b", "kv_b_proj": "wkv_b"}
    native |= {"kv_a_proj_with_mqa": "wkv_a", "kv_a_layernorm": "kv_norm", "o_proj": "wo"}
    renamed = {}
    for name, tensor in state.items():
        module, _, field = name.rpartition(".")
        renamed[f"{native.get(module, module)}.{field}"] = tensor
    assert "wq_b.weight" in renamed and "indexer.wq_b.weight" in renamed
    block = in_bfloat16(AbsorbedMLA)
    nn.init.zeros_(block.q_b_proj.weight)
    block.load_state_dict(renamed)
    assert same_bits(block.export_state_dict("combined"), source.export_state_dict())


def test_both_layouts_side_by_side_have_to_agree() -> None:
    source, block = in_bfloat16(AbsorbedMLA), in_bfloat16(AbsorbedMLA)
    both = source.export_state_dict("split") | source.export_state_dict("combined")
    for loading in (block, in_bfloat16(StandardMLA)):
        loading.load_state_dict(both)
        assert same_bits(loading.export_state_dict("split"), source.export_state_dict("split"))
    both["v_b_proj.weight"] = both["v_b_proj.weight"].flip(0)
    with pytest.raises(BadInputError, match="do not hold the rows of kv_b_proj"):
        block.load_state_dict(both)


def test_what_cannot_be_loaded_is_refused() -> None:
    block = in_bfloat16(AbsorbedMLA)
    state = block.export_state_dict("combined")
    coded = state | {"kv_b_proj.weight": state["kv_b_proj.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(BadInputError, match=r"kv_b_proj\.weight is quantised"):
        block.load_state_dict(coded)
    with pytest.raises(BadInputError, match=r"o_proj\.weight_scale_inv is quantised"):
        block.load_state_dict(state | {"o_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(BadInputError, match="kv_b has shape"):
        block.load_state_dict(state | {"kv_b_proj.weight": state["kv_b_proj.weight"][1:]})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*o_proj\.bias.*Unexpected key.*wrong\.weight"):
        block.load_state_dict(
            {k: v for k, v in state.items() if k != "o_proj.bias"} | {"wrong.weight": state["o_proj.bias"]}
        )


def test_weights_that_do_not_fit_the_spec() -> None:
    weights, w_kv_b = weights_for(SPEC)
    with pytest.raises(BadInputError, match="k_b has shape"):
        AbsorbedMLA(SPEC, weights, split_kv_rows(w_kv_b, SPEC)[::-1])
    with pytest.raises(BadInputError, match="q_a is missing"):
        AbsorbedMLA(SPEC, replace(weights, q_a=None), w_kv_b)
    with pytest.raises(BadInputError, match="indexer's weights are missing"):
        AbsorbedMLA(SPARSE, weights, w_kv_b)


# Inputs


def test_inputs_that_do_not_fit() -> None:
    block, x = make(AbsorbedMLA, SPARSE), draw(30, 2, SPARSE.hidden)
    for wrong, inputs, message in (
        (x[0], {}, r"must be \[s, b, D\] with D = 64"),
        (x[..., 1:], {}, "must be"),
        (x, {"cu_seqlens": [0, 30]}, "have a batch of 1"),
        (x[:, 0], {"cu_seqlens": [0, 20]}, "x has 30 tokens .* 20"),
        (x[:, 0], {"cu_seqlens": [0, 40, 30]}, "never fall"),
        (x[:, 0], {"cu_seqlens": [1, 30]}, "begin with 0"),
        (x, {"indices": torch.zeros(30, 1, 4, dtype=torch.int32)}, "a list for each of 60 queries"),
    ):
        with pytest.raises(BadInputError, match=message):
            block(wrong, **inputs)


class StandIn(Backend):
    """Kernels that compute nothing: what they are handed must all be on one device."""

    def _take(self, q: Tensor, *others: Tensor, d_v: int) -> tuple[Tensor, None]:
        assert all(other.device == q.device for other in others)
        return q[..., :d_v] + 0 * others[0].sum(), None

    def sparse_mla(self, q: Tensor, kv: Tensor, indices: Tensor, scale: float, *, d_v: int) -> Any:
        return self._take(q, kv, indices, d_v=d_v)

    def dense_mla(
        self, q: Tensor, kv: Tensor, scale: float, *, starts: Tensor, ends: Tensor, d_v: int
    ) -> Any:
        assert not (torch.is_grad_enabled() and q.requires_grad)
        return self._take(q, kv, starts, ends, d_v=d_v)

    def decode_mla(self, q: Tensor, kv: Tensor, *, cache_seqlens: Tensor, d_v: int, **_: Any) -> Any:
        return self._take(q, kv, cache_seqlens, d_v=d_v)

    def indexer_select(
        self, q: Tensor, k: Tensor, w: Tensor, topk: int, *, starts: Tensor, ends: Tensor
    ) -> Any:
        self._take(q, k, w, starts, ends, d_v=1)
        return torch.empty(q.shape[0], min(topk, k.shape[0]), dtype=torch.int32, device=q.device)


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_left_on_the_host(name: str) -> None:
    """The way through the kernels on a device that cannot be mixed with the CPU."""
    spec = SPECS[name]
    block = make(AbsorbedMLA, spec, backend=StandIn("tilelang", "a stand-in", "meta")).to("meta")
    x = torch.empty(30, 2, spec.hidden, dtype=torch.float64, device="meta")
    with torch.no_grad():
        cache = LatentCache(spec, 2, 40, dtype=torch.float64, device="meta")
        outputs = [block(part, cache=cache) for part in x.split((20, 1, 4, 5))]
        outputs += [block(x), block(x.flatten(0, 1), cu_seqlens=[0, 23, 60])]
    outputs.append(block(x.requires_grad_(), indices=outputs[-2].indices))
    outputs[-1].output.sum().backward()
    assert all(found.output.device.type == "meta" for found in outputs)
    assert {p.grad.device.type for p in block.parameters() if p.requires_grad} == {"meta"}


def test_the_backend_says_what_ran() -> None:
    block = make(AbsorbedMLA, SPARSE, backend="reference")
    block(draw(30, 1, SPARSE.hidden))
    assert block.backend("cpu").explain().count("reference") >= 3
    assert set(block.backend("cpu").ran) == {"indexer_select: reference", "sparse_mla: reference"}
    with pytest.raises(CannotError, match="cannot run"):
        make(AbsorbedMLA, SPARSE, backend="tilelang")(draw(30, 1, SPARSE.hidden))


# Checkpoints


def test_a_layer_of_a_checkpoint_in_either_layout(tmp_path: Path) -> None:
    original = tiny_models.save("glm_moe_dsa", tmp_path / "model")
    split = api.split(original).output
    x = draw(30, 2, 64, seed=7)
    outputs = [
        load_attention(folder, layer, kind=kind, dtype=torch.float64)(x)[0]
        for folder in (original, split)
        for kind in (None, StandardMLA)
        for layer in (1, "model.layers.1.self_attn")
    ]
    assert all(error(output, outputs[0]) <= 1e-13 for output in outputs)
    stored = load_attention(split, 1).state_dict()
    tensors = load_file(split / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(tensor, tensors[f"model.layers.1.self_attn.{name}"])


def test_layers_that_are_not_there_or_not_one(tmp_path: Path) -> None:
    original = tiny_models.save("longcat_flash", tmp_path / "model")
    with pytest.raises(CannotError, match="There is no MLA block 7") as caught:
        load_attention(original, 7)
    assert caught.value.hint == "Layers with MLA: 0, 1."
    with pytest.raises(CannotError, match="Layer 1 has 2 attention blocks") as caught:
        load_attention(original, 1)
    assert "model.layers.1.self_attn.0, model.layers.1.self_attn.1" in str(caught.value.hint)
