"""What the tests of ``push`` share: a small verified checkpoint, the real command against the fake Hub."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from conversions import contents, environment, manifest, run_process, write_checkpoint
from fake_hub import TOKEN, FakeHub

from mla_convert import api

REPO = "tester/model-split"
VERIFICATION = {
    "passed": True,
    "version": "0.1.0",
    "against": "the manifest's source, unchanged",
    "settings": {
        "version": "0.1.0",
        "tp": 2,
        "tokens": 128,
        "dtype": "float32",
        "backend": "reference",
        "devices": ["CPU"],
        "blocks": 3,
        "blocks_in_checkpoint": 3,
    },
    "ran": {"absorbed": "reference"},
    "checks": [["structure", "index", True, "14 tensors"], ["bytes", "K and V rows", True, "3 of 3 blocks"]],
    "worst": {"prefix": "model.layers.0.", "cosine": 0.99999, "absorbed": 1e-7, "standard": 1e-7},
}


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Change fields of a manifest; None removes one."""
    value = {**manifest(folder), **changes}
    kept = {name: field for name, field in value.items() if field is not None}
    (folder / "mla-convert.json").write_text(json.dumps(kept, indent=2))


def make_output(folder: Path, *, readme: bytes | None = None) -> Path:
    """A split checkpoint whose verification is on record."""
    source = write_checkpoint(folder / "model")
    if readme is not None:
        (source / "README.md").write_bytes(readme)
    output = folder / "model-split"
    api.split(source, output)
    shutil.rmtree(source)
    edit_manifest(output, verification=VERIFICATION)
    return output


def push(
    hub: FakeHub, *arguments: str | Path, code: int = 0, **changes: str
) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own; it must end with ``code`` and never show the token."""
    done = run_process("push", *arguments, env=hub.environment(**changes))
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    if code:
        assert done.stdout == ""
    return done


def expected_files(output: Path) -> dict[str, bytes]:
    """The files of the manifest, as they lie on disk; README.md and the manifest itself are looked at apart."""
    names = manifest(output)["files"].keys() - {"README.md"}
    return {name: data for name, data in contents(output).items() if name in names}


def assert_pushed(
    hub: FakeHub, output: Path, ref: str = "main", *, repo: str = REPO, commits: int = 1
) -> None:
    """The ref has so many commits, and its files are those of the manifest, byte for byte."""
    assert len(hub.commits(repo, ref)) == commits
    there = hub.files(repo, ref, local=output)
    there.pop("README.md", None)
    published = json.loads(there.pop("mla-convert.json"))
    assert there == expected_files(output)
    for name, entry in published["files"].items():
        assert entry["sha256"] is not None, name
    local = manifest(output)
    assert published["files"].keys() == local["files"].keys()
    assert {**published, "files": 0, "source": 0} == {**local, "files": 0, "source": 0}


def assert_not_pushed(hub: FakeHub, *, repo: str = REPO) -> None:
    """There is no commit: no repository, or one as the Hub makes it."""
    repository = hub.repositories.get(repo)
    assert repository is None or all(not hub.commits(repo, ref) for ref in repository.refs)


def change_shard(output: Path, name: str, *, seed: int = 7) -> None:
    """Other bytes of the same size in a shard, known to the manifest: a later conversion."""
    path = output / name
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + random.Random(seed).randbytes(len(data) - start))
    entries = manifest(output)["files"]
    entries[name]["sha256"] = None
    edit_manifest(output, files=entries)


def add_file(output: Path, name: str, data: bytes) -> None:
    """One file more (or another), in the folder and in the manifest, without a hash."""
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_bytes(data)
    files = {**manifest(output)["files"], name: {"size": len(data), "sha256": None}}
    edit_manifest(output, files=files)


def plain_environment(hub: FakeHub, **changes: str) -> dict[str, str]:
    """The whole environment of a child process."""
    return environment(**hub.environment(**changes))


#: Imports everything once, then runs the command in a fork for each line of stdin: a push takes a third of the time.
_CLIENT = """
import json, os, sys, traceback
import huggingface_hub.hf_api, huggingface_hub._commit_api
import mla_convert.push, mla_convert.render, rich.console, rich.table, rich.text, yaml
from mla_convert.cli import main
for line in sys.stdin:
    words, out, err = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.argv = ["mla-convert", *words]
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Client:
    """Runs the command again and again against one Hub, quicker than ``push``; used as a context."""

    def __init__(self, hub: FakeHub) -> None:
        self.hub = hub
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            env=plain_environment(hub),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0

    def push(self, *arguments: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """As :func:`push`; any code will do if it is None."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        out, err = (self.hub.folder / name for name in ("stdout", "stderr"))
        words = ["push", *map(str, arguments)]
        process.stdin.write(json.dumps([words, str(out), str(err)]) + "\n")
        process.stdin.flush()
        found = int(process.stdout.readline())
        done = subprocess.CompletedProcess(words, found, out.read_text(), err.read_text())
        assert code in (None, found), (found, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done
