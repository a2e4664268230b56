"""Where a wgmma accumulator of 64 rows has its elements, and how they get to rows in memory."""

from typing import Any

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


def accumulator_place(row: Any, column: Any) -> tuple[Any, Any]:
    """Thread and register of an element of a 64-row wgmma accumulator."""
    return (
        row // 16 * 32 + row % 8 * 4 + column % 8 // 2,
        column // 8 * 4 + row % 16 // 8 * 2 + column % 2,
    )
