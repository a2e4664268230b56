"""What the kernel modules share: the compile target and cache, and how arguments are made ready for a launch."""

import fcntl
import functools
import hashlib
import logging
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import tilelang
import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_convert.errors import CannotError

TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""A dict, since the kernels name the architecture themselves: TileLang compiles them where there is no GPU."""

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

PLANS = 1024
"""Of each entry point, so many plans are kept: those used last."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_cache: dict[Hashable, Any] = {}
_lock = threading.Lock()


def compiled(
    key: Hashable, build: Callable[[], Any], *, safe_access: bool = True, insert_barriers: bool = True
) -> Any:
    """The kernel stored under ``key``; on first use ``build()`` gives the program and TileLang compiles it.

    That takes 5 to 25 s, once: TileLang keeps the result on disk as well (``TILELANG_CACHE_DIR``), and processes
    that want the same kernel at the same time wait for the first of them. A program that checks its own indices and
    has all of its barriers can do without TileLang's.

    Raises:
        CannotError: It does not compile, or would hang.
    """
    with _lock:
        if key not in _cache:
            configs = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
            if not safe_access:
                configs[tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS] = True
            if not insert_barriers:
                configs[tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC] = True
            with _quiet_log():
                program = build()  # outside the lock: many processes may do this at a time
                with _alone(key):
                    kernel = _compile(
                        key, partial(tilelang.compile, program, target=TARGET, pass_configs=configs)
                    )
            source = kernel.get_kernel_source()
            if found := divergent_barriers(source) + shared_barriers(source):
                raise CannotError(
                    f"TileLang {tilelang.__version__} placed a barrier at which the kernel would hang: {found[0]}",
                    hint="It is not run. Use the backend 'reference'.",
                )
            _cache[key] = kernel
        return _cache[key]


class KernelNotKeptWarning(UserWarning):
    """A kernel was compiled for this process alone."""


def _compile(key: Hashable, compile_program: Callable[[], Any]) -> Any:
    """The compiled program, found or kept in TileLang's cache on disk where that can be written."""
    folder = Path(tilelang.env.TILELANG_CACHE_DIR)
    try:
        return compile_program()
    except Exception as error:
        if _can_write(folder) or not tilelang.is_cache_enabled():
            raise _failure(key, error) from error
    message = f"{folder} cannot be written: kernels are compiled for this process alone (TILELANG_CACHE_DIR)"
    warnings.warn(message, KernelNotKeptWarning, stacklevel=2)
    tilelang.disable_cache()
    try:
        return compile_program()
    except Exception as error:
        raise _failure(key, error) from error
    finally:
        tilelang.enable_cache()


def _failure(key: Hashable, error: Exception) -> CannotError:
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return CannotError(
        f"TileLang {tilelang.__version__} cannot compile the kernel {key}: {said[-1]}",
        hint="It needs nvcc: install the CUDA toolkit and set CUDA_HOME to it, or use the backend 'reference'.",
    )


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def launcher(kernel: Any) -> Callable[..., None]:
    """The compiled program's own entry point: the same call without the Python that TileLang wraps round it."""
    executable = kernel.adapter.executable
    if executable is None:  # compiled in this process and not run yet
        executable = kernel.adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    entry: Callable[..., None] = module.main
    return entry


