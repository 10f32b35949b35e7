"""Schedules on a host: a scheduler with one timer for the next due schedule, and handles for the schedules' owners.

Invariants:

- One timer and at most one check at a time serve any number of schedules. While nothing is due, the store is not
  queried.
- Due schedules fire in batches in which principals take turns. If a batch makes no progress, the next check waits for
  `AGAIN_S`.
- Wall-clock time decides what is due. The wall clock is checked at least every `LOOK_EVERY_S`, so that clock jumps in
  either direction are noticed.
- A schedule that is unreadable, or whose tick is refused, does not block other schedules.
- A draining host fires no more schedules. The remaining ticks are due, or missed, at the next start.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.errors import (
    Draining,
    InvalidKey,
    InvalidRequest,
    RateLimited,
    ScheduleChanged,
    StorageError,
    UnknownPolicy,
    UnknownSchedule,
)
from holdfast.host.message_sender import receipt_of
from holdfast.logs import redact, visible
from holdfast.protocol.mailbox_policies import DECISIONS
from holdfast.protocol.messages import Receipt, check_text
from holdfast.protocol.schedules import ScheduleSpec, ScheduleView, check_cadence
from holdfast.storage.port import DueSchedule, Fire, Fired, PutSchedule, Send

if TYPE_CHECKING:
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.dispatcher import Dispatcher
    from holdfast.host.slot_queue import SlotQueue

__all__ = ["Schedule", "Scheduler"]

_log = logging.getLogger("holdfast.host")

LOOK_EVERY_S = 30.0
"""Interval for comparing the wall clock with the loop's clock, which does not jump."""
AGAIN_S = 1.0
"""Delay before a check is repeated after a store error or without progress."""
BACK_S = 1.0
"""If the wall clock falls behind the monotonic clock by more than this many seconds, it counts as set back."""
BATCH = 256
"""Maximum number of schedules that fire in one batch."""
TRIES = 3
"""Maximum number of attempts to run a schedule manually while the schedule is being changed."""
ID_LENGTH = 200
TEXT_LENGTH = 100_000
"""Maximum length of a schedule's message in characters: the messages of many schedules may be in memory at once."""


