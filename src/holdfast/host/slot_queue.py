"""Sessions that wait for a run slot, or for the time when their messages are due.

All code here runs on the host's loop. It does not read the store or start runs; `RunObserver.on_slot` does both.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.host.admission import Admission

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.run_observer import RunObserver

__all__ = ["SlotQueue"]

LOOK_EVERY_S = 60.0
"""Maximum delay before a session that is not due yet is checked again, because the clock may be set meanwhile."""


class SlotQueue:
    """The run slots of a host and the sessions that wait for them."""

    __slots__ = ("_context", "_due", "_observer", "_timer", "_unused", "admission")

    def __init__(self, context: HostContext, observer: RunObserver) -> None:
        settings = context.settings
        self._context = context
        self._observer = observer
        self.admission = Admission(max_runs=settings.max_runs, principal_runs=settings.principal_runs)
        self._due: list[tuple[float, int, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._unused: asyncio.Future[None] | None = None

    def enqueue_when_due(self, session: int, principal: str, not_before: float) -> None:
        """Queue a session that has waiting messages, now or once the messages are due at `not_before`.

        The timer uses the loop's clock, which cannot be set; the store decides whether the messages are due.
        """
        wait_s = not_before - self._context.now()
        if wait_s > 0:
            heapq.heappush(self._due, (self._context.loop.time() + min(wait_s, LOOK_EVERY_S), session, principal))
            self._arm()
        else:
            self.admission.enqueue(principal, session)
            self._admit()

    def share(self, hosts: int) -> None:
        """Divide the runs of each principal by the number of `hosts` that use the store; this host gets at least 1.

        Active runs continue. What one host has no slot for, another host claims.
        """
        self.admission.principal_runs = max(1, self._context.settings.principal_runs // hosts)
        self._admit()

    def reserve(self, principal: str) -> str | None:
        """Take a slot and return a new id for the run that will use the slot.

        If no slot is free for the principal, count a refusal and return None.
        """
        if self.admission.reserve(principal):
            return ids.run_id()
        self._context.incidents.promises.kept["P14"] += 1
        return None

    def release(self, principal: str) -> None:
        """Release a slot. Queued sessions get the slot before any new request."""
        self.admission.release(principal)
        self._admit()
        if self._unused is not None and not self._unused.done() and not self.admission.statistics().running:
            self._unused.set_result(None)

    def next_run_id(self) -> str | None:
        """Return a new id for the run that may reuse an ending run's slot.

        Return None if sessions wait for a slot or the host is draining.
        """
        return None if self._context.lifecycle.draining or self.admission.waiting else ids.run_id()

    async def unused(self) -> None:
        """Wait until all slots are free, which means that all runs have ended and all claims have been handled."""
        while self.admission.statistics().running:
            if self._unused is None or self._unused.done():
                self._unused = self._context.loop.create_future()
            await asyncio.shield(self._unused)

    def close(self) -> None:
        """Stop the timer that queues sessions when they become due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self) -> None:
        context = self._context
        while not context.lifecycle.draining and (admitted := self.admission.admit()) is not None:
            context.incidents.promises.kept["P13"] += 1
            self._observer.on_slot(*admitted)

    def _arm(self) -> None:
        self.close()
        if self._due and not self._context.lifecycle.draining:
            self._timer = self._context.loop.call_at(self._due[0][0], self._wake, context=self._context.variables)

    def _wake(self) -> None:
        self._timer = None
        now = self._context.loop.time()
        while self._due and self._due[0][0] <= now:
            _, session, principal = heapq.heappop(self._due)
            self.admission.enqueue(principal, session)
        self._admit()
        self._arm()
