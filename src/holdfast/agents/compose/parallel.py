"""A composite that runs branches in parallel, until all branches or a required number have completed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.agents.agent import Agent
from holdfast.agents.child_group import ChildGroup
from holdfast.agents.children import cancel_stale_child, recorded_outcome
from holdfast.agents.compose.answers import Join, joined, result_of, texts_in_order
from holdfast.agents.compose.branch_spec import BranchLike, BranchSpec, composite, named
from holdfast.agents.journal import CallPath
from holdfast.errors import BranchesFailed, ConfigurationError
from holdfast.protocol.stopping import Cause
from holdfast.protocol.supervision import BranchResult, Need, Quorum, Verdict, told_results

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
    """Return an agent that sends the same request to several agents, its branches, at the same time.

    Each branch is a child of the run. A branch appears in the log and in the task tree under its own name, and its text
    is streamed under that name. A later attempt does not repeat a branch that has finished. At the end, the agent emits
    the text that `join` builds from the answers. If the agent is interrupted or fails, its text consists of the answers
    so far.

    Once enough branches have completed, the remaining branches are interrupted with a cause that names the reason. When
    the agent ends, every branch has ended, or was abandoned and is listed in the receipt.

    Parameters:
        branches: agents, functions that take a `Run`, names of the host's agents, or results of `branch`.
        name: name of the composite agent.
        need: number of branches that must complete: ``all``, ``first`` (one branch), or a number. Once that number has
            completed, the remaining branches are interrupted. With ``some``, the agent waits for all branches, and at
            least one must complete.
        on_failure: action when too few branches can still complete: ``interrupt`` the remaining branches with a cause
            that names the failed branch, or ``wait`` for the remaining branches.
        concurrency: maximum number of concurrent branches, which start in order; None means no limit.
        join: function that is called with the results of the completed branches (at most as many as `need` requires, or
            all with ``some``), in the order of the branches, and returns the answer. The function may be async; a sync
            function must not block. None joins the texts of the results with blank lines.
        description: one-line description of the agent, for people and models.

    Raises:
        ConfigurationError: if no branches are given, or a parameter is invalid. The agent's run raises `BranchesFailed`
            with all results if too few branches complete.
    """
    parts = named(branches)
    if on_failure not in ("interrupt", "wait"):
        raise ConfigurationError(f"unknown on_failure {on_failure!r}", hint="choose interrupt or wait")
    room: object = concurrency
    if room is not None and (not isinstance(room, int) or room < 1):
        raise ConfigurationError(f"concurrency is {concurrency!r}; it must be a whole number of at least 1")
    work = _Parallel(
        parts=parts,
        quorum=Quorum(need, len(parts)),
        interrupts=on_failure == "interrupt",
        concurrency=concurrency or len(parts),
        join=join or texts_in_order,
    )
    return composite(name, work, parts, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parallel:
    """The work of an agent that `parallel` made."""

    parts: tuple[BranchSpec, ...]
    quorum: Quorum
    interrupts: bool
    concurrency: int
    join: Join

    async def __call__(self, run: Run) -> str:
        return await _Race(run, self).answer()


class _Race:
    """One run of a parallel agent."""

    def __init__(self, run: Run, work: _Parallel) -> None:
        self._run = run
        self._context = run.context
        self._work = work
        self._branches = ChildGroup(run.context, self._take)
        self._tasks = [part.task(run, run.text, CallPath(run.context.next_id())) for part in work.parts]
        self._waiting = deque(range(len(self._tasks)))
        self._results: dict[int, BranchResult] = {}
        self._order: list[int] = []  # completed branches, in the order of their ends
        self._problem: BaseException | None = None  # of the first that did not complete
        self._decided: Cause | None = None

    async def answer(self) -> str:
        """Run the branches and return the joined answer. Raises `BranchesFailed` if too few branches complete."""
        self._take_past()
        try:
            await self._branches.driven(self._drive)
            if self._verdict() == "lost":
                raise self._too_few() from self._problem
            return await joined(self._work.join, self._counted())
        except BaseException:
            self._emit_finished()
            raise

    def _take_past(self) -> None:
        """Apply the outcomes that earlier attempts recorded, in log order; these branches are not repeated."""
        ends: list[tuple[int, ChildFinished]] = []
        for number in self._waiting:
            past = recorded_outcome(self._context, self._tasks[number])
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
                if (left := cancel_stale_child(self._context, self._tasks[number], self._decided)) is not None:
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
        """Return the results that count, in the order of the branches."""
        quorum = self._work.quorum
        counted = self._order if quorum.waits else self._order[: quorum.required]
        return [self._results[number] for number in sorted(counted)]

    def _too_few(self) -> BranchesFailed:
        results = tuple(
            self._results.get(number) or BranchResult(name=task.label, status="not_begun")
            for number, task in enumerate(self._tasks)
        )
        done, total = len(self._order), len(results)
        summary = told_results(results, decided=self._decided)
        return BranchesFailed(
            f"{done} of {total} branches completed, {self._work.quorum.required} must: {summary}",
            results=results,
        )

    def _emit_finished(self) -> None:
        """Emit the finished answers, as the text of a run that did not complete."""
        text = texts_in_order([self._results[number] for number in sorted(self._order)])
        if text and not self._context.closed:
            _ = self._run.emit(text)
