"""The parts of ``_sparse_mla_few`` that are CUDA C++: what works on a consumer's accumulators, [64, kColumns] each.

A thread has two neighbouring columns of each eight, in the rows lane / 4 and lane / 4 + 8 of its warp's sixteen.
"""

SOURCE = """
#include <tl_templates/cuda/intrin.h>

// Each warp's largest element (times scale) or sum of every column, to to[warp * kColumns + column].
template <int kColumns, bool kSum>
__device__ __forceinline__ void mla_reduce(float* to, int at, const float* acc, float scale) {
  to += at;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x = kSum ? acc[i + e] + acc[i + e + 2] : fmaxf(acc[i + e], acc[i + e + 2]) * scale;
#pragma unroll
      for (int b = 4; b < 32; b *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, b);
        x = kSum ? x + other : fmaxf(x, other);
      }
      if (lane < 4) to[warp * kColumns + i * 2 + lane * 2 + e] = x;
    }
  }
}

// An accumulator for the same thread of the other consumer.
template <int kColumns>
__device__ __forceinline__ void mla_give(void* to, int at, const float* acc, int first) {
  float4* place = reinterpret_cast<float4*>(static_cast<char*>(to) + at) + (threadIdx.x & 127);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const float* x = acc + first + i;
    place[i * 32] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

// Own and given, each times its columns' factors.
template <int kColumns>
__device__ __forceinline__ void mla_take(
    float* all, int first, const void* from, int at, const float* factors, int at_factors) {
  factors += at_factors;
  const float *own = factors, *given = factors + kColumns;
  float* acc = all + first;
  const float4* place =
      reinterpret_cast<const float4*>(static_cast<const char*>(from) + at) + (threadIdx.x & 127);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const float2 f = *reinterpret_cast<const float2*>(own + i * 2 + (threadIdx.x & 3) * 2);
    const float2 g = *reinterpret_cast<const float2*>(given + i * 2 + (threadIdx.x & 3) * 2);
    const float4 x = place[i * 32];
    acc[i] = acc[i] * f.x + x.x * g.x;
    acc[i + 1] = acc[i + 1] * f.y + x.y * g.y;
    acc[i + 2] = acc[i + 2] * f.x + x.z * g.x;
    acc[i + 3] = acc[i + 3] * f.y + x.w * g.y;
  }
}

template <int kColumns>
__device__ __forceinline__ void mla_scale(float* all, int first, const float* factor, int at_factors) {
  factor += at_factors;
  float* acc = all + first;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const float2 f = *reinterpret_cast<const float2*>(factor + i * 2 + (threadIdx.x & 3) * 2);
    acc[i] *= f.x;
    acc[i + 1] *= f.y;
    acc[i + 2] *= f.x;
    acc[i + 3] *= f.y;
  }
}

// A producer's walk through an item's list, of which there is one for each item under way; to the first block and on.
__device__ __forceinline__ void walk_on(
    int* walks, int s, const int* lists, long long row, int entries, int tokens, void* found) {
  next_block(reinterpret_cast<Walk*>(walks)[s], lists + row * entries, tokens, static_cast<unsigned*>(found));
}
__device__ __forceinline__ void walk_enter(
    int* walks, int s, const int* lists, const int* limits, int limited, int row, int rows, int entries, int tokens,
    int part, int parts, void* found) {
  Walk& walk = reinterpret_cast<Walk*>(walks)[s];
  const int* list = lists + static_cast<long long>(row) * entries;
  const int limit = row >= rows ? 0 : limited ? min(limits[row], entries) : entries;  // one behind the last is empty
  walk = enter_list<false>(list, limit, tokens, part, parts, static_cast<unsigned*>(found));
  next_block(walk, list, tokens, static_cast<unsigned*>(found));
}
__device__ __forceinline__ int walk_follows(const int* walks, int s) {
  return block_follows(reinterpret_cast<const Walk*>(walks)[s]);
}

// 64 dims (rows) of each head (a column) to the heads' rows of out, from column on.
template <int kColumns>
__device__ __forceinline__ void mla_store(
    float* out, long long row, int heads, int width, int column, const float* all, int first) {
  const float* acc = all + first;
  const int lane = threadIdx.x & 31, dim = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int head = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
    if (head < heads) out[(row * heads + head) * width + column + dim + (i & 2) * 4] = acc[i];
  }
}

template <int kColumns, class T>
__device__ __forceinline__ void mla_store(
    T* out, long long row, int heads, int width, int column, const float* all, int first) {
  const float* acc = all + first;
  const int lane = threadIdx.x & 31, dim = ((threadIdx.x >> 5) & 3) * 16 + (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) {
    T two[2] = {T(acc[i]), T(acc[i + 1])};
    unsigned turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                 : "=r"(turned)
                 : "r"(*reinterpret_cast<unsigned*>(two)));
    const int head = i / 4 * 8 + (lane >> 2);
    if (head < heads) {
      *reinterpret_cast<unsigned*>(out + (row * heads + head) * width + column + dim + (i & 2) * 4) = turned;
    }
  }
}
"""
