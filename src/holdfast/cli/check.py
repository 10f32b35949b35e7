"""``holdfast check``: test an adapter against the promises that apply to any agent runtime, and print the evidence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json
from holdfast.cli.output import note, say, say_error, say_json, say_table
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.proof.check.verdicts import AdapterVerdict

__all__ = ["check"]


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|MODULE:ADAPTER]...",
            help="holdfast (default), langgraph, pydantic-ai, openai-agents, google-adk, all, or your own adapter.",
        ),
    ] = None,
    promises: Annotated[
        list[str] | None, typer.Option("--promise", help="Test only this promise (repeatable).")
    ] = None,
    times: Annotated[
        int, typer.Option("--times", help="Maximum tries of a probe that fails or cannot run.", min=1, max=100)
    ] = 3,
    json: Json = False,
) -> Exit:
    """Test an agent framework's promises. Exit 0: all kept or not offered; 1: some broken; 2: some not testable."""
    from holdfast.proof.check.environments import FRAMEWORKS, target_of
    from holdfast.proof.check.judge import judge
    from holdfast.proof.check.probes import PROBES

    wanted = [one for name in names or ["holdfast"] for one in (FRAMEWORKS if name == "all" else (name,))]
    judgements: list[AdapterVerdict] = []
    failed = False
    try:
        if unknown := [one for one in promises or () if one not in PROBES]:
            raise ConfigurationError(f"unknown promise {unknown[0]!r}", hint=f"choose {', '.join(PROBES)}")
        for name in wanted:
            try:
                target = target_of(name, say=note)
            except ConfigurationError as error:
                if len(wanted) == 1:
                    raise
                say_error(error, as_json=json)
                failed = True
                continue
            done = asyncio.run(judge(target, promises=promises or PROBES, times=times, progress=note))
            judgements.append(done)
            if json:
                say_json(done)
            else:
                _say(done)
    except ConfigurationError as error:
        say_error(error, as_json=json)
        return Exit.USAGE
    except KeyboardInterrupt:
        note("check: interrupted")
        return Exit.INTERRUPTED
    if any(one.has("broken") for one in judgements):
        return Exit.FAILED
    return Exit.USAGE if failed or any(one.has("could not run") for one in judgements) else Exit.OK


def _say(judgement: AdapterVerdict) -> None:
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
