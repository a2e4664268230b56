"""The program of ``sparse_mla`` for up to 32 heads; ``_sparse_mla`` describes it beside the other one."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK, LIST_END, LOWEST, SLACK, list_end

SHARED_BYTES = 232448 - 4096  # what a thread block may have, less the small arrays and barriers
PANEL = 64  # dims of a row that lie together in shared memory: the 128 bytes of a swizzle
NOTES = 4  # blocks of a consumer that the producer may have described ahead of it


def few_heads(columns: int, rank: int, rope: int, dtype: str, split: bool) -> Any:
    """Keys on the M side, ``columns`` (8, 16 or 32) heads on the N side: an item is a query and one of ``parts``.

    With 8 columns, each consumer walks items of its own, and nothing passes between the two: while one is at a
    softmax or stores a result, the other uses the tensor cores. The queries of two items with more columns would
    leave the keys too little room, so there both work on one item, on alternate blocks, and merge at its end (16
    heads: 1.26 ms with eight pieces in the ring and one item, 1.35 ms with seven and two).

    A consumer computes S^T = K q^T, takes the exponentials where the product left them, against the maximum it
    has, and adds V^T P^T to its own [rank, columns] sum. Only if a score exceeds that maximum by ``SLACK`` are the
    scores turned round through shared memory for a new one.

    Rows of keys pass through a ring of pieces, each up to three panels of a block, that the producer fills for one
    consumer and the other in turn. Pieces of one panel keep more copies in flight, but 128 threads arrive for each
    of them, which cost more (1.46 instead of 1.24 ms for 16 heads).
    """
    panels = -(-(rank + rope) // PANEL)
    group = min(3, panels)  # panels of a piece
    starts = [u * PANEL for u in range(0, panels, group)]
    pieces = len(starts)
    widths = [min(group * PANEL, rank + rope - start) for start in starts]
    values = [max(0, min(group * PANEL, rank - start)) for start in starts]  # dims of a piece that are values
    summed = [u for u in range(pieces) if values[u] > 0]
    chunks = rank // PANEL
    items = 2 if columns == 8 else 1  # that are under way at a time
    buffers = 1 if columns == 32 else 2  # of probabilities, each consumer's
    by_key = (
        columns > 8
    )  # probabilities lie key by key, so that two are stored at once: 8 are no row of a matrix
    rows = min(columns, 16)  # heads whose scores are turned round at a time
    stride = BLOCK + 4  # keeps the turn round free of bank conflicts and its rows on 16 bytes
    fixed = items * columns * panels * PANEL * 2 + 2 * (rows * stride * 4 + columns * buffers * BLOCK * 2)
    # No more than three blocks' worth, so that NOTES are enough.
    slots = min((SHARED_BYTES - -(-fixed // 1024) * 1024) // (group * PANEL * BLOCK * 2), 3 * pieces)
    queries, tokens, heads, entries, out_rows = T.dynamic("queries, tokens, heads, entries, out_rows")
    limits, lse_rows = T.dynamic("limits, lse_rows")
    out_width = rank + 4 if split else rank  # the log-sum-exp of a part is behind its values
    each = list(range(pieces))  # a list: TileLang unrolls a loop over it while it traces

    # Reductions over keys are written thread by thread. As fragments, TileLang chose a layout for the second
    # consumer that put a barrier inside one warp's branch (a hang), and has no way to fix one for those threads.
    lanes = 128 // rows  # threads of a row, all in one warp
    keys = BLOCK // lanes  # keys of a thread
    passes = columns // rows

    @T.macro
    def softmax(g, t, number, scale, turn, p_sh, factor_sh, highest_sh, flag_sh, score, p, sums, outs):
        """Probabilities of a consumer's block into ``p`` and ``p_sh``; ``number`` counts its blocks."""
        top = T.alloc_var("float32")
        part = T.alloc_var("float32")
        flag = T.alloc_var("int32")
        for j, n in T.Parallel(BLOCK, columns):
            p[j, n] = score[j, n] * scale - highest_sh[g, n]
        for j, n in T.Parallel(BLOCK, columns):
            if p[j, n] > SLACK:
                flag_sh[g, number % 2] = number + 1
        for j, n in T.Parallel(BLOCK, columns):
            p[j, n] = T.exp2(p[j, n])
        if buffers == 1:
            T.sync_threads(8 + g, 128)  # until every warp's last product has read it
        for j, n in T.Parallel(BLOCK, columns):
            if by_key:
                p_sh[g * buffers + number % buffers, j, n] = p[j, n]
            else:
                p_sh[g * buffers + number % buffers, n, j] = p[j, n]
        T.fence_proxy_async()
        T.sync_threads(8 + g, 128)  # every thread's fence comes before any thread's matrix product
        flag = flag_sh[g, number % 2]  # read once: TileLang makes a dozen branches of the one below
        if flag == number + 1:
            for r in list(range(passes)):
                for j, n in T.Parallel(BLOCK, columns):
                    if n // rows == r:
                        turn[g, n % rows, j] = score[j, n] * scale
                T.sync_threads(8 + g, 128)
                part = highest_sh[g, r * rows + t // lanes]
                top = part
                for k in T.unroll(keys):
                    top = T.max(top, turn[g, t // lanes, t % lanes * keys + k])
                for b in T.unroll(lanes.bit_length() - 1):
                    top = T.max(top, T.shfl_xor(top, 1 << b))
                if t % lanes == 0:
                    factor_sh[g, r * rows + t // lanes] = T.exp2(part - top)
                    highest_sh[g, r * rows + t // lanes] = top
                T.sync_threads(8 + g, 128)
            for j, n in T.Parallel(BLOCK, columns):
                p[j, n] = T.exp2(score[j, n] * scale - highest_sh[g, n])
            for j, n in T.Parallel(BLOCK, columns):
                if by_key:
                    p_sh[g * buffers + number % buffers, j, n] = p[j, n]
                else:
                    p_sh[g * buffers + number % buffers, n, j] = p[j, n]
            for j, n in T.Parallel(BLOCK, columns):
                sums[j, n] = sums[j, n] * factor_sh[g, n]
            for u in summed:
                for d, n in T.Parallel(values[u], columns):
                    outs[u][d, n] = outs[u][d, n] * factor_sh[g, n]
            T.fence_proxy_async()
            T.sync_threads(8 + g, 128)

    @T.macro
    def reduce_sums(g, t, turn, total_sh, sums):
        """Add up the consumer's probabilities over its threads."""
        part = T.alloc_var("float32")
        for r in list(range(passes)):
            if r > 0:
                T.sync_threads(8 + g, 128)
            for j, n in T.Parallel(BLOCK, columns):
                if n // rows == r:
                    turn[g, n % rows, j] = sums[j, n]
            T.sync_threads(8 + g, 128)
            part = 0.0
            for k in T.unroll(keys):
                part = part + turn[g, t // lanes, t % lanes * keys + k]
            for b in T.unroll(lanes.bit_length() - 1):
                part = part + T.shfl_xor(part, 1 << b)
            if t % lanes == 0:
                total_sh[g, r * rows + t // lanes] = part

    def log_sum(total: Any, top: Any) -> Any:
        return T.if_then_else(total == 0.0, -T.infinity("float32"), (T.log2(total) + top) * LN2)

    @T.macro
    def store(g, t, heads, out_row, has_sink, Sink, Out, Lse, turn, factor_sh, highest_sh, total_sh, outs):
        """Store a consumer's own item, 64 dims at a time."""
        total = T.alloc_var("float32")
        T.sync_threads(8 + g, 128)
        n = t % columns
        total = total_sh[g, n]
        if (t < columns) & (t < heads):
            if split:
                Out[out_row, n, rank] = log_sum(total, highest_sh[g, n])
            else:
                Lse[out_row, n] = log_sum(total, highest_sh[g, n])
            if has_sink != 0:
                total = T.if_then_else(total == 0.0, 0.0, total + T.exp2(Sink[n] * LOG2E - highest_sh[g, n]))
        if t < columns:
            factor_sh[g, n] = T.if_then_else(total == 0.0, 0.0, 1.0 / total)
        T.sync_threads(8 + g, 128)
        for c in list(range(chunks)):
            for d, n in T.Parallel(PANEL, columns):
                turn[g, n, d] = outs[c // group][c % group * PANEL + d, n] * factor_sh[g, n]
            T.sync_threads(8 + g, 128)
            for n, d in T.Parallel(columns, PANEL):
                if n < heads:
                    Out[out_row, n, c * PANEL + d] = turn[g, n, d]
            T.sync_threads(8 + g, 128)

    @T.macro
    def merge(
        g, t, heads, out_row, has_sink, Sink, Out, Lse, turn, factor_sh, highest_sh, total_sh, sums, outs
    ):  # fmt: skip
        """Store an item that both consumers worked on: one's chunks of 64 dims are the even ones."""
        top = T.alloc_var("float32")
        total = T.alloc_var("float32")
        T.sync_threads(10, 256)
        n = t % columns
        top = T.max(highest_sh[0, n], highest_sh[1, n])
        total = total_sh[0, n] * T.exp2(highest_sh[0, n] - top) + total_sh[1, n] * T.exp2(
            highest_sh[1, n] - top
        )
        if (t < columns) & (t < heads):
            if g == 0:
                if split:
                    Out[out_row, n, rank] = log_sum(total, top)
                else:
                    Lse[out_row, n] = log_sum(total, top)
            if has_sink != 0:
                total = T.if_then_else(total == 0.0, 0.0, total + T.exp2(Sink[n] * LOG2E - top))
        if t < columns:
            factor_sh[g, n] = T.if_then_else(total == 0.0, 0.0, T.exp2(highest_sh[g, n] - top) / total)
        T.sync_threads(8 + g, 128)
        for c in list(range(0, chunks, 2)):
            given = c + 1 - g
            own = c + g
            for r in list(range(passes)):
                if given < chunks:
                    for d, n in T.Parallel(PANEL, columns):
                        if n // rows == r:
                            turn[g, n % rows, d] = (
                                outs[given // group][given % group * PANEL + d, n] * factor_sh[g, n]
                            )
                T.sync_threads(10, 256)
                if own < chunks:
                    for d, n in T.Parallel(PANEL, columns):
                        if n // rows == r:
                            sums[d, n] = (
                                outs[own // group][own % group * PANEL + d, n] * factor_sh[g, n]
                                + turn[1 - g, n % rows, d]
                            )
                    for d, n in T.Parallel(PANEL, columns):
                        if n // rows == r:
                            turn[1 - g, n % rows, d] = sums[d, n]
                    T.sync_threads(8 + g, 128)
                    for n, d in T.Parallel(rows, PANEL):
                        if r * rows + n < heads:
                            Out[out_row, r * rows + n, own * PANEL + d] = turn[1 - g, n, d]
                T.sync_threads(10, 256)

    @T.macro
    def consume(
        g, t, first_row, out_rows, grid, heads, has_sink, Sink, scale, Out, Lse, q_sh, kv, turn, p_sh, factor_sh,
        highest_sh, total_sh, flag_sh, note_sh, valid, holes, q_full, q_free, full, free, noted, score, p, sums, outs,
    ):  # fmt: skip
        """A consumer's items, one after another; ``number`` counts its blocks."""
        number = T.alloc_var("int32")
        first = T.alloc_var("int32")
        last = T.alloc_var("int32")
        number = 0
        flag_sh[g, t % 2] = 0  # what an earlier thread block left there could look raised
        for w in T.serial(T.ceildiv(out_rows - first_row, items * grid)):
            for out in outs:
                T.fill(out, 0)
            T.fill(sums, 0)
            highest_sh[g, t % columns] = LOWEST
            T.sync_threads(8 + g, 128)
            T.barrier_wait(q_full[g % items], w & 1)
            last = 0
            while last == 0:
                note = g * NOTES + number % NOTES
                T.barrier_wait(noted[note], number // NOTES & 1)
                first = T.shfl_sync(note_sh[note], 0)  # the same in a warp, as a product's addresses must be
                last = first & 1
                first = first >> 1
                for u in each:
                    T.barrier_wait(full[(first + u) % slots], (first + u) // slots & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(
                        kv[(first + u) % slots, :, : widths[u]],
                        q_sh[g % items, :, starts[u] : starts[u] + widths[u]],
                        score,
                        transpose_B=True,
                        clear_accum=u == 0,
                    )
                T.wait_wgmma(0)
                if last != 0 and t % 32 == 0:
                    T.barrier_arrive(q_free[g % items])
                if holes[note] == number + 1:
                    for j, n in T.Parallel(BLOCK, columns):
                        score[j, n] = T.if_then_else(valid[note, j] != 0, score[j, n], -T.infinity("float32"))
                softmax(g, t, number, scale, turn, p_sh, factor_sh, highest_sh, flag_sh, score, p, sums, outs)
                for u in summed:
                    T.wgmma_gemm(
                        kv[(first + u) % slots, :, : values[u]],
                        p_sh[g * buffers + number % buffers, :, :],
                        outs[u],
                        transpose_A=True,
                        transpose_B=not by_key,
                    )
                for j, n in T.Parallel(BLOCK, columns):
                    sums[j, n] = sums[j, n] + p[j, n]
                for u in each:
                    T.wait_wgmma(max(0, len(summed) - 1 - u))
                    if t % 32 == 0:
                        T.barrier_arrive(free[(first + u) % slots])
                number = number + 1
            out_row = first_row + w * items * grid
            reduce_sums(g, t, turn, total_sh, sums)
            if items == 2:
                store(
                    g, t, heads, out_row, has_sink, Sink, Out, Lse, turn, factor_sh, highest_sh, total_sh, outs
                )  # fmt: skip
            else:
                merge(
                    g, t, heads, out_row, has_sink, Sink, Out, Lse, turn, factor_sh, highest_sh, total_sh, sums, outs
                )  # fmt: skip

    @T.macro
    def enter(s, Indices, Lengths, tokens, item, row, at, end, length, parts, grid, out_rows):
        """Producer: the entries [at, end) of an item, whose list's length is known; asks for the next one's.

        With ``split``, lists are looked at here, and what stands for their lengths are limits, if there are any.
        """
        row[s] = item[s] // parts
        if split:
            length[s] = list_end(Indices, Lengths, row[s], tokens)
        at[s] = T.min(item[s] % parts * T.ceildiv(T.ceildiv(length[s], BLOCK), parts) * BLOCK, length[s])
        end[s] = T.min(at[s] + T.ceildiv(T.ceildiv(length[s], BLOCK), parts) * BLOCK, length[s])
        if not split:
            length[s] = Lengths[T.min(item[s] + items * grid, out_rows - 1) // parts]

    @T.macro
    def ask(s, Indices, index, item, row, at, end, out_rows, thread):
        """Producer: the entries of the next block, which the copies of this one give time to arrive."""
        for r in T.unroll(4):
            index[4 + s * 4 + r] = -1
            if (item[s] < out_rows) & (at[s] + r * 16 + thread // 8 < end[s]):
                index[4 + s * 4 + r] = Indices[row[s], at[s] + r * 16 + thread // 8]

    @T.macro
    def describe(note, number, place, last, index, tokens, thread, note_sh, valid, holes, noted):
        """Producer: what a consumer is told of its block: where in the ring it starts, which rows are valid."""
        if thread == 0:
            note_sh[note] = place * 2 + last
        for r in T.unroll(4):
            if thread % 8 == 0:
                ok = (index[r] >= 0) & (index[r] < tokens)
                valid[note, r * 16 + thread // 8] = T.if_then_else(ok, 1, 0)
                if not ok:
                    holes[note] = number + 1
        T.barrier_arrive(noted[note])

    @T.macro
    def fill(KV, kv, place, index, tokens, thread, full, free):
        """Producer: copy a block's rows, eight threads a row; one that is not valid becomes zeros, without a read."""
        column = thread % 8 * 8
        for u in each:
            T.barrier_wait(free[(place + u) % slots], ((place + u) // slots & 1) ^ 1)
            for r in T.unroll(4):
                ok = (index[r] >= 0) & (index[r] < tokens)
                source = T.if_then_else(ok, index[r], 0)
                for v in list(range(0, widths[u], PANEL)):
                    if v + column < widths[u]:
                        T.ptx_cp_async(
                            T.access_ptr(kv[(place + u) % slots, r * 16 + thread // 8, v + column], "w", 8),
                            T.access_ptr(KV[source, starts[u] + v + column], "r", 8),
                            8,
                            ok,
                        )
            T.cp_async_barrier_noinc(full[(place + u) % slots])

    @T.macro
    def load_queries(s, Q, q_sh, row, heads, thread, q_full):
        """Producer: copy a query's heads; those that do not exist become zeros."""
        column = thread % 8 * 8
        for step in T.unroll(T.ceildiv(columns, 16)):
            h = step * 16 + thread // 8
            if h < columns:
                for u in T.unroll(panels):
                    if u * PANEL + column < rank + rope:
                        T.ptx_cp_async(
                            T.access_ptr(q_sh[s, h, u * PANEL + column], "w", 8),
                            T.access_ptr(Q[row, T.min(h, heads - 1), u * PANEL + column], "r", 8),
                            8,
                            h < heads,
                        )
        T.cp_async_barrier_noinc(q_full[s])

    @T.prim_func
    def sparse_mla_few_heads(
        Q: T.Tensor([queries, heads, rank + rope], dtype),
        KV: T.Tensor([tokens, rank + rope], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([limits if split else queries], "int32"),
        grid: T.int32,
        parts: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([out_rows, heads, out_width], "float32" if split else dtype),
        Lse: T.Tensor([lse_rows if split else out_rows, heads], "float32"),
    ):
        with T.Kernel(grid, threads=384, prelude=LIST_END if split else None) as cta:
            q_sh = T.alloc_shared([items, columns, panels * PANEL], dtype)
            kv = T.alloc_shared([slots, BLOCK, group * PANEL], dtype)
            turn = T.alloc_shared([2, rows, stride], "float32")
            p_sh = T.alloc_shared([2 * buffers, *((BLOCK, columns) if by_key else (columns, BLOCK))], dtype)
            note_sh = T.alloc_shared([2 * NOTES], "int32", scope="shared")
            valid = T.alloc_shared([2 * NOTES, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2 * NOTES], "int32", scope="shared")
            flag_sh = T.alloc_shared([2, 2], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            factor_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            total_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            # Two of each, one a consumer: TileLang lays a fragment out for the threads that use it.
            score0 = T.alloc_fragment([BLOCK, columns], "float32")
            score1 = T.alloc_fragment([BLOCK, columns], "float32")
            p0 = T.alloc_fragment([BLOCK, columns], "float32")
            p1 = T.alloc_fragment([BLOCK, columns], "float32")
            sums0 = T.alloc_fragment([BLOCK, columns], "float32")
            sums1 = T.alloc_fragment([BLOCK, columns], "float32")
            outs0 = [T.alloc_fragment([values[u], columns], "float32") for u in summed]
            outs1 = [T.alloc_fragment([values[u], columns], "float32") for u in summed]
            # The producer's state for each consumer, or for both of them if there is one item at a time.
            index = T.alloc_local([4 + 4 * items], "int32")  # entries of this block, and of the next ones
            item = T.alloc_local([items], "int32")
            row = T.alloc_local([items], "int32")
            at = T.alloc_local([items], "int32")
            end = T.alloc_local([items], "int32")
            length = T.alloc_local([items], "int32")
            ends = T.alloc_local([items], "int32")  # 1 behind an item's last block, so before one's first
            loaded = T.alloc_local([items], "int32")
            number = T.alloc_local([2], "int32")
            place = T.alloc_var("int32")
            q_full = T.alloc_barrier([128] * items)
            q_free = T.alloc_barrier([8 // items] * items)
            full = T.alloc_barrier([128] * slots)
            free = T.alloc_barrier([4] * slots)
            noted = T.alloc_barrier([128] * (2 * NOTES))

            if split:
                T.pdl_trigger()
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(216, 1)
                consume(
                    0, thread, cta, out_rows, grid, heads, has_sink, Sink, scale, Out, Lse, q_sh, kv, turn, p_sh,
                    factor_sh, highest_sh, total_sh, flag_sh, note_sh, valid, holes, q_full, q_free, full, free,
                    noted, score0, p0, sums0, outs0,
                )  # fmt: skip
            elif thread < 256:
                T.set_max_nreg(216, 1)
                consume(
                    1, thread - 128, cta + (items - 1) * grid, out_rows, grid, heads, has_sink, Sink, scale, Out,
                    Lse, q_sh, kv, turn, p_sh, factor_sh, highest_sh, total_sh, flag_sh, note_sh, valid, holes,
                    q_full, q_free, full, free, noted, score1, p1, sums1, outs1,
                )  # fmt: skip
            else:
                T.set_max_nreg(72, 0)
                producer = thread - 256
                place = 0
                number[0] = 0
                number[1] = 0
                for s in list(range(items)):
                    item[s] = cta + s * grid
                    ends[s] = 1
                    loaded[s] = 0
                    length[s] = 0 if split else Lengths[T.min(item[s], out_rows - 1) // parts]
                    enter(s, Indices, Lengths, tokens, item, row, at, end, length, parts, grid, out_rows)
                    ask(s, Indices, index, item, row, at, end, out_rows, producer)
                while (item[0] < out_rows) | (item[items - 1] < out_rows):
                    for g in [0, 1]:
                        s = g % items
                        if item[s] < out_rows:
                            T.barrier_wait(free[place % slots], (place // slots & 1) ^ 1)
                            for r in T.unroll(4):
                                index[r] = index[4 + s * 4 + r]
                            begins = ends[s]
                            query = row[s]
                            at[s] = at[s] + BLOCK
                            # With one item at a time, consumers get the same number of blocks.
                            ends[s] = T.if_then_else(at[s] + (2 - items) * (1 - g) * BLOCK >= end[s], 1, 0)
                            describe(
                                g * NOTES + number[g] % NOTES, number[g], place, ends[s], index, tokens, producer,
                                note_sh, valid, holes, noted,
                            )  # fmt: skip
                            if ends[s] != 0 and (items == 2 or g == 1):
                                item[s] = item[s] + items * grid
                                enter(
                                    s, Indices, Lengths, tokens, item, row, at, end, length, parts, grid, out_rows
                                )  # fmt: skip
                            ask(s, Indices, index, item, row, at, end, out_rows, producer)
                            fill(KV, kv, place, index, tokens, producer, full, free)
                            if begins != 0 and g == s:
                                T.barrier_wait(q_free[s], (loaded[s] & 1) ^ 1)
                                load_queries(s, Q, q_sh, query, heads, producer, q_full)
                                loaded[s] = loaded[s] + 1
                            place = place + pieces
                            number[g] = number[g] + 1

    return sparse_mla_few_heads
