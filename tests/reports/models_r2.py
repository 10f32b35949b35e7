"""Report R2 as a model: a bridge that makes a task per message and keeps the tasks in flight in a set.

The set is changed from the streams' thread pool (add), from the loop (done callback) and from clean-up (iterate, clear,
look for late ones by set difference), without a lock, and tasks are made off the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Bridge", "Tracked"]


class Tracked:
    """Stands for a task in flight: all that the set needs to know of it."""

    __slots__ = ("cancelled", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.cancelled = False


class Bridge:
    """The bridge of the report, fault by fault.

    Parameters:
        loop: where the tasks run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.tasks: set[Any] = set()

    def on_message(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The operator: called by the streams' threads."""
        task = asyncio.ensure_future(work(), loop=self.loop)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def track(self, task: Tracked) -> None:
        """The add half of `on_message`, from a thread of the pool."""
        self.tasks.add(task)

    def finished(self, task: Tracked) -> None:
        """The done callback."""
        self.tasks.discard(task)

    def cancel_all(self) -> None:
        """The sync clean-up: iterate, then clear."""
        for task in self.tasks:
            task.cancelled = True
        self.tasks.clear()

    async def cleanup(self) -> int:
        """The async clean-up: cancel and await what is there, then look once for what came meanwhile."""
        before = set(self.tasks)
        for task in before:
            task.cancel()
        await asyncio.gather(*before, return_exceptions=True)
        late = self.tasks - before
        for task in late:
            task.cancel()
        self.tasks.clear()
        return len(late)
