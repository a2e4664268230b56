"""What ``push`` refuses, and what it says when the Hub refuses: a sentence with what to do, and the right code."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conversions import contents, manifest, run_process, snapshot
from fake_hub import TOKEN, FakeHub
from pushing import (
    REPO,
    VERIFICATION,
    Client,
    add_file,
    assert_not_pushed,
    assert_pushed,
    edit_manifest,
    make_output,
    plain_environment,
    push,
)

from mla_convert.errors import HubError
from mla_convert.hub_errors import explain_writing

try:
    import httpx2 as httpx  # huggingface_hub has one or the other
except ImportError:
    import httpx  # type: ignore[no-redef]

README = Path(__file__).parents[2] / "README.md"


# What is not pushed


def test_folders_that_cannot_be_pushed(hub: FakeHub, client: Client, output: Path, tmp_path: Path) -> None:
    def refused(code: int, path: Path, repo: str = REPO) -> str:
        return client.push(path, repo, code=code).stderr

    assert f"{tmp_path}/absent does not exist\n" in refused(2, tmp_path / "absent")
    (tmp_path / "plain").mkdir()
    error = refused(4, tmp_path / "plain")
    assert "has no mla-convert.json, so it is not known which files are meant\n" in error
    assert "hint: push an output of mla-convert; for other folders there is hf upload" in error
    assert "has no mla-convert.json" in refused(4, output / "model-1.safetensors")
    for repo in ("justaname", "a/b/c", "tester/ x", "hf://tester/x", ""):
        assert "is no repository id\nhint: it looks like USER/NAME" in refused(2, output, repo)
    assert "'tester/a..b' is no repository id" in refused(2, output, "tester/a..b")
    for name in ("../secret", "/etc/passwd", ".git/config", "a/../../b", "mla-convert.json"):
        files = {**manifest(output)["files"], name: {"size": 1, "sha256": None}}
        copy = tmp_path / "copy"
        shutil.copytree(output, copy)
        edit_manifest(copy, files=files)
        assert "which is no name of a file in a repository" in refused(3, copy)
        shutil.rmtree(copy)
    assert hub.changes() == []


def test_what_was_changed_is_not_pushed(hub: FakeHub, client: Client, output: Path) -> None:
    data = (output / "model-1.safetensors").read_bytes()
    for changed, said in (
        (data + b"x", f"model-1.safetensors has {len(data) + 1} bytes, the manifest says {len(data)}"),
        (data[:-1] + bytes([data[-1] ^ 1]), "model-1.safetensors has sha256 "),
        (None, "model-1.safetensors is missing"),
    ):
        (output / "model-1.safetensors").unlink()
        if changed is not None:
            (output / "model-1.safetensors").write_bytes(changed)
        for flag in ((), ("--unverified",), ("--dry-run",)):
            error = client.push(output, REPO, *flag, code=10).stderr
            assert (
                f"error: 1 file is not as the manifest of {output} says; nothing was pushed\n  {said}"
                in error
            )
    assert hub.log == []


def test_what_is_not_verified_is_not_pushed(hub: FakeHub, client: Client, output: Path) -> None:
    for record, said in (
        (None, "has not been verified"),
        ({**VERIFICATION, "passed": False}, "was verified and did not pass"),
        ({**VERIFICATION, "passed": "yes"}, "was verified and did not pass"),
        ("passed", "has not been verified"),
    ):
        edit_manifest(output, verification=record)
        error = client.push(output, REPO, code=4).stderr
        assert f"error: {output} {said}\nhint: verify it first: mla-convert verify" in error
    assert hub.log == []
    edit_manifest(output, verification=None)
    document = json.loads(client.push(output, REPO, "--unverified", "--json").stdout)
    assert document["verified"] is False
    assert b"**This checkpoint has not been verified.**" in hub.files(REPO)["README.md"]
    assert hub.commits(REPO)[0].title.endswith("not verified)")
    edit_manifest(output, verification=VERIFICATION)
    client.push(output, REPO)
    assert b"not been verified" not in hub.files(REPO)["README.md"]


def test_what_may_have_changed_since_it_was_verified(hub: FakeHub, client: Client, output: Path) -> None:
    """Without a hash, only the time can tell."""
    add_file(output, "model-6.safetensors", b"12345678")
    later = (output / "mla-convert.json").stat().st_mtime + 10
    os.utime(output / "model-6.safetensors", (later, later))
    error = client.push(output, REPO, code=4).stderr
    assert "without a recorded sha256 that are newer than its verification\n  model-6.safetensors\n" in error
    os.utime(output / "mla-convert.json", (later, later))
    client.push(output, REPO, "-q")
    assert manifest(output)["files"]["model-6.safetensors"]["sha256"]
    assert_pushed(hub, output)


# What the Hub refuses


def test_no_token(hub: FakeHub, output: Path) -> None:
    error = push(hub, output, REPO, code=6, HF_TOKEN="").stderr
    assert "error: there is no token for the Hub\nhint: log in with `hf auth login`, or set HF_TOKEN" in error
    (hub.folder / "home").mkdir(exist_ok=True)
    (hub.folder / "home" / "token").write_text(TOKEN)  # where `hf auth login` puts it
    push(hub, output, REPO, HF_TOKEN="")
    assert_pushed(hub, output)


def test_offline(hub: FakeHub, output: Path) -> None:
    error = push(hub, output, REPO, code=6, HF_HUB_OFFLINE="1").stderr
    assert (
        "error: HF_HUB_OFFLINE is set, so the Hub is not to be contacted\nhint: unset HF_HUB_OFFLINE\n"
        in error
    )
    assert hub.log == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://localhost:bad", "nonsense"])
def test_a_hub_that_is_not_there(hub: FakeHub, output: Path, endpoint: str) -> None:
    error = push(hub, output, REPO, code=6, HF_ENDPOINT=endpoint).stderr
    if endpoint.endswith(":9"):
        assert f"error: cannot read {REPO}: {endpoint} does not answer (ConnectError)\n" in error
        assert "hint: check the connection, then run the same command again" in error
    else:
        assert f"error: HF_ENDPOINT is no address: '{endpoint}'\nhint: it looks like https://" in error


@pytest.mark.parametrize(
    "cause",
    [socket.gaierror(-2, "Name or service not known"), OSError(errno.ENETUNREACH, "Network is unreachable")],
)
def test_no_way_to_the_hub_is_no_matter_of_the_disk(cause: OSError) -> None:
    error = httpx.ConnectError(str(cause))
    error.__cause__ = cause
    found = explain_writing(error, "read a/b", "a/b", "https://hub.invalid")
    assert isinstance(found, HubError)
    assert found.message == "cannot read a/b: https://hub.invalid does not answer (ConnectError)"


def test_a_proxy_that_answers_for_another_hub(hub: FakeHub, output: Path) -> None:
    """The fake Hub is the proxy of all that leaves the machine, and answers with addresses of its own."""
    error = push(hub, output, REPO, code=6, HF_ENDPOINT="http://hub.invalid").stderr
    assert "http://hub.invalid answers with an address of another Hub" in error
    assert "hint: check HF_ENDPOINT, and the proxy if there is one" in error


@pytest.mark.parametrize("token", ["hf_wrong", "hf_line\nbreak", "hf_ümlaut", "hf_" + "x" * 3 + "\x00y"])
def test_a_token_that_is_not_accepted(hub: FakeHub, output: Path, token: str) -> None:
    if "\0" in token:
        (hub.folder / "home").mkdir()
        (hub.folder / "home" / "token").write_text(token)
    env = hub.environment(HF_TOKEN="" if "\0" in token else token)
    done = run_process("push", output, REPO, "-vv", env={**env, "HF_DEBUG": "1", "MLA_CONVERT_DEBUG": "1"})
    assert done.returncode == 6, done.stderr
    assert "log in with `hf auth login`" in done.stderr
    for part in token.splitlines():
        assert part not in done.stdout + done.stderr
        assert repr(part)[1:-1] not in done.stderr
    assert_not_pushed(hub)


STATUSES: list[tuple[int, dict[str, Any], str]] = [
    (401, {}, "the token is not accepted (401); it is wrong or has expired"),
    (402, {}, "the Hub asks for payment (402)"),
    (403, {}, f"the token may not write to {REPO} (403)"),
    (413, {}, "the Hub says that this is too large (413)"),
    (418, {}, "the Hub refuses (HTTP status 418)"),
    (429, {"times": 99}, "the Hub asks for fewer requests (429)"),
    (500, {"times": 99}, "the Hub is in trouble (HTTP status 500)"),
]


def test_what_the_hub_says(hub: FakeHub, client: Client, output: Path) -> None:
    """At the end of the way, when everything has been uploaded: the next run sends nothing twice."""
    for status, settings, said in STATUSES:
        hub.fail("POST", "/commit/", status=status, **settings)
        error = client.push(output, REPO, code=6).stderr
        assert f"error: cannot commit to {REPO}: {said}\n" in error
        assert re.search(r"\nhint: .{10,}\n\Z", error)
        assert_not_pushed(hub)
        hub.faults.clear()
    hub.log.clear()
    client.push(output, REPO)
    assert hub.called("PUT", "") == []
    assert_pushed(hub, output)


@pytest.mark.parametrize("hub", ["lfs", "xet"], indirect=True)
def test_a_token_that_expires_on_the_way(hub: FakeHub, client: Client, output: Path) -> None:
    route = "/xet-write-token/" if hub.mode == "xet" else "/info/lfs/objects/batch"
    hub.fail("GET" if hub.mode == "xet" else "POST", route, status=401, times=99)
    error = client.push(output, REPO, code=6).stderr
    assert "error: cannot upload 12 small files: " in error
    assert "hint: " in error
    assert_not_pushed(hub)
    hub.faults.clear()
    client.push(output, REPO)
    assert_pushed(hub, output)


def test_repositories_that_cannot_be_pushed_to(hub: FakeHub, client: Client, output: Path) -> None:
    def refused(repo: str, *arguments: str, code: int = 6) -> str:
        return client.push(output, repo, *arguments, code=code).stderr

    assert "cannot create else/x: the token may not write to else/x (403)" in refused("else/x")
    hub.add_repository("org/gated", gated=True)
    assert "org/gated is gated, and this account has no access\n" in refused("org/gated")
    hub.add_repository("org/readonly", can_write=False)
    assert "the token may not write to org/readonly (403)" in refused("org/readonly")
    client.push(output, "org/readonly", "--create-pr")
    hub.fail("GET", "/api/models/org/taken", status=404, times=2, headers={"X-Error-Code": "RepoNotFound"})
    hub.add_repository("org/taken")
    assert "org/taken is taken by a repository that this token cannot see" in refused("org/taken")
    hub.add_repository("org/public")
    hub.add_repository("org/private", visibility="private")
    error = refused("org/public", "--private", code=4)
    assert "org/public exists and is public, and --private was asked for; nothing was pushed" in error
    assert "is private, and --public was asked for" in refused("org/private", "--public", code=4)
    client.push(output, "org/private", "--private", "-q")
    assert "has no revision refs/pr/7" in refused("org/public", "--revision", "refs/pr/7")
    assert "has no revision next" in refused("org/public", "--revision", "next", "--create-pr")
    assert not hub.commits("org/public")


def test_metadata_that_the_hub_refuses(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    output = make_output(tmp_path / "x", readme=b"---\nlicense: bogus\n---\n# Mine\n")
    error = client.push(output, REPO, code=6).stderr
    assert "the Hub refuses the metadata of README.md" in error
    assert "must be one of [apache-2.0, mit]" in error
    assert "--no-card" in error
    assert_not_pushed(hub)


@pytest.mark.parametrize("hub", ["lfs", "xet"], indirect=True)
def test_a_disk_that_cannot_be_read(hub: FakeHub, output: Path) -> None:
    """At the first reading, and while it is uploaded."""
    script = """
