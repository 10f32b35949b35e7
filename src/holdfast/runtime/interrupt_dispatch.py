"""Carries an interrupt to those who cannot be woken in place: event loops, callbacks and timers.

Invariants
- Everything that `Interrupt.trigger` calls here is free of locks: it may run in a signal handler, in `__del__` or in a
  callback, on top of any other call of this module in the same thread.
- A loop is visited with one `call_soon_threadsafe` per trigger, however many waiters it has; it then works in chunks of
  `CHUNK`, one per tick, so that other work of the loop runs in between.
- A callback never runs inside `trigger`. It runs on its loop, or on the dispatcher thread, at most once.
- The dispatcher thread is started when something is registered, never by a trigger.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from holdfast.runtime.interrupt import Interrupt

__all__ = ["CHUNK", "Hops", "LoopTimer", "Registration", "ThreadTimer", "Timer", "dispatcher", "start_timer"]

CHUNK = 2_000
"""How many waiters of a loop are woken in one tick."""

_log = logging.getLogger("holdfast.runtime")

Loop = asyncio.AbstractEventLoop
FutureGroup = dict[asyncio.Future[None], None]


class Registration:
    """A callback that is registered with an interrupt; made by `Interrupt.on_trigger`.

    `close()` takes it back; leaving it as a context manager does so too. Safe from any thread.
    """

    __slots__ = ("_context", "_fn", "_interrupt", "loop")

    def __init__(self, interrupt: Interrupt, fn: Callable[[Cause], object], loop: Loop | None) -> None:
        self._interrupt = interrupt
        self._fn = fn
        self._context = contextvars.copy_context()
        self.loop = loop

    def close(self) -> None:
        """Take the callback back: it does not start any more. Does nothing when it has run or was closed before."""
        self._interrupt._callbacks.pop(self, None)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self) -> None:
        """Run the callback, unless it has run or was closed. Its error is reported, not raised."""
        if self._interrupt._callbacks.pop(self, self) is self:
            return
        cause = self._interrupt.cause
        assert cause is not None
        try:
            self._context.run(self._fn, cause)
        except Exception as error:
            message = f"the callback {self._fn!r} of interrupt {self._interrupt.name!r} raised"
            if self.loop is None:
                _log.error(message, exc_info=error)
            else:
                self.loop.call_exception_handler({"message": message, "exception": error})


def wake(futures: Iterable[asyncio.Future[None]]) -> None:
    """Let the tasks go that wait on these futures. Only on their loop's thread."""
    for future in futures:
        if not future.done():
            future.set_result(None)


class _Visit:
    """The work of one trigger on one loop, done in chunks."""

    __slots__ = ("_futures", "_loop", "_registrations")

    def __init__(self, loop: Loop, groups: list[FutureGroup], registrations: list[Registration]) -> None:
        self._loop = loop
        self._futures: Iterator[asyncio.Future[None]] = itertools.chain.from_iterable(map(list, groups))
        self._registrations = iter(registrations)

    def __call__(self) -> None:
        done = 0
        for registration in itertools.islice(self._registrations, CHUNK):
            registration.run()
            done += 1
        chunk = list(itertools.islice(self._futures, CHUNK - done))
        wake(chunk)
        if done + len(chunk) == CHUNK:
            self._loop.call_soon(self, context=contextvars.Context())


class Hops:
    """What one trigger has to wake, sorted by where it lives."""

    __slots__ = ("_groups", "_registrations", "_threads")

    def __init__(self) -> None:
        self._groups: dict[Loop, list[FutureGroup]] = {}
        self._registrations: dict[Loop, list[Registration]] = {}
        self._threads: list[Registration] = []

    def add_group(self, loop: Loop, group: FutureGroup) -> None:
        """Wake the waiting tasks of `group`, all of which live on `loop`."""
        self._groups.setdefault(loop, []).append(group)

    def add_registration(self, registration: Registration) -> None:
        """Run the callback on its loop, or on the dispatcher thread."""
        if registration.loop is None:
            self._threads.append(registration)
        else:
            self._registrations.setdefault(registration.loop, []).append(registration)

    def go(self) -> None:
        """Set everybody going and return at once."""
        for registration in self._threads:
            dispatcher.post(registration.run)
        self._wake_in_place()
        for loop in self._groups.keys() | self._registrations.keys():
            visit = _Visit(loop, self._groups.get(loop, []), self._registrations.get(loop, []))
            try:
                loop.call_soon_threadsafe(visit, context=contextvars.Context())
            except RuntimeError:
                # The loop is closed: whoever waited there is gone with it.
                continue

    def _wake_in_place(self) -> None:
        """Wake a few waiters of the running loop without a hop.

        Only inside the step of a task: there the loop is certain to look at its ready queue again before it sleeps.
        Anywhere else on its thread this may be a signal handler that came just before the loop's `select`.
        """
        loop = asyncio._get_running_loop()
        if loop is None or loop not in self._groups or asyncio.current_task(loop) is None:
            return
        groups = self._groups[loop]
        if sum(map(len, groups)) > CHUNK:
            return
        for group in groups:
            wake(list(group))
        del self._groups[loop]


