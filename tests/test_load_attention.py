"""``load_attention`` gives the same block from whatever format a checkpoint lies in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import conversions
import megatron_checkpoints as made
import pytest
import torch

from mla_convert import api
from mla_convert.attention import load_attention
from mla_convert.errors import CannotError
from mla_convert.geometry import Layout
from mla_convert.megatron.eras import IndexerRows
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format

FORMS = {
    "rank files": ReshardOptions(2, to=Format.DEEPSEEK, layout=Layout.SPLIT),
    "rank folders": ReshardOptions(2, to=Format.HUGGINGFACE),
    "torch_dist": ReshardOptions(1, to=Format.TORCH_DIST),
    "torch_dist, split": ReshardOptions(1, to=Format.TORCH_DIST, layout=Layout.SPLIT),
    "torch": ReshardOptions(2, to=Format.TORCH),
}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Path]]:
    """A sparse model as Hugging Face has it, and in every other form."""
    with conversions.memory_folder() as parent:
        source = made.write(parent / "hf", *made.make("deepseek_v32"))
        for name, options in FORMS.items():
            api.reshard(source, parent / name, options)
        yield {name: parent / name for name in ("hf", *FORMS)}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_block_from_every_form(models: dict[str, Path], form: str) -> None:
    for layer in (0, 1):
        expected = load_attention(models["hf"], layer).state_dict()
        found = load_attention(models[form], layer).state_dict()
        assert any("indexer" in name for name in expected)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_indexer_rows_whose_order_nothing_tells(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "torch_dist"
    shutil.copytree(models["torch_dist"], folder)
    for common in folder.rglob("common.pt"):
        common.unlink()
    if api.inspect(folder)[1]["megatron"]["indexer"]["rows"] is not None:
        pytest.skip("something else tells the order")
    with pytest.raises(CannotError, match="indexer"):
        load_attention(folder, 0)
    expected = load_attention(models["hf"], 0).state_dict()
    for name, tensor in load_attention(folder, 0, indexer_from=IndexerRows.ROPE_FIRST).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
