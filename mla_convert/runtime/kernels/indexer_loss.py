"""The indexer's loss and gradients on a Hopper GPU; the programs are in ``_indexer_loss_target`` and ``_indexer_loss``.

Both stages run as lists: over all keys, a query's list is the range of keys that it sees.

Shapes: S queries, T tokens, I indexer heads, J indexer dims, H heads and E dims of the main attention, K entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_convert.errors import CannotError
from mla_convert.runtime.indexer_loss import MainAttention, Results
from mla_convert.runtime.kernels._common import DTYPES, as_int32, compiled, launchable, launcher
from mla_convert.runtime.kernels._indexer_loss import loss_and_gradients as loss_program
from mla_convert.runtime.kernels._indexer_loss_target import target as target_program
from mla_convert.runtime.kernels.sparse_mla_backward import entry_order, listed_blocks, sum_kernel

MAX_INDEX_HEADS = 64
MAX_INDEX_DIM = 128
MAX_WIDTH = 576
TILE = 64  # heads of the main attention that a thread block takes
WORKSPACE_BYTES = 1 << 30
"""Targets, logits and, over all keys, lists held at a time; the deterministic mode holds as much of dk again."""
MOST_QUERIES = 65535
"""At a time: CUDA's limit on the second dim of a grid."""


