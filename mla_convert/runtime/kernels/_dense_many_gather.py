"""The program of dense and decode attention for tiles of 64 rows whose tokens lie anywhere, or are FP8 rows.

``_dense`` describes its surroundings; ``_dense_many_blocks`` is for blocks that no page cuts, ``_dense_fp8`` converts.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._dense import (
    BEGIN,
    BLOCK,
    COUNT,
    FP8_ROW,
    LOWEST,
    PLAN_COLUMNS,
    ROW,
    ROWS_END,
    SEEN_BEGIN,
    SEEN_END,
    SLACK,
    TURN,
    load_queries,
    turn_at,
)
from mla_convert.runtime.kernels._dense_blocks import HELPERS
from mla_convert.runtime.kernels._dense_gather import FUNCTIONS, LOOKED_UP, fetch_rows, start_rows
from mla_convert.runtime.kernels._dense_many import TILE, finish_first, finish_second, follow, rescale, store


def many_rows_gathered(rank: int, rope: int, dtype: str, fp8: bool, pair: bool) -> Any:
    """Rows on the M side, 64 of them.

    The consumers work as in ``_dense_many_blocks``, but that a block comes in two pieces, [0, left) and what is
    behind. Threads write these, so each consumer makes them visible to its products.
    """
    left = -(-rank // 128) * 64
    right, width = rank - left, rank + rope
    rows, tokens, requests, entries = T.dynamic("rows, tokens, requests, entries")
    lines, slots, heads = T.dynamic("lines, slots, heads")
    row_width, row_type = (FP8_ROW, "float8_e4m3fn") if fp8 else (width, dtype)
    scale_width, scale_type = (FP8_ROW // 4, "float32") if fp8 else (width, dtype)
    rope_width = FP8_ROW // 2 if fp8 else width
    own_registers = 208 if fp8 else 216  # of a consumer's thread; FP8 rows pass through the producer's

    @T.macro
    def release(free, k, lane, thread):
        """A piece of a buffer is free: a warp's products are done together, so one of its threads says so."""
        if thread % 32 == 0:
            T.barrier_arrive(free[k])
            if pair:
                T.call_extern("handle", "mla_arrive_there", free.data, k, lane % 2 ^ 1)

    @T.macro
    def scores(q_rank, q_rope, kv_rank, kv_rope, s, phase, full, score, first, last):
        """Ask for the product of the columns [first, last) of a block."""
        for u in list(range(first // 64, last // 64)):
            if u == 0 or u == left // 64:
                T.barrier_wait(full[s * 2 + u // (left // 64)], phase)
                T.fence_proxy_async()
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
    def softmax(s, block, turn, scale, bounds_sh, valid, holes, score, p, highest, before, factor):
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

    @T.prim_func
    def dense_mla_many_rows_gathered(
        Q: T.Tensor([rows, width], dtype),
        KV: T.Tensor([tokens, row_width], row_type),
        _Scales: T.Tensor([tokens, scale_width], scale_type),
        _Rope: T.Tensor([tokens, rope_width], dtype),
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
        with T.Kernel(shares * lanes, threads=384, cluster_dims=2 if pair else None) as block:
            q_rank = T.alloc_shared([TILE, rank], dtype)
            q_rope = T.alloc_shared([TILE, max(rope, 64)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, 64)], dtype)
            stage = T.alloc_shared(
                [2, TILE, 24], dtype
            )  # 16 columns of output, padded against bank conflicts
            bounds_sh = T.alloc_shared([2, TILE], "int32", scope="shared")
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, TILE], "float32", scope="shared")
            total_sh = T.alloc_shared([TILE], "float32", scope="shared")
            factor_sh = T.alloc_shared([TILE], "float32", scope="shared")
            count_sh = T.alloc_shared(
                [1], "int32", scope="shared"
            )  # blocks of the item, as the producer has found
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
            found = T.alloc_local([LOOKED_UP], "int32")
            source = T.alloc_local([4], "int32")
            codes = T.alloc_local([32], "uint32")
            scales = T.alloc_local([8], "float32")
            turn = T.alloc_local([TURN], "int32")
            used0 = T.alloc_var("int32")
            used1 = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            each = T.alloc_var("int32")
            count = T.alloc_var("int32")
            q_full = T.alloc_barrier([256])
            q_free = T.alloc_barrier([256])
            full = T.alloc_barrier([4, 132, 4, 132] if fp8 else [128, 256, 128, 256])
            free = T.alloc_barrier([8 if pair else 4] * 4)
            scored = T.alloc_barrier([128])
            p_full = T.alloc_barrier([128, 128])
            finished = T.alloc_barrier([128, 128])

            T.import_source(HELPERS + FUNCTIONS)
            thread = T.get_thread_binding()
            rows_each = T.truncdiv(rows, requests)
            if pair:
                T.call_extern("handle", "mla_meet")  # the other's barriers are ready
            T.pdl_trigger()
            T.pdl_sync()
            used0 = 0
            used1 = 0
            each = Plan[items + shares, 0]
            first = Plan[items + T.truncdiv(block, lanes), 0]
            last = Plan[items + T.truncdiv(block, lanes), 1]
            if thread < 128:
                T.set_max_nreg(own_registers, 1)
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                    T.fill(out0, 0)
                    T.fill(total0, 0)
                    T.fill(highest0, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    count = count_sh[0]
                    if count > 0:
                        scores(q_rank, q_rope, kv_rank, kv_rope, 0, used0 & 1, full, score0, 0, width)
                        T.wait_wgmma(0)
                        T.barrier_arrive(scored[0])
                    for i in T.serial((count - 1) // 2):
                        softmax(
                            0, 2 * i, turn, scale, bounds_sh, valid, holes, score0, p0, highest0, before0, factor0
                        )  # fmt: skip
                        share(0, p0, kv_rope, highest0, highest_sh, p_full, thread)
                        rescale(out0, factor0, left)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        add_up(score0, part0, factor0, total0)
                        T.wait_wgmma(0)
                        release(free, 0, T.truncmod(block, lanes), thread)
                        T.barrier_wait(p_full[1], (used1 + i) & 1)
                        follow(scale, highest_sh, 1, highest0, before0, factor0, total0)
                        rescale(out0, factor0, left)
                        T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, 0, left
                        )
                        T.wait_wgmma(left // 64)
                        release(free, 2, T.truncmod(block, lanes), thread)
                        scores(
                            q_rank, q_rope, kv_rank, kv_rope, 0, (used0 + i + 1) & 1, full, score0, left, width
                        )  # fmt: skip
                        T.wait_wgmma(1)
                        T.barrier_arrive(scored[0])
                        T.wait_wgmma(0)
                    # The last block or two, behind which no scores follow.
                    if count > 0:
                        softmax(
                            0, (count - 1) // 2 * 2, turn, scale, bounds_sh, valid, holes, score0, p0, highest0,
                            before0, factor0,
                        )  # fmt: skip
                        share(0, p0, kv_rope, highest0, highest_sh, p_full, thread)
                        rescale(out0, factor0, left)
                        T.wgmma_gemm(p0, kv_rank[0, :, :left], out0)
                        add_up(score0, part0, factor0, total0)
                        T.wait_wgmma(0)
                        release(free, 0, T.truncmod(block, lanes), thread)
                        if count % 2 == 0:
                            T.barrier_wait(p_full[1], (used1 + count // 2 - 1) & 1)
                            follow(scale, highest_sh, 1, highest0, before0, factor0, total0)
                            rescale(out0, factor0, left)
                            T.wgmma_gemm(kv_rope[1, :, :BLOCK], kv_rank[1, :, :left], out0)
                            T.wait_wgmma(0)
                            release(free, 2, T.truncmod(block, lanes), thread)
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
                    turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                    T.fill(out1, 0)
                    T.fill(total1, 0)
                    T.fill(highest1, LOWEST)
                    T.barrier_wait(q_full, w & 1)
                    count = count_sh[0]
                    T.fence_proxy_async()  # or TileLang puts one into the loop, for what the last item stored
                    for i in T.serial(count // 2):
                        T.barrier_wait(scored[0], (used0 + i) & 1)
                        scores(q_rank, q_rope, kv_rank, kv_rope, 1, (used1 + i) & 1, full, score1, 0, width)
                        T.wait_wgmma(0)
                        T.barrier_wait(p_full[0], (used0 + i) & 1)
                        follow(scale, highest_sh, 0, highest1, before1, factor1, total1)
                        rescale(out1, factor1, right)
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        softmax(
                            1, 2 * i + 1, turn, scale, bounds_sh, valid, holes, score1, p1, highest1, before1, factor1
                        )  # fmt: skip
                        share(1, p1, kv_rope, highest1, highest_sh, p_full, thread)
                        T.wait_wgmma(0)
                        release(free, 1, T.truncmod(block, lanes), thread)
                        rescale(out1, factor1, right)
                        T.wgmma_gemm(p1, kv_rank[1, :, left:], out1)
                        add_up(score1, part1, factor1, total1)
                        T.wait_wgmma(0)
                        release(free, 3, T.truncmod(block, lanes), thread)
                    if count % 2 == 1:
                        T.barrier_wait(p_full[0], (used0 + count // 2) & 1)
                        follow(scale, highest_sh, 0, highest1, before1, factor1, total1)
                        rescale(out1, factor1, right)
                        T.wgmma_gemm(kv_rope[0, :, :BLOCK], kv_rank[0, :, left:], out1)
                        T.wait_wgmma(0)
                        release(free, 1, T.truncmod(block, lanes), thread)
                    T.barrier_arrive(q_free)
                    used0 = used0 + (count + 1) // 2
                    used1 = used1 + count // 2

                    finish_second(finished, w, total1, total_sh, factor1, factor_sh, out1, right)
                    store(1, out1, left, right, turn, stage, Out, Part)
            else:
                T.set_max_nreg(504 - 2 * own_registers, 0)
                producer = thread - 256
                for w in T.serial(last - first + 1):
                    turn_at(Plan, turn, first + w, block, lanes, each, items_each, rows_each, TILE)
                    start_rows(
                        KV, Table, paged, page, T.truncdiv(tokens, page), turn, found, codes, scales, fp8, pair,
                        T.truncmod(block, lanes) % 2, producer,
                    )  # fmt: skip
                    T.barrier_wait(q_free, (w & 1) ^ 1)
                    if producer == 0:
                        count_sh[0] = turn[COUNT]
                    load_queries(
                        Q, Plan, items + shares + 1, q_rank, q_rope, bounds_sh, turn[ROW], turn[ROWS_END], heads,
                        producer, q_full, TILE, rank, rope,
                    )  # fmt: skip
                    fetch_rows(
                        KV, Table, paged, page, T.truncdiv(tokens, page), turn, found, source, codes, scales,
                        kv_rank, kv_rope, valid, holes, full, free, used0, used1, left, rank, rope, fp8, pair,
                        T.truncmod(block, lanes) % 2, T.truncmod(block, lanes), lanes, producer,
                    )  # fmt: skip
                    used0 = used0 + (turn[COUNT] + 1) // 2
                    used1 = used1 + turn[COUNT] // 2
            if pair:
                T.call_extern("handle", "mla_meet")  # the other may still say that it has read a buffer

    return dense_mla_many_rows_gathered
