"""The small programs around ``_sparse_mla_backward``: terms of each query and head, and sums in a fixed order.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LOG2E

NOTHING = 1.0e30  # log-sum-exp of a row without keys: every exponential against it is 0


def prepare(rank: int, dtype: str) -> Any:
    """What the gradient of a score needs of its row: log2-sum-exp, share beside the sink, delta and offset.

    With p = exp(score - lse): P = p * share, dS = p * (share * dP * scale + offset), where
    offset = (d_lse - share * delta) * scale and delta = dO . O.
    """
    queries, heads = T.dynamic("queries, heads")
    rows = 8

    @T.prim_func
    def sparse_mla_backward_prepare(
        Out: T.Tensor([queries, heads, rank], dtype),
        DOut: T.Tensor([queries, heads, rank], dtype),
        Lse: T.Tensor([queries, heads], "float32"),
        DLse: T.Tensor([queries, heads], "float32"),
        has_d_lse: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Lse2: T.Tensor([queries, heads], "float32"),
        Share: T.Tensor([queries, heads], "float32"),
        Delta: T.Tensor([queries, heads], "float32"),
        Offset: T.Tensor([queries, heads], "float32"),
    ):
        with T.Kernel(queries, T.ceildiv(heads, rows), threads=128) as (s, tile):
            product = T.alloc_fragment([rows, rank], "float32")
            delta = T.alloc_fragment([rows], "float32")
            share = T.alloc_fragment([rows], "float32")
            for h, d in T.Parallel(rows, rank):
                if tile * rows + h < heads:
                    product[h, d] = T.cast(Out[s, tile * rows + h, d], "float32") * T.cast(
                        DOut[s, tile * rows + h, d], "float32"
                    )
                else:
                    product[h, d] = 0.0
            T.reduce_sum(product, delta, dim=1)
            for h in T.Parallel(rows):
                if tile * rows + h < heads:
                    share[h] = 1.0
                    if has_sink != 0:
                        # An empty row has lse -inf and share 0; a sink of -inf takes nothing, even of that.
                        share[h] = 1.0 / (
                            1.0 + T.exp2((Sink[tile * rows + h] - Lse[s, tile * rows + h]) * LOG2E)
                        )
                    Share[s, tile * rows + h] = share[h]
                    Delta[s, tile * rows + h] = delta[h]
                    Lse2[s, tile * rows + h] = T.if_then_else(
                        Lse[s, tile * rows + h] == -T.infinity("float32"),
                        NOTHING,
                        Lse[s, tile * rows + h] * LOG2E,
                    )
                    if has_d_lse != 0:
                        Offset[s, tile * rows + h] = (DLse[s, tile * rows + h] - share[h] * delta[h]) * scale
                    else:
                        Offset[s, tile * rows + h] = -share[h] * delta[h] * scale

    return sparse_mla_backward_prepare


def sum_slots(width: int, tiles: int) -> Any:
    """dKV[t] += the rows of every entry that lists token t, in the order of ``Order``: two runs give equal bits.

    ``Order`` holds numbers of entries (query * entries + position), those of token t from ``Begin[t]`` on.
    """
    tokens, listed, slots, bounds = T.dynamic("tokens, listed, slots, bounds")
    threads = -(-width // 128) * 32

    @T.prim_func
    def sparse_mla_backward_sum_slots(
        Slots: T.Tensor([slots, width], "float32"),
        Order: T.Tensor([listed], "int64"),
        Begin: T.Tensor([bounds], "int64"),
        entries: T.int32,
        DKV: T.Tensor([tokens, width], "float32"),
    ):
        with T.Kernel(tokens, threads=threads) as token:
            total = T.alloc_local([4], "float32")
            number = T.alloc_var("int64")
            slot = T.alloc_var("int64")
            column = T.get_thread_binding() * 4
            if column < width:
                for k in T.vectorized(4):
                    total[k] = DKV[token, column + k]
                for n in T.serial(T.cast(Begin[token + 1] - Begin[token], "int32")):
                    number = Order[Begin[token] + n]
                    for tile in T.unroll(tiles):
                        slot = (number // entries * tiles + tile) * entries + number % entries
                        for k in T.vectorized(4):
                            total[k] = total[k] + Slots[slot, column + k]
                for k in T.vectorized(4):
                    DKV[token, column + k] = total[k]

    return sparse_mla_backward_sum_slots


def sum_parts(width: int, dtype: str) -> Any:
    """dQ from its float32 parts, those of one query in a row, in their order: two runs give equal bits."""
    queries, rows, heads = T.dynamic("queries, rows, heads")

    @T.prim_func
    def sparse_mla_backward_sum_parts(
        Part: T.Tensor([rows, heads, width], "float32"),
        parts: T.int32,
        DQ: T.Tensor([queries, heads, width], dtype),
    ):
        with T.Kernel(queries, heads, threads=width // 4) as (row, h):
            total = T.alloc_local([4], "float32")
            rounded = T.alloc_local([4], dtype)
            column = T.get_thread_binding() * 4
            T.fill(total, 0.0)
            for part in T.serial(parts):
                for k in T.vectorized(4):
                    total[k] = total[k] + Part[row * parts + part, h, column + k]
            for k in T.vectorized(4):
                rounded[k] = total[k]
            for k in T.vectorized(4):
                DQ[row, h, column + k] = rounded[k]

    return sparse_mla_backward_sum_parts
