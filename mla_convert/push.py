"""``push``: exactly the verified files of a manifest, in one commit.

The order is what makes it safe: every file is checked before the Hub is asked anything; files go up shard by shard
without being visible; one commit, on top of the head that was read, makes them visible together; and the tree it
made is compared with the manifest. Where an answer is lost, the head tells whether the commit was made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_convert.api import inspect
from mla_convert.errors import CannotError, DifferenceError, HubError, MlaConvertError, UsageError
from mla_convert.hub_errors import DELAYS, is_transient, status_of, summary
from mla_convert.hub_writing import Hub, connect
from mla_convert.model_card import make_card
from mla_convert.progress import Progress, SilentProgress
from mla_convert.push_files import README, Publication, PushFile, read_publication
from mla_convert.push_target import Head, Landed, Target, differences, same
from mla_convert.signals import ending_as_interrupted

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

#: Files smaller than the first go up together, in batches of at most so many bytes and files.
_SMALL, _BATCH_BYTES, _BATCH_FILES = 16 << 20, 64 << 20, 200


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What to push, and how. ``private`` is None where the Hub is to choose."""

    revision: str = "main"
    create_pr: bool = False
    private: bool | None = None
    message: str | None = None
    card: bool = True
    unverified: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class PushResult:
    """What was pushed, or would be."""

    path: Path
    repo_id: str
    options: PushOptions
    endpoint: str
    files: Mapping[str, PushFile]
    outgoing: tuple[str, ...]
    created: bool
    landed: Landed | None
    committed: bool
    verified: bool
    withheld: bool
    warnings: tuple[str, ...]
    seconds: float

    @property
    def bytes_total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def bytes_outgoing(self) -> int:
        """Bytes of the files that the repository did not have."""
        return sum(self.files[name].size for name in self.outgoing)

    @property
    def repository_url(self) -> str:
        """Where the repository is."""
        return f"{self.endpoint}/{self.repo_id}"

    @property
    def url(self) -> str:
        """The pull request or the commit; the repository while there is neither."""
        if self.landed is None:
            return self.repository_url
        if self.landed.pull_request is not None:
            return f"{self.repository_url}/discussions/{self.landed.pull_request}"
        return f"{self.repository_url}/commit/{self.landed.commit}"

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "command": "push",
            "dry_run": self.options.dry_run,
            "path": str(self.path),
            "repo_id": self.repo_id,
            "revision": self.options.revision,
            "url": self.url,
            "commit": self.landed.commit if self.landed else None,
            "pull_request": self.landed.pull_request if self.landed else None,
            "created": self.created,
            "committed": self.committed,
            "verified": self.verified,
            "withheld": ["source.path"] if self.withheld else [],
            "files": {name: file.sha256 for name, file in self.files.items()},
            "sent": list(self.outgoing),
            "bytes": {"total": self.bytes_total, "sent": self.bytes_outgoing},
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
        }


def push(
    path: Path, repo_id: str, options: PushOptions | None = None, progress: Progress | None = None
) -> PushResult:
    """Push an output of this tool to the Hub, in one commit or as one pull request.

    Args:
        path: The output folder; its manifest says which files are meant.
        repo_id: ``USER/NAME``; created if it is not there.
        options: What to push, and how.
        progress: Who is told about progress.

    Raises:
        CannotError: There is no manifest, it is not verified, or the repository is not as asked for.
        DifferenceError: A file was changed, or the Hub holds something else than was sent.
        HubError: The Hub or the network refused.
    """
    options, progress = options or PushOptions(), progress or SilentProgress()
    started = time.monotonic()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise UsageError(
            f"{repo_id!r} is no repository id", hint="it looks like USER/NAME or ORGANISATION/NAME"
        )
    with ending_as_interrupted():
        publication = read_publication(
            path, unverified=options.unverified, record=not options.dry_run, progress=progress
        )
        with connect(progress.note) as hub:
            result = _Push(path, repo_id, options, progress, publication, hub).execute()
    return replace(result, seconds=time.monotonic() - started)