@contextmanager
def _alone(key: Hashable) -> Iterator[None]:
    """Hold a kernel's lock among all processes that share the cache; it goes with the process that holds it."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    with ExitStack() as held:
        # A cache that is read-only, a file system without locks: several may compile.
        with suppress(OSError):
            folder = Path(tilelang.env.TILELANG_CACHE_DIR) / "mla-convert-locks"
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context((folder / name).open("wb")), fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet_log() -> Iterator[None]:
    """TileLang logs to stdout, which belongs to the result of whatever command is running."""
    log = logging.getLogger("tilelang")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


_BARRIER = re.compile(r"__syncthreads\(|__sync_thread_partial\(|AllReduce<[\w:]+, (\d+),")
_OWN_BARRIER = re.compile(r"__sync_thread_partial\((\d+), 128\)")
_ROLE = re.compile(r"if \(\(+int\)threadIdx\.x\) < (128|256)\) \{|(\} )?else \{")


def divergent_barriers(source: str) -> list[str]:
    """Lines of CUDA with a barrier inside a branch that only some threads of a warpgroup take.

    TileLang inserts barriers itself, and where it lays a fragment out over fewer threads than a role has, the
    branch around the copy can enclose one; such a kernel hangs. A role's own branch is no such branch.
    """
    found: list[str] = []
    scopes: list[str] = []
    for number, line in enumerate(map(str.strip, source.splitlines()), 1):
        if line.startswith("}") and scopes:
            scopes.pop()
        barrier = _BARRIER.search(line)
        if barrier and int(barrier.group(1) or 128) > 32:
            inside = [scope for scope in scopes if "threadIdx" in scope and not _ROLE.fullmatch(scope)]
            found += [f"line {number}: {line} inside {scope}" for scope in inside]
        if line.endswith("{"):
            scopes.append(line)
    return found


def shared_barriers(source: str) -> list[str]:
    """Lines of CUDA with a barrier of one warpgroup, 128 threads, whose number another role of the kernel uses too.

    TileLang numbers the barriers that it inserts. Two roles that wait at one number release each other: data is read
    before it is there, and in the end one of them waits for ever.
    """
    found: list[str] = []
    scopes: list[tuple[str, int]] = []
    roles: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(map(str.strip, source.splitlines()), 1):
        if line.startswith("}") and scopes:
            scopes.pop()
        if barrier := _OWN_BARRIER.search(line):
            role = tuple(start for scope, start in scopes if _ROLE.fullmatch(scope))
            if roles.setdefault(barrier.group(1), role) != role:
                found.append(f"line {number}: {line} of another role")
        if line.endswith("{"):
            scopes.append((line, number))
    return found


class Argument(NamedTuple):
    """What a plan knows of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        return len(self.shape)


Signature = tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]


def signature(*tensors: Tensor | None) -> Signature:
    """What a plan may depend on; ``arguments`` gives it names. Not part of it: strides, address and contents."""
    return tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors])


def arguments(known: Signature) -> list[Any]:
    """The ``Argument`` of each tensor of a signature, or None."""
    return [None if each is None else Argument(*each) for each in known]


def planned(plan: Callable[_P, _R]) -> Callable[_P, _R]:
    """What calls with equal signatures have in common is found out once: checks, sizes, and which kernels run.

    With few queries all of that takes the host longer than the GPU needs for the kernels. A plan is a function of
    its arguments alone, which are a signature and numbers, so that it cannot go out of date; it holds no tensors, so
    that it belongs to no stream, graph or thread. An error is not kept, but found again. The ``PLANS`` plans used
    last are kept as long as the process runs.
    """
    return cast(Callable[_P, _R], functools.lru_cache(maxsize=PLANS)(plan))


def run_on(device: torch.device, run: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """``run`` while ``device`` is the current one: to make it so, if it already is, would take longer than a launch."""
    if device.index == torch.cuda.current_device():
        return run(*args, **kwargs)
    with torch.cuda.device(device):
        return run(*args, **kwargs)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def unread(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """A tensor for a parameter that a kernel has and does not read; kept as long as the process runs."""
    return torch.empty(shape, dtype=dtype, device=device)


def launchable(tensor: Tensor) -> Tensor:
    """The tensor packed and on a 16-byte boundary, as the kernels' 16-byte copies need it; copied only if not."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def pad_features(tensor: Tensor, head: int, head_to: int, tail_to: int) -> Tensor:
    """Zero-pad both parts of the last dim: ``head`` dims to ``head_to`` and the rest to ``tail_to``."""
    tail = tensor.shape[-1] - head
    if (head, tail) == (head_to, tail_to):
        return tensor
    parts = (pad(tensor[..., :head], (0, head_to - head)), pad(tensor[..., head:], (0, tail_to - tail)))
    return torch.cat(parts, dim=-1)


def as_int32(tensor: Tensor) -> Tensor:
    """Integers as int32; what int32 cannot hold stays out of range instead of wrapping round to a valid value."""
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.dtype == torch.int64:
        return tensor.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    raise TypeError(f"expected int32 or int64, got {tensor.dtype}")


def scale_problem(scale: float) -> str | None:
    """Why this is no factor for scores, or None if it is one."""
    return None if 0 < scale < float("inf") else f"scale {scale} is not a positive number"
