"""verify on torch_dist: every level runs on the tensors as they lie, and a fault is found."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from conversions import run
from dist_checkpoints import ARGUMENTS, UP, D, state, write

from mla_convert.formats.torch_dist import locate, open_torch_dist

MODEL = {
    **ARGUMENTS,
    "num_layers": 2,
    "hidden_size": D,
    "rope_type": "rope",
    "rotary_base": 10000,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import torch

    norms = {
        f"decoder.layers.{layer}.self_attention.{name}.weight": torch.rand(size).bfloat16() + 0.5
        for layer in range(2)
        for name, size in (("q_layernorm", MODEL["q_lora_rank"]), ("kv_layernorm", MODEL["kv_lora_rank"]))
    }
    write(tmp_path / "model", state() | norms, {"args": Namespace(**MODEL), "iteration": 7})
    assert run("split", tmp_path / "model").returncode == 0
    return tmp_path


def levels(report: dict[str, object]) -> dict[str, object]:
    checks = report["checks"]
    assert isinstance(checks, list)
    return {f"{check['level']}: {check['name']}": check["passed"] for check in checks}


def test_every_level_passes(folder: Path) -> None:
    done = run("verify", folder / "model-split", "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = levels(report)
    assert found["structure: files"] is True
    assert found["structure: tensors"] is True
    assert found["bytes: K and V rows"] is True
    assert found["bytes: carried tensors"] is True
    assert found["control: negative control"] is True
    assert len(report["layers"]) == 2


@pytest.mark.parametrize("half", ["k_up", "v_up"])
def test_one_wrong_bit_in_a_row_is_found(folder: Path, half: str) -> None:
    source = open_torch_dist(folder / "model-split")
    key = UP.format(1).replace("kv_up", half)
    chunk = source.metadata.tensors[key].chunks[0]
    place = locate(source.folder, key, chunk, "BF16")
    path = source.folder / chunk.item.file
    data = bytearray(path.read_bytes())
    data[place.start + 99] ^= 1
    path.write_bytes(data)
    done = run("verify", folder / "model-split", "--json")
    assert done.returncode == 10
    assert levels(json.loads(done.stdout))["bytes: K and V rows"] is False


def test_a_carried_tensor_that_changed_is_found(folder: Path) -> None:
    source = open_torch_dist(folder / "model-split")
    key = "embedding.word_embeddings.weight"
    chunk = source.metadata.tensors[key].chunks[0]
    place = locate(source.folder, key, chunk, "F32")
    path = source.folder / chunk.item.file
    data = bytearray(path.read_bytes())
    data[place.start] ^= 1
    path.unlink()  # it is a hard link of the original's
    path.write_bytes(data)
    done = run("verify", folder / "model-split", "--json")
    assert done.returncode == 10
    assert levels(json.loads(done.stdout))["bytes: carried tensors"] is False


def test_an_archive_that_pytorch_cannot_read_is_said(folder: Path) -> None:
    """The reader that verifies is not the one that converts."""
    source = open_torch_dist(folder / "model-split")
    key = UP.format(0).replace("kv_up", "k_up")
    chunk = source.metadata.tensors[key].chunks[0]
    path = source.folder / chunk.item.file
    data = bytearray(path.read_bytes())
    data[chunk.item.offset + 40] ^= 255  # inside data.pkl, in an archive that is still found
    path.write_bytes(data)
    done = run("verify", folder / "model-split")
    assert done.returncode in (3, 10)
