"""Arguments that do not belong together, at every entry point: references refuse what kernels refuse."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_convert.runtime import autograd, backward, reference, selection
from mla_convert.runtime.dispatch import resolve_backend
from mla_convert.runtime.indexer_loss import indexer_loss

META = "meta"


def kernels(module: str, name: str) -> list[Callable[..., Any]]:
    """The entry point of a kernel, where TileLang is installed; no GPU is needed to be refused."""
    if importlib.util.find_spec("tilelang") is None:
        return []
    return [getattr(importlib.import_module(f"mla_convert.runtime.kernels.{module}"), name)]


SPARSE: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(3, 40)}, r"q \[3, 40\]"),
    ({"q": torch.zeros(1, 1, 3, 4, 40)}, r"q \[1, 1, 3, 4, 40\]"),
    ({"kv": torch.zeros(40)}, r"kv \[40\]"),
    ({"kv": torch.zeros(9, 2, 40)}, r"kv \[9, 2, 40\].* \[T, E\] or \[T, 1, E\]"),
    ({"kv": torch.zeros(9, 41)}, "q has 40 dims a head and kv 41 a token"),
    ({"kv": torch.zeros(9, 40).double()}, "q is torch.float32 and kv torch.float64"),
    ({"kv": torch.zeros(9, 40, device=META)}, "kv is on meta, and not on cpu"),
    ({"q": torch.ones(3, 4, 40).int(), "kv": torch.ones(9, 40).int()}, "q is torch.int32, no floating"),
    ({"indices": torch.zeros(5).int()}, r"indices \[5\]"),
    ({"indices": torch.zeros(1, 5).int()}, "3 queries and 1 lists"),
    ({"indices": torch.zeros(3, 5)}, "indices is torch.float32, expected int32 or int64"),
    ({"indices": torch.zeros(3, 5).to(torch.uint8)}, "indices is torch.uint8, expected int32 or int64"),
    ({"indices": torch.zeros(3, 5, dtype=torch.int32, device=META)}, "indices is on meta, and not on cpu"),
    ({"topk_length": torch.tensor([1])}, r"topk_length \[1\] for 3 queries"),
    ({"topk_length": torch.tensor([1, 2, 3, 4])}, r"topk_length \[4\] for 3 queries"),
    ({"topk_length": torch.ones(3)}, "topk_length is torch.float32, expected int32 or int64"),
    ({"attn_sink": torch.zeros(1)}, r"attn_sink \[1\] for 4 heads"),
    ({"attn_sink": torch.zeros(4, device=META)}, "attn_sink is on meta, and not on cpu"),
    ({"d_v": 0}, "d_v is 0 and a token has 40 dims"),
    ({"d_v": 41}, "d_v is 41 and a token has 40 dims"),
]  # fmt: skip


def sparse_arguments(change: dict[str, Any]) -> dict[str, Any]:
    plain = {"q": torch.zeros(3, 4, 40), "kv": torch.zeros(9, 40), "scale": 0.2, "d_v": 32}
    return plain | {"indices": torch.zeros(3, 5, dtype=torch.int32)} | change


@pytest.mark.parametrize("change, message", SPARSE)
def test_sparse(change: dict[str, Any], message: str) -> None:
    backend = resolve_backend("reference", "cpu")
    for function in (
        reference.sparse_mla, autograd.sparse_mla, backend.sparse_mla, *kernels("sparse_mla", "sparse_mla")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            function(**sparse_arguments(change))


@pytest.mark.parametrize(
    "change, message",
    [
        *SPARSE,
        ({"out_SHR": torch.zeros(3, 4, 40)}, r"out is \[3, 4, 40\], expected \[3, 4, 32\]"),
        ({"d_out_SHR": torch.zeros(3, 32)}, r"d_out is \[3, 32\], expected \[3, 4, 32\]"),
        ({"lse_SH": torch.zeros(4, 3)}, r"lse is \[4, 3\], expected \[3, 4\]"),
        ({"d_lse": torch.zeros(3, 1)}, r"d_lse is \[3, 1\], expected \[3, 4\]"),
        ({"lse_SH": torch.zeros(3, 4, device=META)}, "lse is on meta, and not on cpu"),
    ],
)
def test_sparse_backward(change: dict[str, Any], message: str) -> None:
    results = {
        "out_SHR": torch.zeros(3, 4, 32),
        "lse_SH": torch.zeros(3, 4),
        "d_out_SHR": torch.zeros(3, 4, 32),
    }
    for function in (backward.sparse_mla_backward, *kernels("sparse_mla_backward", "sparse_mla_backward")):
        with pytest.raises(ValueError, match=message):
            function(**sparse_arguments(results | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(3, 40)}, r"q \[3, 40\]"),
        ({"kv": torch.zeros(9, 41)}, "q has 40 dims a head and kv 41 a token"),
        ({"kv": torch.zeros(9, 40).half()}, "q is torch.float32 and kv torch.float16"),
        ({"ends": torch.tensor([1])}, r"ends \[1\]: it needs one entry for each of 3 queries"),
        ({"starts": torch.zeros(3)}, "starts is torch.float32, expected int32 or int64"),
        ({"rows_S": torch.zeros(3, dtype=torch.int32, device=META)}, "rows_S is on meta, and not on cpu"),
        ({"rows_S": torch.arange(3), "ends": torch.arange(3)}, "pass one of them"),
        ({"attn_sink": torch.zeros(5)}, r"attn_sink \[5\] for 4 heads"),
        ({"d_v": -1}, "d_v is -1"),
    ],
)
def test_dense(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.zeros(3, 4, 40),
        "kv": torch.zeros(9, 40),
        "scale": 0.2,
        "d_v": 32,
    } | change
    backend = resolve_backend("reference", "cpu")
    for function in (reference.dense_mla, backend.dense_mla, *kernels("dense_mla", "dense_mla")):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q_SIJ": torch.zeros(3, 16)}, r"q \[3, 16\]"),
        ({"k_TJ": torch.zeros(9, 15)}, "q has 16 dims a head and k 15 a key"),
        ({"k_TJ": torch.zeros(9, 16).half()}, "q is torch.float32 and k torch.float16"),
        ({"weights_SI": torch.zeros(3)}, r"weights \[3\] for 3 x 4"),
        ({"weights_SI": torch.zeros(3, 4, device=META)}, "weights is on meta, and not on cpu"),
        ({"ends": torch.tensor([5])}, r"ends \[1\]: it needs one entry for each of 3 queries"),
        ({"ends": torch.ones(3)}, "ends is torch.float32, expected int32 or int64"),
        ({"q_scale": torch.ones(3)}, "q_scale needs one entry for each of 3 queries and 4 heads"),
        ({"k_scale": torch.ones(3)}, "k_scale needs one entry for each of 9 keys"),
    ],
)
def test_indexer(change: dict[str, Any], message: str) -> None:
    arguments = {"q_SIJ": torch.zeros(3, 4, 16), "k_TJ": torch.zeros(9, 16), "weights_SI": torch.zeros(3, 4)}
    backend = resolve_backend("reference", "cpu")
    by_kernels = kernels("indexer_logits", "indexer_logits")
    for logits in (selection.indexer_logits, backend.indexer_logits, *by_kernels):
        with pytest.raises(ValueError, match=message):
            logits(**arguments | change)
    by_kernels = kernels("indexer_select", "indexer_select")
    for select in (selection.indexer_select, backend.indexer_select, *by_kernels):
        with pytest.raises(ValueError, match=message):
            select(**arguments | change, topk=3)
    for select in (selection.indexer_select, backend.indexer_select):
        with pytest.raises(ValueError, match="top-k of 0 keys"):
            select(**arguments, topk=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits_ST": torch.zeros(9)}, r"logits \[9\]: expected \[S, T\]"),
        ({"k": 0}, "top-k of 0 keys"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"starts \[2\]: it needs one entry for each of 3"),
        ({"ends": torch.zeros(3)}, "ends is torch.float32"),
    ],
)
def test_topk(change: dict[str, Any], message: str) -> None:
    backend = resolve_backend("reference", "cpu")
    for function in (selection.select_topk, backend.select_topk, *kernels("topk", "select_topk")):
        with pytest.raises(ValueError, match=message):
            function(**{"logits_ST": torch.zeros(3, 9), "k": 2} | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q_SIJ": torch.zeros(3, 16)}, r"the indexer's q \[3, 16\]"),
        ({"k_TJ": torch.zeros(9, 15)}, r"k is \[9, 15\], expected \[9, 16\]"),
        ({"kv_TE": torch.zeros(8, 40)}, r"the attention's kv is \[8, 40\], expected \[9, 40\]"),
        ({"q_SHE": torch.zeros(1, 2, 40)}, r"the attention's q is \[1, 2, 40\], expected \[3, 2, 40\]"),
        ({"indices": torch.zeros(3, 5)}, "indices is torch.float32"),
        ({"indices": torch.zeros(1, 5).int()}, r"indices is \[1, 5\], expected \[3, 5\]"),
        ({"lse": torch.zeros(3)}, r"lse is \[3\], expected \[3, 2\]"),
        ({"ends": torch.tensor([1])}, r"ends is \[1\], expected \[3\]"),
        ({"ends": torch.arange(3), "indices": torch.zeros(3, 5).int()}, "for a loss without indices"),
        ({"topk_length": torch.arange(3)}, "topk_length needs indices"),
        ({"reduction": "none"}, "no reduction 'none'; there are mean and sum"),
    ],
)
def test_loss(change: dict[str, Any], message: str) -> None:
    arguments = {"q_SIJ": torch.zeros(3, 4, 16), "k_TJ": torch.zeros(9, 16), "weights_SI": torch.zeros(3, 4)}
    arguments |= {"q_SHE": torch.zeros(3, 2, 40), "kv_TE": torch.zeros(9, 40), "scale": 0.2}
    for function in (indexer_loss, resolve_backend("reference", "cpu").indexer_loss):
        with pytest.raises(ValueError, match=message):
            function(**arguments | change)


def test_a_batch() -> None:
    arguments = sparse_arguments({})
    batch = {name: torch.stack([arguments[name]] * 2) for name in ("q", "kv", "indices")}
    backend = resolve_backend("reference", "cpu")
    with pytest.raises(ValueError, match=r"topk_length \[3, 2\] for 2 x 3 queries"):
        backend.sparse_mla(**arguments | batch, topk_length=torch.ones(3, 2).int())
