"""Thread primitives for the runtime's own code under exploration; each use of a primitive is a switch point."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.testing.explorer.controlled_threads import ControlledThread, ThreadController, Unwound

__all__ = ["Lock", "RLock", "SimpleQueue", "Thread"]


class Lock:
    """Replacement of `threading.Lock` for the threads of a schedule.

    Parameters:
        strands: the schedule's controller.
        quiet: if true, waiting for the lock is a switch point, but acquiring and releasing it are not. Conditions use
            quiet locks for their waiters.
    """

    __slots__ = ("_quiet", "is_locked", "owner", "strands", "waiting")

    def __init__(self, strands: ThreadController, *, quiet: bool = False) -> None:
        self.strands = strands
        self._quiet = quiet
        self.is_locked = False
        self.owner: ControlledThread | None = None
        self.waiting: dict[ControlledThread, None] = {}

    def __str__(self) -> str:
        if self._quiet:
            return "a condition, an event, a queue or a future"
        if not self.is_locked:
            return "a lock that is free"
        return "a lock that the loop has" if self.owner is None else f"a lock that thread {self.owner.label!r} has"

    def _free(self) -> bool:
        return not self.is_locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; timeouts are in virtual seconds."""
        strands = self.strands
        if not self._quiet:
            strands.pause()
        if self.is_locked and self._quiet and strands.over:
            raise Unwound  # a loop around a condition would never end
        must_wait = self.is_locked and not strands.over
        if must_wait and not (
            blocking and strands.wait(self._free, self.waiting, self, None if timeout < 0 else timeout)
        ):
            return False
        self.is_locked = True
        self.owner = strands.running
        return True

    def release(self) -> None:
        """Release the lock, from any thread.

        Raises:
            RuntimeError: if the lock is not held.
        """
        if not self.is_locked:
            raise RuntimeError("release unlocked lock")
        self.is_locked = False
        self.strands.wake(self.waiting)
        if not self._quiet:
            self.strands.pause()

    def locked(self) -> bool:
        """Return whether the lock is held."""
        return self.is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """Replacement of `threading.RLock` for the threads of a schedule."""

    __slots__ = ("_depth", "_lock")

    def __init__(self, strands: ThreadController) -> None:
        self._lock = Lock(strands)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, which this thread may already hold; timeouts are in virtual seconds."""
        lock = self._lock
        if not (lock.is_locked and lock.owner is lock.strands.running) and not lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        """Release the lock once.

        Raises:
            RuntimeError: if this thread does not hold the lock.
        """
        if not self._depth or self._lock.owner is not self._lock.strands.running:
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue:
    """Replacement of `queue.SimpleQueue` for the threads of a schedule."""

    # Names that are unlikely in a test's subclass.
    __slots__ = ("explored_items", "explored_strands", "explored_waiting")

    def __init__(self, strands: ThreadController) -> None:
        self.explored_strands = strands
        self.explored_items: deque[Any] = deque()
        self.explored_waiting: dict[ControlledThread, None] = {}

    def __str__(self) -> str:
        return "an empty queue"

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item."""
        self.explored_items.append(item)
        self.explored_strands.wake(self.explored_waiting)
        self.explored_strands.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the first item.

        Raises:
            queue.Empty: if the queue is empty and no item arrives in time.
        """
        self.explored_strands.pause()
        if not self.explored_items and block:
            self.explored_strands.wait(lambda: self.explored_items, self.explored_waiting, self, timeout)
        if not self.explored_items:
            raise queue.Empty
        return self.explored_items.popleft()

    def get_nowait(self) -> Any:
        """Remove and return the first item; raise `queue.Empty` at once if the queue is empty."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return whether the queue is empty."""
        return not self.explored_items

    def qsize(self) -> int:
        """Return the number of items."""
        return len(self.explored_items)


class Thread:
    """Replacement of `threading.Thread` for the threads of a schedule."""

    def __init__(
        self,
        strands: ThreadController,
        target: Callable[..., object],
        name: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._strands = strands
        self._strand: ControlledThread | None = None
        self._target = lambda: target(*args, **(kwargs or {}))

    @property
    def ident(self) -> int | None:
        """The identifier of the real thread; None before the thread first runs and after it has ended."""
        return None if self._strand is None else self._strand.ident

    def start(self) -> None:
        """Start the thread."""
        self._strand = ControlledThread(self._strands, self._target, self.name, must_end=False, thread=self)
        self._strands.start(self._strand)

    def is_alive(self) -> bool:
        """Return whether the thread was started and has not ended."""
        return self._strand is not None and not self._strand.ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, for at most ``timeout`` virtual seconds; None waits indefinitely."""
        strand = self._strand
        assert strand is not None, "a thread that was not started"
        self._strands.wait(lambda: strand.ended, strand.joining, f"the end of thread {self.name!r}", timeout)
