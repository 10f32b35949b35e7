"""The exception hierarchy: every error that Holdfast raises deliberately.

    BaseException
    └── Interrupted                  control flow: the surrounding scope was interrupted
    Exception
    └── HoldfastError                code, message, hint
        ├── InvalidRequest           invalid input from the caller
        │   ├── InvalidCursor        not a cursor of this session
        │   ├── InvalidKey           not a valid session key or schedule id
        │   ├── InvalidSchedule      invalid schedule, or one that never fires
        │   ├── MalformedRequest     not HTTP, or over a size limit
        │   ├── MalformedBody        not JSON, or nested too deeply
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
        │   ├── UnknownGrant
        │   ├── UnknownSchedule
        │   └── UnknownRoute
        ├── Conflict                 the current state does not allow the operation
        │   ├── SessionBusy          policy ``reject`` found an active run
        │   ├── SessionAgentMissing  the host no longer has the session's agent
        │   ├── AlreadySettled       a message that can no longer be withdrawn
        │   ├── AlreadyAnswered      the question already has a different answer
        │   ├── CallMismatch         the approval is for a call other than the current one
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
        │   ├── ApprovalKeyRequired  a person must type the approval key
        │   ├── HostRefused          the Host header is not on the allowlist
        │   └── OriginRefused        the request comes from a web page of another origin
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
        ├── EventsMissed             a reader that requires every event encountered a gap
        ├── ScopeClosed              the scope is stopping or closed and starts no new work
        ├── ProcessEnded             the process of an isolated call exited without returning a result
        ├── StorageError
        │   ├── StaleFence           the run no longer holds the session; nothing was written
        │   ├── StoreFull            the disk is full
        │   ├── StoreReadOnly
        │   ├── StoreCorrupt
        │   ├── StoreLocked          another host has this file open
        │   └── StoreUnreachable     the database does not accept connections
        ├── ModelFailed              the model provider refused, failed or broke off its answer
        ├── DeliveryFailed           a channel failed to deliver a message to its network
        ├── ConfigurationError       invalid settings, flags or agents
        │   └── MissingExtra         a package for an optional feature is missing; the hint has the command
        └── InternalError            a bug in Holdfast; see the log

Each error has a message that describes what happened, a stable ``code`` for programs, and a ``hint`` that suggests what
to do next.
"""

from __future__ import annotations

from holdfast.errors.agents import (
    AgentCycle,
    BranchesFailed,
    CallFailed,
    EventsMissed,
    InvalidArguments,
    ModelFailed,
    NotDeterministic,
    RunClosed,
    RunError,
    RunFailed,
    RunInterrupted,
    StreamEnded,
    ToolFailed,
    TooManyRestarts,
    UnknownBranch,
)
from holdfast.errors.base import (
    AccessDenied,
    ConfigurationError,
    Conflict,
    HoldfastError,
    IllegalTransition,
    InternalError,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    MissingExtra,
    NotFound,
    NotSupported,
    Unavailable,
    format_error,
)
from holdfast.errors.host import (
    AlreadyAnswered,
    AlreadySettled,
    BudgetExceeded,
    CallMismatch,
    DeliveryFailed,
    Draining,
    HistoryChanged,
    HostBusy,
    IdempotencyMismatch,
    InvalidCursor,
    InvalidSchedule,
    MailboxFull,
    MessageWithdrawn,
    NothingToUndo,
    QuotaExceeded,
    RateLimited,
    ScheduleBroken,
    ScheduleChanged,
    ScheduleFinished,
    SessionAgentMissing,
    SessionBusy,
    SessionDeleted,
    UnknownAgent,
    UnknownAttachment,
    UnknownGrant,
    UnknownMessage,
    UnknownPolicy,
    UnknownQuestion,
    UnknownRun,
    UnknownSchedule,
    UnknownSession,
    WaitExpired,
    WaitsForItself,
)
from holdfast.errors.http import (
    ApprovalKeyRequired,
    BodyTooLarge,
    Forbidden,
    HostRefused,
    MalformedBody,
    MalformedRequest,
    MethodNotAllowed,
    OriginRefused,
    ServerUnreachable,
    Unauthenticated,
    UnknownKey,
    UnknownRoute,
    UnknownStop,
    UnsupportedMediaType,
)
from holdfast.errors.runtime import Interrupted, ProcessEnded, QueueClosed, QueueEmpty, QueueFull, ScopeClosed
from holdfast.errors.storage import (
    StaleFence,
    StorageError,
    StoreCorrupt,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
    StoreUnreachable,
)

__all__ = [
    "AccessDenied",
    "AgentCycle",
    "AlreadyAnswered",
    "AlreadySettled",
    "ApprovalKeyRequired",
    "BodyTooLarge",
    "BranchesFailed",
    "BudgetExceeded",
    "CallFailed",
    "CallMismatch",
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
    "SessionAgentMissing",
    "SessionBusy",
    "SessionDeleted",
    "StaleFence",
    "StorageError",
    "StoreCorrupt",
    "StoreFull",
    "StoreLocked",
    "StoreReadOnly",
    "StoreUnreachable",
    "StreamEnded",
    "TooManyRestarts",
    "ToolFailed",
    "Unauthenticated",
    "Unavailable",
    "UnknownAgent",
    "UnknownAttachment",
    "UnknownBranch",
    "UnknownGrant",
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
    "format_error",
]
