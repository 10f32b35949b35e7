"""Carry out the store's decisions: start and stop runs for accepted messages, and claim runs of queued sessions.

All code here runs on the host's loop, in callbacks of the store's futures, so that no await separates a durable
decision from the resulting action.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.errors import LimitExceeded, ScheduleChanged, StorageError
from holdfast.host.store_retry import RETRY_S, retry_delay_s
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Claim, Fire, Fired, NotReady, Send, SendResult

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.slot_queue import SlotQueue
    from holdfast.host.suspension import Suspension
    from holdfast.protocol.messages import SessionView
    from holdfast.storage.port import Served

__all__ = ["Dispatcher"]


class Dispatcher:
    """Starts and stops runs as the store decides.

    Parameters:
        served: the agents whose runs this host may claim; None if only this host uses the store.
    """

    __slots__ = ("_context", "_directory", "_launcher", "_queue", "_served", "_suspension")

    def __init__(
        self,
        context: HostContext,
        directory: SessionDirectory,
        queue: SlotQueue,
        launcher: RunLauncher,
        suspension: Suspension,
        served: Served | None,
    ) -> None:
        self._context = context
        self._directory = directory
        self._queue = queue
        self._launcher = launcher
        self._suspension = suspension
        self._served = served

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def on_send_committed(self, request: Send, done: asyncio.Future[SendResult]) -> None:
        """Handle a completed send: publish its events, and start or stop runs as the store decided."""
        context, queue = self._context, self._queue
        principal, reserved = request.principal, request.run_id is not None
        error = done.exception()
        if isinstance(error, StorageError):
            context.start_task(self._look_after(request), "look after a send")
            return
        if error is not None:
            if reserved:
                queue.release(principal)
            if isinstance(error, LimitExceeded):
                context.incidents.promises.kept["P9"] += 1
            return
        result = done.result()
        self._directory.awaited.made(principal, request.key)
        context.incidents.counts[f"sends_{result.disposition}"] += 1
        if result.claim is None:
            self._directory.publish(result.session, result.events)
            if reserved:
                queue.release(principal)
        if result.claim is not None:
            self._launcher.start(result.claim, published=result.events)
        elif result.interrupt is not None:
            self._stop(result.session, result.interrupt, request)
        elif result.disposition == "steering":
            run = self._launcher.live.get(result.run_id or "")
            if run is not None:
                run.expect_steering()
        elif result.run_id is None and result.disposition != "duplicate":
            queue.enqueue_when_due(result.session, principal, result.not_before)

    def on_fire_committed(self, request: Fire, done: asyncio.Future[Fired]) -> None:
        """Handle a completed firing of a schedule. If the firing sent a message, handle that message like any other."""
        sent: asyncio.Future[SendResult] = self._context.loop.create_future()
        error = done.exception()
        result = None if error is not None else done.result().sent
        if result is not None:
            sent.set_result(result)
        else:
            sent.set_exception(error or ScheduleChanged("nothing was sent"))
        self.on_send_committed(request.send, sent)

    def _stop(self, session: int, run_id: str, request: Send) -> None:
        """Stop the run that the message in `request` interrupts. The store has already recorded the interrupt."""
        rollback = request.policy == "rollback"
        cause = Cause(
            kind="rollback" if rollback else "message",
            reason="replaced by a newer message" if rollback else "a newer message arrived",
            origin=request.key,
            at=request.at,
            message_id=request.message_id,
        )
        run = self._launcher.live.get(run_id)
        if run is not None:
            run.request_stop(cause)
        else:
            self._suspension.stop(session, request.principal, run_id, cause)

    async def _look_after(self, request: Send) -> None:
        """Handle a failed send that may be durable anyway: carry out the store's decision, or release the slot."""
        context = self._context
        found: tuple[int, SessionView] | None = None
        for delay_s in RETRY_S:
            try:
                found = await context.store.find_session(request.principal, request.key)
                break
            except StorageError:
                if context.lifecycle.draining:
                    break
                await asyncio.sleep(delay_s)
        session, view = found or (0, None)
        if found is not None:
            self._directory.awaited.made(request.principal, request.key)
        if view is not None and view.run_id is not None and view.run_id == request.run_id:
            self._claim(request.principal, session, view.run_id, tries=1)
            return
        if request.run_id is not None:
            self._queue.release(request.principal)
        if view is None:
            return
        run = self._launcher.live.get(view.run_id or "")
        if view.run_id is not None and view.state == "stopping":
            self._stop(session, view.run_id, request)
        elif run is not None:
            run.expect_steering()  # perhaps
        elif view.run_id is None and view.waiting:
            self._queue.enqueue_when_due(session, request.principal, 0.0)

    # ── queued sessions ──────────────────────────────────────────────────────────────────────────────────────────

    def on_slot(self, principal: str, session: int) -> None:
        """Claim and start the next run of a queued session, for which a slot is reserved."""
        self._claim(principal, session, ids.run_id())

    def _claim(self, principal: str, session: int, run_id: str, tries: int = 0) -> None:
        """Claim and start the session's next run, for which a slot is reserved."""
        done = self._context.store.claim(session, run_id=run_id, at=self._context.now(), served=self._served)
        claimed = functools.partial(self._claimed, principal, session, run_id, tries)
        done.add_done_callback(claimed, context=self._context.variables)

    def _claimed(
        self, principal: str, session: int, run_id: str, tries: int, done: asyncio.Future[Claim | NotReady]
    ) -> None:
        context = self._context
        error = done.exception()
        if error is not None:
            context.store_failed(None, run_id, "claim", error)
            if isinstance(error, StorageError) and not context.lifecycle.draining:
                # The claim may have been made anyway: a repeat with the same id returns the same run.
                again = functools.partial(self._claim, principal, session, run_id, tries + 1)
                context.loop.call_later(retry_delay_s(tries), again, context=context.variables)
            else:
                self._queue.release(principal)
            return
        match done.result():
            case Claim() as claim if claim.lease.run_id in self._launcher.live:  # it was found in the meantime
                self._queue.release(principal)
            case Claim() as claim if claim.resumed:
                self._suspension.resume(claim)
            case Claim() as claim:
                self._launcher.start(claim, steering=tries > 0)
            case NotReady(waiting=waiting, not_before=not_before, busy=busy):
                if waiting and not busy and not_before:
                    self._queue.enqueue_when_due(session, principal, not_before)
                self._queue.release(principal)
