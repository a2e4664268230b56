"""The Hub's client for pushing: made here, called through here.

huggingface_hub is imported when the first client is made, never before. ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HOME``
and ``HF_HUB_OFFLINE`` mean what they mean to ``hf``, because the client itself reads them. The token stays inside
the client: whatever is said to anybody goes through ``redacted``.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from mla_convert import __version__
from mla_convert.errors import CannotError, HubError, MlaConvertError
from mla_convert.hub_errors import DELAYS, LOG_IN, explain_writing, is_transient, scrub, summary

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")


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
            raise HubError("there is no token for the Hub", hint=LOG_IN)

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
        found = explain_writing(error, doing, repo_id, self.endpoint)
        if found is None:
            scrub(error, self.redacted)
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
        raise HubError(f"no token could be obtained ({type(error).__name__})", hint=LOG_IN) from None
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
