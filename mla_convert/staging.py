"""Where an output grows until it is complete: a hidden folder beside the target, with a journal.

For a target ``out`` the staging folder is ``.out.mla-convert-partial`` and holds ``files/`` and ``journal``. The
journal's first line names the plan; each further line is one finished file. ``files/`` gets the name ``out`` in a
single rename at the very end, so an output that is not complete never has its final name.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mla_convert import __version__, storage
from mla_convert.errors import BadInputError, CannotError, UsageError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.manifest import read_manifest
from mla_convert.plan import Plan

JournalEntry = Mapping[str, Any]


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse an output path that cannot work, before any input is read.

    Raises:
        UsageError: The output is the input, inside it or around it; or it exists and may not be replaced.
        LocalIOError: It cannot be written to.
    """
    if os.path.lexists(source):
        relation = storage.same_or_nested(target, source)
        if relation and not (relation == "inside" and source.is_file()):
            where = {"same": "is", "inside": "lies inside", "around": "contains"}[relation]
            raise UsageError(
                f"the output {target} {where} the input {source}", hint="choose another output with -o"
            )
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UsageError(f"the output {target} exists and is not a folder", hint="choose another with -o")
    if target.is_dir() and any(target.iterdir()) and overwrite and not (target / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{target} holds files that this tool did not make (there is no {MANIFEST_NAME}); "
            "--overwrite will not delete them",
            hint="choose another output with -o, or empty the folder yourself",
        )
    storage.ensure_writable(target.parent)


def finished_already(target: Path, digest: str) -> bool:
    """True if ``target`` is the complete output of the plan with this digest."""
    try:
        manifest = read_manifest(target) if target.is_dir() else None
    except BadInputError:
        return False
    if manifest is None or manifest.plan != digest:
        return False
    sizes = {name: entry["size"] for name, entry in manifest.files.items()}
    return all(
        (target / name).is_file() and (target / name).stat().st_size == size for name, size in sizes.items()
    )


class Staging:
    """The staging folder of one run: ``with Staging(...) as staging``. Only one process may hold it.

    Attributes:
        files: Folder that becomes the output.
        done: Journal entries of files finished by an earlier run and still as it left them.
    """

    def __init__(self, target: Path, plan: Plan, *, restart: bool) -> None:
        self.target = target
        self.root = target.parent / f".{target.name}.mla-convert-partial"
        self.files = self.root / "files"
        self.done: dict[str, JournalEntry] = {}
        self._plan = plan
        self._restart = restart
        self._lock = storage.Lock(target.parent / f".{target.name}.mla-convert-lock", subject=target)
        self._journal = -1
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        """Lock the target and open the journal.

        Raises:
            CannotError: An unfinished run of another plan lies there.
            LocalIOError: Another process is writing this output.
        """
        with storage.os_errors(self.target.parent, "make"):
            self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock.__enter__()
        try:
            self._open()
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal >= 0:
            os.close(self._journal)
        self._lock.__exit__()

    @property
    def locks_supported(self) -> bool:
        """False on a network filesystem without locks."""
        return self._lock.supported

    def _open(self) -> None:
        head = self._head()
        path = self.root / "journal"
        with storage.os_errors(self.root, "make"):
            if self.root.exists():
                lines = _read_lines(path)
                if self._restart or not lines or not self._is_ours(lines[0], head):
                    shutil.rmtree(self.root)
                else:
                    self.done = {entry["file"]: entry for entry in lines[1:] if self._still_there(entry)}
            self.files.mkdir(parents=True, exist_ok=True)
            self._sweep()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._journal = os.open(path, flags, 0o666)
            if os.fstat(self._journal).st_size == 0:
                self._append(head)
                storage.fsync_directory(self.root)

    def _head(self) -> dict[str, Any]:
        return {
            "plan": self._plan.digest(),
            "operation": self._plan.operation,
            "options": dict(self._plan.options),
            "version": __version__,
            "source": self._plan.source_identity(),
        }

    def _is_ours(self, found: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
        if found.get("plan") == head["plan"] and found.get("version") == head["version"]:
            return True
        differs = [
            key for key in ("operation", "options", "version", "source") if found.get(key) != head[key]
        ]
        shown = [
            f"{key}: was {_brief(found.get(key))}, now {_brief(head[key])}"
            for key in differs
            if key != "source"
        ]
        if "source" in differs:
            shown.append("source: its files changed since")
        raise CannotError(
            f"an unfinished run of another plan lies in {self.root} ({'; '.join(shown) or 'the plan differs'})",
            hint="--restart discards it; the command it came from would finish it",
        )

    def _still_there(self, entry: Mapping[str, Any]) -> bool:
        try:
            status = (self.files / entry["file"]).stat()
            return bool(status.st_size == entry["size"] and status.st_mtime_ns == entry["mtime_ns"])
        except (OSError, KeyError, TypeError, ValueError):
            return False

    def _sweep(self) -> None:
        """Remove what a killed run left half written: everything that is not in the journal."""
        for folder, _, names in os.walk(self.files):
            for name in names:
                path = Path(folder, name)
                if path.relative_to(self.files).as_posix() not in self.done:
                    path.unlink()

    def record(self, name: str, **facts: Any) -> None:
        """Journal one finished file, which must be complete and flushed under its final name in ``files``."""
        status = (self.files / name).stat()
        self._append({"file": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns, **facts})

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        with self._writing, storage.os_errors(self.root / "journal", "write"):
            os.write(self._journal, line.encode("ascii"))
            storage.fsync_fd(self._journal)

    def publish(self, *, overwrite: bool) -> None:
        """Flush every folder and give ``files`` its final name."""
        for folder, _, _ in os.walk(self.files, topdown=False):
            storage.fsync_directory(Path(folder))
        if self.target.is_dir() and not any(self.target.iterdir()):
            with storage.os_errors(self.target, "replace"):
                self.target.rmdir()
        old = storage.publish_directory(self.files, self.target, replace=overwrite)
        with storage.os_errors(self.root, "remove"):
            if old is not None:
                shutil.rmtree(old)
            shutil.rmtree(self.root)

    def discard(self) -> None:
        """Remove the staging folder."""
        with storage.os_errors(self.root, "remove"):
            shutil.rmtree(self.root, ignore_errors=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The journal's entries up to the first damaged line; a kill may have cut the last one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    entries: list[dict[str, Any]] = []
    for line in data.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
    return entries


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
