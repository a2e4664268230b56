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
    ROW,
    ROWS_END,
    SEEN_BEGIN,
    SEEN_END,
    SLACK,
    SLOT,
    TURN,
    WHOLE,
    turn_at,
)
from mla_convert.runtime.kernels._dense_blocks import AHEAD, HELPERS, fetch_blocks, load_queries, page_at
from mla_convert.runtime.kernels._dense_many import TILE, finish_first


def many_rows_by_blocks(rank: int, rope: int, dtype: str) -> Any:
    """Rows on the M side, 64 of them.

    The first consumer owns output columns [0, left) and the scores of even blocks, the second the columns behind
    and the scores of odd blocks. Each multiplies its own probabilities from registers and the other's from shared
    memory, where the second's take the place of their block's rope dims. The first asks for the scores of its next
    block, 64 columns at a time as they arrive, behind its last product, and the second begins its scores when the
    first's are about to end, so that products run beside either's softmax. Odd blocks come right half first, which
    is free first. A row's reference of the exponentials seldom moves: a vote finds out, and else no lane waits for
    another; sums are a thread's until the end.
    """
    left = -(-rank // 128) * 64
    right, width = rank - left, rank + rope
    rows, tokens, requests, entries = T.dynamic("rows, tokens, requests, entries")
    lines, slots, heads = T.dynamic("lines, slots, heads")
    pieces, half = width // 64, left // 64  # of 64 columns, of a block and its left half
    even = [*range(pieces)]  # the order in which they come
    odd = [*range(half, rank // 64), *range(half), *range(rank // 64, pieces)]
    near = max(half, pieces - 2)  # pieces of the first's scores before the second's begin

    @T.macro
    def arrive(barrier, k, thread):
        """One thread of a warp says that all are done; a warp's products are done together."""
        if thread % 32 == 0:
            T.barrier_arrive(barrier[k])

    @T.macro
    def scores(q_rank, q_rope, kv_rank, kv_rope, s, phase, full, score, order, begin, end):
        """Ask for the product of the pieces order[begin:end] of a block."""
        for k in list(range(begin, end)):
            T.barrier_wait(full[s * pieces + order[k]], phase)
            if order[k] < rank // 64:
                T.wgmma_gemm(
                    q_rank[:, order[k] * 64 : order[k] * 64 + 64],
                    kv_rank[s, :, order[k] * 64 : order[k] * 64 + 64],
                    score,
                    transpose_B=True,
                    clear_accum=k == 0,
                )
            else:
                T.wgmma_gemm(
                    q_rope[:, order[k] * 64 - rank : order[k] * 64 - rank + 64],
                    kv_rope[s, :, order[k] * 64 - rank : order[k] * 64 - rank + 64],
                    score,
                    transpose_B=True,
                )

    @T.macro
    def softmax(s, block, used, w, turn, scale, bounds_sh, there, score, p, highest, factor):
        """Probabilities of a block against a reference; nonzero if that has moved and older results shrink."""
        first = turn[BEGIN] + block * BLOCK
        if (turn[TURN] != 0) | (first < turn[SEEN_BEGIN]) | (first + BLOCK > turn[SEEN_END]):
            for h, j in T.Parallel(TILE, BLOCK):
                score[h, j] = T.if_then_else(
                    (j < there[s * 2 + ((used + block // 2) & 1)])
                    & (first + j >= bounds_sh[w & 1, 0, h])
                    & (first + j < bounds_sh[w & 1, 1, h]),
                    score[h, j],
                    -T.infinity("float32"),
                )
        moved = T.alloc_var("int32")
        moved = T.call_extern("int32", "mla_raise", score.data, highest.data, factor.data, scale, SLACK)
        for h, j in T.Parallel(TILE, BLOCK):
            score[h, j] = T.exp2(score[h, j] * scale - highest[h] * scale)
        T.copy(score, p)
        return moved

    @T.macro
    def rescale(moved, out, factor, columns):
        if moved != 0:
            for h, d in T.Parallel(TILE, columns):
                out[h, d] = out[h, d] * factor[h]

    @T.macro
    def follow(s, scale, highest_sh, highest, factor, total, out, columns, thread):
        """Take over the reference that the other consumer left after its block."""
        moved = T.alloc_var("int32")
        moved = T.call_extern(
            "int32", "mla_follow", highest_sh.data, s * TILE, highest.data, factor.data, total.data, scale,
            thread % 128,
        )  # fmt: skip
        rescale(moved, out, factor, columns)

    @T.macro
    def share(s, p, to, at, highest, highest_sh, thread):
        """Probabilities and reference for the other consumer."""
        # Helpers get plain pointers: TileLang would put a fence between every use of an address and the next product.
        T.call_extern("void", "mla_store_tile", to.data, at, p.data, thread % 128)
        T.call_extern("void", "mla_leave", highest_sh.data, s * TILE, highest.data, thread % 128)

    @T.macro
    def announce(s, p_full, thread):
        """What a consumer has left in shared memory is there, for products too."""
        T.fence_proxy_async()
        T.sync_warp()
        arrive(p_full, s, thread)

    @T.macro
    def store(out, base, columns, turn, Out, Part, thread):
        """Normalised results to memory."""
        if turn[WHOLE] != 0:
            T.call_extern(
                "void", "mla_store_rows", out.data, columns, T.address_of(Out[turn[ROW], base]), rank,
                turn[ROWS_END] - turn[ROW], 1 if dtype == "bfloat16" else 0, thread % 128,
            )  # fmt: skip
        else:
            for h, d in T.Parallel(TILE, columns):
                Part[turn[SLOT], h, base + d] = out[h, d]

    @T.macro
    def clear_unseen(group, s, block, used, w, turn, there, bounds_sh, kv_rank, column, columns, thread):
        """Zeros for the values of tokens that no row sees: even times a probability of 0, NaN would be NaN."""
        first = turn[BEGIN] + block * BLOCK
        if (turn[TURN] != 0) | (first < turn[SEEN_BEGIN]) | (first + BLOCK > turn[SEEN_END]):
            T.call_extern(
                "void", "mla_clear_unseen", kv_rank.data, s * (rank // 64) + column // 64, columns // 64,
                bounds_sh.data, (w & 1) * 128, first, there[s * 2 + ((used + block // 2) & 1)], thread % 128,
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
            p_sh = T.alloc_shared([TILE, BLOCK], dtype)  # the first consumer's
            bounds_sh = T.alloc_shared([2, 2, TILE], "int32", scope="shared")  # of this item and the next
            turn_sh = T.alloc_shared([2, TURN + 1], "int32", scope="shared")
            there = T.alloc_shared([4], "int32", scope="shared")
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
            factor0 = T.alloc_fragment([TILE], "float32")
            factor1 = T.alloc_fragment([TILE], "float32")
            total0 = T.alloc_fragment([TILE], "float32")
            total1 = T.alloc_local(
                [2], "float32"
            )  # of a thread's two rows: no fragment that would be laid out anew
            part0 = T.alloc_fragment([TILE], "float32")
            ahead = T.alloc_local([AHEAD], "int32")
            turn = T.alloc_local([TURN + 1], "int32")  # and whether a page is missing
            moved0 = T.alloc_var("int32")
            moved1 = T.alloc_var("int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            each = T.alloc_var("int32")
            count = T.alloc_var("int32")
            prefetch = T.alloc_var("int32")
            q_full = T.alloc_barrier([32])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([1] * (2 * pieces))
            free = T.alloc_barrier([4, 4, 4, 4])
            scored = T.alloc_barrier([4])
            p_full = T.alloc_barrier([4, 4])
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
            # One tile alone is held up by memory, and others' requests fill the cache with what is not needed yet;
            # tokens that many items share are there.
            prefetch = T.if_then_else((lanes > 1) & (items_each == 1), 1, 0)
            if thread < 128:
                T.set_max_nreg(216, 1)
                for w in T.serial(last - first + 1):
                    T.fill(out0, 0)
                    T.fill(total0, 0)
                    T.fill(highest0, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    for k in T.unroll(TURN + 1):
                        turn[k] = turn_sh[w & 1, k]
                    count = turn[COUNT]
                    if count > 0:
                        scores(q_rank, q_rope, kv_rank, kv_rope, 0, used0 & 1, full, score0, even, 0, pieces)
                        T.wait_wgmma(0)
                        arrive(scored, 0, thread)
                    for i in T.serial((count - 1) // 2):
                        moved0 = softmax(
                            0, 2 * i, used0, w, turn, scale, bounds_sh, there, score0, p0, highest0, factor0,
                        )  # fmt: skip
                        share(0, p0, p_sh, 0, highest0, highest_sh, thread)
                        clear_unseen(0, 0, 2 * i, used0, w, turn, there, bounds_sh, kv_rank, 0, left, thread)
                        rescale(moved0, out0, factor0, left)
                        announce(0, p_full, thread)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        T.call_extern("void", "mla_add", score0.data, factor0.data, total0.data)
                        T.wait_wgmma(0)
                        arrive(free, 0, thread)
                        T.barrier_wait(p_full[1], (used1 + i) & 1)
                        follow(1, scale, highest_sh, highest0, factor0, total0, out0, left, thread)
                        clear_unseen(
                            0, 1, 2 * i + 1, used1, w, turn, there, bounds_sh, kv_rank, 0, left, thread
                        )
                        T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, even, 0, half
                        )  # fmt: skip
                        T.wait_wgmma(half)
                        arrive(free, 2, thread)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, even, half, near
                        )  # fmt: skip
                        arrive(scored, 0, thread)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, even, near, pieces
                        )  # fmt: skip
                        T.wait_wgmma(0)
                    T.barrier_arrive(q_free)
                    # The last block or two, behind which no scores follow.
                    if count > 0:
                        moved0 = softmax(
                            0, (count - 1) // 2 * 2, used0, w, turn, scale, bounds_sh, there, score0, p0, highest0,
                            factor0,
                        )  # fmt: skip
                        share(0, p0, p_sh, 0, highest0, highest_sh, thread)
                        clear_unseen(
                            0, 0, (count - 1) // 2 * 2, used0, w, turn, there, bounds_sh, kv_rank, 0, left, thread
                        )  # fmt: skip
                        rescale(moved0, out0, factor0, left)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        announce(0, p_full, thread)
                        T.call_extern("void", "mla_add", score0.data, factor0.data, total0.data)
                        T.wait_wgmma(0)
                        arrive(free, 0, thread)
                        if count % 2 == 0:
                            T.barrier_wait(p_full[1], (used1 + count // 2 - 1) & 1)
                            follow(1, scale, highest_sh, highest0, factor0, total0, out0, left, thread)
                            clear_unseen(
                                0, 1, count - 1, used1, w, turn, there, bounds_sh, kv_rank, 0, left, thread
                            )
                            T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                            T.wait_wgmma(0)
                            arrive(free, 2, thread)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    T.call_extern("void", "mla_sum_rows", total0.data)
                    finish_first(
                        finished, w, turn, has_sink, Sink, heads, scale, before0, highest0, total0, total_sh, factor0,
                        factor_sh, part0, out0, left, rank, Lse, Part,
                    )  # fmt: skip
                    store(out0, 0, left, turn, Out, Part, thread)
            elif thread < 256:
                T.set_max_nreg(216, 1)
                for w in T.serial(last - first + 1):
                    T.fill(out1, 0)
                    total1[0] = 0.0
                    total1[1] = 0.0
                    T.fill(highest1, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    for k in T.unroll(TURN + 1):
                        turn[k] = turn_sh[w & 1, k]
                    count = turn[COUNT]
                    if count < 2:
                        T.barrier_arrive(q_free)
                    T.fence_proxy_async()  # or TileLang puts one into the loop, for what the last item stored
                    for i in T.serial(count // 2):
                        T.barrier_wait(scored[0], (used0 + i) & 1)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 1, (used1 + i) & 1, full, score1, odd, 0, pieces
                        )
                        T.wait_wgmma(0)
                        if i == count // 2 - 1:
                            T.barrier_arrive(q_free)
                        T.barrier_wait(p_full[0], (used0 + i) & 1)
                        follow(0, scale, highest_sh, highest1, factor1, total1, out1, right, thread)
                        clear_unseen(
                            1, 0, 2 * i, used0, w, turn, there, bounds_sh, kv_rank, left, right, thread
                        )
                        T.wgmma_gemm(p_sh, kv_rank[0, :, left:], out1)
                        moved1 = softmax(
                            1, 2 * i + 1, used1, w, turn, scale, bounds_sh, there, score1, p1, highest1, factor1,
                        )  # fmt: skip
                        T.sync_threads(9, 128)  # all warps' scores have read the rope dims, which P replaces
                        share(1, p1, kv_rope, max(rope // 64, 1), highest1, highest_sh, thread)
                        announce(1, p_full, thread)
                        T.wait_wgmma(0)
                        arrive(free, 1, thread)
                        rescale(moved1, out1, factor1, right)
                        clear_unseen(
                            1, 1, 2 * i + 1, used1, w, turn, there, bounds_sh, kv_rank, left, right, thread
                        )
                        T.wgmma_gemm(p1, kv_rank[1, :, left:], out1)
                        T.call_extern("void", "mla_add", score1.data, factor1.data, total1.data)
                        T.wait_wgmma(0)
                        arrive(free, 3, thread)
                    if count % 2 == 1:
                        T.barrier_wait(p_full[0], (used0 + count // 2) & 1)
                        follow(0, scale, highest_sh, highest1, factor1, total1, out1, right, thread)
                        clear_unseen(
                            1, 0, count - 1, used0, w, turn, there, bounds_sh, kv_rank, left, right, thread
                        )
                        T.wgmma_gemm(p_sh, kv_rank[0, :, left:], out1)
                        T.wait_wgmma(0)
                        arrive(free, 1, thread)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    T.call_extern("void", "mla_sum_rows", total1.data)
                    T.call_extern("void", "mla_leave", total_sh.data, 0, total1.data, thread % 128)
                    T.barrier_arrive(finished[1])
                    T.barrier_wait(finished[0], w & 1)
                    for h in T.Parallel(TILE):
                        factor1[h] = factor_sh[h]
                    for h, d in T.Parallel(TILE, right):
                        out1[h, d] = out1[h, d] * factor1[h]
                    store(out1, left, right, turn, Out, Part, thread)
            else:
                T.set_max_nreg(72, 0)
                # A warp for each half of the blocks, since they become free at different times.
                if thread < 288:
                    for w in T.serial(last - first + 1):
                        turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                        for k in T.unroll(AHEAD):
                            ahead[k] = page_at(Table, paged, turn, page, k)
                        T.barrier_wait(q_free, (w & 1) ^ 1)
                        load_queries(
                            Q, Plan, Table, paged, page, T.truncdiv(tokens, page), turn, w, turn_sh, q_rank, q_rope,
                            bounds_sh, items + shares + 1, heads, q_full, thread - 256, rank, rope,
                        )  # fmt: skip
                        fetch_blocks(
                            KV, Table, paged, page, T.truncdiv(tokens, page), tokens, turn, ahead, kv_rank, kv_rope,
                            there, full, free, used0, used1, 0, left, rank, width, T.truncmod(block, lanes), lanes,
                            prefetch, thread - 256,
                        )  # fmt: skip
                        used0 = used0 + (turn[COUNT] + 1) // 2
                        used1 = used1 + turn[COUNT] // 2
                elif thread < 320:
                    for w in T.serial(last - first + 1):
                        turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                        for k in T.unroll(AHEAD):
                            ahead[k] = page_at(Table, paged, turn, page, k)
                        fetch_blocks(
                            KV, Table, paged, page, T.truncdiv(tokens, page), tokens, turn, ahead, kv_rank, kv_rope,
                            there, full, free, used0, used1, 1, left, rank, width, T.truncmod(block, lanes), lanes,
                            prefetch, thread - 288,
                        )  # fmt: skip
                        used0 = used0 + (turn[COUNT] + 1) // 2
                        used1 = used1 + turn[COUNT] // 2

    return dense_mla_many_rows_by_blocks
