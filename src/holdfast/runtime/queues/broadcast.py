"""Broadcast from one publisher to many readers: each reader gets all items in order, or a gap for items it missed.

Invariants:

- Publishing never waits for readers. It accesses only readers that are waiting at that moment.
- A reader that waits has seen everything. Its callback ``on_publish`` may take new items at the moment of publication;
  otherwise, its task is woken and takes them. A reader is never offered items while its task is awake or being
  cancelled, so the callback and the task never take items at the same time, and the order is kept.
- An item is kept, within the limits, until every open reader has seen it, whether or not the readers are waiting.
- A cursor moves only when its reader takes items, without an await in between, so a cancelled read loses no items.
- Once every open reader has seen all items, or all readers are closed, the items are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.runtime.interrupt.interrupt import check_interrupt
from holdfast.runtime.queues.wait_queue import Waiter, release, wait_for_release

__all__ = ["Broadcast", "BroadcastGap", "BroadcastStatistics", "Reader"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BroadcastGap:
    """Gap in a reader's items: the reader missed the items with ``after`` < number ≤ ``until``.

    The reader's cursor is now at ``until``.
    """

    after: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStatistics:
    """A snapshot of a broadcast.

    Parameters:
        next_seq: number of the next item.
        kept: number of items in memory.
        readers: number of open readers.
        waiting: number of readers that wait for an item.
        behind: number of readers that have not yet seen all published items.
        closed: whether the broadcast was closed.
    """

    next_seq: int
    kept: int
    readers: int
    waiting: int
    behind: int
    closed: bool


class Broadcast(Generic[T]):
    """Publisher that delivers each item to every reader. Call all methods on one event loop.

    A broadcast without readers uses little memory.

    Parameters:
        next_seq: number of the first item to be published.
        limit: minimum number of items kept for a reader that is behind; up to twice as many may be kept.
        weigh: callable that returns the weight of an item; None disables ``weight_limit``.
        weight_limit: maximum total weight of the kept items; if it is exceeded, all kept items are dropped.

    Raises:
        ValueError: ``limit`` is below 1.
    """

    __slots__ = (
        "_behind",
        "_closed",
        "_epoch",
        "_items",
        "_limit",
        "_next_seq",
        "_readers",
        "_waiting",
        "_weigh",
        "_weight",
        "_weight_limit",
    )

    def __init__(
        self,
        next_seq: int = 1,
        *,
        limit: int = 1024,
        weigh: Callable[[T], int] | None = None,
        weight_limit: int = 0,
    ) -> None:
        if limit < 1:
            raise ValueError(f"invalid limit={limit}; use at least 1")
        self._next_seq = next_seq
        self._limit = limit
        self._items: list[T] | None = None  # the newest ones; the last has number next_seq - 1
        self._weigh = weigh
        self._weight = 0
        self._weight_limit = weight_limit
        self._readers = 0
        self._behind = 0
        self._epoch = 0  # counts publications; a reader that has seen the last one has its number
        self._closed = False
        self._waiting: dict[Reader[T], Waiter] | None = None

    @property
    def next_seq(self) -> int:
        """Number of the next item to be published."""
        return self._next_seq

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def publish(self, items: Sequence[T], *, first_seq: int | None = None) -> int:
        """Publish items with consecutive numbers, and return the number of the next item to be published.

        Parameters:
            items: items to publish; may be empty.
            first_seq: number of the first of ``items``; None uses `next_seq`. Items whose numbers were already
                published are skipped, so publishing the same items again has no effect. If numbers are skipped, every
                reader gets a `BroadcastGap` that covers them.

        Raises:
            RuntimeError: the broadcast is closed.
        """
        if self._closed:
            raise RuntimeError("broadcast is closed")
        missing = 0 if first_seq is None else first_seq - self._next_seq
        if missing < 0:
            items = items[-missing:]
        if not items:
            return self._next_seq
        if missing > 0:
            self._next_seq += missing
            self._items = None
        self._next_seq += len(items)
        if self._readers:
            self._keep(items)
            self._offer(items)
        return self._next_seq

    def reader(self, after: int | None = None) -> Reader[T]:
        """Create a reader. Close the reader, or use it as a context manager; it is also closed when it is freed.

        Parameters:
            after: number of the last item that the reader has already seen; None uses the last published item. If the
                item with this number is not yet published, the reader waits for the item after it.
        """
        return Reader(self, self._next_seq - 1 if after is None else after)

    def close(self) -> None:
        """Close the broadcast to new items. Idempotent.

        Readers can still read the kept items; after the last item, `Reader.read` returns None.
        """
        self._closed = True
        self._wake()

    def statistics(self) -> BroadcastStatistics:
        """Return a snapshot of the broadcast."""
        return BroadcastStatistics(
            next_seq=self._next_seq,
            kept=len(self._items) if self._items else 0,
            readers=self._readers,
            waiting=len(self._waiting) if self._waiting else 0,
            behind=self._behind,
            closed=self._closed,
        )

    def _keep(self, items: Sequence[T]) -> None:
        self._epoch += 1
        self._behind = self._readers
        if self._items is None:
            self._items = list(items)
            self._weight = 0
        else:
            self._items.extend(items)
        if len(self._items) >= 2 * self._limit:
            del self._items[: -self._limit]
        if self._weigh is not None:
            self._weight += sum(map(self._weigh, items))
            if self._weight > self._weight_limit:
                self._items = None

    def _offer(self, items: Sequence[T]) -> None:
        """Pass new items to each waiting reader that takes them at once, and wake the other waiting readers."""
        if not self._waiting:
            return
        first = self._next_seq - len(items)
        for reader, waiter in list(self._waiting.items()):
            if not reader._takes(items, first, waiter):
                self._stop_waiting(reader, waiter)
                release(waiter)

    def _wake(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, None
            for waiter in waiting.values():
                release(waiter)

    def _start_waiting(self, reader: Reader[T], waiter: Waiter) -> None:
        if self._waiting is None:
            self._waiting = {}
        self._waiting[reader] = waiter

    def _stop_waiting(self, reader: Reader[T], waiter: Waiter) -> None:
        if self._waiting is not None and self._waiting.get(reader) is waiter:
            del self._waiting[reader]
            if not self._waiting:
                self._waiting = None

    def _caught_up(self) -> None:
        """Record that one more reader has seen all items or was closed."""
        self._behind -= 1
        if not self._behind:
            self._items = None


class Reader(Generic[T]):
    """A position in a broadcast, for one task at a time; created by `Broadcast.reader`."""

    __slots__ = ("_broadcast", "_closed", "_cursor", "_epoch", "_on_publish", "_waiter")

    def __init__(self, broadcast: Broadcast[T], cursor: int) -> None:
        self._broadcast = broadcast
        self._cursor = cursor
        self._closed = False
        self._waiter: Waiter | None = None
        self._on_publish: Callable[[Sequence[T]], bool] | None = None
        self._epoch = broadcast._epoch
        broadcast._readers += 1
        if cursor + 1 < broadcast._next_seq:
            self._epoch = -1
            broadcast._behind += 1

    def __enter__(self) -> Reader[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def cursor(self) -> int:
        """Number of the last item that the reader has read or missed."""
        return self._cursor

    async def read(
        self, max_items: int = 256, *, on_publish: Callable[[Sequence[T]], bool] | None = None
    ) -> list[tuple[int, T]] | BroadcastGap | None:
        """Return the next items with their numbers, waiting until at least one item is available.

        If the reader missed items, return a `BroadcastGap` instead. If the reader is closed, or if the broadcast is
        closed and the reader has read all kept items, return None.

        Parameters:
            max_items: maximum number of items to return; at least 1.
            on_publish: callback, called by `Broadcast.publish` with the new items while this call waits. If it returns
                True, it has taken all these items, and this call continues to wait for the items after them. Otherwise,
                this call returns the items. The callback must not block, and must not read or close this reader.

        Raises:
            Interrupted: the current interrupt is triggered; the cursor has not moved.
            Exception: ``on_publish`` raised it; the cursor has not moved.
            RuntimeError: another task already waits on this reader.
            ValueError: ``max_items`` is below 1.
        """
        if max_items < 1:
            raise ValueError(f"invalid max_items={max_items}; use at least 1")
        check_interrupt()
        while True:
            taken = self._take(max_items)
            if taken is not None:
                return taken
            if self._closed or self._broadcast._closed:
                return None
            await self._wait(on_publish)

    def close(self) -> None:
        """Close the reader; a pending `read` returns None. Idempotent."""
        if self._closed:
            return
        self._closed = True
        broadcast = self._broadcast
        broadcast._readers -= 1
        if self._epoch != broadcast._epoch:
            broadcast._caught_up()
        if self._waiter is not None:
            release(self._waiter)

    def _take(self, max_items: int) -> list[tuple[int, T]] | BroadcastGap | None:
        broadcast = self._broadcast
        first = self._cursor + 1
        end = broadcast._next_seq
        if self._closed:
            return None
        if first >= end:
            self._has_seen_everything()
            return None
        items = broadcast._items or []
        start = end - len(items)
        if first < start:
            gap = BroadcastGap(self._cursor, start - 1)
            self._cursor = start - 1
            if start == end:
                self._has_seen_everything()
            return gap
        taken = list(enumerate(items[first - start : first - start + max_items], first))
        self._cursor += len(taken)
        if self._cursor + 1 == end:
            self._has_seen_everything()
        return taken

    def _takes(self, items: Sequence[T], first: int, waiter: Waiter) -> bool:
        """Offer new items to the callback of the pending `read`, and return whether it took them."""
        if self._on_publish is None or self._cursor + 1 != first or waiter.done():
            return False
        try:
            if not self._on_publish(items):
                return False
        except Exception as error:
            waiter.set_exception(error)
            return False
        self._cursor += len(items)
        self._has_seen_everything()
        return True

    def _has_seen_everything(self) -> None:
        broadcast = self._broadcast
        if self._epoch != broadcast._epoch:
            self._epoch = broadcast._epoch
            broadcast._caught_up()

    async def _wait(self, on_publish: Callable[[Sequence[T]], bool] | None) -> None:
        if self._waiter is not None:
            raise RuntimeError("another task already waits on this reader; use one reader per task")
        broadcast = self._broadcast
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiter, self._on_publish = waiter, on_publish
        broadcast._start_waiting(self, waiter)
        try:
            await wait_for_release(waiter)
        finally:
            self._waiter = self._on_publish = None
            broadcast._stop_waiting(self, waiter)