import errno, os, sys
from mla_convert import filling, push
from mla_convert.cli import main
def broken(*_, **__): raise OSError(errno.EIO, os.strerror(errno.EIO), "model-1.safetensors")
if sys.argv.pop(1) == "first":
    os.pread = broken
    os.preadv = broken
else:
    from huggingface_hub import HfApi
    HfApi.preupload_lfs_files = broken
main()
"""
    for when in ("first", "later"):
        words = [sys.executable, "-c", script, when, "push", str(output), REPO]
        done = subprocess.run(words, env=plain_environment(hub), capture_output=True, text=True, timeout=100)
        assert done.returncode == 5, done.stderr
        assert "Input/output error" in done.stderr or "EIO" in done.stderr
        assert "Traceback" not in done.stderr
        assert_not_pushed(hub)


def test_an_unexpected_error_does_not_show_the_token(hub: FakeHub, output: Path) -> None:
    script = """
import sys
from mla_convert.cli import main
from huggingface_hub import HfApi
def broken(self, *_, **__):
    try: raise KeyError("Bearer " + self.token)
    except KeyError as error: raise ZeroDivisionError("with " + self.token) from error
HfApi.create_commit = broken
main()
"""
    words = [sys.executable, "-c", script, "push", str(output), REPO, "-vv"]
    done = subprocess.run(words, env=plain_environment(hub), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "error: unexpected ZeroDivisionError: with hf_***\n" in done.stderr
    assert "Traceback" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


# README


def test_the_readme_is_kept_and_amended(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    own = b"---\nlicense: mit\n---\n# Mine\n"
    output = make_output(tmp_path / "x", readme=own)
    before = snapshot(output)
    client.push(output, REPO)
    text = hub.files(REPO)["README.md"]
    assert text.startswith(own)
    assert snapshot(output) == before
    edited = text.replace(b"# Mine", b"# Ours, edited on the Hub")
    hub.commit_aside(REPO, {"README.md": edited})
    hub.log.clear()
    record = json.loads(client.push(output, REPO, "--json").stdout)
    assert record["sent"] == ["mla-convert.json"]  # which has the hash of the README as it is now
    assert hub.files(REPO)["README.md"] == edited
    client.push(output, REPO, "--no-card")
    assert hub.files(REPO)["README.md"] == own


def test_a_readme_on_the_hub_gets_the_licence_of_the_source(
    hub: FakeHub, client: Client, tmp_path: Path
) -> None:
    output = make_output(tmp_path / "x", readme=b"---\nlicense: mit\n---\n# Source\n")
    hub.add_repository(REPO, {"README.md": b"# Mine\n"})
    client.push(output, REPO)
    assert hub.files(REPO)["README.md"].startswith(
        b"---\nlicense: mit\n---\n\n# Mine\n\n<!-- mla-convert: begin"
    )


def test_no_card(hub: FakeHub, client: Client, output: Path) -> None:
    client.push(output, REPO, "--no-card")
    assert "README.md" not in hub.files(REPO)
    assert_pushed(hub, output)


def test_the_readme_was_followed_literally(hub: FakeHub, tmp_path: Path) -> None:
    """Every command under "Publish it", typed into a shell, from a checkpoint that was split and verified."""
    section = README.read_text(encoding="utf-8").partition("### Publish it\n")[2].partition("\n### ")[0]
    fences = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    commands = [line[2:] for fence in fences for line in fence.splitlines() if line.startswith("$ ")]
    assert len(commands) == 6
    assert run_process("demo", "-o", tmp_path / "demo", "--tp", "2", "-qq").returncode == 0
    (tmp_path / "demo" / "demo-split").rename(tmp_path / "DeepSeek-V3.2-split")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = plain_environment(hub, PATH=path, OMP_NUM_THREADS="1")
    for line in commands:
        words = ["bash", "-c", line]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    name = "your-name/DeepSeek-V3.2-split"
    assert_pushed(hub, tmp_path / "DeepSeek-V3.2-split", repo=name)
    assert hub.repositories[name].visibility == "private"
    original = contents(tmp_path / "demo" / "demo")
    assert original.items() <= contents(tmp_path / "original").items()
