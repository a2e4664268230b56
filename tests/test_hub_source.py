"""Sources on the Hub: the real client against the fake one, over loopback."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conversions
import fake_hub
import fake_hub_server
import filesystems
import pytest
from conversions import CARRIED_WEIGHTS, INDEX, command, contents, environment, manifest, write_checkpoint
from fake_hub import TOKEN, FakeHub, running_hub
from fake_hub_server import Answer

from mla_convert import api
from mla_convert.cli import main
from mla_convert.demo_model import write_demo_checkpoint
from mla_convert.errors import UsageError
from mla_convert.formats.safetensors import read_header
from mla_convert.hub_source import HubId, hub_id

NAME = "org/name"
SOURCE = f"hf://{NAME}"
INFO = f"/api/models/{NAME}$"
SHARDS = (*conversions.REWRITTEN, *CARRIED_WEIGHTS)
#: Names that a URL, a shell or a cache would make something else of.
ODD = ("odd name [1] #2 100%.txt", "ünï/cödé ✓.json", "a+b&c=d?.md", "-q")


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


def cache(hub: FakeHub) -> Path:
    return hub.folder / "home" / "hub"


def commit(hub: FakeHub, ref: str = "main") -> str:
    return hub.repositories[NAME].refs[ref]


def cached(hub: FakeHub) -> set[str]:
    """Names of the files in the cache's snapshots."""
    snapshots = cache(hub) / "models--org--name" / "snapshots"
    return {
        str(path.relative_to(snapshots)).partition("/")[2] for path in snapshots.rglob("*") if path.is_file()
    }


def oid(hub: FakeHub, name: str, ref: str = "main") -> str:
    found = hub.repositories[NAME].resolve(ref)
    assert found is not None
    return found.tree[name].oid


def transfers(hub: FakeHub, since: int = 0) -> dict[str, list[str | None]]:
    """By shard, the range of every request for its bytes; None for a request for all of them."""
    names = {oid(hub, name): name for name in SHARDS}
    found: dict[str, list[str | None]] = {}
    for call in hub.log[since:]:
        if call.method == "GET" and call.path.startswith("/_content/"):
            name = names.get(call.path.removeprefix("/_content/"), "?")
            found.setdefault(name, []).append(call.headers.get("Range"))
    return found


def same_output(found: Path, expected: Path) -> bool:
    """Byte for byte; in the manifest, all but where the source was and the plan's hash, which covers that."""
    ours, theirs = contents(found), contents(expected)
    for folder, files in ((found, ours), (expected, theirs)):
        value = manifest(folder)
        value["source"] = [[name, size] for name, (size, _) in value["source"]["files"].items()]
        files["mla-convert.json"] = json.dumps({**value, "plan": ""}).encode()
    return ours == theirs


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


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", HubId("org/name")),
        ("hf://deepseek-ai/DeepSeek-V3.2_x", HubId("deepseek-ai/DeepSeek-V3.2_x")),
        ("hf://org/name@refs/pr/3", HubId("org/name", "refs/pr/3")),
        ("hf://org/name@feature/x-1", HubId("org/name", "feature/x-1")),
        ("hf://org/name@v1.0@x", HubId("org/name", "v1.0@x")),
        ("hf://org/name@" + "a1" * 20, HubId("org/name", "a1" * 20)),
    ],
)
def test_names(text: str, expected: HubId) -> None:
    assert hub_id(text) == expected
    assert str(expected) == text
    assert hub_id(text.removeprefix("hf://")) is None
    assert hub_id(Path("folder")) is None


BAD = (
    "hf://",
    "hf:///",
    "hf://name",
    "hf://org/",
    "hf:///name",
    "hf://org/name/",
    "hf://org/name/model.safetensors",
    "hf://datasets/org/name",
    "hf://org/na me",
    "hf://org/na--me",
    "hf://org/..",
    "hf://../name",
    "hf://org/name.git",
    "hf://org/-name",
    "hf://org/näme",
    "hf://org/" + "n" * 100,
    "hf://org/name@",
    "hf://org/name@../../x",
    "hf://org/name@a/../b",
    "hf://org/name@/x",
    "hf://org/name@a//b",
    "hf://org/name@-x",
    "hf://org/name@a b",
    "hf://org/name@a\nb",
    "hf://org/name@a:b",
    "hf://org/name@.x",
    "hf://org/name@x.lock",
)


@pytest.mark.parametrize("text", BAD)
def test_bad_names(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        hub_id(text)
    assert caught.value.message.startswith(text.split("@")[0])
    assert caught.value.hint


def test_a_bad_name_is_a_usage_error(fails: Callable[..., str], hub: FakeHub) -> None:
    assert "names a part of a repository\nhint: give all of it: hf://org/name\n" in fails(
        2, "split", f"{SOURCE}/x"
    )
    for name in ("inspect", "split", "combine", "verify"):
        assert "error: hf://name does not name a repository\nhint: " in fails(2, name, "hf://name")
    assert "hf://name does not name" in fails(2, "verify", SOURCE, "--against", "hf://name")
    assert hub.log == []


def test_a_bare_name_is_a_path(fails: Callable[..., str], hub: FakeHub) -> None:
    for name in ("inspect", "split", "combine"):
        expected = (
            "error: org/name does not exist\nhint: if you mean the repository on the Hub: hf://org/name\n"
        )
        assert fails(2, name, NAME) == expected
    assert hub.log == []


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