class Scheduler:
    """Fires the schedules of a host. Use it on the host's loop only."""

    def __init__(self, context: HostContext, agents: AgentRegistry, queue: SlotQueue, dispatcher: Dispatcher) -> None:
        self._context = context
        self._agents = agents
        self._queue = queue
        self._dispatcher = dispatcher
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = math.inf
        self._looking = False
        self._ahead_s = math.inf
        self._broken: set[int] = set()
        """Row ids of unreadable schedules that were already reported."""

    def start(self) -> None:
        """Start the scheduler, and check for due schedules at once."""
        self._ahead_s = self._context.now() - self._context.clock.monotonic()
        self._begin()

    def close(self) -> None:
        """Cancel the timer for the next check."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Look for schedules that other hosts have put, and fire those that are due."""
        if not self._looking:
            self.close()
            self._begin()

    # ── the timer ────────────────────────────────────────────────────────────────────────────────────────────────

    def _due(self, at: float) -> None:
        """Arm the timer for a schedule that is due at `at`, unless the timer is due earlier."""
        if at < self._next_at:
            self._next_at = at
            if not self._looking:
                self._arm()

    def _arm(self) -> None:
        self.close()
        if not self._context.lifecycle.draining:
            delay_s = min(max(0.001, self._next_at - self._context.now()), LOOK_EVERY_S)
            self._timer = self._context.loop.call_later(delay_s, self._wake, context=self._context.variables)

    def _wake(self) -> None:
        self._timer = None
        now = self._context.now()
        before, self._ahead_s = self._ahead_s, now - self._context.clock.monotonic()
        if now >= self._next_at or self._ahead_s < before - BACK_S:
            self._begin()
        else:
            self._arm()

    def _begin(self) -> None:
        if not self._context.lifecycle.draining:
            self._looking = True
            self._context.start_task(self._look(), "schedules")

    async def _look(self) -> None:
        """Fire all due schedules, then arm the timer for the next schedule."""
        context = self._context
        again_at = context.now() + AGAIN_S
        self._next_at = math.inf  # a schedule that is put from now on may set it earlier
        try:
            while not context.lifecycle.draining and (
                batch := await context.store.due_schedules(now=context.now(), limit=BATCH)
            ):
                if not await self._fire_all(batch):
                    again_at = context.now() + AGAIN_S
                    return
            next_at = await context.store.next_schedule()
            again_at = math.inf if next_at is None else next_at
        except StorageError as error:
            context.store_failed(None, None, "schedules", error)
        finally:
            self._looking = False
            self._next_at = min(self._next_at, again_at)
            self._arm()

    # ── firing ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _fire_all(self, batch: Sequence[DueSchedule]) -> bool:
        """Fire a batch of schedules. Return whether all store calls succeeded and any schedule made progress."""
        firing = [
            self._fire(due)
            for due in batch
            if not self._context.lifecycle.draining and self._is_served(due.spec) and self._may_fire(due.principal)
        ]
        if firing:
            await asyncio.wait(firing)
        return all(done.exception() is None for done in firing) and any(
            done.result().outcome != "waits" for done in firing
        )

    def _is_served(self, spec: ScheduleSpec) -> bool:
        """Return whether to fire the schedule here. In a cluster, a host that has its agent fires it."""
        return self._context.store.cluster is None or spec.agent is None or spec.agent in self._agents.names

    def _may_fire(self, principal: str) -> bool:
        """Return whether the principal is within its rate. A schedule that may not fire now stays due."""
        try:
            self._context.budgets.fires.take(principal)
        except RateLimited:
            self._context.incidents.promises.kept["P14"] += 1
            return False
        return True

    def _fire(self, due: DueSchedule, *, by_hand: bool = False) -> asyncio.Future[Fired]:
        context = self._context
        settings, spec, now = context.settings, due.spec, context.now()
        request = Fire(
            schedule=due.schedule,
            revision=due.revision,
            send=Send(
                principal=due.principal,
                key=spec.session,
                agent=spec.agent,
                default_agent=self._agents.default,
                message_id=ids.message_id(),
                content=spec.text,
                policy=spec.overlap,
                at=now,
                run_id=self._queue.reserve(due.principal),
                quiet_s=settings.quiet_s,
                max_wait_s=settings.max_wait_s,
                mailbox_limit=settings.mailbox_limit,
                mailbox_size=settings.mailbox_size,
                session_limit=settings.principal_sessions,
                stored_limit=context.stored_limit,
                served=self._agents.served,
                takes_over=self._agents.takes_over,
            ),
            by_hand=by_hand,
            is_shared=context.store.cluster is not None,
        )
        done = context.store.fire_schedule(request)
        done.add_done_callback(
            functools.partial(self._dispatcher.on_fire_committed, request), context=context.variables
        )
        done.add_done_callback(functools.partial(self._fired, due, by_hand), context=context.variables)
        return done

    def _fired(self, due: DueSchedule, by_hand: bool, done: asyncio.Future[Fired]) -> None:
        context, error = self._context, done.exception()
        if error is not None:
            if not by_hand:
                context.store_failed(due.spec.session, None, f"schedule {due.schedule_id!r}", error)
            return
        fired = done.result()
        counts = context.incidents.counts
        counts["ticks_missed"] += fired.missed
        match fired.outcome:
            case "fired":
                counts["ticks_fired"] += 1
            case "duplicate" | "missed" | "set_back" | "changed" | "waits" | "broken":
                pass
            case outcome:
                counts["ticks_refused"] += 1
                if outcome in ("mailbox_full", "limit_exceeded"):
                    context.incidents.promises.kept["P9"] += 1
        told = due.schedule in self._broken
        if fired.outcome == "broken":
            self._broken.add(due.schedule)
        else:
            self._broken.discard(due.schedule)
        if fired.problem is not None and not (told and fired.outcome == "broken"):
            text = f"schedule {due.schedule_id!r} of {due.principal!r} does not fire: {fired.problem}"
            _log.warning("%s", visible(redact(text)))
            context.report("schedule", text, session=due.spec.session)

    # ── for owners ───────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, principal: str, schedule_id: str | None, spec: ScheduleSpec) -> Schedule:
        """Create or replace a schedule. Raises the errors of `SessionAPI.schedule`."""
        context = self._context
        schedule_id = ids.schedule_id() if schedule_id is None else checked_id(schedule_id)
        self._check(spec)
        if context.lifecycle.draining:
            raise Draining("this host is shutting down and accepts no new schedules")
        done = context.store.put_schedule(
            PutSchedule(
                principal=principal,
                schedule_id=schedule_id,
                spec=spec,
                at=context.now(),
                limit=context.settings.principal_schedules,
                stored_limit=context.stored_limit,
            )
        )
        done.add_done_callback(self._changed, context=context.variables)
        await asyncio.shield(done)
        return Schedule(self, principal, schedule_id)

    def _check(self, spec: ScheduleSpec) -> None:
        text: object = spec.text
        if not isinstance(text, str):
            raise InvalidRequest("the text of a schedule must be text (str)")
        check_text(text)
        if len(text) > TEXT_LENGTH:
            raise InvalidRequest(
                f"schedule text too long; the limit is {TEXT_LENGTH:,} characters", hint="shorten it or refer to a file"
            )
        if "\0" in text:
            raise InvalidRequest("the text contains a NUL character", hint="remove it from the text")
        if not any(policy == spec.overlap for _, policy in DECISIONS):
            raise UnknownPolicy(f"unknown policy {spec.overlap!r}")
        if spec.agent is not None:
            self._agents.find(spec.agent)
        check_cadence(spec, now=self._context.now())

    def _changed(self, done: asyncio.Future[ScheduleView]) -> None:
        if done.exception() is None and done.result().next_at is not None:
            self._due(done.result().next_at or 0.0)

    async def pause(self, principal: str, schedule_id: str, *, paused: bool) -> ScheduleView:
        """See `ScheduleAPI.pause` and `ScheduleAPI.resume`."""
        context = self._context
        done = context.store.pause_schedule(principal, schedule_id, paused=paused, at=context.now())
        done.add_done_callback(self._changed, context=context.variables)
        return await asyncio.shield(done)

    async def find(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView]:
        """Return the schedule in the form needed to fire it, and the view for its owner. Raises `UnknownSchedule`."""
        found = await self._context.store.schedule(principal, schedule_id)
        if found is None:
            raise UnknownSchedule(f"no such schedule: {schedule_id!r}")
        return found

    async def delete(self, principal: str, schedule_id: str) -> ScheduleView:
        """See `ScheduleAPI.delete`."""
        return await asyncio.shield(self._context.store.delete_schedule(principal, schedule_id))

    async def run_now(self, principal: str, schedule_id: str) -> Receipt:
        """See `ScheduleAPI.run_now`."""
        for tries in range(1, TRIES + 1):
            due, _ = await self.find(principal, schedule_id)
            if self._context.lifecycle.draining:
                raise Draining("this host is shutting down and accepts no new messages")
            try:
                fired = await asyncio.shield(self._fire(due, by_hand=True))
            except ScheduleChanged:
                if tries == TRIES:
                    raise
            else:
                assert fired.sent is not None
                return receipt_of(due.spec.session, fired.sent)
        raise AssertionError("the last try returns or raises")


