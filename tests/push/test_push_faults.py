"""``push`` when the Hub or the process fails: after every single fault there is exactly one commit, or none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conversions import command
from fake_hub import TOKEN, FakeHub, Fault
from pushing import (
    REPO,
    Client,
    assert_not_pushed,
    assert_pushed,
    change_shard,
    plain_environment,
)

WAYS = ("lfs", "multipart", "xet")
COMMIT = "/api/models/tester/model-split/commit/"


def forget(hub: FakeHub) -> None:
    """A Hub as on the first day."""
    hub.repositories.clear()
    hub.faults.clear()
    hub.log.clear()
    hub.parts.clear()
    for path in (hub.folder / "blobs").iterdir():
        path.unlink()


def calls_of_a_push(
    hub: FakeHub, client: Client, output: Path, *arguments: str
) -> list[tuple[str, str, int]]:
    """Every call that a fresh push makes, as (method, route, n): the n-th call of its kind."""
    client.push(output, REPO, *arguments)
    found: list[tuple[str, str, int]] = []
    for call in hub.log:
        # Every object and every part of one is as good as another.
        route = re.sub(
            r"[0-9a-f]{40,64}(/\d+)?", lambda m: "[0-9a-f]{40,64}" + (r"/\d+" if m[1] else ""), call.path
        )
        kind = (call.method, f"^{route}$")
        found.append((*kind, 1 + sum(entry[:2] == kind for entry in found)))
    forget(hub)
    return found


@pytest.mark.parametrize("hub", WAYS, indirect=True)
@pytest.mark.parametrize("kind", ["status", "lose"])
def test_a_fault_at_every_call(hub: FakeHub, client: Client, output: Path, kind: str) -> None:
    """A 503, or an answer that is lost after the work was done: the push gets over each, and commits once."""
    calls = calls_of_a_push(hub, client, output)
    assert len(calls) >= 8
    if hub.mode == "xet" or hub.multipart:  # the rest is the same as with "lfs"
        calls = [call for call in calls if re.search("_lfs|/lfs/|xet|commit", call[1])]
    if kind == "lose":  # reading twice is no matter: those are in the other half
        calls = [call for call in calls if call[0] not in ("GET", "HEAD")]
    for method, route, n in calls:
        if n > (1 if "/_lfs/" in route else 3):
            continue  # one of many like calls
        fault = hub.fail(method, route, kind, n=n)  # type: ignore[arg-type]
        client.push(output, REPO)
        assert fault.reached.is_set(), (method, route, n)
        assert_pushed(hub, output)
        forget(hub)


@pytest.mark.parametrize("kind", ["lose", "drop", "status"])
def test_a_lost_commit_makes_no_second_one(hub: FakeHub, client: Client, output: Path, kind: str) -> None:
    for ref, arguments in (
        ("main", ()),
        ("refs/pr/1", ("--create-pr",)),
        ("next", ("--revision", "next")),
    ):
        forget(hub)
        hub.add_repository(REPO)
        hub.fail("POST", COMMIT, kind, status=504)  # type: ignore[arg-type]
        client.push(output, REPO, *arguments)
        assert_pushed(hub, output, ref)
        assert len(hub.repositories[REPO].commits) == 2
        assert len(hub.called("POST", COMMIT)) == (1 if kind == "lose" else 2)
        hub.log.clear()
        client.push(output, REPO, *arguments)
        assert hub.changes() == []


def test_a_commit_that_fails_for_good(hub: FakeHub, client: Client, output: Path) -> None:
    hub.fail("POST", COMMIT, times=99)
    done = client.push(output, REPO, code=6)
    assert f"error: cannot commit to {REPO}: the Hub is in trouble (HTTP status 503)\n" in done.stderr
    assert "hint: wait a little, then run the same command again" in done.stderr
    assert len(hub.called("POST", COMMIT)) == 5
    assert_not_pushed(hub)
    hub.faults.clear()
    hub.log.clear()
    client.push(output, REPO)
    assert_pushed(hub, output)
    assert hub.called("PUT", "") == []


def test_somebody_else_commits_meanwhile(hub: FakeHub, client: Client, output: Path) -> None:
    hub.add_repository(REPO)
    fault = hub.fail("POST", COMMIT, "hold")
    process = start(hub, output)
    wait_for(fault, process)
    hub.commit_aside(REPO, {"theirs.txt": b"theirs"})
    fault.release.set()
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 6
    assert (
        f"error: somebody else has committed to {REPO} meanwhile; nothing of this push is visible there"
        in stderr
    )
    assert hub.files(REPO) == {"theirs.txt": b"theirs"}
    done = client.push(output, REPO)
    assert "no part of this checkpoint: theirs.txt" in done.stderr
    files = hub.files(REPO)
    assert files.pop("theirs.txt") == b"theirs"
    assert len(hub.commits(REPO)) == 2


def test_somebody_else_commits_while_the_answer_is_lost(hub: FakeHub, client: Client, output: Path) -> None:
    """Our commit is there, and another on top of it: the files are there, so nothing is sent again."""
    hub.add_repository(REPO)
    fault = hub.fail("GET", "/revision/main", "hold", n=2)
    hub.fail("POST", COMMIT, "lose")
    process = start(hub, output)
    wait_for(fault, process)
    hub.commit_aside(REPO, {"theirs.txt": b"theirs"})
    fault.release.set()
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert len(hub.called("POST", COMMIT)) == 1
    assert len(hub.commits(REPO)) == 2


# Killed, interrupted


def start(hub: FakeHub, output: Path, *arguments: str) -> subprocess.Popen[str]:
    words = command("push", output, REPO, *arguments)
    return subprocess.Popen(
        words, env=plain_environment(hub), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(fault: Fault, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not fault.reached.wait(0.05):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline


MIDDLES = {
    "lfs": [("PUT", "/_lfs/", 3), ("POST", COMMIT, 1)],
    "multipart": [("PUT", "/_lfs/", 7), ("POST", "/complete$", 2)],
    "xet": [("GET", "/xet-write-token/", 1), ("POST", COMMIT, 1)],
}


@pytest.mark.parametrize(("hub", "n"), [(way, n) for way in WAYS for n in (0, 1)], indirect=["hub"])
def test_killed_in_the_middle_and_run_again(
    hub: FakeHub, client: Client, output: Path, n: int, request: pytest.FixtureRequest
) -> None:
    method, route, count = MIDDLES[request.node.callspec.params["hub"]][n]
    fault = hub.fail(method, route, "hold", n=count)
    process = start(hub, output)
    wait_for(fault, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=100)
    assert_not_pushed(hub)
    stored = {path.name for path in (hub.folder / "blobs").iterdir()}
    hub.faults.remove(fault)
    hub.log.clear()
    client.push(output, REPO)
    assert_pushed(hub, output)
    sent = {call.path.split("/")[2] for call in hub.called("PUT", "/_lfs/")}
    assert not sent & stored, "what was there has been sent again"


def test_killed_after_the_commit(hub: FakeHub, client: Client, output: Path) -> None:
    """The answer never came, and nobody is left to look: the next run does."""
    fault = hub.fail("GET", "/tree/", "hold", n=2)
    process = start(hub, output)
    wait_for(fault, process)
    process.kill()
    process.communicate(timeout=100)
    hub.faults.remove(fault)
    assert "nothing to do" in client.push(output, REPO).stdout
    assert_pushed(hub, output)


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("hub", ["lfs", "xet"], indirect=True)
def test_interrupted(hub: FakeHub, client: Client, output: Path, way: signal.Signals) -> None:
    fault = hub.fail("POST", COMMIT, "hold")
    process = start(hub, output, "--message", "two words")
    wait_for(fault, process)
    process.send_signal(way)
    stdout, stderr = process.communicate(timeout=100)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert "error: interrupted" in stderr
    again = f"mla-convert push {output} {REPO} --message 'two words'"
    assert f"hint: run it again: {again}\n" in stderr
    assert TOKEN not in stderr
    hub.faults.remove(fault)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", again], env=plain_environment(hub, PATH=path), check=True, capture_output=True
    )
    assert_pushed(hub, output)
    assert hub.commits(REPO)[0].title == "two words"


# The bytes change underneath


@pytest.mark.parametrize("hub", WAYS, indirect=True)
def test_a_file_that_changes_while_it_is_uploaded(hub: FakeHub, client: Client, output: Path) -> None:
    """It was as the manifest says when it was checked; what the client sends is something else."""
    fault = hub.fail("POST", "/preupload/", "hold")
    process = start(hub, output)
    wait_for(fault, process)
    before = (output / "model-3.safetensors").read_bytes()
    (output / "model-3.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    fault.release.set()
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 10
    assert "error: model-3.safetensors was changed while it was being uploaded; there is no commit" in stderr
    assert_not_pushed(hub)
    (output / "model-3.safetensors").write_bytes(before)
    client.push(output, REPO)
    assert_pushed(hub, output)


def test_a_hub_that_keeps_something_else(hub: FakeHub, client: Client, output: Path) -> None:
    """The tree is listed after the commit and compared."""
    fault = hub.fail("GET", "/tree/", "hold", n=2)
    process = start(hub, output)
    wait_for(fault, process)
    tree = hub.commits(REPO)[0].tree
    tree["model-1.safetensors"] = tree["model-2.safetensors"]  # type: ignore[index]
    fault.release.set()
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 10
    assert "does not hold what was pushed\n  model-1.safetensors is not what was sent\n" in stderr
    change_shard(output, "model-5.safetensors")
    client.push(output, REPO)
    assert_pushed(hub, output, commits=2)
