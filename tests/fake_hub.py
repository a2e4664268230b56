"""A Hub in this process, on loopback, that the real huggingface_hub client talks to.

It keeps repositories with branches, commits and pull requests, takes files by LFS (one part or several) or by Xet
(the released hf_xet writes to a ``local://`` store), serves them with ranges, and can be told to fail. Every call is
logged. A call that it has no route for fails the test, and so does a client that tries to leave the machine.

How a test module uses it::

    @pytest.fixture
    def hub(tmp_path: Path) -> Iterator[FakeHub]:
        with running_hub(tmp_path / "hub") as hub:
            yield hub

    subprocess.run(..., env=environment(**hub.environment()))
"""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fake_hub_server import Call, Handler, Server

TOKEN = "hf_CanaryTokenThatMustNeverBeShown"
USER = "tester"
PAGE = 100  # entries of one page of a tree
GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
#: Put on PYTHONPATH of a client: refuses to connect anywhere but to loopback, and lets no back-off take long.
_SITECUSTOMIZE = """
import socket, time
def guarded(connect):
    def inner(self, address, *more):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            with open({log!r}, "a") as log:
                log.write(repr(address) + "\\n")
            raise OSError("left the machine: " + repr(address))
        return connect(self, address, *more)
    return inner
def resolve(host, *more, resolve=socket.getaddrinfo, **options):
    if host not in ("127.0.0.1", "::1", "localhost", None):
        with open({log!r}, "a") as log:
            log.write("resolve " + repr(host) + "\\n")
        raise OSError("left the machine: " + repr(host))
    return resolve(host, *more, **options)
socket.getaddrinfo = resolve
class Guarded(socket.socket):
    connect = guarded(socket.socket.connect)
    connect_ex = guarded(socket.socket.connect_ex)
socket.socket = Guarded
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.02))
"""


@dataclass(frozen=True)
class Blob:
    """A file of a commit: bytes the Hub holds, or an LFS or Xet pointer to them."""

    oid: str  # git's sha1 of a regular file, sha256 of a pointer
    size: int
    data: bytes | None = None  # None for a pointer

    @property
    def git_oid(self) -> str:
        """What the tree lists as the oid."""
        return self.oid if self.data is not None else git_oid(self.oid.encode())


@dataclass(frozen=True)
class Commit:
    """One commit, with the whole tree after it."""

    oid: str
    title: str
    description: str
    parent: str | None
    tree: Mapping[str, Blob]


