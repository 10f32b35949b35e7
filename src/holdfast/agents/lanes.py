"""Many coroutines of one run, a bounded number at a time, with a task only for those that wait.

A lane is a task that takes one coroutine after another, each in a context of its own, up to the first one that waits:
that one is its last, and other lanes are started to go on with the rest. So what never waits costs no task, as with
eager tasks, and what waits has one to itself: `asyncio.timeout`, task groups and scopes inside of it work as
everywhere, and a cancellation that comes too late for it meets no other one.

Invariants
- Coroutines begin in the order of their source; the next one is taken when there is room for it, and not before.
- At most ``room`` lanes have work, so at most so many coroutines have begun and not ended.
- Each lane is counted off once, also one that is cancelled before it begins, and never runs at all.
- A source that is to be awaited is awaited by one task, the one that made all this; each of its items has a lane.
- Who takes many in a row waits while the log is behind, and lets the loop's other tasks go in between.
- The number of a coroutine is its place in the source, and in the journal.
- Nothing passes from one coroutine of a lane to the next: no context variable, and no cancellation of the task.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import Branch, current_branch
from holdfast.agents.lookout import Lookout
from holdfast.agents.placing import no_exit
from holdfast.agents.results import told_briefly
from holdfast.errors import Interrupted

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.runtime import Handle, Scope

__all__ = ["Lanes"]

_END = object()
_AT_ONCE = 32
"""So many begin before the loop's other tasks have their turn."""
_GROWTH = 2
"""So many lanes begin for one that has to wait, so that a thousand that wait have all begun after ten ticks."""
_TOLD = 10
"""So many errors that came after the first one are told."""


class _Lane:
    """A task that takes coroutines."""

    __slots__ = ("begun", "handle")

    def __init__(self) -> None:
        self.handle: Handle[None] | None = None
        self.begun = False

    def take_name(self, name: str) -> None:
        """It is called what the coroutine is that it has."""
        if self.handle is not None:
            self.handle.name = name


