"""Real ranks: every process runs its own part of the absorbed path, rank 0 everything else.

Rank 0 leads. It names a block or an input, and all ranks, itself among them, take the same steps with the same
collectives. Before each collective the ranks tell each other, over gloo, whether the step before went well: one that
failed is reported by rank 0 instead of being waited for. A rank that is gone breaks the connection, and a rank that
hangs runs into ``PATIENCE``; ``launch`` or torchrun then end the others.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from mla_convert import errors
from mla_convert.errors import MlaConvertError, UsageError
from mla_convert.geometry import find_blocks
from mla_convert.launch import GRACE, RENDEZVOUS, RankError, own_rank
from mla_convert.runtime.dispatch import Backend, Requested, resolve_backend
from mla_convert.runtime.parallel import all_gather, all_reduce, reduce_scatter
from mla_convert.verification.absorbed import Grid, Outcome, RankPart, Totals, sum_dtype, swapped
from mla_convert.verification.cases import Case, Draw, make_case
from mla_convert.verification.readers import reader_of
from mla_convert.verification.sharded import ShardedReader, is_sharded, load_one_rank
from mla_convert.verification.weights import LoadedBlock, TensorReader, block_spec, load_block
from mla_convert.whole import open_whole

Result = TypeVar("Result")

#: How long a rank waits for another one within a step: kernels may have to be compiled, a block to be read.
PATIENCE = timedelta(minutes=10)
#: How long it waits for rank 0's next step: comparing the bytes of a large checkpoint takes hours.
_LEISURE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class _Load:
    """The next block."""

    path: str
    prefix: str
    trust_shapes: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """The next input; ``lists`` is the shape of the lists of keys, which follow as a tensor."""

    draw: Draw
    lists: tuple[int, ...] | None
    swap: tuple[int, int] | None
    backend: Requested


@dataclass(frozen=True, slots=True)
class _Count:
    """Tell which calls ran."""


@dataclass(frozen=True, slots=True)
class _End:
    """There is nothing more to do."""


_Command = _Load | _Run | _Count | _End


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the other ranks."""

    kind: str
    message: str
    hint: str | None
    is_ours: bool

    def error(self, rank: int) -> MlaConvertError:
        kind = getattr(errors, self.kind, None) if self.is_ours else None
        if kind is None:
            return RankError(f"rank {rank}: {self.kind}: {self.message}")
        return cast(MlaConvertError, kind(f"rank {rank}: {self.message}", hint=self.hint))


