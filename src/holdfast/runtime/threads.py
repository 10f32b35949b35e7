"""Daemon threads for blocking calls: carried context, a cap, and replacement of threads that never come back.

Invariants:

- A call is in exactly one place: queued, running on one thread, finished, or abandoned.
- Those who share the pool take turns: between two queued calls of one sharer each other one that waits has its call
  begun. Calls of one sharer begin in their order.
- ``running + abandoned`` threads are never more than ``max_threads + abandoned_limit``.
- The lock is held for a few instructions only, never while user code runs, so it cannot deadlock with user locks.
- Threads are daemons and unknown to ``concurrent.futures``: the interpreter never waits for them at exit.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import LimitExceeded, Unavailable

__all__ = [
    "Call",
    "ThreadPool",
    "ThreadPoolStatistics",
    "any_abandoned",
    "call_of_thread",
    "shared_threads",
    "thread_stack",
]

_IDLE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPoolStatistics:
    """A snapshot of a pool.

    Parameters:
        running: calls that run now and were not abandoned.
        idle: threads that wait for a call.
        queued: calls that wait for a thread.
        abandoned: threads that were given up and have not come back yet.
        abandoned_total: threads given up since the pool was made.
        by_owner: abandoned threads per owner, for owners that have any.
    """

    running: int
    idle: int
    queued: int
    abandoned: int
    abandoned_total: int
    by_owner: dict[str, int] = field(default_factory=dict)


class Call:
    """One function call given to a pool. Its attributes may be read from any thread."""

    __slots__ = (
        "abandoned",
        "context",
        "fn",
        "kwargs",
        "name",
        "on_done",
        "owner",
        "pool",
        "sharer",
        "thread",
        "values",
    )

    def __init__(
        self,
        pool: ThreadPool,
        fn: Callable[..., Any],
        values: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: contextvars.Context,
        on_done: Callable[[Any, BaseException | None], object],
        name: str,
        owner: str,
        sharer: str,
    ) -> None:
        self.pool = pool
        self.fn = fn
        self.values = values
        self.kwargs = kwargs
        self.context = context
        self.on_done = on_done
        self.name = name
        self.owner = owner
        self.sharer = sharer
        self.thread: threading.Thread | None = None
        self.abandoned = False

    def cancel(self) -> bool:
        """Take the call back if no thread has begun it; True if it will never run. ``on_done`` is not called then."""
        return self.pool._take_back(self)

    def abandon(self) -> bool:
        """Give up the thread that runs this call: it is replaced. True for the first time."""
        return self.pool._abandon(self)

    def stack(self) -> tuple[str, ...]:
        """Where the thread is now, outermost frame first; empty when the call is not running."""
        thread = self.thread
        return () if thread is None else thread_stack(thread)


def thread_stack(thread: threading.Thread) -> tuple[str, ...]:
    """Where a thread is now, outermost frame first; empty when it has ended."""
    frame = sys._current_frames().get(thread.ident) if thread.ident is not None else None
    if frame is None:
        return ()
    return tuple(f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in traceback.extract_stack(frame))


class _Parked:
    """A thread that waits for its next call; ``call`` is set before ``wake`` is released."""

    __slots__ = ("call", "thread", "wake")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.call: Call | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class ThreadPool:
    """A capped pool of daemon threads.

    Parameters:
        max_threads: calls that may run at the same time; further ones wait, and who made them takes turns.
        abandoned_limit: threads that may be given up and still be alive; at the limit new calls are refused.
        queue_limit: calls that may wait.
        name: prefix of the threads' names.

    All methods may be called from any thread, but not from a signal handler.
    """

    def __init__(
        self, *, max_threads: int = 64, abandoned_limit: int = 64, queue_limit: int = 10_000, name: str = "holdfast"
    ) -> None:
        if max_threads < 1:
            raise ValueError("max_threads must be at least 1")
        self.max_threads = max_threads
        self.abandoned_limit = abandoned_limit
        self.queue_limit = queue_limit
        self.name = name
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Call]] = {}  # by sharer, the one whose turn it is first; none is empty
        self._queued = 0
        self._parked: list[_Parked] = []
        self._threads = 0
        self._running = 0
        self._abandoned: Counter[str] = Counter()
        self._abandoned_total = 0
        self._serial = 0
        self._closed = False

    def submit(
        self,
        fn: Callable[..., Any],
        /,
        *values: Any,
        context: contextvars.Context | None = None,
        on_done: Callable[[Any, BaseException | None], object],
        name: str = "",
        owner: str = "",
        sharer: str = "",
        kwargs: dict[str, Any] | None = None,
    ) -> Call:
        """Run ``fn(*values)`` on a thread, in ``context`` (default: a copy of the caller's).

        ``on_done(result, error)`` is called on that thread, once, unless the call was taken back; it must not raise.
        ``owner`` groups abandoned threads for caps. While calls wait for a thread, each ``sharer`` has its turn.

        Raises:
            LimitExceeded: too many calls wait, or too many threads are abandoned.
            Unavailable: the pool is closed.
        """
        call = Call(
            self,
            fn,
            values,
            kwargs or {},
            contextvars.copy_context() if context is None else context,
            on_done,
            name or getattr(fn, "__qualname__", type(fn).__name__),
            owner,
            sharer,
        )
        with self._lock:
            if self._closed:
                raise Unavailable(f"thread pool {self.name!r} is closed")
            if self._abandoned.total() >= self.abandoned_limit:
                raise LimitExceeded(
                    f"{self.abandoned_limit} threads of pool {self.name!r} were abandoned and still run",
                    hint="run what blocks in a process, or make it look at its interrupt",
                )
            if self._queued >= self.queue_limit:
                raise LimitExceeded(
                    f"{self.queue_limit} calls wait for a thread of pool {self.name!r}", hint="try again later"
                )
            self._place(call)
        return call

    def _place(self, call: Call) -> None:
        """Give the call to a parked thread, to a new one, or to the queue. Holds the lock."""
        if self._parked:
            parked = self._parked.pop()
            self._begin(call, parked.thread)
            parked.call = call
            parked.wake.release()
            return
        self._queues.setdefault(call.sharer, deque()).append(call)
        self._queued += 1
        try:
            self._staff()
        except BaseException:
            self._drop(call)
            raise

    def _drop(self, call: Call) -> bool:
        """Take a call out of its queue; False if it is in none. Holds the lock."""
        queue = self._queues.get(call.sharer)
        if queue is None or call not in queue:
            return False
        queue.remove(call)
        if not queue:
            del self._queues[call.sharer]
        self._queued -= 1
        return True

    def _take(self) -> Call:
        """The next call; its sharer's next turn comes after all others'. Holds the lock."""
        sharer = next(iter(self._queues))
        queue = self._queues.pop(sharer)
        call = queue.popleft()
        if queue:
            self._queues[sharer] = queue
        self._queued -= 1
        return call

    def _begin(self, call: Call, thread: threading.Thread) -> None:
        call.thread = thread
        self._running += 1

    def _staff(self) -> None:
        """Start a thread if a call waits and the cap allows it. Holds the lock."""
        if self._queued and self._threads < self.max_threads:
            self._serial += 1
            self._threads += 1
            thread = threading.Thread(target=self._serve, name=f"{self.name}-{self._serial}", daemon=True)
            try:
                _start_plain(thread)
            except BaseException:
                self._threads -= 1
                raise

    def _serve(self) -> None:
        parked = _Parked(threading.current_thread())
        native = threading.get_native_id()
        call = self._next(parked)
        while call is not None:
            _begun[native] = call
            try:
                result, error = call.context.run(call.fn, *call.values, **call.kwargs), None
            except BaseException as caught:
                result, error = None, caught
            finally:
                if on_leave is not None:
                    on_leave()
                _begun.pop(native, None)  # none is there in a forked child that comes back
            with self._lock:
                call.thread = None
                kept = not call.abandoned
                if kept:
                    self._running -= 1
                else:
                    self._abandoned[call.owner] -= 1
                    if not self._abandoned[call.owner]:
                        del self._abandoned[call.owner]
            try:
                call.on_done(result, error)
            except Exception:  # shown, and no reason to lose the thread
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), parked.thread)))
            del result, error, call
            call = self._next(parked) if kept else None

    def _next(self, parked: _Parked) -> Call | None:
        """The next call for this thread, or None when the thread shall end."""
        with self._lock:
            if self._queued:
                call = self._take()
                self._begin(call, parked.thread)
                return call
            if self._closed:
                self._threads -= 1
                return None
            self._parked.append(parked)
        if not parked.wake.acquire(timeout=_IDLE_S):
            with self._lock:
                if parked in self._parked:
                    self._parked.remove(parked)
                    self._threads -= 1
                    return None
            parked.wake.acquire()
        handed, parked.call = parked.call, None
        return handed

    def _take_back(self, call: Call) -> bool:
        with self._lock:
            return self._drop(call)

    def _abandon(self, call: Call) -> bool:
        with self._lock:
            if call.abandoned or call.thread is None:
                return False
            call.abandoned = True
            self._running -= 1
            self._threads -= 1
            self._abandoned[call.owner] += 1
            self._abandoned_total += 1
            # When no thread can be started now, the calls that wait are taken by the next thread that is free.
            with contextlib.suppress(RuntimeError):
                self._staff()
            return True

    def abandoned(self, owner: str | None = None) -> int:
        """How many threads are given up and not back yet, of one owner or of all."""
        with self._lock:
            return self._abandoned.total() if owner is None else self._abandoned[owner]

    def statistics(self) -> ThreadPoolStatistics:
        """A snapshot of the pool."""
        with self._lock:
            return ThreadPoolStatistics(
                running=self._running,
                idle=len(self._parked),
                queued=self._queued,
                abandoned=self._abandoned.total(),
                abandoned_total=self._abandoned_total,
                by_owner={owner: count for owner, count in self._abandoned.items() if count},
            )

    def close(self) -> None:
        """Refuse new calls and let idle threads end. Calls that wait or run go on; nothing is waited for."""
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
            self._threads -= len(parked)
        for one in parked:
            one.wake.release()


_start_plain = threading.Thread.start

_begun: dict[int, Call] = {}
"""What each thread of any pool, by its number in the kernel, runs now."""

on_leave: Callable[[], object] | None = None
"""Called on a pool's thread when it ends to run a call, whose scope its C code may have started programs in."""


def call_of_thread(native_id: int) -> Call | None:
    """What a pool's thread, by its number in the kernel, runs now."""
    return _begun.get(native_id)


def any_abandoned() -> bool:
    """Whether any pool's thread that was given up has not come back yet."""
    return any(call.abandoned for call in list(_begun.values()))


_shared: ThreadPool | None = None
_shared_lock = threading.Lock()


def shared_threads() -> ThreadPool:
    """The pool that scopes use when they are given none; made on first use, one per process."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = ThreadPool(name="holdfast-shared")
        return _shared


def _forget_threads_after_fork() -> None:
    global _shared, _shared_lock
    _begun.clear()
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_after_fork)
