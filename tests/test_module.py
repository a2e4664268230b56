"""The attention blocks as modules: against transformers and each other, and inputs that do not fit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import tiny_models
import torch
from blocks import SPARSE, SPECS, TOPK, error, gradients, make, packed_input, recombined, weights_for
from test_families import LONG, TOKENS, WHOLE, Float32IsDouble, causal, spec_of, weights_of
from test_reference import SPEC, draw
from torch import Tensor

from mla_convert.errors import BadInputError, CannotError
from mla_convert.runtime.block import MultiLatentAttention
from mla_convert.runtime.dispatch import Backend
from mla_convert.runtime.module import AbsorbedMLA, LatentCache, StandardMLA
from mla_convert.runtime.parallel import context_rows
from mla_convert.runtime.reference import select_topk
from mla_convert.runtime.tokens import place_tokens

GATE = 1e-10


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


# Inputs


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("shape", "bounds"),
    [((0, 2), None), ((5, 0), None), ((0,), [0]), ((0,), [0, 0, 0]), ((0, 1), torch.tensor([0, 0]))],
    ids=str,
)
def test_no_tokens(
    kind: type[MultiLatentAttention], name: str, shape: tuple[int, ...], bounds: list[int] | None
) -> None:
    """As from a rank that got no data: an output of no rows, and a gradient of 0 for every parameter."""
    block, inputs = make(kind, SPECS[name]), {} if bounds is None else {"cu_seqlens": bounds}
    output, found = gradients(block, torch.empty(*shape, 64, dtype=torch.float64), **inputs)
    assert output.shape == (*shape, 64) and found["x"].shape == output.shape
    trained = {key for key, p in block.named_parameters() if p.requires_grad}
    assert found.keys() == {"x", *trained} and not any(gradient.any() for gradient in found.values())
    if shape != (5, 0):
        with torch.no_grad():
            cache = LatentCache(SPECS[name], 2, 8, dtype=torch.float64)
            block(draw(3, 2, 64), cache=cache)
            inputs = {"cu_seqlens": [0, 0, 0]} if inputs else {}
            assert not block(torch.empty(*shape, 64, dtype=torch.float64), cache=cache, **inputs)[0].numel()
        assert cache.lengths == [3, 3]


@pytest.mark.parametrize("kind", [StandardMLA, AbsorbedMLA])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_after_inference_mode(
    kind: type[MultiLatentAttention], name: str, packed: bool
) -> None:
    """Of the same shape, so that what is kept of the first call serves the second."""
    spec, block = SPECS[name], make(kind, SPECS[name])
    place_tokens.cache_clear()
    x, bounds = packed_input()
    inputs = {"cu_seqlens": bounds} if packed else {}
    x = x if packed else draw(30, 3, spec.hidden, seed=7)
    with torch.inference_mode():
        want = block(x, **inputs)[0]
        cache = LatentCache(spec, 2, 9, dtype=torch.float64)
    assert error(gradients(block, x, **inputs)[0], want.clone()) <= 1e-13
    with torch.no_grad():
        block(draw(8, 2, spec.hidden), cache=cache)
    with torch.inference_mode():
        block(draw(1, 2, spec.hidden), cache=cache)
    assert cache.lengths == [9, 9]


@pytest.mark.parametrize("name", SPECS)
def test_a_default_device_is_left_alone(name: str) -> None:
    """``torch.set_default_device`` says where a script's new tensors go, not where a block does its counting."""
    block, (x, bounds) = make(AbsorbedMLA, SPECS[name]), packed_input()
    want = block(x, cu_seqlens=bounds)[0]
    place_tokens.cache_clear()
    context_rows.cache_clear()
    with torch.device("meta"), torch.no_grad():
        assert torch.equal(block(x, cu_seqlens=bounds)[0], want)
        cache = LatentCache(SPECS[name], 2, 40, dtype=torch.float64)
        parts = [block(part, cache=cache)[0] for part in x[:40].view(20, 2, -1).split((17, 1, 2))]
    assert error(torch.cat(parts), block(x[:40].view(20, 2, -1))[0].detach()) <= 1e-13


