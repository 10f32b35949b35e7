"""Values that the methods of a store take and return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

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
    "Append",
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
    "NodeReply",
    "NodeRequest",
    "NotReady",
    "OldEvents",
    "Parked",
    "PutSchedule",
    "Ready",
    "RequestKind",
    "RunCommit",
    "Send",
    "SendResult",
    "Served",
    "Steered",
    "StopRequest",
    "Stopped",
    "StoreHealth",
    "StoreInfo",
]

ALL_ENTRIES: Final = 2**62
"""Limit that means an unlimited number of entries."""
ALL_BYTES: Final = 2**62
"""Limit that means an unlimited number of bytes."""
Served: TypeAlias = Mapping[str, str]
"""The agents of a host: the version of each agent by its name, empty if it has none."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to write to the store on behalf of one run of one session."""

    session: int
    run_id: str
    fence: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claimed run, which this node now holds, with the messages that the run took.

    Parameters:
        lease: right to write for the run.
        number: public number of the session, which is part of cursors.
        principal, key, agent: owner and key of the session, and name of the agent.
        attempt: 1, plus one for each restart after a crash, and each time that a host which drained let the run go.
        messages: messages that the run took, oldest first.
        started_seq: seq of the run's ``run.started`` event; all events of the run are later.
        interrupt: cause of the interrupt recorded for this run; None if no interrupt is recorded.
        events: events that the claim wrote: ``run.started`` for a new run; empty for a resumed or rescued run.
        questions: open questions to which a rescued run still waits for answers.
        resumed: whether the claim resumes a parked run. `Store.run_events` returns the run's journal.
        handed_over: whether the run was parked after a `Store.rescue`, by a node that does not have its agent or files.
        workspace_pool: pool of the nodes that have the session's files; None if it has none, or any node has them.
        epoch: epoch of the node in which it made the claim.
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
    handed_over: bool = False
    workspace_pool: str | None = None
    epoch: int = 0


