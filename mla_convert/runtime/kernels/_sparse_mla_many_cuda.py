"""The program of ``sparse_mla`` for tiles of 64 heads, in CUDA C++; ``_sparse_mla_many`` describes it.

Here are the consumers, and what starts all three warpgroups; ``_sparse_mla_many_producer_cuda`` fills their panels. It
is written by hand for the order of its instructions: a quarter of a block's probabilities is multiplied while the next
are computed, and nothing waits in between.

Shared memory holds panels: 64 rows of 64 columns, 128 bytes a row under the 128-byte swizzle. A panel of keys is an
operand as it is (scores) and transposed (values).
"""

from mla_convert.runtime.kernels._sparse_mla_many_producer_cuda import PRODUCER
from mla_convert.runtime.kernels._warpgroup_cuda import INSTRUCTIONS

SOURCE = (
    INSTRUCTIONS
    + r"""
constexpr float kLowest = -1e30f, kSlack = 8.f, kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kWarps = 4;  // of a warpgroup; a barrier counts warps, not threads

struct Arguments {
  const void *q, *kv;
  const int *indices, *limits;
  int has_limits;
  const float* sink;
  void* out;
  float* lse;
  int parts, tiles, tokens, heads, entries, has_sink;
  float scale;
};

// What two warpgroups tell each other. Of four: left and right piece of an even block, left and right of an odd one.
struct Shared {
  unsigned long long q_full, q_free, full[4], free[4], max_full, p_full[2], staged, unstaged;
  int count, holes[2];
  alignas(8) int valid[2][64];
  float highest[2][64], total[2][64];
  unsigned found;  // of the walk through a list
};

// Where panels lie. The first consumer stages its results from the odd block's left piece on, which it reads last, the
// second from the even block's right piece on; each row is padded by 16 bytes, and so needs what lies behind.
template <int kRank, int kRope>
struct Places {
  static constexpr int kLeft = (kRank + 127) / 128 * 64, kRight = kRank - kLeft, kWidth = kRank + kRope;
  static constexpr int kEvenLeft = 0, kEvenRight = kEvenLeft + kLeft * 128, kEvenRope = kEvenRight + kRight * 128,
                       kOddLeft = kEvenRope + (kRope > 64 ? kRope : 64) * 128, kOddP = kOddLeft + kLeft * 128,
                       kOddRight = kOddP + 64 * 128, kOddRope = kOddRight + kRight * 128,
                       kQ = kOddRope + kRope * 128, kQRope = kQ + kRank * 128;
  static constexpr int kEvenP = kEvenRope;  // probabilities take the place of the block's rope part
};

MLA_DEVICE void publish(float* to, const float* x) {
  if (threadIdx.x % 4 == 0) {
    to[row()] = x[0];
    to[row() + 8] = x[1];
  }
}
MLA_DEVICE void take(const float* from, float* x) {
  x[0] = from[row()];
  x[1] = from[row() + 8];
}

MLA_DEVICE void store_probabilities(unsigned panel, const unsigned* p) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, side = threadIdx.x / 16 % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) store_matrices(panel + row * 128 + ((i * 2 + side ^ row & 7) << 4), p + i * 4);
}

// The maximum of each row of a block, in which what is not valid becomes -inf.
MLA_DEVICE void peak(float* score, const Shared& s, int which, int number, float* top) {
  if (s.holes[which] == number) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int2 valid = *reinterpret_cast<const int2*>(&s.valid[which][n * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!(i % 2 ? valid.y : valid.x)) score[n * 4 + i] = -CUDART_INF_F;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top_of[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) top_of[n] = fmaxf(score[n * 4 + h * 2], score[n * 4 + h * 2 + 1]);
#pragma unroll
    for (int n = 4; n < 8; ++n)
      top_of[n - 4] = fmaxf(top_of[n - 4], fmaxf(score[n * 4 + h * 2], score[n * 4 + h * 2 + 1]));
    top[h] = fmaxf(fmaxf(top_of[0], top_of[1]), fmaxf(top_of[2], top_of[3]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], lanes));
  }
}

// The reference of the exponentials rises to a block's maximum if that is far above it.
MLA_DEVICE void settle(float* reference, const float* top, float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    reference[h] = (top[h] - reference[h]) * scale > kSlack ? top[h] : reference[h];
}

template <int kCount>
MLA_DEVICE void multiply(float* x, const float* factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factor[i / 2 % 2];
}

// Where the reference has moved, which is seldom, older sums and results shrink: true in warps with such a row.
template <int kCount>
MLA_DEVICE bool follow(const float* before, const float* now, float scale, float* factor, float* total, float* out) {
  if (!__any_sync(~0u, before[0] != now[0] || before[1] != now[1])) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    factor[h] = exp2f((before[h] - now[h]) * scale);
    total[h] *= factor[h];
  }
  multiply<kCount>(out, factor);
  return true;
}

// Probabilities of a block and their product with the values, a quarter of the keys after the other.
template <bool kHalf, int kColumns>
MLA_DEVICE void weigh(float* score, unsigned* p, const float* reference, float scale, float* out, unsigned values) {
  const float shift[2] = {reference[0] * scale, reference[1] * scale};
  hold<kColumns / 2>(out);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = k * 8; i < k * 8 + 8; ++i) score[i] = exp2f(score[i] * scale - shift[i / 2 % 2]);
#pragma unroll
    for (int i = k * 4; i < k * 4 + 4; ++i) p[i] = Type<kHalf>::pack(score[i * 2], score[i * 2 + 1]);
    hold<4>(p + k * 4);
    before_product();
    Type<kHalf>::template quarter<kColumns>(out, p, values, k);
  }
  commit();
}

// A thread's probabilities are added to its totals; the four threads of a row add theirs up in the end.
MLA_DEVICE void count_up(const float* score, float* total) {
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i % 4] += score[i];
  total[0] += sum[0] + sum[1];
  total[1] += sum[2] + sum[3];
}

// The end of an item, of both consumers (kSide 0 and 1): results, normalised, to shared memory, from where the producer
// sends them on, or float32 parts to memory.
template <int kRank, int kRope, bool kHalf, bool kSplit, int kSide>
MLA_DEVICE void finish(float* out, float* total, const float* reference, Shared& s, const Arguments& a, unsigned base,
                       int turn, long long out_row, int first) {
  using P = Places<kRank, kRope>;
  constexpr int kColumns = kSide ? P::kRight : P::kLeft;
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] += __shfl_xor_sync(~0u, total[h], lanes);
  }
  publish(s.total[kSide], total);
  if (!kSplit) await(s.unstaged, turn & 1 ^ 1);  // the last item's results have been read
  meet<kConsumers, 256>();                       // the products of both have ended, too
  float factor[2];
  take(s.total[1 - kSide], factor);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = first + row() + h * 8;
    const float all = total[h] + factor[h];
    const float sink =
        a.has_sink && head < a.heads ? exp2f(a.sink[head] * kLog2e - reference[h] * a.scale) : 0.f;
    factor[h] = all == 0.f ? 0.f : 1.f / (all + sink);
    if (kSide == 0 && threadIdx.x % 4 == 0 && head < a.heads) {
      const long long at = out_row * a.heads + head;
      float& lse = kSplit ? static_cast<float*>(a.out)[at * (kRank + 4) + kRank] : a.lse[at];  // of a part behind it
      lse = all == 0.f ? -CUDART_INF_F : (log2f(all) + reference[h] * a.scale) * kLn2;
    }
  }
  multiply<kColumns / 2>(out, factor);
  if constexpr (kSplit) {
    float* to = static_cast<float*>(a.out) + (out_row * a.heads + first + row()) * (kRank + 4) + kSide * P::kLeft +
                threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (first + row() + h * 8 < a.heads) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
          *reinterpret_cast<float2*>(to + h * 8 * (kRank + 4) + n * 8) =
              make_float2(out[n * 4 + h * 2], out[n * 4 + h * 2 + 1]);
      }
    }
    meet<kConsumers, 256>();  // both have taken the totals
  } else {
    const int staged_row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, side = threadIdx.x / 16 % 2;
    const unsigned at =
        base + (kSide ? P::kEvenRight : P::kOddLeft) + staged_row * (kColumns * 2 + 16) + side * 16;
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      unsigned v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = Type<kHalf>::pack(out[i * 8 + k * 2], out[i * 8 + k * 2 + 1]);
      store_matrices(at + i * 32, v);
    }
    fence();
    arrive_as_warp(s.staged);
  }
}

template <int kRank, int kRope, bool kHalf, bool kSplit>
MLA_DEVICE void consume_even(const Arguments& a, Shared& s, unsigned base, int items) {
  using P = Places<kRank, kRope>;
  using Of = Type<kHalf>;
  int used0 = 0, used1 = 0;
  for (int turn = 0; turn < items; ++turn) {
    const int item = blockIdx.x + turn * gridDim.x, first = item % a.tiles * 64;
    float out[P::kLeft / 2], score[32], total[2] = {}, reference[2] = {kLowest, kLowest};
    unsigned p[16];
#pragma unroll
    for (int i = 0; i < P::kLeft / 2; ++i) out[i] = 0.f;
    await(s.q_full, turn & 1);
    const int count = s.count;

    const auto left_scores = [&](int phase) {
      await(s.full[0], phase);
      fence();
      hold<32>(score);
      before_product();
      Of::template scores<P::kLeft, true>(score, base + P::kQ, base + P::kEvenLeft);
      commit();
    };
    const auto right_scores = [&](int phase) {
      await(s.full[1], phase);
      fence();
      before_product();
      Of::template scores<P::kRight, false>(score, base + P::kQ + P::kLeft * 128, base + P::kEvenRight);
      Of::template scores<kRope, false>(score, base + P::kQRope, base + P::kEvenRope);
      commit();
      wait_products<0>();
      hold<32>(score);
      hold<P::kLeft / 2>(out);
    };
    // Softmax of an even block and product with it; alone: no odd block follows.
    const auto own = [&](int number, bool alone) {
      float top[2], factor[2];
      const float before[2] = {reference[0], reference[1]};
      peak(score, s, 0, number, top);
      settle(reference, top, a.scale);
      publish(s.highest[0], reference);
      arrive_as_warp(s.max_full);
      follow<P::kLeft / 2>(before, reference, a.scale, factor, total, out);
      weigh<kHalf, P::kLeft>(score, p, reference, a.scale, out, base + P::kEvenLeft);
      meet<kFirst, 128>();  // every warp's product has read the rope part, whose place P takes
      store_probabilities(base + P::kEvenP, p);
      fence();
      if (alone) arrive_as_warp(s.p_full[0]);
      count_up(score, total);
      wait_products<0>();
      hold<P::kLeft / 2>(out);
      arrive_as_warp(s.free[0]);
    };
    // The even block's probabilities are handed over, once the odd block's maximum is known; the product with the odd
    // block's is started.
    const auto other = [&](int phase) {
      float factor[2];
      const float before[2] = {reference[0], reference[1]};
      await(s.p_full[1], phase);
      take(s.highest[1], reference);
      if (follow<P::kLeft / 2>(before, reference, a.scale, factor, total, out)) {
        multiply<32>(score, factor);
#pragma unroll
        for (int i = 0; i < 16; ++i) p[i] = Of::pack(score[i * 2], score[i * 2 + 1]);
        store_probabilities(base + P::kEvenP, p);
        fence();
      }
      arrive_as_warp(s.p_full[0]);
      hold<P::kLeft / 2>(out);
      before_product();
      Of::template product<P::kLeft>(out, base + P::kOddP, base + P::kOddLeft);
      commit();
    };

    if (count > 0) {
      left_scores(used0 & 1);
      right_scores(used0 & 1);
    }
    for (int i = 0; i < (count - 1) / 2; ++i) {  // pairs that a block follows
      own(2 * i + 1, false);
      other(used1 + i & 1);
      left_scores(used0 + i + 1 & 1);
      wait_products<1>();
      arrive_as_warp(s.free[2]);
      right_scores(used0 + i + 1 & 1);
    }
    arrive_as_warp(s.q_free);
    if (count > 0) {
      const bool pair = count % 2 == 0;
      own(pair ? count - 1 : count, !pair);
      if (pair) {
        other(used1 + count / 2 - 1 & 1);
        wait_products<0>();
        hold<P::kLeft / 2>(out);
        arrive_as_warp(s.free[2]);
      }
    }
    used0 += (count + 1) / 2;
    used1 += count / 2;
    finish<kRank, kRope, kHalf, kSplit, 0>(out, total, reference, s, a, base, turn, item / a.tiles, first);
  }
}

template <int kRank, int kRope, bool kHalf, bool kSplit>
MLA_DEVICE void consume_odd(const Arguments& a, Shared& s, unsigned base, int items) {
  using P = Places<kRank, kRope>;
  using Of = Type<kHalf>;
  int used0 = 0, used1 = 0;
  for (int turn = 0; turn < items; ++turn) {
    const int item = blockIdx.x + turn * gridDim.x, first = item % a.tiles * 64;
    float out[P::kRight / 2], score[32], total[2] = {}, reference[2] = {kLowest, kLowest}, factor[2];
    unsigned p[16];
#pragma unroll
    for (int i = 0; i < P::kRight / 2; ++i) out[i] = 0.f;
    await(s.q_full, turn & 1);
    const int count = s.count;
    for (int i = 0; i < count / 2; ++i) {
      await(s.full[3], used1 + i & 1);
      fence();
      hold<32>(score);
      before_product();
      Of::template scores<P::kRight, true>(score, base + P::kQ + P::kLeft * 128, base + P::kOddRight);
      Of::template scores<kRope, false>(score, base + P::kQRope, base + P::kOddRope);
      commit();
      await(s.full[2], used1 + i & 1);
      fence();
      before_product();
      Of::template scores<P::kLeft, false>(score, base + P::kQ, base + P::kOddLeft);
      commit();
      wait_products<0>();
      hold<32>(score);
      if (2 * i + 2 == count) arrive_as_warp(s.q_free);

      float top[2];
      const float before[2] = {reference[0], reference[1]};
      peak(score, s, 1, 2 * i + 2, top);
      await(s.max_full, used0 + i & 1);
      take(s.highest[0], reference);
      settle(reference, top, a.scale);
      follow<P::kRight / 2>(before, reference, a.scale, factor, total, out);
      publish(s.highest[1], reference);
      weigh<kHalf, P::kRight>(score, p, reference, a.scale, out, base + P::kOddRight);
      store_probabilities(base + P::kOddP, p);
      fence();
      arrive_as_warp(s.p_full[1]);
      count_up(score, total);
      await(s.p_full[0], used0 + i & 1);
      before_product();
      Of::template product<P::kRight>(out, base + P::kEvenP, base + P::kEvenRight);
      commit();
      wait_products<1>();
      arrive_as_warp(s.free[3]);
      wait_products<0>();
      hold<P::kRight / 2>(out);
      arrive_as_warp(s.free[1]);
    }
    if (count == 0 || count % 2 == 1) arrive_as_warp(s.q_free);
    if (count % 2 == 1) {
      const float before[2] = {reference[0], reference[1]};
      await(s.p_full[0], used0 + count / 2 & 1);
      take(s.highest[0], reference);
      follow<P::kRight / 2>(before, reference, a.scale, factor, total, out);
      hold<P::kRight / 2>(out);
      before_product();
      Of::template product<P::kRight>(out, base + P::kEvenP, base + P::kEvenRight);
      commit();
      wait_products<0>();
      hold<P::kRight / 2>(out);
      arrive_as_warp(s.free[1]);
    }
    used0 += (count + 1) / 2;
    used1 += count / 2;
    finish<kRank, kRope, kHalf, kSplit, 1>(out, total, reference, s, a, base, turn, item / a.tiles, first);
  }
}

"""
    + PRODUCER
    + r"""template <int kRank, int kRope, bool kHalf, bool kSplit>
MLA_DEVICE void run(void* memory, const void* q, const void* kv, const int* indices, const int* limits, int has_limits,
                    const float* sink, void* out, float* lse, int rows, int parts, int tiles, int tokens, int heads,
                    int entries, int has_sink, float scale) {
  __shared__ Shared s;
  const Arguments a{q,     kv,    indices, limits, has_limits, sink,    out,      lse,
                    parts, tiles, tokens,  heads,  entries,    has_sink, scale};
  const unsigned base = address(memory);
  const int items = (rows * tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  if (threadIdx.x == 0) {
    s.holes[0] = s.holes[1] = 0;
    start(s.q_full, 129);
    start(s.q_free, 2 * kWarps);
    for (int piece = 0; piece < 4; ++piece) {
      start(s.full[piece], piece % 2 ? 128 + 16 : 128);
      start(s.free[piece], kWarps);
    }
    start(s.max_full, kWarps);
    start(s.p_full[0], kWarps);
    start(s.p_full[1], kWarps);
    start(s.staged, 2 * kWarps);
    start(s.unstaged, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    consume_even<kRank, kRope, kHalf, kSplit>(a, s, base, items);
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    consume_odd<kRank, kRope, kHalf, kSplit>(a, s, base, items);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    produce<kRank, kRope, kSplit>(a, s, base, items);
  }
}

}  // namespace mla_many
"""
)
