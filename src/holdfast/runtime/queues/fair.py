"""A fair queue: round robin over the keys of its items and over the consumers that take the items.

Invariants:

- Keys take turns: between two items of one key, every other key that has items supplies one item.
- Items of one key leave in order of arrival.
- Consumers take turns: items are handed out in rounds, and a round serves each task at most once. A task is not served
  twice while another task waits.
- A round waits at most `PATIENCE` ticks of the loop for served tasks to ask for another item. So a quick consumer does
  not get ahead of consumers that only yield to the loop, and a slow consumer does not delay the other consumers.
- An item that is promised to a consumer stays in the queue until the consumer resumes, so the item is not lost if the
  consumer is cancelled or interrupted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.errors import QueueClosed, QueueEmpty, QueueFull
from holdfast.runtime.interrupt.interrupt import check_interrupt
from holdfast.runtime.queues.wait_queue import Waiter, WaitQueue

__all__ = ["FairQueue", "FairQueueStatistics"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

PATIENCE = 4
"""Maximum number of loop ticks that a round waits for served consumers to ask for another item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairQueueStatistics:
    """A snapshot of a fair queue.

    Parameters:
        name: name of the queue.
        size: number of items in the queue.
        limit: maximum number of items.
        limit_per_key: maximum number of items per key.
        keys: number of keys that have items.
        waiting: number of tasks that wait for an item.
        put: total number of items put into the queue since its creation.
        taken: total number of items taken from the queue since its creation, including items taken by `remove`.
        closed: whether the queue was closed.
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
    """A queue from many keys to many consumers, in which neither keys nor consumers starve.

    Call all methods on one event loop.

    Parameters:
        limit: maximum number of items.
        limit_per_key: maximum number of items per key; None uses ``limit``.
        name: name of the queue in errors and statistics.

    Raises:
        ValueError: a limit is below 1.
    """

    def __init__(self, limit: int, *, limit_per_key: int | None = None, name: str = "fair queue") -> None:
        self._limit = limit
        self._limit_per_key = limit if limit_per_key is None else limit_per_key
        if limit < 1 or self._limit_per_key < 1:
            raise ValueError(f"invalid limit={limit} or limit_per_key={limit_per_key}; use at least 1")
        self.name = name
        self._by_key: dict[K, deque[T]] = {}
        self._turns: deque[K] = deque()  # keys with items; the first is next
        self._size = 0
        self._line = WaitQueue()
        self._consumers: dict[Waiter, int] = {}  # consumer of each waiter
        self._served: set[int] = set()  # consumers that this round has served
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
        """Put an item into the queue without waiting.

        Parameters:
            key: owner of the item, such as a principal or a session.
            item: item to put into the queue.

        Raises:
            QueueFull: the queue already holds ``limit`` items, or ``limit_per_key`` items of this key.
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
        """Remove the first item of the key whose turn it is, without waiting; return the key and the item.

        Raises:
            QueueEmpty: the queue is empty, every item is promised to a waiting task, or other tasks wait for items.
            QueueClosed: the queue is empty and closed.
        """
        if self._free() > 0 and not self._line.waiting:
            return self._pop()
        if self._closed and not self._size:
            raise QueueClosed(f"{self.name} is closed and empty")
        raise QueueEmpty(f"{self.name} is empty, or other tasks wait for its items")

    async def take(self) -> tuple[K, T]:
        """Wait for this consumer's turn, then remove the first item of the next key; return the key and the item.

        The current task is the consumer. The task yields to other tasks even if an item is ready.

        Raises:
            QueueClosed: the queue is closed and empty, or became closed and empty while the task waited.
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
        """Remove and return all items of a key, in order; return an empty list if the key has no items."""
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
        """Close the queue to new items; the remaining items can still be taken. Idempotent."""
        self._closed = True
        self._tell_if_over()

    def statistics(self) -> FairQueueStatistics:
        """Return a snapshot of the queue."""
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
        """Return the number of items that are not promised."""
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
        """Promise items to waiting tasks, at most one item per consumer and round."""
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
