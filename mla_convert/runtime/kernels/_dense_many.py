"""What the programs of dense and decode attention for tiles of 64 rows share: what a consumer does beside its products.

The programs are in ``_dense_many_blocks`` and ``_dense_many_gather``.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._dense import ROW, ROWS_END, SLOT, WHOLE

TILE = 64


@T.macro
def follow(scale, highest_sh, s, highest, before, factor, total):
    """Take over the maximum that the other consumer left after its block."""
    T.copy(highest, before)
    for h in T.Parallel(TILE):
        highest[h] = highest_sh[s, h]
    for h in T.Parallel(TILE):
        factor[h] = T.exp2((before[h] - highest[h]) * scale)
    for h in T.Parallel(TILE):
        total[h] = total[h] * factor[h]


@T.macro
def rescale(out, factor, columns):
    moved = T.alloc_var("int32")
    moved = 0
    for h in T.Parallel(TILE):
        if factor[h] != 1.0:
            moved = 1
    if T.any_sync(moved) != 0:
        for h, d in T.Parallel(TILE, columns):
            out[h, d] = out[h, d] * factor[h]


@T.macro
def store(g, out, base, columns, turn, stage, Out, Part):
    """Normalised results to memory; as they lie in registers, a row's pieces would be four bytes."""
    if turn[WHOLE] != 0:
        for k in T.unroll(columns // 16):
            for h, d in T.Parallel(TILE, 16):
                stage[g, h, d] = out[h, k * 16 + d]
            T.sync_threads(8 + g, 128)
            for h, d in T.Parallel(TILE, 16):
                if turn[ROW] + h < turn[ROWS_END]:
                    Out[turn[ROW] + h, base + k * 16 + d] = stage[g, h, d]
            T.sync_threads(8 + g, 128)
    else:
        for h, d in T.Parallel(TILE, columns):
            Part[turn[SLOT], h, base + d] = out[h, d]


@T.macro
def finish_first(
    finished, w, turn, has_sink, Sink, heads, scale, before, highest, total, total_sh, factor, factor_sh, part, out,
    columns, rank, Lse, Part,
):  # fmt: skip
    """First consumer, behind an item's blocks: both totals, the log-sum-exp, and what both divide their results by."""
    T.barrier_wait(finished[1], w & 1)
    for h in T.Parallel(TILE):
        before[h] = 0.0
        if (has_sink != 0) & (turn[WHOLE] != 0):
            before[h] = T.exp2(Sink[T.truncmod(turn[ROW] + h, heads)] * LOG2E - highest[h] * scale)
    for h in T.Parallel(TILE):
        total[h] = total[h] + total_sh[h]
    for h in T.Parallel(TILE):
        factor[h] = T.if_then_else(total[h] == 0.0, 0.0, 1.0 / (total[h] + before[h]))
        part[h] = (T.log2(total[h]) + highest[h] * scale) * LN2
    for h in T.Parallel(TILE):
        part[h] = T.if_then_else(total[h] == 0.0, -T.infinity("float32"), part[h])
    if turn[WHOLE] != 0:
        for h in T.Parallel(TILE):
            if turn[ROW] + h < turn[ROWS_END]:
                Lse[turn[ROW] + h] = part[h]
    else:
        for h in T.Parallel(TILE):
            Part[turn[SLOT], h, rank] = part[h]
    T.copy(factor, factor_sh)
    T.barrier_arrive(finished[0])
    for h, d in T.Parallel(TILE, columns):
        out[h, d] = out[h, d] * factor[h]


@T.macro
def finish_second(finished, w, total, total_sh, factor, factor_sh, out, columns):
    """Second consumer, behind an item's blocks: its total to the first, and results divided by what that says."""
    T.copy(total, total_sh)
    T.barrier_arrive(finished[1])
    T.barrier_wait(finished[0], w & 1)
    for h in T.Parallel(TILE):
        factor[h] = factor_sh[h]
    for h, d in T.Parallel(TILE, columns):
        out[h, d] = out[h, d] * factor[h]
