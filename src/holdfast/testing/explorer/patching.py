"""Replace the thread primitives of explored code with those of the schedule.

The runtime's own code gets the primitives of `holdfast.testing.explorer.runtime_primitives`. All other code gets the
primitives of `holdfast.testing.explorer.thread_primitives`, which are set in `threading` and `queue` and in each module
outside the standard library that imported the originals by name.

Invariants

- Only module attributes and `Event.is_set` are replaced, and each is restored when the exploration is over.
- A replacement behaves according to the calling thread: outside a schedule, it acts as the original.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from _thread import LockType
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, TypeVar

from holdfast.errors import Interrupted
from holdfast.runtime import oneshot
from holdfast.runtime import thread_pool as threads
from holdfast.runtime.adoption import tasks as adoption
from holdfast.runtime.interrupt import dispatch as interrupt_dispatch
from holdfast.runtime.interrupt import interrupt
from holdfast.runtime.scope import state as scope_state
from holdfast.storage.sql import readers, writer
from holdfast.storage.sqlite import checkpoints, snapshots
from holdfast.testing.explorer.controlled_threads import ControlledThread, Unwound, end_carriers, strands_here
from holdfast.testing.explorer.runtime_primitives import Lock, RLock, SimpleQueue, Thread
from holdfast.testing.explorer.thread_primitives import (
    REAL_LOCK,
    REAL_RLOCK,
    REAL_SIMPLE_QUEUE,
    OwnLock,
    OwnRLock,
    OwnSimpleQueue,
    look,
)
from holdfast.testing.threading_internals import CLOCK, MAKE_LOCK, lock_of_event

__all__ = ["start_thread", "swapped_in"]

T = TypeVar("T")

_monotonic, _sleep = time.monotonic, time.sleep
_is_set_plain = threading.Event.is_set
_start_plainly = threads.start_plainly
_shared_threads = threads.shared_threads


def start_thread(fn: Callable[..., T], /, *values: Any, name: str | None = None) -> asyncio.Future[T]:
    """Run ``fn(*values)`` in a thread of the explored schedule, and return a future for the result.

    The thread is a real thread, but only one thread runs at a time: the loop's thread or one of the schedule's threads.
    The explorer may switch to another thread whenever this thread uses a runtime primitive (an `Interrupt`'s blocking
    waits, a scope, a `BoundedQueue`, a hand-over to the loop). The explorer may also switch when the thread sleeps,
    when the thread uses a lock, condition, event, semaphore, barrier or queue of `threading` and `queue` that the test
    created, and when the thread waits for such an object that was created before the test. The schedule fails if the
    test ends before the thread.

    Parameters:
        fn: plain function to run in the thread.
        values: positional arguments for ``fn``.
        name: display name of the thread; None uses the name of ``fn``.

    Awaiting the future raises the error of ``fn``. A `StopIteration`, or an error that is neither an `Exception` nor
    `holdfast.errors.Interrupted`, is raised as the cause of a `RuntimeError`.

    Raises:
        RuntimeError: if this thread does not belong to an explored schedule.
    """
    strands = strands_here()
    if strands is None:
        raise RuntimeError("start_thread() works only in an explored schedule; call it in a test under explore()")
    loop = strands.loop
    future: asyncio.Future[T] = loop.create_future()
    label = name or str(getattr(fn, "__qualname__", type(fn).__name__))

    def run() -> None:
        try:
            result = fn(*values)
        except Unwound:
            raise
        except BaseException as error:
            loop.call_soon_threadsafe(_fail, future, _carried(error, label))
        else:
            loop.call_soon_threadsafe(_succeed, future, result)

    strands.start(ControlledThread(strands, run, label, must_end=True, future=future))
    return future


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _carried(error: BaseException, label: str) -> BaseException:
    """Return ``error``, or a `RuntimeError` caused by ``error`` if futures cannot carry it, such as `SystemExit`."""
    if isinstance(error, (Exception, Interrupted)) and not isinstance(error, StopIteration):
        return error
    instead = RuntimeError(f"thread {label!r} raised {type(error).__name__}: {error}")
    instead.__cause__ = error
    return instead


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class _Threading:
    """Replacement for the module `threading` in the runtime's own code."""

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    @staticmethod
    def Lock() -> Any:
        """Return a lock of the explored schedule, or a real lock outside a schedule."""
        strands = strands_here()
        return REAL_LOCK() if strands is None else Lock(strands)

    @staticmethod
    def RLock() -> Any:
        """Return a re-entrant lock of the explored schedule, or a real lock outside a schedule."""
        strands = strands_here()
        return REAL_RLOCK() if strands is None else RLock(strands)

    @staticmethod
    def Thread(*, target: Callable[..., object], name: str, **options: Any) -> Any:
        """Return a thread of the explored schedule, or a real thread outside a schedule."""
        strands = strands_here()
        if strands is None:
            return threading.Thread(target=target, name=name, **options)
        return Thread(strands, target, name, **options)

    @staticmethod
    def current_thread() -> Any:
        """Return the schedule's thread object for the running thread, or the real thread object."""
        strands = strands_here()
        strand = None if strands is None else strands.running
        return threading.current_thread() if strand is None or strand.thread is None else strand.thread


