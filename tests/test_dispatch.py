"""Choosing a backend: what is chosen, what is refused, and that every call is on record."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mla_convert.errors import CannotError, ExitCode
from mla_convert.runtime import backward, dispatch, reference
from mla_convert.runtime.dispatch import Backend, available, resolve_backend


def sparse_arguments(dtype: torch.dtype = torch.float32) -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(3, 4, 40, dtype=dtype),
        "kv": torch.randn(9, 40, dtype=dtype),
        "indices": torch.randint(-1, 9, (3, 5)),
        "scale": 0.2,
        "d_v": 32,
    }


def indexer_arguments(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 16, dtype=dtype), torch.randn(9, 16, dtype=dtype)
    return {"q_SIJ": q, "k_TJ": k, "weights_SI": torch.randn(3, 4)}


@pytest.fixture
def kernels_available(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that kernels run here: they answer with the reference, and the list shows that they were called."""
    called: list[str] = []
    sparse = pytest.importorskip("mla_convert.runtime.kernels.sparse_mla")
    indexer = pytest.importorskip("mla_convert.runtime.kernels.indexer_logits")

    def stand_in(name: str) -> object:
        def run(*args: object, **options: object) -> object:
            called.append(name)
            return getattr(reference, name)(*args, **options)

        return run

    monkeypatch.setattr(dispatch, "available", lambda device: (True, "TileLang kernels on a test's GPU"))
    monkeypatch.setattr(sparse, "sparse_mla", stand_in("sparse_mla"))
    monkeypatch.setattr(indexer, "indexer_logits", stand_in("indexer_logits"))
    return called


