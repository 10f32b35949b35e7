"""Judge an adapter: run every probe in a fresh process, and repeat each probe that fails or cannot run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.proof.check.kit import NotOffered
from holdfast.proof.check.probes import PROBES, Inconclusive, ProbeBench, answer
from holdfast.proof.check.subject import AdapterFailed, Subject, SubjectTarget
from holdfast.proof.check.verdicts import AdapterVerdict, Finding, Verdict, worst
from holdfast.testing.model_server import ModelServer

__all__ = ["judge"]


async def judge(
    target: SubjectTarget,
    *,
    promises: Iterable[str] = tuple(PROBES),
    times: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> AdapterVerdict:
    """Test whether an adapter keeps the promises, and return the verdicts.

    Parameters:
        target: the adapter and its Python interpreter.
        promises: short names of the promises to test; all promises by default.
        times: maximum number of tries for a probe that finds its promise broken or cannot run. A promise counts as
            broken if any try finds it broken.
        progress: called with a one-line message for each verdict.
    """
    versions: tuple[str, ...] = ()
    findings: list[Finding] = []
    hopeless = ""  # why no probe can run: the adapter did not answer a plain question, however often it was tried
    for promise in promises:
        tries: list[tuple[Verdict, str]] = []
        works = False
        while not tries or (tries[0][0] in ("broken", "could not run") and len(tries) < times):
            if hopeless:
                tries.append(("could not run", f"not tried again: {hopeless}"))
                break
            verdict, evidence, seen, answered = await _try(target, promise)
            versions = seen or versions
            works = works or answered
            tries.append((verdict, evidence))
        if not works and not findings:
            hopeless = tries[-1][1]
        verdict = worst(tries)
        findings.append(
            Finding(
                promise=promise,
                text=(PROBES[promise].__doc__ or "").strip(),
                verdict=verdict,
                evidence=tuple(text if one == verdict else f"{one}: {text}" for one, text in tries),
            )
        )
        progress(f"{target.name}: {promise}: {verdict}")
    return AdapterVerdict(name=target.name, versions=versions, findings=tuple(findings))


async def _try(target: SubjectTarget, promise: str) -> tuple[Verdict, str, tuple[str, ...], bool]:
    """Run one probe; return its verdict, its evidence, the versions, and whether a plain question was answered."""
    versions: tuple[str, ...] = ()
    answered = False
    with tempfile.TemporaryDirectory(prefix="holdfast-check-") as name:
        try:
            async with (
                ModelServer(answer) as server,
                Subject(target, model_url=f"{server.url}/v1", folder=Path(name)) as subject,
            ):
                versions = tuple(subject.versions)
                await _control(subject)
                answered = True
                server.exchanges.clear()
                verdict, evidence = await PROBES[promise](ProbeBench(subject, server, Path(name)))
        except NotOffered as error:
            return "not offered", str(error), versions, answered
        except (AdapterFailed, Inconclusive, TimeoutError) as error:
            return "could not run", str(error) or type(error).__name__, versions, answered
    return verdict, evidence, versions, answered


async def _control(subject: Subject) -> None:
    """Send one plain message, so that a broken adapter is not mistaken for a broken promise."""
    await subject.ask("open", "control", "carl")
    said = await subject.ask("result", await subject.ask("submit", "control", "reply hello"))
    if "hello" not in said:
        raise Inconclusive(f"the answer to a plain message must contain 'hello', but was {said!r}")