class _Time:
    """Replacement for the module `time` in the runtime's own code."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def monotonic() -> float:
        """Return the explored schedule's time, or the real time outside a schedule."""
        return _now()

    @staticmethod
    def sleep(delay_s: float) -> None:
        """Sleep in the explored schedule's time, or in real time outside a schedule."""
        strands = strands_here()
        if strands is None:
            _sleep(delay_s)
        else:
            strands.sleep(delay_s)


class _Queue:
    """Replacement for the module `queue` in the runtime's own code."""

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)

    @staticmethod
    def SimpleQueue() -> Any:
        """Return a queue of the explored schedule, or a real queue outside a schedule."""
        strands = strands_here()
        return REAL_SIMPLE_QUEUE() if strands is None else SimpleQueue(strands)


class _Dispatcher:
    """Proxy of the explored schedule's callback dispatcher, or of the real dispatcher outside a schedule."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        strands = strands_here()
        if strands is None or strands.over:
            return getattr(self._real, name)
        return getattr(strands.the_only("dispatcher", interrupt_dispatch.CallbackDispatcher), name)


def _now() -> float:
    strands = strands_here()
    return _monotonic() if strands is None else strands.loop.time()


def _gate() -> Any:
    strands = strands_here()
    if strands is None:
        return REAL_LOCK()
    if strands.running is None:
        strands.loop.refuse(
            "Interrupt.wait_blocking and sleep_blocking stop the whole loop; use `await interrupt.wait()` and "
            "`await interrupt.sleep(…)` on a loop, these are for threads (holdfast.testing.start_thread)"
        )
    return Lock(strands)


def _gate_of_condition() -> LockType | Lock:
    strands = strands_here()
    return REAL_LOCK() if strands is None or strands.running is None else Lock(strands, quiet=True)


def _is_set(event: threading.Event) -> bool:
    look(lock_of_event(event))
    return _is_set_plain(event)


def _start(thread: Any) -> None:
    if isinstance(thread, Thread):
        thread.start()
    else:
        _start_plainly(thread)


def _threads_here() -> threads.ThreadPool:
    strands = strands_here()
    if strands is None:
        return _shared_threads()
    pool: threads.ThreadPool = strands.the_only("threads", lambda: threads.ThreadPool(name="holdfast-shared"))
    return pool


_threading, _time, _queue = _Threading(), _Time(), _Queue()
_SWAPPED: Final[tuple[tuple[ModuleType | type, str, Any], ...]] = (
    (threads, "threading", _threading),
    (threads, "start_plainly", _start),
    (scope_state, "threading", _threading),
    (scope_state, "shared_threads", _threads_here),
    (adoption, "shared_threads", _threads_here),
    (oneshot, "threading", _threading),
    (interrupt, "allocate_lock", _gate),
    (interrupt_dispatch, "threading", _threading),
    (interrupt_dispatch, "queue", _queue),
    (interrupt_dispatch, "time", _time),
    (checkpoints, "threading", _threading),
    (checkpoints, "SimpleQueue", _queue.SimpleQueue),
    (writer, "threading", _threading),
    (writer, "time", _time),
    (writer, "SimpleQueue", _queue.SimpleQueue),
    (readers, "threading", _threading),
    (readers, "SimpleQueue", _queue.SimpleQueue),
    (readers, "system_clock", _time),
    (snapshots, "threading", _threading),
    # With these, the standard library's conditions, events, queues and futures wait.
    (threading, MAKE_LOCK, _gate_of_condition),
    (threading, CLOCK, _now),
    (queue, "time", _now),
    # Code outside the runtime creates and uses these.
    (threading, "Lock", OwnLock),
    (threading, "RLock", OwnRLock),
    (threading.Event, "is_set", _is_set),
    (queue, "SimpleQueue", OwnSimpleQueue),
)


def _imported_by_name() -> list[tuple[ModuleType, str, Any]]:
    """Return the module attributes outside the standard library and the runtime that refer to a replaced object."""
    instead = {
        id(REAL_LOCK): OwnLock,
        id(REAL_RLOCK): OwnRLock,
        id(REAL_SIMPLE_QUEUE): OwnSimpleQueue,
        id(_sleep): time.sleep,
    }
    modules: list[Any] = list(sys.modules.values())
    return [
        (module, name, instead[id(value)])
        for module in modules
        if isinstance(module, ModuleType) and not _is_left_alone(module.__name__)
        for name, value in list(vars(module).items())
        if id(value) in instead
    ]


def _is_left_alone(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "holdfast" or (top in sys.stdlib_module_names and top != "__main__")


@contextmanager
def swapped_in() -> Iterator[None]:
    """Replace the thread primitives within the block; at the end, restore them and end idle threads."""
    dispatcher = interrupt_dispatch.dispatcher
    changes = (*_SWAPPED, (interrupt_dispatch, "dispatcher", _Dispatcher(dispatcher)), *_imported_by_name())
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, instead in changes:
        setattr(module, name, instead)
    try:
        yield
    finally:
        for (module, name, _), old in zip(changes, before, strict=True):
            setattr(module, name, old)
        end_carriers()
