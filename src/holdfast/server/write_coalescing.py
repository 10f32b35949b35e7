"""HTTP/1.1 protocol of a connection, with limits on sizes and pipelining, and with coalesced writes.

- uvicorn parses all requests in the received data and queues them. In this protocol, at most ``_WAITING_LIMIT``
  requests are queued, at most ``_READ_BYTES`` bytes are read at a time, and reading pauses while a request is queued. A
  connection therefore buffers at most one read, whatever the client sends.
- The size of a request head and the number of its fields are limited, and so is the size of the framing of a body
  (chunk sizes, chunk extensions and trailers).
- A request that exceeds a limit is refused after the responses to earlier requests, and the connection is closed.
- uvicorn writes the head and the body of a response separately. Each write costs a system call, a packet and a wake-up
  of the client, together a tenth of the cost of a small response. This protocol writes the head and the body together.
- A request body that has arrived completely, and a response that can be written immediately, bypass ASGI messages. This
  is the case for nearly all requests. No deadline is needed for them, because nothing waits.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from holdfast.errors import HoldfastError, InvalidRequest, LimitExceeded, MalformedRequest
from holdfast.server.connections import CONNECTION, Connection, Connections
from holdfast.server.delivery import CUT
from holdfast.server.errors import error_response

if TYPE_CHECKING:
    from holdfast.host.budgets import Charge

__all__ = ["BoundedReader", "CoalescingProtocol"]

_HELD_LIMIT_BYTES = 16_384
_RESET = struct.pack("ii", 1, 0)
_READ_BYTES = 65_536
_HEAD_LIMIT_BYTES = 65_536
_FIELDS_LIMIT = 100
_WAITING_LIMIT = 16
_LINGER_S = 1.0
_LINGER_BYTES = 262_144
_FRAMING_BYTES = 16_384
"""Maximum size of the framing of a body, in addition to the size of the body itself."""
_PIECES = 256
_PIECE_BYTES = 64
"""Minimum average size of a body's chunks, after the first ``_PIECES``."""


