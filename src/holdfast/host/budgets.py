"""Budgets of a host: memory, connections, streams, stops and loop time, each with a share for each principal.

All accounting of these resources is in this module. A `Charge` is an amount of a resource that a principal holds. It is
a context manager; releasing it again has no effect. The rules are:

- A principal at its share is refused, or waits without delaying other principals.
- When the host's limit is reached, waiting principals take turns, each with its charges in order.
- A charge costs a few dictionary operations. Up to ``FREE_BYTES`` in each direction are part of the connection.

Use everything here from one event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar

import msgspec

from holdfast.clock import Clock, system_clock
from holdfast.errors import BudgetExceeded, HostBusy, RateLimited
from holdfast.settings import Settings

T = TypeVar("T")
E = TypeVar("E")

__all__ = [
    "FREE_BYTES",
    "PAGE_BYTES",
    "SMALL_MESSAGE_CHARACTERS",
    "UNKNOWN",
    "Budget",
    "BudgetUsage",
    "Budgets",
    "Charge",
    "LoopTime",
    "Rate",
]

FREE_BYTES = 65_536
"""Number of bytes of a body that are not charged, because they count as part of the connection."""
PAGE_BYTES = 262_144
"""Approximate maximum number of bytes of events or entries in one read from the store."""
UNKNOWN = ""
"""The principal of connections that have not yet presented a valid key."""
_WAITERS = 1024
"""Maximum number of waiting charges of one principal."""
_SWEEP_AT = 10_000


class BudgetUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one budget.

    Parameters:
        used, limit: the amount in use and the maximum. Requests with a user key get the caller's figures; all other
            requests get those of the whole host (for ``stored`` and ``program_*``, the limit is that of each
            principal). For ``loop_time``, `used` is in seconds, and `limit` is a fraction of the loop's time.
        share: the maximum that one principal may hold.
        refused: number of refused charges; always 0 for requests with a user key.
        principals: usage of the 20 largest principals, largest first; requests with a user key get only the caller's
            usage.
    """

    used: float
    limit: float
    share: float
    refused: int
    principals: Mapping[str, float]


class Charge:
    """An amount of a resource that one principal holds, made by `Budget`.

    Call `release`, or use the charge as a context manager.
    """

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
        """Charge `amount` more. On failure, raise the errors of `Budget.charge` and keep the amount already held."""
        self._budget._take(self.principal, amount)
        self.amount += amount

    def shrink(self, amount: int) -> None:
        """Release `amount`, or the whole charge if `amount` is larger."""
        amount = min(amount, self.amount)
        if amount:
            self.amount -= amount
            self._budget._give(self.principal, amount)

    def move(self, principal: str) -> None:
        """Transfer the charge to `principal`, for example once a connection has presented its key.

        Raises `BudgetExceeded` if `principal` would hold more than its share.
        """
        if principal != self.principal:
            if self.amount:
                self._budget._move(self.principal, principal, self.amount)
            self.principal = principal

    def release(self) -> None:
        """Release the whole charge. Idempotent."""
        self.shrink(self.amount)


