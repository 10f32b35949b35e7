"""The store: one method for each transaction and read, over a backend that keeps the rows.

The rules that hold for all of them are in `holdfast.storage.port`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from holdfast.protocol.events import Stored
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    MailboxItem,
    Question,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import ScheduleView
from holdfast.protocol.stopping import Cause
from holdfast.storage import transactions
from holdfast.storage.backend import Backend, Tables
from holdfast.storage.values import (
    ALL_BYTES,
    ALL_ENTRIES,
    Answered,
    Appended,
    Claim,
    Committed,
    DueQuestion,
    DueSchedule,
    Edited,
    EditHistory,
    Fire,
    Fired,
    InterruptRequest,
    InterruptResult,
    KeyRecord,
    Lease,
    NotReady,
    Parked,
    PutSchedule,
    Ready,
    RunCommit,
    Send,
    SendResult,
    Steered,
    Stopped,
    StoreInfo,
)

__all__ = ["Store"]


class Store:
    """A store, over a backend that keeps its rows. Every method may raise `StorageError`.

    Parameters:
        backend: keeps the rows.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._write = backend.write
        self._read = backend.read

    async def open(self, *, node_id: str, at: float) -> None:
        """Open the store and register the node with a new epoch.

        Raises `StoreLocked`, `StoreCorrupt`, `StoreReadOnly`, `StoreFull`.
        """
        await self.backend.open(node_id=node_id, at=at)

    async def close(self) -> None:
        """Finish accepted writes, then close the store. Idempotent."""
        await self.backend.close()

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        """Accept a message: deduplicate, check limits, number, store, decide and, on an idle session with room, claim.

        Raises `MailboxFull`, `SessionBusy`, `IdempotencyMismatch`, `SessionDeleted`, `UnknownPolicy`,
        `UnknownAttachment`, `HistoryChanged` (``retry_of`` is not the last ended run), `LimitExceeded` (too many
        sessions of the principal), `QuotaExceeded` (its rows take ``stored_limit`` bytes).
        """
        return self._write("send", lambda tables: transactions.send(tables, request))

    def claim(self, session: int, *, run_id: str, at: float) -> asyncio.Future[Claim | NotReady]:
        """Start the next run of a free and ready session."""
        return self._write("claim", lambda tables: transactions.claim(tables, session, run_id, at))

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        """Write a run's events, each as its kind and one line of JSON.

        ``nth`` numbers the appends of one lease from 1; a repeated number writes nothing and returns the same answer.
        Use 0 for appends that are never retried. After ``session.deleted`` nothing is written and the answer is empty.
        Raises `StaleFence`, and `QuotaExceeded` if the principal's stored data would exceed `stored_limit`.
        """
        return self._write("append", lambda tables: transactions.append(tables, lease, events, nth, stored_limit))

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        """End a run: write its last events, transcript, settlements and final state, and free its slot.

        A run that fails while it is stopping ends ``interrupted``, with its error. Raises `StaleFence`, and
        `QuotaExceeded` as `append` does.
        """
        return self._write("commit_run", lambda tables: transactions.commit_run(tables, commit))

    def interrupt(self, request: InterruptRequest) -> asyncio.Future[InterruptResult]:
        """Make an interrupt durable, with the run that it targets. Raises `UnknownSession`, `SessionDeleted`."""
        return self._write("interrupt", lambda tables: transactions.interrupt(tables, request))

    def stop_session(self, request: InterruptRequest) -> asyncio.Future[Stopped]:
        """Stop the session: record the interrupt of the active run and withdraw queued messages.

        Raises `UnknownSession`, `SessionDeleted`.
        """
        return self._write("stop_session", lambda tables: transactions.stop_session(tables, request))

    def withdraw(
        self, principal: str, key: str, message_id: str, *, at: float
    ) -> asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]:
        """Settle a queued message as ``withdrawn``; idempotent.

        Raises `UnknownSession`, `UnknownMessage`, `AlreadySettled` (a run took it), `SessionDeleted`.
        """
        return self._write("withdraw", lambda tables: transactions.withdraw(tables, principal, key, message_id, at))

    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        """Delete the session, leaving a tombstone: as `stop_session`, with ``session.deleted`` as the last event.

        An active run may still end by `commit_run`, which then writes no event after ``session.deleted``. Raises
        `UnknownSession`, `SessionDeleted`.
        """
        return self._write(
            "delete_session", lambda tables: transactions.delete_session(tables, principal, key, at, cause)
        )

    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        """Take the queued ``steer`` messages that target this run; write ``message.steered`` for each.

        They are settled with the run. After an interrupt of the run is recorded, none is taken. Raises `StaleFence`.
        """
        return self._write("steer", lambda tables: transactions.steer(tables, lease, step, at))

    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        """Record a question to a person: the run is ``suspended`` until every open question is answered.

        A question with a known id has no effect. Raises `StaleFence`, `IllegalTransition` (the run is stopping).
        """
        return self._write("suspend", lambda tables: transactions.suspend(tables, lease, question))

    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        """Answer an open question of the active run; the last answer makes it ``running``, or resumable if parked.

        Repeating the decision and text has no effect and returns the same answer. Raises `UnknownSession`,
        `SessionDeleted`, `UnknownQuestion`, `AlreadyAnswered` (differently, or by its deadline), `InvalidRequest` (the
        wrong kind).
        """
        return self._write("answer", lambda tables: transactions.answer(tables, principal, key, answer))

    def park(self, lease: Lease, *, at: float) -> asyncio.Future[Parked]:
        """Release a suspended run. It keeps the slot and is not rescued. Raises `StaleFence`.

        Once all questions are answered, its `claim` uses the run's own id and has ``resumed`` set; `ready` lists such
        sessions. An `interrupt` of a parked run is handled by a `claim` too (with ``interrupt`` set).
        """
        return self._write("park", lambda tables: transactions.park(tables, lease, at))

    async def questions(self, session: int) -> Sequence[Question]:
        """Return the open questions of the active run, oldest first."""
        return await self._read(lambda reads: reads.questions(session))

    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        """Return open questions with ``due_at`` < before, the longest due first."""
        return await self._read(lambda reads: reads.due_questions(before=before, limit=limit))

    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        """Change a transcript. Refused while a run is active or messages wait.

        Raises `UnknownSession`, `SessionDeleted`, `SessionBusy`, `HistoryChanged` (``expected_n``), `NothingToUndo`,
        `UnknownAttachment`, `LimitExceeded`, `QuotaExceeded`. An ``undo`` is never refused because of its size.
        """
        return self._write("edit_history", lambda tables: transactions.edit_history(tables, request))

    def add_attachment(
        self,
        principal: str,
        attachment: Attachment,
        body: bytes | bytearray,
        *,
        at: float,
        limit_bytes: int,
        stored_limit: int = ALL_BYTES,
    ) -> asyncio.Future[Attachment]:
        """Store the bytes under their digest, once per principal; a repeated call returns the stored attachment.

        Raises `LimitExceeded` if the principal's attachments would take more than `limit_bytes` in total, and
        `QuotaExceeded` if its stored data would exceed `stored_limit`.
        """
        return self._write(
            "add_attachment",
            lambda tables: transactions.add_attachment(
                tables, principal, attachment, body, at, limit_bytes, stored_limit
            ),
        )

    async def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        """Return the principal's attachment with that digest, without its bytes."""
        return await self._read(lambda reads: reads.attachment_about(principal, digest))

    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        """Return the principal's attachment with that digest."""
        return await self._read(lambda reads: reads.attachment(principal, digest))

    async def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        """Return at most `size` bytes of an attachment, from `start` on; None if the attachment does not exist."""
        return await self._read(lambda reads: reads.attachment_part(principal, digest, start=start, size=size))

    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        """Create a schedule, or replace its spec. Idempotent.

        A replaced schedule stays paused if it was; its ticks and counters start anew if its cadence changed. Raises
        `LimitExceeded` (too many schedules of the principal), `QuotaExceeded`, `InvalidSchedule`.
        """
        return self._write("put_schedule", lambda tables: transactions.put_schedule(tables, request))

    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        """Pause or resume a schedule; idempotent. Ticks during the pause do not count.

        Raises `UnknownSchedule`.
        """
        return self._write(
            "pause_schedule", lambda tables: transactions.pause_schedule(tables, principal, schedule_id, paused, at)
        )

    def delete_schedule(self, principal: str, schedule_id: str) -> asyncio.Future[ScheduleView]:
        """Delete a schedule; return its last state. Raises `UnknownSchedule`."""
        return self._write(
            "delete_schedule", lambda tables: transactions.delete_schedule(tables, principal, schedule_id)
        )

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        """Accept the message of a schedule's tick as `send` does, and advance the schedule, in one transaction.

        If the message is refused, that is counted and noted instead, and the schedule continues. If the schedule was
        fired or changed since it was read, nothing is done, so a repetition has no second effect. When fired by hand,
        it raises the errors of `send`, and `ScheduleFinished`, `ScheduleChanged` and `UnknownAgent`.
        """
        return self._write("fire_schedule", lambda tables: transactions.fire_schedule(tables, request))

    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        """Return schedules to check: those that are due, and those whose clock was set back.

        Principals take turns: first the longest due schedule of each principal, then the second of each, and so on.
        """
        return await self._read(lambda reads: reads.due_schedules(now=now, limit=limit))

    async def next_schedule(self) -> float | None:
        """Return when the first of all schedules is due; None if none has a due time."""
        return await self._read(lambda reads: reads.next_schedule())

    async def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        """Return a schedule's row and its public view."""
        return await self._read(lambda reads: reads.schedule(principal, schedule_id))

    async def schedules(
        self, *, principal: str | None, limit: int, session: str | None = None
    ) -> Sequence[ScheduleView]:
        """Return schedules in the order of their creation, of one principal (and session) or of all."""
        return await self._read(lambda reads: reads.schedules(principal=principal, session=session, limit=limit))

    async def rescue(self, *, at: float) -> Sequence[Claim]:
        """Take over every run whose holder is not this node's epoch, the longest running first.

        Fence and attempt increase by one; ``run.restarted`` is not written yet.
        """
        return await self._write("rescue", lambda tables: transactions.rescue(tables, at))

    def restart(self, lease: Lease, *, at: float, discard_from: int | None = None) -> asyncio.Future[Appended]:
        """Write ``run.restarted`` for a rescued run that runs again. Raises `StaleFence`.

        Readers drop output from seq ``discard_from`` on; None: from the start of the run.
        """
        return self._write("restart", lambda tables: transactions.restart(tables, lease, at, discard_from))

    async def ready(self, *, limit: int) -> Sequence[Ready]:
        """Return sessions with queued messages and no run, or with a parked run that no longer waits for an answer.

        Those that have waited longest come first; a parked run counts from its start.
        """
        return await self._read(lambda reads: reads.ready(limit=limit))

    async def stored_bytes(self, principal: str) -> int:
        """Return the bytes that a principal's rows take: messages, events, transcripts, attachments and schedules.

        A counter is updated whenever rows are written or dropped.
        """
        return await self._read(lambda reads: reads.stored_bytes(principal))

    async def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        """Return the principals with the most stored bytes, the largest first."""
        return await self._read(lambda reads: reads.most_stored(limit=limit))

    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        """Return events with seq > after, in order, about `limit` at most (a store may round up to whole rows).

        No row is added once their bodies have `limit_bytes` or more, so a page is never empty because of that limit.
        """
        return await self._read(lambda reads: reads.events(session, after=after, limit=limit, limit_bytes=limit_bytes))

    async def oldest_seq(self, session: int) -> int:
        """Return the seq of the oldest event that is kept (1 if nothing was pruned)."""
        return await self._read(lambda reads: reads.oldest_seq(session))

    async def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        """Return all stored events of one run: its journal."""
        return await self._read(lambda reads: reads.run_events(session, run_id))

    async def transcript(
        self, session: int, *, after: int = 0, limit: int = ALL_ENTRIES, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Entry]:
        """Return entries with n > after, from a single moment, without the bodies of agent state kept with them.

        No entry is added once they have `limit_bytes` or more as JSON, so a page is never empty because of that limit.
        """
        return await self._read(
            lambda reads: reads.transcript(session, after=after, limit=limit, limit_bytes=limit_bytes)
        )

    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        """Return all entries, as `transcript`; or, if they exceed `limit_bytes`, the number of bytes they take."""
        return await self._read(lambda reads: reads.transcript_within(session, limit_bytes=limit_bytes))

    async def kept(self, session: int, n: int) -> str:
        """Return the state that an agent kept with this entry (`AgentState.n`), even an undone one; empty if none."""
        return await self._read(lambda reads: reads.kept(session, n))

    async def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        """Return the session's row number and view; a deleted one is found until it is purged, with state
        ``deleted``."""
        return await self._read(lambda reads: reads.find_session(principal, key))

    async def sessions(
        self, *, principal: str | None, limit: int, before: float | None = None
    ) -> Sequence[SessionView]:
        """Return sessions of a principal (None: of all), the most recently changed first."""
        return await self._read(lambda reads: reads.sessions(principal=principal, limit=limit, before=before))

    async def mailbox(self, session: int) -> Sequence[MailboxItem]:
        """Return queued messages, in order."""
        return await self._read(lambda reads: reads.mailbox(session))

    async def settlement(self, session: int, message_id: str) -> Settlement | None:
        """Return the outcome of a message, with the text, cause and error of its run."""
        return await self._read(lambda reads: reads.settlement(session, message_id))

    async def run(self, session: int, run_id: str) -> RunView | None:
        """Return a run."""
        return await self._read(lambda reads: reads.run(session, run_id))

    async def runs(self, session: int, *, limit: int = 100) -> Sequence[RunView]:
        """Return runs, the newest first."""
        return await self._read(lambda reads: reads.runs(session, limit=limit))

    async def prune(
        self,
        *,
        events_before: float,
        tombstones_before: float,
        idempotency_before: float,
        attachments_before: float = 0.0,
    ) -> int:
        """Drop old events of ended runs, purge tombstones and old idempotency keys; transcripts stay.

        Queued messages and data of the active run are kept. Attachments that no session uses are dropped if they were
        (last) uploaded before ``attachments_before``. Return the number of rows dropped or changed.
        """

        def prune(tables: Tables, *, after: int) -> tuple[int, int | None]:
            return tables.prune(
                events_before=events_before,
                tombstones_before=tombstones_before,
                idempotency_before=idempotency_before,
                attachments_before=attachments_before,
                after=after,
            )

        total = 0
        after: int | None = 0
        while after is not None:  # in small transactions, so that others get their turn
            dropped, after = await self._write("prune", partial(prune, after=after))
            total += dropped
        return total

    async def add_key(self, record: KeyRecord) -> None:
        """Store an API key's hash."""
        await self._write("add_key", lambda tables: tables.add_key(record))

    async def keys(self) -> Sequence[KeyRecord]:
        """Return all API keys, including revoked ones."""
        return await self._read(lambda reads: reads.keys())

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        """Revoke a key; return False if no valid key has that id."""
        return await self._write("revoke_key", lambda tables: tables.revoke_key(key_id, at))

    async def info(self) -> StoreInfo:
        """Return figures about the store, for display."""
        sessions = await self._read(lambda reads: reads.live_sessions())
        backend = self.backend
        counters = backend.counters
        return StoreInfo(
            engine=backend.engine,
            path=backend.path,
            version=backend.version,
            commits=counters.commits,
            batches=counters.batches,
            sessions=sessions,
            stale_writes_refused=counters.stale_writes_refused,
            duplicates_prevented=counters.duplicates_prevented,
        )
