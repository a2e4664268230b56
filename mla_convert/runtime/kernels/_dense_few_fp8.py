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
    FP8_ROPE,
    FP8_ROW,
    LOWEST,
    PLAN_COLUMNS,
    REQUEST,
    ROW,
    ROWS_END,
    SEEN_BEGIN,
    SEEN_END,
    TURN,
    ask,
    locate,
    turn_at,
)
from mla_convert.runtime.kernels._dense_few import steps

RANK, ROPE = 512, 64
MOST_COLUMNS = 16

# Eight threads have a row of codes, 16 of each 128 a thread. The eight threads of a store write 128 bytes of one row
# to two panels of 64 columns: those of the second panel take their two pieces the other way round, so that a store
# meets every bank of shared memory once.
FUNCTIONS = """
#include <cuda_fp8.h>

__device__ __forceinline__ uint4 mla_stream(const unsigned char* from, bool there) {
  uint4 got = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(got.x), "+r"(got.y), "+r"(got.z), "+r"(got.w)
      : "l"(from), "r"((int)there));
  return got;
}

// The thread's codes and scales of four rows of the cache; zeros for a row that is not there (-1).
__device__ __forceinline__ void mla_load_codes(unsigned* codes, unsigned* scales, const void* cache,
                                               const int* source) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const unsigned char* row = (const unsigned char*)cache + (long long)max(source[r], 0) * 656;
    const bool there = source[r] >= 0;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint4 got = mla_stream(row + u * 128 + (threadIdx.x & 7) * 16, there);
      codes[r * 16 + u * 4] = got.x, codes[r * 16 + u * 4 + 1] = got.y;
      codes[r * 16 + u * 4 + 2] = got.z, codes[r * 16 + u * 4 + 3] = got.w;
    }
    const uint4 got = mla_stream(row + 512, there);
    scales[r * 4] = got.x, scales[r * 4 + 1] = got.y, scales[r * 4 + 2] = got.z, scales[r * 4 + 3] = got.w;
  }
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


def few_fp8_rows(columns: int, early: bool = False, functions: str = FUNCTIONS) -> Any:
    """As ``_dense_few.few_rows``, for 8 or 16 ``columns``, without a warpgroup that fetches.

    A consumer fetches for itself. The codes of its next block are on their way to its registers while it multiplies
    this one; then it stores them to its buffer as bfloat16. Memory so has a block of each consumer in flight, nobody
    waits for another, and while one consumer converts, the other uses the tensor cores. Results are those of
    ``few_rows``.
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
    def load(KV, Rope, source, codes, scales, rope_sh, buffer, t):
        """Ask for a block's rows: values into registers, rotary dims into shared memory."""
        T.call_extern(
            "handle",
            "mla_load_codes",
            T.access_ptr(codes[0], "w", 64),
            T.access_ptr(scales[0], "w", 16),
            T.address_of(KV[0, 0]),
            T.access_ptr(source[0], "r", 4),
        )
        for r in T.unroll(4):
            T.ptx_cp_async(
                T.access_ptr(rope_sh[buffer, r * 16 + t // 8, t % 8 * 8], "w", 8),
                T.access_ptr(Rope[T.max(source[r], 0), FP8_ROPE + t % 8 * 8], "r", 8),
                8,
                source[r] >= 0,
            )
        T.ptx_commit_group()

    @T.macro
    def consume(
        g, thread, block, first, last, share, items, shares, items_each, lanes, rows_each, paged, page, pages, heads,
        has_sink, scale, Q, KV, Rope, Table, Plan, Sink, Out, Lse, Part, q_rank, q_rope, kv_rank, kv_rope, round_sh,
        p_sh, bounds_sh, valid, holes, flag_sh, highest_sh, factor_sh, total_sh, both_sh, turn, ahead, entry, source,
        codes, scales, score, p, sums, out_left, out_right,
    ):  # fmt: skip
        """A consumer's items; ``used`` counts its blocks."""
        used = T.alloc_var("int32")
        begin = T.alloc_var("int32")
        count = T.alloc_var("int32")
        t = thread - 128 * g
        used = 0
        flag_sh[g, t % 2] = 0  # what an earlier thread block left there could look raised
        holes[g] = 0
        turn_at(Plan, turn, first, block, lanes, share, items_each, rows_each, columns)
        begin = turn[BEGIN] + g * BLOCK
        if first <= last:
            ask(Table, paged, entry, turn[REQUEST], page, begin, turn[END], t)
            locate(entry, source, page, pages, begin, t)
            ask(Table, paged, entry, turn[REQUEST], page, begin + 2 * BLOCK, turn[END], t)
            load(KV, Rope, source, codes, scales, kv_rope, 2 * g, t)
            load_queries(
                Q, Plan, items + shares + 1, q_rank, q_rope, bounds_sh, turn[ROW], turn[ROWS_END], heads, thread
            )
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
                T.call_extern(
                    "handle",
                    "mla_store_values",
                    T.address_of(kv_rank[g, 0, 0]),
                    T.access_ptr(codes[0], "r", 64),
                    T.access_ptr(scales[0], "r", 16),
                )
                if t % 8 == 0:
                    for r in T.unroll(4):
                        valid[g, r * 16 + t // 8] = T.if_then_else(source[r] >= 0, 1, 0)
                        if source[r] < 0:
                            holes[g] = used + 1
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.sync_threads(8 + g, 128)  # every thread's fence comes before any thread's matrix product
                if 2 * i + g + 2 < count:
                    locate(entry, source, page, pages, begin + 2 * BLOCK, t)
                    ask(Table, paged, entry, turn[REQUEST], page, begin + 4 * BLOCK, turn[END], t)
                    load(KV, Rope, source, codes, scales, kv_rope, 2 * g + (used + 1) % 2, t)
                T.wgmma_gemm(kv_rank[g, :, :], q_rank, score, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(kv_rope[2 * g + used % 2, :, :], q_rope, score, transpose_B=True)
                T.wait_wgmma(0)
                if (holes[g] == used + 1) | (begin < turn[SEEN_BEGIN]) | (begin + BLOCK > turn[SEEN_END]):
                    for j, n in T.Parallel(BLOCK, columns):
                        score[j, n] = T.if_then_else(
                            (valid[g, j] != 0) & (begin + j >= bounds_sh[0, n]) & (begin + j < bounds_sh[1, n]),
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
            if w < last - first:
                turn_at(Plan, ahead, first + w + 1, block, lanes, share, items_each, rows_each, columns)
                begin = ahead[BEGIN] + g * BLOCK
                ask(Table, paged, entry, ahead[REQUEST], page, begin, ahead[END], t)
                locate(entry, source, page, pages, begin, t)
                ask(Table, paged, entry, ahead[REQUEST], page, begin + 2 * BLOCK, ahead[END], t)
                load(KV, Rope, source, codes, scales, kv_rope, 2 * g + used % 2, t)
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
        with T.Kernel(shares * lanes, threads=256, prelude=functions) as block:
            q_rank = T.alloc_shared([columns, rank], dtype)
            q_rope = T.alloc_shared([columns, rope], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([4, BLOCK, rope], dtype)
            round_sh = T.alloc_shared([2, columns, stride], "float32")
            p_sh = T.alloc_shared([4, columns, BLOCK], dtype)
            bounds_sh = T.alloc_shared([2, columns], "int32", scope="shared")
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2], "int32", scope="shared")
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
            entry = T.alloc_local([4], "int32")
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
            if early:
                T.pdl_trigger()
                T.pdl_sync()
            share = Plan[items + shares, 0]
            first = Plan[items + T.truncdiv(block, lanes), 0]
            last = Plan[items + T.truncdiv(block, lanes), 1]
            # Nobody needs registers of another's: without this, the addresses of products are not known to be a warp's.
            if thread < 128:
                T.set_max_nreg(248, 0)
                consume(
                    0, thread, block, first, last, share, items, shares, items_each, lanes, rows_each, paged, page,
                    pages, heads, has_sink, scale, Q, KV, Rope, Table, Plan, Sink, Out, Lse, Part, q_rank, q_rope,
                    kv_rank, kv_rope, round_sh, p_sh, bounds_sh, valid, holes, flag_sh, highest_sh, factor_sh,
                    total_sh, both_sh, turn, ahead, entry, source, codes, scales, score0, p0, sums0, left0, right0,
                )  # fmt: skip
            else:
                T.set_max_nreg(248, 0)
                consume(
                    1, thread, block, first, last, share, items, shares, items_each, lanes, rows_each, paged, page,
                    pages, heads, has_sink, scale, Q, KV, Rope, Table, Plan, Sink, Out, Lse, Part, q_rank, q_rope,
                    kv_rank, kv_rope, round_sh, p_sh, bounds_sh, valid, holes, flag_sh, highest_sh, factor_sh,
                    total_sh, both_sh, turn, ahead, entry, source, codes, scales, score1, p1, sums1, left1, right1,
                )  # fmt: skip

    return dense_mla_few_fp8_rows
