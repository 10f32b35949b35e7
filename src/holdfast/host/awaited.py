"""Tasks in this process that wait for a session to be created."""

from __future__ import annotations

import asyncio

__all__ = ["AwaitedSessions"]


class AwaitedSessions:
    """Futures by principal and key. Used on the host's loop only.

    Nothing is kept of a wait that is over, and nothing in the store tells of one.
    """

    __slots__ = ("_closed", "_expected")

    def __init__(self) -> None:
        self._expected: dict[tuple[str, str], list[asyncio.Future[None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def closed(self) -> bool:
        """Whether nobody waits any more."""
        return self._closed

    def expect(self, principal: str, key: str) -> asyncio.Future[None]:
        """A future that is done when the session may be there: look then. Give it to `forget` when the wait ends."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_result(None)
        else:
            self._expected.setdefault((principal, key), []).append(future)
        return future

    def forget(self, principal: str, key: str, future: asyncio.Future[None]) -> None:
        """Nobody waits on the future any more."""
        waiting = self._expected.get((principal, key))
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._expected[principal, key]

    def made(self, principal: str, key: str) -> None:
        """The session is in the store, or may be: wake who waits for it."""
        if self._expected:
            for future in self._expected.pop((principal, key), ()):
                if not future.done():
                    future.set_result(None)

    def close(self) -> None:
        """The streams end: wake everybody. May be repeated."""
        self._closed = True
        for key in list(self._expected):
            self.made(*key)
