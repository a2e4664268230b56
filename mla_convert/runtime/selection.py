"""DeepSeek Sparse Attention's choice of keys: the indexer's scores, top-k, and comparing two choices.

Shape suffixes: S queries, T keys, D hidden, Q query rank, I indexer heads, J indexer dims, K keys selected.

The published indexer also multiplies queries and keys by an orthonormal Hadamard matrix, and quantises them
to FP8. The first changes no dot product and the second is a way of computing: neither is in the definition.
Whoever computes like that passes what ``quantise_rows`` gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from mla_convert.errors import BadInputError
from mla_convert.runtime.checks import check_indexer, check_topk, require
from mla_convert.runtime.numerics import chunks, compute_dtype
from mla_convert.runtime.rope import apply_rope, rope_tables
from mla_convert.runtime.spec import AttentionSpec, IndexerSpec
from mla_convert.runtime.weights import IndexerWeights, expect


def index_queries_keys(
    x_SD: Tensor,
    q_latent_SQ: Tensor | None,
    weights: IndexerWeights,
    spec: AttentionSpec,
    positions_S: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The indexer's queries [S, I, J], keys [S, J] and head weights [S, I] (>= float32).

    Queries and keys have x's dtype or, under ``torch.autocast``, that of its products.

    The head weights carry the factors I^-0.5 and J^-0.5, so that ``indexer_logits`` needs no scale.

    Raises:
        BadInputError: the block has no indexer, or a weight of the wrong shape.
    """
    indexer = spec.indexer
    if indexer is None or q_latent_SQ is None:
        raise BadInputError("The block has no indexer, or no query latent to feed one.")
    expect("indexer.wq_b", weights.wq_b, indexer.heads * indexer.dim, q_latent_SQ.shape[-1])
    expect("indexer.wk", weights.wk, indexer.dim, spec.hidden)
    expect("indexer.weights_proj", weights.weights_proj, indexer.heads, spec.hidden)
    dtype = compute_dtype(x_SD.dtype)
    q_SIJ = F.linear(q_latent_SQ, weights.wq_b).reshape(-1, indexer.heads, indexer.dim)
    k_bias = None if weights.k_norm_bias is None else weights.k_norm_bias.to(dtype)
    k_SJ = F.linear(x_SD, weights.wk).to(dtype)
    k_SJ = F.layer_norm(k_SJ, (indexer.dim,), weights.k_norm_weight.to(dtype), k_bias, indexer.k_norm_eps)
    w_SI = F.linear(x_SD, weights.weights_proj).to(dtype) * (indexer.heads * indexer.dim) ** -0.5
    if indexer.rotated:
        cos_SF, sin_SF = rope_tables(spec.rope_spec, positions_S)
        q_SIJ = _rotate_part(q_SIJ, cos_SF, sin_SF, indexer)
        k_SJ = _rotate_part(k_SJ, cos_SF, sin_SF, indexer)
    return q_SIJ, k_SJ.to(q_SIJ.dtype), w_SI


def _rotate_part(x: Tensor, cos_SF: Tensor, sin_SF: Tensor, indexer: IndexerSpec) -> Tensor:
    """Rotate the first (or last) ``rope_dim`` dims, where MLA itself always rotates the last ones."""
    start = indexer.dim - indexer.rope_dim if indexer.rope_last else 0
    before, turned, after = x.tensor_split((start, start + indexer.rope_dim), dim=-1)
    turned = apply_rope(turned, cos_SF, sin_SF, interleaved=indexer.rope_interleaved)
    return torch.cat((before, turned, after), dim=-1)