class _Push:
    def __init__(
        self,
        path: Path,
        repo_id: str,
        options: PushOptions,
        progress: Progress,
        publication: Publication,
        hub: Hub,
    ) -> None:
        self.path, self.repo_id, self.options, self.progress = path, repo_id, options, progress
        self.publication, self.hub, self.api = publication, hub, hub.api
        self.target = Target(hub, repo_id, options.revision)
        self.warnings = list(publication.warnings)

    def execute(self) -> PushResult:
        """Everything after the local checks."""
        options = self.options
        if not options.dry_run:
            self.hub.require_token()
        head = self.target.head()
        self._check_visibility(head)
        created = not head.exists
        if not options.dry_run:
            head = self.target.prepare(head, private=options.private, create_pr=options.create_pr)
        files = self.publication.with_readme(self._readme(head))
        outgoing = tuple(name for name, file in files.items() if not same(file, head.files.get(name)))
        self._note_strangers(head, files)
        landed: Landed | None = Landed(head.commit) if head.commit and not outgoing else None
        if landed is None and options.create_pr and head.exists:
            landed = self.target.open_pull_request(files)
        committed = False
        if landed is None and not options.dry_run:
            landed = self._commit(files, [files[name] for name in outgoing], head)
            committed = True
            self._check_landed(files, landed)
        elif landed is not None:
            outgoing = ()
        return PushResult(
            self.path,
            self.repo_id,
            options,
            self.hub.endpoint,
            files,
            outgoing,
            created,
            landed,
            committed,
            self.publication.verified,
            self.publication.withheld,
            tuple(self.warnings),
            0.0,
        )

    def _check_visibility(self, head: Head) -> None:
        wanted = self.options.private
        if head.exists and wanted is not None and head.private is not None and head.private != wanted:
            now, then = ("private", "--public") if head.private else ("public", "--private")
            raise CannotError(
                f"{self.repo_id} exists and is {now}, and {then} was asked for; nothing was pushed",
                hint=f"leave out {then}, or change the repository in its settings",
            )

    def _readme(self, head: Head) -> bytes | None:
        """The README to push: the repository's own or else the checkpoint's, amended; None to leave it alone."""
        if not self.options.card:
            return None
        source = self.publication.files.get(README)
        own = source.data if source else None
        if source and own is None:
            raise CannotError(
                f"README.md has {source.size} bytes: too many to be amended", hint="use --no-card"
            )
        existing = own
        remote = head.files.get(README)
        if remote is not None and not (source and same(source, remote)):
            existing = self.target.download_readme(head)
        return make_card(
            self.publication.manifest,
            self.repo_id,
            verification=self.publication.verification,
            stored_as=_stored_as(self.path),
            existing=existing,
            source_card=own,
        )

    def _note_strangers(self, head: Head, files: Mapping[str, PushFile]) -> None:
        strangers = sorted(head.files.keys() - files.keys() - {".gitattributes", README})
        if strangers:
            shown = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if strangers[5:] else "")
            self.warnings.append(
                f"{self.repo_id} also holds files that are no part of this checkpoint: {shown}"
            )

    # Sending

    def _commit(self, files: Mapping[str, PushFile], outgoing: Sequence[PushFile], head: Head) -> Landed:
        operations = self._upload(outgoing)
        pulls = self.target.pull_requests() if self.options.create_pr else {}
        message = self.options.message or self._message()
        doing = f"commit to {self.repo_id}"
        for delay in (*DELAYS, None):
            try:
                made = self.api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=message,
                    revision=self.options.revision,
                    create_pr=self.options.create_pr,
                    parent_commit=head.commit,
                )
                return Landed(made.oid, made.pr_num)
            except Exception as error:
                overtaken = status_of(error) == 412
                if not overtaken and not is_transient(error):
                    raise self.hub.explained(error, doing, self.repo_id) from None
                failure = error
            # The answer may be lost and the commit made: the head tells.
            self.hub.note(f"no commit yet, as far as is known ({summary(failure)}); looking at the head")
            if delay is not None and not overtaken:
                time.sleep(delay)
            if landed := self._look_for_commit(files, head, pulls):
                return landed
            if overtaken or delay is None:
                raise self.hub.explained(failure, doing, self.repo_id) from None
        raise AssertionError("the last attempt returns or raises")

    def _message(self) -> str:
        manifest = self.publication.manifest
        done = {
            "split": "Split KV up-projections",
            "combine": "Combined KV up-projections",
            "migrate": "Migrated to the conventions of another Megatron release",
        }.get(manifest.operation, "Resharded")
        note = "" if self.publication.verified else ", not verified"
        return f"{done} (mla-convert{note})"

    def _upload(self, outgoing: Sequence[PushFile]) -> list[CommitOperationAdd]:
        """Send the bytes of every file; nothing is visible yet. What the Hub has already is not sent again."""
        from huggingface_hub import CommitOperationAdd

        operations = []
        self.progress.start("upload", sum(file.size for file in outgoing), "bytes")
        try:
            for batch in _batches(outgoing):
                added = []
                for file in batch:
                    content: Any = file.data if file.data is not None else file.path
                    with _changed_meanwhile(file):
                        added.append(CommitOperationAdd(file.name, content))
                what = batch[0].name if len(batch) == 1 else f"{len(batch)} small files"
                self.hub.call(f"upload {what}", partial(self._send, added), repo_id=self.repo_id)
                for file, operation in zip(batch, added, strict=True):
                    _check_sent(file, operation)
                self.progress.advance(sum(file.size for file in batch))
                self.progress.note(f"{what} uploaded")
                operations += added
        finally:
            self.progress.finish()
        return operations

    def _send(self, added: list[CommitOperationAdd]) -> None:
        self.api.preupload_lfs_files(
            self.repo_id,
            added,
            revision=self.options.revision,
            create_pr=self.options.create_pr,
            free_memory=False,
            gitignore_content="",  # the manifest says what is pushed; no .gitignore does
        )

    # What became of it

    def _look_for_commit(
        self, files: Mapping[str, PushFile], head: Head, pulls: Mapping[int, str]
    ) -> Landed | None:
        """The commit whose answer was lost, if it was made.

        Raises:
            HubError: Somebody else has committed.
        """
        if self.options.create_pr:
            new = {number: oid for number, oid in self.target.pull_requests().items() if number not in pulls}
            return self.target.first_with(files, new)
        now = self.target.head()
        if now.commit is None or now.commit == head.commit:
            return None
        if differences(files, now.files):
            raise HubError(
                f"somebody else has committed to {self.repo_id} meanwhile; nothing of this push is visible there",
                hint="look at it, then run the same command again: what has been uploaded is not sent twice",
            )
        return Landed(now.commit)

    def _check_landed(self, files: Mapping[str, PushFile], landed: Landed) -> None:
        if wrong := differences(files, self.target.tree_at(landed.commit)):
            raise DifferenceError(
                f"commit {landed.commit} of {self.repo_id} does not hold what was pushed",
                hint="look at the repository; running the same command again sends what differs",
                details=wrong,
            )


