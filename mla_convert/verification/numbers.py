"""Levels 3, 4 and 6: run the attention. Standard MLA with the original's combined weights against absorbed MLA
with the converted ones, both against float64; the sparse selection; and a known corruption that must be caught.

What the run may rest on: the original's geometry, weights and configuration define the float64 truth, and the
converted checkpoint's own weights and configuration are all that the absorbed path sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime import reference
from mla_convert.runtime.dispatch import Backend
from mla_convert.runtime.reference import Projected, SparseAttention
from mla_convert.verification.result import Check, Errors, LayerResult, Selection
from mla_convert.verification.weights import LoadedBlock

#: The absorbed path may be this much less exact than the standard path is itself.
FACTOR = 4.0
#: Error that is never held against a path, by compute dtype: a few units of rounding.
FLOORS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
MIN_COSINE = 0.9999
#: Differences in a selection that are never held against it: in scores, as a share of the scores' spread, and in
#: number, as a share of all selected keys.
SELECTION_FLOORS = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 1e-2,
}
SELECTION_COUNT_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class NumbersSettings:
    """How to run the attention.

    Attributes:
        tokens: Sequence length.
        rows: How many of its queries to check, spread over the sequence and including the last.
        dtype: Compute dtype of both paths; the truth is float64.
        world: Tensor-parallel ranks, folded on ``devices`` in turn.
        devices: Where to run; the first one holds the truth.
        backend: What runs the absorbed path.
        seed: Seed of the hidden states.
    """

    tokens: int
    rows: int
    dtype: torch.dtype
    world: int
    devices: tuple[torch.device, ...]
    backend: Backend
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Case:
    """Inputs that every path of one block shares."""

    x_SD: Tensor
    positions_S: Tensor
    rows_S: Tensor
    indices_SK: Tensor | None


def check_layer(
    original: LoadedBlock, converted: LoadedBlock, settings: NumbersSettings, indices: Tensor | None
) -> tuple[LayerResult, Tensor | None]:
    """Run one block both ways.

    Args:
        original: The block as the original stores and configures it, in float64.
        converted: The block as the checkpoint under test does, in float64.
        settings: How to run.
        indices: Selection [rows, K] to use where the block shares an indexer; None where it has its own.

    Returns:
        The result, and the selection that the block used, for blocks that share it.
    """
    started = time.monotonic()
    case, selection = _prepare(original, converted, settings, indices)
    truth_head, truth = _standard(original, case, torch.float64)
    standard = measure(*_standard(original.rounded_like(converted), case, settings.dtype), truth_head, truth)
    absorbed_head, absorbed_out = absorbed_ranks(converted, case, settings)
    absorbed = measure(absorbed_head, absorbed_out, truth_head, truth)
    limit = _limit(standard, settings.dtype)
    passed = _within(absorbed, limit) and (selection is None or selection.passed)
    result = LayerResult(
        prefix=original.block.prefix,
        layer=original.block.layer,
        heads=original.spec.heads,
        kind=_kind(original, case),
        tokens=settings.tokens,
        rows=case.rows_S.numel(),
        standard=standard,
        absorbed=absorbed,
        cosine=absorbed.cosine,
        limit=limit,
        passed=passed,
        selection=selection,
        seconds=time.monotonic() - started,
        unmodelled=original.spec.unmodelled,
    )
    return result, case.indices_SK


def _kind(original: LoadedBlock, case: _Case) -> str:
    if case.indices_SK is None:
        return "dense"
    return "sparse" if original.spec.indexer else "sparse, shared selection"


def _prepare(
    original: LoadedBlock, converted: LoadedBlock, settings: NumbersSettings, indices: Tensor | None
) -> tuple[_Case, Selection | None]:
    device = settings.devices[0]
    x_SD = hidden_states(original.block.prefix, settings, original.spec.hidden).to(device, torch.float64)
    positions_S = torch.arange(settings.tokens, device=device)
    rows_S = _spread(settings.tokens, settings.rows).to(device)
    selection = None
    if original.spec.indexer is not None:
        scores = _index_scores(original, x_SD, positions_S, rows_S, reference.indexer_logits)
        indices = reference.select_topk(scores, original.spec.indexer.topk)
        selection = _compare_selection(
            original, converted, scores, indices, x_SD, positions_S, rows_S, settings
        )
    return _Case(x_SD, positions_S, rows_S, indices), selection


def hidden_states(prefix: str, settings: NumbersSettings, hidden: int) -> Tensor:
    """Layer-normed hidden states [tokens, hidden]: standard normal, rounded to the compute dtype.

    The seed comes from the block's prefix, so a run can be repeated layer by layer.
    """
    seed = int.from_bytes(sha256(f"{settings.seed} {prefix}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(settings.tokens, hidden, generator=generator).to(settings.dtype)


def _spread(tokens: int, rows: int) -> Tensor:
    if rows >= tokens:
        return torch.arange(tokens)
    return torch.tensor(sorted({number * (tokens - 1) // max(1, rows - 1) for number in range(rows)}))


def _standard(loaded: LoadedBlock, case: _Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output by head [rows, H, V] and of the block [rows, D], with the combined weight."""
    block = loaded.to(dtype)
    projected = _project(block, case, dtype)
    o_SHV = reference.standard_attention(
        projected, block.w_kv_b, block.spec, indices=case.indices_SK, rows_S=case.rows_S
    )
    return o_SHV, reference.output_projection(o_SHV, block.weights)


