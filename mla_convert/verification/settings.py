"""What ``verify`` may be asked for, and what it chooses where nothing was asked: layers, tokens, dtype, devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mla_convert import __version__
from mla_convert.catalogue import Catalogue
from mla_convert.errors import CannotError, UsageError
from mla_convert.geometry import AttentionBlock, layer_config
from mla_convert.inspection import group_blocks
from mla_convert.runtime.dispatch import resolve_backend
from mla_convert.verification.numbers import FACTOR, FLOORS, MIN_COSINE, SELECTION_FLOORS, NumbersSettings

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
        tp: Tensor-parallel ranks, folded on the devices there are.
        layers: Layer numbers to run; None chooses (all on a GPU or if the model is small).
        tokens: Sequence length; None chooses (past the top-k of a sparse model).
        dtype: Compute dtype; auto is bfloat16 on a GPU, float32 on a CPU.
        backend: What runs the absorbed path; an explicit one that cannot run is an error.
        device: ``cpu``, ``cuda`` or None for the GPU if there is one.
        carried: Compare the bytes of carried tensors too.
        control: Run the negative control.
        record: Write the outcome into the manifest beside the weights.
        trust_shapes: Let tensor shapes win over config.json.
        seed: Seed of the hidden states.
    """

    tp: int = 1
    layers: tuple[int, ...] | None = None
    tokens: int | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    backend: Literal["auto", "reference", "tilelang"] = "auto"
    device: str | None = None
    carried: bool = True
    control: bool = True
    record: bool = True
    trust_shapes: bool = False
    seed: int = 0

    @property
    def on_gpu(self) -> bool:
        """True if a GPU will be used."""
        return self.device != "cpu" and torch.cuda.is_available()


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
    options: VerifyOptions, catalogue: Catalogue, blocks: Sequence[AttentionBlock]
) -> NumbersSettings:
    """How to run the blocks.

    Raises:
        CannotError: The heads do not divide by ``tp``, or the backend or device asked for is not there.
        UsageError: ``device`` is neither cpu nor cuda.
    """
    _check_tp(options, blocks)
    devices = _devices(options)
    gpu = devices[0].type == "cuda"
    dtype = _DTYPES.get(options.dtype, torch.bfloat16 if gpu else torch.float32)
    if options.backend == "tilelang" and dtype.itemsize != 2 and gpu:
        raise CannotError(
            f"--backend tilelang cannot run in {options.dtype}",
            hint="the kernels compute in bfloat16 or float16; --backend auto runs other types in PyTorch",
        )
    tokens = options.tokens or _default_tokens(largest_topk(catalogue, blocks), gpu=gpu)
    return NumbersSettings(
        tokens=tokens,
        rows=tokens if gpu or options.tokens else min(tokens, _CPU_ROWS),
        dtype=dtype,
        world=options.tp,
        devices=devices,
        backend=resolve_backend(options.backend, devices[0]),
        seed=options.seed,
    )


def largest_topk(catalogue: Catalogue, blocks: Sequence[AttentionBlock]) -> int:
    """``index_topk`` of a sparse model, 0 for a dense one."""
    config = catalogue.config.value if catalogue.config else None
    found = [layer_config(config, block.layer).get("index_topk") for block in blocks]
    return max((topk for topk in found if type(topk) is int), default=0)


def describe_settings(
    settings: NumbersSettings, catalogue: Catalogue, blocks: Sequence[AttentionBlock], total: int
) -> dict[str, Any]:
    """The settings as the report shows them, tolerances included."""
    return {
        "version": __version__,
        "tp": settings.world,
        "tokens": settings.tokens,
        "rows": settings.rows,
        "topk": largest_topk(catalogue, blocks) or None,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "backend": settings.backend.name,
        "backend_reason": settings.backend.reason,
        "devices": [_device_name(device) for device in settings.devices],
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


def _check_tp(options: VerifyOptions, blocks: Sequence[AttentionBlock]) -> None:
    bad = next((block for block in blocks if block.heads % options.tp), None)
    if bad is None:
        return
    most = min(block.heads for block in blocks)
    legal = [size for size in range(1, most + 1) if all(block.heads % size == 0 for block in blocks)]
    raise CannotError(
        f"--tp {options.tp}: {bad.heads} heads of {bad.prefix.rstrip('.')} do not divide by {options.tp}",
        hint=f"sizes that fit: {', '.join(map(str, legal))}",
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
    return tuple(torch.device("cuda", number) for number in range(min(torch.cuda.device_count(), options.tp)))


def _default_tokens(topk: int, *, gpu: bool) -> int:
    """Past the top-k, where a wrong selection shows; 4096 on a GPU at least."""
    past = max(2 * topk, 64) if topk <= 1024 else topk + topk // 4
    return max(past, 4096) if gpu else max(past, 128)


def _device_name(device: torch.device) -> str:
    return "CPU" if device.type != "cuda" else f"{device} {torch.cuda.get_device_name(device)}"
