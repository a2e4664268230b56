"""Sources on the Hub: the real client against the fake one, over loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import pytest
from conversions import INDEX, contents, environment, manifest
from fake_hub import FakeHub, running_hub
from fake_hub_server import Answer
from hub_sources import INFO, NAME, ODD, SHARDS, SOURCE, cache, cached, commit, oid, same_output, transfers

from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.formats.safetensors import read_header

# Headers only


def test_inspect_reads_headers_alone(does: Callable[..., Any], hub: FakeHub, model: Path, here: Path) -> None:
    found, expected = does("inspect", SOURCE), does("inspect", model)
    assert found.pop("path") == f"{SOURCE}@{commit(hub)}"
    assert found == {name: value for name, value in expected.items() if name != "path"}
    ranges = {name: ["bytes=0-7", f"bytes=8-{read_header(model / name).data_start - 1}"] for name in SHARDS}
    assert transfers(hub) == ranges
    assert cached(hub) == {"config.json", INDEX}
    assert list(here.iterdir()) == []
    assert len(hub.called("GET", INFO)) == len(hub.called("GET", "/tree/")) == 1


def test_a_dry_run_reads_headers_alone(does: Callable[..., Any], hub: FakeHub, here: Path) -> None:
    planned = does("split", SOURCE, "--dry-run")
    assert all(ranges and None not in ranges for ranges in transfers(hub).values())
    assert cached(hub) == {"config.json", INDEX}
    assert list(here.iterdir()) == []
    assert planned["output"] == str(here / "name-split")
    done = does("split", SOURCE)
    assert done["plan"] == planned["plan"]
    assert (done["source"], done["output"]) == (planned["source"], planned["output"])


def test_a_server_that_ignores_ranges_is_not_read_to_the_end(
    does: Callable[..., Any], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fake_hub_routes

    monkeypatch.setattr(fake_hub_routes, "ranged", lambda _, data, headers: Answer(200, data, headers))
    assert does("inspect", SOURCE)["layout"] == "combined"
    assert cached(hub) == {"config.json", INDEX}


def test_what_cannot_be_split_is_not_downloaded(
    fails: Callable[..., str], hub: FakeHub, model: Path, here: Path
) -> None:
    assert "nothing to combine" in fails(4, "combine", SOURCE)
    (here / "name-split").mkdir()
    (here / "name-split" / "mine").write_text("")
    assert "is not empty" in fails(2, "split", SOURCE)
    hub.commit_aside(NAME, {SHARDS[0]: (model / SHARDS[0]).read_bytes()[:-1]})
    expected = f"error: {SOURCE}@{commit(hub)}/{SHARDS[0]}: the file ends early"
    assert expected in fails(3, "split", SOURCE, "-o", "out")
    assert all(None not in ranges for ranges in transfers(hub).values())
    assert cached(hub) == {"config.json", INDEX}


# Conversions


def test_split_equals_that_of_a_folder(
    does: Callable[..., Any], hub: FakeHub, model: Path, expected: Path, here: Path
) -> None:
    done = does("split", SOURCE)
    output = here / "name-split"
    assert done["output"] == str(output)
    assert same_output(output, expected)
    assert contents(output).keys() >= {*ODD, ".gitattributes"}
    source = manifest(output)["source"]
    assert source["path"] == f"{SOURCE}@{commit(hub)}"
    assert str(hub.folder) not in (output / "mla-convert.json").read_text()
    assert sorted(path.name for path in here.iterdir()) == ["name-split"]
    # A second run finds it done, and asks for no weights.
    before = len(hub.log)
    assert does("split", SOURCE)["already_done"]
    assert transfers(hub, before) == {}
    # And combine gives the original back.
    does("combine", output, "-o", "back")
    back = contents(here / "back")
    del back["mla-convert.json"]
    assert back == contents(model)


def test_combine_from_the_hub(
    does: Callable[..., Any], hub: FakeHub, model: Path, expected: Path, here: Path
) -> None:
    hub.add_repository("org/parted", contents(expected))
    does("combine", "hf://org/parted")
    back = contents(here / "parted-combined")
    del back["mla-convert.json"]
    assert back == contents(model)


def test_the_output_never_lies_in_the_cache(fails: Callable[..., str], hub: FakeHub) -> None:
    inside = cache(hub) / "models--org--name" / "out"
    assert f"the output {inside} lies inside" in fails(2, "split", SOURCE, "-o", inside)
    assert f"the output {cache(hub)} contains" in fails(2, "split", SOURCE, "-o", cache(hub))
    assert hub.log == []


@pytest.mark.parametrize("revision", ["feature/x-1", "refs/pr/3", "v1.0", "the commit"])
def test_revisions(does: Callable[..., Any], hub: FakeHub, revision: str) -> None:
    repository = hub.repositories[NAME]
    repository.refs[revision] = commit(hub)
    other = hub.commit_aside(NAME, {"tokenizer.json": b"of this revision"}, revision).oid
    output = does("split", f"{SOURCE}@{other if revision == 'the commit' else revision}", "-o", "out")
    assert output["source"] == f"{SOURCE}@{other}"
    assert not hub.called("HEAD", f"/resolve/(?!{other})")


def test_everything_comes_from_one_commit(
    does: Callable[..., Any], hub: FakeHub, expected: Path, here: Path
) -> None:
    """The branch moves on between the headers and the shards, and what is at the branch is another model."""
    before = commit(hub)
    for number, files in enumerate(({"config.json": b"{}"}, {SHARDS[0]: b"no", "tokenizer.json": b"no"})):
        fault = hub.fail("GET", "/_content/", "hold", n=1 if number == 0 else 9)

        def move(fault: Any = fault, files: dict[str, bytes] = files) -> None:
            fault.reached.wait()
            hub.commit_aside(NAME, files)
            fault.release.set()

        threading.Thread(target=move, daemon=True).start()
    done = does("split", SOURCE, "-o", "out")
    assert commit(hub) != before
    assert all(fault.reached.is_set() for fault in hub.faults)
    assert done["source"] == f"{SOURCE}@{before}"
    assert same_output(here / "out", expected)


def test_another_commit_does_not_finish_an_unfinished_run(
    run: Callable[..., Any],
    fails: Callable[..., str],
    hub: FakeHub,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same sizes, other bytes: only the commit tells them apart."""
    cut_short = "mla_convert.engine._Run._finish"
    with monkeypatch.context() as patch:
        patch.setattr(cut_short, lambda self: os._exit(9))
        assert run("split", SOURCE).returncode == 9
    old = commit(hub)
    assert (here / ".name-split.mla-convert-partial").is_dir()
    flipped = bytes(byte ^ 1 for byte in b"tokenizer.json\n" * 50)
    hub.commit_aside(NAME, {"tokenizer.json": flipped})
    stderr = fails(4, "split", SOURCE)
    assert f'origin: was "{SOURCE}@{old}", now "{SOURCE}@{commit(hub)}"' in stderr
    assert run("split", f"{SOURCE}@{old}").returncode == 0


