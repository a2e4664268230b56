"""What can go wrong between huggingface_hub and the Hub, put into sentences: for reading, and for writing.

The client raises errors of its own, of its HTTP library (httpx or httpx2) and of hf_xet, and wraps some in others: they
are told apart by status, and by the names of classes where the library may be the one or the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mla_convert.errors import HubError, LocalIOError, MlaConvertError, UsageError
from mla_convert.storage import os_errors, plain

#: Seconds to wait before each further attempt; most calls have been repeated by the client itself by then.
DELAYS = (1.0, 2.0, 4.0, 8.0)
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"
_AGAIN = "run the same command again: what has been uploaded is not sent twice"

# What it is


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from: the client wraps some."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def names_of(error: BaseException) -> set[str]:
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
        if names_of(each) & {"OfflineModeIsEnabled"}:
            return False
        if names_of(each) & {"TransportError", "TimeoutException", "ConnectionError", "TimeoutError"}:
            return "ProxyError" not in names_of(each) and "LocalProtocolError" not in names_of(each)
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


def scrub(error: BaseException, redacted: Callable[[str], str]) -> None:
    """Take the token out of an unexpected error and all it came from: its traceback may be shown."""
    for each in _chain(error):
        each.args = tuple(redacted(part) if isinstance(part, str) else _plain(part) for part in each.args)
        if isinstance(each, UnicodeError):
            each.__traceback__ = None


def _plain(part: Any) -> Any:
    return part if isinstance(part, (int, float, type(None))) else type(part).__name__


# Writing


def explain_writing(error: Exception, doing: str, repo_id: str, endpoint: str) -> MlaConvertError | None:
    """Why a repository cannot be written to, as a sentence with what to do; None if that is nobody's doing but ours."""
    names = set().union(*(names_of(each) for each in _chain(error)))
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
    if "HfUriError" in names:
        return HubError(
            f"cannot {doing}: {endpoint} answers with an address of another Hub",
            hint="check HF_ENDPOINT, and the proxy if there is one",
            details=(_line(error),),
        )
    status = status_of(error)
    details = _server_message(error)
    if status is not None:
        text, hint = _status_text(status, names, repo_id, endpoint)
        return HubError(f"cannot {doing}: {text}", hint=hint, details=details)
    for each in _chain(error):
        if "TransportError" in names_of(each):
            break  # an OSError below is one of the network: no route, no such host
        if isinstance(each, OSError) and each.errno and not isinstance(each, (ConnectionError, TimeoutError)):
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
        return HubError(f"cannot {doing}: the token is not one that can be sent", hint=LOG_IN)
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
        return "the token is not accepted (401); it is wrong or has expired", f"{LOG_IN}; then {_AGAIN}"
    if "RevisionNotFoundError" in names:
        return f"{repo_id} has no such revision", "check --revision"
    if "RepositoryNotFoundError" in names or status == 404:
        hint = f"check the name, and that the token may see it; {LOG_IN}"
        return f"{repo_id} does not exist or is hidden from this token", hint
    known = {
        402: ("the Hub asks for payment (402)", "check the plan and the storage limits of the account"),
        403: (f"the token may not write to {repo_id} (403)", LOG_IN + ", or push with --create-pr"),
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


# Reading


def explain_reading(
    error: Exception,
    what: str,
    folder: Path | None,
    *,
    endpoint: str,
    repository: str,
    not_cached: Callable[[], HubError],
) -> Exception:
    """Why a repository cannot be read, as a sentence with what to do; an error of our own doing, as it is.

    Args:
        error: What the client raised.
        what: What was being read: ``hf://org/name``.
        folder: Where the client was writing.
        endpoint: The address of the Hub.
        repository: ``org/name``.
        not_cached: Says that the cache cannot stand in.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    names, page = names_of(error), f"{endpoint}/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{what} is gated, and access was not granted",
            hint=f"ask for it at {page}, and log in as that user: hf auth login, or HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{what}: the repository has no such revision",
            hint=f"branches, tags and commits are listed at {page}/commits/main",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{what}: no such repository, or a private one that this token may not see",
            hint="check the name; for a private repository log in first: hf auth login, or HF_TOKEN",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return HubError(f"{what}: a file that is listed is not there", hint="run it again")
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error.response.status_code, what)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return not_cached()
    if names & {"LocalProtocolError", "UnicodeEncodeError"}:
        return HubError(
            f"{what}: the token is not one that can be sent",
            hint="log in again: hf auth login, or another HF_TOKEN",
        )
    if "HTTPError" in names:  # what is left of these is below HTTP
        return HubError(
            f"{what}: the connection to {endpoint} failed ({type(error).__name__})",
            hint="run it again: what is downloaded is kept; HF_HUB_OFFLINE=1 works from the cache alone",
        )
    if isinstance(error, OSError) and error.errno is not None:
        try:
            with os_errors(folder or Path(error.filename or "."), "write to"):
                raise error
        except MlaConvertError as explained:
            return explained
    if "hf_xet" in str(error) and "install" in str(error):
        return HubError(
            f"{what} has a file too large for plain HTTP",
            hint="install what it needs: pip install hf_xet",
        )
    if isinstance(error, (OSError, RuntimeError, ValueError)):  # hf_xet raises these, too
        return HubError(f"{what}: the download failed ({type(error).__name__})", hint="run it again")
    return error


def _refused(status: int, what: str) -> HubError:
    if status == 401:
        return HubError(
            f"{what}: the Hub does not accept the token (401)",
            hint="it may have expired: hf auth login, or another HF_TOKEN",
        )
    if status == 403:
        return HubError(
            f"{what}: the token has no permission to read this (403)",
            hint="use a token with read access to the repository: hf auth login, or HF_TOKEN",
        )
    if status == 429:
        return HubError(
            f"{what}: the Hub limits the rate of requests (429)", hint="run it again in some minutes"
        )
    if status >= 500:
        return HubError(
            f"{what}: the Hub is in trouble ({status})",
            hint="run it again later: what is downloaded is kept",
        )
    return HubError(f"{what}: the Hub refused ({status})", hint="check HF_ENDPOINT and the name")
