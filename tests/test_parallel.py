"""Tensor, sequence and context parallelism: four gloo processes against one block that has everything.

Every configuration runs in one set of processes; what each rank finds comes back as plain numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import SPECS, error, gradients, make, recombined, same_bits, weights_for
from ranks import run_ranks
from test_reference import draw
from torch import Tensor

from mla_convert.errors import CannotError, UsageError
from mla_convert.runtime.module import AbsorbedMLA, LatentCache, StandardMLA
from mla_convert.runtime.parallel import (
    Parallel,
    all_gather,
    context_rows,
    copy_to_group,
    gather_rows,
    make_groups,
    sum_over_group,
    sum_scatter_rows,
    take_context,
)

WORLD = 4
GATE = 1e-10
LENGTHS = (8, 24, 16)
SIZES = [(tp, cp) for tp in (1, 2) for cp in (1, 2)]
SHAPES = ("sbhd", "packed")
CASES = [
    (name, kind, tp, cp, shape, sequence)
    for name in SPECS
    for kind in ("absorbed", "standard")
    for tp, cp in SIZES
    for shape in SHAPES
    for sequence in (False, True)
    if kind == "absorbed" or (name == "sparse" and tp * cp > 1)
]


def inputs_for(shape: str) -> tuple[Tensor, dict[str, Any]]:
    if shape == "sbhd":
        return draw(32, 3, 64, seed=7), {}
    return draw(sum(LENGTHS), 64, seed=7), {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}


# Runs on each rank


def rank_errors() -> dict[tuple[Any, ...], dict[str, float]]:
    """For each case the errors of this rank's output and gradients against the whole block's."""
    groups = {
        (tp, cp, sp): make_groups(tp, cp, sequence_parallel=sp) for tp, cp in SIZES for sp in (False, True)
    }
    return {case: _errors(case, groups[case[2], case[3], case[5]]) for case in CASES}


def _errors(case: tuple[Any, ...], parallel: Parallel) -> dict[str, float]:
    name, kind, _, _, shape, _ = case
    spec = SPECS[name]
    x, inputs = inputs_for(shape)
    lengths = LENGTHS if shape == "packed" else None
    output, want = _expected(name, shape)
    block = make(AbsorbedMLA if kind == "absorbed" else StandardMLA, spec, parallel=parallel)
    own = functools.partial(take_context, parallel=parallel, lengths=lengths)
    got_output, got = rank_gradients(block, own(x), own(draw(*output.shape, seed=99)), inputs)
    errors = {"output": error(got_output, own(output)), "x": error(got.pop("x"), own(want["x"]))}
    whole = {key: whole_gradient(key, tensor, parallel) for key, tensor in got.items()}
    whole = recombined(whole, spec) if kind == "absorbed" else whole
    assert {"x", *whole} == want.keys()
    return errors | {key: error(whole[key], want[key]) for key in whole}


@functools.cache
def _expected(name: str, shape: str) -> tuple[Tensor, dict[str, Tensor]]:
    x, inputs = inputs_for(shape)
    return gradients(make(StandardMLA, SPECS[name]), x, **inputs)


def rank_gradients(
    block: Any, x: Tensor, towards: Tensor, inputs: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.detach().requires_grad_()
    output = block(x, **inputs)[0]
    output.backward(towards)
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return output.detach(), {"x": x.grad, **found}


def whole_gradient(name: str, own: Tensor, parallel: Parallel) -> Tensor:
    """A gradient of all heads from every rank's part, by the rule of the parameter's name."""
    if name == "o_proj.weight":
        return all_gather(own.T.contiguous(), parallel.tp).T
    by_head = name.split("_proj")[0] in ("q", "q_b", "k_b", "v_b", "kv_b")
    return all_gather(own, parallel.tp) if by_head else own


def rank_partial_gradients() -> dict[str, float]:
    """``reduce_gradients=False`` leaves parts that add up to what it would have given."""
    parallel = make_groups(2, 2, sequence_parallel=True)
    x, _ = inputs_for("sbhd")
    own, towards = take_context(x, parallel), take_context(draw(*x.shape, seed=99), parallel)
    _, want = rank_gradients(make(AbsorbedMLA, SPECS["dense"], parallel=parallel), own, towards, {})
    block = make(AbsorbedMLA, SPECS["dense"], parallel=parallel, reduce_gradients=False)
    _, parts = rank_gradients(block, own, towards, {})
    differs = error(parts["kv_a_layernorm.weight"], want["kv_a_layernorm.weight"])
    worst = 0.0
    for name, part in parts.items():
        by_head = name.split("_proj")[0] in ("q", "q_b", "k_b", "v_b", "o") and name.endswith("weight")
        if name != "x":
            dist.all_reduce(part, group=parallel.cp)
            if not by_head:
                dist.all_reduce(part, group=parallel.tp)
            worst = max(worst, error(part, want[name]))
    return {"worst": worst, "differs": differs}


def rank_decodes(sequence_parallel: bool) -> float:
    """Prefill and decode on tensor-parallel ranks, which sequence parallelism cuts by tokens."""
    parallel = make_groups(2, sequence_parallel=sequence_parallel)
    spec, x = SPECS["sparse"], draw(16, 2, 64, seed=7)
    block = make(AbsorbedMLA, spec, parallel=parallel)
    parts, worst = x.split((10, 2, 4)), 0.0
    with torch.no_grad():
        whole = make(AbsorbedMLA, spec)(x)[0].split((10, 2, 4))
        cache = LatentCache(spec, 2, 16, dtype=torch.float64)
        for part, want in zip(parts, whole, strict=True):
            got = block(take_context(part, parallel), cache=cache)[0]
            worst = max(worst, error(got, take_context(want, parallel)))
    return worst


def rank_state_dicts() -> bool:
    """Whole and local state dicts load into ranks, and come back whole, bit for bit."""
    parallel = make_groups(2)
    spec = SPECS["sparse"]
    whole = make(AbsorbedMLA, spec).to(torch.bfloat16)
    right = True
    for layout in ("split", "combined"):
        for kind in (AbsorbedMLA, StandardMLA):
            weights, w_kv_b = weights_for(spec)
            blank = torch.zeros_like(w_kv_b)
            block = kind(spec, weights, blank, parallel=parallel).to(torch.bfloat16)
            block.load_state_dict(whole.export_state_dict(layout))
            right &= same_bits(block.export_state_dict(layout, whole=True), whole.export_state_dict(layout))
            other = kind(spec, weights, blank, parallel=parallel).to(torch.bfloat16)
            other.load_state_dict(block.export_state_dict(layout))
            right &= same_bits(other.export_state_dict(), block.export_state_dict())
            right &= other.o_proj.weight.shape == (64, spec.heads * spec.v // 2)
    return right


def rank_gradchecks() -> bool:
    """Each collective's backward pass, against finite differences of a function of all ranks' outputs."""
    group, rank = dist.group.WORLD, dist.get_rank()
    right = True
    for function in (copy_to_group, sum_over_group, gather_rows, sum_scatter_rows):
        # All ranks have the input of a copy, and the output of a sum: one tensor, which counts once.
        one_input, one_output = function is copy_to_group, function is sum_over_group
        x = draw(2 * WORLD, 3, seed=0 if one_input else rank).requires_grad_()
        out = function(x, group)
        towards = draw(*out.shape, seed=50 if one_output else 50 + rank)
        out.backward(towards)
        direction, step = draw(2 * WORLD, 3, seed=70 if one_input else 70 + rank), 1e-6
        with torch.no_grad():
            ahead, behind = (function(x + sign * step * direction, group) for sign in (1, -1))
        along = ((ahead - behind) * towards).sum() / (2 * step)
        total = torch.stack([along, (x.grad * direction).sum()])
        total[0] /= WORLD if one_output else 1
        total[1] /= WORLD if one_input else 1
        dist.all_reduce(total)
        right &= abs(total[0] - total[1]).item() < 1e-7 * abs(total[0]).item()
    return right


def rank_refusals() -> list[str]:
    said = []
    for function in (
        lambda: make_groups(3),
        lambda: make_groups(2, 0),
        lambda: make(AbsorbedMLA, SPECS["dense"], parallel=make_groups(1, 4))(draw(6, 1, 64)[:5]),
        lambda: take_context(draw(6, 1, 64), make_groups(4, sequence_parallel=True)),
    ):
        try:
            function()
        except (CannotError, UsageError) as refusal:
            said.append(refusal.message)
    cp = make_groups(1, 2)
    with torch.no_grad():
        try:
            cache = LatentCache(SPECS["dense"], 1, 8, dtype=torch.float64)
            make(AbsorbedMLA, SPECS["dense"], parallel=cp)(draw(4, 1, 64), cache=cache)
        except CannotError as refusal:
            said.append(refusal.message)
    return said


def rank_everything() -> dict[str, Any]:
    return {
        "errors": rank_errors(),
        "partial": rank_partial_gradients(),
        "decode": [rank_decodes(sequence) for sequence in (False, True)],
        "state": rank_state_dicts(),
        "gradchecks": rank_gradchecks(),
        "refusals": rank_refusals(),
    }


# What came back


@functools.cache
def found() -> list[dict[str, Any]]:
    return run_ranks("test_parallel", "rank_everything", WORLD)


@pytest.mark.parametrize("tp, cp", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sequence", [False, True], ids=["SP off", "SP on"])
def test_outputs_and_gradients_equal_one_standard_block(tp: int, cp: int, shape: str, sequence: bool) -> None:
    cases = [case for case in CASES if case[2:] == (tp, cp, shape, sequence)]
    assert len(cases) == (3 if tp * cp == 1 else 4)
    for case in cases:
        for rank, result in enumerate(found()):
            errors = result["errors"][case]
            assert len(errors) >= 8
            assert max(errors.values()) <= GATE, (case, rank, errors)


def test_gradients_may_stay_parts() -> None:
    for result in found():
        assert result["partial"]["worst"] <= GATE
        assert result["partial"]["differs"] > 1e-2


def test_decoding_on_ranks() -> None:
    assert all(worst <= 1e-13 for result in found() for worst in result["decode"])


def test_state_dicts_of_ranks() -> None:
    assert all(result["state"] for result in found())


def test_collectives_have_the_right_gradients() -> None:
    assert all(result["gradchecks"] for result in found())


def test_what_ranks_cannot_do_is_said_with_numbers() -> None:
    for result in found():
        groups, none, pieces, cut, cache = result["refusals"]
        assert groups == "4 ranks cannot be cut into tp 3 x cp 1 = 3."
        assert none == "There are no groups of tp 2 x cp 0 ranks."
        assert pieces.startswith("A sequence of 20 tokens cannot be cut into 2 x 4 equal pieces")
        assert cut.startswith("6 tokens cannot be cut over 4 tensor-parallel ranks")
        assert cache.startswith("A cache cannot be used with context parallelism")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_context_rows_cover_every_token_once_and_share_the_work(world: int) -> None:
    lengths = (12, 0, 36)
    rows = [context_rows(lengths, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(sum(lengths)))
    starts = torch.tensor([0] * 12 + [12] * 36)
    work = [(own - starts[own] + 1).sum().item() for own in rows]
    assert len(set(work)) == 1
    if world == 2:
        assert rows[0][:6].tolist() == [0, 1, 2, 9, 10, 11]


def test_one_rank_needs_no_group() -> None:
    x = draw(4, 2, 64)
    assert take_context(x, Parallel()) is x
    assert gather_rows(x, None) is x
    assert not Parallel(sequence_parallel=True).cuts_tokens
