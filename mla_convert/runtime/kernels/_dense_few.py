"""The program of dense and decode attention for requests of up to 32 rows; ``_dense`` describes its surroundings."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from types import SimpleNamespace
from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._dense import (
    BEGIN,
    BLOCK,
    COUNT,
    END,
    LOWEST,
    NONE,
    PLAN_COLUMNS,
    REQUEST,
    ROW,
    ROWS_END,
    SEEN_BEGIN,
    SEEN_END,
    SLACK,
    SLOT,
    SOME,
    TURN,
    WHOLE,
    ask,
    fetch,
    load_queries,
    turn_at,
)


def steps(columns: int, rank: int) -> SimpleNamespace:
    """Macros of a consumer, a warpgroup that has its own softmax state and output of ``columns`` rows."""
    left = -(-rank // 128) * 64
    right = rank - left

    # Reductions over tokens are written thread by thread: as fragments, TileLang chooses a layout for the second
    # consumer that puts a barrier inside one warp's branch (a hang).
    group = min(columns, 16)  # rows of S at a time
    threads_row = 128 // group  # threads of a row, all in one warp
    keys = BLOCK // threads_row  # tokens of a thread
    passes = columns // group

    @T.macro
    def softmax(
        g, t, use, scale, round_sh, p_sh, factor_sh, highest_sh, flag_sh, score, p, sums, out_left, out_right
    ):  # fmt: skip
        """Probabilities of a consumer's block into ``p`` and ``p_sh``; ``use`` counts its blocks."""
        top = T.alloc_var("float32")
        part = T.alloc_var("float32")
        flag = T.alloc_var("int32")
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
                round_sh[g, n, j] = score[j, n] * scale
            T.sync_threads(8 + g, 128)
            for r in T.unroll(passes):
                n = r * group + t // threads_row
                part = highest_sh[g, n]
                top = part
                for k in T.unroll(keys):
                    top = T.max(top, round_sh[g, n, t % threads_row * keys + k])
                for b in T.unroll(threads_row.bit_length() - 1):
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

    @T.macro
    def reduce_sums(g, t, round_sh, total_sh, sums):
        """Add up the consumer's probabilities over its threads."""
        part = T.alloc_var("float32")
        for j, n in T.Parallel(BLOCK, columns):
            round_sh[g, n, j] = sums[j, n]
        T.sync_threads(8 + g, 128)
        for r in T.unroll(passes):
            part = 0.0
            for k in T.unroll(keys):
                part = part + round_sh[g, r * group + t // threads_row, t % threads_row * keys + k]
            for b in T.unroll(threads_row.bit_length() - 1):
                part = part + T.shfl_xor(part, 1 << b)
            total_sh[g, r * group + t // threads_row] = part

    @T.macro
    def weigh(t, turn, heads, has_sink, Sink, highest_sh, total_sh, both_sh, Lse, Part):
        """First consumer: the log-sum-exp of each row, and how both consumers' sums enter the output."""
        top = T.alloc_var("float32")
        mine = T.alloc_var("float32")
        other = T.alloc_var("float32")
        total = T.alloc_var("float32")
        denominator = T.alloc_var("float32")
        n = t % columns
        top = T.max(highest_sh[0, n], highest_sh[1, n])
        mine = T.exp2(highest_sh[0, n] - top)
        other = T.exp2(highest_sh[1, n] - top)
        total = total_sh[0, n] * mine + total_sh[1, n] * other
        denominator = total
        if (has_sink != 0) & (turn[WHOLE] != 0):
            denominator = total + T.exp2(Sink[T.truncmod(turn[ROW] + n, heads)] * LOG2E - top)
        both_sh[0, n] = T.if_then_else(total == 0.0, 0.0, mine / denominator)
        both_sh[1, n] = T.if_then_else(total == 0.0, 0.0, other / denominator)
        total = T.if_then_else(total == 0.0, -T.infinity("float32"), (T.log2(total) + top) * LN2)
        if t < columns:
            if turn[WHOLE] != 0:
                if turn[ROW] + n < turn[ROWS_END]:
                    Lse[turn[ROW] + n] = total
            else:
                Part[turn[SLOT], n, rank] = total

    @T.macro
    def merge(g, own, given, turn, round_sh, both_sh, Out, Part):
        """Give the other consumer its half of this one's sum, 64 dims at a time, and store the own half of both."""
        for k in T.unroll(left // 64):
            if k * 64 < (left if g == 1 else right):
                for d, n in T.Parallel(64, columns):
                    round_sh[g, n, d] = given[k * 64 + d, n]
            T.sync_threads(10, 256)
            if k * 64 < (right if g == 1 else left):
                for d, n in T.Parallel(64, columns):
                    round_sh[1 - g, n, d] = (
                        own[k * 64 + d, n] * both_sh[g, n] + round_sh[1 - g, n, d] * both_sh[1 - g, n]
                    )
                T.sync_threads(8 + g, 128)
                if turn[WHOLE] != 0:
                    for n, d in T.Parallel(columns, 64):
                        if turn[ROW] + n < turn[ROWS_END]:
                            Out[turn[ROW] + n, g * left + k * 64 + d] = round_sh[1 - g, n, d]
                else:
                    for n, d in T.Parallel(columns, 64):
                        Part[turn[SLOT], n, g * left + k * 64 + d] = round_sh[1 - g, n, d]
            T.sync_threads(10, 256)

    return SimpleNamespace(softmax=softmax, reduce_sums=reduce_sums, weigh=weigh, merge=merge)


def few_rows(columns: int, rank: int, rope: int, dtype: str) -> Any:
    """Tokens on the M side, ``columns`` (8, 16 or 32) rows on the N side.

    The consumers walk alternate blocks, each with its own softmax state, output and buffer; nothing passes between
    them until they merge at the end. A consumer computes S^T = K q^T, takes the exponentials where the product
    left them, against the maximum it has, and adds V^T P^T to its own [rank, columns] sum. Only if a score exceeds
    that maximum by ``SLACK`` are the scores turned round through shared memory for a new one.
    """
    left = -(-rank // 128) * 64
    right = rank - left
    rows, tokens, requests, entries = T.dynamic("rows, tokens, requests, entries")
    lines, slots, heads = T.dynamic("lines, slots, heads")
    stride = BLOCK + 4  # keeps the turn round free of bank conflicts and its rows on 16 bytes
    width = rank + rope

    each = steps(columns, rank)
    softmax, reduce_sums, weigh, merge = each.softmax, each.reduce_sums, each.weigh, each.merge

    @T.macro
    def consume(
        g, t, w, turn, scale, q_rank, q_rope, kv_rank, kv_rope, bounds_sh, round_sh, p_sh, factor_sh, highest_sh,
        total_sh, flag_sh, valid, there, used, q_full, q_free, full, free, score, p, sums, out_left, out_right,
    ):  # fmt: skip
        """One consumer's blocks of an item; ``used`` counts the earlier uses of its buffer."""
        first = T.alloc_var("int32")
        count = T.alloc_var("int32")
        state = T.alloc_var("int32")
        count = turn[COUNT]
        T.fill(out_left, 0)
        if right > 0:
            T.fill(out_right, 0)
        T.fill(sums, 0)
        # Shared memory is written by all threads, some the same: TileLang may put a barrier of them all before it.
        highest_sh[g, t % columns] = LOWEST
        flag_sh[g, t % 2] = 0  # what an earlier thread block left there could look raised
        T.sync_threads(8 + g, 128)
        T.barrier_wait(q_full, w & 1)
        for i in T.serial(T.ceildiv(count - g, 2)):
            use = used + i
            first = turn[BEGIN] + (2 * i + g) * BLOCK
            T.barrier_wait(full[g * 2], use & 1)
            state = there[g]
            if state != NONE:
                T.fence_proxy_async()
                T.wgmma_gemm(
                    kv_rank[g, :, :left], q_rank[:, :left], score, transpose_B=True, clear_accum=True
                )
                T.barrier_wait(full[g * 2 + 1], use & 1)
                T.fence_proxy_async()
                if right > 0:
                    T.wgmma_gemm(kv_rank[g, :, left:], q_rank[:, left:], score, transpose_B=True)
                if rope > 0:
                    T.wgmma_gemm(kv_rope[g, :, :], q_rope, score, transpose_B=True)
                T.wait_wgmma(0)
                if (state == SOME) | (first < turn[SEEN_BEGIN]) | (first + BLOCK > turn[SEEN_END]):
                    for j, n in T.Parallel(BLOCK, columns):
                        score[j, n] = T.if_then_else(
                            (valid[g, j] != 0)
                            & (first + j >= bounds_sh[0, n])
                            & (first + j < bounds_sh[1, n]),
                            score[j, n],
                            -T.infinity("float32"),
                        )
                if 2 * i + g + 2 >= count:
                    T.barrier_arrive(q_free)
                softmax(
                    g, t, use, scale, round_sh, p_sh, factor_sh, highest_sh, flag_sh, score, p,
                    sums, out_left, out_right,
                )  # fmt: skip
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
            else:
                T.barrier_wait(full[g * 2 + 1], use & 1)
                if 2 * i + g + 2 >= count:
                    T.barrier_arrive(q_free)
                T.barrier_arrive(free[g * 2])
                T.barrier_arrive(free[g * 2 + 1])
        if count <= g:
            T.barrier_arrive(q_free)
        reduce_sums(g, t, round_sh, total_sh, sums)
        T.sync_threads(10, 256)

    @T.prim_func
    def dense_mla_few_rows(
        Q: T.Tensor([rows, rank + rope], dtype),
        KV: T.Tensor([tokens, width], dtype),
        Scales: T.Tensor([tokens, width], dtype),  # this and the next are FP8 rows' alone: the rows once more
        Rope: T.Tensor([tokens, width], dtype),
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
        Part: T.Tensor([slots, columns, rank + 4], "float32"),
    ):
        with T.Kernel(shares * lanes, threads=384) as block:
            q_rank = T.alloc_shared([columns, rank], dtype)
            q_rope = T.alloc_shared([columns, max(rope, 32)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, 32)], dtype)
            round_sh = T.alloc_shared([2, columns, stride], "float32")
            p_sh = T.alloc_shared([4, columns, BLOCK], dtype)
            bounds_sh = T.alloc_shared([2, columns], "int32", scope="shared")
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            there = T.alloc_shared([2], "int32", scope="shared")
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
            entry = T.alloc_local([2], "int32")
            source = T.alloc_local([4], "int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            share = T.alloc_var("int32")
            turn = T.alloc_local([TURN], "int32")
            q_full = T.alloc_barrier([256])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([160, 128, 160, 128])
            free = T.alloc_barrier([128, 128, 128, 128])

            thread = T.get_thread_binding()
            rows_each = T.truncdiv(rows, requests)
            used0 = 0
            used1 = 0
            T.pdl_trigger()
            T.pdl_sync()
            share = Plan[items + shares, 0]
            first = Plan[items + T.truncdiv(block, lanes), 0]
            last = Plan[items + T.truncdiv(block, lanes), 1]
            if thread < 128:
                T.set_max_nreg(216, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, columns)
                    consume(
                        0, thread, w, turn, scale, q_rank, q_rope, kv_rank, kv_rope, bounds_sh, round_sh,
                        p_sh, factor_sh, highest_sh, total_sh, flag_sh, valid, there,
                        used0, q_full, q_free, full, free, score0, p0, sums0, left0, right0,
                    )  # fmt: skip
                    used0 = used0 + (turn[COUNT] + 1) // 2
                    weigh(thread, turn, heads, has_sink, Sink, highest_sh, total_sh, both_sh, Lse, Part)
                    merge(0, left0, right0, turn, round_sh, both_sh, Out, Part)
            elif thread < 256:
                T.set_max_nreg(216, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, columns)
                    consume(
                        1, thread - 128, w, turn, scale, q_rank, q_rope, kv_rank, kv_rope, bounds_sh, round_sh,
                        p_sh, factor_sh, highest_sh, total_sh, flag_sh, valid,
                        there, used1, q_full, q_free, full, free, score1, p1, sums1, left1, right1,
                    )  # fmt: skip
                    used1 = used1 + turn[COUNT] // 2
                    merge(1, right1, left1, turn, round_sh, both_sh, Out, Part)
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, share, items_each, rows_each, columns)
                    ask(Table, paged, entry, turn[REQUEST], page, turn[BEGIN], turn[END], producer)
                    T.barrier_wait(q_free, (w & 1) ^ 1)
                    load_queries(
                        Q, Plan, items + shares + 1, q_rank, q_rope, bounds_sh, turn[ROW], turn[ROWS_END], heads,
                        producer, q_full, columns, rank, rope,
                    )  # fmt: skip
                    fetch(
                        KV, Table, Plan, items + shares + 1, paged, entry, source, kv_rank, kv_rope, valid, there,
                        turn, page, T.truncdiv(tokens, page), heads, columns, producer, full, free, used0, used1,
                        left, rank, rope,
                    )  # fmt: skip
                    used0 = used0 + (turn[COUNT] + 1) // 2
                    used1 = used1 + turn[COUNT] // 2

    return dense_mla_few_rows
