"""What the attention programs of ``sparse_mla`` share, and the small programs around them.

Blocks of a list without a valid entry are skipped, wherever they lie (``_list_walk_cuda``). Programs that need to know
only where a list ends ask ``lengths``, in a launch of its own.

The attention programs run as many thread blocks as there are multiprocessors, and gather listed rows by 16-byte
cp.async, with zero fill for what is not valid. In two of them a thread block takes one item (a query and up to 64
heads) after another, with 384 threads: a producer warpgroup gathers 64 rows at a time, and two consumer warpgroups
compute. Rows are handed over and freed in pieces, so that products start on one while the next is still in flight, and
the producer is at the next item while the consumers finish one.

- ``_sparse_mla_pairs.pair_heads`` (many queries of up to 8 heads): each pair of warps gathers and computes by itself.
- ``_sparse_mla_few.few_heads`` (up to 32 heads): keys are the M side of each product and heads the N side, so
  16 heads cost 16 columns rather than 64 rows.
- ``_sparse_mla_many.many_heads`` (tiles of 64 heads): heads are the M side. It is written in CUDA.

Few queries, or a few more than every multiprocessor takes, would leave most of the GPU idle. Then an item is a part of
a list (from 33 heads on, in the ``split`` programs), and ``combine`` merges the parts' float32 results.

All keep the reference of the exponentials (the running maximum of a softmax) where it is until a score exceeds
it by ``SLACK``: the result is the same sum, and almost no block has to rescale the output. Barriers of producers
and consumers follow one rule: waiting for "full" starts at phase 0, waiting for "free" at phase 1 (which a fresh
barrier passes at once), and every role counts the same items and the same uses of each buffer, so no length of a
list, zero included, can hang.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E

BLOCK = 64  # keys a step: what one warpgroup's matrix instruction takes on its M side
LOWEST = -1.0e30  # where the running maximum starts: finite, so that an empty row never computes inf - inf
SLACK = 8.0  # how far, in powers of two, a probability may exceed 1 before everything is rescaled


def is_token(entry: Any, tokens: Any) -> Any:
    """Whether a list's entry is valid, in one comparison: without its sign, a negative one is beyond all tokens."""
    return T.cast(entry, "uint32") < T.cast(tokens, "uint32")


def lengths() -> Any:
    """lengths[s] = 1 + the position of the last valid entry of list s, or 0."""
    queries, entries = T.dynamic("queries, entries")

    threads = 128

    @T.prim_func
    def sparse_mla_lengths(
        Indices: T.Tensor([queries, entries], "int32"),
        Limits: T.Tensor([queries], "int32"),
        tokens: T.int32,
        use_limits: T.int32,
        Lengths: T.Tensor([queries], "int32"),
    ):
        with T.Kernel(queries, threads=threads) as row:
            last = T.alloc_fragment([threads], "int32")
            result = T.alloc_fragment([1], "int32")
            limit = T.alloc_var("int32")
            limit = entries
            if use_limits != 0:
                limit = T.min(limit, Limits[row])
            T.fill(last, 0)
            tail = T.max(limit - threads, 0)
            for t in T.Parallel(threads):
                entry = T.if_then_else(tail + t < limit, Indices[row, tail + t], -1)
                if (entry >= 0) & (entry < tokens):
                    last[t] = tail + t + 1
            T.reduce_max(last, result, dim=0)
            if result[0] == 0:  # most lists are full, and their end is all that is read
                for step in T.serial(T.ceildiv(tail, threads)):
                    for t in T.Parallel(threads):
                        entry = Indices[row, step * threads + t]
                        if (step * threads + t < tail) & (entry >= 0) & (entry < tokens):
                            last[t] = step * threads + t + 1
                T.reduce_max(last, result, dim=0)
            Lengths[row] = result[0]

    return sparse_mla_lengths


def combine(rank: int, dtype: str) -> Any:
    """Merge the parts of each query and head, whose log-sum-exp is behind the values: ``rank`` // 4 threads for one."""
    queries, rows, heads = T.dynamic("queries, rows, heads")

    @T.prim_func
    def sparse_mla_combine(
        Part: T.Tensor([rows, heads, rank + 4], "float32"),
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        parts: T.int32,
        Out: T.Tensor([queries, heads, rank], dtype),
        Lse: T.Tensor([queries, heads], "float32"),
    ):
        with T.Kernel(queries, heads, threads=rank // 4) as (row, h):
            T.pdl_sync()  # it starts while the attention ends
            total = T.alloc_local([4], "float32")
            rounded = T.alloc_local([4], dtype)
            top = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            denominator = T.alloc_var("float32")
            thread = T.get_thread_binding()
            top = LOWEST
            for part in T.serial(parts):
                top = T.max(top, Part[row * parts + part, h, rank])
            denominator = 0.0
            T.fill(total, 0.0)
            for part in T.serial(parts):
                weight = T.exp2((Part[row * parts + part, h, rank] - top) * LOG2E)
                denominator = denominator + weight
                for k in T.vectorized(4):
                    total[k] = total[k] + weight * Part[row * parts + part, h, thread * 4 + k]
            if thread == 0:
                Lse[row, h] = T.if_then_else(
                    denominator == 0.0, -T.infinity("float32"), T.log2(denominator) * LN2 + top
                )
            weight = denominator
            if has_sink != 0:
                weight = denominator + T.exp2((Sink[h] - top) * LOG2E)
            weight = T.if_then_else(denominator == 0.0, 0.0, 1.0 / weight)
            for k in T.vectorized(4):
                rounded[k] = total[k] * weight
            for k in T.vectorized(4):
                Out[row, h, thread * 4 + k] = rounded[k]

    return sparse_mla_combine