class Budget:
    """The limit of one resource for the host, with a share for each principal. Belongs to one event loop.

    Parameters:
        name: the plural name of the resource in error messages.
        limit: the maximum for all principals together.
        share: the maximum for one principal.
        hint: the hint of the error that is raised when a principal exceeds its share.
    """

    __slots__ = ("_held", "_hint", "_lined_up", "_refused", "_used", "limit", "name", "on_refused", "share")

    def __init__(self, name: str, *, limit: int, share: int, hint: str) -> None:
        self.name = name
        self.limit = limit
        self.share = min(share, limit)
        self._hint = hint
        self.on_refused: Callable[[str, str], None] | None = None
        """Callback, called with the principal and a message when a charge would exceed the principal's share."""
        self._held: dict[str, int] = {}
        self._used = 0
        self._refused = 0
        self._lined_up: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def used(self) -> int:
        """Amount held by all principals."""
        return self._used

    def held(self, principal: str) -> int:
        """Return the amount that one principal holds."""
        return self._held.get(principal, 0)

    def resize(self, *, limit: int, share: int) -> None:
        """Set a new limit and share. Existing charges are kept, even if they exceed the new values."""
        self.limit = limit
        self.share = min(share, limit)
        self._admit()

    def charge(self, principal: str, amount: int = 1) -> Charge:
        """Charge `amount` to `principal` without waiting.

        Raises:
            BudgetExceeded: if the principal would hold more than its share.
            HostBusy: if all principals together would hold more than the limit.
        """
        self._take(principal, amount)
        return Charge(self, principal, amount)

    async def wait_for(self, principal: str, amount: int, *, within_s: float | None, in_memory: bool = False) -> Charge:
        """Charge `amount` to `principal`, waiting for room if necessary. Waiting principals take turns.

        Parameters:
            principal: the principal to charge.
            amount: the amount to charge.
            within_s: timeout in seconds; None waits indefinitely.
            in_memory: whether the charged object is already in memory. If so, all waiting charges of a principal
                together are limited to its share.

        Raises:
            BudgetExceeded, HostBusy: as for `charge`, if the wait times out. Raised at once if `amount` can never fit,
                or if the principal has too many waiting charges.
        """
        if self._has_room(principal, amount) and not self._lined_up:
            return self.charge(principal, amount)
        line = self._lined_up.setdefault(principal, deque())
        waiting = sum([place[0] for place in line]) if in_memory else 0
        if amount > self.share or waiting + amount > self.share or len(line) >= _WAITERS:
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
        """Return a snapshot of the budget for `principal`; None covers the whole host."""
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
        if not held:
            return  # a zero charge to a principal that holds nothing
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
        """Admit waiting charges. Principals take turns, and a principal without room does not delay the others."""
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
                    self._lined_up[principal] = self._lined_up.pop(principal)  # moves to the end: others are next
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
    """A rate limit with one token bucket for each principal. Belongs to one event loop.

    Parameters:
        name: the plural name of the counted events in error messages.
        rate_per_s: maximum average rate, in events per second; 0 disables the limit.
        clock: the source of monotonic time.
        burst: maximum number of events at once; 0 uses twice `rate_per_s`, but at least 1.
    """

    __slots__ = ("_buckets", "_burst", "_clock", "_name", "_rate", "_sweep_at")

    def __init__(self, name: str, rate_per_s: float, clock: Clock = system_clock, *, burst: float = 0.0) -> None:
        self._name = name
        self._rate = rate_per_s
        self._burst = burst or max(1.0, 2 * rate_per_s)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._sweep_at = _SWEEP_AT

    def take(self, principal: str) -> None:
        """Count one event, or raise `RateLimited` with the time until the next event is allowed."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        self._buckets[principal] = (self._room(principal, now) - 1.0, now)
        if len(self._buckets) > self._sweep_at:
            self._sweep(now)

    def check(self, principal: str) -> None:
        """Raise `RateLimited` if `take` would, without counting an event."""
        if self._rate:
            self._room(principal, self._clock.monotonic())

    def _room(self, principal: str, now: float) -> float:
        """Return the number of available tokens. Raises `RateLimited` if less than one token is available."""
        tokens, at = self._buckets.get(principal, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._rate)
        if tokens < 1.0:
            error = RateLimited(f"more than {self._rate:g} {self._name} per second from {principal}")
            error.retry_after_s = (1.0 - tokens) / self._rate
            raise error
        return tokens

    def _sweep(self, now: float) -> None:
        """Drop full buckets, because a new bucket starts full."""
        self._buckets = {
            principal: (tokens, at)
            for principal, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * self._rate < self._burst
        }
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._buckets))


class LoopTime:
    """Limit on the event loop time that each principal's large responses may take. Belongs to one event loop.

    Work is split into pieces of a few milliseconds. After a piece, the principal waits until it is back within its
    share, so that the loop can serve other principals in the meantime.

    Parameters:
        share: average fraction of the loop's time that one principal's large responses may take.
        clock: the source of monotonic time.
    """

    __slots__ = ("_clock", "_debt", "_share", "_total")

    def __init__(self, share: float, clock: Clock = system_clock) -> None:
        self._share = share
        self._clock = clock
        self._debt: dict[str, tuple[float, float]] = {}
        self._total: dict[str, float] = {}

    def spend(self, principal: str, seconds: float) -> float:
        """Charge a piece of work that takes `seconds`. Return the seconds to wait before the principal's next piece."""
        now = self._clock.monotonic()
        debt, at = self._debt.get(principal, (0.0, now))
        debt = max(0.0, debt - (now - at) * self._share) + seconds
        self._debt[principal] = (debt, now)
        self._total[principal] = self._total.get(principal, 0.0) + seconds
        if len(self._debt) > _SWEEP_AT:
            self._sweep(now)
        return debt / self._share if debt > _BURST_S else 0.0

    async def pay(self, principal: str, seconds: float) -> None:
        """Charge a finished piece of work, then wait until the principal is back within its share."""
        delay_s = self.spend(principal, seconds)
        if delay_s:
            await asyncio.sleep(delay_s)

    async def turn(self, principal: str, seconds: float) -> None:
        """Charge an upcoming piece of work, then wait as long as the principal's earlier pieces require."""
        delay_s = self.spend(principal, seconds) - seconds / self._share
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def run(self, principal: str, work: Callable[[], bytes]) -> bytes:
        """Run one piece of work on the loop and charge its time. Return the result once the principal may continue."""
        began = self._clock.monotonic()
        done = work()
        await asyncio.sleep(self.spend(principal, self._clock.monotonic() - began))
        return done

    def usage(self, principal: str | None = None) -> BudgetUsage:
        """Return the loop time used so far, in seconds, for `principal`; None covers the whole host."""
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


