"""The judge's verdict on one promise, and all its verdicts on one adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["AdapterVerdict", "Finding", "Verdict", "broken", "kept", "worst"]

Verdict = Literal["kept", "broken", "not offered", "could not run"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's finding about one promise.

    Parameters:
        promise: short name of the promise.
        text: full text of the promise.
        verdict: the verdict; ``not offered`` if the framework lacks the feature, and ``could not run`` if the adapter
            failed or the probe could not reach the point that it tests.
        evidence: observations of each try, with numbers.
    """

    promise: str
    text: str
    verdict: Verdict
    evidence: tuple[str, ...]


class AdapterVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """All findings about one adapter.

    Parameters:
        name: the adapter's name in the table.
        versions: versions of the adapter's packages, with the framework first.
        findings: one finding for each tested promise.
    """

    name: str
    versions: tuple[str, ...]
    findings: tuple[Finding, ...]

    def has(self, verdict: Verdict) -> bool:
        """Whether any promise has this verdict."""
        return any(finding.verdict == verdict for finding in self.findings)


def kept(evidence: str) -> tuple[Verdict, str]:
    """Return the result of a probe whose promise was kept."""
    return "kept", evidence


def broken(evidence: str) -> tuple[Verdict, str]:
    """Return the result of a probe whose promise was broken."""
    return "broken", evidence


def worst(tries: Sequence[tuple[Verdict, str]]) -> Verdict:
    """Return ``broken`` if any try found the promise broken, else the verdict of the last try."""
    return next((verdict for verdict, _ in tries if verdict == "broken"), tries[-1][0])
