"""The exception hierarchy: every error that Holdfast raises deliberately.

    BaseException
    └── Interrupted                  control flow: the surrounding scope was interrupted
    Exception
    └── HoldfastError                code, message, hint
        ├── InvalidRequest           invalid input from the caller
        │   ├── InvalidCursor        not a cursor of this session
        │   ├── InvalidKey           session key with characters that are not allowed
        │   ├── InvalidSchedule      invalid schedule, or one that never fires
        │   ├── MalformedRequest     not HTTP, or over a size limit
        │   ├── MalformedBody        not JSON
        │   ├── MethodNotAllowed     the route exists, but not for this method
        │   ├── UnsupportedMediaType a write without ``content-type: application/json``
        │   ├── UnknownPolicy
        │   └── NotSupported         the agent or this machine does not support it
        ├── NotFound                 no such session, message, run, agent, stop, API key or route
        │   ├── UnknownSession
        │   ├── UnknownMessage
        │   ├── UnknownRun
        │   ├── UnknownAgent
        │   ├── UnknownStop
        │   ├── UnknownKey
        │   ├── UnknownQuestion      no such open question or approval
        │   ├── UnknownAttachment
        │   ├── UnknownBranch        a route chose a branch that does not exist
        │   ├── UnknownSchedule
        │   └── UnknownRoute
        ├── Conflict                 the current state does not allow this
        │   ├── SessionBusy          policy ``reject`` found an active run
        │   ├── AlreadySettled       a message that can no longer be withdrawn
        │   ├── AlreadyAnswered      the question already has a different answer
        │   ├── HistoryChanged       the transcript changed since the caller read it
        │   ├── NothingToUndo
        │   ├── AgentCycle           delegation cycle: the agent is already handling this request
        │   ├── WaitsForItself       a run waits for the next run of its own session
        │   ├── IdempotencyMismatch  the key was used with a different body
        │   ├── SessionDeleted
        │   ├── ScheduleBroken       the stored schedule is unreadable
        │   ├── ScheduleFinished     the schedule never fires again
        │   ├── ScheduleChanged      the schedule was changed concurrently
        │   └── IllegalTransition    a state change that the state table does not allow
        ├── LimitExceeded            a limit was reached; nothing was stored
        │   ├── MailboxFull
        │   ├── QueueFull            an in-process queue
        │   ├── RateLimited
        │   ├── BudgetExceeded       the principal uses its full share of a resource
        │   ├── QuotaExceeded        the principal reached its storage quota
        │   ├── HostBusy             the host is out of a resource
        │   └── BodyTooLarge
        ├── AccessDenied
        │   ├── Unauthenticated
        │   ├── Forbidden
        │   ├── HostRefused          the Host header is not on the allowlist
        │   └── OriginRefused        a page of another origin may not call
        ├── Unavailable              try again later or elsewhere
        │   ├── Draining
        │   ├── WaitExpired          only the wait ended; the work continues
        │   └── ServerUnreachable
        ├── RunError                 raised by ``ask()``
        │   ├── RunFailed            also raised by delegate()
        │   │   └── BranchesFailed   too few branches of a composite agent completed; carries all results
        │   │       └── TooManyRestarts
        │   ├── RunInterrupted
        │   └── MessageWithdrawn
        ├── CallFailed               run.call(): a replayed call failed when it was first made
        ├── ToolFailed               raised by a tool: its text goes to the model unchanged
        │   └── InvalidArguments     the model's arguments do not match the tool's parameters
        ├── NotDeterministic         a replayed run made a different call
        ├── RunClosed                a run handle was used after its run ended
        ├── QueueClosed              the queue is closed and empty
        ├── QueueEmpty               nothing to take without waiting
        ├── StreamEnded              an item arrived after the end of its reactive source
        ├── EventsMissed             a reader that requires every event met a gap
        ├── ScopeClosed              a spawn or process start after stop began
        ├── ProcessEnded             the process of an isolated call exited without an answer
        ├── StorageError
        │   ├── StaleFence           another holder has the session now; nothing was written
        │   ├── StoreFull            the disk is full
        │   ├── StoreReadOnly
        │   ├── StoreCorrupt
        │   └── StoreLocked          another host has this file open
        ├── ModelFailed              the model provider refused, failed or broke off its answer
        ├── DeliveryFailed           a channel failed to deliver a message to its network
        ├── ConfigurationError       invalid settings, flags or agents
        │   └── MissingExtra         a package for an optional feature is missing; the hint has the command
        └── InternalError            a bug in Holdfast; see the log

Each error carries a message (what happened), a stable ``code`` for programs, and a ``hint``: what to do next.
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
    """The surrounding scope was interrupted; ``cause`` has the reason.

    A ``BaseException``, so that ``except Exception`` in an agent or tool does not swallow it. It is not a
    ``CancelledError``: a task that awaits an interrupted one must not look cancelled itself.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(
            f"interrupted by {cause.kind}: {cause.reason}" if cause.reason else f"interrupted by {cause.kind}"
        )
        self.cause = cause


