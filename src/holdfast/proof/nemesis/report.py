"""Markdown page of the findings of a nemesis, for the docs."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from holdfast.clock import system_clock
from holdfast.proof.nemesis.runner import FaultOutcome

__all__ = ["page"]

_FOUND = 10


def page(outcomes: Sequence[FaultOutcome], command: str) -> str:
    """Return a Markdown page with a table of the faults, followed by the findings.

    Parameters:
        outcomes: the outcomes of all faults of one run.
        command: the command that repeats the run.
    """
    return "\n".join(_lines(outcomes, command)) + "\n"


def _lines(outcomes: Sequence[FaultOutcome], command: str) -> Iterator[str]:
    day = datetime.fromtimestamp(system_clock.now(), UTC).date().isoformat()
    yield (
        f"Measured on {day} with holdfast {version('holdfast-agents')}, Python {platform.python_version()}, SQLite "
        f"{sqlite3.sqlite_version} on {platform.system()}, {os.cpu_count()} processors:"
    )
    yield ""
    yield "```text"
    yield command
    yield "```"
    yield ""
    yield (
        "The name of a row after `--nemesis` instead of what stands there repeats that row alone; how busy the machine "
        "is changes the counts."
    )
    yield ""
    yield "| fault | what is done | injected | observations of promises | checked besides | found |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in outcomes:
        injected = "<br>".join(f"{kind}: {times:,}" for kind, times in one.injected.items())
        found = f"**{one.broken:,}**" if one.broken else "nothing"
        title = f"{one.title} ({one.how})" if one.how else one.title
        yield f"| `{one.fault}` | {title} | {injected} | {one.observations:,} | {one.checked:,} | {found} |"
    for one in outcomes:
        if one.found or one.never:
            yield ""
            yield f"## {one.fault}"
            yield ""
            yield from (f"- never injected: {kind}" for kind in one.never)
            yield from (f"- {_plain(what)}" for what in one.found[:_FOUND])


def _plain(text: str) -> str:
    """Return text as one line that Markdown leaves unchanged."""
    text = " ".join(text.split())
    for letter in "\\`*_[]<>|$":
        text = text.replace(letter, f"\\{letter}")
    return text