class Schedule:
    """A handle to a schedule of a host, made by `Session.schedule`, `Host.schedule` or `Host.find_schedule`.

    Call all methods on the host's loop. If a caller is cancelled, it stops waiting, but the requested change is made.
    """

    __slots__ = ("_scheduler", "principal", "schedule_id")

    def __init__(self, scheduler: Scheduler, principal: str, schedule_id: str) -> None:
        self._scheduler = scheduler
        self.principal = principal
        self.schedule_id = checked_id(schedule_id)

    def __repr__(self) -> str:
        return f"<Schedule {self.schedule_id!r} of {self.principal!r}>"

    async def info(self) -> ScheduleView:
        """See `ScheduleAPI.info`."""
        return (await self._scheduler.find(self.principal, self.schedule_id))[1]

    async def pause(self) -> ScheduleView:
        """See `ScheduleAPI.pause`."""
        return await self._scheduler.pause(self.principal, self.schedule_id, paused=True)

    async def resume(self) -> ScheduleView:
        """See `ScheduleAPI.resume`."""
        return await self._scheduler.pause(self.principal, self.schedule_id, paused=False)

    async def run_now(self) -> Receipt:
        """See `ScheduleAPI.run_now`."""
        return await self._scheduler.run_now(self.principal, self.schedule_id)

    async def delete(self) -> ScheduleView:
        """See `ScheduleAPI.delete`."""
        return await self._scheduler.delete(self.principal, self.schedule_id)


def checked_id(schedule_id: str) -> str:
    """Return the schedule id if it is valid. Raises `InvalidKey` otherwise."""
    given: object = schedule_id
    if not isinstance(given, str) or not 0 < len(given) <= ID_LENGTH or not given.isprintable() or "/" in given:
        raise InvalidKey(f"{given!r:.200} is not a schedule id")
    return given
