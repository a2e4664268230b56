"""The loss that trains an indexer: how far its distribution over keys is from the attention it selects for.

From DeepSeek-V3.2's report: the probabilities of the main attention, summed over its heads and divided by their sum,
are the target; the indexer's logits of the same keys pass through a softmax; the loss of a query is the
Kullback-Leibler divergence of the second from the first. In the dense warm-up stage that runs over all keys a query
sees, in the sparse stage over the selected ones. The main attention is a constant here.

Shape suffixes: S queries, T keys, I indexer heads, J indexer dims, H heads and E dims of the main attention, K
entries of a list, C keys that a chunk of queries looks at (T or fewer, or K).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mla_convert.runtime.checks import check_loss, require
from mla_convert.runtime.numerics import chunks, compute_dtype

Reduction = Literal["mean", "sum"]


def indexer_loss(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    q_SHE: Tensor,
    kv_TE: Tensor,
    scale: float,
    *,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    lse: Tensor | None = None,
    reduction: Reduction = "mean",
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    deterministic: bool | None = None,
    kernels: bool = False,
) -> Tensor:
    """KL(main attention || indexer) of each query, reduced; gradients go to q_SIJ, k_TJ and weights_SI alone.

    They are computed with the loss, a chunk of queries at a time, so that neither [S, I, T] nor [S, H, T] exists
    as a whole; a backward pass only scales them.

    Args:
        q_SIJ, k_TJ, weights_SI: What ``indexer_logits`` takes.
        q_SHE, kv_TE, scale: Absorbed queries, cached tokens [T, E] or [T, 1, E] and the factor of their products,
            as ``sparse_mla`` takes them. All of E counts, so other keys and queries of one shared head serve too.
        indices: [S, K] or [S, 1, K]: both distributions are over these entries (sparse stage), under the rule of
            ``sparse_mla``: entry j counts if 0 <= index < T and j < topk_length. None: over all keys.
        starts, ends: Without indices, the first key of each query and the one after its last, int [S]. Causal
            attention of a whole sequence has ends = 1…S. None: from 0, or to T.
        lse: [S, H], natural log-sum-exp of the main attention's scores over the same keys, as ``sparse_mla`` returns
            it. None: computed, at the cost of another product of q and kv.
        reduction: "mean" over the queries that see a key, or "sum".
        sum_over_ranks: Given the probabilities of this process's heads, summed [queries, C], returns the sum over
            all heads: an all-reduce where heads are spread over ranks. It is called in the same order on each.
        deterministic: Whether two runs on a GPU give equal bits; None: what
            ``torch.are_deterministic_algorithms_enabled`` says.
        kernels: Compute with those of ``kernels.indexer_loss``, which takes what its ``unsupported`` lets pass,
            instead of torch.

    Returns:
        The loss, a scalar in float32 (float64 for float64). A query that sees no key adds nothing.

    Raises:
        ValueError: tensors that do not belong together, or another ``reduction``.
        CannotError: ``kernels`` that do not take the call.
    """
    attention = MainAttention(
        q_SHE.detach(),
        (kv_TE.squeeze(1) if kv_TE.ndim == 3 else kv_TE).detach(),
        scale,
        indices_SK=None if indices is None else indices.flatten(1),
        topk_length=topk_length,
        starts=starts,
        ends=ends,
        lse_SH=None if lse is None else lse.detach(),
        sum_over_ranks=sum_over_ranks,
    )
    check_loss(
        q_SIJ, k_TJ, weights_SI, attention.q_SHE, attention.kv_TE, attention.indices_SK, topk_length, starts, ends, lse
    )  # fmt: skip
    require(reduction in get_args(Reduction), f"no reduction {reduction!r}; there are mean and sum")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    run = loss_and_gradients
    if kernels:
        from mla_convert.runtime.kernels import indexer_loss as kernel

        run = kernel.loss_and_gradients
    compute = partial(run, attention=attention, deterministic=deterministic)
    loss: Tensor = _IndexerLoss.apply(q_SIJ, k_TJ, weights_SI, compute, reduction)  # type: ignore[no-untyped-call]
    return loss


Results = tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""The sum over queries, how many queries see a key, and gradients of the sum for q, k and weights (or none)."""


