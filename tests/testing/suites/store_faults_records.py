"""Stores with one fault each in transcripts, attachments and schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.protocol.messages import Attachment
from holdfast.protocol.schedules import ScheduleView
from holdfast.storage import MemoryStore
from holdfast.storage.port import (
    Committed,
    DueSchedule,
    Edited,
    EditHistory,
    Fire,
    Fired,
    OldEvents,
    PutSchedule,
    RunCommit,
    Send,
    SendResult,
)
from holdfast.storage.rows import ScheduleRow
from holdfast.storage.transactions import schedules
from tests.testing.suites.store_faults import answered, changed, found_by


@found_by("an_undo_takes_the_newest_piece_away")
class TakesAllAway(MemoryStore):
    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        done = super().edit_history(request)
        row = self.backend.tables.find(request.principal, request.key)
        if row is not None and request.edit == "undo" and done.exception() is None:
            row.history_id = None
        return done


@found_by("a_compaction_stands_in_the_place_of_all_before")
class ForgetsWhatItStandsFor(MemoryStore):
    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        done = super().edit_history(request)
        row = self.backend.tables.find(request.principal, request.key)
        if row is not None and row.history_id is not None and request.edit == "compact" and done.exception() is None:
            history = self.backend.tables.sessions[row.session].history
            history[row.history_id] = changed(history[row.history_id], previous_id=None)
        return done


@found_by("a_run_may_replace_the_transcript")
class AddsToTheTranscript(MemoryStore):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        return super().commit_run(changed(commit, replaces_history=False))


@found_by("what_an_agent_keeps_is_read_by_itself")
class KeepsOnlyTheNewest(MemoryStore):
    async def kept(self, session: int, n: int) -> str:
        row = self.backend.tables.get(session)
        return await super().kept(session, n) if row is not None and n == row.next_n - 1 else ""


@found_by("a_history_is_not_edited_under_a_run")
class EditsUnderARun(MemoryStore):
    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        row = self.backend.tables.find(request.principal, request.key)
        if row is None:
            return super().edit_history(request)
        run_id, row.run_id = row.run_id, None
        done = super().edit_history(request)
        row.run_id = run_id
        return done


@found_by("a_branch_or_an_import_begins_a_session")
class ImportsOverAHistory(MemoryStore):
    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        row = self.backend.tables.find(request.principal, request.key)
        if row is not None and request.edit in ("branch", "import"):
            row.history_id = None
        return super().edit_history(request)


@found_by("a_retry_takes_the_last_runs_entries_with_it")
class RetriesOnTop(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        row = self.backend.tables.find(request.principal, request.key)
        history_id = None if row is None else row.history_id
        done = super().send(request)
        if row is not None:
            row.history_id = history_id
        return done


@found_by("an_attachment_is_kept_once_for_each_principal")
class SharesAttachments(MemoryStore):
    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        for owner in (principal, *self.backend.tables.attachments):
            found = await super().attachment(owner, digest)
            if found is not None:
                return found
        return None


@found_by("a_message_carries_its_attachments")
class DropsAttachmentsOfEntries(MemoryStore):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        return super().commit_run(changed(commit, entries=[changed(e, attachments=()) for e in commit.entries]))


@found_by("what_no_session_refers_to_is_dropped_in_time")
class DropsWhatIsUsed(MemoryStore):
    async def prune(self, **before: float) -> int:
        for session in self.backend.tables.sessions.values():
            session.attached.clear()
        return await super().prune(**before)


class Scheduled(MemoryStore):
    """No fault: a short form for those that have one."""

    def known(self, request: Fire) -> ScheduleRow | None:
        return self.backend.tables.schedule(request.schedule)


@found_by("a_tick_is_fired_once_and_the_schedule_goes_on")
class FiresAndForgets(Scheduled):
    """The message and the step past the tick are two transactions, and the second is lost."""

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        row = self.known(request)
        done = super().fire_schedule(request)
        if row is not None:
            self.backend.tables.save_schedule(row)
        return done


@found_by("what_refuses_a_tick_is_counted_and_the_schedule_goes_on")
class TriesForEver(Scheduled):
    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        row = self.known(request)
        done = super().fire_schedule(request)
        if row is not None and done.exception() is None and done.result().outcome == "busy":
            self.backend.tables.save_schedule(row)
        return done


@found_by("missed_ticks_are_counted")
class CountsNothing(Scheduled):
    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        done = super().fire_schedule(request)
        row = self.known(request)
        if row is not None:
            self.backend.tables.save_schedule(changed(row, progress=changed(row.progress, missed=0)))
        return done


@found_by("the_texts_of_schedules_count_as_stored")
class StoresTextsForNothing(Scheduled):
    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        return super().put_schedule(changed(request, stored_limit=10**9))


@found_by("a_paused_schedule_has_no_ticks")
class ResumesWithWhatWasDue(Scheduled):
    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        before = self.backend.tables.find_schedule(principal, schedule_id)
        done = super().pause_schedule(principal, schedule_id, paused=paused, at=at)
        row = self.backend.tables.find_schedule(principal, schedule_id)
        if before is None or row is None or paused:
            return done
        self.backend.tables.save_schedule(changed(row, progress=before.progress))
        return answered(changed(done.result(), next_at=before.progress.tick_at))


@found_by("a_schedule_is_replaced_under_its_id")
class FiresWhatWasNotRead(Scheduled):
    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        row = self.known(request)
        return super().fire_schedule(request if row is None else changed(request, revision=row.revision))


@found_by("a_schedule_ends_after_its_runs")
class RunsOn(Scheduled):
    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        return super().put_schedule(changed(request, spec=changed(request.spec, max_runs=None)))


@found_by("a_run_by_hand_leaves_the_ticks_where_they_are")
class TakesItForATick(Scheduled):
    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        row = self.known(request)
        done = super().fire_schedule(request)
        after = self.known(request)
        if request.by_hand and row is not None and after is not None and row is not after:
            assert row.progress.tick_at is not None
            tick_at = row.progress.tick_at + (row.spec.every_s or 0.0)
            self.backend.tables.save_schedule(
                changed(after, progress=changed(after.progress, tick_at=tick_at, due_at=tick_at))
            )
        return done


@found_by("principals_take_turns_when_much_is_due")
class FirstComeFirstServed(Scheduled):
    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        found = await super().due_schedules(now=now, limit=1000)
        return sorted(found, key=lambda due: due.due_at or 0.0)[:limit]


@found_by("a_clock_that_was_set_back_is_looked_at")
class TrustsTheClock(Scheduled):
    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        found = await super().due_schedules(now=now, limit=1000)
        return [due for due in found if due.due_at is not None and due.due_at <= now][:limit]


@found_by("nobody_passes_for_a_schedule")
class TakesAnyKeyForItsOwn(Scheduled):
    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        for session in self.backend.tables.sessions.values():
            for message in session.messages.values():
                message.body_hash = schedules._BODY_HASH
        return super().fire_schedule(request)


@found_by("old_events_are_dropped_only_as_far_as_they_were_read")
class DropsAllOldEvents(MemoryStore):
    async def drop_old_events(self, read: Sequence[OldEvents], *, before: float) -> int:
        return await self.prune(events_before=before, tombstones_before=0.0, idempotency_before=0.0)
