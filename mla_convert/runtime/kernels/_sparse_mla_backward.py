"""The main program of ``sparse_mla_backward``: five products for each list, 64 rows and block of the list.

The rows are 64 heads of one query or, up to 32 heads, those of ``GROUP`` queries at most that share a list
(``_sparse_mla_backward_rows.unite``): a token that several of them name is gathered, multiplied and added to once,
and a query that does not name it has a probability of 0.

A thread block has two warpgroups, with rows on the M side. Shared memory holds Q, dO, one block of 64 gathered tokens,
P and dS of 64 x 64, and nothing more fits. The first warpgroup computes S = Q K^T and dP = dO V^T, from them P and dS,
and the left columns of dQ += dS K; then it gathers the next block. The second computes the other columns of dQ and
dKV = dS^T Q + P^T dO, 64 columns at a time in two accumulators, so that one is added to memory while the other's
product runs. The rows of K are free as soon as they have been read for dQ, the left columns of the first warpgroup
alone before those of the second: the next block arrives, and its S and dP run, beside the dKV of this one.

A multiprocessor starts additions and exchanges between lanes in one order, so the exchanges of a chunk, which make its
additions whole lines, stand between the last additions of the chunk before, not behind them.

Blocks of a list without a valid entry are not walked: ``_sparse_mla_backward_rows.blocks_of`` finds the others.

With ``slots``, rows of dKV are stored, one for each entry of a list and tile of heads, instead of being added to
the tokens' rows; ``_sparse_mla_backward_rows.sum_slots`` sums those in a fixed order. With ``split``, several thread
blocks share a list, and ``sum_parts`` sums their float32 parts of dQ.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812
from tilelang.layout import make_full_bank_swizzled_layout

from mla_convert.runtime.kernels._accumulators import accumulator_place
from mla_convert.runtime.kernels._common import LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK
from mla_convert.runtime.kernels._sparse_mla_backward_cuda import SOURCE
from mla_convert.runtime.kernels._sparse_mla_backward_rows import GROUP, NOTHING, slot_dtype

BEHIND = 1 << 30  # no list is as long
AHEAD = 5  # additions of eight, before the following chunk's product is waited for


def backward(rank: int, rope: int, dtype: str, slots: bool, split: bool) -> Any:
    """dQ, and dKV added to tokens in float32 (or, with ``slots``, stored for each entry of each list)."""
    width = rank + rope
    left = min(-(-width // 128) * 64, rank - 64)
    right = rank - left
    first_left = min(left, 256)  # what one instruction takes
    lists, rows, tokens, entries, blocks, counted, dq_rows, dkv_rows = T.dynamic(
        "lists, rows, tokens, entries, blocks, counted, dq_rows, dkv_rows"
    )

    def call(function: str, *arguments):
        T.evaluate(T.call_extern("handle", function, *arguments))

    def load(Source, first, existing, base, to, columns):
        call(
            f"mla_load_quads<{columns}>",
            T.access_ptr(to[0, 0], "w", 64 * columns),
            T.access_ptr(Source[first, base], "r", columns),
            existing,
            Source.shape[1] * 2,
        )

    def fetch(Indices, row, begin, end):
        return T.call_extern("int32", "mla_fetch", T.access_ptr(Indices[row, 0], "r", BLOCK), begin, end)

    def begin_of(Blocks, row, at, i, count):
        """Where block i of a part's begins, of those that hold a valid entry; behind every list if there is none."""
        return T.if_then_else(i < count, Blocks[row, at + i] * BLOCK, BEHIND)

    def copy_panels(KV, column, to, to_column, panels, entry, tokens):
        call(
            f"mla_gather<{panels}, {width}>",
            T.access_ptr(to[0, to_column], "w", panels * 64 * BLOCK),
            T.access_ptr(KV[0, column], "r", width),
            entry,
            tokens,
        )

    def weigh(what, score, times, s, query_rows):
        call(
            f"mla_{what}",
            T.access_ptr(score[0, 0], "rw", 32),
            T.access_ptr(times[s, 0, 0], "r", GROUP * BLOCK),
            query_rows,
        )

    @T.macro
    def gather(
        KV, entry, kv_rank, kv_rope, target, b, tokens, slot, tiles, Counts, query_rows, listed, begin, end, times,
        full, kv_free,
    ):  # fmt: skip
        """Copy the rows of a block; one that is not valid becomes zeros, and its target -1.

        The left columns are this warpgroup's own, the others are free when the second is done with them, too.
        """
        if query_rows < 64:
            call(
                "mla_copy_counts",
                T.access_ptr(times[b % 2, 0, 0], "w", GROUP * BLOCK),
                T.access_ptr(Counts[listed, 0, begin], "r", BLOCK),
                Counts.shape[2],
                end - begin,
            )
        else:
            call("mla_count_valid", T.access_ptr(times[b % 2, 0, 0], "w", BLOCK), entry, tokens)
        call(
            "mla_targets",
            T.access_ptr(target[b % 2, 0], "w", BLOCK),
            entry,
            tokens,
            slot if slots else -1,
            tiles,
        )
        copy_panels(KV, 0, kv_rank, 0, left // 64, entry, tokens)
        T.cp_async_barrier_noinc(full[0])
        T.barrier_wait(kv_free[0], (b & 1) ^ 1)
        copy_panels(KV, left, kv_rank, left, (rank - left) // 64, entry, tokens)
        if rope > 0:
            copy_panels(KV, rank, kv_rope, 0, 1, entry, tokens)
        T.cp_async_barrier_noinc(full[1])
        T.barrier_arrive(full[1])  # in release order, for the targets

    def zero(acc, columns):
        call(f"mla_zero<{columns // 2}>", T.access_ptr(acc[0, 0], "w", columns // 2))

    def store(DQ, row, existing, acc, column, columns):
        call(
            f"mla_store_quads<{columns}>",
            T.access_ptr(DQ[row, column], "w", width),
            T.access_ptr(acc[0, 0], "r", columns // 2),
            existing,
            width,
        )

    def product(c, q_rank, q_rope, do_sh, p_sh, ds_sh, acc):
        """64 columns of dKV: values and keys share the first ``rank`` of them, those behind are rotary."""
        if c * 64 < rank:
            columns = slice(c * 64, c * 64 + 64)
            T.evaluate(T.wgmma_gemm(ds_sh, q_rank[:, columns], acc, transpose_A=True, clear_accum=True))
            T.evaluate(T.wgmma_gemm(p_sh, do_sh[:, columns], acc, transpose_A=True))
        else:
            T.evaluate(T.wgmma_gemm(ds_sh, q_rope, acc, transpose_A=True, clear_accum=True))

    def add(c, acc, following, to, dKV, first, last, exchange):
        """Additions ``first`` to ``last`` of a chunk; with ``exchange``, those of the following one between them."""
        call(
            f"mla_add<{'false' if slots else 'true'}, {width}, {first}, {last}, {'true' if exchange else 'false'}>",
            T.access_ptr(dKV[0, c * 64], "rw", 64),
            T.access_ptr(acc[0, 0], "rw", 32),
            T.access_ptr(to[0], "r", 4),
            T.access_ptr(following[0, 0], "rw", 32),
        )

    def add_all(
        kv_rank, kv_rope, q_rank, q_rope, do_sh, p_sh, ds_sh, dq2, dq3, acc0, acc1, to, p_free, kv_free, dKV
    ):
        """Every chunk of dKV, and this warpgroup's columns of dQ behind the first chunk's product."""
        accs = (acc0, acc1)
        chunks = width // 64
        product(0, q_rank, q_rope, do_sh, p_sh, ds_sh, acc0)
        T.evaluate(T.wgmma_gemm(ds_sh, kv_rank[:, left:], dq2))
        if rope > 0:
            T.evaluate(T.wgmma_gemm(ds_sh, kv_rope, dq3))
        product(1, q_rank, q_rope, do_sh, p_sh, ds_sh, acc1)
        T.evaluate(T.wait_wgmma(4 if rope > 0 else 3))
        call("mla_exchange", T.access_ptr(acc0[0, 0], "rw", 32))
        for c in range(chunks):
            acc, following = accs[c % 2], accs[(c + 1) % 2]
            begin = 0
            if c == 0:
                begin = 2
                add(c, acc, following, to, dKV, 0, begin, False)
                T.evaluate(T.wait_wgmma(2))
                T.evaluate(T.barrier_arrive(kv_free))
            add(c, acc, following, to, dKV, begin, AHEAD, False)
            if c + 1 < chunks:
                T.evaluate(T.wait_wgmma(0))
                if c + 2 == chunks:
                    T.evaluate(T.barrier_arrive(p_free))
            add(c, acc, following, to, dKV, AHEAD, 8, c + 1 < chunks)
            if c + 2 < chunks:
                product(c + 2, q_rank, q_rope, do_sh, p_sh, ds_sh, acc)

    @T.prim_func
    def sparse_mla_backward_program(
        Q: T.Tensor([rows, width], dtype),
        KV: T.Tensor([tokens, width], dtype),
        Indices: T.Tensor([lists, entries], "int32"),
        Lengths: T.Tensor([lists], "int32"),
        Blocks: T.Tensor([lists, blocks], "int32"),
        Counts: T.Tensor([counted, GROUP, entries], "uint16"),
        query_rows: T.int32,
        list_rows: T.int32,
        parts: T.int32,
        DOut: T.Tensor([rows, rank], dtype),
        Lse2: T.Tensor([rows], "float32"),
        Share: T.Tensor([rows], "float32"),
        Offset: T.Tensor([rows], "float32"),
        scale: T.float32,
        DQ: T.Tensor([dq_rows, width], "float32" if split else dtype),
        DKV: T.Tensor([dkv_rows, width], slot_dtype(dtype) if slots else "float32"),
    ):
        with T.Kernel(lists * T.ceildiv(list_rows, 64) * parts, threads=256) as block:
            T.import_source(SOURCE)
            q_rank = T.alloc_shared([64, rank], dtype)
            q_rope = T.alloc_shared([64, 64], dtype)
            do_sh = T.alloc_shared([64, rank], dtype)
            kv_rank = T.alloc_shared([BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([BLOCK, 64], dtype)
            p_sh = T.alloc_shared([64, BLOCK], dtype)
            ds_sh = T.alloc_shared([64, BLOCK], dtype)
            target = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            times = T.alloc_shared([2, GROUP, BLOCK], "uint16", scope="shared")
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
            to = T.alloc_local([4], "int32")
            acc0 = T.alloc_fragment([BLOCK, 64], "float32")
            acc1 = T.alloc_fragment([BLOCK, 64], "float32")
            # TileLang cannot tell from a call to its own C++ how a fragment lies: as wgmma leaves it.
            T.annotate_layout(
                {
                    x: T.Fragment(x.shape, forward_fn=accumulator_place)
                    for x in (score, dq0, dq1, dq2, dq3, acc0, acc1)
                }
            )
            T.annotate_layout(
                {
                    tile: make_full_bank_swizzled_layout(tile)
                    for tile in (q_rank, q_rope, do_sh, kv_rank, kv_rope, p_sh, ds_sh)
                }
            )
            listed = T.alloc_var("int32")
            first = T.alloc_var("int32")
            existing = T.alloc_var("int32")
            at = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            count = T.alloc_var("int32")
            entry = T.alloc_var("int32")
            q_full = T.alloc_barrier([256])
            full = T.alloc_barrier([128, 256])
            ds_full = T.alloc_barrier([128])
            kv_free = T.alloc_barrier([256])
            p_free = T.alloc_barrier([128])

            thread = T.get_thread_binding()
            tiles = T.ceildiv(list_rows, 64)
            listed = block // parts // tiles
            first = listed * list_rows + block // parts % tiles * 64
            existing = T.min(list_rows - block // parts % tiles * 64, rows - first)
            # All that the first copies wait for is asked for at once, and as if the first block held a valid entry.
            entry = fetch(Indices, listed, 0, entries)
            begin = Blocks[listed, 1]
            end = Lengths[listed]
            at = Blocks[listed, 0]
            count = T.ceildiv(at, parts)  # blocks of a part
            count = T.max(T.min(at - block % parts * count, count), 0)
            at = 1 + block % parts * T.ceildiv(at, parts)
            slot = listed * entries * tiles + block // parts % tiles
            if thread < 128:
                if block % parts > 0:
                    begin = Blocks[listed, at]
                begin = T.if_then_else(count > 0, begin * BLOCK, BEHIND)
                entry = T.call_extern(
                    "int32",
                    "mla_fetch_first",
                    T.access_ptr(Indices[listed, 0], "r", BLOCK),
                    entry,
                    begin,
                    end,
                )
                if count > 0:
                    gather(
                        KV, entry, kv_rank, kv_rope, target, 0, tokens, slot + begin * tiles, tiles, Counts, query_rows,
                        listed, begin, end, times, full, kv_free,
                    )  # fmt: skip
                begin = begin_of(Blocks, listed, at, 1, count)
                load(Q, first, existing, 0, q_rank, rank)
                if rope > 0:
                    load(Q, first, existing, rank, q_rope, rope)
                T.fence_proxy_async()
                T.barrier_arrive(q_full[0])
                for h in T.Parallel(64):
                    lse2[h] = NOTHING
                    share[h] = 0.0
                    offset[h] = 0.0
                    if h < existing:
                        lse2[h] = Lse2[first + T.min(h, existing - 1)]
                        share[h] = Share[first + T.min(h, existing - 1)]
                        offset[h] = Offset[first + T.min(h, existing - 1)]
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
                    # No branch before the last wait: one around registers would wait for the product in flight.
                    weigh("hide", score, times, i % 2, query_rows)
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.exp2(score[h, j] * (scale * LOG2E) - lse2[h])
                    T.wait_wgmma(0)
                    if query_rows < 64:
                        weigh("weigh", score, times, i % 2, query_rows)
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
                    entry = fetch(Indices, listed, begin, end)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free[0])
                    T.sync_threads(8, 128)  # every warp's product with the left columns has ended
                    if i + 1 < count:
                        gather(
                            KV, entry, kv_rank, kv_rope, target, i + 1, tokens, slot + begin * tiles, tiles, Counts,
                            query_rows, listed, begin, end, times, full, kv_free,
                        )  # fmt: skip
                    begin = begin_of(Blocks, listed, at, i + 2, count)
                first = first + block % parts * rows
                store(DQ, first, existing, dq0, 0, first_left)
                if left > first_left:
                    store(DQ, first, existing, dq1, first_left, left - first_left)
            else:
                load(DOut, first, existing, 0, do_sh, rank)
                T.fence_proxy_async()
                T.barrier_arrive(q_full[0])
                zero(dq2, right)  # T.fill would take the places for those of the first 128 threads
                if rope > 0:
                    zero(dq3, 64)
                T.barrier_wait(q_full[0], 0)
                for i in T.serial(count):
                    T.barrier_wait(ds_full[0], i & 1)
                    T.fence_proxy_async()
                    call(
                        "mla_targets_of",
                        T.access_ptr(to[0], "w", 4),
                        T.access_ptr(target[i % 2, 0], "r", BLOCK),
                    )
                    add_all(
                        kv_rank, kv_rope, q_rank, q_rope, do_sh, p_sh, ds_sh, dq2, dq3, acc0, acc1, to, p_free[0],
                        kv_free[0], DKV,
                    )  # fmt: skip
                first = first + block % parts * rows
                store(DQ, first, existing, dq2, left, right)
                if rope > 0:
                    store(DQ, first, existing, dq3, rank, rope)

    return sparse_mla_backward_program
