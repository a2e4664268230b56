"""Levels 3 to 6: run the attention. Standard MLA with the original's combined weights against absorbed MLA with
the converted ones, forward and backward, both against float64; the sparse selection; and a known corruption that
must be caught.

What the run may rest on: the original's geometry, weights and configuration define the float64 truth, and the
converted checkpoint's own weights and configuration are all that the absorbed path sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime import reference
from mla_convert.runtime.dispatch import Backend
from mla_convert.verification.absorbed import Grid, Outcome, Ranks
from mla_convert.verification.backward import compare_gradients, run_standard
from mla_convert.verification.cases import Case, Draw, make_case
from mla_convert.verification.result import Check, Errors, GradientResult, LayerResult, Selection
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
        grid: Tensor- and context-parallel ranks.
        devices: Where to run; the first one holds the truth.
        backend: What runs the indexer here, and the absorbed path.
        ranks: Who runs the absorbed path.
        seed: Seed of the hidden states.
        backward: Compare gradients too.
    """

    tokens: int
    rows: int
    dtype: torch.dtype
    grid: Grid
    devices: tuple[torch.device, ...]
    backend: Backend
    ranks: Ranks
    seed: int = 0
    backward: bool = False

    @property
    def draw(self) -> Draw:
        """What the random inputs depend on."""
        return Draw(self.tokens, self.rows, self.dtype, self.seed, self.backward)


def check_layer(
    original: LoadedBlock,
    converted: LoadedBlock,
    settings: NumbersSettings,
    indices: Tensor | None,
    swap: tuple[int, int] | None = None,
) -> tuple[LayerResult, Tensor | None]:
    """Run one block both ways.

    Args:
        original: The block as the original stores and configures it, in float64.
        converted: The block as the checkpoint under test does, in float64.
        settings: How to run.
        indices: Selection [rows, K] to use where the block shares an indexer; None where it has its own.
        swap: Two heads of the converted K to exchange first, for the negative control.

    Returns:
        The result, and the selection that the block used, for blocks that share it.
    """
    started = time.monotonic()
    case, selection = _prepare(original, converted, settings, indices)
    true = run_standard(original, case, torch.float64)
    by_standard = run_standard(original.rounded_like(converted), case, settings.dtype)
    began = time.monotonic()
    by_absorbed = settings.ranks.run(converted, case, swap)
    absorbed_seconds = time.monotonic() - began
    standard, absorbed = _measured(by_standard, true), _measured(by_absorbed, true)
    limit = _limit(standard, settings.dtype)
    gradients = _gradients(by_absorbed, by_standard, true, original, settings.dtype)
    passed = (
        _within(absorbed, limit)
        and (selection is None or selection.passed)
        and all(gradient.passed for gradient in gradients)
    )
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
        gradients=gradients,
        absorbed_seconds=absorbed_seconds,
    )
    return result, case.indices_SK


def _gradients(
    absorbed: Outcome, standard: Outcome, true: Outcome, original: LoadedBlock, dtype: torch.dtype
) -> tuple[GradientResult, ...]:
    if absorbed.gradients is None or standard.gradients is None or true.gradients is None:
        return ()
    return compare_gradients(
        absorbed.gradients,
        standard.gradients,
        true.gradients,
        original.spec,
        factor=FACTOR,
        floor=FLOORS[dtype],
        min_cosine=MIN_COSINE,
    )


def _kind(original: LoadedBlock, case: Case) -> str:
    if case.indices_SK is None:
        return "dense"
    return "sparse" if original.spec.indexer else "sparse, shared selection"


def _prepare(
    original: LoadedBlock, converted: LoadedBlock, settings: NumbersSettings, indices: Tensor | None
) -> tuple[Case, Selection | None]:
    case = make_case(original, settings.draw, settings.devices[0])
    x_SD, positions_S, rows_S = case.x_SD, case.positions_S, case.rows_S
    selection = None
    if original.spec.indexer is not None:
        q_SIJ, k_TJ, w_SI, ends_S = _index_inputs(original, x_SD, positions_S, rows_S)
        scores = reference.indexer_logits(q_SIJ, k_TJ, w_SI, ends=ends_S)
        indices = reference.select_topk(scores, original.spec.indexer.topk)
        selection = _compare_selection(
            original, converted, scores, indices, x_SD, positions_S, rows_S, settings
        )
    return replace(case, indices_SK=indices), selection


