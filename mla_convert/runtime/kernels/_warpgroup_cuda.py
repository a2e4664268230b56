"""A warpgroup's instructions in CUDA C++, for programs whose order is written by hand: barriers, products, matrices.

It opens the namespace ``mla_many``, which ``_sparse_mla_many_cuda`` closes.
"""

INSTRUCTIONS = r"""
#include <tl_templates/cuda/instruction/wgmma.h>

namespace mla_many {

#define MLA_DEVICE static __device__ __forceinline__

MLA_DEVICE unsigned address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

MLA_DEVICE void start(unsigned long long& barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(count));
}
MLA_DEVICE void arrive(unsigned long long& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
MLA_DEVICE void arrive_with_copies(unsigned long long& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&barrier)) : "memory");
}
MLA_DEVICE void arrive_as_warp(unsigned long long& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}
MLA_DEVICE void await(unsigned long long& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\n"
      "done:\n}" ::"r"(address(&barrier)), "r"(phase)
      : "memory");
}
// For the tensor cores (and bulk copies) to see what threads, or their cp.async, wrote.
MLA_DEVICE void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int kId, int kThreads>
MLA_DEVICE void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
enum Meetings { kConsumers = 1, kFirst = 2, kProducers = 3 };

// Products. Registers of one under way must not be touched: hold() keeps the compiler from it.
MLA_DEVICE void before_product() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA_DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kUnderWay>
MLA_DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kUnderWay) : "memory");
}
template <int kCount>
MLA_DEVICE void hold(float* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
MLA_DEVICE void hold(unsigned* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

MLA_DEVICE unsigned long long descriptor(unsigned address, int panel_stride) {  // strides in 16 bytes
  return 1ull << 62 | 64ull << 32 | static_cast<unsigned long long>(panel_stride) << 16 | (address & 0x3ffff) >> 4;
}

template <bool kHalf>
struct Type {
  static constexpr auto kInput = kHalf ? tl::DataType::kFloat16 : tl::DataType::kBFloat16;
  static constexpr auto kSum = tl::DataType::kFloat32;

  // score (+)= Q K^T over some columns
  template <int kColumns, bool kClear>
  MLA_DEVICE void scores(float* score, unsigned q, unsigned k) {
    const unsigned long long of_q = descriptor(q, 1), of_k = descriptor(k, 1);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const int offset = (i / 4 * 8192 + i % 4 * 32) / 16;
      tl::wgmma_ss<kInput, kInput, kSum, 64, 64, 16, false, false, 1, 1>(
          of_q + offset, of_k + offset, reinterpret_cast<uint32_t*>(score), !(kClear && i == 0));
    }
  }
  // out += P V, P in shared memory
  template <int kColumns>
  MLA_DEVICE void product(float* out, unsigned p, unsigned v) {
    const unsigned long long of_p = descriptor(p, 1), of_v = descriptor(v, 512);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tl::wgmma_ss<kInput, kInput, kSum, 64, kColumns, 16, false, true, 1, 1>(
          of_p + i * 2, of_v + i * 128, reinterpret_cast<uint32_t*>(out), 1);
  }
  // the same for 16 of the keys, P in registers
  template <int kColumns>
  MLA_DEVICE void quarter(float* out, const unsigned* p, unsigned v, int i) {
    tl::wgmma_rs<kInput, kInput, kSum, 64, kColumns, 16, false, true, 1, 1>(
        p + i * 4, descriptor(v, 512) + i * 128, reinterpret_cast<uint32_t*>(out), 1);
  }
  MLA_DEVICE unsigned pack(float first, float second) {
    unsigned both;
    if constexpr (kHalf)
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
  }
};

MLA_DEVICE void store_matrices(unsigned at, const unsigned* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

// Of an accumulator, a thread has rows row() and row() + 8, and of each 8 columns two: x[8 columns][2 rows][2].
MLA_DEVICE int row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
"""
