"""Clocks for tests: `VirtualClock` follows an event loop's time; `ManualClock` is set by the test."""

from __future__ import annotations

import asyncio

__all__ = ["ManualClock", "VirtualClock"]

_EPOCH_S = 1_750_000_000.0


class VirtualClock:
    """A `holdfast.clock.Clock` that follows an event loop's time, which is virtual under `explore` and `run_virtual`.

    Parameters:
        loop: the loop to follow; None selects the running loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = asyncio.get_running_loop() if loop is None else loop

    def now(self) -> float:
        """Return the time in seconds since the epoch: a fixed start in 2025 plus the loop's time."""
        return _EPOCH_S + self._loop.time()

    def monotonic(self) -> float:
        """Return the loop's time, in seconds."""
        return self._loop.time()


class ManualClock:
    """A `holdfast.clock.Clock` that moves only when a test calls `advance` or `jump`.

    Parameters:
        now_s: initial time, in seconds since the epoch.
    """

    def __init__(self, now_s: float = _EPOCH_S) -> None:
        self._now_s = now_s
        self._monotonic_s = 0.0

    def now(self) -> float:
        """Return the time in seconds since the epoch."""
        return self._now_s

    def monotonic(self) -> float:
        """Return the total time, in seconds, that `advance` has added since the clock was created."""
        return self._monotonic_s

    def advance(self, delay_s: float) -> None:
        """Advance both the wall clock and the monotonic clock by ``delay_s`` seconds.

        Raises:
            ValueError: if ``delay_s`` is negative.
        """
        if delay_s < 0:
            raise ValueError(f"cannot go back by {-delay_s} s; use jump() to set back the wall clock")
        self._now_s += delay_s
        self._monotonic_s += delay_s

    def jump(self, delay_s: float) -> None:
        """Move only the wall clock by ``delay_s`` seconds, which may be negative, as a clock correction does."""
        self._now_s += delay_s
