"""The sessions in this host's memory. They are loaded on use, notified of new events, and evicted when idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import SessionDeleted, UnknownSession
from holdfast.host.awaited_sessions import AwaitedSessions
from holdfast.host.budgets import PAGE_BYTES
from holdfast.host.live_session import LiveSession, SharedSession
from holdfast.host.store_retry import retry
from holdfast.runtime.process_host import process_host

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.protocol.events import Stored
    from holdfast.protocol.messages import SessionView

__all__ = ["PAGE", "SessionDirectory"]

PAGE = 1024
"""Maximum number of events in one read."""


class SessionDirectory:
    """The live sessions of a host, and the waits for sessions to be created. Use it on the host's loop only."""

    __slots__ = ("_closed", "_context", "_idle", "awaited", "live", "on_behind", "readers")

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self.live: dict[int, LiveSession] = {}
        self.awaited = AwaitedSessions()
        self.readers = 0
        """Number of open event streams."""
        self.on_behind: Callable[[SharedSession], object] | None = None
        """Called with a session of which this host knows a newer event, but not all older ones; None if no other host
        writes the store."""
        self._idle: deque[LiveSession] = deque()
        self._closed = False

    def load(self, *, session: int, number: int, principal: str, key: str, seq: int) -> LiveSession:
        """Return the `LiveSession`, created if necessary; `seq` is the number of the session's last stored event."""
        live = self.live.get(session)
        if live is not None and (live.principal, live.key) != (principal, key):
            self.discard(live)  # the store has lost that session, and has given its number to this one
            live = None
        if live is None:
            live = self._make(session, number, principal, key, seq)
            self.live[session] = live
            self._watch(live)
            if self._closed:
                live.log.close()
        elif isinstance(live, SharedSession) and live.idle:
            if seq < live.log.next_seq - 1:
                live.truncate(seq)  # the store has lost events
            live.seen = max(live.seen, seq)  # an idle session needs none of the events before
        return live

    def discard(self, live: LiveSession) -> None:
        """End the readers of a session that the store does not have any more, and drop it from memory."""
        live.log.close()
        if self.live.get(live.session) is live:
            del self.live[live.session]

    def _make(self, session: int, number: int, principal: str, key: str, seq: int) -> LiveSession:
        if self.on_behind is None:
            return LiveSession(session=session, number=number, principal=principal, key=key, seq=seq)
        return SharedSession(
            session=session, number=number, principal=principal, key=key, seq=seq, on_behind=self.on_behind
        )

    async def find(self, principal: str, key: str) -> tuple[int, SessionView]:
        """Return the session's row id and view. Raises `UnknownSession` or `SessionDeleted`."""
        found = await self._context.store.find_session(principal, key)
        if found is None:
            raise UnknownSession(f"no such session: {key!r}")
        if found[1].state == "deleted":
            raise SessionDeleted(f"session {key!r} was deleted")
        return found

    def publish(self, session: int, events: Sequence[Stored]) -> None:
        """Pass newly stored events to the readers of a session, if it is in memory."""
        live = self.live.get(session)
        if live is not None:
            live.publish(events)

    async def catch_up(self, live: LiveSession) -> None:
        """Publish stored events whose publication was missed because store replies were lost. Raises `StorageError`.

        If other hosts use the store, some of these events may be theirs, and are handled soon.
        """
        handled = live.seen if isinstance(live, SharedSession) else 0

        def read() -> Awaitable[Sequence[Stored]]:
            return self._context.store.read_events(
                live.session, after=live.log.next_seq - 1, limit=PAGE, limit_bytes=PAGE_BYTES
            )

        while page := await retry(self._context, "read", read):
            live.publish(page)
            if live.log.closed:
                break
        if isinstance(live, SharedSession) and self.on_behind is not None:
            live.seen = min(live.seen, handled)
            self.on_behind(live)

    def close_streams(self) -> None:
        """End every event stream after its pending events. A stream that is opened later ends at the end of its log."""
        self._closed = True
        for live in self.live.values():
            live.log.close()
        self.awaited.close()

    def evict(self, *, idle_for_s: float) -> None:
        """Drop from memory every session that has been idle for at least `idle_for_s` seconds. The store keeps it.

        The queue of sessions to check contains each live session once, ordered by when the session was loaded or last
        checked.
        """
        before = self._context.loop.time() - idle_for_s
        at_first = len(self.live)
        for _ in range(len(self._idle)):
            live = self._idle[0]
            if live.idle and live.idle_since > before:
                break
            self._idle.popleft()
            if self.live.get(live.session) is not live:
                continue  # it was discarded
            if live.idle:
                del self.live[live.session]
                self.forget_walls(live)
            else:
                self._watch(live)
        if len(self.live) < at_first / 2:
            self.live = dict(self.live)  # copies the dict, since a dict never shrinks

    def forget_walls(self, live: LiveSession) -> None:
        """Drop what is kept to start programs of a session fast, because its activation ends."""
        process_host().forget_walls(self._context.session_id(live.number))

    def _watch(self, live: LiveSession) -> None:
        live.idle_since = self._context.loop.time()
        self._idle.append(live)
