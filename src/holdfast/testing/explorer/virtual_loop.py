"""An event loop without I/O, in virtual time and in asyncio's own order.

Invariants:

- A loop runs one handle per iteration. If nothing can run, the time jumps to the next timer.
- `VirtualLoop` runs handles strictly in asyncio's order. Foreign threads may call `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextvars import Context, copy_context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from holdfast.testing.asyncio_internals import BareLoop, LoopTimer, expect_pending, run_handle
from holdfast.testing.explorer.failures import Deadlock, Livelock, NotExplorable, describe_task

__all__ = ["VirtualLoop"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_START_S = 1_000.0
_SAME_INSTANT_S = 1e-9
# Real time that a stuck loop waits for a thread to wake it. The first value applies if a thread has started since the
# test began or runs an executor call; the second if all threads are older, as these may be unrelated.
_PATIENCE_S = 10.0
_PATIENCE_WITH_OLD_THREADS_S = 1.0
_MANY_CANCELLED = 100


class VirtualLoop(BareLoop):
    """An asyncio loop without I/O, in virtual time, that runs handles in asyncio's own order.

    ``time()`` does not advance while a handle can run, and otherwise jumps to the next timer. Executor calls run in
    real threads; ``time()`` does not advance during a call.

    Parameters:
        max_steps: maximum number of handles to run; a further handle raises `Livelock`.
    """

    virtual = True
    """Tells the runtime not to watch this loop by the real clock, and not to look for programs that the loop starts."""

    def __init__(self, *, max_steps: int = 1_000_000) -> None:
        super().__init__()
        self.steps = 0
        self.max_steps = max_steps
        self.errors: list[dict[str, Any]] = []
        self.home = threading.get_ident()
        self.now = _START_S
        self._timers: list[tuple[float, int, LoopTimer]] = []
        self._timers_made = 0
        self._timers_cancelled = 0
        self._threads_busy = 0
        self._inbox: deque[asyncio.Handle] = deque()
        self._bell = threading.Event()
        self._old_threads: frozenset[threading.Thread] = frozenset()
        self._fifo: deque[asyncio.Handle] = deque()

    # time

    def time(self) -> float:
        """Return the virtual time in seconds, which starts at 1000."""
        return self.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer as asyncio does; timers with the same deadline fire in the order in which they were set."""
        timer = self.make_timer(when, callback, args, context)
        self.set_timer(timer)
        return timer

    def set_timer(self, timer: LoopTimer) -> None:
        """Schedule a timer."""
        self._timers_made += 1
        timer.is_scheduled = True
        heapq.heappush(self._timers, (timer.when(), self._timers_made, timer))

    def make_timer(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], context: Context | None
    ) -> LoopTimer:
        """Return a timer that is not set yet."""
        return LoopTimer(when, callback, args, self, context)

    def on_timer_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Count a cancelled timer, and remove all cancelled timers once there are many."""
        self._timers_cancelled += 1
        if self._timers_cancelled > _MANY_CANCELLED and self._timers_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def next_timer(self) -> float | None:
        """Return the time at which the next timer fires, or None if no timer is set."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        return timers[0][0] if timers else None

    def pass_time(self) -> bool:
        """Jump to the next timer, and make all timers of that instant runnable; return False if no timer is set."""
        when = self.next_timer()
        if when is None:
            return False
        self.now = max(self.now, when)
        last = self.now + _SAME_INSTANT_S
        timers = self._timers
        while timers and timers[0][0] <= last:
            timer = heapq.heappop(timers)[2]
            if timer.cancelled():
                self._timers_cancelled -= 1
            else:
                timer.is_scheduled = False
                self.make_runnable(timer)
        return True

    # handles

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does, but refuse calls from other threads even outside debug mode."""
        self.check_open()
        if threading.get_ident() != self.home:
            self.refuse("call_soon was called from another thread; use call_soon_threadsafe")
        handle = asyncio.Handle(callback, args, self, context)
        self._fifo.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback from any thread, as asyncio does."""
        if threading.get_ident() == self.home:
            return self.call_soon(callback, *args, context=context)
        self.check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._inbox.append(handle)
        self._bell.set()
        return handle

    def make_runnable(self, handle: asyncio.Handle) -> None:
        """Queue a handle after the handles that can already run."""
        self._fifo.append(handle)

    def run_step(self) -> None:
        """Run one handle; if no handle can run, wait for a thread or advance the time first."""
        self._count_step()
        while self._inbox:
            self._fifo.append(self._inbox.popleft())
        if not self._fifo:
            if self._threads_busy or self.next_timer() is None:
                # Only another thread can continue; give it real time.
                if not self._bell.wait(self._patience_s()):
                    raise Deadlock
                self._bell.clear()
                return
            self.pass_time()
        handle = self._fifo.popleft()
        if not handle.cancelled():
            run_handle(handle)

    def _patience_s(self) -> float:
        if self._threads_busy or not self._old_threads.issuperset(threading.enumerate()):
            return _PATIENCE_S
        return _PATIENCE_WITH_OLD_THREADS_S if len(self._old_threads) > 1 else 0.0

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > self.max_steps:
            raise Livelock

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Run ``func`` in an executor as asyncio does; the time does not advance until the call returns."""
        future = super().run_in_executor(executor, func, *args)
        self._threads_busy += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: object) -> None:
        self._threads_busy -= 1

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an error that asyncio would only log, so that the run fails."""
        self.errors.append(context)

    # running

    def run_main(self, test: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Run ``test()`` as the task ``main`` until it is done, then run everything that is still due at that instant.

        Return the main task.

        Raises:
            Deadlock: if nothing can run and no timer is set.
            Livelock: if the run takes more than ``max_steps`` steps.
            NotExplorable: if the test does real I/O, starts a process, or calls `call_soon` from another thread.
            TypeError: if ``test()`` does not return a coroutine.
        """
        main: list[asyncio.Task[Any]] = []

        def begin() -> None:
            coro = test()
            if not asyncio.iscoroutine(coro):
                raise TypeError(f"expected a coroutine, such as an `async def` returns; the test returned {coro!r}")
            main.append(self.create_task(coro, name="main"))

        self.note_threads()
        self._inside(lambda: copy_context().run(begin), lambda: main[0].done())
        self.settle()
        return main[0]

    def note_threads(self) -> None:
        """Record the threads that existed before the test."""
        self._old_threads = frozenset(threading.enumerate())

    def settle(self) -> None:
        """Run everything that can still run at this instant, in asyncio's order; no time passes."""
        if self.can_run():
            self._inside(lambda: None, lambda: not self.can_run())

    def can_run(self) -> bool:
        """Whether a handle can run at this instant."""
        return bool(self._fifo or self._inbox)

    def unwind(self, steps: int = 10_000) -> None:
        """Cancel the remaining tasks and let them end, so that no pending task is destroyed."""
        self.max_steps = self.steps + steps
        left = self.unfinished()

        def begin() -> None:
            for task in left:
                task.cancel()
            if self.has_generators:
                left.append(self.create_task(self.shutdown_asyncgens(), name="close generators"))

        if not left and not self.has_generators:
            return
        try:
            self._inside(begin, lambda: all(task.done() for task in left))
        except (Deadlock, Livelock, NotExplorable):
            pass  # the original failure is reported; tasks that do not end are dropped silently
        for task in left:
            expect_pending(task)

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of this loop that are not done."""
        return list(asyncio.all_tasks(self))

    def left_over(self) -> str:
        """Describe the tasks that the test left unfinished."""
        left = len(self.unfinished())
        return f"{left} of its tasks" if left else ""

    def described(self) -> list[str]:
        """Describe the unfinished tasks and where each waits."""
        return [describe_task(task) for task in self.unfinished()]

    def unretrieved(self) -> list[dict[str, Any]]:
        """Return errors from callbacks, and from finished tasks whose result was never retrieved."""
        gc.collect()
        return self.errors

    def _inside(self, begin: Callable[[], None], is_finished: Callable[[], bool]) -> None:
        self.run_until(begin, is_finished, self.home)

    def on_wakeup(self) -> None:
        """Wake the loop if it is waiting for a thread."""
        self._bell.set()

    def refuse(self, text: str) -> NoReturn:
        """Raise `NotExplorable`."""
        raise NotExplorable(text)


def _refusing(name: str) -> Callable[..., Any]:
    def refused(self: VirtualLoop, *args: Any, **kwargs: Any) -> Any:
        self.refuse(
            f"loop.{name} needs real input and output, which a virtual loop does not have; "
            "hand the code under test an in-memory double (a queue, a StreamReader fed by the test, store memory://), "
            "or run this test with asyncio.run"
        )

    refused.__name__ = name
    return refused


for _name in (
    "add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler",
    "sock_recv", "sock_recv_into", "sock_recvfrom", "sock_sendall", "sock_sendto", "sock_connect", "sock_accept",
    "create_connection", "create_server", "create_unix_connection", "create_unix_server", "create_datagram_endpoint",
    "connect_accepted_socket", "start_tls", "sendfile", "sock_sendfile", "connect_read_pipe", "connect_write_pipe",
    "subprocess_exec", "subprocess_shell", "getaddrinfo", "getnameinfo",
):  # fmt: skip
    setattr(VirtualLoop, _name, _refusing(_name))
