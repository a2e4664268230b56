"""``reshard``, ``diff`` and ``inspect`` of checkpoints on the Hub, sharded ones among them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conversions
import pytest
from checkpoints import RUN, load
from conversions import contents, manifest
from fake_hub import FakeHub, running_hub
from hub_sources import cache
from sharded_models import MODELS, write_model

from mla_convert import api
from mla_convert.formats.safetensors import read_header
from mla_convert.sharding import ReshardOptions
from mla_convert.whole import Format

INDEX = "model.safetensors.index.json"
RANKS = 4
#: What a repository may hold, by the name it has here.
FORMS: dict[str, ReshardOptions | None] = {
    "plain": None,
    "files": ReshardOptions(RANKS, to=Format.DEEPSEEK),
    "folders": ReshardOptions(RANKS, to=Format.HUGGINGFACE),
}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Path]]:
    """One checkpoint in each form, as folders."""
    with conversions.memory_folder() as parent:
        source = write_model(parent / "plain", MODELS["deepseek_v3-fp8"])
        for name, options in FORMS.items():
            if options:
                api.reshard(source, parent / name, options, run=RUN)
                (parent / name / "mla-convert.json").unlink()
        yield {name: parent / name for name in FORMS}


@pytest.fixture
def hub(tmp_path: Path, models: dict[str, Path]) -> Iterator[FakeHub]:
    with running_hub(tmp_path / "hub") as hub:
        for name, folder in models.items():
            hub.add_repository(f"org/{name}", contents(folder))
        yield hub


@pytest.fixture
def does(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run the command, which must be done; its JSON document."""

    def does(*arguments: str | Path, code: int = 0, **changes: str) -> Any:
        done = run(*arguments, "--json", **changes)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    return does


def transfers(hub: FakeHub, name: str) -> dict[str, list[str | None]]:
    """By weight file of a repository, the range of every request for its bytes; None for all of them."""
    found = hub.repositories[f"org/{name}"].resolve("main")
    assert found is not None
    names = {file.oid: path for path, file in found.tree.items() if path.endswith(".safetensors")}
    ranges: dict[str, list[str | None]] = {}
    for call in hub.log:
        if call.method == "GET" and call.path.startswith("/_content/"):
            oid = call.path.removeprefix("/_content/")
            if oid in names:
                ranges.setdefault(names[oid], []).append(call.headers.get("Range"))
    return ranges


def header_ranges(folder: Path) -> dict[str, list[str]]:
    """What two range requests for each header are."""
    return {
        path.relative_to(folder).as_posix(): ["bytes=0-7", f"bytes=8-{read_header(path).data_start - 1}"]
        for path in folder.rglob("*.safetensors")
    }


def cached_files(hub: FakeHub, name: str) -> set[str]:
    """Names in the cache's snapshot of a repository."""
    (snapshot,) = (cache(hub) / f"models--org--{name}" / "snapshots").iterdir()
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORMS)
def test_headers_alone(
    name: str,
    does: Callable[..., Any],
    hub: FakeHub,
    models: dict[str, Path],
    here: Path,
) -> None:
    expected = does("inspect", models[name])
    found = does("inspect", f"hf://org/{name}")
    assert {**found, "path": ""} == {**expected, "path": ""}
    assert transfers(hub, name) == header_ranges(models[name])
    indexes = {f"rank{rank}-of-{RANKS}/{INDEX}" for rank in range(RANKS)}
    small = {"plain": {INDEX}, "files": set(), "folders": indexes}[name]
    assert cached_files(hub, name) == {"config.json", *small}
    planned = does("reshard", f"hf://org/{name}", "--tp", "2", "--dry-run")
    assert all(None not in ranges for ranges in transfers(hub, name).values())
    assert planned["output"] == str(here / f"{name}-tp2")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("to", ["huggingface", "deepseek"])
@pytest.mark.parametrize("name", FORMS)
def test_the_same_as_from_a_folder(
    name: str,
    to: str,
    does: Callable[..., Any],
    hub: FakeHub,
    models: dict[str, Path],
    here: Path,
) -> None:
    words = ("--tp", "2", "--to", to, "--layout", "split")
    planned = does("reshard", f"hf://org/{name}", *words, "--dry-run")
    done = does("reshard", f"hf://org/{name}", *words)
    assert done["plan"] == planned["plan"]
    does("reshard", models[name], *words, "-o", "local")
    ours, theirs = contents(here / f"{name}-tp2"), contents(here / "local")
    found = hub.repositories[f"org/{name}"].refs["main"]
    assert manifest(here / f"{name}-tp2")["source"]["path"] == f"hf://org/{name}@{found}"
    del ours["mla-convert.json"], theirs["mla-convert.json"]
    ours.pop(".gitattributes", None)  # which the Hub adds to a repository
    assert ours == theirs
    assert does("reshard", f"hf://org/{name}", *words)["already_done"]


def test_back_to_one_checkpoint(
    does: Callable[..., Any],
    hub: FakeHub,
    models: dict[str, Path],
    here: Path,
) -> None:
    does("reshard", "hf://org/files", "--tp", "1", "--to", "huggingface", "--layout", "combined")
    assert load(here / "files-tp1") == load(models["plain"])


def test_what_is_refused_is_not_downloaded(fails: Callable[..., str], hub: FakeHub) -> None:
    stderr = fails(4, "reshard", "hf://org/folders", "--tp", "3")
    assert "8 heads of model.layers.0.self_attn do not divide by 3" in stderr
    assert "legal here: --tp 1, 2, 4, 8" in stderr
    fails(4, "reshard", "hf://org/folders", "--tp", str(RANKS))  # nothing to do
    assert all(None not in ranges for ranges in transfers(hub, "folders").values())


def test_a_rank_that_is_not_there(
    fails: Callable[..., str],
    hub: FakeHub,
    models: dict[str, Path],
) -> None:
    for name, gone in (("files", "model2-mp4"), ("folders", "rank2-of-4/")):
        left = {path: data for path, data in contents(models[name]).items() if not path.startswith(gone)}
        hub.add_repository(f"org/{name}-torn", left)
        assert "1 of 4 ranks are missing" in fails(3, "reshard", f"hf://org/{name}-torn", "--tp", "2")


def test_diff(does: Callable[..., Any], hub: FakeHub, models: dict[str, Path]) -> None:
    for left, right in (("hf://org/plain", "hf://org/folders"), (models["plain"], "hf://org/files")):
        document = does("diff", left, right)
        assert document["same"]
        assert (document["a"], document["b"]) == (str(left), right)
        assert document["counts"]["="] == len(load(models["plain"]))
    other = contents(models["plain"])
    name = next(name for name in other if name.endswith(".safetensors"))
    other[name] = other[name][:-1] + bytes([other[name][-1] ^ 1])
    hub.add_repository("org/other", other)
    document = does("diff", "hf://org/other", models["files"], code=10)
    assert document["counts"]["!"] == 1


def test_diff_of_what_is_not_there(fails: Callable[..., str], hub: FakeHub, models: dict[str, Path]) -> None:
    assert "no such repository" in fails(6, "diff", models["plain"], "hf://org/nothing")
    assert "does not name a repository" in fails(2, "diff", "hf://nothing", models["plain"])
    assert "if you mean the repository on the Hub: hf://org/plain" in fails(
        2, "diff", "org/plain", models["plain"]
    )