def _project(block: LoadedBlock, case: _Case, dtype: torch.dtype) -> Projected:
    projected = reference.project(case.x_SD.to(dtype), block.weights, block.spec, case.positions_S)
    return projected.take_queries(case.rows_S)


def absorbed_ranks(
    loaded: LoadedBlock, case: _Case, settings: NumbersSettings, attention: SparseAttention | None = None
) -> tuple[Tensor, Tensor]:
    """The absorbed path on every tensor-parallel rank: heads side by side, partial outputs summed.

    Each rank holds its own heads of the query, K, V and output projections and all of the latent, as in serving.
    """
    heads, total = [], None
    home = settings.devices[0]
    for rank in range(settings.world):
        device = settings.devices[rank % len(settings.devices)]
        spec = loaded.spec.shard(rank, settings.world)
        weights = loaded.weights.shard(loaded.spec, rank, settings.world).to(settings.dtype, device)
        w_uk, w_uv = (
            reference.shard_rows(w, loaded.spec.heads, rank, settings.world).to(device, settings.dtype)
            for w in (loaded.w_uk, loaded.w_uv)
        )
        x_SD = case.x_SD.to(device, settings.dtype)
        positions_S, rows_S = case.positions_S.to(device), case.rows_S.to(device)
        indices = None if case.indices_SK is None else case.indices_SK.to(device)
        projected = reference.project(x_SD, weights, spec, positions_S).take_queries(rows_S)
        o_SHV = reference.absorbed_attention(
            projected,
            w_uk,
            w_uv,
            spec,
            indices=indices,
            rows_S=rows_S,
            attention=attention or _attention(settings.backend, dense=indices is None),
        )
        heads.append(o_SHV.to(home))
        partial = reference.output_projection(o_SHV, weights).to(home, _sum_dtype(settings.dtype))
        total = partial if total is None else total + partial
    if total is None:
        raise ValueError("a run needs at least one rank")
    return torch.cat(heads, 1), total


def _attention(backend: Backend, *, dense: bool) -> SparseAttention | None:
    """The backend's sparse attention; the reference runs dense attention without a list of all keys."""
    if dense and backend.name == "reference":
        backend.ran["dense_mla: reference"] += 1
        return None
    return backend.sparse_mla


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# Measures


