"""A program of ``indexer_loss``: the main attention's probabilities of listed keys, summed over up to 64 heads.

A thread block has a query and a tile of heads. Keys are the M side of the product (64 a step) and heads the N side.
A producer warpgroup gathers the listed rows into two buffers, block by block of those that hold a valid entry
(``_sparse_mla_backward_rows.blocks_of``), and two consumers take alternate blocks. Where the
log-sum-exp of the scores is not given, the list is walked twice: first every thread keeps a maximum and a sum for
each of its columns, which are merged at the end.

Shapes: S queries, T tokens, H heads, E dims (a multiple of 64), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._accumulators import accumulator_place
from mla_convert.runtime.kernels._common import LOG2E

BLOCK = 64  # keys a step: what one warpgroup's matrix instruction takes on its M side
LOWEST = -1.0e30  # where a maximum starts: finite, so that nothing computes inf - inf
NOTHING = 1.0e30  # log-sum-exp of what has no keys or does not exist: every exponential against it is 0

# A thread of a wgmma accumulator has columns 8 i + 2 (lane % 4) and the one behind, of two rows eight apart.
FUNCTIONS = """
// The maximum and, against it, the sum of exponentials of each of a thread's columns so far.
template <int kColumns>
static __device__ __forceinline__ void collect(
    float* peak, float* total, float* acc, float scale, bool has_low, bool has_high) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int c = 0; c < kColumns / 4; ++c) {
    const float low = has_low ? acc[c / 2 * 4 + c % 2] * scale : -INFINITY;
    const float high = has_high ? acc[c / 2 * 4 + c % 2 + 2] * scale : -INFINITY;
    const float top = fmaxf(peak[c], fmaxf(low, high));
    total[c] = total[c] * exp2f(peak[c] - top) + (exp2f(low - top) + exp2f(high - top));
    peak[c] = top;
  }
}

// Merge the eight lanes of a warp that have the same columns.
template <int kColumns>
static __device__ __forceinline__ void merge_lanes(float* peak, float* total) {
#pragma unroll
  for (int c = 0; c < kColumns / 4; ++c) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, peak[c], lanes);
      const float others = __shfl_xor_sync(0xffffffffu, total[c], lanes);
      const float top = fmaxf(peak[c], other);
      total[c] = total[c] * exp2f(peak[c] - top) + others * exp2f(other - top);
      peak[c] = top;
    }
  }
}

// The sum over columns of exp2(scale * x - lse2), of the thread's upper row in even lanes and of the lower in odd ones.
template <int kColumns>
static __device__ __forceinline__ void sum_probabilities(
    float* out, float* acc, const float* lse2, float scale) {
  const int lane = threadIdx.x & 31;
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int c = 0; c < kColumns / 4; ++c) {
    low += exp2f(fmaf(acc[c / 2 * 4 + c % 2], scale, -lse2[c]));
    high += exp2f(fmaf(acc[c / 2 * 4 + c % 2 + 2], scale, -lse2[c]));
  }
  float sum = __shfl_xor_sync(0xffffffffu, lane & 1 ? low : high, 1);
  sum += lane & 1 ? high : low;
  *out = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}
