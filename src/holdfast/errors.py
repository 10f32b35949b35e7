"""Every error that Holdfast raises on purpose, in one tree.

    BaseException
    └── Interrupted                  control flow: the surrounding scope was interrupted
    Exception
    └── HoldfastError                code, message, hint, HTTP status
        ├── InvalidRequest           the caller's input does not fit
        │   ├── InvalidCursor        not a cursor of this session
        │   ├── InvalidKey           a session key outside the allowed alphabet
        │   ├── InvalidSchedule      a cadence that cannot be, or that never ticks
        │   ├── MalformedRequest     not HTTP, or beyond its bounds
        │   ├── MalformedBody        not JSON
        │   ├── MethodNotAllowed     the address exists, but not for this method
        │   ├── UnsupportedMediaType a write without ``content-type: application/json``
        │   ├── UnknownPolicy
        │   └── NotSupported         the agent, or this machine, cannot do it
        ├── NotFound                 no such session, message, run, agent, stop, API key or address
        │   ├── UnknownSession
        │   ├── UnknownMessage
        │   ├── UnknownRun
        │   ├── UnknownAgent
        │   ├── UnknownStop
        │   ├── UnknownKey
        │   ├── UnknownQuestion      no such question or approval is open
        │   ├── UnknownAttachment
        │   ├── UnknownBranch        a route was told a name that it does not have
        │   ├── UnknownSchedule
        │   └── UnknownRoute
        ├── Conflict                 the state does not allow it now
        │   ├── SessionBusy          policy ``reject`` met a run
        │   ├── AlreadySettled       a message that can no longer be withdrawn
        │   ├── AlreadyAnswered      a question that was decided otherwise before
        │   ├── HistoryChanged       the transcript is not what the caller saw
        │   ├── NothingToUndo
        │   ├── AgentCycle           an agent is asked what it is being asked already
        │   ├── WaitsForItself       a run waits for its own session's next one
        │   ├── IdempotencyMismatch  the key was used with another body
        │   ├── SessionDeleted
        │   ├── ScheduleBroken       what is stored of it cannot be read
        │   ├── ScheduleFinished     it has no more ticks
        │   ├── ScheduleChanged      somebody changed the schedule meanwhile
        │   └── IllegalTransition    a state change that the table does not have
        ├── LimitExceeded            a bound was reached; nothing was stored
        │   ├── MailboxFull
        │   ├── QueueFull            an in-process queue
        │   ├── RateLimited
        │   ├── BudgetExceeded       the principal holds its share of a resource
        │   ├── QuotaExceeded        what the principal has stored
        │   ├── HostBusy             the host has no more of a resource
        │   └── BodyTooLarge
        ├── AccessDenied
        │   ├── Unauthenticated
        │   ├── Forbidden
        │   ├── HostRefused          the Host header is not on the allow-list
        │   └── OriginRefused        a page of another origin may not call
        ├── Unavailable              try again later or elsewhere
        │   ├── Draining
        │   ├── WaitExpired          the work goes on; only the wait ended
        │   └── ServerUnreachable
        ├── RunError                 raised by ``ask()``
        │   ├── RunFailed            also raised by delegate()
        │   │   └── BranchesFailed   too few branches of a shape completed; it has the results of all
        │   │       └── TooManyRestarts
        │   ├── RunInterrupted
        │   └── MessageWithdrawn
        ├── CallFailed               run.call(): a replayed call had failed
        ├── ToolFailed               raised by a tool: its text goes to the model as it is
        │   └── InvalidArguments     what the model gave does not fit the tool's parameters
        ├── NotDeterministic         a replayed run made another call than before
        ├── RunClosed                a run handle was used after its run ended
        ├── QueueClosed              nothing goes into the queue any more, and it is empty
        ├── QueueEmpty               nothing to take without waiting
        ├── StreamEnded              an item came after the end of its reactive source
        ├── EventsMissed             a reader that takes no gap met one
        ├── ScopeClosed              a spawn or process came after stop began
        ├── ProcessEnded             the process of an isolated call ended without an answer
        ├── StorageError
        │   ├── StaleFence           the session has another holder now; nothing was written
        │   ├── StoreFull            the disk is full
        │   ├── StoreReadOnly
        │   ├── StoreCorrupt
        │   └── StoreLocked          another host has this file open
        ├── ModelFailed              the model's provider refused, failed or broke off
        ├── DeliveryFailed           a channel could not hand a message to its network
        ├── ConfigurationError       settings, flags or agents that cannot work
        │   └── MissingExtra         a package that an optional part needs; the hint has the command
        └── InternalError            a mistake of ours; the log has it

Each error carries what happened (its message), a stable ``code`` for programs, and a ``hint``: what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from holdfast.protocol.branches import BranchResult
    from holdfast.protocol.stopping import Cause

__all__ = [
    "AccessDenied",
    "AgentCycle",
    "AlreadyAnswered",
    "AlreadySettled",
    "BodyTooLarge",
    "BranchesFailed",
    "BudgetExceeded",
    "CallFailed",
    "ConfigurationError",
    "Conflict",
    "DeliveryFailed",
    "Draining",
    "EventsMissed",
    "Forbidden",
    "HistoryChanged",
    "HoldfastError",
    "HostBusy",
    "HostRefused",
    "IdempotencyMismatch",
    "IllegalTransition",
    "InternalError",
    "Interrupted",
    "InvalidArguments",
    "InvalidCursor",
    "InvalidKey",
    "InvalidRequest",
    "InvalidSchedule",
    "LimitExceeded",
    "MailboxFull",
    "MalformedBody",
    "MalformedRequest",
    "MessageWithdrawn",
    "MethodNotAllowed",
    "MissingExtra",
    "ModelFailed",
    "NotDeterministic",
    "NotFound",
    "NotSupported",
    "NothingToUndo",
    "OriginRefused",
    "ProcessEnded",
    "QueueClosed",
    "QueueEmpty",
    "QueueFull",
    "QuotaExceeded",
    "RateLimited",
    "RunClosed",
    "RunError",
    "RunFailed",
    "RunInterrupted",
    "ScheduleBroken",
    "ScheduleChanged",
    "ScheduleFinished",
    "ScopeClosed",
    "ServerUnreachable",
    "SessionBusy",
    "SessionDeleted",
    "StaleFence",
    "StorageError",
    "StoreCorrupt",
    "StoreFull",
    "StoreLocked",
    "StoreReadOnly",
    "StreamEnded",
    "TooManyRestarts",
    "ToolFailed",
    "Unauthenticated",
    "Unavailable",
    "UnknownAgent",
    "UnknownAttachment",
    "UnknownBranch",
    "UnknownKey",
    "UnknownMessage",
    "UnknownPolicy",
    "UnknownQuestion",
    "UnknownRoute",
    "UnknownRun",
    "UnknownSchedule",
    "UnknownSession",
    "UnknownStop",
    "UnsupportedMediaType",
    "WaitExpired",
    "WaitsForItself",
    "told",
]


class Interrupted(BaseException):
    """The surrounding scope was interrupted; ``cause`` says why.

    A ``BaseException``, so that ``except Exception`` in an agent or tool does not swallow it. It is not a
    ``CancelledError``: an innocent task that awaits an interrupted one must not look cancelled itself.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(
            f"interrupted by {cause.kind}: {cause.reason}" if cause.reason else f"interrupted by {cause.kind}"
        )
        self.cause = cause


