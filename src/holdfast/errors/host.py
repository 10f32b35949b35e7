"""Errors of a host: its sessions, messages, questions, schedules and budgets."""

from __future__ import annotations

from holdfast.errors.agents import RunError
from holdfast.errors.base import Conflict, HoldfastError, InvalidRequest, LimitExceeded, NotFound, Unavailable

__all__ = [
    "AlreadyAnswered",
    "AlreadySettled",
    "BudgetExceeded",
    "CallMismatch",
    "DeliveryFailed",
    "Draining",
    "HistoryChanged",
    "HostBusy",
    "IdempotencyMismatch",
    "InvalidCursor",
    "InvalidSchedule",
    "MailboxFull",
    "MessageWithdrawn",
    "NothingToUndo",
    "QuotaExceeded",
    "RateLimited",
    "ScheduleBroken",
    "ScheduleChanged",
    "ScheduleFinished",
    "SessionAgentMissing",
    "SessionBusy",
    "SessionDeleted",
    "UnknownAgent",
    "UnknownAttachment",
    "UnknownGrant",
    "UnknownMessage",
    "UnknownPolicy",
    "UnknownQuestion",
    "UnknownRun",
    "UnknownSchedule",
    "UnknownSession",
    "WaitExpired",
    "WaitsForItself",
]


class InvalidCursor(InvalidRequest):
    """The cursor does not belong to this session."""

    code = "invalid_cursor"
    default_hint = (
        "use the cursor of a receipt or the last SSE id of the same session, or omit it to start at the beginning"
    )


class InvalidSchedule(InvalidRequest):
    """The schedule is invalid or never fires."""

    code = "invalid_schedule"
    default_hint = "see the how-to page on schedules for examples of valid schedules"


class UnknownPolicy(InvalidRequest):
    """No such policy."""

    code = "unknown_policy"
    default_hint = "use queue, steer, collect, interrupt, rollback or reject"


class UnknownSession(NotFound):
    """No such session."""

    code = "unknown_session"
    default_hint = "send a message to the session: the first message creates it"


class UnknownMessage(NotFound):
    """No such message in this session."""

    code = "unknown_message"
    default_hint = "use the message_id of a receipt of this session"


class UnknownRun(NotFound):
    """No such run in this session."""

    code = "unknown_run"
    default_hint = "use the run_id of a receipt or event of this session"


class UnknownAgent(NotFound):
    """This host has no agent with that name."""

    code = "unknown_agent"


class UnknownQuestion(NotFound):
    """No such open question or approval in this session."""

    code = "unknown_question"
    default_hint = "list the open questions with questions(), or GET …/approvals"


class UnknownAttachment(NotFound):
    """You have no attachment with that digest."""

    code = "unknown_attachment"
    default_hint = "upload the attachment first; its digest is the SHA-256 of its bytes"


class UnknownGrant(NotFound):
    """You have no grant with that id; it may have been revoked, or its session was deleted."""

    code = "unknown_grant"
    default_hint = "list your grants with grants(), 'holdfast grants' or GET /v1/grants"


class UnknownSchedule(NotFound):
    """You have no schedule with that id."""

    code = "unknown_schedule"
    default_hint = "list your schedules with schedules(), 'holdfast schedule ls' or GET /v1/schedules"


class SessionBusy(Conflict):
    """A run is already active and the policy is ``reject``; nothing was stored."""

    code = "busy"
    default_hint = "wait for the run to end, or send with policy queue or interrupt"


class WaitsForItself(Conflict):
    """A run waits for a message of its own session, which cannot be processed before the run ends."""

    code = "waits_for_itself"
    default_hint = "call send() without waiting, delegate to a child with delegate(), or use another session"


class SessionAgentMissing(Conflict):
    """The host no longer has the session's agent; nothing was stored."""

    code = "session_agent_missing"
    default_hint = "name another agent with the message (agent=, --agent), or use another session"


class AlreadySettled(Conflict):
    """The message is no longer queued and can therefore not be withdrawn."""

    code = "already_settled"
    default_hint = "interrupt the run that took the message"


class AlreadyAnswered(Conflict):
    """The question already has a different answer."""

    code = "already_answered"


class CallMismatch(Conflict):
    """The question now asks for a different call than the approved one."""

    code = "call_mismatch"
    default_hint = "read the question again and approve it with its current call_hash"


class HistoryChanged(Conflict):
    """The transcript has changed since you read it."""

    code = "history_changed"
    default_hint = "read the transcript again, then retry"


class NothingToUndo(Conflict):
    """The transcript is empty."""

    code = "nothing_to_undo"


class IdempotencyMismatch(Conflict):
    """The idempotency key was already used with a different body."""

    code = "idempotency_mismatch"
    default_hint = "use a new idempotency key for a new message"


class SessionDeleted(Conflict):
    """The session was deleted."""

    code = "session_deleted"
    default_hint = "use another session key; this one is free again after tombstone_s, by default 7 days"


class ScheduleBroken(Conflict):
    """The stored schedule is unreadable."""

    code = "schedule_broken"
    default_hint = "save the schedule again, delete it, or go back to the version of Holdfast that saved it"


class ScheduleFinished(Conflict):
    """The schedule has fired for the last time."""

    code = "schedule_finished"
    default_hint = "save the schedule again with another cadence"


class ScheduleChanged(Conflict):
    """The schedule was changed concurrently; nothing was done."""

    code = "schedule_changed"
    default_hint = "read the schedule again, then retry"


class MailboxFull(LimitExceeded):
    """The session's mailbox is full; nothing was stored."""

    code = "mailbox_full"
    default_hint = "wait until the session has processed some messages, or withdraw queued ones"


class RateLimited(LimitExceeded):
    """Too many requests from one principal; nothing was stored."""

    code = "rate_limited"
    default_hint = "retry after the number of seconds in Retry-After"


class BudgetExceeded(LimitExceeded):
    """The principal already uses its full share of a resource; nothing was stored."""

    code = "budget_exceeded"
    default_hint = "retry after the number of seconds in Retry-After"


class QuotaExceeded(LimitExceeded):
    """The principal reached its storage quota; nothing was stored."""

    code = "quota_exceeded"
    default_hint = "delete sessions, or raise the setting principal_stored_bytes"
    retry_after_s = 60.0


class HostBusy(LimitExceeded):
    """The host is out of a resource that all principals share; nothing was stored."""

    code = "host_busy"
    default_hint = "retry after the number of seconds in Retry-After"


class Draining(Unavailable):
    """The host is shutting down and accepts no new work."""

    code = "draining"
    default_hint = "retry once the host is back; with the same idempotency key, the message runs only once"


class WaitExpired(Unavailable):
    """The wait ended before the message was settled; the work continues."""

    code = "wait_expired"
    default_hint = "follow the events from the receipt's cursor, or query the message's settlement"


class MessageWithdrawn(RunError):
    """The message was withdrawn before a run took it."""

    code = "message_withdrawn"


class DeliveryFailed(HoldfastError):
    """A channel failed to deliver a message to its network, or does not know whether the message was delivered.

    Parameters:
        retry_after_s: seconds after which another attempt may succeed; None if a retry does not help.
    """

    code = "delivery_failed"

    def __init__(self, message: str = "", *, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
