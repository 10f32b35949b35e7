"""Guard that refuses real threads, processes, sockets and blocking waits in an explored schedule.

Invariants:

- Only the threads of a schedule are restricted: the thread that runs an `ExploredLoop`, and the threads that the
  schedule started. All other threads continue as before.
- The loop records each refusal, so a test that catches the error still fails.
- All patches are undone when the exploration is over; the audit hook stays installed, but does nothing outside an
  exploration.
"""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.testing.explorer.controlled_threads import strands_here
from holdfast.testing.explorer.stepped_loop import SteppedLoop

__all__ = ["collect_some_garbage", "garbage_left", "real_world_closed"]

_MUCH_GARBAGE = 20_000
_DOUBLE = "hand it an in-memory double (a queue, a StreamReader fed by the test, store memory://)"
_REFUSED = {
    "_thread.start_new_thread": "",
    "builtins.input": "the keyboard",
    "os.fork": "a process",
    "os.forkpty": "a process",
    "os.posix_spawn": "a process",
    "os.system": "a process",
    "subprocess.Popen": "a process",
    "socket.bind": "a socket",
    "socket.connect": "a socket",
    "socket.getaddrinfo": "a name server",
    "socket.gethostbyaddr": "a name server",
    "socket.gethostbyname": "a name server",
    "socket.getnameinfo": "a name server",
    "socket.sendmsg": "a socket",
    "socket.sendto": "a socket",
}

_audit_installed = False


# Garbage collection in the middle of a schedule could cancel timers or run callbacks.


@contextmanager
def garbage_left() -> Iterator[None]:
    """Disable the garbage collector within the block."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:  # else most is frozen already, and additions could not be distinguished and unfrozen
        gc.freeze()  # objects from before need not be examined between schedules
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


def collect_some_garbage() -> None:
    """Run the garbage collector between two schedules if many new objects exist."""
    if gc.get_count()[0] > _MUCH_GARBAGE:
        gc.collect()


def _explored_loop() -> SteppedLoop | None:
    strands = strands_here()
    return None if strands is None else strands.loop


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _REFUSED and (loop := _explored_loop()) is not None:
        if event == "_thread.start_new_thread":
            loop.refuse_thread()
        loop.refuse(
            f"{event}: the explored test reaches for {_REFUSED[event]}, which no schedule can repeat; "
            f"{_DOUBLE}, or test that part with asyncio.run"
        )


@contextmanager
def real_world_closed() -> Iterator[None]:
    """Refuse actions that no schedule can repeat, in the threads of an explored schedule."""
    global _audit_installed
    if not _audit_installed:
        _audit_installed = True
        sys.addaudithook(_audit)
    start_thread, sleep, wait = threading.Thread.start, time.sleep, threading.Condition.wait
    start_by_hand = _thread.start_new_thread

    def guarded_start(thread: threading.Thread) -> None:
        if (loop := _explored_loop()) is not None:
            loop.refuse_thread()
        start_thread(thread)

    def guarded_start_by_hand(*values: Any) -> int:  # raises no audit event before Python 3.12
        if (loop := _explored_loop()) is not None:
            loop.refuse_thread()
        return start_by_hand(*values)

    def guarded_sleep(seconds: float, /) -> None:
        strands = strands_here()
        if strands is not None and strands.running is not None:
            strands.sleep(seconds)
        elif strands is None or not seconds:
            sleep(seconds)
        else:
            strands.loop.refuse(
                f"time.sleep({seconds}) stops the whole loop, and the explored time does not move; "
                "use `await asyncio.sleep(…)`, which costs no real time here"
            )

    def guarded_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        waits = timeout is None or timeout > 0
        if waits and (strands := strands_here()) is not None and strands.running is None:
            strands.loop.refuse(
                "a wait of threads (threading.Event, Condition, Semaphore or Barrier, queue.Queue.get, Future.result "
                "of concurrent.futures) stops the whole loop, and the explored time does not move; "
                "await an asyncio.Event, asyncio.Queue or a future, or use holdfast.runtime's Interrupt; "
                "or wait in a thread that holdfast.testing.start_thread starts"
            )
        return wait(condition, timeout)

    threading.Thread.start = guarded_start  # type: ignore[method-assign, assignment]
    time.sleep = guarded_sleep  # type: ignore[assignment]
    threading.Condition.wait = guarded_wait  # type: ignore[method-assign, assignment]
    _thread.start_new_thread = guarded_start_by_hand
    try:
        yield
    finally:
        threading.Thread.start = start_thread  # type: ignore[method-assign]
        time.sleep = sleep
        threading.Condition.wait = wait  # type: ignore[method-assign]
        _thread.start_new_thread = start_by_hand
