"""What fetches the tokens of tiles of 64 rows that lie anywhere or are FP8 rows.

The program is in ``_dense_many_gather``, FP8 rows are those of ``kv_cache``.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._dense import BEGIN, BLOCK, COUNT, END, REQUEST

# A warp has 16 rows of a block, in four groups of four: eight threads a row, 16 codes of each 128 a thread. As the
# codes of a group have been stored, those that the thread needs next are asked for, into the same registers: nothing
# waits for them but their use. A fence between proxies would, so the consumers have that.
#
# In a pair of thread blocks (a cluster) each converts two of the groups, and stores them to the memory of both.
FUNCTIONS = """
#include <cuda_fp8.h>

__device__ __forceinline__ unsigned mla_shared(const void* address) {
  return (unsigned)__cvta_generic_to_shared(address);
}

// Of the last 32 entries before end, this lane's; where begin is nearer, those from there on.
__device__ __forceinline__ int mla_tail(const int* list, int begin, int end) {
  const int at = end - 32 + (threadIdx.x & 31);
  return at >= begin && at < end ? list[at] : -1;
}

// 1 + the position of the last entry, from begin to before end, that is a row of the cache, or begin. For a whole warp,
// which has asked for the last ones.
__device__ __forceinline__ int mla_list_end(const int* list, int tail, int begin, int end, int rows) {
  unsigned valid = __ballot_sync(0xffffffffu, tail >= 0 && tail < rows);
  while (!valid && end > begin) {
    end -= 32;
    const int entry = mla_tail(list, begin, end);
    valid = __ballot_sync(0xffffffffu, entry >= 0 && entry < rows);
  }
  return valid ? end - __clz(valid) : begin;
}

// The same place in the shared memory of thread block ``rank`` of the cluster.
__device__ __forceinline__ unsigned mla_there(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void mla_meet() {  // of all threads of the cluster
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void mla_arrive_there(void* barriers, int k, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mla_there(mla_shared(barriers) + k * 8, rank))
               : "memory");
}

__device__ __forceinline__ void mla_arrive_expecting(void* barriers, int k, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mla_shared(barriers) + k * 8), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ int mla_row(int group) {
  return group * 16 + (threadIdx.x >> 5 & 3) * 4 + (threadIdx.x >> 3 & 3);
}

// The row that group r of this thread's four is, as its warp has found it.
__device__ __forceinline__ int mla_source(int place, int r) {
  return __shfl_sync(0xffffffff, place, (threadIdx.x >> 3 & 3) * 4 + r);
}

// Codes and scales of one half (256 values) of a row; zeros for a row that is not there (-1).
__device__ __forceinline__ void mla_ask_codes(unsigned* codes, float* scales, const void* cache, int source,
                                              int half) {
  const unsigned char* row = (const unsigned char*)cache + (long long)max(source, 0) * 656;
  const unsigned char* from = row + half * 256 + (threadIdx.x & 7) * 16;
#pragma unroll
  for (int u = 0; u < 2; ++u)
    asm volatile(
        "{\\n.reg .pred p;\\nsetp.ge.s32 p, %5, 0;\\n"
        "mov.b32 %0, 0;\\nmov.b32 %1, 0;\\nmov.b32 %2, 0;\\nmov.b32 %3, 0;\\n"
        "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\\n}"
        : "=&r"(codes[u * 4]), "=&r"(codes[u * 4 + 1]), "=&r"(codes[u * 4 + 2]), "=&r"(codes[u * 4 + 3])
        : "l"(from + u * 128), "r"(source));
  asm volatile("{\\n.reg .pred p;\\nsetp.ge.s32 p, %3, 0;\\nmov.b32 %0, 0;\\nmov.b32 %1, 0;\\n"
               "@p ld.global.nc.v2.f32 {%0, %1}, [%2];\\n}"
               : "=&f"(scales[0]), "=&f"(scales[1])
               : "l"(row + 512 + half * 8), "r"(source));
}

// The first codes of an item: half of four rows or, in a pair, two whole rows.
template <bool kPair>
__device__ __forceinline__ void mla_ask_first(unsigned* codes, float* scales, const void* cache, int place, int rank) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int source = mla_source(place, kPair ? rank * 2 + k % 2 : k);
    mla_ask_codes(codes + k * 8, scales + k * 2, cache, source, kPair ? k / 2 : 0);
  }
}

__device__ __forceinline__ unsigned mla_scale(unsigned codes, float scale) {
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&half));
  const __nv_bfloat162 scaled = __floats2bfloat162_rn(wide.x * scale, wide.y * scale);
  return *reinterpret_cast<const unsigned*>(&scaled);
}

