"""Where an output grows until it is complete: a hidden folder beside the target, with a journal.

For a target ``out`` the staging folder is ``.out.mla-convert-partial`` and holds ``files/`` and ``journal``. The
journal's first line names the plan; each further line is one finished file. ``files/`` gets the name ``out`` in a
single rename at the very end, so an output that is not complete never has its final name. Whatever is in ``files/``
and not in the journal was cut short, and is removed before work goes on.

Where several ranks work on one output, rank 0 opens, sweeps and publishes; every other rank ``n`` has a lock and a
journal (``journal.n``) of its own, whose lines the next run takes into the first one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from mla_convert import __version__, output_folder, storage
from mla_convert.errors import BadInputError, CannotError, LocalIOError, UsageError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.journal import FLUSHED_BYTES, Journal, JournalEntry, read_journal
from mla_convert.manifest import Manifest, read_manifest
from mla_convert.plan import Plan
from mla_convert.ranks import Ranks


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse an output path that cannot work, before any input is read.

    Raises:
        UsageError: The output is the input, inside it or around it; or it holds what may not be replaced.
        LocalIOError: It cannot be written to.
    """
    relation = output_folder.same_or_nested(target, source)
    if relation and not (relation == "inside" and source.is_file()):
        where = {"same": "is", "inside": "lies inside", "around": "contains"}[relation]
        raise UsageError(
            f"the output {target} {where} the input {source}", hint="choose another output with -o"
        )
    with storage.os_errors(target, "examine"):
        if target.is_symlink():
            raise UsageError(
                f"the output {target} is a symbolic link", hint="give -o the path that it leads to"
            )
        if target.exists() and not target.is_dir():
            raise UsageError(f"the output {target} exists and is not a folder", hint="choose another with -o")
        if os.path.ismount(target):
            raise UsageError(
                f"the output {target} is a mount point, and no folder can take its place",
                hint=f"choose a folder inside it, such as -o {target / (source.name or 'model')}",
            )
        is_ours = (target / MANIFEST_NAME).is_file()
    if not is_ours:
        check_replaceable(target, overwrite=overwrite)
    output_folder.ensure_writable(target.parent)


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Refuse a target folder unless it is absent, empty, or a replaceable output of this tool.

    Raises:
        UsageError: What it holds may not be replaced; the message says by which option it could be, if any.
    """
    with storage.os_errors(target, "examine"):
        if not target.is_dir() or not any(target.iterdir()):
            return
    manifest = _manifest_of(target)
    if manifest is None:
        raise UsageError(
            f"{target} is not empty, and this tool did not make what is in it (no sound {MANIFEST_NAME}), "
            "so nothing will be overwritten",
            hint="choose another output with -o, or remove the folder yourself",
        )
    if not overwrite:
        raise UsageError(
            f"{target} exists: it is the output of another `{manifest.operation}`, or was changed since",
            hint="choose another output with -o, replace it with --overwrite, or remove it",
        )
    known = {MANIFEST_NAME, *manifest.files}
    with storage.os_errors(target, "examine"):
        strangers = sorted(name for name in _file_names(target) if name not in known)
    if strangers:
        raise UsageError(
            f"{target} also holds files that this tool did not make ({len(strangers)}); --overwrite would "
            "delete them",
            hint="move them out first, or choose another output with -o",
            details=strangers,
        )


def staging_folder(target: Path) -> Path:
    """Where an output grows."""
    return target.parent / f".{target.name}.mla-convert-partial"


def finished_already(target: Path, digest: str) -> bool:
    """True if ``target`` is the complete output of the plan with this digest."""
    manifest = _manifest_of(target)
    if manifest is None or manifest.plan != digest:
        return False
    try:
        return all((target / name).stat().st_size == entry["size"] for name, entry in manifest.files.items())
    except (OSError, ValueError):
        return False


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except BadInputError:
        return None


def _file_names(folder: Path) -> Iterable[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name).relative_to(folder).as_posix()


class Staging:
    """The staging folder of one run: ``with Staging(...) as staging``. Only the ranks of one run may hold it.

    It stays for the next run only if that can use it: one finished file, and no call of ``abandon``.

    Attributes:
        digest: The plan's digest.
        already_done: True, once entered, if the target is this plan's complete output; nothing is staged then.
        files: Folder that becomes the output.
        done: Journal entries of files finished by an earlier run and still as it left them.
    """

    def __init__(
        self, target: Path, plan: Plan, *, restart: bool, overwrite: bool, ranks: Ranks | None = None
    ) -> None:
        self.target = target
        self.root = staging_folder(target)
        self.files = self.root / "files"
        self.digest = plan.digest()
        self.already_done = False
        self.done: dict[str, JournalEntry] = {}
        self._plan, self._ranks = plan, ranks or Ranks()
        self._restart, self._overwrite = restart, overwrite
        self._lock = self._lock_of(self._ranks.number)
        self._journal: Journal | None = None
        self._is_worth_keeping = False
        self._is_abandoned = False

    def __enter__(self) -> Self:
        """Lock the target and open the journal.

        Raises:
            CannotError: An unfinished run of another plan lies there.
            UsageError: The target holds what may not be replaced.
            LocalIOError: Another process is writing this output, or it is not where all ranks see it.
        """
        with storage.os_errors(self.target.parent, "make"):
            self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock.__enter__()
        try:
            self._ranks.gather(None)  # from here on every rank has its lock
            if self._ranks.leads:
                self._lead()
            self.already_done = bool(self._ranks.tell(self.already_done))
            if not self._ranks.leads and not self.already_done:
                self._follow()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
            keep = self._is_worth_keeping or (self._ranks.count > 1 and any(self._recorded_by_others()))
            if self._ranks.leads and (self._is_abandoned or not keep):
                shutil.rmtree(self.root, ignore_errors=True)
        self._lock.__exit__()

    @property
    def locks_supported(self) -> bool:
        """False on a network filesystem without locks."""
        return self._lock.supported

    def abandon(self) -> None:
        """What is finished is of no use to a later run: let it go at the end."""
        self._is_abandoned = True

    @property
    def finished(self) -> int:
        """How many files are finished, by whichever rank and run."""
        own = len({entry["file"] for entry in read_journal(self.root / "journal")[0][1:]} - self.done.keys())
        return len(self.done) + own + sum(1 for _ in self._recorded_by_others())

    # Opening

    def _lock_of(self, rank: int) -> output_folder.Lock:
        name = f".{self.target.name}.mla-convert-lock" + (f".{rank}" if rank else "")
        return output_folder.Lock(self.target.parent / name, subject=self.target)

    def _lead(self) -> None:
        self._refuse_strays()
        self.already_done = finished_already(self.target, self.digest)
        if self.already_done:
            self._clear_leftovers()
        else:
            check_replaceable(self.target, overwrite=self._overwrite)
            self._open()

    def _refuse_strays(self) -> None:
        """A rank of a run that lost its rank 0 may still be writing."""
        for rank in _numbers(self.target.parent, f".{self.target.name}.mla-convert-lock."):
            if rank >= self._ranks.count:
                with self._lock_of(rank):
                    pass

    def _follow(self) -> None:
        if not self.files.is_dir():
            raise LocalIOError(
                f"{self.files} was made by rank 0 and is not there for rank {self._ranks.number}",
                hint="the output has to lie on a file system that all ranks share",
            )
        self._journal = Journal(self._journal_of(self._ranks.number))

    def _journal_of(self, rank: int) -> Path:
        return self.root / (f"journal.{rank}" if rank else "journal")

    def _recorded_by_others(self) -> Iterable[JournalEntry]:
        """What other ranks than 0 have finished, in this run or in one before that was not resumed yet."""
        for rank in _numbers(self.root, "journal."):
            yield from read_journal(self._journal_of(rank))[0]

    def _open(self) -> None:
        path = self._journal_of(0)
        with storage.os_errors(self.root, "make"):
            lines, end = read_journal(path)
            if lines and not self._restart and not self._is_leftover(lines[0]):
                self._require_same_plan(lines[0])
                more = list(self._recorded_by_others())
                self.done = self._usable([*lines[1:], *more])
            else:
                end, more = 0, []
                if self.root.exists():
                    shutil.rmtree(self.root)
            self.files.mkdir(parents=True, exist_ok=True)
            self._sweep()
        self._journal = Journal(path, end)
        self._is_worth_keeping = bool(self.done)
        if not end:
            self._journal.append(self._head(), worth=FLUSHED_BYTES)
        for entry in more:
            self._journal.append(entry, worth=0)
        if more:
            storage.sync_filesystem(self.root)
        for rank in _numbers(self.root, "journal."):
            self._journal_of(rank).unlink()
        storage.fsync_directory(self.root)

    def _head(self) -> dict[str, Any]:
        return {
            "plan": self.digest,
            "operation": self._plan.operation,
            "options": dict(self._plan.options),
            "version": __version__,
            "origin": self._plan.catalogue.origin,
            "source": self._plan.source_identity(),
        }

    def _is_leftover(self, head: Mapping[str, Any]) -> bool:
        """Was this folder's run killed after it had published its output?"""
        return finished_already(self.target, str(head.get("plan")))

    def _clear_leftovers(self) -> None:
        """The target is complete: remove what its run had no time to. Another plan's unfinished run stays."""
        lines, _ = read_journal(self._journal_of(0))
        if not lines or lines[0].get("plan") == self.digest:
            shutil.rmtree(self.root, ignore_errors=True)

    def _require_same_plan(self, found: Mapping[str, Any]) -> None:
        head = self._head()
        if found.get("plan") == head["plan"] and found.get("version") == head["version"]:
            return
        differs = [
            f"{key}: was {_brief(found.get(key))}, now {_brief(head[key])}"
            for key in ("operation", "options", "version", "origin")
            if found.get(key) != head[key]
        ]
        then, now = found.get("source"), head["source"]
        if then != now:
            then = then if isinstance(then, dict) else {}
            changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
            differs.append(f"source: {', '.join(changed[:3])}{' and others' * (len(changed) > 3)} changed")
        raise CannotError(
            f"an unfinished run of another plan lies in {self.root} ({'; '.join(differs) or 'the plan differs'})",
            hint="--restart discards it; the command it came from would finish it",
        )

    def _usable(self, entries: Iterable[JournalEntry]) -> dict[str, JournalEntry]:
        """The entries of planned files that are still as the journal says."""
        sizes = {file.name: file.size for file in self._plan.rewritten}
        sizes |= {file.name: file.size for file in self._plan.carried}
        usable = {}
        for entry in entries:
            name = entry.get("file")
            try:
                status = (self.files / str(name)).stat()
            except (OSError, ValueError):
                continue
            if (status.st_size, status.st_mtime_ns) == (sizes.get(str(name)), entry.get("mtime_ns")):
                usable[str(name)] = entry
        return usable

    def _sweep(self) -> None:
        """Remove what a killed run left half written: everything that is not in the journal."""
        for name in list(_file_names(self.files)):
            if name not in self.done:
                (self.files / name).unlink()

    # Working

    def record(self, name: str, *, way: str, sha256: str | None) -> None:
        """Journal one finished file, which must be complete under its final name in ``files``.

        Bytes that were moved must have been flushed. Their line is once it stands for enough of them: should the power
        fail before, those files are made again, as links are.
        """
        status = (self.files / name).stat()
        entry = {"file": name, "mtime_ns": status.st_mtime_ns, "way": way, "sha256": sha256}
        if self._journal is None:
            raise ValueError("the staging folder is not open")
        self._journal.append(entry, worth=status.st_size if way in ("rewrite", "copy") else 0)
        self._is_worth_keeping = True

    def publish(self) -> list[Path]:
        """Flush everything, give ``files`` its final name, and clean up.

        Returns:
            What could not be cleaned up; the output is complete all the same.
        """
        storage.sync_filesystem(self.files)
        check_replaceable(self.target, overwrite=self._overwrite)
        with storage.os_errors(self.target, "replace"):
            if self.target.is_dir() and not any(self.target.iterdir()):
                self.target.rmdir()
        old = output_folder.publish_directory(self.files, self.target, replace=self._overwrite)
        return [path for path in (old, self.root) if path is not None and not _removed(path)]


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def _numbers(folder: Path, prefix: str) -> list[int]:
    """The numbers that follow ``prefix`` in names of a folder."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    ends = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(end) for end in ends if end.isdigit())


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
