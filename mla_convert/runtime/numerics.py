"""Which dtype a sum runs in, and how much of a computation to do at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")

#: Elements that the temporaries of one chunk may hold together: 512 MiB of float32.
CHUNK_ELEMENTS = 1 << 27


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums run in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(count: int, elements_each: int) -> Iterator[slice]:
    """Cut ``count`` items into ranges whose temporaries stay within ``CHUNK_ELEMENTS``."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def recomputed(function: Callable[..., Result], *arguments: object) -> Result:
    """``function(*arguments)``, which keeps its arguments alone for a backward pass and then runs again.

    What one chunk needs for its gradients is many times what it returns: without this, a backward pass would need
    the memory of all chunks together.
    """
    wanted = (isinstance(argument, Tensor) and argument.requires_grad for argument in arguments)
    if not torch.is_grad_enabled() or not any(wanted):
        return function(*arguments)
    result: Result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, in at least float32, back to x's dtype, times weight."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
