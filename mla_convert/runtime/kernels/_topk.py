"""The program of ``topk``: one thread block selects from one row, or from a part of one.

An entry is the integer that sorts like its logit, followed by the complement of its place in the row: of equal
logits the first is the highest. What is known of the k-th highest entry is a prefix: ``VPREFIX`` is its value
shifted right by ``VSHIFT`` bits, ``IPREFIX`` its complemented place shifted by ``ISHIFT``, which stays 31 until all
32 bits of the value are known. Entries at -inf have lower prefixes than it ever has. ``COUNT`` entries of the row
share the prefix, and the ``NEED`` highest of those are selected along with all that lie above it; once the two
numbers are equal, nothing is left to find out.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

BINS = 4096
FIRST_SHIFT = 20  # below the first digit: sign, exponent and three bits of the fraction
NEXT_BITS = 10  # each of the two digits after it
DIGITS = 5  # at most, behind the first: two of the value and three of the place
CAPACITY = 2560  # entries that are sorted out in shared memory
WINDOW = 1 << 17  # entries whose marks fit the mask in shared memory
MINUS_INFINITY = -8388608  # the bits of -inf, as int32
LOWEST_DIGIT = 8 - BINS // 2  # first digit of the lowest number above -inf

# ``ordered`` is the int32 that sorts like a float32. Adding 0 makes -0.0 to 0.0 and every NaN to the one whose bits
# are 0x7fffffff, and leaves denormals alone, since PTX flushes them only where it says so. The atomics are the
# compiler's own: it sees that the address is in shared memory, where TileLang's go by a generic one.
PRELUDE = """
static __device__ __forceinline__ int ordered(int bits) {
  float x;
  asm("add.rn.f32 %0, %1, 0f00000000;" : "=f"(x) : "f"(__int_as_float(bits)));
  bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
static __device__ __forceinline__ void count_one(int* bin) { atomicAdd(bin, 1); }
static __device__ __forceinline__ int next_slot(int* used) { return atomicAdd(used, 1); }
static __device__ __forceinline__ void clear_bit(unsigned* word, int bit) { atomicAnd(word, ~(1u << bit)); }
"""

VSHIFT, VPREFIX, ISHIFT, IPREFIX, NEED, COUNT = range(6)


def ordered(bits: Any) -> Any:
    return T.call_extern("int32", "ordered", bits)


def shares_prefix(state: Any, value: Any, place: Any) -> Any:
    return (value >> state[VSHIFT] == state[VPREFIX]) & (place >> state[ISHIFT] == state[IPREFIX])


def above_prefix(state: Any, value: Any, place: Any) -> Any:
    high = value >> state[VSHIFT]
    return (high > state[VPREFIX]) | ((high == state[VPREFIX]) & (place >> state[ISHIFT] > state[IPREFIX]))


def next_place_shift(shift: Any, length: Any) -> Any:
    """31 -> 8 -> 0, or 31 -> 20 -> 8 -> 0 where a place can have more than 20 bits."""
    return T.if_then_else(
        shift == 31, T.if_then_else(length > 1 << 20, 20, 8), T.if_then_else(shift == 20, 8, 0)
    )


def next_digit(state: Any, value: Any, place: Any, length: Any) -> Any:
    """The digit behind the prefix, of an entry that shares it."""
    of_value = (value >> (state[VSHIFT] - NEXT_BITS)) & ((1 << NEXT_BITS) - 1)
    shift = next_place_shift(state[ISHIFT], length)
    of_place = (place >> shift) & ((1 << (state[ISHIFT] - shift)) - 1)
    return T.if_then_else(state[VSHIFT] > 0, of_value, of_place)


def select(threads: int, blocks: int, loads: int, *, values: bool = False, mapped: bool = False) -> Any:
    """The kernel.

    Args:
        threads: Of a thread block.
        blocks: Thread blocks that a multiprocessor must be able to hold: limits the registers.
        loads: Entries that a thread has in flight.
        values: Also write the selected logits, -inf behind the last.
        mapped: Entry t of a row stands for key Map[row, t], not t.

    Neither ``Starts``, ``Ends`` nor ``Map`` is read where the flag says so.
    """
    warps = threads // 32
    each_bins = BINS // threads
    rows, elements, width, columns = T.dynamic("rows, elements, width, columns")
    starts, ends, maps = T.dynamic("starts, ends, maps")

    @T.macro
    def clear(hist, thread):
        for j in T.unroll(BINS // threads):
            hist[j * threads + thread] = 0
        T.sync_threads()

    @T.macro
    def find(hist, sums, found, total, wanted, thread):
        """The bin with the ``wanted``-th highest entry: found = bin, how many of it are needed, how many it has.

        ``total`` becomes the number of entries in all bins but, of the first digit, that of -inf.
        """
        warp = thread // 32
        lane = thread % 32
        part = T.alloc_local([1], "int32")
        each = T.alloc_local([each_bins], "int32")
        scan = T.alloc_local([3], "int32")
        upto = T.alloc_local([2], "int32")
        T.sync_threads()
        part[0] = 0
        for j in T.unroll(BINS // threads):
            part[0] = part[0] + hist[warp * (BINS // warps) + j * 32 + lane]
        for j in T.unroll(5):
            part[0] = part[0] + T.shfl_xor(part[0], 1 << j)
        if lane == 0:
            sums[warp] = part[0]
        T.sync_threads()
        total[0] = 0
        for w in T.unroll(warps):
            total[0] = total[0] + sums[w]
        total[0] = total[0] - hist[LOWEST_DIGIT - 1 + BINS // 2]
        if warp == 0:
            # Whose bins, and how many entries lie in those of the warps above.
            scan[0] = 0
            scan[1] = 0
            scan[2] = 0
            for w in T.unroll(warps):
                if scan[2] == 0:
                    if scan[0] + sums[warps - 1 - w] >= wanted:
                        scan[2] = 1
                        scan[1] = warps - 1 - w
                    else:
                        scan[0] = scan[0] + sums[warps - 1 - w]
            # Lane 0 looks at the highest of them.
            top = (scan[1] + 1) * (BINS // warps) - 1 - lane * each_bins
            part[0] = 0
            for j in T.unroll(each_bins):
                each[j] = hist[top - j]
                part[0] = part[0] + each[j]
            upto[0] = part[0]
            for j in T.unroll(5):
                upto[1] = T.shfl_up(upto[0], 1 << j)
                if lane >= 1 << j:
                    upto[0] = upto[0] + upto[1]
            upto[0] = scan[0] + upto[0] - part[0]
            for j in T.unroll(each_bins):
                if (upto[0] < wanted) & (upto[0] + each[j] >= wanted):
                    found[0] = top - j
                    found[1] = wanted - upto[0]
                    found[2] = each[j]
                upto[0] = upto[0] + each[j]
        T.sync_threads()

    @T.macro
    def lengthen(state, found, length):
        """Take the digit that was found into the prefix."""
        if state[VSHIFT] > 0:
            state[VSHIFT] = state[VSHIFT] - NEXT_BITS
            state[VPREFIX] = (state[VPREFIX] << NEXT_BITS) + found[0]
        else:
            shift = next_place_shift(state[ISHIFT], length)
            state[IPREFIX] = (state[IPREFIX] << (state[ISHIFT] - shift)) + found[0]
            state[ISHIFT] = shift
        state[NEED] = found[1]
        state[COUNT] = found[2]

    @T.macro
    def load(Logits, loaded, base, first, length, thread):
        """``loads`` entries a thread, -inf behind the row's end."""
        if first + loads * threads <= length:
            for u in T.unroll(loads):
                loaded[u] = Logits[base + (first + u * threads + thread)]
        else:
            for u in T.unroll(loads):
                loaded[u] = MINUS_INFINITY
                if first + u * threads + thread < length:
                    loaded[u] = Logits[base + (first + u * threads + thread)]

    @T.prim_func
    def select_topk_kernel(
        Logits: T.Tensor([elements], "int32"),
        Starts: T.Tensor([starts], "int32"),
        Ends: T.Tensor([ends], "int32"),
        use_starts: T.int32,
        use_ends: T.int32,
        Map: T.Tensor([maps, columns], "int32"),
        stride: T.int64,
        keys: T.int32,
        span: T.int32,
        parts: T.int32,
        Out: T.Tensor([rows, width], "int32"),
        Values: T.Tensor([rows, width], "int32"),
    ):
        with T.Kernel(rows, threads=threads, prelude=PRELUDE) as block:
            hist = T.alloc_shared([BINS], "int32", scope="shared")
            listed_value = T.alloc_shared([CAPACITY], "int32", scope="shared")
            listed_place = T.alloc_shared([CAPACITY], "int32", scope="shared")
            mask = T.alloc_shared([WINDOW // 32], "uint32")  # dynamic: static shared memory ends at 48 KiB
            sums = T.alloc_shared([warps], "int32", scope="shared")
            found = T.alloc_shared([4], "int32", scope="shared")
            state = T.alloc_local([6], "int32")
            loaded = T.alloc_local([loads], "int32")
            total = T.alloc_local([1], "int32")
            running = T.alloc_local([3], "int32")
            word = T.alloc_local([1], "uint32")
            marked = T.alloc_local([1], "bool")
            base = T.alloc_var("int64")
            begin = T.alloc_var("int32")
            length = T.alloc_var("int32")
            written = T.alloc_var("int32")

            T.annotate_min_blocks_per_sm(blocks)
            thread = T.get_thread_binding()
            warp = thread // 32
            lane = thread % 32
            # The last queries have the longest causal ranges, so they go first.
            row = rows - 1 - block
            query = row // parts
            begin = 0
            if use_starts != 0:
                begin = T.max(Starts[query], 0)
            begin = begin + row % parts * span
            length = keys
            if use_ends != 0:
                length = T.min(Ends[query], keys)
            length = T.max(T.min(length - begin, span), 0)
            base = T.cast(query, "int64") * stride + begin

            state[VSHIFT] = FIRST_SHIFT
            state[VPREFIX] = LOWEST_DIGIT
            state[ISHIFT] = 31
            state[IPREFIX] = 0
            state[NEED] = 0
            state[COUNT] = 0
            if length > width:
                clear(hist, thread)
                for i in T.serial(T.ceildiv(length, threads * loads)):
                    load(Logits, loaded, base, i * (threads * loads), length, thread)
                    for u in T.unroll(loads):
                        digit = (ordered(loaded[u]) >> FIRST_SHIFT) + BINS // 2
                        T.call_extern("void", "count_one", T.address_of(hist[digit]))
                find(hist, sums, found, total, width, thread)
                if total[0] > width:
                    state[VPREFIX] = found[0] - BINS // 2
                    state[NEED] = found[1]
                    state[COUNT] = found[2]
                for _ in T.serial(DIGITS):
                    if (state[COUNT] > CAPACITY) & (state[COUNT] != state[NEED]):
                        clear(hist, thread)
                        for i in T.serial(T.ceildiv(length, threads * loads)):
                            load(Logits, loaded, base, i * (threads * loads), length, thread)
                            for u in T.unroll(loads):
                                value = ordered(loaded[u])
                                place = length - 1 - (i * (threads * loads) + u * threads + thread)
                                if shares_prefix(state, value, place):
                                    digit = next_digit(state, value, place, length)
                                    T.call_extern("void", "count_one", T.address_of(hist[digit]))
                        find(hist, sums, found, total, state[NEED], thread)
                        lengthen(state, found, length)

            if (length <= WINDOW) | (state[COUNT] != state[NEED]):
                if thread == 0:
                    found[3] = 0
                T.sync_threads()
                # Whether entries with the prefix's value need a closer look: they are all selected, or none is.
                undecided = (state[COUNT] != state[NEED]) | (state[ISHIFT] != 31)
                for i in T.serial(T.ceildiv(length, threads * loads)):
                    load(Logits, loaded, base, i * (threads * loads), length, thread)
                    for u in T.unroll(loads):
                        value = ordered(loaded[u])
                        at = i * (threads * loads) + u * threads + thread
                        marked[0] = value >> state[VSHIFT] >= state[VPREFIX]
                        if (value >> state[VSHIFT] == state[VPREFIX]) & undecided:
                            place = length - 1 - at
                            if shares_prefix(state, value, place):
                                if state[COUNT] != state[NEED]:
                                    slot = T.call_extern("int32", "next_slot", T.address_of(found[3]))
                                    listed_value[slot] = value
                                    listed_place[slot] = place
                            elif not above_prefix(state, value, place):
                                marked[0] = False
                        word[0] = T.cast(T.ballot(marked[0]), "uint32")
                        if (length <= WINDOW) & (lane == 0) & (at < length):
                            mask[at // 32] = word[0]
                T.sync_threads()
            if state[COUNT] != state[NEED]:
                running[0] = state[COUNT]
                for _ in T.serial(DIGITS):
                    if state[COUNT] != state[NEED]:
                        clear(hist, thread)
                        for i in T.serial(T.ceildiv(running[0], threads)):
                            j = i * threads + thread
                            if j < running[0]:
                                value = listed_value[j]
                                place = listed_place[j]
                                if shares_prefix(state, value, place):
                                    digit = next_digit(state, value, place, length)
                                    T.call_extern("void", "count_one", T.address_of(hist[digit]))
                        find(hist, sums, found, total, state[NEED], thread)
                        lengthen(state, found, length)
                if length <= WINDOW:
                    for i in T.serial(T.ceildiv(running[0], threads)):
                        j = i * threads + thread
                        if j < running[0]:
                            value = listed_value[j]
                            place = listed_place[j]
                            if not (shares_prefix(state, value, place) | above_prefix(state, value, place)):
                                at = length - 1 - place
                                T.call_extern("void", "clear_bit", T.address_of(mask[at // 32]), at % 32)
                    T.sync_threads()

            written = 0
            for window in T.serial(T.ceildiv(length, WINDOW)):
                behind = T.min(length - window * WINDOW, WINDOW)
                if length > WINDOW:
                    for i in T.serial(T.ceildiv(behind, threads * loads)):
                        load(Logits, loaded, base, window * WINDOW + i * (threads * loads), length, thread)
                        for u in T.unroll(loads):
                            value = ordered(loaded[u])
                            at = i * (threads * loads) + u * threads + thread
                            place = length - 1 - (window * WINDOW + at)
                            chosen = shares_prefix(state, value, place) | above_prefix(state, value, place)
                            word[0] = T.cast(T.ballot(chosen), "uint32")
                            if (lane == 0) & (at < behind):
                                mask[at // 32] = word[0]
                    T.sync_threads()
                # Each warp takes a run of words, 32 at a time: count, then write behind the runs before.
                words = T.ceildiv(behind, 32)
                run = T.ceildiv(T.ceildiv(words, warps), 32) * 32
                running[0] = 0
                for i in T.serial(run // 32):
                    w = warp * run + i * 32 + lane
                    if w < words:
                        running[0] = running[0] + T.cast(T.popcount(mask[w]), "int32")
                for j in T.unroll(5):
                    running[0] = running[0] + T.shfl_xor(running[0], 1 << j)
                if lane == 0:
                    sums[warp] = running[0]
                T.sync_threads()
                running[0] = written
                for w in T.unroll(warps):
                    if w < warp:
                        running[0] = running[0] + sums[w]
                    written = written + sums[w]
                for i in T.serial(run // 32):
                    w = warp * run + i * 32 + lane
                    word[0] = 0
                    if w < words:
                        word[0] = mask[w]
                    running[1] = T.cast(T.popcount(word[0]), "int32")
                    for j in T.unroll(5):
                        running[2] = T.shfl_up(running[1], 1 << j)
                        if lane >= 1 << j:
                            running[1] = running[1] + running[2]
                    running[2] = T.shfl_sync(running[1], 31)
                    running[1] = running[0] + running[1] - T.cast(T.popcount(word[0]), "int32")
                    running[0] = running[0] + running[2]
                    while word[0] != T.uint32(0):
                        at = window * WINDOW + w * 32 + T.__ffs(T.cast(word[0], "int32")) - 1
                        if mapped:
                            Out[row, running[1]] = Map[query, begin + at]
                        else:
                            Out[row, running[1]] = begin + at
                        if values:
                            Values[row, running[1]] = Logits[base + at]
                        running[1] = running[1] + 1
                        word[0] = word[0] & (word[0] - T.uint32(1))
                T.sync_threads()
            for i in T.serial(T.ceildiv(width - written, threads)):
                if written + i * threads + thread < width:
                    Out[row, written + i * threads + thread] = -1
                    if values:
                        Values[row, written + i * threads + thread] = MINUS_INFINITY

    return select_topk_kernel
