"""Clock interface through which Holdfast reads the time, so that tests and the explorer can replace the clock."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "system_clock"]


class Clock(Protocol):
    """Wall-clock and monotonic time, both in seconds. Safe to call from any thread."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since the epoch, which may jump in either direction."""
        ...

    def monotonic(self) -> float:
        """Return the monotonic time in seconds since an arbitrary point in the past."""
        ...


class SystemClock:
    """The operating system's clocks."""

    __slots__ = ()
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


system_clock: Clock = SystemClock()
