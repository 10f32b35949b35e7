"""What a host does from time to time: forgets idle sessions, and prunes what the store kept for long enough."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from holdfast.errors import StorageError
from holdfast.host.recovery import take_up_more

if TYPE_CHECKING:
    from holdfast.host.actor import SessionActor
    from holdfast.host.host import Host

__all__ = ["Upkeep"]

PRUNE_EVERY_S = 3600.0


class Upkeep:
    """Made by the `Host`; on its loop only."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._idle: deque[SessionActor] = deque()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.more_wait = False
        """Whether the store has more sessions with waiting messages than were lined up."""

    def start(self) -> None:
        """Begin; prunes for the first time at once."""
        self._evict()
        self._prune()

    def close(self) -> None:
        """Do nothing more."""
        for timer in self._timers.values():
            timer.cancel()

    def follow(self, actor: SessionActor) -> None:
        """A session became live: forget it when it has been idle for long enough."""
        actor.idle_since = self._host.loop.time()
        self._idle.append(actor)

    def evict(self, *, idle_for_s: float) -> None:
        """Forget every session that has been idle for so long; the store keeps it.

        Each live session is in the line once; those in front were idle, or were looked at, before the others.
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
            host.actors = dict(host.actors)  # a dict that was large keeps its table
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
        self._timers["prune"] = self._host.loop.call_later(PRUNE_EVERY_S, self._prune, context=self._host.context)

    async def _prune_store(self) -> None:
        host = self._host
        now, settings = host.now(), host.settings
        try:
            dropped = await host.store.prune(
                events_before=now - settings.event_retention_s,
                tombstones_before=now - settings.tombstone_s,
                idempotency_before=now - settings.idempotency_s,
            )
        except StorageError as error:
            host.store_failed(None, None, "prune", error)
        else:
            host.incidents.counts["rows_pruned"] += dropped
