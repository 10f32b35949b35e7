"""Stops of runs that are not in this host's memory: unloaded runs, and runs that another host has."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from holdfast.errors import StorageError
from holdfast.host.run_execution import nothing_to_stop
from holdfast.protocol.states import TERMINAL_RUN_STATES
from holdfast.protocol.stopping import NOT_ENDED, Cause, StopReceipt

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.log_follower import LogFollower
    from holdfast.host.suspension import Suspension
    from holdfast.protocol.messages import RunView

__all__ = ["RemoteStops"]

_MARGIN_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.5
"""Interval at which the run is looked at without a signal: this host may be taking it over itself."""


class _Watch:
    """A wait for the end of a run."""

    __slots__ = ("ends_at", "task")

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        """Time of the loop at which the wait is given up."""
        self.task: asyncio.Task[StopReceipt]


class RemoteStops:
    """Waits for the receipts of runs that other hosts stop. Use it on the host's loop only.

    The interrupt is in the store before `stop` is called. The host that has the run finds it there, stops the run and
    writes the receipt with the run's end. If that host is gone, the host that takes the run over writes the receipt,
    with the proof ``lease``.

    Parameters:
        follower: None if no other host uses the store.
    """

    __slots__ = ("_context", "_follower", "_suspension", "_watches")

    def __init__(self, context: HostContext, suspension: Suspension, follower: LogFollower | None) -> None:
        self._context = context
        self._suspension = suspension
        self._follower = follower
        self._watches: dict[str, _Watch] = {}
        """The runs whose end is awaited. All stops of a run share one watch, so that they cost one read at a time."""

    def stop(
        self, session: int, principal: str, run_id: str, cause: Cause, *, grace_s: float | None
    ) -> asyncio.Task[StopReceipt]:
        """Return a task whose result is the stop receipt of a run that is not in memory.

        Parameters:
            grace_s: grace period that was recorded with the interrupt, in seconds; None uses the default.
        """
        stopping = self._suspension.stop(session, principal, run_id, cause)
        stop = self._stop(stopping, session, run_id, cause, grace_s)
        return self._context.start_task(stop, "stop a run that is not here")

    async def _stop(
        self,
        stopping: asyncio.Task[StopReceipt | None],
        session: int,
        run_id: str,
        cause: Cause,
        grace_s: float | None,
    ) -> StopReceipt:
        receipt = await stopping
        follower, context = self._follower, self._context
        if receipt is not None or follower is None:
            return receipt or StopReceipt(scope=run_id, cause=cause)
        settings = context.settings
        grace_s = settings.grace_s if grace_s is None else grace_s
        limit_s = grace_s + settings.abandon_after_s + 2 * context.store.health().lease_s + _MARGIN_S
        ends_at = context.loop.time() + limit_s
        watch = self._watches.get(run_id)
        if watch is None:
            watch = self._watches[run_id] = _Watch(ends_at)
            watch.task = context.start_task(
                self._receipt_of(follower, session, run_id, cause, watch), "wait for a receipt"
            )
            watch.task.add_done_callback(lambda _: self._watches.pop(run_id))
        watch.ends_at = max(watch.ends_at, ends_at)
        return await asyncio.shield(watch.task)

    async def _receipt_of(
        self, follower: LogFollower, session: int, run_id: str, cause: Cause, watch: _Watch
    ) -> StopReceipt:
        """Wait until the run has ended on another host, at most until a take-over would have ended it."""
        context = self._context
        settings, loop = context.settings, context.loop
        began = loop.time()
        while (left_s := watch.ends_at - loop.time()) > 0 and not context.lifecycle.past_deadline:
            changed = follower.change(session)
            try:
                view = await context.store.run(session, run_id)
            except StorageError as error:
                context.store_failed(None, run_id, "read", error)
            else:
                if view is None or view.state in TERMINAL_RUN_STATES:
                    return _receipt_in(view, run_id, cause, loop.time() - began)
            await asyncio.wait((changed,), timeout=min(left_s, _LOOK_EVERY_S, settings.cluster_poll_s))
        return StopReceipt(
            scope=run_id,
            cause=cause,
            outcome="unknown",
            unattributed=(f"the run ({NOT_ENDED} {loop.time() - began:.0f} s)",),
            elapsed_s=loop.time() - began,
        )


def _receipt_in(view: RunView | None, run_id: str, cause: Cause, elapsed_s: float) -> StopReceipt:
    """Return the receipt of an ended run. A run without one had nothing left to stop."""
    if view is None:
        return StopReceipt(
            scope=run_id,
            cause=cause,
            outcome="unknown",
            unattributed=("the run (it was purged with its session)",),
            elapsed_s=elapsed_s,
        )
    if view.receipt is not None:
        return replace(view.receipt, elapsed_s=max(view.receipt.elapsed_s, elapsed_s))
    if view.state == "interrupted":
        return StopReceipt(scope=run_id, cause=view.cause or cause, elapsed_s=elapsed_s)
    return nothing_to_stop(run_id, cause.at)
