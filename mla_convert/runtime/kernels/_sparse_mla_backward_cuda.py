"""The parts of ``_sparse_mla_backward`` that are CUDA C++: what must lie in given registers or addresses.

Registers: the program's three warpgroups need all of a multiprocessor's registers, so addresses are formed anew
where TileLang (or the compiler, if it can) would keep them for every row and panel.

Panels: shared memory holds rows of K, Q and dO as panels of 64 columns under the 128-byte swizzle. A product may
take some of a panel's columns, 8 or more of them: the swizzle is a function of the address alone.

Additions in memory are fastest as whole lines of 128 bytes (on an H200 3.8 TB/s; 3.1 in halves). dKV is computed
transposed, its columns on the M side, where a thread's accumulators of one key are rows g and g + 8 of a panel for
g = lane / 4. With the columns of two panels in the order of ``column_order``, those four are neighbours in memory, and
eight threads hold a line. K, Q and dO all lie in that order: it changes no product, and dQ is put back when stored.
"""

# Additions in memory are fastest as whole lines of 128 bytes (on an H200 3.8 TB/s; 3.1 in halves). A wgmma accumulator
# leaves two neighbouring columns of a row in a thread: one exchange with the neighbouring thread makes them four, and
# a second, with the row beside, lets eight threads hold 32 columns of one row. All exchanges come before all
# additions, so that their latencies overlap: a scheduler has one warp of this warpgroup and no other to switch to.
SCATTER = """
template <bool kAdd>
__device__ __forceinline__ void mla_put(float* to, int row, const float* a, const float* b) {
  if constexpr (kAdd) {
    asm volatile(
        "{.reg .pred p; setp.ge.s32 p, %5, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
        "f"(a[0]), "f"(a[1]), "f"(b[0]), "f"(b[1]), "r"(row)
        : "memory");
  } else {
    asm volatile("{.reg .pred p; setp.ge.s32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
                 "f"(a[0]), "f"(a[1]), "f"(b[0]), "f"(b[1]), "r"(row)
                 : "memory");
  }
}

// Pairs of floats: this thread keeps a and gets the other's a for b, or, if second, the other way round.
__device__ __forceinline__ void mla_exchange(bool second, int lanes, float* a, float* b) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float got = __shfl_xor_sync(0xffffffffu, second ? a[k] : b[k], lanes);
    a[k] = second ? got : a[k];
    b[k] = second ? b[k] : got;
  }
}

// 64 columns of 64 rows, from an accumulator to the listed rows of out; rows listed as negative are left out.
template <bool kAdd>
__device__ __forceinline__ void mla_scatter(float* out, float* acc, const int* listed, int width) {
  const int lane = threadIdx.x & 31, key = ((threadIdx.x >> 5) & 3) * 16 + ((lane >> 2) & 6);
  const int column = (lane & 2) * 2 + (lane & 1) * 8 + (lane & 4) * 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    mla_exchange(lane & 1, 1, acc + i, acc + i + 4);
    mla_exchange(lane & 1, 1, acc + i + 2, acc + i + 6);
  }
#pragma unroll
  for (int i = 0; i < 32; i += 16) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) mla_exchange(lane & 4, 4, acc + i + k, acc + i + k + 8);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int2 rows = *reinterpret_cast<const int2*>(listed + key + half * 8);
    float* even_to = out + (long long)rows.x * width + column;
    float* odd_to = out + (long long)rows.y * width + column;
#pragma unroll
    for (int line = 0; line < 2; ++line) {
      const float* x = acc + line * 16 + half * 2;
      mla_put<kAdd>(even_to + line * 32, rows.x, x, x + 4);
      mla_put<kAdd>(odd_to + line * 32, rows.y, x + 8, x + 12);
    }
  }
}
"""


