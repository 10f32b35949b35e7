"""Detect when a run is quiescent: all of its tasks and threads, and those of its children, wait for people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.runtime.queues.wait_queue import release

__all__ = ["ActivityCounter", "ChildWaiter"]


class ActivityCounter:
    """Counts the active tasks and threads of a run and its children.

    While the count is 0, the run is quiescent: all tasks and threads wait for people. A task that waits for other tasks
    of the run is not counted, because those tasks are counted instead. Use the counter on the run's loop.

    Parameters:
        on_change: called with True when the run becomes quiescent, and with False when it is active again.
    """

    __slots__ = ("_on_change", "busy")

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self.busy = 1
        """Number of active tasks and threads."""
        self._on_change = on_change

    def add(self, number: int = 1) -> None:
        """Count `number` more active tasks or threads."""
        self.busy += number
        if number and self.busy == number:
            self._on_change(False)

    def remove(self, number: int = 1) -> None:
        """Count `number` fewer active tasks or threads."""
        self.busy -= number
        if number and not self.busy:
            self._on_change(True)


class ChildWaiter:
    """Counts the tasks that one parent task starts, and lets the parent task wait for them.

    While the parent task waits without a time limit, the started tasks count as active, and the parent task does not.
    Use the waiter on the run's loop only.

    Parameters:
        activity: the run's activity counter.
    """

    __slots__ = ("_activity", "_idle", "_waiter", "busy")

    def __init__(self, activity: ActivityCounter) -> None:
        self._activity = activity
        self._idle = False
        self._waiter: asyncio.Future[None] | None = None
        self.busy = 0
        """Number of started tasks that have not ended."""

    def began(self) -> None:
        """Count another task as active; called before the task starts."""
        self.busy += 1
        self._activity.add()

    def ended(self) -> None:
        """Stop counting a task that has ended; if the parent task waits in `wait`, count the parent as active again."""
        if not self.busy:
            return  # it was given up
        self.busy -= 1
        if self._idle:
            self._idle = False
        else:
            self._activity.remove()
        if self._waiter is not None:
            release(self._waiter)

    async def wait(self, until: float | None = None) -> None:
        """Wait until another task ends, or until the loop time `until`. Ignores tasks that have already ended."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if until is None else loop.call_at(until, release, waiter)
        if timer is None:
            self._idle = True
            self._activity.remove()
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
            if self._idle:
                self._idle = False
                self._activity.add()

    def give_up(self) -> None:
        """Stop counting the tasks that have not ended by now, because they are abandoned."""
        left, self.busy = self.busy, 0
        if left:
            self._activity.remove(left)
