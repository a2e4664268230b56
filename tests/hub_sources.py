"""The repository that tests of Hub sources read, what was asked of the fake Hub, and what its cache holds."""

from __future__ import annotations

import json
from pathlib import Path

import conversions
from conversions import CARRIED_WEIGHTS, contents, manifest
from fake_hub import FakeHub

NAME = "org/name"
SOURCE = f"hf://{NAME}"
INFO = f"/api/models/{NAME}$"
SHARDS = (*conversions.REWRITTEN, *CARRIED_WEIGHTS)
#: Names that a URL, a shell or a cache would make something else of.
ODD = ("odd name [1] #2 100%.txt", "ünï/cödé ✓.json", "a+b&c=d?.md", "-q")


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
