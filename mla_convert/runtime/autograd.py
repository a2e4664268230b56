"""Autograd functions over the kernels and their references: sparse attention with an explicit backward pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Forward(Protocol):
    """``reference.sparse_mla`` or ``kernels.sparse_mla.sparse_mla``."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        *,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        d_v: int,
    ) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """``backward.sparse_mla_backward`` or ``kernels.sparse_mla_backward.sparse_mla_backward``."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        out_SHR: Tensor,
        lse_SH: Tensor,
        d_out_SHR: Tensor,
        *,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        d_v: int,
        d_lse: Tensor | None = None,
        deterministic: bool | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class SparseMLA(torch.autograd.Function):
    """``sparse_mla`` with gradients for q, kv and attn_sink, through both of its results.

    Keeps q, kv, indices, out and lse for the backward pass, which computes the probabilities again. It can be
    differentiated once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_SHE: Tensor,
        kv_TE: Tensor,
        indices_SK: Tensor,
        scale: float,
        topk_length: Tensor | None,
        attn_sink: Tensor | None,
        d_v: int,
        deterministic: bool | None,
        run: Forward,
        run_backward: Backward,
    ) -> tuple[Tensor, Tensor]:
        out_SHR, lse_SH = run(
            q_SHE, kv_TE, indices_SK, scale, topk_length=topk_length, attn_sink=attn_sink, d_v=d_v
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q_SHE, kv_TE, indices_SK, topk_length, attn_sink, out_SHR, lse_SH)
        ctx.scale, ctx.d_v, ctx.deterministic, ctx.run_backward = scale, d_v, deterministic, run_backward
        return out_SHR, lse_SH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_SHR: Tensor | None, d_lse_SH: Tensor | None) -> tuple[Tensor | None, ...]:
        q_SHE, kv_TE, indices_SK, topk_length, attn_sink, out_SHR, lse_SH = ctx.saved_tensors
        dq = dkv = d_sink = None
        if d_out_SHR is not None or d_lse_SH is not None:
            dq, dkv, d_sink = ctx.run_backward(
                q_SHE,
                kv_TE,
                indices_SK,
                ctx.scale,
                out_SHR,
                lse_SH,
                torch.zeros_like(out_SHR) if d_out_SHR is None else d_out_SHR,
                topk_length=topk_length,
                attn_sink=attn_sink,
                d_v=ctx.d_v,
                d_lse=d_lse_SH,
                deterministic=ctx.deterministic,
            )
        return dq, dkv, None, None, None, d_sink, None, None, None, None


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    *,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    d_v: int,
    deterministic: bool | None = None,
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """``reference.sparse_mla`` (with ``kernels`` those of Hopper), and the backward pass that belongs to it.

    Args:
        q, kv, indices, scale, topk_length, attn_sink, d_v: As ``reference.sparse_mla`` takes them.
        deterministic: Whether two backward passes give equal bits; None: what
            ``torch.are_deterministic_algorithms_enabled`` says when the pass runs.

    Returns:
        out [S, H, d_v] and lse [S, H], both of which carry gradients.
    """
    forward: Forward
    run_backward: Backward
    if kernels:
        from mla_convert.runtime.kernels import sparse_mla as kernel
        from mla_convert.runtime.kernels import sparse_mla_backward as kernel_backward

        forward, run_backward = kernel.sparse_mla, kernel_backward.sparse_mla_backward
    else:
        from mla_convert.runtime import backward, reference

        forward, run_backward = reference.sparse_mla, backward.sparse_mla_backward
    result: tuple[Tensor, Tensor] = SparseMLA.apply(  # type: ignore[no-untyped-call]
        q, kv, indices, scale, topk_length, attn_sink, d_v, deterministic, forward, run_backward
    )
    return result
