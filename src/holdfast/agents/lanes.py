"""Many coroutines of one run, a bounded number at a time, with a task only for those that wait.

A lane is a task that takes one coroutine after another, each in a context of its own. When the first one that it has
to wait for waits, other lanes are started to go on with the rest. So what never waits costs no task, as with eager
tasks, and what waits has one to itself: `asyncio.timeout`, task groups and scopes inside of it work as everywhere.

Invariants
- Coroutines begin in the order of their source; the next one is taken when there is room for it, and not before.
- At most ``room`` lanes are there, so at most so many coroutines have begun and not ended.
- The source is asked by one lane at a time. A source that is to be awaited is awaited by a lane, in the lane's context.
- Who takes many in a row waits while the log is behind, and lets the loop's other tasks go in between.
- The number of a coroutine is its place in the source, and in the journal.
- Nothing passes from one coroutine of a lane to the next: no context variable, and no cancellation of the task.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import Branch, current_branch
from holdfast.agents.lookout import Lookout
from holdfast.errors import Interrupted

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.runtime import Handle, Scope

__all__ = ["END", "Lanes", "Source"]

END = object()
"""What a source gives when it has nothing more."""

_AT_ONCE = 32
"""So many begin before the loop's other tasks have their turn."""
_GROWTH = 2
"""So many lanes begin for one that has to wait, so that a thousand that wait have all begun after ten ticks."""


class Source:
    """Items, one at a time.

    Parameters:
        items: any number of them.
    """

    __slots__ = ("_ahead", "_plain", "busy", "over")

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._ahead: AsyncIterator[Any] | None = None
        self.busy = False
        """Somebody waits for it."""
        self.over = False
        """It has nothing more."""
        if isinstance(items, AsyncIterable):
            self._ahead = aiter(items)
        else:
            self._plain = iter(items)

    async def next(self) -> Any:
        """The next item, or `END`."""
        if self._ahead is None:
            item = next(self._plain, END)
        else:
            self.busy = True
            try:
                item = await anext(self._ahead, END)
            finally:
                self.busy = False
        if item is END:
            self.over = True
        return item


class Lanes:
    """See the module. Used once, by one task of the run's loop.

    Parameters:
        run: whose lines and log these are.
        scope: owns the lanes; open until `done` has returned.
        label: what the coroutine with this number (from 0) is called.
        source: gives the items.
        begin: makes the coroutine for an item.
        place: the branch with this number (from 0): where a coroutine counts its calls.
        room: how many may be at work.
    """

    __slots__ = ("_begin", "_broken", "_label", "_lookout", "_place", "_results", "_room", "_run", "_scope", "_source")

    def __init__(
        self,
        run: Run,
        scope: Scope,
        *,
        label: Callable[[int], str],
        source: Source,
        begin: Callable[[Any], Coroutine[Any, Any, Any]],
        place: Callable[[int], Branch],
        room: int,
    ) -> None:
        self._run = run
        self._scope = scope
        self._label = label
        self._source = source
        self._begin = begin
        self._place = place
        self._room = room
        self._lookout = Lookout(run._lines)
        self._results: list[Any] = []
        self._broken = False

    async def done(self) -> list[Any]:
        """Do all of it; the results in the order of the source.

        The first error interrupts the scope, which raises it.
        """
        try:
            self._start()
            while self._lookout.busy:
                await self._lookout.wait()
        finally:
            self._lookout.give_up()
        return self._results

    def _start(self) -> None:
        self._lookout.began()
        own: list[Handle[None]] = []
        own.append(self._scope.spawn(self._lane(own), name=self._scope.name))

    def _grow(self) -> None:
        """One that has begun waits: others go on with the rest."""
        for _ in range(_GROWTH):
            if not self._open or self._lookout.busy >= self._room:
                return
            self._start()

    @property
    def _open(self) -> bool:
        """Whether one more may be taken, now."""
        return not (self._source.over or self._source.busy or self._broken)

    async def _lane(self, own: list[Handle[None]]) -> None:
        try:
            await self._one_after_another(own)
        except asyncio.CancelledError:
            self._broken = True
            self._scope.interrupt.trigger(f"{own[0].name if own else 'one'} was cancelled", kind="stop")
            raise
        finally:
            self._lookout.ended()

    async def _one_after_another(self, own: list[Handle[None]]) -> None:
        source, results, recorder = self._source, self._results, self._run._recorder
        task = asyncio.current_task()
        assert task is not None
        taken = 0
        while self._open:
            if recorder.behind:
                await recorder.room()
            elif taken == _AT_ONCE:
                taken = 0
                await asyncio.sleep(0)
            if not self._open:
                return
            item = await source.next()
            if item is END or self._broken:
                return
            number = len(results)
            results.append(None)
            taken += 1
            coroutine = self._begin(item)
            context = contextvars.copy_context()
            try:
                try:
                    waits = context.run(_first_step, coroutine, self._place(number))
                except StopIteration as done:
                    results[number] = done.value
                else:
                    self._grow()
                    for handle in own:
                        handle.name = self._label(number)
                    results[number] = await _Rest(context, coroutine, waits)
            except BaseException as error:
                self._broken = True
                for handle in own:
                    handle.name = self._label(number)
                self._tell(error, self._label(number))
                raise
            if task.cancelling():
                # It cancelled the task that it ran in; that is not the next one's concern.
                if not self._scope.interrupt.triggered:
                    self._start()
                return

    def _tell(self, error: BaseException, label: str) -> None:
        """One has raised. What a scope takes for the end of a single member ends all of them here."""
        match error:
            case Exception():
                error.add_note(f"in {label}")
            case Interrupted(cause=cause):
                self._scope.interrupt.trigger(cause=cause)
            case SystemExit(code=code):
                raise RuntimeError(f"{label} called sys.exit({code!r})") from error
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