class HoldfastError(Exception):
    """Base class of all errors. ``code`` is stable, ``hint`` is what to do next."""

    code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""
    retry_after_s: float | None = None
    """Seconds after which to retry; None if a retry does not help."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        text = message or (self.__doc__ or self.code).strip().splitlines()[0]
        super().__init__(text)
        self.message = text
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(HoldfastError):
    """The request is invalid."""

    code = "invalid_request"


class InvalidCursor(InvalidRequest):
    """The cursor does not belong to this session."""

    code = "invalid_cursor"
    default_hint = (
        "use the cursor of a receipt or the last SSE id of the same session, or omit it to start at the beginning"
    )


class InvalidKey(InvalidRequest):
    """The session key contains characters that are not allowed."""

    code = "invalid_key"
    default_hint = "use 1 to 200 printable characters without slashes or control characters"


class InvalidSchedule(InvalidRequest):
    """The schedule is invalid or never fires."""

    code = "invalid_schedule"
    default_hint = "the how-to page on schedules shows valid schedules"


class MalformedRequest(InvalidRequest):
    """The connection's bytes are not an HTTP request or exceed a limit; the connection is closed."""

    code = "malformed_request"
    default_hint = "send HTTP/1.1 with a smaller request head"


class MalformedBody(InvalidRequest):
    """The body is not JSON."""

    code = "malformed_body"
    default_hint = "send one JSON object in UTF-8"


class MethodNotAllowed(InvalidRequest):
    """The route exists, but not for this method."""

    code = "method_not_allowed"


class UnsupportedMediaType(InvalidRequest):
    """A write needs a JSON body."""

    code = "unsupported_media_type"
    default_hint = "send 'content-type: application/json'"


class UnknownPolicy(InvalidRequest):
    """No such policy."""

    code = "unknown_policy"
    default_hint = "use queue, steer, collect, interrupt, rollback or reject"


class NotSupported(InvalidRequest):
    """The agent or this machine does not support this."""

    code = "not_supported"


class NotFound(HoldfastError):
    """No such resource, or you do not own it."""

    code = "not_found"


class UnknownSession(NotFound):
    """No such session."""

    code = "unknown_session"
    default_hint = "send it a message: the first message creates the session"


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


class UnknownStop(NotFound):
    """No such stop in this session, or it has expired."""

    code = "unknown_stop"
    default_hint = "list the session's runs: a run keeps the receipt of its stop"


class UnknownKey(NotFound):
    """No valid API key with that id."""

    code = "unknown_key"
    default_hint = "'holdfast keys list' shows the ids"


class UnknownQuestion(NotFound):
    """No such open question or approval in this session."""

    code = "unknown_question"
    default_hint = "list the open questions with questions(), or GET …/approvals"


class UnknownAttachment(NotFound):
    """You have no attachment with that digest."""

    code = "unknown_attachment"
    default_hint = "upload it first; a digest is the SHA-256 of the bytes"


class UnknownSchedule(NotFound):
    """You have no schedule with that id."""

    code = "unknown_schedule"
    default_hint = "list your schedules with schedules(), 'holdfast schedule ls' or GET /v1/schedules"


class UnknownBranch(NotFound):
    """The route has no branch with that name."""

    code = "unknown_branch"


class UnknownRoute(NotFound):
    """No such route."""

    code = "unknown_route"
    default_hint = "GET /openapi.json lists every route"


class Conflict(HoldfastError):
    """The current state does not allow this."""

    code = "conflict"


class SessionBusy(Conflict):
    """A run is already active and the policy is ``reject``; nothing was stored."""

    code = "busy"
    default_hint = "wait for the run to end, or send with policy queue or interrupt"


class WaitsForItself(Conflict):
    """A run waits for a message of its own session, which can only run after it ends."""

    code = "waits_for_itself"
    default_hint = "use send() without waiting, delegate() for a child, or another session"


