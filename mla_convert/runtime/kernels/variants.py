"""Which compiled kernels a block of attention may call for: what can be built before the first call.

Rows of a call, head counts and sizes choose among few programs each; ``tests/test_warmup_gpu.py`` sees to it that
running a block compiles nothing that is not listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from mla_convert.errors import CannotError
from mla_convert.runtime import kv_cache
from mla_convert.runtime.kernels import (
    dense_mla,
    indexer_logits,
    indexer_loss,
    sparse_mla,
    sparse_mla_backward,
    topk,
)
from mla_convert.runtime.kernels._common import DTYPES
from mla_convert.runtime.kernels._sparse_mla_backward_rows import slot_dtype
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.runtime.tokens import MOST_DECODED


@dataclass(frozen=True)
class Variant:
    """A kernel by its name; ``build`` compiles it or finds it in the cache, and can be sent to another process."""

    name: str
    build: Callable[[], Any]


def variants(spec: AttentionSpec, dtype: torch.dtype) -> tuple[Variant, ...]:
    """The kernels of a block: prefill, decode, selection and, for sparse attention, gradients and the indexer's loss.

    Args:
        spec: The block as one rank runs it: ``AttentionSpec.shard`` gives it.
        dtype: bfloat16 or float16.

    Raises:
        CannotError: The kernels do not take the block's sizes.
    """
    q_SHE = torch.empty(1, spec.heads, spec.kv_dim, dtype=dtype, device="meta")
    if reason := sparse_mla.unsupported(q_SHE, spec.rank, 1.0):
        raise CannotError(f"There are no kernels for this attention: {reason}.")
    found = [*_sparse(spec, dtype), *_dense(spec, dtype), *_backward(spec, dtype)]
    if spec.indexer is not None:
        found += _selection(spec.indexer.heads, spec.indexer.dim, dtype)
        found += _loss(spec, spec.indexer.heads, spec.indexer.dim, dtype)
    return tuple(found)


def _sparse(spec: AttentionSpec, dtype: torch.dtype) -> Iterator[Variant]:
    rank, rope = sparse_mla.native(spec.heads, spec.rank, spec.rope)
    for split in (False, True) if spec.heads > sparse_mla.FEW else (False,):
        name = f"sparse attention: {spec.heads} heads, {rank} + {rope} dims" + (
            ", few queries" if split else ""
        )
        yield Variant(name, partial(sparse_mla.compile_for, spec.heads, rank, rope, dtype, split))
    if spec.heads <= sparse_mla.PAIRED:
        name = f"sparse attention: {spec.heads} heads, {rank} + {rope} dims, many queries"
        yield Variant(name, partial(sparse_mla.pairs_kernel, rank, rope, dtype))
    yield Variant(f"sparse attention: merge, {rank} dims", partial(sparse_mla.combine_kernel, rank, dtype))


def _dense(spec: AttentionSpec, dtype: torch.dtype) -> Iterator[Variant]:
    yield Variant("dense attention: schedule", dense_mla.plan_kernel)
    is_fp8 = (spec.rank, spec.rope) == (kv_cache.RANK, kv_cache.ROPE) and dtype == torch.bfloat16
    rows_of_steps = [tokens * spec.heads for tokens in range(1, MOST_DECODED + 1)]
    for tile in sorted({dense_mla.tile_rows(rows) for rows in (*rows_of_steps, dense_mla.FEW + 1)}):
        rank, rope = dense_mla.native(tile, spec.rank, spec.rope)
        name = f"dense attention: {tile} rows, {rank} + {rope} dims"
        yield Variant(name, partial(dense_mla.compile_for, tile, rank, rope, dtype))
        if tile > dense_mla.FEW:
            build = partial(dense_mla.compile_for, tile, rank, rope, dtype, blocks=True)
            yield Variant(f"{name}, whole blocks", build)
        for parts in ("few", "some", "many"):
            merge = partial(dense_mla.combine_kernel, tile, rank, dtype, parts)
            yield Variant(f"dense attention: merge of {tile} rows, {rank} dims, {parts} parts", merge)
    if is_fp8:
        kinds = {(dense_mla.tile_rows(rows, True), dense_mla.paired(rows, True)) for rows in rows_of_steps}
        for tile, pair in sorted(kinds):
            build = partial(dense_mla.compile_for, tile, spec.rank, spec.rope, dtype, True, pair=pair)
            yield Variant(f"dense attention: {tile} rows, FP8 cache" + (", in pairs" if pair else ""), build)


def _backward(spec: AttentionSpec, dtype: torch.dtype) -> Iterator[Variant]:
    q_SHE = torch.empty(1, spec.heads, spec.kv_dim, dtype=dtype, device="meta")
    if sparse_mla_backward.unsupported(q_SHE, spec.rank, 1.0):
        return
    rank, rope = sparse_mla_backward.native(spec.rank, spec.rope)
    yield Variant("gradients: blocks of lists", sparse_mla_backward.blocks_kernel)
    yield Variant(f"gradients: rows, {rank} dims", partial(sparse_mla_backward.prepare_kernel, rank, dtype))
    if sparse_mla_backward.most_sharing(spec.heads) > 1:
        yield Variant("gradients: list lengths", sparse_mla.lengths_kernel)
        yield Variant("gradients: one list of several", sparse_mla_backward.unite_kernel)
    for slots, split in product((False, True), (False, True)):
        name = f"gradients: {rank} + {rope} dims" + (", deterministic" if slots else "")
        main = partial(sparse_mla_backward.compile_for, rank, rope, dtype, slots, split)
        yield Variant(name + (", few queries" if split else ""), main)
    parts = partial(sparse_mla_backward.parts_kernel, rank + rope, dtype)
    yield Variant(f"gradients: sums of parts, {rank + rope} dims", parts)
    sums = partial(sparse_mla_backward.sum_kernel, rank + rope, slot_dtype(DTYPES[dtype]))
    yield Variant(f"gradients: deterministic sums, {rank + rope} dims", sums)


def _selection(heads: int, dim: int, dtype: torch.dtype) -> Iterator[Variant]:
    padded = -(-dim // 8) * 8
    for share in (True, False):
        name = f"indexer: {heads} heads, {dim} dims" + ("" if share else ", few queries")
        yield Variant(name, partial(indexer_logits.compile_for, heads, padded, dtype, share=share))
    for kind in ("whole", "few", "part", "merge"):
        yield Variant(f"top-k: {kind}", partial(topk.compile_for, kind))


def _loss(spec: AttentionSpec, heads: int, dim: int, dtype: torch.dtype) -> Iterator[Variant]:
    q_SIJ = torch.empty(1, heads, dim, dtype=dtype, device="meta")
    q_SHE = torch.empty(1, spec.heads, spec.kv_dim, dtype=dtype, device="meta")
    if indexer_loss.unsupported(q_SIJ, q_SHE):
        return
    width, main_width = indexer_loss.native(dim, spec.kv_dim)
    yield Variant("indexer loss: blocks of lists", sparse_mla_backward.blocks_kernel)
    target = partial(indexer_loss.target_kernel, spec.heads, main_width, dtype)
    yield Variant(f"indexer loss: target of {spec.heads} heads, {main_width} dims", target)
    for slots in (False, True):
        name = f"indexer loss: {heads} heads, {width} dims" + (", deterministic" if slots else "")
        yield Variant(name, partial(indexer_loss.compile_for, heads, width, dtype, slots))
    sums = partial(sparse_mla_backward.sum_kernel, width, "float32")
    yield Variant(f"indexer loss: deterministic sums, {width} dims", sums)
