"""Checkpoints resharded beside their source, and the files of ranks as the official library reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import (
    RUN,
    Stored,
    untouched,
    write_file,
)
from safetensors import safe_open

from mla_convert import api
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format

DEEPSEEK, HUGGINGFACE = Format.DEEPSEEK, Format.HUGGINGFACE


def reshard(source: Path, tp: int, name: str | None = None, **options: Any) -> Path:
    """Reshard into a folder beside the source, which must stay as it is; returns the folder."""
    target = source.with_name(name or f"tp{tp}")
    with untouched(source):
        api.reshard(source, target, ReshardOptions(tp, **options), run=RUN)
    return target


def rank_tensors(folder: Path, rank: int, ranks: int) -> dict[str, Stored]:
    """What one rank of a DeepSeek folder holds, read by the official library."""
    found = {}
    with safe_open(folder / f"model{rank}-mp{ranks}.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = Stored(file.get_slice(name).get_dtype(), tuple(tensor.shape), data)
    return found


def write_rank(path: Path, tensors: dict[str, Stored]) -> None:
    """The file of one rank."""
    write_file(path, tensors, {"format": "pt"})