class HoldfastError(Exception):
    """Base of all errors. ``code`` is stable, ``status`` is the HTTP status, ``hint`` says what to do next."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    default_hint: ClassVar[str] = ""
    retry_after_s: float | None = None
    """When to try again, in seconds; None where trying again does not help."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        text = message or (self.__doc__ or self.code).strip().splitlines()[0]
        super().__init__(text)
        self.message = text
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(HoldfastError):
    """The request does not fit what this call takes."""

    code = "invalid_request"
    status = 422


class InvalidCursor(InvalidRequest):
    """The cursor is not one of this session's."""

    code = "invalid_cursor"
    status = 400
    default_hint = (
        "use the cursor of a receipt or the last SSE id of the same session, or leave it out to start at the beginning"
    )


class InvalidKey(InvalidRequest):
    """The session key has characters that are not allowed."""

    code = "invalid_key"
    default_hint = "use 1 to 200 printable characters without slashes or control characters"


class InvalidSchedule(InvalidRequest):
    """The schedule cannot be, or never ticks."""

    code = "invalid_schedule"
    default_hint = "the how-to page on schedules shows what they take"


class MalformedRequest(InvalidRequest):
    """The bytes on the connection are no HTTP request, or break a bound of one; the connection is closed."""

    code = "malformed_request"
    status = 400
    default_hint = "send HTTP/1.1 with a smaller head"


class MalformedBody(InvalidRequest):
    """The body is not JSON."""

    code = "malformed_body"
    status = 400
    default_hint = "send one JSON object in UTF-8"


