"""Checkpoints of Megatron on the Hub: pushed, and read back from there by every command."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conversions
import dist_checkpoints
import megatron_checkpoints as made
import pytest
from checkpoints import digests
from conversions import contents, manifest
from fake_hub import FakeHub, running_hub
from hub_sources import cache
from pushing import REPO, VERIFICATION, assert_not_pushed, assert_pushed, edit_manifest, push

from mla_convert import api
from mla_convert.megatron.translation import LayerSpec
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format

DIST = ReshardOptions(1, to=Format.TORCH_DIST, spec=LayerSpec.LOCAL)
FORMS = {"torch_dist": DIST, "torch": ReshardOptions(2, to=Format.TORCH)}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Path]]:
    """One checkpoint as Hugging Face has it, and in each of Megatron's formats."""
    with conversions.memory_folder() as parent:
        source = made.write(parent / "hf", *made.make("deepseek_v3"))
        for name, options in FORMS.items():
            api.reshard(source, parent / name, options)
        yield {name: parent / name for name in ("hf", *FORMS)}


@pytest.fixture
def hub(tmp_path: Path, models: dict[str, Path]) -> Iterator[FakeHub]:
    with running_hub(tmp_path / "hub") as hub:
        for name in FORMS:
            files = {
                file: data for file, data in contents(models[name]).items() if file != "mla-convert.json"
            }
            hub.add_repository(f"org/{name}", files)
        yield hub


# Reading


@pytest.mark.parametrize("name", FORMS)
def test_what_would_need_a_download_is_not_looked_at(
    run: Callable[..., Any],
    hub: FakeHub,
    name: str,
) -> None:
    for command in (("inspect",), ("split", "--dry-run"), ("reshard", "--to", "huggingface", "--dry-run")):
        done = run(*command, f"hf://org/{name}")
        assert done.returncode == 4, done.stderr
        assert "it cannot be looked at before it is downloaded (" in " ".join(done.stderr.split())
        assert f"hf download org/{name}" in done.stderr
    assert not hub.called("GET", r"\.distcp$|\.pt$|/\.metadata$")


@pytest.mark.parametrize("name", FORMS)
def test_conversions_download_and_give_what_a_folder_gives(
    does: Callable[..., Any],
    hub: FakeHub,
    models: dict[str, Path],
    here: Path,
    tmp_path: Path,
    name: str,
) -> None:
    source = f"hf://org/{name}"
    does("split", source)
    output = here / f"{name}-split"
    expected = api.split(models[name], tmp_path / "expected").output
    theirs = digests(output)
    theirs.pop(".gitattributes", None)
    assert theirs == {file: digest for file, digest in digests(expected).items() if file != ".gitattributes"}
    commit = hub.repositories[f"org/{name}"].refs["main"]
    assert manifest(output)["source"]["path"] == f"{source}@{commit}"
    calls = len(hub.called("GET", "/resolve/"))
    assert does("inspect", source)["format"] == name  # it is here by now
    assert does("split", source, "--dry-run")["source"] == f"{source}@{commit}"
    assert does("diff", source, models["hf"])["same"]
    does("reshard", source, "--to", "huggingface", "-o", here / "back")
    made.require_equal(made.read(here / "back"), made.read(models["hf"]))
    assert len(hub.called("GET", "/resolve/")) == calls
    assert not list(cache(hub).rglob("mla-convert.json"))


def test_a_verification_reads_the_hub_on_both_sides(
    does: Callable[..., Any],
    hub: FakeHub,
    here: Path,
) -> None:
    does("split", "hf://org/torch_dist")
    words = ("--against", "hf://org/torch_dist", "--layers", "0", "--seq", "16", "--device", "cpu")
    document = does("verify", here / "torch_dist-split", *words)
    assert document["passed"] is True
    assert document["against"].startswith("hf://org/torch_dist@")


# Pushing


@pytest.fixture
def output(models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint split in place, whose verification is on record."""
    found = api.split(models[request.param], tmp_path / "model-split").output
    edit_manifest(found, verification=VERIFICATION)
    return found


@pytest.mark.parametrize("output", FORMS, indirect=True)
def test_a_checkpoint_is_pushed_and_comes_back(
    hub: FakeHub,
    output: Path,
    does: Callable[..., Any],
    here: Path,
    models: dict[str, Path],
    request: pytest.FixtureRequest,
) -> None:
    push(hub, output, REPO, "--private")
    assert_pushed(hub, output)
    form = request.node.callspec.params["output"]
    card = hub.files(REPO)["README.md"].decode()
    assert "- megatron" in card or '"megatron"' in card
    assert f"--use-checkpoint-args --ckpt-format {form}" in card
    assert "safe_open" not in card
    assert ("mla-convert combine" in card) == (form == "torch_dist")
    assert json.loads(push(hub, output, REPO, "--json").stdout)["sent"] == []  # again: nothing to do
    does("combine", f"hf://{REPO}", "-o", here / "back")
    assert does("diff", here / "back", models["hf"])["same"]


@pytest.mark.parametrize("output", FORMS, indirect=True)
def test_a_changed_file_is_not_pushed(hub: FakeHub, output: Path) -> None:
    weights = next(path for path in output.rglob("*") if path.suffix in (".distcp", ".pt"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()  # it may be a link into the source
    weights.write_bytes(data)
    done = push(hub, output, REPO, code=10)
    assert weights.relative_to(output).as_posix() in done.stderr
    assert_not_pushed(hub)


def test_an_unverified_one_is_not_pushed(hub: FakeHub, models: dict[str, Path]) -> None:
    push(hub, models["torch_dist"], REPO, code=4)
    assert_not_pushed(hub)
    push(hub, models["torch_dist"], REPO, "--unverified")
    assert "laid out anew" in hub.files(REPO)["README.md"].decode()


def test_what_a_checkpoint_tells_besides_weights_is_said(hub: FakeHub, tmp_path: Path) -> None:
    said = {"save": "/home/someone/checkpoints", "data_path": ["1", "/data/x"], "lr": 1.0}
    common = {"args": Namespace(**dist_checkpoints.ARGUMENTS, **said), "iteration": 7}
    state = dist_checkpoints.state()
    averages = {f"optimizer.state.exp_avg.{key}": tensor for key, tensor in state.items()}
    dist_checkpoints.write(tmp_path / "source", state | averages, common)
    output = api.split(tmp_path / "source", tmp_path / "out").output
    edit_manifest(output, verification=VERIFICATION)
    warnings = json.loads(push(hub, output, REPO, "--dry-run", "--json").stdout)["warnings"]
    assert "Megatron's arguments name local paths, and are pushed as they are: data_path, save" in warnings
    assert any("optimizer's state is pushed with the weights" in warning for warning in warnings)
