"""The main program of ``sparse_mla_backward``: five products for each query, tile of heads and block of its list.

It runs a thread block for each query, tile of 64 heads and part of the list, with heads on the M side. Shared memory
holds Q, dO, one block of 64 gathered rows, P and dS of 64 x 64, and nothing more fits. Three warpgroups share a
block's work, so that the additions to dKV, which bound the whole, never wait for anything but each other:

- the first computes S = Q K^T and dP = dO V^T, from them P and dS, and some columns of dQ += dS K;
- the second gathers the rows and computes the other columns of dQ. When both have read a block's rows, it gathers
  the next one's;
- the third computes dKV = dS^T Q + P^T dO, transposed, in two pairs of accumulators, so that one is added to memory
  while the other's product runs; P and dS of the next block take their place when its last product has ended.

A warpgroup's registers are 24 beside its accumulators and 4 to 8 that the compiler leaves alone, and the three have
504 a thread together: 8 columns of dQ that the first takes from the second's panel are what makes them fit.

With ``slots``, rows of dKV are stored, one for each entry of a list and tile of heads, instead of being added to
the tokens' rows; ``_sparse_mla_backward_rows.sum_slots`` sums those in a fixed order. With ``split``, several thread
blocks share a list, and ``sum_parts`` sums their float32 parts of dQ.

Shapes: S queries, T tokens, H heads, E = rank + rope (one cached token), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812
from tilelang.layout import make_full_bank_swizzled_layout

from mla_convert.runtime.kernels._common import LOG2E
from mla_convert.runtime.kernels._sparse_mla import BLOCK
from mla_convert.runtime.kernels._sparse_mla_backward_cuda import SOURCE
from mla_convert.runtime.kernels._sparse_mla_backward_rows import NOTHING

REGISTERS = (192, 216, 96)
EDGE = 8


def accumulator_place(row: Any, column: Any) -> tuple[Any, Any]:
    """Thread and register of an element of a 64-row wgmma accumulator, or of an A operand in registers."""
    return (
        row // 16 * 32 + row % 8 * 4 + column % 8 // 2,
        column // 8 * 4 + row % 16 // 8 * 2 + column % 2,
    )


def backward(tiles: int, rank: int, rope: int, dtype: str, slots: bool, split: bool) -> Any:
    """dQ, and dKV added to tokens in float32 (or, with ``slots``, stored for each entry of each list)."""
    width = rank + rope
    left = max(rank * 3 // 512 * 64, 64)  # the first warpgroup's panels of dQ; it has S and dP as well
    behind = rank - left - 64  # the panels behind the one that both share
    queries, tokens, heads, entries, rows, dq_rows = T.dynamic(
        "queries, tokens, heads, entries, rows, dq_rows"
    )
    kind = {"bfloat16": "tl::DataType::kBFloat16", "float16": "tl::DataType::kFloat16"}[dtype]

    def call(function: str, *arguments):
        T.evaluate(T.call_extern("handle", function, *arguments))

    def load(Source, row, first, heads, base, to, columns):
        """Copy 64 heads of one query, [base, base + columns) of each, in the order of ``column_order``."""
        fours = columns // 128 * 128
        for start, size, step in ((0, fours, 4), (fours, columns - fours, 2)):
            if size:
                call(
                    f"mla_load_heads<{size}, {step}>",
                    T.access_ptr(to[0, start], "w", 64 * size),
                    T.access_ptr(Source[row, first, base + start], "r", size),
                    heads - first,
                    Source.shape[2] * 2,
                )

    def fetch(Indices, row, begin, end):
        return T.call_extern("int32", "mla_fetch", T.access_ptr(Indices[row, 0], "r", BLOCK), begin, end)

    def copy_panels(KV, column, to, to_column, panels, entry, tokens):
        call(
            f"mla_gather<{panels}, {width}>",
            T.access_ptr(to[0, to_column], "w", panels * 64 * BLOCK),
            T.access_ptr(KV[0, column], "r", width),
            entry,
            tokens,
        )

    @T.macro
    def gather(KV, entry, kv_rank, kv_rope, target, s, tokens, slot, full):
        """Copy the rows of a block; one that is not valid becomes zeros, and its target -1."""
        call("mla_targets", T.access_ptr(target[s, 0], "w", BLOCK), entry, tokens, slot if slots else -1)
        copy_panels(KV, 0, kv_rank, 0, left // 64, entry, tokens)
        T.cp_async_barrier_noinc(full[0])
        copy_panels(KV, left, kv_rank, left, (rank - left) // 64, entry, tokens)
        if rope > 0:
            copy_panels(KV, rank, kv_rope, 0, 1, entry, tokens)
        T.cp_async_barrier_noinc(full[1])
        T.barrier_arrive(full[1])  # in release order, for the targets

    def add(acc, ds, kv_sh, column, columns):
        function, place = (
            ("shared", ds.shape[0] * 64) if ds.scope() != "local.fragment" else ("registers", 32)
        )
        call(
            f"mla_add_{function}<{kind}, {columns}>",
            T.access_ptr(acc[0], "rw", columns // 2),
            T.access_ptr(ds[0, 0], "r", place),
            T.access_ptr(kv_sh[0, column], "r", 64 * BLOCK),
        )

    def store(DQ, row, first, heads, accumulators):
        """Accumulators of dQ to memory, each with its first position and their number."""
        for acc, position, positions in accumulators:
            chunk = 0
            while chunk < positions // 8:
                panel, inside = divmod(position // 8 + chunk, 8)
                alone = panel >= rank // 128 * 2
                if not (alone or inside or panel % 2) and positions // 8 - chunk >= 16:
                    function, column, chunks = "mla_store_fours", panel * 64, 16
                else:
                    chunks = min(8 - inside, positions // 8 - chunk)
                    function = f"mla_store<{2 if alone else 4}, {inside}, {chunks}>"
                    column = panel * 64 if alone else panel // 2 * 128 + panel % 2 * 2
                call(
                    function,
                    T.access_ptr(DQ[row, first, column], "w", width),
                    T.access_ptr(acc[chunk * 4], "r", chunks * 4),
                    heads - first,
                    width,
                )
                chunk += chunks

    @T.prim_func
    def sparse_mla_backward_program(
        Q: T.Tensor([queries, heads, width], dtype),
        KV: T.Tensor([tokens, width], dtype),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        parts: T.int32,
        DOut: T.Tensor([queries, heads, rank], dtype),
        Lse2: T.Tensor([queries, heads], "float32"),
        Share: T.Tensor([queries, heads], "float32"),
        Offset: T.Tensor([queries, heads], "float32"),
        scale: T.float32,
        DQ: T.Tensor([dq_rows, heads, width], "float32" if split else dtype),
        DKV: T.Tensor([rows, width], "float32"),
    ):
        with T.Kernel(queries * tiles * parts, threads=384) as block:
            T.import_source(SOURCE)
            q_rank = T.alloc_shared([64, rank], dtype)
            q_rope = T.alloc_shared([64, 64], dtype)
            do_sh = T.alloc_shared([64, rank], dtype)
            kv_rank = T.alloc_shared([BLOCK, rank], dtype)
            kv_rope = T.alloc_shared([BLOCK, 64], dtype)
            p_sh = T.alloc_shared([64, BLOCK], dtype)
            ds_sh = T.alloc_shared([64, BLOCK], dtype)
            target = T.alloc_shared([3, BLOCK], "int32", scope="shared")
            score = T.alloc_fragment([64, BLOCK], "float32")
            dp = T.alloc_fragment([64, BLOCK], "float32")
            p = T.alloc_fragment([64, BLOCK], dtype)
            ds = T.alloc_fragment([64, BLOCK], dtype)
            lse2 = T.alloc_fragment([64], "float32")
            share = T.alloc_fragment([64], "float32")
            offset = T.alloc_fragment([64], "float32")
            dq_left = T.alloc_local([left // 2], "float32")
            dq_edge = T.alloc_local([EDGE // 2], "float32")
            dq_rest = T.alloc_local([(64 - EDGE) // 2], "float32")
            dq_behind = T.alloc_local([max(behind, 64) // 2], "float32")
            dq_rope = T.alloc_local([32], "float32")
            # TileLang cannot tell from a call to C++ how operands lie: fragments as wgmma has them, tiles in panels.
            T.annotate_layout({ds: T.Fragment(ds.shape, forward_fn=accumulator_place)})
            T.annotate_layout(
                {
                    tile: make_full_bank_swizzled_layout(tile)
                    for tile in (q_rank, q_rope, do_sh, kv_rank, kv_rope, p_sh, ds_sh)
                }
            )
            row = T.alloc_var("int32")
            first = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            count = T.alloc_var("int32")
            entry = T.alloc_var("int32")
            q_full = T.alloc_barrier([256])
            full = T.alloc_barrier([128, 256])
            ds_full = T.alloc_barrier([128])
            kv_free = T.alloc_barrier([256])
            p_free = T.alloc_barrier([128])

            thread = T.get_thread_binding()
            row = block // parts // tiles
            first = block // parts % tiles * 64
            end = Lengths[row]
            count = T.ceildiv(T.ceildiv(end, BLOCK), parts)  # blocks of a part
            begin = T.min(block % parts * count * BLOCK, end)
            end = T.min(begin + count * BLOCK, end)
            count = T.ceildiv(end - begin, BLOCK)
            slot = block // parts * entries + begin
            if thread < 128:
                T.set_max_nreg(REGISTERS[0], 1)
                for h in T.Parallel(64):
                    lse2[h] = NOTHING
                    share[h] = 0.0
                    offset[h] = 0.0
                    if first + h < heads:
                        lse2[h] = Lse2[row, T.min(first + h, heads - 1)]
                        share[h] = Share[row, T.min(first + h, heads - 1)]
                        offset[h] = Offset[row, T.min(first + h, heads - 1)]
                T.fill(dq_left, 0)
                T.fill(dq_edge, 0)
                T.barrier_wait(q_full[0], 0)
                for i in T.serial(count):
                    T.barrier_wait(full[0], i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(
                        q_rank[:, :left], kv_rank[:, :left], score, transpose_B=True, clear_accum=True
                    )
                    T.barrier_wait(full[1], i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_rank[:, left:], kv_rank[:, left:], score, transpose_B=True)
                    if rope > 0:
                        T.wgmma_gemm(q_rope, kv_rope, score, transpose_B=True)
                    T.wgmma_gemm(do_sh, kv_rank, dp, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(1)
                    # Without a branch, since one around registers would wait for the product in flight.
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.if_then_else(
                            target[i % 3, j] >= 0, score[h, j], -T.infinity("float32")
                        )
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = T.exp2(score[h, j] * (scale * LOG2E) - lse2[h])
                    T.wait_wgmma(0)
                    for h, j in T.Parallel(64, BLOCK):
                        dp[h, j] = score[h, j] * (dp[h, j] * (share[h] * scale) + offset[h])
                    for h, j in T.Parallel(64, BLOCK):
                        score[h, j] = score[h, j] * share[h]
                    T.copy(score, p)
                    T.copy(dp, ds)
                    T.barrier_wait(p_free[0], (i & 1) ^ 1)
                    T.copy(p, p_sh)
                    T.copy(ds, ds_sh)
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_full[0])
                    add(dq_left, ds, kv_rank, 0, left)
                    add(dq_edge, ds, kv_rank, left, EDGE)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free[0])
                row = row * parts + block % parts
                store(DQ, row, first, heads, ((dq_left, 0, left), (dq_edge, left, EDGE)))
            elif thread < 256:
                T.set_max_nreg(REGISTERS[1], 1)
                entry = fetch(Indices, row, begin, end)
                if count > 0:
                    gather(KV, entry, kv_rank, kv_rope, target, 0, tokens, slot, full)
                load(Q, row, first, heads, 0, q_rank, rank)
                if rope > 0:
                    load(Q, row, first, heads, rank, q_rope, rope)
                T.fence_proxy_async()
                T.barrier_arrive(q_full[0])
                T.fill(dq_rest, 0)
                if behind > 0:
                    T.fill(dq_behind, 0)
                if rope > 0:
                    T.fill(dq_rope, 0)
                for i in T.serial(count):
                    entry = fetch(Indices, row, begin + (i + 1) * BLOCK, end)
                    T.barrier_wait(ds_full[0], i & 1)
                    T.fence_proxy_async()
                    add(dq_rest, ds_sh, kv_rank, left + EDGE, 64 - EDGE)
                    if behind > 0:
                        add(dq_behind, ds_sh, kv_rank, left + 64, behind)
                    if rope > 0:
                        add(dq_rope, ds_sh, kv_rope, 0, rope)
                    T.wait_wgmma(0)
                    T.barrier_arrive(kv_free[0])
                    T.barrier_wait(kv_free[0], i & 1)
                    if i + 1 < count:
                        gather(
                            KV,
                            entry,
                            kv_rank,
                            kv_rope,
                            target,
                            (i + 1) % 3,
                            tokens,
                            slot + (i + 1) * BLOCK,
                            full,
                        )
                row = row * parts + block % parts
                second = [(dq_rest, left + EDGE, 64 - EDGE)]
                if behind > 0:
                    second += [(dq_behind, left + 64, behind)]
                if rope > 0:
                    second += [(dq_rope, rank, rope)]
                store(DQ, row, first, heads, second)
            else:
                T.set_max_nreg(REGISTERS[2], 0)
                load(DOut, row, first, heads, 0, do_sh, rank)
                T.fence_proxy_async()
                T.barrier_arrive(q_full[0])
                T.barrier_wait(q_full[0], 0)
                for i in T.serial(count):
                    T.barrier_wait(ds_full[0], i & 1)
                    T.fence_proxy_async()
                    call(
                        f"mla_keys<{'false' if slots else 'true'}, {kind}, {rank}, {rope}>",
                        T.access_ptr(DKV[0, 0], "rw", width),
                        T.access_ptr(target[i % 3, 0], "r", BLOCK),
                        T.access_ptr(p_sh[0, 0], "r", 64 * BLOCK),
                        T.access_ptr(ds_sh[0, 0], "r", 64 * BLOCK),
                        T.access_ptr(q_rank[0, 0], "r", 64 * rank),
                        T.access_ptr(q_rope[0, 0], "r", 64 * 64),
                        T.access_ptr(do_sh[0, 0], "r", 64 * rank),
                        p_free[0],
                    )

    return sparse_mla_backward_program
