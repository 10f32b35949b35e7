"""Raw connection to a server, for tests with clients that violate the HTTP protocol."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

__all__ = ["RawConnection"]

_SMALL_BYTES = 2048
_CONNECT_S = 10.0
_STATUS_BYTES = len("HTTP/1.1 200")
_RESET = struct.pack("ii", 1, 0)


class RawConnection:
    """A TCP connection to a server on loopback. Use it on one event loop.

    Parameters:
        port: the server's port.
        key: API key that `request` puts into requests.
    """

    def __init__(self, port: int, key: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._port = port
        self._key = key
        self._socket = socket.socket()
        self._socket.setblocking(False)

    async def open(self, *, small: bool = False) -> None:
        """Connect to the server; if `small` is set, use a small receive buffer. Raises `OSError` on failure."""
        if small:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BYTES)
        async with asyncio.timeout(_CONNECT_S):
            await self._loop.sock_connect(self._socket, ("127.0.0.1", self._port))

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[bytes, bytes]:
        """Return the head and the body of an HTTP request, without sending them."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode(), body

    async def say(self, data: bytes) -> bool:
        """Send all of `data`; return False if the server has closed the connection."""
        try:
            await self._loop.sock_sendall(self._socket, data)
        except ConnectionError:
            return False
        return True

    async def status(self) -> int:
        """Read only the response's status code. Raises `ConnectionError` if the connection is closed first."""
        line = b""
        while len(line) < _STATUS_BYTES:
            some = await self.take(_STATUS_BYTES - len(line))
            if not some:
                raise ConnectionError("the connection was closed before a response arrived")
            line += some
        return int(line.split()[1])

    async def take(self, size: int) -> bytes:
        """Return at most `size` received bytes; empty bytes mean that the server has closed the connection."""
        try:
            return await self._loop.sock_recv(self._socket, size)
        except ConnectionError:
            return b""

    def half_close(self) -> None:
        """Close the sending half of the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def drop(self, *, reset: bool = False) -> None:
        """Close the connection; if `reset` is set, with a TCP reset."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()
