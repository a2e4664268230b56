"""The program of ``sparse_mla`` for very few heads; ``_sparse_mla`` describes it beside the others."""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels import _list_walk_cuda as list_walk
from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._sparse_mla import LOWEST, SLACK, is_token

HEADS = 8  # one side of a matrix instruction
TILE = 16  # keys of a tile: another side
PANEL = 64  # dims that eight lanes copy
PAIRS = 6  # of warps in a thread block: as many as there are registers for
STAGES = 2  # tiles in a warp's ring: as many as shared memory has room for
CHAINS = 2  # sums of a score that take turns, since a matrix instruction waits for the one before it
DEPTH = 4  # matrices that are on their way from shared memory at a time
HIGHEST, SUM = 0, 1  # of a head, in ``stats``


def pair_heads(rank: int, rope: int, dtype: str) -> Any:
    """Keys on the M side, up to 8 heads on the N side of ``mma.sync``; a pair of warps has a query.

    Or, behind the first ``whole`` queries, one of ``parts`` parts of a query's list, whose float32 result goes to
    ``Part``, the log-sum-exp behind the values.

    Each warp of a pair has half of a token's dims. It copies that half of a tile's rows into its own ring in shared
    memory and multiplies it with its half of the queries, which it holds in registers. The two add up their halves of
    the scores through shared memory, both take the exponentials, against the maximum they have, and each multiplies
    them with its half of the values, from the same copy. But for that sum, a warp waits for nothing but its own
    copies, so a thread block has no producer and no barrier of its own.

    What shared memory moves is the limit, more than copies or products: a token's row goes in once and out twice.
    ``wgmma`` would take queries and probabilities from there as well, again for every 64 tokens.
    """
    half = rank // 2  # value dims of a warp
    rest = rope // 2  # its other dims
    panels = -(-half // PANEL)
    # A stage holds panels of 64 values, a key's 128 bytes after another's, their eight chunks swapped by the key's
    # number; and other dims, 64 bytes a key, their four chunks swapped by half the number. Scores take their place
    # later. Padded rows would need no swapping, but copies that cross a border of 128 bytes take twice as long.
    values = TILE * panels * PANEL
    stage_size = values + TILE * 32
    ring = STAGES * stage_size  # elements of a warp
    steps = half // 16  # of the output, and with those of the other dims, of the scores
    all_steps = steps + rest // 16
    chunks = half // 8  # of 16 bytes in a row's values
    abbreviation = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    queries, tokens, heads, entries = T.dynamic("queries, tokens, heads, entries")
    limits, part_rows = T.dynamic("limits, part_rows")

    @T.macro
    def multiply(a, a_at, b, b_at, c, c_at):
        """c[16, 8] += a[16, 16] b[16, 8] of fragments that begin at these elements."""
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", abbreviation, abbreviation, "fp32",
            a.data, a_at, b.data, b_at, c.data, c_at, T.bool(False),
        )  # fmt: skip

    @T.macro
    def look_up(Indices, index, row, span, slot, lane):
        """Ask for the lane's entry of a tile, or of the one behind it."""
        index[slot] = -1
        if span[0] + slot * TILE + lane % TILE < span[1]:
            index[slot] = Indices[row, span[0] + slot * TILE + lane % TILE]

    @T.macro
    def go_on(Indices, index, row, span, lane):
        """To the next tile, whose entries have had a tile's time to arrive: copies before them would hold them up."""
        index[0] = index[1]
        span[0] = span[0] + TILE
        look_up(Indices, index, row, span, 1, lane)

    @T.macro
    def settle(Indices, index, mask, row, span, tokens, slot, lane):
        """Which keys of the tile are valid. If none is, it is the next tile with a valid one.

        Where the list ends, none is. Both warps of a pair find the same, since both read the same.
        """
        mask[slot] = T.cast(T.ballot(is_token(index[0], tokens)), "int32") & 0xFFFF
        if mask[slot] == 0 and span[0] + TILE < span[1]:
            span[0] = T.call_extern(
                "int32", "next_tile", T.access_ptr(Indices[row, 0], "r", entries), span[0] + TILE, span[1], tokens
            )  # fmt: skip
            look_up(Indices, index, row, span, 0, lane)
            look_up(Indices, index, row, span, 1, lane)
            mask[slot] = T.cast(T.ballot(is_token(index[0], tokens)), "int32") & 0xFFFF

    @T.macro
    def resolve(index, source, ok, tokens, lane):
        """The rows that a lane copies of that tile."""
        chosen = T.alloc_var("int32")
        for r in T.unroll(4):
            chosen = T.shfl_sync(index[0], lane // 8 + r * 4)
            ok[r] = T.if_then_else(is_token(chosen, tokens), 1, 0)
            source[r] = T.if_then_else(ok[r] != 0, chosen, 0)

    @T.macro
    def copy(KV, kv, source, ok, stage, lane, column, place, rest_column, rest_place):
        """Copy the warp's half of a tile's rows; one that is not valid becomes zeros, without a read."""
        for r in T.unroll(4):
            for v in T.unroll(panels):
                if v * 8 + lane % 8 < chunks:
                    T.ptx_cp_async(
                        T.access_ptr(
                            kv[
                                stage * stage_size
                                + v * (TILE * PANEL)
                                + r * 4 * PANEL
                                + (place ^ (r % 2 * 32))
                            ],
                            "w",
                            8,
                        ),
                        T.access_ptr(KV[source[r], column + v * PANEL], "r", 8),
                        8,
                        ok[r] != 0,
                    )
        if rest > 0:
            for r in T.unroll(2):
                if lane % 4 * 8 < rest:
                    T.ptx_cp_async(
                        T.access_ptr(kv[stage * stage_size + rest_place + r * 8 * 32], "w", 8),
                        T.access_ptr(
                            KV[T.if_then_else(lane % 8 < 4, source[r * 2], source[r * 2 + 1]), rest_column],
                            "r",
                            8,
                        ),
                        8,
                        T.if_then_else(lane % 8 < 4, ok[r * 2], ok[r * 2 + 1]) != 0,
                    )
        T.ptx_commit_group()

    @T.macro
    def load_queries(Q, q, two, row, side, h, c, heads):
        """The warp's half of the queries' dims; heads that do not exist become zeros."""
        for k in T.unroll(all_steps):
            for j in T.unroll(2):
                for v in T.vectorized(2):
                    two[v] = Q[
                        row,
                        T.min(h, heads - 1),
                        T.if_then_else(
                            k < steps, side * half + k * 16, rank + side * rest + (k - steps) * 16
                        ) + j * 8 + c * 2 + v,
                    ]  # fmt: skip
                for v in T.vectorized(2):
                    q[k * 4 + j * 2 + v] = T.if_then_else(h < heads, two[v], T.cast(0, dtype))

    @T.macro
    def load(kv, keys, stage, at, rest_at, k, turned):
        """16 keys by 16 dims: the k-th step of the scores or, turned round, of the output."""
        if k < steps:
            T.ptx_ldmatrix(
                T.bool(turned),
                4,
                T.access_ptr(kv[stage * stage_size + k // 4 * (TILE * PANEL) + (at ^ (k % 4 * 16))], "r", 8),
                T.access_ptr(keys[k % DEPTH * 8], "w", 8),
            )
        else:
            T.ptx_ldmatrix(
                T.bool(False),
                4,
                T.access_ptr(kv[stage * stage_size + (rest_at ^ ((k - steps) * 16))], "r", 8),
                T.access_ptr(keys[k % DEPTH * 8], "w", 8),
            )

    @T.macro
    def multiply_keys(kv, keys, q, score, stage, at, rest_at):
        """This warp's half of a tile's scores; keys are asked for ``DEPTH`` - 1 steps ahead."""
        for n in T.unroll(CHAINS * 4):
            score[n] = 0.0
        for k in list(range(min(DEPTH - 1, all_steps))):
            load(kv, keys, stage, at, rest_at, k, False)
        for k in list(range(all_steps)):
            if k + DEPTH - 1 < all_steps:
                load(kv, keys, stage, at, rest_at, k + DEPTH - 1, False)
            multiply(keys, k % DEPTH * 8, q, k * 4, score, k % CHAINS * 4)
        for s in T.unroll(1, CHAINS):
            for n in T.unroll(4):
                score[n] = score[n] + score[s * 4 + n]

    @T.macro
    def softmax(mask, scale, c, x, p, stats, scaling, out):
        """Probabilities ``p`` of the scores ``x``; if one exceeds the maximum by ``SLACK``, for a new maximum."""
        top = T.alloc_var("float32")
        factor = T.alloc_var("float32")
        for n in T.unroll(4):
            x[n] = x[n] * scale
        if mask[0] != 0xFFFF:
            for n in T.unroll(4):
                if (mask[0] >> (n // 2 * 8 + c * 2 + n % 2)) & 1 == 0:
                    x[n] = -T.infinity("float32")
        top = T.max(T.max(x[0], x[1]), T.max(x[2], x[3]))
        if T.any_sync(top - stats[HIGHEST] > SLACK) != 0:
            top = T.max(top, T.shfl_xor(top, 1))
            top = T.max(top, T.shfl_xor(top, 2))
            top = T.max(top, stats[HIGHEST])
            factor = T.exp2(stats[HIGHEST] - top)
            stats[HIGHEST] = top
            stats[SUM] = stats[SUM] * factor
            for n in T.unroll(2):
                scaling[n] = T.shfl_sync(factor, (c * 2 + n) * 4)
            for k in T.unroll(steps):
                for n in T.unroll(4):
                    out[k * 4 + n] = out[k * 4 + n] * scaling[n % 2]
        for n in T.unroll(4):
            x[n] = T.exp2(x[n] - stats[HIGHEST])
        for n in T.unroll(4):
            stats[SUM] = stats[SUM] + x[n]
        for n in T.vectorized(4):
            p[n] = x[n]

    @T.macro
    def multiply_values(kv, keys, p, out, stage, at):
        """Add a tile's values to the output."""
        for k in list(range(min(DEPTH - 1, steps))):
            load(kv, keys, stage, at, 0, k, True)
        for k in list(range(steps)):
            if k + DEPTH - 1 < steps:
                load(kv, keys, stage, at, 0, k + DEPTH - 1, True)
            multiply(keys, k % DEPTH * 8, p, 0, out, k * 4)

    @T.macro
    def store(
        Out, Lse, Part, Sink, kv, item, whole, heads, has_sink, warp, side, lane, h, c, stats, scaling, out
    ):  # fmt: skip
        """Store the warp's half of a query's result, rounded, through shared memory in whole rows."""
        total = T.alloc_var("float32")
        eight = T.alloc_local([8], dtype)
        total = stats[SUM] + T.shfl_xor(stats[SUM], 1)
        total = total + T.shfl_xor(total, 2)
        lse = T.if_then_else(total == 0.0, -T.infinity("float32"), (T.log2(total) + stats[HIGHEST]) * LN2)
        if (side == 0) & (c == 0) & (h < heads):
            if item < whole:
                Lse[item, h] = lse
            else:
                Part[item - whole, h, rank] = lse
        if (has_sink != 0) & (h < heads) & (item < whole):
            total = T.if_then_else(total == 0.0, 0.0, total + T.exp2(Sink[h] * LOG2E - stats[HIGHEST]))
        total = T.if_then_else(total == 0.0, 0.0, 1.0 / total)
        for n in T.unroll(2):
            scaling[n] = T.shfl_sync(total, (c * 2 + n) * 4)
        if item < whole:
            for k in T.unroll(steps):
                for r in T.unroll(2):
                    for e in T.unroll(2):
                        n = c * 2 + e
                        to = k // 4 * (TILE * PANEL) + n * PANEL + (k % 4 * 2 + r ^ n) * 8
                        kv[warp * ring + to + h] = out[k * 4 + r * 2 + e] * scaling[e]
            T.sync_warp()
            for r in T.unroll(HEADS // 4):
                n = r * 4 + lane // 8
                for u in T.unroll(panels):
                    if (n < heads) & (u * 8 + lane % 8 < chunks):
                        to = u * (TILE * PANEL) + n * PANEL + (lane % 8 ^ n) * 8
                        for v in T.vectorized(8):
                            eight[v] = kv[warp * ring + to + v]
                        for v in T.vectorized(8):
                            Out[item, n, side * half + u * PANEL + lane % 8 * 8 + v] = eight[v]
        else:
            for k in T.unroll(steps):
                for r in T.unroll(2):
                    for e in T.unroll(2):
                        if c * 2 + e < heads:
                            Part[item - whole, c * 2 + e, side * half + k * 16 + r * 8 + h] = (
                                out[k * 4 + r * 2 + e] * scaling[e]
                            )

    @T.prim_func
    def sparse_mla_pair_heads(
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
        with T.Kernel(grid, threads=PAIRS * 64) as cta:
            T.import_source(list_walk.SOURCE)
            T.pdl_trigger()
            kv = T.alloc_shared([2 * PAIRS * ring], dtype)
            scores_sh = T.view(kv, [PAIRS * ring], "float32")
            q = T.alloc_local([all_steps * 4], dtype)
            out = T.alloc_local([steps * 4], "float32")
            score = T.alloc_local([CHAINS * 4], "float32")
            x = T.alloc_local([4], "float32")
            other = T.alloc_local([4], "float32")
            keys = T.alloc_local([DEPTH * 8], dtype)
            p = T.alloc_local([4], dtype)
            stats = T.alloc_local([2], "float32")  # maximum and sum of the head h's probabilities
            scaling = T.alloc_local([2], "float32")  # factors of the heads 2c and 2c + 1
            mask = T.alloc_local([STAGES], "int32")  # of valid keys, of this tile and those behind it
            source = T.alloc_local([4], "int32")
            ok = T.alloc_local([4], "int32")
            two = T.alloc_local([2], dtype)
            index = T.alloc_local([2], "int32")  # entries of the tile to be copied, and of the one behind it
            item = T.alloc_var("int32")
            row = T.alloc_var("int32")
            span = T.alloc_local([2], "int32")  # where the tile to be copied begins, and the end
            now = T.alloc_var("int32")  # this tile's stage
            then = T.alloc_var("int32")  # and that of the tile to be copied
            place = T.alloc_var("int32")
            column = T.alloc_var("int32")
            rest_place = T.alloc_var("int32")
            rest_column = T.alloc_var("int32")
            key_at = T.alloc_var("int32")
            rest_key_at = T.alloc_var("int32")
            value_at = T.alloc_var("int32")
            write_at = T.alloc_var("int32")
            read_at = T.alloc_var("int32")

            thread = T.get_thread_binding()
            warp = T.shfl_sync(thread // 32, 0)  # the same in a warp
            pair = warp // 2
            side = warp % 2
            lane = thread % 32
            # As a matrix instruction leaves scores, a lane has the keys h and h + 8 of two heads from 2c on; as the
            # next takes probabilities, it has the head h, and two keys from 2c and two from 2c + 8 on.
            h = lane // 4
            c = lane % 4
            # Places and columns that are a lane's own. They pass through a shuffle, since the compiler keeps what it
            # cannot see through in one register each, and all the rest in the offsets of instructions.
            write_at = T.shfl_sync((warp * ring + values) // 2 + c * 16 + c // 2 * 8 + h, lane)
            read_at = T.shfl_sync(
                (warp * ring + values) // 2 + (h // 2 + h % 2 * 4) * 16 + (h // 4 ^ (h % 2)) * 8 + c * 2, lane
            )
            place = T.shfl_sync(warp * ring + lane // 8 * PANEL + (lane % 8 ^ (lane // 8)) * 8, lane)
            column = T.shfl_sync(side * half + lane % 8 * 8, lane)
            rest_place = T.shfl_sync(
                warp * ring + values + (lane % 8 // 4 * 4 + lane // 8) * 32
                + (lane % 4 ^ (lane % 8 // 4 * 2 + lane // 16)) * 8,
                lane,
            )  # fmt: skip
            rest_column = T.shfl_sync(rank + side * rest + lane % 4 * 8, lane)
            key_at = T.shfl_sync(warp * ring + lane % 16 * PANEL + (lane // 16 ^ (lane % 8)) * 8, lane)
            rest_key_at = T.shfl_sync(
                warp * ring + values + lane % 16 * 32 + (lane // 16 ^ (lane // 2 % 4)) * 8, lane
            )
            value_at = T.shfl_sync(
                warp * ring + (lane // 16 * 8 + lane % 8) * PANEL + (lane // 8 % 2 ^ (lane % 8)) * 8, lane
            )

            item = pair * grid + cta
            while item < whole + (queries - whole) * parts:
                row = T.if_then_else(item < whole, item, whole + (item - whole) // parts)
                T.evaluate(
                    T.call_extern(
                        "handle", "enter_tiles", span.data, T.access_ptr(Indices[row, 0], "r", entries),
                        T.access_ptr(Limits[0], "r", 1), limits, row, entries, tokens,
                        T.if_then_else(item < whole, 0, (item - whole) % parts), T.if_then_else(item < whole, 1, parts),
                    )
                )  # fmt: skip
                look_up(Indices, index, row, span, 0, lane)
                look_up(Indices, index, row, span, 1, lane)
                load_queries(Q, q, two, row, side, h, c, heads)
                for n in T.unroll(steps * 4):
                    out[n] = 0.0
                stats[HIGHEST] = LOWEST
                stats[SUM] = 0.0
                settle(Indices, index, mask, row, span, tokens, 0, lane)
                for s in T.unroll(STAGES - 1):
                    resolve(index, source, ok, tokens, lane)
                    copy(KV, kv, source, ok, s, lane, column, place, rest_column, rest_place)
                    go_on(Indices, index, row, span, lane)
                    settle(Indices, index, mask, row, span, tokens, s + 1, lane)
                now = 0
                while mask[0] != 0:
                    T.ptx_wait_group(STAGES - 2)
                    T.sync_warp()
                    multiply_keys(kv, keys, q, score, now, key_at, rest_key_at)
                    T.sync_warp()
                    for r in T.unroll(2):
                        for e in T.unroll(2):
                            to = now * (stage_size // 2) + e * 64 + (write_at ^ ((r ^ e) * 8))
                            scores_sh[to] = score[r * 2 + e]
                    resolve(index, source, ok, tokens, lane)
                    then = T.if_then_else(now == 0, STAGES - 1, now - 1)
                    # From here on the other warp is done with the tile before this one, and with its scores.
                    T.sync_threads(pair + 1, 64)
                    copy(KV, kv, source, ok, then, lane, column, place, rest_column, rest_place)
                    go_on(Indices, index, row, span, lane)
                    for j in T.unroll(2):
                        # Halved, so that TileLang sees that both are even.
                        own = now * (stage_size // 4) + (read_at ^ (j * 8)) // 2
                        far = own + (1 - 2 * side) * (ring // 4)
                        for v in T.vectorized(2):
                            x[j * 2 + v] = scores_sh[own * 2 + v]
                        for v in T.vectorized(2):
                            other[j * 2 + v] = scores_sh[far * 2 + v]
                    for n in T.unroll(4):
                        x[n] = x[n] + other[n]
                    softmax(mask, scale, c, x, p, stats, scaling, out)
                    multiply_values(kv, keys, p, out, now, value_at)
                    now = T.if_then_else(now == STAGES - 1, 0, now + 1)
                    for s in T.unroll(STAGES - 1):
                        mask[s] = mask[s + 1]
                    # Here, as a branch inside keeps instructions on either side of it apart.
                    settle(Indices, index, mask, row, span, tokens, STAGES - 1, lane)
                T.ptx_wait_group(0)
                T.sync_warp()
                store(
                    Out, Lse, Part, Sink, kv, item, whole, heads, has_sink, warp, side, lane, h, c, stats, scaling, out
                )  # fmt: skip
                T.sync_threads(pair + 1, 64)  # the other warp may be reading this one's last scores
                item = item + PAIRS * grid

    return sparse_mla_pair_heads
