"""The producer of ``_sparse_mla_many_cuda``: it fills the panels with queries and keys, and sends results on."""

PRODUCER = r"""MLA_DEVICE void copy(unsigned to, const char* from, bool exists) {  // or zeros, and nothing is read
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// An item's results from where they are staged to memory, a row of a half by each thread.
template <int kRank, int kRope>
MLA_DEVICE void send(Shared& s, const Arguments& a, unsigned base, int turn, long long out_row, int first) {
  using P = Places<kRank, kRope>;
  await(s.staged, turn & 1);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  if (first + row < a.heads) {
    char* to = static_cast<char*>(a.out) + (out_row * a.heads + first + row) * (kRank * 2);
    if (lane < 16)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                   "r"(base + P::kOddLeft + row * (P::kLeft * 2 + 16)), "n"(P::kLeft * 2)
                   : "memory");
    else
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + P::kLeft * 2),
                   "r"(base + P::kEvenRight + row * (P::kRight * 2 + 16)), "n"(P::kRight * 2)
                   : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  meet<kProducers, 128>();
  if (threadIdx.x % 128 == 0) arrive(s.unstaged);
}

// Eight threads a row, 16 rows at a time. A row that is not valid becomes zeros, so that nothing stale or NaN can
// reach a product. index holds a thread's entries of a pair of blocks; the next pair's are asked for behind the last
// copies that need them, and where they lie is found out before, while the producer would wait for free pieces.
template <int kRank, int kRope, bool kSplit>
MLA_DEVICE void produce(const Arguments& a, Shared& s, unsigned base, int items) {
  using P = Places<kRank, kRope>;
  const int thread = threadIdx.x % 128, lane = thread % 8, row = thread / 8;
  const unsigned mine = base + row * 128 + ((lane ^ row & 7) << 4);
  int used0 = 0, used1 = 0;
  long long out_row = 0, sent_row = 0;
  int sent_first = 0;
  for (int turn = 0; turn < items; ++turn) {
    const int item = blockIdx.x + turn * gridDim.x, first = item % a.tiles * 64;
    out_row = item / a.tiles;
    const long long query = kSplit ? out_row / a.parts : out_row;
    const int* list = a.indices + query * a.entries;
    Walk walk = enter_list<kSplit>(list, a.has_limits ? min(a.limits[query], a.entries) : a.entries, a.tokens,
                           kSplit ? out_row % a.parts : 0, kSplit ? a.parts : 1, &s.found);
    const int count = count_blocks(walk, list, a.tokens, &s.found), pairs = (count + 1) / 2;
    int index[8];
    int next[2];  // pair of blocks
    const auto walk_on = [&] {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        next_block(walk, list, a.tokens, &s.found);
        next[b] = walk.at;
      }
    };
    const auto fetch = [&](int b) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = next[b] + r * 16 + row;
        index[b * 4 + r] = at < walk.end ? list[at] : -1;
      }
    };
    const auto valid = [&](int entry) { return is_token(entry, a.tokens); };
    // Say which rows of a block are valid, and if not all are; number is the block's in its item, from 1.
    const auto mark = [&](int b, int number) {
      if (lane == 0) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          s.valid[b][r * 16 + row] = valid(index[b * 4 + r]);
          if (!valid(index[b * 4 + r])) s.holes[b] = number;
        }
      }
    };
    const auto copy_rows = [&](int b, int to, int column, auto panels) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const bool exists = valid(index[b * 4 + r]);
        const char* from = static_cast<const char*>(a.kv) + lane * 16 + column * 2 +
                           static_cast<long long>(exists ? index[b * 4 + r] : 0) * (P::kWidth * 2);
#pragma unroll
        for (int u = 0; u < decltype(panels)::value; ++u)
          copy(mine + to + u * 8192 + r * 2048, from + u * 128, exists);
      }
    };
    constexpr std::integral_constant<int, P::kLeft / 64> left{};
    constexpr std::integral_constant<int, P::kRight / 64> right{};
    constexpr std::integral_constant<int, kRope / 64> rope{};

    walk_on();
    fetch(0);
    fetch(1);
    await(s.q_free, turn & 1 ^ 1);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int head = first + r * 16 + row;
      const char* from = static_cast<const char*>(a.q) + lane * 16 +
                         (query * a.heads + min(head, a.heads - 1)) * (P::kWidth * 2);
#pragma unroll
      for (int u = 0; u < P::kWidth / 64; ++u) copy(mine + P::kQ + u * 8192 + r * 2048, from + u * 128, head < a.heads);
    }
    arrive_with_copies(s.q_full);
    if (thread == 0) {
      s.count = count;
      arrive(s.q_full);
    }
    for (int i = 0; i < pairs; ++i) {
      const bool both = 2 * i + 1 < count;
      await(s.free[0], used0 + i & 1 ^ 1);
      mark(0, 2 * i + 1);
      copy_rows(0, P::kEvenLeft, 0, left);
      arrive_with_copies(s.full[0]);
      if (both) {
        await(s.free[3], used1 + i & 1 ^ 1);
        mark(1, 2 * i + 2);
        copy_rows(1, P::kOddRight, P::kLeft, right);
        copy_rows(1, P::kOddRope, kRank, rope);
        arrive_with_copies(s.full[3]);
        if (lane == 0) arrive(s.full[3]);  // with release order, for the marks
      }
      walk_on();
      if (!kSplit && i == 0 && turn > 0) send<kRank, kRope>(s, a, base, turn - 1, sent_row, sent_first);
      await(s.free[1], used0 + i & 1 ^ 1);
      copy_rows(0, P::kEvenRight, P::kLeft, right);
      copy_rows(0, P::kEvenRope, kRank, rope);
      arrive_with_copies(s.full[1]);
      if (lane == 0) arrive(s.full[1]);
      fetch(0);
      if (both) {
        await(s.free[2], used1 + i & 1 ^ 1);
        copy_rows(1, P::kOddLeft, 0, left);
        arrive_with_copies(s.full[2]);
      }
      fetch(1);
    }
    if (!kSplit && pairs == 0 && turn > 0) send<kRank, kRope>(s, a, base, turn - 1, sent_row, sent_first);
    used0 += pairs;
    used1 += count / 2;
    sent_row = out_row;
    sent_first = first;
  }
  if (!kSplit && items > 0) send<kRank, kRope>(s, a, base, items - 1, sent_row, sent_first);
}

"""
