"""The program of ``sparse_mla`` for up to 32 heads; ``_sparse_mla`` describes it beside the other one."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK, LOWEST, SLACK, first_indices, gather, load_queries


def few_heads(columns: int, rank: int, rope: int, dtype: str, split: bool) -> Any:
    """Keys on the M side, ``columns`` (8, 16 or 32) heads on the N side: an item is a query and one of ``parts``.

    The consumers walk alternate blocks, each with its own softmax state, output and buffer; nothing passes between
    them until they merge at the end. A consumer computes S^T = K q^T, takes the exponentials where the product
    left them, against the maximum it has, and adds V^T P^T to its own [rank, columns] sum. Only if a score exceeds
    that maximum by ``SLACK`` are the scores turned round through shared memory for a new one.
    """
    left = -(-rank // 128) * 64
    right = rank - left
    queries, tokens, heads, entries, out_rows = T.dynamic("queries, tokens, heads, entries, out_rows")
    stride = BLOCK + 4  # keeps the turn round free of bank conflicts and its rows on 16 bytes

    # Reductions over keys are written thread by thread. As fragments, TileLang chose a layout for the second
    # consumer that put a barrier inside one warp's branch (a hang), and has no way to fix one for those threads.
    rows = min(columns, 16)  # rows of S at a time
    lanes = 128 // rows  # threads of a row, all in one warp
    keys = BLOCK // lanes  # keys of a thread
    passes = columns // rows

    @T.macro
    def consume(
        g, t, item, count, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh, highest_sh, total_sh,
        flag_sh, valid, holes, used, q_full, q_free, full, free, score, p, sums, out_left, out_right,
    ):  # fmt: skip
        """One consumer's blocks of an item; ``used`` counts the earlier uses of its buffer."""
        top = T.alloc_var("float32")
        part = T.alloc_var("float32")
        flag = T.alloc_var("int32")
        T.fill(out_left, 0)
        if right > 0:
            T.fill(out_right, 0)
        T.fill(sums, 0)
        # Shared memory is written by all threads, some the same: TileLang may put a barrier of them all before it.
        highest_sh[g, t % columns] = LOWEST
        flag_sh[g, t % 2] = 0  # what an earlier thread block left there could look raised
        T.sync_threads(8 + g, 128)
        T.barrier_wait(q_full, item & 1)
        for i in T.serial(T.ceildiv(count - g, 2)):
            use = used + i
            T.barrier_wait(full[g * 2], use & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(kv_rank[g, :, :left], q_rank[:, :left], score, transpose_B=True, clear_accum=True)
            T.barrier_wait(full[g * 2 + 1], use & 1)
            T.fence_proxy_async()
            if right > 0:
                T.wgmma_gemm(kv_rank[g, :, left:], q_rank[:, left:], score, transpose_B=True)
            if rope > 0:
                T.wgmma_gemm(kv_rope[g, :, :], q_rope, score, transpose_B=True)
            T.wait_wgmma(0)
            if 2 * i + g + 2 >= count:
                T.barrier_arrive(q_free)
            if holes[g] == 2 * i + g + 1:
                for j, n in T.Parallel(BLOCK, columns):
                    score[j, n] = T.if_then_else(valid[g, j] != 0, score[j, n], -T.infinity("float32"))
            for j, n in T.Parallel(BLOCK, columns):
                p[j, n] = score[j, n] * scale - highest_sh[g, n]
            for j, n in T.Parallel(BLOCK, columns):
                if p[j, n] > SLACK:
                    flag_sh[g, use % 2] = use + 1
            for j, n in T.Parallel(BLOCK, columns):
                p[j, n] = T.exp2(p[j, n])
            for j, n in T.Parallel(BLOCK, columns):
                p_sh[2 * g + use % 2, n, j] = p[j, n]
            T.fence_proxy_async()
            T.sync_threads(8 + g, 128)  # every thread's fence comes before any thread's matrix product
            flag = flag_sh[g, use % 2]
            if flag == use + 1:
                for j, n in T.Parallel(BLOCK, columns):
                    turn[g, n, j] = score[j, n] * scale
                T.sync_threads(8 + g, 128)
                for r in T.unroll(passes):
                    n = r * rows + t // lanes
                    part = highest_sh[g, n]
                    top = part
                    for k in T.unroll(keys):
                        top = T.max(top, turn[g, n, t % lanes * keys + k])
                    for b in T.unroll(lanes.bit_length() - 1):
                        top = T.max(top, T.shfl_xor(top, 1 << b))
                    factor_sh[g, n] = T.exp2(part - top)
                    highest_sh[g, n] = top
                T.sync_threads(8 + g, 128)
                for j, n in T.Parallel(BLOCK, columns):
                    p[j, n] = T.exp2(score[j, n] * scale - highest_sh[g, n])
                for j, n in T.Parallel(BLOCK, columns):
                    p_sh[2 * g + use % 2, n, j] = p[j, n]
                for j, n in T.Parallel(BLOCK, columns):
                    sums[j, n] = sums[j, n] * factor_sh[g, n]
                for d, n in T.Parallel(left, columns):
                    out_left[d, n] = out_left[d, n] * factor_sh[g, n]
                if right > 0:
                    for d, n in T.Parallel(right, columns):
                        out_right[d, n] = out_right[d, n] * factor_sh[g, n]
                T.fence_proxy_async()
                T.sync_threads(8 + g, 128)
            T.wgmma_gemm(
                kv_rank[g, :, :left],
                p_sh[2 * g + use % 2, :, :],
                out_left,
                transpose_A=True,
                transpose_B=True,
            )
            if right > 0:
                T.wgmma_gemm(
                    kv_rank[g, :, left:],
                    p_sh[2 * g + use % 2, :, :],
                    out_right,
                    transpose_A=True,
                    transpose_B=True,
                )
            for j, n in T.Parallel(BLOCK, columns):
                sums[j, n] = sums[j, n] + p[j, n]
            if right > 0:
                T.wait_wgmma(1)
            else:
                T.wait_wgmma(0)
            T.barrier_arrive(free[g * 2])
            T.wait_wgmma(0)
            T.barrier_arrive(free[g * 2 + 1])
        if count <= g:
            T.barrier_arrive(q_free)
        for j, n in T.Parallel(BLOCK, columns):
            turn[g, n, j] = sums[j, n]
        T.sync_threads(8 + g, 128)
        for r in T.unroll(passes):
            part = 0.0
            for k in T.unroll(keys):
                part = part + turn[g, r * rows + t // lanes, t % lanes * keys + k]
            for b in T.unroll(lanes.bit_length() - 1):
                part = part + T.shfl_xor(part, 1 << b)
            total_sh[g, r * rows + t // lanes] = part
        T.sync_threads(10, 256)

    @T.macro
    def merge(g, own, given, heads, out_row, turn, both_sh, Out):
        """Give the other consumer its half of this one's sum, 64 dims at a time, and store the own half of both."""
        for k in T.unroll(left // 64):
            if k * 64 < (left if g == 1 else right):
                for d, n in T.Parallel(64, columns):
                    turn[g, n, d] = given[k * 64 + d, n]
            T.sync_threads(10, 256)
            if k * 64 < (right if g == 1 else left):
                for d, n in T.Parallel(64, columns):
                    turn[1 - g, n, d] = (
                        own[k * 64 + d, n] * both_sh[g, n] + turn[1 - g, n, d] * both_sh[1 - g, n]
                    )
                T.sync_threads(8 + g, 128)
                for n, d in T.Parallel(columns, 64):
                    if n < heads:
                        Out[out_row, n, g * left + k * 64 + d] = turn[1 - g, n, d]
            T.sync_threads(10, 256)

    @T.prim_func
    def sparse_mla_few_heads(
        Q: T.Tensor([queries, heads, rank + rope], dtype),
        KV: T.Tensor([tokens, rank + rope], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        grid: T.int32,
        parts: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([out_rows, heads, rank], "float32" if split else dtype),
        Lse: T.Tensor([out_rows, heads], "float32"),
    ):
        with T.Kernel(grid, threads=384) as block:
            q_rank = T.alloc_shared([columns, rank], dtype)
            q_rope = T.alloc_shared([columns, max(rope, 32)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, 32)], dtype)
            turn = T.alloc_shared([2, columns, stride], "float32")
            p_sh = T.alloc_shared([4, columns, BLOCK], dtype)
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2], "int32", scope="shared")
            flag_sh = T.alloc_shared([2, 2], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            factor_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            total_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            both_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            # Two of each, one a consumer: TileLang lays a fragment out for the threads that use it.
            score0 = T.alloc_fragment([BLOCK, columns], "float32")
            score1 = T.alloc_fragment([BLOCK, columns], "float32")
            p0 = T.alloc_fragment([BLOCK, columns], "float32")
            p1 = T.alloc_fragment([BLOCK, columns], "float32")
            sums0 = T.alloc_fragment([BLOCK, columns], "float32")
            sums1 = T.alloc_fragment([BLOCK, columns], "float32")
            left0 = T.alloc_fragment([left, columns], "float32")
            left1 = T.alloc_fragment([left, columns], "float32")
            right0 = T.alloc_fragment([max(right, 64), columns], "float32")
            right1 = T.alloc_fragment([max(right, 64), columns], "float32")
            top = T.alloc_var("float32")
            mine = T.alloc_var("float32")
            other = T.alloc_var("float32")
            total = T.alloc_var("float32")
            denominator = T.alloc_var("float32")
            index = T.alloc_local([8], "int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            out_row = T.alloc_var("int32")
            row = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            q_full = T.alloc_barrier([128])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([128, 256, 128, 256])
            free = T.alloc_barrier([128, 128, 128, 128])

            thread = T.get_thread_binding()
            used0 = 0
            used1 = 0
            items = T.ceildiv(out_rows - block, grid)
            if thread < 128:
                T.set_max_nreg(216, 1)
                for w in T.serial(items):
                    out_row = block + w * grid
                    row = out_row // parts
                    end = Lengths[row]
                    begin = T.ceildiv(T.ceildiv(end, BLOCK), parts) * BLOCK  # entries of a part
                    count = T.min(out_row % parts * begin, end)
                    end = T.min(count + begin, end)
                    begin = count
                    count = T.ceildiv(end - begin, BLOCK)
                    consume(
                        0, thread, w, count, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh,
                        highest_sh, total_sh, flag_sh, valid, holes, used0, q_full, q_free, full, free, score0, p0,
                        sums0, left0, right0,
                    )  # fmt: skip
                    used0 = used0 + T.ceildiv(count, 2)
                    n = thread % columns
                    top = T.max(highest_sh[0, n], highest_sh[1, n])
                    mine = T.exp2(highest_sh[0, n] - top)
                    other = T.exp2(highest_sh[1, n] - top)
                    total = total_sh[0, n] * mine + total_sh[1, n] * other
                    denominator = total
                    if (has_sink != 0) & (n < heads):
                        denominator = total + T.exp2(Sink[T.min(n, heads - 1)] * LOG2E - top)
                    both_sh[0, n] = T.if_then_else(total == 0.0, 0.0, mine / denominator)
                    both_sh[1, n] = T.if_then_else(total == 0.0, 0.0, other / denominator)
                    if thread < T.min(heads, columns):
                        Lse[out_row, n] = T.if_then_else(
                            total == 0.0, -T.infinity("float32"), (T.log2(total) + top) * LN2
                        )
                    merge(0, left0, right0, heads, out_row, turn, both_sh, Out)
            elif thread < 256:
                T.set_max_nreg(216, 1)
                for w in T.serial(items):
                    out_row = block + w * grid
                    row = out_row // parts
                    end = Lengths[row]
                    begin = T.ceildiv(T.ceildiv(end, BLOCK), parts) * BLOCK  # entries of a part
                    count = T.min(out_row % parts * begin, end)
                    end = T.min(count + begin, end)
                    begin = count
                    count = T.ceildiv(end - begin, BLOCK)
                    consume(
                        1, thread - 128, w, count, scale, q_rank, q_rope, kv_rank, kv_rope, turn, p_sh, factor_sh,
                        highest_sh, total_sh, flag_sh, valid, holes, used1, q_full, q_free, full, free, score1, p1,
                        sums1, left1, right1,
                    )  # fmt: skip
                    used1 = used1 + count // 2
                    merge(1, right1, left1, heads, out_row, turn, both_sh, Out)
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                for w in T.serial(items):
                    out_row = block + w * grid
                    row = out_row // parts
                    end = Lengths[row]
                    begin = T.ceildiv(T.ceildiv(end, BLOCK), parts) * BLOCK  # entries of a part
                    count = T.min(out_row % parts * begin, end)
                    end = T.min(count + begin, end)
                    begin = count
                    count = T.ceildiv(end - begin, BLOCK)
                    first_indices(Indices, index, row, begin, end, producer)
                    T.barrier_wait(q_free, (w & 1) ^ 1)
                    load_queries(Q, q_rank, q_rope, row, 0, heads, producer, q_full, columns, rank, rope)
                    gather(
                        KV, Indices, index, kv_rank, kv_rope, valid, holes, row, begin, end, tokens, producer,
                        full, free, used0, used1, left, rank, rope,
                    )  # fmt: skip
                    used0 = used0 + T.ceildiv(count, 2)
                    used1 = used1 + count // 2

    return sparse_mla_few_heads