def _stored_as(folder: Path) -> str | None:
    """How K and V are stored, by the headers."""
    try:
        _, document = inspect(folder)
    except MlaConvertError:  # a checkpoint that is pushed unverified may be in any state
        return None
    return "; ".join(dict.fromkeys(str(group["storage"]) for group in document["attention"]))


def _batches(files: Sequence[PushFile]) -> Iterator[list[PushFile]]:
    """Large files alone, for progress and resuming; small ones together."""
    batch: list[PushFile] = []
    for file in files:
        if file.size >= _SMALL:
            yield [file]
            continue
        if len(batch) == _BATCH_FILES or sum(f.size for f in batch) + file.size > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


@contextmanager
def _changed_meanwhile(file: PushFile) -> Iterator[None]:
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        if file.path is None or file.path.is_file():
            raise
        raise DifferenceError(f"{file.name} has gone since it was checked; nothing was pushed") from error


def _check_sent(file: PushFile, operation: CommitOperationAdd) -> None:
    """Compare what the client found while it sent the bytes with what they should be."""
    info = operation.upload_info
    hashed = getattr(info, "is_hashed", True)
    if info.size != file.size or (hashed and info.sha256.hex() != file.sha256):
        raise DifferenceError(
            f"{file.name} was changed while it was being uploaded; there is no commit",
            hint="run again once nothing writes to it; if the file is damaged, convert again",
        )
