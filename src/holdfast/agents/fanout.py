"""`Run.map`: the same work for many items, so many at a time.

Invariants
- At most ``concurrency`` items are in work. The next one is taken from its source only when there is room for it, so
  what waits costs nothing, however many there are.
- An item's number in the source is its place in the journal, in whatever order they end.
- Whoever begins many in a row waits while the log is behind, and lets the loop's other tasks go in between.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent
from holdfast.agents.branches import BEGIN_AT_ONCE, Branches
from holdfast.agents.call import check_said
from holdfast.agents.children import ChildTask, past_end
from holdfast.agents.journal import Branch
from holdfast.agents.lookout import Lookout
from holdfast.agents.placing import name_of, placed, placement_of
from holdfast.errors import Interrupted, RunFailed, RunInterrupted
from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished
    from holdfast.runtime import Scope

__all__ = ["run_map"]

_END = object()


async def run_map(
    run: Run,
    work: Agent | Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    concurrency: int,
    name: str | None,
    timeout_s: float | None,
) -> list[Any]:
    """See `Run.map`."""
    async with aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext():
        source = _Source(items)
        if isinstance(work, Agent):
            return await _Asked(run, work, source, concurrency, name or work.name, timeout_s).results()
        return await _Called(run, work, source, concurrency, name or name_of(work), timeout_s).results()


class _Source:
    """The items, one at a time."""

    __slots__ = ("_ahead", "_plain")

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._ahead: AsyncIterator[Any] | None = None
        if isinstance(items, AsyncIterable):
            self._ahead = aiter(items)
        else:
            self._plain = iter(items)

    async def next(self) -> Any:
        """The next item, or `_END`."""
        if self._ahead is None:
            return next(self._plain, _END)
        return await anext(self._ahead, _END)


class _Called:
    """A function for each item."""

    def __init__(
        self,
        run: Run,
        work: Callable[[Any], Any],
        source: _Source,
        concurrency: int,
        label: str,
        timeout_s: float | None,
    ) -> None:
        self._run = run
        self._work = work
        self._source = source
        self._where = placement_of(work)
        self._timeout_s = timeout_s
        self._label = label
        self._path = run._next_id()
        self._results: list[Any] = []
        self._broken = False  # an item raised: no more begin
        self._lookout = Lookout(run._lines)
        self._scope = run._around().child(label)
        if self._where == "thread":
            # More would only wait for threads, in front of the calls of the principal's other runs.
            concurrency = min(concurrency, self._scope._threads.max_threads)
        self._concurrency = concurrency

    async def results(self) -> list[Any]:
        """Do all of it."""
        lookout, recorder = self._lookout, self._run._recorder
        try:
            async with self._scope:
                while True:
                    while lookout.busy >= self._concurrency:
                        await lookout.wait()
                    if self._broken:
                        break
                    item = await self._source.next()
                    if item is _END:
                        break
                    if recorder.behind:
                        await recorder.room()
                    self._begin(item)
                    if len(self._results) % BEGIN_AT_ONCE == 0:
                        await asyncio.sleep(0)
                while lookout.busy:
                    await lookout.wait()
        finally:
            lookout.give_up()
        return self._results

    def _begin(self, item: Any) -> None:
        number = len(self._results)
        self._results.append(None)
        branch = Branch(f"{self._path}.{number + 1}")
        label = f"{self._label} {number + 1}"
        self._lookout.began()
        if self._timeout_s is not None:
            one = functools.partial(self._in_time, number, item, label)
            self._scope.spawn(placed(one, branch, "loop", self._lookout.ended), name=label)
        elif self._where == "loop":
            one = functools.partial(self._async, number, item)
            self._scope.spawn(placed(one, branch, "loop", self._lookout.ended), name=label)
        else:
            ended = functools.partial(self._run._soon, self._lookout.ended)
            plain = functools.partial(self._sync, number, item)
            self._scope.spawn(placed(plain, branch, "thread", ended), on="thread", name=label)

    async def _async(self, number: int, item: Any) -> None:
        try:
            self._results[number] = await self._work(item)
        except Exception as error:
            self._note(error, number)
            raise

    def _sync(self, number: int, item: Any) -> None:
        try:
            self._results[number] = self._work(item)
        except Exception as error:
            self._note(error, number)
            raise

    async def _in_time(self, number: int, item: Any, label: str) -> None:
        scope: Scope = self._scope.child(label, deadline_s=self._timeout_s)
        try:
            async with scope:
                if self._where == "loop":
                    await scope.spawn(self._async(number, item), name=label)
                else:
                    await scope.spawn(functools.partial(self._sync, number, item), on="thread", name=label)
        except Interrupted as interrupted:
            if interrupted.cause.kind == "deadline" and not self._scope.interrupt.triggered:
                raise TimeoutError(f"{label} did not end within {self._timeout_s:g} s") from None
            raise

    def _note(self, error: Exception, number: int) -> None:
        self._broken = True
        error.add_note(f"in item {number + 1} of {self._label}")


class _Asked:
    """An agent for each item."""

    def __init__(
        self, run: Run, agent: Agent, source: _Source, concurrency: int, label: str, timeout_s: float | None
    ) -> None:
        self._run = run
        self._agent = agent
        self._source = source
        self._concurrency = concurrency
        self._label = label
        self._timeout_s = timeout_s
        self._path = run._next_id()
        self._results: list[str] = []
        self._error: RunFailed | RunInterrupted | None = None
        self._branches = Branches(run, self._take)

    async def results(self) -> list[str]:
        """Ask all of them."""
        await self._branches.driven(self._drive)
        if self._error is not None:
            raise self._error
        return self._results

    async def _drive(self) -> None:
        branches = self._branches
        while self._error is None:
            if branches.busy >= self._concurrency:
                await branches.changed()
                continue
            item = await self._source.next()
            if item is _END:
                break
            await self._begin(item)
        while branches.busy:
            await branches.changed()

    async def _begin(self, item: Any) -> None:
        check_said(item, f"an item of {self._label}")
        self._results.append("")
        number = len(self._results)
        task = ChildTask(
            agent=self._agent,
            text=item,
            branch=Branch(f"{self._path}.{number}"),
            name=f"{self._label} {number}",
            deadline_s=self._timeout_s,
        )
        past = past_end(self._run, task)
        if past is not None:
            self._take(number, past, None)
        else:
            await self._branches.begin(task, number)

    def _take(self, number: int, finished: ChildFinished, problem: BaseException | None) -> None:
        if finished.status == "completed":
            self._results[number - 1] = finished.text
        elif finished.error is not None and self._error is None:
            self._error = (RunFailed if finished.status == "failed" else RunInterrupted)(finished.error)
            self._error.__cause__ = problem
            self._error.add_note(f"in item {number} of {self._label}")
            reason = f"item {number} did not complete: {finished.error}"
            self._branches.stop_all(Cause(kind="stop", reason=reason, origin=self._label, at=self._run.now()))
