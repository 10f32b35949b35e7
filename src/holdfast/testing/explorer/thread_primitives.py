"""Replacements for the locks and queues that an explored test creates; each use of a replacement is a switch point.

During an exploration, these classes replace `threading.Lock`, `threading.RLock` and `queue.SimpleQueue`
(see `holdfast.testing.explorer.patching`). `Condition`, `Event`, `Semaphore`, `Barrier`, `Queue` and their relatives
are written in Python on top of locks, so they use the replacements, too.

Invariants

- Outside a schedule, the constructors return the interpreter's own objects.
- An object that outlives its schedule (such as a lock that a module creates on first use) moves to the next schedule,
  where a lock starts unlocked. If a thread outside any schedule uses the object, a built-in object does the work.
- While a lock that the test created is held, at least one switch point occurs, so that another thread can find the lock
  locked. This does not apply to the mutex inside a condition or a queue, because no code queries its state.
"""

from __future__ import annotations

import queue
import sys
import threading
from _thread import LockType
from types import GenericAlias
from typing import Any, Final

from holdfast.testing.explorer.controlled_threads import ThreadController, strands_here
from holdfast.testing.explorer.runtime_primitives import Lock, SimpleQueue
from holdfast.testing.threading_internals import acquire_restore, is_owned, release_save

__all__ = ["OwnLock", "OwnRLock", "OwnSimpleQueue", "look"]

REAL_LOCK: Final = threading.Lock
REAL_RLOCK: Final = threading.RLock
REAL_SIMPLE_QUEUE: Final = queue.SimpleQueue
_REAL_TYPES: Final[dict[str, type]] = {
    "OwnLock": type(threading.Lock()),
    "OwnRLock": type(threading.RLock()),
    "OwnSimpleQueue": queue.SimpleQueue,
}
_INNER: Final = frozenset({"queue", "threading"})
_making: Final = threading.Lock()


class _StandIn(type):
    """Metaclass of a replacement for a built-in class; `isinstance` accepts the built-in's instances for it, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = _REAL_TYPES.get(cls.__name__)
        return super().__instancecheck__(instance) or (real is not None and isinstance(instance, real))


def _schedule_here() -> ThreadController | None:
    """Return the controller of the schedule that a new object would belong to, if any."""
    strands = strands_here()
    return None if strands is None or strands.over else strands


def _moves_to(strands: ThreadController, here: ThreadController | None) -> bool:
    """Whether an object of the schedule of `strands` is used in a later schedule, `here`."""
    return here is not None and strands.over and not here.over


class OwnLock(Lock, metaclass=_StandIn):
    """Replacement of `threading.Lock` in an explored test."""

    __slots__ = ("__weakref__", "_found_held", "_real_one")

    def __new__(cls, *, found_held: bool | None = None) -> Any:
        """Return a lock of the schedule, or a built-in lock outside a schedule."""
        return REAL_LOCK() if _schedule_here() is None else object.__new__(cls)

    def __init__(self, *, found_held: bool | None = None) -> None:
        strands = strands_here()
        assert strands is not None
        super().__init__(strands)
        self._found_held = sys._getframe(1).f_globals["__name__"] not in _INNER if found_held is None else found_held
        self._real_one: LockType | None = None

    def __str__(self) -> str:
        owner = self.owner
        if self.is_locked and owner is not None and owner.ended:
            return f"a lock that thread {owner.label!r} took and did not release before it ended"
        return super().__str__()

    def _in_schedule(self) -> bool:
        """Whether a thread of the schedule uses the lock. Moves the lock to a later schedule that uses it."""
        here = strands_here()
        if here is self.strands:
            return True
        if not _moves_to(self.strands, here):
            return False
        assert here is not None
        self.strands, self.is_locked, self.owner, self.waiting = here, False, None, {}
        return True

    def _real(self) -> LockType:
        with _making:
            if self._real_one is None:
                self._real_one = REAL_LOCK()
            return self._real_one

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; timeouts are in virtual seconds.

        Raises:
            ValueError: if the timeout is negative (other than -1), or is given although ``blocking`` is false.
        """
        if not self._in_schedule():
            return self._real().acquire(blocking, timeout)
        if timeout != -1 and not blocking:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        return super().acquire(blocking, timeout)

    def release(self) -> None:
        """Release the lock, from any thread.

        Raises:
            RuntimeError: if the lock is not held.
        """
        strands = self.strands
        if not self._in_schedule():
            if self.is_locked and not self._real().locked():
                self.is_locked = False  # taken in a schedule that is over
            else:
                self._real().release()
        elif strands.over:
            self.is_locked = False  # any thread that took it meanwhile is ended, too
        else:
            if self._found_held and self.is_locked:
                strands.pause()
            super().release()

    def locked(self) -> bool:
        """Return whether the lock is held."""
        if not self._in_schedule():
            return self._real().locked()
        self.strands.pause()
        return self.is_locked

    def _is_owned(self) -> bool:
        # A condition calls this before it wakes or waits: not a switch point.
        return self.is_locked if self._in_schedule() else self._real().locked()

    def _at_fork_reinit(self) -> None:
        self.is_locked, self.owner, self._real_one = False, None, None

    def __repr__(self) -> str:
        return f"<explored {'locked' if self.is_locked else 'unlocked'} threading.Lock>"


