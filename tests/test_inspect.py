"""What ``inspect`` says, and which tensor-parallel sizes it allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Recipe, Stored, fingerprint, load, unflushed, write_checkpoint, write_file  # noqa: F401

from mla_convert import api
from mla_convert.formats.huggingface import open_checkpoint
from mla_convert.formats.safetensors import build_header
from mla_convert.geometry import find_blocks
from mla_convert.inspection import group_blocks, tensor_parallel_sizes
from mla_convert.tensors import TensorSpec
from mla_convert.whole import open_whole


def inspected(folder: Path) -> dict[str, Any]:
    before = fingerprint(folder)
    _, document = api.inspect(folder)
    assert fingerprint(folder) == before
    assert json.loads(json.dumps(document)) == document
    return document


def test_the_whole_document(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", layers=4, without_mla=frozenset({1}), mtp=True, total_size=7)
    tensors = load(source)
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + len(tensor.data)
    group = {
        "heads": 4, "nope": 16, "rope": 8, "v": 16, "rank": 32, "q_rank": 12, "hidden": 24,
        "layout": "combined", "storage": "BF16", "indexer": False, "note": None,
    }  # fmt: skip
    assert inspected(source) == {
        "path": str(source),
        "format": "huggingface",
        "ranks": 1,
        "model_type": "deepseek_v3",
        "text_model_type": "deepseek_v3",
        "layout": "combined",
        "files": 1,
        "tensors": len(tensors),
        "bytes": {
            "files": sum(path.stat().st_size for path in source.glob("*.safetensors")),
            "tensors": sum(len(tensor.data) for tensor in tensors.values()),
            "up_projections": 4 * 128 * 32 * 2,
            "stated_total_size": 7,
        },
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        "attention": [
            {"layers": "0, 2-3", "blocks": 3, "prefix": "model.layers.0.self_attn.", **group, "mtp": False},
            {"layers": "4", "blocks": 1, "prefix": "model.layers.4.self_attn.", **group, "mtp": True},
        ],
        "layers_without_mla": [1],
        "sparse_attention": None,
        "tensor_parallel": {
            "legal": [1, 2],
            "illegal": {
                "4": "10 rows of model.embed_tokens do not divide by 4; --pad-vocabulary adds rows of zeros"
            },
        },
        "warnings": [],
    }


@pytest.mark.parametrize("keep_combined", [False, True])
def test_split_checkpoints(keep_combined: bool, tmp_path: Path) -> None:
    recipe = Recipe(heads=2, nope=192, v=256, rank=128, dtype="F8_E4M3", scales="block")
    source = write_checkpoint(tmp_path / "m", recipe)
    assert inspected(source)["attention"][0]["storage"] == "F8_E4M3, scales 128x128"
    api.split(source, tmp_path / "s", api.SplitOptions(keep_combined=keep_combined))
    found = inspected(tmp_path / "s")
    fine = "F8_E4M3, scales 64x128"
    assert found["attention"][0]["storage"] == (
        f"F8_E4M3, scales 128x128 / {fine}" if keep_combined else fine
    )
    assert found["layout"] == ("both" if keep_combined else "split")
    assert found["bytes"]["up_projections"] == (2 if keep_combined else 1) * 2 * 2 * 448 * 128


def test_sparse_attention(tmp_path: Path) -> None:
    config = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    source = write_checkpoint(tmp_path / "m", index=False, config=config)
    name = "model.layers.1.self_attn.indexer.wq_b.weight"
    write_file(source / "model.safetensors", load(source) | {name: Stored("BF16", (1, 1), b"ab")})
    found = inspected(source)
    assert found["sparse_attention"] == {
        "topk": 2048, "index_heads": 64, "index_dim": 128, "layers_with_indexer": 1, "layers_sharing_one": 1,
    }  # fmt: skip
    assert [group["layers"] for group in found["attention"]] == ["0", "1"]


def test_mixed_layouts_and_names_without_layers(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", layers=1, index=False)
    kv = load(source)["model.layers.0.self_attn.kv_b_proj.weight"]
    k = Stored("BF16", (64, 32), kv.data[:4096])
    split = {"head.kv_a_proj_with_mqa.weight": Stored("BF16", (40, 24), bytes(1920)),
             "head.k_b_proj.weight": k, "head.v_b_proj.weight": k}  # fmt: skip
    write_file(source / "model.safetensors", load(source) | split)
    found = inspected(source)
    assert found["layout"] == "mixed"
    assert [group["layers"] for group in found["attention"]] == ["0", "head."]


def large(folder: Path, heads: int, nope: int, v: int, rank: int, *, fp8: bool) -> Path:
    """A checkpoint of full size whose data is a hole: only the header is ever read."""
    module, rows = "model.layers.0.self_attn.", heads * (nope + v)
    specs = [
        TensorSpec(f"{module}kv_b_proj.weight", "F8_E4M3" if fp8 else "BF16", (rows, rank)),
        TensorSpec(f"{module}kv_a_proj_with_mqa.weight", "BF16", (rank + 64, 1024)),
        TensorSpec(f"{module}q_b_proj.weight", "BF16", (heads * (nope + 64), 768)),
        TensorSpec(f"{module}o_proj.weight", "BF16", (1024, heads * v)),
    ]
    if fp8:
        specs.append(
            TensorSpec(f"{module}kv_b_proj.weight_scale_inv", "F32", (-(-rows // 128), -(-rank // 128)))
        )
    folder.mkdir()
    header = build_header(specs)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.nbytes for spec in specs))
    return folder


#: heads, nope, v, rank, FP8, legal sizes. facts/hf_mla.md, table 1.1.
MODELS: dict[str, tuple[int, int, int, int, bool, list[int]]] = {
    "deepseek_v3": (128, 128, 128, 512, True, [1, 2, 4, 8, 16, 32, 64, 128]),
    "glm_5": (64, 192, 256, 512, True, [1, 2, 4, 8, 16, 32]),
    "glm_5_bf16": (64, 192, 256, 512, False, [1, 2, 4, 8, 16, 32, 64]),
    "glm_4_7_flash": (20, 192, 256, 512, True, [1, 2, 5, 10]),
    "glm_4_7_flash_bf16": (20, 192, 256, 512, False, [1, 2, 4, 5, 10, 20]),
    "minicpm3": (40, 64, 64, 256, True, [1, 2, 4, 5, 8, 10, 20, 40]),
    "mistral4": (32, 64, 128, 256, True, [1, 2, 4, 8, 16]),
}


@pytest.mark.parametrize(("heads", "nope", "v", "rank", "fp8", "legal"), MODELS.values(), ids=MODELS)
def test_tensor_parallel_sizes(
    heads: int, nope: int, v: int, rank: int, fp8: bool, legal: list[int], tmp_path: Path
) -> None:
    whole = open_whole(large(tmp_path / "m", heads, nope, v, rank, fp8=fp8))
    sizes = tensor_parallel_sizes(whole, find_blocks(whole.logical))
    assert [size.size for size in sizes if size.is_legal] == legal
    illegal = {size.size: size.reason or "" for size in sizes if not size.is_legal}
    for size, reason in illegal.items():
        assert f"by {size}" in reason or f"over {size} ranks" in reason
    if heads == 20:
        assert illegal[8].startswith("20 heads of model.layers.0.self_attn do not divide by 8")
    if heads == 20 and fp8:
        assert "8960 rows of model.layers.0.self_attn.kv_b_proj over 20 ranks are 448 each" in illegal[20]
        assert "whole FP8 blocks of 128" in illegal[20]


def test_a_size_that_was_asked_for(tmp_path: Path) -> None:
    whole = open_whole(write_checkpoint(tmp_path / "m"))
    sizes = tensor_parallel_sizes(whole, find_blocks(whole.logical), also=[3])
    assert [(size.size, size.is_legal) for size in sizes] == [(1, True), (2, True), (3, False), (4, False)]


def test_groups_keep_unlike_blocks_apart(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", layers=1, index=False)
    other = write_checkpoint(tmp_path / "n", layers=1, index=False, dtype="F16", prefix="draft.")
    for name in ("config.json",):
        (source / name).unlink()
    more = {name: t for name, t in load(other).items() if name.startswith("draft.")}
    write_file(source / "model.safetensors", load(source) | more)
    catalogue = open_checkpoint(source)
    groups = group_blocks(catalogue, find_blocks(catalogue))
    assert [group.storage(catalogue) for group in groups] == ["F16", "BF16"]
