"""Interface of the store: the verbs that every store offers, and the values they take and return.

Rules for every store, checked by the conformance suite (`holdfast.testing.suites.store`):

- Each verb is one transaction: when the call returns, all of it is durable, or nothing is.
- ``append``, ``commit_run`` and every write of a run check its `Lease` (fence **and** run id) inside the write and
  raise `StaleFence` if it does not hold.
- One counter per session numbers all its events, without gaps.
- Results are returned in the order in which they became durable.
- Readiness and limits come from counters in the session row.
- Verbs that a caller retries after a lost reply have no second effect and the same answer: `send` by idempotency key,
  `claim`, `commit_run` and `interrupt` by run id, `append` by its number under the lease.
- A write continues whatever happens to its caller: verbs that write return an `asyncio.Future`, which the caller may
  drop, shield or add done callbacks to. Errors arrive through it too; nothing is raised directly, because hosts write
  from callbacks. The futures of one session are resolved in the order of its event numbers, and a future's done
  callbacks run in the order in which they were added (as in asyncio), so a host can publish from them.

Stores do not know tasks or agents. Call all verbs on the event loop that opened the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

from holdfast.protocol.events import Stored
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Disposition,
    Entry,
    HistoryEdit,
    MailboxItem,
    Message,
    Question,
    RunView,
    SessionView,
    Settlement,
    Usage,
)
from holdfast.protocol.schedules import ScheduleSpec, ScheduleView
from holdfast.protocol.stopping import Cause, StopReceipt

__all__ = [
    "ALL_BYTES",
    "ALL_ENTRIES",
    "Answered",
    "Appended",
    "Claim",
    "Committed",
    "DueQuestion",
    "DueSchedule",
    "EditHistory",
    "Edited",
    "Fire",
    "Fired",
    "Interrupt",
    "Interrupted",
    "KeyRecord",
    "Lease",
    "NotReady",
    "Parked",
    "PutSchedule",
    "Ready",
    "RunCommit",
    "Send",
    "SendResult",
    "Steered",
    "Stopped",
    "Store",
    "StoreInfo",
]

ALL_ENTRIES: Final = 2**62
"""As a limit: unlimited."""
ALL_BYTES: Final = 2**62
"""As a limit: unlimited."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to write for one run of one session."""

    session: int
    run_id: str
    fence: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that this node holds, with its messages.

    Parameters:
        lease: the right to write.
        number: public number of the session (part of cursors).
        principal, key, agent: owner and key of the session, and name of the agent.
        attempt: 1, or more after crashes.
        messages: messages of the run, oldest first.
        started_seq: seq of ``run.started`` (later events belong to the run).
        interrupt: cause of a recorded interrupt of this run, if any.
        events: events that the claim wrote (``run.started``; none for a resumed run).
        questions: questions that a rescued suspended run still waits for.
        resumed: the run was suspended and parked, and now resumes; its journal is in `run_events`.
    """

    lease: Lease
    number: int
    principal: str
    key: str
    agent: str
    attempt: int
    messages: tuple[Message, ...]
    started_seq: int
    interrupt: Cause | None = None
    events: tuple[Stored, ...] = ()
    questions: tuple[Question, ...] = ()
    resumed: bool = False


class Send(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message to accept.

    Parameters:
        principal, key: session; created if missing.
        agent: agent of a new session. For an existing one, None keeps its agent and a name changes it for runs that
            start later.
        message_id, content, policy, at: the message.
        idempotency_key: accept the same key once per session; None disables the check.
        body_hash: hash of what the caller sent; another hash with the same key is an `IdempotencyMismatch`.
        run_id: id for the run if it starts at once; None if the host is at its limit.
        quiet_s, max_wait_s: for ``collect``.
        mailbox_limit: maximum number of queued messages.
        mailbox_size: maximum total characters of queued messages; a single message may have more.
        session_limit: maximum number of sessions of the principal.
        attachments: attachments whose bytes are already stored.
        retry_of: the last ended run, whose entries leave the transcript in the same transaction.
        agents: agents that may answer; the send is refused for others. None: all.
        stored_limit: maximum bytes that the principal may store.
    """

    principal: str
    key: str
    agent: str | None
    default_agent: str
    message_id: str
    content: str
    policy: str
    at: float
    idempotency_key: str | None = None
    body_hash: bytes = b""
    run_id: str | None = None
    quiet_s: float = 1.0
    max_wait_s: float = 10.0
    mailbox_limit: int = 100
    mailbox_size: int = ALL_BYTES
    session_limit: int = 10_000
    attachments: tuple[Attachment, ...] = ()
    retry_of: str | None = None
    agents: frozenset[str] | None = None
    stored_limit: int = ALL_BYTES


class SendResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of a send.

    Parameters:
        session, number: row and public number of the session.
        message_id, seq: of this message; of the first one if ``disposition`` is ``duplicate``.
        disposition: decision for the message.
        run_id: run that took the message or that it targets.
        claim: run to start, for ``started``.
        interrupt: run to stop, for ``interrupting`` and ``rolling_back``; if its ``run.stopping`` is new, it is among
            ``events``.
        not_before: for ``collecting``, when the batch is due.
        events: events that were written.
    """

    session: int
    number: int
    message_id: str
    seq: int
    disposition: Disposition
    run_id: str | None = None
    claim: Claim | None = None
    interrupt: str | None = None
    not_before: float = 0.0
    events: tuple[Stored, ...] = ()


class NotReady(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claim found nothing to run: no message waits, a run is active, or nothing is due before ``not_before``."""

    waiting: int
    not_before: float = 0.0
    busy: bool = False


class Appended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Events with their numbers."""

    events: tuple[Stored, ...]


class Steered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Messages that the active run took, oldest first; the log has ``message.steered`` for each."""

    messages: tuple[Message, ...]
    events: tuple[Stored, ...] = ()


class Parked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """No node holds the run any more. ``ready``: all its questions are answered, so a `claim` may resume it at once."""

    ready: bool


class Answered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A durable answer.

    Parameters:
        session, number: row and public number of the session.
        run_id: the suspended run.
        answer: answer in the log; the first one if the same decision was given before.
        waiting: number of questions still open.
        parked: no node holds the run: with ``waiting`` 0, a `claim` of the session resumes it.
        events: events that were written (``run.resumed``).
    """

    session: int
    number: int
    run_id: str
    answer: Answer
    waiting: int
    parked: bool
    events: tuple[Stored, ...] = ()


class DueQuestion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An open question and its session."""

    principal: str
    key: str
    question: Question


class EditHistory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A change of a transcript while no run is active.

    Parameters:
        principal, key: session. ``import`` and ``branch`` create it, and refuse one with a history.
        edit: ``undo`` removes the entries of the newest history row (a run's, or an edit's); the others replace the
            whole transcript with `entries`.
        at: seconds since the epoch.
        entries: for all but ``undo``; the store assigns ``n``.
        expected_n: last ``n`` of the transcript that the caller saw (0: empty); None disables the check.
        agent: agent of a new session.
        session_limit: maximum number of sessions of the principal.
        stored_limit: maximum bytes that the principal may store.
    """

    principal: str
    key: str
    edit: HistoryEdit
    at: float
    entries: Sequence[Entry] = ()
    expected_n: int | None = None
    agent: str = ""
    session_limit: int = 10_000
    stored_limit: int = ALL_BYTES


class Edited(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Entries that an edit removed, and events that it wrote (``history.edited``)."""

    session: int
    number: int
    removed: tuple[Entry, ...]
    events: tuple[Stored, ...] = ()


class PutSchedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A schedule to create or replace.

    Parameters:
        principal, schedule_id: owner, and id among the owner's schedules.
        spec: the schedule; already checked by the caller.
        at: seconds since the epoch.
        limit: maximum number of schedules of the principal.
        stored_limit: maximum bytes that the principal may store.
    """

    principal: str
    schedule_id: str
    spec: ScheduleSpec
    at: float
    limit: int = 1000
    stored_limit: int = ALL_BYTES


class DueSchedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A schedule to check, as it was when read.

    Parameters:
        schedule: its row.
        revision: revision of the row; every change increments it.
        principal, schedule_id, spec: owner, id and specification.
        due_at: since when it has been due.
    """

    schedule: int
    revision: int
    principal: str
    schedule_id: str
    spec: ScheduleSpec
    due_at: float | None


