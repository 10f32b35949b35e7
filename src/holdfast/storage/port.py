"""The port of the store: the verbs that every store offers, and the values they take and return.

Rules that every store keeps, and the conformance suite (`holdfast.testing.store_suite`) checks:

- Each verb is one transaction: all of it is durable when the call returns, or nothing is.
- ``append``, ``commit_run`` and every write of a run check its `Lease` (fence **and** run id) inside the write and
  raise `StaleFence` when it does not hold.
- One counter per session numbers all its events, without holes.
- Results are handed back in the order in which they became durable.
- Readiness and bounds come from counters in the session row.
- Verbs that a caller repeats after a lost reply have no second effect and the same answer: `send` by idempotency key,
  `claim`, `commit_run` and `interrupt` by run id, `append` by its number under the lease.
- A write goes on whatever becomes of its caller: the verbs that write return an `asyncio.Future`, which the caller may
  drop, shield or give done callbacks to. Their errors come by it too: nothing is raised at once, because hosts write
  from callbacks. The futures of one session are resolved in the order of its event numbers, and a future's done
  callbacks run in the order in which they were added (as asyncio does), so a host can publish from them.

Stores know nothing of tasks or agents. All verbs are called on the event loop that opened the store.
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
"""As a limit: none."""
ALL_BYTES: Final = 2**62
"""As a limit: none."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to write for one run of one session."""

    session: int
    run_id: str
    fence: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that this node holds, with the messages it took.

    Parameters:
        lease: the right to write.
        number: the session's public number (part of cursors).
        principal, key, agent: whose session, its key, and the agent's name.
        attempt: 1, or more after crashes.
        messages: what the run took, oldest first.
        started_seq: the seq of ``run.started`` (what follows it belongs to the run).
        interrupt: the cause of an interrupt that is recorded for this run, if any.
        events: what the claim wrote to the log (``run.started``; nothing for a run that is resumed).
        questions: what a rescued run, which was suspended, still waits for.
        resumed: the run was suspended and parked, and goes on; its journal is in `run_events`.
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
    """A message to be accepted.

    Parameters:
        principal, key: the session; it comes into being if there is none.
        agent: the agent of a new session; for an existing one, None keeps its agent and a name changes it for runs
            that start later.
        message_id, content, policy, at: the message.
        idempotency_key: the same key in the same session is accepted once; None makes no check.
        body_hash: of what the caller sent; another hash under the same key is an `IdempotencyMismatch`.
        run_id: the id for the run if it starts at once; None when the host has no room.
        quiet_s, max_wait_s: for ``collect``.
        mailbox_limit: messages that may wait.
        mailbox_size: characters that they may have in all; a single message may have more.
        session_limit: sessions that the principal may have.
        attachments: their bytes are in the store already.
        retry_of: the run that ended last, whose entries leave the transcript in the same transaction.
        agents: those that may answer; for any other one the send is refused. None: all.
        stored_limit: bytes that the principal may have stored.
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
    """What became of a send.

    Parameters:
        session, number: the session's row and public number.
        message_id, seq: of this message; of the first one if ``disposition`` is ``duplicate``.
        disposition: what was decided.
        run_id: the run that took it or that it is aimed at.
        claim: the run to start, for ``started``.
        interrupt: the run to stop, for ``interrupting`` and ``rolling_back``; its ``run.stopping`` is among ``events``
            if it is new.
        not_before: for ``collecting``, when the batch is due.
        events: what was written to the log.
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
    """A claim found nothing to run: nothing waits, a run is on, or nothing is due before ``not_before``."""

    waiting: int
    not_before: float = 0.0
    busy: bool = False


class Appended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Events as they were numbered."""

    events: tuple[Stored, ...]


class Steered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Messages that the run took while it was on, oldest first; ``message.steered`` of each is in the log."""

    messages: tuple[Message, ...]
    events: tuple[Stored, ...] = ()


