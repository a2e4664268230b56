"""The Hub's client: made here, called through here, and its errors put into sentences here.

huggingface_hub is imported when the first client is made, never before. ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HOME``
and ``HF_HUB_OFFLINE`` mean what they mean to ``hf``, because the client itself reads them. The token stays inside
the client: whatever is said to anybody goes through ``redacted``.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from mla_convert import __version__
from mla_convert.errors import CannotError, HubError, LocalIOError, MlaConvertError, UsageError
from mla_convert.storage import plain

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

#: Seconds to wait before each further attempt; most calls have been repeated by the client itself by then.
DELAYS = (1.0, 2.0, 4.0, 8.0)
_AGAIN = "run the same command again: what has been uploaded is not sent twice"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


class Hub:
    """One client and what is said about it; made by :func:`connect`.

    Attributes:
        api: The client.
        endpoint: The address of the Hub.
    """

    def __init__(self, api: HfApi, token: str | None, note: Callable[[str], None]) -> None:
        self.api, self.endpoint = api, str(api.endpoint)
        self._token, self._note = token, note

    def redacted(self, text: str) -> str:
        """``text`` without the token."""
        return text.replace(self._token, "hf_***") if self._token else text

    def note(self, text: str) -> None:
        """Something for those who want details."""
        self._note(self.redacted(text))

    @property
    def has_token(self) -> bool:
        """Is anybody logged in?"""
        return bool(self._token)

    def require_token(self) -> None:
        """
        Raises:
            HubError: Nobody is logged in.
        """
        if not self._token:
            raise HubError("there is no token for the Hub", hint=_LOG_IN)

    def call(self, doing: str, action: Callable[[], T], *, repo_id: str) -> T:
        """Run ``action``, again after a pause while the Hub or the network fails for the moment.

        Args:
            doing: What fails if it does: "read org/name".
            action: One or more calls of the client that may be repeated.
            repo_id: The repository it is about.

        Raises:
            MlaConvertError: It failed for good; says why and what to do.
        """
        for delay in (*DELAYS, None):
            try:
                return action()
            except Exception as error:
                if delay is None or not is_transient(error):
                    raise self.explained(error, doing, repo_id) from None
                self.note(f"cannot {doing} yet ({summary(error)}); trying again in {delay:.0f} s")
            time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    def explained(self, error: Exception, doing: str, repo_id: str) -> Exception:
        """The error as a sentence with what to do; one that is nobody's doing but ours, as it is."""
        if isinstance(error, MlaConvertError):
            return error
        found = _explain(error, doing, repo_id, self.endpoint)
        if found is None:
            _scrub(error, self.redacted)
            return error
        found.message = self.redacted(found.message)
        found.args = (found.message,)
        found.details = tuple(self.redacted(line) for line in found.details)
        return found


@contextmanager
def connect(note: Callable[[str], None]) -> Iterator[Hub]:
    """The client, silenced: what it would log goes to ``note``.

    Raises:
        HubError: ``HF_HUB_OFFLINE`` is set, or ``HF_ENDPOINT`` is no address.
        CannotError: huggingface_hub is not there.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when it is imported; we have a bar of our own
    try:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise HubError(
                "HF_HUB_OFFLINE is set, so the Hub is not to be contacted", hint="unset HF_HUB_OFFLINE"
            )
        _check_endpoint(constants.ENDPOINT)
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise CannotError(
            f"huggingface_hub cannot be loaded ({error})", hint="pip install 'huggingface-hub>=1.33'"
        ) from None
    try:
        token = get_token()
    except Exception as error:  # a token that had to be fetched or refreshed, and could not
        raise HubError(f"no token could be obtained ({type(error).__name__})", hint=_LOG_IN) from None
    # Without a token of ours the client must not go and find one, so False.
    api = HfApi(token=token or False, library_name="mla-convert", library_version=__version__)
    hub = Hub(api, token, note)
    with _silenced(hub), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield hub


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    except ValueError:  # of the port
        pass
    raise HubError(f"HF_ENDPOINT is no address: {endpoint!r}", hint="it looks like https://huggingface.co")


@contextmanager
def _silenced(hub: Hub) -> Iterator[None]:
    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hub.note(f"{record.name}: {record.getMessage()}")

    logger = logging.getLogger("huggingface_hub")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Notes(logging.WARNING)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from: the client wraps some."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _names(error: BaseException) -> set[str]:
    """Names of the error's classes: the HTTP library is httpx or httpx2, and hf_xet may be missing."""
    return {kind.__name__ for kind in type(error).__mro__}


def status_of(error: Exception) -> int | None:
    """The HTTP status behind an error, if the Hub answered at all."""
    for each in _chain(error):
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def is_transient(error: Exception) -> bool:
    """May the same call succeed in a moment?"""
    status = status_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return _is_network(error)


def _is_network(error: Exception) -> bool:
    for each in _chain(error):
        if _names(each) & {"OfflineModeIsEnabled"}:
            return False
        if _names(each) & {"TransportError", "TimeoutException", "ConnectionError", "TimeoutError"}:
            return "ProxyError" not in _names(each) and "LocalProtocolError" not in _names(each)
        if isinstance(each, json.JSONDecodeError):  # an error page where an answer should be
            return True
        if _is_xet(each) and "uthenticat" not in type(each).__name__ and not _local_problem(each):
            return True
    return False


