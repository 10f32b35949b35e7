"""Concurrent children of one run; a single task starts the children and handles their ends.

Invariants
- Each child has one scope and one task. The end of a child is reported once, after the child's scope has closed. If the
  whole group is interrupted, all ends are reported before `ChildGroup.driven` raises.
- A child that completed before its interrupt arrived is reported as completed, even if the other children were stopped.
- A task that starts many children in a row waits while the log is behind, and now and then yields to other tasks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.agents.children import Child, ChildTask, check_delegation_cycle
from holdfast.agents.quiescence import ChildWaiter

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.protocol.events import ChildFinished
    from holdfast.protocol.stopping import Cause

__all__ = ["ChildGroup"]

T = TypeVar("T")
K = TypeVar("K")

_BEGIN_AT_ONCE = 32
"""Number of children to start before yielding to the loop's other tasks."""


class ChildGroup(Generic[K]):
    """A group of concurrent children of one run. Use it on the run's loop, from one task.

    Parameters:
        parent: context of the run that the children belong to.
        on_end: called once for each child that has ended, with the child's key, its outcome, and the error that the
            child raised, or None.
        on_closed: called with each child as soon as the child's scope has closed, before `on_end`, so that a driver
            that is waiting for something else can react at once.
    """

    __slots__ = ("_begun", "_ended", "_on_closed", "_on_end", "_open", "_waiter", "parent", "scope")

    def __init__(
        self,
        parent: RunContext,
        on_end: Callable[[K, ChildFinished, BaseException | None], object],
        *,
        on_closed: Callable[[Child], object] | None = None,
    ) -> None:
        self.parent = parent
        self.scope = parent.innermost_scope().child("branches")
        self._on_end = on_end
        self._on_closed = on_closed
        self._open: dict[Child, K] = {}
        self._ended: list[Child] = []
        self._waiter = ChildWaiter(parent.activity)
        self._begun = 0

    @property
    def busy(self) -> int:
        """Number of started children whose end has not been reported."""
        return len(self._open)

    async def driven(self, drive: Callable[[], Awaitable[T]]) -> T:
        """Run `drive`, which starts the children and handles their ends, and return its result.

        No child outlives this call. Raises the errors of `drive`, or `Interrupted`.
        """
        try:
            async with self.scope:
                return await drive()
        finally:
            self._waiter.give_up()
            self._ended = list(self._open)
            self.report_ends()

    async def begin(self, task: ChildTask, key: K) -> Child:
        """Start a child with this key. Call this method only while `driven` is running.

        Raises:
            AgentCycle, LimitExceeded: if the child is refused; see `Run.delegate`.
        """
        check_delegation_cycle(self.parent, task)
        if self.parent.recorder.behind:
            await self.parent.recorder.room()
        self._begun += 1
        if self._begun % _BEGIN_AT_ONCE == 0:
            await asyncio.sleep(0)
        child = Child(self.parent, task, self.scope)
        self._waiter.began()
        self._open[child] = key
        child.start(functools.partial(self._post, child))
        return child

    async def changed(self, until: float | None = None) -> None:
        """Wait until a child has ended, or until the loop time `until`, and report all children that have ended.

        Without `until`, at least one child must be open.
        """
        if not self._ended:
            await self._waiter.wait(until)
        self.report_ends()

    def stop(self, child: Child, cause: Cause) -> None:
        """Interrupt one child, unless its scope has closed."""
        if child in self._open and not child.scope.closed:
            child.scope.request_stop(cause)

    def stop_all(self, cause: Cause) -> None:
        """Interrupt all open children, the most recently started first."""
        for child in reversed(list(self._open)):
            self.stop(child, cause)

    def _post(self, child: Child) -> None:
        if child in self._open:
            self._ended.append(child)
            self._waiter.ended()
            if self._on_closed is not None:
                self._on_closed(child)

    def report_ends(self) -> None:
        """Report all children that have ended by now."""
        ended, self._ended = self._ended, []
        for child in ended:
            self._on_end(self._open.pop(child), *child.ended())
