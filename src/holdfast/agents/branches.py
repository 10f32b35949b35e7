"""Children of one run that are at work beside one another, and the one task that hears of their ends.

Invariants
- Each child has one scope and one task. It is told as ended once, when nothing of it is left or what is left does not
  count; also when the whole is interrupted: then before `Branches.driven` raises.
- A child that ended by itself before its interrupt reached it is told as completed, whatever interrupted the others.
- Whoever begins many in a row waits while the log is behind, and lets the loop's other tasks go in between.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.agents.children import Child, ChildTask, check_chain
from holdfast.agents.lookout import Lookout

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished
    from holdfast.protocol.stopping import Cause

__all__ = ["BEGIN_AT_ONCE", "Branches"]

T = TypeVar("T")
K = TypeVar("K")

BEGIN_AT_ONCE = 32
"""So many begin before the loop's other tasks have their turn."""


class Branches(Generic[K]):
    """See the module. On the run's loop, by one task.

    Parameters:
        run: the children's parent.
        on_end: is told of each child that has ended: its key, how it ended, and the error that it raised, if it did.
        on_closed: called before that, when nothing of a child is left: for a task that waits for something else.
    """

    __slots__ = ("_begun", "_ended", "_lookout", "_on_closed", "_on_end", "_open", "run", "scope")

    def __init__(
        self,
        run: Run,
        on_end: Callable[[K, ChildFinished, BaseException | None], object],
        *,
        on_closed: Callable[[Child], object] | None = None,
    ) -> None:
        self.run = run
        self.scope = run._around().child("branches")
        self._on_end = on_end
        self._on_closed = on_closed
        self._open: dict[Child, K] = {}
        self._ended: list[Child] = []
        self._lookout = Lookout(run._lines)
        self._begun = 0

    @property
    def busy(self) -> int:
        """Children that have begun and were not told as ended."""
        return len(self._open)

    async def driven(self, drive: Callable[[], Awaitable[T]]) -> T:
        """Do what begins the children and hears of them; when it ends, in whatever way, they are gone.

        Raises what `drive` raises, or `Interrupted`.
        """
        try:
            async with self.scope:
                return await drive()
        finally:
            self._lookout.give_up()
            self._ended = list(self._open)
            self.tell()

    async def begin(self, task: ChildTask, key: K) -> Child:
        """Begin a child, known by a key. Inside of `driven` only.

        Raises:
            AgentCycle, LimitExceeded: it may not be, see `Run.delegate`.
        """
        check_chain(self.run, task)
        if self.run._recorder.behind:
            await self.run._recorder.room()
        self._begun += 1
        if self._begun % BEGIN_AT_ONCE == 0:
            await asyncio.sleep(0)
        child = Child(self.run, task, self.scope)
        self._lookout.began()
        self._open[child] = key
        child.start(functools.partial(self._post, child))
        return child

    async def changed(self, until: float | None = None) -> None:
        """Wait until a child has ended, and tell of all that have; or until that time of the loop.

        Without a time, something has to be busy.
        """
        if not self._ended:
            await self._lookout.wait(until)
        self.tell()

    def stop(self, child: Child, cause: Cause) -> None:
        """Interrupt one child; it ends within its scope's time for a stop."""
        if child in self._open and not child.scope.closed:
            child.scope.request_stop(cause)

    def stop_all(self, cause: Cause) -> None:
        """Interrupt all that are open, the last that began first."""
        for child in reversed(list(self._open)):
            self.stop(child, cause)

    def _post(self, child: Child) -> None:
        if child in self._open:
            self._ended.append(child)
            self._lookout.ended()
            if self._on_closed is not None:
                self._on_closed(child)

    def tell(self) -> None:
        """Tell of all that have ended by now."""
        ended, self._ended = self._ended, []
        for child in ended:
            self._on_end(self._open.pop(child), *child.ended())
