"""Scores of the lightning indexer: for every query and key, the weighted sum over heads of relu(q . k).

The program is in ``_indexer_logits``.

Shapes: S queries, T keys, I indexer heads, J indexer dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.checks import check_indexer
from mla_convert.runtime.kernels._common import (
    DTYPES,
    Argument,
    Signature,
    arguments,
    as_int32,
    compiled,
    launchable,
    launcher,
    pad_features,
    planned,
    run_on,
    signature,
    unread,
)
from mla_convert.runtime.kernels._indexer_logits import BLOCK, COLUMNS, logits

MAX_HEADS = 128
MAX_DIM = 128
TAKES = DTYPES | {torch.float8_e4m3fn: "float8_e4m3fn"}


def indexer_logits(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """sum over heads of weight * relu(q . k), on a Hopper GPU; products and sums in float32.

    Args:
        q_SIJ: [S, I, J] bfloat16, float16 or float8_e4m3fn; 1 to 128 heads, up to 128 dims (dims that do not fill
            16 bytes are zero-padded in copies of q and k).
        k_TJ: [T, J] in the dtype of q.
        weights_SI: [S, I] float32; other dtypes are converted.
        starts, ends: First key of each query and the one after its last, int [S]; outside them the logit is
            -inf. Causal attention of a whole sequence has ends = 1…S. None: from 0, or to T.
        q_scale: What q was divided by, [S, I], positive. None: 1.
        k_scale: What k was divided by, [T], positive. None: 1.

    Returns:
        logits [S, T] float32, without gradient. Two runs give equal bits. Hopper adds products of float8 numbers
        with 13 bits behind the leading one, so that such logits are exact to about 1e-4 of the largest product.

    Raises:
        CannotError: A size or dtype that the kernel does not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    plan = plan_for(signature(q_SIJ, k_TJ, weights_SI, starts, ends, q_scale, k_scale))
    logits_ST = torch.empty(plan.queries, plan.keys, dtype=torch.float32, device=plan.device)
    launch(plan, q_SIJ, k_TJ, weights_SI, starts, ends, q_scale, k_scale, logits_ST, fill=True)
    return logits_ST


class Plan(NamedTuple):
    """What the sizes of a call decide."""

    device: torch.device
    queries: int
    keys: int
    dim: int
    native: int  # dims that the kernel runs
    span: int
    spans: int
    run: Callable[..., None] | None  # None: there is nothing to score


@planned
def plan_for(known: Signature) -> Plan:
    """For the tensors of ``indexer_logits``, in its order; raises its errors."""
    q, k, *_, k_scale = given = arguments(known)
    check_indexer(*given)
    if reason := unsupported(q):
        raise CannotError(f"The indexer kernel cannot run: {reason}.")
    (queries, heads, dim), keys = q.shape, k.shape[0]
    unit = 16 // q.dtype.itemsize
    padded = -(-dim // unit) * unit
    if not (queries and keys):
        return Plan(q.device, queries, keys, dim, padded, 0, 0, None)
    share = queries > COLUMNS // _slots(heads)
    run = _entry(heads, padded, q.dtype, share, k_scale is not None)
    return Plan(q.device, queries, keys, dim, padded, *_spans(queries, heads, keys), run)


def launch(
    plan: Plan,
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    logits_ST: Tensor,
    *,
    fill: bool,
) -> None:
    """``indexer_logits`` into ``logits_ST``, by the plan for these arguments.

    ``fill`` False leaves most of what lies outside the queries' ranges unwritten: whoever reads only what is inside
    saves the time.
    """
    if plan.run is None:
        return
    if plan.dim != plan.native:
        q_SIJ, k_TJ = (pad_features(x, plan.dim, plan.native, 0) for x in (q_SIJ, k_TJ))
    weights_SI = weights_SI.to(torch.float32)
    if q_scale is not None:
        weights_SI = weights_SI * q_scale
    nowhere = unread(torch.int32, plan.device, 1)
    run_on(
        plan.device,
        plan.run,
        launchable(q_SIJ),
        launchable(k_TJ),
        launchable(weights_SI),
        unread(torch.float32, plan.device, 1) if k_scale is None else launchable(k_scale.to(torch.float32)),
        nowhere if starts is None else launchable(as_int32(starts)),
        nowhere if ends is None else launchable(as_int32(ends)),
        int(starts is not None),
        int(ends is not None),
        plan.span,
        plan.spans,
        int(fill),
        logits_ST,
    )


@functools.cache
def _entry(heads: int, dim: int, dtype: torch.dtype, share: bool, scaled: bool) -> Callable[..., None]:
    return launcher(compile_for(heads, dim, dtype, share=share, scaled=scaled))


def unsupported(q_SIJ: Tensor | Argument) -> str | None:
    """Why the kernel does not take these queries, or None if it does."""
    heads, dim = q_SIJ.shape[1:]
    if q_SIJ.dtype not in TAKES:
        return f"dtype {str(q_SIJ.dtype).removeprefix('torch.')} is neither bfloat16 nor float16 nor float8_e4m3fn"
    if not 0 < heads <= MAX_HEADS or not 0 < dim <= MAX_DIM:
        return f"{heads} heads of {dim} dims; it takes 1 to {MAX_HEADS} heads of 1 to {MAX_DIM} dims"
    return None


def compile_for(heads: int, dim: int, dtype: torch.dtype, *, share: bool = True, scaled: bool = False) -> Any:
    """The kernel for a head count and dims (a multiple of 16 bytes); compiles without a GPU, once per variant.

    Args:
        share: Both consumers take every block of keys, each with its own queries.
        scaled: Keys have scales.
    """
    slots = _slots(heads)
    name = TAKES[dtype]
    key = ("indexer_logits", slots, dim, name, share, scaled)
    return compiled(key, lambda: logits(slots, dim, name, share, scaled))


def _slots(heads: int) -> int:
    """Columns for the heads of one query: a power of two that divides ``COLUMNS``."""
    return max(8, 1 << (heads - 1).bit_length())


def _spans(queries: int, heads: int, keys: int) -> tuple[int, int]:
    """Steps of one thread block and the number of such spans: enough blocks for 132 multiprocessors."""
    group = COLUMNS // _slots(heads)
    groups, steps = -(-queries // (2 * group if queries > group else group)), -(-keys // BLOCK)
    spans = min(-(-4 * 132 // groups), -(-steps // 8))
    span = -(-steps // spans)
    return span, -(-steps // span)
