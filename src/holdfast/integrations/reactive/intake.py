"""A bounded buffer that passes items from any thread to the loop, and counts the items by outcome.

Invariants
- An item is received once and is in exactly one place: it waits, is in flight, or was settled as done, failed,
  interrupted or dropped. All changes are made under one lock, so the counts of every snapshot add up.
- The lock is held for a few instructions, never while foreign code runs. A signal handler or a finalizer may interrupt
  the thread that holds the lock. Therefore, the lock is reentrant, and wherever `close` is interrupted, `finish` still
  counts every item.
- At most ``limit`` items wait, plus one for each blocked producer; items leave the buffer in order of arrival.
- A thread that runs an event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.errors import Interrupted, QueueFull, StreamEnded
from holdfast.protocol.stopping import Cause
from holdfast.runtime import current_interrupt

__all__ = ["Intake", "IntakeCounts", "Overflow", "Settled"]

Overflow = Literal["block", "fail", "drop"]
"""Policy for an item that arrives when the buffer is full; `Shaped`, in the bridge's module, documents the values."""

_State = Literal["open", "completed", "sealed", "closed"]
"""``completed`` by its source, ``sealed`` by us: waiting items are still taken; ``closed``: they are not."""

Settled = Literal["done", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeCounts:
    """Counts of the items of a stream, or of all streams of a bridge.

    ``received`` is always the sum of ``waiting``, ``in_flight``, ``done``, ``failed``, ``interrupted`` and ``dropped``.

    Parameters:
        received: items received.
        waiting: items not yet started, including those of blocked producers.
        blocked: producers blocked now.
        in_flight: items being worked on.
        done: items whose work returned.
        failed: items whose work raised.
        interrupted: items interrupted while they waited or were in flight.
        dropped: items dropped because the buffer was full.
        late: items that arrived after the end of their stream; not in ``received``.
    """

    received: int = 0
    waiting: int = 0
    blocked: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    interrupted: int = 0
    dropped: int = 0
    late: int = 0

    def __add__(self, other: IntakeCounts) -> IntakeCounts:
        """Return the sums of the counts of both objects."""
        return IntakeCounts(**{name: getattr(self, name) + getattr(other, name) for name in IntakeCounts.__slots__})


class _Blocked:
    """A producer that waits for room, with its item."""

    __slots__ = ("item", "let_in")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.let_in: Future[None] = Future()


class Intake:
    """The bounded buffer of one stream.

    Parameters:
        limit: maximum number of items that wait.
        overflow: policy for an item that arrives when the buffer is full.
        block_s: maximum time that a producer is blocked, in seconds.
        wake: function that is called without arguments after an item has arrived or the stream has ended, outside the
            lock and from any thread.
        name: name of the stream in errors.
    """

    __slots__ = (
        "_block_s",
        "_counts",
        "_items",
        "_limit",
        "_line",
        "_lock",
        "_name",
        "_overflow",
        "_state",
        "_wake",
        "error",
    )

    def __init__(self, *, limit: int, overflow: Overflow, block_s: float, wake: Callable[[], None], name: str) -> None:
        self._limit = limit
        self._overflow = overflow
        self._block_s = block_s
        self._wake = wake
        self._name = name
        self._lock = threading.RLock()
        self._items: deque[Any] = deque()
        self._line: deque[_Blocked] = deque()
        self._state: _State = "open"
        self._counts: dict[str, int] = dict.fromkeys(IntakeCounts.__slots__, 0)
        self.error: Exception | None = None
        """The error that ends the stream early."""

    def put(self, item: Any) -> None:
        """Accept an item. Thread-safe. Depending on `Overflow`, this method may block.

        Raises:
            StreamEnded: if the source has already completed or failed.
            Interrupted: if the current interrupt is triggered during the wait; the item is not accepted.
        """
        blocked: _Blocked | None = None
        full = False
        with self._lock:
            counts = self._counts
            if self._state != "open":
                counts["late"] += 1
                if self._state != "completed":
                    return  # we ended the stream: the producer could not know
                raise StreamEnded(f"an item arrived in {self._name} after the end of its source")
            counts["received"] += 1
            if len(self._items) < self._limit and not self._line:
                self._items.append(item)
            elif self._overflow == "block" and asyncio._get_running_loop() is None:
                blocked = _Blocked(item)
                self._line.append(blocked)
            else:
                counts["dropped"] += 1
                full = self._overflow != "drop"
        if full:
            where = "" if self._overflow == "fail" else ", and its producer runs on an event loop, which must not block"
            self.seal(self._full(where))
        elif blocked is not None:
            self._wait(blocked)
        else:
            self._wake()

    def _full(self, why: str) -> QueueFull:
        return QueueFull(
            f"{self._name} is full with {self._limit} items{why}",
            hint="let the source produce on a thread (ops.subscribe_on), use a larger buffer=, or overflow='drop'",
        )

    def _wait(self, blocked: _Blocked) -> None:
        """Block the producer until its item has entered the buffer, or the stream has ended."""
        self._wake()
        interrupt = current_interrupt()
        if interrupt is None:
            self._await_room(blocked)
            return

        def give_up(_: Cause) -> None:
            blocked.let_in.cancel()

        with interrupt.on_trigger(give_up):
            try:
                self._await_room(blocked)
            except CancelledError:
                if not self._leave(blocked, "interrupted"):
                    return  # it was let in at that moment
                cause = interrupt.cause
                assert cause is not None
                raise Interrupted(cause) from None

    def _await_room(self, blocked: _Blocked) -> None:
        try:
            blocked.let_in.result(self._block_s)
        except TimeoutError:
            if self._leave(blocked, "dropped"):
                self.seal(self._full(f", and had no room for {self._block_s:g} s"))

    def _leave(self, blocked: _Blocked, as_: Literal["dropped", "interrupted"]) -> bool:
        """Remove the item of a blocked producer; return False if the item has already entered the buffer."""
        with self._lock:
            try:
                self._line.remove(blocked)
            except ValueError:
                return False
            self._counts[as_] += 1
            return True

    def complete(self) -> None:
        """Record that the source has completed; waiting items are still taken. Thread-safe."""
        self._end("completed", None)

    def fail(self, error: Exception) -> None:
        """End the stream with the source's error, unless the stream has already ended. Thread-safe."""
        self._end("completed", error)

    def seal(self, error: Exception | None = None) -> None:
        """Reject further items, even if the source continues, and end the stream with the given error, if any."""
        self._end("sealed", error)

    def _end(self, state: _State, error: Exception | None) -> None:
        with self._lock:
            if self._state == "open":
                self._state = state
                self.error = error
        self._wake()

    def take(self, room: int) -> list[Any]:
        """Take up to ``room`` items from the buffer and count these items as in flight."""
        taken: list[Any] = []
        let_in: list[_Blocked] = []
        with self._lock:
            items = self._items
            with suppress(IndexError):  # the buffer is empty
                for _ in range(room):
                    taken.append(items.popleft())
                    if self._line:
                        blocked = self._line.popleft()
                        items.append(blocked.item)
                        let_in.append(blocked)
            self._counts["in_flight"] += len(taken)
        self._release(let_in)
        return taken

    @property
    def exhausted(self) -> bool:
        """Whether the buffer is empty and accepts no more items."""
        with self._lock:
            return self._state != "open" and not self._items and not self._line

    def settle(self, settled: Settled) -> None:
        """Record that the work on an item in flight has ended."""
        with self._lock:
            self._counts["in_flight"] -= 1
            self._counts[settled] += 1

    def close(self) -> None:
        """Reject further items, and count the waiting items as interrupted. Thread-safe; idempotent."""
        with self._lock:
            self._state = "closed"
            let_in = list(self._line)
            self._counts["interrupted"] += len(self._items) + len(let_in)
            self._items.clear()
            self._line.clear()
        self._release(let_in)

    def finish(self) -> None:
        """Close the buffer, and count items still in flight as interrupted, because their scope has ended."""
        self.close()
        with self._lock:
            self._counts["interrupted"] += self._counts["in_flight"]
            self._counts["in_flight"] = 0

    def counts(self) -> IntakeCounts:
        """Return a consistent snapshot of the counts."""
        with self._lock:
            waiting = len(self._items) + len(self._line)
            return IntakeCounts(**{**self._counts, "waiting": waiting, "blocked": len(self._line)})

    @staticmethod
    def _release(let_in: list[_Blocked]) -> None:
        for blocked in let_in:
            if blocked.let_in.set_running_or_notify_cancel():
                blocked.let_in.set_result(None)
