"""What the two attention programs of dense and decode attention share; ``_dense_plan`` has the ones around them.

Rows of the product are (query, head) pairs of one request, packed: a tile takes 64 of them (``_dense_many``), or up
to 32 where a request has no more (``_dense_few``). An item is a few neighbouring tiles, ``lanes``, and the cached
tokens that their rows see. Its cost is one unit a block of 64 tokens and ``OVERHEAD`` for what it takes beside them.

``plan`` puts the items end to end and cuts the whole into equal shares. A share is the work of ``lanes`` thread
blocks, one a tile, which so walk the same tokens at the same time: memory is read once for all of them. There are
as many thread blocks as multiprocessors, lengths may differ as they like, one request may take the whole GPU, and
nobody has to know the lengths on the host. An item that no cut goes through is written to the output directly; the
parts of the others are written in float32, two slots a thread block (the part at the start of its share and the
one at the end), and ``combine`` merges them: at most one item for each cut.

The cache is rows in pages: token p of a request is row ``table[request, p // page] * page + p % page``. A
contiguous cache is one page a request, and the list of a query that sees chosen tokens only is a table of pages of
one token. Tiles of 64 rows fetch whole blocks by TMA where none crosses a page; otherwise, and at the end of a span,
rows are fetched one by one. Three warpgroups as in ``_sparse_mla``: one fetches blocks into two buffers, two compute.

Shapes: B requests, S queries of a request, H heads, E = rank + rope, N = B·S·H rows.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

import tilelang.language as T  # noqa: N812

BLOCK = 64  # tokens a step
LOWEST = -1.0e30  # where the running maximum starts: finite, so that an empty row never computes inf - inf
SLACK = 8.0  # how far, in powers of two, a probability may exceed 1 before everything is rescaled
EVERYTHING = 2**31 - 1  # where the span ends of a row that sees all tokens
OVERHEAD = 3  # what an item costs beside its blocks, in blocks
AHEAD = 3  # blocks whose table entries are held before they are needed
PLAN_COLUMNS = 6
"""A plan has a line for each item (first unit, end unit, first token, end token, and the span that all of its rows
see), for each share (first item, last item), one with the units of a share, and one for each query (its span)."""

FETCHING = """
// One thread arrives for many: as many arrivals one by one would keep shared memory busy.
__device__ __forceinline__ void mla_arrive(void* barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(barrier)),
               "r"(count)
               : "memory");
}