@dataclass
class Repository:
    """A repository: commits by oid, and the commit of every ref (``main``, ``refs/pr/1``)."""

    name: str
    visibility: str | None = None
    gated: bool = False
    can_write: bool = True
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pulls: list[dict[str, Any]] = field(default_factory=list)

    def resolve(self, revision: str) -> Commit | None:
        """The commit of a branch, a pull request or an oid."""
        return self.commits.get(self.refs.get(revision, revision))

    def add(self, ref: str, tree: Mapping[str, Blob], title: str, description: str = "") -> Commit:
        """A new commit on top of ``ref``."""
        parent = self.refs.get(ref)
        oid = hashlib.sha1(f"{self.name} {ref} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, description, parent, dict(tree))
        self.refs[ref] = oid
        return self.commits[oid]


@dataclass
class Fault:
    """The ``n``-th to ``n + times``-th call of a route goes wrong.

    ``status``: answered so, nothing done. ``drop``: the connection is closed, nothing done. ``lose``: the work is
    done, and the connection closed without an answer. ``hold``: it waits until ``release`` is set.
    """

    method: str
    route: re.Pattern[str]
    kind: Literal["status", "drop", "lose", "hold"]
    status: int = 503
    n: int = 1
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    seen: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def strikes(self, method: str, path: str) -> bool:
        """Count a call; does it go wrong?"""
        if method != self.method or not self.route.search(path):
            return False
        self.seen += 1
        return self.n <= self.seen < self.n + self.times


def git_oid(data: bytes) -> str:
    """The oid git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def upload_mode(path: str, size: int) -> Literal["lfs", "regular"]:
    """How the Hub wants a file: large ones and weights by pointer."""
    return "lfs" if size and (path.endswith((".safetensors", ".bin")) or size > 10_000_000) else "regular"


class FakeHub:
    """The state of the Hub and its server. ``mode`` says how large files travel."""

    def __init__(self, folder: Path, mode: Literal["lfs", "xet"], multipart: int) -> None:
        self.folder, self.mode, self.multipart = folder, mode, multipart
        self.repositories: dict[str, Repository] = {}
        self.tokens = {TOKEN}
        self.log: list[Call] = []
        self.faults: list[Fault] = []
        self.unknown: list[str] = []
        self.crashes: list[str] = []
        self.parts: dict[tuple[str, int], bytes] = {}
        self.lock = threading.RLock()
        self.uploads = itertools.count(1)
        for name in ("blobs", "cas", "guard"):
            (folder / name).mkdir(parents=True)
        self.strays = folder / "strays"
        (folder / "guard" / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(log=str(self.strays)))
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def environment(self, **changes: str) -> dict[str, str]:
        """What a client's environment needs: this Hub, nothing else, and nothing of the user's."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.folder / "home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_XET": "0" if self.mode == "xet" else "1",
            "PYTHONPATH": str(self.folder / "guard"),
            # Whatever honours proxies (hf_xet is no Python) and leaves the machine comes here, and is unknown.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "https_proxy"), self.url),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **changes,
        }

    # What tests set up

    def add_repository(
        self, name: str, files: Mapping[str, bytes] | None = None, **settings: Any
    ) -> Repository:
        """A repository with one commit of ``files`` (weights and large files by pointer), or the usual empty one."""
        repository = self.repositories[name] = Repository(name, **settings)
        repository.add(
            "main", self._tree({".gitattributes": GITATTRIBUTES, **(files or {})}), "initial commit"
        )
        return repository

    def commit_aside(self, name: str, files: Mapping[str, bytes], ref: str = "main") -> Commit:
        """What somebody else commits meanwhile."""
        repository = self.repositories[name]
        tree = {**repository.commits[repository.refs[ref]].tree, **self._tree(files)}
        return repository.add(ref, tree, "somebody else's commit")

    def _tree(self, files: Mapping[str, bytes]) -> dict[str, Blob]:
        tree = {}
        for path, data in files.items():
            if upload_mode(path, len(data)) == "lfs":
                oid = hashlib.sha256(data).hexdigest()
                self.blob(oid).write_bytes(data)
                tree[path] = Blob(oid, len(data))
            else:
                tree[path] = Blob(git_oid(data), len(data), data)
        return tree

    def fail(
        self,
        method: str,
        route: str,
        kind: Literal["status", "drop", "lose", "hold"] = "status",
        **settings: Any,
    ) -> Fault:
        """Let calls whose path matches ``route`` go wrong; see ``Fault``."""
        fault = Fault(method, re.compile(route), kind, **settings)
        self.faults.append(fault)
        return fault

    # What tests look at

    def blob(self, oid: str) -> Path:
        """Where the bytes of a pointer lie, if LFS brought them."""
        return self.folder / "blobs" / oid

    def commits(self, name: str, ref: str = "main") -> list[Commit]:
        """The history of a ref, newest first, without the Hub's own first commit."""
        repository = self.repositories.get(name)
        commit = repository and repository.resolve(ref)
        found = []
        while repository and commit and commit.parent:
            found.append(commit)
            commit = repository.commits[commit.parent]
        return found

    def files(self, name: str, ref: str = "main", *, local: Path | None = None) -> dict[str, bytes]:
        """The bytes of every file of a ref, but the Hub's own ``.gitattributes``.

        Xet finds files by a hash of its own, so what went by Xet is looked up by that hash of the files in
        ``local``; the bytes come out of the store.
        """
        commit = self.repositories[name].resolve(ref)
        assert commit is not None
        pointers = {blob.oid for blob in commit.tree.values() if blob.data is None}
        stored = {oid: self.blob(oid).read_bytes() for oid in pointers if self.blob(oid).exists()}
        if pointers - stored.keys():
            assert local is not None, "these bytes are in the Xet store: pass local="
            stored |= self._read_xet(local)
        return {
            path: stored[blob.oid] if blob.data is None else blob.data
            for path, blob in commit.tree.items()
            if not (path == ".gitattributes" and blob.data == GITATTRIBUTES)
        }

    def _read_xet(self, local: Path) -> dict[str, bytes]:
        paths = [str(path) for path in sorted(local.rglob("*.safetensors")) if path.stat().st_size]
        target = self.folder / f"readback-{next(self.uploads)}"
        target.mkdir()
        words = [sys.executable, "-c", _READ_XET, f"local://{self.folder / 'cas'}", str(target), *paths]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        found = [path.read_bytes() for path in target.iterdir()]
        return {hashlib.sha256(data).hexdigest(): data for data in found}

    def called(self, method: str, route: str) -> list[Call]:
        """The calls of a route so far."""
        return [call for call in self.log if call.method == method and re.search(route, call.path)]

    def changes(self) -> list[Call]:
        """The calls so far that may change something."""
        harmless = r"/preupload/|/validate-yaml$|/paths-info/"
        return [c for c in self.log if c.method not in ("GET", "HEAD") and not re.search(harmless, c.path)]

    def assert_no_surprise(self) -> None:
        """Nothing unknown was asked for, nothing broke, nobody left the machine."""
        assert not self.unknown, f"the fake Hub has no route for {self.unknown}"
        assert not self.crashes, "\n".join(self.crashes)
        assert not self.strays.exists(), self.strays.read_text()


#: Reads files back out of a local Xet store: finds each by the Xet hash of the local file, writes it to a folder.
_READ_XET = """
import sys, hf_xet
endpoint, target, *paths = sys.argv[1:]
with hf_xet.XetSession().new_file_download_group(endpoint=endpoint) as group:
    for n, pointer in enumerate(hf_xet.hash_files(paths)):
        group.start_download_file(hf_xet.XetFileInfo(pointer.hash, pointer.filesize), f"{target}/{n}")
"""


@contextmanager
def running_hub(
    folder: Path, mode: Literal["lfs", "xet"] = "lfs", *, multipart: int = 0
) -> Iterator[FakeHub]:
    """A Hub that answers while the block runs and checks at its end that nothing unexpected was asked.

    Args:
        folder: New; state on disk goes here.
        mode: How clients send large files.
        multipart: LFS files larger than this go in parts of this size; 0 sends all in one.
    """
    hub = FakeHub(folder, mode, multipart)
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for fault in hub.faults:
            fault.release.set()
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
    hub.assert_no_surprise()
