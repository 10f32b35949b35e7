"""Read a session's log from a cursor: first the stored events, then new events as they arrive.

A run never waits for a reader. A slow reader catches up from the store. If events were pruned before they were read,
the reader yields a `Gap` in their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import InvalidCursor, SessionDeleted, UnknownMessage, UnknownSession
from holdfast.host.budgets import PAGE_BYTES
from holdfast.host.session_directory import PAGE
from holdfast.protocol.events import START, Gap, Stored, format_cursor, parse_cursor, shown
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES

if TYPE_CHECKING:
    from holdfast.host.budgets import Charge
    from holdfast.host.context import HostContext
    from holdfast.host.live_session import LiveSession
    from holdfast.host.session_directory import SessionDirectory

__all__ = ["AwaitedLog", "LogReader", "SessionLog", "events_bytes", "open_log"]


class _Settled(msgspec.Struct):
    """The part of ``message.settled`` that a reader following a message needs."""

    message_id: str


_settled = msgspec.json.Decoder(_Settled)

Sink = Callable[[Sequence[Stored]], bool]


class LogReader:
    """An asynchronous iterator over a session's log, made by `open_log`. Use it in one task, and close it.

    Iterating yields batches of events in order, `Gap` frames, and None after each `keepalive_s` seconds without an
    event. The iteration ends after ``session.deleted``, after the event that settles the message `follow`, or when the
    host closes its streams.

    Parameters:
        number: the session's public number.
        cursor: the seq of the last event that the caller has; 0 starts with the first event.
        follow: id of the message whose settlement ends the iteration; None follows no message.
        keepalive_s: seconds without an event after which the reader yields None.
    """

    __slots__ = (
        "_actor",
        "_charge",
        "_closed",
        "_context",
        "_directory",
        "_done",
        "_ended",
        "_follow",
        "_keepalive_s",
        "_log",
        "_quiet_since",
        "_reader",
        "_stored",
        "cursor",
        "number",
        "sink",
    )

    def __init__(
        self,
        context: HostContext,
        directory: SessionDirectory,
        actor: LiveSession,
        *,
        number: int,
        cursor: int,
        follow: str | None,
        keepalive_s: float,
    ) -> None:
        self.number = number
        self.cursor = cursor
        self._context = context
        self._directory = directory
        self._actor = actor
        self._follow = follow
        self._keepalive_s = keepalive_s
        self._log = actor.log
        self._reader = self._log.reader(after=cursor)
        self._charge: Charge | None = None
        self._stored = 0
        self._ended = False
        self._done = False
        self._closed = False
        self._quiet_since = 0.0
        self.sink: Sink | None = None
        """Callback for new events, called at the moment of publication while the iteration waits; None disables it. It
        returns True if it took all the events, or False, without taking any, if the iteration must yield them. It must
        not block."""
        actor.readers += 1
        directory.readers += 1

    @property
    def position(self) -> str:
        """The cursor to resume from."""
        return format_cursor(self.cursor, self.number)

    def __aiter__(self) -> LogReader:
        return self

    async def __anext__(self) -> Sequence[Stored] | Gap | None:
        batch: Sequence[Stored] | Gap
        self._release()
        self._quiet_since = self._context.loop.time()
        while not self._done:
            if self.cursor < self._actor.deleted_seq - 1 and self.cursor < self._stored:
                # Events that were unread when the session was deleted are no longer shown.
                batch = Gap(after=self.cursor, until=self._actor.deleted_seq - 1, reason="pruned")
                self._stored = self._actor.deleted_seq
            elif self.cursor < self._stored:
                batch = await self._from_store(self.cursor, self._stored)
                if batch and not isinstance(batch, Gap):
                    self._actor.shown_seq = max(self._actor.shown_seq, batch[-1].seq)
            elif self._ended or self._actor.deleted:
                break
            else:
                silent_at = self._quiet_since + self._keepalive_s
                try:
                    async with asyncio.timeout_at(silent_at):
                        shown = await self._reader.read(PAGE, on_publish=self.sink and self._pass_on)
                except TimeoutError:
                    if self._quiet_since + self._keepalive_s > silent_at:
                        continue  # the sink has taken events in the meantime
                    return None
                if shown is None:
                    break
                if not isinstance(shown, list):
                    self._stored = shown.until
                    continue
                batch = [event for seq, event in shown if seq > self.cursor]
            if self._log is not self._actor.log:
                break  # the store has lost events that were shown
            if isinstance(batch, Gap):
                self.cursor = batch.until
                self._context.incidents.counts["gaps"] += 1
                return batch
            if batch:
                ending = _ending(batch, self._follow)
                if ending is not None:
                    batch = batch[: ending + 1]
                    self._done = True
                if batch[0].seq != self.cursor + 1 or batch[-1].seq != self.cursor + len(batch):
                    self._context.incidents.promises.broken["P7"] += 1
                self.cursor = batch[-1].seq
                self._context.incidents.promises.kept["P7"] += len(batch)
                return batch
        self._done = True
        raise StopAsyncIteration

    def _pass_on(self, events: Sequence[Stored]) -> bool:
        """Pass new events to the sink; return False if the iteration must yield them instead."""
        if events[0].seq != self.cursor + 1 or events[-1].seq != self.cursor + len(events):
            return False
        if len(events) > PAGE or _ending(events, self._follow) is not None:
            return False
        assert self.sink is not None
        if not self.sink(events):
            return False
        self.cursor = events[-1].seq
        self._context.incidents.promises.kept["P7"] += len(events)
        self._quiet_since = self._context.loop.time()
        return True

    async def look(self, principal: str, key: str) -> None:
        """Determine which events were stored before this reader was attached.

        Raises:
            InvalidCursor: if the cursor is ahead of the session.
            UnknownMessage: if the message `follow` does not exist.
        """
        session, view = await self._directory.find(principal, key)
        if self.cursor > max(view.seq, self._actor.log.next_seq - 1):
            raise InvalidCursor(f"seq {self.cursor} is ahead of the session, which is at {view.seq}")
        self._stored = view.seq
        if self._follow is not None and await _is_settled(self._context, session, key, self._follow):
            self._ended = True  # it may have settled before the cursor

    async def aclose(self) -> None:
        """Close the reader. Idempotent."""
        if not self._closed:
            self._closed = self._done = True
            self._release()
            self._reader.close()
            self._actor.readers -= 1
            self._directory.readers -= 1
            self._actor.idle_since = self._context.loop.time()

    async def _from_store(self, cursor: int, until: int) -> Sequence[Stored] | Gap:
        """Return the next page of stored events. The page's memory is charged until the next read."""
        self._release()
        context, session = self._context, self._actor.session

        async def read() -> list[Stored]:
            found = await context.store.read_events(session, after=cursor, limit=PAGE, limit_bytes=PAGE_BYTES)
            return [event for event in found if event.seq > cursor]

        page, self._charge = await context.budgets.read_page(self._actor.principal, read, events_bytes)
        if page and page[0].seq == cursor + 1:
            return shown(page)
        return Gap(after=cursor, until=page[0].seq - 1 if page else until, reason="pruned")

    def _release(self) -> None:
        if self._charge is not None:
            self._charge.release()
            self._charge = None