// Code times scale, rounded, of half kHalf of this thread's rows to the panels in shared memory, each 64 rows of 128
// bytes, swizzled; then ask for what follows: the other half of row ``next`` or, in a pair, the same half of it. Eight
// threads write 128 bytes of one row to two panels: those of the second have their two pieces the other way round, so
// that a store meets every bank once.
template <int kHalf, bool kPair>
__device__ __forceinline__ void mla_store_half(void* panels, int s, unsigned* codes, float* scales, const void* cache,
                                               int next, int rank, void* full) {
  const int column = threadIdx.x & 7;
  const bool second = column >= 4;
  const unsigned base = mla_shared(panels) + (s * 8 + kHalf * 4 + second) * 8192;
  const unsigned there = kPair ? mla_there(base, rank ^ 1) - base : 0;
  const unsigned barrier = kPair ? mla_there(mla_shared(full) + (s * 2 + kHalf) * 8, rank ^ 1) : 0;
  const int shift = kPair ? rank * 32 : 0;
#pragma unroll
  for (int r = 0; r < (kPair ? 2 : 4); ++r) {
    const int row = mla_row(r), k = kPair ? kHalf * 2 + r : r;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const unsigned line = base + u * 16384 + (shift + row) * 128;
      const unsigned* own = codes + k * 8 + u * 4;
      const float scale = scales[k * 2 + u];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const unsigned a = second ? own[2 - 2 * v] : own[2 * v], b = second ? own[3 - 2 * v] : own[2 * v + 1];
        const int piece = ((column & 3) * 2 + (v ^ (int)second)) ^ (row & 7);
        const unsigned c = mla_scale(a, scale), d = mla_scale(a >> 16, scale), e = mla_scale(b, scale),
                       f = mla_scale(b >> 16, scale);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(line + piece * 16), "r"(c), "r"(d), "r"(e), "r"(f)
                     : "memory");
        if (kPair)
          asm volatile(
              "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                  line + piece * 16 + there),
              "r"(c), "r"(d), "r"(e), "r"(f), "r"(barrier)
              : "memory");
      }
    }
    const int source = mla_source(next, kPair ? rank * 2 + r : r);
    mla_ask_codes(codes + k * 8, scales + k * 2, cache, source, kPair ? kHalf : kHalf ^ 1);
  }
  __syncwarp();
}

// The rotary dims of four rows, as they are.
__device__ __forceinline__ void mla_copy_rope(void* panels, int s, const void* cache, int place) {
  const int column = threadIdx.x & 7;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = mla_row(r), source = mla_source(place, r);
    const unsigned to = mla_shared(panels) + s * 8192 + row * 128 + (column ^ (row & 7)) * 16;
    const unsigned char* from = (const unsigned char*)cache + (long long)max(source, 0) * 656 + 528 + column * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(source >= 0 ? 16 : 0)
                 : "memory");
  }
}

