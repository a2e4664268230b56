"""The program of ``indexer_logits``: products of keys and heads, and their sums over heads.

Keys are the M side of the product (64 a step) and heads the N side, 128 columns a consumer: as many queries as fill
those with their heads. One producer warpgroup fetches blocks of keys into a ring; two consumers multiply the same
blocks by queries of their own (or, where the queries fill only one, alternate blocks by the same queries), two steps
at a time: while the second product runs, the first is reduced over its heads. Reducing is two instructions a score,
which is what keeps it behind the products. Keys outside every query's range are not read; they only get their -inf,
and each output is written exactly once.

Shapes: S queries, T keys, I indexer heads, J indexer dims.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._accumulators import accumulator_place

COLUMNS = 128  # heads times queries of one consumer
BLOCK = 64  # keys a step: what one warpgroup's matrix instruction takes on its M side

# Not fmaxf(x, 0) for the relu: that would turn a NaN into 0. A thread of a wgmma accumulator has columns
# 8 i + 2 (lane % 4) and the one behind, of two rows eight apart. Four lanes have a row, and each ends with other sums
# of theirs: every exchange leaves half as many, of row lane % 2 and, after the second, of every other query.
HEAD_SUMS = """
static __device__ __forceinline__ float relu_that_keeps_nan(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// sums[m] = sum over the kSlots columns of query 2 m + lane / 2 % 2 of weight * relu(x).
template <int kSlots, int kColumns>
static __device__ __forceinline__ void head_sums(float* sums, float* acc, const float* weights) {
  constexpr int kQueries = kColumns / kSlots, kPairs = kSlots / 8;
  const int lane = threadIdx.x & 31;
  float row[kQueries];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int q = 0; q < kQueries; ++q) {
    float low = 0, high = 0;
#pragma unroll
    for (int i = q * kPairs; i < (q + 1) * kPairs; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        low = fmaf(relu_that_keeps_nan(acc[i * 4 + k]), weights[i * 2 + k], low);
        high = fmaf(relu_that_keeps_nan(acc[i * 4 + 2 + k]), weights[i * 2 + k], high);
      }
    }
    const float other = __shfl_xor_sync(0xffffffffu, lane & 1 ? low : high, 1);
    row[q] = (lane & 1 ? high : low) + other;
  }
  if constexpr (kQueries == 1) {
    sums[0] = row[0] + __shfl_xor_sync(0xffffffffu, row[0], 2);
  } else {
#pragma unroll
    for (int q = 0; q < kQueries; q += 2) {
      const float other = __shfl_xor_sync(0xffffffffu, lane & 2 ? row[q] : row[q + 1], 2);
      sums[q / 2] = (lane & 2 ? row[q + 1] : row[q]) + other;
    }
  }
}
"""


def logits(slots: int, dim: int, dtype: str, share: bool, scaled: bool) -> Any:
    """``slots`` heads of a query side by side (those that do not exist are zero), ``COLUMNS // slots`` queries."""
    group = COLUMNS // slots
    held = max(1, group // 2)  # sums of a thread: see HEAD_SUMS
    together = 2 * group if share else group
    width = 32 if dim <= 32 else 64 if dim <= 64 else 128
    unit = 16 if dtype == "float8_e4m3fn" else 8  # elements of one 16-byte copy
    stages = 6 if share else 8
    stride = 1 if share else 2  # a consumer takes every block of keys, or every other one
    queries, keys, heads, scales, starts, ends = T.dynamic("queries, keys, heads, scales, starts, ends")

    @T.macro
    def multiply(k_sh, q_sh, full, step, score, column):
        T.barrier_wait(full[step % stages], (step // stages) & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(
            k_sh[step % stages, :, :],
            q_sh[column : column + COLUMNS, :],
            score,
            transpose_B=True,
            clear_accum=True,
        )

    @T.macro
    def reduce(
        Logits, scale_sh, score, weights, starts, ends, sums, query, row, begin, step, steps, queries, keys,
    ):  # fmt: skip
        T.call_extern(
            "handle",
            f"head_sums<{slots}, {COLUMNS}>",
            T.access_ptr(sums[0], "w", held),
            T.access_ptr(score[0, 0], "rw", BLOCK * COLUMNS // 128),
            T.access_ptr(weights[0], "r", COLUMNS // 4),
        )
        key = (begin + step) * BLOCK + row
        if (key < keys) & (step < steps):
            for m in T.unroll(held):
                if query + 2 * m < queries:
                    Logits[query + 2 * m, key] = T.if_then_else(
                        (key >= starts[m]) & (key < ends[m]),
                        sums[m] * scale_sh[step % (2 * stages), row] if scaled else sums[m],
                        -T.infinity("float32"),
                    )

    @T.macro
    def consume(
        g, t, Logits, Weights, q_sh, k_sh, scale_sh, start_sh, end_sh, q_full, full, free, even, odd, first, begin,
        steps, pairs, queries, keys, heads,
    ):  # fmt: skip
        """Thread ``t`` of consumer ``g``; its columns of the product and its share of the sums: ``HEAD_SUMS``."""
        weights = T.alloc_local([COLUMNS // 4], "float32")
        sums = T.alloc_local([held], "float32")
        starts = T.alloc_local([held], "int32")
        ends = T.alloc_local([held], "int32")
        offset = g * group if share else 0
        column = g * COLUMNS if share else 0
        for i in T.unroll(COLUMNS // 4):
            q = first + offset + (i // 2 * 8) // slots
            h = (i // 2 * 8) % slots + t % 4 * 2 + i % 2
            weights[i] = T.if_then_else(
                (q < queries) & (h < heads), Weights[T.min(q, queries - 1), T.min(h, heads - 1)], 0.0
            )
        row = t // 32 * 16 + t % 2 * 8 + t % 32 // 4
        mine = offset + t // 2 % 2 if group > 1 else offset
        for m in T.unroll(held):
            starts[m] = start_sh[mine + 2 * m]
            ends[m] = end_sh[mine + 2 * m]
        T.barrier_wait(q_full, 0)
        # Nothing is in flight from one round to the next: ptxas would serialise the products.
        for pair in T.serial(pairs):
            step = pair * 2 * stride + (0 if share else g)
            multiply(k_sh, q_sh, full, step, even, column)
            multiply(k_sh, q_sh, full, step + stride, odd, column)
            T.wait_wgmma(1)
            T.barrier_arrive(free[step % stages])
            reduce(
                Logits, scale_sh, even, weights, starts, ends, sums, first + mine, row, begin, step, steps, queries,
                keys,
            )  # fmt: skip
            T.wait_wgmma(0)
            T.barrier_arrive(free[(step + stride) % stages])
            reduce(
                Logits, scale_sh, odd, weights, starts, ends, sums, first + mine, row, begin, step + stride, steps,
                queries, keys,
            )  # fmt: skip

    @T.prim_func
    def indexer_logits_kernel(
        Q: T.Tensor([queries, heads, dim], dtype),
        K: T.Tensor([keys, dim], dtype),
        Weights: T.Tensor([queries, heads], "float32"),
        Scales: T.Tensor([scales], "float32"),
        Starts: T.Tensor([starts], "int32"),
        Ends: T.Tensor([ends], "int32"),
        use_starts: T.int32,
        use_ends: T.int32,
        span: T.int32,
        spans: T.int32,
        fill: T.int32,
        Logits: T.Tensor([queries, keys], "float32"),
    ):
        with T.Kernel(T.ceildiv(queries, together), spans, threads=384, prelude=HEAD_SUMS) as (block, part):
            q_sh = T.alloc_shared([together * slots, width], dtype)
            k_sh = T.alloc_shared([stages, BLOCK, width], dtype)
            # Read after a block of keys is given back, so it must outlive one more use of the block's place.
            scale_sh = T.alloc_shared([2 * stages, BLOCK], "float32", scope="shared")
            start_sh = T.alloc_shared([together], "int32", scope="shared")
            end_sh = T.alloc_shared([together], "int32", scope="shared")
            even0 = T.alloc_fragment([BLOCK, COLUMNS], "float32")
            even1 = T.alloc_fragment([BLOCK, COLUMNS], "float32")
            odd0 = T.alloc_fragment([BLOCK, COLUMNS], "float32")
            odd1 = T.alloc_fragment([BLOCK, COLUMNS], "float32")
            # TileLang cannot tell from a call to its own C++ how a fragment lies: as wgmma leaves it.
            T.annotate_layout(
                {
                    acc: T.Fragment(acc.shape, forward_fn=accumulator_place)
                    for acc in (even0, even1, odd0, odd1)
                }
            )
            lowest = T.alloc_var("int32")
            highest = T.alloc_var("int32")
            first = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            pairs = T.alloc_var("int32")
            q_full = T.alloc_barrier([128])
            full = T.alloc_barrier([128] * stages)
            free = T.alloc_barrier([256 if share else 128] * stages)

            # The last queries have the longest causal ranges, so they go first.
            first = (T.ceildiv(queries, together) - 1 - block) * together
            thread = T.get_thread_binding()
            if thread < together:
                start_sh[thread] = 0
                end_sh[thread] = 0
                if first + thread < queries:
                    end_sh[thread] = keys
                    if use_starts != 0:
                        start_sh[thread] = T.max(Starts[first + thread], 0)
                    if use_ends != 0:
                        end_sh[thread] = T.min(Ends[first + thread], keys)
            T.sync_threads()
            # The keys that any of the queries needs; a query behind the end has an empty range.
            lowest = 2147483647
            highest = 0
            for q in T.serial(together):
                if start_sh[q] < end_sh[q]:
                    lowest = T.min(lowest, start_sh[q])
                    highest = T.max(highest, end_sh[q])
            span_from = part * span
            span_to = T.min(span_from + span, T.ceildiv(keys, BLOCK))
            begin = T.max(span_from, T.min(lowest // BLOCK, span_to))
            steps = T.max(T.min(T.ceildiv(highest, BLOCK), span_to) - begin, 0)
            pairs = T.ceildiv(steps, 2 * stride)

            if thread < 128:
                T.set_max_nreg(232, 1)
                consume(
                    0, thread - 0, Logits, Weights, q_sh, k_sh, scale_sh, start_sh, end_sh, q_full, full,
                    free, even0, odd0, first, begin, steps, pairs, queries, keys, heads,
                )  # fmt: skip
            elif thread < 256:
                T.set_max_nreg(232, 1)
                consume(
                    1, thread - 128, Logits, Weights, q_sh, k_sh, scale_sh, start_sh, end_sh, q_full, full,
                    free, even1, odd1, first, begin, steps, pairs, queries, keys, heads,
                )  # fmt: skip
            else:
                T.set_max_nreg(40, 0)
                producer = thread - 256
                for r in T.unroll(together * slots // 16):
                    column = r * 16 + producer // 8
                    query = first + column // slots
                    head = column % slots
                    exists = (query < queries) & (head < heads)
                    for u in T.unroll(T.ceildiv(width, 8 * unit)):
                        d = u * 8 * unit + producer % 8 * unit
                        if d < width:
                            T.ptx_cp_async(
                                T.access_ptr(q_sh[column, d], "w", unit),
                                T.access_ptr(
                                    Q[
                                        T.min(query, queries - 1),
                                        T.min(head, heads - 1),
                                        T.min(d, dim - unit),
                                    ],
                                    "r",
                                    unit,
                                ),
                                unit,
                                exists & (d < dim),
                            )
                T.cp_async_barrier_noinc(q_full[0])
                # Pairs are whole: the steps behind the last are empty, and their products are dropped.
                for i in T.serial(pairs * 2 * stride):
                    s = i % stages
                    T.barrier_wait(free[s], ((i // stages) & 1) ^ 1)
                    if i < steps:
                        if scaled:  # noqa: SIM102, one is a choice of the program and one of the thread
                            if producer < BLOCK:
                                T.ptx_cp_async(
                                    T.access_ptr(scale_sh[i % (2 * stages), producer], "w", 1),
                                    T.access_ptr(
                                        Scales[T.min((begin + i) * BLOCK + producer, keys - 1)], "r", 1
                                    ),
                                    1,
                                )
                        for r in T.unroll(BLOCK // 16):
                            j = r * 16 + producer // 8
                            key = (begin + i) * BLOCK + j
                            for u in T.unroll(T.ceildiv(width, 8 * unit)):
                                d = u * 8 * unit + producer % 8 * unit
                                if d < width:
                                    T.ptx_cp_async(
                                        T.access_ptr(k_sh[s, j, d], "w", unit),
                                        T.access_ptr(
                                            K[T.min(key, keys - 1), T.min(d, dim - unit)], "r", unit
                                        ),
                                        unit,
                                        (key < keys) & (d < dim),
                                    )
                    T.cp_async_barrier_noinc(full[s])
                if fill != 0:
                    for i in T.serial(span_to - span_from - steps):
                        outside = span_from + i + T.if_then_else(span_from + i < begin, 0, steps)
                        for q, j in T.Parallel(together, BLOCK):
                            if (first + q < queries) & (outside * BLOCK + j < keys):
                                Logits[first + q, outside * BLOCK + j] = -T.infinity("float32")

    return indexer_logits_kernel