class MethodNotAllowed(InvalidRequest):
    """The address exists, but not for this method."""

    code = "method_not_allowed"
    status = 405


class UnsupportedMediaType(InvalidRequest):
    """A write needs a JSON body."""

    code = "unsupported_media_type"
    status = 415
    default_hint = "send 'content-type: application/json'"


class UnknownPolicy(InvalidRequest):
    """There is no such policy."""

    code = "unknown_policy"
    default_hint = "use queue, steer, collect, interrupt, rollback or reject"


class NotSupported(InvalidRequest):
    """The agent, or this machine, cannot do it."""

    code = "not_supported"


class NotFound(HoldfastError):
    """There is no such thing, or it is not yours."""

    code = "not_found"
    status = 404


class UnknownSession(NotFound):
    """There is no such session."""

    code = "unknown_session"
    default_hint = "send it a message: a session comes into being with its first one"


class UnknownMessage(NotFound):
    """There is no such message in this session."""

    code = "unknown_message"
    default_hint = "use the message_id of a receipt of this session"


class UnknownRun(NotFound):
    """There is no such run in this session."""

    code = "unknown_run"
    default_hint = "use the run_id of a receipt or event of this session"


class UnknownAgent(NotFound):
    """This host has no agent of that name."""

    code = "unknown_agent"


class UnknownStop(NotFound):
    """There is no such stop in this session, or it was forgotten."""

    code = "unknown_stop"
    default_hint = "the run keeps the receipt of its stop: look at the session's runs"


class UnknownKey(NotFound):
    """There is no valid API key of that id."""

    code = "unknown_key"
    default_hint = "'holdfast keys list' shows the ids"


class UnknownQuestion(NotFound):
    """No such question or approval is open in this session."""

    code = "unknown_question"
    default_hint = "list the open ones with questions(), or GET …/approvals"


class UnknownAttachment(NotFound):
    """You have no attachment of that digest."""

    code = "unknown_attachment"
    default_hint = "upload it first; a digest is the SHA-256 of the bytes"


class UnknownSchedule(NotFound):
    """You have no schedule of that id."""

    code = "unknown_schedule"
    default_hint = "list yours with schedules(), 'holdfast schedule ls' or GET /v1/schedules"


class UnknownBranch(NotFound):
    """The route has no branch of that name."""

    code = "unknown_branch"


class UnknownRoute(NotFound):
    """There is nothing at this address."""

    code = "unknown_route"
    default_hint = "GET /openapi.json lists every address"


class Conflict(HoldfastError):
    """The state does not allow this now."""

    code = "conflict"
    status = 409


class SessionBusy(Conflict):
    """A run is on, and the policy is ``reject``; nothing was stored."""

    code = "busy"
    default_hint = "wait for the run to end, or send with policy queue or interrupt"


class WaitsForItself(Conflict):
    """A run waits for a message of its own session, which can only run after it."""

    code = "waits_for_itself"
    default_hint = "use send() without waiting, delegate() for a child, or another session"


class AgentCycle(Conflict):
    """An agent is asked what it is being asked already: that has no end."""

    code = "agent_cycle"
    default_hint = "let one of them do the work itself, or ask for a part of it"


class AlreadySettled(Conflict):
    """The message is no longer waiting and cannot be withdrawn."""

    code = "already_settled"
    default_hint = "interrupt the run that took it instead"


class AlreadyAnswered(Conflict):
    """The question was decided before, and otherwise."""

    code = "already_answered"


class CallMismatch(Conflict):
    """The call that was approved is not the one that the question asks for now."""

    code = "call_mismatch"
    default_hint = "look at the question again; approve it with the call_hash that it has now"


class HistoryChanged(Conflict):
    """The transcript is not what you saw: something was written to it since."""

    code = "history_changed"
    default_hint = "read the transcript again, then repeat it"


class NothingToUndo(Conflict):
    """The transcript is empty."""

    code = "nothing_to_undo"


class IdempotencyMismatch(Conflict):
    """The idempotency key was used before with another body."""

    code = "idempotency_mismatch"
    status = 422
    default_hint = "use a new idempotency key for a new message"


class SessionDeleted(Conflict):
    """The session was deleted."""

    code = "session_deleted"
    status = 410
    default_hint = "use another key, or the same one again after the purge"


class ScheduleBroken(Conflict):
    """What is stored of the schedule cannot be read."""

    code = "schedule_broken"
    default_hint = "put it again, delete it, or go back to the version that wrote it"


class ScheduleFinished(Conflict):
    """The schedule has fired as often as it was to, or has no more ticks."""

    code = "schedule_finished"
    default_hint = "put it again with another cadence"