_BURST_S = 0.002
"""Loop time in excess of its share that a principal may take before it must wait."""
_LOOP_SHARE = 0.25
_COPIES = 3
"""Number of copies of a page in memory: as read, as events or entries, and encoded."""
SMALL_MESSAGE_CHARACTERS = 8192
"""Maximum length of a message that is stored without a charge."""
_WRITES_BYTES = 262_144
_LISTINGS = 8
_EDITS = 64
_PRINCIPAL_EDITS = 4
_TELL_EVERY_S = 60.0
_WRONG_KEYS = 10
_WRONG_KEYS_PER_S = 1 / 12
_STOPS = 10_000
_PRINCIPAL_STOPS = 1_000


class Budgets:
    """All budgets of a host, created from its settings.

    Parameters:
        settings: the settings that contain the limits and shares.
        clock: the source of monotonic time.
        report: callback, called with a message when a principal exceeds its share, at most once a minute for each
            principal and kind of message.

    Attributes:
        memory: bytes of request and response bodies in progress.
        histories: bytes of whole transcripts in memory. Runs hold their transcripts until they end, and edits until
            they are done. Separate from `memory`, because a run may wait for requests of its principal.
        connections: open connections, including those of the principal `UNKNOWN`. The server sets the limits once it
            knows how many file descriptors it may use.
        streams: open event streams.
        stops: stops in progress.
        writes: bytes of large messages being written to the store. One principal's share is small enough to be written
            in a single transaction without delaying the next transaction.
        listings: requests for complete lists in progress, from the read until the client has received the response.
        edits: undo, compact and fork in progress. Each reads a whole transcript, and compact waits for a model.
        reads: pages and attachment parts being read. The size of a page is known only once the page is read, and
            parallel reads of one principal could occupy all readers of the store.
        loop_time: event loop time taken by large responses, in seconds.
        fires: schedule firings.
        wrong_keys: attempts with a wrong approval key.
    """

    def __init__(
        self, settings: Settings, clock: Clock = system_clock, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.memory = Budget(
            "bytes in progress",
            limit=settings.memory_limit_bytes,
            share=settings.principal_memory_bytes,
            hint="read the open responses, or send fewer large requests at once",
        )
        self.histories = Budget(
            "bytes of transcripts in memory",
            limit=settings.memory_limit_bytes,
            share=settings.principal_memory_bytes,
            hint="wait until some runs have ended, or raise the setting principal_memory_bytes",
        )
        self.connections = Budget("connections", limit=2**31, share=2**31, hint="close some connections")
        hint = "close some streams, or raise HOLDFAST_PRINCIPAL_STREAMS"
        self.streams = Budget("event streams", limit=2**31, share=settings.principal_streams, hint=hint)
        self.stops = Budget("stops in progress", limit=_STOPS, share=_PRINCIPAL_STOPS, hint="wait until some are done")
        self.writes = Budget(
            "bytes of messages being stored", limit=2**31, share=_WRITES_BYTES, hint="send fewer large messages at once"
        )
        self.listings = Budget("lists in progress", limit=_LISTINGS, share=1, hint="request one list at a time")
        self.edits = Budget(
            "edits of histories in progress", limit=_EDITS, share=_PRINCIPAL_EDITS, hint="wait until some are done"
        )
        self.reads = Budget("pages being read", limit=2**31, share=1, hint="read one transcript or stream at a time")
        self.loop_time = LoopTime(_LOOP_SHARE, clock)
        self.fires = Rate("schedule firings", settings.principal_fires_per_s, clock)
        self.wrong_keys = Rate("wrong approval keys", _WRONG_KEYS_PER_S, clock, burst=_WRONG_KEYS)
        self._wait_s = 2 * settings.stream_stall_s  # a stalled reader holds its page for the stall time
        self._clock = clock
        self._report = report
        self._told: dict[tuple[str, str], float] = {}
        for budget in (self.memory, self.histories, self.streams, self.stops):
            budget.on_refused = self.tell

    async def take_read(self, principal: str) -> Charge:
        """Wait until the principal may start a large read from the store. Release the charge after the read.

        Raises `BudgetExceeded` or `HostBusy` if the principal's other reads take too long.
        """
        return await self.reads.wait_for(principal, 1, within_s=self._wait_s)

    async def read_page(
        self, principal: str, read: Callable[[], Awaitable[T]], weigh: Callable[[T], int]
    ) -> tuple[T, Charge]:
        """Charge memory for a page of about ``PAGE_BYTES``, then read the page. The caller must release the charge.

        If the page turns out larger, for example because of one large event, it is dropped and read again once there
        is room for its size.

        Parameters:
            principal: the principal to charge.
            read: callback that reads the page.
            weigh: callback that returns the size of a page, in bytes.

        Raises:
            BudgetExceeded, HostBusy: if the wait for room times out.
        """
        amount = _COPIES * PAGE_BYTES
        while True:
            charge = await self.memory.wait_for(principal, amount, within_s=self._wait_s)
            try:
                with await self.take_read(principal):
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

    async def read_history(
        self,
        principal: str,
        read: Callable[[int], Awaitable[Sequence[E] | int]],
        weigh: Callable[[Sequence[E]], int],
        *,
        within_s: float | None,
    ) -> tuple[Sequence[E], Charge]:
        """Read a consistent transcript and charge its memory. The caller must release the charge.

        Transcripts of up to ``FREE_BYTES`` are not charged. While this method waits for room, it keeps no part of the
        transcript in memory; it reads the transcript again afterwards.

        Parameters:
            principal: the principal to charge.
            read: callback that takes a limit in bytes and returns the entries, or only their size if it exceeds the
                limit.
            weigh: callback that returns the size of entries in memory, in bytes.
            within_s: timeout for each wait for room, in seconds; None waits indefinitely.

        Raises:
            BudgetExceeded, HostBusy: if the transcript exceeds a principal's share, or if a wait for room times out.
        """
        found = await read(FREE_BYTES)
        if not isinstance(found, int):
            return found, Charge(self.histories, principal, 0)
        amount = found
        while True:
            share = self.histories.share
            if amount > share:
                raise BudgetExceeded(
                    f"the transcript takes {amount:,} bytes of memory; the limit for {principal} is {share:,}",
                    hint="start another session, undo(), or raise the setting principal_memory_bytes",
                )
            charge = await self.histories.wait_for(principal, amount, within_s=within_s)
            try:
                found = await read(amount)
                weight = found if isinstance(found, int) else weigh(found)
            except BaseException:
                charge.release()
                raise
            if not isinstance(found, int) and weight <= amount:
                charge.shrink(amount - weight)
                return found, charge
            charge.release()
            amount = weight
            del found

    def tell(self, principal: str, text: str, kind: str = "share") -> None:
        """Report the message `text` about a principal, at most once a minute for each principal and `kind`."""
        now = self._clock.monotonic()
        who = (principal, kind)
        if now - self._told.get(who, -_TELL_EVERY_S) >= _TELL_EVERY_S:
            if len(self._told) > _SWEEP_AT:
                self._told.clear()
            self._told[who] = now
            self._report(text)

    def usage(self, principal: str | None = None) -> dict[str, BudgetUsage]:
        """Return a snapshot of each budget by name, for `principal`; None covers the whole host."""
        return {
            "memory": self.memory.usage(principal),
            "connections": self.connections.usage(principal),
            "histories": self.histories.usage(principal),
            "streams": self.streams.usage(principal),
            "stops": self.stops.usage(principal),
            "writes": self.writes.usage(principal),
            "listings": self.listings.usage(principal),
            "edits": self.edits.usage(principal),
            "loop_time": self.loop_time.usage(principal),
        }
