"""Tasks in this process that wait for the outcome of a message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast.errors import Draining
from holdfast.protocol.messages import Settlement

__all__ = ["Settlements"]


class Settlements:
    """The futures of waiting tasks, by message id. Use it on the host's loop only."""

    def __init__(self) -> None:
        self._expected: dict[str, list[asyncio.Future[Settlement]]] = {}
        self._closed = False

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._expected

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, message_id: str) -> asyncio.Future[Settlement]:
        """Return a future of the message's settlement. The caller must pass the future to `forget` after the wait.

        Raises `Draining` if the host is closing.
        """
        if self._closed:
            raise Draining("the host is closing; the message is stored and will be processed after the next start")
        future: asyncio.Future[Settlement] = asyncio.get_running_loop().create_future()
        self._expected.setdefault(message_id, []).append(future)
        return future

    def forget(self, message_id: str, future: asyncio.Future[Settlement]) -> None:
        """Drop a future whose wait has ended."""
        waiting = self._expected.get(message_id)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._expected[message_id]

    def settle(self, settlements: Iterable[Settlement]) -> None:
        """Wake the tasks that wait for the settled messages."""
        for settlement in settlements:
            for future in self._expected.pop(settlement.message_id, ()):
                if not future.done():
                    future.set_result(settlement)

    def close(self) -> None:
        """End all waits with `Draining`, because the host is closing. Open messages settle after the next start."""
        self._closed = True
        for waiting in self._expected.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(Draining("the host closed before the message was settled; it is not lost"))
        self._expected.clear()
