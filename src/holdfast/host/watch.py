"""Detect agent code that blocks the host's event loop, and report where: all other users wait meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

from holdfast.runtime import Interrupt

__all__ = ["LoopWatch"]

STACK_DEPTH = 12


class LoopWatch:
    """Asks the loop for an answer again and again, from a thread of its own.

    Parameters:
        loop: the loop to watch; `start` must be called on it.
        limit_s: how long it may take to answer.
        report: called on the watching thread, once for each time that it did not: the seconds so far, the stack.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, limit_s: float, report: Callable[[float, tuple[str, ...]], object]
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._report = report
        self._end = Interrupt(name="loop watch")
        self._answered = 0
        self._loop_thread = 0

    def start(self) -> None:
        """Begin."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="holdfast loop watch", daemon=True).start()

    def close(self) -> None:
        """End; the thread ends by itself."""
        self._end.trigger("the host closes", kind="shutdown")

    def _watch(self) -> None:
        asked = 0
        while not self._end.triggered:
            asked += 1
            try:
                self._loop.call_soon_threadsafe(self._answer, asked)
            except RuntimeError:
                return  # the loop is closed
            if self._end.wait_blocking(self._limit_s) is None and self._answered < asked:
                self._report(self._limit_s, self._stack())
            while self._answered < asked and self._end.wait_blocking(self._limit_s) is None:
                pass

    def _answer(self, asked: int) -> None:
        self._answered = asked

    def _stack(self) -> tuple[str, ...]:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return ()
        return tuple(line.rstrip() for line in traceback.format_stack(frame)[-STACK_DEPTH:])
