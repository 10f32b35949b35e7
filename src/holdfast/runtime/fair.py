"""A queue that is fair on both sides: round robin over the keys that feed it, and over the consumers that take from it.

Invariants:

- Keys take turns: between two items of one key, every other key that has items gives one.
- Items of one key leave in the order in which they came in.
- Consumers take turns: hand-out goes in rounds, and in a round each task is served at most once. A task that waits is
  served before any other is served twice more.
- A round waits for a task that was served in it and has not come back for at most `PATIENCE` ticks of the loop, so a
  quick consumer does not run ahead of those that only yield, and a slow one holds up nobody.
- An item that a consumer was promised stays in the queue until it resumes: cancelled or interrupted, it loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.errors import QueueClosed, QueueEmpty, QueueFull
from holdfast.runtime.interrupt import check_interrupt
from holdfast.runtime.line import Line, Waiter

__all__ = ["FairQueue", "FairQueueStatistics"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

PATIENCE = 4
"""For how many ticks of the loop a round waits for consumers that were served in it to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairQueueStatistics:
    """A snapshot of a fair queue.

    Parameters:
        name: the queue's name.
        size: items in it.
        limit: its bound in all.
        limit_per_key: its bound for each key.
        keys: keys that have items in it.
        waiting: tasks that wait for an item.
        put: items that ever went in.
        taken: items that ever came out, removed ones included.
        closed: whether it was closed.
    """

    name: str
    size: int
    limit: int
    limit_per_key: int
    keys: int
    waiting: int
    put: int
    taken: int
    closed: bool


class FairQueue(Generic[K, T]):
    """Work from many keys for many consumers; nobody starves. Belongs to one event loop.

    Parameters:
        limit: how many items it holds at most.
        limit_per_key: how many of one key; by default as many as in all.
        name: for errors and statistics.

    Raises:
        ValueError: a bound is below 1.
    """

    def __init__(self, limit: int, *, limit_per_key: int | None = None, name: str = "fair queue") -> None:
        self._limit = limit
        self._limit_per_key = limit if limit_per_key is None else limit_per_key
        if limit < 1 or self._limit_per_key < 1:
            raise ValueError(f"limit is {limit}, limit_per_key {limit_per_key}; a bound must be at least 1")
        self.name = name
        self._by_key: dict[K, deque[T]] = {}
        self._turns: deque[K] = deque()  # the keys that have items; the first is next
        self._size = 0
        self._line = Line()
        self._consumers: dict[Waiter, int] = {}  # who stands behind a waiter
        self._served: set[int] = set()  # consumers that had their item in this round
        self._patience = PATIENCE
        self._handing_out = False
        self._closed = False
        self._put = 0
        self._taken = 0

    def __len__(self) -> int:
        return self._size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def put_nowait(self, key: K, item: T) -> None:
        """Put an item in.

        Parameters:
            key: whose item it is: a principal, a session.
            item: what to put in.

        Raises:
            QueueFull: there is no room, in all or for this key.
            QueueClosed: the queue is closed.
        """
        if self._closed:
            raise QueueClosed(f"{self.name} is closed")
        if self._size >= self._limit:
            raise QueueFull(f"{self.name} is full with {self._limit} items")
        items = self._by_key.get(key)
        if items is None:
            items = self._by_key[key] = deque()
            self._turns.append(key)
        elif len(items) >= self._limit_per_key:
            raise QueueFull(f"{self.name} is full with {self._limit_per_key} items of {key!r}")
        items.append(item)
        self._size += 1
        self._put += 1
        self._call_hand_out()

    def take_nowait(self) -> tuple[K, T]:
        """Take the next key's first item.

        Raises:
            QueueEmpty: there is none that is not promised to somebody who waits.
            QueueClosed: there is none, and the queue is closed.
        """
        if self._free() > 0 and not self._line.waiting:
            return self._pop()
        if self._closed and not self._size:
            raise QueueClosed(f"{self.name} is closed and empty")
        raise QueueEmpty(f"{self.name} has nothing that nobody waits for")

    async def take(self) -> tuple[K, T]:
        """Take the next key's first item, in turn with the other consumers. Gives way to others even if there is one.

        The consumer is the current task.

        Raises:
            QueueClosed: the queue is closed and empty, or became so while this waited.
            Interrupted: the current interrupt is triggered.
        """
        check_interrupt()
        consumer = id(asyncio.current_task())
        while True:
            if self._closed and not self._size:
                raise QueueClosed(f"{self.name} is closed and empty")
            waiter: Waiter = asyncio.get_running_loop().create_future()
            self._consumers[waiter] = consumer
            self._call_hand_out(for_newcomer=True)
            try:
                promised = await self._line.wait(waiter, self._call_hand_out)
            finally:
                del self._consumers[waiter]
            if promised:
                return self._pop()

    def remove(self, key: K) -> list[T]:
        """Take all items of a key out at once, in order; an empty list when it has none."""
        items = self._by_key.pop(key, None)
        if items is None:
            return []
        self._turns.remove(key)
        self._size -= len(items)
        self._taken += len(items)
        if self._free() < 0:
            self._line.take_back()
            self._call_hand_out()
        self._tell_if_over()
        return list(items)

    def close(self) -> None:
        """Let nothing in any more; what is in can still be taken. May be repeated."""
        self._closed = True
        self._tell_if_over()

    def statistics(self) -> FairQueueStatistics:
        """A snapshot."""
        return FairQueueStatistics(
            name=self.name,
            size=self._size,
            limit=self._limit,
            limit_per_key=self._limit_per_key,
            keys=len(self._by_key),
            waiting=len(self._line.waiting),
            put=self._put,
            taken=self._taken,
            closed=self._closed,
        )

    def _free(self) -> int:
        """Items that are not promised."""
        return self._size - len(self._line.promised)

    def _pop(self) -> tuple[K, T]:
        key = self._turns.popleft()
        items = self._by_key[key]
        item = items.popleft()
        if items:
            self._turns.append(key)
        else:
            del self._by_key[key]
        self._size -= 1
        self._taken += 1
        self._tell_if_over()
        return key, item

    def _tell_if_over(self) -> None:
        if self._closed and not self._size:
            self._line.release_all()

    def _call_hand_out(self, *, for_newcomer: bool = False) -> None:
        if not self._handing_out and (for_newcomer or self._line.waiting) and self._free() > 0:
            self._handing_out = True
            asyncio.get_running_loop().call_soon(self._hand_out)

    def _hand_out(self) -> None:
        """Promise items to those who wait; each consumer once in a round."""
        self._handing_out = False
        line = self._line
        while line.waiting and self._free() > 0:
            next_one = next((waiter for waiter in line.waiting if self._consumers[waiter] not in self._served), None)
            if next_one is not None:
                self._served.add(self._consumers[next_one])
                line.promise_to(next_one)
                continue
            here = {self._consumers[waiter] for waiter in line.waiting}
            if self._patience and not self._served <= here:
                self._patience -= 1
                self._call_hand_out()
                return
            self._served.clear()
            self._patience = PATIENCE
