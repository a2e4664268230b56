"""Megatron's own modules: absorbed attention, loaded by itself from what was split, gives what standard attention gave.

0.18.2 has both: MLASelfAttention with the combined up-projection, AbsorbedMLASelfAttention with split ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import run
from megatron_releases import release_folder
from safetensors.torch import load_file

VERSION = "0.18.2"
_SCRIPT = Path(__file__).with_name("megatron_attention.py")


def attention(scratch: Path, module: str, **request: str | Path) -> torch.Tensor:
    """What a module gives for a fixed input, after it was loaded or saved.

    Raises:
        RuntimeError: Megatron refused; with what it said.
    """
    folder = release_folder(VERSION)
    if folder is None:
        pytest.skip(f"megatron-core {VERSION} is not there; `make test` unpacks it")
    output = scratch / f"{module}.safetensors"
    asked: dict[str, Any] = {"module": module, "output": str(output)} | {
        k: str(v) for k, v in request.items()
    }
    (scratch / "request.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", _SCRIPT, scratch / "request.json"],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return load_file(output)["output"]


def test_absorbed_attention_gives_what_standard_attention_gave(tmp_path: Path) -> None:
    expected = attention(tmp_path, "standard", save=tmp_path / "standard")
    with pytest.raises(RuntimeError, match=r"linear_k_up_proj\.weight from model not in state dict"):
        attention(tmp_path, "absorbed", load=tmp_path / "standard")

    assert run("split", tmp_path / "standard", "-o", tmp_path / "split").returncode == 0
    found = attention(tmp_path, "absorbed", load=tmp_path / "split", save=tmp_path / "absorbed")
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)

    # And back: what the absorbed module saved, combined, is what the standard one loads.
    assert run("combine", tmp_path / "absorbed", "-o", tmp_path / "combined").returncode == 0
    assert torch.equal(attention(tmp_path, "standard", load=tmp_path / "combined"), expected)
