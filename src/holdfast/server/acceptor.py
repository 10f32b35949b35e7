"""Acceptor of new connections, which serves connections with a valid key first.

The kernel returns connections in order of arrival, and serving a connection costs ten times as much as accepting it. A
burst of connections from one program would therefore delay all other programs. To avoid this, the acceptor accepts new
connections immediately, and peeks at their first bytes:

- A connection with a valid API key or the local token is served next. Principals take turns, each within its share of
  the connections.
- Connections with a token that looks like a signed token come next. The token is verified only when the request is
  handled, because verification is expensive.
- All other connections are served in order of arrival, a few per turn.

Rules
- There is one turn per millisecond, so that a flood of connections leaves time for other work.
- Peeking affects only the order of service. Each request is still authenticated when it is handled. Peeked bytes are
  not stored.
- A waiting connection counts as open, either as keyless or as a connection of its principal. The usual timeout and
  limits apply to waiting connections (`holdfast.server.connections`).
- If only a few connections arrive, they are served immediately, without peeking. An occasional short burst is also
  served immediately, for example when a pool of clients starts.
"""

from __future__ import annotations

import asyncio
import logging
import re
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.logs import log_failure
from holdfast.server.auth import KeyRing
from holdfast.server.connections import Connection, Connections

if TYPE_CHECKING:
    from collections import OrderedDict

    from holdfast.host.budgets import Charge

__all__ = ["Acceptor"]

_log = logging.getLogger("holdfast.server")
_TURN_S = 0.001
_BATCH = 128
"""Maximum number of connections accepted per turn."""
_MOST = 6
"""Maximum number of connections with a valid key that are served per turn. If no key is required, this is the maximum
number of connections of any kind."""
_FEW = 2
"""Maximum number of signed-token connections, and of keyless connections, that are served per turn."""
_BURST = 24
"""Maximum number of connections in bursts that are served immediately."""
_BURST_PER_S = 500
"""Number of connections by which the allowance for bursts is replenished per second."""
_PEEK_BYTES = 8192
_PEEKS = 2
"""Maximum number of peeks at an incomplete head."""
_WATCHED = 1024
"""Maximum number of connections with an incomplete head that are watched for more bytes; the newest are kept."""
_PAUSE_S = 0.2
_AUTHORIZATION = re.compile(rb"\r\n(?i:authorization):[ \t]*([^\r\n]*)\r\n")


class _Waiting:
    """An accepted connection that is not served yet. It is registered with the server's `Connections`."""

    __slots__ = ("_acceptor", "charge", "line", "peeks", "peer", "queue", "socket")

    def __init__(self, acceptor: Acceptor, accepted: socket.socket, peer: str) -> None:
        self._acceptor = acceptor
        self.socket = accepted
        self.peer = peer
        self.charge: Charge | None = None
        self.queue: OrderedDict[Connection, float] | None = None
        self.line: dict[_Waiting, None] | None = None
        """Queue in which the connection waits; None while the connection is being served."""
        self.peeks = _PEEKS

    def on_timeout(self) -> None:
        """Close the connection, because it was not served in time."""
        self.drop()

    def drop(self) -> None:
        """Close the connection immediately. If the connection is already being served, only deregister it."""
        self._acceptor.drop(self)


