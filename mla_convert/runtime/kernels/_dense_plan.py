"""The small programs around dense and decode attention: ``plan`` shares the work out, ``combine`` merges what was cut.

``_dense`` describes items, shares and parts. The programs of a call follow each other closely: the next one starts
while the one before ends (programmatic dependent launch), and waits for it in ``pdl_sync`` before it reads.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._dense import BLOCK, LOWEST, OVERHEAD, PLAN_COLUMNS

PLAN_THREADS = 256
WARPS = PLAN_THREADS // 32


def plan() -> Any:
    """The programs' schedule. A query's span is from ``Starts`` and ``Ends``; or, with ``use_lengths``, from 0 to the
    length of its request, less the causal queries behind it; with 2, that is the capacity, and ``Lengths`` not read."""
    requests, ranges, lines = T.dynamic("requests, ranges, lines")

    @T.macro
    def add_up(mine, words, thread):
        """The sum of what the threads before this one have, and that of all."""
        before = T.alloc_var("int32")
        everything = T.alloc_var("int32")
        other = T.alloc_var("int32")
        before = mine
        for step in T.unroll(5):
            other = T.shfl_up(before, 1 << step)
            if thread % 32 >= 1 << step:
                before = before + other
        if thread % 32 == 31:
            words[thread // 32] = before
        T.sync_threads()
        before = before - mine
        everything = 0
        for w in T.unroll(WARPS):
            if w < thread // 32:
                before = before + words[w]
            everything = everything + words[w]
        return before, everything

    @T.prim_func
    def dense_mla_plan(
        Lengths: T.Tensor([requests], "int32"),
        Starts: T.Tensor([ranges], "int32"),
        Ends: T.Tensor([ranges], "int32"),
        use_lengths: T.int32,
        causal: T.int32,
        heads: T.int32,
        queries_each: T.int32,
        rows_item: T.int32,
        items_each: T.int32,
        items: T.int32,
        shares: T.int32,
        capacity: T.int32,
        smallest: T.int32,
        allowance: T.int32,
        Plan: T.Tensor([lines, PLAN_COLUMNS], "int32"),
    ):
        with T.Kernel(1, threads=PLAN_THREADS) as _block:
            units_sh = T.alloc_shared([WARPS], "int32", scope="shared")
            shares_sh = T.alloc_shared([WARPS], "int32", scope="shared")
            blocks = T.alloc_shared([PLAN_THREADS], "int32", scope="shared")
            needed = T.alloc_shared([WARPS], "int32", scope="shared")
            ends = T.alloc_shared([PLAN_THREADS], "int32", scope="shared")
            following = T.alloc_shared([2, PLAN_THREADS + 1], "int32", scope="shared")
            firsts = T.alloc_shared([PLAN_THREADS], "int32", scope="shared")
            unit = T.alloc_var("int32")
            mine = T.alloc_var("int32")
            each = T.alloc_var("int32")
            share = T.alloc_var("int32")
            request = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            low = T.alloc_var("int32")
            high = T.alloc_var("int32")
            all_low = T.alloc_var("int32")
            all_high = T.alloc_var("int32")
            item = T.alloc_var("int32")
            total = T.alloc_var("int32")
            apart = T.alloc_var("int32")
            uncut = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            thread = T.get_thread_binding()
            T.pdl_trigger()
            each = T.ceildiv(items, PLAN_THREADS)
            mine = 0
            for k in T.serial(each):
                item = thread * each + k
                if item < items:
                    request = T.truncdiv(item, items_each)
                    first = T.truncdiv(T.truncmod(item, items_each) * rows_item, heads)
                    last = T.truncdiv((T.truncmod(item, items_each) + 1) * rows_item - 1, heads)
                    last = request * queries_each + T.min(last, queries_each - 1)
                    first = request * queries_each + first
                    low = capacity
                    high = 0
                    all_low = 0
                    all_high = capacity
                    for q in T.serial(last - first + 1):
                        start = 0
                        if use_lengths != 0:
                            end = capacity
                            if use_lengths == 1:
                                end = Lengths[request]
                            if causal != 0:
                                end = end - ((request + 1) * queries_each - 1 - first - q)
                        else:
                            start = T.max(Starts[first + q], 0)
                            end = Ends[first + q]
                        end = T.max(T.min(end, capacity), 0)
                        if start < end:
                            low = T.min(low, start)
                            high = T.max(high, end)
                        all_low = T.max(all_low, start)
                        all_high = T.min(all_high, end)
                        Plan[items + shares + 1 + first + q, 0] = start
                        Plan[items + shares + 1 + first + q, 1] = end
                    low = T.min(low, high)
                    Plan[item, 1] = OVERHEAD + T.ceildiv(high - low, BLOCK)
                    Plan[item, 2] = low
                    Plan[item, 3] = high
                    Plan[item, 4] = all_low
                    Plan[item, 5] = all_high
                    mine = mine + OVERHEAD + T.ceildiv(high - low, BLOCK)
                    if item < PLAN_THREADS:
                        blocks[item] = T.max(T.ceildiv(high - low, BLOCK), 1)
            for c in T.serial(T.ceildiv(shares, PLAN_THREADS)):
                if c * PLAN_THREADS + thread < shares:
                    Plan[items + c * PLAN_THREADS + thread, 0] = 0
                    Plan[items + c * PLAN_THREADS + thread, 1] = -1
            unit, total = add_up(mine, units_sh, thread)
            share = T.max(T.truncdiv(total + shares - 1, shares), smallest)
            ends[thread] = unit + mine
            apart = 0
            if items <= T.min(shares, PLAN_THREADS):
                # Each item may have shares of its own, if they need not be longer than shares that items share. Warp w
                # sees how many there are if each has the w-th next number of blocks.
                low = T.max(T.truncdiv(total - OVERHEAD * items + shares - 1, shares), smallest)
                high = low + thread // 32
                mine = 0
                for k in T.serial(T.ceildiv(items, 32)):
                    if k * 32 + thread % 32 < items:
                        mine = mine + T.truncdiv(blocks[k * 32 + thread % 32] + high - 1, high)
                for b in T.unroll(5):
                    mine = mine + T.shfl_xor(mine, 1 << b)
                needed[thread // 32] = mine
                T.sync_threads()
                for w in T.unroll(WARPS):
                    if (needed[WARPS - 1 - w] <= shares) & (low + WARPS - 1 - w <= share):
                        apart = low + WARPS - 1 - w
            if apart != 0:
                share = apart
                mine = 0
                if thread < items:
                    mine = T.truncdiv(blocks[thread] + share - 1, share)
                first, total = add_up(mine, shares_sh, thread)
                if thread < items:
                    Plan[thread, 0] = first * share
                    Plan[thread, 1] = first * share + blocks[thread]
                    for c in T.serial(mine):
                        Plan[items + first + c, 0] = thread
                        Plan[items + first + c, 1] = thread
                each = 0
            uncut = 0
            limit = share + T.min(allowance, share >> 4)
            if (apart == 0) & (allowance > 0) & (items <= PLAN_THREADS) & (shares < PLAN_THREADS):
                # Whole items, if that makes no share much longer. For each item that a share may begin with, following
                # has the one that the next share begins with, then the share 2, 4, 8 … further on; firsts what comes of
                # it. A share's units begin at a multiple of the most that a share may have.
                low = 0
                high = items
                T.sync_threads()
                for _step in T.unroll(PLAN_THREADS.bit_length()):
                    last = T.truncdiv(low + high, 2)
                    if low < high:
                        if ends[last] <= unit + limit:
                            low = last + 1
                        else:
                            high = last
                following[0, thread] = low
                if thread == 0:
                    following[0, PLAN_THREADS] = items
                    following[1, PLAN_THREADS] = items
                first = 0
                T.sync_threads()
                for b in T.unroll(PLAN_THREADS.bit_length() - 1):
                    if (thread >> b) & 1 != 0:
                        first = following[b % 2, first]
                    following[(b + 1) % 2, thread] = following[b % 2, following[b % 2, thread]]
                    T.sync_threads()
                firsts[thread] = first
                T.sync_threads()
                if firsts[shares] == items:
                    uncut = 1
            if uncut != 0:
                share = limit
                each = 0
                if (thread < shares) & (first < items):
                    last = firsts[thread + 1] - 1
                    Plan[items + thread, 0] = first
                    Plan[items + thread, 1] = last
                    start = 0
                    if first > 0:
                        start = ends[first - 1]
                    end = start
                    for k in T.serial(last - first + 1):
                        Plan[first + k, 0] = thread * share + end - start
                        end = ends[first + k]
                        Plan[first + k, 1] = thread * share + end - start
            for k in T.serial(each):
                item = thread * each + k
                if item < items:
                    end = unit + Plan[item, 1]
                    Plan[item, 0] = unit
                    Plan[item, 1] = end
                    first = T.truncdiv(unit, share)
                    last = T.truncdiv(end - 1, share)
                    for c in T.serial(last - first + 1):
                        if (first + c) * share >= unit:
                            Plan[items + first + c, 0] = item
                        if ((first + c + 1) * share <= end) | (item == items - 1):
                            Plan[items + first + c, 1] = item
                    unit = end
            if thread == 0:
                Plan[items + shares, 0] = share

    return dense_mla_plan


def combine(tile: int, rank: int, dtype: str, parts: str) -> Any:
    """Merge the parts of the items that were cut.

    Items of "few" ``parts`` have a warp a row, and a thread block is for a cut and 8 rows of its item: the first cut
    does the work, and the thread blocks of the item's other cuts have none. Otherwise a thread block is for an item,
    and a warp takes 128 dims of a row (64 where there is no more): of "some" parts of all of them, of "many" one of
    8 warps that share them.
    """
    lines, slots, rows, heads = T.dynamic("lines, slots, rows, heads")
    step = 4 if rank % 128 == 0 else 2
    by_item = parts != "few"
    warps = 8 if parts == "many" else 1  # of a row and split
    splits = rank // (32 * step) if by_item else 1
    pieces = rank // (32 * step) // splits
    units_block = 8 // warps
    batch = {"few": 4, "some": 8, "many": 9}[parts]  # parts whose loads are in flight together

    @T.macro
    def take(Part, k, cut, count, lanes, lane, h, split, place, group, taken, weights):
        """Ask for a batch of parts: a warp's share of the dims, and the log-sum-exp."""
        for u in T.unroll(batch):
            part = (k * batch + u) * warps + group
            slot = (2 * (cut + part) + T.if_then_else(part == 0, 1, 0)) * lanes + lane
            weights[u] = -T.infinity("float32")
            for d in T.unroll(pieces * step):
                taken[u, d] = 0.0
            if part < count:
                weights[u] = Part[slot, h, rank]
                for p in T.unroll(pieces):
                    for d in T.vectorized(step):
                        taken[u, p * step + d] = Part[slot, h, ((split * pieces + p) * 32 + place) * step + d]

    @T.macro
    def add(top, taken, weights, total):
        for u in T.unroll(batch):
            factor = T.exp2((weights[u] - top) * LOG2E)
            for d in T.unroll(pieces * step):
                total[d] = total[d] + factor * taken[u, d]

    @T.prim_func
    def dense_mla_combine(
        Plan: T.Tensor([lines, PLAN_COLUMNS], "int32"),
        Part: T.Tensor([slots, tile, rank + 4], "float32"),
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        items: T.int32,
        shares: T.int32,
        rows_each: T.int32,
        items_each: T.int32,
        lanes: T.int32,
        Out: T.Tensor([rows, rank], dtype),
        Lse: T.Tensor([rows], "float32"),
    ):
        with T.Kernel(
            items if by_item else shares - 1, tile * lanes * splits // units_block, threads=256
        ) as (index, block):
            shared = T.alloc_shared([warps, rank // splits], "float32", scope="shared")
            cut = T.alloc_var("int32")
            taken = T.alloc_local([batch, pieces * step], "float32")
            weights = T.alloc_local([batch], "float32")
            total = T.alloc_local([pieces * step], "float32")
            rounded = T.alloc_local([step], dtype)
            top = T.alloc_var("float32")
            denominator = T.alloc_var("float32")
            factor = T.alloc_var("float32")
            share = T.alloc_var("int32")
            item = T.alloc_var("int32")
            count = T.alloc_var("int32")
            row = T.alloc_var("int32")
            part = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            thread = T.get_thread_binding()
            place = thread % 32
            group = thread // 32 % warps
            unit = block * units_block + thread // 32 // warps
            item_row = unit // splits
            split = unit % splits
            h = item_row % tile
            lane = item_row // tile
            T.pdl_sync()
            share = Plan[items + shares, 0]
            if by_item:
                item = index
                cut = T.truncdiv(Plan[item, 0], share)
            else:
                cut = index
                item = Plan[items + cut, 1]
            if item >= 0:
                # A first part ends its thread block's share and is in the second slot, the others in the first.
                count = T.truncdiv(Plan[item, 1] - 1, share) - cut + 1
                row = T.truncmod(item, items_each) * (tile * lanes) + item_row
                if (count > 1) & (Plan[item, 0] >= cut * share) & (row < rows_each):
                    row = row + T.truncdiv(item, items_each) * rows_each
                    take(Part, 0, cut, count, lanes, lane, h, split, place, group, taken, weights)
                    top = LOWEST
                    for k in T.serial(T.ceildiv(count, 32)):
                        part = T.min(k * 32 + place, count - 1)
                        slot = (2 * (cut + part) + T.if_then_else(part == 0, 1, 0)) * lanes + lane
                        top = T.max(top, Part[slot, h, rank])
                    for b in T.unroll(5):
                        top = T.max(top, T.shfl_xor(top, 1 << b))
                    denominator = 0.0
                    for k in T.serial(T.ceildiv(count, 32)):
                        part = k * 32 + place
                        slot = (2 * (cut + part) + T.if_then_else(part == 0, 1, 0)) * lanes + lane
                        if part < count:
                            denominator = denominator + T.exp2((Part[slot, h, rank] - top) * LOG2E)
                    for b in T.unroll(5):
                        denominator = denominator + T.shfl_xor(denominator, 1 << b)
                    T.fill(total, 0.0)
                    add(top, taken, weights, total)
                    for k in T.serial(T.ceildiv(count, warps * batch) - 1):
                        take(Part, k + 1, cut, count, lanes, lane, h, split, place, group, taken, weights)
                        add(top, taken, weights, total)
                    if warps > 1:
                        for p in T.unroll(pieces):
                            for d in T.vectorized(step):
                                shared[group, (p * 32 + place) * step + d] = total[p * step + d]
                        T.sync_threads()
                    if group == 0:
                        for g in T.unroll(warps - 1):
                            for p in T.unroll(pieces):
                                for d in T.unroll(step):
                                    total[p * step + d] = (
                                        total[p * step + d] + shared[g + 1, (p * 32 + place) * step + d]
                                    )
                        if (place == 0) & (split == 0):
                            Lse[row] = T.if_then_else(
                                denominator == 0.0, -T.infinity("float32"), T.log2(denominator) * LN2 + top
                            )
                        factor = denominator
                        if has_sink != 0:
                            factor = denominator + T.exp2((Sink[T.truncmod(row, heads)] - top) * LOG2E)
                        factor = T.if_then_else(denominator == 0.0, 0.0, 1.0 / factor)
                        for p in T.unroll(pieces):
                            for d in T.vectorized(step):
                                rounded[d] = total[p * step + d] * factor
                            for d in T.vectorized(step):
                                Out[row, ((split * pieces + p) * 32 + place) * step + d] = rounded[d]

    return dense_mla_combine
