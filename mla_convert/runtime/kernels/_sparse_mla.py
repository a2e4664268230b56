"""The TileLang programs of ``sparse_mla``.

Three programs, all with run-time sizes. ``lengths`` finds where each list ends, so that no block behind its
last valid entry is read. The others give a thread block one query (and up to 64 heads) with 384 threads: a
producer warpgroup gathers 64 listed rows at a time into one of two buffers (16-byte cp.async, zero fill for what
is not valid), and two consumer warpgroups compute.

- ``_sparse_mla_few.few_heads`` (up to 32 heads): keys are the M side of each product and heads the N side, so
  16 heads cost 16 columns rather than 64 rows. The consumers walk alternate blocks, each with its own softmax
  state and its own buffer; nothing passes between them until they merge at the end.
- ``many_heads`` (tiles of 64 heads): heads are the M side. The first consumer does scores, softmax and the left
  half of the output, the second the right half from probabilities handed over in shared memory.

Barriers follow one rule: waiting for "full" starts at phase 0, waiting for "free" at phase 1 (which a fresh
barrier passes at once), and every loop counts the same blocks, so no count of blocks, zero included, can hang.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._common import LN2, LOG2E

BLOCK = 64  # keys a step: what one warpgroup's matrix instruction takes on its M side
LOWEST = -1.0e30  # where the running maximum starts: finite, so that an empty row never computes inf - inf


def lengths() -> Any:
    """lengths[s] = 1 + the position of the last valid entry of list s, or 0."""
    queries, entries = T.dynamic("queries, entries")
    threads = 128

    @T.prim_func
    def sparse_mla_lengths(
        Indices: T.Tensor([queries, entries], "int32"),
        Limits: T.Tensor([queries], "int32"),
        tokens: T.int32,
        use_limits: T.int32,
        Lengths: T.Tensor([queries], "int32"),
    ):
        with T.Kernel(queries, threads=threads) as row:
            last = T.alloc_fragment([threads], "int32")
            result = T.alloc_fragment([1], "int32")
            limit = T.alloc_var("int32")
            limit = entries
            if use_limits != 0:
                limit = T.min(limit, Limits[row])
            T.fill(last, 0)
            for step in T.serial(T.ceildiv(limit, threads)):
                for t in T.Parallel(threads):
                    entry = T.if_then_else(step * threads + t < limit, Indices[row, step * threads + t], -1)
                    if (entry >= 0) & (entry < tokens):
                        last[t] = step * threads + t + 1
            T.reduce_max(last, result, dim=0)
            Lengths[row] = result[0]

    return sparse_mla_lengths


@T.macro
def load_queries(Q, rank_sh, rope_sh, row, first, heads, thread, q_full, rows, rank, rope):
    """Producer: copy ``rows`` heads of one query; heads that do not exist become zeros."""
    column = thread % 8 * 8
    for step in T.unroll(T.ceildiv(rows, 16)):
        h = step * 16 + thread // 8
        if h < rows:
            exists = first + h < heads
            source = T.min(first + h, heads - 1)
            for u in T.unroll(rank // 64):
                T.ptx_cp_async(
                    T.access_ptr(rank_sh[h, u * 64 + column], "w", 8),
                    T.access_ptr(Q[row, source, u * 64 + column], "r", 8),
                    8,
                    exists,
                )
            for u in T.unroll(T.ceildiv(rope, 64)):
                if u * 64 + column < rope:
                    T.ptx_cp_async(
                        T.access_ptr(rope_sh[h, u * 64 + column], "w", 8),
                        T.access_ptr(Q[row, source, rank + u * 64 + column], "r", 8),
                        8,
                        exists,
                    )
    T.cp_async_barrier_noinc(q_full[0])


@T.macro
def gather(KV, Indices, rank_sh, rope_sh, valid, row, length, tokens, thread, full, free, rank, rope):
    """Producer: fetch 64 listed rows at a time, eight threads a row, and note which of them are valid.

    A row that is not valid is zero-filled without a read, so nothing stale or NaN can reach a product. The next
    block's indices are fetched before the wait for its buffer. Each thread arrives twice on ``full``: once when
    its copies have landed, once (with release order) for the flags it wrote.
    """
    column = thread % 8 * 8
    index = T.alloc_local([4], "int32")
    for r in T.unroll(4):
        index[r] = -1
        if r * 16 + thread // 8 < length:
            index[r] = Indices[row, r * 16 + thread // 8]
    for i in T.serial(T.ceildiv(length, BLOCK)):
        s = i % 2
        T.barrier_wait(free[s], ((i // 2) & 1) ^ 1)
        for r in T.unroll(4):
            j = r * 16 + thread // 8
            ok = (index[r] >= 0) & (index[r] < tokens)
            source = T.if_then_else(ok, index[r], 0)
            if thread % 8 == 0:
                valid[s, j] = T.if_then_else(ok, 1, 0)
            for u in T.unroll(rank // 64):
                T.ptx_cp_async(
                    T.access_ptr(rank_sh[s, j, u * 64 + column], "w", 8),
                    T.access_ptr(KV[source, u * 64 + column], "r", 8),
                    8,
                    ok,
                )
            for u in T.unroll(T.ceildiv(rope, 64)):
                if u * 64 + column < rope:
                    T.ptx_cp_async(
                        T.access_ptr(rope_sh[s, j, u * 64 + column], "w", 8),
                        T.access_ptr(KV[source, rank + u * 64 + column], "r", 8),
                        8,
                        ok,
                    )
        T.cp_async_barrier_noinc(full[s])
        T.barrier_arrive(full[s])
        for r in T.unroll(4):
            index[r] = -1
            if (i + 1) * BLOCK + r * 16 + thread // 8 < length:
                index[r] = Indices[row, (i + 1) * BLOCK + r * 16 + thread // 8]


def many_heads(tiles: int, rank: int, rope: int, dtype: str) -> Any:
    """Heads on the M side: one thread block for a query and a tile of 64 heads, ``tiles`` of them a query.

    The first consumer computes scores, softmax and output columns [0, left), the second the columns behind.
    """
    left = -(-rank // 128) * 64
    right = rank - left
    queries, tokens, heads, entries = T.dynamic("queries, tokens, heads, entries")

    @T.prim_func
    def sparse_mla_many_heads(
        Q: T.Tensor([queries, heads, rank + rope], dtype),
        KV: T.Tensor([tokens, rank + rope], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        Sink: T.Tensor([heads], "float32"),
        has_sink: T.int32,
        scale: T.float32,
        Out: T.Tensor([queries, heads, rank], dtype),
        Lse: T.Tensor([queries, heads], "float32"),
    ):
        with T.Kernel(queries * tiles, threads=384) as block:
            q_rank = T.alloc_shared([64, rank], dtype)
            q_rope = T.alloc_shared([64, max(rope, 32)], dtype)
            kv_rank = T.alloc_shared([2, BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([2, BLOCK, max(rope, 32)], dtype)
            p_sh = T.alloc_shared([64, BLOCK], dtype)
            valid = T.alloc_shared([2, BLOCK], "int32", scope="shared")
            factor_sh = T.alloc_shared([64], "float32", scope="shared")
            score = T.alloc_fragment([64, BLOCK], "float32")
            p = T.alloc_fragment([64, BLOCK], dtype)
            out_left = T.alloc_fragment([64, left], "float32")
            out_right = T.alloc_fragment([64, max(right, 64)], "float32")
            highest = T.alloc_fragment([64], "float32")
            before = T.alloc_fragment([64], "float32")
            factor = T.alloc_fragment([64], "float32")
            total = T.alloc_fragment([64], "float32")
            part = T.alloc_fragment([64], "float32")
            q_full = T.alloc_barrier([128])
            full = T.alloc_barrier([256, 256])
            free = T.alloc_barrier([256 if right else 128] * 2)
            p_full = T.alloc_barrier([128])
            p_free = T.alloc_barrier([128])
            finished = T.alloc_barrier([128])

            row = block // tiles
            first = block % tiles * 64
            length = Lengths[row]
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(240, 1)
                T.fill(out_left, 0)
                T.fill(total, 0)
                T.fill(highest, LOWEST)
                T.barrier_wait(q_full, 0)
                for i in T.serial(T.ceildiv(length, BLOCK)):
                    s = i % 2
                    T.barrier_wait(full[s], (i // 2) & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_rank, kv_rank[s, :, :], score, transpose_B=True, clear_accum=True)
                    if rope > 0:
                        T.wgmma_gemm(q_rope, kv_rope[s, :, :], score, transpose_B=True)
                    T.wait_wgmma(0)
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.if_then_else(valid[s, j] != 0, score[h, j], -T.infinity("float32"))
                    T.copy(highest, before)
                    T.reduce_max(score, highest, dim=1, clear=False)
                    for h in T.Parallel(64):
                        factor[h] = T.exp2((before[h] - highest[h]) * scale)
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.exp2(score[h, j] * scale - highest[h] * scale)
                    T.reduce_sum(score, part, dim=1)
                    for h in T.Parallel(64):
                        total[h] = total[h] * factor[h] + part[h]
                    T.copy(score, p)
                    if right > 0:
                        T.barrier_wait(p_free, (i & 1) ^ 1)
                        T.copy(p, p_sh)
                        T.copy(factor, factor_sh)
                        T.fence_proxy_async()
                        T.barrier_arrive(p_full)
                    for h, d in T.Parallel(64, left):
                        out_left[h, d] = out_left[h, d] * factor[h]
                    T.wgmma_gemm(p, kv_rank[s, :, :left], out_left)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[s])

                for h in T.Parallel(64):
                    before[h] = 0.0
                    if (has_sink != 0) & (first + h < heads):
                        before[h] = T.exp2(Sink[T.min(first + h, heads - 1)] * LOG2E - highest[h] * scale)
                for h in T.Parallel(64):
                    factor[h] = T.if_then_else(total[h] == 0.0, 0.0, 1.0 / (total[h] + before[h]))
                    part[h] = (T.log2(total[h]) + highest[h] * scale) * LN2
                for h in T.Parallel(64):
                    if first + h < heads:
                        Lse[row, first + h] = T.if_then_else(total[h] == 0.0, -T.infinity("float32"), part[h])
                if right > 0:
                    # The second consumer must have read the last block's factors before these replace them.
                    T.barrier_wait(p_free, (T.ceildiv(length, BLOCK) & 1) ^ 1)
                    T.copy(factor, factor_sh)
                    T.barrier_arrive(finished)
                for h, d in T.Parallel(64, left):
                    out_left[h, d] = out_left[h, d] * factor[h]
                T.copy(out_left, q_rank[:, :left])
                T.copy(q_rank[:, :left], Out[row, first : first + 64, :left], disable_tma=True)
            elif thread < 256:
                T.set_max_nreg(168, 1)
                if right > 0:
                    T.fill(out_right, 0)
                    for i in T.serial(T.ceildiv(length, BLOCK)):
                        s = i % 2
                        T.barrier_wait(full[s], (i // 2) & 1)
                        T.barrier_wait(p_full, i & 1)
                        T.fence_proxy_async()
                        for h, d in T.Parallel(64, right):
                            out_right[h, d] = out_right[h, d] * factor_sh[h]
                        T.wgmma_gemm(p_sh, kv_rank[s, :, left:], out_right)
                        T.wait_wgmma(0)
                        T.barrier_arrive(p_free)
                        T.barrier_arrive(free[s])
                    T.barrier_wait(finished, 0)  # q_rank is free from here on: it becomes the output's stage
                    for h, d in T.Parallel(64, right):
                        out_right[h, d] = out_right[h, d] * factor_sh[h]
                    T.copy(out_right, q_rank[:, left:])
                    T.copy(q_rank[:, left:], Out[row, first : first + 64, left:], disable_tma=True)
            else:
                T.set_max_nreg(80, 0)
                producer = thread - 256
                load_queries(Q, q_rank, q_rope, row, first, heads, producer, q_full, 64, rank, rope)
                gather(
                    KV,
                    Indices,
                    kv_rank,
                    kv_rope,
                    valid,
                    row,
                    length,
                    tokens,
                    producer,
                    full,
                    free,
                    rank,
                    rope,
                )

    return sparse_mla_many_heads
