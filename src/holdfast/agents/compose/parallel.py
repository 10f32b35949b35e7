"""Branches at the same time: all, the first, or so many of them have to complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.agents.agent import Agent
from holdfast.agents.branches import Branches
from holdfast.agents.children import leave_off, past_end
from holdfast.agents.compose.answers import Join, joined, result_of, texts_in_order
from holdfast.agents.compose.parts import BranchLike, Part, named, shape
from holdfast.agents.journal import Branch
from holdfast.errors import BranchesFailed, ConfigurationError
from holdfast.protocol.branches import BranchResult, Need, Quorum, Verdict, told_results
from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished

__all__ = ["parallel"]

OnFailure = Literal["interrupt", "wait"]


def parallel(
    *branches: BranchLike,
    name: str = "parallel",
    need: Need = "all",
    on_failure: OnFailure = "interrupt",
    concurrency: int | None = None,
    join: Join | None = None,
    description: str = "",
) -> Agent:
    """An agent that asks several others the same at the same time.

    Each branch is a child of the run: it is in the log and in the task tree under its name, streams there, and what it
    finished is not done again in a later attempt. The agent's own text is said at the end: what `join` makes of the
    answers. Where it is interrupted or fails, its text are the answers that were there by then.

    As soon as it is decided that enough branches have completed, the others are interrupted with a cause that says so,
    and are gone (or quarantined, see the receipt) when the agent ends.

    Parameters:
        branches: agents, functions of a run, names of agents that the host has, or what `branch` makes of them.
        need: ``all`` have to complete; the ``first`` one does and the others are not waited for; so many (a number),
            and the others are not waited for; ``some``: all are waited for, and at least one has to complete.
        on_failure: once too few branches can complete, ``interrupt`` the others with a cause that names the one that
            did not, or ``wait`` for them.
        concurrency: how many at a time; default: all. They begin in their order.
        join: gets the results that count, in the order of the branches, and gives the answer. It may be async; else
            it must not block. Default: their texts, a blank line between them.
        description: one line for people and models.

    Raises:
        ConfigurationError: no branches, or bounds that cannot be. The agent's run raises `BranchesFailed` when too few
            completed; it has the results of all.
    """
    parts = named(branches)
    if on_failure not in ("interrupt", "wait"):
        raise ConfigurationError(f"on_failure={on_failure!r} is not known", hint="use interrupt or wait")
    room: object = concurrency
    if room is not None and (not isinstance(room, int) or room < 1):
        raise ConfigurationError(f"concurrency is {concurrency!r}; it is a whole number, at least 1")
    work = _Parallel(
        parts=parts,
        quorum=Quorum(need, len(parts)),
        interrupts=on_failure == "interrupt",
        concurrency=concurrency or len(parts),
        join=join or texts_in_order,
    )
    return shape(name, work, parts, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parallel:
    """The work of the agent."""

    parts: tuple[Part, ...]
    quorum: Quorum
    interrupts: bool
    concurrency: int
    join: Join

    async def __call__(self, run: Run) -> str:
        return await _Race(run, self).answer()


class _Race:
    """One run of it."""

    def __init__(self, run: Run, work: _Parallel) -> None:
        self._run = run
        self._work = work
        self._branches = Branches(run, self._take)
        self._tasks = [part.task(run, run.text, Branch(run._next_id())) for part in work.parts]
        self._waiting = deque(range(len(self._tasks)))
        self._results: dict[int, BranchResult] = {}
        self._order: list[int] = []  # those that completed, as they did
        self._problem: BaseException | None = None  # of the first that did not
        self._decided: Cause | None = None

    async def answer(self) -> str:
        """Let the branches run until it is decided. Raises `BranchesFailed`."""
        self._take_past()
        try:
            await self._branches.driven(self._drive)
            if self._verdict() == "lost":
                raise self._too_few() from self._problem
            return await joined(self._work.join, self._counted())
        except BaseException:
            self._say_finished()
            raise

    def _take_past(self) -> None:
        """What is in the log is not done again; it ended in the order of the log."""
        ends: list[tuple[int, ChildFinished]] = []
        for number in self._waiting:
            past = past_end(self._run, self._tasks[number])
            if past is not None:
                ends.append((number, past))
        for number, past in sorted(ends, key=lambda end: end[1].seq):
            self._waiting.remove(number)
            self._take(number, past, None)

    async def _drive(self) -> None:
        branches = self._branches
        while self._decided is None and (self._waiting or branches.busy):
            if self._waiting and branches.busy < self._work.concurrency:
                number = self._waiting.popleft()
                await branches.begin(self._tasks[number], number)
            else:
                await branches.changed()
        if self._decided is not None:
            for number in self._waiting:
                if (left := leave_off(self._run, self._tasks[number], self._decided)) is not None:
                    self._results[number] = result_of(self._tasks[number].label, left)
        while branches.busy:
            await branches.changed()

    def _take(self, number: int, finished: ChildFinished, problem: BaseException | None) -> None:
        result = self._results[number] = result_of(self._tasks[number].label, finished)
        if result.completed:
            self._order.append(number)
        elif self._problem is None:
            self._problem = problem
        verdict = self._verdict()
        if self._decided is None and (verdict == "met" or (verdict == "lost" and self._work.interrupts)):
            self._decided = self._cause(result, verdict)
            self._branches.stop_all(self._decided)

    def _verdict(self) -> Verdict:
        return self._work.quorum.verdict(len(self._order), len(self._results))

    def _cause(self, last: BranchResult, verdict: Verdict) -> Cause:
        if verdict == "lost":
            reason = f"branch {last.name!r} did not complete: {last.error}"
        elif self._work.quorum.required == 1:
            reason = f"branch {last.name!r} was first"
        else:
            reason = f"{len(self._order)} branches have completed, the last of them {last.name!r}: that is enough"
        return Cause(kind="stop", reason=reason, origin=self._run.agent.name, at=self._run.now())

    def _counted(self) -> Sequence[BranchResult]:
        """The answers that count, in the order of the branches."""
        quorum = self._work.quorum
        counted = self._order if quorum.waits else self._order[: quorum.required]
        return [self._results[number] for number in sorted(counted)]

    def _too_few(self) -> BranchesFailed:
        results = tuple(
            self._results.get(number) or BranchResult(name=task.label, status="not_begun")
            for number, task in enumerate(self._tasks)
        )
        done, total = len(self._order), len(results)
        told = told_results(results, decided=self._decided)
        return BranchesFailed(
            f"{done} of {total} branches completed, {self._work.quorum.required} have to: {told}",
            results=results,
        )

    def _say_finished(self) -> None:
        """What was finished is not lost: it is the text of a run that did not complete."""
        text = texts_in_order([self._results[number] for number in sorted(self._order)])
        if text and not self._run._closed:
            _ = self._run.emit(text)
