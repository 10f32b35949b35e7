"""A bounded queue for the tasks of one event loop and for threads that feed it.

Invariants:

- Waiters are served in order of arrival. Items leave in order of arrival.
- While tasks wait for an item, every item is promised to a task. While tasks wait for room, every free place is
  promised to a task. So a caller that finds an item or a place that is not promised may take it at once.
- If a put raises, it has added no item; if a get raises, it has removed no item.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from holdfast.errors import Interrupted, QueueClosed, QueueEmpty, QueueFull
from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt.interrupt import check_interrupt, current_interrupt
from holdfast.runtime.queues.wait_queue import Waiter, WaitQueue, release

__all__ = ["BoundedQueue", "BoundedQueueStatistics"]

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
"""Interval in seconds at which a blocked thread checks whether the loop was closed; closing a loop wakes no thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedQueueStatistics:
    """A snapshot of a bounded queue.

    Parameters:
        name: name of the queue.
        size: number of items in the queue.
        maxsize: maximum number of items.
        waiting_getters: number of tasks waiting for an item.
        waiting_putters: number of tasks and threads waiting for room.
        put: total number of items put into the queue since its creation.
        taken: total number of items taken from the queue since its creation, including drained items.
        closed: whether the queue was closed.
    """

    name: str
    size: int
    maxsize: int
    waiting_getters: int
    waiting_putters: int
    put: int
    taken: int
    closed: bool


