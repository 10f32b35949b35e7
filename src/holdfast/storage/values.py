"""Values that the methods of a store take and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from holdfast.protocol.events import Stored
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Disposition,
    Entry,
    HistoryEdit,
    Message,
    Question,
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
    "InterruptRequest",
    "InterruptResult",
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
    "StoreInfo",
]

ALL_ENTRIES: Final = 2**62
"""A limit that is never reached."""
ALL_BYTES: Final = 2**62
"""A limit that is never reached."""


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
        agent: agent of a new session. For an existing session, None keeps its agent, and a name replaces it for runs
            that start later.
        message_id, content, policy, at: the message.
        default_agent: agent of a new session if `agent` names none.
        idempotency_key: accept the same key once per session; None disables the check.
        body_hash: hash of what the caller sent; a different hash with the same idempotency key raises
            `IdempotencyMismatch`.
        run_id: id for the run if it starts at once; None if the host is at its limit.
        quiet_s, max_wait_s: for ``collect``.
        mailbox_limit: maximum number of queued messages.
        mailbox_size: maximum total characters of queued messages; a single message may have more.
        session_limit: maximum number of sessions of the principal.
        attachments: attachments whose bytes are already stored.
        retry_of: the last ended run, whose entries are removed from the transcript in the same transaction.
        agents: agents that may receive the message; it is refused for others. None: all.
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
        message_id, seq: those of this message; those of the first one if ``disposition`` is ``duplicate``.
        disposition: decision about the message.
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
        answer: answer in the log; the earlier one if the same decision was given before.
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
        principal, key: session. ``import`` and ``branch`` create it, and refuse a session that already has a history.
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
    """A schedule to check, as it was when it was read.

    Parameters:
        schedule: id of its row.
        revision: revision of the row; every change increments it.
        principal, schedule_id, spec: owner, id and specification.
        due_at: when to check it; None if it is paused or finished.
    """

    schedule: int
    revision: int
    principal: str
    schedule_id: str
    spec: ScheduleSpec
    due_at: float | None


class Fire(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A check of a schedule, which fires or counts its due ticks.

    Parameters:
        schedule, revision: as they were read. If the revision has changed, nothing is done.
        send: message made from the spec; its ``at`` is the time of the check. The store sets its idempotency key.
        agents: names of the agents of this host.
        by_hand: fire now, even if no tick is due; a refusal is raised, and no tick is skipped.
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
            set back); the code of a refusal; ``set_back`` if the clock was set back and the schedule now has a
            different tick; ``changed`` if the schedule has changed since it was read; ``waits`` if nothing is due;
            ``broken`` if the stored schedule is unreadable: it is checked again much later.
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
        status: how the run ended; its messages are settled accordingly.
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


class InterruptRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An interrupt of the active run, or of exactly `run_id`."""

    principal: str
    key: str
    cause: Cause
    at: float
    run_id: str | None = None


class InterruptResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """A stored key, of which only the hash is stored.

    Parameters:
        role: ``user``, ``admin`` or ``trusted`` (may forward users) for an API key. ``approver`` is not an API key and
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
