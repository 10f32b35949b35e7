"""The line of execution that started others and waits for them: it is busy only when there is something to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.runtime.line import release

if TYPE_CHECKING:
    from holdfast.agents.surroundings import Lines

__all__ = ["Lookout"]


class Lookout:
    """Counts the lines that one line starts, so that the run is at rest when all of them are. On the run's loop only.

    Parameters:
        lines: the run's.
    """

    __slots__ = ("_idle", "_lines", "_waiter", "busy")

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._idle = False
        self._waiter: asyncio.Future[None] | None = None
        self.busy = 0
        """Lines that were started and have not ended."""

    def began(self) -> None:
        """Another line is started. To be called before it begins."""
        self.busy += 1
        self._lines.add()

    def ended(self) -> None:
        """A line has ended; its place is this one's, if it waits."""
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
        """Wait for the next end of a line, or until that time of the loop. Look before: what was is not told again."""
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
        """Lines that have not ended by now are survivors, and do not count."""
        left, self.busy = self.busy, 0
        if left:
            self._lines.remove(left)
