"""Bounds per principal: a token bucket for requests, and counts of event streams and of large bodies on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.clock import Clock, system_clock
from holdfast.errors import LimitExceeded, RateLimited

__all__ = ["LargeLimit", "RateLimit", "StreamLimit"]

_SWEEP_AT = 10_000


class RateLimit:
    """A token bucket for each principal: `rate_per_s` in the long run, twice that in a burst. Of one loop.

    Parameters:
        rate_per_s: requests per second; 0 takes the limit away.
        clock: where the time comes from.
    """

    __slots__ = ("_buckets", "_burst", "_clock", "_rate", "_sweep_at")

    def __init__(self, rate_per_s: float, clock: Clock = system_clock) -> None:
        self._rate = rate_per_s
        self._burst = max(1.0, 2 * rate_per_s)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._sweep_at = _SWEEP_AT

    def take(self, principal: str) -> None:
        """Count one request. Raises `RateLimited` with the time after which there is room again."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        tokens, at = self._buckets.get(principal, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._rate)
        if tokens < 1.0:
            self._buckets[principal] = (tokens, now)
            error = RateLimited(f"more than {self._rate:g} requests per second of {principal}")
            error.retry_after_s = (1.0 - tokens) / self._rate
            raise error
        self._buckets[principal] = (tokens - 1.0, now)
        if len(self._buckets) > self._sweep_at:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Forget full buckets: they are as good as new ones."""
        self._buckets = {
            principal: (tokens, at)
            for principal, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * self._rate < self._burst
        }
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._buckets))


class StreamLimit:
    """How many event streams each principal has open. Of one loop."""

    __slots__ = ("_limit", "_open")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Open streams of everybody."""
        return sum(self._open.values())

    @contextmanager
    def one(self, principal: str) -> Iterator[None]:
        """Hold a place for one stream. Raises `LimitExceeded`."""
        count = self._open.get(principal, 0)
        if count >= self._limit:
            raise LimitExceeded(
                f"{principal} has {count} event streams open", hint="close some, or raise HOLDFAST_PRINCIPAL_STREAMS"
            )
        self._open[principal] = count + 1
        try:
            yield
        finally:
            left = self._open[principal] - 1
            if left:
                self._open[principal] = left
            else:
                del self._open[principal]


class LargeLimit:
    """How many large bodies each principal has on their way, in or out, and so in memory. Of one loop.

    Parameters:
        limit: so many at the same time.
    """

    __slots__ = ("_limit", "_open")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    @contextmanager
    def one(self, principal: str) -> Iterator[None]:
        """Hold a place. Raises `RateLimited`: there is one again soon, and clients come back by themselves."""
        if self._open[principal] >= self._limit:
            raise RateLimited(f"{principal} has {self._limit} large bodies on their way", hint="send fewer at once")
        self._open[principal] += 1
        try:
            yield
        finally:
            self._open[principal] -= 1
            if not self._open[principal]:
                del self._open[principal]
