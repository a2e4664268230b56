"""The small programs around ``_sparse_mla_backward``: terms of each query and head, and sums in a fixed order.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels import _list_walk_cuda as list_walk
from mla_convert.runtime.kernels._common import LOG2E

NOTHING = 1.0e30  # log-sum-exp of a row without keys: every exponential against it is 0


def prepare(rank: int, dtype: str) -> Any:
    """What the gradient of a score needs of its row: log2-sum-exp, share beside the sink, delta and offset.

    With p = exp(score - lse): P = p * share, dS = p * (share * dP * scale + offset), where
    offset = (d_lse - share * delta) * scale and delta = dO . O.
    """
    queries, heads = T.dynamic("queries, heads")
    rows = 8
    columns = 1 << (rank - 1).bit_length()  # TileLang finds no layout for 192 or 320 dims of 128 threads

    @T.prim_func
    def sparse_mla_backward_prepare(
        Out: T.Tensor([queries, heads, rank], dtype),
        DOut: T.Tensor([queries, heads, rank], dtype),
        Lse: T.Tensor([queries, heads], "float32"),
        DLse: T.Tensor([queries, heads], "float32"),
        has_d_lse: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Lse2: T.Tensor([queries, heads], "float32"),
        Share: T.Tensor([queries, heads], "float32"),
        Delta: T.Tensor([queries, heads], "float32"),
        Offset: T.Tensor([queries, heads], "float32"),
    ):
        with T.Kernel(queries, T.ceildiv(heads, rows), threads=128) as (s, tile):
            product = T.alloc_fragment([rows, columns], "float32")
            delta = T.alloc_fragment([rows], "float32")
            share = T.alloc_fragment([rows], "float32")
            for h, d in T.Parallel(rows, columns):
                if (tile * rows + h < heads) & (d < rank):
                    product[h, d] = T.cast(Out[s, tile * rows + h, d], "float32") * T.cast(
                        DOut[s, tile * rows + h, d], "float32"
                    )
                else:
                    product[h, d] = 0.0
            T.reduce_sum(product, delta, dim=1)
            for h in T.Parallel(rows):
                if tile * rows + h < heads:
                    share[h] = 1.0
                    if has_sink != 0:
                        share[h] = 1.0 / (
                            1.0 + T.exp2((Sink[tile * rows + h] - Lse[s, tile * rows + h]) * LOG2E)
                        )
                        if Lse[s, tile * rows + h] == -T.infinity("float32"):
                            share[h] = 0.0  # of an empty row, even beside a sink of -inf
                    Share[s, tile * rows + h] = share[h]
                    Delta[s, tile * rows + h] = delta[h]
                    Lse2[s, tile * rows + h] = T.if_then_else(
                        Lse[s, tile * rows + h] == -T.infinity("float32"),
                        NOTHING,
                        Lse[s, tile * rows + h] * LOG2E,
                    )
                    if has_d_lse != 0:
                        Offset[s, tile * rows + h] = (DLse[s, tile * rows + h] - share[h] * delta[h]) * scale
                    else:
                        Offset[s, tile * rows + h] = -share[h] * delta[h] * scale

    return sparse_mla_backward_prepare


def slot_dtype(dtype: str) -> str:
    """Of one entry's gradient: bfloat16 is what P and dS were rounded to, float16 might overflow."""
    return "bfloat16" if dtype == "bfloat16" else "float32"