class Timer:
    """A deadline that is running for an interrupt; it does not keep the interrupt alive."""

    __slots__ = ()

    def cancel(self) -> None:
        """Stop it, from any thread. Does nothing when it has fired."""
        raise NotImplementedError


class LoopTimer(Timer):
    """A deadline on an event loop's clock."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, loop: Loop, delay_s: float, target: weakref.ref[Interrupt]) -> None:
        self._loop = loop
        self._handle = loop.call_later(delay_s, _expire, target, delay_s, context=contextvars.Context())

    def cancel(self) -> None:
        if asyncio._get_running_loop() is self._loop:
            self._handle.cancel()
            return
        try:
            self._loop.call_soon_threadsafe(self._handle.cancel, context=contextvars.Context())
        except RuntimeError:
            # The loop is closed: its timers will never fire.
            return


class ThreadTimer(Timer):
    """A deadline on the dispatcher thread, for interrupts that are made where no loop runs."""

    __slots__ = ("at", "cancelled", "delay_s", "target")

    def __init__(self, delay_s: float, target: weakref.ref[Interrupt]) -> None:
        self.at = time.monotonic() + delay_s
        self.delay_s = delay_s
        self.target = target
        self.cancelled = False

    def __lt__(self, other: ThreadTimer) -> bool:
        return self.at < other.at

    def cancel(self) -> None:
        self.cancelled = True
        dispatcher.post(dispatcher.forget)


def _expire(target: weakref.ref[Interrupt], delay_s: float) -> None:
    interrupt = target()
    if interrupt is not None:
        interrupt.trigger(f"the deadline of {delay_s:g} s is over", kind="deadline")


def start_timer(delay_s: float, interrupt: Interrupt) -> Timer:
    """Trigger `interrupt` in `delay_s` seconds, unless the timer is cancelled or the interrupt is released before."""
    timers: list[Timer] = []

    def released(_: weakref.ref[Interrupt]) -> None:
        for timer in timers:
            timer.cancel()

    target = weakref.ref(interrupt, released)
    loop = asyncio._get_running_loop()
    timer: Timer
    if loop is None:
        timer = ThreadTimer(delay_s, target)
        dispatcher.start()
        dispatcher.post_timer(timer)
    else:
        timer = LoopTimer(loop, delay_s, target)
    timers.append(timer)
    return timer


class _Dispatcher:
    """The one thread that runs callbacks and deadlines which belong to no loop; started when first needed."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], object] | ThreadTimer] = queue.SimpleQueue()
        self._starter: dict[str, object] = {}
        self._timers: list[ThreadTimer] = []
        self._cancelled = 0

    def start(self) -> None:
        """Start the thread, once."""
        me = object()
        if not self._starter and self._starter.setdefault("thread", me) is me:
            threading.Thread(target=self._loop, name="holdfast-dispatcher", daemon=True).start()

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the thread. Free of locks; the thread must have been started."""
        self._inbox.put(call)

    def post_timer(self, timer: ThreadTimer) -> None:
        """Fire `timer` when its time has come, unless it is cancelled before."""
        self._inbox.put(timer)

    def forget(self) -> None:
        """Note that a timer was cancelled, and drop those that were once they are many. Runs on the thread."""
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer.cancelled]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def pending_timers(self) -> int:
        """How many timers run that nobody has cancelled."""
        return sum(not timer.cancelled for timer in tuple(self._timers))

    def _loop(self) -> None:
        while True:
            item = self._next()
            if isinstance(item, ThreadTimer):
                heapq.heappush(self._timers, item)
            elif item is not None:
                item()
            # Nothing of what was handled may stay alive in this frame while the thread waits.
            del item
            self._fire_due()

    def _next(self) -> Callable[[], object] | ThreadTimer | None:
        try:
            if not self._timers:
                return self._inbox.get()
            return self._inbox.get(timeout=max(0.0, self._timers[0].at - time.monotonic()))
        except queue.Empty:
            return None

    def _fire_due(self) -> None:
        while self._timers and (self._timers[0].cancelled or self._timers[0].at <= time.monotonic()):
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                _expire(timer.target, timer.delay_s)


dispatcher = _Dispatcher()


def _forget_dispatcher_after_fork() -> None:
    dispatcher.__init__()  # type: ignore[misc]  # the thread is not in the child; the object is known everywhere


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_dispatcher_after_fork)
