"""How the programs of sparse attention go through a list, in CUDA C++, past blocks without a valid entry.

An entry is valid if it is the number of a token. There are two ways, for what a full list must not pay for:

- ``Walk``, for the 128 threads of a producer: blocks of 64 entries. A look at 2048 entries, all asked for at once, says
  which of their 32 blocks hold a valid one. So which block is next, how many there are, and whether one follows is
  known long before, and the entries of the next are asked for as early as those of a full list.
- ``next_tile``, for a warp by itself: it looks ahead only where it has come to 16 entries without a valid one.

``find_blocks`` writes the blocks down, for programs that walk a list more than once.
"""

SOURCE = r"""
constexpr int kWindow = 2048, kBlock = 64;  // entries: 32 blocks, a bit each
constexpr int kWalkers = 11;  // the named barrier of a walk's threads

static __device__ __forceinline__ bool is_token(int entry, int tokens) {
  return static_cast<unsigned>(entry) < static_cast<unsigned>(tokens);
}

// 1 + the position of the last valid entry before limit, or 0: most lists are full, and their end is all that is read.
static __device__ __forceinline__ int list_end(const int* list, int limit, int tokens) {
  int last = 0;
  for (int end = limit; end > 0 && last == 0; end -= 128) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = end - 1 - i * 32 - (threadIdx.x & 31);
      const int entry = at >= 0 ? list[at] : -1;
      last = max(last, is_token(entry, tokens) ? at + 1 : 0);
    }
    last = __reduce_max_sync(0xffffffffu, last);
  }
  return last;
}

// Let later reads find this in the L2 cache; of so many neighbouring threads, each asks for other lines.
template <int kThreads>
static __device__ __forceinline__ void prefetch(const void* from, int bytes) {
  for (int at = threadIdx.x % kThreads * 128; at < bytes; at += kThreads * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + at));
}

static __device__ __forceinline__ void meet_walkers() {
  asm volatile("bar.sync %0, 128;" ::"n"(kWalkers) : "memory");
}

// Bit b: the block from + 64 b .. holds a valid entry before end. Each warp looks at eight blocks; found is where they
// tell each other, in shared memory.
static __device__ __forceinline__ unsigned filled_blocks(
    const int* list, int from, int end, int tokens, unsigned* found) {
  const int warp = threadIdx.x / 32 % 4, at = from + warp * (kWindow / 4) + threadIdx.x % 32;
  int entry[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) entry[i] = at + i * 32 < end ? list[at + i * 32] : -1;
  meet_walkers();  // until all have read what was found before; the entries are on their way
  unsigned filled = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) filled |= unsigned(is_token(entry[i], tokens)) << i / 2;
  filled = __reduce_or_sync(0xffffffffu, filled);
  if (threadIdx.x % 32 == 0) reinterpret_cast<unsigned char*>(found)[warp] = filled;
  meet_walkers();
  return *const_cast<volatile unsigned*>(found);
}

// The same out of line: between the instructions of a loop it would slow the loop down.
static __device__ __noinline__ unsigned more_blocks(const int* list, int from, int end, int tokens, unsigned* found) {
  return filled_blocks(list, from, end, tokens, found);
}

// Through the blocks of a list, or of one of its parts, that hold a valid entry.
struct Walk {
  int at, end;      // the block, and behind what no entry counts; at == end: no block is left
  int window;       // where the 2048 entries begin that were looked at
  unsigned blocks;  // and which of their blocks, behind this one, hold a valid entry
};

// Whether a block follows this one. Without a look: behind the first window, end is that of the last valid entry.
static __device__ __forceinline__ bool block_follows(const Walk& walk) {
  return walk.blocks != 0 || walk.window + kWindow < walk.end;
}

static __device__ __forceinline__ void next_block(Walk& walk, const int* list, int tokens, unsigned* found) {
  while (walk.blocks == 0 && walk.window + kWindow < walk.end) {
    walk.window += kWindow;
    walk.blocks = more_blocks(list, walk.window, walk.end, tokens, found);
  }
  walk.at = walk.blocks != 0 ? walk.window + (__ffs(walk.blocks) - 1) * kBlock : walk.end;
  walk.blocks &= walk.blocks - 1;
}

// The walk through one of the parts of a list, before its first block. Lists of one window are divided by the blocks
// that count, longer ones by their entries. Inline is quicker where it is the first thing that a thread block does.
template <bool kInline>
static __device__ __forceinline__ Walk enter_list(
    const int* list, int limit, int tokens, int part, int parts, unsigned* found) {
  Walk walk{0, limit, 0, 0};
  if (limit > kWindow) {
    walk.end = list_end(list, limit, tokens);
    if (parts > 1) {
      const int share = ((walk.end + kBlock - 1) / kBlock + parts - 1) / parts * kBlock;
      walk.window = min(part * share, walk.end);
      walk.end = walk.window + list_end(list + walk.window, min(share, walk.end - walk.window), tokens);
    }
  }
  int share = ((limit + kBlock - 1) / kBlock + parts - 1) / parts;  // blocks of a part, if all count
  if (walk.window < walk.end)
    walk.blocks = kInline ? filled_blocks(list, walk.window, walk.end, tokens, found)
                          : more_blocks(list, walk.window, walk.end, tokens, found);
  if (limit <= kWindow && parts > 1) {
    const int count = __popc(walk.blocks), lane = threadIdx.x % 32;
    if (count * kBlock < limit) share = (count + parts - 1) / parts;
    const int before = __popc(walk.blocks & ((1u << lane) - 1)) - part * share;
    walk.blocks = __ballot_sync(0xffffffffu, walk.blocks >> lane & 1 && before >= 0 && before < share);
  }
  return walk;
}

// How many blocks lie behind this one.
static __device__ __forceinline__ int count_blocks(const Walk& walk, const int* list, int tokens, unsigned* found) {
  int count = __popc(walk.blocks);
  for (int from = walk.window + kWindow; from < walk.end; from += kWindow)
    count += __popc(more_blocks(list, from, walk.end, tokens, found));
  return count;
}

// The numbers of the blocks that hold a valid entry, behind how many those are, and where the list ends. 128 threads.
static __device__ __forceinline__ void find_blocks(
    int* blocks, int* length, const int* list, int limit, int tokens, unsigned* found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int count = 0;
  for (int from = 0; from < limit; from += kWindow) {
    const unsigned filled = filled_blocks(list, from, limit, tokens, found);
    if (warp == 0 && filled >> lane & 1)
      blocks[1 + count + __popc(filled & ((1u << lane) - 1))] = from / kBlock + lane;
    count += __popc(filled);
  }
  if (warp != 0) return;
  const int end = list_end(list, limit, tokens);
  if (lane == 0) {
    blocks[0] = count;
    if (count == 0) blocks[1] = 0;
    *length = end;
  }
}

// Where the steps of 16 entries through a list, or one of its parts, begin and end: behind what no entry counts.
static __device__ __forceinline__ void enter_tiles(
    int* span, const int* list, const int* limits, int limited, int row, int entries, int tokens, int part, int parts) {
  span[0] = 0;
  span[1] = limited ? min(limits[row], entries) : entries;
  if (parts > 1) {
    const int end = list_end(list, span[1], tokens), share = ((end + 15) / 16 + parts - 1) / parts * 16;
    span[0] = min(part * share, end);
    span[1] = min(span[0] + share, end);
  }
}

// Of the steps of 16 entries from at on, the first that holds a valid one, or one at or behind end. For a whole warp.
static __device__ __noinline__ int next_tile(const int* list, int at, int end, int tokens) {
  for (; at < end; at += 512) {
    int entry[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int place = at + i * 32 + threadIdx.x % 32;
      entry[i] = place < end ? list[place] : -1;
    }
    unsigned filled = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) filled |= unsigned(is_token(entry[i], tokens)) << i * 2;
    filled = __reduce_or_sync(0xffffffffu, filled << threadIdx.x % 32 / 16);
    if (filled != 0) return at + (__ffs(filled) - 1) * 16;
  }
  return at;
}
"""
