"""Each entry point on streams, in graphs, on a second device and in inference mode, on a Hopper GPU.

Every result is held against the same call as it is usually made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_decode_gpu import listed, paged, queries
from test_indexer_gpu import indexer_case
from test_kernels_gpu import sparse_case
from torch import Tensor

from mla_convert.runtime.dispatch import available
from mla_convert.runtime.indexer_loss import indexer_loss

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

Call = Callable[[], tuple[Tensor, ...]]


def calls(device: str = "cuda") -> dict[str, tuple[Call, list[Tensor]]]:
    """Each entry point as a call without arguments, and the floating-point inputs that it reads."""
    from mla_convert.runtime.kernels.decode_mla import decode_mla
    from mla_convert.runtime.kernels.dense_mla import dense_mla
    from mla_convert.runtime.kernels.indexer_logits import indexer_logits
    from mla_convert.runtime.kernels.indexer_select import indexer_select
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla
    from mla_convert.runtime.kernels.sparse_mla_backward import sparse_mla_backward

    def here(*tensors: Tensor) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]

    found: dict[str, tuple[Call, list[Tensor]]] = {}
    for heads in (16, 64):
        q, kv, indices = here(*sparse_case(queries=60, heads=heads, topk=300)[:3])
        out, lse = sparse_mla(q, kv, indices, 0.05, d_v=512)
        (d_out,) = here(torch.randn(60, heads, 512, device="cuda", dtype=out.dtype))  # of one generator
        found[f"sparse, {heads}"] = (
            (lambda q=q, kv=kv, indices=indices: sparse_mla(q, kv, indices, 0.05, d_v=512)),
            [q, kv],
        )
        found[f"backward, {heads}"] = (
            (
                lambda q=q, kv=kv, indices=indices, out=out, lse=lse, d_out=d_out: sparse_mla_backward(
                    q, kv, indices, 0.05, out, lse, d_out, d_v=512, deterministic=True
                )[:2]
            ),
            [d_out],
        )
        found[f"dense, {heads}"] = (lambda q=q, kv=kv: dense_mla(q, kv, 0.05, d_v=512)), [q, kv]
        cache, table = here(*(x.nan_to_num() if x.is_floating_point() else x for x in paged([700, 9, 0], 64)))
        lengths = torch.tensor([700, 9, 0], device=device, dtype=torch.int32)
        new = queries(3, 1, heads).to(device)
        found[f"decode, {heads}"] = (
            (
                lambda new=new, cache=cache, lengths=lengths, table=table: decode_mla(
                    new, cache, cache_seqlens=lengths, block_table=table, scale=0.05, d_v=512
                )
            ),
            [new, cache],
        )
        lists = listed(3, 1, 200, 640).to(device)
        found[f"sparse decode, {heads}"] = (
            (
                lambda new=new, cache=cache, lists=lists: decode_mla(
                    new, cache, indices=lists, scale=0.05, d_v=512
                )
            ),
            [new, cache],
        )
    index_q, index_k, weights = here(*indexer_case(60, 3000, 64, 128))
    found["logits"] = (lambda: (indexer_logits(index_q, index_k, weights),)), [index_q, weights]
    found["selection"] = (lambda: (indexer_select(index_q, index_k, weights, 200),)), [index_q, weights]
    q, kv, indices = here(*sparse_case(queries=60, heads=16, topk=300)[:3])

    def loss() -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (index_q, index_k, weights)]
        loss = indexer_loss(
            *inputs, q, kv, 0.05, indices=indices, reduction="sum", deterministic=True, kernels=True
        )
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    found["loss"] = loss, [index_q, weights]
    return found


NAMES = [
    *(f"{what}, {heads}" for what in ("sparse", "backward", "dense", "decode", "sparse decode") for heads in (16, 64)),
    "logits",
    "selection",
    "loss",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_on_a_stream_of_its_own(name: str) -> None:
    """The call waits for what the stream was given before it, and for nothing else."""
    call, inputs = calls()[name]
    want = [x.clone() for x in call()]
    kept = [x.clone() for x in inputs]
    for x in inputs:
        x.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for x, right in zip(inputs, kept, strict=True):
            x.copy_(right)
        got = call()
    assert not stream.query(), "the host waited"
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_in_a_graph_whose_inputs_change(name: str) -> None:
    call, inputs = calls()[name]
    want = [x.clone() for x in call()]
    kept = [x.clone() for x in inputs]
    for x in inputs:
        x.mul_(-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for x, right in zip(inputs, kept, strict=True):
        x.copy_(right)
    for _ in range(2):
        for x in got:
            x.fill_(float("nan") if x.is_floating_point() else -7)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_a_device_that_is_not_the_current_one(name: str) -> None:
    torch.manual_seed(0)
    want = calls()[name][0]()
    torch.manual_seed(0)
    with torch.cuda.device(0):
        call, inputs = calls("cuda:1")[name]
        got = call()
    assert inputs[0].device == got[0].device == torch.device("cuda:1")
    assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "loss"])
def test_in_inference_mode_and_of_inputs_that_want_gradients(name: str) -> None:
    call, inputs = calls()[name]
    want = call()
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(call(), want, strict=True))
    for x in inputs:
        x.requires_grad_()
    got = call()
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, want, strict=True))


def test_arguments_on_other_devices_are_refused() -> None:
    from mla_convert.runtime.kernels.decode_mla import decode_mla
    from mla_convert.runtime.kernels.dense_mla import dense_mla
    from mla_convert.runtime.kernels.sparse_mla import sparse_mla

    q, kv, indices, scale = sparse_case()
    cache, table = paged([70], 64)
    lengths = torch.tensor([70])
    refused: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (sparse_mla, {"q": q, "kv": kv, "indices": indices.cpu(), "scale": scale, "d_v": 512}),
        (sparse_mla, {"q": q, "kv": kv.cpu(), "indices": indices, "scale": scale, "d_v": 512}),
        (dense_mla, {"q": q, "kv": kv.cpu(), "scale": scale, "d_v": 512}),
        (
            decode_mla,
            {"q": q[None, :1], "kv_cache": cache, "cache_seqlens": lengths, "block_table": table}
            | {"scale": scale, "d_v": 512},
        ),
    ]
    for function, arguments in refused:
        with pytest.raises(ValueError, match="on cuda:0"):
            function(**arguments)
