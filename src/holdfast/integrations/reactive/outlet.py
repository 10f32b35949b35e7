"""Deliver notifications to one observer, one after the other, on the bridge's loop or on a scheduler.

Invariants
- Two notifications never overlap. After an error, the completion or `shut`, no notification starts.
- Only one task delivers values, and it waits until the observer has taken them before it delivers more.
- The lock is held for a few instructions, never while the observer runs. The lock is reentrant, because a signal
  handler or a finalizer may run on the thread that holds the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.runtime import detached

if TYPE_CHECKING:
    from reactivex.abc import ObserverBase, SchedulerBase

__all__ = ["Outlet"]


class Outlet:
    """Delivers notifications to one observer.

    Parameters:
        observer: observer that gets the notifications.
        scheduler: scheduler on which the observer is notified; None means the bridge's loop.
        loop: event loop of the bridge.
    """

    __slots__ = ("_active", "_end", "_lock", "_loop", "_observer", "_scheduler", "_shut", "_taken", "_values", "fault")

    def __init__(
        self, observer: ObserverBase[Any], scheduler: SchedulerBase | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._observer = observer
        self._scheduler = scheduler
        self._loop = loop
        self._lock = threading.RLock()
        self._values: list[Any] = []
        self._end: tuple[Exception | None] | None = None
        self._shut = False
        self._active = False
        self._taken: asyncio.Future[None] | None = None
        self.fault: Exception | None = None
        """The error that the observer or its scheduler raised, after which the observer gets no more notifications."""

    async def give(self, values: Sequence[Any]) -> None:
        """Deliver values; wait until the observer has taken them or raised (see `fault`), or the outlet is shut."""
        if self._scheduler is None:
            for value in values:
                if self._shut:
                    return
                try:
                    self._observer.on_next(value)
                except Exception as error:
                    self._failed(error)
            return
        taken = self._loop.create_future()
        with self._lock:
            if self._shut:
                return
            self._values.extend(values)
            self._taken = taken
            start = not self._active
            self._active = True
        if start:
            self._schedule(self._scheduler)
        await taken

    def end(self, error: Exception | None) -> None:
        """Notify the observer of the end, after all values."""
        with self._lock:
            if self._shut:
                return
            self._end = (error,)
            start = not self._active
            self._active = True
        if self._scheduler is None:
            self._run(None)
        elif start:
            self._schedule(self._scheduler)

    def shut(self) -> None:
        """Deliver nothing more; a notification in progress is the last. Thread-safe."""
        with self._lock:
            self._shut = True
            self._values.clear()
            self._end = None
            taken, self._taken = self._taken, None
        self._release(taken)

    def _schedule(self, scheduler: SchedulerBase) -> None:
        # The scheduler owns what it starts, such as a shared thread.
        try:
            with detached():
                scheduler.schedule(self._run)
        except Exception as error:
            self._failed(error, "the scheduler of a reactive stream")

    def _run(self, *_: Any) -> None:
        """Deliver all pending notifications. Runs on the scheduler or, without a scheduler, on the loop."""
        while True:
            with self._lock:
                values, self._values = self._values, []
                end, self._end = (None, self._end) if values else (self._end, None)
                if not values:
                    self._active = False
                    taken, self._taken = self._taken, None
                    self._shut = self._shut or end is not None
            if not values:
                self._release(taken)
                if end is not None:
                    self._tell_end(end[0])
                return
            for value in values:
                if self._shut:
                    break
                try:
                    self._observer.on_next(value)
                except Exception as error:
                    self._failed(error)

    def _tell_end(self, error: Exception | None) -> None:
        try:
            if error is None:
                self._observer.on_completed()
            else:
                self._observer.on_error(error)
        except Exception as raised:
            self._failed(raised)

    def _failed(self, error: Exception, who: str = "the observer of a reactive stream") -> None:
        """Report an error of the observer or the scheduler to the loop's exception handler, and shut the outlet."""
        self.fault = error
        context = {"message": f"{who} raised {type(error).__name__}", "exception": error}
        if asyncio._get_running_loop() is self._loop:
            self._loop.call_exception_handler(context)
        else:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)
        self.shut()

    def _release(self, taken: asyncio.Future[None] | None) -> None:
        if taken is None:
            return
        if asyncio._get_running_loop() is self._loop:
            _let_go(taken)
        else:
            with suppress(RuntimeError):  # the loop is closed, along with its waiters
                self._loop.call_soon_threadsafe(_let_go, taken)


def _let_go(taken: asyncio.Future[None]) -> None:
    if not taken.done():
        taken.set_result(None)