def test_no_queries_take_no_lists() -> None:
    nothing = torch.empty(0, 2, TOPK, dtype=torch.int32)
    assert make(AbsorbedMLA, SPARSE)(draw(0, 2, 64), indices=nothing)[0].shape == (0, 2, 64)


class Kinds(Backend):
    """The reference, where kernels would refuse tensors of different dtypes."""

    def indexer_select(self, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
        assert q.dtype == k.dtype == torch.bfloat16
        return super().indexer_select(q, k, *rest, **options)

    def sparse_mla(self, q: Tensor, kv: Tensor, *rest: Any, **options: Any) -> Any:
        assert q.dtype == kv.dtype == torch.bfloat16
        return super().sparse_mla(q, kv, *rest, **options)

    def decode_mla(self, q: Tensor, kv: Tensor, **options: Any) -> Any:
        assert q.dtype == kv.dtype == torch.bfloat16
        return super().decode_mla(q, kv, **options)


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float32])
def test_autocast(cached: torch.dtype) -> None:
    """What reaches the kernels is of one dtype, that of autocast."""
    block = make(AbsorbedMLA, SPARSE, backend=Kinds("reference", "a test said so", "cpu")).float()
    x = draw(30, 2, SPARSE.hidden, seed=7).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = block(x)
        with torch.no_grad():
            cache = LatentCache(SPARSE, 2, 30, dtype=cached)
            steps = torch.cat([block(part, cache=cache)[0] for part in x.split((24, 1, 5))])
    output.square().mean().backward()
    assert {p.grad.dtype for p in (x, *block.parameters()) if p.grad is not None} == {torch.float32}
    want = make(AbsorbedMLA, SPARSE).float()(x)[0]
    for got in (output, steps):
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99


def test_inputs_of_another_dtype_or_device() -> None:
    block, x = make(AbsorbedMLA, SPARSE), draw(30, 2, SPARSE.hidden)
    for wrong, message in (
        (x.float(), "x is float32 and the block's weights are float64"),
        (x.long(), "x is int64 and the block's weights are float64"),
        (x.to("meta"), "x is on meta and the block on cpu"),
    ):
        with pytest.raises(BadInputError, match=message) as refused:
            block(wrong)
        assert refused.value.hint


def test_inputs_that_do_not_fit() -> None:
    block, x = make(AbsorbedMLA, SPARSE), draw(30, 2, SPARSE.hidden)
    for wrong, inputs, message in (
        (x[:, 0], {"cu_seqlens": torch.tensor([0.0, 30.0])}, "one row of whole numbers"),
        (x[:, 0], {"cu_seqlens": torch.tensor([[0, 30]])}, "one row of whole numbers"),
        (x, {"indices": torch.zeros(30, 2, 4)}, "indices are float32; they must be int32 or int64"),
        (
            x,
            {"indices": torch.zeros(30, 2, 4, dtype=torch.int32, device="meta")},
            "indices are on meta and x on cpu",
        ),
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


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_under_torch_compile(name: str) -> None:
    """In pieces: what counts tokens and calls kernels stays outside of its graphs."""
    block, x = make(AbsorbedMLA, SPECS[name]), draw(30, 2, SPECS[name].hidden, seed=7)
    want_output, want = gradients(block, x)
    torch._dynamo.reset()
    output, found = gradients(torch.compile(block, backend="eager"), x)
    assert error(output, want_output) <= 1e-13
    check_gradients({key.removeprefix("_orig_mod."): value for key, value in found.items()}, want, 1e-12)


def test_the_backend_says_what_ran() -> None:
    block = make(AbsorbedMLA, SPARSE, backend="reference")
    block(draw(30, 1, SPARSE.hidden))
    assert block.backend("cpu").explain().count("reference") >= 3
    assert set(block.backend("cpu").ran) == {"indexer_select: reference", "sparse_mla: reference"}
    with pytest.raises(CannotError, match="cannot run"):
        make(AbsorbedMLA, SPARSE, backend="tilelang")(draw(30, 1, SPARSE.hidden))
