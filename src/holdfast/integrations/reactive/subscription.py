"""One subscription: the task that drives it, its scope, and how it ends.

Invariants
- Whichever thread subscribes, the driving task is registered with the bridge's scope before the task is created. All
  work on items belongs to a scope inside the bridge's scope.
- The observer is notified of the end (error or completion) only after all the stream's work has ended.
- A flow is settled exactly once: by its driving task, or by the bridge if that task never started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.errors import Interrupted, RunInterrupted, ScopeClosed, format_error
from holdfast.integrations.reactive.intake import Intake, IntakeCounts, Overflow, Settled
from holdfast.runtime import Scope

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex.abc import SchedulerBase
    from reactivex.disposable import SingleAssignmentDisposable

    from holdfast.integrations.reactive.outlet import Outlet
    from holdfast.protocol.stopping import Cause

__all__ = ["Flow", "Home", "ItemFlow", "Outcome", "Shape", "Work"]

Work = Callable[[Scope, int, Any], Awaitable[Any]]
"""The work on one item. Its arguments are the stream's scope, the item's number in order of arrival (from 0), and the
item."""


class Home(Protocol):
    """Interface that a flow needs from the bridge."""

    scope: Scope

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the bridge's flows."""
        ...

    def ended(self, flow: Flow) -> None:
        """Record that the flow has settled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one item; emitted instead of the item's result if ``outcomes=True``.

    Parameters:
        index: number of the item in the stream, from 0, in order of arrival.
        item: the item received.
        settled: ``done``, ``failed``, or ``interrupted`` if the work on this item was cancelled while the stream
            continues.
        value: result of the work; None unless ``settled`` is ``done``.
        error: error of the work; None if ``settled`` is ``done``.
    """

    index: int
    item: Any
    settled: Settled
    value: Any = None
    error: Exception | None = None


_Ended = tuple[int, Any, Settled, Any, Exception | None]
"""The fields of an `Outcome`, which is created only on demand."""