"""


def target(columns: int, width: int, dtype: str) -> Any:
    """Target[tile, s, j]: the sum, over the tile's ``columns`` heads, of the probability of entry j of list s.

    0 where the entry is not valid; what lies behind ``Lengths`` or in a block without a valid entry is left as it is.
    """
    queries, tokens, heads, entries, blocks, tiles = T.dynamic(
        "queries, tokens, heads, entries, blocks, tiles"
    )
    held = columns // 4  # columns of a thread

    @T.macro
    def multiply(k_sh, q_sh, full, free, g, use, score):
        T.barrier_wait(full[g], use & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(k_sh[g, :, :], q_sh, score, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.barrier_arrive(free[g])

    @T.macro
    def consume(
        g, t, Indices, Blocks, Lse, Target, q_sh, k_sh, peak_sh, total_sh, q_full, full, free, score, tile, row,
        length, count, scale2, has_lse, heads, tokens,
    ):  # fmt: skip
        lse2 = T.alloc_local([held], "float32")
        peak = T.alloc_local([held], "float32")
        total = T.alloc_local([held], "float32")
        sum_ = T.alloc_local([1], "float32")
        low = T.alloc_var("int32")
        high = T.alloc_var("int32")
        number = T.alloc_var("int32")
        used = T.alloc_var("int32")
        mine = T.ceildiv(count - g, 2)  # blocks of this consumer
        place = t // 32 * 16 + t % 32 // 4  # this thread's upper row; the lower is 8 behind
        used = 0
        T.barrier_wait(q_full, 0)
        if has_lse == 0:
            for c in T.unroll(held):
                peak[c] = LOWEST
                total[c] = 0.0
            number = Blocks[row, T.min(1 + g, count)]
            for i in T.serial(mine):
                entry = number * BLOCK + place
                number = Blocks[row, T.min(3 + 2 * i + g, count)]
                low = -1
                high = -1
                if entry < length:
                    low = Indices[row, entry]
                if entry + 8 < length:
                    high = Indices[row, entry + 8]
                multiply(k_sh, q_sh, full, free, g, i, score)
                T.call_extern(
                    "handle",
                    f"collect<{columns}>",
                    T.access_ptr(peak[0], "rw", held),
                    T.access_ptr(total[0], "rw", held),
                    T.access_ptr(score[0, 0], "rw", columns // 2),
                    scale2,
                    (low >= 0) & (low < tokens),
                    (high >= 0) & (high < tokens),
                )
            T.call_extern(
                "handle",
                f"merge_lanes<{columns}>",
                T.access_ptr(peak[0], "rw", held),
                T.access_ptr(total[0], "rw", held),
            )
            if t % 32 < 4:
                for c in T.unroll(held):
                    peak_sh[g * 4 + t // 32, c // 2 * 8 + t % 4 * 2 + c % 2] = peak[c]
                    total_sh[g * 4 + t // 32, c // 2 * 8 + t % 4 * 2 + c % 2] = total[c]
            T.sync_threads(8, 256)
            for c in T.unroll(held):
                peak[c] = LOWEST
                total[c] = 0.0
                for w in T.unroll(8):
                    peak[c] = T.max(peak[c], peak_sh[w, c // 2 * 8 + t % 4 * 2 + c % 2])
                for w in T.unroll(8):
                    total[c] = total[c] + total_sh[w, c // 2 * 8 + t % 4 * 2 + c % 2] * T.exp2(
                        peak_sh[w, c // 2 * 8 + t % 4 * 2 + c % 2] - peak[c]
                    )
                lse2[c] = T.if_then_else(total[c] == 0.0, NOTHING, peak[c] + T.log2(total[c]))
            used = mine
        if has_lse != 0:
            for c in T.unroll(held):
                head = T.min(tile * columns + c // 2 * 8 + t % 4 * 2 + c % 2, heads - 1)
                lse2[c] = T.if_then_else(
                    Lse[row, head] == -T.infinity("float32"), NOTHING, Lse[row, head] * LOG2E
                )
        # A loop of its own: where one has an elif on has_lse, TileLang 0.1.15 takes that out and loses the first case.
        for c in T.unroll(held):
            if tile * columns + c // 2 * 8 + t % 4 * 2 + c % 2 >= heads:
                lse2[c] = NOTHING
        number = Blocks[row, T.min(1 + g, count)]
        for i in T.serial(mine):
            entry = number * BLOCK + place + t % 2 * 8
            number = Blocks[row, T.min(3 + 2 * i + g, count)]
            low = -1
            if entry < length:
                low = Indices[row, entry]
            multiply(k_sh, q_sh, full, free, g, used + i, score)
            T.call_extern(
                "handle",
                f"sum_probabilities<{columns}>",
                T.access_ptr(sum_[0], "w", 1),
                T.access_ptr(score[0, 0], "rw", columns // 2),
                T.access_ptr(lse2[0], "r", held),
                scale2,
            )
            if (t % 4 < 2) & (entry < length):
                Target[tile, row, entry] = T.if_then_else((low >= 0) & (low < tokens), sum_[0], 0.0)

    @T.prim_func
    def indexer_loss_target(
        Q: T.Tensor([queries, heads, width], dtype),
        KV: T.Tensor([tokens, width], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        Blocks: T.Tensor([queries, blocks], "int32"),
        Lse: T.Tensor([queries, heads], "float32"),
        has_lse: T.int32,
        scale: T.float32,
        Target: T.Tensor([tiles, queries, entries], "float32"),
    ):
        with T.Kernel(tiles, queries, threads=384, prelude=FUNCTIONS) as (tile, row):
            q_sh = T.alloc_shared([columns, width], dtype)
            k_sh = T.alloc_shared([2, BLOCK, width], dtype)
            peak_sh = T.alloc_shared([8, columns], "float32", scope="shared")
            total_sh = T.alloc_shared([8, columns], "float32", scope="shared")
            score0 = T.alloc_fragment([BLOCK, columns], "float32")
            score1 = T.alloc_fragment([BLOCK, columns], "float32")
            # TileLang cannot tell from a call to its own C++ how a fragment lies: as wgmma leaves it.
            T.annotate_layout(
                {acc: T.Fragment(acc.shape, forward_fn=accumulator_place) for acc in (score0, score1)}
            )
            index = T.alloc_local([4], "int32")
            length = T.alloc_var("int32")
            count = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            q_full = T.alloc_barrier([128])
            full = T.alloc_barrier([128, 128])
            free = T.alloc_barrier([128, 128])

            length = Lengths[row]
            count = Blocks[row, 0]
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(216, 1)
                consume(
                    0, thread, Indices, Blocks, Lse, Target, q_sh, k_sh, peak_sh, total_sh, q_full, full, free, score0,
                    tile, row, length, count, scale * LOG2E, has_lse, heads, tokens,
                )  # fmt: skip
            elif thread < 256:
                T.set_max_nreg(216, 1)
                consume(
                    1, thread - 128, Indices, Blocks, Lse, Target, q_sh, k_sh, peak_sh, total_sh, q_full, full, free,
                    score1, tile, row, length, count, scale * LOG2E, has_lse, heads, tokens,
                )  # fmt: skip
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                column = producer % 8 * 8
                for r in T.unroll(T.ceildiv(columns, 16)):
                    h = r * 16 + producer // 8
                    if h < columns:
                        for u in T.unroll(width // 64):
                            T.ptx_cp_async(
                                T.access_ptr(q_sh[h, u * 64 + column], "w", 8),
                                T.access_ptr(
                                    Q[row, T.min(tile * columns + h, heads - 1), u * 64 + column], "r", 8
                                ),
                                8,
                                tile * columns + h < heads,
                            )
                T.cp_async_barrier_noinc(q_full[0])
                for walk in T.serial(2 - has_lse):
                    begin = Blocks[row, 1] * BLOCK
                    for b in T.serial(count):
                        for r in T.unroll(4):
                            index[r] = -1
                            if begin + r * 16 + producer // 8 < length:
                                index[r] = Indices[row, begin + r * 16 + producer // 8]
                        begin = Blocks[row, 1 + T.min(b + 1, count - 1)] * BLOCK
                        use = b // 2 + walk * ((count - b % 2 + 1) // 2)
                        T.barrier_wait(free[b % 2], (use & 1) ^ 1)
                        for r in T.unroll(4):
                            ok = (index[r] >= 0) & (index[r] < tokens)
                            for u in T.unroll(width // 64):
                                T.ptx_cp_async(
                                    T.access_ptr(
                                        k_sh[b % 2, r * 16 + producer // 8, u * 64 + column], "w", 8
                                    ),
                                    T.access_ptr(
                                        KV[T.if_then_else(ok, index[r], 0), u * 64 + column], "r", 8
                                    ),
                                    8,
                                    ok,
                                )
                        T.cp_async_barrier_noinc(full[b % 2])

    return indexer_loss_target
