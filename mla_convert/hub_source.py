"""Checkpoints on the Hub as sources: ``hf://org/name[@revision]``.

The revision is resolved once, and everything comes from that commit. ``inspect`` and ``--dry-run`` read index and
configuration, and of each shard its header, by range requests. What a conversion carries is downloaded by
huggingface_hub into its own cache, and then is a folder like any other. huggingface_hub is imported when such a
source is first used, and its settings (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE) hold.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mla_convert import output_folder, storage
from mla_convert.catalogue import OtherFile, SourceFile
from mla_convert.errors import BadInputError, HubError, InterruptedRunError, LocalIOError, UsageError
from mla_convert.formats.folder import Folder, is_skipped
from mla_convert.formats.huggingface import (
    CONFIG_NAMES,
    INDEX_SUFFIX,
    parse_rank_folder,
)
from mla_convert.formats.safetensors import MAX_HEADER_LENGTH, SafetensorsHeader, parse_header
from mla_convert.hub_reading import HubClient, RemoteFile, StoppedError, in_parallel
from mla_convert.progress import Progress
from mla_convert.storage import FileIdentity, human_bytes

T = TypeVar("T")

PREFIX = "hf://"
#: Headers read at a time, and files downloaded at a time; a file that was cut short starts over.
HEADER_WORKERS = 8
DOWNLOAD_WORKERS = 4

_OWNER = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_NAME = re.compile(r"\w(?:[\w.-]*\w)?", re.ASCII)
_NOT_IN_A_REVISION = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{")
_LENGTH_BYTES = 8
_FORM = "a repository is named hf://ORGANISATION/NAME, with @REVISION for a branch, tag or commit"


@dataclass(frozen=True, slots=True)
class HubId:
    """A model repository and, if one was given, a revision: branch, tag, ``refs/pr/3`` or commit."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        """As the user writes it."""
        return PREFIX + self.repository + (f"@{self.revision}" if self.revision else "")

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repository.partition("/")[2]


def hub_id(source: str | Path) -> HubId | None:
    """What ``source`` names on the Hub, or None if it is a path.

    Raises:
        UsageError: It begins with ``hf://`` but names no model repository.
    """
    if not isinstance(source, str) or not source.startswith(PREFIX):
        return None
    repository, at, revision = source.removeprefix(PREFIX).partition("@")
    owner, *names = repository.split("/")
    if owner in ("datasets", "spaces", "buckets", "models") and len(names) > 1:
        raise UsageError(f"{source} does not name a model repository", hint=_FORM)
    if len(names) > 1:
        whole = PREFIX + "/".join([owner, names[0]])
        raise UsageError(f"{source} names a part of a repository", hint=f"give all of it: {whole}")
    if not names or not _is_repository(owner, names[0]):
        raise UsageError(f"{source} does not name a repository", hint=_FORM)
    if at and not _is_revision(revision):
        raise UsageError(f"{source}: {revision!r} cannot be a revision", hint=_FORM)
    return HubId(repository, revision or None)


def _is_repository(owner: str, name: str) -> bool:
    both = f"{owner}/{name}"
    return (
        _OWNER.fullmatch(owner) is not None
        and _NAME.fullmatch(name) is not None
        and len(both) <= 96
        and not any(bad in both for bad in ("--", ".."))
        and not name.endswith((".git", ".ipynb"))
    )


def _is_revision(revision: str) -> bool:
    parts = revision.split("/")
    return (
        revision.isprintable()
        and not _NOT_IN_A_REVISION.search(revision)
        and not revision.startswith("-")
        and all(part and not part.startswith(".") and not part.endswith((".", ".lock")) for part in parts)
    )


class HubCheckpoint:
    """One commit of a repository, and its place in the Hub's cache.

    Attributes:
        asked: What the user named.
        commit: The commit that it was at.
        origin: ``hf://org/name@commit``.
        root: Where the cache has the commit's files; those that are not there yet are :meth:`missing`.
        files: Every file of the commit that a conversion accounts for.
        warnings: What the user should know about how the files were found.
    """

    def __init__(self, asked: HubId) -> None:
        """Find the commit and its files.

        Raises:
            HubError: There is no such repository or revision, no permission, or no connection.
        """
        self.asked = asked
        self.hub = HubClient(asked.repository, str(asked))
        self.commit = self.hub.resolve(asked.revision)
        self.origin = f"{PREFIX}{asked.repository}@{self.commit}"
        self.root = cache_folder(asked) / "snapshots" / self.commit
        self.warnings: tuple[str, ...] = ()
        self._is_guess = False
        files = self.hub.cached_tree(self.commit) if self.hub.offline else self.hub.tree(self.commit)
        if files is None:
            files = self._what_is_cached()
        self.files = {name: file for name, file in sorted(files.items()) if not is_skipped(name)}

    def _what_is_cached(self) -> dict[str, RemoteFile]:
        """Offline, and the cache has no list of the commit's files: what it has is all that is known."""
        if not self.root.is_dir():
            raise self.hub.not_cached(self.origin)
        self._is_guess = True
        files = {
            name: RemoteFile((self.root / name).stat().st_size, None) for name in Folder(self.root).walk()
        }
        self.warnings = (
            f"HF_HUB_OFFLINE is set: {self.origin} is taken as the cache has it ({len(files)} files); whether "
            "the repository has more is not known",
        )
        return files

    # What is in it

    def read(self, reader: Callable[[Folder], T], progress: Progress, also: Iterable[str] = ()) -> T:
        """The checkpoint's inventory, as ``reader`` makes it. Of weights not in the cache only headers are requested.

        Args:
            reader: ``read_catalogue`` or ``read_whole``.
            progress: Told how many headers are read.
            also: Small files to download besides index and configuration, if the commit has them.

        Raises:
            MlaConvertError: As the reader does; HubError besides.
        """
        small = {*CONFIG_NAMES, *also}
        with self.hub.explaining(self.origin, self.root):
            for name in self.files:
                base = name.rpartition("/")[2]
                is_wanted = base in small or base.endswith(INDEX_SUFFIX)
                if is_wanted and _holds_weights(name) and not self.is_here(name):
                    self._download(name, lambda _: None)
        if self.missing():
            found: Folder = _HubFolder(self, progress)
        else:
            found = Folder(self.root, self.origin, self.warnings)
        try:
            return reader(found)
        except BadInputError as error:
            if not self._is_guess:
                raise
            raise HubError(
                f"HF_HUB_OFFLINE is set, and the cached copy of {self.origin} cannot be used: {error.message}",
                hint="unset HF_HUB_OFFLINE, so that what is missing can be downloaded",
                details=error.details,
            ) from error

    def header(self, name: str) -> SafetensorsHeader:
        """The header of a weight file by two range requests: its length, then itself.

        Raises:
            BadInputError: It is no sound header.
            HubError: The Hub or the network refused.
        """
        size = self.files[name].size
        raw = self.hub.read(self.commit, name, 0, min(_LENGTH_BYTES, size))
        length = int.from_bytes(raw, "little")
        if len(raw) == _LENGTH_BYTES and 0 < length <= min(MAX_HEADER_LENGTH, size - _LENGTH_BYTES):
            raw += self.hub.read(self.commit, name, _LENGTH_BYTES, _LENGTH_BYTES + length)
        return parse_header(raw, size, f"{self.origin}/{name}")

    def is_here(self, name: str) -> bool:
        """True if the cache has the file, whole."""
        try:
            return (self.root / name).stat().st_size == self.files[name].size
        except OSError:
            return False

    def missing(self) -> list[str]:
        """The files that are not in the cache, or not whole."""
        return [name for name in self.files if not self.is_here(name)]

    # Downloading

    def _transfer(self, name: str) -> int:
        """Bytes to download for a missing file: none if the cache has them already, for another commit."""
        file = self.files[name]
        blob = cache_folder(self.asked) / "blobs" / (file.etag or "-")
        return 0 if blob.is_file() and not self._is_damaged(name) else file.size

    def _is_damaged(self, name: str) -> bool:
        return (self.root / name).exists() and not self.is_here(name)

    def check_space(self, more: int = 0) -> None:
        """Refuse before downloading what does not fit.

        Args:
            more: Bytes that will be needed on the same disk besides.

        Raises:
            LocalIOError: With the space free and the space needed.
        """
        transfer, cache = sum(map(self._transfer, self.missing())), cache_folder(self.asked).parent
        if not transfer:
            return
        output_folder.ensure_writable(cache)
        free = output_folder.free_bytes(cache)
        if free is None or transfer + more <= free:
            return
        output = f", and the output {human_bytes(more)}" if more else ""
        raise LocalIOError(
            f"{storage.plain(cache)} has {human_bytes(free)} free; downloading the rest of {self.origin} needs "
            f"{human_bytes(transfer)}{output}",
            hint=f"free {human_bytes(transfer + more - free)}, or set HF_HOME to a folder on a larger disk",
        )

    def download(self, progress: Progress, resume_command: str | None = None) -> None:
        """Bring every missing file into the cache. A file that is complete stays, whatever happens afterwards.

        Weights come last: where the index names a shard that is not there, the download was not finished.

        Raises:
            HubError: The Hub or the network refused, after retries.
            LocalIOError: The disk did.
            InterruptedRunError: The user did.
        """
        missing = self.missing()
        if not missing:
            return
        if self.hub.offline:
            raise self.hub.not_cached(f"{len(missing)} of {len(self.files)} files of {self.origin}", missing)
        output_folder.require_distinct(cache_folder(self.asked), self.files, self.origin)
        self.check_space()
        weights = [name for name in missing if name.endswith((".safetensors", ".distcp", ".pt"))]
        batches = [name for name in missing if name not in set(weights)], weights

        def work(name: str, stop: threading.Event) -> None:
            def advance(count: int) -> None:
                if stop.is_set():
                    raise StoppedError
                progress.advance(count)

            self._download(name, advance)
            progress.note(f"{name}: downloaded")

        progress.start("download", sum(map(self._transfer, missing)), "bytes")
        try:
            with self.hub.explaining(self.origin, self.root):
                for batch in batches:
                    in_parallel(work, batch, DOWNLOAD_WORKERS)
        except KeyboardInterrupt:
            left = len(self.missing())
            raise InterruptedRunError(
                f"stopped; {len(self.files) - left} of {len(self.files)} files of {self.origin} are in the cache",
                hint=f"resume with: {resume_command}" if resume_command else "run it again to go on",
            ) from None
        finally:
            progress.finish()
        if missing := self.missing():
            raise HubError(
                f"{len(missing)} files of {self.origin} did not arrive whole",
                hint="run it again; if that changes nothing, look at what lies between you and the Hub",
                details=missing,
            )

    def _download(self, name: str, advance: Callable[[int], None]) -> None:
        """One file, retried; ``advance`` is told about bytes, negative if they have to come again."""
        expected = self._transfer(name)

        def attempt() -> None:
            done = 0

            def count(number: int) -> None:
                nonlocal done
                advance(number)
                done += number

            try:
                self.hub.download(self.commit, name, count, again=self._is_damaged(name))
            except Exception:
                if done:
                    advance(-done)
                raise
            advance(expected - done)

        self.hub.retrying(attempt)


