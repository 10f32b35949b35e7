"""Stores with one fault each, most of them made before by somebody. Each names the checks that find it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.errors import HoldfastError, StorageError
from holdfast.protocol.events import Stored
from holdfast.protocol.messages import Entry
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore
from holdfast.storage.event_packs import pack_events
from holdfast.storage.port import (
    ALL_BYTES,
    Append,
    Appended,
    Claim,
    Committed,
    InterruptRequest,
    InterruptResult,
    Lease,
    NotReady,
    Ready,
    RunCommit,
    Send,
    SendResult,
    Served,
    Stopped,
)

__all__ = ["FAULTS", "answered", "changed", "found_by", "later"]

FAULTS: dict[str, type[MemoryStore]] = {}
T = TypeVar("T")
changed = msgspec.structs.replace


def found_by(*checks: str) -> Callable[[Any], Any]:
    """The checks that find it."""

    def note(store: Any) -> Any:
        FAULTS.update(dict.fromkeys(checks, store))
        return store

    return note


def answered(result: T) -> asyncio.Future[T]:
    """A verb's answer, or its refusal."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def later(verb: Callable[[], asyncio.Future[T]]) -> asyncio.Future[T]:
    """A verb that is done in the next turn of the loop, whatever was asked for in between."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def do() -> None:
        done = verb()
        error = done.exception()
        if not future.done():
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)

    loop.call_soon(do)
    return future


@found_by("a_message_on_an_idle_session_starts_a_run")
class NeverAtOnce(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, run_id=None))


@found_by("a_commit_writes_everything_and_frees_the_slot")
class CommitsOnlyTheEnd(MemoryStore):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        return super().commit_run(RunCommit(lease=commit.lease, status=commit.status, at=commit.at))


@found_by("one_run_at_a_time_takes_the_mailbox_in_order")
class NewestFirst(MemoryStore):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        row = self.backend.tables.get(commit.lease.session)
        assert row is not None
        row.waiting = row.waiting[::-1]
        return super().commit_run(commit)


@found_by("without_room_a_message_waits_and_is_ready")
class ListsTheNewestFirst(MemoryStore):
    async def ready(self, *, limit: int) -> Sequence[Ready]:
        return (await super().ready(limit=1000))[::-1][:limit]


@found_by("a_repeated_claim_is_the_same_claim")
class ClaimsOnce(MemoryStore):
    def claim(
        self, session: int, *, run_id: str, at: float, served: Served | None = None
    ) -> asyncio.Future[Claim | NotReady]:
        row = self.backend.tables.get(session)
        if row is not None and row.run_id == run_id:
            return answered(NotReady(waiting=len(row.waiting), busy=True))
        return super().claim(session, run_id=run_id, at=at, served=served)


@found_by("an_idempotency_key_is_accepted_once")
class ForgetsKeysAtTheEnd(MemoryStore):
    async def close(self) -> None:
        for session in self.backend.tables.sessions.values():
            session.by_key.clear()
        await super().close()


@found_by("a_refusal_writes_nothing")
class TakesTheAgentFirst(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        row = self.backend.tables.find(request.principal, request.key)
        if row is not None and request.agent is not None:
            row.agent = request.agent
        return super().send(request)


@found_by("a_used_message_id_is_refused_alone")
class RefusesTheBatch(MemoryStore):
    refused = False

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        if self.refused:
            return answered(StorageError("the transaction was rolled back"))  # type: ignore[arg-type]
        done = super().send(request)
        self.refused = done.exception() is not None
        return done


@found_by("reject_is_decided_with_the_claim")
class LooksBeforeItWrites(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        row = self.backend.tables.find(request.principal, request.key)
        if request.policy == "reject" and (row is None or row.run_id is None):
            return later(lambda: MemoryStore.send(self, changed(request, policy="queue")))
        return super().send(request)


@found_by("collect_joins_what_comes_close_together")
class WaitsForSilence(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, max_wait_s=1e9))


@found_by("interrupt_policy_stops_the_run_and_then_takes_everything")
class TakesOneByOne(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        done = super().send(request)
        row = self.backend.tables.find(request.principal, request.key)
        assert row is not None
        row.sweep = 0
        return done


@found_by("an_interrupt_is_durable_and_aimed_at_one_run")
class HitsWhateverIsOn(MemoryStore):
    def interrupt(self, request: InterruptRequest) -> asyncio.Future[InterruptResult]:
        return super().interrupt(changed(request, run_id=None))


@found_by("how_a_run_ends_follows_the_state_table")
class FailsWhileItStops(MemoryStore):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        row = self.backend.tables.get(commit.lease.session)
        assert row is not None
        row.run_state = "running"
        return super().commit_run(commit)


@found_by("a_repeated_append_or_commit_has_no_second_effect")
class AppendsAgain(MemoryStore):
    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        return super().append(lease, events, stored_limit=stored_limit)


@found_by("a_stale_lease_writes_nothing")
class AsksForTheRunOnly(MemoryStore):
    """Writes for whoever is on, without a look at the fence."""

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        row = self.backend.tables.get(lease.session)
        if row is not None and row.run_id is not None:
            lease = Lease(row.session, row.run_id, row.fence)
        return super().append(lease, events, nth=nth, stored_limit=stored_limit)


@found_by("a_rescue_takes_over_and_fences_the_old_holder")
class RescuesUnderTheOldFence(MemoryStore):
    async def rescue(self, *, at: float, served: Served | None = None) -> Sequence[Claim]:
        claims = []
        for claim in await super().rescue(at=at, served=served):
            row = self.backend.tables.get(claim.lease.session)
            assert row is not None
            row.fence -= 1
            claims.append(changed(claim, lease=changed(claim.lease, fence=row.fence)))
        return tuple(claims)


@found_by("a_message_that_waits_can_be_withdrawn")
class WithdrawsAndRuns(MemoryStore):
    def withdraw(self, principal: str, key: str, message_id: str, *, at: float) -> Any:
        row = self.backend.tables.find(principal, key)
        waiting = () if row is None else row.waiting
        done = super().withdraw(principal, key, message_id, at=at)
        if row is not None:
            row.waiting = waiting
        return done


@found_by("a_stop_ends_the_run_and_withdraws_what_waits")
class StopsTheRunOnly(MemoryStore):
    def stop_session(self, request: InterruptRequest) -> asyncio.Future[Stopped]:
        row = self.backend.tables.find(request.principal, request.key)
        assert row is not None
        waiting, row.waiting = row.waiting, ()
        done = super().stop_session(request)
        row.waiting = waiting
        return done


@found_by("a_deleted_session_leaves_a_tombstone")
class ComesToLifeAgain(MemoryStore):
    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        done = super().delete_session(principal, key, at=at, cause=cause)
        row = self.backend.tables.find(principal, key)
        if row is not None:
            row.deleted_at = None
        return done


@found_by("after_the_purge_a_key_is_a_new_session")
class UsesNumbersAgain(MemoryStore):
    async def prune(self, **before: float) -> int:
        dropped = await super().prune(**before)
        self.backend.tables._last_number = len(self.backend.tables.sessions)
        return dropped


@found_by("pruning_drops_old_events_but_no_history")
class PrunesWhatIsOn(MemoryStore):
    async def prune(self, **before: float) -> int:
        rows = [session.row for session in self.backend.tables.sessions.values()]
        on = [row.run_id for row in rows]
        for row in rows:
            row.run_id = None
        dropped = await super().prune(**before)
        for row, run_id in zip(rows, on, strict=True):
            row.run_id = run_id
        return dropped


@found_by("concurrent_appends_are_whole_and_in_order")
class AnswersLongOnesLater(MemoryStore):
    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        done = super().append(lease, events, nth=nth, stored_limit=stored_limit)
        return done if len(events) < 3 else later(lambda: done)


@found_by("text_that_no_json_can_carry_is_written_out")
class WritesQuestionMarks(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, content=request.content.encode("utf-8", "replace").decode()))


@found_by("reads_begin_anywhere_in_the_log")
class ReadsWholeRows(MemoryStore):
    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        found = self.backend.tables.sessions.get(session)
        for pack in () if found is None else found.log:
            if pack.first_seq <= after < pack.last_seq:
                after = pack.first_seq - 1
        return await super().read_events(session, after=after, limit=limit, limit_bytes=limit_bytes)


@found_by("what_was_streamed_is_read_unchanged_after_its_rows_were_merged")
class ReadsEventsOfARunTogether(MemoryStore):
    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        page = await super().read_events(session, after=after, limit=limit, limit_bytes=limit_bytes)
        return sorted(page, key=lambda event: event.kind == "message.accepted")


@found_by("a_long_stream_reads_the_same_while_it_is_merged")
class SkipsAnEventWhereRowsMeet(MemoryStore):
    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        after += after % 512 == 511
        return await super().read_events(session, after=after, limit=limit, limit_bytes=limit_bytes)


@found_by("merged_rows_are_dropped_whole")
class KeepsMergedRowsOfTheDeleted(MemoryStore):
    async def open(self, *, node_id: str, at: float) -> None:
        await super().open(node_id=node_id, at=at)
        for found in self.backend.tables.sessions.values():
            if found.row.deleted_at is not None:
                events = [event for pack in found.log for event in pack.events]
                merged = changed(found.log[-1], first_seq=found.log[0].first_seq, body=pack_events(events))
                found.log[:] = [merged]


@found_by("what_a_principal_stores_is_counted_bounded_and_given_back")
class KnowsNoQuota(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, stored_limit=ALL_BYTES))


@found_by("what_a_principal_stores_is_counted_bounded_and_given_back")
class LetsRunsWriteOn(MemoryStore):
    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        return super().append(lease, events, nth=nth)


@found_by("what_a_principal_stores_is_counted_bounded_and_given_back")
class CommitsWithoutEnd(MemoryStore):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        return super().commit_run(changed(commit, stored_limit=ALL_BYTES))


@found_by("pages_end_where_they_have_enough_bytes")
class GivesTranscriptsOfAnySize(MemoryStore):
    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        return await super().transcript_within(session, limit_bytes=ALL_BYTES)


@found_by("pages_end_where_they_have_enough_bytes")
class PagesByCountOnly(MemoryStore):
    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        return await super().read_events(session, after=after, limit=limit)


@found_by("a_dropped_or_cancelled_caller_does_not_undo_its_write")
class CountsWhatItDrops(MemoryStore):
    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        def write() -> asyncio.Future[Appended]:
            row = self.backend.tables.get(lease.session)
            assert row is not None
            if asked.cancelled():
                row.next_seq += len(events)
                return answered(Appended(events=()))
            return MemoryStore.append(self, lease, events, nth=nth, stored_limit=stored_limit)

        asked = later(write)
        return asked


@found_by("a_closed_store_has_finished_what_it_was_given")
class DropsWhatItWasGiven(MemoryStore):
    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        def write() -> None:
            if self.backend.is_open:
                future.set_result(MemoryStore.append(self, lease, events, nth=nth, stored_limit=stored_limit).result())

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Appended] = loop.create_future()
        loop.call_soon(write)
        return future


@found_by("an_append_that_is_refused_refuses_no_other_of_its_write")
class RefusesAllTogether(MemoryStore):
    def append_all(
        self, appends: Sequence[Append], *, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[list[Appended | HoldfastError]]:
        def write() -> list[Appended | HoldfastError]:
            done = super(RefusesAllTogether, self).append_all(appends, stored_limit=stored_limit).result()
            refusals = [result for result in done if isinstance(result, HoldfastError)]
            return [*refusals[:1]] * len(done) or done

        return answered(write())


@found_by("sessions_are_listed_by_their_last_change")
class ListsByBirth(MemoryStore):
    async def sessions(self, *, principal: str | None, limit: int, before: tuple[float, int] | None = None) -> Any:
        views = await super().sessions(principal=principal, limit=1000, before=before)
        return sorted(views, key=lambda view: view.created_at, reverse=True)[:limit]


@found_by("api_keys_are_kept_and_revoked")
class RevokesAgain(MemoryStore):
    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        await super().revoke_key(key_id, at=at)
        return True
