"""Sparse attention of absorbed MLA: every query attends to the tokens on its own list.

The programs are in ``_sparse_mla`` and ``_sparse_mla_few``; here is what a caller needs. Two of them compute: one
for up to 32 heads, which does not pad 16 heads to the 64 rows of a matrix instruction, and one for tiles of 64.

Shapes: S queries, T tokens, H heads, E = d_v + rope (one cached token), K entries on a list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import CannotError
from mla_convert.runtime.kernels import _sparse_mla as programs
from mla_convert.runtime.kernels._common import (
    DTYPES,
    LOG2E,
    as_int32,
    compiled,
    launchable,
    pad_features,
    require,
)
from mla_convert.runtime.kernels._sparse_mla_few import few_heads

MAX_HEADS = 128
MAX_RANK = 512
MAX_WIDTH = 576


def sparse_mla(
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    scale: float,
    *,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    d_v: int,
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries to the cached tokens listed for each, on a Hopper GPU.

    Scores, softmax and both sums are float32; probabilities are rounded to the dtype of ``q_SHE`` before they
    meet the values. The result does not depend on timing (two runs give equal bits) and carries no gradient.

    Args:
        q_SHE: [S, H, E] bfloat16 or float16, 1 to 128 heads. Heads are never padded in memory.
        kv_TE: [T, E] or [T, 1, E] in the dtype of q; the first ``d_v`` dims are the values as well.
        indices_SK: [S, K] or [S, 1, K], int32 or int64 (converted once), any K. Entry j of a query counts if
            0 <= index < T and j < topk_length; a token listed twice counts twice.
        scale: Factor on the scores, positive.
        topk_length: How many entries of each query to read, int [S]; None reads all.
        attn_sink: Logits [H] float32 that take a share of the softmax; ``lse`` stays as it is.
        d_v: 64, 128, … 512 with E - d_v in 0, 32, 64 … (E at most 576) run as they are. Other sizes are
            zero-padded to the next such in copies of q and kv, which is meant for tiny models.

    Returns:
        out [S, H, d_v] in q's dtype and the natural log-sum-exp [S, H] float32. A query without valid entries
        gives 0 and -inf. A token that is not listed affects nothing, NaN or not.

    Raises:
        CannotError: A size, dtype or scale that the kernels do not take; ``unsupported`` says which.
        ValueError: Shapes that contradict each other.
    """
    kv_TE = kv_TE.squeeze(1) if kv_TE.ndim == 3 else kv_TE
    indices_SK = indices_SK.squeeze(1) if indices_SK.ndim == 3 else indices_SK
    _check(q_SHE, kv_TE, indices_SK, topk_length, attn_sink, d_v)
    if reason := unsupported(q_SHE, d_v, scale):
        raise CannotError(f"The sparse attention kernel cannot run: {reason}.")
    (queries, heads, width), tokens, entries = q_SHE.shape, kv_TE.shape[0], indices_SK.shape[1]
    if not (queries and heads and tokens and entries):
        lse_SH = q_SHE.new_full((queries, heads), -torch.inf, dtype=torch.float32)
        return q_SHE.new_zeros(queries, heads, d_v), lse_SH

    rank, rope = _native(d_v, width - d_v)
    q_SHE = launchable(pad_features(q_SHE, d_v, rank, rope))
    kv_TE = launchable(pad_features(kv_TE, d_v, rank, rope))
    indices_SK = launchable(as_int32(indices_SK))
    lengths_S = torch.empty(queries, dtype=torch.int32, device=q_SHE.device)
    limits_S = lengths_S if topk_length is None else launchable(as_int32(topk_length))
    out_SHR = torch.empty(queries, heads, rank, dtype=q_SHE.dtype, device=q_SHE.device)
    lse_SH = torch.empty(queries, heads, dtype=torch.float32, device=q_SHE.device)
    sink_H = lse_SH[0] if attn_sink is None else attn_sink.to(torch.float32)
    with torch.cuda.device(q_SHE.device):
        lengths_kernel()(indices_SK, limits_S, tokens, int(topk_length is not None), lengths_S)
        kernel = compile_for(heads, rank, rope, q_SHE.dtype)
        has_sink = int(attn_sink is not None)
        kernel(
            q_SHE, kv_TE, indices_SK, lengths_S, launchable(sink_H), has_sink, scale * LOG2E, out_SHR, lse_SH
        )
    return (out_SHR if rank == d_v else out_SHR[..., :d_v].contiguous()), lse_SH


def unsupported(q_SHE: Tensor, d_v: int, scale: float) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    heads, width = q_SHE.shape[1:]
    if q_SHE.dtype not in DTYPES:
        return f"dtype {str(q_SHE.dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    if heads > MAX_HEADS:
        return f"{heads} heads, more than {MAX_HEADS}"
    rank, rope = _native(d_v, width - d_v)
    if rank > MAX_RANK or rank + rope > MAX_WIDTH:
        return f"{d_v} + {width - d_v} dims a token, more than {MAX_RANK} for values or {MAX_WIDTH} in all"
    if not 0 < scale < float("inf"):
        return f"scale {scale} is not a positive number"
    return None


def compile_for(heads: int, rank: int, rope: int, dtype: torch.dtype) -> Any:
    """The attention kernel for a head count and native sizes; compiles without a GPU, once per variant."""
    name = DTYPES[dtype]
    if heads > 32:
        tiles = -(-heads // 64)
        return compiled(
            ("many", tiles, rank, rope, name), lambda: programs.many_heads(tiles, rank, rope, name)
        )
    columns = max(8, 1 << (heads - 1).bit_length())
    return compiled(("few", columns, rank, rope, name), lambda: few_heads(columns, rank, rope, name))


def _native(d_v: int, rope: int) -> tuple[int, int]:
    """The sizes that the kernels run for ``d_v`` and ``rope``: multiples of 64 and of 32."""
    return -(-d_v // 64) * 64, -(-rope // 32) * 32


def _check(
    q_SHE: Tensor,
    kv_TE: Tensor,
    indices_SK: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
) -> None:
    require(
        q_SHE.ndim == 3 and kv_TE.ndim == 2 and indices_SK.ndim == 2,
        f"q {list(q_SHE.shape)}, kv {list(kv_TE.shape)}, indices {list(indices_SK.shape)}:"
        " expected [S, H, E], [T, E] or [T, 1, E], [S, K] or [S, 1, K]",
    )
    queries, heads, width = q_SHE.shape
    require(kv_TE.shape[1] == width, f"q has {width} dims a head and kv {kv_TE.shape[1]} a token")
    require(kv_TE.dtype == q_SHE.dtype, f"q is {q_SHE.dtype} and kv {kv_TE.dtype}")
    require(indices_SK.shape[0] == queries, f"{queries} queries and {indices_SK.shape[0]} lists")
    require(0 < d_v <= width, f"d_v is {d_v} and a token has {width} dims")
    if topk_length is not None:
        require(
            topk_length.shape == (queries,), f"topk_length {list(topk_length.shape)} for {queries} queries"
        )
    if attn_sink is not None:
        require(attn_sink.shape == (heads,), f"attn_sink {list(attn_sink.shape)} for {heads} heads")
    for other in (kv_TE, indices_SK, topk_length, attn_sink):
        same = other is None or other.device == q_SHE.device
        require(same, f"q is on {q_SHE.device} and another argument is not")


def lengths_kernel() -> Any:
    return compiled("lengths", programs.lengths)
