"""What ``verify`` may be asked for, and what it chooses where nothing was asked: layers, tokens, dtype, devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mla_convert import __version__
from mla_convert.catalogue import Catalogue
from mla_convert.errors import CannotError, UsageError
from mla_convert.geometry import AttentionBlock, check_ranks_divide, layer_config
from mla_convert.inspection import group_blocks
from mla_convert.runtime.dispatch import resolve_backend
from mla_convert.verification.absorbed import Folded, Grid
from mla_convert.verification.numbers import FACTOR, FLOORS, MIN_COSINE, SELECTION_FLOORS, NumbersSettings
from mla_convert.verification.processes import RealRanks

#: A block of the checkpoint under test and the original's block of the same prefix.
Pair = tuple[AttentionBlock, AttentionBlock]

#: On a CPU, every layer is run if all of them together stay below this many weights; else a few of each kind.
_ALL_LAYERS_WEIGHTS = 50_000_000
#: On a CPU, this many queries are checked at most when nothing else is asked for.
_CPU_ROWS = 256
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify and how.

    Attributes:
        tp: Tensor-parallel ranks, which share the heads.
        cp: Context-parallel ranks, which share the tokens.
        layers: Layer numbers to run; None chooses (all on a GPU or if the model is small).
        tokens: Sequence length; None chooses (past the top-k of a sparse model).
        dtype: Compute dtype; auto is bfloat16 on a GPU, float32 on a CPU.
        backend: What runs the absorbed path; an explicit one that cannot run is an error.
        device: ``cpu``, ``cuda`` or None for the GPU if there is one.
        carried: Compare the bytes of carried tensors too.
        backward: Compare the gradients of every weight too.
        control: Run the negative control.
        record: Write the outcome into the manifest beside the weights.
        trust_shapes: Let tensor shapes win over config.json.
        seed: Seed of the hidden states.
    """

    tp: int = 1
    cp: int = 1
    layers: tuple[int, ...] | None = None
    tokens: int | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    backend: Literal["auto", "reference", "tilelang"] = "auto"
    device: str | None = None
    carried: bool = True
    backward: bool = False
    control: bool = True
    record: bool = True
    trust_shapes: bool = False
    seed: int = 0

    @property
    def on_gpu(self) -> bool:
        """True if a GPU will be used."""
        return self.device != "cpu" and torch.cuda.is_available()

    @property
    def grid(self) -> Grid:
        """The ranks that share heads and tokens."""
        return Grid(self.tp, self.cp)


