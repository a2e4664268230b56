"""How the sparse forward goes through a list: its CUDA C++, compiled for the CPU, against what the rule says.

A thread block's 128 threads are coroutines, which a barrier or an exchange between lanes makes take turns. The tests
on a GPU let the same functions run there.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gapped_lists import BLOCK, TILE, WINDOW, invalid_like, patterns
from torch import Tensor

pytest.importorskip("tilelang", reason="TileLang is not installed (it is for Linux only)")
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ on PATH to compile the walk with")

TOKENS, UNUSED = 77, -9

# Where each warp of 128 threads goes: how many blocks were counted, whether one followed as was said, and the blocks;
# and each warp for itself in steps of 16, behind two places that stay unused.
WALKS = r"""
static __device__ void write_walk(
    const int* lists, const int* limits, int row, int entries, int tokens, int part, int parts, int room, int* to) {
  __shared__ unsigned shared;
  const int* list = lists + (long long)row * entries;
  to += threadIdx.x / 32 * room;
  Walk walk = enter_list<true>(list, limits[row], tokens, part, parts, &shared);
  int found = 2, right = 1;
  const int count = count_blocks(walk, list, tokens, &shared);
  for (;;) {
    const bool follows = block_follows(walk);
    next_block(walk, list, tokens, &shared);
    right &= follows == (walk.at < walk.end);
    if (walk.at >= walk.end) break;
    if (found < room && threadIdx.x % 32 == 0) to[found] = walk.at;
    ++found;
  }
  if (threadIdx.x % 32 == 0) {
    to[0] = count;
    to[1] = right;
  }
}

static __device__ void write_tiles(
    const int* lists, const int* limits, int row, int entries, int tokens, int part, int parts, int room, int* to) {
  const int* list = lists + (long long)row * entries;
  int span[2];
  enter_tiles(span, list, limits, 1, row, entries, tokens, part, parts);
  int found = 2, at = next_tile(list, span[0], span[1], tokens);
  for (; at < span[1]; at = next_tile(list, at + 16, span[1], tokens)) {
    if (found < room && threadIdx.x % 32 == 0) to[threadIdx.x / 32 * room + found] = at;
    ++found;
  }
}
"""

# How many blocks are found, their numbers, and last, behind the room for those, where the list ends.
FOUND = r"""
static __device__ void write_found(
    const int* lists, const int* limits, int row, int entries, int tokens, int, int, int room, int* to) {
  __shared__ unsigned shared;
  find_blocks(to, to + 4 * room - 1, lists + (long long)row * entries, limits[row], tokens, &shared);
}
"""

# What the walk uses of CUDA. Every coroutine runs up to its next exchange before the first one is resumed.
MACHINE = r"""
#include <algorithm>
#include <cstdio>
#include <ucontext.h>
#include <vector>
using std::max;
using std::min;
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
struct { int x; } threadIdx;
static const int kThreads = 128;
static ucontext_t scheduler, contexts[kThreads];
static unsigned slots[kThreads];
static int met, generation, running;
static void yield() {
  const int self = threadIdx.x;
  swapcontext(&contexts[self], &scheduler);
  threadIdx.x = self;
}
template <class F>
static unsigned exchange(unsigned value, F combine) {
  slots[threadIdx.x] = value;
  yield();
  unsigned all = slots[threadIdx.x / 32 * 32];
  for (int i = 1; i < 32; ++i) all = combine(all, slots[threadIdx.x / 32 * 32 + i]);
  yield();
  return all;
}
static unsigned __reduce_or_sync(unsigned, unsigned x) {
  return exchange(x, [](unsigned a, unsigned b) { return a | b; });
}
static int __reduce_max_sync(unsigned, int x) {
  return exchange(x, [](unsigned a, unsigned b) { return static_cast<unsigned>(max((int)a, (int)b)); });
}
static unsigned __ballot_sync(unsigned, bool x) { return __reduce_or_sync(0, (unsigned)x << threadIdx.x % 32); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static void meet_walkers() {
  const int before = generation;
  if (++met == kThreads) met = 0, ++generation;
  while (generation == before) yield();
}
"""

# Reads and writes: lists, entries, parts, room, limits, entries; then what each part of each list's walk wrote.
PROGRAM = r"""
static std::vector<int> lists, limits, places;
static int sizes[4], row, part;
static void thread() {
  int* to = places.data() + (static_cast<long long>(row) * sizes[2] + part) * 4 * sizes[3];
  FUNCTION(lists.data(), limits.data(), row, sizes[1], TOKENS, part, sizes[2], sizes[3], to);
  --running;
}
static void block() {
  static std::vector<char> stacks(kThreads << 16);
  for (int i = 0; i < kThreads; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[i << 16];
    contexts[i].uc_stack.ss_size = 1 << 16;
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], thread, 0);
  }
  bool ended[kThreads] = {};
  running = kThreads;
  for (int turns = 0; running > 0; ++turns) {
    if (turns > 1 << 20) std::exit(3);  // hangs
    for (int i = 0; i < kThreads; ++i) {
      if (ended[i]) continue;
      threadIdx.x = i;
      const int before = running;
      swapcontext(&scheduler, &contexts[i]);
      ended[i] = running < before;
    }
  }
}
int main() {
  std::fread(sizes, 4, 4, stdin);
  lists.resize(static_cast<long long>(sizes[0]) * sizes[1]);
  limits.resize(sizes[0]);
  places.assign(static_cast<long long>(sizes[0]) * sizes[2] * 4 * sizes[3], UNUSED);
  std::fread(limits.data(), 4, limits.size(), stdin);
  std::fread(lists.data(), 4, lists.size(), stdin);
  for (row = 0; row < sizes[0]; ++row)
    for (part = 0; part < sizes[2]; ++part) block();
  std::fwrite(places.data(), 4, places.size(), stdout);
}
"""


def cases(entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lists, how many entries of each count, and which are valid, in every pattern, whole and cut short."""
    valid = torch.cat([patterns(entries) for _ in range(3)])
    count = len(valid) // 3
    limits = [entries] * count + [entries // 2] * count + [max(0, entries - 3)] * (count - 2) + [0, -5]
    indices = torch.randint(0, TOKENS, valid.shape, dtype=torch.int32)
    return (
        torch.where(valid, indices, invalid_like(indices, TOKENS)),
        torch.tensor(limits, dtype=torch.int32),
        valid,
    )


def room(entries: int) -> int:
    return 3 + entries // TILE


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def steps(valid: list[bool], size: int, begin: int, end: int) -> list[int]:
    return [at for at in range(begin, end, size) if any(valid[at : min(at + size, end)])]


def check(found: Tensor, valid: Tensor, limits: Tensor, parts: int, size: int) -> None:
    """``found`` [lists, parts, 4 warps, room]: blocks of 64 or tiles of 16, and what the warps say of the blocks."""
    assert torch.equal(found[:, :, :1].expand_as(found), found), "warps disagree"
    for flags, limit, walks in zip(valid.tolist(), limits.tolist(), found[:, :, 0].tolist(), strict=True):
        end = max((at + 1 for at in range(limit) if flags[at]), default=0)
        filled = steps(flags, size, 0, end)
        for part, walk in enumerate(walks):
            if size == BLOCK and limit <= WINDOW:
                share = ceil_div(len(filled), parts)
                want = filled[part * share : (part + 1) * share]
            else:
                share = ceil_div(ceil_div(end, size), parts) * size
                want = steps(flags, size, min(part * share, end), min(part * share + share, end))
            head = [len(want), 1] if size == BLOCK else [UNUSED] * 2
            assert walk[: 2 + len(want)] == head + want
            assert set(walk[2 + len(want) :]) <= {UNUSED}


def compile_for_cpu(function: str, folder: Path) -> Path:
    from mla_convert.runtime.kernels._list_walk_cuda import SOURCE

    source = SOURCE
    for asm in ("template <int kThreads>", "static __device__ __forceinline__ void meet_walkers"):
        start = source.index(asm)
        source = source[:start] + source[source.index("\n}\n", start) + 3 :]
    (folder / "walk.cc").write_text(MACHINE + source + WALKS + FOUND + PROGRAM)
    names = {"FUNCTION": function, "TOKENS": TOKENS, "UNUSED": UNUSED}
    defines = [f"-D{name}={value}" for name, value in names.items()]
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-w", *defines, "walk.cc", "-o", "walk"], cwd=folder, check=True
    )
    return folder / "walk"


