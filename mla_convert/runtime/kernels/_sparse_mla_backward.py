"""The main program of ``sparse_mla_backward``: five products for each query, tile of heads and block of its list.

It runs a thread block for each query and tile of 64 heads, with two warpgroups and heads on the M side.
Shared memory holds Q, dO, one block of 64 gathered rows, P and dS of 64 x 64, and nothing more fits. The first
warpgroup computes S = Q K^T and dP = dO V^T, from them P and dS, and the left columns of dQ += dS K; then it
gathers the next block. The second computes the other columns of dQ and dKV = dS^T Q + P^T dO, 64 columns at a
time in two accumulators, so that one is added to memory while the other's product runs. The rows of K are free as
soon as both have read them for dQ: the next block arrives, and its S and dP run, beside the dKV of this one.

Up to 32 heads, and where every run has to give the same bits, ``_sparse_mla_backward_shared`` takes its place.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK
from mla_convert.runtime.kernels._sparse_mla_backward_rows import NOTHING

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


def backward(tiles: int, rank: int, rope: int, dtype: str) -> Any:
    """dQ, and dKV added to tokens in float32."""
    width = rank + rope
    # Half of all columns of dQ: the second warpgroup has the rotary ones, and two accumulators of dKV beside them.
    left = min(-(-width // 128) * 64, rank - 64)
    right = rank - left
    first_left = min(left, 256)  # what one instruction takes
    queries, tokens, heads, entries = T.dynamic("queries, tokens, heads, entries")

    @T.macro
    def load(Source, row, first, heads, base, to, columns, thread):
        """Copy 64 heads of one query, [base, base + columns) of each; heads that do not exist become zeros."""
        for r in T.unroll(4):
            h = r * 16 + thread // 8
            for u in T.unroll(columns // 64):
                T.ptx_cp_async(
                    T.access_ptr(to[h, u * 64 + thread % 8 * 8], "w", 8),
                    T.access_ptr(
                        Source[row, T.min(first + h, heads - 1), base + u * 64 + thread % 8 * 8], "r", 8
                    ),
                    8,
                    first + h < heads,
                )

    @T.macro
    def fetch(Indices, index, row, begin, length, thread):
        """The entries of a block whose rows this thread helps to copy: eight threads a row."""
        for r in T.unroll(4):
            index[r] = -1
            if begin + r * 16 + thread // 8 < length:
                index[r] = Indices[row, begin + r * 16 + thread // 8]

    @T.macro
    def gather(KV, index, kv_rank, kv_rope, target, s, tokens, thread, full):
        """Copy the rows of a block; one that is not valid becomes zeros, and its target -1."""
        for r in T.unroll(4):
            j = r * 16 + thread // 8
            ok = (index[r] >= 0) & (index[r] < tokens)
            if thread % 8 == 0:
                target[s, j] = T.if_then_else(ok, index[r], -1)
            for u in T.unroll(left // 64):
                T.ptx_cp_async(
                    T.access_ptr(kv_rank[j, u * 64 + thread % 8 * 8], "w", 8),
                    T.access_ptr(KV[T.if_then_else(ok, index[r], 0), u * 64 + thread % 8 * 8], "r", 8),
                    8,
                    ok,
                )
        T.cp_async_barrier_noinc(full[0])
        for r in T.unroll(4):
            j = r * 16 + thread // 8
            ok = (index[r] >= 0) & (index[r] < tokens)
            for u in T.unroll(right // 64):
                T.ptx_cp_async(
                    T.access_ptr(kv_rank[j, left + u * 64 + thread % 8 * 8], "w", 8),
                    T.access_ptr(KV[T.if_then_else(ok, index[r], 0), left + u * 64 + thread % 8 * 8], "r", 8),
                    8,
                    ok,
                )
            if rope > 0:
                T.ptx_cp_async(
                    T.access_ptr(kv_rope[j, thread % 8 * 8], "w", 8),
                    T.access_ptr(KV[T.if_then_else(ok, index[r], 0), rank + thread % 8 * 8], "r", 8),
                    8,
                    ok,
                )
        T.cp_async_barrier_noinc(full[1])
        T.barrier_arrive(full[1])  # in release order, for the targets

    def product(c, q_rank, q_rope, do_sh, p_sh, ds_sh, acc):
        """64 columns of dKV: values and keys share the first ``rank`` of them, those behind are rotary."""
        if c * 64 < rank:
            columns = slice(c * 64, c * 64 + 64)
            T.evaluate(T.wgmma_gemm(ds_sh, q_rank[:, columns], acc, transpose_A=True, clear_accum=True))
            T.evaluate(T.wgmma_gemm(p_sh, do_sh[:, columns], acc, transpose_A=True))
        else:
            T.evaluate(T.wgmma_gemm(ds_sh, q_rope, acc, transpose_A=True, clear_accum=True))

    def add(c, acc, target, s, dKV):
        T.evaluate(
            T.call_extern(
                "handle",
                "mla_scatter<true>",
                T.access_ptr(dKV[0, c * 64], "rw", 64),
                T.access_ptr(acc[0, 0], "rw", 32),
                T.access_ptr(target[s, 0], "r", 64),
                width,
            )
        )

    def scatter_all(q_rank, q_rope, do_sh, p_sh, ds_sh, acc0, acc1, target, s, p_free, kv_free, dKV):
        """Every chunk of dKV, one product ahead of the additions; dQ's product is in flight at the start."""
        accs = (acc0, acc1)
        chunks = width // 64
        product(0, q_rank, q_rope, do_sh, p_sh, ds_sh, accs[0])
        T.evaluate(T.wait_wgmma(2))
        T.evaluate(T.barrier_arrive(kv_free))
        for c in range(chunks):
            if c + 1 < chunks:
                product(c + 1, q_rank, q_rope, do_sh, p_sh, ds_sh, accs[(c + 1) % 2])
                T.evaluate(T.wait_wgmma(2 if (c + 1) * 64 < rank else 1))
            else:
                T.evaluate(T.wait_wgmma(0))
                T.evaluate(T.barrier_arrive(p_free))
            add(c, accs[c % 2], target, s, dKV)

    @T.prim_func
    def sparse_mla_backward_program(
        Q: T.Tensor([queries, heads, width], dtype),
        KV: T.Tensor([tokens, width], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        DOut: T.Tensor([queries, heads, rank], dtype),
        Lse2: T.Tensor([queries, heads], "float32"),
        Share: T.Tensor([queries, heads], "float32"),
        Offset: T.Tensor([queries, heads], "float32"),
        scale: T.float32,
        DQ: T.Tensor([queries, heads, width], dtype),
        DKV: T.Tensor([tokens, width], "float32"),
    ):
        with T.Kernel(queries * tiles, threads=256) as block:
            T.import_source(SCATTER)
            q_rank = T.alloc_shared([64, rank], dtype)
            q_rope = T.alloc_shared([64, max(rope, 64)], dtype)
            do_sh = T.alloc_shared([64, rank], dtype)
            kv_rank = T.alloc_shared([BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([BLOCK, max(rope, 64)], dtype)
            p_sh = T.alloc_shared([64, BLOCK], dtype)
            ds_sh = T.alloc_shared([64, BLOCK], dtype)
            target = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            score = T.alloc_fragment([64, BLOCK], "float32")
            dp = T.alloc_fragment([64, BLOCK], "float32")
            p = T.alloc_fragment([64, BLOCK], dtype)
            ds = T.alloc_fragment([64, BLOCK], dtype)
            lse2 = T.alloc_fragment([64], "float32")
            share = T.alloc_fragment([64], "float32")
            offset = T.alloc_fragment([64], "float32")
            dq0 = T.alloc_fragment([64, first_left], "float32")
            dq1 = T.alloc_fragment([64, 64], "float32")
            dq2 = T.alloc_fragment([64, right], "float32")
            dq3 = T.alloc_fragment([64, 64], "float32")
            acc0 = T.alloc_fragment([BLOCK, 64], "float32")
            acc1 = T.alloc_fragment([BLOCK, 64], "float32")
            # TileLang cannot tell from a call to its own C++ how a fragment lies: as wgmma leaves it.
            T.annotate_layout(
                {acc: T.Fragment(acc.shape, forward_fn=accumulator_place) for acc in (acc0, acc1)}
            )
            index = T.alloc_local([4], "int32")
            row = T.alloc_var("int32")
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            count = T.alloc_var("int32")
            q_full = T.alloc_barrier([256])
            full = T.alloc_barrier([128, 256])
            ds_full = T.alloc_barrier([128])
            kv_free = T.alloc_barrier([256])
            p_free = T.alloc_barrier([128])

            thread = T.get_thread_binding()
            row = block // tiles
            first = block % tiles * 64
            length = Lengths[row]
            count = T.ceildiv(length, BLOCK)
            if thread < 128:
                fetch(Indices, index, row, 0, length, thread)
                load(Q, row, first, heads, 0, q_rank, rank, thread)
                if rope > 0:
                    load(Q, row, first, heads, rank, q_rope, rope, thread)
                T.cp_async_barrier_noinc(q_full[0])
                if count > 0:
                    gather(KV, index, kv_rank, kv_rope, target, 0, tokens, thread, full)
                for h in T.Parallel(64):
                    lse2[h] = NOTHING
                    share[h] = 0.0
                    offset[h] = 0.0
                    if first + h < heads:
                        lse2[h] = Lse2[row, T.min(first + h, heads - 1)]
                        share[h] = Share[row, T.min(first + h, heads - 1)]
                        offset[h] = Offset[row, T.min(first + h, heads - 1)]
                T.fill(dq0, 0)
                if left > first_left:
                    T.fill(dq1, 0)
                T.barrier_wait(q_full[0], 0)
                for i in T.serial(count):
                    T.barrier_wait(full[0], i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(
                        q_rank[:, :left], kv_rank[:, :left], score, transpose_B=True, clear_accum=True
                    )
                    T.barrier_wait(full[1], i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_rank[:, left:], kv_rank[:, left:], score, transpose_B=True)
                    if rope > 0:
                        T.wgmma_gemm(q_rope, kv_rope, score, transpose_B=True)
                    T.wgmma_gemm(do_sh, kv_rank, dp, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(1)
                    # Without a branch, since one around registers would wait for the product in flight.
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.if_then_else(
                            target[i % 2, j] >= 0, score[h, j], -T.infinity("float32")
                        )
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.exp2(score[h, j] * (scale * LOG2E) - lse2[h])
                    T.wait_wgmma(0)
                    for h, j in T.Parallel(64, BLOCK):
                        dp[h, j] = score[h, j] * (dp[h, j] * (share[h] * scale) + offset[h])
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = score[h, j] * share[h]
                    T.copy(score, p)
                    T.copy(dp, ds)
                    T.barrier_wait(p_free[0], (i & 1) ^ 1)
                    T.copy(p, p_sh)
                    T.copy(ds, ds_sh)
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_full[0])
                    T.wgmma_gemm(ds, kv_rank[:, :first_left], dq0)
                    if left > first_left:
                        T.wgmma_gemm(ds, kv_rank[:, first_left:left], dq1)
                    fetch(Indices, index, row, (i + 1) * BLOCK, length, thread)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free[0])
                    T.barrier_wait(kv_free[0], i & 1)
                    if i + 1 < count:
                        gather(KV, index, kv_rank, kv_rope, target, (i + 1) % 2, tokens, thread, full)
                if count > 0:
                    T.barrier_wait(p_free[0], (count & 1) ^ 1)
                T.copy(dq0, q_rank[:, :first_left])
                if left > first_left:
                    T.copy(dq1, q_rank[:, first_left:left])
                T.sync_threads(8, 128)
                for h, d in T.Parallel(64, left):
                    if first + h < heads:
                        DQ[row, first + h, d] = q_rank[h, d]
            else:
                load(DOut, row, first, heads, 0, do_sh, rank, thread - 128)
                T.cp_async_barrier_noinc(q_full[0])
                T.fill(dq2, 0)
                if rope > 0:
                    T.fill(dq3, 0)
                T.barrier_wait(q_full[0], 0)
                for i in T.serial(count):
                    T.barrier_wait(ds_full[0], i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(ds_sh, kv_rank[:, left:], dq2)
                    if rope > 0:
                        T.wgmma_gemm(ds_sh, kv_rope, dq3)
                    scatter_all(
                        q_rank,
                        q_rope,
                        do_sh,
                        p_sh,
                        ds_sh,
                        acc0,
                        acc1,
                        target,
                        i % 2,
                        p_free[0],
                        kv_free[0],
                        DKV,
                    )
                T.sync_threads(9, 128)  # every warp's products have read Q
                T.copy(dq2, q_rank[:, left:])
                if rope > 0:
                    T.copy(dq3, q_rope)
                T.sync_threads(9, 128)
                for h, d in T.Parallel(64, right):
                    if first + h < heads:
                        DQ[row, first + h, left + d] = q_rank[h, left + d]
                if rope > 0:
                    for h, d in T.Parallel(64, rope):
                        if first + h < heads:
                            DQ[row, first + h, rank + d] = q_rope[h, d]

    return sparse_mla_backward_program
