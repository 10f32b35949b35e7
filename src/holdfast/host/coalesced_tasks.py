"""Work that many causes request: at most one task at a time does it for each key, and again if requested meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import StorageError

if TYPE_CHECKING:
    from holdfast.host.context import HostContext

__all__ = ["CoalescedTasks"]

PAUSE_S: Final = 0.02
"""Pause before work is repeated, so that a busy session is read in pages instead of event by event."""


class CoalescedTasks:
    """Tasks of a host, by session number. Use it on the host's loop only.

    A task whose read of the store fails ends and reports an incident; the next request tries again.

    Parameters:
        work: coroutine function that does the work for a key.
        name: name of the tasks, and of the failed call in incident reports.
        delay_s: delay before the work begins, in seconds.
    """

    __slots__ = ("_context", "_delay_s", "_name", "_requested", "_work")

    def __init__(
        self, context: HostContext, work: Callable[[int], Awaitable[object]], *, name: str, delay_s: float = 0.0
    ) -> None:
        self._context = context
        self._work = work
        self._name = name
        self._delay_s = delay_s
        self._requested: dict[int, bool] = {}
        """The keys with a task, and whether the work was requested again since it began."""

    def request(self, key: int) -> None:
        """Do the work for this key soon, after everything that is stored now."""
        if key in self._requested:
            self._requested[key] = True
        else:
            self._requested[key] = False
            self._context.start_task(self._run(key), self._name)

    async def _run(self, key: int) -> None:
        try:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            while True:
                self._requested[key] = False
                await self._work(key)
                if not self._requested[key]:
                    return
                await asyncio.sleep(PAUSE_S)
        except StorageError as error:
            self._context.store_failed(None, None, self._name, error)
        finally:
            del self._requested[key]