class AgentCycle(Conflict):
    """Delegation cycle: the agent is already handling this request."""

    code = "agent_cycle"
    default_hint = "let one of them do the work itself, or delegate only a part of it"


class AlreadySettled(Conflict):
    """The message is no longer queued; it is too late to withdraw it."""

    code = "already_settled"
    default_hint = "interrupt the run that took it instead"


class AlreadyAnswered(Conflict):
    """The question already has a different answer."""

    code = "already_answered"


class CallMismatch(Conflict):
    """The approved call is not the one that the question asks for now."""

    code = "call_mismatch"
    default_hint = "read the question again and approve it with its current call_hash"


class HistoryChanged(Conflict):
    """The transcript changed since you read it."""

    code = "history_changed"
    default_hint = "read the transcript again, then try again"


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
    default_hint = "use another key, or reuse this key after the purge"


class ScheduleBroken(Conflict):
    """The stored schedule is unreadable."""

    code = "schedule_broken"
    default_hint = "save it again, delete it, or go back to the version that wrote it"


class ScheduleFinished(Conflict):
    """The schedule has fired for the last time."""

    code = "schedule_finished"
    default_hint = "save it again with another cadence"


class ScheduleChanged(Conflict):
    """The schedule was changed concurrently; nothing was done."""

    code = "schedule_changed"
    default_hint = "read it again, then retry"


class IllegalTransition(Conflict):
    """The state table does not allow this change."""

    code = "illegal_transition"


class LimitExceeded(HoldfastError):
    """A limit was reached; nothing was stored."""

    code = "limit_exceeded"
    retry_after_s = 1.0


class MailboxFull(LimitExceeded):
    """The session's mailbox is full; nothing was stored."""

    code = "mailbox_full"
    default_hint = "wait until the session has processed some messages, or withdraw queued ones"


class QueueFull(LimitExceeded):
    """The queue is full; nothing was added."""

    code = "queue_full"
    default_hint = "wait for room, or raise the queue's limit"


class RateLimited(LimitExceeded):
    """Too many requests from one principal; nothing was stored."""

    code = "rate_limited"
    default_hint = "retry after the time in Retry-After"


class BudgetExceeded(LimitExceeded):
    """The principal already uses its full share of a resource; nothing was stored."""

    code = "budget_exceeded"
    default_hint = "retry after the time in Retry-After"


class QuotaExceeded(LimitExceeded):
    """The principal reached its storage quota; nothing was stored."""

    code = "quota_exceeded"
    default_hint = "delete sessions, or raise the setting principal_stored_bytes"
    retry_after_s = 60.0


class HostBusy(LimitExceeded):
    """The host is out of a resource that all principals share; nothing was stored."""

    code = "host_busy"
    default_hint = "retry after the time in Retry-After"


class BodyTooLarge(LimitExceeded):
    """The request body is too large for this host."""

    code = "body_too_large"


class AccessDenied(HoldfastError):
    """This caller may not do this."""

    code = "access_denied"


class Unauthenticated(AccessDenied):
    """The request has no valid API key."""

    code = "unauthenticated"
    default_hint = "send 'Authorization: Bearer <key>'; create one with 'holdfast keys create'"


class Forbidden(AccessDenied):
    """The key is valid, but its role does not allow this."""

    code = "forbidden"


class ApprovalKeyRequired(AccessDenied):
    """An agent of this server may be able to use any stored credential, so a person must type the approval key."""

    code = "approval_key_required"
    default_hint = "type the approval key that 'holdfast serve' shows at its terminal, or answer there"


class HostRefused(AccessDenied):
    """The request names a host that this server does not serve."""

    code = "host_refused"
    default_hint = "use the address it listens on, or add the name to HOLDFAST_ALLOWED_HOSTS"


class OriginRefused(AccessDenied):
    """A web page of another origin may not call this server."""

    code = "origin_refused"
    default_hint = "add the page's origin to HOLDFAST_ALLOWED_ORIGINS"


class Unavailable(HoldfastError):
    """Temporarily unavailable; nothing was stored."""

    code = "unavailable"
    retry_after_s = 2.0


class Draining(Unavailable):
    """The host is shutting down and accepts no new work."""

    code = "draining"
    default_hint = "retry when the host is back; with the same idempotency key the message runs once"


