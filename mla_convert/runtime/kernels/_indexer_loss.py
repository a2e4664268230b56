"""The main program of ``indexer_loss``: the indexer's distribution over listed keys, the loss, and the gradients.

A thread block has a query, and walks the blocks of its list that hold a valid entry
(``_sparse_mla_backward_rows.blocks_of``) twice, with keys on the M side (64 a step) and heads on the N side. The
first warpgroup computes scores: in the first walk it leaves the logits in memory, whose softmax is then known; in the
second it turns scores above 0 into their gradients, dS = dlogits * weight, and adds up dQ^T += K^T dS. The second
warpgroup gathers the rows of keys, some blocks ahead, and computes dK = dS Q, which it adds to the listed keys' rows
in float32: that is what bounds the second walk, so the scores of the next block are beside it.

With ``slots``, rows of dK are stored, one for each entry of a list, instead of being added to the keys' rows;
``_sparse_mla_backward_rows.sum_slots`` sums those in a fixed order.

Shapes: S queries, T keys, I indexer heads, J dims (64 or 128), K entries on a list.
"""
# Annotations here are TileLang's, read at run time: no ``from __future__ import annotations``, and mypy is told.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, valid-type"

from typing import Any

import tilelang.language as T  # noqa: N812

from mla_convert.runtime.kernels._accumulators import SCATTER, accumulator_place
from mla_convert.runtime.kernels._common import LN2, LOG2E
from mla_convert.runtime.kernels._indexer_logits import HEAD_SUMS
from mla_convert.runtime.kernels._indexer_loss_target import BLOCK, LOWEST

STAGES = 4
AHEAD = STAGES - 1  # blocks that the second role copies ahead of the one whose dK it adds up
THREADS = 128  # of each role

# As in HEAD_SUMS, a thread has columns 8 i + 2 (lane % 4) and the one behind, of two rows eight apart.
SCORE_GRADIENTS = """
// Scores become their gradients, and weight_gradients, of the thread's columns, grow by those of its two rows.
template <int kColumns>
static __device__ __forceinline__ void score_gradients(
    float* acc, const float* weights, float* weight_gradients, float low, float high) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int c = i / 4 * 2 + i % 2;
    const float d_logit = i % 4 < 2 ? low : high;
    weight_gradients[c] = fmaf(relu_that_keeps_nan(acc[i]), d_logit, weight_gradients[c]);
    acc[i] = acc[i] <= 0.f ? 0.f : d_logit * weights[c];
  }
}
"""


