"""What the fake Hub answers: one function a route. Shapes are those of the real Hub as its client expects them."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Any

from fake_hub import PAGE, USER, Blob, Commit, Repository, git_oid, upload_mode
from fake_hub_server import Answer, Request, Route, decode

_MODEL = r"/api/models/(?P<name>[^/]+/[^/]+)"


def refuse(status: int, message: str, code: str = "") -> Answer:
    """An error as the Hub tells it, in the body and in headers."""
    headers = {"X-Error-Message": message, "X-Request-Id": "fake-request"}
    return Answer(status, {"error": message}, headers | ({"X-Error-Code": code} if code else {}))


def unauthorised(request: Request) -> Answer | None:
    """The refusal if the token is missing or wrong."""
    known = {f"Bearer {token}" for token in request.hub.tokens}
    if request.headers.get("Authorization") in known:
        return None
    return refuse(401, "Invalid credentials in Authorization header")


def find(request: Request, name: str, revision: str = "main") -> tuple[Repository, Commit] | Answer:
    """The repository and the commit, or why not."""
    repository = request.hub.repositories.get(name)
    if repository is None or (repository.visibility == "private" and unauthorised(request)):
        return refuse(404, "Repository not found", "RepoNotFound")
    if repository.gated:
        return refuse(403, f"Access to model {name} is restricted", "GatedRepo")
    commit = repository.resolve(revision)
    if commit is None:
        return refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return repository, commit


def writable(request: Request, name: str, revision: str = "main") -> tuple[Repository, Commit] | Answer:
    """As ``find``, for somebody with a token that may write."""
    found = unauthorised(request) or find(request, name, revision)
    if not isinstance(found, Answer) and not found[0].can_write:
        return refuse(403, "Forbidden: you must have write access to this repo")
    return found


def harnesses(request: Request) -> Answer:
    """What the client asks for when a coding agent runs it."""
    return refuse(404, "nothing here")


def whoami(request: Request) -> Answer:
    """Who the token belongs to."""
    role = {"type": "access_token", "accessToken": {"role": "write"}}
    return unauthorised(request) or Answer(body={"type": "user", "name": USER, "auth": role, "orgs": []})


def create(request: Request) -> Answer:
    """Create a repository; one that exists is answered with 409 and its address."""
    if refusal := unauthorised(request):
        return refusal
    asked = request.json()
    name = f"{asked.get('organization') or USER}/{asked['name']}"
    if not name.startswith((f"{USER}/", "org/", "your-name/")):
        return refuse(403, f"You don't have the rights to create a model under the namespace {name}")
    body = {"url": f"{request.hub.url}/{name}", "name": name, "id": name}
    if name in request.hub.repositories:
        return Answer(409, {**body, "error": "You already created this model repo"})
    request.hub.add_repository(name, visibility=asked.get("visibility"))
    return Answer(body=body)


def validate_yaml(request: Request) -> Answer:
    """Check the metadata of a model card: here, only that there is some structure to it."""
    head = re.match(r"---\n(.*?)\n---\n", request.json()["content"], re.DOTALL)
    if head and re.search(r"^license: bogus$", head[1], re.MULTILINE):
        return Answer(
            400, {"errors": [{"message": '"license" must be one of [apache-2.0, mit]'}], "warnings": []}
        )
    return Answer(body={"errors": [], "warnings": [] if head else [{"message": "empty or missing metadata"}]})


def info(request: Request, name: str, revision: str = "main") -> Answer:
    """What a repository is at a revision."""
    found = find(request, name, revision)
    if isinstance(found, Answer):
        return found
    repository, commit = found
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in commit.tree]
    if "blobs" in request.query:
        for sibling in siblings:
            blob = commit.tree[sibling["rfilename"]]
            sibling |= {"size": blob.size, "blobId": blob.git_oid}
            if blob.data is None:
                sibling["lfs"] = {"sha256": blob.oid, "size": blob.size, "pointerSize": 134}
    body = {"id": name, "modelId": name, "sha": commit.oid, "tags": [], "siblings": siblings}
    return Answer(body={**body, "private": repository.visibility == "private", "gated": repository.gated})


def tree(request: Request, name: str, revision: str) -> Answer:
    """The files of a revision, a page at a time."""
    found = find(request, name, revision)
    if isinstance(found, Answer):
        return found
    entries = [entry(path, blob) for path, blob in sorted(found[1].tree.items())]
    start = int(request.query.get("cursor", ["0"])[0])
    headers = {}
    if start + PAGE < len(entries):
        here = f"{request.hub.url}/api/models/{name}/tree/{found[1].oid}"
        headers["Link"] = f'<{here}?recursive=True&cursor={start + PAGE}>; rel="next"'
    return Answer(body=entries[start : start + PAGE], headers=headers)


def entry(path: str, blob: Blob) -> dict[str, Any]:
    """A file as the tree lists it."""
    listed: dict[str, Any] = {"type": "file", "path": path, "size": blob.size, "oid": blob.git_oid}
    if blob.data is None:
        listed["lfs"] = {"oid": blob.oid, "size": blob.size, "pointerSize": 134}
    return listed


def paths_info(request: Request, name: str, revision: str) -> Answer:
    """The files among those asked for that exist."""
    found = find(request, name, revision)
    if isinstance(found, Answer):
        return found
    paths = request.json()["paths"]
    return Answer(body=[entry(path, blob) for path, blob in found[1].tree.items() if path in paths])


def refs(request: Request, name: str) -> Answer:
    """Branches and, if asked for, pull requests."""
    found = find(request, name)
    if isinstance(found, Answer):
        return found
    known = found[0].refs
    pulls = [r for r in known if r.startswith("refs/pr/")]
    body = {
        "branches": [
            {"name": r, "ref": f"refs/heads/{r}", "targetCommit": known[r]} for r in known if r not in pulls
        ],
        "converts": [],
        "tags": [],
    }
    if "include_prs" in request.query:
        body["pullRequests"] = [{"name": r, "ref": r, "targetCommit": known[r]} for r in pulls]
    return Answer(body=body)


def branch(request: Request, name: str, branch: str) -> Answer:
    """Create a branch."""
    start = (json.loads(request.body or b"{}")).get("startingPoint") or "main"
    found = writable(request, name, start)
    if isinstance(found, Answer):
        return found
    if branch in found[0].refs:
        return refuse(409, "Reference already exists")
    found[0].refs[branch] = found[1].oid
    return Answer(body={})


def preupload(request: Request, name: str, revision: str) -> Answer:
    """How each file should be sent, and what is there already."""
    pull = "create_pr" in request.query
    found = unauthorised(request) or (find if pull else writable)(request, name, revision)
    if isinstance(found, Answer):
        return found
    asked = request.json()
    held = found[1].tree.get(".gitignore")
    patterns = asked.get("gitIgnore", (held.data or b"").decode() if held else "").split()
    files = []
    for file in asked["files"]:
        assert len(decode(file["sample"])) <= 512
        there = found[1].tree.get(file["path"])
        ignored = any(re.fullmatch(p.replace(".", r"\.").replace("*", ".*"), file["path"]) for p in patterns)
        mode = upload_mode(file["path"], file["size"])
        answer = {"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored}
        files.append(answer | ({"oid": there.oid} if there else {}))
    return Answer(body={"files": files, "commitOid": found[1].oid})


def commit(request: Request, name: str, revision: str) -> Answer:
    """One commit, on a branch or as a new pull request; all of it or nothing."""
    pull = "create_pr" in request.query
    found = unauthorised(request) or (find if pull else writable)(request, name, revision)
    if isinstance(found, Answer):
        return found
    repository, parent = found
    head, *lines = [json.loads(line) for line in request.body.splitlines() if line]
    assert head["key"] == "header"
    if head["value"].get("parentCommit") not in (None, parent.oid):
        return refuse(412, "A commit has happened since. Please refresh and try again.")
    tree = dict(parent.tree)
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            data = decode(value["content"])
            tree[value["path"]] = Blob(git_oid(data), len(data), data)
        elif line["key"] == "lfsFile":
            if request.hub.mode == "lfs" and not request.hub.blob(value["oid"]).exists():
                return refuse(400, "LFS pointer pointed to a file that does not exist")
            tree[value["path"]] = Blob(value["oid"], value["size"])
        else:
            assert line["key"] == "deletedFile", line["key"]
            del tree[value["path"]]
    ref = revision
    if pull:
        ref = f"refs/pr/{len(repository.pulls) + 1}"
        repository.refs[ref] = parent.oid
        repository.pulls.append({"title": head["value"]["summary"], "status": "open", "base": revision})
    new = repository.add(ref, tree, head["value"]["summary"], head["value"].get("description", ""))
    body = {"success": True, "commitOid": new.oid, "commitUrl": f"{request.hub.url}/{name}/commit/{new.oid}"}
    if pull:
        body["pullRequestUrl"] = f"{request.hub.url}/{name}/discussions/{len(repository.pulls)}"
    return Answer(body=body)


def discussion(request: Request, name: str, number: str) -> Answer:
    """A pull request."""
    found = find(request, name)
    if isinstance(found, Answer):
        return found
    pull = found[0].pulls[int(number) - 1]
    body = {
        "title": pull["title"],
        "num": int(number),
        "status": pull["status"],
        "isPullRequest": True,
        "author": {"name": USER},
        "createdAt": "2026-01-01T00:00:00.000Z",
        "events": [],
        "changes": {"base": f"refs/heads/{pull['base']}"},
        "filesWithConflicts": False,
        "repo": {"name": name, "type": "model"},
    }
    return Answer(body=body)


def lfs_batch(request: Request, name: str) -> Answer:
    """Where to send each object; an object that is there already has nowhere to go."""
    if refusal := unauthorised(request):
        return refusal
    hub, objects = request.hub, []
    for asked in request.json()["objects"]:
        oid, size = asked["oid"], asked["size"]
        answer = {"oid": oid, "size": size}
        if not hub.blob(oid).exists():
            upload: dict[str, Any] = {"href": f"{hub.url}/_lfs/{oid}"}
            if hub.multipart and size > hub.multipart:
                count = -(-size // hub.multipart)
                parts = {str(n): f"{hub.url}/_lfs/{oid}/{n}" for n in range(1, count + 1)}
                header = {"chunk_size": str(hub.multipart), **parts}
                upload = {"href": f"{hub.url}/_lfs/{oid}/complete", "header": header}
            verify = {"href": f"{hub.url}/_lfs/{oid}/verify"}
            answer |= {"authenticated": True, "actions": {"upload": upload, "verify": verify}}
        objects.append(answer)
    multipart = any("header" in o.get("actions", {}).get("upload", {}) for o in objects)
    return Answer(body={"transfer": "multipart" if multipart else "basic", "objects": objects})


def lfs_store(request: Request, oid: str, data: bytes) -> Answer:
    """Keep an object whose bytes are what its name says."""
    if hashlib.sha256(data).hexdigest() != oid:
        return refuse(400, "the content does not have this sha256")
    request.hub.blob(oid).write_bytes(data)
    return Answer(body={"success": True})


def lfs_put(request: Request, oid: str) -> Answer:
    """An object in one part."""
    return lfs_store(request, oid, request.body)


def lfs_part(request: Request, oid: str, number: str) -> Answer:
    """One part of an object."""
    assert len(request.body) <= request.hub.multipart
    request.hub.parts[oid, int(number)] = request.body
    return Answer(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})


def lfs_complete(request: Request, oid: str) -> Answer:
    """All parts of an object, named with their ETags."""
    data = b""
    for number, part in enumerate(request.json()["parts"], 1):
        body = request.hub.parts[oid, number]
        assert part == {"partNumber": number, "etag": f'"{hashlib.md5(body).hexdigest()}"'}
        data += body
    return lfs_store(request, oid, data)


def lfs_verify(request: Request, oid: str) -> Answer:
    """Did it arrive?"""
    blob = request.hub.blob(oid)
    if not blob.exists() or blob.stat().st_size != request.json()["size"]:
        return refuse(404, "the object is not there")
    return Answer(body={"message": "ok"})


def xet_token(request: Request, name: str, kind: str, revision: str) -> Answer:
    """Where the content-addressed store is: a folder."""
    if "create_pr" in request.query and revision == "None":  # the pull request is not there yet
        revision = "main"
    found = unauthorised(request) or find(request, name, revision)
    if isinstance(found, Answer):
        return found
    if request.hub.mode != "xet":
        return refuse(404, "no Xet here")
    url, expires = f"local://{request.hub.folder / 'cas'}", int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": "store",
        "X-Xet-Token-Expiration": str(expires),
    }
    return Answer(body={"accessToken": "store", "casUrl": url, "exp": expires}, headers=headers)


def resolve(request: Request, name: str, revision: str, path: str) -> Answer:
    """The bytes of a file; those of a pointer are elsewhere."""
    found = find(request, name, revision)
    if isinstance(found, Answer):
        return found
    blob = found[1].tree.get(path)
    if blob is None:
        return refuse(404, "Entry not found", "EntryNotFound")
    headers = {"ETag": f'"{blob.oid}"', "X-Repo-Commit": found[1].oid, "Accept-Ranges": "bytes"}
    if blob.data is not None:
        return ranged(request, blob.data, headers)
    headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(blob.size)}
    elsewhere = request.hub.url.replace("127.0.0.1", "localhost")  # another host, as a content network is
    return Answer(302, headers={**headers, "Location": f"{elsewhere}/_content/{blob.oid}"})


def content(request: Request, oid: str) -> Answer:
    """The bytes of a pointer."""
    return ranged(request, request.hub.blob(oid).read_bytes(), {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})


def ranged(request: Request, data: bytes, headers: dict[str, str]) -> Answer:
    """``data``, or the part of it that was asked for."""
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range") or "")
    if not asked or asked.groups() == ("", ""):
        return Answer(200, data, headers)
    first, last = asked.groups()
    start = int(first) if first else max(0, len(data) - int(last))
    end = min(len(data), int(last) + 1) if first and last else len(data)
    if start >= len(data):
        return Answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
    part = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    return Answer(206, data[start:end], headers | part)


_LFS = r"/_lfs/(?P<oid>[0-9a-f]{64})"
ROUTES: tuple[Route, ...] = (
    ("GET", r"/api/agent-harnesses", harnesses),
    ("GET", r"/api/whoami-v2", whoami),
    ("POST", r"/api/repos/create", create),
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("GET", _MODEL, info),
    ("GET", _MODEL + r"/revision/(?P<revision>[^/]+)", info),
    ("GET", _MODEL + r"/tree/(?P<revision>[^/]+)", tree),
    ("POST", _MODEL + r"/paths-info/(?P<revision>[^/]+)", paths_info),
    ("GET", _MODEL + r"/refs", refs),
    ("POST", _MODEL + r"/branch/(?P<branch>[^/]+)", branch),
    ("POST", _MODEL + r"/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", _MODEL + r"/commit/(?P<revision>[^/]+)", commit),
    ("GET", _MODEL + r"/discussions/(?P<number>\d+)", discussion),
    ("GET", _MODEL + r"/xet-(?P<kind>read|write)-token/(?P<revision>[^/]+)", xet_token),
    ("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", _LFS, lfs_put),
    ("PUT", _LFS + r"/(?P<number>\d+)", lfs_part),
    ("POST", _LFS + r"/complete", lfs_complete),
    ("POST", _LFS + r"/verify", lfs_verify),
    ("GET", r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    ("GET", r"/_content/(?P<oid>[0-9a-f]{64})", content),
)