_SETTLED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Settings for the work on a stream's items; `Shaped`, in the bridge's module, documents the fields."""

    concurrency: int
    buffer: int
    overflow: Overflow
    block_s: float
    ordered: bool
    outcomes: bool


class Flow:
    """One subscription to a bridge's observable.

    Parameters:
        home: bridge that owns the flow.
        name: display name of the flow.
        outlet: outlet that delivers notifications to the observer.
    """

    def __init__(self, home: Home, name: str, outlet: Outlet) -> None:
        self._home = home
        self._name = name
        self.outlet = outlet
        self.scope: Scope | None = None
        self._disposed = False
        self._settled = False
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Start the driving task. Thread-safe. Raises `ScopeClosed` if the bridge's scope accepts no more tasks."""
        self._home.scope.spawn(self._run, name=self._name)

    def dispose(self) -> None:
        """End the stream and its work without notifying the observer. Callable from any thread; idempotent."""
        if self._settled:
            return
        self._disposed = True
        self.outlet.shut()
        self.stop_source()
        scope = self.scope
        if scope is not None:
            scope.interrupt.trigger("the subscription was disposed", kind="stop")
        self._wake()

    def stop_source(self) -> None:
        """Accept no more items. Thread-safe; idempotent."""

    def drain(self) -> None:
        """Accept no more items, finish the accepted items, and complete. Thread-safe."""
        raise NotImplementedError

    def counts(self) -> IntakeCounts:
        """Return the item counts so far. Thread-safe."""
        return IntakeCounts()

    def cut_off(self, cause: Cause | None) -> Exception | None:
        """Return the observer's error for an interrupted stream."""
        return cut_off(self._name, cause)

    async def _drive(self, scope: Scope) -> Exception | None:
        """Work until the end; return the error that ends the stream, or None for its completion."""
        raise NotImplementedError

    def _close_accounts(self) -> None:
        """Finalize the counts, after all work of the stream has ended."""

    async def _run(self) -> None:
        error: Exception | None = None
        through = False
        try:
            async with Scope(self._name) as scope:
                self.scope = scope
                if self._disposed:  # disposed before the scope was visible
                    scope.interrupt.trigger("the subscription was disposed", kind="stop")
                    scope.interrupt.check()
                error = await self._drive(scope)
                through = True
                self.stop_source()
                if scope.members():
                    reason = "the stream has ended" if error is None else f"the stream failed: {format_error(error)}"
                    scope.interrupt.trigger(reason, kind="stop")
        except (Interrupted, asyncio.CancelledError) as stopped:
            if not through:
                cause = stopped.cause if isinstance(stopped, Interrupted) else self._home.scope.interrupt.cause
                error = self.cut_off(cause)
            if not (through or self._disposed) or isinstance(stopped, asyncio.CancelledError):
                raise
        except Exception as problem:
            error = problem
        except BaseException as problem:  # for the owner of the bridge; the observer must not get a completion
            error = _interrupted(self._name, format_error(problem))
            raise
        finally:
            self.settle(error)

    def settle(self, error: Exception | None) -> None:
        """Finalize the counts and notify the observer, once. Called after all the stream's work has ended."""
        if self._settled:
            return
        self.stop_source()
        self._close_accounts()
        self._settled = True
        self.scope = None
        self._home.ended(self)
        self.outlet.end(error)

    def _wake(self) -> None:
        """Wake the driving task. Thread-safe; repeated calls before it runs wake it once."""
        if self._woken:
            return
        self._woken = True
        loop = self._home.loop
        if asyncio._get_running_loop() is loop:
            self._release()
        else:
            try:
                loop.call_soon_threadsafe(self._release)
            except RuntimeError:  # the loop is closed: the driving task is gone, so unblock the producers
                self.stop_source()

    def _release(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _rest(self) -> None:
        """Wait for `_wake`, unless it was called since ``_woken`` was cleared."""
        if not self._woken:
            self._waiter = self._home.loop.create_future()
            await self._waiter


class ItemFlow(Flow):
    """A subscription to an operator's results: it receives items from any thread, and emits their results.

    Parameters:
        home, name, outlet: parameters of `Flow`.
        source: disposable that holds the subscription to the source.
        work: async function that works on one item.
        shape: settings of the work.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        outlet: Outlet,
        source: SingleAssignmentDisposable,
        work: Work,
        shape: Shape,
    ) -> None:
        super().__init__(home, name, outlet)
        self._source = source
        self._work = work
        self._shape = shape
        self._intake = Intake(
            limit=shape.buffer, overflow=shape.overflow, block_s=shape.block_s, wake=self._wake, name=name
        )
        self._begun = 0
        self._working = 0
        self._finished: list[_Ended] = []
        self._held: dict[int, _Ended] = {}
        self._next = 0
        self._ahead = shape.concurrency + (shape.buffer if shape.ordered else 0)

    def listen(self, source: Observable[Any], scheduler: SchedulerBase | None) -> None:
        """Subscribe to the source. If `source.subscribe` raises or this thread is interrupted, the stream ends."""
        intake = self._intake
        try:
            self._source.disposable = source.subscribe(intake.put, intake.fail, intake.complete, scheduler=scheduler)
        except Exception as error:
            intake.fail(error)
        except BaseException:
            self.dispose()
            raise

    def stop_source(self) -> None:
        """Accept no more items, and dispose the subscription to the source. Thread-safe; idempotent."""
        self._intake.close()
        self._dispose_source()

    def _dispose_source(self) -> None:
        try:
            self._source.dispose()
        except Exception as error:
            context = {"message": f"the source of {self._name} raised when it was disposed", "exception": error}
            with suppress(RuntimeError):  # the loop is closed
                self._home.loop.call_soon_threadsafe(self._home.loop.call_exception_handler, context)

    def drain(self) -> None:
        """Accept no more items, finish the accepted items, and complete. Thread-safe."""
        self._intake.seal()
        self._dispose_source()

    def counts(self) -> IntakeCounts:
        """Return the item counts so far. Thread-safe."""
        return self._intake.counts()

    def _close_accounts(self) -> None:
        self._intake.finish()
        self._finished.clear()
        self._held.clear()

    async def _drive(self, scope: Scope) -> Exception | None:
        intake = self._intake
        while True:
            self._woken = False
            if self._finished:
                error = await self._pass_on()
                if error is not None:
                    return error
            if self.outlet.fault is not None:
                self._disposed = True
                return None
            if intake.error is not None:
                return intake.error
            room = min(self._shape.concurrency - self._working, self._ahead - (self._begun - self._next))
            if room > 0:
                self._begin(scope, intake.take(room))
            if not self._finished:
                if self._working == 0 and intake.exhausted:
                    return None
                await self._rest()

    def _begin(self, scope: Scope, items: list[Any]) -> None:
        for item in items:
            index = self._begun
            try:
                scope.spawn(self._one(scope, index, item), name=f"{self._name} {index}")
            except ScopeClosed:
                scope.interrupt.check()
                raise
            self._begun += 1
            self._working += 1

    async def _one(self, scope: Scope, index: int, item: Any) -> None:
        """Work on one item. If the scope stops before this task starts, the item is counted when the flow ends."""
        try:
            value = await self._work(scope, index, item)
        except Exception as error:
            self._end((index, item, "failed", None, error))
        except (Interrupted, asyncio.CancelledError) as stopped:
            if not scope.interrupt.triggered:
                cause = stopped.cause if isinstance(stopped, Interrupted) else None
                cut = cut_off(f"item {index} of {self._name}", cause)
                self._end((index, item, "interrupted", None, cut))
            raise
        except SystemExit as left:
            problem = RuntimeError(f"the work on item {index} of {self._name} called sys.exit({left.code!r})")
            self._end((index, item, "failed", None, problem))
        else:
            self._end((index, item, "done", value, None))

    def _end(self, ended: _Ended) -> None:
        if self._settled:
            return  # a survivor, whose result is discarded
        self._intake.settle(ended[_SETTLED])
        self._working -= 1
        self._finished.append(ended)
        self._wake()

    async def _pass_on(self) -> Exception | None:
        """Emit the results whose turn has come; return the error that ends the stream, or None."""
        ready, self._finished = self._finished, []
        if self._shape.ordered:
            held = self._held
            for ended in ready:
                held[ended[0]] = ended
            ready = []
            while (turn := held.pop(self._next + len(ready), None)) is not None:
                ready.append(turn)
        outcomes = self._shape.outcomes
        error: Exception | None = None
        values: list[Any] = []
        for index, item, settled, value, problem in ready:
            if outcomes:
                values.append(Outcome(index=index, item=item, settled=settled, value=value, error=problem))
            elif problem is not None:
                error = problem
                break
            else:
                values.append(value)
        self._next += len(ready)
        if values:
            await self.outlet.give(values)
        return error


def cut_off(what: str, cause: Cause | None) -> RunInterrupted:
    """Return the observer's error for an interrupted stream or item."""
    while cause is not None and cause.parent is not None:
        cause = cause.parent
    why = "it was cancelled" if cause is None else f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}"
    return _interrupted(what, why)


def _interrupted(what: str, why: str) -> RunInterrupted:
    return RunInterrupted(f"{what} was interrupted ({why})", hint="subscribe again on an open bridge")