class ScheduleChanged(Conflict):
    """Somebody changed the schedule meanwhile; nothing was done."""

    code = "schedule_changed"
    default_hint = "look at it, then repeat it"


class IllegalTransition(Conflict):
    """The state table does not have this change."""

    code = "illegal_transition"


class LimitExceeded(HoldfastError):
    """A bound was reached; nothing was stored."""

    code = "limit_exceeded"
    status = 429
    retry_after_s = 1.0


class MailboxFull(LimitExceeded):
    """The session's mailbox is full; nothing was stored."""

    code = "mailbox_full"
    default_hint = "wait until the session has worked some off, or withdraw waiting messages"


class QueueFull(LimitExceeded):
    """The queue is full; nothing was put in."""

    code = "queue_full"
    default_hint = "wait for room, or raise the queue's bound"


class RateLimited(LimitExceeded):
    """Too many requests of one principal; nothing was stored."""

    code = "rate_limited"
    default_hint = "send again after the time in Retry-After"


class BudgetExceeded(LimitExceeded):
    """The principal holds its share of a resource; nothing was stored."""

    code = "budget_exceeded"
    default_hint = "send again after the time in Retry-After"


class QuotaExceeded(LimitExceeded):
    """What the principal has stored reached its quota; nothing was stored."""

    code = "quota_exceeded"
    status = 507
    default_hint = "delete sessions, or raise the setting principal_stored_bytes"
    retry_after_s = 60.0


class HostBusy(LimitExceeded):
    """All principals together hold what the host has of a resource; nothing was stored."""

    code = "host_busy"
    status = 503
    default_hint = "send again after the time in Retry-After"


class BodyTooLarge(LimitExceeded):
    """The request body is larger than this host takes."""

    code = "body_too_large"
    status = 413


class AccessDenied(HoldfastError):
    """This caller may not do this."""

    code = "access_denied"
    status = 403


class Unauthenticated(AccessDenied):
    """No valid key came with the request."""

    code = "unauthenticated"
    status = 401
    default_hint = "send 'Authorization: Bearer <key>'; make one with 'holdfast keys create'"


class Forbidden(AccessDenied):
    """The key is valid, but its role does not allow this."""

    code = "forbidden"


class ApprovalKeyRequired(AccessDenied):
    """An agent of this server could use any stored credential, so an approval needs a key that a person typed."""

    code = "approval_key_required"
    default_hint = "type the approval key that 'holdfast serve' shows at its terminal, or answer there"


class HostRefused(AccessDenied):
    """The request names a host that this server does not answer for."""

    code = "host_refused"
    default_hint = "call it by the address it listens on, or add the name to HOLDFAST_ALLOWED_HOSTS"


class OriginRefused(AccessDenied):
    """A web page of another origin may not call this server."""

    code = "origin_refused"
    default_hint = "add the page's origin to HOLDFAST_ALLOWED_ORIGINS"


class Unavailable(HoldfastError):
    """Not now; nothing was stored."""

    code = "unavailable"
    status = 503
    retry_after_s = 2.0


class Draining(Unavailable):
    """The host is shutting down and takes no new work."""

    code = "draining"
    default_hint = "send again when it is back; with the same idempotency key it runs once"


class WaitExpired(Unavailable):
    """The wait ended before the message was settled; the work goes on."""

    code = "wait_expired"
    status = 202
    default_hint = "follow the events from the receipt's cursor, or ask for the message's settlement"


class ServerUnreachable(Unavailable):
    """The server does not answer."""

    code = "server_unreachable"
    default_hint = "start one with 'holdfast serve', or name its address with --url"


class RunError(HoldfastError):
    """The run that took the message did not complete."""

    code = "run_error"


class RunFailed(RunError):
    """The agent raised an error."""

    code = "run_failed"
    default_hint = "the log of the host's process has the traceback, with the run's id (logger 'holdfast.agents')"


