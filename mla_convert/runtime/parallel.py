"""Tensor and context parallelism over torch.distributed: collectives with gradients, and who holds which tokens.

The collectives are autograd functions of our own rather than those of ``torch.distributed.nn`` or the functional
collectives: each is a pair (what runs forward, what runs backward), and tensors cut along their first dim need
no more than four. A group of one is no collective at all. gloo moves CPU tensors; tensors of a GPU go through the
host there, which is how several ranks can share one device.

Every rank has to build the same graph, because autograd runs the backward collectives in reverse order of creation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mla_convert.errors import CannotError, UsageError

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Parallel:
    """The groups that one rank belongs to; None is a group of one.

    Attributes:
        tp: Ranks that share the heads.
        cp: Ranks that share the tokens of every sequence, see ``context_rows``.
        sequence_parallel: Outside attention the tokens are cut over ``tp`` too: inputs and outputs hold the
            rank's tp-th part of them, by all-gather and reduce-scatter in place of an all-reduce.
    """

    tp: Group | None = None
    cp: Group | None = None
    sequence_parallel: bool = False

    @property
    def tp_size(self) -> int:
        """How many ranks share the heads."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def tp_rank(self) -> int:
        """This one's number among them."""
        return 0 if self.tp is None else self.tp.rank()

    @property
    def cp_size(self) -> int:
        """How many ranks share the tokens."""
        return 1 if self.cp is None else self.cp.size()

    @property
    def cp_rank(self) -> int:
        """This one's number among them."""
        return 0 if self.cp is None else self.cp.rank()

    @property
    def cuts_tokens(self) -> bool:
        """True if the tensor-parallel ranks hold different tokens outside attention."""
        return self.sequence_parallel and self.tp_size > 1


def make_groups(tp: int, cp: int = 1, *, sequence_parallel: bool = False) -> Parallel:
    """Cut the default process group into tensor- and context-parallel groups; every rank has to call it.

    Neighbouring ranks share heads, the next ``cp`` such groups share tokens, and what is left over is data
    parallel: rank = (data * cp + context) * tp + tensor.

    Raises:
        UsageError: the number of ranks is not a multiple of ``tp * cp``, or one of these is below 1.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if tp < 1 or cp < 1:
        raise UsageError(f"There are no groups of tp {tp} x cp {cp} ranks.")
    if world % (tp * cp):
        raise UsageError(
            f"{world} ranks cannot be cut into tp {tp} x cp {cp} = {tp * cp}.",
            hint=f"Start a multiple of {tp * cp} processes.",
        )
    own: dict[str, Group] = {}
    for first in range(0, world, tp * cp):
        for context in range(cp):
            members = [first + context * tp + tensor for tensor in range(tp)]
            _join(own, "tp", members, rank)
        for tensor in range(tp):
            members = [first + context * tp + tensor for context in range(cp)]
            _join(own, "cp", members, rank)
    return Parallel(own.get("tp"), own.get("cp"), sequence_parallel)


def _join(own: dict[str, Group], name: str, members: list[int], rank: int) -> None:
    if len(members) > 1:
        group = dist.new_group(members)
        if rank in members:
            own[name] = group


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve a training step as well
def context_rows(lengths: tuple[int, ...], rank: int, world: int) -> Tensor:
    """The tokens that one context-parallel rank holds, as rows of the packed sequences, int64 on the CPU.

    Every sequence is cut into 2 * world equal pieces, of which rank r holds pieces r and 2 * world - 1 - r, so that
    all ranks have as many keys before their queries (the order of Megatron-LM and Transformer Engine). A rank's
    rows are in the order in which it holds them.

    Raises:
        CannotError: a length is not a multiple of 2 * world.
    """
    if world == 1:
        return torch.arange(sum(lengths), device="cpu")
    rows, start = [], 0
    for length in lengths:
        if length % (2 * world):
            raise CannotError(
                f"A sequence of {length} tokens cannot be cut into 2 x {world} equal pieces, two for each "
                "context-parallel rank.",
                hint=f"Pad it to a multiple of {2 * world}.",
            )
        piece = length // (2 * world)
        for number in (rank, 2 * world - 1 - rank):
            rows.append(torch.arange(start + number * piece, start + (number + 1) * piece, device="cpu"))
        start += length
    return torch.cat(rows) if rows else torch.arange(0, device="cpu")


# Collectives on the first dim, without gradients


def all_reduce(x: Tensor, group: Group | None) -> Tensor:
    """The sum over the group, in a new tensor."""
    if group is None or group.size() == 1:
        return x
    total = _outgoing(x, group).clone()
    dist.all_reduce(total, group=group)
    return total.to(x.device)


def all_gather(x: Tensor, group: Group | None) -> Tensor:
    """Every rank's rows, one rank's behind the other's: [world * n, …] from [n, …]."""
    if group is None or group.size() == 1:
        return x
    x_out = _outgoing(x, group)
    gathered = x_out.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather_single()(gathered, x_out, group=group)
    return gathered.to(x.device)


