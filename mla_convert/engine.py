"""Runs a plan: moves the bytes, safely and in bounded memory, and resumes what was interrupted.

Each file is one job for a pool of threads. How a file is written is ``filling``'s business, which may be shared with
the source ``sharing``'s, what is checked and hashed on the way ``integrity``'s, and where it all grows until the
output is complete ``staging``'s. Several ranks share one plan: files are dealt out to them by size, and rank 0 does
what is to be done once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mla_convert import integrity, output_folder, sharing, storage
from mla_convert.errors import (
    BadInputError,
    ExitCode,
    InterruptedRunError,
    MlaConvertError,
)
from mla_convert.filling import fill
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.manifest import new_manifest, pack, sha256_of
from mla_convert.plan import CarriedFile, Plan, Replicas, RewrittenFile
from mla_convert.progress import Progress
from mla_convert.ranks import Ranks, deal
from mla_convert.signals import ending_in_order
from mla_convert.staging import Staging
from mla_convert.storage import LinkMode, Way

#: Files below the threshold for links are hashed unasked, the smallest first, up to this many bytes in all.
HASHED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a plan. None of these changes a byte of the weights.

    Attributes:
        workers: Files moved at a time.
        link: How unchanged weight files reach the output.
        overwrite: Replace an existing output of this tool.
        restart: Discard an unfinished run instead of resuming it.
        checksum: Read every file of the output and record its sha256.
        resume_command: What to type to go on after an interruption, for the message.
        together: Share the plan with the other processes that torchrun or srun started, all of which make this call.
        on_step: Told of every step, from any thread: ``staged``, for each file ``written`` (rewritten ones only)
            and ``recorded``, then ``finalised`` and ``published``.
    """

    workers: int = 4
    link: LinkMode = LinkMode.AUTO
    overwrite: bool = False
    restart: bool = False
    checksum: bool = False
    resume_command: str | None = None
    on_step: Callable[[str], None] | None = None
    together: bool = False


@dataclass(slots=True)
class RunReport:
    """What a run did. Byte counts are of file contents, by how they reached the output."""

    output: Path
    already_done: bool = False
    resumed_files: int = 0
    seconds: float = 0.0
    bytes_by_way: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class _StoppedError(Exception):
    """Raised where work goes on when the run is to end."""


def run_plan(
    plan: Plan, target: Path, options: RunOptions, progress: Progress, ranks: Ranks | None = None
) -> RunReport:
    """Carry out ``plan`` so that ``target`` exists complete, or not at all.

    Args:
        plan: What to do.
        target: The output folder.
        options: How to do it.
        progress: Who is told about progress.
        ranks: The ranks that carry it out together, all of which have the same plan; the report of rank 0 is on all
            of them.

    Raises:
        InterruptedRunError: Stopped by a signal; finished files are kept for the next run.
        BadInputError: The source changed meanwhile, or a guard does not hold.
        DifferenceError: A restored tensor does not have the hash that was recorded for it.
        CannotError: An unfinished run of another plan is in the way.
        UsageError: The target holds what may not be replaced.
        LocalIOError: The file system refused.
    """
    report, ranks = RunReport(target), ranks or Ranks()
    started = time.monotonic()
    with Staging(target, plan, restart=options.restart, overwrite=options.overwrite, ranks=ranks) as staging:
        report.already_done = staging.already_done
        if not staging.locks_supported:
            report.warnings.append("the file system has no locks: make sure that no other run writes there")
        try:
            if not staging.already_done:
                _Run(plan, staging, options, ranks.counting(progress), report, ranks).execute()
            elif options.checksum and ranks.leads:
                integrity.complete_checksums(target)
        except BaseException as error:
            if isinstance(error, MlaConvertError) and error.exit_code == ExitCode.DIFFERENT:
                staging.abandon()
            ranks.settle(error)  # nobody writes any more when the staging folder is left
            raise
    report.seconds = time.monotonic() - started
    return report


