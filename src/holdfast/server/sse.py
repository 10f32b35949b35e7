"""Event streams: the log of a session as Server-Sent Events or over a WebSocket, for as long as the reader stays.

- A stream holds no events: the host hands it what is stored behind the cursor, joined into one write.
- A reader that goes is noticed at once, one that takes nothing is let go after ``stream_stall_s``; the run, other
  readers and the shutdown never wait for one.
- When the server shuts down, every stream gets a last ``closed`` frame with the cursor to resume from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec

from holdfast.errors import HoldfastError, InvalidCursor
from holdfast.protocol.events import Gap, Stored, format_cursor, parse_cursor, wire
from holdfast.protocol.messages import SessionView, Settlement
from holdfast.protocol.sse import KEEP_ALIVE, Closed, encode_closed, encode_events, encode_gap
from holdfast.server.exchange import Exchange, Receive, encode
from holdfast.server.limits import StreamLimit

__all__ = ["StreamSource", "Streams"]

_log = logging.getLogger("holdfast.server")
_RETRY_MS = 1000
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]

Batch = Sequence[Stored] | Gap | None
Write = Callable[[Batch], Awaitable[None]]


class StreamSource(Protocol):
    """What a stream needs of a session."""

    async def info(self) -> SessionView:
        """The session. Raises `UnknownSession`."""
        ...

    async def message(self, message_id: str) -> Settlement:
        """What became of a message. Raises `UnknownMessage`."""
        ...

    def stream(self, *, after: str | None = None, follow: str | None = None) -> AsyncIterator[Batch]:
        """Batches of stored events; None when it was idle for a while."""
        ...


class _Gone(Exception):
    """The reader went away."""


class _End(NamedTuple):
    """How a stream ended: behind which event, and whether because the server closes."""

    seq: int
    closed: bool


class Streams:
    """All open event streams of a server. Of one loop.

    Parameters:
        limit: how many each principal may have.
    """

    __slots__ = ("_closing", "_cut", "_limit", "_tasks")

    def __init__(self, limit: StreamLimit) -> None:
        self._limit = limit
        self._closing = False
        self._cut = False
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def open(self) -> int:
        """Open streams."""
        return len(self._tasks)

    def closing(self) -> None:
        """From now on, a stream that ends is told to come back; the host ends them by its ``close_streams()``."""
        self._closing = True

    async def all_ended(self) -> None:
        """Wait until no stream is open."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> int:
        """End the streams whose readers do not take their last frame. Returns how many."""
        self._cut = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)

    async def serve_sse(self, exchange: Exchange, session: StreamSource) -> None:
        """Answer with the session's events until they end or the reader goes."""
        number, position, source = await self._begin(exchange, session)
        send = exchange.send

        async def write(batch: Batch) -> None:
            if batch is None:
                data = KEEP_ALIVE
            elif isinstance(batch, Gap):
                data = encode_gap(batch, number)
            else:
                data = encode_events(batch, number)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        with self._limit.one(exchange.caller.principal):
            exchange.started = True
            await send({"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *exchange.extra]})
            await send({"type": "http.response.body", "body": b"retry: %d\n\n" % _RETRY_MS, "more_body": True})
            end = await self._pump(exchange, source, position, write)
            if end is None:
                return
            last = b""
            if end.closed:
                last = encode_closed(
                    Closed(reason="shutdown", cursor=format_cursor(end.seq, number)), retry_ms=_RETRY_MS
                )
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def serve_websocket(self, exchange: Exchange, session: StreamSource) -> None:
        """Send the session's events as text messages ``{"id", "event", "data"}``; what the reader sends is ignored."""
        number, position, source = await self._begin(exchange, session)
        send = exchange.send

        async def write(batch: Batch) -> None:
            if batch is None:
                return  # the server's pings keep the connection open
            if isinstance(batch, Gap):
                await send_text(format_cursor(batch.until, number), "gap", encode(batch))
            else:
                for stored in batch:
                    await send_text(format_cursor(stored.seq, number), stored.kind, wire(stored))

        async def send_text(cursor: str, event: str, data: bytes) -> None:
            message = encode({"id": cursor, "event": event, "data": msgspec.Raw(data)})
            await send({"type": "websocket.send", "text": message.decode()})

        with self._limit.one(exchange.caller.principal):
            exchange.started = True
            await send({"type": "websocket.accept"})
            end = await self._pump(exchange, source, position, write)
            if end is None:
                return
            if end.closed:
                closed = Closed(reason="shutdown", cursor=format_cursor(end.seq, number))
                await send_text(closed.cursor, "closed", encode(closed))
            await send({"type": "websocket.close", "code": 1012 if end.closed else 1000})

    async def _begin(self, exchange: Exchange, session: StreamSource) -> tuple[int, int, AsyncIterator[Batch]]:
        last_id = exchange.headers.get(b"last-event-id")
        after = last_id.decode("latin-1") if last_id else exchange.query("after")
        follow = exchange.query("follow")
        view = await session.info()
        position = 0 if after is None else parse_cursor(after, view.number)
        if position > view.seq:
            raise InvalidCursor(f"{after!r} is ahead of the session, which is at {view.seq}")
        if follow is not None:
            await session.message(follow)
        return view.number, position, session.stream(after=after, follow=follow)

    async def _pump(self, exchange: Exchange, source: AsyncIterator[Batch], position: int, write: Write) -> _End | None:
        """Write what the source has until it ends; None when the reader went, stalled or was cut."""
        stall_s = exchange.settings.stream_stall_s
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        end: _End | None = None
        try:
            async with aclosing(source), asyncio.TaskGroup() as group:
                watcher = group.create_task(_watch(exchange.receive))
                async for batch in source:
                    async with asyncio.timeout(stall_s):
                        await write(batch)
                    if isinstance(batch, Gap):
                        position = batch.until
                    elif batch:
                        position = batch[-1].seq
                end = _End(position, self._closing)
                watcher.cancel()
        except* (_Gone, OSError):
            end = None
        except* HoldfastError as errors:
            _log.warning("an event stream ended early: %s", errors.exceptions[0])
        except* asyncio.CancelledError:
            if not self._cut:
                raise
        finally:
            self._tasks.discard(task)
        return end


async def _watch(receive: Receive) -> None:
    """Wait until the reader goes; what it sends until then is ignored."""
    while not (await receive())["type"].endswith("disconnect"):
        pass
    raise _Gone
