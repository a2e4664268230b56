"""Migration between Megatron's conventions: norms by key, the indexer by its own code of both releases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conversions import run
from megatron_releases import STACKED, VERSIONS, Megatron, Recipe, megatron_process
from test_megatron_split import assert_same, convert, split_state

from mla_convert.megatron.eras import IndexerRows, row_moves, row_order

LAYER = "decoder.layers.0.self_attention.core_attention.indexer."
#: What tells that a release before 0.19 saved it: it has a sparse indexer and not the newer argument.
OLD = Recipe(arguments={"dsa_indexer_n_heads": 2})
#: How Megatron 0.19 rotates for each order of rows.
INTERLEAVED = {IndexerRows.ROPE_FIRST: False, IndexerRows.ROPE_FIRST_INTERLEAVED: True}


@pytest.fixture(scope="module", params=VERSIONS)
def megatron(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    with megatron_process(request.param, tmp_path_factory.mktemp("megatron")) as release:
        yield release


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    with megatron_process("0.16.1", tmp_path_factory.mktemp("old")) as release:
        yield release


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    with megatron_process("0.19.2", tmp_path_factory.mktemp("new")) as release:
        yield release


def indexer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(LAYER): tensor for key, tensor in tensors.items() if key.startswith(LAYER)}


# Norms


NORMS = {
    "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
    "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
}


def standalone(key: str) -> str:
    for fused, alone in NORMS.items():
        key = key.replace(fused, alone)
    return key


@pytest.mark.parametrize(
    "recipe", [Recipe(norms="fused", optimizer="whole"), Recipe(norms="fused", stacked=True)]
)
def test_norms_move_and_come_back(megatron: Megatron, tmp_path: Path, recipe: Recipe) -> None:
    recipe = recipe if not recipe.stacked else Recipe(**{**vars(STACKED), "norms": "fused"})
    tensors = megatron.save(tmp_path / "model", recipe)
    before = megatron.load(tmp_path / "model")
    convert("migrate", tmp_path / "model", "--norms", "standalone", "-o", tmp_path / "alone")
    alone = megatron.load(tmp_path / "alone")
    assert_same(alone.tensors, {standalone(key): tensor for key, tensor in tensors.items()})
    added = alone.objects.keys() - before.objects.keys()
    assert all("layernorm._extra_state" in key for key in added)
    assert {alone.objects[key] for key in added} == {"tensor torch.uint8 (0,) " + EMPTY_SHA256}
    assert alone.common == before.common
    convert("migrate", tmp_path / "alone", "--norms", "fused", "-o", tmp_path / "fused")
    fused = megatron.load(tmp_path / "fused")
    assert_same(fused.tensors, tensors)
    assert (fused.objects, fused.common) == (before.objects, before.common)


EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_splitting_with_a_fused_norm_needs_a_word(megatron: Megatron, tmp_path: Path) -> None:
    tensors = megatron.save(tmp_path / "model", Recipe(norms="fused"))
    done = run("split", tmp_path / "model")
    assert done.returncode == 4
    assert "--norms standalone" in done.stderr
    convert("split", tmp_path / "model", "--norms", "standalone")
    loaded = megatron.load(tmp_path / "model-split").tensors
    assert_same(loaded, split_state({standalone(key): tensor for key, tensor in tensors.items()}))
    convert("combine", tmp_path / "model-split", "--norms", "fused", "-o", tmp_path / "back")
    assert_same(megatron.load(tmp_path / "back").tensors, tensors)
    convert("combine", tmp_path / "model-split", "-o", tmp_path / "original")
    for path in (tmp_path / "model").iterdir():
        assert (tmp_path / "original" / path.name).read_bytes() == path.read_bytes()


def test_a_norm_is_not_fused_with_a_split_projection(megatron: Megatron, tmp_path: Path) -> None:
    megatron.save(tmp_path / "model", Recipe(layout="split"))
    done = run("migrate", tmp_path / "model", "--norms", "fused")
    assert done.returncode == 4
    assert "only be fused with a combined" in done.stderr


# The indexer


@pytest.mark.parametrize("rows", INTERLEAVED)
def test_the_new_indexer_scores_as_the_old_one(
    old: Megatron, new: Megatron, tmp_path: Path, rows: IndexerRows
) -> None:
    """Megatron 0.16.1 and 0.19.2 give the same scores and choose the same keys, each with its own weights."""
    tensors = old.save(tmp_path / "old", OLD)
    convert("migrate", tmp_path / "old", "--indexer", rows, "-o", tmp_path / "new")
    expected = old.indexer(indexer(tensors))
    found = new.indexer(indexer(new.load(tmp_path / "new").tensors), INTERLEAVED[rows])
    # Megatron works the scores out in float32; they reach 170 here.
    assert torch.allclose(found["scores"], expected["scores"], rtol=1e-5, atol=1e-4)
    assert torch.equal(found["chosen"], expected["chosen"])
    # Without the migration the same weights load just as well, and score otherwise.
    wrong = new.indexer(indexer(tensors), INTERLEAVED[rows])
    assert (wrong["scores"] - expected["scores"]).abs().max() > 1


@pytest.mark.parametrize("rows", INTERLEAVED)
def test_rows_common_state_and_files_come_back(
    old: Megatron, new: Megatron, tmp_path: Path, rows: IndexerRows
) -> None:
    tensors = old.save(tmp_path / "old", OLD)
    before = old.load(tmp_path / "old")
    convert("migrate", tmp_path / "old", "--indexer", rows, "-o", tmp_path / "new")
    assert not (tmp_path / "new" / "common.pt").exists()
    loaded = new.load(tmp_path / "new")
    noted = f"'dsa_indexer_rope_interleaved': {INTERLEAVED[rows]}, "
    assert noted in loaded.common
    assert loaded.common.replace(noted, "") == before.common
    changed = {key for key in tensors if not torch.equal(tensors[key], loaded.tensors[key])}
    leaves = {key.rpartition("indexer.")[2] for key in changed}
    assert leaves == {"linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias"}

    convert("migrate", tmp_path / "new", "--indexer", "rope-last", "-o", tmp_path / "back")
    back = old.load(tmp_path / "back")
    assert_same(back.tensors, tensors)
    assert (back.common, back.objects) == (before.common, before.objects)
    assert (tmp_path / "back" / "metadata.json").exists()


def test_a_checkpoint_tells_its_order_and_is_not_migrated_twice(old: Megatron, tmp_path: Path) -> None:
    old.save(tmp_path / "old", OLD)
    convert("migrate", tmp_path / "old", "--indexer", "rope-first", "-o", tmp_path / "new")
    (tmp_path / "new" / "mla-convert.json").unlink()
    done = run("migrate", tmp_path / "new", "--indexer", "rope-first")
    assert done.returncode == 4
    assert "nothing to migrate" in done.stderr


def test_what_a_checkpoint_does_not_tell_is_asked_for(old: Megatron, new: Megatron, tmp_path: Path) -> None:
    tensors = old.save(tmp_path / "model", Recipe(arguments=None))
    done = run("migrate", tmp_path / "model", "--indexer", "rope-first")
    assert done.returncode == 4
    assert "--indexer-from" in done.stderr
    told = convert("migrate", tmp_path / "model", "--indexer", "rope-first", "--indexer-from", "rope-last")
    assert "no arguments to note the order" in told
    again = run("migrate", tmp_path / "model-migrated", "--indexer", "rope-last")
    assert again.returncode == 4
    assert "--indexer-from" in again.stderr
    moved = new.load(tmp_path / "model-migrated").tensors
    key = f"{LAYER}k_norm.weight"
    assert torch.equal(moved[key], tensors[key][torch.tensor([4, 6, 5, 7, 0, 1, 2, 3])])


def test_evidence_at_odds_is_not_weighed(new: Megatron, tmp_path: Path) -> None:
    """0.19 refuses sparse attention with a fused norm, but a common state inside comes from 0.19."""
    new.save(tmp_path / "model", Recipe(norms="fused", arguments={"dsa_indexer_rope_interleaved": False}))
    done = run("migrate", tmp_path / "model", "--indexer", "rope-last")
    assert done.returncode == 4
    assert "the query norm is fused" in done.stderr
    told = convert("migrate", tmp_path / "model", "--indexer", "rope-first", "--indexer-from", "rope-last")
    assert "before its norm" in told


def test_split_and_migrate_in_one_pass(old: Megatron, new: Megatron, tmp_path: Path) -> None:
    tensors = old.save(tmp_path / "old", OLD)
    convert("split", tmp_path / "old", "--indexer", "rope-first", "-o", tmp_path / "one")
    convert("split", tmp_path / "old", "-o", tmp_path / "split")
    convert("migrate", tmp_path / "split", "--indexer", "rope-first", "-o", tmp_path / "two")
    one, two = new.load(tmp_path / "one"), new.load(tmp_path / "two")
    assert_same(one.tensors, two.tensors)
    assert one.common == two.common
    convert("combine", tmp_path / "one", "-o", tmp_path / "back")
    assert_same(old.load(tmp_path / "back").tensors, tensors)


def test_migrating_needs_something_to_do(tmp_path: Path) -> None:
    done = run("migrate", tmp_path)
    assert done.returncode == 4
    assert "which `migrate` does not read" in done.stderr


# Rows


def test_the_permutation_is_the_documented_one() -> None:
    """For width 128 and 64 rotary channels: even rows of the tail, odd rows of the tail, then the head."""
    taken = [
        source + n
        for source, _, count in row_moves(IndexerRows.ROPE_LAST, IndexerRows.ROPE_FIRST, 128, 64)
        for n in range(count)
    ]
    assert taken == [*range(64, 128, 2), *range(65, 128, 2), *range(64)]


@pytest.mark.parametrize("before", IndexerRows)
@pytest.mark.parametrize("after", IndexerRows)
def test_moves_are_permutations_that_undo_each_other(before: IndexerRows, after: IndexerRows) -> None:
    there, back = (
        {at + n: source + n for source, at, count in row_moves(*pair, 16, 6) for n in range(count)}
        for pair in ((before, after), (after, before))
    )
    assert sorted(there) == sorted(there.values()) == list(range(16))
    assert all(back[there[row]] == row for row in range(16))
    assert sorted(row_order(before, 16, 6)) == list(range(16))
