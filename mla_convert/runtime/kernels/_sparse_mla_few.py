"""The program of ``sparse_mla`` for up to 32 heads; ``_sparse_mla`` describes it beside the other one."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK, LOWEST, gather, load_queries


def few_heads(columns: int, rank: int, rope: int, dtype: str) -> Any:
    """Keys on the M side, ``columns`` (8, 16 or 32) heads on the N side: one thread block a query.

    Each consumer computes S^T = K q^T for its block, turns it round through shared memory so that the softmax
    reduces inside a warp, and adds V^T P^T to its own [rank, columns] sum.
    """
    queries, tokens, heads, entries = T.dynamic("queries, tokens, heads, entries")
    stride = BLOCK + 4  # keeps the turn round free of bank conflicts and its rows on 16 bytes

    # The softmax is written thread by thread. As fragments, TileLang chose a layout for the second consumer that
    # put a barrier inside one warp's branch (a hang), and it has no way to fix a layout for those threads.
    rows = min(columns, 16)  # rows of S at a time
    lanes = 128 // rows  # threads of a row, all in one warp
    keys = BLOCK // lanes  # keys of a thread
    passes = columns // rows

    @T.macro
    def consume(
        g, t, length, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, valid, q_full, full, free,
        score, out, highest, total,
    ):  # fmt: skip
        p = T.alloc_local([keys], "float32")
        p_rounded = T.alloc_local([keys], dtype)
        top = T.alloc_var("float32")
        part = T.alloc_var("float32")
        factor = T.alloc_var("float32")
        T.fill(out, 0)
        for r in T.unroll(passes):
            highest[r] = LOWEST
            total[r] = 0.0
        T.barrier_wait(q_full, 0)
        for i in T.serial(T.ceildiv(T.ceildiv(length, BLOCK) - g, 2)):
            T.barrier_wait(full[g], i & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(kv_rank[g, :, :], q_rank, score, transpose_B=True, clear_accum=True)
            if rope > 0:
                T.wgmma_gemm(kv_rope[g, :, :], q_rope, score, transpose_B=True)
            T.wait_wgmma(0)
            for j, n in T.Parallel(BLOCK, columns):
                turn[g, n, j] = score[j, n]
            T.sync_threads(8 + g, 128)
            for r in T.unroll(passes):
                n = r * rows + t // lanes
                j = t % lanes * keys
                for k in T.unroll(keys):
                    p[k] = T.if_then_else(valid[g, j + k] != 0, turn[g, n, j + k], -T.infinity("float32"))
                top = highest[r]
                for k in T.unroll(keys):
                    top = T.max(top, p[k])
                for b in T.unroll(lanes.bit_length() - 1):
                    top = T.max(top, T.shfl_xor(top, 1 << b))
                factor = T.exp2((highest[r] - top) * scale)
                highest[r] = top
                part = 0.0
                for k in T.unroll(keys):
                    p[k] = T.exp2(p[k] * scale - top * scale)
                    part = part + p[k]
                for b in T.unroll(lanes.bit_length() - 1):
                    part = part + T.shfl_xor(part, 1 << b)
                total[r] = total[r] * factor + part
                for k in T.vectorized(keys):
                    p_rounded[k] = p[k]
                for k in T.vectorized(keys):
                    p_sh[g, n, j + k] = p_rounded[k]
                if t % lanes == 0:
                    factor_sh[g, n] = factor
            T.fence_proxy_async()
            T.sync_threads(8 + g, 128)  # every thread's fence comes before any thread's matrix product
            for d, n in T.Parallel(rank, columns):
                out[d, n] = out[d, n] * factor_sh[g, n]
            T.wgmma_gemm(kv_rank[g, :, :], p_sh[g, :, :], out, transpose_A=True, transpose_B=True)
            T.wait_wgmma(0)
            T.barrier_arrive(free[g])

    @T.prim_func
    def sparse_mla_few_heads(
        Q: T.Tensor([queries, heads, rank + rope], dtype),
        KV: T.Tensor([tokens, rank + rope], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([queries, heads, rank], dtype),
        Lse: T.Tensor([queries, heads], "float32"),
    ):
        with T.Kernel(queries, threads=384) as row:
            q_rank = T.alloc_shared([columns, rank], dtype)
            q_rope = T.alloc_shared([columns, max(rope, 32)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, 32)], dtype)
            turn = T.alloc_shared([2, columns, stride], "float32")
            p_sh = T.alloc_shared([2, columns, BLOCK], dtype)
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            factor_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            other_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            # Two of each, one a consumer: TileLang lays a fragment out for the threads that use it.
            score0 = T.alloc_fragment([BLOCK, columns], "float32")
            score1 = T.alloc_fragment([BLOCK, columns], "float32")
            out0 = T.alloc_fragment([rank, columns], "float32")
            out1 = T.alloc_fragment([rank, columns], "float32")
            highest = T.alloc_local([passes], "float32")
            total = T.alloc_local([passes], "float32")
            mine = T.alloc_local([passes], "float32")
            other = T.alloc_local([passes], "float32")
            top = T.alloc_var("float32")
            denominator = T.alloc_var("float32")
            q_full = T.alloc_barrier([128])
            full = T.alloc_barrier([256, 256])
            free = T.alloc_barrier([128, 128])
            other_full = T.alloc_barrier([128])
            turn_full = T.alloc_barrier([128, 128])
            turn_free = T.alloc_barrier([128, 128])

            length = Lengths[row]
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(216, 1)
                consume(
                    0, thread, length, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, valid,
                    q_full, full, free, score0, out0, highest, total,
                )  # fmt: skip
                T.barrier_arrive(turn_free[0])
                T.barrier_arrive(turn_free[1])
                T.barrier_wait(other_full, 0)
                for r in T.unroll(passes):
                    n = r * rows + thread // lanes
                    top = T.max(highest[r], other_sh[0, n])
                    mine[r] = T.exp2((highest[r] - top) * scale)
                    other[r] = T.exp2((other_sh[0, n] - top) * scale)
                    total[r] = total[r] * mine[r] + other_sh[1, n] * other[r]
                    denominator = total[r]
                    if n < heads:
                        if has_sink != 0:
                            denominator = denominator + T.exp2(Sink[n] * LOG2E - top * scale)
                        if thread % lanes == 0:
                            Lse[row, n] = T.if_then_else(
                                total[r] == 0.0,
                                -T.infinity("float32"),
                                (T.log2(total[r]) + top * scale) * LN2,
                            )
                    mine[r] = T.if_then_else(total[r] == 0.0, 0.0, mine[r] / denominator)
                    other[r] = T.if_then_else(total[r] == 0.0, 0.0, other[r] / denominator)
                T.sync_threads(8, 128)
                for r in T.unroll(passes):
                    if thread % lanes == 0:
                        factor_sh[0, r * rows + thread // lanes] = mine[r]
                        other_sh[0, r * rows + thread // lanes] = other[r]
                T.sync_threads(8, 128)
                for k in T.unroll(rank // 64):
                    T.barrier_wait(turn_full[k % 2], (k // 2) & 1)
                    for d, n in T.Parallel(64, columns):
                        out0[k * 64 + d, n] = (
                            out0[k * 64 + d, n] * factor_sh[0, n] + turn[k % 2, n, d] * other_sh[0, n]
                        )
                    T.barrier_arrive(turn_free[k % 2])
                for d, n in T.Parallel(rank, columns):
                    q_rank[n, d] = out0[d, n]
                for n, d in T.Parallel(columns, rank):
                    if n < heads:
                        Out[row, n, d] = q_rank[n, d]
            elif thread < 256:
                T.set_max_nreg(216, 1)
                consume(
                    1, thread - 128, length, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, valid,
                    q_full, full, free, score1, out1, highest, total,
                )  # fmt: skip
                for r in T.unroll(passes):
                    if (thread - 128) % lanes == 0:
                        other_sh[0, r * rows + (thread - 128) // lanes] = highest[r]
                        other_sh[1, r * rows + (thread - 128) // lanes] = total[r]
                T.barrier_arrive(other_full)
                for k in T.unroll(rank // 64):
                    T.barrier_wait(turn_free[k % 2], (k // 2) & 1)
                    for d, n in T.Parallel(64, columns):
                        turn[k % 2, n, d] = out1[k * 64 + d, n]
                    T.barrier_arrive(turn_full[k % 2])
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                load_queries(Q, q_rank, q_rope, row, 0, heads, producer, q_full, columns, rank, rope)
                gather(
                    KV,
                    Indices,
                    kv_rank,
                    kv_rope,
                    valid,
                    row,
                    length,
                    tokens,
                    producer,
                    full,
                    free,
                    rank,
                    rope,
                )

    return sparse_mla_few_heads
