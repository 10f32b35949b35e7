"""Keeps real threads, processes, sockets and blocking waits out of an explored schedule, and says what to use instead.

Invariants:

- Only threads of a schedule (the one that runs an `ExploredLoop` at that moment, and those that belong to it) are
  refused anything; all other threads go on as before.
- A refusal is kept by the loop: a test that catches it fails all the same.
- What is patched is put back when the exploration is over; the audit hook stays and does nothing outside of one.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.testing.loop import ExploredLoop
from holdfast.testing.strands import strands_here

__all__ = ["collect_some_garbage", "garbage_left", "real_world_closed"]

_MUCH_GARBAGE = 20_000
_DOUBLE = "hand it an in-memory double (a queue, a StreamReader fed by the test, store memory://)"
_REFUSED = {
    "_thread.start_new_thread": "",
    "os.fork": "a process",
    "os.forkpty": "a process",
    "os.posix_spawn": "a process",
    "os.system": "a process",
    "subprocess.Popen": "a process",
    "socket.bind": "a socket",
    "socket.connect": "a socket",
    "socket.getaddrinfo": "a name server",
    "socket.gethostbyname": "a name server",
    "socket.sendto": "a socket",
}

_audit_installed = False


# What the garbage collector frees in the middle of a schedule may cancel timers or run callbacks.


@contextmanager
def garbage_left() -> Iterator[None]:
    """Keep the garbage collector out."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:  # else the most is frozen already, and what comes on top could never be told apart and let go
        gc.freeze()  # what was there before need not be looked at between schedules
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


def collect_some_garbage() -> None:
    """Between two schedules: let the collector in, if it is worth it."""
    if gc.get_count()[0] > _MUCH_GARBAGE:
        gc.collect()


def _explored_loop() -> ExploredLoop | None:
    strands = strands_here()
    return None if strands is None else strands.loop


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _REFUSED and (loop := _explored_loop()) is not None:
        if event == "_thread.start_new_thread":
            loop._refuse_thread()
        loop._refuse(
            f"{event}: the explored test reaches for {_REFUSED[event]}, which no schedule can repeat; "
            f"{_DOUBLE}, or test that part with asyncio.run"
        )


@contextmanager
def real_world_closed() -> Iterator[None]:
    """Refuse what no schedule can repeat, in the thread that explores."""
    global _audit_installed
    if not _audit_installed:
        _audit_installed = True
        sys.addaudithook(_audit)
    start_thread, sleep, wait = threading.Thread.start, time.sleep, threading.Condition.wait

    def guarded_start(thread: threading.Thread) -> None:
        if (loop := _explored_loop()) is not None:
            loop._refuse_thread()
        start_thread(thread)

    def guarded_sleep(seconds: float, /) -> None:
        strands = strands_here()
        if strands is not None and strands.running is not None:
            strands.sleep(seconds)
        elif strands is None or not seconds:
            sleep(seconds)
        else:
            strands.loop._refuse(
                f"time.sleep({seconds}) stops the whole loop, and the explored time does not move; "
                "use `await asyncio.sleep(…)`, which costs no real time here"
            )

    def guarded_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is None and (strands := strands_here()) is not None and strands.running is None:
            strands.loop._refuse(
                "a wait of threads without a timeout (threading.Event or Condition, queue.Queue.get, Future.result of "
                "concurrent.futures): under the explorer there is no other thread that could end it; "
                "await an asyncio.Event, asyncio.Queue or a future, or use holdfast.runtime's Interrupt"
            )
        return wait(condition, timeout)

    threading.Thread.start = guarded_start  # type: ignore[method-assign, assignment]
    time.sleep = guarded_sleep  # type: ignore[assignment]
    threading.Condition.wait = guarded_wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start_thread  # type: ignore[method-assign]
        time.sleep = sleep
        threading.Condition.wait = wait  # type: ignore[method-assign]