def events_bytes(page: Sequence[Stored]) -> int:
    """Return the total size of the events in `page`, in bytes."""
    return sum(len(event.body) for event in page)


class AwaitedLog:
    """An iterator that waits until a session exists, then reads the session's log from the first event.

    Made by `open_log`. Use it in one task, and close it. Until the session exists, iterating yields None after each
    `keepalive_s` seconds; the iteration ends when the host closes its streams. The store has no record of the wait.
    """

    __slots__ = ("_closed", "_context", "_directory", "_keepalive_s", "_key", "_log", "_made", "_principal", "sink")

    def __init__(
        self, context: HostContext, directory: SessionDirectory, principal: str, key: str, *, keepalive_s: float
    ) -> None:
        self._context = context
        self._directory = directory
        self._principal = principal
        self._key = key
        self._keepalive_s = keepalive_s
        self._log: LogReader | None = None
        self._closed = False
        self.sink: Sink | None = None
        """As `LogReader.sink`, once the session exists."""
        self._made = directory.awaited.expect(principal, key)
        directory.readers += 1

    @property
    def number(self) -> int:
        """The session's public number; 0 until the session exists."""
        return self._log.number if self._log is not None else 0

    @property
    def position(self) -> str:
        """The cursor to resume from."""
        return self._log.position if self._log is not None else START

    def __aiter__(self) -> AwaitedLog:
        return self

    async def __anext__(self) -> Sequence[Stored] | Gap | None:
        while self._log is None:
            await asyncio.wait((self._made,), timeout=self._keepalive_s)
            if self._closed:
                raise StopAsyncIteration
            if not self._made.done():
                return None
            try:
                there = await self.look()
            except SessionDeleted:  # it was created and deleted in the meantime
                raise StopAsyncIteration from None
            if not there and self._directory.awaited.closed:
                raise StopAsyncIteration
        self._log.sink = self.sink
        return await anext(self._log)

    async def look(self) -> bool:
        """Start reading if the session exists, and return whether it exists.

        Raises `SessionDeleted` if the session was deleted, or `StorageError` if the store fails.
        """
        if self._made.done():  # expect again before looking, so that nothing is missed in between
            self._made = self._directory.awaited.expect(self._principal, self._key)
        with suppress(UnknownSession):
            self._log = await _open(
                self._context,
                self._directory,
                self._principal,
                self._key,
                after=None,
                follow=None,
                keepalive_s=self._keepalive_s,
            )
            self._wait_no_more()
        return self._log is not None

    async def aclose(self) -> None:
        """Close the reader. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._log is None:
                self._wait_no_more()
            else:
                await self._log.aclose()

    def _wait_no_more(self) -> None:
        self._directory.readers -= 1
        self._directory.awaited.forget(self._principal, self._key, self._made)


SessionLog = LogReader | AwaitedLog
"""A reader of a session's log, whether or not the session exists yet."""