__device__ __forceinline__ void mla_prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
"""

FP8_ROW = 656  # bytes of a cached token in FlashMLA's FP8 layout: 512 e4m3, 4 float32 scales, 64 bfloat16
FP8_GROUP = 128  # values that share a scale
FP8_SCALES = 512 // 4  # where the scales begin, in float32
FP8_ROPE = 528 // 2  # where the rotary dims begin, in bfloat16


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
    turn[BEGIN] = T.max(T.max(place * share, unit) - unit - OVERHEAD, 0)
    turn[COUNT] = T.max(T.min((place + 1) * share, stop) - unit - OVERHEAD, 0) - turn[BEGIN]
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
    (``holes`` of an earlier item), and a row that it hid would move the others' reference of the exponentials later.
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
    """Producer: fetch the table entries of the block at token ``begin``, four rows a thread, to be used later."""
    for r in T.unroll(4):
        entry[r] = -1
        if begin + r * 16 + thread // 8 < end:
            entry[r] = request
            if paged != 0:
                entry[r] = Table[request, T.truncdiv(begin + r * 16 + thread // 8, page)]


@T.macro
def locate(entry, source, page, pages, begin, thread):
    """Producer: rows of the cache from table entries, -1 where there is none."""
    for r in T.unroll(4):
        source[r] = -1
        if (entry[r] >= 0) & (entry[r] < pages):
            source[r] = entry[r] * page + T.truncmod(begin + r * 16 + thread // 8, page)


@T.macro
def flag(source, valid, holes, s, number, thread):
    """Producer: say which rows of a block are there."""
    if thread % 8 == 0:
        for r in T.unroll(4):
            valid[s, r * 16 + thread // 8] = T.if_then_else(source[r] >= 0, 1, 0)
            if source[r] < 0:
                holes[s] = number


@T.macro
def copy_left(KV, source, rank_sh, s, thread, full, left):
    """Producer: fetch the first ``left`` values of a block's rows, eight threads a row."""
    column = thread % 8 * 8
    for r in T.unroll(4):
        for u in T.unroll(left // 64):
            T.ptx_cp_async(
                T.access_ptr(rank_sh[s, r * 16 + thread // 8, u * 64 + column], "w", 8),
                T.access_ptr(KV[T.max(source[r], 0), u * 64 + column], "r", 8),
                8,
                source[r] >= 0,
            )
    T.cp_async_barrier_noinc(full[s * 2])


@T.macro
def copy_rest(KV, source, rank_sh, rope_sh, s, thread, full, left, rank, rope):
    """Producer: fetch the other values and the rotary dims of a block's rows."""
    column = thread % 8 * 8
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
    T.barrier_arrive(full[s * 2 + 1])


@T.macro
def fetch(
    KV, Table, paged, entry, source, rank_sh, rope_sh, valid, holes, request, page, pages, begin, end, thread, full,
    free, used0, used1, left, rank, rope,
):  # fmt: skip
    """Producer: fetch tokens [begin, end) of a request, 64 at a time, row by row.

    A row that is not there is zero-filled without a read, so nothing stale or NaN can reach a product. ``valid``
    says which rows are there, ``holes`` whether a block has others: it then holds the block's number, counted from 1
    in this item. ``used0`` and ``used1`` count the earlier uses of each buffer. Each thread arrives on a piece's
    "full" when its copies have landed, and on the second piece's once more, with release order, for its flags.
    """
    for i in T.serial(T.ceildiv(end - begin, BLOCK)):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        T.barrier_wait(free[s * 2], phase ^ 1)
        locate(entry, source, page, pages, begin + i * BLOCK, thread)
        ask(Table, paged, entry, request, page, begin + (i + 1) * BLOCK, end, thread)
        flag(source, valid, holes, s, i + 1, thread)
        copy_left(KV, source, rank_sh, s, thread, full, left)
        T.barrier_wait(free[s * 2 + 1], phase ^ 1)
        copy_rest(KV, source, rank_sh, rope_sh, s, thread, full, left, rank, rope)


@T.macro
def ask_pages(Table, paged, ahead, request, page, begin, end):
    """Producer: fetch the table entries of the first blocks of [begin, end)."""
    for k in T.unroll(AHEAD):
        ahead[k] = -1
        if begin + k * BLOCK < end:
            ahead[k] = request
            if paged != 0:
                ahead[k] = Table[request, T.truncdiv(begin + k * BLOCK, page)]


@T.macro
def fetch_blocks(
    KV, Table, paged, ahead, source, rank_sh, rope_sh, valid, holes, request, page, pages, begin, end, thread, full,
    free, used0, used1, left, rank, rope, lane, lanes,
):  # fmt: skip
    """Producer: as ``fetch`` where no block crosses a page, whole blocks by TMA.

    ``ahead`` holds the table entries of this block and the next ones, so that none is waited for; the last of them is
    brought into the L2 cache, each of the ``lanes`` that walk these tokens asking for its rows. For a whole block
    ``holes`` is 0 and ``valid`` is left alone. All threads wait for buffers, whoever fills them: one that ran ahead
    would take the parity of a barrier for that of an earlier use.
    """
    for i in T.serial(T.ceildiv(end - begin, BLOCK)):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        first = begin + i * BLOCK
        row = ahead[0] * page + T.truncmod(first, page)
        there = (ahead[0] >= 0) & (ahead[0] < pages)
        T.barrier_wait(free[s * 2], phase ^ 1)
        if there & (first + BLOCK <= end):
            if thread < 32:
                if thread == 0:
                    holes[s] = 0
                for u in list(range(left // 64)):  # a list: each box has a place of its own
                    T.tma_copy(
                        KV[row : row + BLOCK, u * 64 : u * 64 + 64],
                        rank_sh[s, :, u * 64 : u * 64 + 64],
                        barrier=full[s * 2],
                        leader_scope_threads=32,
                    )
                if thread == 0:
                    T.call_extern("void", "mla_arrive", T.address_of(full[s * 2]), 128)
            T.barrier_wait(free[s * 2 + 1], phase ^ 1)
            if thread < 32:
                for u in list(range(left // 64, rank // 64)):
                    T.tma_copy(
                        KV[row : row + BLOCK, u * 64 : u * 64 + 64],
                        rank_sh[s, :, u * 64 : u * 64 + 64],
                        barrier=full[s * 2 + 1],
                        leader_scope_threads=32,
                    )
                if rope > 0:
                    T.tma_copy(
                        KV[row : row + BLOCK, rank : rank + rope],
                        rope_sh[s, :, :rope],
                        barrier=full[s * 2 + 1],
                        leader_scope_threads=32,
                    )
                if thread == 0:
                    T.call_extern("void", "mla_arrive", T.address_of(full[s * 2 + 1]), 256)
        else:
            for r in T.unroll(4):
                source[r] = -1
                if there & (first + r * 16 + thread // 8 < end):
                    source[r] = row + r * 16 + thread // 8
            flag(source, valid, holes, s, i + 1, thread)
            copy_left(KV, source, rank_sh, s, thread, full, left)
            T.barrier_wait(free[s * 2 + 1], phase ^ 1)
            copy_rest(KV, source, rank_sh, rope_sh, s, thread, full, left, rank, rope)
        far = ahead[AHEAD - 1]
        ours = T.truncmod(thread, lanes) == lane
        if (thread >= 64) & ours & (far >= 0) & (far < pages) & (first + AHEAD * BLOCK <= end):
            line = far * page + T.truncmod(first + (AHEAD - 1) * BLOCK, page) + thread - 64
            for u in T.unroll(T.ceildiv(rank + rope, 64)):
                T.call_extern("void", "mla_prefetch", T.address_of(KV[line, u * 64]))
        for k in T.unroll(AHEAD - 1):
            ahead[k] = ahead[k + 1]
        ahead[AHEAD - 1] = -1
        if first + AHEAD * BLOCK < end:
            ahead[AHEAD - 1] = request
            if paged != 0:
                ahead[AHEAD - 1] = Table[request, T.truncdiv(first + AHEAD * BLOCK, page)]


@T.macro
def load_codes(KV, Scales, source, raw, factor, half, place, thread):
    """Producer: half of the values of four rows and their scales into registers; zeros for a row that is not there."""
    for r in T.unroll(4):
        for u in T.unroll(2):
            factor[place * 8 + r * 2 + u] = T.if_then_else(
                source[r] >= 0, Scales[T.max(source[r], 0), FP8_SCALES + half * 2 + u], 0.0
            )
            for k in T.vectorized(16):
                raw[place * 128 + (r * 2 + u) * 16 + k] = T.if_then_else(
                    source[r] >= 0,
                    KV[T.max(source[r], 0), (half * 2 + u) * FP8_GROUP + thread % 8 * 16 + k],
                    T.cast(0.0, "float8_e4m3fn"),
                )


@T.macro
def store_values(raw, factor, rank_sh, s, half, place, thread):
    """Producer: code times scale, rounded, to shared memory."""
    for r in T.unroll(4):
        for u in T.unroll(2):
            for v in T.unroll(2):
                for k in T.vectorized(8):
                    rank_sh[
                        s, r * 16 + thread // 8, (half * 2 + u) * FP8_GROUP + thread % 8 * 16 + v * 8 + k
                    ] = (
                        T.cast(raw[place * 128 + (r * 2 + u) * 16 + v * 8 + k], "float32")
                        * factor[place * 8 + r * 2 + u]
                    )


@T.macro
def fetch_fp8(
    KV, Scales, Rope, Table, paged, entry, source, here, raw, factor, rank_sh, rope_sh, valid, holes, request, page,
    pages, begin, end, thread, full, free, used0, used1, ahead,
):  # fmt: skip
    """Producer: as ``fetch``, from rows in FlashMLA's FP8 layout; values become 16-bit floats on their way.

    ``KV``, ``Scales`` and ``Rope`` are the same memory as e4m3, float32 and bfloat16. With ``ahead`` the codes of the
    next half are asked for before those of one are converted, which takes twice the registers.
    """
    if ahead:
        locate(entry, source, page, pages, begin, thread)
        ask(Table, paged, entry, request, page, begin + BLOCK, end, thread)
        load_codes(KV, Scales, source, raw, factor, 0, 0, thread)
    for i in T.serial(T.ceildiv(end - begin, BLOCK)):
        s = i % 2
        phase = (T.if_then_else(s == 0, used0, used1) + i // 2) & 1
        if ahead:
            load_codes(KV, Scales, source, raw, factor, 1, 1, thread)
        else:
            locate(entry, source, page, pages, begin + i * BLOCK, thread)
            ask(Table, paged, entry, request, page, begin + (i + 1) * BLOCK, end, thread)
            load_codes(KV, Scales, source, raw, factor, 0, 0, thread)
        for r in T.unroll(4):
            here[r] = source[r]
        T.barrier_wait(free[s * 2], phase ^ 1)
        flag(here, valid, holes, s, i + 1, thread)
        store_values(raw, factor, rank_sh, s, 0, 0, thread)
        T.fence_proxy_async()
        T.barrier_arrive(full[s * 2])
        if ahead:
            locate(entry, source, page, pages, begin + (i + 1) * BLOCK, thread)
            ask(Table, paged, entry, request, page, begin + (i + 2) * BLOCK, end, thread)
            load_codes(KV, Scales, source, raw, factor, 0, 0, thread)
        else:
            load_codes(KV, Scales, source, raw, factor, 1, 0, thread)
        T.barrier_wait(free[s * 2 + 1], phase ^ 1)
        for r in T.unroll(4):
            T.ptx_cp_async(
                T.access_ptr(rope_sh[s, r * 16 + thread // 8, thread % 8 * 8], "w", 8),
                T.access_ptr(Rope[T.max(here[r], 0), FP8_ROPE + thread % 8 * 8], "r", 8),
                8,
                here[r] >= 0,
            )
        T.cp_async_barrier_noinc(full[s * 2 + 1])
        store_values(raw, factor, rank_sh, s, 1, 1 if ahead else 0, thread)
        T.fence_proxy_async()
        T.barrier_arrive(full[s * 2 + 1])
