"""Split and combine of checkpoints that real megatron-core saved; what comes out is loaded by it, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversions import contents, run
from dist_checkpoints import halves
from megatron_releases import STACKED, VERSIONS, Megatron, Recipe, megatron_process

from mla_convert.formats.torch_dist_metadata import read_metadata

RECIPES = {
    "one tensor a layer, DSA, MoE, MTP": Recipe(),
    "all states by name": Recipe(optimizer="fully_reshardable"),
    "stacked, optimizer not distributed": replace(STACKED, optimizer="whole"),
    "stacked, ranks that end inside a head": replace(STACKED, tp=5),
    "no arguments, no extra states": Recipe(arguments=None, extra="none"),
}
KV = "linear_kv_up_proj.weight"


@pytest.fixture(scope="module", params=VERSIONS)
def megatron(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    with megatron_process(request.param, tmp_path_factory.mktemp("megatron")) as release:
        yield release


def convert(*words: str | Path) -> str:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stderr


def split_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What splitting must give, by reshaping alone."""
    found = {}
    for key, tensor in tensors.items():
        if key.endswith(KV):
            names = (key.replace("kv_up", "k_up"), key.replace("kv_up", "v_up"))
            found |= dict(zip(names, halves(tensor), strict=True))
        else:
            found[key] = tensor
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            key
        )


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_loads_what_was_split_and_combined(megatron: Megatron, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    tensors = megatron.save(folder, RECIPES[name])
    original = megatron.load(folder)
    assert_same(original.tensors, tensors)

    convert("split", folder, "-o", tmp_path / "split")
    loaded = megatron.load(tmp_path / "split")
    assert_same(loaded.tensors, split_state(tensors))
    assert loaded.common == original.common
    renamed = {key for key in original.objects if "linear_kv_up_proj" in key}
    assert {k: v for k, v in loaded.objects.items() if "_up_proj" not in k} == {
        k: v for k, v in original.objects.items() if "_up_proj" not in k
    }
    for key in renamed:
        for half in ("k_up", "v_up"):
            assert loaded.objects[key.replace("kv_up", half)] == original.objects[key]

    convert("combine", tmp_path / "split", "-o", tmp_path / "back")
    restored = contents(tmp_path / "back")
    restored.pop("mla-convert.json")
    assert restored == contents(folder)

    convert("combine", tmp_path / "split", "-o", tmp_path / "anew", "--ignore-manifest")
    anew = megatron.load(tmp_path / "anew")
    assert_same(anew.tensors, tensors)
    assert (anew.objects, anew.common) == (original.objects, original.common)


@pytest.fixture(scope="module", params=["0.14.0", "0.15.3"])
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Releases that save optimizer states in flat fragments, on two data-parallel ranks."""
    with megatron_process(request.param, tmp_path_factory.mktemp("earlier"), ranks=2) as release:
        yield release


@pytest.mark.parametrize(
    "recipe", [Recipe(optimizer="model_space"), replace(STACKED, optimizer="model_space")]
)
def test_states_in_flat_fragments(earlier: Megatron, tmp_path: Path, recipe: Recipe) -> None:
    """``fully_sharded_model_space``: ranges of fragments, which end anywhere, become whole fragments."""
    tensors = earlier.save(tmp_path / "model", recipe)
    metadata = read_metadata(tmp_path / "model" / ".metadata")
    states = [t for key, t in metadata.tensors.items() if key.startswith("optimizer.") and key.endswith(KV)]
    assert states
    assert all(tensor.original and len(tensor.chunks) % 2 == 0 for tensor in states)
    assert_same(earlier.load(tmp_path / "model").tensors, tensors)
    convert("split", tmp_path / "model", "-o", tmp_path / "split")
    assert_same(earlier.load(tmp_path / "split").tensors, split_state(tensors))
    convert("combine", tmp_path / "split", "-o", tmp_path / "anew", "--ignore-manifest")
    assert_same(earlier.load(tmp_path / "anew").tensors, tensors)
    convert("combine", tmp_path / "split", "-o", tmp_path / "back")
    for path in (tmp_path / "model").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_flat_fragments_that_end_inside_a_head_are_refused(earlier: Megatron, tmp_path: Path) -> None:
    earlier.save(tmp_path / "model", replace(STACKED, optimizer="model_space", tp=5))
    done = run("split", tmp_path / "model")
    assert done.returncode == 4
    assert "not whole heads" in done.stderr


@pytest.mark.parametrize(
    "recipe", [Recipe(layout="split"), replace(STACKED, layout="split", optimizer="whole")]
)
def test_a_checkpoint_that_megatron_saved_split(megatron: Megatron, tmp_path: Path, recipe: Recipe) -> None:
    split = megatron.save(tmp_path / "split", recipe)
    convert("combine", tmp_path / "split", "-o", tmp_path / "combined")
    combined = megatron.load(tmp_path / "combined").tensors
    assert any(key.endswith(KV) for key in combined)
    assert_same(split_state(combined), split)
    convert("split", tmp_path / "combined", "-o", tmp_path / "again")
    assert_same(megatron.load(tmp_path / "again").tensors, split)


def test_both_layouts_side_by_side(megatron: Megatron, tmp_path: Path) -> None:
    tensors = megatron.save(tmp_path / "model", Recipe())
    convert("split", tmp_path / "model", "-o", tmp_path / "both", "--keep-combined")
    assert_same(megatron.load(tmp_path / "both").tensors, tensors | split_state(tensors))
    convert("combine", tmp_path / "both", "-o", tmp_path / "back", "--ignore-manifest")
    assert_same(megatron.load(tmp_path / "back").tensors, tensors)


def test_states_in_buckets_are_refused_or_dropped(megatron: Megatron, tmp_path: Path) -> None:
    tensors = megatron.save(tmp_path / "model", Recipe(optimizer="dp_reshardable"))
    done = run("split", tmp_path / "model")
    assert done.returncode == 4
    assert "dp_reshardable" in done.stderr
    assert "--dist-ckpt-optim-fully-reshardable" in done.stderr
    assert not (tmp_path / "model-split").exists()
    told = convert("split", tmp_path / "model", "--drop-optimizer")
    assert "4 tensors and objects of the optimizer are left out" in told
    loaded = megatron.load(tmp_path / "model-split")
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    assert_same(loaded.tensors, split_state(weights))
    assert not any(key.startswith("optimizer.") for key in loaded.objects)


def test_states_by_name_can_be_dropped_too(megatron: Megatron, tmp_path: Path) -> None:
    tensors = megatron.save(tmp_path / "model", Recipe(optimizer="fully_reshardable"))
    convert("split", tmp_path / "model", "-o", tmp_path / "split", "--drop-optimizer")
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    assert_same(megatron.load(tmp_path / "split").tensors, split_state(weights))
    convert("combine", tmp_path / "split", "-o", tmp_path / "back")
    assert_same(megatron.load(tmp_path / "back").tensors, megatron.load(tmp_path / "model").tensors)


def test_fp8_histories_are_refused_or_replaced(megatron: Megatron, tmp_path: Path) -> None:
    megatron.save(tmp_path / "model", Recipe(extra="delayed"))
    done = run("split", tmp_path / "model")
    assert done.returncode == 4
    assert "delayed scaling" in done.stderr
    told = convert("split", tmp_path / "model", "--drop-fp8-state")
    assert "FP8 calibrates anew" in told
    before, after = megatron.load(tmp_path / "model").objects, megatron.load(tmp_path / "model-split").objects
    up = [key for key in after if "linear_k_up_proj" in key or "linear_v_up_proj" in key]
    assert len(up) == 6
    for key in after:
        if key in up:
            assert after[key].startswith("tensor torch.uint8 (0,)")
        else:
            assert after[key] == before[key]


def test_a_save_folder_with_a_tracker(megatron: Megatron, tmp_path: Path) -> None:
    save = tmp_path / "save"
    tensors = megatron.save(save / "iter_0000020", Recipe())
    megatron.save(save / "iter_0000010", Recipe(seed=1))
    (save / "latest_checkpointed_iteration.txt").write_text("20\n")
    told = convert("split", save, "-o", tmp_path / "out")
    assert "only iter_0000020 is read" in told
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["iter_0000020", "latest_checkpointed_iteration.txt", "mla-convert.json"]
    assert_same(megatron.load(tmp_path / "out" / "iter_0000020").tensors, split_state(tensors))
    convert("combine", tmp_path / "out", "-o", tmp_path / "back")
    restored = contents(tmp_path / "back" / "iter_0000020")
    assert restored == contents(save / "iter_0000020")


def test_ranks_keep_their_heads(megatron: Megatron, tmp_path: Path) -> None:
    """A rank that loads its part reads one chunk of K and one of V."""
    megatron.save(tmp_path / "model", Recipe(tp=4))
    convert("split", tmp_path / "model", "-o", tmp_path / "split")
    tensors = read_metadata(tmp_path / "split" / ".metadata").tensors
    for half, rows in (("k_up", 8), ("v_up", 12)):
        chunks = tensors[f"decoder.layers.0.self_attention.linear_{half}_proj.weight"].chunks
        assert [chunk.offsets for chunk in chunks] == [(rank * rows, 0) for rank in range(4)]


def test_untouched_files_are_linked_and_the_old_bytes_can_go(megatron: Megatron, tmp_path: Path) -> None:
    """After split, the output stands on its own: the source may be removed."""
    tensors = megatron.save(tmp_path / "model", Recipe())
    convert("split", tmp_path / "model", "-o", tmp_path / "split", "--link", "hard")
    for path in (tmp_path / "model").glob("*.distcp"):
        assert (tmp_path / "split" / path.name).samefile(path)
    shutil.rmtree(tmp_path / "model")
    assert_same(megatron.load(tmp_path / "split").tensors, split_state(tensors))


def test_a_changed_half_does_not_come_back_as_the_original(megatron: Megatron, tmp_path: Path) -> None:
    megatron.save(tmp_path / "model", Recipe())
    convert("split", tmp_path / "model", "-o", tmp_path / "split")
    new = tmp_path / "split" / "__mla_convert_0.distcp"
    data = bytearray(new.read_bytes())
    data[800] ^= 1  # in the first K
    new.write_bytes(data)
    done = run("combine", tmp_path / "split", "-o", tmp_path / "back")
    assert done.returncode == 3
    assert "was changed since the split" in done.stderr
