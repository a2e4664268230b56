"""What commands read: the tables of ``sources`` are true of every kind of checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import megatron_checkpoints as made
import pytest

from mla_convert import api
from mla_convert.errors import CannotError, UsageError
from mla_convert.megatron.changes import MegatronOptions
from mla_convert.megatron.eras import IndexerRows, Norms
from mla_convert.megatron.translation import LayerSpec
from mla_convert.progress import SilentProgress
from mla_convert.sharding import ReshardOptions
from mla_convert.sources import OPTIONS, SUPPORT, Kind, open_source
from mla_convert.whole import Format

#: How to make a checkpoint of each kind out of one of Hugging Face.
_MADE_BY = {
    Kind.RANK_FILES: ReshardOptions(2, to=Format.DEEPSEEK),
    Kind.RANK_FOLDERS: ReshardOptions(2, to=Format.HUGGINGFACE),
    Kind.TORCH_DIST: ReshardOptions(1, to=Format.TORCH_DIST, spec=LayerSpec.LOCAL),
    Kind.TORCH: ReshardOptions(2, to=Format.TORCH),
}
_GIVEN: dict[str, Any] = {
    "norms": Norms.STANDALONE,
    "indexer": IndexerRows.ROPE_FIRST,
    "indexer_from": IndexerRows.ROPE_FIRST,
    "drop_optimizer": True,
    "drop_fp8_state": True,
}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """A checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    source = made.write(folder / "hf", *made.make("deepseek_v3"))
    for kind, options in _MADE_BY.items():
        api.reshard(source, folder / kind.name, options)
    return {Kind.HUGGINGFACE: source, **{kind: folder / kind.name for kind in _MADE_BY}}


@pytest.mark.parametrize("kind", list(Kind))
def test_a_kind_is_recognised(every: dict[Kind, Path], kind: Kind) -> None:
    assert open_source(every[kind], "inspect", SilentProgress()).kind is kind


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
@pytest.mark.parametrize("command", ["split", "combine", "migrate"])
def test_conversions_do_what_the_table_says(
    every: dict[Kind, Path], kind: Kind, command: str, tmp_path: Path
) -> None:
    source = every[kind]
    if kind in SUPPORT["split"] and command == "combine":
        api.split(source, tmp_path / "split")
        source = tmp_path / "split"

    def convert() -> None:
        if command == "migrate":
            api.migrate(source, tmp_path / "out", MegatronOptions(norms=Norms.FUSED))
        else:
            getattr(api, command)(source, tmp_path / "out")

    if kind in SUPPORT[command]:
        convert()
        assert (tmp_path / "out").is_dir()
        return
    with pytest.raises(CannotError, match=f"is {kind}, which `{command}` does not read"):
        convert()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [Kind.HUGGINGFACE, Kind.TORCH_DIST, Kind.TORCH], ids=lambda kind: kind.name)
@pytest.mark.parametrize("option", list(OPTIONS))
def test_an_option_of_another_kind_is_refused(
    every: dict[Kind, Path], kind: Kind, option: str, tmp_path: Path
) -> None:
    options = MegatronOptions(**{option: _GIVEN[option]})
    if kind in OPTIONS[option]:
        with suppress(CannotError):  # there may be nothing to do it to
            api.split(every[kind], tmp_path / "out", megatron=options, dry_run=True)
        return
    with pytest.raises(UsageError, match=r"--norms, --indexer.* for torch_dist"):
        api.split(every[kind], tmp_path / "out", megatron=options)


@pytest.mark.parametrize("kind", sorted(set(Kind) - SUPPORT["migrate"]))
def test_a_source_opened_for_something_else_does_not_migrate(every: dict[Kind, Path], kind: Kind) -> None:
    source = open_source(every[kind], "inspect", SilentProgress())
    with pytest.raises(CannotError, match="which `migrate` does not read") as caught:
        source.plan_migrate(MegatronOptions(), trust_shapes=False)
    assert caught.value.hint == f"it reads: {Kind.TORCH_DIST}"
