"""Daemon threads for blocking calls: inherited context, a size limit, and replacement of threads that never return.

Invariants:

- A call is in exactly one place: queued, running on one thread, finished, or abandoned.
- Sharers (see `submit`) take turns: between two queued calls of one sharer, one call of every other waiting sharer
  starts. Calls of one sharer start in the order in which they were submitted.
- ``running + abandoned`` threads never exceed ``max_threads + abandoned_limit``.
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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from holdfast.errors import LimitExceeded, Unavailable

__all__ = [
    "ThreadCall",
    "ThreadPool",
    "ThreadPoolStatistics",
    "any_abandoned",
    "call_of_thread",
    "runs_a_call",
    "shared_threads",
    "start_plainly",
    "thread_stack",
]

_IDLE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPoolStatistics:
    """A snapshot of a thread pool.

    Parameters:
        running: number of running calls that were not abandoned.
        idle: number of idle threads.
        queued: number of calls that wait for a thread.
        abandoned: number of abandoned threads that still run.
        abandoned_total: number of threads abandoned since the pool was created.
        by_owner: number of abandoned threads that still run, by owner; owners without such threads are left out.
    """

    running: int
    idle: int
    queued: int
    abandoned: int
    abandoned_total: int
    by_owner: dict[str, int] = field(default_factory=dict)


class ThreadCall:
    """One function call submitted to a pool. Its attributes are readable from any thread."""

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
        """Withdraw the call if no thread has started it; return whether it was withdrawn.

        If the call was withdrawn, neither its function nor ``on_done`` is called.
        """
        return self.pool._take_back(self)

    def abandon(self) -> bool:
        """Abandon the thread that runs this call, and free its place in the pool for another thread.

        Return False if no thread runs the call or the thread was already abandoned.
        """
        return self.pool._abandon(self)

    def stack(self) -> tuple[str, ...]:
        """Return the current stack of the call's thread, outermost frame first; empty if the call is not running."""
        thread = self.thread
        return () if thread is None else thread_stack(thread)


