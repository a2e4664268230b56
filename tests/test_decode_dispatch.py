"""Decode and dense attention through a backend: which code serves a call, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime import decode, dispatch, reference
from mla_convert.runtime.dispatch import Requested, resolve_backend


def decode_arguments(dtype: torch.dtype = torch.float32) -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(2, 2, 4, 40, dtype=dtype),
        "kv_cache": torch.randn(2, 9, 40, dtype=dtype),
        "cache_seqlens": torch.tensor([9, 3]),
        "scale": 0.2,
        "causal": True,
        "d_v": 32,
    }


def dense_arguments(dtype: torch.dtype = torch.float32) -> dict[str, object]:
    torch.manual_seed(0)
    q, kv = torch.randn(3, 4, 40, dtype=dtype), torch.randn(9, 40, dtype=dtype)
    return {"q": q, "kv": kv, "scale": 0.2, "ends": torch.tensor([1, 9, 4]), "d_v": 32}


@pytest.fixture
def kernels_available(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that kernels run here: they answer with the reference, and the list shows that they were called."""
    called: list[str] = []

    def stand_in(name: str, module: object) -> object:
        def run(*args: object, **options: object) -> object:
            called.append(name)
            return getattr(module, name)(*args, **options)

        return run

    monkeypatch.setattr(dispatch, "available", lambda device: (True, "TileLang kernels on a test's GPU"))
    for name, module in (("decode_mla", decode), ("dense_mla", reference)):
        kernels = pytest.importorskip(f"mla_convert.runtime.kernels.{name}")
        monkeypatch.setattr(kernels, name, stand_in(name, module))
    return called


def test_the_reference_serves_and_is_on_record() -> None:
    backend = resolve_backend("reference", "cpu")
    for name, module, arguments in (
        ("decode_mla", decode, decode_arguments()),
        ("dense_mla", reference, dense_arguments()),
    ):
        got, want = getattr(backend, name)(**arguments), getattr(module, name)(**arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert backend.ran == {"decode_mla: reference": 1, "dense_mla: reference": 1}


@pytest.mark.parametrize("requested", ["auto", "tilelang"])
def test_kernels_serve_bfloat16(kernels_available: list[str], requested: Requested) -> None:
    backend = resolve_backend(requested, "cuda:0")
    backend.decode_mla(**decode_arguments(torch.bfloat16))
    backend.dense_mla(**dense_arguments(torch.bfloat16))
    assert kernels_available == ["decode_mla", "dense_mla"]
    assert backend.ran == {"decode_mla: tilelang": 1, "dense_mla: tilelang": 1}


def test_what_kernels_cannot_take_goes_to_the_reference(kernels_available: list[str]) -> None:
    backend = resolve_backend("auto", "cuda:0")
    backend.decode_mla(**decode_arguments())
    arguments = dense_arguments(torch.bfloat16)
    query = arguments["q"]
    assert isinstance(query, Tensor)
    query.requires_grad_()
    backend.dense_mla(**arguments)[0].float().sum().backward()
    assert kernels_available == [] and query.grad is not None
    assert backend.ran == {
        "decode_mla: reference, dtype float32 is neither bfloat16 nor float16": 1,
        "dense_mla: reference, gradients are needed and this kernel has no backward pass": 1,
    }


def test_strict_kernels_refuse(kernels_available: list[str]) -> None:
    backend = resolve_backend("tilelang", "cuda:0")
    with pytest.raises(CannotError, match="decode_mla was asked for and cannot run: dtype float32"):
        backend.decode_mla(**decode_arguments())
    with pytest.raises(CannotError, match="dense_mla was asked for and cannot run: dtype float32"):
        backend.dense_mla(**dense_arguments())
    assert not backend.ran and kernels_available == []


def test_fp8_rows_need_bfloat16_queries() -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.decode_mla")
    rows, q = torch.zeros(2, 64, 1, 656, dtype=torch.uint8), torch.zeros(1, 1, 4, 576, dtype=torch.float16)
    assert kernels.unsupported(q, rows, 512, 0.1) == "FP8 rows need bfloat16 queries, not float16"
    assert kernels.unsupported(q.bfloat16(), rows, 512, 0.1) is None


@pytest.mark.parametrize(
    ("rows", "tile", "lanes"), [(1, 8, 1), (16, 16, 1), (17, 32, 1), (33, 64, 1), (96, 64, 2), (8192, 64, 4)]
)
def test_tiles_follow_the_rows_of_a_request(rows: int, tile: int, lanes: int) -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.dense_mla")
    assert kernels.tile_rows(rows) == tile
    assert kernels.lanes_of(-(-rows // tile)) == lanes
    assert kernels.tile_rows(rows, fp8=True) == (tile if rows <= 16 else 64)
