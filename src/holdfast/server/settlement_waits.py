"""Requests that wait for a message to settle. They end early if the client disconnects or the server shuts down."""

from __future__ import annotations

import asyncio

from holdfast.protocol.messages import Settlement
from holdfast.server.request import Request

__all__ = ["SettlementWaits"]


class SettlementWaits:
    """The requests of a server that wait for a message to settle. Use it from one event loop only."""

    __slots__ = ("_closing", "_loop", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Settlement]] = set()
        self._closing = False

    @property
    def count(self) -> int:
        """Number of requests that are waiting."""
        return len(self._waiting)

    def close(self) -> None:
        """End all waits, because the server is shutting down. Later waits end immediately."""
        self._closing = True
        for settling in self._waiting:
            settling.cancel()

    async def wait(
        self, request: Request, settling: asyncio.Future[Settlement], wait_s: float | None
    ) -> Settlement | None:
        """Wait for the future `settling`, and return the settlement.

        Return None after `wait_s` seconds, at shutdown, or if the client disconnects. If `wait_s` is None or 0, return
        None immediately.
        """
        if not wait_s or self._closing:
            settling.cancel()
            return None
        timer = self._loop.call_later(wait_s, settling.cancel)
        self._waiting.add(settling)
        connection = request.connection
        if connection is not None:
            connection.on_lost = settling.cancel
        try:
            return await settling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None
        finally:
            timer.cancel()
            self._waiting.discard(settling)
            if connection is not None:
                connection.on_lost = None
