"""Tasks in this process that wait for a session to be created."""

from __future__ import annotations

import asyncio

__all__ = ["AwaitedSessions"]


class AwaitedSessions:
    """The futures of waiting tasks, by principal and session key. Use it on the host's loop only.

    A future is dropped when its wait ends. Waits are not recorded in the store.
    """

    __slots__ = ("_closed", "_expected")

    def __init__(self) -> None:
        self._expected: dict[tuple[str, str], list[asyncio.Future[None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, so that all waits have ended."""
        return self._closed

    def expect(self, principal: str, key: str) -> asyncio.Future[None]:
        """Return a future that resolves once the session may exist.

        The caller must then check whether the session exists, and pass the future to `forget` after the wait.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_result(None)
        else:
            self._expected.setdefault((principal, key), []).append(future)
        return future

    def forget(self, principal: str, key: str, future: asyncio.Future[None]) -> None:
        """Drop a future whose wait has ended."""
        waiting = self._expected.get((principal, key))
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._expected[principal, key]

    def made(self, principal: str, key: str) -> None:
        """Wake all tasks that wait for a session, because the session exists or may exist."""
        if self._expected:
            for future in self._expected.pop((principal, key), ()):
                if not future.done():
                    future.set_result(None)

    def look_again(self) -> None:
        """Wake all waiting tasks, because another host may have created their sessions."""
        for key in list(self._expected):
            self.made(*key)

    def close(self) -> None:
        """End all waits, because the host closes its streams. Idempotent."""
        self._closed = True
        self.look_again()
