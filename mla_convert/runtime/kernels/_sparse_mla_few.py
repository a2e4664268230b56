"""The program of ``sparse_mla`` for up to 32 heads; ``_sparse_mla`` describes it beside the other one."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels import _list_walk_cuda as list_walk
from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK, LOWEST, SLACK, is_token
from mla_convert.runtime.kernels._sparse_mla_few_cuda import SOURCE

SHARED_BYTES = 232448 - 8192  # what a thread block may have, less the small arrays and barriers
PANEL = 64  # dims of a row that lie together in shared memory: the 128 bytes of a swizzle
NOTES = 4  # blocks of a consumer that the producer may have described ahead of it


def few_heads(columns: int, rank: int, rope: int, dtype: str) -> Any:
    """Keys on the M side, ``columns`` (8, 16 or 32) heads on the N side.

    An item is one of the first ``whole`` queries or, of those behind them, one of ``parts`` parts of a list, whose
    float32 result goes to ``Part``, the log-sum-exp behind the values.

    With 8 columns, each consumer walks items of its own, and nothing passes between the two: while one is at a
    softmax or stores a result, the other uses the tensor cores. The queries of two items with more columns would
    leave the keys too little room, so there both work on one item, on alternate blocks, and at its end each gives
    the other half of its sum, through shared memory, and stores the other half.

    A consumer computes S^T = K q^T, takes the exponentials where the product left them, against the maximum it
    has, and adds V^T P^T to its own [rank, columns] sum. It looks for a new maximum in an item's first block, and
    where a score exceeds the one it has by ``SLACK``.

    Rows of keys pass through a ring of pieces, each up to three panels of a block, that the producer fills for one
    consumer and the other in turn. Pieces of one panel keep more copies in flight, but 128 threads arrive for each
    of them, which cost more (1.46 instead of 1.24 ms for 16 heads). With 16 columns, a ring of eight pieces takes
    1.21 ms where seven take 1.23.
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
    buffers = 2 if columns == 8 else 1  # of probabilities, each consumer's
    by_key = columns == 16  # probabilities lie key by key; at 32 columns, head by head is 2 % faster
    fixed = items * columns * panels * PANEL * 2 + 2 * columns * buffers * BLOCK * 2
    # No more than three blocks' worth, so that NOTES are enough.
    slots = min((SHARED_BYTES - -(-fixed // 1024) * 1024) // (group * PANEL * BLOCK * 2), 3 * pieces)
    queries, tokens, heads, entries = T.dynamic("queries, tokens, heads, entries")
    limits, part_rows = T.dynamic("limits, part_rows")
    each = list(range(pieces))  # a list: TileLang unrolls a loop over it while it traces

    # An item's dims are stored half by one consumer and half by the other: chunks of 64, [own, given] for each. What
    # it gives passes through the last pieces of its last block (the first would stop the producer longer), which
    # the other then frees.
    split = (chunks + 1) // 2
    own = [list(range(split)), list(range(split, chunks))] if items == 1 else [list(range(chunks))] * 2
    given = own[::-1] if items == 1 else [[], []]
    chunk_bytes = BLOCK * columns * 4
    in_piece = group * PANEL * BLOCK * 2 // chunk_bytes
    lent = [-(-len(given[g]) // in_piece) for g in (0, 1)]

    def chunk_of(outs: Any, c: int) -> tuple[Any, int]:
        """The accumulator that holds 64 dims: plain pointers and offsets, or TileLang lays out and fences anew."""
        return outs[c // group].data, c % group * (columns // 2)

    def place_of(first: Any, k: int) -> Any:
        """Byte of the keys' ring where a consumer gives its k-th chunk, in the last block that begins at ``first``."""
        return (first + pieces - 1 - k // in_piece) % slots * (
            group * PANEL * BLOCK * 2
        ) + k % in_piece * chunk_bytes

    def call(function: str, *arguments: Any) -> None:
        T.evaluate(T.call_extern("handle", function, *arguments))

    def query_of(item: Any, whole: Any, parts: Any) -> Any:
        return T.if_then_else(item < whole, item, whole + (item - whole) // parts)

    @T.macro
    def raise_highest(g, t, scale, reduced_sh, factor_sh, highest_sh, score):
        """Let ``highest_sh`` be at least each head's largest score; ``factor_sh`` is what that makes of older sums."""
        top = T.alloc_var("float32")
        call(f"mla_reduce<{columns}, false>", reduced_sh.data, g * 4 * columns, score.data, scale)
        T.sync_threads(8 + g, 128)
        if t < columns:
            top = highest_sh[g, t]
            for w in T.unroll(4):
                top = T.max(top, reduced_sh[g, w, t])
            factor_sh[g, 0, t] = T.exp2(highest_sh[g, t] - top)
            highest_sh[g, t] = top
        T.sync_threads(8 + g, 128)

    @T.macro
    def store_probabilities(g, number, p_sh, p):
        for j, n in T.Parallel(BLOCK, columns):
            if by_key:
                p_sh[g * buffers + number % buffers, j, n] = p[j, n]
            else:
                p_sh[g * buffers + number % buffers, n, j] = p[j, n]

    @T.macro
    def softmax(
        g, t, number, fresh, scale, p_sh, reduced_sh, factor_sh, highest_sh, flag_sh, score, p, sums, outs
    ):
        """Probabilities of a consumer's block into ``p`` and ``p_sh``; ``number`` counts its blocks."""
        flag = T.alloc_var("int32")
        if fresh != 0:
            raise_highest(g, t, scale, reduced_sh, factor_sh, highest_sh, score)
        for j, n in T.Parallel(BLOCK, columns):
            p[j, n] = score[j, n] * scale - highest_sh[g, n]
        for j, n in T.Parallel(BLOCK, columns):
            if p[j, n] > SLACK:
                flag_sh[g, number % 2] = number + 1
        for j, n in T.Parallel(BLOCK, columns):
            p[j, n] = T.exp2(p[j, n])
        if buffers == 1:
            T.sync_threads(8 + g, 128)  # until every warp's last product has read it
        store_probabilities(g, number, p_sh, p)
        T.fence_proxy_async()
        T.sync_threads(8 + g, 128)  # every thread's fence comes before any thread's matrix product
        flag = flag_sh[g, number % 2]  # read once: TileLang makes a dozen branches of the one below
        if flag == number + 1:
            raise_highest(g, t, scale, reduced_sh, factor_sh, highest_sh, score)
            for j, n in T.Parallel(BLOCK, columns):
                p[j, n] = T.exp2(score[j, n] * scale - highest_sh[g, n])
            store_probabilities(g, number, p_sh, p)
            for j, n in T.Parallel(BLOCK, columns):
                sums[j, n] = sums[j, n] * factor_sh[g, 0, n]
            for u in summed:
                for d, n in T.Parallel(values[u], columns):
                    outs[u][d, n] = outs[u][d, n] * factor_sh[g, 0, n]
            T.fence_proxy_async()
            T.sync_threads(8 + g, 128)

    @T.macro
    def finish(
        g, t, w, first, heads, item, whole, has_sink, Sink, Out, Lse, Part, kv, factor_sh, highest_sh,
        last_sh, free, sums, outs,
    ):  # fmt: skip
        """Store an item's result, or a consumer's half of it; ``first`` is the place of its last block."""
        top = T.alloc_var("float32")
        total = T.alloc_var("float32")
        lse = T.alloc_var("float32")
        # Two of each, so that the consumer which is ahead does not disturb the other.
        call(
            f"mla_reduce<{columns}, true>", last_sh.data, (w % 2 * 2 + g) * 5 * columns, sums.data, 1.0
        )  # fmt: skip
        if t < columns:
            last_sh[w % 2, g, 4, t] = highest_sh[g, t]
        T.sync_threads(8 + g, 128)  # until every warp's last product has read its keys
        for k in list(range(len(given[g]))):
            call(f"mla_give<{columns}>", kv.data, place_of(first, k), *chunk_of(outs, given[g][k]))
        if items == 1:
            T.sync_threads(10, 256)
        if t < columns:
            top = last_sh[w % 2, g, 4, t]
            if items == 1:
                top = T.max(top, last_sh[w % 2, 1 - g, 4, t])
            total = 0.0
            for i in T.unroll(4):
                total = total + last_sh[w % 2, g, i, t]
            factor_sh[g, 0, t] = T.exp2(last_sh[w % 2, g, 4, t] - top)
            total = total * factor_sh[g, 0, t]
            if items == 1:
                factor_sh[g, 1, t] = T.exp2(last_sh[w % 2, 1 - g, 4, t] - top)
                lse = 0.0
                for i in T.unroll(4):
                    lse = lse + last_sh[w % 2, 1 - g, i, t]
                # The same order in both consumers, so that they agree.
                total = total + lse * factor_sh[g, 1, t]
            lse = T.if_then_else(total == 0.0, -T.infinity("float32"), (T.log2(total) + top) * LN2)
            if (t < heads) & (items == 2 or g == 0):
                if item < whole:
                    Lse[item, t] = lse
                else:
                    Part[item - whole, t, rank] = lse
            if (has_sink != 0) & (item < whole) & (t < heads):
                total = T.if_then_else(total == 0.0, 0.0, total + T.exp2(Sink[t] * LOG2E - top))
            total = T.if_then_else(total == 0.0, 0.0, 1.0 / total)
            factor_sh[g, 0, t] = factor_sh[g, 0, t] * total
            if items == 1:
                factor_sh[g, 1, t] = factor_sh[g, 1, t] * total
        T.sync_threads(8 + g, 128)
        for k in list(range(len(own[g]))):
            if items == 1:
                call(
                    f"mla_take<{columns}>", *chunk_of(outs, own[g][k]), kv.data,
                    place_of(first + (1 - 2 * g) * pieces, k), factor_sh.data, g * 2 * columns,
                )  # fmt: skip
            else:
                call(f"mla_scale<{columns}>", *chunk_of(outs, own[g][k]), factor_sh.data, g * 2 * columns)
        for u in list(range(lent[1 - g])):
            T.sync_warp()
            if t % 32 == 0:
                T.barrier_arrive(free[(first + (1 - 2 * g) * pieces + pieces - 1 - u) % slots])
        for k in list(range(len(own[g]))):
            if item < whole:
                call(
                    f"mla_store<{columns}>", T.access_ptr(Out[0, 0, 0], "w", 1), item, heads, rank,
                    own[g][k] * PANEL, *chunk_of(outs, own[g][k]),
                )  # fmt: skip
            else:
                call(
                    f"mla_store<{columns}>", T.access_ptr(Part[0, 0, 0], "w", 1), item - whole, heads, rank + 4,
                    own[g][k] * PANEL, *chunk_of(outs, own[g][k]),
                )  # fmt: skip

    @T.macro
    def consume(
        g, t, start, count, whole, grid, heads, has_sink, Sink, scale, Out, Lse, Part, q_sh, kv, p_sh,
        reduced_sh, factor_sh, highest_sh, last_sh, flag_sh, note_sh, valid, holes, q_full, q_free, full, free, noted,
        score, p, sums, outs,
    ):  # fmt: skip
        """A consumer's items, one after another; ``number`` counts its blocks."""
        number = T.alloc_var("int32")
        first = T.alloc_var("int32")
        last = T.alloc_var("int32")
        fresh = T.alloc_var("int32")
        number = 0
        flag_sh[g, t % 2] = 0  # what an earlier thread block left there could look raised
        for w in T.serial(T.ceildiv(count - start, items * grid)):
            for out in outs:
                T.fill(out, 0)
            T.fill(sums, 0)
            highest_sh[g, t % columns] = LOWEST
            T.sync_threads(8 + g, 128)
            T.barrier_wait(q_full[g % items], w & 1)
            last = 0
            fresh = 1
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
                softmax(
                    g, t, number, fresh, scale, p_sh, reduced_sh, factor_sh, highest_sh, flag_sh, score, p, sums, outs
                )  # fmt: skip
                fresh = 0
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
                    if t % 32 == 0 and (u < pieces - lent[g] or last == 0):
                        T.barrier_arrive(free[(first + u) % slots])
                number = number + 1
            item = start + w * items * grid
            finish(
                g, t, w, first, heads, item, whole, has_sink, Sink, Out, Lse, Part, kv, factor_sh, highest_sh,
                last_sh, free, sums, outs,
            )  # fmt: skip

    @T.macro
    def enter(s, Q, Indices, Limits, tokens, item, row, walk, found, count, whole, parts, grid):
        """Producer: an item's first block; and a look ahead at what the next item needs."""
        row[s] = query_of(item[s], whole, parts)
        call(
            "walk_enter", walk.data, s, T.access_ptr(Indices[0, 0], "r", Indices.shape[1]),
            T.access_ptr(Limits[0], "r", 1), Limits.shape[0], row[s], Indices.shape[0], Indices.shape[1], tokens,
            T.if_then_else(item[s] < whole, 0, (item[s] - whole) % parts), T.if_then_else(item[s] < whole, 1, parts),
            found.data,
        )  # fmt: skip
        after = query_of(T.min(item[s] + items * grid, count - 1), whole, parts)
        call("prefetch<128>", T.access_ptr(Indices[after, 0], "r", BLOCK), Indices.shape[1] * 4)
        call("prefetch<128>", T.access_ptr(Q[after, 0, 0], "r", BLOCK), Q.shape[1] * ((rank + rope) * 2))

    @T.macro
    def ask(s, Indices, index, item, row, walk, count, thread):
        """Producer: the entries of the next block, which the copies of this one give time to arrive."""
        for r in T.unroll(4):
            index[4 + s * 4 + r] = -1
            if (item[s] < count) & (walk[s * 4] + r * 16 + thread // 8 < walk[s * 4 + 1]):
                index[4 + s * 4 + r] = Indices[row[s], walk[s * 4] + r * 16 + thread // 8]

    @T.macro
    def walk_on(s, Indices, row, walk, tokens, found):
        """Producer: where the block behind that one is, as the copies leave time for it."""
        call(
            "walk_on", walk.data, s, T.access_ptr(Indices[0, 0], "r", Indices.shape[1]), row[s], Indices.shape[1],
            tokens, found.data,
        )  # fmt: skip

    @T.macro
    def describe(note, number, place, last, index, tokens, thread, note_sh, valid, holes, noted):
        """Producer: what a consumer is told of its block: where in the ring it starts, which rows are valid."""
        if thread == 0:
            note_sh[note] = place * 2 + last
        for r in T.unroll(4):
            if thread % 8 == 0:
                ok = is_token(index[r], tokens)
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
                ok = is_token(index[r], tokens)
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
        Limits: T.Tensor([limits], "int32"),
        grid: T.int32,
        whole: T.int32,
        parts: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([queries, heads, rank], dtype),
        Lse: T.Tensor([queries, heads], "float32"),
        Part: T.Tensor([part_rows, heads, rank + 4], "float32"),
    ):
        with T.Kernel(grid, threads=384) as cta:
            T.import_source(list_walk.SOURCE + SOURCE)
            T.pdl_trigger()
            q_sh = T.alloc_shared([items, columns, panels * PANEL], dtype)
            kv = T.alloc_shared([slots, BLOCK, group * PANEL], dtype)
            p_sh = T.alloc_shared([2 * buffers, *((BLOCK, columns) if by_key else (columns, BLOCK))], dtype)
            note_sh = T.alloc_shared([2 * NOTES], "int32", scope="shared")
            valid = T.alloc_shared([2 * NOTES, BLOCK], "int32", scope="shared")
            holes = T.alloc_shared([2 * NOTES], "int32", scope="shared")
            flag_sh = T.alloc_shared([2, 2], "int32", scope="shared")
            highest_sh = T.alloc_shared([2, columns], "float32", scope="shared")
            factor_sh = T.alloc_shared([2, 2, columns], "float32", scope="shared")
            reduced_sh = T.alloc_shared([2, 4, columns], "float32", scope="shared")
            last_sh = T.alloc_shared(
                [2, 2, 5, columns], "float32", scope="shared"
            )  # an item's sums and maxima
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
            found = T.alloc_shared([1], "uint32", scope="shared")  # of the walk through a list
            # Through an item's list: the block behind the one that was asked for, the end, and more.
            walk = T.alloc_local([4 * items], "int32")
            ends = T.alloc_local([items], "int32")  # 1 behind an item's last block, so before one's first
            loaded = T.alloc_local([items], "int32")
            number = T.alloc_local([2], "int32")
            place = T.alloc_var("int32")
            q_full = T.alloc_barrier([128] * items)
            q_free = T.alloc_barrier([8 // items] * items)
            full = T.alloc_barrier([128] * slots)
            free = T.alloc_barrier([4] * slots)
            noted = T.alloc_barrier([128] * (2 * NOTES))

            thread = T.get_thread_binding()
            count = whole + (queries - whole) * parts
            if thread < 128:
                T.set_max_nreg(216, 1)
                consume(
                    0, thread, cta, count, whole, grid, heads, has_sink, Sink, scale, Out, Lse, Part, q_sh,
                    kv, p_sh, reduced_sh, factor_sh, highest_sh, last_sh, flag_sh, note_sh, valid, holes, q_full,
                    q_free, full, free, noted, score0, p0, sums0, outs0,
                )  # fmt: skip
            elif thread < 256:
                T.set_max_nreg(216, 1)
                consume(
                    1, thread - 128, cta + (items - 1) * grid, count, whole, grid, heads, has_sink, Sink, scale, Out,
                    Lse, Part, q_sh, kv, p_sh, reduced_sh, factor_sh, highest_sh, last_sh, flag_sh, note_sh,
                    valid, holes, q_full, q_free, full, free, noted, score1, p1, sums1, outs1,
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
                    enter(s, Q, Indices, Limits, tokens, item, row, walk, found, count, whole, parts, grid)
                    ask(s, Indices, index, item, row, walk, count, producer)
                    walk_on(s, Indices, row, walk, tokens, found)
                while (item[0] < count) | (item[items - 1] < count):
                    for g in [0, 1]:
                        s = g % items
                        if item[s] < count:
                            T.barrier_wait(free[place % slots], (place // slots & 1) ^ 1)
                            for r in T.unroll(4):
                                index[r] = index[4 + s * 4 + r]
                            begins = ends[s]
                            query = row[s]
                            if items == 1 and g == 0:  # consumers get the same number of blocks
                                ends[s] = 1 - T.call_extern("int32", "walk_follows", walk.data, s)
                            else:
                                ends[s] = T.if_then_else(walk[s * 4] >= walk[s * 4 + 1], 1, 0)
                            describe(
                                g * NOTES + number[g] % NOTES, number[g], place, ends[s], index, tokens, producer,
                                note_sh, valid, holes, noted,
                            )  # fmt: skip
                            done = ends[s] != 0 and (items == 2 or g == 1)
                            if not done:
                                ask(s, Indices, index, item, row, walk, count, producer)
                            fill(KV, kv, place, index, tokens, producer, full, free)
                            if begins != 0 and g == s:
                                T.barrier_wait(q_free[s], (loaded[s] & 1) ^ 1)
                                load_queries(s, Q, q_sh, query, heads, producer, q_full)
                                loaded[s] = loaded[s] + 1
                            place = place + pieces
                            number[g] = number[g] + 1
                            if done:
                                item[s] = item[s] + items * grid
                                enter(
                                    s,
                                    Q,
                                    Indices,
                                    Limits,
                                    tokens,
                                    item,
                                    row,
                                    walk,
                                    found,
                                    count,
                                    whole,
                                    parts,
                                    grid,
                                )
                                ask(s, Indices, index, item, row, walk, count, producer)
                            walk_on(s, Indices, row, walk, tokens, found)

    return sparse_mla_few_heads
