"""Top-k of each row of logits, exactly, by radix selection.

A logit becomes an integer that sorts like it. A thread block counts the highest digit of a row's entries, finds the
digit in which the k-th entry lies, and either goes on with the next digit of the entries that share it or, once
those fit a list in shared memory, collects them and finishes there. The list cannot overflow, since the count is
known before anything is collected. While they are collected, the entries above the digit are marked in a bit mask,
from which the keys are written in order. Places in the row are digits too, so ties are decided in the same way.

A row is read twice, or once if it has no more than k keys; a third time, or more, only if more than 2560 entries
share 12 (22, 32) leading bits with the k-th; and once more if it is longer than 131072. A few long rows are cut into
parts, each part's top-k is selected by a thread block of its own, and then the top-k of those.

Shapes: S queries, T keys, K keys selected.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.checks import check_topk
from mla_convert.runtime.kernels._common import (
    Argument,
    Signature,
    arguments,
    as_int32,
    compiled,
    launchable,
    launcher,
    planned,
    run_on,
    signature,
    unread,
)
from mla_convert.runtime.kernels._topk import select

FEW_QUERIES = 132  # up to this many, a thread block has a multiprocessor to itself
SPREAD_BLOCKS = 132  # rows are cut into parts if that makes no more thread blocks, and the rows are so long
SPREAD_KEYS = 65536
MAX_PARTS = 16


def select_topk(
    logits_ST: Tensor, k: int, *, starts: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Keys of the ``k`` highest logits of each query, on a Hopper GPU: exact, and the same in every run.

    Of equal logits the lower key is selected; 0.0 and -0.0 are equal. NaN counts as the highest logit. Keys at -inf
    are never selected.

    Args:
        logits_ST: [S, T] float32; rows may be any number of elements apart.
        k: How many, at least 1.
        starts, ends: First key of each query that may be selected and the one after its last, int [S]; logits
            outside are not read. None: from 0, or to T.

    Returns:
        int32 [S, min(k, T)]: the keys of each query in ascending order, then -1 where fewer than k were selected.

    Raises:
        CannotError: A dtype that the kernel does not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other, or a ``k`` below 1.
    """
    plan = _plan(signature(logits_ST, starts, ends), k)
    if plan is None:
        queries, keys = logits_ST.shape
        return torch.empty(queries, min(k, keys), dtype=torch.int32, device=logits_ST.device)
    queries, keys = plan.queries, plan.keys
    if logits_ST.stride(1) != 1 or (queries > 1 and logits_ST.stride(0) < keys):
        logits_ST = logits_ST.contiguous()
    stride = logits_ST.stride(0) if queries > 1 else keys
    if logits_ST.requires_grad:
        logits_ST = logits_ST.detach()
    flat = logits_ST.as_strided(((queries - 1) * stride + keys,), (1,)).view(torch.int32)
    starts_S = None if starts is None else launchable(as_int32(starts))
    ends_S = None if ends is None else launchable(as_int32(ends))
    return run_on(plan.device, _launch, plan, flat, stride, starts_S, ends_S)


class _Plan(NamedTuple):
    """What the sizes of a call decide."""

    device: torch.device
    queries: int
    keys: int
    width: int  # of the result
    parts: int  # of a row
    span: int  # keys of a part
    candidates: int  # keys selected of a part
    select: Callable[..., None]
    merge: Callable[..., None] | None


@planned
def _plan(known: Signature, k: int) -> _Plan | None:
    """For logits, starts and ends; None if there is nothing to select from."""
    logits, *bounds = arguments(known)
    check_topk(logits, k, *bounds)
    queries, keys = logits.shape
    if reason := unsupported(logits):
        raise CannotError(f"The top-k kernel cannot run: {reason}.")
    if not (queries and keys):
        return None
    width = min(k, keys)
    parts = parts_of(queries, keys, width)
    span = -(-keys // parts)
    if parts == 1:
        select, merge = _entry("whole" if queries > FEW_QUERIES else "few"), None
    else:
        select, merge = _entry("part"), _entry("merge")
    return _Plan(logits.device, queries, keys, width, parts, span, min(width, span), select, merge)


def _launch(plan: _Plan, flat: Tensor, stride: int, starts: Tensor | None, ends: Tensor | None) -> Tensor:
    """Select from packed bounds and the flat bits of the logits, rows ``stride`` apart, on the current device."""
    device, queries, parts, candidates = plan.device, plan.queries, plan.parts, plan.candidates
    nowhere = unread(torch.int32, device, 1)
    chosen = torch.empty(queries * parts, candidates, dtype=torch.int32, device=device)
    values = chosen if plan.merge is None else torch.empty_like(chosen)
    plan.select(
        flat,
        nowhere if starts is None else starts,
        nowhere if ends is None else ends,
        int(starts is not None),
        int(ends is not None),
        unread(torch.int32, device, 1, 1),
        stride,
        plan.keys,
        plan.span,
        parts,
        chosen,
        values,
    )
    if plan.merge is None:
        return chosen
    keys = parts * candidates
    merged = torch.empty(queries, plan.width, dtype=torch.int32, device=device)
    plan.merge(
        values.view(-1),
        nowhere,
        nowhere,
        0,
        0,
        chosen.view(queries, keys),
        keys,
        keys,
        keys,
        1,
        merged,
        merged,
    )
    return merged


def unsupported(logits_ST: Tensor | Argument) -> str | None:
    """Why the kernel does not take these logits, or None if it does."""
    if logits_ST.dtype != torch.float32:
        return f"dtype {str(logits_ST.dtype).removeprefix('torch.')} is not float32"
    if logits_ST.shape[1] >= 2**30:
        return f"{logits_ST.shape[1]} keys; it takes fewer than 2^30"
    return None


def compile_for(kind: str) -> Any:
    """The kernel for many or few whole rows, for parts of rows, or to merge parts; compiles without a GPU."""
    many, few = (512, 4, 8), (1024, 1, 16)
    program = {
        "whole": lambda: select(*many),
        "few": lambda: select(*few),
        "part": lambda: select(*few, values=True),
        "merge": lambda: select(*few, mapped=True),
    }[kind]
    # Every access is in range and every barrier in place: the passes would add 64-bit comparisons and barriers.
    return compiled(("select_topk", kind), program, safe_access=False, insert_barriers=False)


@cache
def _entry(kind: str) -> Callable[..., None]:
    return launcher(compile_for(kind))


def parts_of(queries: int, keys: int, k: int) -> int:
    """How many thread blocks share a row: such that a part is about as long as the list of what all parts select."""
    parts = min(MAX_PARTS, round(math.sqrt(keys / k)))
    pays = parts > 1 and -(-keys // parts) + parts * k <= keys // 2
    return parts if pays and keys >= SPREAD_KEYS and queries * parts <= SPREAD_BLOCKS else 1
