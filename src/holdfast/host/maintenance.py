"""Periodic maintenance of a host: evict idle sessions, prune the store, expire questions."""

from __future__ import annotations

import asyncio
import functools
import math
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, StorageError
from holdfast.host.event_archive import EventArchive
from holdfast.protocol.messages import Answer

if TYPE_CHECKING:
    from holdfast.host.recovery import RunRecovery
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.run_parts import RunParts
    from holdfast.host.suspension import Suspension

__all__ = ["Maintenance"]

LOOK_EVERY_S = 3600.0
"""Maximum interval between checks for due questions, because the wall clock may be set to a different time."""
CLUSTER_LOOK_EVERY_S = 60.0
"""The same if other hosts use the store, whose runs ask questions too."""
JUST_AFTER_S = 0.001
ARCHIVED_BYTES = 1_000_000
"""Size of the rows of events that are read, written to the archive and deleted at a time; a row may exceed it."""
EXPIRE_LIMIT = 1000
"""Maximum number of questions that one check expires."""


class Maintenance:
    """Periodic maintenance of a host. Use it on the host's loop only."""

    def __init__(self, parts: RunParts, launcher: RunLauncher, suspension: Suspension, recovery: RunRecovery) -> None:
        self._parts = parts
        self._context = parts.context
        self._launcher = launcher
        self._suspension = suspension
        self._recovery = recovery
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._next_due_at = math.inf
        self._is_alone = self._context.store.cluster is None
        folder = self._context.settings.event_archive
        self._pruning: asyncio.Task[None] | None = None
        self._archive = EventArchive(folder, self._context.node_id) if folder else None

    def open(self) -> None:
        """Open the archive of events, if there is one. Raises `ConfigurationError` if it cannot be written."""
        if self._archive is not None:
            self._archive.open()

    def start(self) -> None:
        """Start maintenance. Idle sessions, old rows and due questions are handled at once, then periodically."""
        self._evict()
        self._prune()
        self._expire()

    def close(self) -> None:
        """Stop all maintenance."""
        for timer in self._timers.values():
            timer.cancel()

    def evict(self, *, idle_for_s: float) -> None:
        """Evict every session that has been idle for at least `idle_for_s` seconds, then close unused thread pools."""
        directory, threads = self._parts.directory, self._parts.threads
        directory.evict(idle_for_s=idle_for_s)
        if len(threads) > len(self._launcher.live):
            live = {session.principal for session in directory.live.values()}
            threads.close_unused(live.__contains__)

    def _evict(self) -> None:
        context = self._context
        if self._recovery.more_waiting and not self._parts.queue.admission.waiting and not context.lifecycle.draining:
            context.start_task(self._recovery.enqueue_more(), "enqueue more")
        idle_for_s = context.settings.evict_after_s
        self.evict(idle_for_s=idle_for_s)
        every_s = max(0.05, idle_for_s / 4)
        self._timers["evict"] = context.loop.call_later(every_s, self._evict, context=context.variables)

    def _prune(self) -> None:
        if self._pruning is None or self._pruning.done():
            self._pruning = self._context.start_task(self._prune_store(), "prune")
        self._timers["prune"] = self._context.loop.call_later(
            self._context.settings.prune_every_s, self._prune, context=self._context.variables
        )

    async def _prune_store(self) -> None:
        context = self._context
        now, settings = context.now(), context.settings
        events_before = now - settings.event_retention_s
        if self._archive is not None:
            await self._archive_events(self._archive, before=events_before)
            events_before = 0.0
        try:
            dropped = await context.store.prune(
                events_before=events_before,
                tombstones_before=now - settings.tombstone_s,
                idempotency_before=now - settings.idempotency_s,
                attachments_before=now - settings.attachment_retention_s,
            )
        except StorageError as error:
            context.store_failed(None, None, "prune", error)
        else:
            context.incidents.counts["rows_pruned"] += dropped

    async def _archive_events(self, archive: EventArchive, *, before: float) -> None:
        """Write old events to the archive, then delete them. What cannot be written is kept until the next time."""
        context, store = self._context, self._context.store
        after: tuple[float, int] | None = None
        try:
            while True:
                read, after = await store.old_events(before=before, after=after, limit_bytes=ARCHIVED_BYTES)
                if read:
                    add = functools.partial(archive.add, read, at=context.now())
                    archived = await context.loop.run_in_executor(None, add)
                    dropped = await store.drop_old_events(read, before=before)
                    context.incidents.counts["events_archived"] += archived
                    context.incidents.counts["rows_pruned"] += dropped
                if after is None:
                    return
        except StorageError as error:
            context.store_failed(None, None, "archive events", error)
        except OSError as error:
            text = f"old events are kept, because they cannot be written to event_archive: {error}"
            context.report("event_archive", text)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def question_due(self, due_at: float) -> None:
        """Arm the timer for a question that expires at `due_at`, unless the timer is already set to an earlier time."""
        if due_at < self._next_due_at and not self._context.lifecycle.draining:
            self._next_due_at = due_at
            self._look_in(due_at + JUST_AFTER_S - self._context.now())

    def _look_in(self, delay_s: float) -> None:
        timer = self._timers.pop("expire", None)
        if timer is not None:
            timer.cancel()
        every_s = LOOK_EVERY_S if self._is_alone else CLUSTER_LOOK_EVERY_S
        self._timers["expire"] = self._context.loop.call_later(
            min(max(0.0, delay_s), every_s), self._expire, context=self._context.variables
        )

    def _expire(self) -> None:
        self._next_due_at = math.inf
        if not self._context.lifecycle.draining:
            self._context.start_task(self._expire_due(), "expire")

    async def _expire_due(self) -> None:
        """Answer all due questions with ``expired``, then arm the timer for the next question."""
        context = self._context
        again_s = LOOK_EVERY_S
        try:
            for due in await context.store.due_questions(before=context.now(), limit=EXPIRE_LIMIT):
                answer = Answer(question_id=due.question.question_id, decision="expired", at=context.now())
                done = context.store.answer(due.principal, due.key, answer)
                answered = functools.partial(self._suspension.on_answered, due.principal, due.key, answer.question_id)
                done.add_done_callback(answered, context=context.variables)
                try:
                    await done
                except StorageError:
                    raise
                except HoldfastError:
                    pass  # it was answered, or its run ended, in the meantime
            for due in await context.store.due_questions(before=math.inf, limit=1):
                left_s = due.question.due_at - context.now()
                again_s = min(again_s, left_s if left_s >= 0 else 1.0)
        except StorageError as error:
            context.store_failed(None, None, "expire", error)
            again_s = 1.0
        self.question_due(context.now() + again_s)
