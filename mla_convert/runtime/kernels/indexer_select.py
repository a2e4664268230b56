"""The keys that the indexer selects, on a Hopper GPU: its scores and their top-k, some queries at a time.

Shapes: S queries, T keys, I indexer heads, J indexer dims, K keys selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.runtime.kernels import indexer_logits as scoring
from mla_convert.runtime.kernels._common import signature
from mla_convert.runtime.kernels.topk import select_topk

WORKSPACE_BYTES = 1 << 30
"""Logits held at a time: 8192 queries by 32768 keys, or 2048 by 131072. One query always fits, if need be in more."""


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
    """``topk.select_topk`` of ``indexer_logits.indexer_logits``, whose arguments and errors these are.

    The logits of a chunk of queries go to a workspace of at most ``WORKSPACE_BYTES`` (or one query's logits), which
    the next chunk uses again. Keys outside a query's range are neither scored nor read, nor filled with -inf, so
    causal selection costs half of the square. Nothing waits for the GPU, and the call can be captured in a graph.

    Returns:
        int32 [S, min(topk, T)]: the keys of each query in ascending order, then -1 where fewer were selected.
    """
    plan = scoring.plan_for(signature(q_SIJ, k_TJ, weights_SI, starts, ends, q_scale, k_scale))
    rows = min(plan.queries, max(1, WORKSPACE_BYTES // (4 * max(plan.keys, 1))))
    workspace_RT = torch.empty(rows, plan.keys, dtype=torch.float32, device=plan.device)
    if rows == plan.queries:  # one chunk: what select_topk returns is the result
        scoring.launch(
            plan, q_SIJ, k_TJ, weights_SI, starts, ends, q_scale, k_scale, workspace_RT, fill=False
        )
        return select_topk(workspace_RT, topk, starts=starts, ends=ends)
    found = []
    for first in range(0, plan.queries, rows):
        part = slice(first, min(first + rows, plan.queries))
        starts_S, ends_S, scale_SI = (
            None if each is None else each[part] for each in (starts, ends, q_scale)
        )
        some = (q_SIJ[part], k_TJ, weights_SI[part], starts_S, ends_S, scale_SI, k_scale)
        logits_ST = workspace_RT[: part.stop - part.start]
        scoring.launch(scoring.plan_for(signature(*some)), *some, logits_ST, fill=False)
        found.append(select_topk(logits_ST, topk, starts=starts_S, ends=ends_S))
    return torch.cat(found)


def unsupported(q_SIJ: Tensor) -> str | None:
    """Why the kernels do not take these queries, or None if they do."""
    return scoring.unsupported(q_SIJ)