class Lanes:
    """See the module. Used once, by one task of the run's loop.

    Parameters:
        run: whose lines and log these are.
        scope: owns the lanes; not yet open.
        label: what the coroutine with this number (from 0) is called.
        items: what there is to do.
        begin: makes the coroutine for an item.
        place: the branch with this number (from 0): where a coroutine counts its calls.
        room: how many may be at work.
    """

    __slots__ = (
        "_begin",
        "_items",
        "_label",
        "_lookout",
        "_over",
        "_place",
        "_plain",
        "_results",
        "_room",
        "_run",
        "_scope",
    )

    def __init__(
        self,
        run: Run,
        scope: Scope,
        *,
        label: Callable[[int], str],
        items: Iterable[Any] | AsyncIterable[Any],
        begin: Callable[[Any], Coroutine[Any, Any, Any]],
        place: Callable[[int], Branch],
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
        self._lookout = Lookout(run._lines)
        self._results: list[Any] = []
        self._over = False  # no more are taken: there are none, or one has raised

    async def done(self) -> list[Any]:
        """Do all of it; the results in the order of the items.

        The first error interrupts the scope and is raised, with notes about those that came after it.
        """
        try:
            async with self._scope:
                return await self._all()
        except BaseExceptionGroup:
            if len(self._scope.errors) < 2:
                raise  # it is one of an item's own
        raise self._first_error()

    async def _all(self) -> list[Any]:
        try:
            if isinstance(self._items, AsyncIterable):
                await self._feed(aiter(self._items))
            else:
                self._start(self._one_after_another)
            while self._lookout.busy:
                await self._lookout.wait()
        finally:
            self._lookout.give_up()
        return self._results

    def _first_error(self) -> BaseException:
        first, *others = self._scope.errors
        for other in others[:_TOLD]:
            first.add_note(f"then, {', '.join(getattr(other, '__notes__', ()))}: {told_briefly(other)}")
        if len(others) > _TOLD:
            first.add_note(f"and {len(others) - _TOLD:,} more")
        return first

    async def _feed(self, source: AsyncIterator[Any]) -> None:
        lookout, recorder = self._lookout, self._run._recorder
        while True:
            while lookout.busy >= self._room:
                await lookout.wait()
            if recorder.behind:
                await recorder.room()
            item = await anext(source, _END) if self._goes_on() else _END
            if item is _END or not self._goes_on():
                return
            self._start(functools.partial(self._one, item, self._take()))

    def _goes_on(self) -> bool:
        return not self._over

    def _take(self) -> int:
        """The number of the item that was taken now."""
        self._results.append(None)
        return len(self._results) - 1

    def _start(self, work: Callable[[_Lane], Coroutine[Any, Any, object]]) -> None:
        self._lookout.began()
        lane = _Lane()
        lane.handle = self._scope.spawn(self._run_lane(work, lane), name=self._scope.name)
        task = lane.handle.task
        if task is not None:
            task.add_done_callback(functools.partial(self._never_began, lane))

    def _grow(self) -> None:
        """One that has begun waits: others go on with the rest."""
        for _ in range(_GROWTH):
            if self._over or self._lookout.busy >= self._room or isinstance(self._items, AsyncIterable):
                return
            self._start(self._one_after_another)

    async def _run_lane(self, work: Callable[[_Lane], Coroutine[Any, Any, object]], lane: _Lane) -> None:
        lane.begun = True
        try:
            if lane.handle is None:
                await asyncio.sleep(0)  # an eager task: what it begins would begin inside of what is beginning now
            await work(lane)
        except asyncio.CancelledError:
            self._cancelled(lane, "was cancelled")
            raise
        finally:
            self._lookout.ended()

    def _never_began(self, lane: _Lane, _: asyncio.Task[None]) -> None:
        """A lane's task has ended; if it was cancelled before its first step, nothing else told of it."""
        if not lane.begun:
            self._cancelled(lane, "was cancelled before it began")
            self._lookout.ended()

    def _cancelled(self, lane: _Lane, what: str) -> None:
        self._over = True
        name = self._scope.name if lane.handle is None else lane.handle.name
        self._scope.interrupt.trigger(f"{name} {what}", kind="stop")

    async def _one_after_another(self, lane: _Lane) -> None:
        recorder = self._run._recorder
        taken = 0
        while not self._over:
            if recorder.behind:
                await recorder.room()
            elif taken == _AT_ONCE:
                taken = 0
                await asyncio.sleep(0)
            item = next(self._plain, _END) if self._goes_on() else _END
            if item is _END:
                self._over = True
                return
            taken += 1
            if await self._one(item, self._take(), lane):
                if self._goes_on() and not self._scope.interrupt.triggered:
                    self._start(self._one_after_another)
                return

    async def _one(self, item: Any, number: int, lane: _Lane) -> bool:
        """Do one of them; whether the task is its own: it has waited in it, or cancelled it."""
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
            self._tell(error, self._label(number))
            raise
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _tell(self, error: BaseException, label: str) -> None:
        """One has raised. What a scope takes for the end of a single member ends all of them here."""
        match error:
            case Exception():
                error.add_note(f"in {label}")
            case Interrupted(cause=cause):
                self._scope.interrupt.trigger(cause=cause)
            case SystemExit():
                raise no_exit(label, error) from error
            case _:
                pass


def _first_step(coroutine: Coroutine[Any, Any, Any], branch: Branch) -> Any:
    """In the coroutine's own context."""
    current_branch.set(branch)
    return coroutine.send(None)


class _Rest:
    """What is left of a coroutine that has begun to wait; awaited by its lane, it goes on in its own context."""

    __slots__ = ("_context", "_told", "_waits", "gi_yieldfrom")

    def __init__(self, context: contextvars.Context, coroutine: Coroutine[Any, Any, Any], waits: Any) -> None:
        self._context = context
        self._waits = waits
        self._told = False
        self.gi_yieldfrom = coroutine
        """Named as a generator has it, for whoever looks where a task is."""

    def __await__(self) -> Generator[Any, Any, Any]:
        return self  # type: ignore[return-value]  # it has all that is used of a generator

    def __iter__(self) -> _Rest:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Go on; gives what the coroutine waits for, or raises `StopIteration` with its result."""
        if not self._told:
            self._told = True
            waits, self._waits = self._waits, None
            return waits
        return self._context.run(self.gi_yieldfrom.send, value)

    def throw(self, error: BaseException, *_: Any) -> Any:
        """Raise in the coroutine where it waits."""
        return self._context.run(self.gi_yieldfrom.throw, error)

    def close(self) -> None:
        """End it where it waits."""
        self._context.run(self.gi_yieldfrom.close)
