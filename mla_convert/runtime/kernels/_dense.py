"""What the two attention programs of dense and decode attention share; ``_dense_plan`` has the ones around them.

Rows of the product are (query, head) pairs of one request, packed: a tile takes 64 of them (``_dense_many_blocks``,
and ``_dense_many_gather`` for FP8 rows and pages that cut blocks), or up to 32 where a request has no more
(``_dense_few``; up to 16 with FP8 rows, ``_dense_few_fp8``). An item is a few neighbouring tiles, ``lanes``, and the
cached tokens that their rows see. Its cost is one unit a block of 64 tokens and ``OVERHEAD`` for what it takes beside
them.

``plan`` puts the items end to end and cuts the whole into equal shares; or, where no share gets longer by it, each
item into shares of its own, so that none has parts of two items. A share is the work of ``lanes`` thread blocks, one
a tile, which so walk the same tokens at the same time: memory is read once for all of them. There are as many thread
blocks as multiprocessors, lengths may differ as they like, one request may take the whole GPU, and nobody has to know
the lengths on the host. An item that no cut goes through is written to the output directly; the parts of the others
are written in float32, two slots a thread block (the part at the start of its share and the one at the end), and
``combine`` merges them: at most one item for each cut.

The cache is rows in pages: token p of a request is row ``table[request, p // page] * page + p % page``. A
contiguous cache is one page a request, and the list of a query that sees chosen tokens only is a table of pages of
one token. Three warpgroups as in ``_sparse_mla``: one fetches blocks into two buffers, two compute.

Shapes: B requests, S queries of a request, H heads, E = rank + rope, N = B·S·H rows.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

import tilelang.language as T  # noqa: N812

BLOCK = 64  # tokens a step
LOWEST = -1.0e30  # where the running maximum starts: finite, so that an empty row never computes inf - inf
SLACK = 8.0  # how far, in powers of two, a probability may exceed 1 before everything is rescaled
EVERYTHING = 2**30  # where the span ends of a row that sees all tokens: TileLang may add to it
OVERHEAD = 3  # what an item costs beside its blocks, in blocks
ALL, SOME, NONE = range(3)  # of a block's rows are there
PLAN_COLUMNS = 6
"""A plan has a line for each item (first unit, end unit, first token, end token, and the span that all of its rows
see), for each share (first item, last item), one with the units of a share, and one for each query (its span). An
item's blocks are the last of its units."""

FP8_ROW = 656  # bytes of a cached token in FlashMLA's FP8 layout: 512 e4m3, 4 float32 scales, 64 bfloat16

BEGIN, END, COUNT, ROW, ROWS_END, WHOLE, SLOT, REQUEST, SEEN_BEGIN, SEEN_END, TURN = range(11)
"""What ``turn_at`` finds: the tokens and blocks of a thread block's part of an item, the rows of its tile and where
those of the request end, 1 if the part is all of the item, the slot for it if not, the request, and the span that
all rows see."""


@T.macro
def turn_at(Plan, turn, item, block, lanes, share, items_each, rows_each, tile):
    """Work out a thread block's part of ``item``."""
    place = T.truncdiv(block, lanes)
    lane = T.truncmod(block, lanes)
    unit = Plan[item, 0]
    stop = Plan[item, 1]
    turn[WHOLE] = T.if_then_else((unit >= place * share) & (stop <= (place + 1) * share), 1, 0)
    turn[SLOT] = (2 * place + T.if_then_else(unit >= place * share, 1, 0)) * lanes + lane
    ahead = stop - T.ceildiv(Plan[item, 3] - Plan[item, 2], BLOCK)  # where the item's blocks begin
    turn[BEGIN] = T.max(T.max(place * share, unit) - ahead, 0)
    turn[COUNT] = T.max(T.min((place + 1) * share, stop) - ahead, 0) - turn[BEGIN]
    turn[BEGIN] = Plan[item, 2] + turn[BEGIN] * BLOCK
    turn[END] = T.min(turn[BEGIN] + turn[COUNT] * BLOCK, Plan[item, 3])
    turn[REQUEST] = T.truncdiv(item, items_each)
    turn[ROW] = turn[REQUEST] * rows_each + (T.truncmod(item, items_each) * lanes + lane) * tile
    turn[ROWS_END] = (turn[REQUEST] + 1) * rows_each
    turn[SEEN_BEGIN] = Plan[item, 4]
    turn[SEEN_END] = Plan[item, 5]


