"""Detect the shutdown of a web server around a host, so that event streams end and the server can exit.

A server such as uvicorn waits for its open connections before it runs the lifespan's shutdown. Because event streams
stay open, such a server would never exit. uvicorn sets ``should_exit`` on its server object when the shutdown
begins, and its signal handler is a method of that object. So this module finds the server through the installed signal
handler and polls the flag; it does not change the server.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["ServerExit"]

_LOOK_EVERY_S = 0.2


class ServerExit:
    """Calls `on_exit` when the web server that installed this process's signal handlers begins to shut down.

    Parameters:
        loop: the host's loop.
        on_exit: callback, called on the host's loop at most once.
    """

    __slots__ = ("_loop", "_on_exit", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], object]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Stop polling."""
        self._timer.cancel()

    def _look(self) -> None:
        if _server_exits():
            self._on_exit()
        else:
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)


def _server_exits() -> bool:
    for number in (signal.SIGTERM, signal.SIGINT):
        server = getattr(signal.getsignal(number), "__self__", None)
        if getattr(server, "should_exit", None) is True:
            return True
    return False
