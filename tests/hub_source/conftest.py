"""The command run against a fake Hub that holds one checkpoint."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conversions
import fake_hub
import pytest
from conversions import contents, write_checkpoint
from fake_hub import TOKEN, FakeHub, running_hub
from hub_sources import NAME, ODD, cache

from mla_convert import api
from mla_convert.cli import main


@pytest.fixture(scope="module", autouse=True)
def client() -> None:
    """Import the client once; forked children then only have to read its settings again."""
    from huggingface_hub import HfApi, get_cached_repo_tree, hf_hub_download  # noqa: F401

    from mla_convert import verify  # noqa: F401


@pytest.fixture(autouse=True)
def in_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child gets what a new process gets: settings from its environment, and the fake Hub's guard."""

    def prepared() -> None:
        importlib.reload(sys.modules["huggingface_hub.constants"])
        guard = Path(os.environ["PYTHONPATH"], "sitecustomize.py")
        exec(guard.read_text(), {})
        main()

    monkeypatch.setattr(conversions, "main", prepared)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with conversions.memory_folder() as folder:
        yield folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder the command is run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    """The checkpoint that the repository holds, as a folder; tests leave it as it is."""
    with conversions.memory_folder() as parent:
        folder = write_checkpoint(parent / "name")
        for name in ODD:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(name)
        (folder / ".gitattributes").write_bytes(fake_hub.GITATTRIBUTES)
        yield folder


@pytest.fixture(scope="module")
def expected(model: Path) -> Path:
    """What splitting that folder gives."""
    return api.split(model).output


@pytest.fixture
def hub(tmp_path: Path, model: Path, here: Path) -> Iterator[FakeHub]:
    with running_hub(tmp_path / "hub") as hub:
        hub.add_repository(NAME, contents(model))
        yield hub
    for path in [*here.rglob("*.json"), *here.rglob("journal")]:
        assert TOKEN not in path.read_text(), path
    for path in cache(hub).rglob("*"):
        assert not path.is_file() or path.stat().st_size > 1 << 20 or TOKEN.encode() not in path.read_bytes()


@pytest.fixture
def run(hub: FakeHub, here: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in ``here`` with this Hub; keywords are changes of the environment."""

    def run(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        done = conversions.run(*arguments, cwd=here, env=hub.environment(**changes))
        assert TOKEN not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "huggingface_hub" not in done.stderr
        return done

    return run


@pytest.fixture
def fails(run: Callable[..., Any]) -> Callable[..., str]:
    """The same, which must end with this code and no result; its stderr."""

    def fails(code: int, *arguments: str | Path, hint: bool = True, **changes: str) -> str:
        done = run(*arguments, **changes)
        assert (done.returncode, done.stdout) == (code, ""), (done.returncode, done.stdout, done.stderr)
        assert ("hint: " in done.stderr) == hint
        return str(done.stderr)

    return fails


@pytest.fixture
def does(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, which must be done; its JSON document."""

    def does(*arguments: str | Path, **changes: str) -> Any:
        done = run(*arguments, "--json", **changes)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return does
