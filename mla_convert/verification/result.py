"""What a verification found: plain frozen data, ready for a table or for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one level. ``passed`` is None if it could not be made, and ``summary`` then says why."""

    level: str
    name: str
    passed: bool | None
    summary: str
    details: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "level": self.level,
            "name": self.name,
            "passed": self.passed,
            "summary": self.summary,
            "details": list(self.details),
        }


@dataclass(frozen=True, slots=True)
class Errors:
    """How far an output is from float64: relative (norm of the difference over norm of the reference).

    ``head`` and ``row`` are the worst head and the worst token: one bad head hides in a global figure.
    """

    cosine: float
    relative: float
    head: float
    worst_head: int
    row: float
    worst_row: int

    def within(self, limit: Errors) -> bool:
        """True if every figure is better than its limit."""
        return (
            self.cosine > limit.cosine
            and self.relative <= limit.relative
            and self.head <= limit.head
            and self.row <= limit.row
        )

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "cosine": self.cosine,
            "relative": self.relative,
            "worst_head": {"head": self.worst_head, "relative": self.head},
            "worst_row": {"row": self.worst_row, "relative": self.row},
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """How a top-k selection compares with the float64 one of the original.

    ``missed`` of the ``expected`` keys are not selected. ``worst_gap`` is the largest spread, in one query, of the
    scores of keys that only one side selects, as a share of the spread of all scores; so is ``tolerance``.
    """

    queries: int
    expected: int
    missed: int
    wrong_queries: int
    worst_gap: float
    tolerance: float
    missed_limit: int

    @property
    def passed(self) -> bool:
        """True if every difference is a tie within the tolerance, and there are not too many."""
        return self.wrong_queries == 0 and self.missed <= self.missed_limit

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "queries": self.queries,
            "selected": self.expected,
            "differing": self.missed,
            "differing_limit": self.missed_limit,
            "wrong_queries": self.wrong_queries,
            "worst_gap": self.worst_gap,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """How far a gradient is from float64; ``worst`` is its worst head, row or token, number ``at``."""

    cosine: float
    relative: float
    worst: float
    at: int

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {"cosine": self.cosine, "relative": self.relative, "worst": self.worst, "at": self.at}


@dataclass(frozen=True, slots=True)
class GradientResult:
    """The gradient of one weight (``x`` the input), standard against absorbed, both against float64.

    ``unit`` says what ``worst`` counts: head, row, token, or all where the weight is a vector.
    """

    name: str
    unit: str
    standard: GradientErrors
    absorbed: GradientErrors
    limit: GradientErrors
    passed: bool

    @property
    def strain(self) -> float:
        """The largest error as a share of what it may be."""
        absorbed, limit = self.absorbed, self.limit
        return max(absorbed.relative / limit.relative, absorbed.worst / limit.worst)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "weight": self.name,
            "unit": self.unit,
            "standard": self.standard.document(),
            "absorbed": self.absorbed.document(),
            "limit": self.limit.document(),
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Standard against absorbed attention of one block, both against float64.

    ``gradients`` are those of every weight where the backward pass was asked for; ``absorbed_seconds`` is the time
    that the absorbed path alone took.
    """

    prefix: str
    layer: int | None
    heads: int
    kind: str
    tokens: int
    rows: int
    standard: Errors
    absorbed: Errors
    cosine: float
    limit: Errors
    passed: bool
    selection: Selection | None
    seconds: float
    unmodelled: tuple[str, ...]
    gradients: tuple[GradientResult, ...] = ()
    absorbed_seconds: float = 0.0

    @property
    def forward_passed(self) -> bool:
        """True if outputs and selection are right, whatever the gradients are."""
        return self.absorbed.within(self.limit) and (self.selection is None or self.selection.passed)

    def failure(self) -> str:
        """What is wrong, in one line."""
        where = self.prefix.rstrip(".")
        bad = [gradient for gradient in self.gradients if not gradient.passed]
        if bad and self.forward_passed:
            worst = max(bad, key=lambda gradient: gradient.strain)
            return (
                f"{where}: {len(bad)} of {len(self.gradients)} gradients are off, the most that of {worst.name}: "
                f"{worst.absorbed.relative:.2e} (limit {worst.limit.relative:.2e}), worst {worst.unit} "
                f"{worst.absorbed.at} {worst.absorbed.worst:.2e} ({worst.limit.worst:.2e}), cosine "
                f"{worst.absorbed.cosine:.6f}"
            )
        if self.selection is not None and not self.selection.passed:
            chosen = self.selection
            return (
                f"{where}: the indexer selects other keys: {chosen.missed} of {chosen.expected} (limit "
                f"{chosen.missed_limit}), {chosen.wrong_queries} of {chosen.queries} queries by more than a tie"
            )
        absorbed, limit = self.absorbed, self.limit
        return (
            f"{where}: absorbed error {absorbed.relative:.2e} (limit {limit.relative:.2e}), worst head "
            f"{absorbed.worst_head} {absorbed.head:.2e} ({limit.head:.2e}), worst token {absorbed.worst_row} "
            f"{absorbed.row:.2e} ({limit.row:.2e}), cosine {self.cosine:.6f}"
        )

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "prefix": self.prefix,
            "layer": self.layer,
            "heads": self.heads,
            "kind": self.kind,
            "tokens": self.tokens,
            "rows": self.rows,
            "standard": self.standard.document(),
            "absorbed": self.absorbed.document(),
            "cosine": self.cosine,
            "limit": self.limit.document(),
            "selection": self.selection.document() if self.selection else None,
            "passed": self.passed,
            "gradients": [gradient.document() for gradient in self.gradients],
            "seconds": round(self.seconds, 3),
            "absorbed_seconds": round(self.absorbed_seconds, 3),
            "unmodelled": list(self.unmodelled),
        }


@dataclass(slots=True)
class VerifyReport:
    """Everything ``verify`` found and how it looked."""

    path: str
    against: str | None
    against_note: str
    settings: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    layers: list[LayerResult] = field(default_factory=list)
    ran: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    recorded: bool = False

    @property
    def passed(self) -> bool:
        """True if nothing failed and at least one check was made."""
        made = [check.passed for check in self.checks if check.passed is not None]
        made += [layer.passed for layer in self.layers]
        return bool(made) and all(made)

    @property
    def failures(self) -> list[str]:
        """One line for each thing that failed."""
        failed = [f"{check.name}: {check.summary}" for check in self.checks if check.passed is False]
        return failed + [layer.failure() for layer in self.layers if not layer.passed]

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "command": "verify",
            "path": self.path,
            "against": self.against,
            "against_note": self.against_note,
            "settings": self.settings,
            "passed": self.passed,
            "checks": [check.document() for check in self.checks],
            "layers": [layer.document() for layer in self.layers],
            "ran": dict(sorted(self.ran.items())),
            "seconds": round(self.seconds, 3),
            "recorded": self.recorded,
        }
