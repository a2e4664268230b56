"""What a block is called with: hidden states, where packed sequences begin, and lists of keys.

Shape suffixes as in ``reference``; each function raises BadInputError for what cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mla_convert.errors import BadInputError
from mla_convert.runtime.tokens import Tokens


def check_hidden_states(x: Tensor, packed: bool, hidden: int, weight: Tensor) -> None:
    """Whether x is [s, b, D], or packed [t, D] or [t, 1, D], in the dtype and on the device of a weight.

    Under autocast any floating-point dtype will do.
    """
    shapes = "[t, D] or [t, 1, D]" if packed else "[s, b, D]"
    if x.ndim not in ((2, 3) if packed else (3,)) or x.shape[-1] != hidden:
        raise BadInputError(f"x is {list(x.shape)}; it must be {shapes} with D = {hidden}.")
    if packed and x.ndim == 3 and x.shape[1] != 1:
        raise BadInputError(f"x is {list(x.shape)}: packed sequences have a batch of 1.")
    if x.device != weight.device:
        raise BadInputError(
            f"x is on {x.device} and the block on {weight.device}.", hint="Move one with .to(device)."
        )
    if x.dtype == weight.dtype or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        return
    raise BadInputError(
        f"x is {_name(x.dtype)} and the block's weights are {_name(weight.dtype)}.",
        hint="Convert one with .to(dtype), or run under torch.autocast.",
    )


def lengths_between(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Tokens of each packed sequence, from where each begins and, behind the last, their sum."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not all(isinstance(bound, int) for bound in bounds):
        raise BadInputError(f"cu_seqlens is {bounds}; it must be one row of whole numbers.")
    lengths = tuple(end - start for start, end in pairwise(bounds))
    if not bounds or bounds[0] != 0 or any(length < 0 for length in lengths):
        raise BadInputError(f"cu_seqlens is {bounds}; it must begin with 0 and never fall.")
    return lengths


def lists_of(indices: Tensor, tokens: Tokens) -> Tensor:
    """Given lists [..., K] as [S, K], one for each query."""
    rows = tokens.keys_S.numel()
    if indices.ndim < 2 or indices.shape[:-1].numel() != rows:
        raise BadInputError(
            f"indices are {list(indices.shape)}; they need a list for each of {rows} queries."
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise BadInputError(f"indices are {_name(indices.dtype)}; they must be int32 or int64.")
    if indices.device != tokens.keys_S.device:
        raise BadInputError(f"indices are on {indices.device} and x on {tokens.keys_S.device}.")
    return indices.reshape(rows, indices.shape[-1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
