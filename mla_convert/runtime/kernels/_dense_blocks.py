"""What tiles of 64 rows need where no block of tokens crosses a page: blocks come by TMA, and hold what is there.

The program is in ``_dense_many_blocks``.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._dense import BEGIN, BLOCK, COUNT, END, REQUEST, ROW, ROWS_END, TURN

AHEAD = 3  # blocks whose table entries are held before they are needed


HELPERS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// 64 rows of ``columns`` values each to memory, rounded to 16 bits. Four threads that share a row exchange their pairs,
// so that each writes 16 bytes.
__device__ __forceinline__ void mla_store_rows(const float* out, int columns, void* to, int stride, int rows,
                                               int bfloat, int thread) {
  int q = thread % 4, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int g = 0; g < columns / 32; ++g)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float2 pair = make_float2(out[(g * 4 + k) * 4 + r * 2], out[(g * 4 + k) * 4 + r * 2 + 1]);
        if (bfloat) {
          __nv_bfloat162 both = __float22bfloat162_rn(pair);
          v[k] = *reinterpret_cast<unsigned*>(&both);
        } else {
          __half2 both = __float22half2_rn(pair);
          v[k] = *reinterpret_cast<unsigned*>(&both);
        }
      }
      unsigned a = __shfl_xor_sync(0xffffffff, q & 1 ? v[0] : v[1], 1);
      unsigned c = __shfl_xor_sync(0xffffffff, q & 1 ? v[2] : v[3], 1);
      if (q & 1) v[0] = a, v[2] = c;
      else v[1] = a, v[3] = c;
      a = __shfl_xor_sync(0xffffffff, q & 2 ? v[0] : v[2], 2);
      c = __shfl_xor_sync(0xffffffff, q & 2 ? v[1] : v[3], 2);
      if (q & 2) v[0] = a, v[1] = c;
      else v[2] = a, v[3] = c;
      if (row + r * 8 < rows)
        reinterpret_cast<uint4*>(to)[((long long)(row + r * 8) * stride + (g * 4 + q) * 8) / 8] =
            make_uint4(v[0], v[1], v[2], v[3]);
    }
}

// A thread has two rows of a 64 x 64 accumulator: values 0 and 1 of every four are the first's, 2 and 3 the second's.

// Raise the reference of a row's exponentials to its largest score if that is more than ``slack`` above it; ``factor``
// is what older results shrink by. Nonzero if any row of the warp has moved: seldom, and else no lane has to wait.
__device__ __forceinline__ int mla_raise(const float* score, float* reference, float* factor, float scale,
                                         float slack) {
  float top[2] = {score[0], score[2]};
#pragma unroll
  for (int i = 0; i < 32; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], score[i]);
  factor[0] = factor[1] = 1.0f;
  bool over = (top[0] - reference[0]) * scale > slack || (top[1] - reference[1]) * scale > slack;
  int moved = __any_sync(0xffffffff, over);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 2));
      if ((top[r] - reference[r]) * scale > slack) {
        factor[r] = exp2f((reference[r] - top[r]) * scale);
        reference[r] = top[r];
      }
    }
  }
  return moved;
}

// Leave the references for the other consumer.
__device__ __forceinline__ void mla_leave(void* references, int at, const float* reference, int thread) {
  unsigned to = (unsigned)__cvta_generic_to_shared(references) + (at + thread / 32 * 16 + thread % 32 / 4) * 4;
  if (thread % 4 == 0)
    asm volatile("st.shared.f32 [%0], %1; st.shared.f32 [%0 + 32], %2;" ::"r"(to), "f"(reference[0]), "f"(reference[1])
                 : "memory");
}

// Take over the references that the other consumer left, with what a thread has summed up of its rows.
__device__ __forceinline__ int mla_follow(const void* references, int at, float* reference, float* factor, float* total,
                                          float scale, int thread) {
  const float* other = reinterpret_cast<const float*>(references) + at + thread / 32 * 16 + thread % 32 / 4;
  float now[2] = {other[0], other[8]};
  factor[0] = factor[1] = 1.0f;
  int moved = __any_sync(0xffffffff, now[0] != reference[0] || now[1] != reference[1]);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2f((reference[r] - now[r]) * scale);
      total[r] *= factor[r];
      reference[r] = now[r];
    }
  }
  return moved;
}

// Add a block's probabilities to what this thread has summed up of its rows.
__device__ __forceinline__ void mla_add(const float* score, const float* factor, float* total) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i / 2 % 2] += score[i];
  total[0] = total[0] * factor[0] + sum[0];
  total[1] = total[1] * factor[1] + sum[1];
}

// The sums of whole rows from those of their four threads.
__device__ __forceinline__ void mla_sum_rows(float* total) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(0xffffffff, total[r], 1);
    total[r] += __shfl_xor_sync(0xffffffff, total[r], 2);
  }
}

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
__device__ __forceinline__ void mla_clear_unseen(void* tiles, int at, int count, const int* bounds, int which,
                                                 int first, int there, int thread) {
  bounds += which;
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

// Bring neighbouring rows into the L2 cache.
__device__ __forceinline__ void mla_prefetch(const void* first, int rows, int row_bytes) {
  if (rows > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(rows * row_bytes) : "memory");
}
"""


