"""The program of dense and decode attention over FP8 rows for requests of up to 16 rows.

``_dense`` describes its surroundings, ``kv_cache`` the rows.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._dense import (
    BEGIN,
    BLOCK,
    COUNT,
    END,
    EVERYTHING,
    FP8_ROW,
    LOWEST,
    PLAN_COLUMNS,
    REQUEST,
    ROW,
    ROWS_END,
    SEEN_BEGIN,
    SEEN_END,
    TURN,
    turn_at,
)
from mla_convert.runtime.kernels._dense_few import steps

RANK, ROPE = 512, 64
MOST_COLUMNS = 16
PIECES = 1  # of a block of rows in shared memory, each with barriers of its own

# Eight threads have a row of codes, 16 of each 128 a thread. The eight threads of a store write 128 bytes of one row
# to two panels of 64 columns: those of the second panel take their two pieces the other way round, so that a store
# meets every bank of shared memory once.
FUNCTIONS = """
#include <cuda_fp8.h>

__device__ __forceinline__ void mla_copy(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Eight threads copy whole rows, of their four those from kFirst to before kEnd, to shared memory; a row that is not
// there (-1) becomes zeros.
template <int kFirst, int kEnd>
__device__ __forceinline__ void mla_copy_rows(void* block, const void* cache, const int* source) {
  const int place = threadIdx.x & 7;
  const unsigned first = (unsigned)__cvta_generic_to_shared(block) + (threadIdx.x >> 3 & 15) * 656 + place * 16;
#pragma unroll
  for (int r = kFirst; r < kEnd; ++r) {
    const unsigned to = first + r * 16 * 656;
    const unsigned char* from = (const unsigned char*)cache + (long long)max(source[r], 0) * 656 + place * 16;
    const int bytes = source[r] >= 0 ? 16 : 0;
#pragma unroll
    for (int u = 0; u < 5; ++u) mla_copy(to + u * 128, from + u * 128, bytes);
    if (place == 0) mla_copy(to + 640, from + 640, bytes);
  }
}

// Codes and scales of the same rows from there to registers, and the rotary dims, swizzled, to a block of their own.
template <int kFirst, int kEnd>
__device__ __forceinline__ void mla_read_codes(unsigned* codes, unsigned* scales, void* rope, const void* block) {
  const int place = threadIdx.x & 7, row = threadIdx.x >> 3 & 15;
  asm volatile("" ::: "memory");  // neither before the barrier that says they are there
#pragma unroll
  for (int r = kFirst; r < kEnd; ++r) {
    const uint4* from = reinterpret_cast<const uint4*>((const unsigned char*)block + (r * 16 + row) * 656);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint4 got = from[u * 8 + place];
      codes[r * 16 + u * 4] = got.x, codes[r * 16 + u * 4 + 1] = got.y;
      codes[r * 16 + u * 4 + 2] = got.z, codes[r * 16 + u * 4 + 3] = got.w;
    }
    const uint4 got = from[32], rotary = from[33 + place];
    scales[r * 4] = got.x, scales[r * 4 + 1] = got.y, scales[r * 4 + 2] = got.z, scales[r * 4 + 3] = got.w;
    *reinterpret_cast<uint4*>((unsigned char*)rope + (r * 16 + row) * 128 + (place ^ (row & 7)) * 16) = rotary;
  }
  asm volatile("" ::: "memory");  // nor after the one that says they have been read
}

__device__ __forceinline__ unsigned mla_scale(unsigned codes, float scale) {
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&half));
  const __nv_bfloat162 scaled = __floats2bfloat162_rn(wide.x * scale, wide.y * scale);
  return *reinterpret_cast<const unsigned*>(&scaled);
}

