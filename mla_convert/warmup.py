"""Compiling a model's kernels ahead, so that its first call need not wait for them."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mla_convert.api import inspect
from mla_convert.errors import CannotError
from mla_convert.geometry import find_blocks
from mla_convert.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """
    workers = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    took: dict[str, float] = {}
    progress.start("compile", len(wanted), "items")
    # Not forked: this process may have a CUDA context and the threads of a compiler.
    pool = ProcessPoolExecutor(min(workers, len(wanted)), multiprocessing.get_context("spawn"))
    try:
        names = {pool.submit(_build, variant): variant.name for variant in wanted}
        for done in as_completed(names):
            name = names[done]
            try:
                took[name], failure = done.result()
            except BrokenProcessPool as error:
                raise CannotError(
                    "A compiler was ended from outside, perhaps for lack of memory.",
                    hint="Give fewer --workers; what is compiled is kept.",
                ) from error
            if failure is not None:
                raise CannotError(f"The kernel '{name}' does not compile: {failure}")
            progress.note(f"{name}: {took[name]:.1f} s")
            progress.advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
        progress.finish()
    return {variant.name: took[variant.name] for variant in wanted}


def _build(variant: Variant) -> tuple[float, str | None]:
    """Compile one; its seconds and, as text since not every error can be sent, why it failed."""
    started = time.monotonic()
    try:
        variant.build()
    except Exception as error:
        return 0.0, str(error) or type(error).__name__
    return time.monotonic() - started, None


def _variants(
    source: str | Path, tp: int, dtype: DtypeName, trust_shapes: bool, progress: Progress
) -> tuple[Variant, ...]:
    """The kernels of all blocks, each once."""
    catalogue, _ = inspect(source, trust_shapes=trust_shapes, progress=progress)
    blocks = find_blocks(catalogue, trust_shapes=trust_shapes)
    try:
        import tilelang  # noqa: F401
    except (ImportError, OSError) as error:
        raise CannotError(f"TileLang cannot be imported: {error}", hint="pip install tilelang") from error
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
