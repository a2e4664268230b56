"""What the ranks of a checkpoint must agree on when they are merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    Stored,
    random_bytes,
    randomness,
    unflushed,  # noqa: F401
)
from resharded import DEEPSEEK, rank_tensors, reshard, write_rank
from sharded_models import V3, write_model

from mla_convert import api
from mla_convert.errors import BadInputError, CannotError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return reshard(write_model(tmp_path / "source", V3), 4, to=DEEPSEEK)


def test_replicas_that_differ_are_named(sharded: Path) -> None:
    for rank, name in ((3, "layers.0.attn.q_norm.weight"), (2, "layers.1.ffn.gate.bias"), (3, "norm.weight")):
        path = sharded / f"model{rank}-mp4.safetensors"
        tensors = rank_tensors(sharded, rank, 4)
        old = tensors[name]
        tensors[name] = Stored(old.dtype, old.shape, bytes([old.data[0] ^ 1]) + old.data[1:])
        write_rank(path, tensors)
    with pytest.raises(
        BadInputError, match=r"3 of \d+ tensors that every rank holds are not the same"
    ) as caught:
        reshard(sharded, 2, "out")
    assert sorted(caught.value.details) == [
        "model.layers.0.self_attn.q_a_layernorm.weight: rank 3 differs from rank 0",
        "model.layers.1.mlp.gate.e_score_correction_bias: rank 2 differs from rank 0",
        "model.norm.weight: rank 3 differs from rank 0",
    ]
    assert not (sharded.parent / "out").exists()


def test_a_missing_rank(sharded: Path) -> None:
    (sharded / "model2-mp4.safetensors").unlink()
    with pytest.raises(BadInputError, match="1 of 4 ranks are missing") as caught:
        reshard(sharded, 1)
    assert caught.value.details == ("model2-mp4.safetensors",)


def test_a_missing_folder(tmp_path: Path) -> None:
    target = reshard(write_model(tmp_path / "source", V3), 4)
    shutil.rmtree(target / "rank0-of-4")
    with pytest.raises(BadInputError, match="1 of 4 ranks are missing") as caught:
        reshard(target, 1)
    assert caught.value.details == ("rank0-of-4",)


def test_ranks_of_two_checkpoints(sharded: Path) -> None:
    shutil.copy(sharded / "model0-mp4.safetensors", sharded / "model0-mp2.safetensors")
    with pytest.raises(BadInputError, match="of 2 and of 4 ranks"):
        reshard(sharded, 1)


def test_other_weights_beside_the_ranks(sharded: Path) -> None:
    shutil.copy(sharded / "model0-mp4.safetensors", sharded / "model.safetensors")
    with pytest.raises(BadInputError, match="4 rank files and 1 other weight files"):
        reshard(sharded, 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm.weight", None, "model.norm.weight is missing on rank 1 of 4"),
        ("layers.0.attn.wkv_b.weight", None, r"kv_b_proj\.weight is missing on rank 1 of 4"),
        ("layers.0.attn.wo.weight", (8, 8), r"o_proj\.weight in shapes that do not fit together"),
        ("norm.weight", (8,), r"model\.norm\.weight in shapes that do not fit together"),
    ],
)
def test_ranks_that_do_not_fit(
    name: str, change: tuple[int, ...] | None, message: str, sharded: Path
) -> None:
    tensors = rank_tensors(sharded, 1, 4)
    del tensors[name]
    if change:
        tensors[name] = random_bytes(randomness(), "BF16", change)
    write_rank(sharded / "model1-mp4.safetensors", tensors)
    with pytest.raises(BadInputError, match=message):
        reshard(sharded, 1)


def test_an_expert_on_two_ranks(sharded: Path) -> None:
    name = "layers.1.ffn.experts.0.w1.weight"
    tensors = rank_tensors(sharded, 1, 4) | {name: rank_tensors(sharded, 0, 4)[name]}
    write_rank(sharded / "model1-mp4.safetensors", tensors)
    with pytest.raises(BadInputError, match=r"experts\.0\.gate_proj\.weight lies on ranks 0, 1"):
        reshard(sharded, 1)


@pytest.mark.parametrize("mark", [{}, {"stem": 1, "vocabulary": {}, "reblocked": {}}, {"stem": "", "vocabulary": [],
    "reblocked": {}}, {"stem": "", "vocabulary": {}, "reblocked": {"x": [128, 128, 3, 128]}}])  # fmt: skip
def test_a_damaged_note(mark: dict[str, Any], sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_bytes())
    config["mla_convert"]["tensor_parallel"] = mark
    (sharded / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="tensor_parallel is damaged"):
        reshard(sharded, 1)


def test_other_commands_point_here(sharded: Path, tmp_path: Path) -> None:
    for folder in (sharded, reshard(tmp_path / "source", 2)):
        with pytest.raises(CannotError) as caught:
            api.split(folder, tmp_path / "out")
        assert "`mla-convert reshard --tp 1` makes one checkpoint of it" in (caught.value.hint or "")


def test_inspect_reads_sharded_checkpoints(sharded: Path, tmp_path: Path) -> None:
    _, plain = api.inspect(tmp_path / "source")
    for folder, format in ((sharded, "deepseek"), (reshard(tmp_path / "source", 2), "huggingface")):
        _, document = api.inspect(folder)
        assert (document["format"], document["ranks"]) == (format, 4 if format == "deepseek" else 2)
        for key in ("attention", "tensors", "tensor_parallel", "dtypes", "layout"):
            assert document[key] == plain[key]