@dataclass(frozen=True, slots=True)
class MainAttention:
    """What the indexer is compared with, and over which keys; see ``indexer_loss``."""

    q_SHE: Tensor
    kv_TE: Tensor
    scale: float
    indices_SK: Tensor | None
    topk_length: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    lse_SH: Tensor | None
    sum_over_ranks: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some queries and the keys that any of them may look at: a range, or [queries, K] gathered."""

    rows: slice
    keys: slice | Tensor
    valid_SC: Tensor

    def take(self, source_TX: Tensor) -> Tensor:
        """[C, X] shared by all queries, or [queries, K, X]; a gathered row that is not valid is 0, never NaN."""
        if isinstance(self.keys, slice):
            return source_TX[self.keys]
        return source_TX[self.keys].masked_fill(~self.valid_SC[..., None], 0)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SIJ: Tensor,
        k_TJ: Tensor,
        weights_SI: Tensor,
        compute: Callable[..., Results],
        reduction: Reduction,
    ) -> Tensor:
        loss, counted, gradients = compute(q_SIJ, k_TJ, weights_SI, wanted=any(ctx.needs_input_grad))
        share = (1 / counted.clamp(min=1) if reduction == "mean" else torch.ones_like(counted)).to(loss.dtype)
        ctx.save_for_backward(share, *gradients)
        ctx.dtypes = q_SIJ.dtype, k_TJ.dtype, weights_SI.dtype
        return loss * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        share, *gradients = ctx.saved_tensors
        factor = d_loss * share
        scaled = (
            (gradient * factor).to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None


def loss_and_gradients(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    *,
    attention: MainAttention,
    deterministic: bool,
    wanted: bool,
) -> Results:
    """The loss of ``indexer_loss`` before its reduction, some queries at a time, and gradients if ``wanted``."""
    dtype, device = compute_dtype(q_SIJ.dtype), q_SIJ.device
    loss = torch.zeros((), dtype=dtype, device=device)
    counted = torch.zeros((), dtype=dtype, device=device)
    dq_SIJ, dw_SI = torch.zeros_like(q_SIJ), torch.zeros_like(weights_SI)
    dk_TJ = torch.zeros(k_TJ.shape, dtype=dtype, device=device)
    for chunk in _chunks(attention, q_SIJ.shape[1], q_SIJ.shape[2]):
        rows, valid_SC = chunk.rows, chunk.valid_SC
        target_SC = _target(chunk, attention, dtype)
        keys = chunk.take(k_TJ)
        weights = weights_SI[rows].to(dtype)
        scores_SIC = _scores(q_SIJ[rows], keys, dtype).relu()
        logits_SC = torch.einsum("sic,si->sc", scores_SIC, weights)
        seen_S = valid_SC.any(-1, keepdim=True)
        logits_SC = logits_SC.masked_fill(~valid_SC, -torch.inf).masked_fill(~seen_S, 0)
        log_p_SC = logits_SC.log_softmax(-1)
        terms_SC = torch.special.xlogy(target_SC, target_SC) - target_SC * log_p_SC.masked_fill(~valid_SC, 0)
        loss += terms_SC.sum()
        counted += seen_S.sum()
        if wanted:
            d_logits_SC = (log_p_SC.exp() - target_SC).masked_fill(~valid_SC, 0)
            dw_SI[rows] = torch.einsum("sic,sc->si", scores_SIC, d_logits_SC).to(dw_SI.dtype)
            d_scores_SIC = (d_logits_SC[:, None] * weights[..., None]).masked_fill_(scores_SIC <= 0, 0)
            d_scores_SIC = d_scores_SIC.to(q_SIJ.dtype)
            del scores_SIC
            dq_SIJ[rows] = _product(d_scores_SIC, keys, dtype).to(dq_SIJ.dtype)
            _add_key_gradients(dk_TJ, d_scores_SIC, q_SIJ[rows], chunk, dtype, deterministic)
    return loss, counted, (dq_SIJ, dk_TJ, dw_SI) if wanted else ()


def _chunks(attention: MainAttention, index_heads: int, index_dim: int) -> Iterator[_Chunk]:
    queries, heads, width = attention.q_SHE.shape
    tokens, device = attention.kv_TE.shape[0], attention.q_SHE.device
    if not tokens:
        return
    if attention.indices_SK is not None:
        entries = attention.indices_SK.shape[1]
        each = entries * (3 * (heads + index_heads) + width + 2 * index_dim)
        for rows in chunks(queries if entries else 0, each):
            chosen_SK = attention.indices_SK[rows].long()
            valid_SK = (chosen_SK >= 0) & (chosen_SK < tokens)
            if attention.topk_length is not None:
                valid_SK &= torch.arange(entries, device=device) < attention.topk_length[rows, None]
            yield _Chunk(rows, chosen_SK.masked_fill(~valid_SK, 0), valid_SK)
        return
    first_S = torch.zeros(queries, dtype=torch.int64, device=device)
    last_S = torch.full_like(first_S, tokens)
    if attention.starts is not None:
        first_S = attention.starts.long().clamp(0, tokens)
    if attention.ends is not None:
        last_S = attention.ends.long().clamp(0, tokens)
    bounds = torch.stack((first_S, last_S)).cpu()  # keys that no query of a chunk sees are not looked at
    for rows in chunks(queries, 3 * tokens * (heads + index_heads)):
        keys = slice(int(bounds[0, rows].min()), int(bounds[1, rows].max()))
        if keys.start < keys.stop:
            keys_C = torch.arange(keys.start, keys.stop, device=device)
            yield _Chunk(rows, keys, (keys_C >= first_S[rows, None]) & (keys_C < last_S[rows, None]))


def _target(chunk: _Chunk, attention: MainAttention, dtype: torch.dtype) -> Tensor:
    """The main attention's probabilities, summed over heads and normalised [queries, C]; 0 where not valid."""
    scores_SHC = _scores(attention.q_SHE[chunk.rows], chunk.take(attention.kv_TE), dtype) * attention.scale
    unseen_SC = ~chunk.valid_SC
    scores_SHC = scores_SHC.masked_fill_(unseen_SC[:, None], torch.finfo(dtype).min)
    if attention.lse_SH is None:
        p_SHC = scores_SHC.softmax(-1)
    else:
        p_SHC = (scores_SHC - attention.lse_SH[chunk.rows, :, None].to(dtype)).exp_()
    total_SC = p_SHC.sum(1).masked_fill(unseen_SC, 0)
    if attention.sum_over_ranks is not None:
        total_SC = attention.sum_over_ranks(total_SC)
    return total_SC / total_SC.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)


