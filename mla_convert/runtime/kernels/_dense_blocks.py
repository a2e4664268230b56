"""What tiles of 64 rows need where no block of tokens crosses a page: blocks come by TMA, and hold what is there.

The program is in ``_dense_many_blocks``.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._dense import BEGIN, BLOCK, END, REQUEST, ROW, ROWS_END

AHEAD = 3  # blocks whose table entries are held before they are needed

HELPERS = """
// A 64 x 64 accumulator rounded to 16 bits, 32 values a thread, to tile ``at``: 64 rows of 128 bytes, swizzled.
__device__ __forceinline__ void mla_store_tile(void* tiles, int at, const void* values, int thread) {
  const unsigned* v = reinterpret_cast<const unsigned*>(values);
  int row = thread / 32 * 16 + thread % 16, side = thread / 16 % 2;
  unsigned base = (unsigned)__cvta_generic_to_shared(tiles) + at * 8192 + row * 128;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     base + (((k * 2 + side) ^ (row & 7)) << 4)),
                 "r"(v[k * 4]), "r"(v[k * 4 + 1]), "r"(v[k * 4 + 2]), "r"(v[k * 4 + 3])
                 : "memory");
}

// Zeros for the tokens of ``count`` tiles from tile ``at`` on that no row sees: the first ``there`` tokens are in
// memory, token j is number first + j, and row h sees [bounds[h], bounds[64 + h]).
__device__ __forceinline__ void mla_clear_unseen(void* tiles, int at, int count, const int* bounds, int first,
                                                 int there, int thread) {
  int j = thread / 2, token = first + j;
  int seen = 0;
  if (j < there)
    for (int h = thread % 2; h < 64; h += 2) seen |= bounds[h] <= token && token < bounds[64 + h];
  seen |= __shfl_xor_sync(0xffffffff, seen, 1);
  unsigned base = (unsigned)__cvta_generic_to_shared(tiles) + at * 8192 + j * 128 + thread % 2 * 64;
  if (!seen)
    for (int t = 0; t < count; ++t)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(base + t * 8192 + k * 16), "r"(0) : "memory");
}

__device__ __forceinline__ void mla_set(void* numbers, int at, int value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(numbers) + at * 4), "r"(value)
               : "memory");
}

__device__ __forceinline__ void mla_prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
"""


@T.macro
def load_queries(Q, Plan, turn, q_rank, q_rope, bounds_sh, spans_at, heads, q_full, thread, rank, rope):
    """Producer: ask for a tile's rows and note the spans they see. Rows that do not exist see nothing.

    Where the request has no more rows, those of the next one fill the tile; rows do not meet each other.
    """
    row = turn[ROW]
    for u in list(range(rank // 64)):  # a list: each box has a place of its own
        T.tma_copy(
            Q[row : row + 64, u * 64 : u * 64 + 64],
            q_rank[:, u * 64 : u * 64 + 64],
            barrier=q_full[0],
            leader_scope_threads=32,
        )
    for u in list(range(rope // 64)):
        T.tma_copy(
            Q[row : row + 64, rank + u * 64 : rank + u * 64 + 64],
            q_rope[:, u * 64 : u * 64 + 64],
            barrier=q_full[0],
            leader_scope_threads=32,
        )
    for u in T.unroll(2):
        for side in T.unroll(2):
            bounds_sh[side, u * 32 + thread] = 0
            if row + u * 32 + thread < turn[ROWS_END]:
                bounds_sh[side, u * 32 + thread] = Plan[
                    spans_at + T.truncdiv(row + u * 32 + thread, heads), side
                ]
    T.barrier_arrive(q_full[0])


@T.macro
def page_at(Table, paged, turn, page, k):
    """Producer: the table entry of block k, -1 behind the end."""
    entry = T.alloc_var("int32")
    entry = -1
    if turn[BEGIN] + k * BLOCK < turn[END]:
        entry = turn[REQUEST]
        if paged != 0:
            entry = Table[turn[REQUEST], T.truncdiv(turn[BEGIN] + k * BLOCK, page)]
    return entry


@T.macro
def load_columns(KV, row, kv_rank, kv_rope, s, full, first, last, rank, width, thread):
    """Producer: ask for the columns [first, last) of the 64 tokens from ``row`` on, 64 columns a barrier."""
    # Requests stand together, since TileLang puts a fence before each group of them.
    for u in list(range(first // 64, min(last, rank) // 64)):
        T.tma_copy(
            KV[row : row + BLOCK, u * 64 : u * 64 + 64],
            kv_rank[s, :, u * 64 : u * 64 + 64],
            barrier=full[s * (width // 64) + u],
            leader_scope_threads=32,
        )
    for u in list(range(rank // 64, last // 64)):
        T.tma_copy(
            KV[row : row + BLOCK, u * 64 : u * 64 + 64],
            kv_rope[s, :, u * 64 - rank : u * 64 - rank + 64],
            barrier=full[s * (width // 64) + u],
            leader_scope_threads=32,
        )
    if thread == 0:
        for u in list(range(first // 64, last // 64)):
            T.barrier_arrive(full[s * (width // 64) + u])


@T.macro
def fetch_blocks(
    KV, Table, paged, page, pages, tokens, turn, ahead, kv_rank, kv_rope, there, full, free, used0, used1, left, rank,
    width, lane, lanes, count, thread,
):  # fmt: skip
    """Producer, one warp: fetch the blocks of a thread block's part of an item.

    ``ahead`` holds the table entries of this block and the next ones, so that none is waited for; the last of them is
    brought into the L2 cache, each of the ``lanes`` that walk these tokens asking for its rows. A block is fetched
    whole, and ``there`` says how many of its tokens belong to the request: none of a page that is not there.
    """
    far = T.alloc_var("int32")
    row = T.alloc_var("int32")
    T.fence_proxy_async()  # or TileLang puts fences into the loop, for what was stored before
    for i in T.serial(count):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        begin = turn[BEGIN] + i * BLOCK
        known = (ahead[0] >= 0) & (ahead[0] < pages)
        row = T.if_then_else(known, ahead[0] * page + T.truncmod(begin, page), 0)
        T.barrier_wait(free[s * 2], phase ^ 1)
        load_columns(KV, row, kv_rank, kv_rope, s, full, 0, left, rank, width, thread)
        T.barrier_wait(free[s * 2 + 1], phase ^ 1)
        if thread == 0:
            T.call_extern(
                "void", "mla_set", there.data, s, T.if_then_else(known, T.min(turn[END] - begin, BLOCK), 0)
            )
        load_columns(KV, row, kv_rank, kv_rope, s, full, left, width, rank, width, thread)
        if (ahead[AHEAD - 1] >= 0) & (ahead[AHEAD - 1] < pages):
            far = ahead[AHEAD - 1] * page + T.truncmod(begin + (AHEAD - 1) * BLOCK, page)
            for r in T.unroll(2):
                row = T.min(far + r * 32 + thread, tokens - 1)
                if T.truncmod(r * 32 + thread, lanes) == lane:
                    for u in T.unroll(width // 64):
                        T.call_extern("void", "mla_prefetch", T.address_of(KV[row, u * 64]))
        for k in T.unroll(AHEAD - 1):
            ahead[k] = ahead[k + 1]
        ahead[AHEAD - 1] = page_at(Table, paged, turn, page, i + AHEAD)