class Send(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message to accept.

    Parameters:
        principal, key: owner and key of the session, which is created if it does not exist.
        agent: name of the agent of a new session. In an existing session, the name replaces the session's agent for
            runs that start later; None keeps the session's agent.
        default_agent: name of the agent of a new session if `agent` is None.
        message_id, content, policy: id, text and policy of the message.
        at: time at which the message is sent, in seconds since the epoch.
        idempotency_key: key under which the session accepts only one message; None disables this check.
        body_hash: hash of the request that the caller sent. A different hash with the same idempotency key raises
            `IdempotencyMismatch`.
        run_id: id for the run that this message may start at once; None if the host has no room for a run.
        quiet_s, max_wait_s: for the policy ``collect``, in seconds, as described in `SendOptions`.
        mailbox_limit: maximum number of queued messages.
        mailbox_size: maximum total length of queued messages, in characters; a single message may be longer.
        session_limit: maximum number of sessions of the principal.
        attachments: attachments whose bytes are already stored.
        retry_of: id of the last ended run, if the message retries this run; the run's entries are then removed from the
            transcript in the same transaction. None if the message is not a retry.
        agents: names of the agents that the sender may use; None allows all agents. A message that would reach another
            agent is refused.
        served: the host's agents. A message to an existing session is refused if the session's agent is not among them
            and the message names no other; None disables this check.
        takes_over: names of agents whose sessions the default agent takes over.
        stored_limit: maximum number of bytes that the principal may store.
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
    served: Served | None = None
    takes_over: frozenset[str] = frozenset()
    stored_limit: int = ALL_BYTES


class SendResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of a send.

    Parameters:
        session, number: row and public number of the session.
        message_id, seq: id and seq of the message; if `disposition` is ``duplicate``, the id and seq of the first
            message with the same idempotency key.
        disposition: what the session did with the message.
        run_id: id of the run that took the message, or else of the run that was active when the message arrived; None
            if there was neither.
        claim: claim of the run to start, if `disposition` is ``started``.
        interrupt: id of the run to stop, if `disposition` is ``interrupting`` or ``rolling_back``. If the interrupt is
            new, `events` contains its ``run.stopping``.
        not_before: time at which the batch is due, if `disposition` is ``collecting``.
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
    """Result of a claim that found nothing to run.

    Parameters:
        waiting: number of queued messages.
        not_before: time at which the next queued message is due, in seconds since the epoch; 0 if no message waits or
            a run is active.
        busy: whether a run is active.
    """

    waiting: int
    not_before: float = 0.0
    busy: bool = False


class Append(msgspec.Struct, frozen=True, gc=False):
    """Events of one run to be written, each as its kind and one line of JSON; ``nth`` as in `Store.append`."""

    lease: Lease
    events: Sequence[tuple[str, bytes]]
    nth: int


class Appended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Events that were written, with their numbers."""

    events: tuple[Stored, ...]


class Steered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Messages that the active run took, oldest first. ``events`` has a ``message.steered`` for each message."""

    messages: tuple[Message, ...]
    events: tuple[Stored, ...] = ()


class Parked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of parking a run, which no node holds any more.

    ``ready`` is true if the run has no open questions, so that a `claim` may resume the run at once.
    """

    ready: bool


class Answered(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A durable answer.

    Parameters:
        session, number: row and public number of the session.
        run_id: id of the run that asked the question.
        answer: answer in the log; if the answer repeats an earlier one, the earlier answer.
        waiting: number of the run's questions that are still open.
        parked: whether the run is parked. If it is and `waiting` is 0, a `claim` of the session resumes the run.
        events: events that were written (``run.resumed``); empty for a repeated answer.
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
    """A request to change a transcript while no run is active.

    Parameters:
        principal, key: owner and key of the session. ``import`` and ``branch`` create the session if it does not exist,
            and refuse a session that already has a history.
        edit: kind of the edit. ``undo`` removes the entries of the last run or edit; the other kinds replace the whole
            transcript with `entries`.
        at: time of the edit, in seconds since the epoch.
        entries: new entries, which the store numbers; empty for ``undo``.
        expected_n: number of the last entry in the transcript that the caller read (0 if the transcript was empty). If
            the last entry has a different number, the edit is refused. None disables this check.
        agent: name of the agent of a new session.
        session_limit: maximum number of sessions of the principal.
        stored_limit: maximum number of bytes that the principal may store.
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
        principal, schedule_id: owner of the schedule, and the schedule's id, unique among the owner's schedules.
        spec: specification of the schedule, already checked by the caller.
        at: current time, in seconds since the epoch.
        limit: maximum number of schedules of the principal.
        stored_limit: maximum number of bytes that the principal may store.
    """

    principal: str
    schedule_id: str
    spec: ScheduleSpec
    at: float
    limit: int = 1000
    stored_limit: int = ALL_BYTES


class DueSchedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A schedule to check, in the state in which it was read.

    Parameters:
        schedule: id of the schedule's row.
        revision: revision of the row, which every change increments.
        principal, schedule_id, spec: owner, id and specification of the schedule.
        due_at: time at which to check the schedule; None if it is paused, finished or unreadable.
    """

    schedule: int
    revision: int
    principal: str
    schedule_id: str
    spec: ScheduleSpec
    due_at: float | None


class Fire(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request to check a schedule, which fires or counts the schedule's due ticks.

    Parameters:
        schedule, revision: row id and revision of the schedule that the caller read. If the revision has changed since,
            nothing is done.
        send: message to send; its ``at`` is the time of the check. The store sets the message's idempotency key. A
            message for an agent that is not in ``served`` is refused, even if the session is new.
        by_hand: whether to fire now, even if no tick is due. A refusal of the message is then raised as an error, and
            no tick is skipped.
        is_shared: whether another node may have an agent that this one does not have. The tick then stays due.
    """

    schedule: int
    revision: int
    send: Send
    by_hand: bool = False
    is_shared: bool = False


class Fired(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of checking a schedule.

    Parameters:
        outcome: ``fired``; ``missed`` if ticks were counted as missed and none fires now; ``duplicate`` if the tick had
            already fired before the clock was set back; the code of the error if the message was refused or the
            schedule's ticks cannot be computed; ``set_back`` if the clock was set back and the schedule now has a
            different tick; ``changed`` if the schedule has changed since it was read; ``waits`` if no tick is due or
            the schedule is paused; ``broken`` if the stored schedule is unreadable, in which case it is checked again
            an hour later.
        missed: number of ticks counted as missed.
        sent: result of the send, if `outcome` is ``fired`` or ``duplicate``.
        schedule: current state of the schedule; None if it was deleted.
        problem: description of the schedule's problem, for display; None if the schedule has no problem or the problem
            was already reported. Always set if `outcome` is ``broken``.
    """

    outcome: str
    missed: int = 0
    sent: SendResult | None = None
    schedule: ScheduleView | None = None
    problem: str | None = None


class RunCommit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request to end a run.

    Parameters:
        lease: right to write for the run.
        status: how the run ended; the run's messages are settled accordingly.
        at: end of the run, in seconds since the epoch.
        text: the run's answer, complete or partial.
        cause, error, receipt, usage: fields of ``run.finished``.
        entries: entries for the transcript, in order; the store numbers them.
        events: kind and JSON of the run's last events, written before ``run.finished`` and the settlements.
        next_run_id: id for the next run, which may start in the same transaction; None if the host has no room for it.
        not_undone: names of calls whose effects remain, if the run is rolled back.
        replaces_history: whether `entries` replace the whole transcript, because the run compacted it.
        stored_limit: maximum number of bytes that the principal may store.
        served: the agents whose runs may start next; None allows all agents.

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
    served: Served | None = None


class Committed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of ending a run. The session's slot is free, or held by the next run.

    Parameters:
        events: events that were written, including ``run.finished``, ``message.settled`` and the events of `claim`.
        settled: settlements of the run's messages.
        claim: claim of the next run; None if no run starts.
        waiting, not_before: number of messages left in the mailbox, and the time at which the next message is due.
    """

    events: tuple[Stored, ...]
    settled: tuple[Settlement, ...]
    claim: Claim | None = None
    waiting: int = 0
    not_before: float = 0.0


class InterruptRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request to interrupt the active run of a session. If ``run_id`` is given, no other run is interrupted.

    ``grace_s`` is the grace period for cleanup if another node holds the run; None lets that node choose.
    """

    principal: str
    key: str
    cause: Cause
    at: float
    run_id: str | None = None
    grace_s: float | None = None


class InterruptResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of an interrupt request. ``run_id`` is None if the session was idle or the given run was not active."""

    session: int
    number: int
    run_id: str | None
    events: tuple[Stored, ...] = ()


class Stopped(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Result of stopping or deleting a session.

    ``run_id`` is the id of the run to stop, or None if the session was idle; ``withdrawn`` contains the messages that
    were withdrawn from the mailbox. ``requests`` are the ids of the requests by which other nodes stop their background
    work of the session.
    """

    session: int
    number: int
    run_id: str | None
    withdrawn: tuple[Message, ...] = ()
    events: tuple[Stored, ...] = ()
    requests: tuple[int, ...] = ()


class Ready(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session to claim: it has queued messages and no active run, or a parked run to resume or stop."""

    session: int
    principal: str
    key: str
    agent: str
    not_before: float


RequestKind = Literal["stop", "interrupt", "tree"]
"""What a node may ask another one to do with its part of a session: to stop its background work, to change the grace
period of its run, which is being stopped already, or to show its tree."""


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request of another node, to do something with this node's part of a session."""

    request_id: int
    session: int
    kind: RequestKind
    body: bytes


class StopRequest(msgspec.Struct, frozen=True):
    """The body of a request to stop a session's background work or its run.

    Parameters:
        key: key of the session.
        before_seq: seq of the session's next event at the stop: background work of later runs continues.
        grace_s: grace period of the stop, in seconds; None lets the other node choose.
        run_id: id of the run to stop; empty if only background work is to be stopped.
    """

    key: str
    cause: Cause
    before_seq: int
    grace_s: float | None = None
    run_id: str = ""


class NodeReply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a request to another node.

    Parameters:
        body: the reply; None until it arrives.
        is_gone: whether the other node has ended, so that it will not reply.
    """

    body: bytes | None
    is_gone: bool


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored key. Only the hash of the key's secret is stored.

    Parameters:
        role: ``user``, ``admin`` or ``trusted`` (may act for other users) for an API key. A key with the role
            ``approver`` grants no access to the API; a person types it to approve calls of the principal's sessions.
        agents: names of the agents that the key may use; None allows the server's public agents, or all agents if
            `role` is ``admin``.
    """

    key_id: str
    principal: str
    role: Literal["user", "admin", "trusted", "approver"]
    digest: bytes
    created_at: float
    label: str = ""
    revoked_at: float | None = None
    agents: tuple[str, ...] | None = None


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Whether a store can be used now.

    Parameters:
        lease_s: duration of the host's lease; infinity if no other host can ever take over its runs.
        lease_ends_at: monotonic time until which no other host can take over its runs.
        problem: why the store does not answer at the moment, for display; None if it does.
    """

    lease_s: float = math.inf
    lease_ends_at: float = math.inf
    problem: str | None = None


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Figures about a store, for ``doctor`` and the statistics."""

    engine: str
    path: str
    version: str
    commits: int
    batches: int
    sessions: int
    stale_writes_refused: int
    duplicates_prevented: int


class OldEvents(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Old events of one session, which pruning may drop: the session's oldest ones, without a gap.

    Parameters:
        session: number of the session.
        principal, key: owner and key of the session.
        events: the events, in order; never empty.
    """

    session: int
    principal: str
    key: str
    events: tuple[Stored, ...]
