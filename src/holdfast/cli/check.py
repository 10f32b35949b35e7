"""``holdfast check``: test an adapter against the promises that apply to any agent runtime, with evidence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.exits import Exit
from holdfast.cli.output import note, say, say_error, say_json, say_table
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.proof.check.verdicts import Judgement

__all__ = ["check"]

_PAGE = Path("docs/measured/conformance.md")


def check(
    names: Sequence[str], *, promises: Sequence[str] = (), times: int = 3, as_json: bool = False, write: bool = False
) -> Exit:
    """Test adapters. Exit 0 if all promises were kept or are not offered, 1 if one was broken, 2 if one could not run.

    Parameters:
        names: frameworks by name, ``all``, or your own adapters as ``module:Class``.
        promises: promises to test; empty: all.
        times: number of attempts of a probe that finds its promise broken.
        as_json: print JSON, one line per adapter.
        write: write the docs page; run it in the source tree.
    """
    from holdfast.proof.check.environments import FRAMEWORKS, target_of
    from holdfast.proof.check.judge import judge
    from holdfast.proof.check.probes import PROBES
    from holdfast.proof.check.report import page

    wanted = [one for name in names for one in (FRAMEWORKS if name == "all" else (name,))]
    judgements: list[Judgement] = []
    failed = False
    try:
        if unknown := [one for one in promises if one not in PROBES]:
            raise ConfigurationError(f"unknown promise {unknown[0]!r}", hint=f"choose {', '.join(PROBES)}")
        if write and not _PAGE.parent.is_dir():
            raise ConfigurationError(f"folder {_PAGE.parent} not found", hint="run it in Holdfast's source tree")
        for name in wanted:
            try:
                target = target_of(name, say=note)
            except ConfigurationError as error:
                if len(wanted) == 1:
                    raise
                say_error(error, as_json=as_json)
                failed = True
                continue
            done = asyncio.run(judge(target, promises=promises or PROBES, times=times, progress=note))
            judgements.append(done)
            if as_json:
                say_json(done)
            else:
                _say(done)
    except ConfigurationError as error:
        say_error(error, as_json=as_json)
        return Exit.USAGE
    except KeyboardInterrupt:
        note("check: interrupted")
        return Exit.INTERRUPTED
    if write and judgements:
        _PAGE.write_text(page(judgements))
        note(f"wrote {_PAGE}")
    if any(one.has("broken") for one in judgements):
        return Exit.FAILED
    return Exit.USAGE if failed or any(one.has("could not run") for one in judgements) else Exit.OK


def _say(judgement: Judgement) -> None:
    say(f"{judgement.name}: {', '.join(judgement.versions) or 'did not start'}\n")
    say_table(
        ("promise", "verdict", "evidence"),
        ((one.promise, _loud(one.verdict), one.evidence[0]) for one in judgement.findings),
    )
    for finding in judgement.findings:
        for n, evidence in enumerate(finding.evidence[1:], 2):
            say(f"  {finding.promise}, attempt {n}: {evidence}")
    say()


def _loud(verdict: str) -> str:
    return verdict.upper() if verdict in ("broken", "could not run") else verdict
