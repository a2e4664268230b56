"""Which code runs an operation, TileLang kernels or the torch reference, and the record of what really ran.

Nothing falls back in silence: a ``Backend`` can say why it is what it is (``explain``), and counts every call by
the code that served it (``ran``), so that a report can name the backend of each part.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from mla_convert.errors import CannotError
from mla_convert.runtime.checks import require

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Requested = Literal["auto", "reference", "tilelang"]
Name = Literal["reference", "tilelang"]

CAPABILITY = (9, 0)
"""The kernels use instructions of this compute capability (Hopper) alone; they do not run on newer ones either."""


@dataclass(frozen=True, slots=True)
class Backend:
    """How operations on one device are served.

    Attributes:
        name: What serves them where it can.
        reason: Why this backend was chosen, a clause without a full stop.
        device: The device it was resolved for, such as "cuda:0".
        strict: True if the kernels were asked for by name: a call that they cannot take then fails, where
            otherwise the reference takes it and ``ran`` says why.
        ran: Calls so far by operation, code and, for the reference in place of a kernel, reason.
        forms: Forms of a block's attention that were chosen, and why each was the last time.
    """

    name: Name
    reason: str
    device: str
    strict: bool = False
    ran: Counter[str] = field(default_factory=Counter, compare=False)
    forms: dict[str, str] = field(default_factory=dict, compare=False)

    def sparse_mla(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        *,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        d_v: int,
    ) -> tuple[Tensor, Tensor]:
        """``reference.sparse_mla`` or ``kernels.sparse_mla.sparse_mla``, which share this signature.

        A batch of sequences, each with a cache of its own, has one dim more in front of every tensor but
        ``attn_sink``: q [B, S, H, E], kv [B, T, E], indices [B, S, K] into the sequence's own cache.
        """
        require(q.ndim in (3, 4), f"q {list(q.shape)}: expected [S, H, E] or [B, S, H, E]")
        if q.ndim == 4:
            batch, queries = q.shape[:2]
            flat_q_SHE, flat_kv_TE, flat_indices_SK = _one_sequence(q, kv, indices)
            if topk_length is not None:
                shape = list(topk_length.shape)
                require(shape == [batch, queries], f"topk_length {shape} for {batch} x {queries} queries")
            limits = None if topk_length is None else topk_length.flatten()
            out_SHV, lse_SH = self.sparse_mla(
                flat_q_SHE,
                flat_kv_TE,
                flat_indices_SK,
                scale,
                topk_length=limits,
                attn_sink=attn_sink,
                d_v=d_v,
            )
            heads = q.shape[2]
            return out_SHV.reshape(batch, queries, heads, d_v), lse_SH.reshape(batch, queries, heads)
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import sparse_mla as kernels

            if _needs_grad(q, kv, attn_sink):
                from mla_convert.runtime import autograd
                from mla_convert.runtime.kernels import sparse_mla_backward

                if self._kernel_runs("sparse_mla", sparse_mla_backward.unsupported(q, d_v, scale)):
                    return autograd.sparse_mla(
                        q,
                        kv,
                        indices,
                        scale,
                        topk_length=topk_length,
                        attn_sink=attn_sink,
                        d_v=d_v,
                        kernels=True,
                    )
            elif self._kernel_runs("sparse_mla", kernels.unsupported(q, d_v, scale)):
                return kernels.sparse_mla(
                    q, kv, indices, scale, topk_length=topk_length, attn_sink=attn_sink, d_v=d_v
                )
        else:
            self.ran["sparse_mla: reference"] += 1
        from mla_convert.runtime import reference

        return reference.sparse_mla(
            q, kv, indices, scale, topk_length=topk_length, attn_sink=attn_sink, d_v=d_v
        )

    def dense_mla(
        self,
        q: Tensor,
        kv: Tensor,
        scale: float,
        *,
        rows_S: Tensor | None = None,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        attn_sink: Tensor | None = None,
        d_v: int,
    ) -> tuple[Tensor, Tensor]:
        """``reference.dense_mla`` or ``kernels.dense_mla.dense_mla``, which share this signature."""
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import dense_mla as kernels

            why = _needs_grad(q, kv, attn_sink) or kernels.unsupported(q, d_v, scale)
            if self._kernel_runs("dense_mla", why):
                return kernels.dense_mla(
                    q,
                    kv,
                    scale,
                    rows_S=rows_S,
                    starts=starts,
                    ends=ends,
                    attn_sink=attn_sink,
                    d_v=d_v,
                )
        else:
            self.ran["dense_mla: reference"] += 1
        from mla_convert.runtime import reference

        return reference.dense_mla(
            q, kv, scale, rows_S=rows_S, starts=starts, ends=ends, attn_sink=attn_sink, d_v=d_v
        )

    def decode_mla(
        self,
        q: Tensor,
        kv_cache: Tensor,
        *,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
        scale: float,
        causal: bool = False,
        indices: Tensor | None = None,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        d_v: int,
    ) -> tuple[Tensor, Tensor]:
        """``decode.decode_mla`` or ``kernels.decode_mla.decode_mla``, which share this signature."""
        options: dict[str, Any] = {
            "cache_seqlens": cache_seqlens,
            "block_table": block_table,
            "scale": scale,
            "causal": causal,
            "indices": indices,
            "topk_length": topk_length,
            "attn_sink": attn_sink,
            "d_v": d_v,
        }
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import decode_mla as kernels

            why = _needs_grad(q, kv_cache, attn_sink)
            why = why or kernels.unsupported(q, kv_cache, d_v, scale)
            if self._kernel_runs("decode_mla", why):
                return kernels.decode_mla(q, kv_cache, **options)
        else:
            self.ran["decode_mla: reference"] += 1
        from mla_convert.runtime import decode

        return decode.decode_mla(q, kv_cache, **options)

    def indexer_logits(
        self,
        q_SIJ: Tensor,
        k_TJ: Tensor,
        weights_SI: Tensor,
        *,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
    ) -> Tensor:
        """``reference.indexer_logits`` or ``kernels.indexer_logits.indexer_logits``."""
        require(q_SIJ.ndim == 3, f"q {list(q_SIJ.shape)}: expected [S, I, J]")
        options = {"starts": starts, "ends": ends, "q_scale": q_scale, "k_scale": k_scale}
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import indexer_logits as kernels

            why = _needs_grad(q_SIJ, k_TJ, weights_SI) or kernels.unsupported(q_SIJ)
            if self._kernel_runs("indexer_logits", why):
                return kernels.indexer_logits(q_SIJ, k_TJ, weights_SI, **options)
        else:
            self.ran["indexer_logits: reference"] += 1
        from mla_convert.runtime import reference

        return reference.indexer_logits(q_SIJ, k_TJ, weights_SI, **options)

    def select_topk(
        self, logits_ST: Tensor, k: int, *, starts: Tensor | None = None, ends: Tensor | None = None
    ) -> Tensor:
        """``reference.select_topk`` or ``kernels.topk.select_topk``."""
        require(logits_ST.ndim == 2, f"logits {list(logits_ST.shape)}: expected [S, T]")
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import topk as kernels

            if self._kernel_runs("select_topk", kernels.unsupported(logits_ST)):
                return kernels.select_topk(logits_ST, k, starts=starts, ends=ends)
        else:
            self.ran["select_topk: reference"] += 1
        from mla_convert.runtime import reference

        return reference.select_topk(logits_ST, k, starts=starts, ends=ends)

    def indexer_select(
        self,
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
        """``reference.indexer_select`` or ``kernels.indexer_select.indexer_select``.

        Which keys are selected has no gradient, so the kernels also serve calls inside a backward graph.
        """
        require(q_SIJ.ndim == 3, f"q {list(q_SIJ.shape)}: expected [S, I, J]")
        options = {"starts": starts, "ends": ends, "q_scale": q_scale, "k_scale": k_scale}
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import indexer_select as kernels

            if self._kernel_runs("indexer_select", kernels.unsupported(q_SIJ)):
                return kernels.indexer_select(q_SIJ, k_TJ, weights_SI, topk, **options)
        else:
            self.ran["indexer_select: reference"] += 1
        from mla_convert.runtime import reference

        return reference.indexer_select(q_SIJ, k_TJ, weights_SI, topk, **options)

    def indexer_loss(
        self,
        q_SIJ: Tensor,
        k_TJ: Tensor,
        weights_SI: Tensor,
        q_SHE: Tensor,
        kv_TE: Tensor,
        scale: float,
        **options: Any,
    ) -> Tensor:
        """``indexer_loss.indexer_loss``, whose options these are, computed by its kernels where they take the call."""
        from mla_convert.runtime.indexer_loss import indexer_loss

        require(
            q_SIJ.ndim == q_SHE.ndim == 3,
            f"the indexer's q {list(q_SIJ.shape)}, the attention's {list(q_SHE.shape)}: expected [S, I, J], [S, H, E]",
        )
        runs = False
        if self.name == "tilelang":
            from mla_convert.runtime.kernels import indexer_loss as kernels

            runs = self._kernel_runs("indexer_loss", kernels.unsupported(q_SIJ, q_SHE))
        else:
            self.ran["indexer_loss: reference"] += 1
        return indexer_loss(q_SIJ, k_TJ, weights_SI, q_SHE, kv_TE, scale, kernels=runs, **options)

    def explain(self) -> str:
        """One sentence on the choice, then one on each kind of call and each form so far."""
        lines = [f"{self.device} uses {self.name}: {self.reason}."]
        lines += [
            f"{what} ({count} call{'s' if count > 1 else ''})." for what, count in sorted(self.ran.items())
        ]
        lines += [
            f"The {name} form was last chosen: {reason}." for name, reason in sorted(self.forms.items())
        ]
        return " ".join(lines)

    def note_form(self, name: str, reason: str) -> None:
        """Record that a form of a block's attention was chosen, and why (a clause without a full stop)."""
        self.forms[name] = reason
        if name == "multi-head":
            self.ran["multi_head: torch"] += 1  # the other forms end in one of the operations here

    def _kernel_runs(self, operation: str, why_not: str | None) -> bool:
        """Record who serves this call, and whether that is the kernel; a strict backend raises instead."""
        if why_not is None:
            self.ran[f"{operation}: tilelang"] += 1
            return True
        if self.strict:
            raise CannotError(
                f"The TileLang kernel of {operation} was asked for and cannot run: {why_not}.",
                hint="Ask for the backend 'auto' or 'reference', or use bfloat16.",
            )
        self.ran[f"{operation}: reference, {why_not}"] += 1
        return False


