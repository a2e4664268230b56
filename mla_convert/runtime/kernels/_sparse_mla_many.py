"""The program of ``sparse_mla`` for tiles of 64 heads; ``_sparse_mla`` describes it beside the other one."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import (
    BLOCK,
    LIST_END,
    LOWEST,
    SLACK,
    gather,
    list_end,
    load_indices,
    load_queries,
)


def many_heads(tiles: int, rank: int, rope: int, dtype: str, split: bool) -> Any:
    """Heads on the M side: an item is a query, a tile of 64 heads and one of ``parts`` of the list.

    The first consumer owns output columns [0, left) and the scores of even blocks, the second the columns behind
    and the scores of odd blocks. Each multiplies its own probabilities from registers and the other's from shared
    memory. They are half a step apart, so that the softmax of one runs beside the products of the other:

    - The first finds a maximum, tells the second (``max_full``), and multiplies its probabilities. Meanwhile it
      writes them to shared memory, but the second may find a larger maximum: once it has said so (``p_full[1]``),
      they are right or are made so, and go to the second (``p_full[0]``).
    - It does not wait for its product with the second's probabilities: the scores of the next even block follow.
    - The second multiplies its own probabilities, then the first's, and turns to the next odd block.

    So a pair of blocks is freed, and gathered, in this order: left piece of the even block, right piece of the odd
    block, right of the even, left of the odd.
    """
    left = -(-rank // 128) * 64
    right = rank - left
    queries, tokens, heads, entries, rows = T.dynamic("queries, tokens, heads, entries, rows")
    limits, lse_rows = T.dynamic("limits, lse_rows")
    out_width = rank + 4 if split else rank  # the log-sum-exp of a part is behind its values

    @T.macro
    def left_scores(q_rank, kv_rank, s, score, clear):
        T.wgmma_gemm(q_rank[:, :left], kv_rank[s, :, :left], score, transpose_B=True, clear_accum=clear)

    @T.macro
    def right_scores(q_rank, q_rope, kv_rank, kv_rope, s, score, clear):
        T.wgmma_gemm(q_rank[:, left:], kv_rank[s, :, left:], score, transpose_B=True, clear_accum=clear)
        if rope > 0:
            T.wgmma_gemm(q_rope, kv_rope[s, :, :], score, transpose_B=True)

    @T.macro
    def peak(s, number, valid, holes, score, part):
        """The maximum of each row of a block, in which what is not valid becomes -inf."""
        if holes[s] == number:
            for h, j in T.Parallel(64, BLOCK):
                score[h, j] = T.if_then_else(valid[s, j] != 0, score[h, j], -T.infinity("float32"))
        T.reduce_max(score, part, dim=1)

    @T.macro
    def settle(scale, highest, before, factor, part):
        """Let the reference of the exponentials rise to a block's maximum ``part`` if that is far above it."""
        for h in T.Parallel(64):
            highest[h] = T.if_then_else((part[h] - highest[h]) * scale > SLACK, part[h], highest[h])
        for h in T.Parallel(64):
            factor[h] = T.exp2((before[h] - highest[h]) * scale)

    @T.macro
    def weigh(scale, score, p, highest):
        for h, j in T.Parallel(64, BLOCK):
            score[h, j] = T.exp2(score[h, j] * scale - highest[h] * scale)
        T.copy(score, p)

    @T.macro
    def count_up(score, factor, total, part):
        """Add a block's probabilities to the total: the sum can wait until a product is on its way."""
        T.reduce_sum(score, part, dim=1)
        for h in T.Parallel(64):
            total[h] = total[h] * factor[h] + part[h]

    @T.macro
    def follow(scale, highest_sh, s, highest, before, factor, total):
        """Take over the maximum that the other consumer left after its block."""
        T.copy(highest, before)
        for h in T.Parallel(64):
            highest[h] = highest_sh[s, h]
        for h in T.Parallel(64):
            factor[h] = T.exp2((before[h] - highest[h]) * scale)
        for h in T.Parallel(64):
            total[h] = total[h] * factor[h]

    @T.macro
    def rescale(out, factor, width):
        """Shrink older results, which is seldom needed."""
        moved = T.alloc_var("int32")
        moved = 0
        for h in T.Parallel(64):
            if factor[h] != 1.0:
                moved = 1
        if T.any_sync(moved) != 0:
            for h, d in T.Parallel(64, width):
                out[h, d] = out[h, d] * factor[h]

    @T.macro
    def even(
        scale, number, kv_rank, kv_rope, valid, holes, highest_sh, free, max_full, p_full, score, p, out, highest,
        before, factor, total, part, alone: bool,
    ):  # fmt: skip
        """First consumer: softmax of an even block and product with it; ``alone``: no odd block follows."""
        T.copy(highest, before)
        peak(0, number, valid, holes, score, part)
        settle(scale, highest, before, factor, part)
        T.copy(highest, highest_sh[0, :])
        T.barrier_arrive(max_full)
        weigh(scale, score, p, highest)
        rescale(out, factor, left)
        T.wgmma_gemm(p, kv_rank[0, :, :left], out)
        T.sync_threads(8, 128)  # P replaces the block's rope part: every warp's product has read it
        T.copy(p, kv_rope[0, :, :BLOCK])
        T.fence_proxy_async()
        if alone:
            T.barrier_arrive(p_full[0])
        count_up(score, factor, total, part)
        T.wait_wgmma(0)
        T.barrier_arrive(free[0])

    @T.macro
    def odd(
        scale, phase, kv_rank, kv_rope, p_sh, highest_sh, p_full, score, p, out, highest, before, factor, total
    ):  # fmt: skip
        """First consumer: hand over the even block's probabilities, start the product with the odd block's."""
        T.barrier_wait(p_full[1], phase)
        follow(scale, highest_sh, 1, highest, before, factor, total)
        moved = T.alloc_var("int32")
        moved = 0
        for h in T.Parallel(64):
            if factor[h] != 1.0:
                moved = 1
        if T.any_sync(moved) != 0:
            for h, j in T.Parallel(64, BLOCK):
                score[h, j] = score[h, j] * factor[h]
            T.copy(score, p)
            T.copy(p, kv_rope[0, :, :BLOCK])
        T.fence_proxy_async()
        T.barrier_arrive(p_full[0])
        rescale(out, factor, left)
        T.wgmma_gemm(p_sh, kv_rank[1, :, :left], out)

    @T.macro
    def store(g, thread, out, base, width, first, heads, out_row, stage, Out):
        """Normalised results to memory; as they lie in registers, a row's pieces would be four bytes.

        A warp has 16 rows, and stages 32 columns of them at a time; in ``stage``, each consumer has 32 columns.
        """
        if split:
            for h, d in T.Parallel(64, width):
                if first + h < heads:
                    Out[out_row, first + h, base + d] = out[h, d]
        else:
            row = thread // 32 * 16 + thread % 8
            column = thread % 32 // 8 * 8
            for k in T.unroll(width // 32):
                for h, d in T.Parallel(64, 32):
                    stage[h, g * 32 + d] = out[h, k * 32 + d]
                T.sync_warp()
                for r in T.unroll(2):
                    if first + row + r * 8 < heads:
                        for v in T.vectorized(8):
                            Out[out_row, first + row + r * 8, base + k * 32 + column + v] = stage[
                                row + r * 8, g * 32 + column + v
                            ]
                T.sync_warp()

    @T.prim_func
    def sparse_mla_many_heads(
        Q: T.Tensor([queries, heads, rank + rope], dtype),
        KV: T.Tensor([tokens, rank + rope], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([limits if split else queries], "int32"),
        grid: T.int32,
        parts: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([rows, heads, out_width], "float32" if split else dtype),
        Lse: T.Tensor([lse_rows if split else rows, heads], "float32"),
    ):
        with T.Kernel(grid, threads=384, prelude=LIST_END if split else None) as block:
            q_rank = T.alloc_shared([64, rank], dtype)
            q_rope = T.alloc_shared([64, max(rope, 32)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, BLOCK)], dtype)
            p_sh = T.alloc_shared(
                [64, BLOCK], dtype
            )  # of odd blocks; in the end 32 columns of each consumer's output
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2], "int32", scope="shared")
            count_sh = T.alloc_shared([1], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, 64], "float32", scope="shared")
            total_sh = T.alloc_shared([64], "float32", scope="shared")
            factor_sh = T.alloc_shared([64], "float32", scope="shared")
            # Two of each, one a consumer: TileLang lays a fragment out for the threads that use it.
            score0 = T.alloc_fragment([64, BLOCK], "float32")
            score1 = T.alloc_fragment([64, BLOCK], "float32")
            p0 = T.alloc_fragment([64, BLOCK], dtype)
            p1 = T.alloc_fragment([64, BLOCK], dtype)
            out0 = T.alloc_fragment([64, left], "float32")
            out1 = T.alloc_fragment([64, right], "float32")
            highest0 = T.alloc_fragment([64], "float32")
            highest1 = T.alloc_fragment([64], "float32")
            before0 = T.alloc_fragment([64], "float32")
            before1 = T.alloc_fragment([64], "float32")
            factor0 = T.alloc_fragment([64], "float32")
            factor1 = T.alloc_fragment([64], "float32")
            total0 = T.alloc_fragment([64], "float32")
            total1 = T.alloc_fragment([64], "float32")
            part0 = T.alloc_fragment([64], "float32")
            part1 = T.alloc_fragment([64], "float32")
            index = T.alloc_local([8], "int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            out_row = T.alloc_var("int32")
            row = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            first = T.alloc_var("int32")
            q_full = T.alloc_barrier([129])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([128, 256, 128, 256])
            free = T.alloc_barrier([128, 128, 128, 128])
            max_full = T.alloc_barrier([128])
            p_full = T.alloc_barrier([128, 128])
            finished = T.alloc_barrier([128, 128])

            if split:
                T.pdl_trigger()
            thread = T.get_thread_binding()
            used0 = 0
            used1 = 0
            items = T.ceildiv(rows * tiles - block, grid)
            if thread < 128:
                T.set_max_nreg(216, 1)
                for w in T.serial(items):
                    out_row = (block + w * grid) // tiles
                    first = (block + w * grid) % tiles * 64
                    T.fill(out0, 0)
                    T.fill(total0, 0)
                    T.fill(highest0, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    count = count_sh[0]
                    if count > 0:
                        T.barrier_wait(full[0], used0 & 1)
                        T.fence_proxy_async()
                        left_scores(q_rank, kv_rank, 0, score0, True)
                        T.barrier_wait(full[1], used0 & 1)
                        T.fence_proxy_async()
                        right_scores(q_rank, q_rope, kv_rank, kv_rope, 0, score0, False)
                        T.wait_wgmma(0)
                    for i in T.serial((count - 1) // 2):  # pairs that a block follows
                        even(
                            scale, 2 * i + 1, kv_rank, kv_rope, valid, holes, highest_sh, free, max_full, p_full,
                            score0, p0, out0, highest0, before0, factor0, total0, part0, False,
                        )  # fmt: skip
                        odd(
                            scale, (used1 + i) & 1, kv_rank, kv_rope, p_sh, highest_sh, p_full, score0, p0, out0,
                            highest0, before0, factor0, total0,
                        )  # fmt: skip
                        T.barrier_wait(full[0], (used0 + i + 1) & 1)
                        T.fence_proxy_async()
                        left_scores(q_rank, kv_rank, 0, score0, True)
                        T.wait_wgmma(1)
                        T.barrier_arrive(free[2])
                        T.barrier_wait(full[1], (used0 + i + 1) & 1)
                        T.fence_proxy_async()
                        right_scores(q_rank, q_rope, kv_rank, kv_rope, 0, score0, False)
                        T.wait_wgmma(0)
                    T.barrier_arrive(q_free)
                    if (count > 0) & (count % 2 == 0):
                        even(
                            scale, count - 1, kv_rank, kv_rope, valid, holes, highest_sh, free, max_full, p_full,
                            score0, p0, out0, highest0, before0, factor0, total0, part0, False,
                        )  # fmt: skip
                        odd(
                            scale, (used1 + count // 2 - 1) & 1, kv_rank, kv_rope, p_sh, highest_sh, p_full, score0,
                            p0, out0, highest0, before0, factor0, total0,
                        )  # fmt: skip
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[2])
                    if count % 2 == 1:
                        even(
                            scale, count, kv_rank, kv_rope, valid, holes, highest_sh, free, max_full, p_full,
                            score0, p0, out0, highest0, before0, factor0, total0, part0, True,
                        )  # fmt: skip
                    used0 = used0 + T.ceildiv(count, 2)
                    used1 = used1 + count // 2

                    T.barrier_wait(finished[1], w & 1)
                    for h in T.Parallel(64):
                        before0[h] = 0.0
                        if (has_sink != 0) & (first + h < heads):
                            before0[h] = T.exp2(
                                Sink[T.min(first + h, heads - 1)] * LOG2E - highest0[h] * scale
                            )
                    for h in T.Parallel(64):
                        total0[h] = total0[h] + total_sh[h]
                    for h in T.Parallel(64):
                        factor0[h] = T.if_then_else(total0[h] == 0.0, 0.0, 1.0 / (total0[h] + before0[h]))
                        part0[h] = (T.log2(total0[h]) + highest0[h] * scale) * LN2
                    T.copy(factor0, factor_sh)
                    T.barrier_arrive(finished[0])
                    for h in T.Parallel(64):
                        if first + h < heads:
                            if split:
                                Out[out_row, first + h, rank] = T.if_then_else(
                                    total0[h] == 0.0, -T.infinity("float32"), part0[h]
                                )
                            else:
                                Lse[out_row, first + h] = T.if_then_else(
                                    total0[h] == 0.0, -T.infinity("float32"), part0[h]
                                )
                    for h, d in T.Parallel(64, left):
                        out0[h, d] = out0[h, d] * factor0[h]
                    T.sync_threads(8, 128)  # every warp's product with what p_sh holds has ended
                    store(0, thread, out0, 0, left, first, heads, out_row, p_sh, Out)
            elif thread < 256:
                T.set_max_nreg(216, 1)
                for w in T.serial(items):
                    out_row = (block + w * grid) // tiles
                    first = (block + w * grid) % tiles * 64
                    T.fill(out1, 0)
                    T.fill(total1, 0)
                    T.fill(highest1, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    count = count_sh[0]
                    for i in T.serial(count // 2):
                        T.barrier_wait(full[3], (used1 + i) & 1)
                        T.fence_proxy_async()
                        right_scores(q_rank, q_rope, kv_rank, kv_rope, 1, score1, True)
                        T.barrier_wait(full[2], (used1 + i) & 1)
                        T.fence_proxy_async()
                        left_scores(q_rank, kv_rank, 1, score1, False)
                        T.wait_wgmma(0)
                        if 2 * i + 2 == count:
                            T.barrier_arrive(q_free)
                        peak(1, 2 * i + 2, valid, holes, score1, part1)
                        T.barrier_wait(max_full, (used0 + i) & 1)
                        T.copy(highest1, before1)
                        for h in T.Parallel(64):
                            highest1[h] = highest_sh[0, h]
                        settle(scale, highest1, before1, factor1, part1)
                        weigh(scale, score1, p1, highest1)
                        T.copy(highest1, highest_sh[1, :])
                        T.copy(p1, p_sh)
                        T.fence_proxy_async()
                        T.barrier_arrive(p_full[1])
                        rescale(out1, factor1, right)
                        T.wgmma_gemm(p1, kv_rank[1, :, left:], out1)
                        count_up(score1, factor1, total1, part1)
                        T.barrier_wait(p_full[0], (used0 + i) & 1)
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        T.wait_wgmma(1)
                        T.barrier_arrive(free[3])
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[1])
                    if (count == 0) | (count % 2 == 1):
                        T.barrier_arrive(q_free)
                    if count % 2 == 1:
                        T.barrier_wait(p_full[0], (used0 + count // 2) & 1)
                        follow(scale, highest_sh, 0, highest1, before1, factor1, total1)
                        rescale(out1, factor1, right)
                        T.fence_proxy_async()
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[1])
                    used0 = used0 + T.ceildiv(count, 2)
                    used1 = used1 + count // 2

                    T.copy(total1, total_sh)
                    T.barrier_arrive(finished[1])
                    T.barrier_wait(finished[0], w & 1)
                    for h in T.Parallel(64):
                        factor1[h] = factor_sh[h]
                    for h, d in T.Parallel(64, right):
                        out1[h, d] = out1[h, d] * factor1[h]
                    store(1, thread - 128, out1, left, right, first, heads, out_row, p_sh, Out)
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                for w in T.serial(items):
                    out_row = (block + w * grid) // tiles
                    first = (block + w * grid) % tiles * 64
                    row = out_row // parts
                    end = list_end(Indices, Lengths, row, tokens) if split else Lengths[row]
                    begin = T.ceildiv(T.ceildiv(end, BLOCK), parts) * BLOCK  # entries of a part
                    count = T.min(out_row % parts * begin, end)
                    end = T.min(count + begin, end)
                    begin = count
                    count = T.ceildiv(end - begin, BLOCK)
                    load_indices(Indices, index, row, begin, end, producer)
                    T.barrier_wait(q_free, (w & 1) ^ 1)
                    load_queries(Q, q_rank, q_rope, row, first, heads, producer, q_full, 64, rank, rope)
                    if producer == 0:
                        count_sh[0] = count
                        T.barrier_arrive(q_full)
                    gather(
                        KV, Indices, index, kv_rank, kv_rope, valid, holes, row, begin, end, tokens, producer,
                        full, free, used0, used1, left, rank, rope,
                    )  # fmt: skip
                    used0 = used0 + T.ceildiv(count, 2)
                    used1 = used1 + count // 2

    return sparse_mla_many_heads