// Code times scale, rounded to bfloat16, to the block in shared memory: panels of 64 rows of 128 bytes, swizzled.
__device__ __forceinline__ void mla_store_values(void* block, const unsigned* codes, const unsigned* scales) {
  const int place = threadIdx.x & 7, row = threadIdx.x >> 3 & 15;
  const bool second = place >= 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      unsigned char* line = (unsigned char*)block + (u * 2 + second) * 8192 + (r * 16 + row) * 128;
      const unsigned* own = codes + r * 16 + u * 4;
      const float scale = __uint_as_float(scales[r * 4 + u]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const unsigned a = second ? own[2 - 2 * v] : own[2 * v], b = second ? own[3 - 2 * v] : own[2 * v + 1];
        const int piece = ((place & 3) * 2 + (v ^ (int)second)) ^ (row & 7);
        *reinterpret_cast<uint4*>(line + piece * 16) = make_uint4(
            mla_scale(a, scale), mla_scale(a >> 16, scale), mla_scale(b, scale), mla_scale(b >> 16, scale));
      }
    }
  }
}
"""


def few_fp8_rows(columns: int) -> Any:
    """As ``_dense_few.few_rows``, for 8 or 16 ``columns``; the consumers turn codes into bfloat16.

    The third warpgroup copies rows as they are to a block in shared memory, for one consumer and the other in turn. A
    consumer takes its block's codes to registers, which makes room for the next block, and stores them as bfloat16 to
    a buffer of its own. So nothing waits for a load but the copies' barriers: a warpgroup that loads codes to its
    registers ahead of time and converts them itself stalls at every proxy fence, which waits for all loads under way.
    """
    rank, rope, dtype = RANK, ROPE, "bfloat16"
    half = rank // 2
    rows, tokens, requests, entries = T.dynamic("rows, tokens, requests, entries")
    lines, slots, heads = T.dynamic("lines, slots, heads")
    stride = BLOCK + 4
    each = steps(columns, rank)
    softmax, reduce_sums, weigh, merge = each.softmax, each.reduce_sums, each.weigh, each.merge

    @T.macro
    def load_queries(Q, Plan, spans_at, q_rank, q_rope, bounds_sh, row, rows_end, heads, thread):
        """All threads: a tile's rows and the spans they see, as ``_dense.load_queries``, to be waited for."""
        h = thread // 8
        column = thread % 8 * 8
        if h < columns:
            exists = row + h < rows_end
            source = T.min(row + h, rows_end - 1)
            for u in T.unroll(rank // 64):
                T.ptx_cp_async(
                    T.access_ptr(q_rank[h, u * 64 + column], "w", 8),
                    T.access_ptr(Q[source, u * 64 + column], "r", 8),
                    8,
                    exists,
                )
            T.ptx_cp_async(
                T.access_ptr(q_rope[h, column], "w", 8),
                T.access_ptr(Q[source, rank + column], "r", 8),
                8,
                exists,
            )
        for side in T.unroll(2):
            if thread < columns:
                bounds_sh[side, thread] = T.if_then_else(
                    row + thread < rows_end,
                    Plan[spans_at + T.truncdiv(T.min(row + thread, rows_end - 1), heads), side],
                    side * EVERYTHING,
                )
        T.ptx_commit_group()

    @T.macro
    def fetch_rows(
        t, block, first, last, share, items_each, lanes, rows_each, paged, page, pages, KV, Table, Plan, staged, there,
        holes, full, free, turn, source,
    ):  # fmt: skip
        """Producer: whole rows of one block after another, for one consumer and the other.

        A warp has 16 rows of a block, in four groups of four. Lane 4 * i + r finds where row i of group r is, a block
        ahead of its use, for the eight lanes that copy it.
        """
        number = T.alloc_var("int32")
        entry = T.alloc_var("int32")
        offset = T.alloc_var("int32")
        place = T.alloc_var("int32")
        row = t % 4 * 16 + t // 32 * 4 + t % 16 // 4
        number = 0
        entry = -1
        offset = 0
        for w in T.serial(last - first + 1):
            turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, columns)
            for i in T.serial(turn[COUNT] + 1):
                if i > 0:
                    place = T.if_then_else((entry >= 0) & (entry < pages), entry * page + offset, -1)
                entry = -1
                if turn[BEGIN] + i * BLOCK + row < turn[END]:
                    entry = turn[REQUEST]
                    offset = turn[BEGIN] + i * BLOCK + row
                    if paged != 0:
                        entry = Table[turn[REQUEST], T.truncdiv(offset, page)]
                        offset = T.truncmod(offset, page)
                if i > 0:
                    for r in T.unroll(4):
                        source[r] = T.shfl_sync(place, t % 32 // 8 * 4 + r)
                    for k in list(range(PIECES)):
                        T.barrier_wait(free[k], (number & 1) ^ 1)
                        if k == 0 and t % 32 < 16:
                            there[row] = T.if_then_else(place >= 0, 1, 0)
                            if place < 0:
                                holes[0] = number + 1
                        T.call_extern(
                            "handle",
                            f"mla_copy_rows<{k * 4 // PIECES}, {(k + 1) * 4 // PIECES}>",
                            T.address_of(staged[0, 0]),
                            T.address_of(KV[0, 0]),
                            T.access_ptr(source[0], "r", 4),
                        )
                        T.cp_async_barrier_noinc(full[(i - 1) % 2 * PIECES + k])
                        T.barrier_arrive(full[(i - 1) % 2 * PIECES + k])
                    number = number + 1

    @T.macro
    def consume(
        g, thread, block, first, last, share, items, shares, items_each, lanes, rows_each, heads, has_sink, scale, Q,
        Plan, Sink, Out, Lse, Part, q_rank, q_rope, kv_rank, kv_rope, round_sh, p_sh, staged, there, full, free,
        bounds_sh, valid, holes, flag_sh, highest_sh, factor_sh, total_sh, both_sh, turn, ahead, codes, scales, score,
        p, sums, out_left, out_right,
    ):  # fmt: skip
        """A consumer's items; ``used`` counts its blocks."""
        used = T.alloc_var("int32")
        done = T.alloc_var("int32")
        hole = T.alloc_var("int32")
        begin = T.alloc_var("int32")
        count = T.alloc_var("int32")
        t = thread - 128 * g
        used = 0
        flag_sh[g, t % 2] = 0  # what an earlier thread block left there could look raised
        turn_at(Plan, turn, first, block, lanes, share, items_each, rows_each, columns)
        done = 0
        if first <= last:
            load_queries(
                Q, Plan, items + shares + 1, q_rank, q_rope, bounds_sh, turn[ROW], turn[ROWS_END], heads, thread
            )  # fmt: skip
        for w in T.serial(last - first + 1):
            count = turn[COUNT]
            T.fill(out_left, 0)
            T.fill(out_right, 0)
            T.fill(sums, 0)
            highest_sh[g, t % columns] = LOWEST
            T.ptx_wait_group(0)
            T.fence_proxy_async()
            T.sync_threads(10, 256)
            for i in T.serial(T.ceildiv(count - g, 2)):
                begin = turn[BEGIN] + (2 * i + g) * BLOCK
                number = done + 2 * i + g
                for k in list(range(PIECES)):
                    T.barrier_wait(full[g * PIECES + k], used & 1)
                    T.call_extern(
                        "handle",
                        f"mla_read_codes<{k * 4 // PIECES}, {(k + 1) * 4 // PIECES}>",
                        T.access_ptr(codes[0], "w", 64),
                        T.access_ptr(scales[0], "w", 16),
                        T.address_of(kv_rope[g, 0, 0]),
                        T.address_of(staged[0, 0]),
                    )
                    if k == 0:
                        if t < BLOCK:
                            valid[g, t] = there[t]
                        hole = holes[0]
                    T.barrier_arrive(free[k])
                T.call_extern(
                    "handle",
                    "mla_store_values",
                    T.address_of(kv_rank[g, 0, 0]),
                    T.access_ptr(codes[0], "r", 64),
                    T.access_ptr(scales[0], "r", 16),
                )
                T.fence_proxy_async()
                T.sync_threads(8 + g, 128)  # every thread's fence comes before any thread's matrix product
                T.wgmma_gemm(kv_rank[g, :, :], q_rank, score, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(kv_rope[g, :, :], q_rope, score, transpose_B=True)
                T.wait_wgmma(0)
                if (hole == number + 1) | (begin < turn[SEEN_BEGIN]) | (begin + BLOCK > turn[SEEN_END]):
                    for j, n in T.Parallel(BLOCK, columns):
                        score[j, n] = T.if_then_else(
                            (valid[g, j] != 0)
                            & (begin + j >= bounds_sh[0, n])
                            & (begin + j < bounds_sh[1, n]),
                            score[j, n],
                            -T.infinity("float32"),
                        )
                softmax(
                    g, t, used, scale, round_sh, p_sh, factor_sh, highest_sh, flag_sh, score, p, sums, out_left,
                    out_right,
                )  # fmt: skip
                T.wgmma_gemm(
                    kv_rank[g, :, :half],
                    p_sh[2 * g + used % 2, :, :],
                    out_left,
                    transpose_A=True,
                    transpose_B=True,
                )
                T.wgmma_gemm(
                    kv_rank[g, :, half:],
                    p_sh[2 * g + used % 2, :, :],
                    out_right,
                    transpose_A=True,
                    transpose_B=True,
                )
                for j, n in T.Parallel(BLOCK, columns):
                    sums[j, n] = sums[j, n] + p[j, n]
                T.wait_wgmma(0)
                used = used + 1
                T.sync_threads(8 + g, 128)  # all have read the block: the next one takes its place
            done = done + count
            if w < last - first:
                turn_at(Plan, ahead, first + w + 1, block, lanes, share, items_each, rows_each, columns)
            reduce_sums(g, t, round_sh, total_sh, sums)
            T.sync_threads(10, 256)
            if w < last - first:  # both have multiplied with this item's queries
                load_queries(
                    Q, Plan, items + shares + 1, q_rank, q_rope, bounds_sh, ahead[ROW], ahead[ROWS_END], heads, thread
                )  # fmt: skip
            if g == 0:
                weigh(t, turn, heads, has_sink, Sink, highest_sh, total_sh, both_sh, Lse, Part)
                merge(g, out_left, out_right, turn, round_sh, both_sh, Out, Part)
            else:
                merge(g, out_right, out_left, turn, round_sh, both_sh, Out, Part)
            for k in T.unroll(TURN):
                turn[k] = ahead[k]

    @T.prim_func
    def dense_mla_few_fp8_rows(
        Q: T.Tensor([rows, rank + rope], dtype),
        KV: T.Tensor([tokens, FP8_ROW], "float8_e4m3fn"),
        Scales: T.Tensor([tokens, FP8_ROW // 4], "float32"),
        Rope: T.Tensor([tokens, FP8_ROW // 2], dtype),
        Table: T.Tensor([requests, entries], "int32"),
        Plan: T.Tensor([lines, PLAN_COLUMNS], "int32"),
        paged: T.int32,
        page: T.int32,
        items: T.int32,
        shares: T.int32,
        items_each: T.int32,
        lanes: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([rows, rank], dtype),
        Lse: T.Tensor([rows], "float32"),
        Part: T.Tensor([slots, columns, rank + 4], "float32"),
    ):
        with T.Kernel(shares * lanes, threads=384, prelude=FUNCTIONS) as block:
            q_rank = T.alloc_shared([columns, rank], dtype)
            q_rope = T.alloc_shared([columns, rope], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, rope], dtype)
            round_sh = T.alloc_shared([2, columns, stride], "float32")
            p_sh = T.alloc_shared([4, columns, BLOCK], dtype)
            bounds_sh = T.alloc_shared([2, columns], "int32", scope="shared")
            staged = T.alloc_shared([BLOCK, FP8_ROW], "float8_e4m3fn")
            there = T.alloc_shared([BLOCK], "int32", scope="shared")
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([1], "int32", scope="shared")
            full = T.alloc_barrier([256] * (2 * PIECES))
            free = T.alloc_barrier([128] * PIECES)
            flag_sh = T.alloc_shared([2, 2], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            factor_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            total_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            both_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            # Two of each, one a consumer: TileLang lays a fragment out for the threads that use it.
            score0 = T.alloc_fragment([BLOCK, columns], "float32")
            score1 = T.alloc_fragment([BLOCK, columns], "float32")
            p0 = T.alloc_fragment([BLOCK, columns], "float32")
            p1 = T.alloc_fragment([BLOCK, columns], "float32")
            sums0 = T.alloc_fragment([BLOCK, columns], "float32")
            sums1 = T.alloc_fragment([BLOCK, columns], "float32")
            left0 = T.alloc_fragment([half, columns], "float32")
            left1 = T.alloc_fragment([half, columns], "float32")
            right0 = T.alloc_fragment([half, columns], "float32")
            right1 = T.alloc_fragment([half, columns], "float32")
            source = T.alloc_local([4], "int32")
            codes = T.alloc_local([64], "uint32")
            scales = T.alloc_local([16], "uint32")
            turn = T.alloc_local([TURN], "int32")
            ahead = T.alloc_local([TURN], "int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            share = T.alloc_var("int32")

            thread = T.get_thread_binding()
            rows_each = T.truncdiv(rows, requests)
            pages = T.truncdiv(tokens, page)
            T.pdl_trigger()
            T.pdl_sync()
            share = Plan[items + shares, 0]
            first = Plan[items + T.truncdiv(block, lanes), 0]
            last = Plan[items + T.truncdiv(block, lanes), 1]
            if thread < 128:
                T.set_max_nreg(216, 1)
                consume(
                    0, thread, block, first, last, share, items, shares, items_each, lanes, rows_each, heads, has_sink,
                    scale, Q, Plan, Sink, Out, Lse, Part, q_rank, q_rope, kv_rank, kv_rope, round_sh, p_sh, staged,
                    there, full, free, bounds_sh, valid, holes, flag_sh, highest_sh, factor_sh, total_sh, both_sh, turn,
                    ahead, codes, scales, score0, p0, sums0, left0, right0,
                )  # fmt: skip
            elif thread < 256:
                T.set_max_nreg(216, 1)
                consume(
                    1, thread, block, first, last, share, items, shares, items_each, lanes, rows_each, heads, has_sink,
                    scale, Q, Plan, Sink, Out, Lse, Part, q_rank, q_rope, kv_rank, kv_rope, round_sh, p_sh, staged,
                    there, full, free, bounds_sh, valid, holes, flag_sh, highest_sh, factor_sh, total_sh, both_sh, turn,
                    ahead, codes, scales, score1, p1, sums1, left1, right1,
                )  # fmt: skip
            else:
                T.set_max_nreg(72, 0)
                fetch_rows(
                    thread - 256, block, first, last, share, items_each, lanes, rows_each, paged, page, pages, KV,
                    Table, Plan, staged, there, holes, full, free, turn, source,
                )  # fmt: skip

    return dense_mla_few_fp8_rows
