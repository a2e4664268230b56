"""The program of ``sparse_mla`` for up to 32 heads; ``_sparse_mla`` describes it beside the other one."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK, LOWEST, gather, load_queries


def _softmax_layout(columns: int) -> Any:
    """Thread and register of element [row, key]: rows over all 128 threads, a row's keys inside one warp."""
    rows = min(columns, 16)  # rows at a time
    threads = 128 // rows  # of a row
    keys = BLOCK // threads  # of a thread
    return lambda row, key: (row % rows * threads + key // keys, row // rows * keys + key % keys)


def few_heads(columns: int, rank: int, rope: int, dtype: str) -> Any:
    """Keys on the M side, ``columns`` (8, 16 or 32) heads on the N side: one thread block a query.

    Each consumer computes S^T = K q^T for its block, turns it round through shared memory so that the softmax
    reduces inside a warp, and adds V^T P^T to its own [rank, columns] sum.
    """
    queries, tokens, heads, entries = T.dynamic("queries, tokens, heads, entries")
    stride = BLOCK + 4  # keeps the turn round free of bank conflicts and its rows on 16 bytes

    @T.macro
    def consume(
        g, length, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, valid, q_full, full, free,
        score, p, out, highest, before, factor, total, part,
    ):  # fmt: skip
        T.fill(out, 0)
        T.fill(total, 0)
        T.fill(highest, LOWEST)
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
            for n, j in T.Parallel(columns, BLOCK):
                p[n, j] = T.if_then_else(valid[g, j] != 0, turn[g, n, j], -T.infinity("float32"))
            T.copy(highest, before)
            T.reduce_max(p, highest, dim=1, clear=False)
            for n in T.Parallel(columns):
                factor[n] = T.exp2((before[n] - highest[n]) * scale)
            for n, j in T.Parallel(columns, BLOCK):
                p[n, j] = T.exp2(p[n, j] * scale - highest[n] * scale)
            T.reduce_sum(p, part, dim=1)
            for n in T.Parallel(columns):
                total[n] = total[n] * factor[n] + part[n]
            T.copy(p, p_sh[g, :, :])
            T.copy(factor, factor_sh[g, :])
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
            p0 = T.alloc_fragment([columns, BLOCK], "float32")
            p1 = T.alloc_fragment([columns, BLOCK], "float32")
            out0 = T.alloc_fragment([rank, columns], "float32")
            out1 = T.alloc_fragment([rank, columns], "float32")
            highest0 = T.alloc_fragment([columns], "float32")
            highest1 = T.alloc_fragment([columns], "float32")
            before0 = T.alloc_fragment([columns], "float32")
            before1 = T.alloc_fragment([columns], "float32")
            factor0 = T.alloc_fragment([columns], "float32")
            factor1 = T.alloc_fragment([columns], "float32")
            total0 = T.alloc_fragment([columns], "float32")
            total1 = T.alloc_fragment([columns], "float32")
            part0 = T.alloc_fragment([columns], "float32")
            part1 = T.alloc_fragment([columns], "float32")
            # Left to itself TileLang may give a row to one warp and put a barrier in that warp's branch: a hang.
            T.annotate_layout(
                {
                    p0: T.Fragment([columns, BLOCK], forward_fn=_softmax_layout(columns)),
                    p1: T.Fragment([columns, BLOCK], forward_fn=_softmax_layout(columns)),
                }
            )
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
                    0, length, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, valid, q_full, full,
                    free, score0, p0, out0, highest0, before0, factor0, total0, part0,
                )  # fmt: skip
                T.barrier_arrive(turn_free[0])
                T.barrier_arrive(turn_free[1])
                T.barrier_wait(other_full, 0)
                for n in T.Parallel(columns):
                    before0[n] = T.max(highest0[n], other_sh[0, n])
                for n in T.Parallel(columns):
                    factor0[n] = T.exp2((highest0[n] - before0[n]) * scale)
                    part0[n] = T.exp2((other_sh[0, n] - before0[n]) * scale)
                for n in T.Parallel(columns):
                    total0[n] = total0[n] * factor0[n] + other_sh[1, n] * part0[n]
                for n in T.Parallel(columns):
                    highest0[n] = 0.0
                    if (has_sink != 0) & (n < heads):
                        highest0[n] = T.exp2(Sink[T.min(n, heads - 1)] * LOG2E - before0[n] * scale)
                for n in T.Parallel(columns):
                    highest0[n] = T.if_then_else(total0[n] == 0.0, 0.0, 1.0 / (total0[n] + highest0[n]))
                    before0[n] = (T.log2(total0[n]) + before0[n] * scale) * LN2
                for n in T.Parallel(columns):
                    if n < heads:
                        Lse[row, n] = T.if_then_else(total0[n] == 0.0, -T.infinity("float32"), before0[n])
                for n in T.Parallel(columns):
                    factor0[n] = factor0[n] * highest0[n]
                    part0[n] = part0[n] * highest0[n]
                T.sync_threads(8, 128)
                T.copy(factor0, factor_sh[0, :])
                T.copy(part0, other_sh[0, :])
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
                    1, length, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, valid, q_full, full,
                    free, score1, p1, out1, highest1, before1, factor1, total1, part1,
                )  # fmt: skip
                T.copy(highest1, other_sh[0, :])
                T.copy(total1, other_sh[1, :])
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