// Bring rows of a later block into the L2 cache: of ``step`` thread blocks that want them, each asks for some.
template <int kBytes>
__device__ __forceinline__ void mla_prefetch_rows(const void* cache, int place, int rank, int step) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int source = mla_source(place, r);
    const unsigned char* row = (const unsigned char*)cache + (long long)source * kBytes;
    if (source >= 0 && r * step / 4 == rank)
      for (int at = (threadIdx.x & 7) * 128; at < kBytes + (kBytes % 128 ? 128 : 0); at += 1024)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + min(at, kBytes - 1)));
  }
}
"""


@T.macro
def entry_at(Table, paged, turn, page, i, row):
    """Producer: the table entry of a row of block i, -1 behind the end."""
    entry = T.alloc_var("int32")
    entry = -1
    if turn[BEGIN] + i * BLOCK + row < turn[END]:
        entry = turn[REQUEST]
        if paged != 0:
            entry = Table[turn[REQUEST], T.truncdiv(turn[BEGIN] + i * BLOCK + row, page)]
    return entry


@T.macro
def copy_columns(KV, source, to, s, first, last, offset, thread):
    """Producer: ask for the columns [first, last) of four rows of a 16-bit cache; zeros where one is not there."""
    for r in T.unroll(4):
        for u in T.unroll(T.ceildiv(last - first, 64)):
            T.ptx_cp_async(
                T.access_ptr(to[s, r * 16 + thread // 8, first - offset + u * 64 + thread % 8 * 8], "w", 8),
                T.access_ptr(KV[T.max(source[r], 0), first + u * 64 + thread % 8 * 8], "r", 8),
                8,
                source[r] >= 0,
            )


PLACE, LATER, ENTRY, LOOKED_UP = range(4)
"""What lane 4 * i + r of a warp has found for row i of group r: where that row of this block is and of the next one,
-1 for one that is not there, and the table entry of the one behind."""


@T.macro
def start_rows(KV, Table, paged, page, pages, turn, found, codes, scales, fp8, pair, side, thread):
    """Producer: look the first rows of an item up, and ask for their codes. A list ends behind its last valid entry."""
    tail = T.alloc_var("int32")
    tail = 0
    if (paged != 0) & (page == 1):
        tail = T.call_extern(
            "int32", "mla_tail", T.access_ptr(Table[turn[REQUEST], 0], "r", 1), turn[BEGIN], turn[END]
        )
    row = thread % 4 * 16 + thread // 32 * 4 + thread % 16 // 4
    found[ENTRY] = entry_at(Table, paged, turn, page, 0, row)
    found[PLACE] = T.if_then_else(
        (found[ENTRY] >= 0) & (found[ENTRY] < pages),
        found[ENTRY] * page + T.truncmod(turn[BEGIN] + row, page),
        -1,
    )
    found[ENTRY] = entry_at(Table, paged, turn, page, 1, row)
    if fp8:
        T.call_extern(
            "handle", f"mla_ask_first<{str(pair).lower()}>", T.access_ptr(codes[0], "rw", 32),
            T.access_ptr(scales[0], "rw", 8), T.address_of(KV[0, 0]), found[PLACE], side,
        )  # fmt: skip
    if (paged != 0) & (page == 1):
        turn[END] = T.call_extern(
            "int32",
            "mla_list_end",
            T.access_ptr(Table[turn[REQUEST], 0], "r", 1),
            tail,
            turn[BEGIN],
            turn[END],
            pages,
        )
        turn[COUNT] = T.ceildiv(turn[END] - turn[BEGIN], BLOCK)


@T.macro
def fetch_rows(
    KV, Table, paged, page, pages, turn, found, source, codes, scales, kv_rank, kv_rope, valid, holes, full, free,
    used0, used1, left, rank, rope, fp8, pair, side, lane, lanes, thread,
):  # fmt: skip
    """Producer: fetch the blocks of a thread block's part of an item; rows of the next block come into the L2 cache."""
    row = thread % 4 * 16 + thread // 32 * 4 + thread % 16 // 4
    for i in T.serial(turn[COUNT]):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        found[LATER] = T.if_then_else(
            (found[ENTRY] >= 0) & (found[ENTRY] < pages),
            found[ENTRY] * page + T.truncmod(turn[BEGIN] + (i + 1) * BLOCK + row, page),
            -1,
        )
        found[ENTRY] = entry_at(Table, paged, turn, page, i + 2, row)
        T.call_extern(
            "handle", f"mla_prefetch_rows<{656 if fp8 else 2 * (rank + rope)}>", T.address_of(KV[0, 0]),
            found[LATER], T.min(lane, 3), T.min(lanes, 4),
        )  # fmt: skip
        T.barrier_wait(free[s * 2], phase ^ 1)
        if thread % 32 < 16:
            valid[s, row] = T.if_then_else(found[PLACE] >= 0, 1, 0)
            if found[PLACE] < 0:
                holes[s] = i + 1
        if fp8:
            T.call_extern(
                "handle", f"mla_store_half<0, {str(pair).lower()}>", kv_rank.data, s, T.access_ptr(codes[0], "rw", 32),
                T.access_ptr(scales[0], "rw", 8), T.address_of(KV[0, 0]),
                found[LATER] if pair else found[PLACE], side, full.data,
            )  # fmt: skip
            if thread % 32 == 0:
                if pair:
                    T.call_extern("handle", "mla_arrive_expecting", full.data, s * 2, 4096)
                else:
                    T.barrier_arrive(full[s * 2])
        else:
            for r in T.unroll(4):
                source[r] = T.shfl_sync(found[PLACE], thread % 32 // 8 * 4 + r)
            copy_columns(KV, source, kv_rank, s, 0, left, 0, thread)
            T.cp_async_barrier_noinc(full[s * 2])
        T.barrier_wait(free[s * 2 + 1], phase ^ 1)
        if fp8:
            T.call_extern("handle", "mla_copy_rope", kv_rope.data, s, T.address_of(KV[0, 0]), found[PLACE])
        else:
            copy_columns(KV, source, kv_rank, s, left, rank, 0, thread)
            if rope > 0:
                copy_columns(KV, source, kv_rope, s, rank, rank + rope, rank, thread)
        T.cp_async_barrier_noinc(full[s * 2 + 1])
        if fp8:
            T.call_extern(
                "handle", f"mla_store_half<1, {str(pair).lower()}>", kv_rank.data, s, T.access_ptr(codes[0], "rw", 32),
                T.access_ptr(scales[0], "rw", 8), T.address_of(KV[0, 0]), found[LATER], side, full.data,
            )  # fmt: skip
            if thread % 32 == 0:
                if pair:
                    T.call_extern("handle", "mla_arrive_expecting", full.data, s * 2 + 1, 4096)
                else:
                    T.barrier_arrive(full[s * 2 + 1])
        else:
            T.barrier_arrive(full[s * 2 + 1])
        found[PLACE] = found[LATER]
