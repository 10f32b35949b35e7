"""Budgets of a host: memory, connections, streams, stops and loop time, each with a share for each principal.

This is the one place where such things are charged and released. A `Charge` is what a principal holds of a resource; it
is a context manager and is released once. Rules:

- A principal at its share is refused, or waits, by itself: it never holds up another.
- While the host's limit is reached, principals wait in turn, each in its own order.
- Charging costs one dictionary look-up. What is small is not charged: up to ``FREE_BYTES`` each way belong to the
  connection, and the number of connections is bounded.

All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import NoReturn, TypeVar

import msgspec

from holdfast.clock import Clock, system_clock
from holdfast.errors import BudgetExceeded, HostBusy, RateLimited
from holdfast.settings import Settings

T = TypeVar("T")

__all__ = ["FREE_BYTES", "PAGE_BYTES", "UNKNOWN", "Budget", "BudgetUsage", "Budgets", "Charge", "LoopTime", "Rate"]

FREE_BYTES = 65_536
"""Bytes of one body that are not charged: they are part of what a connection costs."""
PAGE_BYTES = 262_144
"""Bytes of events or entries that are read from the store at a time."""
UNKNOWN = ""
"""The principal of connections that have not shown a valid key yet."""
_WAITERS = 1024
"""Charges of one principal that may wait at the same time."""
_SWEEP_AT = 10_000


class BudgetUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one budget.

    Parameters:
        used, limit: of the host.
        share: what one principal may hold.
        refused: how often a charge was refused.
        principals: who holds how much, the largest first; for a user key its own principal only.
    """

    used: float
    limit: float
    share: float
    refused: int
    principals: Mapping[str, float]


class Charge:
    """What one principal holds of a resource. Release it, or use it as a context manager; made by `Budget`."""

    __slots__ = ("_budget", "amount", "principal")

    def __init__(self, budget: Budget, principal: str, amount: int) -> None:
        self._budget = budget
        self.principal = principal
        self.amount = amount

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def grow(self, amount: int) -> None:
        """Charge `amount` more. Raises as `Budget.charge` does; what is held stays held."""
        self._budget._take(self.principal, amount)
        self.amount += amount

    def shrink(self, amount: int) -> None:
        """Give a part back, at most what is held."""
        amount = min(amount, self.amount)
        if amount:
            self.amount -= amount
            self._budget._give(self.principal, amount)

    def move(self, principal: str) -> None:
        """Charge it to `principal` instead, as when a connection has shown its key. Raises as `Budget.charge` does."""
        if principal != self.principal:
            self._budget._move(self.principal, principal, self.amount)
            self.principal = principal

    def release(self) -> None:
        """Give it all back. May be repeated."""
        self.shrink(self.amount)


