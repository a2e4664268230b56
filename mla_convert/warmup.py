"""Compiling a model's kernels ahead, so that its first call need not wait for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mla_convert.api import inspect
from mla_convert.errors import CannotError, LocalIOError
from mla_convert.geometry import find_blocks
from mla_convert.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mla_convert.runtime.kernels.variants import Variant

DtypeName = Literal["bfloat16", "float16"]
MOST_WORKERS = 16
"""A compiler takes about a gigabyte of memory."""


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What ``warmup`` built.

    Attributes:
        path: The checkpoint.
        tp: Over how many ranks its heads are divided.
        dtype: What the kernels compute in.
        cache: The folder of compiled kernels.
        kernels: Their names, and the seconds that each took; None where nothing was built.
        seconds: How long it took altogether.
    """

    path: str
    tp: int
    dtype: DtypeName
    cache: Path
    kernels: dict[str, float | None]
    seconds: float

    def document(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {
            "path": self.path,
            "tp": self.tp,
            "dtype": self.dtype,
            "cache": str(self.cache),
            "kernels": [{"name": name, "seconds": seconds} for name, seconds in self.kernels.items()],
            "seconds": round(self.seconds, 3),
        }


def warmup(
    source: str | Path,
    *,
    tp: int = 1,
    dtype: DtypeName = "bfloat16",
    workers: int | None = None,
    trust_shapes: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> WarmupReport:
    """Compile every kernel that the blocks of ``source`` may call for, and leave them in TileLang's cache.

    It takes nvcc and no GPU. A kernel that the cache has already takes a second or two.

    Args:
        source: A checkpoint in any format; its headers and configuration are read, and no weight.
        tp: Over how many ranks the heads will be divided.
        dtype: What the kernels will compute in.
        workers: Compilers at a time; None: one a processor, ``MOST_WORKERS`` at most.
        trust_shapes: Let tensor shapes win where the configuration contradicts them.
        dry_run: Name the kernels and build none.
        progress: Who is told about each one.

    Raises:
        CannotError: The heads do not divide by ``tp``, there are no kernels for a block's sizes, TileLang or
            nvcc is not there, or a kernel does not compile.
        LocalIOError: A kernel is not in the cache, and the cache cannot be written.
        MlaConvertError: As ``inspect`` does.
    """
    started = time.monotonic()
    progress = progress or SilentProgress()
    wanted = _variants(source, tp, dtype, trust_shapes, progress)
    cache = _cache_folder(needs_compiler=not dry_run)
    kernels: dict[str, float | None] = {variant.name: None for variant in wanted}
    if not dry_run:
        kernels |= build(wanted, workers, progress)
    return WarmupReport(str(source), tp, dtype, cache, kernels, time.monotonic() - started)


def build(wanted: Sequence[Variant], workers: int | None, progress: Progress) -> dict[str, float]:
    """Compile each variant in a process of its own pool; the seconds of each, by name.

    Raises:
        CannotError: One does not compile.
        LocalIOError: One cannot be kept.
    """
    workers = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    took: dict[str, float] = {}
    progress.start("compile", len(wanted), "items")
    # Not forked: this process may have a CUDA context and the threads of a compiler.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(wanted)), context, initializer=_end_quietly)
    try:
        with _interrupts_held():  # compilers start with ^C held back, until they know how to end
            names = {pool.submit(_build, variant): variant.name for variant in wanted}
        for done in as_completed(names):
            name = names[done]
            try:
                took[name], failure, kept = done.result()
            except BrokenProcessPool as error:
                raise CannotError(
                    "A compiler was ended from outside, perhaps for lack of memory.",
                    hint="Give fewer --workers; what is compiled is kept.",
                ) from error
            if not kept:
                raise LocalIOError(
                    f"The kernel '{name}' cannot be kept: {failure}",
                    hint="Set TILELANG_CACHE_DIR to a folder that can be written.",
                )
            if failure is not None:
                raise CannotError(f"The kernel '{name}' does not compile: {failure}")
            progress.note(f"{name}: {took[name]:.1f} s")
            progress.advance(1)
    except KeyboardInterrupt:
        for compiler in multiprocessing.active_children():
            compiler.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        progress.finish()
    return {variant.name: took[variant.name] for variant in wanted}


@contextmanager
def _interrupts_held() -> Iterator[None]:
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _end_quietly() -> None:
    """^C comes to compilers as well, and the command says what there is to say."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _build(variant: Variant) -> tuple[float, str | None, bool]:
    """Compile one; its seconds, as text since not every error can be sent why it failed, and if it could be kept."""
    from mla_convert.runtime.kernels._common import KernelNotKeptWarning

    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelNotKeptWarning)
        try:
            variant.build()
        except KernelNotKeptWarning as warning:
            return 0.0, str(warning), False
        except Exception as error:
            return 0.0, str(error) or type(error).__name__, True
    return time.monotonic() - started, None, True


def _variants(
    source: str | Path, tp: int, dtype: DtypeName, trust_shapes: bool, progress: Progress
) -> tuple[Variant, ...]:
    """The kernels of all blocks, each once."""
    catalogue, _ = inspect(source, trust_shapes=trust_shapes, progress=progress)
    blocks = find_blocks(catalogue, trust_shapes=trust_shapes)
    try:
        import tilelang  # noqa: F401
    except ImportError as error:
        raise CannotError(f"TileLang cannot be imported: {error}", hint="pip install tilelang") from error
    except OSError as error:
        raise LocalIOError(
            f"TileLang cannot make its cache: {error}",
            hint="Set TILELANG_CACHE_DIR to a folder that can be written.",
        ) from error
    import torch

    from mla_convert.runtime.kernels.variants import variants
    from mla_convert.verification.weights import block_spec

    specs = {block_spec(catalogue, block).shard(0, tp): None for block in blocks}
    found = {v.name: v for spec in specs for v in variants(spec, getattr(torch, dtype))}
    return tuple(found.values())


def _cache_folder(*, needs_compiler: bool) -> Path:
    from tilelang.contrib.nvcc import find_cuda_path
    from tilelang.env import env

    if needs_compiler:
        hint = "install the CUDA toolkit and set CUDA_HOME to it"
        try:
            toolkit = Path(find_cuda_path())
        except RuntimeError as error:
            raise CannotError("There is no nvcc to compile kernels with.", hint=hint) from error
        if not (toolkit / "bin/nvcc").exists():
            raise CannotError(f"There is no nvcc in {toolkit / 'bin'}.", hint=hint)
    return Path(env.TILELANG_CACHE_DIR)
