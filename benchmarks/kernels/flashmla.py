"""FlashMLA as a baseline: the torch operators of a shared library, on the same inputs.

Such a library is ``flashmla_ops.abi3.so`` of the sglang-kernel 0.4.4 wheel. The sparse operators take 64 or 128
heads, so the queries are padded beforehand; schedules of decode are made beforehand. Neither is in its time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.common import ERROR_LIMIT, RANK, SCALE, Rival


def load(library: Path) -> None:
    torch.ops.load_library(str(library))


def rival(
    make: Callable[[], Callable[[], Tensor]],
    error_of: Callable[[Tensor], float],
    wrap: Callable[[Callable[[], object]], Callable[[], object]] = lambda call: call,
) -> dict[str, Rival]:
    """FlashMLA's call and error; nothing without the library, where it refuses the case or where it is wrong.

    Args:
        make: One of the functions below, which give a call.
        error_of: 1 - cosine of what the call gives.
        wrap: What becomes of the call before it is timed, such as ``in_graph``.
    """
    if not hasattr(torch.ops.sgl_kernel, "sparse_prefill_fwd"):
        return {}
    try:
        call = make()
        error, wrapped = error_of(call()), wrap(call)
    except RuntimeError as refusal:
        print(f"no baseline, since FlashMLA says: {refusal}", file=sys.stderr)
        return {}
    if not error <= ERROR_LIMIT:
        print(f"no baseline, since FlashMLA's 1 - cosine is {error:.1e}", file=sys.stderr)
        return {}
    return {"FlashMLA": Rival(wrapped, error)}


def _padded(q: Tensor) -> Tensor:
    """The heads, the last dim but one, filled up to 64 or 128 with zeros."""
    heads = q.shape[-2]
    padded = q.new_zeros(*q.shape[:-2], 64 if heads <= 64 else 128, q.shape[-1])
    padded[..., :heads, :] = q
    return padded


def sparse_prefill(q_SHE: Tensor, kv_TE: Tensor, indices_SK: Tensor) -> Callable[[], Tensor]:
    """A call that gives the output of the padded heads."""
    run = torch.ops.sgl_kernel.sparse_prefill_fwd
    padded = _padded(q_SHE)
    return lambda: run(padded, kv_TE[:, None], indices_SK[:, None], SCALE, RANK, None, None)[0]


def dense_decode(q_BSHE: Tensor, cache: Tensor, options: dict[str, Any]) -> Callable[[], Tensor]:
    """``cache`` is [pages, page size, 1, dims]; options are those of ``decode_mla``."""
    run = torch.ops.sgl_kernel.dense_decode_fwd
    where = (options["cache_seqlens"], options["block_table"], SCALE, options["causal"])
    *_, schedule, splits = run(q_BSHE, cache, RANK, *where, None, None)
    return lambda: run(q_BSHE, cache, RANK, *where, schedule, splits)[0]


def sparse_decode(q_BSHE: Tensor, rows: Tensor, options: dict[str, Any]) -> Callable[[], Tensor]:
    """A call that gives the output of the padded heads. Its decode takes FP8 rows alone; bf16 goes to its prefill."""
    if rows.dtype == torch.bfloat16:
        tokens = q_BSHE.shape[:2]
        call = sparse_prefill(
            q_BSHE.flatten(0, 1), rows.view(-1, rows.shape[-1]), options["indices"].flatten(0, 1)
        )
        return lambda: call().unflatten(0, tokens)
    run = torch.ops.sgl_kernel.sparse_decode_fwd
    fixed = (_padded(q_BSHE), rows.view(torch.float8_e4m3fn), options["indices"], None, None)
    rest = (None, None, None, RANK, SCALE)
    *_, schedule, splits = run(*fixed, None, None, *rest)
    return lambda: run(*fixed, schedule, splits, *rest)[0]
