"""Level 5: the gradient of every weight, absorbed with split weights against standard with combined ones.

Both start from the same random gradient of the output and are compared with float64. K and V of the absorbed path
are held against the rows of the combined weight's gradient. A gradient may be as far off as the standard path's
own is by rounding, times a factor, over the whole tensor and for its worst head, row or token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.runtime import reference
from mla_convert.runtime.spec import AttentionSpec
from mla_convert.verification.absorbed import BY_HEAD, Gradients, Outcome, leaf, leaves, named
from mla_convert.verification.cases import Case
from mla_convert.verification.result import GradientErrors, GradientResult
from mla_convert.verification.weights import LoadedBlock


def run_standard(loaded: LoadedBlock, case: Case, dtype: torch.dtype) -> Outcome:
    """Standard attention with the combined weight, in one piece; gradients of it split into those of K and V."""
    block, spec = loaded.to(dtype), loaded.spec
    weights, w_kv_b, x_SD = block.weights, block.w_kv_b, case.x_SD.to(dtype)
    backwards = case.towards_SD is not None
    if backwards:
        weights, w_kv_b, x_SD = leaves(weights), leaf(w_kv_b), leaf(x_SD)
    with torch.set_grad_enabled(backwards):
        projected = reference.project(x_SD, weights, spec, case.positions_S).take_queries(case.rows_S)
        o_SHV = reference.standard_attention(
            projected, w_kv_b, spec, indices=case.indices_SK, rows_S=case.rows_S
        )
        output_SD = reference.output_projection(o_SHV, weights)
    if case.towards_SD is None:
        return Outcome(o_SHV, output_SD, None)
    torch.autograd.backward([output_SD], [case.towards_SD.to(output_SD)])
    found = {"kv_b": w_kv_b.grad, "x": x_SD.grad}
    found |= {name: weight.grad for name, weight in named(weights).items()}
    grads = {name: grad for name, grad in found.items() if grad is not None}
    halves = reference.split_kv_rows(grads.pop("kv_b"), spec)
    grads |= dict(zip(("k_b", "v_b"), halves, strict=True))
    return Outcome(o_SHV.detach(), output_SD.detach(), grads)


def compare_gradients(
    absorbed: Gradients,
    standard: Gradients,
    truth: Gradients,
    spec: AttentionSpec,
    *,
    factor: float,
    floor: float,
    min_cosine: float,
) -> tuple[GradientResult, ...]:
    """Each weight's gradient, both paths against float64."""
    results = []
    for name, true in truth.items():
        own = measure_gradient(standard[name], true, name, spec)
        ours = measure_gradient(absorbed[name], true, name, spec)
        limit = GradientErrors(min_cosine, factor * own.relative + floor, factor * own.worst + floor, own.at)
        passed = ours.cosine > min_cosine and ours.relative <= limit.relative and ours.worst <= limit.worst
        results.append(GradientResult(name, _unit(name, true), own, ours, limit, passed))
    return tuple(results)


def measure_gradient(grad: Tensor, truth: Tensor, name: str, spec: AttentionSpec) -> GradientErrors:
    """Errors of one gradient; not-a-number anywhere counts as infinite error.

    The error of a head is relative to the head's own gradient; that of a row or token to the root mean square of
    all of them, since one that hardly matters has a gradient of mostly rounding.
    """
    grad, truth = grad.to(truth.device, torch.float64), truth.to(torch.float64)
    difference = (grad - truth).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    size = truth.norm()
    if float(size) == 0:
        relative = 0.0 if float(difference.abs().max()) == 0 else float("inf")
        return GradientErrors(1.0 if relative == 0 else -1.0, relative, relative, 0)
    cosine = torch.nn.functional.cosine_similarity(grad.flatten(), truth.flatten(), dim=0)
    by_part, sizes = (_parts(tensor, name, spec).norm(dim=1) for tensor in (difference, truth))
    if _unit(name, truth) != "head":
        sizes = size / by_part.numel() ** 0.5
    by_part = torch.where(by_part > 0, by_part / sizes, 0.0)
    at = int(by_part.argmax())
    return GradientErrors(
        cosine=float(cosine.nan_to_num(nan=-1.0)),
        relative=float(difference.norm() / size),
        worst=float(by_part[at]),
        at=at,
    )


def _parts(grad: Tensor, name: str, spec: AttentionSpec) -> Tensor:
    """One row a head, output feature or token."""
    if name in BY_HEAD:
        return grad.reshape(spec.heads, -1)
    if name == "o":
        return grad.reshape(-1, spec.heads, spec.v).transpose(0, 1).reshape(spec.heads, -1)
    return grad.reshape(1, -1) if grad.ndim == 1 else grad


def _unit(name: str, grad: Tensor) -> str:
    if name in BY_HEAD or name == "o":
        return "head"
    return "token" if name == "x" else "all" if grad.ndim == 1 else "row"