class WaitExpired(Unavailable):
    """The wait ended before the message was settled; the work continues."""

    code = "wait_expired"
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
        results: result of each branch, in order, including the answers of those that completed.
    """

    code = "branches_failed"
    default_hint = ""  # the text has each branch's error

    def __init__(self, message: str = "", *, hint: str | None = None, results: tuple[BranchResult, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.results = results


class TooManyRestarts(BranchesFailed):
    """Branches restarted too often in too short a time."""

    code = "too_many_restarts"


class RunInterrupted(RunError):
    """The run was interrupted before it completed."""

    code = "run_interrupted"


class MessageWithdrawn(RunError):
    """The message was withdrawn before a run took it."""

    code = "message_withdrawn"


class CallFailed(HoldfastError):
    """The call failed in an earlier attempt of this run and is not repeated."""

    code = "call_failed"


class ToolFailed(HoldfastError):
    """The tool failed; the model reads this text unchanged."""

    code = "tool_failed"


class InvalidArguments(ToolFailed):
    """The arguments do not match the tool's parameters."""

    code = "invalid_arguments"


class NotDeterministic(HoldfastError):
    """A replayed run made a different call than before."""

    code = "not_deterministic"
    default_hint = (
        "make the same calls in the same order on every replay; wrap what varies (time, randomness) in run.call"
    )


class RunClosed(HoldfastError):
    """The run has ended; its handle no longer accepts output."""

    code = "run_closed"
    default_hint = "for work that outlives its run, use run.background()"


class QueueClosed(HoldfastError):
    """The queue is closed and empty."""

    code = "queue_closed"


class QueueEmpty(HoldfastError):
    """The queue is empty."""

    code = "queue_empty"


class StreamEnded(HoldfastError):
    """A reactive source emitted an item after it had completed or failed."""

    code = "stream_ended"
    default_hint = "push items before on_completed() and on_error(), or use a new source"


class EventsMissed(HoldfastError):
    """A reader that requires every event met a gap."""

    code = "events_missed"
    default_hint = "read the missed content in the transcript, then subscribe again after the gap"


class ProcessEnded(HoldfastError):
    """The process of an isolated call exited before it answered."""

    code = "process_ended"
    default_hint = "read its standard error; the exit code of a process killed by signal n is -n"


class ScopeClosed(HoldfastError):
    """The scope is stopping or closed and starts no new work."""

    code = "scope_closed"


class StorageError(HoldfastError):
    """The store operation failed; nothing was written."""

    code = "storage_error"
    retry_after_s = 5.0
    default_hint = "retry; if it keeps failing, check the store's disk and the host's incidents"


class StaleFence(StorageError):
    """Another holder or run has the session now; nothing was written."""

    code = "stale_fence"
    default_hint = "read the session again: another run has taken it over"


class StoreFull(StorageError):
    """The disk is full; nothing was written."""

    code = "store_full"
    default_hint = "free some space on the store's disk; no accepted message is lost"


class StoreReadOnly(StorageError):
    """The store is not writable."""

    code = "store_read_only"
    default_hint = "check the owner and mode of the database file and its folder"


class StoreCorrupt(StorageError):
    """The database file is damaged or is not a Holdfast store."""

    code = "store_corrupt"
    default_hint = "move the file aside and restore a backup, or name another file with --store"


class StoreLocked(StorageError):
    """Another host has this store open."""

    code = "store_locked"
    default_hint = "stop the other host, or name another file with --store"


class ModelFailed(HoldfastError):
    """The model provider refused the request, failed, or broke off its answer.

    Parameters:
        provider_status: HTTP status of the provider's answer; None if it did not answer.
        retry_after_s: seconds after which the same request may succeed; None if a retry does not help.
    """

    code = "model_failed"

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
    """A channel failed to deliver a message to its network, or does not know whether it did.

    Parameters:
        retry_after_s: seconds after which another attempt may succeed; None if a retry does not help.
    """

    code = "delivery_failed"

    def __init__(self, message: str = "", *, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ConfigurationError(HoldfastError):
    """A setting, flag or agent is invalid."""

    code = "configuration_error"


class MissingExtra(ConfigurationError):
    """An optional feature needs a package that is not installed."""

    code = "missing_extra"

    def __init__(self, part: str, *, extra: str) -> None:
        super().__init__(
            f"{part} needs packages that are not installed",
            hint=f"install them: pip install 'holdfast-agents[{extra}]'",
        )


class InternalError(HoldfastError):
    """The server hit a bug; nothing else is affected."""

    code = "internal_error"
    default_hint = "the server's log has the details; a send with an idempotency key is safe to retry"


def told(error: BaseException) -> str:
    """Return an error's class and text, even if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as trouble:
        return f"{type(error).__name__} (its text is unavailable: {type(trouble).__name__}"
