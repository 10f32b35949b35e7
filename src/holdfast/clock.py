"""The only source of time, so that tests and the explorer can replace it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "system_clock"]


class Clock(Protocol):
    """Wall-clock and monotonic time, both in seconds. Safe to call from any thread."""

    def now(self) -> float:
        """Return seconds since the epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Return seconds since some point in the past; never goes back."""
        ...


class SystemClock:
    """The operating system's clocks."""

    __slots__ = ()
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


system_clock: Clock = SystemClock()
