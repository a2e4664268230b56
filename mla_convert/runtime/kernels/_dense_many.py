"""The program of dense and decode attention for tiles of 64 rows; ``_dense`` describes its surroundings."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._dense import (
    BEGIN,
    BLOCK,
    COUNT,
    END,
    FP8_ROW,
    LOWEST,
    PLAN_COLUMNS,
    REQUEST,
    ROW,
    ROWS_END,
    SEEN_BEGIN,
    SEEN_END,
    SLACK,
    SLOT,
    TURN,
    WHOLE,
    ask,
    fetch,
    fetch_fp8,
    load_queries,
    turn_at,
)

TILE = 64


@T.macro
def follow(scale, highest_sh, s, highest, before, factor, total):
    """Take over the maximum that the other consumer left after its block."""
    T.copy(highest, before)
    for h in T.Parallel(TILE):
        highest[h] = highest_sh[s, h]
    for h in T.Parallel(TILE):
        factor[h] = T.exp2((before[h] - highest[h]) * scale)
    for h in T.Parallel(TILE):
        total[h] = total[h] * factor[h]


@T.macro
def rescale(out, factor, columns):
    moved = T.alloc_var("int32")
    moved = 0
    for h in T.Parallel(TILE):
        if factor[h] != 1.0:
            moved = 1
    if T.any_sync(moved) != 0:
        for h, d in T.Parallel(TILE, columns):
            out[h, d] = out[h, d] * factor[h]


@T.macro
def store(g, out, base, columns, turn, stage, Out, Part):
    """Normalised results to memory; as they lie in registers, a row's pieces would be four bytes."""
    if turn[WHOLE] != 0:
        for k in T.unroll(columns // 16):
            for h, d in T.Parallel(TILE, 16):
                stage[g, h, d] = out[h, k * 16 + d]
            T.sync_threads(8 + g, 128)
            for h, d in T.Parallel(TILE, 16):
                if turn[ROW] + h < turn[ROWS_END]:
                    Out[turn[ROW] + h, base + k * 16 + d] = stage[g, h, d]
            T.sync_threads(8 + g, 128)
    else:
        for h, d in T.Parallel(TILE, columns):
            Part[turn[SLOT], h, base + d] = out[h, d]


@T.macro
def finish_first(
    finished, w, turn, has_sink, Sink, heads, scale, before, highest, total, total_sh, factor, factor_sh, part, out,
    columns, rank, Lse, Part,
):  # fmt: skip
    """First consumer, behind an item's blocks: both totals, the log-sum-exp, and what both divide their results by."""
    T.barrier_wait(finished[1], w & 1)
    for h in T.Parallel(TILE):
        before[h] = 0.0
        if (has_sink != 0) & (turn[WHOLE] != 0):
            before[h] = T.exp2(Sink[T.truncmod(turn[ROW] + h, heads)] * LOG2E - highest[h] * scale)
    for h in T.Parallel(TILE):
        total[h] = total[h] + total_sh[h]
    for h in T.Parallel(TILE):
        factor[h] = T.if_then_else(total[h] == 0.0, 0.0, 1.0 / (total[h] + before[h]))
        part[h] = (T.log2(total[h]) + highest[h] * scale) * LN2
    for h in T.Parallel(TILE):
        part[h] = T.if_then_else(total[h] == 0.0, -T.infinity("float32"), part[h])
    if turn[WHOLE] != 0:
        for h in T.Parallel(TILE):
            if turn[ROW] + h < turn[ROWS_END]:
                Lse[turn[ROW] + h] = part[h]
    else:
        for h in T.Parallel(TILE):
            Part[turn[SLOT], h, rank] = part[h]
    T.copy(factor, factor_sh)
    T.barrier_arrive(finished[0])
    for h, d in T.Parallel(TILE, columns):
        out[h, d] = out[h, d] * factor[h]


@T.macro
def finish_second(finished, w, total, total_sh, factor, factor_sh, out, columns):
    """Second consumer, behind an item's blocks: its total to the first, and results divided by what that says."""
    T.copy(total, total_sh)
    T.barrier_arrive(finished[1])
    T.barrier_wait(finished[0], w & 1)
    for h in T.Parallel(TILE):
        factor[h] = factor_sh[h]
    for h, d in T.Parallel(TILE, columns):
        out[h, d] = out[h, d] * factor[h]


def many_rows(rank: int, rope: int, dtype: str, fp8: bool) -> Any:
    """Rows on the M side, 64 of them.

    The first consumer owns output columns [0, left) and the scores of even blocks, the second the columns behind
    and the scores of odd blocks. Each multiplies its own probabilities from registers and the other's from shared
    memory. They take turns: the second needs the first's maximum for its own softmax, which it computes while
    its product with the first's probabilities runs.
    """
    left = -(-rank // 128) * 64
    right = rank - left
    rows, tokens, requests, entries = T.dynamic("rows, tokens, requests, entries")
    lines, slots, heads = T.dynamic("lines, slots, heads")
    own_registers = 208 if fp8 else 216  # of a consumer's thread; FP8 rows pass through the producer's
    width, kv_type = (FP8_ROW, "float8_e4m3fn") if fp8 else (rank + rope, dtype)
    # What only FP8 rows have is the rows themselves once more.
    scale_width, scale_type = (FP8_ROW // 4, "float32") if fp8 else (width, dtype)
    rope_width = FP8_ROW // 2 if fp8 else width

    @T.macro
    def scores(q_rank, q_rope, kv_rank, kv_rope, s, phase, full, score):
        T.barrier_wait(full[s * 2], phase)
        T.fence_proxy_async()
        T.wgmma_gemm(q_rank[:, :left], kv_rank[s, :, :left], score, transpose_B=True, clear_accum=True)
        T.barrier_wait(full[s * 2 + 1], phase)
        T.fence_proxy_async()
        T.wgmma_gemm(q_rank[:, left:], kv_rank[s, :, left:], score, transpose_B=True)
        if rope > 0:
            T.wgmma_gemm(q_rope, kv_rope[s, :, :], score, transpose_B=True)
        T.wait_wgmma(0)

    @T.macro
    def softmax(
        s, block, turn, scale, bounds_sh, valid, holes, score, p, highest, before, factor, total, part
    ):  # fmt: skip
        """Probabilities of a block against the maximum so far; ``factor`` is what older results shrink by."""
        first = turn[BEGIN] + block * BLOCK
        if (holes[s] == block + 1) | (first < turn[SEEN_BEGIN]) | (first + BLOCK > turn[SEEN_END]):
            for h, j in T.Parallel(TILE, BLOCK):
                score[h, j] = T.if_then_else(
                    (valid[s, j] != 0) & (first + j >= bounds_sh[0, h]) & (first + j < bounds_sh[1, h]),
                    score[h, j],
                    -T.infinity("float32"),
                )
        T.copy(highest, before)
        T.reduce_max(score, highest, dim=1, clear=False)
        for h in T.Parallel(TILE):
            highest[h] = T.if_then_else((highest[h] - before[h]) * scale > SLACK, highest[h], before[h])
        for h in T.Parallel(TILE):
            factor[h] = T.exp2((before[h] - highest[h]) * scale)
        for h, j in T.Parallel(TILE, BLOCK):
            score[h, j] = T.exp2(score[h, j] * scale - highest[h] * scale)
        T.reduce_sum(score, part, dim=1)
        for h in T.Parallel(TILE):
            total[h] = total[h] * factor[h] + part[h]
        T.copy(score, p)

    @T.prim_func
    def dense_mla_many_rows(
        Q: T.Tensor([rows, rank + rope], dtype),
        KV: T.Tensor([tokens, width], kv_type),
        Scales: T.Tensor([tokens, scale_width], scale_type),
        Rope: T.Tensor([tokens, rope_width], dtype),
        Table: T.Tensor([requests, entries], "int32"),
        Plan: T.Tensor([lines, PLAN_COLUMNS], "int32"),
        paged: T.int32,
        page: T.int32,
        items: T.int32,
        shares: T.int32,
        items_each: T.int32,
        lanes: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([rows, rank], dtype),
        Lse: T.Tensor([rows], "float32"),
        Part: T.Tensor([slots, TILE, rank + 4], "float32"),
    ):
        with T.Kernel(shares * lanes, threads=384) as block:
            q_rank = T.alloc_shared([TILE, rank], dtype)
            q_rope = T.alloc_shared([TILE, max(rope, 32)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, BLOCK)], dtype)
            stage = T.alloc_shared(
                [2, TILE, 24], dtype
            )  # 16 columns of output, padded against bank conflicts
            bounds_sh = T.alloc_shared([2, TILE], "int32", scope="shared")
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, TILE], "float32", scope="shared")
            total_sh = T.alloc_shared([TILE], "float32", scope="shared")
            factor_sh = T.alloc_shared([TILE], "float32", scope="shared")
            # Two of each, one a consumer: TileLang lays a fragment out for the threads that use it.
            score0 = T.alloc_fragment([TILE, BLOCK], "float32")
            score1 = T.alloc_fragment([TILE, BLOCK], "float32")
            p0 = T.alloc_fragment([TILE, BLOCK], dtype)
            p1 = T.alloc_fragment([TILE, BLOCK], dtype)
            out0 = T.alloc_fragment([TILE, left], "float32")
            out1 = T.alloc_fragment([TILE, right], "float32")
            highest0 = T.alloc_fragment([TILE], "float32")
            highest1 = T.alloc_fragment([TILE], "float32")
            before0 = T.alloc_fragment([TILE], "float32")
            before1 = T.alloc_fragment([TILE], "float32")
            factor0 = T.alloc_fragment([TILE], "float32")
            factor1 = T.alloc_fragment([TILE], "float32")
            total0 = T.alloc_fragment([TILE], "float32")
            total1 = T.alloc_fragment([TILE], "float32")
            part0 = T.alloc_fragment([TILE], "float32")
            part1 = T.alloc_fragment([TILE], "float32")
            entry = T.alloc_local([4], "int32")
            source = T.alloc_local([4], "int32")
            here = T.alloc_local([4], "int32")
            raw = T.alloc_local([128 if fp8 else 16], kv_type)
            unit = T.alloc_local([8], "float32")
            turn = T.alloc_local([TURN], "int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            share = T.alloc_var("int32")
            count = T.alloc_var("int32")
            q_full = T.alloc_barrier([256])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([128, 256, 128, 256])
            free = T.alloc_barrier([128, 128, 128, 128])
            p_full = T.alloc_barrier([128, 128])
            finished = T.alloc_barrier([128, 128])

            thread = T.get_thread_binding()
            rows_each = T.truncdiv(rows, requests)
            used0 = 0
            used1 = 0
            share = Plan[items + shares, 0]
            first = Plan[items + T.truncdiv(block, lanes), 0]
            last = Plan[items + T.truncdiv(block, lanes), 1]
            if thread < 128:
                T.set_max_nreg(own_registers, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, TILE)
                    count = turn[COUNT]
                    T.fill(out0, 0)
                    T.fill(total0, 0)
                    T.fill(highest0, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    for i in T.serial((count + 1) // 2):
                        scores(q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i) & 1, full, score0)
                        softmax(
                            0, 2 * i, turn, scale, bounds_sh, valid, holes, score0, p0, highest0, before0, factor0,
                            total0, part0,
                        )  # fmt: skip
                        if 2 * i + 2 >= count:
                            T.barrier_arrive(q_free)
                        T.sync_threads(
                            8, 128
                        )  # P takes the block's rope part: every warp's product has read it
                        T.copy(p0, kv_rope[0, :, :BLOCK])
                        T.copy(highest0, highest_sh[0, :])
                        T.fence_proxy_async()
                        T.barrier_arrive(p_full[0])
                        rescale(out0, factor0, left)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[0])
                        if 2 * i + 1 < count:
                            T.barrier_wait(p_full[1], (used1 + i) & 1)
                            T.fence_proxy_async()
                            follow(scale, highest_sh, 1, highest0, before0, factor0, total0)
                            rescale(out0, factor0, left)
                            T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                            T.wait_wgmma(0)
                            T.barrier_arrive(free[2])
                    if count == 0:
                        T.barrier_arrive(q_free)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    finish_first(
                        finished, w, turn, has_sink, Sink, heads, scale, before0, highest0, total0, total_sh, factor0,
                        factor_sh, part0, out0, left, rank, Lse, Part,
                    )  # fmt: skip
                    store(0, out0, 0, left, turn, stage, Out, Part)
            elif thread < 256:
                T.set_max_nreg(own_registers, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, TILE)
                    count = turn[COUNT]
                    T.fill(out1, 0)
                    T.fill(total1, 0)
                    T.fill(highest1, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    for i in T.serial((count + 1) // 2):
                        if 2 * i + 1 < count:
                            scores(q_rank, q_rope, kv_rank, kv_rope, 1, (used1 + i) & 1, full, score1)
                        T.barrier_wait(p_full[0], (used0 + i) & 1)
                        T.fence_proxy_async()
                        follow(scale, highest_sh, 0, highest1, before1, factor1, total1)
                        rescale(out1, factor1, right)
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        if 2 * i + 1 < count:
                            softmax(
                                1, 2 * i + 1, turn, scale, bounds_sh, valid, holes, score1, p1, highest1, before1,
                                factor1, total1, part1,
                            )  # fmt: skip
                            T.sync_threads(9, 128)
                            T.copy(p1, kv_rope[1, :, :BLOCK])
                            T.copy(highest1, highest_sh[1, :])
                            T.fence_proxy_async()
                            T.barrier_arrive(p_full[1])
                        if 2 * i + 2 >= count:
                            T.barrier_arrive(q_free)
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[1])
                        if 2 * i + 1 < count:
                            rescale(out1, factor1, right)
                            T.wgmma_gemm(p1, kv_rank[1, :, left:], out1)
                            T.wait_wgmma(0)
                            T.barrier_arrive(free[3])
                    if count == 0:
                        T.barrier_arrive(q_free)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    finish_second(finished, w, total1, total_sh, factor1, factor_sh, out1, right)
                    store(1, out1, left, right, turn, stage, Out, Part)
            else:
                T.set_max_nreg(504 - 2 * own_registers, 0)
                producer = thread - 256
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, TILE)
                    ask(Table, paged, entry, turn[REQUEST], page, turn[BEGIN], turn[END], producer)
                    T.barrier_wait(q_free, (w & 1) ^ 1)
                    load_queries(
                        Q, Plan, items + shares + 1, q_rank, q_rope, bounds_sh, turn[ROW], turn[ROWS_END], heads,
                        producer, q_full, TILE, rank, rope,
                    )  # fmt: skip
                    if fp8:
                        fetch_fp8(
                            KV, Scales, Rope, Table, paged, entry, source, here, raw, unit, kv_rank, kv_rope, valid,
                            holes, turn[REQUEST], page, T.truncdiv(tokens, page), turn[BEGIN], turn[END], producer,
                            full, free, used0, used1,
                        )  # fmt: skip
                    else:
                        fetch(
                            KV, Table, paged, entry, source, kv_rank, kv_rope, valid, holes, turn[REQUEST], page,
                            T.truncdiv(tokens, page), turn[BEGIN], turn[END], producer, full, free, used0, used1,
                            left, rank, rope,
                        )  # fmt: skip
                    used0 = used0 + (turn[COUNT] + 1) // 2
                    used1 = used1 + turn[COUNT] // 2

    return dense_mla_many_rows