class Parked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Nobody holds the run any more. ``ready``: all its questions are answered, so a `claim` may resume it at once."""

    ready: bool


class Answered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer is durable.

    Parameters:
        session, number: the session's row and public number.
        run_id: the suspended run.
        answer: as it stands in the log; of the first one if the same decision was given before.
        waiting: questions that are still open.
        parked: nobody holds the run: with ``waiting`` 0 a `claim` of the session resumes it.
        events: what was written (``run.resumed``).
    """

    session: int
    number: int
    run_id: str
    answer: Answer
    waiting: int
    parked: bool
    events: tuple[Stored, ...] = ()


class DueQuestion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An open question, and the session that asks it."""

    principal: str
    key: str
    question: Question


class EditHistory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A change of a transcript while no run is on.

    Parameters:
        principal, key: the session. ``import`` and ``branch`` make it, and refuse one that has a history.
        edit: ``undo`` takes the entries of the newest history row (a run's, or an edit's) away; the others put
            `entries` in the place of the whole transcript.
        at: seconds since the epoch.
        entries: for all but ``undo``; ``n`` is given by the store.
        expected_n: the transcript's last ``n`` that the caller saw (0: empty); None makes no check.
        agent: of a new session.
        session_limit: sessions that the principal may have.
        stored_limit: bytes that the principal may have stored.
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
    """What an edit took away, and what it wrote to the log (``history.edited``)."""

    session: int
    number: int
    removed: tuple[Entry, ...]
    events: tuple[Stored, ...] = ()


class PutSchedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A schedule to be made, or to take the place of the one of that id.

    Parameters:
        principal, schedule_id: whose, and its id among theirs.
        spec: what it does; checked by the caller.
        at: seconds since the epoch.
        limit: schedules that the principal may have.
        stored_limit: bytes that the principal may have stored.
    """

    principal: str
    schedule_id: str
    spec: ScheduleSpec
    at: float
    limit: int = 1000
    stored_limit: int = ALL_BYTES


class DueSchedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A schedule to be looked at, as it stood when it was read.

    Parameters:
        schedule: its row.
        revision: of the row; whatever happens to it makes another.
        principal, schedule_id, spec: whose, its id, what it does.
        due_at: since when it waits.
    """

    schedule: int
    revision: int
    principal: str
    schedule_id: str
    spec: ScheduleSpec
    due_at: float | None


class Fire(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A look at a schedule: what is due of it is fired or counted.

    Parameters:
        schedule, revision: as they were read. If the revision is another now nothing is done.
        send: the message, made of the spec; its ``at`` is the time of the look. The store sets its idempotency key.
        agents: names of the agents that this host has.
        by_hand: fire now, whatever is due; what refuses it is raised, and no tick is gone over.
    """

    schedule: int
    revision: int
    send: Send
    agents: frozenset[str]
    by_hand: bool = False