class Budget:
    """One resource: a limit for the host and a share for each principal. Belongs to one event loop.

    Parameters:
        name: of the resource, in the plural, as in messages, metrics and ``doctor``.
        limit: what all principals may hold together.
        share: what one principal may hold.
        hint: what a caller at its share can do.
    """

    __slots__ = ("_held", "_hint", "_lined_up", "_refused", "_used", "limit", "name", "on_refused", "share")

    def __init__(self, name: str, *, limit: int, share: int, hint: str) -> None:
        self.name = name
        self.limit = limit
        self.share = min(share, limit)
        self._hint = hint
        self.on_refused: Callable[[str, str], None] | None = None
        """Called with who was refused, and why."""
        self._held: dict[str, int] = {}
        self._used = 0
        self._refused = 0
        self._lined_up: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def used(self) -> int:
        """What all principals hold."""
        return self._used

    def held(self, principal: str) -> int:
        """What one principal holds."""
        return self._held.get(principal, 0)

    def resize(self, *, limit: int, share: int) -> None:
        """Set other bounds, as when the number of descriptors is known. What is held stays held."""
        self.limit = limit
        self.share = min(share, limit)
        self._admit()

    def charge(self, principal: str, amount: int = 1) -> Charge:
        """Charge `amount` to `principal` at once.

        Raises:
            BudgetExceeded: the principal would hold more than its share.
            HostBusy: all principals together would hold more than the limit.
        """
        self._take(principal, amount)
        return Charge(self, principal, amount)

    async def wait_for(self, principal: str, amount: int, *, within_s: float) -> Charge:
        """Charge `amount`, waiting for room at most `within_s` seconds, in turn with the other principals.

        Raises:
            BudgetExceeded, HostBusy: as `charge`, after that time, or at once if it can never fit.
        """
        if self._has_room(principal, amount) and not self._lined_up:
            return self.charge(principal, amount)
        line = self._lined_up.setdefault(principal, deque())
        if amount > self.share or len(line) >= _WAITERS:
            if not line:
                del self._lined_up[principal]
            self._refuse(principal, amount)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (amount, admitted)
        line.append(place)
        self._admit()
        try:
            async with asyncio.timeout(within_s):
                await admitted
        except BaseException as error:
            if admitted.done() and not admitted.cancelled():
                self._give(principal, amount)
            else:
                self._leave(principal, place)
            if isinstance(error, TimeoutError):
                self._refuse(principal, amount)
            raise
        return Charge(self, principal, amount)

    def usage(self, principal: str | None = None) -> BudgetUsage:
        """A snapshot, with every principal or with the given one only."""
        if principal is None:
            held = dict(sorted(self._held.items(), key=lambda one: -one[1])[:20])
            return BudgetUsage(
                used=self._used, limit=self.limit, share=self.share, refused=self._refused, principals=held
            )
        mine = self.held(principal)
        return BudgetUsage(used=mine, limit=self.share, share=self.share, refused=0, principals={principal: mine})

    def _has_room(self, principal: str, amount: int) -> bool:
        return self._used + amount <= self.limit and self._held.get(principal, 0) + amount <= self.share

    def _take(self, principal: str, amount: int) -> None:
        held = self._held.get(principal, 0) + amount
        if held > self.share or self._used + amount > self.limit:
            self._refuse(principal, amount)
        self._held[principal] = held
        self._used += amount

    def _give(self, principal: str, amount: int) -> None:
        held = self._held[principal] - amount
        if held:
            self._held[principal] = held
        else:
            del self._held[principal]
        self._used -= amount
        if self._lined_up:
            self._admit()

    def _move(self, old: str, new: str, amount: int) -> None:
        held = self._held.get(new, 0) + amount
        if held > self.share:
            self._refuse(new, amount)
        self._held[new] = held
        self._used += amount
        self._give(old, amount)

    def _refuse(self, principal: str, amount: int) -> NoReturn:
        self._refused += 1
        held = self._held.get(principal, 0)
        whose = principal or "connections without a key"
        if held + amount > self.share:
            text = f"{whose}: {held:,} of {self.share:,} {self.name} in use"
            if self.on_refused is not None:
                self.on_refused(principal, text)
            raise BudgetExceeded(text, hint=self._hint)
        raise HostBusy(f"the host has {self._used:,} of {self.limit:,} {self.name} in use")

    def _admit(self) -> None:
        """Let in who waits: principals in turn, each in its own order; one that has no room holds up nobody else."""
        moved = True
        while moved and self._lined_up:
            moved = False
            for principal in list(self._lined_up):
                line = self._lined_up[principal]
                while line and line[0][1].done():
                    line.popleft()
                if line and self._has_room(principal, line[0][0]):
                    amount, admitted = line.popleft()
                    self._take(principal, amount)
                    admitted.set_result(None)
                    moved = True
                    self._lined_up[principal] = self._lined_up.pop(principal)  # the others are first now
                if not line:
                    del self._lined_up[principal]

    def _leave(self, principal: str, place: tuple[int, asyncio.Future[None]]) -> None:
        line = self._lined_up.get(principal)
        if line is not None and place in line:
            line.remove(place)
            if not line:
                del self._lined_up[principal]
            self._admit()