class BranchesFailed(RunFailed):
    """Too few branches completed.

    Parameters:
        results: what each branch came to, in their order; the answers of those that completed are there.
    """

    code = "branches_failed"
    default_hint = ""  # the text has each branch's error

    def __init__(self, message: str = "", *, hint: str | None = None, results: tuple[BranchResult, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.results = results


class TooManyRestarts(BranchesFailed):
    """Branches were started again too often in too short a time."""

    code = "too_many_restarts"


class RunInterrupted(RunError):
    """The run was interrupted before it completed."""

    code = "run_interrupted"
    status = 409


class MessageWithdrawn(RunError):
    """The message was withdrawn before a run took it."""

    code = "message_withdrawn"
    status = 409


class CallFailed(HoldfastError):
    """The call raised an error in an earlier attempt of this run; it is not made again."""

    code = "call_failed"


class ToolFailed(HoldfastError):
    """The tool could not do what it was asked; the model reads this text as it is."""

    code = "tool_failed"


class InvalidArguments(ToolFailed):
    """The arguments do not fit the tool's parameters."""

    code = "invalid_arguments"


class NotDeterministic(HoldfastError):
    """A replayed run made another call than before."""

    code = "not_deterministic"
    default_hint = (
        "a replayable agent makes the same calls in the same order; put what differs (time, chance) into run.call"
    )


class RunClosed(HoldfastError):
    """The run has ended; nothing that is emitted through its handle counts any more."""

    code = "run_closed"
    default_hint = "keep work that outlives its run out of it: start it with session.background()"


class QueueClosed(HoldfastError):
    """The queue is closed: nothing goes in any more, and nothing is left in it to take."""

    code = "queue_closed"


class QueueEmpty(HoldfastError):
    """There is nothing to take without waiting."""

    code = "queue_empty"


class StreamEnded(HoldfastError):
    """An item came from a reactive source that had said before that it completed or failed."""

    code = "stream_ended"
    default_hint = "push items before on_completed() and on_error(), or into a new source"


class EventsMissed(HoldfastError):
    """A reader of events that takes no gap met one."""

    code = "events_missed"
    default_hint = "read the transcript for what was missed, and subscribe again after the gap"


class ProcessEnded(HoldfastError):
    """The process of an isolated call ended before it answered."""

    code = "process_ended"
    default_hint = "look at its standard error; the exit code of a process killed by signal n is -n"


class ScopeClosed(HoldfastError):
    """The scope is stopping or closed and starts nothing new."""

    code = "scope_closed"


class StorageError(HoldfastError):
    """The store could not do this; nothing was written."""

    code = "storage_error"
    status = 503
    retry_after_s = 5.0
    default_hint = "send again; if it stays so, look at the store's disk and at the host's incidents"


class StaleFence(StorageError):
    """The session has another holder or run now; nothing was written."""

    code = "stale_fence"
    status = 409
    default_hint = "read the session again: another run holds it now"


class StoreFull(StorageError):
    """The disk is full; nothing was written."""

    code = "store_full"
    status = 507
    default_hint = "free some space on the store's disk; nothing that was accepted is lost"


class StoreReadOnly(StorageError):
    """The store cannot be written."""

    code = "store_read_only"
    default_hint = "check the owner and mode of the database file and of its folder"


class StoreCorrupt(StorageError):
    """The database file is damaged or is not a Holdfast store."""

    code = "store_corrupt"
    default_hint = "keep the file aside and restore a backup, or name another file with --store"


class StoreLocked(StorageError):
    """Another host has this store open."""

    code = "store_locked"
    default_hint = "stop the other host, or name another file with --store"


class ModelFailed(HoldfastError):
    """The model's provider refused the request, failed, or broke off its answer.

    Parameters:
        provider_status: the HTTP status that it answered with; None where there was no such answer.
        retry_after_s: when the same request may succeed, in seconds; None where repeating it does not help.
    """

    code = "model_failed"
    status = 502

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        provider_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.provider_status = provider_status
        self.retry_after_s = retry_after_s


class DeliveryFailed(HoldfastError):
    """A channel could not hand a message to its network, or does not know whether it did.

    Parameters:
        retry_after_s: when another attempt may succeed, in seconds; None where repeating it does not help.
    """

    code = "delivery_failed"
    status = 502

    def __init__(self, message: str = "", *, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ConfigurationError(HoldfastError):
    """A setting, flag or agent that cannot work."""

    code = "configuration_error"


class MissingExtra(ConfigurationError):
    """An optional part needs a package that is not installed."""

    code = "missing_extra"

    def __init__(self, part: str, *, extra: str) -> None:
        super().__init__(
            f"{part} needs packages that are not installed",
            hint=f"install them: pip install 'holdfast-agents[{extra}]'",
        )


class InternalError(HoldfastError):
    """The server made a mistake; nothing else is affected."""

    code = "internal_error"
    default_hint = "the server's log has the details; a send with an idempotency key may be repeated"


def told(error: BaseException) -> str:
    """An error's class and text, also when its text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as trouble:
        return f"{type(error).__name__}, whose text cannot be had: {type(trouble).__name__}"