async def open_log(
    context: HostContext,
    directory: SessionDirectory,
    principal: str,
    key: str,
    *,
    after: str | None,
    follow: str | None,
    keepalive_s: float,
) -> SessionLog:
    """Return a reader of the events after the cursor `after`, or of all events if `after` is None.

    If `after` is ``"0"`` or not given, and `follow` is not given, the session need not exist yet: the reader waits
    until the session is created.

    Raises:
        UnknownSession: if the session does not exist, and `after` or `follow` refers to it.
        SessionDeleted: if the session was deleted.
        UnknownMessage: if the message `follow` does not exist.
        InvalidCursor: if `after` is not a cursor of the session, or is ahead of the session's log.
    """
    try:
        return await _open(context, directory, principal, key, after=after, follow=follow, keepalive_s=keepalive_s)
    except UnknownSession:
        if follow is not None or after not in (None, START):
            raise
    log = AwaitedLog(context, directory, principal, key, keepalive_s=keepalive_s)
    try:
        await log.look()
    except BaseException:
        await log.aclose()
        raise
    return log


async def _open(
    context: HostContext,
    directory: SessionDirectory,
    principal: str,
    key: str,
    *,
    after: str | None,
    follow: str | None,
    keepalive_s: float,
) -> LogReader:
    session, view = await directory.find(principal, key)
    cursor = 0 if after is None else parse_cursor(after, view.number)
    actor = directory.load(session=session, number=view.number, principal=principal, key=key, seq=view.seq)
    reader = LogReader(
        context, directory, actor, number=view.number, cursor=cursor, follow=follow, keepalive_s=keepalive_s
    )
    try:
        # New events reach this reader from now on; `look` finds everything stored before.
        await reader.look(principal, key)
    except BaseException:
        await reader.aclose()
        raise
    return reader


async def _is_settled(context: HostContext, session: int, key: str, message_id: str) -> bool:
    settlement = await context.store.settlement(session, message_id)
    if settlement is None:
        raise UnknownMessage(f"no such message: {message_id!r} in session {key!r}")
    return settlement.state in TERMINAL_MESSAGE_STATES


def _ending(batch: Sequence[Stored], follow: str | None) -> int | None:
    """Return the index of the event in `batch` that ends the stream; None if the stream continues."""
    for index, event in enumerate(batch):
        if event.kind == "session.deleted":
            return index
        if follow is not None and event.kind == "message.settled" and _settled.decode(event.body).message_id == follow:
            return index
    return None