def choose_blocks(
    options: VerifyOptions,
    catalogue: Catalogue,
    ours: Mapping[str, AttentionBlock],
    theirs: Mapping[str, AttentionBlock],
) -> list[Pair]:
    """The blocks to run: those asked for, or all, or on a CPU a few of each kind of a large model.

    Raises:
        CannotError: A layer was asked for that has no MLA block.
    """
    pairs = [(block, theirs[prefix]) for prefix, block in ours.items() if prefix in theirs]
    if options.layers is not None:
        known = {block.layer for block, _ in pairs if block.layer is not None}
        absent = sorted(set(options.layers) - known)
        if absent:
            raise CannotError(
                f"--layers: no MLA block in layer {', '.join(map(str, absent))}",
                hint=f"layers with MLA: {', '.join(map(str, sorted(known)))}",
            )
        return [pair for pair in pairs if pair[0].layer in options.layers]
    if options.on_gpu or _weights(catalogue, ours) < _ALL_LAYERS_WEIGHTS:
        return pairs
    sample: set[str] = set()
    for group in group_blocks(catalogue, ours.values()):
        sample |= {group.blocks[at].prefix for at in (0, len(group.blocks) // 2, -1)}
    return [pair for pair in pairs if pair[0].prefix in sample]


def _weights(catalogue: Catalogue, blocks: Mapping[str, AttentionBlock]) -> int:
    """Weights of all attention blocks together, roughly: the largest block's times their number."""
    prefix = max(blocks.values(), key=lambda block: block.heads * block.rank).prefix
    return len(blocks) * sum(t.spec.numel for name, t in catalogue.tensors.items() if name.startswith(prefix))


def make_settings(
    options: VerifyOptions,
    catalogue: Catalogue,
    blocks: Sequence[AttentionBlock],
    ranks: RealRanks | None = None,
) -> NumbersSettings:
    """How to run the blocks, on real ranks or on ranks folded into this process.

    Raises:
        CannotError: The heads do not divide by ``tp``, the tokens do not by ``cp``, there are too few of them for
            gradients, or the backend or device asked for is not there.
        UsageError: ``device`` is neither cpu nor cuda.
    """
    check_ranks_divide(blocks, options.tp)
    devices = _devices(options)  # refuses a device that is not there
    devices = devices if ranks is None else (ranks.device,)
    gpu = devices[0].type == "cuda"
    dtype = _DTYPES.get(options.dtype, torch.bfloat16 if gpu else torch.float32)
    if options.backend == "tilelang" and dtype.itemsize != 2 and gpu:
        raise CannotError(
            f"--backend tilelang cannot run in {options.dtype}",
            hint="the kernels compute in bfloat16 or float16; --backend auto runs other types in PyTorch",
        )
    pieces = 2 * options.cp if options.cp > 1 else 1
    tokens = options.tokens or _default_tokens(largest_topk(catalogue, blocks), gpu=gpu, pieces=pieces)
    _check_tokens(options, tokens, pieces)
    backend = resolve_backend(options.backend, devices[0])
    return NumbersSettings(
        tokens=tokens,
        rows=tokens if gpu or options.tokens else min(tokens, _CPU_ROWS),
        dtype=dtype,
        grid=options.grid,
        devices=devices,
        backend=backend,
        ranks=Folded(options.grid, devices, backend)
        if ranks is None
        else ranks.served_by(backend, options.backend, _path_of(catalogue), options.trust_shapes),
        seed=options.seed,
        backward=options.backward,
    )


def _path_of(catalogue: Catalogue) -> Path:
    only = next(iter(catalogue.files.values()))
    return only.path if catalogue.single_file else catalogue.root


def largest_topk(catalogue: Catalogue, blocks: Sequence[AttentionBlock]) -> int:
    """``index_topk`` of a sparse model, 0 for a dense one."""
    config = catalogue.config.value if catalogue.config else None
    found = [layer_config(config, block.layer).get("index_topk") for block in blocks]
    return max((topk for topk in found if type(topk) is int), default=0)


def describe_settings(
    settings: NumbersSettings,
    catalogue: Catalogue,
    blocks: Sequence[AttentionBlock],
    total: int,
    ranks: RealRanks | None = None,
) -> dict[str, Any]:
    """The settings as the report shows them, tolerances included."""
    return {
        "version": __version__,
        "tp": settings.grid.tp,
        "cp": settings.grid.cp,
        "processes": 1 if ranks is None else settings.grid.size,
        "process_group": None if ranks is None else ranks.collectives,
        "backward": settings.backward,
        "tokens": settings.tokens,
        "rows": settings.rows,
        "topk": largest_topk(catalogue, blocks) or None,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "backend": settings.backend.name,
        "backend_reason": settings.backend.reason,
        "devices": [_device_name(d) for d in settings.devices] if ranks is None else list(ranks.devices),
        "seed": settings.seed,
        "layers": sorted({block.layer for block in blocks if block.layer is not None}),
        "blocks": len(blocks),
        "blocks_in_checkpoint": total,
        "tolerances": {
            "cosine": MIN_COSINE,
            "factor": FACTOR,
            "floor": FLOORS[settings.dtype],
            "selection": SELECTION_FLOORS[settings.dtype],
        },
    }


def _check_tokens(options: VerifyOptions, tokens: int, pieces: int) -> None:
    if tokens % pieces:
        near = max(pieces, tokens - tokens % pieces)
        raise CannotError(
            f"--cp {options.cp}: {tokens} tokens cannot be cut into {pieces} equal pieces, two for each rank",
            hint=f"--seq {near} can",
        )
    if options.backward and tokens < 2:
        raise CannotError(
            "--backward: with one token there is one key, and K has no gradient", hint="use a larger --seq"
        )


def _devices(options: VerifyOptions) -> tuple[torch.device, ...]:
    if options.device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {options.device}: expected cpu or cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CannotError(
            "--device cuda: PyTorch finds no CUDA device", hint="leave --device out to use the CPU"
        )
    if not options.on_gpu:
        return (torch.device("cpu"),)
    count = min(torch.cuda.device_count(), options.grid.size)
    return tuple(torch.device("cuda", number) for number in range(count))


def _default_tokens(topk: int, *, gpu: bool, pieces: int) -> int:
    """Past the top-k, where a wrong selection shows; 4096 on a GPU at least; a multiple of ``pieces``."""
    past = max(2 * topk, 64) if topk <= 1024 else topk + topk // 4
    least = max(past, 4096) if gpu else max(past, 128)
    return -(-least // pieces) * pieces


def _device_name(device: torch.device) -> str:
    return "CPU" if device.type != "cuda" else f"{device} {torch.cuda.get_device_name(device)}"
