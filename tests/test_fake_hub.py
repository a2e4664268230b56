"""The fake Hub itself: the real client can use it, and it notices what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversions import environment
from fake_hub import FakeHub, running_hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with running_hub(tmp_path / "hub") as hub:
        yield hub


def client(hub: FakeHub, script: str, **changes: str) -> Any:
    """Run a script with ``api``; what it leaves in ``found`` comes back."""
    code = f"import json\nfrom huggingface_hub import *\napi = HfApi()\n{script}\nprint(json.dumps(found))"
    env = environment(**hub.environment(**changes))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_downloads(hub: FakeHub) -> None:
    """Headers, redirects and ranges are as the client wants them."""
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 100, "code/x.py": b"pass"}
    hub.add_repository("org/name", files)
    script = """
from pathlib import Path
folder = Path(snapshot_download("org/name"))
url = hf_hub_url("org/name", "model.safetensors")
some = get_session().get(url, headers={"Range": "bytes=1-3"}, follow_redirects=True)
meta = get_hf_file_metadata(url)
found = {
    "files": {str(p.relative_to(folder)): p.read_bytes().hex() for p in folder.rglob("*") if p.is_file()},
    "some": [some.status_code, some.content.hex()], "size": meta.size, "etag": meta.etag,
    "exists": [file_exists("org/name", "config.json"), file_exists("org/name", "x"), repo_exists("org/no")],
}
"""
    found = client(hub, script)
    expected = {path: data.hex() for path, data in files.items()}
    assert {name: text for name, text in found["files"].items() if name != ".gitattributes"} == expected
    assert found["some"] == [206, "010203"]
    assert found["size"] == 25600
    assert found["exists"] == [True, False, False]
    assert hub.files("org/name") == files


@pytest.mark.parametrize("mode", ["lfs", "multipart", "xet"])
def test_uploads(tmp_path: Path, mode: str) -> None:
    """The client's own way to upload a folder ends in one commit of these bytes."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 1000)
    (folder / "b.txt").write_bytes(b"b")
    how = "xet" if mode == "xet" else "lfs"
    with running_hub(tmp_path / "hub", how, multipart=70_000 if mode == "multipart" else 0) as hub:
        script = f"""
api.create_repo("org/name", private=True)
found = api.upload_folder(folder_path={str(folder)!r}, repo_id="org/name").commit_url
"""
        assert client(hub, script).startswith(f"{hub.url}/org/name/commit/")
        assert len(hub.commits("org/name")) == 1
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert hub.files("org/name", local=folder) == files
        assert bool(hub.called("GET", "xet-write-token")) == (mode == "xet")
        assert bool(hub.called("PUT", r"_lfs/\w+/4$")) == (mode == "multipart")


def test_an_unknown_route_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no route for"), running_hub(tmp_path / "hub") as hub:
        client(hub, "found = get_session().get(api.endpoint + '/api/surprise').status_code")


@pytest.mark.parametrize("way", ["socket", "proxy"])
def test_leaving_the_machine_fails_the_test(tmp_path: Path, way: str) -> None:
    script = """
import socket
try: socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error: found = str(error)
"""
    if way == "proxy":
        script = "found = get_session().get('http://192.0.2.1/').status_code"
    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"), running_hub(tmp_path / "hub") as hub:
        client(hub, script)


def test_faults(hub: FakeHub) -> None:
    hub.add_repository("org/name")
    hub.fail("GET", "/api/models/org/name$", n=2, status=418)
    hub.fail("GET", "/api/models/org/name$", "drop", n=3)
    hub.fail("POST", "/api/repos/create", "lose")
    script = """
found = []
for call in [lambda: api.model_info("org/name")] * 4 + [lambda: api.create_repo("org/new")] * 2:
    try: call(); found.append("fine")
    except Exception as error: found.append(getattr(getattr(error, "response", None), "status_code", None))
"""
    assert client(hub, script) == ["fine", 418, None, "fine", None, 409]
