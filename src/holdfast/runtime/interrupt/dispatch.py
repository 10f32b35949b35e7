"""Delivery of interrupts to event loops, callbacks and file descriptors, and the timers that trigger interrupts.

Invariants
- Everything that `Interrupt.trigger` calls here is lock-free: it may run in a signal handler, in `__del__` or in a
  callback, even while another call of this module runs in the same thread.
- Each trigger calls `call_soon_threadsafe` at most once per loop, however many waiters the loop has. The loop then
  wakes the waiters in chunks of `CHUNK`, one chunk per tick, so that other work of the loop runs in between.
- A callback never runs inside `trigger`. It runs on its loop, or on the dispatcher thread, at most once.
- The dispatcher thread is started when something is registered, never by a trigger.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from asyncio import _get_running_loop, current_task
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, Self

from holdfast.logs import log_failure
from holdfast.protocol.stopping import Cause, CauseKind

__all__ = [
    "CHUNK",
    "CallbackDispatcher",
    "FdLatch",
    "FutureGroup",
    "Loop",
    "Registration",
    "Timer",
    "WakeBatch",
    "dispatcher",
    "start_timer",
    "wake_few",
]

CHUNK = 1_000
"""Maximum number of waiters that are woken per tick of their loop."""

Loop = asyncio.AbstractEventLoop
FutureGroup = dict[asyncio.Future[None], None]

_log = logging.getLogger("holdfast.runtime")


class Source(Protocol):
    """Interface that callbacks and timers need from their interrupt."""

    name: str
    callbacks: dict[Registration, None]

    @property
    def cause(self) -> Cause | None:
        """Why the interrupt was triggered; None if it was not."""
        ...

    def trigger(self, reason: str, *, kind: CauseKind) -> bool:
        """Trigger the interrupt; return False if it was already triggered."""
        ...


class Registration:
    """A callback registered with an interrupt; created by `Interrupt.on_trigger`.

    `close()` removes the callback, and so does the end of a ``with`` block. `close()` is callable from any thread.
    """

    __slots__ = ("_context", "_fn", "_interrupt", "loop")

    def __init__(self, interrupt: Source, fn: Callable[[Cause], object], loop: Loop | None) -> None:
        self._interrupt = interrupt
        self._fn = fn
        self._context = contextvars.copy_context()
        self.loop = loop
        if loop is None:
            dispatcher.start()

    def close(self) -> None:
        """Remove the callback, so that it is not called. Does nothing if it has run or was already removed."""
        self._interrupt.callbacks.pop(self, None)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self) -> None:
        """Run the callback, unless it has run or was removed.

        An error of the callback is logged or passed to the loop's exception handler, not raised. Only `SystemExit` and
        `KeyboardInterrupt` are raised, if the callback runs on a loop.
        """
        if self._interrupt.callbacks.pop(self, self) is self:
            return
        cause = self._interrupt.cause
        assert cause is not None
        try:
            self._context.run(self._fn, cause)
        except BaseException as error:
            if self.loop is not None and isinstance(error, (SystemExit, KeyboardInterrupt)):
                raise
            message = f"callback {self._fn!r} of interrupt {self._interrupt.name!r} raised"
            if self.loop is None:
                log_failure(_log, message, error)
            else:
                self.loop.call_exception_handler({"message": message, "exception": error})


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    """Release the tasks that wait on these futures, on their loop. Idempotent."""
    for future in futures:
        if not future.done():
            future.set_result(None)


def _serve(chunk: Iterable[asyncio.Future[None] | Registration]) -> None:
    """Wake these waiters and run these callbacks, on their loop. Idempotent."""
    for entry in chunk:
        if isinstance(entry, Registration):
            entry.run()
        elif not entry.done():
            entry.set_result(None)


def _in_step(loop: Loop) -> bool:
    """Whether a task of `loop` is calling, so that a few of the loop's waiters can be woken in place.

    The loop is then certain to check its ready queue again before it sleeps. Otherwise, the caller may be a signal
    handler that runs just before the loop's `select`, which only `call_soon_threadsafe` interrupts.
    """
    return current_task(loop) is not None and _get_running_loop() is loop


def wake_few(loop: Loop, group: FutureGroup) -> None:
    """Wake the waiting tasks of `group`, all on `loop`: the fast path for an interrupt without children and callbacks.

    `group` has at most `CHUNK` tasks.
    """
    if current_task(loop) is not None and _get_running_loop() is loop:  # as `_in_step`, without the call
        for future in list(group):
            if not future.done():
                future.set_result(None)
        return
    # A closed loop raises: its waiters are gone with it.
    try:
        loop.call_soon_threadsafe(_wake_group, group, context=contextvars.Context())
    except RuntimeError:
        return


def _wake_group(group: FutureGroup) -> None:
    _wake(list(group))


class _LoopWakeup:
    """The work of one trigger on one loop, done in chunks."""

    __slots__ = ("_loop", "_rest", "groups", "registrations")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._rest: Iterator[asyncio.Future[None] | Registration] | None = None
        self.groups: list[FutureGroup] = []
        self.registrations: list[Registration] = []

    def __call__(self) -> None:
        if self._rest is None:
            self._rest = itertools.chain(self.registrations, itertools.chain.from_iterable(map(list, self.groups)))
        chunk = list(itertools.islice(self._rest, CHUNK))
        if len(chunk) == CHUNK:
            self._loop.call_soon(self, context=contextvars.Context())
        try:
            _serve(chunk)
        except BaseException:
            # A callback that ends the program. If the loop continues after all, so do the others.
            self._loop.call_soon(_serve, chunk, context=contextvars.Context())
            raise


class WakeBatch:
    """Wakeups of one trigger: done at once if possible, otherwise passed to their loops and threads by `schedule`."""

    __slots__ = ("_here", "_posts", "_room", "_visits")

    def __init__(self) -> None:
        self._visits: dict[Loop, _LoopWakeup] = {}
        self._posts: list[Registration] = []
        self._here: Loop | None = None
        self._room = CHUNK

    def add_group(self, loop: Loop, group: FutureGroup) -> None:
        """Wake the waiting tasks of `group`, all on `loop`: at once if possible, otherwise in `schedule`."""
        if loop is not self._here and _in_step(loop):
            self._here = loop
        if loop is self._here and len(group) <= self._room:
            self._room -= len(group)
            _wake(list(group))
        else:
            self._wakeup(loop).groups.append(group)

    def add_registration(self, registration: Registration) -> None:
        """Let `schedule` run the callback on its loop, or on the dispatcher thread."""
        if registration.loop is not None:
            self._wakeup(registration.loop).registrations.append(registration)
        else:
            self._posts.append(registration)

    def _wakeup(self, loop: Loop) -> _LoopWakeup:
        visit = self._visits.get(loop)
        if visit is None:
            visit = self._visits[loop] = _LoopWakeup(loop)
        return visit

    def schedule(self) -> None:
        """Dispatch all wakeups; return at once."""
        for registration in self._posts:
            dispatcher.post(registration.run)
        for loop, visit in self._visits.items():
            try:
                loop.call_soon_threadsafe(visit, context=contextvars.Context())
            except RuntimeError:
                # The loop is closed: its waiters are gone with it.
                continue


class FdLatch:
    """A file descriptor that becomes readable when the latch is released.

    Whichever thread removes an end of the pipe from its list closes that end, so no descriptor is closed or written
    twice.
    """

    __slots__ = ("_readers", "_writers", "fd")

    def __init__(self) -> None:
        self.fd, writer = os.pipe()
        self._readers = [self.fd]
        self._writers = [writer]

    def release(self) -> None:
        """Make the descriptor permanently readable: a reader gets one byte, then end of file."""
        with contextlib.suppress(IndexError):
            writer = self._writers.pop()
            os.write(writer, b"!")
            os.close(writer)

    def close(self) -> None:
        """Close both ends."""
        for ends in (self._writers, self._readers):
            with contextlib.suppress(IndexError):
                os.close(ends.pop())

    def __del__(self) -> None:
        self.close()


class Timer(weakref.ref[Source]):
    """A deadline for an interrupt; references the interrupt weakly, and is cancelled when the interrupt is freed."""

    __slots__ = ("delay_s",)

    delay_s: float

    def __new__(cls, interrupt: Source, delay_s: float, *_: object) -> Self:
        """Create the weak reference, which cancels the timer when the interrupt is freed."""
        return super().__new__(cls, interrupt, cls.cancel)

    def __init__(self, _: Source, delay_s: float) -> None:
        self.delay_s = delay_s

    def fire(self) -> None:
        """Trigger the interrupt: the deadline has passed."""
        interrupt = self()
        if interrupt is not None:
            interrupt.trigger(f"deadline of {self.delay_s:g} s exceeded", kind="deadline")

    def cancel(self) -> None:
        """Cancel the timer. Callable from any thread; does nothing if the timer has fired."""
        raise NotImplementedError


class _LoopTimer(Timer):
    """A deadline on an event loop's clock."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, interrupt: Source, delay_s: float, loop: Loop) -> None:
        super().__init__(interrupt, delay_s)
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = loop.call_later(delay_s, self.fire, context=contextvars.Context())

    def fire(self) -> None:
        self._handle = None
        super().fire()

    def cancel(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if _get_running_loop() is self._loop:
            handle.cancel()
            return
        # A closed loop raises: its timers never fire.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(handle.cancel, context=contextvars.Context())


class _ThreadTimer(Timer):
    """A deadline on the dispatcher thread, for interrupts created where no loop runs."""

    __slots__ = ("at", "over")

    def __init__(self, interrupt: Source, delay_s: float) -> None:
        super().__init__(interrupt, delay_s)
        self.at = time.monotonic() + delay_s
        self.over = False
        dispatcher.start()
        dispatcher.post(self.enter)

    def enter(self) -> None:
        """Start the timer, on the dispatcher thread."""
        if not self.over:
            heapq.heappush(dispatcher.timers, (self.at, next(dispatcher.serial), self))

    def fire(self) -> None:
        self.over = True
        super().fire()

    def cancel(self) -> None:
        if not self.over:
            self.over = True
            dispatcher.post(dispatcher.tidy)


def start_timer(delay_s: float, interrupt: Source) -> Timer:
    """Trigger `interrupt` in `delay_s` seconds, by the running loop's clock or, without a loop, the dispatcher's."""
    loop = _get_running_loop()
    return _ThreadTimer(interrupt, delay_s) if loop is None else _LoopTimer(interrupt, delay_s, loop)


class CallbackDispatcher:
    """The single thread that runs callbacks and deadlines that belong to no loop; started on first use.

    Only that thread uses `timers`.
    """

    def __init__(self) -> None:
        self.timers: list[tuple[float, int, _ThreadTimer]] = []
        self.serial = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._starter: dict[str, object] = {}
        self._cancelled = 0

    def start(self) -> None:
        """Start the thread, unless it was already started."""
        me = object()
        if not self._starter and self._starter.setdefault("thread", me) is me:
            threading.Thread(target=self._run, name="holdfast-dispatcher", daemon=True).start()

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the dispatcher thread, which must have been started. Lock-free."""
        self._inbox.put(call)

    def tidy(self) -> None:
        """Count a cancelled timer; once most timers are cancelled, remove the cancelled ones."""
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self.timers):
            self.timers = [entry for entry in self.timers if not entry[2].over]
            heapq.heapify(self.timers)
            self._cancelled = 0

    def _run(self) -> None:
        while True:
            self._run_next()

    def _run_next(self) -> None:
        """Fire due timers, then run the next call. In its own frame, so that the waiting thread keeps nothing alive."""
        while self.timers and self.timers[0][0] <= time.monotonic():
            timer = heapq.heappop(self.timers)[2]
            if not timer.over:
                timer.fire()
        idle_s = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=idle_s)()


dispatcher = CallbackDispatcher()


def _start_anew_after_fork() -> None:
    # The child has neither the thread nor its waiters.
    global dispatcher
    dispatcher = CallbackDispatcher()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew_after_fork)
