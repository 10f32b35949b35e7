"""The connection of a worker of ``serve --workers`` to the supervisor that started it.

The worker tells once that it is ready. The supervisor sends requests to end, one byte each. If the supervisor ends, in
whatever way, the kernel closes the connection, and the worker ends too: nothing is left behind.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from holdfast.server.response import encode

__all__ = ["DRAIN", "HAND_OVER", "ORPHANED", "WorkerLink"]

DRAIN: Final = "drain"
"""Reason to end: all workers end. Until they have, they answer new connections."""
HAND_OVER: Final = "hand over"
"""Reason to end: another worker replaces this one, and takes all new connections."""
ORPHANED: Final = "the supervisor ended"
_REASONS: Final = {b"d": DRAIN, b"h": HAND_OVER}


class WorkerLink:
    """A worker's end of the connection. Use it from one event loop only.

    Parameters:
        connection: connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop

    def start(self, on_request: Callable[[str], object]) -> None:
        """Call `on_request` with the reason when the supervisor asks this worker to end, or has ended."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._read, on_request)

    def tell_ready(self, **about: object) -> None:
        """Tell the supervisor that this worker serves."""
        try:
            self._connection.send(encode(about) + b"\n")
        except OSError:
            pass  # it has ended, which the next read finds

    def close(self) -> None:
        """Close the connection."""
        self._loop.remove_reader(self._connection)
        self._connection.close()

    def _read(self, on_request: Callable[[str], object]) -> None:
        try:
            request = self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if not request:
            self._loop.remove_reader(self._connection)
        on_request(_REASONS.get(request, ORPHANED))
