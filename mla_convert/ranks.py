"""The ranks of one run, as one of them sees it: which it is, and what it does in step with the others.

Rank 0 leads: it is told (``gather``) and tells (``tell``). Here a run is one process, alone with itself; of several
``many_ranks`` knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from mla_convert.progress import Progress


def deal(sizes: Sequence[int], count: int, load: Sequence[int] = ()) -> list[list[int]]:
    """Deal things out to ``count`` ranks by size, the largest first, each to the rank with the least: indices by rank.

    ``load`` is what ranks have to do already.
    """
    loads = [*load, *[0] * (count - len(load))]
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min(range(count), key=loads.__getitem__)
        dealt[rank].append(index)
        loads[rank] += sizes[index]
    return dealt


class Ranks:
    """The ranks of a run, as one of them sees it. This class is a run of one process.

    Attributes:
        number: Which of them this is.
        count: How many there are.
    """

    number = 0
    count = 1

    @property
    def leads(self) -> bool:
        """True for rank 0."""
        return self.number == 0

    def gather(self, value: Any) -> list[Any]:
        """Tell rank 0 a value; rank 0 waits for that of every rank, and gets them in order. Others get nothing."""
        return [value]

    def tell(self, value: Any = None) -> Any:
        """What rank 0 says; the others wait for it."""
        return value

    def counting(self, progress: Progress) -> Progress:
        """Where this rank counts its bytes: on rank 0 in ``progress``, where those of all ranks meet."""
        return progress

    def count_all(self, totals: Sequence[int] | None = None) -> None:
        """From now on rank 0's stage of progress counts what the others do; at its end, exactly ``totals``."""

    @property
    def counted(self) -> int:
        """What a rank other than 0 has counted."""
        return 0

    def attach(self, stop: threading.Event, check: Callable[[], None]) -> None:
        """Set ``stop`` once the run is to end because of another rank; call ``check`` while waiting."""

    def check(self) -> None:
        """Raise what ended the run elsewhere, if anything did."""

    def settle(self, error: BaseException) -> None:
        """This rank fails: tell the others. Rank 0 comes back when they have stopped."""