# Measures


def _measured(outcome: Outcome, true: Outcome) -> Errors:
    return measure(outcome.head_SHV, outcome.output_SD, true.head_SHV, true.output_SD)


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
    return errors.within(limit)


# Sparse selection


def _index_inputs(
    loaded: LoadedBlock, x_SD: Tensor, positions_S: Tensor, rows_S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indexer's queries [rows, I, J], keys [T, J] and head weights [rows, I], and where causality ends each row."""
    weights = loaded.weights.indexer
    if weights is None:
        raise CannotError(f"{loaded.block.prefix}: the indexer's weights are missing")
    projected = reference.project(x_SD, loaded.weights, loaded.spec, positions_S)
    q_SIJ, k_TJ, w_SI = reference.index_queries_keys(
        x_SD, projected.q_latent_SQ, weights, loaded.spec, positions_S
    )
    return q_SIJ[rows_S], k_TJ, w_SI[rows_S], (rows_S + 1).to(torch.int32)


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
    lie near the threshold, and only those. Weights that a conversion rounded to BF16 are rounded there, too.
    """
    if converted.spec.indexer is None or original.spec.indexer is None:
        raise CannotError(
            f"{converted.block.prefix}: the original has an indexer here, this checkpoint has none"
        )

    def select(loaded: LoadedBlock, by: Callable[..., Tensor], topk: int) -> Tensor:
        own = loaded.to(settings.dtype)
        q_SIJ, k_TJ, w_SI, ends_S = _index_inputs(own, x_SD.to(settings.dtype), positions_S, rows_S)
        return by(q_SIJ, k_TJ, w_SI, topk, ends=ends_S)

    finite = scores.masked_fill(scores.isneginf(), torch.nan)
    spread = (finite - finite.nanmean(-1, keepdim=True)).square().nanmean().sqrt()
    floor = SELECTION_FLOORS[settings.dtype] * float(spread)
    rounded = original.rounded_like(converted)
    by_reference = select(rounded, reference.indexer_select, original.spec.indexer.topk)
    own = reference.selection_agreement(scores, by_reference, expected, floor)
    chosen = select(converted, settings.backend.indexer_select, converted.spec.indexer.topk)
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
    tokens = few_tokens(settings.tokens, settings.grid.cp)
    small = replace(settings, tokens=tokens, rows=tokens, backward=False)
    dense = make_case(converted, small.draw, small.devices[0])
    lists_SK = dense.positions_S.to(torch.int32).expand(tokens, tokens).contiguous()
    true = run_standard(converted, dense, torch.float64)
    standard = _measured(run_standard(converted, dense, small.dtype), true)
    by_sparse = small.ranks.run(converted, replace(dense, indices_SK=lists_SK), None)
    sparse = _measured(by_sparse, true)
    passed = _within(sparse, _limit(standard, small.dtype))
    return Check(
        "sparse",
        "top-k of every key equals dense",
        passed,
        f"{tokens} tokens, error {sparse.relative:.1e} (standard {standard.relative:.1e}), "
        f"cosine {sparse.cosine:.7f}",
    )


def few_tokens(tokens: int, cp: int) -> int:
    """As many of ``tokens`` as ``cp`` ranks can cut into two pieces each: 256, or fewer, or two a rank."""
    pieces = 2 * cp
    return min(tokens, max(256 - 256 % pieces, pieces))


# Negative controls


def check_control(
    original: LoadedBlock, converted: LoadedBlock, settings: NumbersSettings, indices: Tensor | None
) -> Check:
    """Swap two heads of K on purpose: the comparison has to notice, or it proves nothing."""
    pair = _different_heads(converted)
    if pair is None:
        return Check("control", "negative control", None, "no two heads of K differ, so none can be swapped")
    first, second = pair
    result, _ = check_layer(original, converted, settings, indices, pair)
    noticed = not _within(result.absorbed, result.limit)
    if settings.backward:
        noticed = noticed and not all(gradient.passed for gradient in result.gradients)
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
    """Two heads of K with the most different weights; where the block lies on ranks, both on the first."""
    by_head = loaded.w_uk.reshape(loaded.spec.heads, -1)
    count = loaded.spec.heads // max(1, len(loaded.by_rank))
    distances = [float((by_head[0] - by_head[head]).norm()) for head in range(1, count)]
    if not distances or max(distances) == 0:
        return None
    return 0, 1 + distances.index(max(distances))