def test_import_is_cheap() -> None:
    code = (
        "import sys, mla_convert.runtime.dispatch; print('torch' in sys.modules, 'tilelang' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_cpu_is_no_cuda_device() -> None:
    assert available("cpu") == (False, "cpu is not a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device() -> None:
    assert available("cuda") == (False, "no CUDA device")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_architectures_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Other")
    runs, reason = available("cuda")
    major, minor = capability
    assert not runs
    assert reason == (
        f"NVIDIA Other has compute capability {major}.{minor}; the kernels are written for 9.0 (Hopper)"
    )


def test_hopper_needs_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "tilelang", None)
    runs, reason = available("cuda")
    assert not runs and reason.startswith("TileLang cannot be imported (")


def test_auto_says_why_it_is_the_reference() -> None:
    backend = resolve_backend("auto", "cpu")
    assert backend == Backend("reference", "cpu is not a CUDA device", "cpu")
    assert backend.explain() == "cpu uses reference: cpu is not a CUDA device."


def test_tilelang_by_name_cannot_run_on_a_cpu() -> None:
    with pytest.raises(CannotError, match="asked for and cannot run: cpu is not a CUDA device") as caught:
        resolve_backend("tilelang", "cpu")
    assert caught.value.exit_code == ExitCode.CANNOT
    assert caught.value.hint and "'auto' or 'reference'" in caught.value.hint


def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no backend 'cuda'; there are auto, reference, tilelang"):
        resolve_backend("cuda", "cpu")  # type: ignore[arg-type]


def test_reference_results_and_record() -> None:
    backend = resolve_backend("reference", "cpu")
    out, lse = backend.sparse_mla(**sparse_arguments())
    want_out, want_lse = reference.sparse_mla(**sparse_arguments())
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    logits = backend.indexer_logits(**indexer_arguments(), ends=torch.tensor([1, 2, 9]))
    assert torch.equal(logits, reference.indexer_logits(**indexer_arguments(), ends=torch.tensor([1, 2, 9])))
    backend.sparse_mla(**sparse_arguments())
    assert backend.ran == {"sparse_mla: reference": 2, "indexer_logits: reference": 1}
    assert backend.explain() == (
        "cpu uses reference: the reference was asked for."
        " indexer_logits: reference (1 call). sparse_mla: reference (2 calls)."
    )


def test_auto_uses_kernels_for_bfloat16(kernels_available: list[str]) -> None:
    backend = resolve_backend("auto", "cuda:0")
    backend.sparse_mla(**sparse_arguments(torch.bfloat16))
    backend.indexer_logits(**indexer_arguments(torch.bfloat16))
    assert kernels_available == ["sparse_mla", "indexer_logits"]
    assert backend.ran == {"sparse_mla: tilelang": 1, "indexer_logits: tilelang": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_records_why_a_call_went_to_the_reference(
    kernels_available: list[str], dtype: torch.dtype
) -> None:
    backend = resolve_backend("auto", "cuda:0")
    backend.sparse_mla(**sparse_arguments(dtype))
    backend.indexer_logits(**indexer_arguments(dtype))
    assert kernels_available == []
    why = f"dtype {str(dtype)[6:]} is neither bfloat16 nor float16"
    assert backend.ran == {
        f"sparse_mla: reference, {why}": 1,
        f"indexer_logits: reference, {why} nor float8_e4m3fn": 1,
    }
    assert why in backend.explain()


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_gradients_run_the_kernels_forward_and_backward(
    kernels_available: list[str], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.sparse_mla_backward")

    def stand_in(*args: object, **options: object) -> object:
        kernels_available.append("sparse_mla_backward")
        return backward.sparse_mla_backward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "sparse_mla_backward", stand_in)
    backend = resolve_backend("auto", "cuda:0")
    arguments = sparse_arguments(torch.bfloat16)
    differentiated = arguments[wanted]
    assert isinstance(differentiated, Tensor)
    differentiated.requires_grad_()
    out, _ = backend.sparse_mla(**arguments)
    assert kernels_available == ["sparse_mla"]
    out.float().sum().backward()
    assert differentiated.grad is not None and kernels_available == ["sparse_mla", "sparse_mla_backward"]
    with torch.no_grad():
        backend.sparse_mla(**arguments)
    assert backend.ran == {"sparse_mla: tilelang": 2}


def test_gradients_that_the_kernels_cannot_give_come_from_the_reference(
    kernels_available: list[str],
) -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.sparse_mla_backward")
    backend = resolve_backend("auto", "cuda:0")
    query = torch.randn(3, 4, 448 + 128, dtype=torch.bfloat16, requires_grad=True)
    arguments = {**sparse_arguments(torch.bfloat16), "q": query, "d_v": 448}
    arguments["kv"] = torch.randn(9, 448 + 128, dtype=torch.bfloat16)
    backend.sparse_mla(**arguments)[0].float().sum().backward()
    why = kernels.unsupported(query, 448, 0.5)
    assert why == "128 dims behind the values, more than 64 for gradients"
    assert query.grad is not None and kernels_available == []
    assert backend.ran == {f"sparse_mla: reference, {why}": 1}
    indexer = indexer_arguments(torch.bfloat16)
    indexer["q_SIJ"].requires_grad_()
    backend.indexer_logits(**indexer).sum().backward()
    assert indexer["q_SIJ"].grad is not None and kernels_available == []


def test_strict_kernels_refuse_what_they_cannot_take(kernels_available: list[str]) -> None:
    backend = resolve_backend("tilelang", "cuda:0")
    with pytest.raises(CannotError, match="sparse_mla was asked for and cannot run: dtype float32"):
        backend.sparse_mla(**sparse_arguments())
    with pytest.raises(CannotError, match="indexer_logits was asked for and cannot run: dtype float64"):
        backend.indexer_logits(**indexer_arguments(torch.float64))
    assert not backend.ran and kernels_available == []


@pytest.mark.parametrize(
    ("heads", "d_v", "rope", "scale", "reason"),
    [
        (4, 512, 64, 0.1, None),
        (128, 512, 0, 0.1, None),
        (1, 32, 8, 0.1, None),
        (300, 512, 64, 0.1, None),
        (4, 513, 0, 0.1, "513 + 0 dims a token, more than 512 for values or 576 in all"),
        (4, 512, 65, 0.1, "512 + 65 dims a token, more than 512 for values or 576 in all"),
        (4, 512, 64, 0.0, "scale 0.0 is not a positive number"),
        (4, 512, 64, float("nan"), "scale nan is not a positive number"),
    ],
)
def test_what_the_sparse_kernel_takes(
    heads: int, d_v: int, rope: int, scale: float, reason: str | None
) -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.sparse_mla")
    query = torch.empty(1, heads, d_v + rope, dtype=torch.bfloat16)
    assert kernels.unsupported(query, d_v, scale) == reason


def test_kernel_arguments_that_contradict_each_other() -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.sparse_mla")
    arguments = sparse_arguments(torch.bfloat16)
    with pytest.raises(ValueError, match="q has 40 dims a head and kv 39 a token"):
        kernels.sparse_mla(**{**arguments, "kv": torch.zeros(9, 39, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="3 queries and 2 lists"):
        kernels.sparse_mla(**{**arguments, "indices": torch.zeros(2, 5, dtype=torch.int32)})
    indexer = pytest.importorskip("mla_convert.runtime.kernels.indexer_logits")
    with pytest.raises(ValueError, match=r"ends \[4\]: it needs one entry for each of 3 queries"):
        indexer.indexer_logits(**indexer_arguments(torch.bfloat16), ends=torch.zeros(4, dtype=torch.int32))


def test_empty_lists_need_no_launch() -> None:
    kernels = pytest.importorskip("mla_convert.runtime.kernels.sparse_mla")
    arguments = sparse_arguments(torch.bfloat16)
    out, lse = kernels.sparse_mla(**{**arguments, "kv": torch.zeros(0, 40, dtype=torch.bfloat16)})
    assert out.shape == (3, 4, 32) and not out.any() and lse.isneginf().all()


def test_integers_that_int32_cannot_hold_stay_out_of_range() -> None:
    common = pytest.importorskip("mla_convert.runtime.kernels._common")
    wide = torch.tensor([5, -1, 2**32 + 5, -(2**40), 2**31 - 1])
    assert common.as_int32(wide).tolist() == [5, -1, 2**31 - 1, -1, 2**31 - 1]


def test_a_batch_is_its_sequences() -> None:
    """Entries beyond a sequence's own cache stay invalid: they must not reach the next sequence's."""
    torch.manual_seed(0)
    q, kv = torch.randn(3, 5, 4, 40), torch.randn(3, 9, 40)
    indices = torch.randint(-2, 12, (3, 5, 6), dtype=torch.int32)
    lengths, sink = torch.randint(0, 7, (3, 5)), torch.randn(4)
    backend = resolve_backend("reference", "cpu")
    options = {"attn_sink": sink, "d_v": 32}
    out, lse = backend.sparse_mla(q, kv, indices, 0.2, topk_length=lengths, **options)
    assert out.shape == (3, 5, 4, 32) and lse.shape == (3, 5, 4)
    for b in range(3):
        want = reference.sparse_mla(q[b], kv[b], indices[b], 0.2, topk_length=lengths[b], **options)
        torch.testing.assert_close(out[b], want[0])
        torch.testing.assert_close(lse[b], want[1])
    with_heads = backend.sparse_mla(
        q, kv[:, :, None], indices[:, :, None], 0.2, topk_length=lengths, **options
    )
    assert torch.equal(with_heads[0], out)
    assert backend.ran["sparse_mla: reference"] == 2


@pytest.mark.parametrize(("sequences", "lists"), [(2, (3, 5)), (3, (3, 4)), (3, (2, 5))])
def test_a_batch_that_does_not_fit(sequences: int, lists: tuple[int, int]) -> None:
    backend = resolve_backend("reference", "cpu")
    indices = torch.zeros(*lists, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="indices"):
        backend.sparse_mla(torch.randn(3, 5, 4, 40), torch.randn(sequences, 9, 40), indices, 0.2, d_v=32)
