"""Downloads that break, resume, are refused or do not fit, and work without a network."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import fake_hub_server
import filesystems
import pytest
from conversions import INDEX, command, environment
from fake_hub import TOKEN, FakeHub
from fake_hub_server import Answer
from hub_sources import INFO, NAME, ODD, SHARDS, SOURCE, cache, cached, commit, oid, same_output, transfers


def cut_bodies(hub: FakeHub, route: str, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let the connection break in the middle of an answer's body."""
    plain, left = fake_hub_server.Handler._send, [times]

    def send(self: Any, answer: Answer) -> None:
        if self.command != "GET" or not re.search(route, self.path) or answer.status >= 300 or not left[0]:
            return plain(self, answer)
        left[0] -= 1
        size = str(len(answer.body))
        half = Answer(
            answer.status, answer.body[: len(answer.body) // 2], {**answer.headers, "Content-Length": size}
        )
        plain(self, half)
        self.wfile.flush()
        self._drop()
        return None

    monkeypatch.setattr(fake_hub_server.Handler, "_send", send)


# Resuming


def test_only_what_is_missing_is_downloaded(
    run: Callable[..., Any], does: Callable[..., Any], hub: FakeHub, here: Path, model: Path
) -> None:
    does("split", SOURCE)
    hub.commit_aside(NAME, {"tokenizer.json": b"new"})
    snapshots = cache(hub) / "models--org--name" / "snapshots"
    (snapshots / commit(hub)).mkdir(exist_ok=True)
    before = len(hub.log)
    does("split", SOURCE, "-o", "again")
    assert all(
        None not in ranges for ranges in transfers(hub, before).values()
    )  # headers, and blobs that are here
    # A damaged file in the cache is not used.
    damaged = (snapshots / commit(hub) / SHARDS[4]).resolve()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = len(hub.log)
    does("split", SOURCE, "-o", "repaired")
    assert [ranges[-1] for ranges in transfers(hub, before).values()] == [None]
    assert (here / "repaired" / SHARDS[4]).read_bytes() == (model / SHARDS[4]).read_bytes()


def test_a_connection_that_breaks_once(
    does: Callable[..., Any], hub: FakeHub, here: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_bodies(hub, "/_content/", monkeypatch, times=9)
    does("split", SOURCE)
    assert same_output(here / "name-split", expected)


def test_a_connection_that_keeps_breaking_and_a_second_run(
    does: Callable[..., Any], fails: Callable[..., str], hub: FakeHub, here: Path, expected: Path
) -> None:
    fault = hub.fail("GET", f"/_content/{oid(hub, SHARDS[4])}", "drop", n=3, times=1000)
    stderr = fails(6, "split", SOURCE)
    assert re.search(rf"error: {SOURCE}@\w+: the connection to {hub.url} failed \(\w+\)\n", stderr)
    assert "what is downloaded is kept" in stderr
    assert fault.seen < 100
    assert SHARDS[4] not in cached(hub)
    assert not list(here.glob("*name-split*"))
    hub.faults.clear()
    complete, before = cached(hub), len(hub.log)
    does("split", SOURCE)
    whole = {name for name, ranges in transfers(hub, before).items() if None in ranges}
    assert SHARDS[4] in whole
    assert not whole & complete
    assert same_output(here / "name-split", expected)


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", INFO),
        ("GET", "/tree/"),
        ("HEAD", "/resolve/"),
        ("GET", "/resolve/"),
        ("GET", "/_content/"),
    ],
)
def test_a_hub_in_trouble(
    does: Callable[..., Any],
    fails: Callable[..., str],
    hub: FakeHub,
    here: Path,
    expected: Path,
    method: str,
    route: str,
) -> None:
    hub.fail(method, route, times=2)
    does("split", SOURCE)
    hub.faults.clear()
    assert same_output(here / "name-split", expected)
    for path in cache(hub).rglob("*"):
        if path.is_file():
            path.unlink()
    fault = hub.fail(method, route, status=502, times=10**6)
    stderr = fails(6, "split", SOURCE, "-o", "out")
    assert re.search(rf"error: {SOURCE}(@\w+)?: the Hub is in trouble \(502\)", stderr)
    assert fault.seen <= 60


