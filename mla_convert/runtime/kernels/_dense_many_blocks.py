"""The program of dense and decode attention for tiles of 64 rows where no block of tokens crosses a page.

``_dense`` describes its surroundings, ``_dense_blocks`` has what fetches; ``_dense_many`` is for other pages.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._dense import (
    BEGIN,
    BLOCK,
    COUNT,
    LOWEST,
    PLAN_COLUMNS,
    SEEN_BEGIN,
    SEEN_END,
    SLACK,
    TURN,
    turn_at,
)
from mla_convert.runtime.kernels._dense_blocks import AHEAD, HELPERS, fetch_blocks, load_queries, page_at
from mla_convert.runtime.kernels._dense_many import TILE, finish_first, finish_second, follow, rescale, store


def many_rows_by_blocks(rank: int, rope: int, dtype: str) -> Any:
    """Rows on the M side, 64 of them.

    The first consumer owns output columns [0, left) and the scores of even blocks, the second the columns behind
    and the scores of odd blocks. Each multiplies its own probabilities from registers and the other's from shared
    memory, where they take the place of the block's rope dims. No product waits for another of its warpgroup but
    where their results meet: the first asks for the scores of its next block, 64 columns at a time as they arrive,
    behind its last product, and the second begins its scores when the first's are about to end.
    """
    left = -(-rank // 128) * 64
    right, width = rank - left, rank + rope
    rows, tokens, requests, entries = T.dynamic("rows, tokens, requests, entries")
    lines, slots, heads = T.dynamic("lines, slots, heads")

    @T.macro
    def release(free, k, thread):
        """A piece of a buffer is free: a warp's products are done together, so one of its threads says so."""
        if thread % 32 == 0:
            T.barrier_arrive(free[k])

    @T.macro
    def scores(q_rank, q_rope, kv_rank, kv_rope, s, phase, full, score, first, last):
        """Ask for the product of the columns [first, last) of a block."""
        for u in list(range(first // 64, last // 64)):
            T.barrier_wait(full[s * (width // 64) + u], phase)
            if u < rank // 64:
                T.wgmma_gemm(
                    q_rank[:, u * 64 : u * 64 + 64],
                    kv_rank[s, :, u * 64 : u * 64 + 64],
                    score,
                    transpose_B=True,
                    clear_accum=u == 0,
                )
            else:
                T.wgmma_gemm(
                    q_rope[:, u * 64 - rank : u * 64 - rank + 64],
                    kv_rope[s, :, u * 64 - rank : u * 64 - rank + 64],
                    score,
                    transpose_B=True,
                )

    @T.macro
    def softmax(s, block, turn, scale, bounds_sh, there, score, p, highest, before, factor):
        """Probabilities of a block against the maximum so far; ``factor`` is what older results shrink by."""
        first = turn[BEGIN] + block * BLOCK
        if (there[s] < BLOCK) | (first < turn[SEEN_BEGIN]) | (first + BLOCK > turn[SEEN_END]):
            for h, j in T.Parallel(TILE, BLOCK):
                score[h, j] = T.if_then_else(
                    (j < there[s]) & (first + j >= bounds_sh[0, h]) & (first + j < bounds_sh[1, h]),
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
        T.copy(score, p)

    @T.macro
    def add_up(score, part, factor, total):
        """The sum of a block's probabilities, while the product with them runs."""
        T.reduce_sum(score, part, dim=1)
        for h in T.Parallel(TILE):
            total[h] = total[h] * factor[h] + part[h]

    @T.macro
    def share(s, p, kv_rope, highest, highest_sh, p_full, thread):
        """Probabilities and maximum for the other consumer. The block's rope dims, which P replaces, have been read
        when all warps are here."""
        T.sync_threads(8 + s, 128)
        # Helpers get plain pointers: TileLang would put a fence between every use of an address and the next product.
        T.call_extern("void", "mla_store_tile", kv_rope.data, s * max(rope // 64, 1), p.data, thread % 128)
        T.copy(highest, highest_sh[s, :])
        T.fence_proxy_async()
        T.barrier_arrive(p_full[s])

    @T.macro
    def clear_unseen(group, s, block, turn, there, bounds_sh, kv_rank, column, columns, thread):
        """Zeros for the values of tokens that no row sees: even times a probability of 0, NaN would be NaN."""
        first = turn[BEGIN] + block * BLOCK
        if (there[s] < BLOCK) | (first < turn[SEEN_BEGIN]) | (first + BLOCK > turn[SEEN_END]):
            T.call_extern(
                "void", "mla_clear_unseen", kv_rank.data, s * (rank // 64) + column // 64, columns // 64,
                bounds_sh.data, first, there[s], thread % 128,
            )  # fmt: skip
            T.fence_proxy_async()
            T.sync_threads(8 + group, 128)

    @T.prim_func
    def dense_mla_many_rows_by_blocks(
        Q: T.Tensor([rows, width], dtype),
        KV: T.Tensor([tokens, width], dtype),
        _Scales: T.Tensor([tokens, width], dtype),
        _Rope: T.Tensor([tokens, width], dtype),
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
            q_rope = T.alloc_shared([TILE, max(rope, 64)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, 64)], dtype)
            stage = T.alloc_shared(
                [2, TILE, 24], dtype
            )  # 16 columns of output, padded against bank conflicts
            bounds_sh = T.alloc_shared([2, TILE], "int32", scope="shared")
            there = T.alloc_shared([2], "int32", scope="shared")
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
            ahead = T.alloc_local([AHEAD], "int32")
            turn = T.alloc_local([TURN], "int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            each = T.alloc_var("int32")
            count = T.alloc_var("int32")
            q_full = T.alloc_barrier([32])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([1] * (2 * width // 64))
            free = T.alloc_barrier([4, 4, 4, 4])
            scored = T.alloc_barrier([128])
            p_full = T.alloc_barrier([128, 128])
            finished = T.alloc_barrier([128, 128])

            T.import_source(HELPERS)
            thread = T.get_thread_binding()
            rows_each = T.truncdiv(rows, requests)
            T.pdl_sync()  # everything but the plan has been there before
            used0 = 0
            used1 = 0
            each = Plan[items + shares, 0]
            first = Plan[items + T.truncdiv(block, lanes), 0]
            last = Plan[items + T.truncdiv(block, lanes), 1]
            if thread < 128:
                T.set_max_nreg(216, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                    count = turn[COUNT]
                    T.fill(out0, 0)
                    T.fill(total0, 0)
                    T.fill(highest0, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    if count > 0:
                        scores(q_rank, q_rope, kv_rank, kv_rope, 0, used0 & 1, full, score0, 0, width)
                        T.wait_wgmma(0)
                        T.barrier_arrive(scored[0])
                    for i in T.serial((count - 1) // 2):
                        softmax(
                            0, 2 * i, turn, scale, bounds_sh, there, score0, p0, highest0, before0, factor0
                        )  # fmt: skip
                        share(0, p0, kv_rope, highest0, highest_sh, p_full, thread)
                        clear_unseen(0, 0, 2 * i, turn, there, bounds_sh, kv_rank, 0, left, thread)
                        rescale(out0, factor0, left)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        add_up(score0, part0, factor0, total0)
                        T.wait_wgmma(0)
                        release(free, 0, thread)
                        T.barrier_wait(p_full[1], (used1 + i) & 1)
                        follow(scale, highest_sh, 1, highest0, before0, factor0, total0)
                        rescale(out0, factor0, left)
                        clear_unseen(0, 1, 2 * i + 1, turn, there, bounds_sh, kv_rank, 0, left, thread)
                        T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, 0, left
                        )
                        T.wait_wgmma(left // 64)
                        release(free, 2, thread)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, left, width
                        )  # fmt: skip
                        T.wait_wgmma(1)
                        T.barrier_arrive(scored[0])
                        T.wait_wgmma(0)
                    # The last block or two, behind which no scores follow.
                    if count > 0:
                        softmax(
                            0, (count - 1) // 2 * 2, turn, scale, bounds_sh, there, score0, p0, highest0, before0,
                            factor0,
                        )  # fmt: skip
                        share(0, p0, kv_rope, highest0, highest_sh, p_full, thread)
                        clear_unseen(
                            0, 0, (count - 1) // 2 * 2, turn, there, bounds_sh, kv_rank, 0, left, thread
                        )  # fmt: skip
                        rescale(out0, factor0, left)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        add_up(score0, part0, factor0, total0)
                        T.wait_wgmma(0)
                        release(free, 0, thread)
                        if count % 2 == 0:
                            T.barrier_wait(p_full[1], (used1 + count // 2 - 1) & 1)
                            follow(scale, highest_sh, 1, highest0, before0, factor0, total0)
                            rescale(out0, factor0, left)
                            clear_unseen(0, 1, count - 1, turn, there, bounds_sh, kv_rank, 0, left, thread)
                            T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                            T.wait_wgmma(0)
                            release(free, 2, thread)
                    T.barrier_arrive(q_free)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    finish_first(
                        finished, w, turn, has_sink, Sink, heads, scale, before0, highest0, total0, total_sh, factor0,
                        factor_sh, part0, out0, left, rank, Lse, Part,
                    )  # fmt: skip
                    store(0, out0, 0, left, turn, stage, Out, Part)
            elif thread < 256:
                T.set_max_nreg(216, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                    count = turn[COUNT]
                    T.fill(out1, 0)
                    T.fill(total1, 0)
                    T.fill(highest1, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    T.fence_proxy_async()  # or TileLang puts one into the loop, for what the last item stored
                    for i in T.serial(count // 2):
                        T.barrier_wait(scored[0], (used0 + i) & 1)
                        scores(q_rank, q_rope, kv_rank, kv_rope, 1, (used1 + i) & 1, full, score1, 0, width)
                        T.wait_wgmma(0)
                        T.barrier_wait(p_full[0], (used0 + i) & 1)
                        follow(scale, highest_sh, 0, highest1, before1, factor1, total1)
                        rescale(out1, factor1, right)
                        clear_unseen(1, 0, 2 * i, turn, there, bounds_sh, kv_rank, left, right, thread)
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        softmax(
                            1, 2 * i + 1, turn, scale, bounds_sh, there, score1, p1, highest1, before1, factor1
                        )  # fmt: skip
                        share(1, p1, kv_rope, highest1, highest_sh, p_full, thread)
                        T.wait_wgmma(0)
                        release(free, 1, thread)
                        rescale(out1, factor1, right)
                        clear_unseen(1, 1, 2 * i + 1, turn, there, bounds_sh, kv_rank, left, right, thread)
                        T.wgmma_gemm(p1, kv_rank[1, :, left:], out1)
                        add_up(score1, part1, factor1, total1)
                        T.wait_wgmma(0)
                        release(free, 3, thread)
                    if count % 2 == 1:
                        T.barrier_wait(p_full[0], (used0 + count // 2) & 1)
                        follow(scale, highest_sh, 0, highest1, before1, factor1, total1)
                        rescale(out1, factor1, right)
                        clear_unseen(1, 0, count - 1, turn, there, bounds_sh, kv_rank, left, right, thread)
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        T.wait_wgmma(0)
                        release(free, 1, thread)
                    T.barrier_arrive(q_free)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    finish_second(finished, w, total1, total_sh, factor1, factor_sh, out1, right)
                    store(1, out1, left, right, turn, stage, Out, Part)
            else:
                T.set_max_nreg(72, 0)
                if thread < 288:  # one warp is enough
                    for w in T.serial(last - first + 1):
                        turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                        count = turn[COUNT]
                        for k in T.unroll(AHEAD):
                            ahead[k] = page_at(Table, paged, turn, page, k)
                        T.barrier_wait(q_free, (w & 1) ^ 1)
                        load_queries(
                            Q, Plan, turn, q_rank, q_rope, bounds_sh, items + shares + 1, heads, q_full, thread - 256,
                            rank, rope,
                        )  # fmt: skip
                        fetch_blocks(
                            KV, Table, paged, page, T.truncdiv(tokens, page), tokens, turn, ahead, kv_rank, kv_rope,
                            there, full, free, used0, used1, left, rank, width, T.truncmod(block, lanes), lanes, count,
                            thread - 256,
                        )  # fmt: skip
                        used0 = used0 + (count + 1) // 2
                        used1 = used1 + count // 2

    return dense_mla_many_rows_by_blocks
