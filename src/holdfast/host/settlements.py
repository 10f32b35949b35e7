"""Tasks in this process that wait for the outcome of a message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast.errors import Draining
from holdfast.protocol.messages import Settlement

__all__ = ["Settlements"]


class Settlements:
    """Futures by message id. Used on the host's loop only."""

    def __init__(self) -> None:
        self._expected: dict[str, list[asyncio.Future[Settlement]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, message_id: str) -> asyncio.Future[Settlement]:
        """A future for the message's settlement; give it to `forget` when the wait ends. Raises `Draining`."""
        if self._closed:
            raise Draining("the host closes and waits for nothing any more; the message is not lost")
        future: asyncio.Future[Settlement] = asyncio.get_running_loop().create_future()
        self._expected.setdefault(message_id, []).append(future)
        return future

    def forget(self, message_id: str, future: asyncio.Future[Settlement]) -> None:
        """Nobody waits on the future any more."""
        waiting = self._expected.get(message_id)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._expected[message_id]

    def settle(self, settlements: Iterable[Settlement]) -> None:
        """Wake who waits for these messages."""
        for settlement in settlements:
            for future in self._expected.pop(settlement.message_id, ()):
                if not future.done():
                    future.set_result(settlement)

    def close(self) -> None:
        """The host closes: what is not settled now is settled after the next start."""
        self._closed = True
        for waiting in self._expected.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(Draining("the host closed before the message was settled; it is not lost"))
        self._expected.clear()