def test_a_hub_that_asks_for_patience(
    does: Callable[..., Any], fails: Callable[..., str], hub: FakeHub
) -> None:
    hub.fail("GET", "/tree/", status=429, headers={"Retry-After": "3"})
    does("inspect", SOURCE)
    hub.fail("GET", INFO, status=429, headers={"Retry-After": "100000"}, times=10**6)
    assert "limits the rate of requests (429)\nhint: run it again in some minutes" in fails(
        6, "inspect", SOURCE
    )
    assert len(hub.called("GET", INFO)) == 2


def test_an_interrupted_download(hub: FakeHub, here: Path, does: Callable[..., Any], model: Path) -> None:
    fault = hub.fail("GET", f"/_content/{oid(hub, SHARDS[3])}", "hold", n=3)
    process = subprocess.Popen(
        command("split", SOURCE),
        cwd=here,
        env=environment(**hub.environment()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert fault.reached.wait(60)
    while not {SHARDS[0], SHARDS[4], *ODD} <= cached(hub):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    fault.release.set()
    assert (process.returncode, stdout) == (130, ""), stderr
    assert f"files of {SOURCE}@{commit(hub)} are in the cache\n" in stderr
    assert f"hint: resume with: mla-convert split {SOURCE}@{commit(hub)}\n" in stderr
    before, complete = len(hub.log), cached(hub)
    does("split", SOURCE)
    whole = {name for name, ranges in transfers(hub, before).items() if None in ranges}
    assert whole
    assert not whole & complete


# Refusals


@pytest.mark.parametrize(
    ("what", "message", "hint"),
    [
        ("missing", "hf://org/no: no such repository, or a private one", "hf auth login"),
        ("private", "hf://org/name: no such repository, or a private one", "hf auth login"),
        ("revision", "hf://org/name@v9: the repository has no such revision", "/org/name/commits/main"),
        ("commit", "0: the repository has no such revision", "/org/name/commits/main"),
        ("gated", "hf://org/name is gated, and access was not granted", "ask for it at http"),
        ("forbidden", "hf://org/name: the token has no permission to read this (403)", "read access"),
        ("expired", "hf://org/name: the Hub does not accept the token (401)", "hf auth login"),
    ],
)
def test_refusals(
    fails: Callable[..., str], hub: FakeHub, here: Path, what: str, message: str, hint: str
) -> None:
    repository = hub.repositories[NAME]
    source = {"missing": "hf://org/no", "revision": f"{SOURCE}@v9", "commit": f"{SOURCE}@{'0' * 40}"}
    if what == "private":
        repository.visibility = "private"
    repository.gated = what == "gated"
    if what in ("forbidden", "expired"):
        hub.fail("GET", "/api/", status=403 if what == "forbidden" else 401, times=10**6)
    for name in ("inspect", "split"):
        stderr = fails(6, name, source.get(what, SOURCE), HF_TOKEN="hf_wrong" if what == "private" else TOKEN)
        assert message in stderr
        assert hint in stderr
    assert len(hub.log) <= 4
    assert list(here.iterdir()) == []
    error = json.loads(
        fails_json(hub, here, "inspect", source.get(what, SOURCE)) if what != "private" else "{}"
    )
    assert what == "private" or (error["error"], error["exit_code"]) == ("HubError", 6)


def fails_json(hub: FakeHub, here: Path, *arguments: str) -> str:
    done = conversions.run(*arguments, "--json", cwd=here, env=hub.environment())
    return done.stderr.splitlines()[-1]


def test_files_may_be_gated_where_their_list_is_not(fails: Callable[..., str], hub: FakeHub) -> None:
    hub.fail("GET", "/resolve/", status=403, headers={"X-Error-Code": "GatedRepo"}, times=10**6)
    hub.fail("HEAD", "/resolve/", status=403, headers={"X-Error-Code": "GatedRepo"}, times=10**6)
    assert "is gated, and access was not granted" in fails(6, "inspect", SOURCE)


def test_no_hub_at_all(fails: Callable[..., str], hub: FakeHub) -> None:
    stderr = fails(6, "inspect", SOURCE, HF_ENDPOINT="http://127.0.0.1:9")
    assert f"error: {SOURCE}: the connection to http://127.0.0.1:9 failed (ConnectError)\n" in stderr
    assert "HF_HUB_OFFLINE=1 works from the cache alone" in stderr
    assert "error: HF_ENDPOINT is no web address: hub" in fails(6, "inspect", SOURCE, HF_ENDPOINT="hub")


def test_a_token_that_cannot_be_sent(fails: Callable[..., str], hub: FakeHub) -> None:
    stderr = fails(6, "inspect", SOURCE, "-vv", HF_TOKEN="hf_Bäd")
    assert "the token is not one that can be sent" in stderr
    assert "hf_B" not in stderr
    assert hub.log == []


# Disks


def test_what_does_not_fit_is_not_begun(
    fails: Callable[..., str], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_convert.output_folder.free_bytes", lambda path: 50_000)
    stderr = fails(5, "split", SOURCE)
    assert re.search(r"has 50\.00 kB \(50 000 bytes\) free; downloading the rest of .* needs \d", stderr)
    assert "or set HF_HOME to a folder on a larger disk" in stderr
    assert cached(hub) == {"config.json", INDEX}


def test_a_disk_that_fills_up(
    fails: Callable[..., str], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_convert.output_folder.free_bytes", lambda path: None)
    with filesystems.tmpfs("128k") as disk:
        stderr = fails(5, "split", SOURCE, HF_HOME=str(disk))
        assert "error: cannot write to " in stderr
        assert "no space is left on the device (ENOSPC)" in stderr


# Offline


def test_offline_works_from_the_cache(
    does: Callable[..., Any], run: Callable[..., Any], hub: FakeHub, here: Path
) -> None:
    does("split", SOURCE)
    before = len(hub.log)
    done = does("split", SOURCE, "-o", "again", HF_HUB_OFFLINE="1")
    assert same_output(here / "again", here / "name-split")
    assert done["source"] == f"{SOURCE}@{commit(hub)}"
    assert any("is taken as the cache has it" in warning for warning in done["warnings"])
    assert does("inspect", f"{SOURCE}@{commit(hub)}", HF_HUB_OFFLINE="1")["layout"] == "combined"
    assert len(hub.log) == before


def test_offline_with_a_list_of_the_files(
    does: Callable[..., Any], fails: Callable[..., str], hub: FakeHub
) -> None:
    """As ``hf download`` leaves it: what is missing is known, and nothing else has to be warned of."""
    script = f"from huggingface_hub import snapshot_download; snapshot_download({NAME!r})"
    env = environment(**hub.environment())
    subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True)
    assert does("split", SOURCE, HF_HUB_OFFLINE="1")["warnings"] == []
    (cache(hub) / "models--org--name" / "snapshots" / commit(hub) / "tokenizer.json").unlink()
    stderr = fails(6, "split", SOURCE, "-o", "out", HF_HUB_OFFLINE="1")
    assert (
        f"does not have 1 of {len(hub.files(NAME)) + 1} files of {SOURCE}@{commit(hub)}\n  tokenizer.json"
        in stderr
    )


def test_offline_without_a_cache(does: Callable[..., Any], fails: Callable[..., str], hub: FakeHub) -> None:
    for source in (SOURCE, f"{SOURCE}@{commit(hub)}", f"{SOURCE}@v1"):
        stderr = fails(6, "split", source, HF_HUB_OFFLINE="1")
        assert f"HF_HUB_OFFLINE is set, and the cache {cache(hub)} does not have {source}\n" in stderr
        assert "hint: unset it, or fill the cache first: hf download org/name\n" in stderr
    assert hub.log == []
    does("inspect", SOURCE)  # leaves index and configuration
    stderr = fails(6, "split", SOURCE, HF_HUB_OFFLINE="1")
    assert "cannot be used" in stderr
    assert "hint: unset HF_HUB_OFFLINE" in stderr
