"""Rotary position embedding: inverse frequencies, cos and sin tables, and the two ways of pairing dims.

Shapes: S positions, P rotary dims, F = P / 2 frequencies.

Tables are float32 whatever the dtype of the model. Every engine builds them so, which makes them part of the
model's definition: a float64 reference with float64 angles would compute another model (at position 100 000 a
float32 angle is off by up to 0.004 rad).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_convert.runtime.spec import LinearScaling, LongRopeScaling, RopeSpec, YarnScaling


def inverse_frequencies(spec: RopeSpec, length: int = 1, device: torch.device | None = None) -> Tensor:
    """Radians a position for each pair, float32 [F]: theta^(-2i/P), then the scaling's correction.

    Args:
        length: Number of positions in use; only LongRoPE looks at it.
    """
    exponents_F = torch.arange(0, spec.dim, 2, dtype=torch.int64, device=device).float() / spec.dim
    periods_F = spec.theta**exponents_F
    match spec.scaling:
        case YarnScaling():
            return _yarn(spec.scaling, spec, periods_F)
        case LinearScaling(factor):
            return 1.0 / periods_F / factor
        case LongRopeScaling(short, long, original):
            divisors = torch.tensor(long if length > original else short, dtype=torch.float32, device=device)
            return 1.0 / (divisors * periods_F)
        case None:
            return 1.0 / periods_F


def table_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by; 1 unless the scaling says otherwise."""
    match spec.scaling:
        case YarnScaling():
            return spec.scaling.table_factor
        case LongRopeScaling():
            return spec.scaling.attention_factor
        case _:
            return 1.0


def rope_tables(spec: RopeSpec, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [S, F] each, for integer positions."""
    length = 1
    if isinstance(spec.scaling, LongRopeScaling) and positions_S.numel():
        length = int(positions_S.max()) + 1
    frequencies_F = inverse_frequencies(spec, length, positions_S.device)
    angles_SF = positions_S[:, None].float() * frequencies_F
    factor = table_factor(spec)
    return angles_SF.cos() * factor, angles_SF.sin() * factor


def apply_rope(x: Tensor, cos_SF: Tensor, sin_SF: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate ``x`` [S, P] or [S, H, P], in at least float32; the result has x's dtype and dim order.

    Interleaved pairs stay where they are (DeepSeek's cache layout). transformers moves them to the two halves
    instead, which changes no dot product as long as queries and keys agree.
    """
    if x.ndim == 3:
        cos_SF, sin_SF = cos_SF[:, None], sin_SF[:, None]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x.chunk(2, dim=-1)
    rotated = (a * cos_SF - b * sin_SF, b * cos_SF + a * sin_SF)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return joined.to(x.dtype)


def rotate(x: Tensor, positions_S: Tensor, spec: RopeSpec) -> Tensor:
    """``x`` [S, P] or [S, H, P] at its positions; unchanged where the spec does not rotate."""
    if not spec.rotated:
        return x
    cos_SF, sin_SF = rope_tables(spec, positions_S)
    return apply_rope(x, cos_SF, sin_SF, interleaved=spec.interleaved)


def _yarn(yarn: YarnScaling, spec: RopeSpec, periods_F: Tensor) -> Tensor:
    """Blend interpolated and original frequencies (arXiv 2309.00071, section 3.2, "NTK-by-parts").

    Pairs that turn more than ``beta_fast`` times within the original context keep their frequency, those that
    turn less than ``beta_slow`` times are slowed by ``factor``, with a linear ramp over the index between.
    """

    def pair_that_turns(times: float) -> float:
        turns = yarn.original_max_position / (times * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs_F = torch.arange(spec.dim // 2, dtype=torch.float32, device=periods_F.device)
    kept_F = 1 - ((pairs_F - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * periods_F) * (1 - kept_F) + 1.0 / periods_F * kept_F
