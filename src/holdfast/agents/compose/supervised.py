"""A composite that restarts branches that do not complete, in the manner of an OTP supervisor.

Invariants
- A branch has one incarnation at a time: the next incarnation starts after the scope of the previous one has closed.
  The id of an incarnation contains its number, so that the log distinguishes the incarnations of a branch.
- With every strategy, a completed branch keeps its answer and is not restarted, unless the branch is permanent.
- When a branch is restarted because it ended, this counts as one restart, even if other branches are restarted with it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.agents.agent import Agent
from holdfast.agents.child_group import ChildGroup
from holdfast.agents.children import Child, cancel_stale_child, recorded_outcome
from holdfast.agents.compose.answers import Join, joined, result_of, texts_in_order
from holdfast.agents.compose.branch_spec import BranchLike, BranchSpec, composite, named
from holdfast.agents.journal import CallPath
from holdfast.errors import BranchesFailed, ConfigurationError, TooManyRestarts
from holdfast.protocol.stopping import Cause
from holdfast.protocol.supervision import BranchResult, Intensity, is_seconds, told_results

if TYPE_CHECKING:
    from holdfast.agents.children import ChildTask
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished

__all__ = ["supervised"]

Strategy = Literal["one_for_one", "rest_for_one", "one_for_all"]


def supervised(
    *branches: BranchLike,
    name: str = "supervised",
    strategy: Strategy = "one_for_one",
    restarts: int = 3,
    within_s: float = 5.0,
    delay_s: float = 0.0,
    join: Join | None = None,
    description: str = "",
) -> Agent:
    """Return an agent that runs branches, and restarts each branch that does not complete, with the same request.

    All branches start at once, in order. The agent ends when every transient branch has completed and every temporary
    branch has ended; permanent branches are then stopped. A branch that raises, exceeds its own deadline or uses up its
    budget does not complete.
    If the agent is interrupted or fails, its text consists of the answers so far.

    Parameters:
        branches: agents, functions that take a `Run`, names of the host's agents, or results of `branch`, whose
            ``restart`` is the restart policy.
        name: name of the composite agent.
        strategy: branches to restart when a branch fails: only the failed branch (``one_for_one``), also the branches
            after it (``rest_for_one``), or all branches (``one_for_all``). The other branches are interrupted first,
            with a cause that names the failed branch. Completed branches keep their answers.
        restarts: maximum number of restarts within `within_s`; if more are needed, the agent ends with an error.
        within_s: length of the sliding window in which restarts are counted, in seconds.
        delay_s: delay before each restart, in seconds.
        join: function that builds the answer from the results of the completed branches; see `parallel`.
        description: one-line description of the agent, for people and models.

    Raises:
        ConfigurationError: if no branches are given, or a parameter is invalid. The agent's run raises
            `TooManyRestarts`, with all results and the last errors, if branches need too many restarts. The run raises
            `BranchesFailed` if all branches have ended and none has completed.
    """
    parts = named(branches)
    if not parts:
        raise ConfigurationError("no branches given", hint="pass at least one agent")
    if strategy not in ("one_for_one", "rest_for_one", "one_for_all"):
        raise ConfigurationError(
            f"unknown strategy {strategy!r}", hint="choose one_for_one, rest_for_one or one_for_all"
        )
    if not is_seconds(delay_s) or delay_s == math.inf:
        raise ConfigurationError(f"delay_s is {delay_s!r}; it must be a number of seconds, 0 or more")
    Intensity(restarts, within_s)
    work = _Supervised(
        parts=parts,
        strategy=strategy,
        restarts=restarts,
        within_s=within_s,
        delay_s=delay_s,
        join=join or texts_in_order,
    )
    return composite(name, work, parts, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supervised:
    """The work of an agent that `supervised` made."""

    parts: tuple[BranchSpec, ...]
    strategy: Strategy
    restarts: int
    within_s: float
    delay_s: float
    join: Join

    async def __call__(self, run: Run) -> str:
        return await _Supervision(run, self).answer()


class _Slot:
    """The state of one branch."""

    __slots__ = ("child", "due_at", "index", "over", "part", "place", "result", "task")

    def __init__(self, index: int, part: BranchSpec, place: CallPath) -> None:
        self.index = index
        self.part = part
        self.place = place
        self.child: Child | None = None
        self.task: ChildTask | None = None
        self.result: BranchResult | None = None
        self.due_at: float | None = 0.0  # when the next incarnation is due; None: it is active, or over
        self.over = False

    @property
    def name(self) -> str:
        """The display name of the branch."""
        return self.part.label

    @property
    def outcome(self) -> BranchResult:
        """The result of the last incarnation that ended, or ``not_begun`` before the first end."""
        return self.result or BranchResult(name=self.name, status="not_begun")


class _Supervision:
    """One run of a supervised agent."""

    def __init__(self, run: Run, work: _Supervised) -> None:
        self._run = run
        self._context = run.context
        self._work = work
        self._branches = ChildGroup(run.context, self._ended)
        self._slots = [_Slot(index, part, CallPath(run.context.next_id())) for index, part in enumerate(work.parts)]
        self._intensity = Intensity(work.restarts, work.within_s)
        self._failures: list[str] = []
        self._problem: BaseException | None = None
        self._end: Cause | None = None  # for the remaining branches, after too many restarts
        self._ending = False

    async def answer(self) -> str:
        """Run the branches until they are done, and return the joined answer.

        Raises:
            TooManyRestarts: if the branches need too many restarts.
            BranchesFailed: if all branches have ended and none completed.
        """
        try:
            self._take_past()
            await self._branches.driven(self._drive)
            results = tuple(slot.outcome for slot in self._slots)
            completed = [result for result in results if result.completed]
            if self._end is not None:
                raise self._given_up(results) from self._problem
            if not completed:
                raise BranchesFailed(f"no branch completed: {told_results(results)}", results=results)
            return await joined(self._work.join, completed)
        except BaseException:
            text = texts_in_order([slot.outcome for slot in self._slots])
            if text and not self._context.closed:
                _ = self._run.emit(text)
            raise

    def _take_past(self) -> None:
        """Apply the outcomes that earlier attempts recorded. Recorded failures count towards the limit on restarts."""
        ends: list[tuple[_Slot, ChildFinished]] = []
        for slot in self._slots:
            while (past := recorded_outcome(self._context, self._next(slot))) is not None:
                slot.task = None
                ends.append((slot, past))
        for slot, past in sorted(ends, key=lambda end: end[1].seq):
            self._take(slot, past, None, again=past.cause is not None and past.cause.origin == self._origin)

    @property
    def _origin(self) -> str:
        return f"{self._run.run_id} restarts"

    def _next(self, slot: _Slot) -> ChildTask:
        """Return the task of the slot's next incarnation; repeated calls return the same task until it starts."""
        if slot.task is None:
            slot.task = slot.part.task(self._run, self._run.text, CallPath(slot.place.next_id()))
        return slot.task

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._ending and not self._done():
            now = loop.time()
            ready = [slot for slot in self._slots if slot.due_at is not None and slot.due_at <= now]
            if ready and not (self._work.strategy != "one_for_one" and self._stopping()):
                for slot in ready:
                    slot.due_at = None
                    slot.child = await self._branches.begin(self._next(slot), slot)
                    slot.task = None
            else:
                due = [slot.due_at for slot in self._slots if slot.due_at is not None and slot.due_at > now]
                await self._branches.changed(min(due, default=None))
        self._ending = True
        end = self._end or self._cause("all other branches have ended")
        self._branches.stop_all(end)
        for slot in self._slots:
            if slot.task is not None and (left := cancel_stale_child(self._context, slot.task, end)) is not None:
                slot.result = result_of(slot.name, left)
        while self._branches.busy:
            await self._branches.changed()

    def _done(self) -> bool:
        """Return whether no branch is left to wait for."""
        return all(slot.over or slot.part.restart == "permanent" for slot in self._slots) and any(
            slot.over for slot in self._slots
        )

    def _stopping(self) -> bool:
        return any(slot.child is not None and slot.due_at is not None for slot in self._slots)

    def _ended(self, slot: _Slot, finished: ChildFinished, problem: BaseException | None) -> None:
        slot.child = None
        self._take(slot, finished, problem, again=slot.due_at is not None)

    def _take(self, slot: _Slot, finished: ChildFinished, problem: BaseException | None, *, again: bool) -> None:
        """Apply the outcome of a branch.

        Parameters:
            again: whether the branch was stopped in order to restart it.
        """
        slot.result = result = result_of(slot.name, finished)
        mode = slot.part.restart
        if (result.completed and mode != "permanent") or (mode == "temporary" and not again):
            slot.over = True
            slot.due_at = None
        elif not again and not self._ending and (result.completed or finished.error is not None):
            self._failed(slot, finished, problem)

    def _failed(self, slot: _Slot, finished: ChildFinished, problem: BaseException | None) -> None:
        """Restart a branch, or end the agent after too many restarts."""
        why = finished.error or f"child {slot.name} has ended, and is permanent"
        self._failures = [*self._failures[-9:], why]
        self._problem = problem or self._problem
        if not self._intensity.restart(finished.at):
            self._ending = True
            self._end = self._cause(f"branch {slot.name!r} needed too many restarts: {why}")
            return
        due_at = asyncio.get_running_loop().time() + self._work.delay_s
        cause = self._cause(f"branch {slot.name!r} is restarted, and this one with it: {why}")
        for other in reversed(self._affected(slot)):
            if other.part.restart == "temporary" and other is not slot:
                other.over = True
            else:
                other.due_at = due_at
            if other.child is not None:
                self._branches.stop(other.child, cause)

    def _affected(self, slot: _Slot) -> list[_Slot]:
        match self._work.strategy:
            case "one_for_one":
                return [slot]
            case "rest_for_one":
                return [other for other in self._slots[slot.index :] if not other.over]
            case "one_for_all":
                return [other for other in self._slots if not other.over]

    def _cause(self, reason: str) -> Cause:
        return Cause(kind="stop", reason=reason, origin=self._origin, at=self._run.now())

    def _given_up(self, results: tuple[BranchResult, ...]) -> TooManyRestarts:
        work = self._work
        return TooManyRestarts(
            f"more than {work.restarts} restarts within {work.within_s:g} s: {'; '.join(self._failures)}",
            hint="fix the causes of these errors; for a branch that need not be restarted, use restart='temporary'",
            results=results,
        )
