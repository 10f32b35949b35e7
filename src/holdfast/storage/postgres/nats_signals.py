"""Signals between nodes over a NATS server, for large clusters, where notifications cost the database much.

Nothing depends on NATS: while its servers do not answer, the nodes poll, as they do without notifications. Hints are
those of `SignalQueue`, on one subject for each store; a node asks on it for events, too (``follow 7 12``). Events are
sent on other subjects, as `LiveEvents` describes. Importing this module requires the extra ``nats``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, FlushTimeoutError

from holdfast.errors import ConfigurationError
from holdfast.storage.cluster import CommittedEvents, OnEvents, OnSignals
from holdfast.storage.postgres.live_events import FOLLOW_S, LiveEvents
from holdfast.storage.postgres.signal_queue import SignalQueue

__all__ = ["NatsSignals"]

_RECONNECT_S: Final = 0.5
_DENIED_S: Final = 5.0
"""Pause before another attempt if this user may not use the subjects."""
_CONNECT_S: Final = 5
_CLOSE_S: Final = 2
_FLUSH_S: Final = 2.0
"""Time after which a connection that takes no more data counts as lost."""
_UNSENT_BYTES: Final = 1_048_576
"""Size of the data that a connection has not taken yet above which events are dropped, so that hints are not late. The
client itself begins to wait at 2 MiB."""
_LOOK_S: Final = 0.1
"""Interval at which a pending connection attempt is given up if the store is being closed."""
_CHECK: Final = "check"
_FOLLOW: Final = "follow"
_ASKED_TOGETHER: Final = 1000
"""Maximum number of sessions that one message asks for."""
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
        super().__init__(sends_seqs=True)
        self._live = LiveEvents()
        self._servers = [server.strip() for server in servers.split(",")]
        parsed = [_parsed(server) for server in self._servers]
        self._requires_tls = parsed[0][0] == "tls"
        if any(scheme != parsed[0][0] for scheme, _ in parsed):
            raise ConfigurationError("NATS URLs of both kinds, nats:// and tls://", hint="use tls:// for all servers")
        self.shown = ", ".join(host for _, host in parsed)
        """The hosts, for display."""
        self._subject = ""
        self._events_subject = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Future[None]
        """Resolves when `wake` is called."""

    def start(self, cluster_id: str, cluster_key: bytes) -> None:
        """Start to exchange signals with the nodes of the store that `cluster_id` identifies.

        Parameters:
            cluster_key: secret that only these nodes know.
        """
        self._subject = f"holdfast.{cluster_id}.signals"
        self._events_subject = f"holdfast.{cluster_id}.events"
        self._live.start(cluster_key)
        self.start_thread()

    def publish(self, commits: Iterable[CommittedEvents]) -> None:
        """See `Signals.publish`."""
        if self.problem is None and self._live.add(commits):
            self.wake()

    def follow(self, session: int) -> None:
        """See `Signals.follow`."""
        if self._live.follow(session):
            self.wake()

    def listen(self, on_signals: OnSignals, on_events: OnEvents) -> None:
        """See `Signals.listen`."""
        super().listen(on_signals, on_events)
        self._live.listen(on_events)

    def before_hints(self) -> None:
        """See `SignalQueue.before_hints`."""
        self._live.pass_on()

    def wake(self) -> None:
        """See `SignalQueue.wake`."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless the store is being closed."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        while not self.is_closing and (left_s := ends_at - loop.time()) > 0:
            await self._sleep_at_most(left_s)

    async def _sleep_at_most(self, seconds: float | None) -> None:
        """Sleep until `wake` is called, also if that was before, since the last call."""
        await asyncio.wait((self._woken,), timeout=seconds)
        if self._woken.done():
            self._woken = asyncio.get_running_loop().create_future()

    def run(self) -> None:
        """See `SignalQueue.run`."""
        asyncio.run(self._exchange())

    async def _exchange(self) -> None:
        loop = asyncio.get_running_loop()
        self._woken, self._loop = loop.create_future(), loop
        while not self.is_closing:
            try:
                await self._serve()
            except Exception as error:  # whatever a peer sends: the next connection may be better
                self.lost(f"NATS ({self.shown}) does not work: {type(error).__name__}")
            await self._pause(_RECONNECT_S)

    async def _serve(self) -> None:
        """Exchange signals on a new connection until the store is closed or the connection is lost."""
        is_lost = is_denied = False

        async def on_lost() -> None:
            nonlocal is_lost
            is_lost = True
            self._on_wake()

        async def on_error(error: Exception) -> None:
            nonlocal is_denied
            if "permissions violation" in str(error).casefold():
                is_denied = True
                subjects = f"{self._subject} and {self._events_subject}.*"
                self.lost(f"NATS ({self.shown}) does not let this user publish and subscribe on {subjects}")
                self._on_wake()
            elif isinstance(error, FlushTimeoutError):
                await on_lost()

        async def on_message(message: Msg) -> None:
            kind, _, sessions = message.data.decode("ascii", "replace").partition(" ")
            if kind == _FOLLOW:
                with suppress(ValueError):
                    self._live.note_followers([int(session) for session in sessions.split()[:_ASKED_TOGETHER]])
            else:
                self.hear(f"{kind} {sessions}")
                self.deliver()

        client = _Client(requires_tls=self._requires_tls)
        connecting = asyncio.get_running_loop().create_task(
            client.connect(
                self._servers,
                name="holdfast",
                no_echo=True,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=_CONNECT_S,
                ping_interval=_PING_S,
                flush_timeout=_FLUSH_S,
                disconnected_cb=on_lost,
                closed_cb=on_lost,
                error_cb=on_error,
            )
        )
        while not connecting.done():
            if self.is_closing:
                connecting.cancel()  # a client that did not connect cannot be closed
            await asyncio.wait((connecting,), timeout=_LOOK_S)
        if connecting.cancelled():
            return
        connecting.result()
        try:
            await client.subscribe(self._subject, cb=on_message)
            await client.subscribe(f"{self._events_subject}.{_CHECK}")  # so that missing rights are known now
            await client.publish(f"{self._events_subject}.{_CHECK}", b"")
            subscriptions: dict[int, Subscription] = {}
            self._live.connected()
            await self._subscribe(client, subscriptions)
            await client.flush()
            if not is_denied:
                self.works()
            while not is_lost:
                if is_denied:
                    await self._pause(_DENIED_S)
                    return
                messages = self.take()
                for channel, events in self._live.take():  # before the hints of the same commits
                    if client.pending_data_size < _UNSENT_BYTES and len(events) <= client.max_payload:
                        await client.publish(f"{self._events_subject}.{channel}", events)
                for message in messages:
                    await client.publish(self._subject, message.encode())
                if messages:
                    self.on_sent(len(messages))
                await self._subscribe(client, subscriptions)
                if self.is_closing:
                    await client.flush(_CLOSE_S)
                    return
                waits_s = self.wait_s(), FOLLOW_S if subscriptions else None
                await self._sleep_at_most(min([wait_s for wait_s in waits_s if wait_s is not None], default=None))
            raise ConnectionError("the connection was lost")
        finally:
            with suppress(Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await client.close()

    async def _subscribe(self, client: Client, subscriptions: dict[int, Subscription]) -> None:
        """Receive the channels of the sessions that this node follows, and ask the others to send on them."""

        async def on_events(message: Msg) -> None:
            self._live.hear(message.data)

        channels = self._live.changed_channels()
        if channels is not None:
            for channel in subscriptions.keys() - channels:
                await subscriptions.pop(channel).unsubscribe()
            for channel in channels - subscriptions.keys():
                subscriptions[channel] = await client.subscribe(f"{self._events_subject}.{channel}", cb=on_events)
        sessions = self._live.to_ask()
        for start in range(0, len(sessions), _ASKED_TOGETHER):
            asked = " ".join(map(str, sessions[start : start + _ASKED_TOGETHER]))
            await client.publish(self._subject, f"{_FOLLOW} {asked}".encode())


class _Client(Client):
    """A client that sends nothing to a server without TLS if TLS is required.

    nats-py itself starts TLS only if the server asks for it. So anyone on the path could prevent it, and read the
    password.
    """

    def __init__(self, *, requires_tls: bool) -> None:
        super().__init__()
        self._requires_tls = requires_tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._requires_tls and not info.get("tls_required"):
            raise Error("the server has no TLS")
        await super()._process_info(info, initial_connection)


def _parsed(server: str) -> tuple[str, str]:
    """Return the scheme and host of a server's URL. Raises `ConfigurationError`, without showing the URL."""
    try:
        parts = urlsplit(server)
        if parts.scheme in ("nats", "tls") and parts.hostname and (parts.port is None or parts.port > 0):
            return parts.scheme, parts.hostname
    except ValueError:
        pass
    raise ConfigurationError(
        "invalid NATS URL",
        hint="use nats://user:password@host:4222 or tls://…; percent-encode special characters in the password",
    )
