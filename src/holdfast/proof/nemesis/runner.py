"""Run a nemesis: one episode for each fault, each judged separately."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, format_error
from holdfast.proof.checker.judgement import Report, judge
from holdfast.proof.history import FailpointHit, HostKilled
from holdfast.proof.nemesis.episode import EpisodePlan, Tally, open_episode
from holdfast.proof.nemesis.faults import FAULTS, KILLS, Fault
from holdfast.proof.storm.access import Progress
from holdfast.proof.storm.killing import registered_failpoints
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.runner import conduct_kills

__all__ = ["FaultOutcome", "run_against", "run_faults", "run_kills"]

_KILL_TITLE = "SIGKILL at every failpoint of every write, then at random moments."
_RANDOM_KILLS_S = 2.0
_KILL_SESSIONS = 6


class FaultOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one fault.

    Parameters:
        fault, title: name and title of the fault.
        how: how the fault was injected, if there is more than one way; else empty.
        injected: number of injections, by kind.
        observations: number of observations of promises.
        checked: number of further checks.
        broken: total number of violations, of promises that should have been observed but were not, and of failed
            checks.
        found: descriptions of the failed checks, of the first violations of each promise, and of the promises that
            should have been observed but were not.
        seconds: duration of the episode, in seconds.
    """

    fault: str
    title: str
    how: str = ""
    injected: dict[str, int]
    observations: int
    checked: int = 0
    broken: int
    found: tuple[str, ...]
    seconds: float

    @property
    def never(self) -> tuple[str, ...]:
        """The kinds of injection that never happened."""
        return tuple(kind for kind, times in self.injected.items() if not times)

    @property
    def passed(self) -> bool:
        """Whether every kind of injection happened, promises were observed, and ``broken`` is 0."""
        return not self.broken and not self.never and self.observations > 0


def _outcome(fault: Fault, how: str, tally: Tally, report: Report, seconds: float) -> FaultOutcome:
    found = [
        f"{judgement.promise}: {violation.what}"
        for judgement in report.judgements
        for violation in judgement.violations
    ]
    found += [
        f"{judgement.promise} was not observed"
        for judgement in report.judgements
        if judgement.verdict == "not observed" and judgement.demanded
    ]
    broken = sum(judgement.broken or not judgement.passed for judgement in report.judgements)
    return FaultOutcome(
        fault=fault.name,
        title=fault.title,
        how=how,
        injected={kind: tally.injected[kind] for kind in fault.kinds},
        observations=sum(judgement.observations for judgement in report.judgements),
        checked=tally.checked,
        broken=broken + len(tally.found),
        found=(*tally.found, *found),
        seconds=seconds,
    )


async def run_against(fault: Fault, ask: EpisodePlan, progress: Progress) -> tuple[FaultOutcome, StormRecorder]:
    """Run one episode with a fault, and return the outcome and the recorder of the history.

    Raises `HoldfastError` if the server cannot be started.
    """
    began = system_clock.monotonic()
    recorder = StormRecorder()
    how = ""

    def say(text: str) -> None:
        progress(f"{fault.name}: {text}")

    with tempfile.TemporaryDirectory(prefix="holdfast-nemesis-") as name:
        async with open_episode(
            ask, recorder, Path(name), fault.settings, kills=fault.kills, small=fault.disk, progress=say
        ) as episode:
            if fault.disk:
                how = episode.disk.how
            await episode.begin()
            for act in (partial(fault.inject, episode), episode.finish):
                try:
                    await act()
                except (HoldfastError, OSError) as error:
                    episode.tally.found.append(f"it broke off: {format_error(error)}")
                if not episode.is_alive():
                    break
    report = judge(recorder.records)
    return _outcome(fault, how, episode.tally, report, system_clock.monotonic() - began), recorder


async def run_kills(
    ask: EpisodePlan, progress: Progress, *, points: tuple[str, ...] | None = None
) -> tuple[FaultOutcome, StormRecorder]:
    """Send SIGKILL at each of `points`, or else at every failpoint, then at random; return the outcome and history."""
    began = system_clock.monotonic()
    recorder = StormRecorder()
    tally = Tally()
    try:
        await conduct_kills(
            recorder,
            sessions=min(_KILL_SESSIONS, ask.sessions),
            seconds=_RANDOM_KILLS_S,
            kill_every_s=_RANDOM_KILLS_S / 3,
            seed=ask.seed,
            progress=lambda text: progress(f"{KILLS}: {text}"),
            points=registered_failpoints() if points is None else points,
        )
    except (HoldfastError, OSError) as error:
        tally.found.append(f"it broke off: {format_error(error)}")
    report = judge(recorder.records)
    hits = dict.fromkeys(report.failpoints, 0)
    random_kills = 0
    for record in recorder.records:
        if isinstance(record, FailpointHit):
            hits[record.name] += 1
        elif isinstance(record, HostKilled) and record.failpoint is None:
            random_kills += 1
    tally.injected["at a failpoint"] = sum(hits.values())
    tally.injected["at random"] = random_kills
    for name, times in hits.items():
        tally.check(times > 0, f"failpoint {name} was never hit")
    fault = Fault(name=KILLS, title=_KILL_TITLE, kinds=("at a failpoint", "at random"), inject=_nothing)
    return _outcome(fault, "", tally, report, system_clock.monotonic() - began), recorder


async def _nothing(episode: object) -> None:
    """Do nothing: the storm injects this fault."""


async def run_faults(
    names: Sequence[str], ask: EpisodePlan, progress: Progress
) -> list[tuple[FaultOutcome, StormRecorder]]:
    """Run an episode for each named fault in turn, and return the outcomes with the recorders of the histories.

    Raises `HoldfastError` if a server cannot be started.
    """
    done = []
    for name in names:
        one = await run_kills(ask, progress) if name == KILLS else await run_against(FAULTS[name], ask, progress)
        done.append(one)
    return done