class _Run:
    """One run of a plan. Methods that are jobs run on worker threads; everything shared is behind ``_tally``."""

    def __init__(
        self,
        plan: Plan,
        staging: Staging,
        options: RunOptions,
        progress: Progress,
        report: RunReport,
        ranks: Ranks,
    ) -> None:
        self.plan, self.staging, self.options = plan, staging, options
        self.progress, self.report, self.ranks = progress, report, ranks
        self._files: tuple[RewrittenFile | CarriedFile, ...] = (*plan.rewritten, *plan.carried)
        self._stop = threading.Event()
        self._tally = threading.Lock()
        self._hashes: dict[str, str] = {}
        self._kept: dict[str, bytes] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._way: Way = "copy"

    def execute(self) -> None:
        """Guards, files, finish."""
        self._step("staged")
        self.ranks.attach(self._stop, self._check_stop)
        probe = self.staging.files / f"{storage.TEMPORARY_PREFIX}probe-{self.ranks.number}"
        self._way = sharing.best_way(self.plan.catalogue, probe, self.options.link)
        if self.ranks.leads:
            integrity.check_guards(self.plan)
            left = [file for file in self._files if file.name not in self.staging.done]
            sizes = [generated.size for generated in self.plan.generated]
            need = sharing.space_needed(left, sizes, self._way)
            output_folder.preflight(self.staging.target.parent, need)
        try:
            with ending_in_order(self._on_signal):
                jobs = self._jobs(self._dealt())
                self.progress.start(self.plan.operation, self.plan.bytes_total, "bytes")
                self.ranks.count_all()
                self._check_replicas()
                self._work(jobs)
                self._collect()
                if self.ranks.leads:
                    self._finish()
                self.ranks.tell()
        except _StoppedError:
            self.ranks.check()
            self._interrupted()
        finally:
            self.progress.finish()

    def _step(self, name: str) -> None:
        if self.options.on_step:
            self.options.on_step(name)

    # Control

    def _on_signal(self) -> None:
        self._stop.set()
        self.progress.finish()  # gives the cursor back before a second signal ends the process

    def _work(self, jobs: list[Callable[[], None]]) -> None:
        pool = ThreadPoolExecutor(max_workers=self.options.workers, thread_name_prefix="mla-convert")
        try:
            futures = [pool.submit(self._one_of_many, job) for job in jobs]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            self._stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        errors = [future.exception() for future in futures if not future.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, _StoppedError):
                raise error
        self._check_stop()

    def _one_of_many(self, job: Callable[[], None]) -> None:
        """A job that is not begun once the run is to end, and that ends the run if it fails."""
        self._check_stop()
        try:
            job()
        except BaseException:
            self._stop.set()
            raise

    def _check_stop(self, _: int = 0) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _interrupted(self) -> NoReturn:
        finished = self.staging.finished
        command = self.options.resume_command
        raise InterruptedRunError(
            f"stopped; {finished} of {len(self._files)} files are finished and kept",
            hint=f"resume with: {command}" if command else "run the same command again to resume",
        ) from None

    def _advance(self, count: int) -> None:
        self.progress.advance(count)
        self._check_stop()

    def _count(self, way: str, count: int) -> None:
        with self._tally:
            self.report.bytes_by_way[way] = self.report.bytes_by_way.get(way, 0) + count

    # Before

    def _check_replicas(self) -> None:
        """What every rank holds in full must be the same on all of them, by its hash."""
        sizes = [self._catalogue_bytes(one) for one in self.plan.replicas]
        mine = [self.plan.replicas[index] for index in deal(sizes, self.ranks.count)[self.ranks.number]]
        found: dict[str, str] = {}

        def hash_one(key: str) -> None:
            digest = integrity.hash_tensor(self.plan.catalogue, key, self._check_stop)
            with self._tally:
                found[key] = digest

        self._work([partial(hash_one, key) for one in mine for key in one.keys])
        details = integrity.differing_replicas(mine, found)
        details = [text for each in self.ranks.gather(details) for text in each]
        if details:
            raise BadInputError(
                f"{len(details)} of {len(self.plan.replicas)} tensors that every rank holds are not the same on all "
                f"ranks; {details[0]}",
                hint="the ranks were not saved together, or one was trained on; none of them can be chosen for you",
                details=details,
            )
        self.ranks.tell()

    def _catalogue_bytes(self, one: Replicas) -> int:
        return sum(self.plan.catalogue.tensors[key].spec.nbytes for key in one.keys)

    # Jobs

    def _dealt(self) -> set[int]:
        """The files that this rank makes, by their place in the plan: rank 0 knows which are finished."""
        left = [index for index, file in enumerate(self._files) if file.name not in self.staging.done]
        hashed = sum(self.plan.catalogue.tensors[name].spec.nbytes for name in self.plan.hashed)
        hands = deal([self._files[index].size for index in left], self.ranks.count, [hashed])
        dealt: list[list[int]] = self.ranks.tell([[left[place] for place in hand] for hand in hands])
        return set(dealt[self.ranks.number])

    def _jobs(self, mine: Collection[int]) -> list[Callable[[], None]]:
        """Everything that this rank does, the largest first; what the journal knows as finished is only counted."""
        todo: list[tuple[int, Callable[[], None]]] = []
        for index, file in enumerate(self._files):
            entry = self.staging.done.get(file.name)
            if entry is not None:
                self.report.resumed_files += 1
                todo.append((0, partial(self.progress.advance, file.size)))
                if self.options.checksum and not entry["sha256"]:
                    todo.append((file.size, partial(self._finished, file.name, entry["way"])))
                else:
                    self._entries[file.name] = {"size": file.size, "sha256": entry["sha256"]}
            elif index not in mine:
                continue
            elif isinstance(file, RewrittenFile):
                todo.append((file.size, partial(self._rewrite, file)))
            else:
                todo.append((file.size, partial(self._carry, file)))
        if not self.ranks.leads:
            return [job for _, job in sorted(todo, key=lambda item: -item[0])]
        kept = set(self.plan.manifest.get("restore_tensors", ()))
        todo += [(0, partial(self._hash_tensor, name, name in kept)) for name in self.plan.hashed]
        return [job for _, job in sorted(todo, key=lambda item: -item[0])]

    def _carry(self, file: CarriedFile) -> None:
        path = self.staging.files / file.name
        with storage.os_errors(path.parent, "make"):
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = self.options.link if sharing.may_link(file) else LinkMode.COPY
        way = storage.clone_file(file.path, path, mode, on_bytes=self._advance)
        self._count(way, file.size)
        self._finished(file.name, way)

    def _rewrite(self, file: RewrittenFile) -> None:
        path = self.staging.files / file.name
        reflink = self._way == "reflink"
        with storage.os_errors(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                storage.preallocate(fd, file.size, reserve=not reflink)
                shared = fill(fd, file, self.plan.catalogue, reflink=reflink, on_bytes=self._advance)
                integrity.check_restored(fd, file, self._check_stop)
                storage.fsync_fd(fd)
            except BaseException:
                path.unlink(missing_ok=True)  # the disk may be full: leave nothing that is of no use
                raise
            finally:
                os.close(fd)
        self._step("written")
        self._count("reflink", shared)
        self._count("rewrite", file.size - shared)
        self._finished(file.name, "rewrite")

    def _finished(self, name: str, way: str) -> None:
        path = self.staging.files / name
        sha256 = self._hash_file(path) if self.options.checksum else None
        self.staging.record(name, way=way, sha256=sha256)
        with self._tally:
            self._entries[name] = {"size": path.stat().st_size, "sha256": sha256}
        self._step("recorded")
        self.progress.note(f"{name}: {way}")

    def _hash_tensor(self, name: str, keep: bool) -> None:
        digest = integrity.hash_tensor(self.plan.catalogue, name, self._check_stop)
        data = integrity.read_tensor(self.plan.catalogue, name) if keep else None
        with self._tally:
            self._hashes[name] = digest
            if data is not None:
                self._kept[name] = data

    def _hash_file(self, path: Path) -> str:
        return integrity.hash_file(path, self._check_stop)

    # After

    def _collect(self) -> None:
        """Rank 0 learns what the others did."""
        if not self.ranks.leads:
            storage.sync_filesystem(self.staging.files)  # what rank 0 will flush is its own machine's
        done = {
            "entries": self._entries,
            "ways": self.report.bytes_by_way,
            "bytes": self.ranks.counted,
        }
        reports: list[dict[str, Any]] = self.ranks.gather(done)
        for report in reports[1:]:
            self._entries |= report["entries"]
            for way, count in report["ways"].items():
                self._count(way, count)
        self.ranks.count_all([report["bytes"] for report in reports])
        missing = [file.name for file in self._files if file.name not in self._entries]
        if self.ranks.leads and missing:
            raise ValueError(f"{len(missing)} files were made by no rank, {missing[0]} among them")

    def _finish(self) -> None:
        self._check_source_unchanged()
        files = self.staging.files
        for generated in self.plan.generated:
            storage.write_file_atomic(files / generated.name, generated.data)
            self._entries[generated.name] = {"size": generated.size, "sha256": sha256_of(generated.data)}
            self.progress.advance(generated.size)
        budget = HASHED_BYTES
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1]["size"], item[0])):
            budget -= entry["size"]
            if entry["sha256"] is None and entry["size"] < sharing.LINK_THRESHOLD and budget >= 0:
                entry["sha256"] = self._hash_file(files / name)
        storage.write_file_atomic(files / MANIFEST_NAME, self._manifest())
        self._step("finalised")
        self._check_stop()
        for left in self.staging.publish():
            self.report.warnings.append(f"{left} could not be removed; nothing needs it any more")
        self._step("published")

    def _manifest(self) -> bytes:
        fixed, catalogue = self.plan.manifest, self.plan.catalogue
        root = catalogue.origin or os.path.relpath(catalogue.root.resolve(), self.staging.target.resolve())
        restore = {
            **fixed["restore"],
            "tensors": {name: pack(data) for name, data in sorted(self._kept.items())},
        }
        return new_manifest(
            operation=self.plan.operation,
            options=self.plan.options,
            layout=fixed["layout"],
            plan=self.staging.digest,
            source={
                # JSON is UTF-8 and paths need not be: such a path is recorded as one that leads nowhere.
                "path": os.fsencode(root).decode("utf-8", "replace"),
                "files": self.plan.source_identity(),
            },
            files=self._entries,
            restore=restore,
            blocks=fixed["blocks"],
            tensor_sha256=dict(sorted(self._hashes.items())),
        )

    def _check_source_unchanged(self) -> None:
        if changed := integrity.changed_sources(self.plan.catalogue):
            self.staging.abandon()
            raise BadInputError(
                f"the source {self.plan.catalogue.root} changed while it was being read; there is no output",
                hint="run again once nothing writes to it",
                details=changed,
            )