def run(program: Path, indices: Tensor, limits: Tensor, parts: int) -> Tensor:
    """What the function wrote, [lists, parts, 4 warps, room]."""
    lists, entries = indices.shape
    sizes = torch.tensor([lists, entries, parts, room(entries)], dtype=torch.int32)
    data = b"".join(x.numpy().tobytes() for x in (sizes, limits, indices))
    result = subprocess.run([program], input=data, stdout=subprocess.PIPE, check=True).stdout
    return torch.frombuffer(bytearray(result), dtype=torch.int32).view(lists, parts, 4, room(entries))


@pytest.fixture(scope="module", params=["write_walk", "write_tiles"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The compiled walk, and its steps."""
    compiled = compile_for_cpu(request.param, tmp_path_factory.mktemp("walk"))
    return compiled, BLOCK if request.param == "write_walk" else TILE


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("entries", [1, 65, 2048, 2049, 5000])
def test_walks(program: tuple[Path, int], entries: int, parts: int) -> None:
    torch.manual_seed(entries)
    indices, limits, valid = cases(entries)
    check(run(program[0], indices, limits, parts), valid, limits, parts, program[1])


def test_found_blocks(tmp_path: Path) -> None:
    program = compile_for_cpu("write_found", tmp_path)
    for entries in (1, 65, 2048, 2049, 5000):
        torch.manual_seed(entries)
        indices, limits, valid = cases(entries)
        found = run(program, indices, limits, 1).view(len(indices), -1)
        for flags, limit, written in zip(valid.tolist(), limits.tolist(), found.tolist(), strict=True):
            blocks = [at // BLOCK for at in steps(flags, BLOCK, 0, max(limit, 0))]
            end = max((at + 1 for at in range(limit) if flags[at]), default=0)
            want = [len(blocks), *(blocks or [0])]
            assert written[: len(want)] == want and written[-1] == end
            assert set(written[len(want) : -1]) <= {UNUSED}
