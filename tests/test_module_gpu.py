"""``AbsorbedMLA`` in BF16 with the kernels, on a Hopper GPU: outputs and every parameter's gradient against
``StandardMLA``, in the same BF16 weights and in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from blocks import gradients, recombined
from test_reference import draw
from torch import Tensor

from mla_convert.runtime.dispatch import available
from mla_convert.runtime.forms import Form, FormName
from mla_convert.runtime.module import AbsorbedMLA, LatentCache, StandardMLA
from mla_convert.runtime.spec import AttentionSpec, IndexerSpec, RopeSpec
from mla_convert.runtime.weights import AttentionWeights, IndexerWeights

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

DENSE = AttentionSpec(
    hidden=1024,
    heads=16,
    nope=128,
    rope=64,
    v=128,
    rank=512,
    q_rank=768,
    rms_eps=1e-6,
    softmax_scale=192**-0.5,
    rope_spec=RopeSpec(64, interleaved=True, theta=10000.0),
)
SPARSE = replace(
    DENSE,
    indexer=IndexerSpec(
        heads=8,
        dim=128,
        topk=256,
        rope_dim=64,
        rope_interleaved=False,
        rope_last=False,
        rotated=True,
        k_norm_eps=1e-6,
    ),
)
SPECS = {"dense": DENSE, "sparse": SPARSE}
LENGTHS = (700, 1, 900, 447)


def make_weights(spec: AttentionSpec) -> tuple[AttentionWeights, Tensor]:
    count = iter(range(100))

    def linear(rows: int, columns: int) -> Tensor:
        return draw(rows, columns, seed=next(count)) * columns**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * draw(size, seed=next(count))

    indexer = None
    if spec.indexer is not None:
        heads, dim = spec.indexer.heads, spec.indexer.dim
        indexer = IndexerWeights(
            wq_b=linear(heads * dim, spec.q_rank or 0),
            wk=linear(dim, spec.hidden),
            k_norm_weight=norm(dim),
            k_norm_bias=0.1 * draw(dim, seed=next(count)),
            weights_proj=linear(heads, spec.hidden),
        )
    weights = AttentionWeights(
        q_a=linear(spec.q_rank or 0, spec.hidden),
        q_a_norm=norm(spec.q_rank or 0),
        q_b=linear(spec.heads * spec.qk_dim, spec.q_rank or 0),
        kv_a=linear(spec.kv_dim, spec.hidden),
        kv_a_norm=norm(spec.rank),
        o=linear(spec.hidden, spec.heads * spec.v),
        indexer=indexer,
    )
    return weights, linear(spec.heads * (spec.nope + spec.v), spec.rank)


def block(kind: Any, spec: AttentionSpec, dtype: torch.dtype, **options: Any) -> Any:
    """Weights rounded to BF16, whatever the dtype."""
    weights, w_kv_b = make_weights(spec)
    made = kind(spec, weights.to(torch.bfloat16), w_kv_b.to(torch.bfloat16), **options)
    return made.to("cuda", dtype)


def inputs(shape: str) -> tuple[Tensor, dict[str, Any]]:
    if shape == "sbhd":
        return draw(1024, 2, 1024, seed=7).bfloat16().cuda(), {}
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).cuda()
    return draw(sum(LENGTHS), 1024, seed=7).bfloat16().cuda(), {"cu_seqlens": bounds}


def cosine(got: Tensor, want: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(
        got.double().flatten(), want.double().flatten(), dim=0
    ).item()


@pytest.mark.parametrize(
    ("name", "form"), [("dense", "multi-head"), ("dense", "absorbed dense"), ("sparse", "absorbed sparse")]
)
@pytest.mark.parametrize("shape", ["sbhd", "packed"])
def test_outputs_and_gradients_equal_standard(
    name: str, form: FormName, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name]
    x, given = inputs(shape)
    absorbed = block(AbsorbedMLA, spec, torch.bfloat16, backend="tilelang")
    if name == "dense":
        monkeypatch.setattr(absorbed, "_choose", lambda *_: Form(form, "a test said so"))
    with torch.no_grad():
        given["indices"] = absorbed(x, **given)[1]
    assert (given["indices"] is None) == (name == "dense")
    output, found = gradients(absorbed, x, **given)
    found = recombined(found, spec)
    backend = absorbed.backend(x.device)
    assert set(backend.forms) == {form}
    if form == "multi-head":
        assert set(backend.ran) == {"multi_head: torch"}
    else:
        assert (
            all(entry.endswith(": tilelang") for entry in backend.ran) and backend.ran["sparse_mla: tilelang"]
        )
    for dtype in (torch.bfloat16, torch.float64):
        want_output, want = gradients(block(StandardMLA, spec, dtype), x.to(dtype), **given)
        assert found.keys() == want.keys()
        cosines = {key: cosine(found[key], want[key]) for key in want}
        cosines["output"] = cosine(output, want_output)
        print(f"\n{form}, {shape}, {dtype}: " + ", ".join(f"{k} {1 - c:.1e}" for k, c in cosines.items()))
        assert min(cosines.values()) > 0.9999, cosines


def test_long_prefill_is_multi_head_and_a_chunk_behind_a_cache_too() -> None:
    x, _ = inputs("sbhd")
    blocks = [block(AbsorbedMLA, DENSE, torch.bfloat16, backend="tilelang") for _ in range(2)]
    blocks[1].form = "absorbed"
    outputs = []
    with torch.no_grad():
        for made in blocks:
            cache = LatentCache(DENSE, 2, 1024, dtype=torch.bfloat16, device="cuda")
            outputs.append(torch.cat([made(part, cache=cache)[0] for part in x.split((512, 512))]))
    assert [set(made.backend(x.device).ran) for made in blocks] == [
        {"multi_head: torch"},
        {"dense_mla: tilelang"},
    ]
    assert cosine(*outputs) > 0.9999


@pytest.mark.parametrize("name", SPECS)
def test_prefill_and_decode_equal_the_whole(name: str) -> None:
    spec = SPECS[name]
    x, _ = inputs("sbhd")
    absorbed = block(AbsorbedMLA, spec, torch.bfloat16, backend="tilelang")
    exact = block(AbsorbedMLA, spec, torch.float64)
    with torch.no_grad():
        cache = LatentCache(spec, 2, 1024, dtype=torch.bfloat16, device="cuda")
        parts = [absorbed(part, cache=cache) for part in x.split((1000, 1, 1, 4, 18))]
        got = torch.cat([output for output, _ in parts])
        indices = torch.cat([keys for _, keys in parts]) if name == "sparse" else None
        want, own = exact(x.double())
        if indices is not None:  # BF16 selects other keys near the threshold, and few others
            assert (selected(indices) & selected(own)).sum() > 0.99 * selected(own).sum()
            want = exact(x.double(), indices=indices)[0]
    assert absorbed.backend(x.device).ran["decode_mla: tilelang"] == 3
    assert cosine(got[:1000], want[:1000]) > 0.9999
    assert cosine(got[1000:], want[1000:]) > 0.9999


def selected(indices: Tensor) -> Tensor:
    """bool ``[s, b, 1024]`` of keys ``[s, b, topk]``, -1 for none."""
    chosen = torch.zeros(*indices.shape[:2], 1025, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(2, indices.long() % 1025, True)[..., :1024]


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SPECS)
def test_autocast_from_float32(name: str, cached: torch.dtype) -> None:
    """Weights and inputs in float32: the kernels get BF16, and gradients come back in float32."""
    spec = SPECS[name]
    x = inputs("sbhd")[0].float().requires_grad_()
    absorbed = block(AbsorbedMLA, spec, torch.float32, backend="tilelang")
    absorbed.form = "absorbed"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output, indices = absorbed(x)
        with torch.no_grad():
            cache = LatentCache(spec, 2, 1024, dtype=cached, device="cuda")
            steps = torch.cat([absorbed(part, cache=cache)[0] for part in x.split((1000, 1, 4, 19))])
    assert all(entry.endswith(": tilelang") for entry in absorbed.backend(x.device).ran)
    output.float().square().mean().backward()
    assert {p.grad.dtype for p in (x, *absorbed.parameters()) if p.grad is not None} == {torch.float32}
    with torch.no_grad():
        want = block(AbsorbedMLA, spec, torch.float64)(x.double(), indices=indices)[0]
    assert cosine(output, want) > 0.9999
    assert cosine(steps[:1000], want[:1000]) > (0.9999 if name == "dense" else 0.999)


@pytest.mark.parametrize("name", SPECS)
def test_no_tokens_and_inference_mode(name: str) -> None:
    spec = SPECS[name]
    absorbed = block(AbsorbedMLA, spec, torch.float16, backend="tilelang")
    nothing = torch.empty(0, 2, spec.hidden, device="cuda", dtype=torch.float16, requires_grad=True)
    output = absorbed(nothing)[0]
    output.sum().backward()
    assert output.shape == (0, 2, spec.hidden)
    assert all(p.grad is not None and not p.grad.any() for p in absorbed.parameters() if p.requires_grad)
    x = inputs("sbhd")[0].half()
    with torch.no_grad():
        want = absorbed(x)[0]
    with torch.inference_mode():
        assert torch.equal(absorbed(x)[0], want)
        cache = LatentCache(spec, 2, 1024, dtype=torch.float16, device="cuda")
        steps = torch.cat([absorbed(part, cache=cache)[0] for part in x.split((1000, 24))])
    assert cosine(steps, want) > 0.999


@pytest.mark.parametrize("heads", [4, 16, 64])
@pytest.mark.parametrize("name", SPECS)
def test_packed_steps_of_unequal_sequences(name: str, heads: int) -> None:
    """Some sequences get tokens and some none, so that no decode kernel fits; few heads share a tile of few rows."""
    spec = replace(SPECS[name], heads=heads)
    x, given = inputs("packed")
    absorbed = block(AbsorbedMLA, spec, torch.bfloat16, backend="tilelang")
    absorbed.form = "absorbed"
    starts = given["cu_seqlens"].tolist()
    with torch.no_grad():
        want, indices = block(AbsorbedMLA, spec, torch.float64)(x.double(), **given)
        cache = LatentCache(spec, len(LENGTHS), 1024, dtype=torch.bfloat16, device="cuda")
        done = [0] * len(LENGTHS)
        for step in ((690, 0, 880, 440), (0, 1, 3, 0), (1, 0, 0, 2), (2, 0, 1, 0), (7, 0, 16, 5)):
            rows = [
                torch.arange(start + past, start + past + count)
                for start, past, count in zip(starts, done, step, strict=False)
            ]
            taken = torch.cat(rows).cuda()
            bounds = torch.tensor([0, *step]).cumsum(0).to(torch.int32).cuda()
            lists = None if indices is None else indices[taken]
            got = absorbed(x[taken], cu_seqlens=bounds, cache=cache, indices=lists)[0]
            assert cosine(got, want[taken]) > 0.9999
            done = [past + count for past, count in zip(done, step, strict=True)]
    assert cache.lengths == list(LENGTHS)
    assert all(entry.endswith(": tilelang") for entry in absorbed.backend(x.device).ran)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_a_device_that_is_not_the_current_one(name: str) -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        absorbed = block(AbsorbedMLA, SPECS[name], torch.bfloat16, backend="tilelang").to(device)
        absorbed.form = "absorbed"
        x = inputs("sbhd")[0].to(device)
        output, found = gradients(absorbed, x)
        results.append({"output": output, **found})
    for key, first in results[0].items():
        assert results[1][key].device.index == 1
        assert cosine(results[1][key].to("cuda:0"), first) > 0.99999, key
