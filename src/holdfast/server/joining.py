"""One write to the socket for what is written in one turn of the event loop, and a bound for a request's head.

uvicorn writes the head and the body of an answer apart, and each write is a system call, a packet and a wake-up of the
client: together a tenth of what a small answer costs.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.server.exchange import CUT

__all__ = ["JoiningProtocol"]

_HELD_LIMIT_BYTES = 16_384
_HEAD_LIMIT_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)


class JoiningProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol on a transport that joins small writes.

    A head that is still not whole after ``_HEAD_LIMIT_BYTES`` is refused: its parser would keep all that comes.
    """

    _in_head = True
    _turned = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A connection has come."""
        super().connection_made(_JoiningTransport(transport, self.loop))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[CUT] = self._cut  # type: ignore[literal-required]  # a key of our own

    def _cut(self) -> None:
        """Close at once, and have the kernel drop what the other side has not taken."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._turned = False
        super().data_received(data)
        if not self._in_head or self._turned:
            return  # another request was in it, too: this head's share is not known, but it is one piece at most
        self._head_bytes += len(data)
        if self._head_bytes > _HEAD_LIMIT_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {_HEAD_LIMIT_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole; the next one's head may come."""
        self._in_head = self._turned = True
        self._head_bytes = 0
        super().on_message_complete()


class _JoiningTransport(asyncio.Transport):
    """Holds small writes until the end of the turn; a larger one goes at once, behind what is held."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._going = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write soon, in order."""
        if len(self._held) + len(data) > _HELD_LIMIT_BYTES:
            self._go()
            self._transport.write(data)
            return
        self._held += data
        if not self._going:
            self._going = True
            self._loop.call_soon(self._turn_ends)

    def _turn_ends(self) -> None:
        self._going = False
        self._go()

    def _go(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def writelines(self, data: Any) -> None:
        """Write several pieces."""
        self.write(b"".join(data))

    def close(self) -> None:
        """Close, behind what was written."""
        self._go()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._held = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """Whether it can be half closed."""
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """Close the way out, behind what was written."""
        self._go()
        self._transport.write_eof()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket is."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Take nothing in for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take in again."""
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        """Whether it takes in."""
        return self._transport.is_reading()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Who gets what comes in."""
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand what comes in to another."""
        self._transport.set_protocol(protocol)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait to go out."""
        return self._transport.get_write_buffer_size() + len(self._held)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Where writing is paused and resumed."""
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set where writing is paused and resumed."""
        self._transport.set_write_buffer_limits(high, low)