def loss_and_gradients(columns: int, width: int, dtype: str, slots: bool) -> Any:
    """The loss of each query, dQ and dWeights, and dK added to keys (or, with ``slots``, stored for each entry).

    ``Target`` need not be normalised. ``wanted`` 0 leaves the gradients out.
    """
    queries, tokens, heads, entries, blocks, rows = T.dynamic("queries, tokens, heads, entries, blocks, rows")
    held = columns // 4  # columns of a thread
    halves = width // 64
    warps = THREADS // 32
    scatter = f"mla_scatter<{'false' if slots else 'true'}>"

    @T.macro
    def gather(
        K, Indices, index, k_sh, listed, full, free, step, begin, row, length, entries, tokens, thread
    ):
        """Copy the rows of a block; one that is not valid becomes zeros, and is listed as -1."""
        s = step % STAGES
        T.barrier_wait(free[s], ((step // STAGES) & 1) ^ 1)
        for r in T.unroll(4):
            j = r * 16 + thread // 8
            ok = (index[r] >= 0) & (index[r] < tokens)
            if thread % 8 == 0:
                if slots:
                    listed[step % (2 * STAGES), j] = T.if_then_else(ok, row * entries + begin + j, -1)
                else:
                    listed[step % (2 * STAGES), j] = T.if_then_else(ok, index[r], -1)
            for u in T.unroll(halves):
                T.ptx_cp_async(
                    T.access_ptr(k_sh[s, j, u * 64 + thread % 8 * 8], "w", 8),
                    T.access_ptr(K[T.if_then_else(ok, index[r], 0), u * 64 + thread % 8 * 8], "r", 8),
                    8,
                    ok,
                )
        T.cp_async_barrier_noinc(full[s])
        T.barrier_arrive(full[s])  # in release order, for what is listed

    @T.macro
    def fetch(Indices, index, row, begin, length, thread):
        """The entries of a block whose rows this thread helps to copy: eight threads a row."""
        for r in T.unroll(4):
            index[r] = -1
            if begin + r * 16 + thread // 8 < length:
                index[r] = Indices[row, begin + r * 16 + thread // 8]

    @T.macro
    def multiply(k_sh, q_sh, full, step, score):
        T.barrier_wait(full[step % STAGES], (step // STAGES) & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(k_sh[step % STAGES, :, :], q_sh, score, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)

    @T.macro
    def across(part, number, scratch, thread):
        """Sum ``number`` values over all threads; every thread has the result."""
        for n in T.unroll(number):
            for b in T.unroll(5):
                part[n] = part[n] + T.shfl_xor(part[n], 1 << b)
        if thread % 32 == 0:
            for n in T.unroll(number):
                scratch[n, thread // 32] = part[n]
        T.sync_threads(8, THREADS)
        for n in T.unroll(number):
            part[n] = 0.0
            for w in T.unroll(warps):
                part[n] = part[n] + scratch[n, w]

    @T.macro
    def add_columns(half, q_sh, ds_sh, dk, listed, ds_free, i, turn, DK):
        """64 columns of dK: product and additions."""
        T.wgmma_gemm(
            ds_sh[i % 2, :, :],
            q_sh[:, half * 64 : half * 64 + 64],
            dk,
            transpose_A=True,
            clear_accum=True,
        )
        T.wait_wgmma(0)
        if half == halves - 1:
            T.barrier_arrive(ds_free[i % 2])
        T.call_extern(
            "handle",
            scatter,
            T.access_ptr(DK[0, half * 64], "rw", 64),
            T.access_ptr(dk[0, 0], "rw", 32),
            T.access_ptr(listed[turn, 0], "r", BLOCK),
            width,
        )

    @T.prim_func
    def indexer_loss_program(
        Q: T.Tensor([queries, heads, width], dtype),
        K: T.Tensor([tokens, width], dtype),
        Weights: T.Tensor([queries, heads], "float32"),
        Indices: T.Tensor([queries, entries], "int32"),
        Lengths: T.Tensor([queries], "int32"),
        Blocks: T.Tensor([queries, blocks], "int32"),
        Target: T.Tensor([queries, entries], "float32"),
        wanted: T.int32,
        Logits: T.Tensor([queries, entries], "float32"),
        Loss: T.Tensor([queries], "float32"),
        DQ: T.Tensor([queries, heads, width], dtype),
        DWeights: T.Tensor([queries, heads], "float32"),
        DK: T.Tensor([rows, width], "float32"),
    ):
        with T.Kernel(queries, threads=2 * THREADS, prelude=SCATTER + HEAD_SUMS + SCORE_GRADIENTS) as row:
            T.annotate_min_blocks_per_sm(2)
            q_sh = T.alloc_shared([columns, width], dtype)
            k_sh = T.alloc_shared([STAGES, BLOCK, width], dtype)
            ds_sh = T.alloc_shared([2, columns, BLOCK], dtype)
            # A slow warp may still add up what a fast one has overtaken, so it must outlive the block of keys.
            listed = T.alloc_shared([2 * STAGES, BLOCK], "int32", scope="shared")
            scratch = T.alloc_shared([3, warps], "float32", scope="shared")
            dw_sh = T.alloc_shared([warps, columns], "float32", scope="shared")
            score = T.alloc_fragment([BLOCK, columns], "float32")
            ds = T.alloc_fragment([BLOCK, columns], dtype)
            dq = T.alloc_fragment([width, columns], "float32")
            dk = T.alloc_fragment([BLOCK, 64], "float32")
            # TileLang cannot tell from a call to its own C++ how a fragment lies: as wgmma leaves it.
            T.annotate_layout(
                {acc: T.Fragment(acc.shape, forward_fn=accumulator_place) for acc in (score, dk)}
            )
            index = T.alloc_local([4], "int32")
            weights = T.alloc_local([held], "float32")
            dw = T.alloc_local([held], "float32")
            sums = T.alloc_local([1], "float32")
            part = T.alloc_local([3], "float32")
            logits = T.alloc_local([2], "float32")
            targets = T.alloc_local([2], "float32")
            d_logits = T.alloc_local([2], "float32")
            length = T.alloc_var("int32")
            count = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            behind = T.alloc_var("int32")
            following = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            top = T.alloc_var("float32")
            share = T.alloc_var("float32")
            norm = T.alloc_var("float32")
            q_full = T.alloc_barrier([THREADS])
            full = T.alloc_barrier([2 * THREADS] * STAGES)
            free = T.alloc_barrier([THREADS] * STAGES)
            ds_full = T.alloc_barrier([THREADS] * 2)
            ds_free = T.alloc_barrier([THREADS] * 2)

            thread = T.get_thread_binding()
            length = Lengths[row]
            count = Blocks[row, 0]
            steps = count * (1 + wanted)
            if thread < THREADS:
                T.set_max_nreg(168, 1)
                place = thread // 32 * 16 + thread % 32 // 4  # this thread's upper row; the lower is 8 behind
                for c in T.unroll(held):
                    h = c // 2 * 8 + thread % 4 * 2 + c % 2
                    weights[c] = T.if_then_else(h < heads, Weights[row, T.min(h, heads - 1)], 0.0)
                    dw[c] = 0.0
                T.barrier_wait(q_full[0], 0)
                top = LOWEST
                behind = 0
                following = Blocks[row, 1]
                for i in T.serial(count):
                    begin = following * BLOCK
                    following = Blocks[row, T.min(2 + i, count)]
                    multiply(k_sh, q_sh, full, i, score)
                    T.call_extern(
                        "handle",
                        f"head_sums<{columns}, {columns}>",
                        T.access_ptr(sums[0], "w", 1),
                        T.access_ptr(score[0, 0], "rw", columns // 2),
                        T.access_ptr(weights[0], "r", held),
                    )
                    if listed[i % (2 * STAGES), place + thread % 2 * 8] < 0:
                        sums[0] = -T.infinity("float32")
                    T.barrier_arrive(free[i % STAGES])
                    top = T.max(top, sums[0])
                    if (thread % 4 < 2) & (begin + place + thread % 2 * 8 < length):
                        Logits[row, begin + place + thread % 2 * 8] = sums[0]
                    for e in T.serial(T.ceildiv(begin - behind, THREADS)):  # blocks without a valid entry
                        if behind + e * THREADS + thread < begin:
                            Logits[row, behind + e * THREADS + thread] = -T.infinity("float32")
                    behind = begin + BLOCK

                # The softmax of the logits, and the loss with the target's sum Z: sum t / Z (log(t / Z) - log p).
                for b in T.unroll(5):
                    top = T.max(top, T.shfl_xor(top, 1 << b))
                if thread % 32 == 0:
                    scratch[0, thread // 32] = top
                T.sync_threads(8, THREADS)
                for w in T.unroll(warps):
                    top = T.max(top, scratch[0, w])
                T.sync_threads(8, THREADS)
                for n in T.unroll(3):
                    part[n] = 0.0
                for e in T.serial(T.ceildiv(length, 4 * THREADS)):
                    for u in T.unroll(4):
                        entry = (e * 4 + u) * THREADS + thread
                        if entry < length:
                            part[0] = part[0] + T.exp2((Logits[row, entry] - top) * LOG2E)
                            part[1] = part[1] + Target[row, entry]
                            if Target[row, entry] != 0.0:
                                part[2] = part[2] + Target[row, entry] * (
                                    T.log2(Target[row, entry]) * LN2 - (Logits[row, entry] - top)
                                )
                across(part, 3, scratch, thread)
                share = T.if_then_else(part[1] == 0.0, 0.0, 1.0 / part[1])
                norm = 1.0 / part[0]
                if thread == 0:
                    Loss[row] = T.if_then_else(
                        (part[1] == 0.0) | (length == 0),
                        0.0,
                        part[2] * share + (T.log2(part[0]) - T.log2(part[1])) * LN2,
                    )

                if wanted != 0:
                    T.fill(dq, 0)
                    following = Blocks[row, 1]
                    for i in T.serial(count):
                        begin = following * BLOCK
                        following = Blocks[row, T.min(2 + i, count)]
                        for r in T.unroll(2):
                            logits[r] = -T.infinity("float32")
                            targets[r] = 0.0
                            if begin + place + r * 8 < length:
                                logits[r] = Logits[row, begin + place + r * 8]
                                targets[r] = Target[row, begin + place + r * 8]
                        multiply(k_sh, q_sh, full, count + i, score)
                        for r in T.unroll(2):
                            d_logits[r] = T.exp2((logits[r] - top) * LOG2E) * norm - targets[r] * share
                        T.call_extern(
                            "handle",
                            f"score_gradients<{columns}>",
                            T.access_ptr(score[0, 0], "rw", columns // 2),
                            T.access_ptr(weights[0], "r", held),
                            T.access_ptr(dw[0], "rw", held),
                            d_logits[0],
                            d_logits[1],
                        )
                        T.copy(score, ds)
                        T.barrier_wait(ds_free[i % 2], ((i // 2) & 1) ^ 1)
                        for j, h in T.Parallel(BLOCK, columns):
                            ds_sh[i % 2, h, j] = ds[j, h]
                        T.fence_proxy_async()
                        T.barrier_arrive(ds_full[i % 2])
                        T.sync_threads(8, THREADS)
                        T.wgmma_gemm(
                            k_sh[(count + i) % STAGES, :, :],
                            ds_sh[i % 2, :, :],
                            dq,
                            transpose_A=True,
                            transpose_B=True,
                        )
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[(count + i) % STAGES])

                    for c in T.unroll(held):
                        for b in T.unroll(3):
                            dw[c] = dw[c] + T.shfl_xor(dw[c], 4 << b)
                    if thread % 32 < 4:
                        for c in T.unroll(held):
                            dw_sh[thread // 32, c // 2 * 8 + thread % 4 * 2 + c % 2] = dw[c]
                    # The other role's products have read Q when it has let go of the last gradients of scores.
                    if count > 0:
                        T.barrier_wait(ds_free[(count - 1) % 2], ((count - 1) // 2) & 1)
                    T.sync_threads(8, THREADS)
                    if thread < heads:
                        sums[0] = 0.0
                        for w in T.unroll(warps):
                            sums[0] = sums[0] + dw_sh[w, thread]
                        DWeights[row, thread] = sums[0]
                    for d, h in T.Parallel(width, columns):
                        q_sh[h, d] = dq[d, h]
                    T.sync_threads(8, THREADS)
                    for h, d in T.Parallel(columns, width):
                        if h < heads:
                            DQ[row, h, d] = q_sh[h, d]
            else:
                T.set_max_nreg(88, 0)
                other = thread - THREADS
                # As if the first block held a valid entry, as most do: so nothing here waits for another load.
                fetch(Indices, index, row, 0, entries, other)
                begin = Blocks[row, 1] * BLOCK
                following = Blocks[row, T.min(T.max(count, 1), 2)] * BLOCK
                if begin > 0:
                    fetch(Indices, index, row, begin, length, other)
                for r in T.unroll(4):
                    if begin + r * 16 + other // 8 >= length:
                        index[r] = -1
                for r in T.unroll(T.ceildiv(columns, 16)):
                    h = r * 16 + other // 8
                    for u in T.unroll(halves):
                        T.ptx_cp_async(
                            T.access_ptr(q_sh[h, u * 64 + other % 8 * 8], "w", 8),
                            T.access_ptr(Q[row, T.min(h, heads - 1), u * 64 + other % 8 * 8], "r", 8),
                            8,
                            h < heads,
                        )
                T.cp_async_barrier_noinc(q_full[0])
                T.barrier_wait(q_full[0], 0)
                for step in T.serial(steps + AHEAD):
                    if step < steps:
                        gather(
                            K,
                            Indices,
                            index,
                            k_sh,
                            listed,
                            full,
                            free,
                            step,
                            begin,
                            row,
                            length,
                            entries,
                            tokens,
                            other,
                        )
                        fetch(
                            Indices,
                            index,
                            row,
                            following,
                            length,
                            other,
                        )
                        begin = following
                        place = T.if_then_else(step + 2 < count, step + 2, T.min(step + 2 - count, count - 1))
                        following = Blocks[row, 1 + place] * BLOCK
                    if step >= count + AHEAD:
                        i = step - AHEAD - count
                        T.barrier_wait(ds_full[i % 2], (i // 2) & 1)
                        T.barrier_wait(full[(step - AHEAD) % STAGES], ((step - AHEAD) // STAGES) & 1)
                        T.fence_proxy_async()
                        add_columns(0, q_sh, ds_sh, dk, listed, ds_free, i, (step - AHEAD) % (2 * STAGES), DK)
                        if halves > 1:
                            add_columns(
                                1, q_sh, ds_sh, dk, listed, ds_free, i, (step - AHEAD) % (2 * STAGES), DK
                            )

    return indexer_loss_program
