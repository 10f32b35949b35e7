"""Run many coroutines of one run with bounded concurrency, and with separate tasks only for coroutines that wait.

A lane is a task that runs coroutines one after another, each in its own context, until a coroutine waits. That
coroutine is the lane's last, and other lanes start for the remaining coroutines. So a coroutine that never waits needs
no task of its own, as with eager tasks. A coroutine that waits has a task to itself: `asyncio.timeout`, task groups and
scopes in the coroutine work as usual, and a late cancellation cannot reach another coroutine.

Invariants
- Coroutines start in the order of their source; the next item is taken only when its coroutine can start.
- At most ``room`` lanes have work, so at most ``room`` coroutines are active.
- The end of each lane is counted once, even if the lane is cancelled before it starts.
- Only the task that called `done` awaits an async source; each item of an async source has its own lane.
- A task that takes many items in a row waits while the log is behind, and now and then yields to other tasks.
- A coroutine's number is its position in the source, and determines the coroutine's call path in the journal.
- The coroutines of a lane are isolated: neither context variables nor a cancellation carry over to the next coroutine.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import CallPath, current_call_path
from holdfast.agents.placement import no_exit
from holdfast.agents.quiescence import ChildWaiter
from holdfast.agents.results import summarize_error
from holdfast.errors import Interrupted

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.runtime import Handle, Scope

__all__ = ["BoundedMap"]

_END = object()
_AT_ONCE = 32
"""Number of coroutines to start before yielding to the loop's other tasks."""
_GROWTH = 2
"""Lanes to start for each coroutine that waits: a thousand waiting coroutines have all started after ten ticks."""
_NOTED_ERRORS = 10
"""Maximum number of later errors that the notes of the first one describe."""


class _Lane:
    """A task that runs coroutines one after another."""

    __slots__ = ("begun", "handle")

    def __init__(self) -> None:
        self.handle: Handle[None] | None = None
        self.begun = False

    def take_name(self, name: str) -> None:
        """Take the name of the coroutine that the lane runs."""
        if self.handle is not None:
            self.handle.name = name


