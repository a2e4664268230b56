"""FlashMLA's layouts of the latent cache: FP8 rows of 656 bytes, and pages.

A cached token of 512 values and 64 rotary dims in FP8 is one row of 656 bytes:

| bytes | what |
|---|---|
| 0-511 | the values as float8 e4m3 |
| 512-527 | 4 float32 scales; value i is code i times scale i // 128 |
| 528-655 | the rotary dims as bfloat16 |
"""

from __future__ import annotations

import torch
from torch import Tensor

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE
GROUP = 128
FP8_ROW = RANK + 4 * (RANK // GROUP) + 2 * ROPE
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-4


def pack_fp8(kv: Tensor, *, power_of_two: bool = True) -> Tensor:
    """Cached tokens [..., 576] as FP8 rows, uint8 [..., 656].

    Args:
        kv: Any float dtype; 512 values, then 64 rotary dims.
        power_of_two: Round each scale up to a power of two of at least 1e-4, as FlashMLA's own quantiser does: then
            code times scale is exact in bfloat16, so every reader sees the same values. Otherwise a scale is
            max |value| / 448, as vLLM writes it.

    Raises:
        ValueError: another last dim.
    """
    if kv.shape[-1] != WIDTH:
        raise ValueError(f"a token of the FP8 cache has {RANK} + {ROPE} dims, got {kv.shape[-1]}")
    groups = kv[..., :RANK].to(torch.float32).reshape(*kv.shape[:-1], -1, GROUP)
    scales = groups.abs().amax(-1) / E4M3_MAX
    if power_of_two:
        # From the bits, since log2 of a power of two need not be whole. Mantissa 0: a power of two as it is.
        mantissa, exponent = torch.frexp(scales.clamp_min(SMALLEST_SCALE))
        scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))
    else:
        scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    codes = (groups / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
    rope = kv[..., RANK:].to(torch.bfloat16).contiguous()
    parts = (codes.view(torch.uint8), scales.contiguous().view(torch.uint8), rope.view(torch.uint8))
    return torch.cat(parts, dim=-1)


def unpack_fp8(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """FP8 rows [..., 656] as cached tokens [..., 576]: code times scale in float32, then rounded to ``dtype``.

    Args:
        rows: uint8 or float8_e4m3fn, 656 bytes in the last dim.

    Raises:
        ValueError: another last dim or dtype.
    """
    if not is_fp8(rows):
        raise ValueError(f"FP8 rows are {FP8_ROW} bytes, got {rows.dtype} {list(rows.shape)}")
    rows = rows.contiguous().view(torch.uint8)
    codes = rows[..., :RANK].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = rows[..., RANK : RANK + 4 * (RANK // GROUP)].contiguous().view(torch.float32)
    rope = rows[..., FP8_ROW - 2 * ROPE :].contiguous().view(torch.bfloat16)
    values = (codes.reshape(*codes.shape[:-1], -1, GROUP) * scales[..., None]).flatten(-2)
    return torch.cat((values.to(dtype), rope.to(dtype)), dim=-1)


def is_fp8(cache: Tensor) -> bool:
    """Whether a cache has FP8 rows."""
    return cache.dtype in (torch.uint8, torch.float8_e4m3fn) and cache.shape[-1] == FP8_ROW


def cache_rows(positions: Tensor, block_table: Tensor | None, page: int) -> Tensor:
    """Token positions [B, ...] of each request as rows of the whole cache: the ``indices`` of ``decode_mla``.

    Row = ``block_table[b, position // page] * page + position % page``; without a table request b's tokens are the
    ``page`` rows from b * page. A position that is negative or beyond the table becomes -1.
    """
    batch = positions.shape[0]
    flat = positions.reshape(batch, -1).long()
    if block_table is None:
        block_table = torch.arange(batch, device=positions.device)[:, None]
    table = block_table.long()
    known = (flat >= 0) & (flat < table.shape[1] * page)
    flat = flat.masked_fill(~known, 0)
    rows = table.gather(1, flat // page) * page + flat % page
    return rows.masked_fill(~known, -1).reshape(positions.shape).to(torch.int32)
