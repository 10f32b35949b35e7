"""Markdown table that compares several adapters, for the docs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from holdfast.clock import system_clock
from holdfast.proof.check.environments import FRAMEWORKS
from holdfast.proof.check.verdicts import AdapterVerdict, Finding

__all__ = ["page"]


def page(judgements: Sequence[AdapterVerdict]) -> str:
    """Return a Markdown page: a table of all verdicts side by side, then the evidence for each adapter.

    Parameters:
        judgements: the adapters' verdicts of one run, all on the same promises.
    """
    return "\n".join(_lines(judgements)) + "\n"


def _lines(judgements: Sequence[AdapterVerdict]) -> Iterator[str]:
    day = datetime.fromtimestamp(system_clock.now(), UTC).date().isoformat()
    python = platform.python_version()
    yield f"Measured on {day} with Python {python} on {platform.system()}, {os.cpu_count()} processors:"
    yield ""
    yield "```text"
    yield f"holdfast check {' '.join(one.name for one in judgements)} --write-docs"
    yield "```"
    yield ""
    yield from _row("promise", *(_title(one) for one in judgements))
    yield from _row("---", *("---" for _ in judgements))
    for findings in zip(*(one.findings for one in judgements), strict=True):
        yield from _row(findings[0].text, *(_verdict(one) for one in findings))
    for judgement in judgements:
        yield ""
        yield f"## {_title(judgement)}"
        yield ""
        yield f"{', '.join(judgement.versions) or 'No versions are known'}. Every try that was made:"
        yield ""
        yield from _row("promise", "verdict", "evidence")
        yield from _row("---", "---", "---")
        for finding in judgement.findings:
            yield from _row(finding.promise, _verdict(finding), "<br>".join(map(_plain, finding.evidence)))


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def _title(judgement: AdapterVerdict) -> str:
    return FRAMEWORKS[judgement.name].title if judgement.name in FRAMEWORKS else judgement.name


def _verdict(finding: Finding) -> str:
    return f"**{finding.verdict}**" if finding.verdict == "broken" else finding.verdict


def _plain(text: str) -> str:
    """Return text as one line that Markdown leaves unchanged."""
    text = " ".join(text.split())
    for letter in "\\`*_[]<>|$":
        text = text.replace(letter, f"\\{letter}")
    return text