def sum_slots(width: int, dtype: str) -> Any:
    """dKV[t] += the rows of every entry that lists token t, in the order of ``Order``: two runs give equal bits.

    ``Order`` holds numbers of entries (list * K + position), those of token t from ``Begin[t]`` on, and the
    rows begin with those of entry ``first``. An entry has a row for each of ``tiles`` tiles of heads.
    """
    tokens, listed, slots, bounds = T.dynamic("tokens, listed, slots, bounds")
    columns = 128 // (16 if dtype == "bfloat16" else 32)  # 16 bytes
    threads = -(-width // columns // 32) * 32
    ahead = 8  # rows in flight

    @T.prim_func
    def sparse_mla_backward_sum_slots(
        Slots: T.Tensor([slots, width], dtype),
        Order: T.Tensor([listed], "int64"),
        Begin: T.Tensor([bounds], "int64"),
        first: T.int64,
        tiles: T.int32,
        DKV: T.Tensor([tokens, width], "float32"),
    ):
        with T.Kernel(tokens, threads=threads) as token:
            total = T.alloc_local([columns], "float32")
            row = T.alloc_local([ahead, columns], dtype)
            begin = T.alloc_var("int64")
            count = T.alloc_var("int32")
            last = T.alloc_var("int32")
            column = T.get_thread_binding() * columns
            if column < width:
                begin = Begin[token]
                count = T.cast(Begin[token + 1] - begin, "int32") * tiles
                last = count - 1
                for k in T.vectorized(columns):
                    total[k] = DKV[token, column + k]
                for n in T.serial(T.ceildiv(count, ahead)):
                    for u in T.unroll(ahead):
                        for k in T.vectorized(columns):
                            row[u, k] = Slots[
                                (Order[begin + T.truncdiv(T.min(n * ahead + u, last), tiles)] - first) * tiles
                                + T.truncmod(T.min(n * ahead + u, last), tiles),
                                column + k,
                            ]
                    for u in T.unroll(ahead):
                        if n * ahead + u < count:
                            for k in T.unroll(columns):
                                total[k] = total[k] + T.cast(row[u, k], "float32")
                for k in T.vectorized(columns):
                    DKV[token, column + k] = total[k]

    return sparse_mla_backward_sum_slots


def sum_parts(width: int, dtype: str) -> Any:
    """dQ from its float32 parts, in their order: two runs give equal bits."""
    rows, part_rows = T.dynamic("rows, part_rows")

    @T.prim_func
    def sparse_mla_backward_sum_parts(
        Part: T.Tensor([part_rows, width], "float32"),
        parts: T.int32,
        DQ: T.Tensor([rows, width], dtype),
    ):
        with T.Kernel(rows, threads=width // 4) as row:
            total = T.alloc_local([4], "float32")
            rounded = T.alloc_local([4], dtype)
            column = T.get_thread_binding() * 4
            T.fill(total, 0.0)
            for part in T.serial(parts):
                for k in T.vectorized(4):
                    total[k] = total[k] + Part[part * rows + row, column + k]
            for k in T.vectorized(4):
                rounded[k] = total[k]
            for k in T.vectorized(4):
                DQ[row, column + k] = rounded[k]

    return sparse_mla_backward_sum_parts


GROUP = 4  # queries of a list at most
UNION_THREADS = 1024
UNION_TOKENS = 1 << 18  # at most: a bit and a count of the bits before it, in shared memory
UNION_ENTRIES = 8192  # at most, of all lists together

UNION = """
__device__ __forceinline__ int mla_block_sum_before(int mine, int* total, int* warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) {
    before += w < warp ? warps[w] : 0;
    all += warps[w];
  }
  *total = all;
  return before + sum - mine;
}

// The tokens that some of the lists name, in their order, and how often each list names each.
__device__ __forceinline__ void mla_union(
    int* tokens_out, unsigned short* counts_out, int* length_out, int* blocks_out, const int* lists,
    const int* lengths, int queries, int entries, int stride, int tokens, unsigned* seen, unsigned* before,
    unsigned* counts, int* warps) {
  const int words = (tokens + 31) / 32, listed = queries * entries;
  for (int i = threadIdx.x; i < words; i += blockDim.x) seen[i] = 0;
  for (int i = threadIdx.x; i < 2 * listed; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const auto each = [&](auto function) {
    for (int i = threadIdx.x; i < listed; i += blockDim.x) {
      const int query = i / entries, token = lists[i];
      if (i - query * entries < lengths[query] && token >= 0 && token < tokens) function(query, token);
    }
  };
  each([&](int, int token) { atomicOr(&seen[token >> 5], 1u << (token & 31)); });
  __syncthreads();
  const int chunk = (words + blockDim.x - 1) / blockDim.x, first = min((int)threadIdx.x * chunk, words);
  const int last = min(first + chunk, words);
  int mine = 0, total;
  for (int i = first; i < last; ++i) mine += __popc(seen[i]);
  int place = mla_block_sum_before(mine, &total, warps);
  for (int i = first; i < last; ++i) {
    before[i] = place;
    place += __popc(seen[i]);
  }
  // Each list starts at another token, or all thread blocks would add to the same ones at the same time.
  const int shift = __umulhi(blockIdx.x * 0x9e3779b1u, total);
  const auto turned = [&](int at) { return at + shift < total ? at + shift : at + shift - total; };
  __syncthreads();
  each([&](int query, int token) {
    const int at = turned(before[token >> 5] + __popc(seen[token >> 5] & ((1u << (token & 31)) - 1)));
    atomicAdd(&counts[at * 2 + query / 2], 1u << (query % 2 * 16));
  });
  __syncthreads();
  for (int i = threadIdx.x; i < words; i += blockDim.x) {
    int at = before[i];
    for (unsigned rest = seen[i]; rest; rest &= rest - 1) tokens_out[turned(at++)] = i * 32 + __ffs(rest) - 1;
  }
  for (int i = threadIdx.x; i < (total + 63) / 64 * 64; i += blockDim.x) {
#pragma unroll
    for (int query = 0; query < 4; ++query) {
      const unsigned count = i < total ? counts[i * 2 + query / 2] >> (query % 2 * 16) : 0;
      counts_out[query * (long long)stride + i] = count & 0xffff;
    }
  }
  for (int i = threadIdx.x; i <= (total + 63) / 64; i += blockDim.x) blocks_out[i] = i ? i - 1 : (total + 63) / 64;
  if (threadIdx.x == 0) *length_out = total;
}
"""


def unite() -> Any:
    """One list for each ``group`` queries: the tokens that some of theirs name, and how often each query names each.

    Entries that are not valid are not in it, so ``Blocks``, as ``blocks_of`` finds them, are all that there are.
    """
    queries, entries, lists, united, blocks = T.dynamic("queries, entries, lists, united, blocks")

    @T.prim_func
    def sparse_mla_backward_unite(
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        tokens: T.int32,
        group: T.int32,
        Tokens: T.Tensor([lists, united], "int32"),
        Counts: T.Tensor([lists, GROUP, united], "uint16"),
        UnitedLengths: T.Tensor([lists], "int32"),
        Blocks: T.Tensor([lists, blocks], "int32"),
    ):
        with T.Kernel(lists, threads=UNION_THREADS) as row:
            T.import_source(UNION)
            seen = T.alloc_shared([UNION_TOKENS // 32], "uint32", scope="shared.dyn")
            before = T.alloc_shared([UNION_TOKENS // 32], "uint32", scope="shared.dyn")
            counts = T.alloc_shared([UNION_ENTRIES * 2], "uint32", scope="shared.dyn")
            warps = T.alloc_shared([32], "int32", scope="shared.dyn")
            T.evaluate(
                T.call_extern(
                    "handle",
                    "mla_union",
                    T.access_ptr(Tokens[row, 0], "w", united),
                    T.access_ptr(Counts[row, 0, 0], "w", GROUP * united),
                    T.access_ptr(UnitedLengths[row], "w", 1),
                    T.access_ptr(Blocks[row, 0], "w", blocks),
                    T.access_ptr(Indices[row * group, 0], "r", entries),
                    T.access_ptr(Lengths[row * group], "r", 1),
                    T.min(group, queries - row * group),
                    entries,
                    united,
                    tokens,
                    T.access_ptr(seen[0], "rw", UNION_TOKENS // 32),
                    T.access_ptr(before[0], "rw", UNION_TOKENS // 32),
                    T.access_ptr(counts[0], "rw", UNION_ENTRIES * 2),
                    T.access_ptr(warps[0], "rw", 32),
                )
            )

    return sparse_mla_backward_unite


def blocks_of() -> Any:
    """``Blocks[s]``: of list s, how many blocks of 64 entries hold a valid one, and then their numbers.

    Kernels walk these alone; where there are none, there is one number, 0. What lies behind is left as it is.
    ``Lengths[s]`` is 1 + the position of the last valid entry, or 0.
    """
    lists, entries, blocks = T.dynamic("lists, entries, blocks")

    @T.prim_func
    def sparse_mla_blocks(
        Indices: T.Tensor([lists, entries], "int32"),
        Limits: T.Tensor([lists], "int32"),
        tokens: T.int32,
        use_limits: T.int32,
        Lengths: T.Tensor([lists], "int32"),
        Blocks: T.Tensor([lists, blocks], "int32"),
    ):
        with T.Kernel(lists, threads=128) as row:
            T.import_source(list_walk.SOURCE)
            found = T.alloc_shared([1], "uint32", scope="shared")
            limit = T.alloc_var("int32")
            limit = entries
            if use_limits != 0:
                limit = T.min(limit, Limits[row])
            T.evaluate(
                T.call_extern(
                    "handle",
                    "find_blocks",
                    T.access_ptr(Blocks[row, 0], "w", blocks),
                    T.access_ptr(Lengths[row], "w", 1),
                    T.access_ptr(Indices[row, 0], "r", entries),
                    limit,
                    tokens,
                    T.access_ptr(found[0], "rw", 1),
                )
            )

    return sparse_mla_blocks