def reduce_scatter(x: Tensor, group: Group | None) -> Tensor:
    """This rank's part of the sum's rows: [n, …] from [world * n, …].

    Raises:
        CannotError: the rows do not divide.
    """
    if group is None or group.size() == 1:
        return x
    if x.shape[0] % group.size():
        raise CannotError(
            f"{x.shape[0]} rows cannot be cut over {group.size()} ranks.",
            hint="Pad the tokens, or turn sequence parallelism off.",
        )
    x_out = _outgoing(x, group)
    part = x_out.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter_single()(part, x_out, group=group)
    return part.to(x.device)


def _outgoing(x: Tensor, group: Group) -> Tensor:
    """``x`` as the group's backend can send it."""
    x = x.detach().contiguous()
    return x.cpu() if x.is_cuda and dist.get_backend(group) == "gloo" else x


def _all_gather_single() -> Any:
    """torch 2.13 gave the function a new name and deprecated the old one; likewise below."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter_single() -> Any:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# The same with gradients. mypy: torch's Function is untyped.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.group), None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.group), None


def copy_to_group(x: Tensor, group: Group | None) -> Tensor:
    """``x``, which every rank has, used by each in its own way: the gradient is the sum of all of theirs."""
    return _apply(_Copy, x, group)


def sum_over_group(x: Tensor, group: Group | None) -> Tensor:
    """The sum of every rank's ``x``; each gets the whole gradient."""
    return _apply(_Sum, x, group)


def gather_rows(x: Tensor, group: Group | None) -> Tensor:
    """Every rank's rows, [world * n, …]; the gradient is reduce-scattered."""
    return _apply(_Gather, x, group)


def sum_scatter_rows(x: Tensor, group: Group | None) -> Tensor:
    """This rank's rows of the sum, [n, …] from [world * n, …]; the gradient is all-gathered."""
    return _apply(_SumScatter, x, group)


def _apply(function: Any, x: Tensor, group: Group | None) -> Tensor:
    if group is None or group.size() == 1:
        return x
    result: Tensor = function.apply(x, group)
    return result


def take_context(x: Tensor, parallel: Parallel, lengths: Sequence[int] | None = None) -> Tensor:
    """This rank's tokens of whole sequences: what an ``AbsorbedMLA`` with the same groups expects.

    Args:
        x: [s, b, …], or packed [t, …] with ``lengths``.
        lengths: Tokens of each packed sequence.
    """
    whole = (x.shape[0],) if lengths is None else tuple(lengths)
    rows = context_rows(whole, parallel.cp_rank, parallel.cp_size)
    part = x.index_select(0, rows.to(x.device)) if parallel.cp_size > 1 else x
    if parallel.cuts_tokens:
        if part.shape[0] % parallel.tp_size:
            raise CannotError(
                f"{part.shape[0]} tokens cannot be cut over {parallel.tp_size} tensor-parallel ranks.",
                hint="Pad them, or turn sequence parallelism off.",
            )
        part = part.chunk(parallel.tp_size)[parallel.tp_rank]
    return part