@T.macro
def load_queries(
    Q, Plan, spans_at, rank_sh, rope_sh, bounds_sh, row, rows_end, heads, thread, q_full, tile, rank, rope
):
    """Producer: copy a tile's rows and the spans they see. Rows that do not exist become zeros.

    Those see everything, so that a mask leaves them alone: it may also be applied to a block that needs none
    (of what another item left), and a row that it hid would move the others' reference of the exponentials later.
    """
    column = thread % 8 * 8
    for step in T.unroll(T.ceildiv(tile, 16)):
        h = step * 16 + thread // 8
        if h < tile:
            exists = row + h < rows_end
            source = T.min(row + h, rows_end - 1)
            for u in T.unroll(rank // 64):
                T.ptx_cp_async(
                    T.access_ptr(rank_sh[h, u * 64 + column], "w", 8),
                    T.access_ptr(Q[source, u * 64 + column], "r", 8),
                    8,
                    exists,
                )
            for u in T.unroll(T.ceildiv(rope, 64)):
                if u * 64 + column < rope:
                    T.ptx_cp_async(
                        T.access_ptr(rope_sh[h, u * 64 + column], "w", 8),
                        T.access_ptr(Q[source, rank + u * 64 + column], "r", 8),
                        8,
                        exists,
                    )
    T.cp_async_barrier_noinc(q_full[0])
    for side in T.unroll(2):
        if thread < tile:
            bounds_sh[side, thread] = T.if_then_else(
                row + thread < rows_end,
                Plan[spans_at + T.truncdiv(T.min(row + thread, rows_end - 1), heads), side],
                side * EVERYTHING,
            )
    T.barrier_arrive(q_full[0])


@T.macro
def ask(Table, paged, entry, request, page, begin, end, thread):
    """Producer: fetch the table entries of the block at token ``begin``, all of them in each warp, to be used later."""
    for r in T.unroll(2):
        entry[r] = -1
        if begin + r * 32 + thread % 32 < end:
            entry[r] = request
            if paged != 0:
                entry[r] = Table[request, T.truncdiv(begin + r * 32 + thread % 32, page)]


@T.macro
def leave_gaps(Plan, spans_at, turn, entry, heads, rows, begin, thread):
    """Producer: -1 for tokens that none of the tile's ``rows`` see: NaN there, times a probability of 0, would be NaN.

    Spans that have a token in common leave no gap, and in all but odd calls they do.
    """
    unseen = T.alloc_var("int32")
    if turn[SEEN_BEGIN] >= turn[SEEN_END]:
        first = T.truncdiv(turn[ROW], heads)
        last = T.truncdiv(T.min(turn[ROW] + rows, turn[ROWS_END]) - 1, heads)
        for r in T.unroll(2):
            token = begin + r * 32 + thread % 32
            unseen = 1
            for k in T.serial(last - first + 1):
                if (token >= Plan[spans_at + first + k, 0]) & (token < Plan[spans_at + first + k, 1]):
                    unseen = 0
            if unseen != 0:
                entry[r] = -1


@T.macro
def locate(entry, source, page, pages, begin, thread):
    """Producer: rows of the cache from table entries, -1 where there is none; gives ``ALL``, ``SOME`` or ``NONE``.

    ``entry`` becomes those of the lane, ``source`` the four that the thread copies.
    """
    some = T.alloc_var("int32")
    holes = T.alloc_var("int32")
    some = 0
    holes = 0
    for r in T.unroll(2):
        if (entry[r] >= 0) & (entry[r] < pages):
            entry[r] = entry[r] * page + T.truncmod(begin + r * 32 + thread % 32, page)
            some = 1
        else:
            entry[r] = -1
            holes = 1
    for r in T.unroll(4):
        source[r] = T.shfl_sync(entry[r // 2], r % 2 * 16 + thread // 8)
    some = T.any_sync(some)
    holes = T.any_sync(holes)
    return T.if_then_else(holes == 0, ALL, T.if_then_else(some == 0, NONE, SOME))


@T.macro
def fetch(
    KV, Table, Plan, spans_at, paged, entry, source, rank_sh, rope_sh, valid, there, turn, page, pages, heads, rows,
    thread, full, free, used0, used1, left, rank, rope,
):  # fmt: skip
    """Producer: fetch the tokens of a thread block's part of an item, 64 at a time, eight threads a row.

    A row that is not there is zero-filled without a read, so nothing stale or NaN can reach a product. ``valid``
    says which rows are there, ``there`` whether all, some or none: such a block is not copied. ``used0`` and ``used1``
    count the earlier uses of each buffer. Each thread arrives on a piece's "full" when its copies have landed, and the
    first warp, which sets the flags, on the first piece's once more, with release order.
    """
    state = T.alloc_var("int32")
    column = thread % 8 * 8
    for i in T.serial(T.ceildiv(turn[END] - turn[BEGIN], BLOCK)):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        begin = turn[BEGIN] + i * BLOCK
        leave_gaps(Plan, spans_at, turn, entry, heads, rows, begin, thread)
        state = locate(entry, source, page, pages, begin, thread)
        T.barrier_wait(free[s * 2], phase ^ 1)
        if thread < 32:
            for r in T.unroll(2):
                valid[s, r * 32 + thread] = T.if_then_else(entry[r] >= 0, 1, 0)
            if thread == 0:
                there[s] = state
            T.barrier_arrive(full[s * 2])
        ask(Table, paged, entry, turn[REQUEST], page, begin + BLOCK, turn[END], thread)
        if state != NONE:
            for r in T.unroll(4):
                for u in T.unroll(left // 64):
                    T.ptx_cp_async(
                        T.access_ptr(rank_sh[s, r * 16 + thread // 8, u * 64 + column], "w", 8),
                        T.access_ptr(KV[T.max(source[r], 0), u * 64 + column], "r", 8),
                        8,
                        source[r] >= 0,
                    )
        T.cp_async_barrier_noinc(full[s * 2])
        T.barrier_wait(free[s * 2 + 1], phase ^ 1)
        if state != NONE:
            for r in T.unroll(4):
                for u in T.unroll((rank - left) // 64):
                    T.ptx_cp_async(
                        T.access_ptr(rank_sh[s, r * 16 + thread // 8, left + u * 64 + column], "w", 8),
                        T.access_ptr(KV[T.max(source[r], 0), left + u * 64 + column], "r", 8),
                        8,
                        source[r] >= 0,
                    )
                for u in T.unroll(T.ceildiv(rope, 64)):
                    if u * 64 + column < rope:
                        T.ptx_cp_async(
                            T.access_ptr(rope_sh[s, r * 16 + thread // 8, u * 64 + column], "w", 8),
                            T.access_ptr(KV[T.max(source[r], 0), rank + u * 64 + column], "r", 8),
                            8,
                            source[r] >= 0,
                        )
        T.cp_async_barrier_noinc(full[s * 2 + 1])
