"""Reading a session's log by cursor: from the store up to its end, then as it grows.

A reader holds nothing that a run waits for. What it was too slow for it reads from the store; it never misses an event
without a `Gap`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import InvalidCursor, UnknownMessage, UnknownSession
from holdfast.protocol.events import Gap, Stored, parse_cursor
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES

if TYPE_CHECKING:
    from holdfast.host.host import Host
    from holdfast.protocol.messages import SessionView

__all__ = ["read_log"]

PAGE = 1024
"""Events that are taken at a time."""


class _Settled(msgspec.Struct):
    """What a reader that follows a message looks for in ``message.settled``."""

    message_id: str


_settled = msgspec.json.Decoder(_Settled)


async def read_log(
    host: Host, principal: str, key: str, *, after: str | None, follow: str | None, keepalive_s: float
) -> AsyncIterator[Sequence[Stored] | Gap | None]:
    """Batches of events in order, `Gap` frames, and None after each `keepalive_s` without an event.

    It ends after ``session.deleted``, after the event that settles `follow`, and when the host closes its streams.

    Raises:
        UnknownSession, UnknownMessage, InvalidCursor.
    """
    session, view = await _found(host, principal, key)
    cursor = 0 if after is None else parse_cursor(after, view.number)
    actor = host.actor(session=session, number=view.number, principal=principal, key=key, seq=view.seq)
    actor.readers += 1
    host.readers += 1
    try:
        # From now on what is stored is shown to this reader too: whatever was stored before is at or below `stored`.
        with actor.log.reader(after=cursor) as reader:
            view = (await _found(host, principal, key))[1]
            stored = view.seq
            if cursor > max(stored, actor.log.next_seq - 1):
                raise InvalidCursor(f"{after!r} is ahead of the session, which is at {stored}")
            settled = follow is not None and await _is_settled(host, session, key, follow)
            while True:
                batch: Sequence[Stored] | Gap
                if cursor < stored:
                    batch = await _from_store(host, session, cursor, stored)
                elif settled or actor.deleted or view.state == "deleted":
                    return  # nothing comes any more, or what it follows was settled before its cursor
                else:
                    try:
                        async with asyncio.timeout(keepalive_s):
                            shown = await reader.read(PAGE)
                    except TimeoutError:
                        yield None
                        continue
                    if shown is None:
                        return
                    if not isinstance(shown, list):
                        stored = shown.until
                        continue
                    batch = [event for seq, event in shown if seq > cursor]
                if isinstance(batch, Gap):
                    cursor = batch.until
                    host.incidents.counts["gaps"] += 1
                    yield batch
                elif batch:
                    ending = _ending(batch, follow)
                    cursor = batch[-1].seq
                    host.incidents.kept["P7"] += len(batch)
                    yield batch if ending is None else batch[: ending + 1]
                    if ending is not None:
                        return
    finally:
        actor.readers -= 1
        host.readers -= 1
        actor.idle_since = host.loop.time()


async def _found(host: Host, principal: str, key: str) -> tuple[int, SessionView]:
    found = await host.store.find_session(principal, key)
    if found is None:
        raise UnknownSession(f"there is no session {key!r}")
    return found


async def _is_settled(host: Host, session: int, key: str, message_id: str) -> bool:
    settlement = await host.store.settlement(session, message_id)
    if settlement is None:
        raise UnknownMessage(f"there is no message {message_id!r} in session {key!r}")
    return settlement.state in TERMINAL_MESSAGE_STATES


async def _from_store(host: Host, session: int, cursor: int, until: int) -> Sequence[Stored] | Gap:
    page = [event for event in await host.store.read_events(session, after=cursor, limit=PAGE) if event.seq > cursor]
    if page and page[0].seq == cursor + 1:
        return page
    return Gap(after=cursor, until=page[0].seq - 1 if page else until, reason="pruned")


def _ending(batch: Sequence[Stored], follow: str | None) -> int | None:
    """The index of the event that ends the stream."""
    for index, event in enumerate(batch):
        if event.kind == "session.deleted":
            return index
        if follow is not None and event.kind == "message.settled" and _settled.decode(event.body).message_id == follow:
            return index
    return None