def measure(head_SHV: Tensor, out_SD: Tensor, truth_head_SHV: Tensor, truth_SD: Tensor) -> Errors:
    """Errors of one path against float64; not-a-number anywhere counts as infinite error."""
    head_SHV, out_SD = head_SHV.to(truth_SD.device, torch.float64), out_SD.to(truth_SD.device, torch.float64)
    by_head = _relative(head_SHV - truth_head_SHV, truth_head_SHV, dims=(0, 2))
    by_row = _relative(out_SD - truth_SD, truth_SD, dims=(1,))
    cosine = torch.nn.functional.cosine_similarity(out_SD.flatten(), truth_SD.flatten(), dim=0)
    whole = _relative(out_SD - truth_SD, truth_SD, dims=(0, 1))
    worst_head, worst_row = int(by_head.argmax()), int(by_row.argmax())
    return Errors(
        cosine=float(cosine.nan_to_num(nan=-1.0)),
        relative=float(whole),
        head=float(by_head[worst_head]),
        worst_head=worst_head,
        row=float(by_row[worst_row]),
        worst_row=worst_row,
    )


def _relative(difference: Tensor, truth: Tensor, dims: tuple[int, ...]) -> Tensor:
    size = truth.square().sum(dims).sqrt()
    error = difference.square().sum(dims).sqrt()
    ratio = torch.where(size > 0, error / size, torch.where(error > 0, torch.inf, 0.0))
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _limit(standard: Errors, dtype: torch.dtype) -> Errors:
    """What the absorbed path may reach: the standard path's own errors, times a factor."""
    floor = FLOORS[dtype]
    return replace(
        standard,
        cosine=MIN_COSINE,
        relative=FACTOR * standard.relative + floor,
        head=FACTOR * standard.head + floor,
        row=FACTOR * standard.row + floor,
    )


def _within(errors: Errors, limit: Errors) -> bool:
    return (
        errors.cosine > limit.cosine
        and errors.relative <= limit.relative
        and errors.head <= limit.head
        and errors.row <= limit.row
    )


# Sparse selection


def _index_scores(
    loaded: LoadedBlock,
    x_SD: Tensor,
    positions_S: Tensor,
    rows_S: Tensor,
    logits: Callable[..., Tensor],
) -> Tensor:
    """Indexer scores [rows, T], -inf after each query."""
    weights = loaded.weights.indexer
    if weights is None:
        raise CannotError(f"{loaded.block.prefix}: the indexer's weights are missing")
    projected = reference.project(x_SD, loaded.weights, loaded.spec, positions_S)
    q_SIJ, k_TJ, w_SI = reference.index_queries_keys(
        x_SD, projected.q_latent_SQ, weights, loaded.spec, positions_S
    )
    starts = torch.zeros_like(rows_S, dtype=torch.int32)
    scores: Tensor = logits(
        q_SIJ[rows_S], k_TJ, w_SI[rows_S], starts=starts, ends=(rows_S + 1).to(torch.int32)
    )
    return scores