class Fired(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a look at a schedule came to.

    Parameters:
        outcome: ``fired``, ``missed`` (ticks were counted, none is to be fired now), ``duplicate`` (it was fired before
            a clock was set back), the code of what refused it; ``set_back`` if the clock was and it has another tick
            now; ``changed`` if it is not what was read; ``waits`` if nothing is due; ``broken`` if what is stored of it
            cannot be read: it is looked at again much later.
        missed: ticks that were counted as missed.
        sent: what became of the message, for ``fired`` and ``duplicate``.
        schedule: as it stands now; None when it is gone.
        problem: what a person should hear of: the schedule's problem if it is new.
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
        status: how it ended. The messages it took are settled alike.
        at: seconds since the epoch.
        text: the answer, whole or partial.
        cause, error, receipt, usage: as in ``run.finished``.
        entries: for the transcript, in order; ``n`` is given by the store.
        events: (kind, JSON) of the run's last events, written before ``run.finished`` and the settlements.
        next_run_id: the id for a next run that starts in the same transaction; None when the host has no room.
        not_undone: names of calls whose effects stay, for a run that is rolled back.
        replaces_history: `entries` stand in the place of the whole transcript (a compaction in the run).
        stored_limit: bytes that the principal may have stored.

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
    """A run has ended and its slot is free, or taken by ``claim``.

    Parameters:
        events: what was written, ``message.settled`` and ``run.finished`` included (and the claim's).
        settled: the messages' final states.
        claim: the next run, if one starts.
        waiting, not_before: what is left in the mailbox and when it is due.
    """

    events: tuple[Stored, ...]
    settled: tuple[Settlement, ...]
    claim: Claim | None = None
    waiting: int = 0
    not_before: float = 0.0


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An interrupt of the run that is on, or of exactly `run_id`."""

    principal: str
    key: str
    cause: Cause
    at: float
    run_id: str | None = None


class Interrupted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an interrupt met: ``run_id`` is None when the session was idle or that run had ended already."""

    session: int
    number: int
    run_id: str | None
    events: tuple[Stored, ...] = ()


class Stopped(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a session's stop met: the run to stop, and the messages that were withdrawn."""

    session: int
    number: int
    run_id: str | None
    withdrawn: tuple[Message, ...] = ()
    events: tuple[Stored, ...] = ()


class Ready(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session to claim: it has messages and no run, or a parked run that may go on or has to be stopped."""

    session: int
    principal: str
    key: str
    agent: str
    not_before: float


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A key as it is stored: hashed.

    Parameters:
        role: of an API key: ``user``, ``admin`` or ``trusted`` (may forward users). ``approver``: it is no API key and
            opens nothing: it is typed by a person to approve calls of the principal's sessions.
        agents: the agents that it may name; None: those that the server lets everybody name.
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
    """What a store says of itself, for ``doctor`` and the statistics."""

    engine: str
    path: str
    version: str
    commits: int
    batches: int
    sessions: int
    stale_writes_refused: int
    duplicates_prevented: int


class Store(Protocol):
    """See the module's rules. Every method may raise `StorageError`."""

    async def open(self, *, node_id: str, at: float) -> None:
        """Open the store and register the node with a new epoch.

        Raises `StoreLocked`, `StoreCorrupt`, `StoreReadOnly`, `StoreFull`.
        """
        ...

    async def close(self) -> None:
        """Finish what was given to the store, then close it. May be called twice."""
        ...

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        """Accept a message: dedupe, bound, number, store, decide and, on an idle session with room, claim.

        Raises `MailboxFull`, `SessionBusy`, `IdempotencyMismatch`, `SessionDeleted`, `UnknownPolicy`,
        `UnknownAttachment`, `HistoryChanged` (``retry_of`` is not the run that ended last), `LimitExceeded` (too many
        sessions of the principal), `QuotaExceeded` (its rows take ``stored_limit`` bytes).
        """
        ...

    def claim(self, session: int, *, run_id: str, at: float) -> asyncio.Future[Claim | NotReady]:
        """Start the next run of a session that is free and ready."""
        ...

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        """Write events of a run: (kind, one line of JSON) each.

        ``nth`` numbers the appends of one lease from 1; the same one again writes nothing and has the same answer. 0 is
        for appends that are never repeated. After ``session.deleted`` nothing is written and the answer is empty.
        Raises `StaleFence`, and `QuotaExceeded` when all that the principal has stored would take more than
        `stored_limit`.
        """
        ...

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        """End a run: its last events, transcript, settlements and final state, and its slot is free.

        A run that fails while it is stopping ends ``interrupted``, with its error. Raises `StaleFence`, and
        `QuotaExceeded` as `append` does.
        """
        ...

    def interrupt(self, request: Interrupt) -> asyncio.Future[Interrupted]:
        """Make an interrupt durable, with the run it is aimed at. Raises `UnknownSession`, `SessionDeleted`."""
        ...

    def stop_session(self, request: Interrupt) -> asyncio.Future[Stopped]:
        """End the activation: record the interrupt of the run that is on and withdraw what waits. As `interrupt`."""
        ...

    def withdraw(
        self, principal: str, key: str, message_id: str, *, at: float
    ) -> asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]:
        """Settle a waiting message as ``withdrawn``; repeated: no second effect.

        Raises `UnknownSession`, `UnknownMessage`, `AlreadySettled` (a run took it), `SessionDeleted`.
        """
        ...

    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        """Leave a tombstone: as `stop_session`, then ``session.deleted`` is the last event. As `interrupt`.

        A run that is on may still end by `commit_run`, which then writes no event after ``session.deleted``.
        """
        ...

    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        """Take the waiting ``steer`` messages that are aimed at this run; ``message.steered`` of each is written.

        They are settled with the run. Nothing is taken once an interrupt of the run is recorded. Raises `StaleFence`.
        """
        ...

    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        """Ask a person: the run is ``suspended`` until every open question is answered. A known id has no effect.

        Raises `StaleFence`, `IllegalTransition` (the run is stopping).
        """
        ...

    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        """Answer an open question of the run that is on; the last answer makes it ``running``, or resumable if parked.

        The same decision and text again has no effect and the same answer. Raises `UnknownSession`, `SessionDeleted`,
        `UnknownQuestion`, `AlreadyAnswered` (otherwise, or by its deadline), `InvalidRequest` (the wrong kind).
        """
        ...

    def park(self, lease: Lease, *, at: float) -> asyncio.Future[Parked]:
        """Give up the holding of a suspended run. It keeps the slot; nobody rescues it. Raises `StaleFence`.

        Its `claim`, once all questions are answered, is made under the run's own id and has ``resumed`` set; `ready`
        lists such sessions. An `interrupt` of a parked run is answered by a `claim` too (with ``interrupt`` set).
        """
        ...

    async def questions(self, session: int) -> Sequence[Question]:
        """The open questions of the run that is on, oldest first."""
        ...

    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        """Open questions with ``due_at`` < before, the longest due first."""
        ...

    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        """Change a transcript. A run that is on, or messages that wait, refuse it.

        Raises `UnknownSession`, `SessionDeleted`, `SessionBusy`, `HistoryChanged` (``expected_n``), `NothingToUndo`,
        `UnknownAttachment`, `LimitExceeded`, `QuotaExceeded`. An ``undo`` is never refused for its size.
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
        """Keep the bytes under their digest, once for each principal; repeated: no second effect, the first answer.

        Raises `LimitExceeded` when the principal's attachments would take more than `limit_bytes` in all, and
        `QuotaExceeded` when all that it has stored would take more than `stored_limit`.
        """
        ...

    async def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        """The attachment of that digest which the principal has, without its bytes."""
        ...

    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        """The attachment of that digest which the principal has."""
        ...

    async def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        """At most `size` of its bytes, from `start` on; none behind its end. None: there is no such attachment."""
        ...

    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        """Make a schedule, or put another spec in the place of one. The same again: no second effect.

        One that is replaced stays paused if it was; its ticks and counters begin anew if its cadence is another. Raises
        `LimitExceeded` (too many schedules of the principal), `QuotaExceeded`, `InvalidSchedule`.
        """
        ...

    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        """Pause or resume a schedule; repeated: no second effect. Ticks of the time between are none.

        Raises `UnknownSchedule`.
        """
        ...

    def delete_schedule(self, principal: str, schedule_id: str) -> asyncio.Future[ScheduleView]:
        """Delete a schedule; the answer is how it stood. Raises `UnknownSchedule`."""
        ...

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        """Accept the message of a schedule's tick as `send` does, and advance the schedule, in one transaction.

        What refuses the message is counted and noted instead, and the schedule goes on. For a schedule that was fired
        or changed since it was read nothing is done: so repeated it has no second effect. By hand it
        raises what `send` raises, `ScheduleFinished`, `ScheduleChanged` and `UnknownAgent`.
        """
        ...

    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        """Schedules to be looked at: those that are due, and those whose clock was set back.

        Principals in turn: first of each the one that has been due longest, then the second of each, and so on.
        """
        ...

    async def next_schedule(self) -> float | None:
        """When the first of all schedules is due; None if none ever is."""
        ...

    async def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        """A schedule, as it is to be fired and as people see it."""
        ...

    async def schedules(
        self, *, principal: str | None, limit: int, session: str | None = None
    ) -> Sequence[ScheduleView]:
        """Schedules in the order in which they were made, of one principal (and session) or of all."""
        ...

    async def rescue(self, *, at: float) -> Sequence[Claim]:
        """Take over every run whose holder is not this node's epoch, the longest running first.

        Fence and attempt grow by one; ``run.restarted`` is not written yet.
        """
        ...

    def restart(self, lease: Lease, *, at: float, discard_from: int | None = None) -> asyncio.Future[Appended]:
        """Write ``run.restarted`` for a rescued run that is run again. Raises `StaleFence`.

        ``discard_from`` is the seq from which readers drop what was said; None: from the start of the run.
        """
        ...

    async def ready(self, *, limit: int) -> Sequence[Ready]:
        """Sessions that have messages waiting and no run, or a parked run that waits for nothing (any more).

        The longest waiting first; a run counts since it began.
        """
        ...

    async def stored_bytes(self, principal: str) -> int:
        """Bytes that the rows of a principal take: messages, events, transcripts, attachments and schedules.

        Counted as they are written and dropped.
        """
        ...

    async def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        """The principals that have most stored, with their bytes, the largest first."""
        ...

    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        """Events with seq > after, in order, at most about `limit` of them (a store may round up to its row).

        Once their bodies have `limit_bytes` or more, no row is added; so a page is never empty because of that.
        """
        ...

    async def oldest_seq(self, session: int) -> int:
        """The seq of the oldest event that is kept (1 while nothing was pruned)."""
        ...

    async def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        """All stored events of one run: its journal."""
        ...

    async def transcript(
        self, session: int, *, after: int = 0, limit: int = ALL_ENTRIES, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Entry]:
        """Entries with n > after, all as they stand at one moment; without the bodies of what is kept with them.

        Once they have `limit_bytes` or more as JSON, no entry is added; so a page is never empty because of that.
        """
        ...

    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        """All entries, as `transcript`; or, if they take more than `limit_bytes`, how many bytes they take."""
        ...

    async def kept(self, session: int, n: int) -> str:
        """What an agent kept with the entry of that number (`KeptState.n`), also once it was undone; else empty."""
        ...

    async def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        """The session's row number and view; a deleted one is found until it is purged, with state ``deleted``."""
        ...

    async def sessions(
        self, *, principal: str | None, limit: int, before: float | None = None
    ) -> Sequence[SessionView]:
        """Sessions, the most recently changed first; None lists all principals'."""
        ...

    async def mailbox(self, session: int) -> Sequence[MailboxItem]:
        """What waits, in order."""
        ...

    async def settlement(self, session: int, message_id: str) -> Settlement | None:
        """What became of a message, with the text, cause and error of its run."""
        ...

    async def run(self, session: int, run_id: str) -> RunView | None:
        """A run."""
        ...

    async def runs(self, session: int, *, limit: int = 100) -> Sequence[RunView]:
        """Runs, the newest first."""
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

        What waits and what belongs to the run that is on is kept. Attachments that no session uses are dropped when
        they were put in (last) before ``attachments_before``. Returns the number of rows dropped or changed.
        """
        ...

    async def add_key(self, record: KeyRecord) -> None:
        """Store an API key's hash."""
        ...

    async def keys(self) -> Sequence[KeyRecord]:
        """All API keys, revoked ones included."""
        ...

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        """Revoke a key; False if there is none of that id that is valid."""
        ...

    async def info(self) -> StoreInfo:
        """Figures for people."""
        ...