def _is_xet(error: BaseException) -> bool:
    """Raised inside hf_xet, which is no Python: it has few classes of its own."""
    if type(error).__module__.startswith("hf_xet"):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "_upload_xet_files"


def _local_problem(error: BaseException) -> bool:
    return "No such file" in str(error) or "Permission denied" in str(error) or "os error 5)" in str(error)


def summary(error: Exception) -> str:
    """A few words on an error."""
    status = status_of(error)
    if status is not None:
        return f"HTTP status {status}"
    return "no usable answer" if isinstance(error, json.JSONDecodeError) else type(error).__name__


def _server_message(error: Exception) -> tuple[str, ...]:
    for each in _chain(error):
        text = getattr(each, "server_message", None)
        request = getattr(each, "request_id", None)
        if text or request:
            lines = [f"the Hub says: {line}" for line in str(text or "").splitlines() if line.strip()]
            return (*lines, *([f"request: {request}"] if request else []))
    return ()


def _explain(error: Exception, doing: str, repo_id: str, endpoint: str) -> MlaConvertError | None:
    names = set().union(*(_names(each) for each in _chain(error)))
    if "OfflineModeIsEnabled" in names:
        return HubError(f"cannot {doing}: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
    if "HFValidationError" in names:
        return UsageError(
            f"{repo_id!r} is no repository id", hint="it looks like USER/NAME, of letters, digits, . _ and -"
        )
    if isinstance(error, ValueError) and "metadata" in str(error).lower():
        return HubError(
            f"cannot {doing}: the Hub refuses the metadata of README.md",
            hint="correct the lines between --- at the top of README.md, or push with --no-card",
            details=tuple(line for line in str(error).splitlines()[1:] if line.strip()),
        )
    status = status_of(error)
    details = _server_message(error)
    if status is not None:
        text, hint = _status_text(status, names, repo_id, endpoint)
        return HubError(f"cannot {doing}: {text}", hint=hint, details=details)
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno and not isinstance(each, ConnectionError):
            where = f"{plain(each.filename)}: " if each.filename else ""
            return LocalIOError(
                f"cannot {doing}: {where}{each.strerror}", hint=f"check the disk, then {_AGAIN}"
            )
        if _is_xet(each):
            if _local_problem(each):
                return LocalIOError(f"cannot {doing}: {_line(each)}", hint=f"check the disk, then {_AGAIN}")
            return HubError(f"cannot {doing}: the upload by Xet failed", hint=_AGAIN, details=(_line(each),))
    if _is_network(error):
        where = f"{endpoint} does not answer ({summary(error)})"
        return HubError(f"cannot {doing}: {where}", hint=f"check the connection, then {_AGAIN}")
    if "LocalProtocolError" in names or "UnicodeEncodeError" in names:
        return HubError(f"cannot {doing}: the token is not one that can be sent", hint=_LOG_IN)
    if "RequestError" in names or "InvalidURL" in names or "UnsupportedProtocol" in names:
        return HubError(
            f"cannot {doing}: {endpoint} cannot be reached ({summary(error)})", hint="check HF_ENDPOINT"
        )
    if isinstance(error, ValueError) and "LFS" in str(error):
        return HubError(f"cannot {doing}: the Hub refuses a file", hint=_AGAIN, details=(_line(error),))
    return None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _status_text(status: int, names: set[str], repo_id: str, endpoint: str) -> tuple[str, str]:
    """What a status means here, and what to do about it."""
    if "GatedRepoError" in names:
        return (
            f"{repo_id} is gated, and this account has no access",
            f"ask for access on {endpoint}/{repo_id}",
        )
    if "DisabledRepoError" in names:
        return f"{repo_id} has been disabled by the Hub", "push to another repository"
    if status == 401:
        return "the token is not accepted (401); it is wrong or has expired", f"{_LOG_IN}; then {_AGAIN}"
    if "RevisionNotFoundError" in names:
        return f"{repo_id} has no such revision", "check --revision"
    if "RepositoryNotFoundError" in names or status == 404:
        hint = f"check the name, and that the token may see it; {_LOG_IN}"
        return f"{repo_id} does not exist or is hidden from this token", hint
    known = {
        402: ("the Hub asks for payment (402)", "check the plan and the storage limits of the account"),
        403: (f"the token may not write to {repo_id} (403)", _LOG_IN + ", or push with --create-pr"),
        409: (f"{repo_id} is taken or busy (409)", "choose another name, or try again later"),
        412: (f"somebody else has committed to {repo_id} meanwhile", f"look at it, then {_AGAIN}"),
        413: ("the Hub says that this is too large (413)", "check the storage limits of the account"),
        429: ("the Hub asks for fewer requests (429)", f"wait a few minutes, then {_AGAIN}"),
    }
    if status in known:
        return known[status]
    if status >= 500:
        return f"the Hub is in trouble (HTTP status {status})", f"wait a little, then {_AGAIN}"
    return f"the Hub refuses (HTTP status {status})", "the Hub's own words are above; please check them"


def _scrub(error: BaseException, redacted: Callable[[str], str]) -> None:
    """Take the token out of an unexpected error and all it came from: its traceback may be shown."""
    for each in _chain(error):
        each.args = tuple(redacted(part) if isinstance(part, str) else _plain(part) for part in each.args)
        if isinstance(each, UnicodeError):
            each.__traceback__ = None


def _plain(part: Any) -> Any:
    return part if isinstance(part, (int, float, type(None))) else type(part).__name__
