"""Signals between nodes over a NATS server, for large clusters, where notifications cost the database much.

Nothing depends on NATS: while its servers do not answer, the nodes poll, as they do without notifications. Messages are
those of `SignalQueue`, on one subject for each store. Importing this module requires the extra ``nats``.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error

from holdfast.errors import ConfigurationError
from holdfast.storage.postgres.signal_queue import OFF, SignalQueue

__all__ = ["NatsSignals"]

_RECONNECT_S: Final = 0.5
_CONNECT_S: Final = 5
_CLOSE_S: Final = 2.0
_PING_S: Final = 10
"""Interval of pings; after two without an answer, the connection counts as lost."""


class NatsSignals(SignalQueue):
    """The `holdfast.storage.cluster.Signals` over NATS.

    Parameters:
        servers: comma-separated URLs of the servers of one NATS cluster: ``nats://user:password@host:4222``, or
            ``tls://…``, which verifies the server's certificate by the system's authorities (or ``SSL_CERT_FILE``).

    Raises:
        ConfigurationError: if a URL has another form. The error does not show it, because it may contain a password.
    """

    def __init__(self, servers: str) -> None:
        super().__init__()
        self._servers = [server.strip() for server in servers.split(",")]
        for server in self._servers:
            if urlsplit(server).scheme not in ("nats", "tls") or not urlsplit(server).hostname:
                raise ConfigurationError("invalid NATS URL", hint="use nats://user:password@host:4222 or tls://…")
        self.shown = ", ".join(f"{urlsplit(server).hostname}" for server in self._servers)
        """The hosts, for display."""
        self._subject = ""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sleep: asyncio.Future[None] | None = None
        self._is_woken = False

    def start(self, cluster_id: str) -> None:
        """Start to exchange signals with the nodes of the store that `cluster_id` identifies."""
        self.begin()
        self._subject = f"holdfast.{cluster_id}.signals"
        self._thread = threading.Thread(target=self._run, name="holdfast-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what waits, and end. It blocks until the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.end()
        thread.join()
        self.problem = OFF

    def wake(self) -> None:
        """See `SignalQueue.wake`."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        self._is_woken = True
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    async def _sleep_at_most(self, seconds: float | None) -> None:
        """Sleep until `wake` is called, also if that was before, since the last call."""
        self._sleep = asyncio.get_running_loop().create_future()
        if not self._is_woken:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._sleep
        self._is_woken = False

    def _run(self) -> None:
        asyncio.run(self._exchange())

    async def _exchange(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self.is_closing:
            try:
                await self._serve()
            except (Error, OSError, TimeoutError) as error:
                self.lost(f"NATS ({self.shown}) does not answer: {type(error).__name__}")
            if not self.is_closing:
                await self._sleep_at_most(_RECONNECT_S)

    async def _serve(self) -> None:
        """Exchange signals on a new connection until the store is closed or the connection is lost."""
        is_lost = False

        async def on_lost() -> None:
            nonlocal is_lost
            is_lost = True
            self._on_wake()

        async def on_error(_: Exception) -> None:
            """Do nothing: errors of the connection end it, and others concern single messages."""

        async def on_message(message: Msg) -> None:
            self.hear(message.data.decode("ascii", "replace"))
            self.deliver()

        client = Client()
        await client.connect(  # a client that did not connect cannot be closed
            self._servers,
            name="holdfast",
            no_echo=True,
            allow_reconnect=False,
            connect_timeout=_CONNECT_S,
            ping_interval=_PING_S,
            disconnected_cb=on_lost,
            closed_cb=on_lost,
            error_cb=on_error,
        )
        try:
            await client.subscribe(self._subject, cb=on_message)
            await client.flush()
            self.problem = None
            while not is_lost:
                for message in self.take():
                    await client.publish(self._subject, message.encode())
                if self.is_closing:
                    await client.flush()
                    return
                await self._sleep_at_most(self.wait_s())
            raise ConnectionError("the connection was lost")
        finally:
            with suppress(Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await client.close()
