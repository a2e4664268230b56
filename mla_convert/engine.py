"""Runs a plan: moves the bytes, safely and in bounded memory, and resumes what was interrupted.

Each file is one job for a pool of threads. Ranges that stay as they are move inside the kernel (reflink or
copy_file_range), so Python touches almost none of the bytes. Memory is a small buffer a worker, whatever the size.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from mla_convert import storage
from mla_convert.catalogue import OtherFile, SourceFile
from mla_convert.errors import BadInputError, DifferenceError, InterruptedRunError, LocalIOError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.manifest import new_manifest, pack, sha256_of
from mla_convert.plan import (
    CarriedFile,
    Copy,
    Dequantise,
    Inline,
    Plan,
    Requantise,
    RewrittenFile,
    TargetTensor,
)
from mla_convert.progress import Progress
from mla_convert.quant import decode_scales, dequantise_rows, requantise_rows
from mla_convert.staging import Staging, finished_already
from mla_convert.storage import LinkMode
from mla_convert.tensors import Run, byte_runs

#: Bytes read at a time when bytes pass through Python (hashes, computed pieces).
BUFFER = 4 << 20
#: Files smaller than this that are no weights are copied, so that editing one cannot change the source.
LINK_THRESHOLD = 16 << 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a plan. None of these changes a byte of the weights."""

    workers: int = 4
    link: LinkMode = LinkMode.AUTO
    overwrite: bool = False
    restart: bool = False
    checksum: bool = False
    resume_command: str | None = None
    on_step: Callable[[str], None] | None = None


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
    """Raised inside a worker when the run is to end."""


@dataclass(frozen=True, slots=True)
class _Range:
    """A run of bytes of one source file that becomes part of the file being written."""

    file: str
    run: Run


def run_plan(plan: Plan, target: Path, options: RunOptions, progress: Progress) -> RunReport:
    """Carry out ``plan`` so that ``target`` exists complete, or not at all.

    Raises:
        InterruptedRunError: Stopped by a signal; finished files are kept for the next run.
        BadInputError: The source changed meanwhile, or a guard does not hold.
        DifferenceError: A restored tensor does not have the hash that was recorded for it.
        LocalIOError: The file system refused.
    """
    report = RunReport(target)
    if finished_already(target, plan.digest()):
        report.already_done = True
        return report
    started = time.monotonic()
    with Staging(target, plan, restart=options.restart) as staging:
        if not staging.locks_supported:
            report.warnings.append("the file system has no locks: make sure that no other run writes there")
        _Run(plan, staging, options, progress, report).execute()
    report.seconds = time.monotonic() - started
    return report


