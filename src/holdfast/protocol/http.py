"""Bodies of the HTTP API, shared by the server and the client. Query parameters and routes belong to the server."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from holdfast.protocol.messages import (
    Attachment,
    Entry,
    Grant,
    GrantScope,
    MailboxItem,
    MessageState,
    Policy,
    Question,
    Receipt,
    RunView,
    SessionView,
)
from holdfast.protocol.schedules import ScheduleSpec, ScheduleView
from holdfast.protocol.send_options import SendOptions
from holdfast.protocol.stopping import Cause

__all__ = [
    "Choice",
    "CompactBody",
    "DecisionBody",
    "DrainBody",
    "ErrorBody",
    "ErrorResponse",
    "ForkBody",
    "GrantList",
    "InterruptBody",
    "KeyBody",
    "KeyCreated",
    "KeyList",
    "KeyRevoked",
    "KeyRole",
    "KeyView",
    "Mailbox",
    "NothingBody",
    "PauseBody",
    "QuestionList",
    "RequestBody",
    "RunList",
    "ScheduleBody",
    "ScheduleList",
    "SendBody",
    "SendOutcome",
    "SessionList",
    "Status",
    "StopBody",
    "StopPending",
    "Transcript",
]

_SPEC_FIELDS = ScheduleSpec.__struct_fields__
_YEAR_S = 366 * 86400.0

Text = Annotated[str, Meta(max_length=2000)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Duration = Annotated[float, Meta(ge=0, le=_YEAR_S)]

Choice = Literal["approve", "deny", "answer"]
"""Decisions on an open question, used in `DecisionBody`."""

KeyRole = Literal["user", "admin", "trusted", "approver"]
"""Roles of keys, described in `KeyRecord`."""


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class RequestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the request bodies; the server refuses unknown fields, and the client omits defaults."""


class SendBody(RequestBody, frozen=True, kw_only=True):
    """A message to send.

    ``quiet_s`` and ``max_wait_s`` apply only to the policy ``collect``. Each item of ``attachments`` is either the
    response to an upload or a digest.
    """

    content: str
    policy: str = "queue"
    idempotency_key: Name | None = None
    agent: Name | None = None
    quiet_s: Duration | None = None
    max_wait_s: Duration | None = None
    attachments: Annotated[list[str | Attachment], Meta(max_length=100)] = []

    @classmethod
    def of(cls, content: str, options: SendOptions) -> SendBody:
        """Return the request body that sends `content` with these options."""
        return cls(
            content=content,
            policy=options.policy,
            idempotency_key=options.idempotency_key,
            agent=options.agent,
            quiet_s=options.quiet_s,
            max_wait_s=options.max_wait_s,
            attachments=list(options.attachments),
        )

    def options(self) -> SendOptions:
        """Return the send options. The store completes attachments that are given only by digest."""
        return SendOptions(
            policy=cast(Policy, self.policy),  # the store refuses unknown policies by name
            idempotency_key=self.idempotency_key,
            agent=self.agent,
            quiet_s=self.quiet_s,
            max_wait_s=self.max_wait_s,
            attachments=[
                Attachment(digest=one, media_type="") if isinstance(one, str) else one for one in self.attachments
            ],
        )


class InterruptBody(RequestBody, frozen=True, kw_only=True):
    """A request to interrupt a run.

    ``run_id`` is the run to interrupt (default: the active run); ``grace_s`` is the grace period for cleanup, in
    seconds.
    """

    reason: Text = ""
    run_id: Name | None = None
    grace_s: Duration | None = None


class StopBody(RequestBody, frozen=True, kw_only=True):
    """A request to stop a session. ``grace_s`` is the grace period for cleanup, in seconds."""

    reason: Text = ""
    grace_s: Duration | None = None


class DrainBody(RequestBody, frozen=True, kw_only=True):
    """A request to drain the host.

    ``deadline_s`` is the time that active runs have to finish, in seconds (default: the setting ``drain_timeout_s``).
    """

    deadline_s: Duration | None = None


class KeyBody(RequestBody, frozen=True, kw_only=True):
    """An API key to create: its principal, role and label.

    ``agents`` lists the agents that the key may use (default: the server's public agents). ``approval_key`` is an
    approval key of the same principal; it is required for the role ``approver`` on a server whose approvals need one.
    """

    principal: Name
    role: KeyRole = "user"
    label: Annotated[str, Meta(max_length=200)] = ""
    agents: Annotated[list[Name], Meta(max_length=1000)] | None = None
    approval_key: Annotated[str, Meta(max_length=200)] = ""


class DecisionBody(RequestBody, frozen=True, kw_only=True):
    """A decision on a call, or the answer to a question.

    ``text`` is the answer, or the reason for a denial, which the model sees. For an approval, ``call_hash`` is the hash
    from the question, ``scope`` is what the access that the call asks for holds for, and ``approval_key`` is the key
    typed by a person, if the server requires one.
    """

    decision: Choice
    text: Annotated[str, Meta(max_length=100_000)] = ""
    call_hash: Annotated[str, Meta(max_length=200)] = ""
    scope: GrantScope = "call"
    approval_key: Annotated[str, Meta(max_length=200)] = ""