def column_order(rank: int, rope: int) -> list[int]:
    """The column of a token that lies at each position: fours of two panels, or pairs of a panel without another."""
    panels = rank // 64
    order = []
    for panel in range((rank + rope) // 64):
        alone = panel >= panels // 2 * 2
        step = 2 if alone else 4
        base = panel * 64 if alone else panel // 2 * 128 + panel % 2 * 2
        order += [base + w * 8 * step + g * step + b for w in range(4) for b in range(2) for g in range(8)]
    return order


SOURCE = """
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>

// The row of a block whose entry this lane holds: each warp gathers 16 rows, and has their entries twice.
__device__ __forceinline__ int mla_row() {
  return ((threadIdx.x >> 2) & 3) * 16 + ((threadIdx.x >> 5) & 3) * 4 + (threadIdx.x & 3);
}

__device__ __forceinline__ int mla_fetch(const int* list, int begin, int end) {
  return begin + mla_row() < end ? list[begin + mla_row()] : -1;
}

// Where the gradient of each row goes: to its token's row or, from slot on if that is not negative, one of its own.
__device__ __forceinline__ void mla_targets(int* target, int entry, int tokens, int slot) {
  const bool valid = entry >= 0 && entry < tokens;
  if ((threadIdx.x & 31) < 16) target[mla_row()] = !valid ? -1 : slot < 0 ? entry : slot + mla_row();
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

// Heads of one query into panels, kStep columns of a four or pair to as many rows of eight; zeros behind the last head.
template <int kColumns, int kStep>
__device__ __forceinline__ void mla_load_heads(void* to, const void* from, int heads, int stride) {
  constexpr int kUnits = kColumns / (8 * kStep);
#pragma unroll 1
  for (int unit = threadIdx.x & 127; unit < 64 * kUnits; unit += 128) {
    const int head = unit / kUnits, piece = unit % kUnits;
    uint4 in[kStep] = {};
    if (head < heads) {
      const uint4* source = reinterpret_cast<const uint4*>(static_cast<const char*>(from) + head * (long long)stride);
#pragma unroll
      for (int i = 0; i < kStep; ++i) in[i] = source[piece * kStep + i];
    }
    const unsigned* word = reinterpret_cast<const unsigned*>(in);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      unsigned out[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[k] = __byte_perm(word[k * kStep + i / 2], word[k * kStep + kStep / 2 + i / 2], i % 2 ? 0x7632 : 0x5410);
      }
      const int panel = piece / 4 * (kStep / 2) + i / 2, chunk = (piece % 4 * 2 + i % 2) ^ (head & 7);
      *reinterpret_cast<uint4*>(static_cast<char*>(to) + panel * 8192 + head * 128 + chunk * 16) =
          make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}

// dQ += dS K for kColumns columns of K from k on, dS from shared memory or from registers.
template <tl::DataType kType, int kColumns>
__device__ __forceinline__ void mla_add_shared(float* acc, const void* ds, const void* k) {
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<1, 1, 64>(a, ds);
  tl::initialize_wgmma_descriptor<1, kColumns <= 64 ? 0 : 512, 64>(b, k);
  tl::warpgroup_fence_operand(acc, kColumns / 2);
  tl::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    tl::wgmma_ss<kType, kType, tl::DataType::kFloat32, 64, kColumns, 16, false, true, 1, 1>(
        uint64_t(a + ((step * 32) >> 4)), uint64_t(b + ((step * 2048) >> 4)), reinterpret_cast<uint32_t*>(acc), 1);
  }
  tl::warpgroup_commit_batch();
}

template <tl::DataType kType, int kColumns>
__device__ __forceinline__ void mla_add_registers(float* acc, void* ds, const void* k) {
  tl::GmmaDescriptor b;
  tl::initialize_wgmma_descriptor<1, kColumns <= 64 ? 0 : 512, 64>(b, k);
  tl::warpgroup_fence_operand(static_cast<uint32_t*>(ds), 16);
  tl::warpgroup_fence_operand(acc, kColumns / 2);
  tl::warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    tl::wgmma_rs<kType, kType, tl::DataType::kFloat32, 64, kColumns, 16, false, true, 1, 1>(
        static_cast<uint32_t*>(ds) + step * 4, uint64_t(b + ((step * 2048) >> 4)), reinterpret_cast<uint32_t*>(acc), 1);
  }
  tl::warpgroup_commit_batch();
}

// dQ of 64 heads to memory, from kChunks times 8 positions of a panel on.
template <int kStep, int kFirst, int kChunks, class Out>
__device__ __forceinline__ void mla_store(Out* dq, const float* acc, int heads, int width) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = ((threadIdx.x >> 5) & 3) * 16 + half * 8 + (lane >> 2);
    if (head < heads) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int chunk = kFirst + n, column = chunk / 2 * 8 * kStep + ((lane & 3) * 2 + c) * kStep + chunk % 2;
          dq[head * width + column] = Out(acc[n * 4 + half * 2 + c]);
        }
      }
    }
  }
}

// The same for two panels whose columns are fours: eight neighbours a thread.
template <class Out>
__device__ __forceinline__ void mla_store_fours(Out* dq, const float* acc, int heads, int width) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = ((threadIdx.x >> 5) & 3) * 16 + half * 8 + (lane >> 2);
    if (head < heads) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        alignas(16) Out out[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) out[k] = Out(acc[k % 4 / 2 * 32 + (w * 2 + k % 2) * 4 + half * 2 + k / 4]);
        uint4* to = reinterpret_cast<uint4*>(dq + head * width + w * 32 + (lane & 3) * 8);
#pragma unroll
        for (int k = 0; k < (int)sizeof(Out) / 2; ++k) to[k] = reinterpret_cast<const uint4*>(out)[k];
      }
    }
  }
}

// One product of dKV transposed: 64 columns of heads by columns times 32 keys of heads by keys.
template <tl::DataType kType>
__device__ __forceinline__ void mla_multiply(const void* columns, const void* keys, float* acc, bool add) {
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<1, 0, 64>(a, columns);
  tl::initialize_wgmma_descriptor<1, 0, 64>(b, keys);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    tl::wgmma_ss<kType, kType, tl::DataType::kFloat32, 64, 32, 16, true, true, 1, 1>(
        uint64_t(a + ((step * 2048) >> 4)), uint64_t(b + ((step * 2048) >> 4)), reinterpret_cast<uint32_t*>(acc),
        add || step > 0);
  }
}

template <bool kAdd>
__device__ __forceinline__ void mla_put(float* to, bool valid, float a, float b, float c, float d) {
  if constexpr (kAdd) {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %5, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"((int)valid)
        : "memory");
  } else if (valid) {
    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
  }
}

template <bool kAdd>
__device__ __forceinline__ void mla_put(float* to, bool valid, float a, float b) {
  if constexpr (kAdd) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};}" ::"l"(to),
                 "f"(a), "f"(b), "r"((int)valid)
                 : "memory");
  } else if (valid) {
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  }
}

// dKV = dS^T Q + P^T dO of a block, two panels and 32 keys at a time: one product runs while the one before it goes to
// memory, each key's row to its target; keys with a negative one are left out. The last product frees P and dS.
template <bool kAdd, tl::DataType kType, int kRank, int kRope, class Barrier>
__device__ __forceinline__ void mla_keys(float* out, const int* target, const void* p, const void* ds,
                                         const void* q_rank, const void* q_rope, const void* d_out, Barrier& free) {
  constexpr int kWidth = kRank + kRope, kPanels = kRank / 64, kFours = kPanels / 2;
  constexpr int kSteps = 2 * (kFours + kPanels % 2 + kRope / 64);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const auto at = [](const void* base, int bytes) { return static_cast<const char*>(base) + bytes; };
  const unsigned listed = static_cast<unsigned>(__cvta_generic_to_shared(target)) + (lane & 3) * 8;
  float acc[2][2][16];
  const auto start = [&](int step) {
    const int keys = step % 2 * 64;
    tl::warpgroup_fence_operand(acc[step % 2][0], 16);
    tl::warpgroup_fence_operand(acc[step % 2][1], 16);
    tl::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < (step / 2 < kFours ? 2 : 1); ++i) {
      const int panel = step / 2 < kFours ? step / 2 * 2 + i : kFours + step / 2;
      if (panel < kPanels) {
        mla_multiply<kType>(at(q_rank, panel * 8192), at(ds, keys), acc[step % 2][i], false);
        mla_multiply<kType>(at(d_out, panel * 8192), at(p, keys), acc[step % 2][i], true);
      } else {
        mla_multiply<kType>(q_rope, at(ds, keys), acc[step % 2][i], false);
      }
    }
    tl::warpgroup_commit_batch();
  };
  start(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) {
      start(step + 1);
      tl::warpgroup_wait<1>();
    } else {
      tl::warpgroup_wait<0>();
      free.arrive();
    }
    float* a = acc[step % 2][0];
    float* b = acc[step % 2][1];
    tl::warpgroup_fence_operand(a, 16);
    tl::warpgroup_fence_operand(b, 16);
    const bool fours = step / 2 < kFours;
    const int column = fours ? step / 2 * 128 + warp * 32 + (lane >> 2) * 4
                             : (kFours + step / 2) * 64 + warp * 16 + (lane >> 2) * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int2 rows;  // read anew in each step: the compiler would keep sixteen rows' addresses, and spill them
      asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                   : "=r"(rows.x), "=r"(rows.y)
                   : "r"(listed + (step % 2 * 32 + j * 8) * 4)
                   : "memory");
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = c ? rows.y : rows.x;
        float* to = out + (long long)row * kWidth + column;
        const int i = j * 4 + c;
        if (fours) {
          mla_put<kAdd>(to, row >= 0, a[i], a[i + 2], b[i], b[i + 2]);
        } else {
          mla_put<kAdd>(to, row >= 0, a[i], a[i + 2]);
        }
      }
    }
  }
}
"""
