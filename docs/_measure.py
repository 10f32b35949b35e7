"""Measure what the docs show about faults and other frameworks, and write docs/measured.

python docs/_measure.py check                         judge all frameworks (minutes; makes environments for them)
python docs/_measure.py check holdfast langgraph      judge these
python docs/_measure.py nemesis --seed 7              inject all faults (minutes)
python docs/_measure.py escapes                       try to break out of each wall (minutes; needs root for all rows)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from _text import table

from holdfast.clock import system_clock
from holdfast.errors import HoldfastError
from holdfast.proof.check.environments import FRAMEWORKS, target_of
from holdfast.proof.check.judge import judge
from holdfast.proof.check.probes import PROBES
from holdfast.proof.check.verdicts import AdapterVerdict, Finding
from holdfast.proof.nemesis import EpisodePlan, FaultOutcome, chosen, run_faults

TARGET = Path(__file__).resolve().parent / "measured"
FOUND = 10
"""Findings that the page shows for each fault."""


def conformance_page(judgements: Sequence[AdapterVerdict]) -> str:
    """Return a table of all verdicts side by side, then the evidence for each adapter.

    Parameters:
        judgements: the verdicts on each adapter, all on the same promises.
    """
    names = " ".join(one.name for one in judgements)
    head = ("promise", *(title_of(one) for one in judgements))
    findings = zip(*(one.findings for one in judgements), strict=True)
    rows = ((same[0].text, *map(verdict_of, same)) for same in findings)
    out = [measured_on(f"Python {platform.python_version()}"), command(f"holdfast check {names}"), table(head, rows)]
    for judgement in judgements:
        evidence = (
            (finding.promise, verdict_of(finding), "<br>".join(map(escaped, finding.evidence)))
            for finding in judgement.findings
        )
        out += [
            f"## {title_of(judgement)}\n",
            f"{', '.join(judgement.versions) or 'No versions are known'}. Every try that was made:\n",
            table(("promise", "verdict", "evidence"), evidence),
        ]
    return "\n".join(out)


def title_of(judgement: AdapterVerdict) -> str:
    """Return the name of a framework as its authors write it."""
    return FRAMEWORKS[judgement.name].title if judgement.name in FRAMEWORKS else judgement.name


def verdict_of(finding: Finding) -> str:
    """Return a verdict, in bold if a promise was broken."""
    return f"**{finding.verdict}**" if finding.verdict == "broken" else finding.verdict


def nemesis_page(outcomes: Sequence[FaultOutcome], again: str) -> str:
    """Return a table of the faults, then what was found.

    Parameters:
        outcomes: the outcomes of all faults that one run injected.
        again: the command that repeats the run.
    """
    programs = f"holdfast {version('holdfast-agents')}, Python {platform.python_version()}"
    rows = (
        (
            f"`{one.fault}`",
            f"{one.title} ({one.how})" if one.how else one.title,
            "<br>".join(f"{kind}: {times:,}" for kind, times in one.injected.items()),
            f"{one.observations:,}",
            f"{one.checked:,}",
            f"**{one.broken:,}**" if one.broken else "nothing",
        )
        for one in outcomes
    )
    out = [
        measured_on(f"{programs}, SQLite {sqlite3.sqlite_version}"),
        command(again),
        "To repeat one row, name it after `--nemesis`. The counts depend on how busy the machine is.\n",
        table(("fault", "what is done", "injected", "observations of promises", "other checks", "found"), rows),
    ]
    for one in outcomes:
        if one.found or one.never:
            never = (f"- never injected: {kind}" for kind in one.never)
            found = (f"- {escaped(what)}" for what in one.found[:FOUND])
            out += [f"## {one.fault}\n", "\n".join((*never, *found, ""))]
    return "\n".join(out)


def measured_on(programs: str) -> str:
    """Return the line above a page's command."""
    day = datetime.fromtimestamp(system_clock.now(), UTC).date().isoformat()
    return f"Measured on {day} with {programs} on {platform.system()}, {os.cpu_count()} processors:\n"


def command(text: str) -> str:
    """Return a command as a block."""
    return f"```text\n{text}\n```\n"


def escaped(text: str) -> str:
    """Return text as one line that Markdown leaves unchanged. `table` escapes the bars."""
    text = " ".join(text.split())
    for letter in "\\`*_[]<>$":
        text = text.replace(letter, f"\\{letter}")
    return text


def measure_frameworks(names: Iterable[str], *, promises: Sequence[str], times: int) -> str:
    """Judge adapters, each in its environment, and return the page."""
    judgements = []
    for name in names:
        target = target_of(name, say=print)
        judgements.append(asyncio.run(judge(target, promises=promises, times=times, progress=print)))
    return conformance_page(judgements)


def measure_faults(names: str, *, seed: int) -> str:
    """Inject faults and return the page."""
    done = asyncio.run(run_faults(chosen(names), EpisodePlan(seed=seed), print))
    return nemesis_page([outcome for outcome, _ in done], f"holdfast storm --nemesis {names} --seed {seed}")


def measure_escapes() -> str:
    """Try all escapes against each wall and return the page."""
    sys.path.insert(0, str(TARGET.parents[1]))
    from tests.system.escapes.page import measure, tried_page

    head = [measured_on(f"Python {platform.python_version()}"), command("python docs/_measure.py escapes")]
    return "\n".join([*head, tried_page(measure(print), table)])


def main(arguments: Sequence[str], target: Path = TARGET) -> int:
    """Measure, write the page into the folder `target`, and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure, and write docs/measured.")
    pages = parser.add_subparsers(dest="page", required=True)
    check = pages.add_parser("check", help="judge frameworks; write conformance.md")
    check.add_argument("names", nargs="*", default=list(FRAMEWORKS), help="as for 'holdfast check'")
    check.add_argument("--promise", action="append", choices=PROBES, help="judge only this one (repeatable)")
    check.add_argument("--times", type=int, default=3, help="maximum tries of a probe that fails")
    nemesis = pages.add_parser("nemesis", help="inject faults; write nemesis.md")
    nemesis.add_argument("names", nargs="?", default="all", help="as for 'holdfast storm --nemesis'")
    nemesis.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    pages.add_parser("escapes", help="try to break out of each wall; write escapes.md")
    asked = parser.parse_args(arguments)
    try:
        if asked.page == "check":
            text = measure_frameworks(asked.names, promises=asked.promise or tuple(PROBES), times=asked.times)
        elif asked.page == "escapes":
            text = measure_escapes()
        else:
            text = measure_faults(asked.names, seed=asked.seed)
    except HoldfastError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        return 1
    page = target / {"check": "conformance.md", "nemesis": "nemesis.md", "escapes": "escapes.md"}[asked.page]
    page.write_text(text, "utf-8")
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