class Acceptor:
    """Acceptor of connections on a listening socket; replaces `asyncio.Server`. Use it from one event loop only.

    Parameters:
        listener: bound, listening, non-blocking socket, which `close` closes.
        protocol: function that creates the protocol of a connection. It is called with the waiting connection that the
            protocol takes over, or with None if the connection did not wait.
        connections: register of the server's open connections.
        keys: key ring that recognizes valid keys.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[Connection | None], asyncio.BaseProtocol],
        connections: Connections,
        keys: KeyRing,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._protocol = protocol
        self._connections = connections
        self._keys = keys
        self._preferred: dict[str, dict[_Waiting, None]] = {}
        self._signed: dict[_Waiting, None] = {}
        self._others: dict[_Waiting, None] = {}
        self._watched: dict[int, _Waiting] = {}
        self._poll = select.poll()
        self._starting: dict[asyncio.Task[object], tuple[socket.socket, _Waiting | None]] = {}
        self._turn: asyncio.TimerHandle | None = None
        self._refused_at = -_PAUSE_S
        self._allowance = float(_BURST)
        self._allowance_at = self._loop.time()
        self._ready = select.poll()
        self._ready.register(listener, select.POLLIN)
        self._loop.add_reader(listener, self._on_connections)

    def close(self) -> None:
        """Stop listening, and close waiting connections. Idempotent."""
        if self._turn is not None:
            self._turn.cancel()
        self.stop_listening()
        for line in (*self._preferred.values(), self._signed, self._others):
            for waiting in list(line):
                self.drop(waiting)

    def stop_listening(self) -> None:
        """Accept no more connections; those that wait are still served. Idempotent."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Wait until every connection that is being set up has its protocol.

        Call `close` first, so that no further connections are accepted.
        """
        if self._starting:
            await asyncio.wait(self._starting)

    def drop(self, waiting: _Waiting) -> None:
        """Close a waiting connection, or deregister a connection that is already being served. Idempotent."""
        self._connections.lost(waiting)
        if waiting.line is not None:
            self._leave_line(waiting)
            waiting.socket.close()

    def _on_connections(self) -> None:
        """Serve a few new connections or a short burst immediately; otherwise queue them and serve some per turn."""
        came = self._accept()
        if len(came) <= _FEW or self._allows_burst(len(came)):
            for accepted, _ in came:
                self._serve(accepted, None)
        else:
            self._admit_all(came)
        if self._has_waiting or self._is_paused:
            self._loop.remove_reader(self._listener)
            self._plan_turn()

    def _allows_burst(self, count: int) -> bool:
        """Return whether a burst of `count` connections may be served immediately; if so, reduce the allowance."""
        now = self._loop.time()
        self._allowance = min(self._allowance + (now - self._allowance_at) * _BURST_PER_S, _BURST)
        self._allowance_at = now
        if count > self._allowance:
            return False
        self._allowance -= count
        return True

    def _take_turn(self) -> None:
        """Accept new connections, and serve some of the waiting connections."""
        try:
            self._peek_again()
            self._admit_all([] if self._is_paused else self._accept())
        finally:
            self._plan_turn()

    def _plan_turn(self) -> None:
        """Schedule another turn while connections wait; otherwise watch the listener."""
        if self._has_waiting or self._is_paused:
            self._turn = self._loop.call_later(_TURN_S if self._has_waiting else _PAUSE_S, self._take_turn)
        else:
            self._turn = None
            if self._listener.fileno() >= 0:
                self._loop.add_reader(self._listener, self._on_connections)

    @property
    def _has_waiting(self) -> bool:
        return bool(self._others or self._preferred or self._signed)

    @property
    def _is_paused(self) -> bool:
        return self._loop.time() < self._refused_at + _PAUSE_S

    def _accept(self) -> list[tuple[socket.socket, str]]:
        came: list[tuple[socket.socket, str]] = []
        if self._listener.fileno() < 0:
            return came
        most = min(_BATCH, self._connections.acceptable(_FEW))
        try:
            while len(came) < most and self._ready.poll(0):  # costs a tenth of a failed accept
                accepted, address = self._listener.accept()
                came.append((accepted, address[0]))
        except (BlockingIOError, ConnectionError):
            pass  # no more are pending, or the next client has already disconnected
        except OSError as error:
            self._connections.cannot_accept(error)
            self._refused_at = self._loop.time()
        return came

    def _admit_all(self, came: list[tuple[socket.socket, str]]) -> None:
        for accepted, peer in came:
            self._admit(accepted, peer)
        self._serve_some()

    def _admit(self, accepted: socket.socket, peer: str) -> None:
        """Queue a new connection.

        If the server has no room, the connection is served immediately, so that its protocol responds with an error.
        """
        if not self._connections.acceptable(0):
            self._serve(accepted, None)
            return
        waiting = _Waiting(self, accepted, peer)
        self._connections.opened(waiting, accepted.fileno())
        self._enter_line(waiting, self._others)
        if self._keys.required:
            self._peek(waiting)

    def _peek(self, waiting: _Waiting) -> None:
        """Peek at the first bytes of a connection.

        A connection with a valid key gets priority. A connection with an incomplete head is watched for more bytes.
        """
        try:
            head = waiting.socket.recv(_PEEK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._watch(waiting)
            return
        except OSError:
            head = b""
        if not head:
            self.drop(waiting)  # the client has disconnected
            return
        field = _AUTHORIZATION.search(head)
        if field is not None:
            self._unwatch(waiting)
            self._rank(waiting, field[1])
            return
        waiting.peeks -= 1
        if waiting.peeks and len(head) < _PEEK_BYTES and b"\r\n\r\n" not in head:
            self._watch(waiting)
        else:
            self._unwatch(waiting)

    def _rank(self, waiting: _Waiting, authorization: bytes) -> None:
        principal = self._keys.holder(authorization)
        if principal is None:
            if self._keys.may_be_signed(authorization):
                self._leave_line(waiting)
                self._enter_line(waiting, self._signed)
        elif self._connections.claim(waiting, principal):
            self._leave_line(waiting)
            self._enter_line(waiting, self._preferred.setdefault(principal, {}))

    def _peek_again(self) -> None:
        if self._watched:
            for descriptor, _ in self._poll.poll(0):
                self._peek(self._watched[descriptor])

    def _watch(self, waiting: _Waiting) -> None:
        descriptor = waiting.socket.fileno()
        if descriptor in self._watched:
            return
        if len(self._watched) >= _WATCHED:
            self._unwatch(next(iter(self._watched.values())))
        self._watched[descriptor] = waiting
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, waiting: _Waiting) -> None:
        descriptor = waiting.socket.fileno()
        if self._watched.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _serve_some(self) -> None:
        for _ in range(_MOST):
            if not self._preferred:
                break
            principal = next(iter(self._preferred))
            line = self._preferred.pop(principal)
            self._serve_first(line)
            if line:
                self._preferred[principal] = line  # the others are first now
        most = _FEW if self._keys.required else _MOST
        for line in (self._signed, self._others):
            for _ in range(min(most, len(line))):
                self._serve_first(line)

    def _serve_first(self, line: dict[_Waiting, None]) -> None:
        waiting = next(iter(line))
        self._leave_line(waiting)
        self._serve(waiting.socket, waiting)

    def _serve(self, accepted: socket.socket, waiting: _Waiting | None) -> None:
        serving = self._loop.connect_accepted_socket(partial(self._protocol, waiting), accepted)
        task: asyncio.Task[object] = self._loop.create_task(serving)
        self._starting[task] = (accepted, waiting)
        task.add_done_callback(self._on_started)

    def _on_started(self, task: asyncio.Task[object]) -> None:
        accepted, waiting = self._starting.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        accepted.close()
        if waiting is not None:
            self._connections.lost(waiting)
        if error is not None and not isinstance(error, OSError):  # those are clients that disconnected
            log_failure(_log, "a connection could not be served", error)

    @staticmethod
    def _enter_line(waiting: _Waiting, line: dict[_Waiting, None]) -> None:
        waiting.line = line
        line[waiting] = None

    def _leave_line(self, waiting: _Waiting) -> None:
        assert waiting.line is not None
        self._unwatch(waiting)
        del waiting.line[waiting]
        waiting.line = None