class _Run:
    """One run of a plan. Methods that are jobs run on worker threads; everything shared is behind ``_tally``."""

    def __init__(
        self, plan: Plan, staging: Staging, options: RunOptions, progress: Progress, report: RunReport
    ) -> None:
        self.plan, self.staging, self.options = plan, staging, options
        self.progress, self.report = progress, report
        self._stop = threading.Event()
        self._tally = threading.Lock()
        self._hashes: dict[str, str] = {}
        self._kept: dict[str, bytes] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._reflinks = False

    def execute(self) -> None:
        """Guards, files, finish."""
        self._step("staged")
        with self._signals():
            self._check_guards()
            self._reflinks = self.options.link in (LinkMode.AUTO, LinkMode.REFLINK) and self._can_reflink()
            storage.preflight(self.staging.target.parent, self._space_needed())
            jobs = self._jobs()
            self.progress.start(self.plan.operation, self.plan.bytes_total, "bytes")
            try:
                self._work(jobs)
                self._finish()
            finally:
                self.progress.finish()

    def _step(self, name: str) -> None:
        if self.options.on_step:
            self.options.on_step(name)

    # Control

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first ^C (or SIGTERM, SIGHUP) ends the run in good order; the second one at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._stop.is_set():
                raise KeyboardInterrupt
            self._stop.set()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _work(self, jobs: list[Callable[[], None]]) -> None:
        pool = ThreadPoolExecutor(max_workers=self.options.workers, thread_name_prefix="mla-convert")
        try:
            futures = [pool.submit(job) for job in jobs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
            if failed:
                self._stop.set()
        finally:
            pool.shutdown(wait=True, cancel_futures=self._stop.is_set())
        errors = [future.exception() for future in futures if not future.cancelled()]
        real = [error for error in errors if error is not None and not isinstance(error, _StoppedError)]
        if real:
            raise real[0]
        if self._stop.is_set():
            self._interrupted()

    def _interrupted(self) -> None:
        finished = len(self.staging.done) + len(self._entries)
        total = len(self.plan.rewritten) + len(self.plan.carried)
        command = self.options.resume_command
        raise InterruptedRunError(
            f"stopped; {min(finished, total)} of {total} files are finished and kept",
            hint=f"resume with: {command}" if command else "run the same command again to resume",
        )

    def _advance(self, count: int) -> None:
        self.progress.advance(count)
        if self._stop.is_set():
            raise _StoppedError

    def _count(self, way: str, count: int) -> None:
        with self._tally:
            self.report.bytes_by_way[way] = self.report.bytes_by_way.get(way, 0) + count

    # Before

    def _check_guards(self) -> None:
        for guard in self.plan.guards:
            left = self._read_rows(guard.left, guard.left_row, guard.count)
            if left != self._read_rows(guard.right, guard.right_row, guard.count):
                raise BadInputError(
                    guard.otherwise, hint="the split checkpoint was changed; combine cannot choose for you"
                )

    def _read_rows(self, name: str, row: int, count: int) -> bytes:
        tensor = self.plan.catalogue.tensors[name]
        size = tensor.spec.row_nbytes
        with self._source(tensor.file) as fd:
            return _pread(fd, count * size, tensor.start + row * size, tensor.file)

    def _can_reflink(self) -> bool:
        """Try it once, on the smallest weight file."""
        files = sorted(self.plan.catalogue.files.values(), key=lambda file: file.identity.size)
        probe = self.staging.root / "probe"
        try:
            storage.clone_file(files[0].path, probe, LinkMode.REFLINK, on_bytes=lambda _: None)
        except LocalIOError:
            return False
        probe.unlink()
        return True

    def _space_needed(self) -> int:
        """Bytes that will take new space, leaving out what an earlier run wrote already."""
        rewritten = 0 if self._reflinks else self.plan.bytes_rewritten
        copied = self.options.link is LinkMode.COPY
        carried = sum(f.size for f in self.plan.carried if copied or not self._may_link(f))
        done = sum(int(entry["size"]) for entry in self.staging.done.values() if entry.get("way") != "hard")
        return max(0, rewritten + carried - done)

    @contextmanager
    def _source(self, name: str) -> Iterator[int]:
        fd = storage.open_source(self.plan.catalogue.files[name].path)
        try:
            yield fd
        finally:
            os.close(fd)

    # Jobs

    def _jobs(self) -> list[Callable[[], None]]:
        """Everything to do, the largest first; what the journal knows as finished is only counted."""
        todo: list[tuple[int, Callable[[], None]]] = []
        files: tuple[RewrittenFile | CarriedFile, ...] = (*self.plan.rewritten, *self.plan.carried)
        for file in files:
            entry = self.staging.done.get(file.name)
            if entry is not None and not (self.options.checksum and not entry.get("sha256")):
                self._entries[file.name] = {"size": entry["size"], "sha256": entry.get("sha256")}
                self.report.resumed_files += 1
                todo.append((0, partial(self.progress.advance, file.size)))
            elif isinstance(file, RewrittenFile):
                todo.append((file.size, partial(self._rewrite, file)))
            else:
                todo.append((file.size, partial(self._carry, file)))
        kept = set(self.plan.manifest.get("restore_tensors", ()))
        todo += [(0, partial(self._hash_tensor, name, name in kept)) for name in self.plan.hashed]
        return [job for _, job in sorted(todo, key=lambda item: -item[0])]

    def _may_link(self, file: CarriedFile) -> bool:
        return file.is_weights or file.size >= LINK_THRESHOLD

    def _carry(self, file: CarriedFile) -> None:
        path = self.staging.files / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        mode = self.options.link if self._may_link(file) else LinkMode.COPY
        way = storage.clone_file(file.path, path, mode, on_bytes=self._advance)
        self._count(way, file.size)
        self._finished(file.name, path, way)

    def _rewrite(self, file: RewrittenFile) -> None:
        path = self.staging.files / file.name
        temporary = path.with_name(f"{storage.TEMPORARY_PREFIX}{file.name}.tmp")
        with storage.os_errors(path, "write"):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                storage.preallocate(fd, file.size, reserve=not self._reflinks)
                os.pwrite(fd, file.header, 0)
                self._advance(len(file.header))
                shared = self._move_ranges(fd, file)
                self._compute_pieces(fd, file)
                self._check_hashes(fd, file)
                storage.fsync_fd(fd)
            finally:
                os.close(fd)
            self._step("written")
            temporary.rename(path)
        self._count("reflink", shared)
        self._count("rewrite", file.size - shared)
        self._finished(file.name, path, "rewrite")

    def _finished(self, name: str, path: Path, way: str) -> None:
        sha256 = self._hash_file(path) if self.options.checksum else None
        storage.fsync_directory(path.parent)
        self.staging.record(name, way=way, sha256=sha256)
        with self._tally:
            self._entries[name] = {"size": path.stat().st_size, "sha256": sha256}
        self._step("recorded")
        self.progress.note(f"{name}: {way}")

    def _move_ranges(self, fd: int, file: RewrittenFile) -> int:
        shared = 0
        opened: dict[str, int] = {}
        try:
            for piece in _merged(self._ranges(file)):
                if piece.file not in opened:
                    opened[piece.file] = storage.open_source(self.plan.catalogue.files[piece.file].path)
                run = piece.run
                shared += storage.copy_range(
                    opened[piece.file],
                    run.source,
                    fd,
                    run.target,
                    run.length,
                    reflink=self._reflinks,
                    on_bytes=self._advance,
                )
        finally:
            for source in opened.values():
                os.close(source)
        return shared

    def _ranges(self, file: RewrittenFile) -> Iterator[_Range]:
        for target, offset in file.placed():
            for piece in target.pieces:
                if not isinstance(piece, Copy):
                    continue
                source = self.plan.catalogue.tensors[piece.source]
                for run in byte_runs(source.spec, piece.box, target.spec, piece.at):
                    yield _Range(source.file, Run(source.start + run.source, offset + run.target, run.length))

    def _compute_pieces(self, fd: int, file: RewrittenFile) -> None:
        for target, offset in file.placed():
            for piece in target.pieces:
                if isinstance(piece, Copy):
                    continue
                data, row = self._computed(piece, target)
                os.pwrite(fd, data, offset + row * target.spec.row_nbytes)
                self._advance(len(data))

    def _computed(self, piece: Dequantise | Requantise | Inline, target: TargetTensor) -> tuple[bytes, int]:
        """The bytes of one computed piece and the row they start at."""
        if isinstance(piece, Inline):
            return piece.data, 0
        columns = target.spec.shape[1]
        codes = memoryview(self._read_rows(piece.source, piece.row, piece.count))
        if isinstance(piece, Dequantise):
            scale = self.plan.catalogue.tensors[piece.scale].spec
            stored = self._read_rows(piece.scale, piece.scale_row if scale.numel > 1 else 0, 1)
            scales = decode_scales(stored, scale.dtype)
            return bytes(dequantise_rows(codes, columns, scales, piece.block_columns)), piece.at
        scales = decode_scales(piece.scales, piece.scale_dtype)
        return bytes(requantise_rows(codes, columns, scales, piece.block_columns, target.spec.name)), piece.at

    # Hashes

    def _check_hashes(self, fd: int, file: RewrittenFile) -> None:
        """A restored tensor must be the one that was taken apart."""
        for target, offset in file.placed():
            if target.sha256 is None:
                continue
            found = _sha256_range(fd, offset, target.spec.nbytes, target.spec.name, self._check_stop)
            if found != target.sha256:
                raise DifferenceError(
                    f"{target.spec.name} does not come back as it was: sha256 {found[:16]}…, "
                    f"recorded {target.sha256[:16]}…",
                    hint="K or V was changed since the split; --ignore-manifest combines it as it is now",
                )

    def _check_stop(self, _: int = 0) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _hash_tensor(self, name: str, keep: bool) -> None:
        tensor = self.plan.catalogue.tensors[name]
        with self._source(tensor.file) as fd:
            found = _sha256_range(fd, tensor.start, tensor.spec.nbytes, name, self._check_stop)
            kept = _pread(fd, tensor.spec.nbytes, tensor.start, name) if keep else None
        with self._tally:
            self._hashes[name] = found
            if kept is not None:
                self._kept[name] = kept

    def _hash_file(self, path: Path) -> str:
        fd = storage.open_source(path)
        try:
            return _sha256_range(fd, 0, os.fstat(fd).st_size, path.name, self._check_stop)
        finally:
            os.close(fd)

    # After

    def _finish(self) -> None:
        self._check_source_unchanged()
        files = self.staging.files
        for generated in self.plan.generated:
            storage.write_file_atomic(files / generated.name, generated.data)
            self._entries[generated.name] = {"size": generated.size, "sha256": sha256_of(generated.data)}
            self.progress.advance(generated.size)
        for name, entry in self._entries.items():
            if entry["sha256"] is None and entry["size"] < LINK_THRESHOLD:
                entry["sha256"] = self._hash_file(files / name)
        storage.write_file_atomic(files / MANIFEST_NAME, self._manifest())
        self._step("finalised")
        if self._stop.is_set():
            self._interrupted()
        self.staging.publish(overwrite=self.options.overwrite)
        self._step("published")

    def _manifest(self) -> bytes:
        fixed = self.plan.manifest
        root = self.plan.catalogue.root.resolve()
        restore = {
            **fixed["restore"],
            "tensors": {name: pack(data) for name, data in sorted(self._kept.items())},
        }
        return new_manifest(
            operation=self.plan.operation,
            options=self.plan.options,
            layout=fixed["layout"],
            plan=self.plan.digest(),
            source={
                "path": os.path.relpath(root, self.staging.target.resolve()),
                "files": self.plan.source_identity(),
            },
            files=self._entries,
            restore=restore,
            blocks=fixed["blocks"],
            tensor_sha256=dict(sorted(self._hashes.items())),
        )

    def _check_source_unchanged(self) -> None:
        sources: tuple[SourceFile | OtherFile, ...] = (
            *self.plan.catalogue.files.values(),
            *self.plan.catalogue.others,
        )
        for file in sources:
            now, then = storage.identify(file.path), file.identity
            if (now.size, now.mtime_ns, now.inode) != (then.size, then.mtime_ns, then.inode):
                raise BadInputError(
                    f"{file.path} changed while it was being read; the output is not complete",
                    hint="run again with --restart once nothing writes to the source",
                )


def _merged(ranges: Iterator[_Range]) -> Iterator[_Range]:
    """Join runs that follow one another on both sides, so that untouched stretches move in one call."""
    last: _Range | None = None
    for piece in ranges:
        if last is not None and (
            piece.file == last.file
            and piece.run.source == last.run.source + last.run.length
            and piece.run.target == last.run.target + last.run.length
        ):
            last = _Range(
                last.file, Run(last.run.source, last.run.target, last.run.length + piece.run.length)
            )
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _pread(fd: int, count: int, offset: int, name: str) -> bytes:
    with storage.os_errors(name, "read"):
        parts = []
        while count:
            part = os.pread(fd, count, offset)
            if not part:
                raise BadInputError(
                    f"{name} ends early, at byte {offset}", hint="was it truncated meanwhile?"
                )
            parts.append(part)
            offset += len(part)
            count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sha256_range(fd: int, offset: int, length: int, name: str, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    end = offset + length
    while offset < end:
        data = _pread(fd, min(BUFFER, end - offset), offset, name)
        digest.update(data)
        offset += len(data)
        on_bytes(len(data))
    return digest.hexdigest()
