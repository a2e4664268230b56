"""``push`` against the fake Hub, over every way bytes travel: one commit of exactly the manifest's bytes, or none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conversions import manifest, snapshot
from fake_hub import TOKEN, FakeHub
from pushing import (
    REPO,
    Client,
    add_file,
    assert_not_pushed,
    assert_pushed,
    change_shard,
    edit_manifest,
    expected_files,
    make_output,
    push,
)

WAYS = ("lfs", "multipart", "xet")


@pytest.mark.parametrize("hub", WAYS, indirect=True)
def test_a_fresh_push_then_nothing_to_do_then_a_changed_file(
    hub: FakeHub, client: Client, output: Path, request: pytest.FixtureRequest
) -> None:
    before = snapshot(output)
    done = push(hub, output, REPO, "--private")
    assert_pushed(hub, output)
    assert snapshot(output) == before
    first = hub.commits(REPO)[0]
    assert done.stdout.splitlines()[-1] == f"{hub.url}/{REPO}/commit/{first.oid}"
    assert first.title == "Split KV up-projections (mla-convert)"
    assert hub.repositories[REPO].visibility == "private"
    way = request.node.callspec.params["hub"]
    assert bool(hub.called("PUT", "/_lfs/")) == (way != "xet")
    assert bool(hub.called("POST", "/complete$")) == (way == "multipart")
    assert bool(hub.called("GET", "/xet-write-token/")) == (way == "xet")

    hub.log.clear()
    done = client.push(output, REPO)
    assert done.stdout.startswith(f"push: nothing to do for {output} to {REPO}\n")
    assert f"/commit/{first.oid}\n" in done.stdout
    assert hub.changes() == []
    assert_pushed(hub, output)

    change_shard(output, "model-4.safetensors")
    document = json.loads(client.push(output, REPO, "--json").stdout)
    assert document["sent"] == ["mla-convert.json", "model-4.safetensors"]
    assert_pushed(hub, output, commits=2)
    assert hub.commits(REPO)[0].parent == first.oid


@pytest.mark.parametrize("hub", ["lfs", "xet"], indirect=True)
def test_pull_requests_and_branches(hub: FakeHub, client: Client, output: Path) -> None:
    hub.add_repository(REPO, {"LICENSE": b"theirs"})
    done = client.push(output, REPO, "--create-pr", "--message", "Mine")
    assert done.stdout.endswith(f"\n{hub.url}/{REPO}/discussions/1\n")
    assert "also holds files that are no part of this checkpoint: LICENSE" in done.stderr
    assert hub.commits(REPO) == []
    assert hub.commits(REPO, "refs/pr/1")[0].title == "Mine"
    again = json.loads(client.push(output, REPO, "--create-pr", "--json").stdout)
    assert (again["committed"], again["pull_request"], again["sent"]) == (False, 1, [])
    assert len(hub.repositories[REPO].pulls) == 1
    hub.repositories[REPO].pulls[0]["status"] = "closed"
    client.push(output, REPO, "--create-pr", "-q")
    assert len(hub.repositories[REPO].pulls) == 2

    client.push(output, REPO, "--revision", "split/v1")
    assert hub.repositories[REPO].refs.keys() == {"main", "split/v1", "refs/pr/1", "refs/pr/2"}
    change_shard(output, "model-5.safetensors")
    client.push(output, REPO, "--revision", "refs/pr/2")
    assert len(hub.commits(REPO, "split/v1")) == 1
    assert hub.commits(REPO) == []
    assert len(hub.commits(REPO, "refs/pr/2")) == 2
    files = hub.files(REPO, "refs/pr/2", local=output)
    assert files.pop("LICENSE") == b"theirs"
    assert {n: d for n, d in files.items() if n not in ("README.md", "mla-convert.json")} == expected_files(
        output
    )


def test_260_files_land_in_one_commit(hub: FakeHub, client: Client, output: Path) -> None:
    for n in range(260):
        add_file(output, f"extra/part-{n:03d}.safetensors", b"%08d" % n)
    client.push(output, REPO, "-q")
    assert len(hub.called("POST", "/commit/")) == 1
    assert_pushed(hub, output)
    assert len(hub.commits(REPO)[0].tree) > 270
    # The hashes are noted where they were missing, so that nobody need read the files for them again.
    assert all(entry["sha256"] for entry in manifest(output)["files"].values())


def test_only_what_the_manifest_lists_is_pushed(hub: FakeHub, client: Client, output: Path) -> None:
    (output / "notes.txt").write_text("mine")
    (output / ".gitignore").write_text("*.safetensors")
    (output / "stray.safetensors").write_bytes(b"x")
    client.push(output, REPO)
    assert_pushed(hub, output)


def test_no_gitignore_takes_anything_away(hub: FakeHub, client: Client, output: Path) -> None:
    """The Hub heeds a .gitignore that lies in the repository; the manifest says what is pushed."""
    hub.add_repository(REPO, {".gitignore": b"*.safetensors\n*.json\n"})
    client.push(output, REPO)
    files = hub.files(REPO)
    assert expected_files(output).items() <= files.items()


def test_files_by_links_into_a_cache(hub: FakeHub, client: Client, output: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for name in ("model-1.safetensors", "tokenizer.json"):
        target = (output / name).rename(tmp_path / "blobs" / name)
        (output / name).symlink_to(os.path.relpath(target, output))
    client.push(output, REPO)
    assert_pushed(hub, output)


# A dry run


def test_a_dry_run_changes_nothing(hub: FakeHub, client: Client, output: Path) -> None:
    change_shard(output, "model-4.safetensors")  # so that a hash is missing, and could be noted
    before = snapshot(output)
    done = client.push(output, REPO, "--dry-run")
    assert done.stdout.startswith(f"would push {output} to {REPO}\n")
    assert "to send        12 files" in done.stdout
    assert_not_pushed(hub)
    assert hub.repositories == {}
    push(hub, output, REPO, "--dry-run", "--create-pr", "--revision", "next", HF_TOKEN="")
    assert {call.method for call in hub.log} <= {"GET", "HEAD"}
    assert snapshot(output) == before
    client.push(output, REPO, "-q")
    hub.log.clear()
    document = json.loads(client.push(output, REPO, "--dry-run", "--json").stdout)
    assert (document["dry_run"], document["committed"], document["sent"]) == (True, False, [])
    assert {call.method for call in hub.log} <= {"GET", "HEAD"}


# Output


def test_what_json_says(hub: FakeHub, client: Client, output: Path) -> None:
    done = client.push(output, REPO, "--json", "-v")
    document = json.loads(done.stdout)
    assert document["files"].keys() == expected_files(output).keys() | {"README.md", "mla-convert.json"}
    assert (document["created"], document["committed"], document["verified"]) == (True, True, True)
    assert document["commit"] == hub.commits(REPO)[0].oid
    assert document["url"] == f"{hub.url}/{REPO}/commit/{document['commit']}"
    assert document["withheld"] == ["source.path"]
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {e["event"] for e in events} <= {"start", "progress", "note", "finish"}
    finished = [e for e in events if e["event"] == "finish"]
    assert [(e["label"], e["complete"]) for e in finished] == [("check files", True), ("upload", True)]


def test_quiet_prints_the_address(hub: FakeHub, client: Client, output: Path) -> None:
    done = client.push(output, REPO, "-q")
    assert done.stdout == f"{hub.url}/{REPO}/commit/{hub.commits(REPO)[0].oid}\n"
    assert done.stderr == ""
    assert client.push(output, REPO, "-qq").stdout == ""


def test_names_that_look_like_markup(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "[bold]x[/x]"
    folder.mkdir(parents=True)
    output = make_output(folder)
    name = "[red]y |`<b>.safetensors"
    add_file(output, name, b"12345678")
    done = client.push(output, REPO, "-v")
    assert done.stdout.startswith(f"push {output} to {REPO}\n")
    assert_pushed(hub, output)
    (output / name).write_bytes(b"short")
    assert f"  {name} has 5 bytes, the manifest says 8\n" in client.push(output, REPO, code=10).stderr


# Nothing of this machine


def test_paths_of_this_machine_are_not_pushed(hub: FakeHub, client: Client, output: Path) -> None:
    edit_manifest(output, source={"path": "/home/someone/secret/model", "files": {}})
    done = client.push(output, REPO, "-v")
    assert "left out       the source's path in the manifest" in done.stdout
    files = hub.files(REPO)
    assert json.loads(files["mla-convert.json"])["source"] == {"path": "(not published)", "files": {}}
    for name, data in files.items():
        assert b"someone" not in data, name
        assert os.fsencode(output.parent) not in data, name
    edit_manifest(output, source={"path": "inside", "files": {}})
    done = client.push(output, REPO)
    assert "left out" not in done.stdout
    assert json.loads(hub.files(REPO)["mla-convert.json"])["source"]["path"] == "inside"


def test_a_local_path_in_the_configuration_is_told(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    output = make_output(tmp_path)
    config = json.loads((output / "config.json").read_text()) | {"_name_or_path": "/home/someone/model"}
    add_file(output, "config.json", json.dumps(config).encode())
    assert "config.json names a local path" in client.push(output, REPO).stderr


@pytest.mark.parametrize("hub", ["lfs", "xet"], indirect=True)
def test_the_token_is_nowhere(hub: FakeHub, output: Path, tmp_path: Path) -> None:
    """Not in what is said, not in what is kept, not in what is pushed: with every log there is."""
    push(
        hub,
        output,
        REPO,
        "-vv",
        HF_DEBUG="1",
        MLA_CONVERT_DEBUG="1",
        HF_XET_LOG_LEVEL="debug",
        RUST_LOG="debug",
    )
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