def indexer_logits(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """sum over heads of weight * relu(q . k): [S, T] in float32, or float64 if q is float64.

    Args:
        q_SIJ, k_TJ: Any float dtype; float8_e4m3fn with the scales that ``quantise_rows`` gives.
        starts, ends: First key of each query and the one after its last, int [S]; outside them the logit is
            -inf. Causal attention of a whole sequence has ends = 1…S. None: from 0, or to T.
        q_scale: What q was divided by, [S, I], positive. None: 1.
        k_scale: What k was divided by, [T], positive. None: 1.

    Raises:
        ValueError: tensors that do not belong together.
    """
    check_indexer(q_SIJ, k_TJ, weights_SI, starts, ends, q_scale, k_scale)
    queries, heads, _ = q_SIJ.shape
    dtype = compute_dtype(q_SIJ.dtype)
    logits_ST = torch.empty(queries, k_TJ.shape[0], dtype=dtype, device=q_SIJ.device)
    keys_T = torch.arange(k_TJ.shape[0], device=q_SIJ.device)
    k_TJ = k_TJ.to(dtype)
    weights_SI = weights_SI.to(dtype) if q_scale is None else weights_SI.to(dtype) * q_scale.to(dtype)
    for rows in chunks(queries, 2 * heads * k_TJ.shape[0]):
        scores_SIT = torch.einsum("sij,tj->sit", q_SIJ[rows].to(dtype), k_TJ).relu()
        part_ST = torch.einsum("sit,si->st", scores_SIT, weights_SI[rows])
        if k_scale is not None:
            part_ST = part_ST * k_scale.to(dtype)
        logits_ST[rows] = _outside_is_masked(part_ST, keys_T, starts, ends, rows)
    return logits_ST


def _outside_is_masked(
    logits_ST: Tensor, keys_T: Tensor, starts: Tensor | None, ends: Tensor | None, rows: slice
) -> Tensor:
    if starts is not None:
        logits_ST = logits_ST.masked_fill(keys_T < starts[rows, None], -torch.inf)
    if ends is not None:
        logits_ST = logits_ST.masked_fill(keys_T >= ends[rows, None], -torch.inf)
    return logits_ST


FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn with one power-of-two scale for each row of the last dim: codes * scale ~ x.

    The scale is the smallest that leaves no element above 448, float32, of x's shape without the last dim; a row of
    zeros has scale 1. DeepSeek-V3.2's indexer quantises its queries and keys like this (``scale_fmt: ue8m0``).
    """
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest / FP8_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(largest > 0, exponent, 0).clamp_min(-126)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return (wide / scale[..., None]).to(torch.float8_e4m3fn), scale


def select_topk(
    logits_ST: Tensor, k: int, *, starts: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Keys of the ``k`` highest logits of each query: int32 [S, min(k, T)], in ascending order of the keys.

    Of equal logits the lower key is selected. NaN counts as the highest logit, so that it shows in whatever attends
    to the selected keys. Keys at -inf are not selected; -1 ends a row that has fewer than k others.

    Args:
        starts, ends: First key of each query that may be selected and the one after its last, int [S]. None: from
            0, or to T.

    Raises:
        ValueError: tensors that do not belong together, or k is below 1.
    """
    check_topk(logits_ST, k, starts, ends)
    queries, tokens = logits_ST.shape
    width = min(k, tokens)
    keys_T = torch.arange(tokens, device=logits_ST.device)
    chosen_SK = torch.empty(queries, width, dtype=torch.int32, device=logits_ST.device)
    for rows in chunks(queries, 3 * tokens):
        part_ST = _outside_is_masked(logits_ST[rows], keys_T, starts, ends, rows)
        part_ST = part_ST.masked_fill(
            part_ST.isnan(), torch.nan
        )  # CUDA sorts a NaN with a sign bit behind all
        values, keys = part_ST.sort(dim=-1, descending=True, stable=True)
        # Behind all keys while they are sorted, then -1.
        found_SK = keys[:, :width].masked_fill(values[:, :width].isneginf(), tokens).sort(dim=-1).values
        chosen_SK[rows] = found_SK.masked_fill(found_SK == tokens, -1).to(torch.int32)
    return chosen_SK


def indexer_select(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    topk: int,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """``select_topk`` of ``indexer_logits`` without the logits of all queries at once: int32 [S, min(topk, T)].

    Raises:
        ValueError: tensors that do not belong together, or topk is below 1.
    """
    check_indexer(q_SIJ, k_TJ, weights_SI, starts, ends, q_scale, k_scale)
    require(topk >= 1, f"top-k of {topk} keys")
    queries, tokens = q_SIJ.shape[0], k_TJ.shape[0]
    chosen_SK = torch.empty(queries, min(topk, tokens), dtype=torch.int32, device=q_SIJ.device)
    for rows in chunks(queries, 4 * tokens):
        starts_S, ends_S = (None if bound is None else bound[rows] for bound in (starts, ends))
        # No query of the chunk sees a key behind its largest end.
        seen = tokens if ends_S is None else min(tokens, max(int(ends_S.max()), 0))
        logits_ST = indexer_logits(
            q_SIJ[rows],
            k_TJ[:seen],
            weights_SI[rows],
            starts=starts_S,
            ends=ends_S,
            q_scale=None if q_scale is None else q_scale[rows],
            k_scale=None if k_scale is None else k_scale[:seen],
        )
        found_SK = select_topk(logits_ST, topk)
        chosen_SK[rows, : found_SK.shape[1]] = found_SK
        chosen_SK[rows, found_SK.shape[1] :] = -1
    return chosen_SK


@dataclass(frozen=True, slots=True)
class SelectionAgreement:
    """How well a choice of keys agrees with the expected one.

    ``expected`` keys were to be chosen over all ``queries``; ``missed`` of them were not; ``wrong_queries``
    have a difference that is more than a tie. Keys are interchangeable when their logits are, so ``worst_gap``
    is the largest spread, in one query, of the logits of the keys that only one of the two choices holds. It is
    inf where the choices differ in size, one holds a key twice, or they differ in a masked key.
    """

    queries: int
    expected: int
    missed: int
    wrong_queries: int
    worst_gap: float

    @property
    def agrees(self) -> bool:
        """Every difference is a tie."""
        return self.wrong_queries == 0


def selection_agreement(
    logits_ST: Tensor, chosen_SK: Tensor, expected_SK: Tensor, tolerance: float
) -> SelectionAgreement:
    """Compare two selections (entries outside 0…T-1 are padding), allowing ties within ``tolerance``."""
    chosen_ST, chosen_count_S = _as_mask(chosen_SK, logits_ST)
    expected_ST, expected_count_S = _as_mask(expected_SK, logits_ST)
    differs_ST = chosen_ST ^ expected_ST
    gap_S = (
        logits_ST.masked_fill(~differs_ST, -torch.inf).amax(-1)
        - logits_ST.masked_fill(~differs_ST, torch.inf).amin(-1)
    ).masked_fill(~differs_ST.any(-1), 0)
    duplicate_S = (chosen_count_S != chosen_ST.sum(-1)) | (expected_count_S != expected_ST.sum(-1))
    gap_S = gap_S.masked_fill(duplicate_S | (chosen_count_S != expected_count_S) | gap_S.isnan(), torch.inf)
    return SelectionAgreement(
        queries=logits_ST.shape[0],
        expected=int(expected_ST.sum()),
        missed=int((expected_ST & ~chosen_ST).sum()),
        wrong_queries=int((gap_S > tolerance).sum()),
        worst_gap=float(gap_S.max()) if gap_S.numel() else 0.0,
    )


def _as_mask(indices_SK: Tensor, logits_ST: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys a selection holds, bool [S, T], and how many valid entries each query has."""
    tokens = logits_ST.shape[1]
    keys_SK = indices_SK.long()
    valid_SK = (keys_SK >= 0) & (keys_SK < tokens)
    mask = torch.zeros(keys_SK.shape[0], tokens + 1, dtype=torch.bool, device=logits_ST.device)
    mask.scatter_(1, keys_SK.masked_fill(~valid_SK, tokens), True)
    return mask[:, :tokens], valid_SK.sum(-1)
