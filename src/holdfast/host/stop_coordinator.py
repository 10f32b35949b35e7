"""Carry out an interrupt or a stop of a session once the store has recorded it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from holdfast.errors import StorageError
from holdfast.host.run_execution import nothing_to_stop
from holdfast.protocol.messages import Message, Settlement
from holdfast.protocol.stopping import Cause, StopReceipt, join_receipts
from holdfast.storage.port import Stopped as StopDone

if TYPE_CHECKING:
    from holdfast.host.node_requests import NodeRequests
    from holdfast.host.remote_stops import RemoteStops
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.run_parts import RunParts
    from holdfast.storage.port import InterruptResult

__all__ = ["StopCoordinator"]


class StopCoordinator:
    """Stops the run and the background work of a session. Use it on the host's loop only."""

    __slots__ = ("_context", "_launcher", "_node_requests", "_parts", "_remote")

    def __init__(
        self, parts: RunParts, launcher: RunLauncher, remote: RemoteStops, node_requests: NodeRequests | None
    ) -> None:
        self._parts = parts
        self._context = parts.context
        self._launcher = launcher
        self._remote = remote
        self._node_requests = node_requests

    def execute(
        self,
        principal: str,
        key: str,
        done: asyncio.Future[InterruptResult] | asyncio.Future[StopDone],
        cause: Cause,
        grace_s: float | None,
        *,
        background: bool,
    ) -> asyncio.Task[tuple[StopReceipt, tuple[Message, ...]]]:
        """Carry out an interrupt or a stop once the store has recorded it, even if the caller is cancelled.

        Return a task whose result is the stop receipt and the withdrawn messages.

        Parameters:
            principal: the session's owner.
            key: the session's key.
            done: future of the store call that records the interrupt or stop.
            cause: the cause of the interrupt or stop.
            grace_s: grace period for cleanup, in seconds; None uses the default.
            background: whether to stop the session's background work too.
        """
        context = self._context
        stops: list[asyncio.Future[StopReceipt]] = []
        elsewhere: list[asyncio.Task[list[StopReceipt]]] = []
        acted: asyncio.Future[None] = context.loop.create_future()

        def decided(done: asyncio.Future[Any]) -> None:
            """Act in the callback of `done`, so that nothing else happens between the record and the action."""
            try:
                act(done)
            finally:
                acted.set_result(None)

        def act(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, StorageError):  # even a full disk must not keep a run alive
                stops.extend(
                    context.start_task(run.scope.stop(cause=cause, grace_s=grace_s), "stop")
                    for run in self._launcher.live.values()
                    if run.actor.principal == principal and run.actor.key == key
                )
            if error is not None:
                return
            result = done.result()
            actor = self._parts.directory.live.get(result.session)
            if actor is not None:
                actor.publish(result.events)
            run = self._launcher.live.get(result.run_id or "")
            if run is not None:
                stops.append(run.stop(cause, grace_s=grace_s))
            elif result.run_id is not None:
                stops.append(self._remote.stop(result.session, principal, result.run_id, cause, grace_s=grace_s))
            if background and actor is not None:
                stops.extend(actor.stop_background(context.start_task, cause, grace_s=grace_s))
            if isinstance(result, StopDone) and result.requests and self._node_requests is not None:
                asking = self._node_requests.receipts(result.requests, result.session, key, cause, grace_s=grace_s)
                elsewhere.append(context.start_task(asking, "stop background elsewhere"))

        done.add_done_callback(decided, context=context.variables)

        async def carry_out() -> tuple[StopReceipt, tuple[Message, ...]]:
            withdrawn: tuple[Message, ...] = ()
            await acted  # not `done`: between its result and its callbacks, the stop has not happened yet
            try:
                result: InterruptResult | StopDone = done.result()
            except StorageError:
                if background or not stops:  # waiting messages were not withdrawn: the caller must retry
                    raise
            else:
                if isinstance(result, StopDone):
                    withdrawn = result.withdrawn
                    settled = [Settlement(message_id=m.message_id, state="withdrawn") for m in withdrawn]
                    self._parts.accounting.withdrawn(result.session, settled, ())
            receipts = [await stop for stop in stops]
            receipts += [receipt for asking in elsewhere for receipt in await asking]
            live = (
                self._parts.directory.live.get(done.result().session) if background and not done.exception() else None
            )
            if live is not None:
                self._parts.directory.forget_walls(live)
            return join_receipts(*(receipts or [nothing_to_stop(key, context.now())])), withdrawn

        return context.start_task(carry_out(), "stopping")