def _scores(q_SXD: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """q . k for keys [C, D] of all queries, or [S, K, D]: [S, X, C]."""
    return _product(q_SXD, keys.transpose(-1, -2), dtype)


def _product(left_SXC: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix for each query times a shared one [C, D] or one of its own [S, C, D]; sums and result in ``dtype``."""
    queries, rows, _ = left_SXC.shape
    if right.ndim == 2:
        return _matmul(left_SXC.flatten(0, 1), right, dtype).reshape(queries, rows, -1)
    return _matmul(left_SXC, right, dtype)


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        multiply = torch.mm if left.ndim == 2 else torch.bmm
        return multiply(left, right.to(left.dtype), out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_key_gradients(
    dk_TJ: Tensor, d_scores_SIC: Tensor, q_SIJ: Tensor, chunk: _Chunk, dtype: torch.dtype, deterministic: bool
) -> None:
    if isinstance(chunk.keys, slice):
        dk_TJ[chunk.keys] += _matmul(d_scores_SIC.flatten(0, 1).T, q_SIJ.flatten(0, 1), dtype)
        return
    dk_SKJ = _matmul(d_scores_SIC.transpose(1, 2), q_SIJ, dtype)
    where, what = chunk.keys[chunk.valid_SC], dk_SKJ[chunk.valid_SC]
    if deterministic:
        dk_TJ.index_put_((where,), what, accumulate=True)
    else:
        dk_TJ.index_add_(0, where, what)
