"""A task that starts others and waits for them; while it only waits, the run may be quiescent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.runtime.line import release

if TYPE_CHECKING:
    from holdfast.agents.surroundings import Lines

__all__ = ["Lookout"]


class Lookout:
    """Counts the tasks that one task starts, so that the run is quiescent when all of them are. On the loop only.

    Parameters:
        lines: the run's activity.
    """

    __slots__ = ("_idle", "_lines", "_waiter", "busy")

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._idle = False
        self._waiter: asyncio.Future[None] | None = None
        self.busy = 0
        """Tasks that were started and have not ended."""

    def began(self) -> None:
        """Count another task, before it begins."""
        self.busy += 1
        self._lines.add()

    def ended(self) -> None:
        """Count off a task that has ended; the waiting one is active in its place."""
        if not self.busy:
            return  # it was given up
        self.busy -= 1
        if self._idle:
            self._idle = False
        else:
            self._lines.remove()
        if self._waiter is not None:
            release(self._waiter)

    async def wait(self, until: float | None = None) -> None:
        """Wait until the next task ends, or until that time of the loop. Earlier ends are not reported again."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if until is None else loop.call_at(until, release, waiter)
        if timer is None:
            self._idle = True
            self._lines.remove()
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
            if self._idle:
                self._idle = False
                self._lines.add()

    def give_up(self) -> None:
        """Stop counting the tasks that have not ended by now: they are abandoned."""
        left, self.busy = self.busy, 0
        if left:
            self._lines.remove(left)
