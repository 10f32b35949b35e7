"""Event streams, which send the events of a session as Server-Sent Events until the client disconnects.

- A stream buffers no events. It reads the stored events after its cursor from the host and sends them in one write, or
  in several writes if the events are large, so that few bytes wait in the socket's buffer.
- If the client has read everything so far, new events are written at the moment of publication, without waking the
  stream's task, and are encoded once for all clients of a session. The task runs only if the client falls behind, or if
  the stream ends.
- A stream ends immediately when its client disconnects, and after ``stream_stall_s`` if its client stops reading. The
  run, other clients and the shutdown never wait for a client.
- When the server shuts down, or the client's credential becomes invalid, a stream ends with a ``closed`` frame that
  contains the cursor to resume from. Once the credential is invalid, no other frame is sent, and a client that does not
  read this frame is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Literal, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.host import Session, SessionLog
from holdfast.host.budgets import Budgets
from holdfast.host.log_reader import events_bytes
from holdfast.protocol.events import Gap, Stored
from holdfast.protocol.sse import KEEP_ALIVE, Closed, encode_closed, encode_events, encode_gap
from holdfast.server.delivery import PIECE_BYTES, Receive, cut_connection
from holdfast.server.request import Request

__all__ = ["Streams"]

_log = logging.getLogger("holdfast.server")
_RETRY_MS = 1000
LAST_FRAME_S = 0.25
"""Time in seconds that a client has to read the last frame after its credential has become invalid."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]

Batch = Sequence[Stored] | Gap | None
Write = Callable[[Batch], Awaitable[None]]


class _Gone(Exception):
    """The client disconnected."""


class _End(NamedTuple):
    """The end of a stream, with the last cursor and, if the server ended the stream, the reason."""

    cursor: str
    reason: Literal["shutdown", "unauthorized"] | None


class Streams:
    """All open event streams of a server. Use it from one event loop only.

    Parameters:
        budgets: budgets of the host, which give each principal a share of the streams.
    """

    __slots__ = ("_budgets", "_closing", "_cut", "_encoded", "_tasks")

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._closing = False
        self._cut = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._encoded: tuple[Sequence[Stored], int, bytes] = ((), 0, b"")

    @property
    def open(self) -> int:
        """Number of open streams."""
        return len(self._tasks)

    def closing(self) -> None:
        """Make all streams that end from now on report the shutdown as the reason.

        This method ends no streams: the host's ``close_streams()`` does.
        """
        self._closing = True

    async def all_ended(self) -> None:
        """Wait until all streams have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> int:
        """End all open streams immediately, without a last frame, and return how many there were."""
        self._cut = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)

    async def serve_sse(self, request: Request, session: Session, *, after: str | None, follow: str | None) -> None:
        """Stream the session's events until the event log ends or the client disconnects.

        Raises as `Session.open_log`, and `LimitExceeded` if the principal has too many open streams.

        Parameters:
            request: request to which the stream is the response.
            session: session whose events are streamed.
            after, follow: as for `SessionAPI.events`.
        """
        send = request.send
        async with self._opened(request, session, after, follow) as log:

            async def write(batch: Batch) -> None:
                if batch is None:
                    data = KEEP_ALIVE
                elif isinstance(batch, Gap):
                    data = encode_gap(batch, log.number)
                else:
                    data = encode_events(batch, log.number)
                if not request.write_now(data):
                    await request.write(data)

            def write_published(events: Sequence[Stored]) -> bool:
                return request.use.ended is None and request.write_now(self._encode(events, log.number))

            log.sink = write_published
            await send({"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *request.extra]})
            await send({"type": "http.response.body", "body": b"retry: %d\n\n" % _RETRY_MS, "more_body": True})
            end = await self._pump(request, log, write)
            if end is None:
                return
            last = b""
            if end.reason is not None:
                last = encode_closed(Closed(reason=end.reason, cursor=end.cursor), retry_ms=_RETRY_MS)
            try:
                async with asyncio.timeout(LAST_FRAME_S if end.reason == "unauthorized" else None):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    if end.reason == "unauthorized":
                        await request.all_sent()
            except TimeoutError:
                cut_connection(request.scope)  # unread data must not arrive later

    def _encode(self, events: Sequence[Stored], number: int) -> bytes:
        """Encode published events, or return no bytes if the events are too large for one write.

        The last result is cached, because all readers of a session get the same list, one after another.
        """
        last, of, data = self._encoded
        if last is not events or of != number:
            data = encode_events(events, number) if events_bytes(events) < PIECE_BYTES else b""
            self._encoded = (events if data else (), number, data)
        return data

    @asynccontextmanager
    async def _opened(
        self, request: Request, session: Session, after: str | None, follow: str | None
    ) -> AsyncIterator[SessionLog]:
        with self._budgets.streams.charge(request.principal):
            async with aclosing(await session.open_log(after=after, follow=follow)) as log:
                request.started = True
                yield log

    async def _pump(self, request: Request, log: SessionLog, write: Write) -> _End | None:
        """Write the events of `log` until the log ends, and return the end of the stream.

        Return None if the client disconnected or stalled, or if the stream was cut.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        end: _End | None = None
        written = True
        cancelled = False
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(_watch(request.receive))
                async for batch in log:
                    written = False
                    await write(batch)
                    written = True
                end = _End(log.position, "shutdown" if self._closing else None)
                watcher.cancel()
        except* (_Gone, OSError):
            end = None
        except* HoldfastError as errors:
            _log.warning("event stream ended early: %s", errors.exceptions[0])
        except* asyncio.CancelledError:
            if request.use.ended is not None and written:  # otherwise the client has stalled and is cut
                request.use.absorb()
                end = _End(log.position, "unauthorized")
            elif not self._cut:
                cancelled = True  # a bare raise would wrap it in a group
        finally:
            self._tasks.discard(task)
        if cancelled:
            raise asyncio.CancelledError
        return end


async def _watch(receive: Receive) -> None:
    """Raise `_Gone` when the client disconnects, and ignore all data that the client sends before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _Gone