class BoundedMap:
    """Runs a coroutine for each item with bounded concurrency. Use each instance once, in one task on the run's loop.

    Parameters:
        run: context of the run that the coroutines belong to.
        scope: scope that owns the lanes; it must not be open yet.
        label: function that is called with a coroutine's number, from 0, and returns the coroutine's display name.
        items: source of the items.
        begin: function that is called with an item and returns the item's coroutine.
        place: function that is called with a coroutine's number, from 0, and returns the coroutine's call path.
        room: maximum number of active coroutines.
    """

    __slots__ = (
        "_begin",
        "_items",
        "_label",
        "_over",
        "_place",
        "_plain",
        "_results",
        "_room",
        "_run",
        "_scope",
        "_waiter",
    )

    def __init__(
        self,
        run: RunContext,
        scope: Scope,
        *,
        label: Callable[[int], str],
        items: Iterable[Any] | AsyncIterable[Any],
        begin: Callable[[Any], Coroutine[Any, Any, Any]],
        place: Callable[[int], CallPath],
        room: int,
    ) -> None:
        self._run = run
        self._scope = scope
        self._label = label
        self._items = items
        self._plain: Iterator[Any] = iter(()) if isinstance(items, AsyncIterable) else iter(items)
        self._begin = begin
        self._place = place
        self._room = room
        self._waiter = ChildWaiter(run.activity)
        self._results: list[Any] = []
        self._over = False  # no more are taken: the source has ended, or one has raised

    async def done(self) -> list[Any]:
        """Run all coroutines and return their results in the order of the items.

        The first error interrupts the scope and is raised, with notes about later errors.
        """
        try:
            async with self._scope:
                return await self._all()
        except BaseExceptionGroup:
            if len(self._scope.errors) < 2:
                raise  # an item raised the group itself
        raise self._first_error()

    async def _all(self) -> list[Any]:
        try:
            if isinstance(self._items, AsyncIterable):
                await self._feed(aiter(self._items))
            else:
                self._start(self._one_after_another)
            while self._waiter.busy:
                await self._waiter.wait()
        finally:
            self._waiter.give_up()
        return self._results

    def _first_error(self) -> BaseException:
        first, *others = self._scope.errors
        for other in others[:_NOTED_ERRORS]:
            first.add_note(f"then, {', '.join(getattr(other, '__notes__', ()))}: {summarize_error(other)}")
        if len(others) > _NOTED_ERRORS:
            first.add_note(f"and {len(others) - _NOTED_ERRORS:,} more")
        return first

    async def _feed(self, source: AsyncIterator[Any]) -> None:
        waiter, recorder = self._waiter, self._run.recorder
        while True:
            while waiter.busy >= self._room:
                await waiter.wait()
            if recorder.behind:
                await recorder.room()
            item = await anext(source, _END) if self._has_more() else _END
            if item is _END or not self._has_more():
                return
            self._start(functools.partial(self._one, item, self._take()))

    def _has_more(self) -> bool:
        return not self._over

    def _take(self) -> int:
        """Return the number of the item that was just taken."""
        self._results.append(None)
        return len(self._results) - 1

    def _start(self, work: Callable[[_Lane], Coroutine[Any, Any, object]]) -> None:
        self._waiter.began()
        lane = _Lane()
        lane.handle = self._scope.spawn(self._run_lane(work, lane), name=self._scope.name)
        task = lane.handle.task
        if task is not None:
            task.add_done_callback(functools.partial(self._never_began, lane))

    def _grow(self) -> None:
        """Start lanes for the remaining items, because a started coroutine waits."""
        for _ in range(_GROWTH):
            if self._over or self._waiter.busy >= self._room or isinstance(self._items, AsyncIterable):
                return
            self._start(self._one_after_another)

    async def _run_lane(self, work: Callable[[_Lane], Coroutine[Any, Any, object]], lane: _Lane) -> None:
        lane.begun = True
        try:
            if lane.handle is None:
                await asyncio.sleep(0)  # eager: it would start inside the coroutine that is starting
            await work(lane)
        except asyncio.CancelledError:
            self._cancelled(lane, "was cancelled")
            raise
        finally:
            self._waiter.ended()

    def _never_began(self, lane: _Lane, _: asyncio.Task[None]) -> None:
        """Count off a lane whose task was cancelled before its first step, because nothing else reports such a lane."""
        if not lane.begun:
            self._cancelled(lane, "was cancelled before it began")
            self._waiter.ended()

    def _cancelled(self, lane: _Lane, what: str) -> None:
        self._over = True
        name = self._scope.name if lane.handle is None else lane.handle.name
        self._scope.interrupt.trigger(f"{name} {what}", kind="stop")

    async def _one_after_another(self, lane: _Lane) -> None:
        recorder = self._run.recorder
        taken = 0
        while not self._over:
            if recorder.behind:
                await recorder.room()
            elif taken == _AT_ONCE:
                taken = 0
                await asyncio.sleep(0)
            item = next(self._plain, _END) if self._has_more() else _END
            if item is _END:
                self._over = True
                return
            taken += 1
            if await self._one(item, self._take(), lane):
                if self._has_more() and not self._scope.interrupt.triggered:
                    self._start(self._one_after_another)
                return

    async def _one(self, item: Any, number: int, lane: _Lane) -> bool:
        """Run one coroutine; return True if it waited in the lane's task or cancelled it, so that the lane must end."""
        coroutine = self._begin(item)
        context = contextvars.copy_context()
        try:
            try:
                waits = context.run(_first_step, coroutine, self._place(number))
            except StopIteration as done:
                self._results[number] = done.value
            else:
                self._grow()
                lane.take_name(self._label(number))
                self._results[number] = await _Rest(context, coroutine, waits)
                return True
        except BaseException as error:
            self._over = True
            lane.take_name(self._label(number))
            self._annotate(error, self._label(number))
            raise
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _annotate(self, error: BaseException, label: str) -> None:
        """Add the item's name to its error. An interrupt or exit, which would end one member of a scope, ends all."""
        match error:
            case Exception():
                error.add_note(f"in {label}")
            case Interrupted(cause=cause):
                self._scope.interrupt.trigger(cause=cause)
            case SystemExit():
                raise no_exit(label, error) from error
            case _:
                pass


def _first_step(coroutine: Coroutine[Any, Any, Any], branch: CallPath) -> Any:
    """Run the coroutine, in its own context, up to the first point where it waits."""
    current_call_path.set(branch)
    return coroutine.send(None)


class _Rest:
    """The rest of a coroutine that has started to wait. The lane awaits this object, which resumes the coroutine in the
    coroutine's own context."""

    __slots__ = ("_context", "_reported", "_waits", "gi_yieldfrom")

    def __init__(self, context: contextvars.Context, coroutine: Coroutine[Any, Any, Any], waits: Any) -> None:
        self._context = context
        self._waits = waits
        self._reported = False
        self.gi_yieldfrom = coroutine
        """Named as in a generator, for tools that show where a task waits."""

    def __await__(self) -> Generator[Any, Any, Any]:
        return self  # type: ignore[return-value]  # it has all methods of a generator that are used

    def __iter__(self) -> _Rest:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Resume the coroutine; return the next future that it waits for, or raise `StopIteration` with its result."""
        if not self._reported:
            self._reported = True
            waits, self._waits = self._waits, None
            return waits
        return self._context.run(self.gi_yieldfrom.send, value)

    def throw(self, error: BaseException, *_: Any) -> Any:
        """Raise the error in the coroutine, where it waits."""
        return self._context.run(self.gi_yieldfrom.throw, error)

    def close(self) -> None:
        """Close the coroutine where it waits."""
        self._context.run(self.gi_yieldfrom.close)
