"""How a storm tells its progress and its report, and how it is interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cli.output import note, say, say_table
from holdfast.clock import system_clock

if TYPE_CHECKING:
    from holdfast.proof.checker.judgement import Report

__all__ = ["StormProgress", "report_figures", "say_report", "sigterm_interrupts"]

_PROGRESS_S = 1.0
_SHOWN = 3


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside the block, treat SIGTERM as Ctrl-C, so that a storm ends its servers and removes its folder."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StormProgress:
    """Printer of progress on stderr; a line that differs only in its figures is printed at most once a second."""

    def __init__(self) -> None:
        self._began = system_clock.monotonic()
        self._last = ("", 0.0)

    def __call__(self, text: str) -> None:
        """Print `text`, or leave it out if it differs only in its figures from the line of a moment ago."""
        now = system_clock.monotonic()
        kind = "".join(character for character in text if not character.isdigit())
        if kind == self._last[0] and now - self._last[1] < _PROGRESS_S:
            return
        self._last = (kind, now)
        note(f"{now - self._began:6.1f} s  {text}")


def report_figures(report: Report, *, seed: int | None, seconds: float) -> dict[str, object]:
    """Return a report as a value for JSON, with the storm's seed and duration."""
    return {
        "passed": report.passed,
        "seed": seed,
        "seconds": round(seconds, 1),
        "records": report.records,
        "promises": list(report.judgements),
        "failpoints": {
            "registered": len(report.failpoints),
            "hit": sum(report.failpoints.values()),
            "missed": sorted(name for name, hit in report.failpoints.items() if not hit),
        },
        "hostile": list(report.hostile),
        "bombs": report.bombs,
    }


def _rows(report: Report) -> Iterable[tuple[str, str, str, str]]:
    for judgement in report.judgements:
        verdict: str = judgement.verdict
        if judgement.broken:
            verdict = f"BROKEN {judgement.broken} times"
        elif not judgement.passed:
            verdict = "NOT OBSERVED"
        elif judgement.verdict == "not observed":
            verdict = "not observed (not visible here)"
        yield judgement.promise, judgement.name, f"{judgement.observations:,}", verdict


def say_report(report: Report) -> None:
    """Print a report: a row for each promise, the first violations, and whether every promise was kept."""
    say_table(("", "promise", "observations", "verdict"), _rows(report))
    for judgement in report.judgements:
        for violation in judgement.violations[:_SHOWN]:
            say(f"\n{judgement.promise}: {violation.what}")
            for evidence in violation.evidence:
                say(f"    {evidence}")
    if report.failpoints:
        missed = sorted(name for name, hit in report.failpoints.items() if not hit)
        say(f"\nfailpoints: {len(report.failpoints) - len(missed)} of {len(report.failpoints)} were hit")
        for name in missed:
            say(f"    NOT HIT {name}")
    if report.hostile:
        say("\nthe hostile principal")
        say_table(
            ("act", "done", "felt", "refused"),
            (
                (act.name, f"{act.did:,}", f"{act.felt:,}" if act.felt else "NOT FELT", f"{act.refused:,}")
                for act in report.hostile
            ),
        )
        if not report.bombs:
            say("\nbombs: NOT THROWN (programs run without walls here)")
    say("\nevery promise was kept" if report.passed else "\nnot every promise was kept")
