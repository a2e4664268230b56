"""The absorbed path of one block on its tensor- and context-parallel ranks, forward and backward.

A rank holds its heads of the query, K, V and output projections and its pieces of the sequence. It projects its
tokens, gets the latents of all others, attends with its queries, and contributes to the sums: outputs over the
heads, gradients over everything. Ranks that are folded into one process run one after the other here; in
``processes`` they are real, and run the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_convert.runtime import reference
from mla_convert.runtime.dispatch import Backend
from mla_convert.runtime.parallel import context_rows
from mla_convert.runtime.reference import DenseAttention
from mla_convert.runtime.weights import AttentionWeights
from mla_convert.verification.cases import Case
from mla_convert.verification.weights import LoadedBlock

Gradients = dict[str, Tensor]

#: Weights whose rows belong to heads; the columns of ``o`` do.
BY_HEAD = ("q", "q_b", "k_b", "v_b")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Output by head [rows, H, V] and of the block [rows, D]; gradients by the name of weight (``x`` the input)."""

    head_SHV: Tensor
    output_SD: Tensor
    gradients: Gradients | None


@dataclass(frozen=True, slots=True)
class Grid:
    """How many ranks share the heads and the tokens; rank = cp_rank * tp + tp_rank."""

    tp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp

    def held(self, tokens: int, cp_rank: int) -> Tensor:
        """The tokens of one context-parallel rank, in its order."""
        return context_rows((tokens,), cp_rank, self.cp)

    def gathered(self, tokens: int) -> Tensor:
        """The tokens in the order in which an all-gather brings them."""
        return torch.cat([self.held(tokens, rank) for rank in range(self.cp)])


class Ranks(Protocol):
    """Whoever runs the absorbed path: ``Folded``, or ``processes.RealRanks``."""

    def load(self, loaded: LoadedBlock) -> None:
        """The next block is this one."""
        ...

    def run(self, loaded: LoadedBlock, case: Case, swap: tuple[int, int] | None) -> Outcome:
        """Every rank's part of the block, put together; ``swap`` exchanges two heads of K before."""
        ...

    def ran(self) -> dict[str, int]:
        """The calls of all ranks, as ``Backend.ran`` counts them."""
        ...


class Folded:
    """All ranks in this process, dealt out over its devices."""

    def __init__(self, grid: Grid, devices: tuple[torch.device, ...], backend: Backend) -> None:
        self.grid, self.devices, self.backend = grid, devices, backend

    def load(self, loaded: LoadedBlock) -> None:
        """Nothing to prepare: ``run`` is handed the block."""

    def ran(self) -> dict[str, int]:
        """This process is all there is."""
        return dict(self.backend.ran)

    def run(self, loaded: LoadedBlock, case: Case, swap: tuple[int, int] | None) -> Outcome:
        """One tensor-parallel rank after the other, each with all its context-parallel ones."""
        grid, home, tokens = self.grid, self.devices[0], case.draw.tokens
        dtype = case.draw.dtype
        loaded = swapped(loaded, swap)
        totals = Totals(loaded, case, home)
        order, gathered = grid.gathered(tokens).argsort().to(home), grid.gathered(tokens).to(home)
        for tp_rank in range(grid.tp):
            parts = [
                RankPart(loaded, case, self.backend, grid, tp_rank, cp_rank, self._device(tp_rank, cp_rank))
                for cp_rank in range(grid.cp)
            ]
            kv_TE = torch.cat([part.keys().to(home) for part in parts])[order]
            for part in parts:
                part.attend(kv_TE.to(part.device))
            if case.towards_SD is not None:
                grads = [part.backward().to(home, sum_dtype(dtype)) for part in parts]
                pieces = torch.stack(grads).sum(0)[gathered].chunk(grid.cp)
                for part, piece in zip(parts, pieces, strict=True):
                    part.finish(piece)
            for part in parts:
                totals.add(part)
        if home.type == "cuda":
            torch.cuda.synchronize(home)  # whoever called is taking the time
        return totals.outcome()

    def _device(self, tp_rank: int, cp_rank: int) -> torch.device:
        return self.devices[(cp_rank * self.grid.tp + tp_rank) % len(self.devices)]