def _compare_selection(
    original: LoadedBlock,
    converted: LoadedBlock,
    scores: Tensor,
    expected: Tensor,
    x_SD: Tensor,
    positions_S: Tensor,
    rows_S: Tensor,
    settings: NumbersSettings,
) -> Selection:
    """The converted block's selection, by the backend in the compute dtype, against the float64 one.

    The limit is what the original's own selection in that dtype misses, times a factor: rounding moves keys that
    lie near the threshold, and only those.
    """
    if converted.spec.indexer is None or original.spec.indexer is None:
        raise CannotError(
            f"{converted.block.prefix}: the original has an indexer here, this checkpoint has none"
        )

    def select(loaded: LoadedBlock, logits: Callable[..., Tensor], topk: int) -> Tensor:
        own = loaded.to(settings.dtype)
        return reference.select_topk(
            _index_scores(own, x_SD.to(settings.dtype), positions_S, rows_S, logits), topk
        )

    finite = scores.masked_fill(scores.isneginf(), torch.nan)
    spread = (finite - finite.nanmean(-1, keepdim=True)).square().nanmean().sqrt()
    floor = SELECTION_FLOORS[settings.dtype] * float(spread)
    by_reference = select(original, reference.indexer_logits, original.spec.indexer.topk)
    own = reference.selection_agreement(scores, by_reference, expected, floor)
    chosen = select(converted, settings.backend.indexer_logits, converted.spec.indexer.topk)
    tolerance = max(floor, FACTOR * own.worst_gap)
    found = reference.selection_agreement(scores, chosen, expected, tolerance)
    return Selection(
        queries=found.queries,
        expected=found.expected,
        missed=found.missed,
        wrong_queries=found.wrong_queries,
        worst_gap=found.worst_gap / float(spread),
        tolerance=tolerance / float(spread),
        missed_limit=int(FACTOR * own.missed + SELECTION_COUNT_FLOOR * found.expected),
    )


def check_sparse_equals_dense(converted: LoadedBlock, settings: NumbersSettings) -> Check:
    """With every key selected, sparse attention must be dense attention."""
    tokens = min(settings.tokens, 256)
    small = replace(settings, tokens=tokens, rows=tokens)
    device = small.devices[0]
    x_SD = hidden_states(converted.block.prefix, small, converted.spec.hidden).to(device, torch.float64)
    every = torch.arange(tokens, device=device)
    lists_SK = every.to(torch.int32).expand(tokens, tokens).contiguous()
    dense_case = _Case(x_SD, every, every, None)
    sparse_case = _Case(x_SD, every, every, lists_SK)
    truth = _standard(converted, dense_case, torch.float64)
    standard = measure(*_standard(converted, dense_case, small.dtype), *truth)
    sparse = measure(*absorbed_ranks(converted, sparse_case, small), *truth)
    passed = _within(sparse, _limit(standard, small.dtype))
    return Check(
        "sparse",
        "top-k of every key equals dense",
        passed,
        f"{tokens} tokens, error {sparse.relative:.1e} (standard {standard.relative:.1e}), "
        f"cosine {sparse.cosine:.7f}",
    )


# Negative controls


def check_control(
    original: LoadedBlock, converted: LoadedBlock, settings: NumbersSettings, indices: Tensor | None
) -> Check:
    """Swap two heads of K on purpose: the comparison has to notice, or it proves nothing."""
    pair = _different_heads(converted)
    if pair is None:
        return Check("control", "negative control", None, "no two heads of K differ, so none can be swapped")
    first, second = pair
    by_head = converted.w_uk.reshape(converted.spec.heads, -1).clone()
    by_head[[first, second]] = by_head[[second, first]]
    corrupted = replace(converted, w_uk=by_head.reshape(converted.w_uk.shape))
    result, _ = check_layer(original, corrupted, settings, indices)
    noticed = not _within(result.absorbed, result.limit)
    return Check(
        "control",
        "negative control",
        noticed,
        f"heads {first} and {second} of K swapped in {converted.block.prefix.rstrip('.')}: "
        + (
            f"caught, worst head off by {result.absorbed.head:.1e} (limit {result.limit.head:.1e})"
            if noticed
            else "NOT caught"
        ),
    )


def _different_heads(loaded: LoadedBlock) -> tuple[int, int] | None:
    """Two heads of K with the most different weights."""
    by_head = loaded.w_uk.reshape(loaded.spec.heads, -1)
    distances = [float((by_head[0] - by_head[head]).norm()) for head in range(1, loaded.spec.heads)]
    if not distances or max(distances) == 0:
        return None
    return 0, 1 + distances.index(max(distances))


def shared_indices(results: Sequence[Tensor | None]) -> Tensor | None:
    """The selection of the nearest block before that has an indexer."""
    return next((found for found in reversed(results) if found is not None), None)
