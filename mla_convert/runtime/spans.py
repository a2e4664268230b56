"""Spans of tokens that the queries of packed sequences see."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_spans(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *, queries: int
) -> tuple[Tensor, Tensor]:
    """``starts`` and ``ends`` of ``dense_mla`` for packed sequences, int32 [queries].

    Sequence n has queries ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` and keys likewise in ``cu_seqlens_k``
    (None: the same), and its last query stands at its last key. Works on the tensors' device without waiting for it.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [N + 1], rising from 0.
        queries: ``cu_seqlens_q[N]``. Queries from there on, if a buffer has more, see nothing.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    rows_S = torch.arange(queries, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    sequence_S = torch.searchsorted(cu_seqlens_q, rows_S, right=True) - 1
    inside_S = rows_S < cu_seqlens_q[-1]
    sequence_S = sequence_S.clamp_max(cu_seqlens_q.shape[0] - 2)
    behind_S = cu_seqlens_q[sequence_S + 1] - 1 - rows_S
    starts_S = cu_seqlens_k[sequence_S]
    ends_S = torch.maximum(cu_seqlens_k[sequence_S + 1] - behind_S, starts_S)
    ends_S = torch.where(inside_S, ends_S, starts_S)
    return starts_S.to(torch.int32), ends_S.to(torch.int32)