class RankPart:
    """One rank's part of the block: ``keys``, ``attend`` and, for gradients, ``backward`` and ``finish``.

    Between the steps stands what ranks exchange, so that no step waits for another rank.
    """

    def __init__(
        self,
        loaded: LoadedBlock,
        case: Case,
        backend: Backend,
        grid: Grid,
        tp_rank: int,
        cp_rank: int,
        device: torch.device,
    ) -> None:
        self.tp_rank, self.device, self._backend, dtype = tp_rank, device, backend, case.draw.dtype
        self.backwards = case.towards_SD is not None
        part = loaded.part(tp_rank, grid.tp)
        self.spec, self._weights = part.spec, part.weights.to(dtype, device)
        self._w_uk, self._w_uv = (w.to(device, dtype) for w in (part.w_uk, part.w_uv))
        self.held = grid.held(case.draw.tokens, cp_rank).to(case.x_SD.device)
        self._x_SD = case.x_SD[self.held].to(device, dtype)
        self._positions_S = case.positions_S[self.held].to(device)
        if self.backwards:
            self._weights = leaves(self._weights)
            self._w_uk, self._w_uv, self._x_SD = (leaf(t) for t in (self._w_uk, self._w_uv, self._x_SD))
        # Which of the checked queries are here: where they stand in the output, and in this rank's tokens.
        place = torch.full_like(case.positions_S, -1)
        place[self.held] = torch.arange(self.held.numel(), device=place.device)
        here = place[case.rows_S]
        self.rows = (here >= 0).nonzero().squeeze(-1)
        self._queries = here[self.rows].to(device)
        self._case = case

    def keys(self) -> Tensor:
        """Latent and rotated key of the rank's tokens [n, R + P], for the others."""
        with torch.set_grad_enabled(self.backwards):
            entries = reference.cache_entries(self._x_SD, self._weights, self.spec, self._positions_S)
            self._own_kv = torch.cat(entries, dim=-1)
        return self._own_kv.detach()

    def attend(self, kv_TE: Tensor) -> None:
        """The rank's queries against the keys of all tokens, in their order; results in ``head`` and ``output``."""
        case, spec, weights = self._case, self.spec, self._weights
        rows_S = case.rows_S[self.rows].to(self.device)
        indices = None if case.indices_SK is None else case.indices_SK[self.rows].to(self.device)
        self._kv_TE = leaf(kv_TE) if self.backwards else kv_TE
        with torch.set_grad_enabled(self.backwards):
            x_SD, positions_S = self._x_SD[self._queries], self._positions_S[self._queries]
            q_latent_SQ = reference.query_latent(x_SD, weights, spec)
            source = x_SD if q_latent_SQ is None else q_latent_SQ
            projected = reference.Projected(
                *reference.queries_by_head(source, weights, spec, positions_S),
                self._kv_TE[:, : spec.rank],
                self._kv_TE[:, spec.rank :],
            )
            self.head_SHV = reference.absorbed_attention(
                projected,
                self._w_uk,
                self._w_uv,
                spec,
                indices=indices,
                rows_S=rows_S,
                attention=self._backend.sparse_mla,
                dense=_dense(self._backend, backwards=self.backwards),
            )
            self.output_SD = reference.output_projection(self.head_SHV, weights)

    def backward(self) -> Tensor:
        """From the output to the rank's weights and to the keys of all tokens, whose gradient is returned [T, E]."""
        if self._case.towards_SD is None:
            raise ValueError("the case has no gradient to start with")
        towards_SD = self._case.towards_SD[self.rows].to(self.output_SD)
        torch.autograd.backward([self.output_SD], [towards_SD])
        return torch.zeros_like(self._kv_TE) if self._kv_TE.grad is None else self._kv_TE.grad

    def finish(self, kv_grad: Tensor) -> None:
        """From the gradient of the rank's own keys [n, E], every rank's contribution in it, to its weights."""
        torch.autograd.backward([self._own_kv], [kv_grad.to(self._own_kv)])

    def gradients(self) -> Gradients:
        """This rank's gradients; None gradients, of what was not used, are left out."""
        found = {"k_b": self._w_uk.grad, "v_b": self._w_uv.grad, "x": self._x_SD.grad}
        found |= {name: weight.grad for name, weight in named(self._weights).items()}
        return {name: grad for name, grad in found.items() if grad is not None}