class OwnRLock(metaclass=_StandIn):
    """Replacement of `threading.RLock` in an explored test."""

    __slots__ = ("__weakref__", "_depth", "_lock", "_real_one")

    def __new__(cls) -> Any:
        """Return a lock of the schedule, or a built-in lock outside a schedule."""
        return REAL_RLOCK() if _schedule_here() is None else object.__new__(cls)

    def __init__(self) -> None:
        self._lock: OwnLock = OwnLock(found_held=sys._getframe(1).f_globals["__name__"] not in _INNER)
        self._depth = 0
        self._real_one: Any = None

    def _in_schedule(self) -> bool:
        strands = self._lock.strands
        inside = self._lock._in_schedule()
        if self._lock.strands is not strands:
            self._depth = 0
        return inside

    def _real(self) -> Any:
        with _making:
            if self._real_one is None:
                self._real_one = REAL_RLOCK()
            return self._real_one

    def _mine(self) -> bool:
        lock = self._lock
        return lock.is_locked and lock.owner is lock.strands.running

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, which this thread may already hold; timeouts are in virtual seconds."""
        if not self._in_schedule():
            return bool(self._real().acquire(blocking, timeout))
        if self._mine():
            self._pause()
        else:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._depth = 0
        self._depth += 1
        return True

    def release(self) -> None:
        """Release the lock once.

        Raises:
            RuntimeError: if this thread does not hold the lock.
        """
        if not self._in_schedule():
            self._real().release()
            return
        if not self._mine():
            if self._lock.strands.over:
                return  # another thread that is being ended took it
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if self._depth:
            self._pause()
        else:
            self._lock.release()

    def _pause(self) -> None:
        # Re-acquiring the lock is invisible to other threads, but the code before and after that is not.
        if self._lock._found_held:
            self._lock.strands.pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "locked" if self._lock.is_locked else "unlocked"
        return f"<explored {state} threading.RLock, taken {self._depth} times>"

    # called by conditions that use this lock

    def _is_owned(self) -> bool:
        return self._mine() if self._in_schedule() else is_owned(self._real())

    def _release_save(self) -> Any:
        if not self._in_schedule():
            return release_save(self._real())
        if not self._mine():
            raise RuntimeError("cannot release un-acquired lock")
        depth, self._depth = self._depth, 0
        self._lock.release()
        return depth

    def _acquire_restore(self, saved: Any) -> None:
        if not self._in_schedule():
            acquire_restore(self._real(), saved)
            return
        self._lock.acquire()
        self._depth = saved

    def _at_fork_reinit(self) -> None:
        self._depth, self._real_one = 0, None
        self._lock._at_fork_reinit()


class OwnSimpleQueue(SimpleQueue, metaclass=_StandIn):
    """Replacement of `queue.SimpleQueue` in an explored test."""

    __slots__ = ("__dict__", "__weakref__", "_real_one")
    __class_getitem__: Any = classmethod(GenericAlias)

    def __new__(cls) -> Any:
        """Return a replacement queue; outside a schedule, a built-in queue unless ``cls`` is a subclass."""
        is_plain = cls is OwnSimpleQueue
        return REAL_SIMPLE_QUEUE() if is_plain and _schedule_here() is None else object.__new__(cls)

    def __init__(self) -> None:
        strands = strands_here()
        super().__init__(strands)  # type: ignore[arg-type]
        self._real_one: queue.SimpleQueue[Any] = REAL_SIMPLE_QUEUE()

    def _in_schedule(self) -> bool:
        here = strands_here()
        strands: ThreadController | None = self.explored_strands
        if here is strands:
            return here is not None
        if here is None or not (strands is None or _moves_to(strands, here)):
            return False
        self.explored_strands, self.explored_waiting = here, {}
        while not self._real_one.empty():
            self.explored_items.append(self._real_one.get_nowait())
        return True

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item."""
        if not self._in_schedule():
            self._real_one.put(item)
            return
        self.explored_strands.pause()
        super().put(item)

    def put_nowait(self, item: Any) -> None:
        """Add an item."""
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the first item; timeouts are in virtual seconds.

        Raises:
            queue.Empty: if the queue is empty and no item arrives in time.
            ValueError: if the timeout is negative.
        """
        if block and timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        if self._in_schedule():
            return super().get(block, timeout)
        if self.explored_items:
            return self.explored_items.popleft()  # from a schedule that is over
        return self._real_one.get(block, timeout)

    def empty(self) -> bool:
        """Return whether the queue is empty."""
        return not self.qsize()

    def qsize(self) -> int:
        """Return the number of items."""
        if not self._in_schedule():
            return len(self.explored_items) + self._real_one.qsize()
        self.explored_strands.pause()
        return len(self.explored_items)


def look(lock: object) -> None:
    """Let other threads run before the caller reads the state that the lock guards, without holding the lock."""
    if type(lock) is OwnLock and lock._in_schedule():
        lock.strands.pause()