class Rate:
    """A token bucket for each principal: `rate_per_s` in the long run, twice that in a burst. Of one event loop.

    Parameters:
        name: what is counted, in the plural.
        rate_per_s: how many per second; 0 takes the limit away.
        clock: where the time comes from.
    """

    __slots__ = ("_buckets", "_burst", "_clock", "_name", "_rate", "_sweep_at")

    def __init__(self, name: str, rate_per_s: float, clock: Clock = system_clock) -> None:
        self._name = name
        self._rate = rate_per_s
        self._burst = max(1.0, 2 * rate_per_s)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._sweep_at = _SWEEP_AT

    def take(self, principal: str) -> None:
        """Count one. Raises `RateLimited` with the time after which there is room again."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        tokens, at = self._buckets.get(principal, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._rate)
        if tokens < 1.0:
            self._buckets[principal] = (tokens, now)
            error = RateLimited(f"more than {self._rate:g} {self._name} per second of {principal}")
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


class LoopTime:
    """Seconds of the event loop that each principal's large answers took, and their pace. Belongs to one event loop.

    Work is cut into pieces of a few milliseconds. After a piece, its principal waits until it is within its share of
    the time again, so that what others send gets the loop in between.

    Parameters:
        share: seconds per second that one principal's large answers may take in the long run.
        clock: where the time comes from.
    """

    __slots__ = ("_clock", "_debt", "_share", "_total")

    def __init__(self, share: float, clock: Clock = system_clock) -> None:
        self._share = share
        self._clock = clock
        self._debt: dict[str, tuple[float, float]] = {}
        self._total: dict[str, float] = {}

    def spend(self, principal: str, seconds: float) -> float:
        """Charge a piece of work. Returns how long the principal's next piece has to wait, in seconds."""
        now = self._clock.monotonic()
        debt, at = self._debt.get(principal, (0.0, now))
        debt = max(0.0, debt - (now - at) * self._share) + seconds
        self._debt[principal] = (debt, now)
        self._total[principal] = self._total.get(principal, 0.0) + seconds
        if len(self._debt) > _SWEEP_AT:
            self._sweep(now)
        return debt / self._share if debt > _BURST_S else 0.0

    async def run(self, principal: str, work: Callable[[], bytes]) -> bytes:
        """Do one piece of work on the loop, charge its time, and give the others their turn."""
        began = self._clock.monotonic()
        done = work()
        await asyncio.sleep(self.spend(principal, self._clock.monotonic() - began))
        return done

    def usage(self, principal: str | None = None) -> BudgetUsage:
        """Seconds of the loop taken so far, by principal."""
        if principal is not None:
            mine = self._total.get(principal, 0.0)
            return BudgetUsage(used=mine, limit=self._share, share=self._share, refused=0, principals={principal: mine})
        total = dict(sorted(self._total.items(), key=lambda one: -one[1])[:20])
        return BudgetUsage(used=sum(self._total.values()), limit=1.0, share=self._share, refused=0, principals=total)

    def _sweep(self, now: float) -> None:
        self._debt = {
            principal: (debt, at) for principal, (debt, at) in self._debt.items() if debt > (now - at) * self._share
        }
        self._total = {principal: self._total[principal] for principal in self._debt}


_BURST_S = 0.02
"""Time of the loop that a principal may take before it has to wait."""
_LOOP_SHARE = 0.25
_COPIES = 3
"""A page is in memory as it was read, as events or entries, and encoded."""
_LISTINGS = 8
_EDITS = 64
_PRINCIPAL_EDITS = 4
_TELL_EVERY_S = 60.0
_STOPS = 10_000
_PRINCIPAL_STOPS = 1_000