class RealRanks:
    """The ranks of a run, seen from one of them. Made by ``real_ranks``.

    ``collectives`` is the backend of the process group that moves tensors, ``devices`` names every rank's device,
    ``lost`` is True once the ranks can no longer reach each other.
    """

    def __init__(self, grid: Grid, rank: int, device: torch.device, collectives: str) -> None:
        self.grid, self.rank, self.device, self.collectives = grid, rank, device, collectives
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._commands = dist.new_group(backend="gloo", timeout=_LEISURE)
        self._data = dist.new_group(backend=collectives, timeout=PATIENCE)
        self._context: dist.ProcessGroup | None = None
        for tp_rank in range(grid.tp if grid.cp > 1 else 0):
            members = [cp_rank * grid.tp + tp_rank for cp_rank in range(grid.cp)]
            group = dist.new_group(members, backend=collectives, timeout=PATIENCE)
            if rank in members:
                self._context = group
        self.lost = False
        self._backend: Backend | None = None
        self._requested: Requested = "auto"
        self._checkpoint, self._trust_shapes = "", False
        gpu = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "CPU"
        self.devices = tuple(str(name) for name in self._share(f"rank {rank}: {gpu}"))

    # What rank 0 calls

    def served_by(self, backend: Backend, requested: Requested, path: Path, trust_shapes: bool) -> RealRanks:
        """The same ranks, for blocks of one checkpoint."""
        self._backend, self._requested = backend, requested
        self._checkpoint, self._trust_shapes = str(path.resolve()), trust_shapes
        return self

    def load(self, loaded: LoadedBlock) -> None:
        """Every other rank reads the block too.

        Raises:
            MlaConvertError: One could not.
        """
        self._tell(_Load(self._checkpoint, loaded.block.prefix, self._trust_shapes))
        self._together(lambda: None)

    def run(self, loaded: LoadedBlock, case: Case, swap: tuple[int, int] | None) -> Outcome:
        """Every rank's part of the block, put together.

        Raises:
            MlaConvertError: A rank could not run its part.
        """
        lists = None if case.indices_SK is None else tuple(case.indices_SK.shape)
        self._tell(_Run(case.draw, lists, swap, self._requested))
        if case.indices_SK is not None:
            lists_SK = case.indices_SK.to("cpu", torch.int32).contiguous()
            self._collective(lambda: dist.broadcast(lists_SK, 0, group=self._control))
        return self._part(lambda: (loaded, case), swap)

    def ran(self) -> dict[str, int]:
        """The calls of all ranks."""
        self._tell(_Count())
        return self._counted()

    def end(self) -> None:
        """Let the others go; nobody is told anything once the ranks have lost each other."""
        if not self.lost:
            self._tell(_End())

    # What the others do

    def serve(self) -> None:
        """Do as rank 0 says, until it says that it is over. Errors are rank 0's to report.

        Raises:
            RankError: The other ranks are gone.
        """
        loaded: LoadedBlock | None = None
        readers: dict[str, TensorReader] = {}
        while True:
            command = self._told()
            try:
                match command:
                    case _End():
                        return
                    case _Count():
                        self._counted()
                    case _Load():
                        loaded = self._together(functools.partial(self._read, command, readers))
                    case _Run():
                        self._serve_run(command, loaded)
            except Exception:
                if self.lost:
                    raise

    def _read(self, order: _Load, readers: dict[str, TensorReader]) -> LoadedBlock:
        if order.path not in readers:
            readers[order.path] = reader_of(open_whole(Path(order.path)))
        reader = readers[order.path]
        blocks = find_blocks(reader.catalogue, trust_shapes=order.trust_shapes)
        block = next(block for block in blocks if block.prefix == order.prefix)
        spec = block_spec(reader.catalogue, block)
        if isinstance(reader, ShardedReader) and is_sharded(reader.whole):
            return load_one_rank(reader, block, spec, self.rank % self.grid.tp, self.device)
        return load_block(reader, block, spec, self.device)

    def _serve_run(self, order: _Run, loaded: LoadedBlock | None) -> None:
        lists_SK = None
        if order.lists is not None:
            lists_SK = torch.empty(order.lists, dtype=torch.int32)
            self._collective(lambda: dist.broadcast(lists_SK, 0, group=self._control))

        def prepare() -> tuple[LoadedBlock, Case]:
            if loaded is None:
                raise ValueError("there is no block to run")
            if self._backend is None:
                self._backend = resolve_backend(order.backend, self.device)
            case = make_case(loaded, order.draw, self.device)
            return loaded, replace(case, indices_SK=None if lists_SK is None else lists_SK.to(self.device))

        self._part(prepare, order.swap)

    # What all do

    def _part(self, prepare: Callable[[], tuple[LoadedBlock, Case]], swap: tuple[int, int] | None) -> Outcome:
        grid = self.grid

        def start() -> tuple[RankPart, Totals, Case]:
            loaded, case = prepare()
            loaded = swapped(loaded, swap)
            if self._backend is None:
                raise ValueError("nothing was said about the backend")
            where = (self.rank % grid.tp, self.rank // grid.tp, self.device)
            return (
                RankPart(loaded, case, self._backend, grid, *where),
                Totals(loaded, case, self.device),
                case,
            )

        part, totals, case = self._together(start)
        own = self._together(part.keys)
        gathered = grid.gathered(case.draw.tokens).to(self.device)
        kv_TE = self._collective(lambda: all_gather(own, self._context))[gathered.argsort()]
        self._together(lambda: part.attend(kv_TE))
        if case.towards_SD is not None:
            grad = self._together(part.backward).to(sum_dtype(case.draw.dtype))[gathered]
            piece = self._collective(lambda: reduce_scatter(grad, self._context))
            self._together(lambda: part.finish(piece))
        self._together(lambda: totals.add(part))
        totals.head_SHV, totals.output_SD = self._sum(totals.head_SHV), self._sum(totals.output_SD)
        totals.gradients = {name: self._sum(total) for name, total in totals.gradients.items()}
        if self.device.type == "cuda":
            self._collective(lambda: torch.cuda.synchronize(self.device))  # whoever called is taking the time
        return totals.outcome()

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        return self._collective(lambda: all_reduce(own, self._data))

    def _counted(self) -> dict[str, int]:
        counts = self._share({} if self._backend is None else dict(self._backend.ran))
        return dict(sum((Counter(count) for count in counts), Counter()))

    def _together(self, step: Callable[[], Result]) -> Result:
        """Take a step, and go on only if every rank could.

        Raises:
            Exception: This rank's own error, else that of the first other rank that has one.
        """
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:
            failure = error
        told = self._share(None if failure is None else _failure(failure))
        if failure is not None:
            raise failure
        for rank, other in enumerate(told):
            if other is not None:
                raise other.error(rank)
        return result

    def _share(self, own: Any) -> list[Any]:
        """What every rank has to say."""
        found: list[Any] = [None] * self.grid.size
        self._collective(lambda: dist.all_gather_object(found, own, group=self._control))
        return found

    def _tell(self, command: _Command) -> None:
        self._collective(lambda: self._call().wait(PATIENCE))
        self._collective(lambda: dist.broadcast_object_list([command], 0, group=self._control))

    def _told(self) -> _Command:
        self._collective(lambda: self._call().wait())
        told: list[Any] = [None]
        self._collective(lambda: dist.broadcast_object_list(told, 0, group=self._control))
        return cast(_Command, told[0])

    def _call(self) -> dist.Work:
        """Rank 0 calls, the others wait to be called, for as long as it takes; it does not wait that long for them."""
        return cast(dist.Work, dist.broadcast(torch.zeros(1), 0, group=self._commands, async_op=True))

    def _collective(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except RuntimeError as error:
            self.lost = True
            if RENDEZVOUS in os.environ:
                time.sleep(2 * GRACE)  # the supervisor sees which rank died, and ends this one meanwhile
            raise RankError(
                f"rank {self.rank} lost the other ranks: {error}", hint="the rank that ended first says why"
            ) from error


def _failure(error: Exception) -> _Failure:
    if isinstance(error, MlaConvertError):
        return _Failure(type(error).__name__, error.message, error.hint, True)
    return _Failure(type(error).__name__, str(error), None, False)


@contextmanager
def real_ranks(grid: Grid, *, gpu: bool) -> Iterator[RealRanks | None]:
    """This process as one of several ranks, if it was started as one (torchrun, ``launch``); else None.

    Each rank takes a GPU of its own with NCCL; gloo connects ranks on CPUs, and ranks that share a GPU.

    Raises:
        UsageError: There are more or fewer processes than ``grid`` has ranks.
        RankError: The ranks do not find each other.
    """
    place = own_rank()
    if place is None:
        yield None
        return
    rank, world = place
    if world != grid.size:
        raise UsageError(
            f"{world} processes were started; --tp {grid.tp} with --cp {grid.cp} needs {grid.size}",
            hint=f"start {grid.size}, or choose --tp and --cp so that their product is {world}",
        )
    device, collectives = _device(rank, world) if gpu else (torch.device("cpu"), "gloo")
    meeting = os.environ.get(RENDEZVOUS)
    try:
        dist.init_process_group(
            "gloo",
            init_method="env://" if meeting is None else f"file://{meeting}",
            rank=rank,
            world_size=world,
            timeout=PATIENCE,
        )
        ranks = RealRanks(grid, rank, device, collectives)
    except RuntimeError as error:
        raise RankError(f"rank {rank}: the {world} ranks do not find each other: {error}") from error
    try:
        with _own_work():
            yield ranks
    except Exception:
        if rank == 0:
            ranks.end()
        raise
    if rank == 0:
        ranks.end()
    dist.destroy_process_group()


@contextmanager
def _own_work() -> Iterator[None]:
    """These ranks verify together. What else runs here, such as splitting the demo model, is rank 0's alone."""
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _device(rank: int, world: int) -> tuple[torch.device, str]:
    count = torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank)
    device = torch.device("cuda", here % count)
    torch.cuda.set_device(device)
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", world)) <= count
    return device, "nccl" if alone and dist.is_nccl_available() else "gloo"
