"""The store: one method for each transaction and each read, over a backend that keeps the rows.

`holdfast.storage.port` lists the rules that all these methods obey.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.protocol.events import Stored
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    Grant,
    MailboxItem,
    Question,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import ScheduleView
from holdfast.protocol.stopping import Cause
from holdfast.storage import transactions
from holdfast.storage.backend import Backend, PruneTimes, Tables
from holdfast.storage.cluster import Cluster
from holdfast.storage.values import (
    ALL_BYTES,
    ALL_ENTRIES,
    Answered,
    Append,
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
    OldEvents,
    Parked,
    PutSchedule,
    Ready,
    RunCommit,
    Send,
    SendResult,
    Served,
    Steered,
    Stopped,
    StoreHealth,
    StoreInfo,
)

__all__ = ["Store"]


class Store:
    """A store over a backend. Every method may raise `StorageError`.

    Parameters:
        backend: backend that keeps the store's rows.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._write = backend.write
        self._read = backend.read

    @property
    def cluster(self) -> Cluster | None:
        """The nodes that share this store; None if only one node can use it."""
        return self.backend.cluster

    async def open(self, *, node_id: str, at: float) -> None:
        """Open the store and register the node with a new epoch.

        Raises `StoreLocked`, `StoreCorrupt`, `StoreReadOnly`, `StoreFull`.
        """
        await self.backend.open(node_id=node_id, at=at)

    async def close(self) -> None:
        """Finish accepted writes, then close the store. Idempotent."""
        await self.backend.close()

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        """Accept a message, unless it is a duplicate or exceeds a limit, and apply its policy.

        If the session is idle and the host has room, the message's run is claimed in the same transaction (except with
        the policy ``collect``, which waits for further messages).
        Raises `MailboxFull`, `SessionBusy`, `IdempotencyMismatch`, `SessionDeleted`, `SessionAgentMissing`,
        `UnknownPolicy`, `UnknownAgent`, `UnknownAttachment`, `HistoryChanged` (if ``retry_of`` is not the last ended
        run), `LimitExceeded` (if the principal has too many sessions), `QuotaExceeded` (if the principal's rows would
        exceed ``stored_limit``).
        """
        return self._write("send", lambda tables: transactions.send(tables, request))

    def claim(
        self, session: int, *, run_id: str, at: float, served: Served | None = None
    ) -> asyncio.Future[Claim | NotReady]:
        """Start the next run of a session that has due messages and no run, or resume its parked run.

        Return `NotReady` if neither is possible, if the run's agent is not among `served` (None serves all agents), or
        if the session has files in another ``workspace_pool``. Without them, a node may claim only a run that was
        interrupted, or that a node without its agent has parked in a `rescue`: to end it, or to park it again.
        """
        return self._write("claim", lambda tables: transactions.claim(tables, session, run_id, at, served))

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        """Write events of a run, each given as its kind and one line of JSON.

        ``nth`` numbers the appends under one lease, from 1. Repeating the last number writes nothing and returns the
        same result. Use 0 for appends that are never retried. After ``session.deleted``, nothing is written and the
        result is empty. Raises `StaleFence`, and `QuotaExceeded` if the principal's stored data would exceed
        `stored_limit`.
        """
        return self._write("append", lambda tables: transactions.append(tables, lease, events, nth, stored_limit))

    def append_all(
        self, appends: Sequence[Append], *, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[list[Appended | HoldfastError]]:
        """Write events of several runs in one transaction, and return the result of each append, in order.

        The errors of `append` refuse only their own append, and are returned in place of its result. Any other error is
        raised for all of them.
        """
        return self._write("append", lambda tables: transactions.append_all(tables, appends, stored_limit))

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        """End a run: write its last events, transcript, settlements and final state, and free the session's slot.

        A run that fails while it is stopping ends as ``interrupted`` and keeps its error. Raises `StaleFence`, and
        `QuotaExceeded` if the principal's stored data would exceed ``stored_limit``.
        """
        return self._write("commit_run", lambda tables: transactions.commit_run(tables, commit))

    def interrupt(self, request: InterruptRequest) -> asyncio.Future[InterruptResult]:
        """Record an interrupt of the active run durably. Raises `UnknownSession`, `SessionDeleted`."""
        return self._write("interrupt", lambda tables: transactions.interrupt(tables, request))

    def stop_session(self, request: InterruptRequest) -> asyncio.Future[Stopped]:
        """Stop the session: record an interrupt of the active run and withdraw all queued messages.

        Raises `UnknownSession`, `SessionDeleted`.
        """
        return self._write("stop_session", lambda tables: transactions.stop_session(tables, request))

    def withdraw(
        self, principal: str, key: str, message_id: str, *, at: float
    ) -> asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]:
        """Settle a queued message as ``withdrawn``. Idempotent.

        Raises `UnknownSession`, `UnknownMessage`, `AlreadySettled` (if a run has taken the message), `SessionDeleted`.
        """
        return self._write("withdraw", lambda tables: transactions.withdraw(tables, principal, key, message_id, at))

    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        """Stop the session as `stop_session` does, write ``session.deleted`` as its last event and leave a tombstone.

        An active run may still be ended with `commit_run`, which then writes no more events. Raises `UnknownSession`,
        `SessionDeleted`.
        """
        return self._write(
            "delete_session", lambda tables: transactions.delete_session(tables, principal, key, at, cause)
        )

    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        """Take the queued ``steer`` messages that target this run, and write ``message.steered`` for each of them.

        These messages are settled when the run ends. Once an interrupt of the run is recorded, the run takes no more
        messages. Raises `StaleFence`.
        """
        return self._write("steer", lambda tables: transactions.steer(tables, lease, step, at))

    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        """Record a question to a person. The run stays ``suspended`` until all its open questions are answered.

        Recording a question with a known id has no effect. Raises `StaleFence`, `IllegalTransition` (if the run is
        stopping).
        """
        return self._write("suspend", lambda tables: transactions.suspend(tables, lease, question))

    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        """Answer an open question of the active run.

        The last answer makes the run ``running`` again; if the run is parked, a `claim` may then resume it. If the
        answer's scope is the session or the principal, a `Grant` is recorded too. Repeating an answer with the same
        decision, text and scope has no effect and returns the earlier answer. Raises `UnknownSession`,
        `SessionDeleted`, `UnknownQuestion`, `AlreadyAnswered` (if the answer differs from an earlier one or the
        question has expired), `CallMismatch` (if a different call was approved), `InvalidRequest` (if the decision or
        the scope does not fit the question), `LimitExceeded` (if the principal has too many grants).
        """
        return self._write("answer", lambda tables: transactions.answer(tables, principal, key, answer))

    async def grants(self, principal: str, *, session: int | None = None) -> Sequence[Grant]:
        """Return a principal's grants, oldest first.

        Parameters:
            principal: principal that has the access.
            session: number of a session: return only the grants that hold in this session; None returns all.
        """
        return await self._read(lambda reads: reads.grants(principal, session))

    def revoke_grant(self, principal: str, grant_id: str) -> asyncio.Future[Grant]:
        """Delete a grant and return it. Raises `UnknownGrant`."""
        return self._write("revoke_grant", lambda tables: transactions.revoke_grant(tables, principal, grant_id))

    def park(
        self, lease: Lease, *, at: float, restarts: bool = False, handed_over: bool = False
    ) -> asyncio.Future[Parked]:
        """Park a run, so that no node holds the run any more. Raises `StaleFence`.

        A parked run keeps its session's slot and is not rescued. Once all its questions are answered or an interrupt of
        the run is recorded, `ready` lists the session. The next `claim` then returns the same run, with ``resumed`` set
        and, if an interrupt was recorded, with its cause as ``interrupt``.

        Parameters:
            restarts: whether the run was at work instead of suspended, so that its next claim is a further attempt.
            handed_over: whether this node took the run over and leaves it to others. The next claim has the same mark.
        """
        return self._write(
            "park", lambda tables: transactions.park(tables, lease, at, restarts=restarts, handed_over=handed_over)
        )

    def use_workspace(self, lease: Lease) -> asyncio.Future[Appended]:
        """Record that the run's session has files in this node's ``workspace_pool``. Raises `StaleFence`.

        From then on, only nodes of this pool start and resume runs of the session; others may end an interrupted run.
        Nothing is written if the node declares no pool, or if the session already has one. No events are written.
        """
        return self._write("use_workspace", lambda tables: transactions.use_workspace(tables, lease))

    async def questions(self, session: int) -> Sequence[Question]:
        """Return the open questions of the active run, oldest first."""
        return await self._read(lambda reads: reads.questions(session))

    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        """Return at most `limit` open questions with a ``due_at`` earlier than `before`, the earliest first."""
        return await self._read(lambda reads: reads.due_questions(before=before, limit=limit))

    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        """Change the transcript of an idle session.

        Raises `UnknownSession`, `SessionDeleted`, `SessionBusy` (if a run is active, messages are queued or, for
        ``branch`` and ``import``, the session already has a history), `HistoryChanged` (if the last entry is not
        ``expected_n``), `NothingToUndo`, `UnknownAttachment`, `LimitExceeded` and, except for ``undo``,
        `QuotaExceeded`.
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
        """Store an attachment's bytes under their digest, once per principal.

        If the principal already has an attachment with this digest, the stored attachment is returned. Raises
        `LimitExceeded` if the principal's attachments would take more than `limit_bytes` in total, and `QuotaExceeded`
        if the principal's stored data would exceed `stored_limit`.
        """
        return self._write(
            "add_attachment",
            lambda tables: transactions.add_attachment(
                tables, principal, attachment, body, at, limit_bytes, stored_limit
            ),
        )

    async def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        """Return the principal's attachment with that digest, without its bytes; None if it does not exist."""
        return await self._read(lambda reads: reads.attachment_about(principal, digest))

    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        """Return the principal's attachment with that digest, and its bytes; None if it does not exist."""
        return await self._read(lambda reads: reads.attachment(principal, digest))

    async def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        """Return at most `size` bytes of an attachment from offset `start`; None if the attachment does not exist."""
        return await self._read(lambda reads: reads.attachment_part(principal, digest, start=start, size=size))

    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        """Create a schedule, or replace the spec of an existing one. Idempotent.

        A replaced schedule stays paused if it was paused. Its ticks and counters start over only if its cadence has
        changed. Raises `LimitExceeded` (if the principal has too many schedules), `QuotaExceeded`, `InvalidSchedule`.
        """
        return self._write("put_schedule", lambda tables: transactions.put_schedule(tables, request))

    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        """Pause or resume a schedule. Idempotent.

        Ticks during the pause are not counted as missed. Raises `UnknownSchedule`, `ScheduleBroken`.
        """
        return self._write(
            "pause_schedule", lambda tables: transactions.pause_schedule(tables, principal, schedule_id, paused, at)
        )

    def delete_schedule(self, principal: str, schedule_id: str) -> asyncio.Future[ScheduleView]:
        """Delete a schedule and return its last state. Raises `UnknownSchedule`."""
        return self._write(
            "delete_schedule", lambda tables: transactions.delete_schedule(tables, principal, schedule_id)
        )

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        """Send the message of a schedule's due tick as `send` does, and advance the schedule, in one transaction.

        If the message is refused, the refusal is counted and recorded, and the schedule continues. If the schedule was
        fired or changed since the caller read it, nothing is done, so that a repeated call has no effect. A call
        ``by_hand`` raises the errors of `send`, and `ScheduleFinished`, `ScheduleChanged`, `ScheduleBroken` and
        `UnknownAgent`.
        """
        return self._write("fire_schedule", lambda tables: transactions.fire_schedule(tables, request))

    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        """Return the schedules to check: those that are due, and those last checked before the clock was set back.

        Principals take turns: first the most overdue schedule of each principal, then the second most overdue schedule
        of each principal, and so on.
        """
        return await self._read(lambda reads: reads.due_schedules(now=now, limit=limit))

    async def next_schedule(self) -> float | None:
        """Return the earliest due time of all schedules; None if no schedule has a due time."""
        return await self._read(lambda reads: reads.next_schedule())

    async def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        """Return the data of a schedule that `fire_schedule` needs, and its public view; None if it does not exist."""
        return await self._read(lambda reads: reads.schedule(principal, schedule_id))

    async def schedules(
        self, *, principal: str | None, limit: int, session: str | None = None
    ) -> Sequence[ScheduleView]:
        """Return at most `limit` schedules of a principal, in order of creation.

        If `session` is given, only schedules that send to this session are returned. If `principal` is None, schedules
        of all principals are returned and `session` is ignored.
        """
        return await self._read(lambda reads: reads.schedules(principal=principal, session=session, limit=limit))

    async def rescue(self, *, at: float, served: Served | None = None) -> Sequence[Claim]:
        """Take over every run whose holder has ended, and return the claims, the oldest run first.

        Each run's fence and attempt increase by one. The caller writes ``run.restarted`` with `restart`. A run whose
        agent is not among `served` is parked for a node that has the agent; None serves all agents. Sessions of another
        ``workspace_pool`` are rescued, too, because runs that cannot resume end without their files.
        """
        return await self._write("rescue", lambda tables: transactions.rescue(tables, at, served))

    def restart(self, lease: Lease, *, at: float, discard_from: int | None = None) -> asyncio.Future[Appended]:
        """Write ``run.restarted`` for a rescued run that runs again. Raises `StaleFence`.

        Readers discard the run's output from seq `discard_from` on; None discards all output of the run.
        """
        return self._write("restart", lambda tables: transactions.restart(tables, lease, at, discard_from))

    async def ready(self, *, limit: int) -> Sequence[Ready]:
        """Return sessions with queued messages and no run, or with a parked run that no longer waits for an answer.

        Sessions are ordered by waiting time, the longest first. A parked run counts as waiting since its start.
        """
        return await self._read(lambda reads: reads.ready(limit=limit))

    async def stored_bytes(self, principal: str) -> int:
        """Return the size of a principal's rows in bytes: messages, events, transcripts, attachments and schedules.

        The result is read from a counter, which is updated whenever rows are written or dropped.
        """
        return await self._read(lambda reads: reads.stored_bytes(principal))

    async def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        """Return the `limit` principals with the most stored bytes, in descending order, each with its stored bytes."""
        return await self._read(lambda reads: reads.most_stored(limit=limit))

    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        """Return a page of events with seq > `after`, in order.

        The page has at most `limit` events, rounded up to whole rows. It also ends with the row that brings the page's
        size to `limit_bytes` or more, so a page is never empty because of that limit.
        """
        return await self._read(lambda reads: reads.events(session, after=after, limit=limit, limit_bytes=limit_bytes))

    async def oldest_seq(self, session: int) -> int:
        """Return the seq of the session's oldest stored event; 1 if no event was pruned."""
        return await self._read(lambda reads: reads.oldest_seq(session))

    async def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        """Return all stored events of one run: its journal."""
        return await self._read(lambda reads: reads.run_events(session, run_id))

    async def transcript(
        self, session: int, *, after: int = 0, limit: int = ALL_ENTRIES, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Entry]:
        """Return a page of at most `limit` transcript entries with n > `after`, read from one snapshot.

        The page also ends with the entry that brings the page's size as JSON to `limit_bytes` or more, so a page is
        never empty because of that limit. The entries' agent states omit their bodies.
        """
        return await self._read(
            lambda reads: reads.transcript(session, after=after, limit=limit, limit_bytes=limit_bytes)
        )

    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        """Return all transcript entries, or only their total size in bytes if this size exceeds `limit_bytes`."""
        return await self._read(lambda reads: reads.transcript_within(session, limit_bytes=limit_bytes))

    async def kept(self, session: int, n: int) -> str:
        """Return the agent state stored with entry `n`, even if the entry was undone; empty if none is stored."""
        return await self._read(lambda reads: reads.kept(session, n))

    async def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        """Return the session's row number and view; None if the session does not exist.

        A deleted session is returned with state ``deleted`` until it is purged.
        """
        return await self._read(lambda reads: reads.find_session(principal, key))

    async def sessions(
        self, *, principal: str | None, limit: int, before: tuple[float, int] | None = None
    ) -> Sequence[SessionView]:
        """Return at most `limit` sessions of a principal, the most recently changed first.

        Parameters:
            principal: owner of the sessions; None returns the sessions of all principals.
            limit: maximum number of sessions.
            before: ``updated_at`` and ``number`` of the last session of the previous page; None returns the first page.
                A session that changes between two pages moves to the front of the list, so the second page misses it.
        """
        return await self._read(lambda reads: reads.sessions(principal=principal, limit=limit, before=before))

    async def mailbox(self, session: int) -> Sequence[MailboxItem]:
        """Return the session's queued messages, in order."""
        return await self._read(lambda reads: reads.mailbox(session))

    async def settlement(self, session: int, message_id: str) -> Settlement | None:
        """Return the outcome of a message, with its run's text, cause and error; None if the message is unknown."""
        return await self._read(lambda reads: reads.settlement(session, message_id))

    async def run(self, session: int, run_id: str) -> RunView | None:
        """Return the view of a run, active or ended; None if the run does not exist."""
        return await self._read(lambda reads: reads.run(session, run_id))

    async def runs(self, session: int, *, limit: int = 100) -> Sequence[RunView]:
        """Return at most `limit` runs of the session, the newest first."""
        return await self._read(lambda reads: reads.runs(session, limit=limit))

    async def old_events(
        self, *, before: float, after: tuple[float, int] | None = None, limit_bytes: int
    ) -> tuple[Sequence[OldEvents], tuple[float, int] | None]:
        """Return the next events that `prune` would drop, and the ``after`` for the next call, None at the end.

        Call `drop_old_events` between two calls. Events of deleted sessions are left out.

        Parameters:
            before: time before which events are old.
            after: position after which to continue; None starts with the oldest events of all sessions.
            limit_bytes: the call ends with the row that brings the size of the rows to this number of bytes or more.
        """
        return await self._read(lambda reads: reads.old_events(before=before, after=after, limit_bytes=limit_bytes))

    async def drop_old_events(self, read: Sequence[OldEvents], *, before: float) -> int:
        """Drop events that `old_events` has returned for the same ``before``; return the number of rows dropped.

        Events are dropped in whole rows. A row that was merged with later ones in the meantime is kept, and
        `old_events` returns its events again.
        """
        return await self._write("prune", lambda tables: tables.drop_old_events(read, before=before))

    async def prune(
        self,
        *,
        events_before: float,
        tombstones_before: float,
        idempotency_before: float,
        attachments_before: float = 0.0,
    ) -> int:
        """Drop old events of ended runs, old tombstones, old idempotency keys and unused attachments.

        Transcripts, queued messages and data of the active run are kept. An attachment that no session uses is dropped
        if it was last uploaded before ``attachments_before``. Return the number of rows dropped or changed.
        """

        before = PruneTimes(tombstones_before, events_before, idempotency_before, attachments_before)

        def prune(tables: Tables, *, after: tuple[Any, ...]) -> tuple[int, tuple[Any, ...] | None]:
            return tables.prune(before, after)

        total = 0
        after: tuple[Any, ...] | None = ()
        while after is not None:  # in small transactions, so that others get their turn
            dropped, after = await self._write("prune", partial(prune, after=after))
            total += dropped
        return total

    async def add_key(self, record: KeyRecord) -> None:
        """Store the record of an API key, which contains the hash of the key's secret."""
        await self._write("add_key", lambda tables: tables.add_key(record))

    async def keys(self) -> Sequence[KeyRecord]:
        """Return all API keys, including revoked ones."""
        return await self._read(lambda reads: reads.keys())

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        """Revoke a key; return False if no valid key has that id."""
        return await self._write("revoke_key", lambda tables: tables.revoke_key(key_id, at))

    def health(self) -> StoreHealth:
        """Return whether the store can be used now, and how long this host surely holds its runs. Does not wait."""
        return self.backend.health()

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
