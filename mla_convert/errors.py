"""The error tree. Every failure that a user can meet is one of these, and each class owns an exit code.

An error says what went wrong, where (file, tensor, numbers) and what to do next. Nothing else in the package
decides an exit code: ``cli.main`` prints the error and exits with ``error.exit_code``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns. "It differs" (10) is never the same code as "it broke"."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    BAD_INPUT = 3
    CANNOT = 4
    LOCAL_IO = 5
    HUB = 6
    DIFFERENT = 10
    INTERRUPTED = 130


class MlaConvertError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: What is wrong and where, with the numbers, in one or two sentences.
        hint: What to do next; printed on a line of its own.
        details: Further lines (tensor names, files). All of them go into ``--json``; a terminal sees the first few.
    """

    exit_code = ExitCode.UNEXPECTED

    def __init__(self, message: str, *, hint: str | None = None, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = tuple(details)


class UsageError(MlaConvertError):
    """The command line contradicts itself, or names a path that cannot be what it is used as."""

    exit_code = ExitCode.USAGE


class BadInputError(MlaConvertError):
    """The checkpoint is damaged, incomplete, or contradicts itself."""

    exit_code = ExitCode.BAD_INPUT


class CannotError(MlaConvertError):
    """The checkpoint is sound, but what was asked cannot be done to it."""

    exit_code = ExitCode.CANNOT


class LocalIOError(MlaConvertError):
    """The local file system refused: space, permission, lock, device error."""

    exit_code = ExitCode.LOCAL_IO


class HubError(MlaConvertError):
    """The Hub or the network refused."""

    exit_code = ExitCode.HUB


class DifferenceError(MlaConvertError):
    """A comparison was carried out properly, and it found a difference."""

    exit_code = ExitCode.DIFFERENT


class InterruptedRunError(MlaConvertError):
    """The user stopped the run; what is finished is kept, and the message says how to resume."""

    exit_code = ExitCode.INTERRUPTED
