"""Open connections of a server, with their limits, owners and timeouts.

A connection is keyless until a request on the connection presents a valid key. From then on, the connection belongs to
the key's principal.

Rules
- The server limits its connections to fewer than the available file descriptors, so that enough descriptors remain for
  the agents' tools and the store.
- When the server is full, the keyless connection that was idle longest is closed to make room for a new connection. If
  no keyless connection exists, an idle connection of a principal is closed. Keyless connections can therefore never
  lock a principal out. A connection that handles a principal's request is never closed for this purpose.
- The number of connections is limited for each principal, and for all keyless connections together. A request that
  would take a principal over its limit is refused, and the connection is closed.
- A request head must be complete within ``head_timeout_s`` of its first byte. For the first head of a connection, the
  time starts when the connection is made. Between two requests, a connection may be idle for
  ``idle_connection_timeout_s``. One timer enforces the timeouts of all connections, so a request costs only two changes
  of an ordered dictionary.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import BudgetExceeded, HostBusy
from holdfast.host import Host, Incident
from holdfast.host.budgets import UNKNOWN

if TYPE_CHECKING:
    from holdfast.host.budgets import Charge

__all__ = ["CONNECTION", "Connection", "Connections", "descriptors_kept_free", "raise_descriptor_limit"]

CONNECTION = "holdfast.connection"
"""Key in the ASGI scope of a request for the protocol object of the connection."""

_log = logging.getLogger("holdfast.server")
_MOST_DESCRIPTORS = 65_536
_RESERVE_PART = 4
_RESERVE_LEAST = 32
_RESERVE_MOST = 4096
_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 60.0
_HEADS_BYTES = 32_000_000
"""Maximum total size of incomplete heads in memory."""


class Connection(Protocol):
    """Interface of a connection that is registered with `Connections`."""

    peer: str
    charge: Charge | None
    queue: OrderedDict[Connection, float] | None

    def on_timeout(self) -> None:
        """Handle a timeout: a request's head, a request's body or the next request did not arrive in time."""
        ...

    def drop(self) -> None:
        """Close the connection immediately, to make room for another connection."""
        ...


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit on file descriptors to its hard limit, but to at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_kept_free(descriptors: int) -> int:
    """Return how many of `descriptors` are reserved for tools and the store.

    A quarter is reserved, but at least 32 and at most 4,096.
    """
    return min(max(descriptors // _RESERVE_PART, _RESERVE_LEAST), _RESERVE_MOST)


class Connections:
    """Register of a server's open connections, which enforces their limits and timeouts.

    Use it from one event loop only.

    Parameters:
        host: host of the server, which provides the settings, the connection budget and the incident log.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        settings = host.settings
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
        reserve = descriptors_kept_free(descriptors)
        limit = max(1, min(settings.max_connections, descriptors - reserve))
        self._spare = reserve // 2
        self.is_leaving = False
        """Whether each connection is closed after the response to its next request."""
        self._highest_descriptor = descriptors - self._spare
        self._budget = host.budgets.connections
        self._budget.resize(limit=limit, share=max(1, min(settings.principal_connections, limit // 2)))
        self._now = self._ticked_at = self._loop.time()
        self._keyless: OrderedDict[Connection, None] = OrderedDict()
        self._peers: Counter[str] = Counter()
        self._heads: OrderedDict[Connection, float] = OrderedDict()
        self._idle: OrderedDict[Connection, float] = OrderedDict()
        self._bodies: OrderedDict[Connection, float] = OrderedDict()
        self._deadlines = (
            (self._heads, settings.head_timeout_s),
            (self._idle, settings.idle_connection_timeout_s),
            (self._bodies, settings.body_timeout_s),
        )
        self._timer: asyncio.TimerHandle | None = None
        self._told: dict[str, float] = {}
        self._looked_at = -_LOOK_EVERY_S
        self._default: tuple[object, bytes] = (None, b"")
        self.head_bytes = 0
        """Total size of incomplete heads in memory."""

    @property
    def open(self) -> int:
        """Number of open connections."""
        return self._budget.used

    def default_lines(self, fields: list[tuple[bytes, bytes]]) -> bytes:
        """Return uvicorn's default response headers, which are in `fields`, encoded as header lines.

        The result is cached, because uvicorn replaces the list `fields` only once a second.
        """
        made_of, lines = self._default
        if made_of is not fields:
            lines = b"".join([b"%s: %s\r\n" % field for field in fields])
            self._default = (fields, lines)
        return lines

    def opened(self, connection: Connection, descriptor: int) -> None:
        """Register a new connection.

        Parameters:
            connection: connection to register.
            descriptor: file descriptor of the connection's socket.

        Raises:
            HostBusy, BudgetExceeded: if the server is full and no connection can be closed to make room.
        """
        self._make_room(connection.peer, descriptor)
        try:
            connection.charge = self._budget.charge(UNKNOWN)
        except (HostBusy, BudgetExceeded):
            self._count("refused")
            raise
        self._keyless[connection] = None
        self._peers[connection.peer] += 1
        self._place(connection, self._heads)
        if self._timer is None:
            self._now = self._ticked_at = self._loop.time()
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def lost(self, connection: Connection) -> None:
        """Deregister a connection that has closed or is about to close. Idempotent."""
        self._place(connection, None)
        charge, connection.charge = connection.charge, None
        if charge is not None:
            if charge.principal == UNKNOWN:
                self._forget_keyless(connection)
            charge.release()

    def own(self, connection: Connection, principal: str) -> None:
        """Assign a connection to the principal of an authenticated request.

        Raises `BudgetExceeded` if the principal already has its full share of connections.
        """
        charge = connection.charge
        if charge is None or charge.principal == principal:
            return
        keyless = charge.principal == UNKNOWN
        try:
            charge.move(principal)
        except BudgetExceeded as error:
            self._count("refused")
            self._tell(f"principal {principal}", str(error))
            raise
        if keyless:
            self._forget_keyless(connection)

    def acceptable(self, least: int) -> int:
        """Return how many connections may be accepted now, before the first of them is registered with `opened`.

        Parameters:
            least: minimum to return, even if the server has no room; connections without room get an error response.
        """
        budget = self._budget
        room = min(budget.limit - budget.used, budget.share - budget.held(UNKNOWN)) + len(self._keyless)
        return max(least, min(room, self._spare))

    def claim(self, connection: Connection, principal: str) -> bool:
        """Charge a waiting connection to the principal, so that it is not closed to make room for other connections.

        Returns:
            False, without any change, if the principal already has its full share of connections; otherwise True.
        """
        if self._budget.held(principal) >= self._budget.share:
            return False
        self.own(connection, principal)
        self._place(connection, None)
        return True

    def cannot_accept(self, error: OSError) -> None:
        """Report that the system cannot accept a connection, for example because it has no free descriptors."""
        self._tell("this host", f"cannot accept connections, retrying soon: {error.strerror or error}")

    def head_began(self, connection: Connection) -> None:
        """Record that a part of a request head has arrived on a connection."""
        if connection.queue is self._idle:
            self._place(connection, self._heads)
        if self.head_bytes > _HEADS_BYTES:
            oldest = next(iter(self._heads))
            self._tell(f"peer {oldest.peer}", f"half heads have {self.head_bytes:,} bytes")
            self._close(oldest)

    def busy(self, connection: Connection) -> None:
        """Record that a connection is handling a request, so that it does not time out."""
        self._place(connection, None)

    def answered(self, connection: Connection, *, whole: bool, head_began: bool) -> None:
        """Record that a response has ended on a connection with no further requests queued.

        Parameters:
            connection: connection on which the response was sent.
            whole: whether the request itself has arrived completely.
            head_began: whether a part of the next request's head has already arrived.
        """
        self._place(connection, (self._heads if head_began else self._idle) if whole else self._bodies)
        if connection in self._keyless:
            self._keyless.move_to_end(connection)

    def close(self) -> None:
        """Stop enforcing timeouts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self, peer: str, descriptor: int) -> None:
        """Close idle connections until there is room for one more keyless connection."""
        budget = self._budget
        scarce = descriptor >= self._highest_descriptor
        while scarce or budget.used >= budget.limit or budget.held(UNKNOWN) >= budget.share:
            oldest = next(iter(self._keyless), None)
            if oldest is None and budget.used >= budget.limit:
                oldest = next(iter(self._idle), None)
            if self._now - self._looked_at >= _LOOK_EVERY_S:  # there may be tens of thousands of peers
                self._looked_at = self._now
                most = max(self._peers, key=self._peers.__getitem__, default=peer)
                if scarce:
                    text = f"the host has {descriptor:,} descriptors open, {budget.used:,} of them connections"
                else:
                    text = f"the host has {budget.used:,} of {budget.limit:,} connections in use"
                self._tell(f"peer {most}", f"{text}, {budget.held(UNKNOWN):,} of them without a key")
            if oldest is None:
                break
            self._close(oldest)
            scarce = False

    def _close(self, connection: Connection) -> None:
        self._count("no_room")
        self.lost(connection)
        connection.drop()

    def _forget_keyless(self, connection: Connection) -> None:
        del self._keyless[connection]
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]

    def _place(self, connection: Connection, queue: OrderedDict[Connection, float] | None) -> None:
        if connection.queue is not None:
            del connection.queue[connection]
        connection.queue = queue
        if queue is not None:
            queue[connection] = self._now

    def _look(self) -> None:
        """Time out connections whose deadline has passed.

        If the loop was blocked, at most two intervals of the pause count, because nothing was read meanwhile.
        """
        now = self._loop.time()
        self._now += min(now - self._ticked_at, 2 * _LOOK_EVERY_S)
        self._ticked_at = now
        for queue, limit_s in self._deadlines:
            while queue:
                connection, since = next(iter(queue.items()))
                if self._now - since < limit_s:
                    break
                self._count("too_slow")
                self._place(connection, None)
                connection.on_timeout()
        self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look) if self._budget.used else None

    def _count(self, reason: str) -> None:
        self._host.incidents.counts[f"connections_{reason}"] += 1

    def _tell(self, who: str, text: str) -> None:
        """Log a message and record it as an incident, at most once a minute for each `who`."""
        if self._now - self._told.get(who, -_TELL_EVERY_S) < _TELL_EVERY_S:
            return
        if len(self._told) > 1000:
            self._told.clear()
        self._told[who] = self._now
        line = f"{who}: {text}"
        _log.warning("%s", line)
        self._host.incidents.report(Incident(at=self._host.now(), kind="connections", text=line))