class BoundedQueue(Generic[T]):
    """A bounded FIFO queue for the tasks of one event loop; other threads may call `put_threadsafe` only.

    Any number of tasks may put and get concurrently. If a task is cancelled or interrupted while it waits, or after it
    was woken, no item is lost. If consumers must get equal shares of the items, use `holdfast.runtime.FairQueue`.

    Parameters:
        maxsize: maximum number of items; at least 1.
        name: name of the queue in errors and statistics.

    Raises:
        ValueError: ``maxsize`` is below 1.
    """

    def __init__(self, maxsize: int, *, name: str = "queue") -> None:
        if maxsize < 1:
            raise ValueError(f"invalid maxsize={maxsize}; use at least 1")
        self.name = name
        self._maxsize = maxsize
        self._items: deque[T] = deque()
        self._getters = WaitQueue()
        self._putters = WaitQueue()
        self._closed = False
        self._put = 0
        self._taken = 0
        self._loop: asyncio.AbstractEventLoop | None = asyncio._get_running_loop()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def put(self, item: T) -> None:
        """Put an item into the queue, waiting for room if necessary.

        Raises:
            QueueClosed: the queue was already closed or was closed while the task waited.
            Interrupted: the current interrupt is triggered.
        """
        check_interrupt()
        while True:
            self._check_open()
            if self._room() > 0 and not self._putters.waiting:
                break
            if await self._putters.wait(self._new_waiter(), self._offer_room):
                self._check_open()
                break
        self._append(item)

    def put_nowait(self, item: T) -> None:
        """Put an item into the queue without waiting.

        Raises:
            QueueFull: the queue is full, or every free place is promised to a waiting task.
            QueueClosed: the queue is closed.
        """
        self._check_open()
        if self._room() <= 0:
            raise QueueFull(f"{self.name} is full with {self._maxsize} items")
        self._append(item)

    def put_threadsafe(self, item: T, *, timeout_s: float | None = None) -> None:
        """Put an item into the queue from a thread other than the loop's, blocking that thread until there is room.

        Parameters:
            item: item to put into the queue.
            timeout_s: timeout in seconds; None waits indefinitely.

        Raises:
            QueueFull: the queue had no room within ``timeout_s``; the item was not added.
            QueueClosed: the queue or its loop was already closed or was closed while the thread waited.
            Interrupted: the current interrupt was triggered before there was room; the item was not added.
            RuntimeError: the method was called on the thread of a running loop, or the queue is not yet bound to a
                loop.
        """
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(f"put_threadsafe() of {self.name} would block an event loop; await put() instead")
        loop = self._loop
        if loop is None:
            raise RuntimeError(f"{self.name} is not yet bound to an event loop; create the queue inside a coroutine")
        check_interrupt()
        accepted: Future[None] = Future()
        try:
            loop.call_soon_threadsafe(self._enter_from_thread, item, accepted)
        except RuntimeError as error:
            raise QueueClosed(f"the event loop of {self.name} is closed") from error
        interrupt = current_interrupt()
        if interrupt is None:
            self._await_acceptance(accepted, timeout_s, loop)
            return

        def give_up(_: Cause) -> None:
            accepted.cancel()

        with interrupt.on_trigger(give_up):
            try:
                self._await_acceptance(accepted, timeout_s, loop)
            except CancelledError:
                cause = interrupt.cause
                assert cause is not None
                raise Interrupted(cause) from None

    async def get(self) -> T:
        """Remove and return the first item, waiting for an item if necessary.

        Raises:
            QueueClosed: the queue is closed and empty, or became closed and empty while the task waited.
            Interrupted: the current interrupt is triggered.
        """
        check_interrupt()
        while True:
            if self._free() > 0:
                break
            if self._closed and not self._items:
                raise QueueClosed(f"{self.name} is closed and empty")
            if await self._getters.wait(self._new_waiter(), self._offer_items):
                break
        return self._pop()

    def get_nowait(self) -> T:
        """Remove and return the first item without waiting.

        Raises:
            QueueEmpty: the queue is empty, or every item is promised to a waiting task.
            QueueClosed: the queue is empty and closed.
        """
        if self._free() > 0:
            return self._pop()
        if self._closed and not self._items:
            raise QueueClosed(f"{self.name} is closed and empty")
        raise QueueEmpty(f"{self.name} is empty")

    def close(self) -> None:
        """Close the queue to new items; the remaining items can still be taken. Idempotent."""
        self._closed = True
        self._putters.release_all()
        self._tell_if_over()

    def drain(self) -> list[T]:
        """Remove and return all items, in order. Tasks that wait for room then continue."""
        items = list(self._items)
        self._items.clear()
        self._taken += len(items)
        self._getters.take_back()
        self._offer_room()
        self._tell_if_over()
        return items

    def statistics(self) -> BoundedQueueStatistics:
        """Return a snapshot of the queue."""
        return BoundedQueueStatistics(
            name=self.name,
            size=len(self._items),
            maxsize=self._maxsize,
            waiting_getters=len(self._getters.waiting),
            waiting_putters=len(self._putters.waiting),
            put=self._put,
            taken=self._taken,
            closed=self._closed,
        )

    def _free(self) -> int:
        """Return the number of items that are not promised."""
        return len(self._items) - len(self._getters.promised)

    def _room(self) -> int:
        """Return the number of places that are neither taken nor promised."""
        return self._maxsize - len(self._items) - len(self._putters.promised)

    def _append(self, item: T) -> None:
        self._items.append(item)
        self._put += 1
        self._offer_items()

    def _pop(self) -> T:
        item = self._items.popleft()
        self._taken += 1
        self._offer_room()
        self._tell_if_over()
        return item

    def _tell_if_over(self) -> None:
        if self._closed and not self._items:
            self._getters.release_all()

    def _offer_items(self) -> None:
        while self._free() > 0 and self._getters.promise():
            pass

    def _offer_room(self) -> None:
        while self._room() > 0 and self._putters.promise():
            pass

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"{self.name} is closed")

    def _new_waiter(self) -> Waiter:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(f"{self.name} belongs to another event loop; in other threads, call put_threadsafe()")
        return loop.create_future()

    def _enter_from_thread(self, item: T, accepted: Future[None]) -> None:
        """Run the loop's part of `put_threadsafe`: add the item, or wait for room on behalf of the thread."""
        if self._closed:
            self._answer(accepted, QueueClosed(f"{self.name} is closed"))
        elif self._room() > 0 and not self._putters.waiting:
            if self._answer(accepted, None):
                self._append(item)
        else:
            waiter = self._new_waiter()
            self._putters.waiting[waiter] = None
            waiter.add_done_callback(partial(self._thread_is_next, item, accepted))
            accepted.add_done_callback(partial(self._thread_went_away, waiter))

    def _thread_is_next(self, item: T, accepted: Future[None], waiter: Waiter) -> None:
        if not self._putters.redeem(waiter):
            if not accepted.cancelled():
                self._enter_from_thread(item, accepted)
        elif self._closed:
            self._answer(accepted, QueueClosed(f"{self.name} is closed"))
        elif self._answer(accepted, None):
            self._append(item)
        else:
            self._offer_room()

    def _thread_went_away(self, waiter: Waiter, accepted: Future[None]) -> None:
        """Release the thread's waiter if the thread no longer waits. Called on the thread that ended the wait."""
        if accepted.cancelled():
            loop = waiter.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(release, waiter)

    @staticmethod
    def _answer(accepted: Future[None], error: Exception | None) -> bool:
        """Resolve the thread's future; return True if the put is accepted and the thread still waits."""
        if not accepted.set_running_or_notify_cancel():
            return False
        if error is not None:
            accepted.set_exception(error)
            return False
        accepted.set_result(None)
        return True

    def _await_acceptance(
        self, accepted: Future[None], timeout_s: float | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Block until the loop has accepted or refused the item, the timeout has passed, or the loop was closed."""
        left_s = math.inf if timeout_s is None else timeout_s
        while True:
            try:
                return accepted.result(min(left_s, _LOOK_EVERY_S))
            except TimeoutError:
                if left_s > _LOOK_EVERY_S and not loop.is_closed():
                    left_s -= _LOOK_EVERY_S
                    continue
            if not accepted.cancel():
                return accepted.result()
            if loop.is_closed():
                raise QueueClosed(f"the event loop of {self.name} was closed")
            raise QueueFull(f"{self.name} had no room within {timeout_s:g} s")
