"""Level 5 of ``verify``: gradients of every weight, on folded tensor- and context-parallel ranks."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from blocks import error
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert import api
from mla_convert.attention import load_attention
from mla_convert.errors import CannotError
from mla_convert.formats.huggingface import MANIFEST_NAME, open_checkpoint
from mla_convert.geometry import find_blocks
from mla_convert.runtime.module import StandardMLA
from mla_convert.runtime.weights import split_kv_rows
from mla_convert.verification import numbers
from mla_convert.verification.absorbed import Grid, RankPart
from mla_convert.verification.backward import measure_gradient, run_standard
from mla_convert.verification.cases import Draw, make_case
from mla_convert.verification.weights import LoadedBlock, TensorReader, block_spec, load_block
from mla_convert.verify import ControlFailedError, VerifyOptions, verify

Q_LORA = {"q_a", "q_a_norm", "q_b"}
ALWAYS = {"kv_a", "kv_a_norm", "k_b", "v_b", "o", "x"}
OPTIONS = VerifyOptions(dtype="float64", tokens=48, backward=True, record=False, carried=False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Original and split of a tiny model, made once."""

    @functools.cache
    def make(family: str) -> tuple[Path, Path]:
        original = tiny_models.save(family, tmp_path_factory.mktemp("backward") / family)
        return original, api.split(original).output

    return make


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("deepseek_v2_lite", {"q"}),
        ("deepseek_v3_bias", Q_LORA | {"q_a_bias", "kv_a_bias", "o_bias"}),
        ("glm_moe_dsa_shared", Q_LORA),
        ("deepseek_v3_yarn", Q_LORA),
    ],
)
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (1, 3), (2, 2)])
def test_gradients_of_every_weight(family: str, weights: set[str], tp: int, cp: int, folders: Any) -> None:
    original, converted = folders(family)
    report = verify(converted, original, dataclasses.replace(OPTIONS, tp=tp, cp=cp))
    assert report.passed, report.failures
    for layer in report.layers:
        assert {gradient.name for gradient in layer.gradients} == ALWAYS | weights
        for gradient in layer.gradients:
            assert gradient.absorbed.cosine > 0.9999
            assert max(gradient.absorbed.relative, gradient.absorbed.worst) < 1e-12
            assert gradient.document()["limit"]["cosine"] == 0.9999
    assert {layer.kind for layer in report.layers} <= {"dense", "sparse", "sparse, shared selection"}
    assert (report.settings["tp"], report.settings["cp"], report.settings["processes"]) == (tp, cp, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounding_is_held_against_neither_path(dtype: Any, folders: Any) -> None:
    original, converted = folders("glm_moe_dsa")
    report = verify(converted, original, dataclasses.replace(OPTIONS, tp=2, cp=2, dtype=dtype))
    assert report.passed, report.failures
    gradients = [gradient for layer in report.layers for gradient in layer.gradients]
    assert all(0 < gradient.strain < 1 for gradient in gradients)
    assert all(gradient.limit.relative > 4 * gradient.standard.relative for gradient in gradients)


def loaded(folder: Path, layer: int) -> LoadedBlock:
    catalogue = open_checkpoint(folder)
    block = next(block for block in find_blocks(catalogue) if block.layer == layer)
    return load_block(TensorReader(catalogue), block, block_spec(catalogue, block), torch.device("cpu"))


def test_the_truth_is_what_the_module_gives(folders: Any) -> None:
    original, _ = folders("deepseek_v3_bias")
    block = loaded(original, 1)
    case = make_case(block, Draw(32, 9, torch.float64, backward=True), torch.device("cpu"))
    outcome = run_standard(block, case, torch.float64)
    module = load_attention(original, 1, kind=StandardMLA, dtype=torch.float64)
    x = case.x_SD[:, None].clone().requires_grad_()
    output = module(x)[0][case.rows_S, 0]
    output.backward(case.towards_SD)
    assert error(outcome.output_SD, output.detach()) < 1e-13
    assert outcome.gradients is not None
    found = dict(module.named_parameters())
    halves = split_kv_rows(found["kv_b_proj.weight"].grad, block.spec)
    want = {
        "x": x.grad[:, 0],
        "k_b": halves[0],
        "v_b": halves[1],
        "q_b": found["q_b_proj.weight"].grad,
        "o_bias": found["o_proj.bias"].grad,
        "kv_a": found["kv_a_proj_with_mqa.weight"].grad,
        "kv_a_norm": found["kv_a_layernorm.weight"].grad,
    }
    assert all(error(outcome.gradients[name], grad) < 1e-12 for name, grad in want.items())
    assert 0 < (outcome.gradients["x"] != 0).any(1).sum() == case.rows_S.max() + 1


def swap_v_heads(folder: Path) -> None:
    shard = folder / "model.safetensors"
    tensors = load_file(shard)
    weight = tensors["model.layers.0.self_attn.v_b_proj.weight"].view(4, 16, 32)
    weight[[1, 3]] = weight[[3, 1]]
    save_file(tensors, shard)


def test_a_corrupted_weight_has_other_gradients(folders: Any, tmp_path: Path) -> None:
    original, converted = folders("deepseek_v3")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in converted.iterdir():
        if file.name != MANIFEST_NAME:
            (copy / file.name).write_bytes(file.read_bytes())
    swap_v_heads(copy)
    report = verify(copy, original, OPTIONS)
    wrong = {gradient.name for gradient in report.layers[0].gradients if not gradient.passed}
    # V's own gradient does not depend on V.
    assert {"o", "q_b", "k_b", "kv_a"} <= wrong and "v_b" not in wrong
    worst = next(g for g in report.layers[0].gradients if g.name == "o").absorbed
    assert worst.at in (1, 3)
    assert all(gradient.passed for gradient in report.layers[1].gradients)


def test_a_wrong_gradient_of_a_right_output_fails(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, converted = folders("deepseek_v3")
    finish = RankPart.finish
    monkeypatch.setattr(RankPart, "finish", lambda part, grad: finish(part, grad * (1 + 1e-6)))
    report = verify(converted, original, dataclasses.replace(OPTIONS, control=False))
    assert not report.passed
    assert all(layer.absorbed.within(layer.limit) for layer in report.layers)
    wrong = {gradient.name for gradient in report.layers[0].gradients if not gradient.passed}
    assert wrong == {"kv_a", "kv_a_norm", "x"}
    assert "3 of 9 gradients are off, the most that of x: " in report.failures[0]


def test_a_backward_check_that_notices_nothing_is_broken(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, converted = folders("deepseek_v3")
    compare = numbers.compare_gradients

    def pass_everything(*arguments: Any, **limits: Any) -> Any:
        return tuple(dataclasses.replace(g, passed=True) for g in compare(*arguments, **limits))

    monkeypatch.setattr(numbers, "compare_gradients", pass_everything)
    with pytest.raises(ControlFailedError, match="the check itself is broken"):
        verify(converted, original, OPTIONS)


def test_how_gradients_are_measured(folders: Any) -> None:
    spec = loaded(folders("deepseek_v3")[0], 0).spec
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(spec.heads * spec.nope, spec.rank, generator=generator, dtype=torch.float64)

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.view(spec.heads, -1)

    by_head(truth)[2] *= 1e-4
    off = truth.clone()
    by_head(off)[2] *= 1.5
    errors = measure_gradient(off, truth, "k_b", spec)
    assert errors.relative < 1e-3 and errors.cosine > 0.9999
    assert (errors.at, errors.worst) == (2, pytest.approx(0.5))  # one small head shows all the same
    as_rows = measure_gradient(off, truth, "kv_a", spec)
    assert as_rows.worst < 1e-3
    off[0, 0] = torch.nan
    assert measure_gradient(off, truth, "k_b", spec).worst == float("inf")
    nothing = torch.zeros_like(truth)
    assert measure_gradient(nothing, nothing, "k_b", spec).cosine == 1.0
    assert measure_gradient(truth, nothing, "k_b", spec).relative == float("inf")


def test_requests_that_cannot_be(folders: Any) -> None:
    original, converted = folders("deepseek_v3")
    with pytest.raises(CannotError, match="--cp 3: 40 tokens cannot be cut into 6 equal pieces") as caught:
        verify(converted, original, VerifyOptions(cp=3, tokens=40))
    assert caught.value.hint == "--seq 36 can"
    with pytest.raises(CannotError, match="--backward: with one token"):
        verify(converted, original, VerifyOptions(backward=True, tokens=1))
    report = verify(converted, original, VerifyOptions(cp=3, layers=(0,), record=False, carried=False))
    assert report.settings["tokens"] == 132  # the default, rounded up to a multiple of 6


def test_ranks_hold_every_token_and_head_once() -> None:
    grid = Grid(tp=2, cp=2)
    assert grid.size == 4
    assert grid.gathered(16).sort().values.tolist() == list(range(16))
    assert grid.held(16, 1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
