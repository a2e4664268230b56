"""Small torch_dist checkpoints that PyTorch itself writes, and reads again, where Megatron is not needed."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

H, N, P, V, R, Q, D = 4, 8, 4, 12, 16, 24, 32
ARGUMENTS = {
    "num_attention_heads": H,
    "qk_head_dim": N,
    "qk_pos_emb_head_dim": P,
    "v_head_dim": V,
    "kv_lora_rank": R,
    "q_lora_rank": Q,
}
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
UP = "decoder.layers.{}.self_attention.linear_kv_up_proj.weight"


def state(layers: int = 2) -> dict[str, torch.Tensor]:
    """Two attention layers and an embedding."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "linear_q_down_proj": (Q, D),
        "linear_q_up_proj": (H * (N + P), Q),
        "linear_kv_down_proj": (R + P, D),
        "linear_kv_up_proj": (H * (N + V), R),
        "linear_proj": (D, H * V),
    }
    found = {
        f"decoder.layers.{layer}.self_attention.{name}.weight": torch.randn(
            shape, generator=generator
        ).bfloat16()
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    return found | {"embedding.word_embeddings.weight": torch.randn(64, D, generator=generator)}


def write(folder: Path, tensors: dict[str, Any] | None = None, common: Any = ...) -> dict[str, Any]:
    """An iteration: PyTorch's own save, ``metadata.json``, and ``common.pt`` unless ``common`` is None."""
    tensors = state() if tensors is None else tensors
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # as Megatron has it
    dcp.save(dict(tensors), checkpoint_id=folder, planner=planner, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps(BACKEND))
    if common is ...:
        common = {"args": Namespace(**ARGUMENTS), "iteration": 7}
    if common is not None:
        torch.save(common, folder / "common.pt")
    return tensors


def write_save_folder(
    folder: Path, iterations: tuple[int, ...] = (7,), tracker: str | None = "7"
) -> dict[str, Any]:
    """A save folder with iterations and a tracker."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    for iteration in iterations:
        tensors = write(folder / f"iter_{iteration:07d}")
    if tracker is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    (folder / "progress.txt").write_text("half way\n")
    return tensors


def read(folder: Path, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Tensors by PyTorch's own reader."""
    found = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def halves(combined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a combined up-projection ``[…, H*(N+V), R]``, by reshaping."""
    lead = combined.shape[:-2]
    heads = combined.reshape(*lead, H, N + V, R)
    return heads[..., :N, :].reshape(*lead, H * N, R), heads[..., N:, :].reshape(*lead, H * V, R)
