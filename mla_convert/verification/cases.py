"""The random inputs that every path of one block shares."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from mla_convert.verification.weights import LoadedBlock


@dataclass(frozen=True, slots=True)
class Draw:
    """What the inputs of a block depend on besides its name, so that each can be drawn again, on any rank.

    Attributes:
        tokens: Sequence length.
        rows: How many of its queries are checked, spread over the sequence and including the last.
        dtype: Hidden states are rounded to it.
        seed: Chooses the hidden states.
        backward: Draw a gradient of the output too.
    """

    tokens: int
    rows: int
    dtype: torch.dtype
    seed: int = 0
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of one block.

    ``x_SD`` hidden states of all tokens (float64), ``rows_S`` the tokens whose queries are checked, ``indices_SK``
    the keys that each of them may see (None: all before it), ``towards_SD`` the gradient of the output with which
    the backward pass starts (None: forward only).
    """

    draw: Draw
    x_SD: Tensor
    positions_S: Tensor
    rows_S: Tensor
    indices_SK: Tensor | None
    towards_SD: Tensor | None


def make_case(loaded: LoadedBlock, draw: Draw, device: torch.device) -> Case:
    """Layer-normed hidden states and the gradient of the output: standard normal, rounded to the compute dtype.

    The seeds come from the block's prefix, so a run can be repeated layer by layer.
    """

    def normal(what: str, rows: int) -> Tensor:
        text = f"{draw.seed} {loaded.block.prefix}{what}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(sha256(text).digest()[:8], "big") >> 1)
        drawn = torch.randn(rows, loaded.spec.hidden, generator=generator).to(draw.dtype)
        return drawn.to(device, torch.float64)

    rows_S = _spread(draw.tokens, draw.rows)
    return Case(
        draw,
        normal("", draw.tokens),
        torch.arange(draw.tokens, device=device),
        rows_S.to(device),
        None,
        normal(" gradient", rows_S.numel()) if draw.backward else None,
    )


def _spread(tokens: int, rows: int) -> Tensor:
    if rows >= tokens:
        return torch.arange(tokens)
    return torch.tensor(sorted({number * (tokens - 1) // max(1, rows - 1) for number in range(rows)}))
