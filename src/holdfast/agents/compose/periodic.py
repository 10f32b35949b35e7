"""A composite that runs an agent periodically within one run, and other agents at the same time.

Invariants
- At most one tick's child is active at a time; between ticks, a timer is set and no tick's child exists.
- The ticks are determined by `holdfast.protocol.schedules`. The miss policy applies to ticks that are missed because a
  child is active, the loop is blocked or the clock jumps.
- The agents in `beside` are interrupted after the last tick, and have ended when the composite ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from holdfast.agents.agent import Agent
from holdfast.agents.child_group import ChildGroup
from holdfast.agents.children import Child, ChildTask, cancel_stale_child, recorded_outcome
from holdfast.agents.compose.branch_spec import BranchLike, BranchSpec, branch_spec, composite, named
from holdfast.agents.journal import CallPath
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, InvalidSchedule, RunFailed
from holdfast.protocol.schedules import Cadence, Miss, begin, check_cadence, counted, step
from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished

__all__ = ["periodic"]

Overlap: TypeAlias = Literal["queue", "reject", "interrupt"]

_LEAST_EVERY_S = 0.001
_LOOK_EVERY_S = 30.0
"""Interval at which the wall clock is checked, because it may jump."""


def periodic(
    agent: BranchLike,
    *,
    every_s: float | None = None,
    cron: str | None = None,
    timezone: str = "UTC",
    initial_delay_s: float | None = None,
    jitter_s: float = 0.0,
    max_runs: int | None = None,
    miss: Miss = "skip",
    overlap: Overlap = "queue",
    beside: Iterable[BranchLike] = (),
    name: str = "periodic",
    description: str = "",
) -> Agent:
    """Return an agent that runs another agent at each tick of a clock, within one run.

    Each tick runs as a child of the run, in the log and in the task tree. The composite's answer is the answer of the
    last completed tick. The composite ends after `max_runs` ticks, when it is interrupted, or at the run's deadline
    (the setting ``run_timeout_s``). For work over days or across restarts, put a schedule on a session
    (`Session.schedule`).

    Parameters:
        agent: agent to run at each tick: an agent, a function of a run, the name of one of the host's agents, or a
            result of `branch`. If a tick fails, the composite ends with the tick's error; to restart a failed agent,
            wrap it in `supervised`. If a tick exceeds its deadline, the composite continues.
        every_s, cron, timezone: times of the ticks: either an interval in seconds, or a cron expression in a time zone.
        initial_delay_s: time to the first tick, in seconds; None means `every_s`. With `cron`, this is the minimum time
            to the first tick, and None means 0.
        jitter_s: maximum random delay of each tick, in seconds.
        max_runs: maximum number of ticks; None means no limit.
        miss: policy for missed ticks. ``skip`` runs the newest missed tick if it is at most 60 s late, and drops all
            others. ``delay`` runs the newest missed tick, however late, drops all others, and counts `every_s` from
            then on. ``burst`` runs the newest 100 missed ticks, one after another, and drops older ones.
        overlap: policy for a tick that is due while the previous tick is active. ``queue`` waits until the previous
            tick has ended and then applies `miss`, ``reject`` drops the new tick, and ``interrupt`` interrupts the
            previous tick and then starts the new one.
        beside: agents that get the same request once, at the start, and are interrupted after the last tick.
        name: name of the composite agent.
        description: one-line description of the agent, for people and models.

    Raises:
        ConfigurationError: if the cadence is invalid or never ticks, or another parameter is invalid.
    """
    cadence = Cadence(
        every_s=every_s,
        cron=cron,
        timezone=timezone,
        initial_delay_s=initial_delay_s,
        jitter_s=jitter_s,
        max_runs=max_runs,
        miss=miss,
    )
    try:
        check_cadence(cadence, now=system_clock.now(), least_every_s=_LEAST_EVERY_S)
    except InvalidSchedule as error:
        raise ConfigurationError(f"{name!r}: {error.message}", hint=error.hint) from None
    if overlap not in ("queue", "reject", "interrupt"):
        raise ConfigurationError(f"unknown overlap {overlap!r}", hint="choose queue, reject or interrupt")
    ticking, streamers = replace(branch_spec(agent)), named(beside)  # a copy: `beside` may have the same branch
    work = _Periodic(part=ticking, cadence=cadence, overlap=overlap, beside=streamers)
    return composite(name, work, (ticking, *streamers), description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Periodic:
    """The work of an agent that `periodic` made."""

    part: BranchSpec
    cadence: Cadence
    overlap: Overlap
    beside: tuple[BranchSpec, ...]

    async def __call__(self, run: Run) -> str:
        return await _Ticks(run, self).answer()


class _Ticks:
    """One run of a periodic agent."""

    def __init__(self, run: Run, work: _Periodic) -> None:
        self._run = run
        self._context = run.context
        self._work = work
        self._branches: ChildGroup[BranchSpec] = ChildGroup(run.context, self._ended)
        self._streams = [(part, self._task(part, CallPath(run.context.next_id()))) for part in work.beside]
        self._ticks = run.context.next_id()
        self._begun = 0  # ticks so far, including earlier attempts
        self._progress = begin(work.cadence, run.run_id, run.now())
        self._child: Child | None = None
        self._next: ChildTask | None = None  # of the tick that an earlier attempt left open
        self._wanted = False
        self._text = ""
        self._problem: tuple[str, BaseException | None] | None = None

    def _task(self, part: BranchSpec, place: CallPath) -> ChildTask:
        return part.task(self._run, self._run.text, place)

    @property
    def _place(self) -> CallPath:
        """The call path of the next tick."""
        return CallPath(f"{self._ticks}.{self._begun + 1}")

    async def answer(self) -> str:
        """Run all ticks and return the answer. Raises `RunFailed` if a tick or an agent in `beside` fails."""
        try:
            self._take_past()
            await self._branches.driven(self._drive)
            if self._problem is not None:
                error, problem = self._problem
                raise RunFailed(error) from problem
        except BaseException:
            if self._text and not self._context.closed:
                _ = self._run.emit(self._text)
            raise
        return self._text

    def _take_past(self) -> None:
        """Apply the ticks that earlier attempts recorded, so that these ticks are not repeated."""
        while self._context.journal.knows_child(self._place.path):
            task = self._task(self._work.part, self._place)
            past = recorded_outcome(self._context, task)
            if past is None:
                self._next = task
                self._wanted = self._progress.tick_at is not None
                break
            self._begun += 1
            self._took(past, None)
            self._progress = counted(self._work.cadence, self._progress, fired=True)

    async def _drive(self) -> None:
        for part, task in self._streams:
            past = recorded_outcome(self._context, task)
            if past is None:
                await self._branches.begin(task, part)
            else:
                self._ended(part, past, None)
        while self._problem is None and not (self._over and self._child is None):
            if self._wanted and self._child is None:
                await self._begin()
            elif not self._tick():
                await self._branches.changed(self._until())
        over = self._cause("the ticks are over" if self._problem is None else self._problem[0])
        self._branches.stop_all(over)
        if self._next is not None:
            cancel_stale_child(self._context, self._next, over)
        while self._branches.busy:
            await self._branches.changed()

    @property
    def _over(self) -> bool:
        return self._progress.tick_at is None and not self._wanted

    def _tick(self) -> bool:
        """Check the clock; return whether a tick came due or was missed."""
        if self._child is not None and self._work.overlap == "queue":
            return False
        cadence, before = self._work.cadence, self._progress
        tick_at, self._progress = step(cadence, self._run.run_id, before, self._run.now())
        if tick_at is not None:
            if self._wanted or (self._child is not None and self._work.overlap == "reject"):
                self._progress = counted(cadence, self._progress, fired=False)
            else:
                self._wanted = True
                if self._child is not None:
                    self._branches.stop(self._child, self._cause("the next tick came"))
        return self._progress is not before

    def _until(self) -> float | None:
        """Return the loop time of the next check, or None if the next check follows the end of a child."""
        due_at = self._progress.due_at
        if due_at is None or (self._child is not None and self._work.overlap == "queue"):
            return None
        delay_s = min(due_at - self._run.now(), _LOOK_EVERY_S)
        return asyncio.get_running_loop().time() + max(0.0, delay_s)

    async def _begin(self) -> None:
        task = self._next or self._task(self._work.part, self._place)
        self._next = None
        self._begun += 1
        self._wanted = False
        self._progress = counted(self._work.cadence, self._progress, fired=True)
        self._child = await self._branches.begin(task, self._work.part)

    def _cause(self, reason: str) -> Cause:
        return Cause(kind="stop", reason=reason, origin=self._run.agent.name, at=self._run.now())

    def _ended(self, part: BranchSpec, finished: ChildFinished, problem: BaseException | None) -> None:
        if part is self._work.part:
            self._child = None
            self._took(finished, problem)
        elif finished.status == "failed":
            self._failed(finished, problem)

    def _took(self, finished: ChildFinished, problem: BaseException | None) -> None:
        if finished.status == "completed":
            self._text = finished.text
        elif finished.status == "failed":
            self._failed(finished, problem)

    def _failed(self, finished: ChildFinished, problem: BaseException | None) -> None:
        if self._problem is None:
            self._problem = finished.error or "a tick failed", problem
