"""The deadline of a scope, which can be paused."""

from __future__ import annotations

import asyncio
import contextvars

from holdfast.runtime.interrupt.interrupt import Interrupt

__all__ = ["Deadline"]


class Deadline:
    """Triggers an interrupt after a time on the loop's clock. Use it on the loop only.

    Parameters:
        delay_s: time until the trigger, in seconds.
        interrupt: interrupt to trigger.
        loop: loop whose clock counts.
    """

    __slots__ = ("_at", "_delay_s", "_interrupt", "_loop", "_paused_at", "_pauses", "_timer")

    def __init__(self, delay_s: float, interrupt: Interrupt, loop: asyncio.AbstractEventLoop) -> None:
        self._delay_s = delay_s
        self._interrupt = interrupt
        self._loop = loop
        self._pauses = 0
        self._paused_at = 0.0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._run(delay_s)

    def _run(self, left_s: float) -> None:
        self._at = self._loop.time() + left_s
        self._timer = self._loop.call_at(self._at, self._expire, context=contextvars.Context())

    def _expire(self) -> None:
        self._interrupt.trigger(f"deadline of {self._delay_s:g} s exceeded", kind="deadline")

    def pause(self) -> None:
        """Pause until `resume` has been called as many times as `pause`."""
        self._pauses += 1
        if self._pauses == 1 and self._timer is not None:
            self._timer.cancel()
            self._paused_at = self._loop.time()

    def resume(self) -> None:
        """Undo one `pause`; after the last one, continue with the time that was left at the first `pause`."""
        self._pauses -= 1
        if self._pauses == 0 and self._timer is not None:
            self._run(self._at - self._paused_at)

    def cancel(self) -> None:
        """Cancel the deadline permanently."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
