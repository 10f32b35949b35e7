"""Periodic maintenance of a host: evict idle sessions, prune the store, expire questions."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, StorageError
from holdfast.host.recovery import take_up_more
from holdfast.protocol.messages import Answer

if TYPE_CHECKING:
    from holdfast.host.actor import SessionActor
    from holdfast.host.host import Host

__all__ = ["Upkeep"]

LOOK_EVERY_S = 3600.0
"""Maximum interval for checking for due questions: clocks may be set, and stores may fail."""
JUST_AFTER_S = 0.001
EXPIRE_LIMIT = 1000
"""Maximum number of questions that expire together."""


class Upkeep:
    """Periodic maintenance of a host. Made by the `Host`; on its loop only."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._idle: deque[SessionActor] = deque()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._next_due_at = math.inf
        self.more_wait = False
        """Whether the store has more sessions with waiting messages than were queued."""

    def start(self) -> None:
        """Start; prune, and expire due questions, at once and then periodically."""
        self._evict()
        self._prune()
        self._expire()

    def close(self) -> None:
        """Stop all maintenance."""
        for timer in self._timers.values():
            timer.cancel()

    def follow(self, actor: SessionActor) -> None:
        """Evict a live session once it has been idle long enough."""
        actor.idle_since = self._host.loop.time()
        self._idle.append(actor)

    def evict(self, *, idle_for_s: float) -> None:
        """Drop every session idle for at least this long from memory; the store keeps it.

        Each live session is queued once; those at the front were idle, or were checked, before the others.
        """
        host = self._host
        before = host.loop.time() - idle_for_s
        at_first = len(host.actors)
        for _ in range(len(self._idle)):
            actor = self._idle[0]
            if actor.idle and actor.idle_since > before:
                break
            self._idle.popleft()
            if actor.idle:
                del host.actors[actor.session]
            else:
                self.follow(actor)
        if len(host.actors) < at_first / 2:
            host.actors = dict(host.actors)  # copies the dict, since a dict never shrinks
        host.forget_threads()

    def _evict(self) -> None:
        host = self._host
        if self.more_wait and not host.dispatch.admission.waiting and not host.draining:
            self.more_wait = False
            host.start_task(take_up_more(host), "take up")
        idle_for_s = self._host.settings.evict_after_s
        self.evict(idle_for_s=idle_for_s)
        every_s = max(0.05, idle_for_s / 4)
        self._timers["evict"] = self._host.loop.call_later(every_s, self._evict, context=self._host.context)

    def _prune(self) -> None:
        self._host.start_task(self._prune_store(), "prune")
        self._timers["prune"] = self._host.loop.call_later(
            self._host.settings.prune_every_s, self._prune, context=self._host.context
        )

    async def _prune_store(self) -> None:
        host = self._host
        now, settings = host.now(), host.settings
        try:
            dropped = await host.store.prune(
                events_before=now - settings.event_retention_s,
                tombstones_before=now - settings.tombstone_s,
                idempotency_before=now - settings.idempotency_s,
                attachments_before=now - settings.attachment_retention_s,
            )
        except StorageError as error:
            host.store_failed(None, None, "prune", error)
        else:
            host.incidents.counts["rows_pruned"] += dropped

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def question_due(self, due_at: float) -> None:
        """Arm the timer for a question that is due at `due_at`."""
        if due_at < self._next_due_at and not self._host.draining:
            self._next_due_at = due_at
            self._look_in(due_at + JUST_AFTER_S - self._host.now())

    def _look_in(self, delay_s: float) -> None:
        timer = self._timers.pop("expire", None)
        if timer is not None:
            timer.cancel()
        self._timers["expire"] = self._host.loop.call_later(
            min(max(0.0, delay_s), LOOK_EVERY_S), self._expire, context=self._host.context
        )

    def _expire(self) -> None:
        self._next_due_at = math.inf
        if not self._host.draining:
            self._host.start_task(self._expire_due(), "expire")

    async def _expire_due(self) -> None:
        """Answer due questions with ``expired``, then wait for the next."""
        host = self._host
        again_s = LOOK_EVERY_S
        try:
            for due in await host.store.due_questions(before=host.now(), limit=EXPIRE_LIMIT):
                answer = Answer(question_id=due.question.question_id, decision="expired", at=host.now())
                done = host.store.answer(due.principal, due.key, answer)
                told = functools.partial(host.dispatch.parked.answered, due.principal, due.key, answer.question_id)
                done.add_done_callback(told, context=host.context)
                try:
                    await done
                except StorageError:
                    raise
                except HoldfastError:
                    pass  # it was answered, or its run ended, in the meantime
            for due in await host.store.due_questions(before=math.inf, limit=1):
                left_s = due.question.due_at - host.now()
                again_s = min(again_s, left_s if left_s >= 0 else 1.0)
        except StorageError as error:
            host.store_failed(None, None, "expire", error)
            again_s = 1.0
        self.question_due(host.now() + again_s)
