"""Findings of a rule: observations, and violations with their evidence."""

from __future__ import annotations

import msgspec

__all__ = ["Ledger", "Violation"]

_EVIDENCE_CHARS = 400


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A broken promise: what happened, and the records and events that prove it, as JSON."""

    what: str
    evidence: tuple[str, ...] = ()


class Ledger:
    """Collects the findings about one promise. Stores the first `keep` violations, and counts all of them."""

    __slots__ = ("_keep", "broken_count", "observations", "violations")

    def __init__(self, *, keep: int = 50) -> None:
        self.observations = 0
        self.broken_count = 0
        self.violations: list[Violation] = []
        self._keep = keep

    def saw(self, times: int = 1) -> None:
        """Count `times` more observations."""
        self.observations += times

    def broken(self, what: str, *evidence: object) -> None:
        """Count a violation. The evidence consists of records, events or other values that can be encoded as JSON."""
        self.broken_count += 1
        if len(self.violations) < self._keep:
            shown = tuple(msgspec.json.encode(item).decode()[:_EVIDENCE_CHARS] for item in evidence)
            self.violations.append(Violation(what=what, evidence=shown))
