"""Names that differ only in case: refused where a file system would make one file of them, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conversions import contents, write_checkpoint
from fake_hub import FakeHub, running_hub
from filesystems import ignoring_case
from hub_sources import cache

from mla_convert import api, output_folder
from mla_convert.errors import LocalIOError
from mla_convert.output_folder import colliding, ignores_case


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (["a.json", "b.json"], []),
        (["A.json", "a.json", "b"], [("A.json", "a.json")]),
        (["Docs/x", "docs/y"], []),
        (["Docs/x", "docs/X"], [("Docs/x", "docs/X")]),
        (["docs/x", "Docs"], [("Docs", "docs")]),
        (["stra\u00dfe", "STRASSE"], [("STRASSE", "stra\u00dfe")]),
        (["\u00e9.md", "e\u0301.md"], [("e\u0301.md", "\u00e9.md")]),
    ],
)
def test_pairs(names: list[str], pairs: list[tuple[str, str]]) -> None:
    assert colliding(names) == pairs


def test_this_file_system_is_probed_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "Probe").touch()
    expected = (tmp_path / "pROBE").exists()
    assert ignores_case(tmp_path / "not" / "there") is expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["Probe"]


def test_a_file_system_that_ignores_case() -> None:
    with ignoring_case() as root:
        assert ignores_case(root)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "name")
    for name in ("Notes.md", "NOTES.md"):
        (folder / name).write_text(name)
    return folder


def test_an_output_is_refused_before_anything_is_written(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(output_folder, "ignores_case", lambda folder: True)
        for dry_run in (True, False):
            with pytest.raises(LocalIOError, match="ignores case, and in the output names differ") as caught:
                api.split(source, source.parent / "out", dry_run=dry_run)
            assert caught.value.details == ("NOTES.md and Notes.md",)
        assert [entry.name for entry in source.parent.iterdir()] == ["name"]
    output = api.split(source, source.parent / "out").output
    assert (output / "Notes.md").read_text() == "Notes.md"


@pytest.fixture
def hub(tmp_path: Path, source: Path) -> Iterator[FakeHub]:
    with running_hub(tmp_path / "hub") as hub:
        hub.add_repository("org/name", contents(source))
        yield hub


def test_a_download_is_refused(
    run: Callable[..., Any],
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_cache = lambda folder: "models--" in str(folder)  # noqa: E731
    monkeypatch.setattr(output_folder, "ignores_case", is_cache)
    done = run("split", "hf://org/name")
    assert done.returncode == 5, done.stderr
    assert "names differ in nothing else: NOTES.md and Notes.md" in " ".join(done.stderr.split())
    assert not list(cache(hub).rglob("*.safetensors"))