def loss_and_gradients(
    q_SIJ: Tensor,
    k_TJ: Tensor,
    weights_SI: Tensor,
    *,
    attention: MainAttention,
    deterministic: bool,
    wanted: bool,
) -> Results:
    """The loss of ``runtime.indexer_loss.indexer_loss``, whose arguments these hold, checked, before its reduction.

    Targets, logits, and sums over heads and keys are float32; gradients of scores are rounded to q's dtype between
    two products.

    Args:
        deterministic: False adds to dk with atomics, in an order that differs from run to run. True stores every
            entry's gradient and sums them in a fixed order. All else is the same in every run.
        wanted: Whether to compute gradients.

    Returns:
        The sum of the queries' losses, how many queries see a key, and the gradients of the sum for q (in its dtype),
        k and weights (float32), or none.

    Raises:
        CannotError: A size or dtype that the kernels do not take; ``unsupported`` says which.
    """
    q_SHE, kv_TE, lse_SH, indices_SK = (
        attention.q_SHE,
        attention.kv_TE,
        attention.lse_SH,
        attention.indices_SK,
    )
    (queries, index_heads, dim), tokens, device = q_SIJ.shape, k_TJ.shape[0], q_SIJ.device
    heads, main_width = q_SHE.shape[1:]
    if reason := unsupported(q_SIJ, q_SHE):
        raise CannotError(f"The indexer's loss cannot run by kernels: {reason}.")
    tiles, slots = -(-heads // TILE), deterministic and wanted
    width, padded = native(dim, main_width)
    q_SIJ, k_TJ = (launchable(pad(x.to(q_SIJ.dtype), (0, width - dim))) for x in (q_SIJ, k_TJ))
    q_SHE, kv_TE = (launchable(pad(x.to(q_SHE.dtype), (0, padded - main_width))) for x in (q_SHE, kv_TE))
    weights_SI = launchable(weights_SI.to(torch.float32))
    has_lse = lse_SH is not None
    if lse_SH is None:
        lse_SH = weights_SI.new_empty(queries, heads)
    lse_SH = launchable(lse_SH.to(torch.float32))
    loss_S = torch.zeros(queries, dtype=torch.float32, device=device)
    counted = torch.zeros((), dtype=torch.int64, device=device)
    dq_SIJ, dw_SI = torch.zeros_like(q_SIJ), torch.zeros_like(weights_SI)
    dk_TJ = torch.zeros(k_TJ.shape, dtype=torch.float32, device=device)
    if indices_SK is None:
        lists = _ranges(attention.starts, attention.ends, queries, tokens, device)
        entries = tokens
    else:
        lists = _given(indices_SK, attention.topk_length)
        entries = indices_SK.shape[1]
    step = WORKSPACE_BYTES // max(1, 4 * entries * max(tiles + 3, width if slots else 0))
    step = min(max(1, step), MOST_QUERIES)
    targets = _entry("target", heads, padded, q_SHE.dtype)
    losses = _entry("loss", index_heads, width, q_SIJ.dtype, slots)
    with torch.cuda.device(device):
        for first in range(0, queries if tokens and entries else 0, step):
            rows = slice(first, min(first + step, queries))
            listed_SK, limits_S = lists(rows)
            lengths_S, blocks = listed_blocks(listed_SK, limits_S, tokens)
            counted += (lengths_S > 0).sum()
            parts = torch.zeros(tiles, *listed_SK.shape, dtype=torch.float32, device=device)
            targets(
                q_SHE[rows], kv_TE, listed_SK, lengths_S, blocks, lse_SH[rows], int(has_lse), attention.scale, parts
            )  # fmt: skip
            target_SK = parts[0] if tiles == 1 else parts.sum(0)
            if attention.sum_over_ranks is not None:
                target_SK = launchable(attention.sum_over_ranks(target_SK))
            dk = torch.empty(listed_SK.numel(), width, dtype=torch.float32, device=device) if slots else dk_TJ
            losses(
                q_SIJ[rows], k_TJ, weights_SI[rows], listed_SK, lengths_S, blocks, target_SK, int(wanted),
                torch.empty_like(target_SK), loss_S[rows], dq_SIJ[rows], dw_SI[rows], dk,
            )  # fmt: skip
            if slots:
                order, begin = entry_order(listed_SK, lengths_S, tokens)
                _entry("sum", width, "float32")(dk, order, begin[0], 0, 1, dk_TJ)
    return loss_S.sum(), counted, (dq_SIJ[..., :dim], dk_TJ[:, :dim], dw_SI) if wanted else ()


Lists = Callable[[slice], tuple[Tensor, Tensor | None]]
"""Of some queries: their lists, and how many entries of each count (None: all)."""


def _given(indices_SK: Tensor, topk_length: Tensor | None) -> Lists:
    indices_SK = launchable(as_int32(indices_SK))
    limits_S = None if topk_length is None else launchable(as_int32(topk_length))
    return lambda rows: (indices_SK[rows], None if limits_S is None else limits_S[rows])


def _ranges(
    starts: Tensor | None, ends: Tensor | None, queries: int, tokens: int, device: torch.device
) -> Lists:
    """Lists of the keys from ``starts`` to ``ends``."""
    first_S = torch.zeros(queries, dtype=torch.int32, device=device)
    last_S = torch.full_like(first_S, tokens)
    if starts is not None:
        first_S = as_int32(starts).clamp(0, tokens)
    if ends is not None:
        last_S = as_int32(ends).clamp(0, tokens)
    keys_T = torch.arange(tokens, dtype=torch.int32, device=device)
    counts_S = (last_S - first_S).clamp(min=0)
    return lambda rows: (keys_T + first_S[rows, None], counts_S[rows])


@functools.cache
def _entry(what: str, *key: Any) -> Callable[..., None]:
    builders: dict[str, Callable[..., Any]] = {
        "target": target_kernel,
        "loss": compile_for,
        "sum": sum_kernel,
    }
    return launcher(builders[what](*key))


def unsupported(q_SIJ: Tensor, q_SHE: Tensor) -> str | None:
    """Why the kernels do not take these queries of the indexer and of the attention, or None if they do."""
    if q_SIJ.dtype not in DTYPES or q_SHE.dtype not in DTYPES:
        dtypes = " and ".join(str(x.dtype).removeprefix("torch.") for x in (q_SIJ, q_SHE))
        return f"dtypes {dtypes} are not bfloat16 or float16"
    heads, dim = q_SIJ.shape[1:]
    if not 0 < heads <= MAX_INDEX_HEADS or not 0 < dim <= MAX_INDEX_DIM:
        return (
            f"{heads} indexer heads of {dim} dims; it takes 1 to {MAX_INDEX_HEADS} heads of"
            f" 1 to {MAX_INDEX_DIM} dims"
        )
    if not 0 < q_SHE.shape[2] <= MAX_WIDTH or not q_SHE.shape[1]:
        return f"{q_SHE.shape[1]} heads of {q_SHE.shape[2]} dims; it takes heads of 1 to {MAX_WIDTH} dims"
    return None


def target_kernel(heads: int, width: int, dtype: torch.dtype) -> Any:
    """The kernel of the attention's probabilities; compiles without a GPU, once per variant."""
    columns = min(max(8, 1 << (heads - 1).bit_length()), TILE)
    key = ("indexer_loss_target", columns, width, dtype)
    return compiled(
        key, lambda: target_program(columns, width, DTYPES[dtype]), safe_access=False, insert_barriers=False
    )


def compile_for(heads: int, width: int, dtype: torch.dtype, slots: bool = False) -> Any:
    """The kernel of the loss for a head count and 64 or 128 dims; compiles without a GPU, once per variant.

    ``slots`` is for the deterministic mode, whose results go to ``sparse_mla_backward.sum_kernel``.
    """
    columns = max(16, 1 << (heads - 1).bit_length())
    key = ("indexer_loss", columns, width, dtype, slots)
    return compiled(
        key,
        lambda: loss_program(columns, width, DTYPES[dtype], slots),
        safe_access=False,
        insert_barriers=False,
    )


def native(index_dim: int, main_width: int) -> tuple[int, int]:
    """The sizes that the kernels run for these dims of the indexer and of the attention."""
    return (64 if index_dim <= 64 else 128), -(-main_width // 64) * 64