@T.macro
def leave_turn(Table, paged, page, pages, turn, w, turn_sh, thread):
    """Producer, one warp: leave the turn for the consumers, and whether a page of it is not there."""
    missing = T.alloc_var("int32")
    missing = 0
    if paged != 0:
        for k in T.serial(T.ceildiv(turn[COUNT], 32)):
            if k * 32 + thread < turn[COUNT]:
                entry = Table[turn[REQUEST], T.truncdiv(turn[BEGIN] + (k * 32 + thread) * BLOCK, page)]
                if (entry < 0) | (entry >= pages):
                    missing = 1
    missing = T.any_sync(missing)
    if thread == 0:
        for k in T.unroll(TURN):
            turn_sh[w & 1, k] = turn[k]
        turn_sh[w & 1, TURN] = missing


@T.macro
def load_queries(
    Q, Plan, Table, paged, page, pages, turn, w, turn_sh, q_rank, q_rope, bounds_sh, spans_at, heads, q_full, thread,
    rank, rope,
):  # fmt: skip
    """Producer, one warp: ask for a tile's rows, leave the turn and note the spans they see. Rows that do not exist
    see nothing.

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
    leave_turn(Table, paged, page, pages, turn, w, turn_sh, thread)
    for u in T.unroll(2):
        for side in T.unroll(2):
            bounds_sh[w & 1, side, u * 32 + thread] = 0
            if row + u * 32 + thread < turn[ROWS_END]:
                bounds_sh[w & 1, side, u * 32 + thread] = Plan[
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
def load_pieces(KV, row, kv_rank, kv_rope, s, full, pieces, rank, width, thread):
    """Producer: ask for pieces of 64 columns of the 64 tokens from ``row`` on, each with a barrier of its own."""
    # Requests stand together, since TileLang puts a fence before each group of them.
    for u in [u for u in pieces if u < rank // 64]:
        T.tma_copy(
            KV[row : row + BLOCK, u * 64 : u * 64 + 64],
            kv_rank[s, :, u * 64 : u * 64 + 64],
            barrier=full[s * (width // 64) + u],
            leader_scope_threads=32,
        )
    for u in [u for u in pieces if u >= rank // 64]:
        T.tma_copy(
            KV[row : row + BLOCK, u * 64 : u * 64 + 64],
            kv_rope[s, :, u * 64 - rank : u * 64 - rank + 64],
            barrier=full[s * (width // 64) + u],
            leader_scope_threads=32,
        )
    if thread == 0:
        for u in list(pieces):
            T.barrier_arrive(full[s * (width // 64) + u])


@T.macro
def fetch_blocks(
    KV, Table, paged, page, pages, tokens, turn, ahead, kv_rank, kv_rope, there, full, free, used0, used1, side, left,
    rank, width, lane, lanes, prefetch, thread,
):  # fmt: skip
    """Producer, one warp for each ``side``: fetch the blocks of a thread block's part of an item.

    Side 0 is the left half of the values and the rope dims, whose place probabilities may take that the same consumer
    reads; side 1 is the right half. ``ahead`` holds the table entries of this block and the next ones, so that none is
    waited for; with ``prefetch``, side 0 brings the last of them into the L2 cache, each of the ``lanes`` that walk
    these tokens asking for its rows. A block is fetched whole, and ``there`` says how many of its tokens belong to the
    request: none of a page that is not there. It has two entries a buffer, since the other consumer may still be
    reading one.
    """
    far = T.alloc_var("int32")
    row = T.alloc_var("int32")
    middle = [*range(left // 64, rank // 64)]
    T.fence_proxy_async()  # or TileLang puts fences into the loop, for what was stored before
    for i in T.serial(turn[COUNT]):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        begin = turn[BEGIN] + i * BLOCK
        known = (ahead[0] >= 0) & (ahead[0] < pages)
        row = T.if_then_else(known, ahead[0] * page + T.truncmod(begin, page), 0)
        T.barrier_wait(free[s * 2 + side], phase ^ 1)
        if side == 1:
            load_pieces(KV, row, kv_rank, kv_rope, s, full, middle, rank, width, thread)
        else:
            if thread == 0:
                T.call_extern(
                    "void", "mla_set", there.data, s * 2 + phase,
                    T.if_then_else(known, T.min(turn[END] - begin, BLOCK), 0),
                )  # fmt: skip
            load_pieces(
                KV, row, kv_rank, kv_rope, s, full, [u for u in range(width // 64) if u not in middle], rank, width,
                thread,
            )  # fmt: skip
            if (thread == 0) & (prefetch != 0) & (ahead[AHEAD - 1] >= 0) & (ahead[AHEAD - 1] < pages):
                far = ahead[AHEAD - 1] * page + T.truncmod(begin + (AHEAD - 1) * BLOCK, page)
                row = far + T.truncdiv(lane * BLOCK, lanes)
                far = T.min(far + T.truncdiv(lane * BLOCK + BLOCK, lanes), tokens)
                T.call_extern("void", "mla_prefetch", T.address_of(KV[row, 0]), far - row, width * 2)
        for k in T.unroll(AHEAD - 1):
            ahead[k] = ahead[k + 1]
        ahead[AHEAD - 1] = page_at(Table, paged, turn, page, i + AHEAD)
