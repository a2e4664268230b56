"""``AbsorbedMLA`` with the kernels on two and on four ranks, against one ``StandardMLA`` in float64.

Each rank has a GPU of its own, and NCCL connects them; on a machine with fewer they share GPUs, over gloo.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import gradients, recombined
from ranks import run_ranks
from test_module_gpu import SPECS, block, cosine
from test_parallel import rank_gradients, whole_gradient
from test_reference import draw

from mla_convert.runtime.dispatch import available
from mla_convert.runtime.module import AbsorbedMLA, StandardMLA
from mla_convert.runtime.parallel import Parallel, make_groups, take_context

_can_run, _reason = available("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _can_run, reason=f"no kernels here: {_reason}")]

LENGTHS = (704, 4, 896, 444)
CASES = [
    (name, tp, cp, shape, sequence)
    for name in SPECS
    for tp, cp, sequence in ((2, 1, False), (2, 1, True), (1, 2, False))
    for shape in ("sbhd", "packed")
]


FOUR = [
    (name, 2, 2, shape, sequence)
    for name in SPECS
    for shape in ("sbhd", "packed")
    for sequence in (False, True)
]

# Runs on each rank


def rank_cosines(cases: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """For each case the cosine of this rank's output, and of every parameter's gradient, with the whole block's."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    groups = {
        key: make_groups(*key[:2], sequence_parallel=key[2])
        for key in sorted({case[1:3] + case[4:] for case in cases})
    }
    return {case: _cosines(case[0], case[3], groups[case[1:3] + case[4:]]) for case in cases}


def _cosines(name: str, shape: str, parallel: Parallel) -> dict[str, float]:
    lengths = LENGTHS if shape == "packed" else None
    given: dict[str, Any] = {}
    x = draw(1024, 2, 1024, seed=7).bfloat16().cuda()
    if lengths:
        given["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        x = x.flatten(0, 1)
    spec = SPECS[name]
    with torch.no_grad():
        indices = block(AbsorbedMLA, spec, torch.bfloat16, backend="tilelang")(x, **given)[1]
    exact = block(StandardMLA, spec, torch.float64)
    want_output, want = gradients(exact, x.double(), indices=indices, **given)
    own = functools.partial(take_context, parallel=parallel, lengths=lengths)
    absorbed = block(AbsorbedMLA, spec, torch.bfloat16, backend="tilelang", parallel=parallel)
    if indices is not None:
        whole_rows = Parallel(
            parallel.tp, parallel.cp
        )  # a rank that holds some tokens attends from all of its group's
        indices = take_context(indices, whole_rows, lengths=lengths)
    towards = draw(*want_output.shape, seed=99).to(x)
    output, got = rank_gradients(absorbed, own(x), own(towards), {"indices": indices, **given})
    assert absorbed.backend(x.device).ran
    cosines = {"output": cosine(output, own(want_output)), "x": cosine(got.pop("x"), own(want["x"]))}
    whole = recombined({key: whole_gradient(key, tensor, parallel) for key, tensor in got.items()}, spec)
    assert {"x", *whole} == want.keys()
    return cosines | {key: cosine(whole[key], want[key]) for key in whole}


# What came back


@functools.cache
def found(ranks: int) -> list[dict[tuple[Any, ...], dict[str, float]]]:
    backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    cases = CASES if ranks == 2 else FOUR
    return run_ranks("test_parallel_gpu", "rank_cosines", ranks, cases, timeout=500, backend=backend)


@pytest.mark.parametrize("case", CASES + FOUR, ids=str)
def test_outputs_and_gradients_equal_one_standard_block(case: tuple[Any, ...]) -> None:
    for rank, cosines in enumerate(found(case[1] * case[2])):
        assert len(cosines[case]) >= 8
        assert min(cosines[case].values()) > 0.9999, (rank, cosines[case])