def test_weights_come_by_xet(
    tmp_path: Path, model: Path, expected: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the real Hub: ranges over HTTP for headers, and whole files out of the chunk store."""
    import fake_hub_routes

    with running_hub(tmp_path / "hub", "xet") as hub:
        hub.add_repository(NAME)
        script = f"""
import hf_xet, json
from huggingface_hub import HfApi
HfApi().upload_folder(folder_path={str(model)!r}, repo_id={NAME!r})
paths = [{str(model)!r} + "/" + name for name in {SHARDS!r}]
print(json.dumps([pointer.hash for pointer in hf_xet.hash_files(paths)]))
"""
        words, env = [sys.executable, "-c", script], environment(**hub.environment())
        done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
        hashes = dict(zip((oid(hub, name) for name in SHARDS), json.loads(done.stdout), strict=True))
        for name in SHARDS:
            hub.blob(oid(hub, name)).write_bytes((model / name).read_bytes())

        def resolve(request: Any, name: str, revision: str, path: str) -> Answer:
            answer = fake_hub_routes.resolve(request, name, revision, path)
            pointer = answer.headers.get("ETag", "").strip('"')
            if answer.status != 302:
                return answer
            token = f"{hub.url}/api/models/{name}/xet-read-token/{revision}"
            more = {"X-Xet-Hash": hashes[pointer], "X-Xet-Refresh-Route": token}
            return Answer(answer.status, answer.body, {**answer.headers, **more})

        routes = [
            (m, p, resolve if f is fake_hub_routes.resolve else f) for m, p, f in fake_hub_routes.ROUTES
        ]
        monkeypatch.setattr(fake_hub_routes, "ROUTES", routes)
        home = {"HF_HOME": str(tmp_path / "home")}
        done = conversions.run("split", SOURCE, cwd=here, env=hub.environment(**home))
        assert done.returncode == 0, done.stderr
        assert same_output(here / "name-split", expected)
        assert hub.called("GET", "/xet-read-token/")
        assert all(None not in ranges for ranges in transfers(hub).values())
        assert re.search(r"download: \d", done.stderr)
        assert "stopped" not in done.stderr


# Verifying


def test_verify(does: Callable[..., Any], fails: Callable[..., str], hub: FakeHub, here: Path) -> None:
    quick = ("--layers", "0", "--seq", "96", "--no-control")
    write_demo_checkpoint(here / "demo")
    hub.add_repository(NAME, contents(here / "demo"))
    does("split", SOURCE, "-o", "parted")
    origin = f"{SOURCE}@{commit(hub)}"
    found = does("verify", "parted", "--no-record", *quick)
    assert (found["against"], found["against_note"]) == (origin, "the manifest's source, in the Hub's cache")
    # Elsewhere, with an empty cache: nothing is downloaded unasked.
    elsewhere = {"HF_HOME": str(hub.folder / "elsewhere")}
    before = len(hub.log)
    found = does("verify", "parted", "--no-record", *quick, **elsewhere)
    assert found["against"] is None
    assert found["against_note"].endswith(f"; --against {origin} downloads it and compares with it")
    assert len(hub.log) == before
    # Both from the Hub, against each other; the cache's manifest stays as it is.
    hub.add_repository("org/parted", contents(here / "parted"))
    found = does("verify", "hf://org/parted", "--against", SOURCE, *quick, **elsewhere)
    assert (found["passed"], found["against"], found["recorded"]) == (True, origin, False)
    assert found["path"].startswith("hf://org/parted@")
    home = hub.folder / "elsewhere" / "hub" / "models--org--parted"
    (kept,) = home.glob("snapshots/*/mla-convert.json")
    assert kept.read_bytes() == (here / "parted" / "mla-convert.json").read_bytes()
    assert "--against names the checkpoint itself" in fails(
        2, "verify", SOURCE, "--against", f"{SOURCE}@main", **elsewhere, hint=False
    )


# What is imported when


def test_what_is_imported(hub: FakeHub, here: Path, model: Path) -> None:
    script = (
        "import sys\nfrom mla_convert.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([m for m in ('torch', 'numpy', 'huggingface_hub', 'tilelang') if m in sys.modules])"
    )
    for source, expected in ((SOURCE, "['huggingface_hub']\n"), (str(model), "[]\n")):
        words = [sys.executable, "-c", script, "split", source, "-qq"]
        done = subprocess.run(
            words, cwd=here, env=environment(**hub.environment()), capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