class Budgets:
    """All budgets of a host, made of its settings.

    Parameters:
        settings: the limits and shares.
        clock: where the time comes from.
        report: called with a line for people when a principal is refused at its share, once a minute for each.
        memory: bytes of bodies and answers under way, in and out.
        connections: open connections, `UNKNOWN` ones included; the server sets the bounds when it has seen its
            descriptors.
        descriptors: file descriptors beside connections.
        streams: open event streams.
        stops: stops under way.
        listings: lists that are read whole, from the read until the answer is taken.
        edits: undo, compact and branch, each of which reads a transcript whole; a model may be at work meanwhile.
        reads: pages of transcripts that are read just now: how large one is shows only then.
        loop_time: seconds that large answers take of the loop.
        fires: schedules that fire.
    """

    def __init__(
        self, settings: Settings, clock: Clock = system_clock, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.memory = Budget(
            "bytes under way",
            limit=settings.memory_limit_bytes,
            share=settings.principal_memory_bytes,
            hint="read open answers, or send fewer large requests at once",
        )
        self.connections = Budget("connections", limit=2**31, share=2**31, hint="close some connections")
        self.descriptors = Budget("descriptors", limit=2**31, share=2**31, hint="close some connections")
        self.streams = Budget(
            "event streams",
            limit=2**31,
            share=settings.principal_streams,
            hint="close some, or raise HOLDFAST_PRINCIPAL_STREAMS",
        )
        self.stops = Budget("stops under way", limit=_STOPS, share=_PRINCIPAL_STOPS, hint="wait for some of them")
        self.listings = Budget("lists under way", limit=_LISTINGS, share=1, hint="ask for one list at a time")
        self.edits = Budget(
            "edits of histories under way", limit=_EDITS, share=_PRINCIPAL_EDITS, hint="wait for some of them"
        )
        self.reads = Budget("transcript pages being read", limit=2**31, share=1, hint="read one transcript at a time")
        self.loop_time = LoopTime(_LOOP_SHARE, clock)
        self.fires = Rate("fires of schedules", settings.principal_fires_per_s, clock)
        self._wait_s = settings.stream_stall_s
        self._clock = clock
        self._report = report
        self._told: dict[str, float] = {}
        for budget in (self.memory, self.streams, self.stops):
            budget.on_refused = self._tell

    async def read_page(
        self, principal: str, read: Callable[[], Awaitable[T]], weigh: Callable[[T], int]
    ) -> tuple[T, Charge]:
        """A page of about ``PAGE_BYTES`` and the charge of its memory, made before it is read. Release the charge.

        A page that turns out to weigh more, as one large event does, is read again once there is room for it.

        Raises:
            BudgetExceeded, HostBusy: there is no room in time.
        """
        amount = _COPIES * PAGE_BYTES
        while True:
            charge = await self.memory.wait_for(principal, amount, within_s=self._wait_s)
            try:
                page = await read()
                weight = min(_COPIES * weigh(page), self.memory.share)
            except BaseException:
                charge.release()
                raise
            if weight <= charge.amount:
                charge.shrink(charge.amount - weight)
                return page, charge
            charge.release()
            amount = weight
            del page

    def _tell(self, principal: str, text: str) -> None:
        now = self._clock.monotonic()
        if now - self._told.get(principal, -_TELL_EVERY_S) >= _TELL_EVERY_S:
            if len(self._told) > _SWEEP_AT:
                self._told.clear()
            self._told[principal] = now
            self._report(text)

    def usage(self, principal: str | None = None) -> dict[str, BudgetUsage]:
        """Every budget by its name; with the given principal's use only, or everybody's."""
        return {
            "memory": self.memory.usage(principal),
            "connections": self.connections.usage(principal),
            "descriptors": self.descriptors.usage(principal),
            "streams": self.streams.usage(principal),
            "stops": self.stops.usage(principal),
            "listings": self.listings.usage(principal),
            "edits": self.edits.usage(principal),
            "loop_time": self.loop_time.usage(principal),
        }