def cache_folder(asked: HubId) -> Path:
    """Where the Hub's cache keeps a repository."""
    from huggingface_hub import constants

    return (
        Path(constants.HF_HUB_CACHE).expanduser().resolve() / f"models--{asked.repository.replace('/', '--')}"
    )


def downloaded(asked: HubId, progress: Progress) -> HubCheckpoint:
    """A whole repository in the Hub's cache, downloaded as far as it is not there yet.

    Raises:
        MlaConvertError: As :class:`HubCheckpoint` and its ``download`` do.
    """
    checkpoint = HubCheckpoint(asked)
    checkpoint.download(progress)
    return checkpoint


def cached_snapshot(origin: str) -> Path | None:
    """Where the cache has, or would have, the files of ``hf://org/name@commit``; None if it is nothing like that."""
    try:
        found = hub_id(origin)
    except UsageError:
        return None
    if found is None or found.revision is None:
        return None
    return cache_folder(found) / "snapshots" / found.revision


class _HubFolder(Folder):
    """A commit whose files are partly not here: answers from the list of files and from headers."""

    def __init__(self, checkpoint: HubCheckpoint, progress: Progress, prefix: str = "") -> None:
        super().__init__(checkpoint.root / prefix, checkpoint.origin, checkpoint.warnings)
        self._checkpoint, self._progress, self._prefix = checkpoint, progress, prefix
        self._headers: dict[str, SafetensorsHeader] = {}

    def __str__(self) -> str:
        return f"{self._checkpoint.origin}/{self._prefix}".removesuffix("/")

    def entries(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.walk()})

    def walk(self) -> Iterator[str]:
        for name in sorted(self._checkpoint.files):
            if name.startswith(self._prefix):
                yield name.removeprefix(self._prefix)

    def within(self, name: str) -> Folder:
        inner = _HubFolder(self._checkpoint, self._progress, f"{self._prefix}{name}/")
        inner._headers = self._headers
        return inner

    def holds_folder(self, name: str) -> bool:
        return any(other.startswith(f"{name}/") for other in self.walk())

    def weights(self, name: str) -> SourceFile:
        whole = self._prefix + name
        if self._is_absent(whole) and whole not in self._headers:
            self._read_headers()
        if whole not in self._headers:
            return super().weights(name)
        return SourceFile(name, self.root / name, self._headers[whole], self._identity(whole))

    def is_here(self, name: str) -> bool:
        return not self._is_absent(self._prefix + name)

    def other(self, name: str) -> OtherFile:
        whole = self._prefix + name
        if not self._is_absent(whole):
            return super().other(name)
        return OtherFile(name, self.root / name, self._identity(whole))

    def _is_absent(self, name: str) -> bool:
        return not self._checkpoint.is_here(name)

    def _identity(self, name: str) -> FileIdentity:
        return FileIdentity(self._checkpoint.files[name].size, 0, 0, 0)

    def _read_headers(self) -> None:
        """All that will be asked for, a few at a time."""
        names = [
            name
            for name in self._checkpoint.files
            if name.endswith(".safetensors") and self._is_absent(name) and _holds_weights(name)
        ]

        def work(name: str, stop: threading.Event) -> None:
            self._headers[name] = self._checkpoint.header(name)
            self._progress.advance(1)

        self._progress.start("read headers", len(names), "items")
        try:
            with self._checkpoint.hub.explaining(self._checkpoint.origin, self.root):
                in_parallel(work, names, HEADER_WORKERS)
        finally:
            self._progress.finish()


def _holds_weights(name: str) -> bool:
    """True for a file at the top or in a rank's folder; what lies deeper is carried over unread."""
    folder = name.rpartition("/")[0]
    return not folder or parse_rank_folder(folder) is not None