class Fire(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A check of a schedule: whatever is due is fired or counted.

    Parameters:
        schedule, revision: as they were read. If the revision has changed, nothing is done.
        send: message made from the spec; its ``at`` is the time of the check. The store sets its idempotency key.
        agents: names of the agents of this host.
        by_hand: fire now, whatever is due; a refusal is raised, and no tick is skipped.
    """

    schedule: int
    revision: int
    send: Send
    agents: frozenset[str]
    by_hand: bool = False


class Fired(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of a check of a schedule.

    Parameters:
        outcome: ``fired``; ``missed`` (ticks were counted, none fires now); ``duplicate`` (it fired before a clock was
            set back); the code of a refusal; ``set_back`` if the clock was and the schedule now has another tick;
            ``changed`` if it is not what was read; ``waits`` if nothing is due; ``broken`` if the stored schedule is
            unreadable: it is checked again much later.
        missed: number of ticks counted as missed.
        sent: result of the send, for ``fired`` and ``duplicate``.
        schedule: current state; None if it is gone.
        problem: text for people: the schedule's problem, if it is new.
    """

    outcome: str
    missed: int = 0
    sent: SendResult | None = None
    schedule: ScheduleView | None = None
    problem: str | None = None


class RunCommit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a run.

    Parameters:
        lease: the right to write.
        status: how it ended. Its messages are settled accordingly.
        at: seconds since the epoch.
        text: answer, whole or partial.
        cause, error, receipt, usage: as in ``run.finished``.
        entries: entries for the transcript, in order; the store assigns ``n``.
        events: (kind, JSON) of the run's last events, written before ``run.finished`` and the settlements.
        next_run_id: id for a next run that starts in the same transaction; None if the host is at its limit.
        not_undone: names of calls whose effects stay, for a run that is rolled back.
        replaces_history: `entries` replace the whole transcript (a compaction in the run).
        stored_limit: maximum bytes that the principal may store.

    A run with a recorded interrupt of kind ``rollback`` always ends ``interrupted``: its messages are settled as
    ``superseded``, its entries are dropped, and ``run.rolled_back`` is written before ``run.finished``.
    """

    lease: Lease
    status: Literal["completed", "failed", "interrupted"]
    at: float
    text: str = ""
    cause: Cause | None = None
    error: str | None = None
    receipt: StopReceipt | None = None
    usage: Usage = Usage()
    entries: Sequence[Entry] = ()
    events: Sequence[tuple[str, bytes]] = ()
    next_run_id: str | None = None
    not_undone: tuple[str, ...] = ()
    replaces_history: bool = False
    stored_limit: int = ALL_BYTES


class Committed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that has ended; its slot is free, or taken by ``claim``.

    Parameters:
        events: events that were written, including ``message.settled``, ``run.finished`` and the claim's.
        settled: final states of the messages.
        claim: next run, if one starts.
        waiting, not_before: number of messages left in the mailbox, and when they are due.
    """

    events: tuple[Stored, ...]
    settled: tuple[Settlement, ...]
    claim: Claim | None = None
    waiting: int = 0
    not_before: float = 0.0


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An interrupt of the active run, or of exactly `run_id`."""

    principal: str
    key: str
    cause: Cause
    at: float
    run_id: str | None = None


class Interrupted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of an interrupt: ``run_id`` is None if the session was idle or that run had already ended."""

    session: int
    number: int
    run_id: str | None
    events: tuple[Stored, ...] = ()


class Stopped(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of a session's stop: the run to stop, and the messages that were withdrawn."""

    session: int
    number: int
    run_id: str | None
    withdrawn: tuple[Message, ...] = ()
    events: tuple[Stored, ...] = ()


class Ready(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session to claim: it has messages and no run, or a parked run to resume or stop."""

    session: int
    principal: str
    key: str
    agent: str
    not_before: float


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored key: hashed.

    Parameters:
        role: of an API key: ``user``, ``admin`` or ``trusted`` (may forward users). ``approver`` is not an API key and
            grants no access: a person types it to approve calls of the principal's sessions.
        agents: agents that the key may use; None: the server's public agents.
    """

    key_id: str
    principal: str
    role: Literal["user", "admin", "trusted", "approver"]
    digest: bytes
    created_at: float
    label: str = ""
    revoked_at: float | None = None
    agents: tuple[str, ...] | None = None


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Figures of a store, for ``doctor`` and the statistics."""

    engine: str
    path: str
    version: str
    commits: int
    batches: int
    sessions: int
    stale_writes_refused: int
    duplicates_prevented: int


class Store(Protocol):
    """Interface of a store; see the module's rules. Every method may raise `StorageError`."""

    async def open(self, *, node_id: str, at: float) -> None:
        """Open the store and register the node with a new epoch.

        Raises `StoreLocked`, `StoreCorrupt`, `StoreReadOnly`, `StoreFull`.
        """
        ...

    async def close(self) -> None:
        """Finish accepted writes, then close the store. Idempotent."""
        ...

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        """Accept a message: deduplicate, check limits, number, store, decide and, on an idle session with room, claim.

        Raises `MailboxFull`, `SessionBusy`, `IdempotencyMismatch`, `SessionDeleted`, `UnknownPolicy`,
        `UnknownAttachment`, `HistoryChanged` (``retry_of`` is not the last ended run), `LimitExceeded` (too many
        sessions of the principal), `QuotaExceeded` (its rows take ``stored_limit`` bytes).
        """
        ...

    def claim(self, session: int, *, run_id: str, at: float) -> asyncio.Future[Claim | NotReady]:
        """Start the next run of a free and ready session."""
        ...

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        """Write events of a run: (kind, one line of JSON) each.

        ``nth`` numbers the appends of one lease from 1; a repeated number writes nothing and returns the same answer.
        Use 0 for appends that are never retried. After ``session.deleted`` nothing is written and the answer is empty.
        Raises `StaleFence`, and `QuotaExceeded` if the principal's stored data would exceed `stored_limit`.
        """
        ...

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        """End a run: write its last events, transcript, settlements and final state, and free its slot.

        A run that fails while it is stopping ends ``interrupted``, with its error. Raises `StaleFence`, and
        `QuotaExceeded` as `append` does.
        """
        ...

    def interrupt(self, request: Interrupt) -> asyncio.Future[Interrupted]:
        """Make an interrupt durable, with the run that it targets. Raises `UnknownSession`, `SessionDeleted`."""
        ...

    def stop_session(self, request: Interrupt) -> asyncio.Future[Stopped]:
        """Stop the session: record the interrupt of the active run and withdraw queued messages. As `interrupt`."""
        ...

    def withdraw(
        self, principal: str, key: str, message_id: str, *, at: float
    ) -> asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]:
        """Settle a queued message as ``withdrawn``; idempotent.

        Raises `UnknownSession`, `UnknownMessage`, `AlreadySettled` (a run took it), `SessionDeleted`.
        """
        ...

    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        """Leave a tombstone: as `stop_session`, then ``session.deleted`` is the last event. As `interrupt`.

        An active run may still end by `commit_run`, which then writes no event after ``session.deleted``.
        """
        ...

    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        """Take the queued ``steer`` messages that target this run; write ``message.steered`` for each.

        They are settled with the run. After an interrupt of the run is recorded, none is taken. Raises `StaleFence`.
        """
        ...

    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        """Ask a person: the run is ``suspended`` until every open question is answered. A known id has no effect.

        Raises `StaleFence`, `IllegalTransition` (the run is stopping).
        """
        ...

    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        """Answer an open question of the active run; the last answer makes it ``running``, or resumable if parked.

        The same decision and text again has no effect and returns the same answer. Raises `UnknownSession`,
        `SessionDeleted`, `UnknownQuestion`, `AlreadyAnswered` (differently, or by its deadline), `InvalidRequest` (the
        wrong kind).
        """
        ...

    def park(self, lease: Lease, *, at: float) -> asyncio.Future[Parked]:
        """Release a suspended run. It keeps the slot and is not rescued. Raises `StaleFence`.

        Once all questions are answered, its `claim` uses the run's own id and has ``resumed`` set; `ready` lists such
        sessions. An `interrupt` of a parked run is handled by a `claim` too (with ``interrupt`` set).
        """
        ...

    async def questions(self, session: int) -> Sequence[Question]:
        """Return the open questions of the active run, oldest first."""
        ...

    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        """Return open questions with ``due_at`` < before, the longest due first."""
        ...

    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        """Change a transcript. Refused while a run is active or messages wait.

        Raises `UnknownSession`, `SessionDeleted`, `SessionBusy`, `HistoryChanged` (``expected_n``), `NothingToUndo`,
        `UnknownAttachment`, `LimitExceeded`, `QuotaExceeded`. An ``undo`` is never refused because of its size.
        """
        ...

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
        """Store the bytes under their digest, once per principal; a repetition has no effect and the first answer.

        Raises `LimitExceeded` if the principal's attachments would take more than `limit_bytes` in total, and
        `QuotaExceeded` if its stored data would exceed `stored_limit`.
        """
        ...

    async def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        """Return the principal's attachment with that digest, without its bytes."""
        ...

    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        """Return the principal's attachment with that digest."""
        ...

    async def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        """Return at most `size` of its bytes from `start` on, none past its end; None if it does not exist."""
        ...

    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        """Create a schedule, or replace its spec. Idempotent.

        A replaced schedule stays paused if it was; its ticks and counters start anew if its cadence changed. Raises
        `LimitExceeded` (too many schedules of the principal), `QuotaExceeded`, `InvalidSchedule`.
        """
        ...

    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        """Pause or resume a schedule; idempotent. Ticks while it is paused do not count.

        Raises `UnknownSchedule`.
        """
        ...

    def delete_schedule(self, principal: str, schedule_id: str) -> asyncio.Future[ScheduleView]:
        """Delete a schedule; return its last state. Raises `UnknownSchedule`."""
        ...

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        """Accept the message of a schedule's tick as `send` does, and advance the schedule, in one transaction.

        A refusal of the message is counted and noted instead, and the schedule continues. If the schedule was fired or
        changed since it was read, nothing is done, so a repetition has no second effect. By hand, it raises what `send`
        raises, and `ScheduleFinished`, `ScheduleChanged` and `UnknownAgent`.
        """
        ...

    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        """Return schedules to check: those that are due, and those whose clock was set back.

        Principals take turns: first the longest due of each, then the second of each, and so on.
        """
        ...

    async def next_schedule(self) -> float | None:
        """Return when the first of all schedules is due; None if none ever is."""
        ...

    async def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        """Return a schedule, both for firing and for people."""
        ...

    async def schedules(
        self, *, principal: str | None, limit: int, session: str | None = None
    ) -> Sequence[ScheduleView]:
        """Return schedules in the order of their creation, of one principal (and session) or of all."""
        ...

    async def rescue(self, *, at: float) -> Sequence[Claim]:
        """Take over every run whose holder is not this node's epoch, the longest running first.

        Fence and attempt increase by one; ``run.restarted`` is not written yet.
        """
        ...

    def restart(self, lease: Lease, *, at: float, discard_from: int | None = None) -> asyncio.Future[Appended]:
        """Write ``run.restarted`` for a rescued run that runs again. Raises `StaleFence`.

        Readers drop output from seq ``discard_from`` on; None: from the start of the run.
        """
        ...

    async def ready(self, *, limit: int) -> Sequence[Ready]:
        """Return sessions with queued messages and no run, or with a parked run that waits for nothing (any more).

        The longest waiting come first; a run counts since it began.
        """
        ...

    async def stored_bytes(self, principal: str) -> int:
        """Return the bytes that a principal's rows take: messages, events, transcripts, attachments and schedules.

        They are counted as they are written and dropped.
        """
        ...

    async def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        """Return the principals with the most stored bytes, the largest first."""
        ...

    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        """Return events with seq > after, in order, at most about `limit` (a store may round up to its row).

        No row is added once their bodies have `limit_bytes` or more, so a page is never empty because of that limit.
        """
        ...

    async def oldest_seq(self, session: int) -> int:
        """Return the seq of the oldest event that is kept (1 if nothing was pruned)."""
        ...

    async def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        """Return all stored events of one run: its journal."""
        ...

    async def transcript(
        self, session: int, *, after: int = 0, limit: int = ALL_ENTRIES, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Entry]:
        """Return entries with n > after, from one moment; without the bodies of agent state kept with them.

        No entry is added once they have `limit_bytes` or more as JSON, so a page is never empty because of that limit.
        """
        ...

    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        """Return all entries, as `transcript`; or, if they exceed `limit_bytes`, the number of bytes they take."""
        ...

    async def kept(self, session: int, n: int) -> str:
        """Return the state that an agent kept with this entry (`KeptState.n`), even if undone; empty if none."""
        ...

    async def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        """Return the session's row number and view; a deleted one is found until it is purged, with state
        ``deleted``."""
        ...

    async def sessions(
        self, *, principal: str | None, limit: int, before: float | None = None
    ) -> Sequence[SessionView]:
        """Return sessions, the most recently changed first; None lists all principals'."""
        ...

    async def mailbox(self, session: int) -> Sequence[MailboxItem]:
        """Return queued messages, in order."""
        ...

    async def settlement(self, session: int, message_id: str) -> Settlement | None:
        """Return the outcome of a message, with the text, cause and error of its run."""
        ...

    async def run(self, session: int, run_id: str) -> RunView | None:
        """Return a run."""
        ...

    async def runs(self, session: int, *, limit: int = 100) -> Sequence[RunView]:
        """Return runs, the newest first."""
        ...

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
        ...

    async def add_key(self, record: KeyRecord) -> None:
        """Store an API key's hash."""
        ...

    async def keys(self) -> Sequence[KeyRecord]:
        """Return all API keys, including revoked ones."""
        ...

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        """Revoke a key; return False if no valid key has that id."""
        ...

    async def info(self) -> StoreInfo:
        """Return figures for people."""
        ...