def available(device: str | torch.device) -> tuple[bool, str]:
    """Whether the TileLang kernels can run on ``device``, and why or why not (a clause without a full stop)."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return False, f"{device} is not a CUDA device"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    if device.index is not None and device.index >= torch.cuda.device_count():
        return False, f"no device {device}; there are {torch.cuda.device_count()}"
    if torch.version.hip:
        return False, "an AMD GPU; the kernels are written for NVIDIA Hopper"
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if capability != CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, CAPABILITY))
        return False, f"{name} has compute capability {have}; the kernels are written for {need} (Hopper)"
    try:
        importlib.import_module("tilelang")
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"TileLang cannot be imported ({error})"
    return True, f"TileLang kernels on {name}"


def resolve_backend(requested: Requested, device: str | torch.device) -> Backend:
    """The backend for ``device``.

    Args:
        requested: "tilelang" insists on the kernels, "reference" on torch. "auto" takes the kernels if
            ``available`` says so, and for single calls that they cannot take (dtype, sizes, gradients) the
            reference, noted in ``Backend.ran``.

    Raises:
        CannotError: "tilelang" on a device where the kernels cannot run.
        ValueError: No backend has that name.
    """
    names = get_args(Requested)
    require(requested in names, f"no backend {requested!r}; there are {', '.join(names)}")
    if requested == "reference":
        return Backend("reference", "the reference was asked for", str(device))
    runs, reason = available(device)
    if requested == "auto":
        return Backend("tilelang" if runs else "reference", reason, str(device))
    if not runs:
        raise CannotError(
            f"The TileLang kernels were asked for and cannot run: {reason}.",
            hint="Run on an H100 or H200 with TileLang installed, or ask for the backend 'auto' or 'reference'.",
        )
    return Backend("tilelang", reason, str(device), strict=True)


def _needs_grad(*tensors: Tensor | None) -> str | None:
    """Why a kernel without a backward pass cannot take a call: gradients must flow through it."""
    import torch

    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return "gradients are needed and this kernel has no backward pass"
    return None


def _one_sequence(q_BSHE: Tensor, kv_BTE: Tensor, indices_BSK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A batch as one packed sequence: caches one behind the other, and lists that point into their own."""
    import torch

    kv_BTE = kv_BTE.squeeze(2) if kv_BTE.ndim == 4 else kv_BTE
    indices_BSK = indices_BSK.squeeze(2) if indices_BSK.ndim == 4 else indices_BSK
    if kv_BTE.ndim != 3 or indices_BSK.ndim != 3 or kv_BTE.shape[0] != q_BSHE.shape[0]:
        raise ValueError(
            f"q {list(q_BSHE.shape)}, kv {list(kv_BTE.shape)}, indices {list(indices_BSK.shape)}:"
            " expected [B, S, H, E], [B, T, E], [B, S, K]"
        )
    if indices_BSK.shape[:2] != q_BSHE.shape[:2]:
        raise ValueError(f"q {list(q_BSHE.shape)} and indices {list(indices_BSK.shape)} differ in B or S")
    batch, tokens = kv_BTE.shape[:2]
    offsets_B = torch.arange(batch, device=indices_BSK.device) * tokens
    listed_BSK = (indices_BSK >= 0) & (
        indices_BSK < tokens
    )  # else one sequence would read the next one's cache
    indices_BSK = torch.where(listed_BSK, indices_BSK + offsets_B[:, None, None], -1)
    return q_BSHE.flatten(0, 1), kv_BTE.flatten(0, 1), indices_BSK.flatten(0, 1)