def thread_stack(thread: threading.Thread) -> tuple[str, ...]:
    """Return a thread's current stack, outermost frame first; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident) if thread.ident is not None else None
    if frame is None:
        return ()
    return tuple(f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in traceback.extract_stack(frame))


class _Parked:
    """An idle thread; ``call`` is set before ``wake`` is released."""

    __slots__ = ("call", "thread", "wake")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.call: ThreadCall | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class ThreadPool:
    """A bounded pool of daemon threads.

    Parameters:
        max_threads: maximum number of concurrent calls; further calls wait, and their sharers take turns.
        abandoned_limit: maximum number of abandoned threads that still run; at the limit, new calls are refused.
        queue_limit: maximum number of waiting calls; at the limit, new calls are refused.
        name: prefix of thread names.

    All methods are callable from any thread, but not from a signal handler.
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
        self._queues: dict[str, deque[ThreadCall]] = {}  # by sharer, next turn first; none is empty
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
    ) -> ThreadCall:
        """Submit ``fn(*values, **kwargs)`` to a thread of the pool; return the call without waiting for it.

        Parameters:
            fn: function to call.
            values: positional arguments of the function.
            context: context that the function runs in; None uses a copy of the caller's context.
            on_done: callback that is called with the result and the error on the same thread, once, unless the call was
                withdrawn; must not raise.
            name: display name; empty uses the name of the function.
            owner: key under which the thread is counted if it is abandoned.
            sharer: key for fair sharing: while calls wait for a thread, sharers take turns.
            kwargs: keyword arguments of the function.

        Raises:
            LimitExceeded: ``queue_limit`` calls already wait, or ``abandoned_limit`` abandoned threads still run.
            Unavailable: the pool is closed.
        """
        call = ThreadCall(
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
                    hint="run blocking code in a process, or let it check its interrupt",
                )
            if self._queued >= self.queue_limit:
                raise LimitExceeded(
                    f"{self.queue_limit} calls wait for a thread of pool {self.name!r}", hint="retry later"
                )
            self._place(call)
        return call

    def _place(self, call: ThreadCall) -> None:
        """Give the call to an idle thread, to a new one, or to the queue. The caller holds the lock."""
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

    def _drop(self, call: ThreadCall) -> bool:
        """Remove a call from its queue; return False if the call is not queued. The caller holds the lock."""
        queue = self._queues.get(call.sharer)
        if queue is None or call not in queue:
            return False
        queue.remove(call)
        if not queue:
            del self._queues[call.sharer]
        self._queued -= 1
        return True

    def _take(self) -> ThreadCall:
        """Remove and return the next call, and move its sharer to the end of the turns. The caller holds the lock."""
        sharer = next(iter(self._queues))
        queue = self._queues.pop(sharer)
        call = queue.popleft()
        if queue:
            self._queues[sharer] = queue
        self._queued -= 1
        return call

    def _begin(self, call: ThreadCall, thread: threading.Thread) -> None:
        call.thread = thread
        self._running += 1

    def _staff(self) -> None:
        """Start a thread if a call waits and the limit allows it. The caller holds the lock."""
        if self._queued and self._threads < self.max_threads:
            self._serial += 1
            self._threads += 1
            thread = threading.Thread(target=self._serve, name=f"{self.name}-{self._serial}", daemon=True)
            try:
                start_plainly(thread)
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
                _begun.pop(native, None)  # missing in a forked child that returns
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
            except Exception:  # reported, and no reason to lose the thread
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), parked.thread)))
            del result, error, call
            call = self._next(parked) if kept else None

    def _next(self, parked: _Parked) -> ThreadCall | None:
        """Return the next call for this thread, or None if the thread is to end."""
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

    def _take_back(self, call: ThreadCall) -> bool:
        with self._lock:
            return self._drop(call)

    def _abandon(self, call: ThreadCall) -> bool:
        with self._lock:
            if call.abandoned or call.thread is None:
                return False
            call.abandoned = True
            self._running -= 1
            self._threads -= 1
            self._abandoned[call.owner] += 1
            self._abandoned_total += 1
            # If no thread can be started now, the next free thread takes the waiting calls.
            with contextlib.suppress(RuntimeError):
                self._staff()
            return True

    def abandoned(self, owner: str | None = None) -> int:
        """Return the number of abandoned threads of ``owner`` that still run; None counts the threads of all owners."""
        with self._lock:
            return self._abandoned.total() if owner is None else self._abandoned[owner]

    def statistics(self) -> ThreadPoolStatistics:
        """Return a snapshot of the pool."""
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
        """Close the pool to new calls and let idle threads end.

        Return at once; calls that already wait or run are still completed.
        """
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
            self._threads -= len(parked)
        for one in parked:
            one.wake.release()


start_plainly = threading.Thread.start
"""The interpreter's own ``Thread.start``, saved because `holdfast.runtime.adoption.threads` replaces it."""

_begun: dict[int, ThreadCall] = {}
"""Running calls of all pools, by native thread id."""

on_leave: Callable[[], object] | None = None
"""Callback that is called on a pool's thread after each call, because C code in the call may have started programs."""


def runs_a_call(stack: Collection[CodeType]) -> bool:
    """Return whether a thread with these code objects on its stack belongs to a pool and is not idle."""
    return ThreadPool._serve.__code__ in stack and ThreadPool._next.__code__ not in stack


def call_of_thread(native_id: int) -> ThreadCall | None:
    """Return the call that the thread with this native id runs now; None if the thread runs no call of a pool."""
    return _begun.get(native_id)


def any_abandoned() -> bool:
    """Return whether an abandoned thread of any pool still runs."""
    return any(call.abandoned for call in list(_begun.values()))


_shared: ThreadPool | None = None
_shared_lock = threading.Lock()


def shared_threads() -> ThreadPool:
    """Return the default thread pool of scopes, which is shared by the whole process and created on first use."""
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