class Totals:
    """What the ranks' parts add up to, on one device, in at least float32."""

    def __init__(self, loaded: LoadedBlock, case: Case, home: torch.device) -> None:
        spec, rows, wide = loaded.spec, case.rows_S.numel(), sum_dtype(case.draw.dtype)
        self.head_SHV = torch.zeros(rows, spec.heads, spec.v, dtype=wide, device=home)
        self.output_SD = torch.zeros(rows, spec.hidden, dtype=wide, device=home)
        self.gradients: Gradients = {}
        if case.towards_SD is not None:
            shapes = {"k_b": loaded.w_uk.shape, "v_b": loaded.w_uv.shape, "x": case.x_SD.shape}
            shapes |= {name: weight.shape for name, weight in named(loaded.weights).items()}
            self.gradients = {n: torch.zeros(s, dtype=wide, device=home) for n, s in shapes.items()}

    def add(self, part: RankPart) -> None:
        """Add one rank's part in its place."""
        heads = slice(part.tp_rank * part.spec.heads, (part.tp_rank + 1) * part.spec.heads)
        rows, home = part.rows.to(self.output_SD.device), self.output_SD
        self.head_SHV[rows, heads] = part.head_SHV.detach().to(home)
        self.output_SD.index_add_(0, rows, part.output_SD.detach().to(home))
        for name, grad in part.gradients().items() if part.backwards else ():
            total, grad = self.gradients[name], grad.to(home)
            if name == "x":
                total.index_add_(0, part.held.to(home.device), grad)
            elif name in BY_HEAD:
                total.chunk(total.shape[0] // grad.shape[0])[part.tp_rank].add_(grad)
            elif name == "o":
                total.chunk(total.shape[1] // grad.shape[1], 1)[part.tp_rank].add_(grad)
            else:
                total.add_(grad)

    def outcome(self) -> Outcome:
        """The block's results."""
        return Outcome(self.head_SHV, self.output_SD, self.gradients or None)


def named(weights: AttentionWeights) -> dict[str, Tensor]:
    """The weights outside the indexer that are there, by field."""
    found = {field.name: getattr(weights, field.name) for field in fields(weights) if field.name != "indexer"}
    return {name: weight for name, weight in found.items() if weight is not None}


def leaf(tensor: Tensor) -> Tensor:
    """The same values, as a place where gradients arrive."""
    return tensor.detach().requires_grad_()


def leaves(weights: AttentionWeights) -> AttentionWeights:
    """The same weights, each a place where gradients arrive."""
    turned: dict[str, Any] = {name: leaf(weight) for name, weight in named(weights).items()}
    return replace(weights, **turned)


def swapped(loaded: LoadedBlock, pair: tuple[int, int] | None) -> LoadedBlock:
    """The block with two heads of K exchanged, on one rank if it lies on ranks: the negative control."""
    if pair is None:
        return loaded
    if loaded.by_rank:
        each = loaded.spec.heads // len(loaded.by_rank)
        here = (pair[0] % each, pair[1] % each)
        return replace(
            loaded,
            by_rank=tuple(
                part if part is None or rank != pair[0] // each else swapped(part, here)
                for rank, part in enumerate(loaded.by_rank)
            ),
        )
    by_head = loaded.w_uk.reshape(loaded.spec.heads, -1).clone()
    by_head[list(pair)] = by_head[list(reversed(pair))]
    return replace(loaded, w_uk=by_head.reshape(loaded.w_uk.shape))


def _dense(backend: Backend, *, backwards: bool) -> DenseAttention | None:
    """Dense attention without a list of all keys, where it has the gradients that are needed."""
    return None if backwards and backend.name == "tilelang" else backend.dense_mla


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which type ranks' parts are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32
