"""What the tests of the bridge share: an observer that checks the rules of Rx, work that counts itself, waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from reactivex.abc import ObserverBase

from holdfast.integrations.reactive import IntakeCounts, ReactiveBridge

__all__ = ["Busy", "Watcher", "accounted", "gone", "soon"]


class Watcher(ObserverBase[Any]):
    """An observer that writes down what it is told, and each breach of the rules: overlaps, anything after an end."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.error: Exception | None = None
        self.completed = False
        self.disposed = False
        self.breaches: list[str] = []
        self.threads: set[int] = set()
        self._inside = threading.Lock()

    @property
    def ended(self) -> bool:
        return self.completed or self.error is not None

    def on_next(self, value: Any) -> None:
        self._told("on_next", lambda: self.values.append(value))

    def on_error(self, error: Exception) -> None:
        def note() -> None:
            self.error = error

        self._told("on_error", note)

    def on_completed(self) -> None:
        def note() -> None:
            self.completed = True

        self._told("on_completed", note)

    def _told(self, what: str, note: Callable[[], None]) -> None:
        if not self._inside.acquire(blocking=False):
            self.breaches.append(f"{what} overlaps")
            return
        try:
            if self.ended or self.disposed:
                self.breaches.append(f"{what} after the end")
            self.threads.add(threading.get_ident())
            note()
        finally:
            self._inside.release()


class Busy:
    """Work that takes some turns of the loop, or seconds, and knows how much of it is alive."""

    def __init__(self, *, turns: int = 1, wait_s: float = 0.0) -> None:
        self.turns = turns
        self.wait_s = wait_s
        self.begun = 0
        self.alive = 0
        self.most = 0
        self.ended = 0

    async def __call__(self, item: Any) -> Any:
        self.begun += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        try:
            for _ in range(self.turns):
                await asyncio.sleep(self.wait_s)
            return item
        finally:
            self.alive -= 1
            self.ended += 1


def accounted(counts: IntakeCounts, *, over: bool = True) -> None:
    """Every item is in one place; once all is over it was settled."""
    settled = counts.done + counts.failed + counts.interrupted + counts.dropped
    assert counts.received == settled + counts.waiting + counts.in_flight, counts
    if over:
        assert (counts.waiting, counts.blocked, counts.in_flight) == (0, 0, 0), counts


async def soon(condition: Callable[[], object]) -> None:
    """Wait until it holds, for a minute at most."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def gone(bridge: ReactiveBridge) -> None:
    """Nothing of a bridge that has closed is left, and all items are accounted for."""
    assert bridge.scope.closed
    assert bridge.scope.members() == ()
    assert bridge.streams == 0
    accounted(bridge.statistics())
