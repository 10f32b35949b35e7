"""Buffered reading and writing of a connected socket, without a transport.

Invariants
- At most one read of `PIECE_BYTES` is held per direction: data is read only once the data before it was written. So a
  slow reader slows its sender and costs no memory.
- A socket that always has data yields to the other connections after each read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

__all__ = ["PIECE_BYTES", "SocketStream", "wait_readable"]

PIECE_BYTES = 65_536
_LINGER_S = 2.0
_LINGER_READS = 64


class SocketStream:
    """A connected socket.

    Parameters:
        sock: the socket, which the stream owns and closes.
        on_read: called with the number of bytes of each read.
    """

    def __init__(self, sock: socket.socket, on_read: Callable[[int], object]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_read = on_read
        self._buffer = b""
        self._loop = asyncio.get_running_loop()

    async def read(self) -> bytes:
        """Return the next bytes; empty at the end of the stream."""
        if self._buffer:
            data, self._buffer = self._buffer, b""
            return data
        data = await self._loop.sock_recv(self._sock, PIECE_BYTES)
        await asyncio.sleep(0)
        self._on_read(len(data))
        return data

    def unread(self, data: bytes) -> None:
        """Put bytes back, to be read next."""
        self._buffer = data + self._buffer

    async def read_exactly(self, count: int) -> bytes:
        """Return `count` bytes.

        Raises:
            EOFError: the stream ended before.
        """
        data = b""
        while len(data) < count:
            more = await self.read()
            if not more:
                raise EOFError
            data += more
        self.unread(data[count:])
        return data[:count]

    async def read_until(self, end: bytes, limit: int) -> bytes:
        """Return the bytes up to and including `end`.

        Raises:
            EOFError: the stream ended before.
            ValueError: `end` is not among the first `limit` bytes.
        """
        data = b""
        while True:
            more = await self.read()
            if not more:
                raise EOFError
            start = max(0, len(data) - len(end) + 1)
            data += more
            found = data.find(end, start, limit)
            if found >= 0:
                found += len(end)
                self.unread(data[found:])
                return data[:found]
            if len(data) >= limit:
                raise ValueError("the head is too long")

    async def write(self, data: bytes) -> None:
        """Send bytes; return when the kernel has taken all of them."""
        await self._loop.sock_sendall(self._sock, data)

    def end(self) -> None:
        """Send the end of the stream; reading stays possible."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def linger(self) -> None:
        """Send the end of the stream and discard what the peer still sends, so that no reset discards our bytes."""
        self.end()
        self._buffer = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                for _ in range(_LINGER_READS):
                    if not await self._loop.sock_recv(self._sock, PIECE_BYTES):
                        return
                    await asyncio.sleep(0)

    def close(self) -> None:
        """Close the socket; no other task may be using it."""
        self._sock.close()


async def wait_readable(sock: socket.socket) -> None:
    """Wait until a socket has data, a connection or the end of its stream."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