class BoundedReader(asyncio.BufferedProtocol):
    """Protocol that reads at most ``_READ_BYTES`` bytes at a time, and passes the data to a `CoalescingProtocol`.

    The parameters are those of `CoalescingProtocol`. All readers share one buffer; its content is passed on before
    another reader uses it.
    """

    _buffer = bytearray(_READ_BYTES)
    _view = memoryview(_buffer)

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        self._protocol = CoalescingProtocol(connections, *arguments, **options)
        self.connection_made = self._protocol.connection_made  # type: ignore[method-assign, assignment]
        self.connection_lost = self._protocol.connection_lost  # type: ignore[method-assign]
        self.pause_writing = self._protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = self._protocol.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer for the next received bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the received bytes to the protocol."""
        self._protocol.data_received(bytes(self._view[:nbytes]))

    def eof_received(self) -> None:
        """Close the connection, because the client has closed its side."""


class CoalescingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on sizes and pipelining, on a transport that coalesces small writes.

    Parameters:
        connections: register of the server's open connections.
        waited: waiting connection of the acceptor that this protocol takes over; None if the connection was served
            without waiting.
        arguments, options: arguments of uvicorn's protocol.
    """

    peer = ""
    charge: Charge | None = None
    queue: OrderedDict[Connection, float] | None = None
    transport: _CoalescingTransport
    on_lost: Callable[[], object] | None = None
    """Callback for a client that disconnects while a request is in progress, called without arguments."""

    _in_head = True
    _turned = False
    _head_bytes = 0
    _framing_bytes = 0
    _body_bytes = 0
    _pieces = 0
    _dropped_bytes = 0
    _unread_bytes = 0
    _closing = False
    _lost = False
    _running: RequestResponseCycle | None = None
    _refusal: HoldfastError | None = None

    def __init__(
        self, connections: Connections, *arguments: Any, waited: Connection | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._open = connections
        self._waited = waited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Register the new connection. If the server has no room for it, respond with an error and close it."""
        super().connection_made(_CoalescingTransport(transport, self.loop))
        self.flow = _Flow(self.transport, self.pipeline)
        self.peer = self.client[0] if self.client else ""
        waited, self._waited = self._waited, None
        if waited is not None:
            self._open.lost(waited)
        try:
            self._open.opened(self, transport.get_extra_info("socket").fileno())
        except HoldfastError as error:
            self._refuse(error)

    def on_timeout(self) -> None:
        """Close the connection: a request's head, a request's body or the next request did not arrive in time.

        The connection stays open while the client is still reading a response.
        """
        unread = self.transport.get_write_buffer_size()
        if unread and unread != self._unread_bytes:
            self._unread_bytes = unread  # a response is still being read
            self._open.answered(self, whole=False, head_began=False)
        elif self._in_head and self._head_bytes and not self._closing:
            self._refuse(MalformedRequest("the request's head did not come in time", hint="send it without pauses"))
        else:
            self.transport.abort()

    def drop(self) -> None:
        """Close the connection immediately."""
        self.transport.abort()

    def own(self, principal: str) -> None:
        """Assign the connection to the principal of the current request.

        Raises `BudgetExceeded` if the principal already has its full share of connections. The connection is then
        closed after the response.
        """
        try:
            self._open.own(self, principal)
        except HoldfastError:
            if self._running is not None:
                self._running.keep_alive = False
            raise

    def take_body(self) -> bytes | None:
        """Return the body of the current request if all of it has arrived; otherwise return None.

        If the result is None, the caller must wait for the body with ``receive``.
        """
        cycle = self._running
        if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        if self.flow.read_paused:
            self.flow.resume_reading()
        return body

    def answer_now(self, status: int, fields: bytes, body: bytes) -> bool:
        """Write the whole response to the current request.

        Return False, without writing, if the write would have to wait, if the response has already begun, or if the
        client has disconnected.

        Parameters:
            status: HTTP status of the response.
            fields: encoded header fields, each followed by a line end.
            body: body of the response.
        """
        cycle = self._running
        if cycle is None or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        head = STATUS_LINE[status] + self._open.default_lines(self.server_state.default_headers) + fields
        if not cycle.keep_alive:
            head += b"connection: close\r\n"
        cycle.response_started = cycle.response_complete = True
        self.transport.write_now(head + b"\r\n" + body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
        return True

    def write_part(self, data: bytes) -> bool:
        """Write a part of the body of the response in progress, which must use chunked encoding.

        Return False, without writing, if the write would have to wait, or if no such response is in progress.
        """
        cycle = self._running
        if cycle is None or self.flow.write_paused or cycle.disconnected or self.transport.is_closing():
            return False
        if not cycle.response_started or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self.transport.write_now(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the current request that the client has disconnected, even if other requests are queued."""
        super().connection_lost(exc)
        self._lost = True
        self._open.lost(self)
        self._head_came()
        self.pipeline.clear()
        if self.on_lost is not None:
            self.on_lost()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        else:
            self._let_go()

    def _let_go(self) -> None:
        """Break the reference cycles of a closed connection, to free its memory without the garbage collector."""
        self._running = self.cycle = self.scope = None  # type: ignore[assignment]  # as uvicorn begins with

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and refuse a request that exceeds a limit."""
        if self._closing:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        self._turned = False
        in_body = not self._in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._closing = True  # the rest belongs to a protocol that is not supported here
            return
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason.error if isinstance(reason, _Refused) else MalformedRequest("this is not HTTP/1.1"))
            return
        if self._turned:
            return  # the data also ended another request: this one's part is unknown, but at most one read
        if self._in_head:
            self._head_bytes += len(data)
            self._open.head_bytes += len(data)
            self._open.head_began(self)
            if self._head_bytes > _HEAD_LIMIT_BYTES:
                self._refuse(MalformedRequest(f"the request's head has more than {_HEAD_LIMIT_BYTES} bytes"))
        elif in_body:
            self._framing_bytes += len(data)
            if self._framing_bytes - self._body_bytes > _FRAMING_BYTES + self._body_bytes:
                self._refuse(_too_much_framing())

    def on_message_begin(self) -> None:
        """Begin a request. Raises `_Refused` if too many earlier requests are queued."""
        if len(self.pipeline) >= _WAITING_LIMIT:
            raise _Refused(
                LimitExceeded(
                    f"{_WAITING_LIMIT} requests are already waiting for a response on this connection",
                    hint="read responses before sending more requests",
                )
            )
        super().on_message_begin()
        self.scope[CUT] = self._cut  # type: ignore[literal-required]  # a key of our own

    def unsent(self) -> int:
        """Return the number of bytes that are waiting in the transport.

        On Linux, if the transport is empty, return the number of bytes in the kernel that the client has not
        acknowledged yet.
        """
        if self._lost:
            return 0
        waiting = self.transport.get_write_buffer_size()
        if waiting or sys.platform != "linux":
            return waiting
        queued = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return queued[0]

    def _cut(self) -> None:
        """Close the connection immediately, and make the kernel drop unsent data."""
        if self._lost:
            return  # the descriptor may be another connection's
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header field, or drop a trailer field. Raises `_Refused` if the head has too many fields."""
        if not self._in_head:
            return
        if len(self.headers) >= _FIELDS_LIMIT:
            raise _Refused(MalformedRequest(f"the request's head has more than {_FIELDS_LIMIT} fields"))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start to handle the request, or queue it behind earlier requests.

        Raises `_Refused` for an upgrade request with a body, because the parser would not read the body.
        """
        upgrades = self.parser.should_upgrade()
        if upgrades and any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            raise _Refused(InvalidRequest("this server does not upgrade connections", hint="omit the header Upgrade"))
        self._in_head = False
        self._head_came()
        self._framing_bytes = self._body_bytes = self._pieces = 0
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # a key of our own
        super().on_headers_complete()
        self._open.busy(self)
        if upgrades or self._open.is_leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Add a chunk of the request body. Raises `_Refused` if the body's chunks are too small on average."""
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > _PIECES + self._body_bytes // _PIECE_BYTES:
            raise _Refused(_too_much_framing())
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request. The head of another request may follow."""
        self._in_head = self._turned = True
        super().on_message_complete()
        if self.queue is not None:
            self._open.answered(self, whole=True, head_began=False)

    def on_response_complete(self) -> None:
        """Start the next queued request. If no request is queued, send the refusal that is pending, if any."""
        running = self._running
        assert running is not None
        if running.body:
            running.body = bytearray()
        self.server_state.total_requests += 1
        if self._lost:
            self._let_go()
            return
        if self.transport.is_closing():
            self._open.answered(self, whole=False, head_began=False)
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._write_refusal(self._refusal)
        else:
            self._open.answered(self, whole=not running.more_body, head_began=self._head_bytes > 0)
        if self.flow.read_paused:
            self.flow.resume_reading()

    def _head_came(self) -> None:
        if self._head_bytes:
            self._open.head_bytes -= self._head_bytes
            self._head_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_idle(self) -> bool:
        return self._running is None or self._running.response_complete

    def _refuse(self, error: HoldfastError) -> None:
        """Stop reading, respond with `error` after the responses to earlier requests, and close the connection."""
        if self.transport.is_closing():
            return
        self._closing = True
        self._open.busy(self)
        if self._in_head:
            broken = None
        elif self.pipeline:
            broken, _ = self.pipeline.popleft()
        else:
            broken = self._running
        if broken is not None and broken is self._running:
            if broken.response_started:
                self.transport.close()
            else:
                self._write_refusal(error)
        elif self._is_idle():
            self._write_refusal(error)
        else:
            self._refusal = error
            self.flow.pause_reading()

    def _write_refusal(self, error: HoldfastError) -> None:
        response = error_response(error)
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(response.body) + 1).encode()),
            *response.headers,
            (b"connection", b"close"),
        ]
        lines = [b"%s: %s\r\n" % field for field in fields]
        self.transport.write(b"".join([STATUS_LINE[response.status], *lines, b"\r\n", response.line()]))
        # If it were closed at once while bytes still arrive, it would be reset, and the client would lose the response.
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_S, self.transport.abort)


def _too_much_framing() -> MalformedRequest:
    return MalformedRequest("the body's chunks and trailers outweigh the body", hint="send it in larger chunks")


class _Refused(Exception):
    """A request exceeds a limit."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(error.message)
        self.error = error


class _Flow(FlowControl):
    """Flow control that resumes reading only if no request is queued behind another request."""

    def __init__(self, transport: asyncio.Transport, waiting: object) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        """Resume reading, unless requests are queued."""
        if not self._waiting:
            super().resume_reading()


class _CoalescingTransport(asyncio.Transport):
    """Transport that combines the small writes of one turn of the event loop into one write.

    Large writes are passed on immediately. The order of writes is preserved.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._going = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hold small data for the next combined write; write large data immediately, after held data."""
        if len(self._held) + len(data) > _HELD_LIMIT_BYTES:
            self._go()
            self._transport.write(data)
            return
        self._held += data
        if not self._going:
            self._going = True
            self._loop.call_soon(self._turn_ends)

    def write_now(self, data: bytes) -> None:
        """Write held data and then `data` immediately, because `data` completes a response."""
        self._go()
        if not self._transport.is_closing():
            self._transport.write(data)

    def _turn_ends(self) -> None:
        self._going = False
        self._go()

    def _go(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def writelines(self, data: Any) -> None:
        """Write several chunks of data in order."""
        self.write(b"".join(data))

    def close(self) -> None:
        """Close the transport after held data is written."""
        self._go()
        self._transport.close()

    def abort(self) -> None:
        """Close the transport immediately, and drop held data."""
        self._held = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether the transport is closed or closing."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """Return whether the transport's write side can be closed separately."""
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """Close the write side after held data is written."""
        self._go()
        self._transport.write_eof()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Pause reading."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        """Return whether the transport is reading."""
        return self._transport.is_reading()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that receives the data."""
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol that receives the data."""
        self._transport.set_protocol(protocol)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait to be written, including held data."""
        return self._transport.get_write_buffer_size() + len(self._held)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the limits at which writing is paused and resumed."""
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits at which writing is paused and resumed."""
        self._transport.set_write_buffer_limits(high, low)
