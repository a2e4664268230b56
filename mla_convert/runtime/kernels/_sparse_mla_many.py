"""The program of ``sparse_mla`` for tiles of 64 heads; ``_sparse_mla`` describes it beside the other ones.

Heads are the M side of the products. An item is a query, a tile of 64 heads and one of ``parts`` of the list.

The first consumer owns output columns [0, left) and the scores of even blocks, the second the columns behind and the
scores of odd blocks. Each multiplies its own probabilities from registers, a quarter of the keys at a time so that the
product starts when a quarter of the exponentials are there, and the other's from shared memory:

- The first finds a maximum, tells the second (``max_full``), and multiplies its probabilities. Meanwhile it writes
  them to shared memory, but the second may find a larger maximum: once it has said so (``p_full[1]``), they are right
  or are made so, and go to the second (``p_full[0]``).
- It does not wait for its product with the second's probabilities: the scores of the next even block follow.
- The second multiplies its own probabilities, then the first's, and turns to the next odd block.

So a pair of blocks is freed, and gathered, in this order: left piece of the even block, right piece of the odd
block, right of the even, left of the odd.

In the end each consumer leaves its half of the results in the piece that it read last, and turns to the next item,
whose queries and first two pieces are on their way. The producer sends the results on by bulk copies before it fills
the other two.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels import _list_walk_cuda as list_walk
from mla_convert.runtime.kernels._sparse_mla import BLOCK
from mla_convert.runtime.kernels._sparse_mla_many_cuda import SOURCE


def many_heads(rank: int, rope: int, dtype: str, split: bool) -> Any:
    """Attention of each query and tile of heads to its list or, with ``split``, to a part of it, in float32."""
    queries, tokens, heads, entries, rows = T.dynamic("queries, tokens, heads, entries, rows")
    limits, lse_rows = T.dynamic("limits, lse_rows")
    out_width = rank + 4 if split else rank  # the log-sum-exp of a part is behind its values
    # Panels of both blocks, the odd block's probabilities, queries.
    shared_columns = 2 * rank + max(rope, BLOCK) + rope + BLOCK + rank + rope
    program = f"mla_many::run<{rank}, {rope}, {str(dtype == 'float16').lower()}, {str(split).lower()}>"

    @T.prim_func
    def sparse_mla_many_heads(
        Q: T.Tensor([queries, heads, rank + rope], dtype),
        KV: T.Tensor([tokens, rank + rope], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Limits: T.Tensor([limits], "int32"),
        grid: T.int32,
        parts: T.int32,
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([rows, heads, out_width], "float32" if split else dtype),
        Lse: T.Tensor([lse_rows if split else rows, heads], "float32"),
    ):
        with T.Kernel(grid, threads=384, prelude=list_walk.SOURCE + SOURCE):
            if split:
                T.pdl_trigger()
            shared = T.alloc_shared([64, shared_columns], dtype)
            T.evaluate(
                T.call_extern(
                    "handle",
                    program,
                    T.access_ptr(shared[0, 0], "rw", 64 * shared_columns),
                    T.access_ptr(Q[0, 0, 0], "r", rank + rope),
                    T.access_ptr(KV[0, 0], "r", rank + rope),
                    T.access_ptr(Indices[0, 0], "r", entries),
                    T.access_ptr(Limits[0], "r", limits),
                    limits,
                    T.access_ptr(Sink[0], "r", heads),
                    T.access_ptr(Out[0, 0, 0], "w", out_width),
                    T.access_ptr(Lse[0, 0], "w", heads),
                    rows,
                    parts,
                    T.ceildiv(heads, 64),
                    tokens,
                    heads,
                    entries,
                    has_sink,
                    scale,
                )
            )

    return sparse_mla_many_heads
