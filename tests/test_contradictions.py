"""Layouts, scales and weights that contradict each other, or the manifest: what ``split`` and ``combine`` refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import (
    ALIGNED,
    GLM,
    Recipe,
    Stored,
    combine,
    load,
    make_tensors,
    split,
    unflushed,  # noqa: F401
    write_checkpoint,
    write_file,
)

from mla_convert.errors import BadInputError, CannotError, DifferenceError


def changed(folder: Path, name: str, *, at: int = 0) -> None:
    """Flip a bit of one tensor in place."""
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if name in header:
            offset = 8 + length + header[name]["data_offsets"][0] + at
            path.unlink()  # the file may be a hard link to its source
            path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
            return
    raise KeyError(name)


@pytest.mark.parametrize("field", ["k_b_proj.weight", "v_b_proj.weight", "kv_b_proj.weight"])
@pytest.mark.parametrize("ignore_manifest", [False, True])
def test_both_layouts_with_unequal_bytes(field: str, ignore_manifest: bool, tmp_path: Path) -> None:
    target = split(write_checkpoint(tmp_path / "source"), keep_combined=True)
    name = f"model.layers.1.self_attn.{field}"
    changed(target, name, at=-1 + 2 * 32 * 16)
    with pytest.raises(BadInputError, match=r"model\.layers\.1\.self_attn\..* differs from .*kv_b_proj"):
        combine(target, ignore_manifest=ignore_manifest)
    assert not (tmp_path / "combined").exists()


@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
def test_both_layouts_with_unequal_scales(scales: str, tmp_path: Path) -> None:
    recipe = Recipe(**GLM, scales=scales)
    target = split(write_checkpoint(tmp_path / "source", recipe), keep_combined=True)
    field = "weight_scale_inv" if scales == "block" else "weight_scale"
    changed(target, f"model.layers.0.self_attn.v_b_proj.{field}")
    with pytest.raises(BadInputError, match=f"v_b_proj.{field} row 0 differs from"):
        combine(target)


def test_both_layouts_of_unequal_shape(tmp_path: Path) -> None:
    recipe = Recipe(dtype="F8_E4M3", scales="channel")
    target = split(write_checkpoint(tmp_path / "source", recipe), keep_combined=True)
    tensors = load(target)
    name = "model.layers.0.self_attn.kv_b_proj.weight_scale"
    tensors[name] = Stored("F32", (128,), tensors[name].data)
    write_file(next(target.glob("*.safetensors")), tensors)
    with pytest.raises(BadInputError, match=r"kv_b_proj\.weight_scale is F32 \[128\]; .* F32 \[128, 1\]"):
        combine(target, ignore_manifest=True)


@pytest.mark.parametrize("ignore_manifest", [False, True])
def test_replicated_scales_that_no_longer_agree(ignore_manifest: bool, tmp_path: Path) -> None:
    target = split(write_checkpoint(tmp_path / "source", Recipe(**GLM, scales="block")))
    changed(target, "model.layers.1.self_attn.k_b_proj.weight_scale_inv")
    with pytest.raises(BadInputError, match=r"belong to one block of .* but hold different scales"):
        combine(target, ignore_manifest=ignore_manifest)
    assert not (tmp_path / "combined").exists()


def test_per_tensor_scales_that_no_longer_agree(tmp_path: Path) -> None:
    recipe = Recipe(dtype="F8_E4M3", scales="tensor", input_scale=True)
    target = split(write_checkpoint(tmp_path / "source", recipe))
    changed(target, "model.layers.0.self_attn.v_b_proj.input_scale")
    with pytest.raises(BadInputError, match=r"k_b_proj\.input_scale and .*v_b_proj\.input_scale differ"):
        combine(target, ignore_manifest=True)


@pytest.mark.parametrize("field", ["k_b_proj.weight", "v_b_proj.weight"])
def test_weights_changed_since_the_split(field: str, tmp_path: Path) -> None:
    """The manifest knows what the combined tensor was: this is a difference, not damage."""
    target = split(write_checkpoint(tmp_path / "source", shards=2))
    changed(target, f"model.layers.1.self_attn.{field}")
    with pytest.raises(
        DifferenceError, match=r"model\.layers\.1\.self_attn\.kv_b_proj\.weight does not come"
    ):
        combine(target)
    assert not (tmp_path / "combined").exists()
    found = load(combine(target, ignore_manifest=True))
    assert "model.layers.1.self_attn.kv_b_proj.weight" in found


def test_dequantized_weights_changed_since_the_split(tmp_path: Path) -> None:
    target = split(write_checkpoint(tmp_path / "source", Recipe(**ALIGNED, scales="block")), dequantize=True)
    changed(target, "model.layers.0.self_attn.k_b_proj.weight")
    with pytest.raises((BadInputError, DifferenceError), match=r"kv_b_proj\.weight"):
        combine(target)


def foreign_halves(folder: Path, recipe: Recipe, change: dict[str, Stored]) -> Path:
    """A split checkpoint that somebody else made: no manifest, and some tensors other than ours."""
    target = split(write_checkpoint(folder / "source", recipe))
    tensors = load(target) | change
    write_file(next(target.glob("*.safetensors")), tensors)
    (target / "mla-convert.json").unlink()
    return target


def test_halves_quantised_on_their_own(tmp_path: Path) -> None:
    """128-row blocks of K [2*192] cross from head to head; no combined tensor can hold such scales."""
    recipe = Recipe(layers=1, heads=2, nope=192, v=256, rank=128, dtype="F8_E4M3", scales="block")
    k, v = (f"model.layers.0.self_attn.{half}_b_proj.weight_scale_inv" for half in "kv")
    target = foreign_halves(
        tmp_path, recipe, {k: Stored("F32", (3, 1), bytes(12)), v: Stored("F32", (4, 1), bytes(16))}
    )
    with pytest.raises(CannotError, match="one scale for 128 rows; with nope 192 and v 256"):
        combine(target)


def test_halves_stored_differently(tmp_path: Path) -> None:
    recipe = Recipe(layers=1)
    name = "model.layers.0.self_attn.v_b_proj.weight"
    target = foreign_halves(tmp_path, recipe, {name: Stored("F16", (64, 32), bytes(64 * 32 * 2))})
    with pytest.raises(CannotError, match="K and V are stored differently: BF16; F16"):
        combine(target)


def test_halves_with_scales_of_different_dtypes(tmp_path: Path) -> None:
    recipe = Recipe(layers=1, dtype="F8_E4M3", scales="channel")
    name = "model.layers.0.self_attn.v_b_proj.weight_scale"
    target = foreign_halves(tmp_path, recipe, {name: Stored("BF16", (64, 1), bytes(128))})
    with pytest.raises(CannotError, match=r"v_b_proj\.weight_scale is BF16 \[64, 1\]; .* F32 \[64, 1\]"):
        combine(target)


@pytest.mark.parametrize("keep_combined", [False, True])
def test_split_of_what_is_split(keep_combined: bool, tmp_path: Path) -> None:
    target = split(write_checkpoint(tmp_path / "source"), keep_combined=keep_combined)
    with pytest.raises(CannotError, match="nothing to split: all 2 attention blocks") as caught:
        split(target, "again")
    assert "mla-convert combine" in (caught.value.hint or "")


def test_combine_of_what_is_combined(tmp_path: Path) -> None:
    with pytest.raises(CannotError, match="nothing to combine: all 2 attention blocks") as caught:
        combine(write_checkpoint(tmp_path / "source"))
    assert "mla-convert split" in (caught.value.hint or "")


def test_half_converted(tmp_path: Path) -> None:
    target = split(write_checkpoint(tmp_path / "source", index=False))
    tensors = load(target)
    old = make_tensors(Recipe())["model.layers.1.self_attn.kv_b_proj.weight"]
    tensors = {name: t for name, t in tensors.items() if "layers.1.self_attn.k_b" not in name}
    tensors = {name: t for name, t in tensors.items() if "layers.1.self_attn.v_b" not in name}
    write_file(target / "model.safetensors", {**tensors, "model.layers.1.self_attn.kv_b_proj.weight": old})
    for operation in (split, combine):
        with pytest.raises(CannotError, match="1 of 2 attention blocks") as caught:
            operation(target, "out")
        assert "original" in (caught.value.hint or "")