class NothingBody(RequestBody, frozen=True, kw_only=True):
    """An empty object; the body may be omitted."""


class CompactBody(RequestBody, frozen=True, kw_only=True):
    """A request to compact a transcript.

    ``keep`` is the number of newest user messages to keep, along with all entries after the first of these messages.
    """

    keep: Annotated[int, Meta(ge=0, le=1000)] = 4


class ForkBody(RequestBody, frozen=True, kw_only=True):
    """A request to fork a session: the new session's key, and the last entry to copy (default: the newest entry)."""

    key: Name
    through_n: Annotated[int, Meta(ge=0)] | None = None


class ScheduleBody(RequestBody, frozen=True, kw_only=True):
    """A schedule to create or replace: its session, message and times (``every_s``, or ``cron`` with ``timezone``).

    An existing schedule with this ``schedule_id`` is replaced. ``miss`` is the policy for missed ticks: ``skip``,
    ``burst`` or ``delay``. ``overlap`` is the policy of the schedule's messages.
    """

    session: Name
    text: str
    schedule_id: Name | None = None
    agent: Name | None = None
    every_s: float | None = None
    cron: Annotated[str, Meta(max_length=200)] | None = None
    timezone: Annotated[str, Meta(max_length=100)] = "UTC"
    overlap: str = "queue"
    miss: str = "skip"
    initial_delay_s: float | None = None
    jitter_s: float = 0.0
    max_runs: int | None = None

    @classmethod
    def of(cls, spec: ScheduleSpec, schedule_id: str) -> ScheduleBody:
        """Return the request body that creates or replaces a schedule."""
        return cls(schedule_id=schedule_id, **{name: getattr(spec, name) for name in _SPEC_FIELDS})

    def spec(self) -> ScheduleSpec:
        """Return the schedule's specification. The host rejects unknown values of ``overlap`` and ``miss``."""
        return ScheduleSpec(**{name: getattr(self, name) for name in _SPEC_FIELDS})


class PauseBody(RequestBody, frozen=True, kw_only=True):
    """Whether the schedule is paused."""

    paused: bool


# ── Responses ────────────────────────────────────────────────────────────────────────────────────────────────────────


class SendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a message sent with ``?wait=``."""

    status: MessageState
    text: str
    cause: Cause | None
    error: str | None
    message_id: str
    run_id: str | None
    receipt: Receipt


class StopPending(msgspec.Struct, frozen=True, kw_only=True):
    """A stop in progress; poll ``/v1/sessions/{key}/stops/{stop_id}``."""

    session: str
    stop_id: str


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions, most recently changed first.

    ``next`` is the ``before`` parameter for the next page, or None on the last page.
    """

    sessions: list[SessionView]
    next: str | None = None


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that the model sees, in order."""

    entries: list[Entry]


class Mailbox(msgspec.Struct, frozen=True, kw_only=True):
    """Queued messages, in order."""

    items: list[MailboxItem]


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Runs, newest first."""

    runs: list[RunView]


class QuestionList(msgspec.Struct, frozen=True, kw_only=True):
    """Open questions of the suspended run, oldest first."""

    questions: list[Question]


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True):
    """Schedules, in order of creation."""

    schedules: list[ScheduleView]


class GrantList(msgspec.Struct, frozen=True, kw_only=True):
    """Grants, oldest first."""

    grants: list[Grant]


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret."""

    key_id: str
    principal: str
    role: KeyRole
    label: str
    created_at: float
    revoked_at: float | None
    agents: list[str] | None = None


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """All keys, including revoked ones."""

    keys: list[KeyView]


class KeyRevoked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of revoking a key: all keys, and which work of the key's principal was stopped or continues.

    Parameters:
        keys: all keys, including revoked ones.
        principal: owner of the revoked key.
        stopped: sessions whose runs and background work were stopped and whose queued messages were withdrawn.
        paused: schedules that were paused.
        running: sessions that continue to have a run, queued messages or background work.
        active: schedules that continue to fire.
    """

    keys: list[KeyView]
    principal: str
    stopped: list[str]
    paused: list[str]
    running: list[str]
    active: list[str]


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A new key and its secret, which is shown only once.

    ``first`` is whether this is the store's first key, so that every request needs a key from now on. For a first key,
    ``local_sessions`` is the number of sessions of the principal `local`, 1,000 if there are more; otherwise it is 0.
    """

    key: KeyView
    secret: str
    first: bool = False
    local_sessions: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Status of the server: ok, ready, draining or store_unreachable.

    ``awaiting_pool`` is the number of sessions that wait for a host of a ``workspace_pool`` that no host declares.
    """

    status: str
    awaiting_pool: int = 0


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error: a stable code, a message, and a hint."""

    code: str
    message: str
    hint: str


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every error response."""

    error: ErrorBody
