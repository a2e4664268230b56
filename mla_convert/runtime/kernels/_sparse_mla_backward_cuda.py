"""The parts of ``_sparse_mla_backward`` that are CUDA C++: what must lie in given registers or addresses.

Panels: shared memory holds rows of K, Q and dO as panels of 64 columns under the 128-byte swizzle.

Additions in memory are fastest as whole lines of 128 bytes (on an H200 3.8 TB/s; 3.1 in halves). A wgmma accumulator
leaves two neighbouring columns of each eight of a row in a thread. With columns in the order of ``in_quads``, those of
two eights are four neighbours in memory: K, Q and dO all lie in that order, which changes no product, and dQ is put
back when stored. One exchange with the row beside then lets eight threads hold 32 columns of a row.
"""

import torch
from torch import Tensor


def in_quads(tensor: Tensor) -> Tensor:
    """The columns of each row so that a thread's two of each eight are neighbours of its two of the next eight.

    Of 16 columns, the first pair of every four comes first, then the second pair of every four.
    """
    pairs = tensor.view(torch.int32).view(*tensor.shape[:-1], -1, 4, 2)
    return pairs.transpose(-1, -2).reshape(*tensor.shape[:-1], -1).view(tensor.dtype)


SOURCE = """
#include <tl_templates/cuda/intrin.h>

// The row of a block whose entry this lane holds: each warp gathers 16 rows, and has their entries twice.
__device__ __forceinline__ int mla_row() {
  return ((threadIdx.x >> 2) & 3) * 16 + ((threadIdx.x >> 5) & 3) * 4 + (threadIdx.x & 3);
}

__device__ __forceinline__ int mla_fetch(const int* list, int begin, int end) {
  return begin + mla_row() < end ? list[begin + mla_row()] : -1;
}

// The same of the first block that is walked, where entry is that of the list's first block: most lists begin with it.
__device__ __forceinline__ int mla_fetch_first(const int* list, int entry, int begin, int end) {
  if (begin != 0) return mla_fetch(list, begin, end);
  return mla_row() < end ? entry : -1;
}

// Where the gradient of each row goes: to its token's row or, from slot on if that is not negative, one of its own.
__device__ __forceinline__ void mla_targets(int* target, int entry, int tokens, int slot, int tiles) {
  const bool valid = entry >= 0 && entry < tokens;
  if ((threadIdx.x & 31) < 16) target[mla_row()] = !valid ? -1 : slot < 0 ? entry : slot + mla_row() * tiles;
}

// How often each of four queries lists each key of a block; lists are as long as end says, from the block on.
__device__ __forceinline__ void mla_copy_counts(unsigned short* to, const unsigned short* from, int stride, int end) {
  const int thread = threadIdx.x & 127, query = thread >> 3, key = (thread & 7) * 8;
  if (thread < 32) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to + query * 64 + key))),
                 "l"(from + query * (long long)stride + (key < end ? key : 0)), "r"(key < end ? 16 : 0)
                 : "memory");
  }
}

// The same for one list as it came.
__device__ __forceinline__ void mla_count_valid(unsigned short* to, int entry, int tokens) {
  if ((threadIdx.x & 31) < 16) to[mla_row()] = entry >= 0 && entry < tokens;
}

// This thread's pairs of keys of an accumulator of scores, with how often the row's query lists each.
template <class Function>
__device__ __forceinline__ void mla_each_pair(float* score, const unsigned short* counts, int rows, Function function) {
  const int lane = threadIdx.x & 31, row = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(score[i])::"memory");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = min((row + half * 8) / rows, 3);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const unsigned pair = *reinterpret_cast<const unsigned*>(counts + query * 64 + n * 8 + (lane & 3) * 2);
      function(score[n * 4 + half * 2], pair & 0xffff);
      function(score[n * 4 + half * 2 + 1], pair >> 16);
    }
  }
}

__device__ __forceinline__ void mla_hide(float* score, const unsigned short* counts, int rows) {
  mla_each_pair(score, counts, rows, [](float& x, unsigned count) { x = count ? x : -INFINITY; });
}

__device__ __forceinline__ void mla_weigh(float* score, const unsigned short* counts, int rows) {
  mla_each_pair(score, counts, rows, [](float& x, unsigned count) {
    x *= __uint_as_float(0x4b000000 | count) - 8388608.f;  // 2^23 + count: a conversion takes longer
  });
}

// kPanels panels of the listed rows of kv: eight threads a row, four rows a thread; zeros where none is listed.
template <int kPanels, int kWidth>
__device__ __forceinline__ void mla_gather(void* to, const void* kv, int entry, int tokens) {
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 3) & 15;
  const unsigned base =
      static_cast<unsigned>(__cvta_generic_to_shared(to)) + first * 128 + ((lane ^ first) & 7) * 16;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int listed = __shfl_sync(0xffffffffu, entry, r * 4 + (lane >> 3));
    const bool valid = listed >= 0 && listed < tokens;
    const char* row = static_cast<const char*>(kv) + (valid ? listed : 0) * (long long)(kWidth * 2) + (lane & 7) * 16;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(base + r * 2048 + panel * 8192),
                   "l"(row + panel * 128), "r"(valid ? 16 : 0)
                   : "memory");
    }
  }
}

// Heads of one query into panels: two pairs of four neighbours to two chunks.
template <int kColumns>
__device__ __forceinline__ void mla_load_quads(void* to, const void* from, int heads, int stride) {
  constexpr int kUnits = kColumns / 16;
#pragma unroll 6
  for (int unit = threadIdx.x & 127; unit < 64 * kUnits; unit += 128) {
    const int head = unit / kUnits, piece = unit % kUnits;
    uint4 a = {}, b = {};
    if (head < heads) {
      const uint4* source = reinterpret_cast<const uint4*>(static_cast<const char*>(from) + head * (long long)stride);
      a = source[piece * 2];
      b = source[piece * 2 + 1];
    }
    char* panel = static_cast<char*>(to) + piece / 4 * 8192 + head * 128;
    const int chunk = piece % 4 * 2;
    *reinterpret_cast<uint4*>(panel + ((chunk ^ head) & 7) * 16) = make_uint4(a.x, a.z, b.x, b.z);
    *reinterpret_cast<uint4*>(panel + (((chunk + 1) ^ head) & 7) * 16) = make_uint4(a.y, a.w, b.y, b.w);
  }
}

template <int kCount>
__device__ __forceinline__ void mla_zero(float* acc) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = 0.f;
}

// dQ to memory: a thread has four neighbouring columns of each 16.
template <int kColumns, class Out>
__device__ __forceinline__ void mla_store_quads(Out* dq, const float* acc, int heads, int width) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = ((threadIdx.x >> 5) & 3) * 16 + half * 8 + (lane >> 2);
    if (head < heads) {
#pragma unroll
      for (int m = 0; m < kColumns / 16; ++m) {
        struct alignas(4 * sizeof(Out)) { Out x[4]; } out;
#pragma unroll
        for (int k = 0; k < 4; ++k) out.x[k] = Out(acc[(m * 2 + k / 2) * 4 + half * 2 + k % 2]);
        *reinterpret_cast<decltype(out)*>(dq + head * width + m * 16 + (lane & 3) * 4) = out;
      }
    }
  }
}

// Four neighbouring columns are added to a token's row, or stored in an entry's.
template <bool kAdd, class Out>
__device__ __forceinline__ void mla_put(Out* to, bool valid, float a, float b, float c, float d) {
  if constexpr (kAdd) {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %5, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"((int)valid)
        : "memory");
  } else if (valid) {
    struct alignas(4 * sizeof(Out)) { Out x[4]; } out = {{Out(a), Out(b), Out(c), Out(d)}};
    *reinterpret_cast<decltype(out)*>(to) = out;
  }
}

// This thread keeps a and gets the other's a for b, or, if second, the other way round.
__device__ __forceinline__ void mla_swap(float& a, float& b, bool second) {
  float got;
  asm volatile("shfl.sync.bfly.b32 %0, %1, 4, 0x1f, 0xffffffff;" : "=f"(got) : "f"(second ? a : b));
  a = second ? got : a;
  b = second ? b : got;
}

// Exchanges kFirst to kLast of 16, after which eight threads hold 32 columns of one row of an accumulator: the threads
// of a row and of the one behind swap every second 16 columns.
template <int kFirst, int kLast>
__device__ __forceinline__ void mla_exchanges(float* acc) {
#pragma unroll
  for (int i = kFirst; i < kLast; ++i) mla_swap(acc[i / 8 * 16 + i % 8], acc[i / 8 * 16 + i % 8 + 8], threadIdx.x & 4);
}

__device__ __forceinline__ void mla_fence(float* acc) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ __forceinline__ void mla_exchange(float* acc) {
  mla_fence(acc);
  mla_exchanges<0, 16>(acc);
}

// Where the four rows go of which a thread has columns after the exchanges.
__device__ __forceinline__ void mla_targets_of(int* to, const int* target) {
  const int2* pair = reinterpret_cast<const int2*>(target) + ((threadIdx.x >> 5) & 3) * 8 + ((threadIdx.x >> 3) & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    to[half * 2] = pair[half * 4].x;
    to[half * 2 + 1] = pair[half * 4].y;
  }
}

// Additions kFirst to kLast, of eight, of 64 columns of 64 keys; those to negative rows are left out. The exchanges of
// the following accumulator stand between them.
template <bool kAdd, int kWidth, int kFirst, int kLast, bool kExchange, class Out>
__device__ __forceinline__ void mla_add(Out* out, float* acc, const int* to, float* following) {
  constexpr int kCount = kLast - kFirst;
  const int column = (threadIdx.x & 7) * 4;
  mla_fence(acc);
  if constexpr (kExchange) mla_fence(following);
  const auto step = [&](auto number) {
    constexpr int kStep = decltype(number)::value, kAddition = kFirst + kStep, kHalf = kAddition / 4;
    constexpr int kBefore = (16 * kStep + kCount - 1) / kCount, kThen = (16 * kStep + 15 + kCount) / kCount;
    if constexpr (kExchange) mla_exchanges<kBefore, kThen>(following);
    const int row = to[kHalf * 2 + kAddition % 2];
    const float* x = acc + kAddition % 4 * 8 + kHalf * 2;
    mla_put<kAdd>(out + (long long)row * kWidth + column + (kAddition & 2) * 16, row >= 0, x[0], x[1], x[4], x[5]);
  };
  [&]<int... kSteps>(std::integer_sequence<int, kSteps...>) {
    (step(std::integral_constant<int, kSteps>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}
"""
