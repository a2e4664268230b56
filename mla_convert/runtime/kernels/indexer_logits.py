"""Scores of the lightning indexer: for every query and key, the weighted sum over heads of relu(q . k).

Keys are the M side of the product (64 a step) and heads the N side: a thread block takes as many queries as fill
128 columns with their heads, and walks a span of keys. One producer warpgroup fetches; two consumers take
alternate steps through two buffers each, so that one's product hides the other's reduction over heads. Keys
outside every query's range are not read; they only get their -inf, and each output is written exactly once.

Shapes: S queries, T keys, I indexer heads, J indexer dims.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812
import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.kernels._common import (
    DTYPES,
    as_int32,
    compiled,
    launchable,
    pad_features,
    require,
)

COLUMNS = 128  # heads times queries of one thread block
BLOCK = 64  # keys a step: what one warpgroup's matrix instruction takes on its M side
MAX_HEADS = 128
MAX_DIM = 128


def indexer_logits(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """sum over heads of weight * relu(q . k), on a Hopper GPU; products and sums in float32.

    Args:
        q_SIJ: [S, I, J] bfloat16 or float16; 1 to 128 heads, up to 128 dims (dims that are not a multiple of 8
            are zero-padded in copies of q and k).
        k_TJ: [T, J] in the dtype of q.
        weights_SI: [S, I] float32; other dtypes are converted.
        starts, ends: First key of each query and the one after its last, int [S]; outside them the logit is
            -inf. Causal attention of a whole sequence has ends = 1…S. None: from 0, or to T.

    Returns:
        logits [S, T] float32, without gradient. Two runs give equal bits.

    Raises:
        CannotError: A size or dtype that the kernel does not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    _check(q_SIJ, k_TJ, weights_SI, starts, ends)
    if reason := unsupported(q_SIJ):
        raise CannotError(f"The indexer kernel cannot run: {reason}.")
    (queries, heads, dim), keys = q_SIJ.shape, k_TJ.shape[0]
    logits_ST = torch.empty(queries, keys, dtype=torch.float32, device=q_SIJ.device)
    if not (queries and keys):
        return logits_ST
    padded = -(-dim // 8) * 8
    q_SIJ = launchable(pad_features(q_SIJ, dim, padded, 0))
    k_TJ = launchable(pad_features(k_TJ, dim, padded, 0))
    weights_SI = launchable(weights_SI.to(torch.float32))
    first_S = q_SIJ.new_zeros(queries, dtype=torch.int32) if starts is None else launchable(as_int32(starts))
    last_S = torch.full_like(first_S, keys) if ends is None else launchable(as_int32(ends))
    span, spans = _spans(queries, heads, keys)
    with torch.cuda.device(q_SIJ.device):
        kernel = compile_for(heads, padded, q_SIJ.dtype)
        kernel(q_SIJ, k_TJ, weights_SI, first_S, last_S, span, spans, logits_ST)
    return logits_ST


def unsupported(q_SIJ: Tensor) -> str | None:
    """Why the kernel does not take these queries, or None if it does."""
    heads, dim = q_SIJ.shape[1:]
    if q_SIJ.dtype not in DTYPES:
        return f"dtype {str(q_SIJ.dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    if not 0 < heads <= MAX_HEADS or not 0 < dim <= MAX_DIM:
        return f"{heads} heads of {dim} dims; it takes 1 to {MAX_HEADS} heads of 1 to {MAX_DIM} dims"
    return None


def compile_for(heads: int, dim: int, dtype: torch.dtype) -> Any:
    """The kernel for a head count and dims (a multiple of 8); compiles without a GPU, once per variant."""
    slots = _slots(heads)
    name = DTYPES[dtype]
    key = ("indexer_logits", slots, dim, name)
    return compiled(key, lambda: _program(slots, dim, name))


def _slots(heads: int) -> int:
    """Columns for the heads of one query: a power of two that divides ``COLUMNS``."""
    return max(8, 1 << (heads - 1).bit_length())


def _spans(queries: int, heads: int, keys: int) -> tuple[int, int]:
    """Steps of one thread block and the number of such spans: enough blocks for 132 multiprocessors."""
    groups, steps = -(-queries * _slots(heads) // COLUMNS), -(-keys // BLOCK)
    spans = min(-(-4 * 132 // groups), -(-steps // 8))
    span = -(-steps // spans)
    return span, -(-steps // span)


def _check(
    q_SIJ: Tensor, k_TJ: Tensor, weights_SI: Tensor, starts: Tensor | None, ends: Tensor | None
) -> None:
    require(
        q_SIJ.ndim == 3 and k_TJ.ndim == 2,
        f"q {list(q_SIJ.shape)}, k {list(k_TJ.shape)}: expected [S, I, J], [T, J]",
    )
    queries, heads, dim = q_SIJ.shape
    require(k_TJ.shape[1] == dim, f"q has {dim} dims a head and k {k_TJ.shape[1]} a key")
    require(k_TJ.dtype == q_SIJ.dtype, f"q is {q_SIJ.dtype} and k {k_TJ.dtype}")
    require(weights_SI.shape == (queries, heads), f"weights {list(weights_SI.shape)} for {queries} x {heads}")
    for name, bound in (("starts", starts), ("ends", ends)):
        require(
            bound is None or bound.shape == (queries,),
            f"{name} needs one entry for each of {queries} queries",
        )
    for other in (k_TJ, weights_SI, starts, ends):
        same = other is None or other.device == q_SIJ.device
        require(same, f"q is on {q_SIJ.device} and another argument is not")


def _program(slots: int, dim: int, dtype: str) -> Any:
    """``slots`` heads of a query side by side (those that do not exist are zero), ``COLUMNS // slots`` queries."""
    group = COLUMNS // slots
    width = 32 if dim <= 32 else 64 if dim <= 64 else 128
    queries, keys, heads = T.dynamic("queries, keys, heads")

    @T.macro
    def consume(
        g, Logits, Weights, q_sh, k_sh, start_sh, end_sh, q_full, full, free, score, weights, logits,
        first, begin, steps, queries, keys, heads,
    ):  # fmt: skip
        by_head = T.reshape(score, (BLOCK, group, slots))
        for q, h in T.Parallel(group, slots):
            weights[q, h] = T.if_then_else(
                (first + q < queries) & (h < heads),
                Weights[T.min(first + q, queries - 1), T.min(h, heads - 1)],
                0.0,
            )
        T.barrier_wait(q_full, 0)
        for i in T.serial(T.ceildiv(steps - g, 2)):
            s = i % 2
            T.barrier_wait(full[g * 2 + s], (i // 2) & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(k_sh[g * 2 + s, :, :], q_sh, score, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            T.barrier_arrive(free[g * 2 + s])
            for j, q, h in T.Parallel(BLOCK, group, slots):
                # Not max(x, 0): that would turn a NaN into 0.
                by_head[j, q, h] = (
                    T.if_then_else(by_head[j, q, h] < 0.0, 0.0, by_head[j, q, h]) * weights[q, h]
                )
            T.reduce_sum(by_head, logits, dim=2)
            key = (begin + i * 2 + g) * BLOCK
            for j, q in T.Parallel(BLOCK, group):
                if (first + q < queries) & (key + j < keys):
                    Logits[first + q, key + j] = T.if_then_else(
                        (key + j >= start_sh[q]) & (key + j < end_sh[q]), logits[j, q], -T.infinity("float32")
                    )

    @T.prim_func
    def indexer_logits_kernel(
        Q: T.Tensor([queries, heads, dim], dtype),
        K: T.Tensor([keys, dim], dtype),
        Weights: T.Tensor([queries, heads], "float32"),
        Starts: T.Tensor([queries], "int32"),
        Ends: T.Tensor([queries], "int32"),
        span: T.int32,
        spans: T.int32,
        Logits: T.Tensor([queries, keys], "float32"),
    ):
        with T.Kernel(T.ceildiv(queries, group), spans, threads=384) as (block, part):
            q_sh = T.alloc_shared([COLUMNS, width], dtype)
            k_sh = T.alloc_shared([4, BLOCK, width], dtype)
            start_sh = T.alloc_shared([group], "int32", scope="shared")
            end_sh = T.alloc_shared([group], "int32", scope="shared")
            weights0 = T.alloc_fragment([group, slots], "float32")
            weights1 = T.alloc_fragment([group, slots], "float32")
            score0 = T.alloc_fragment([BLOCK, COLUMNS], "float32")
            score1 = T.alloc_fragment([BLOCK, COLUMNS], "float32")
            logits0 = T.alloc_fragment([BLOCK, group], "float32")
            logits1 = T.alloc_fragment([BLOCK, group], "float32")
            lowest = T.alloc_var("int32")
            highest = T.alloc_var("int32")
            first = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            q_full = T.alloc_barrier([128])
            full = T.alloc_barrier([128] * 4)
            free = T.alloc_barrier([128] * 4)

            # The last queries have the longest causal ranges, so they go first.
            first = (T.ceildiv(queries, group) - 1 - block) * group
            thread = T.get_thread_binding()
            if thread < group:
                start_sh[thread] = 0
                end_sh[thread] = 0
                if first + thread < queries:
                    start_sh[thread] = T.max(Starts[first + thread], 0)
                    end_sh[thread] = T.min(Ends[first + thread], keys)
            T.sync_threads()
            # The keys that any of the queries needs; a query behind the end has an empty range.
            lowest = 2147483647
            highest = 0
            for q in T.serial(group):
                if start_sh[q] < end_sh[q]:
                    lowest = T.min(lowest, start_sh[q])
                    highest = T.max(highest, end_sh[q])
            span_from = part * span
            span_to = T.min(span_from + span, T.ceildiv(keys, BLOCK))
            begin = T.max(span_from, T.min(lowest // BLOCK, span_to))
            steps = T.max(T.min(T.ceildiv(highest, BLOCK), span_to) - begin, 0)

            if thread < 128:
                T.set_max_nreg(216, 1)
                consume(
                    0, Logits, Weights, q_sh, k_sh, start_sh, end_sh, q_full, full, free, score0, weights0,
                    logits0, first, begin, steps, queries, keys, heads,
                )  # fmt: skip
            elif thread < 256:
                T.set_max_nreg(216, 1)
                consume(
                    1, Logits, Weights, q_sh, k_sh, start_sh, end_sh, q_full, full, free, score1, weights1,
                    logits1, first, begin, steps, queries, keys, heads,
                )  # fmt: skip
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                for r in T.unroll(COLUMNS // 16):
                    column = r * 16 + producer // 8
                    query = first + column // slots
                    head = column % slots
                    exists = (query < queries) & (head < heads)
                    for u in T.unroll(T.ceildiv(width, 64)):
                        d = u * 64 + producer % 8 * 8
                        if d < width:
                            T.ptx_cp_async(
                                T.access_ptr(q_sh[column, d], "w", 8),
                                T.access_ptr(
                                    Q[T.min(query, queries - 1), T.min(head, heads - 1), T.min(d, dim - 8)],
                                    "r",
                                    8,
                                ),
                                8,
                                exists & (d < dim),
                            )
                T.cp_async_barrier_noinc(q_full[0])
                for i in T.serial(steps):
                    s = i % 2 * 2 + i // 2 % 2
                    T.barrier_wait(free[s], ((i // 4) & 1) ^ 1)
                    for r in T.unroll(BLOCK // 16):
                        j = r * 16 + producer // 8
                        key = (begin + i) * BLOCK + j
                        for u in T.unroll(T.ceildiv(width, 64)):
                            d = u * 64 + producer % 8 * 8
                            if d < width:
                                T.ptx_cp_async(
                                    T.access_ptr(k_sh[s, j, d], "w", 8),
                                    T.access_ptr(K[T.min(key, keys - 1), T.min(d, dim - 8)], "r", 8),
                                    8,
                                    (key < keys) & (d < dim),
                                )
                    T.cp_async_barrier_noinc(full[s])
                for i in T.serial(span_to - span_from - steps):
                    outside = span_from + i + T.if_then_else(span_from + i < begin, 0, steps)
                    for q, j in T.Parallel(group, BLOCK):
                        if (first + q < queries) & (outside * BLOCK + j < keys):
                            Logits[first + q, outside * BLOCK + j] = -T.infinity("float32")

    return indexer_logits_kernel
