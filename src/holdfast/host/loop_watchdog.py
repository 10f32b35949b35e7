"""Detect code that blocks the host's event loop and thereby delays all users, and report the loop's stack."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

from holdfast.clock import system_clock
from holdfast.runtime import Interrupt

__all__ = ["LoopWatchdog"]


class LoopWatchdog:
    """Pings the loop periodically from a separate thread.

    Parameters:
        loop: the loop to watch; `start` must be called on the loop's thread.
        limit_s: maximum response time of the loop, in seconds.
        report: callback, called with `limit_s` and the loop's stack once for each late response, on the watchdog's
            thread.
        recovered: callback, called with the response time in seconds once a late response has come, on the watchdog's
            thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limit_s: float,
        report: Callable[[float, traceback.StackSummary], object],
        recovered: Callable[[float], object],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._report = report
        self._recovered = recovered
        self._end = Interrupt(name="loop watchdog")
        self._answered = 0
        self._answered_at = 0.0
        self._loop_thread = 0

    def start(self) -> None:
        """Start watching the loop."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="holdfast loop watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching the loop, without waiting for the watchdog's thread to end."""
        self._end.trigger("the host is closing", kind="shutdown")

    def _watch(self) -> None:
        asked = 0
        while not self._end.triggered:
            asked += 1
            asked_at = system_clock.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answer, asked)
            except RuntimeError:
                return  # the loop is closed
            if self._end.wait_blocking(self._limit_s) is None and self._answered < asked:
                self._report(self._limit_s, self._stack())
                while self._answered < asked and self._end.wait_blocking(self._limit_s) is None:
                    pass
                if self._answered >= asked:
                    self._recovered(self._answered_at - asked_at)

    def _answer(self, asked: int) -> None:
        self._answered_at = system_clock.monotonic()
        self._answered = asked

    def _stack(self) -> traceback.StackSummary:
        frame = sys._current_frames().get(self._loop_thread)
        walked = reversed(list(traceback.walk_stack(frame))) if frame is not None else ()
        return traceback.StackSummary.extract(walked)
