"""The Hub's client for sources: find, list, read, download; retried, and explained where it fails.

Its words never reach the user: errors become sentences with a next step, its log and its bars are silenced. Nothing
here names the token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mla_convert import __version__
from mla_convert.errors import HubError, MlaConvertError
from mla_convert.hub_errors import DELAYS, explain_reading, is_transient

_LONGEST_WAIT = 300.0  # seconds; what the Hub asks for beyond that is not waited for
_CHUNK = 1 << 20  # bytes received before they are written
_TIMEOUT = 30.0  # seconds without a byte
_PATIENCE = 2.0  # seconds that threads get to end by themselves after ^C

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit: its size in bytes, and the name under which the cache keeps its bytes, if known."""

    size: int
    etag: str | None


class StoppedError(Exception):
    """Raised in a thread whose work nobody waits for any more."""


class HubClient:
    """One model repository, as huggingface_hub sees it with the settings of the environment.

    Attributes:
        offline: HF_HUB_OFFLINE is set: only the cache is there.
    """

    def __init__(self, repository: str, label: str) -> None:
        from huggingface_hub import constants

        if not constants.HF_DEBUG:
            logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        # Chunks of 10 MB cost 50 MB of memory a download, and a broken connection up to 10 MB.
        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, _CHUNK)
        self.repository, self.label = repository, label
        self.offline = constants.is_offline_mode()
        self.endpoint = constants.ENDPOINT
        if not self.endpoint.startswith(("http://", "https://")):
            raise HubError(f"HF_ENDPOINT is no web address: {self.endpoint}", hint="unset it, or correct it")

    # Finding

    def resolve(self, revision: str | None) -> str:
        """The commit a revision is at; the cache takes note of it.

        Raises:
            HubError: There is no such repository or revision, or the Hub cannot be asked.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionResolutionError

        client = self

        class Api(HfApi):
            """Fails where the Hub does, instead of taking the commit that a branch was at once."""

            def repo_info(self, *arguments: Any, **options: Any) -> Any:
                options["timeout"] = _TIMEOUT
                with client.explaining(client.label):
                    return client.retrying(lambda: super(Api, self).repo_info(*arguments, **options))

        api = Api(library_name="mla-convert", library_version=__version__)
        try:
            found = api.resolve_revision(self.repository, revision=revision, local_files_only=self.offline)
        except RevisionResolutionError as error:
            raise self.not_cached(self.label) from error
        return found.resolved

    def tree(self, commit: str) -> dict[str, RemoteFile]:
        """Every file of a commit."""
        from huggingface_hub import HfApi

        api = HfApi(library_name="mla-convert", library_version=__version__)
        with self.explaining(self.label):
            listing = self.retrying(
                lambda: list(api.list_repo_tree(self.repository, recursive=True, revision=commit))
            )
        return _files(listing)

    def cached_tree(self, commit: str) -> dict[str, RemoteFile] | None:
        """The same from the cache; None if it has no list of them."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return _files(get_cached_repo_tree(self.repository, revision=commit))
        except CachedRepoTreeNotFoundError:
            return None

    # Reading

    def read(self, commit: str, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of a file, and no others, by a range request."""
        return self.retrying(lambda: self._read(commit, name, start, stop)) if stop > start else b""

    def _read(self, commit: str, name: str, start: int, stop: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = build_hf_headers(library_name="mla-convert", library_version=__version__)
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.repository, name, revision=commit)
        data = bytearray()
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as answer:
            hf_raise_for_status(answer)
            begin = 0 if answer.status_code == 200 else start  # 200: ranges are ignored, so stop in time
            for chunk in answer.iter_raw():
                data += chunk
                if len(data) >= stop - begin:
                    break
        found = bytes(data[start - begin : stop - begin])
        if len(found) != stop - start:
            raise HubError(
                f"{self.label}: asked for bytes {start} to {stop} of {name}, got {len(found)}",
                hint="something between you and the Hub changes its answers: a proxy, or HF_ENDPOINT",
            )
        return found

    def download(self, commit: str, name: str, count: Callable[[int], None], *, again: bool) -> None:
        """Bring one file into the cache; ``again`` replaces a damaged one. ``count`` is told about bytes."""
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self.repository,
            name,
            revision=commit,
            force_download=again,
            library_name="mla-convert",
            library_version=__version__,
            tqdm_class=_bar_class(count),
        )

    # Failing

    def retrying(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``, several times where the network or the Hub is at fault, with longer and longer waits."""
        for delay in DELAYS:
            try:
                return action()
            except Exception as error:
                wait = _wait(error, delay)
                if wait is None:
                    raise
            time.sleep(wait)
        return action()

    def not_cached(self, what: str, details: Sequence[str] = ()) -> HubError:
        """Offline, and the cache cannot stand in."""
        from huggingface_hub import constants

        return HubError(
            f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not have {what}",
            hint=f"unset it, or fill the cache first: hf download {self.repository}",
            details=details,
        )

    @contextmanager
    def explaining(self, what: str, folder: Path | None = None) -> Iterator[None]:
        """Turn whatever huggingface_hub raises into a sentence about ``what``; ``folder`` is where it writes."""
        try:
            yield
        except (MlaConvertError, StoppedError):
            raise
        except Exception as error:
            raise explain_reading(
                error,
                what,
                folder,
                endpoint=self.endpoint,
                repository=self.repository,
                not_cached=lambda: self.not_cached(what),
            ) from None


def _wait(error: Exception, usual: float) -> float | None:
    """Seconds until another attempt; None if none would help, or the client has made its own."""
    if type(error).__name__ == "LocalEntryNotFoundError" or not is_transient(error):
        return None
    asked = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    wait = float(asked) if asked.isdecimal() else usual
    return wait if wait <= _LONGEST_WAIT else None


def _files(listing: Iterable[Any]) -> dict[str, RemoteFile]:
    from huggingface_hub.hf_api import RepoFile

    return {
        entry.path: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in listing
        if isinstance(entry, RepoFile)
    }


def _bar_class(count: Callable[[int], None]) -> Any:
    """A class that huggingface_hub takes for a progress bar of one file."""

    class Bar:
        total: int | None = None

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def update(self, number: int | float | None = 1) -> None:
            count(int(number or 0))

        # Xet tells of bytes received besides bytes written, if there is where to.
        def update_transfer(self, number: int | float | None = 1) -> None: ...
        def set_postfix_str(self, *_: Any, **__: Any) -> None: ...
        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...
        def refresh(self) -> None: ...
        def close(self) -> None: ...

    return Bar


def in_parallel(work: Callable[[_Item, threading.Event], None], items: Iterable[_Item], workers: int) -> None:
    """Run ``work`` on every item, ``workers`` at a time, and raise the first failure.

    ``work`` is given an event besides: once it is set, nobody waits. The threads are daemons, so one that hangs in
    the network does not keep the process.
    """
    queue: SimpleQueue[_Item] = SimpleQueue()
    ended: SimpleQueue[None] = SimpleQueue()
    stop = threading.Event()
    failures: list[BaseException] = []
    for item in items:
        queue.put(item)

    def run() -> None:
        try:
            while not stop.is_set():
                work(queue.get_nowait(), stop)
        except Empty:
            pass
        except BaseException as error:
            failures.append(error)
            stop.set()
        finally:
            ended.put(None)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(workers, queue.qsize()))]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            ended.get()
    except BaseException:
        stop.set()
        until = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        raise
    if failures:
        raise failures[0]
