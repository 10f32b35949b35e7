"""Values of a session: messages, receipts, settlements, transcript entries and views.

All are frozen values that encode to JSON directly; HTTP, CLI and Python share them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.protocol.stopping import Cause, CauseKind, StopReceipt

__all__ = [
    "Access",
    "AgentState",
    "Answer",
    "Attachment",
    "Decision",
    "Disposition",
    "EndedBy",
    "Entry",
    "Grant",
    "GrantScope",
    "HistoryEdit",
    "MailboxItem",
    "Message",
    "MessageState",
    "Policy",
    "Question",
    "Receipt",
    "RunState",
    "RunView",
    "SessionExport",
    "SessionStop",
    "SessionView",
    "Settlement",
    "TreeNode",
    "Usage",
    "check_seconds",
    "check_text",
]

Policy = Literal["queue", "steer", "collect", "interrupt", "rollback", "reject"]
Disposition = Literal["started", "queued", "steering", "collecting", "interrupting", "rolling_back", "duplicate"]
MessageState = Literal["accepted", "taken", "completed", "failed", "interrupted", "superseded", "withdrawn"]
RunState = Literal["running", "suspended", "stopping", "completed", "failed", "interrupted"]
SettledAs = Literal["completed", "failed", "interrupted", "superseded", "withdrawn"]
Decision = Literal["approved", "denied", "answered", "expired"]
GrantScope = Literal["call", "session", "principal"]
EndedBy = CauseKind | Literal["failure"]
HistoryEdit = Literal["undo", "retry", "compact", "branch", "import"]


def check_text(text: str) -> None:
    """Raise `InvalidRequest` if the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate at character {error.start}, which UTF-8 does not allow",
            hint="decode the source bytes with errors='replace'",
        ) from None


def check_seconds(**times: object) -> None:
    """Raise `InvalidRequest` unless each duration is None (the default) or a finite number of seconds, 0 or more."""
    for name, value in times.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise InvalidRequest(f"{name} is {value!r}; it must be a number of seconds, 0 or more")


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of the wire values: frozen and keyword-only; the JSON omits fields that have their default value."""


class Attachment(Value, frozen=True, kw_only=True):
    """A file, image or sound that belongs to a message; the store keeps the bytes under their hash.

    Parameters:
        digest: SHA-256 of the bytes, as 64 hexadecimal digits.
        media_type: media type of the bytes, such as ``image/png``.
        name: file name for display, without folders.
        size_bytes: number of bytes.
    """

    digest: str
    media_type: str
    name: str = ""
    size_bytes: int = 0


class Message(Value, frozen=True, kw_only=True):
    """One input to a session.

    Parameters:
        message_id: id of the message.
        seq: number of the message's ``message.accepted`` event.
        content: text of the message.
        policy: how the session handles the message if a run is already active.
        accepted_at: time at which the message was accepted, in seconds since the epoch.
        attachments: attachments of the message.
    """

    message_id: str
    seq: int
    content: str
    policy: Policy = "queue"
    accepted_at: float = 0.0
    attachments: tuple[Attachment, ...] = ()


class Access(Value, frozen=True, kw_only=True):
    """Access of a call beyond its wall (see `holdfast.protocol.access`).

    Parameters:
        read: absolute paths of files and folders that the call may read.
        write: absolute paths of files and folders that the call may change.
        hosts: hosts that the call may reach, each with its port, such as ``api.example.org:443``.
        secrets: names of secrets that the call gets.
    """

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the access gives anything."""
        return bool(self.read or self.write or self.hosts or self.secrets)


class Grant(Value, frozen=True, kw_only=True):
    """An access that a person granted to a session or a principal, until it is revoked or the session is deleted.

    Access that is granted for one call is part of the call's `Answer`, and is not a `Grant`.

    Parameters:
        grant_id: id of the grant.
        principal: principal whose calls have the access.
        scope: ``session`` if only calls of one session have the access, or ``principal``.
        session: key of the session in which the access was granted; with scope ``session``, the access holds there.
        access: what was granted.
        at: time of the grant, in seconds since the epoch.
        by, on_behalf_of, via, approval_key: who granted it, and with which credential; as in `Answer`.
        question_id, call_hash, tool: the question that was approved: its id, the hash of its call, and the tool.
    """

    grant_id: str
    principal: str
    scope: Literal["session", "principal"]
    session: str
    access: Access
    at: float = 0.0
    by: str = ""
    on_behalf_of: str = ""
    via: str = ""
    approval_key: str = ""
    question_id: str = ""
    call_hash: str = ""
    tool: str = ""


class Question(Value, frozen=True, kw_only=True):
    """The question of a suspended run: approve a call (``approval``), or give an answer in text (``question``).

    Parameters:
        question_id: id of the question, the same in every attempt of the run; for an approval, the id of the call.
        kind: ``approval`` or ``question``.
        text: text shown to people.
        tool, arguments: tool and arguments of the call that needs approval; None for a ``question``.
        asked_at: time at which the question was asked, in seconds since the epoch.
        due_at: time at which the question expires, in seconds since the epoch; 0 if it does not expire.
        call_hash: hash of the call that needs approval (`holdfast.protocol.call_hash`); empty for a ``question``. The
            answer that approves the call carries the same hash, so that only the call that the person was shown is
            approved.
        access: what the call asks for beyond its wall; empty if it asks for nothing. The `text` describes it.
    """

    question_id: str
    kind: Literal["approval", "question"]
    text: str = ""
    tool: str | None = None
    arguments: Any = None
    asked_at: float = 0.0
    due_at: float = 0.0
    call_hash: str = ""
    access: Access = Access()


class Answer(Value, frozen=True, kw_only=True):
    """A person's answer to a question, or ``expired`` if no person answered in time.

    Parameters:
        question_id: id of the question.
        decision: ``approved`` or ``denied`` for an approval, ``answered`` for a question, ``expired`` for either.
        text: text of the answer, or the reason for a denial.
        by: principal that answered: the owner of the credential, even if that principal acted for the session's owner.
        at: time of the answer, in seconds since the epoch.
        on_behalf_of: principal for which `by` acted; empty if `by` acted for itself.
        via: credential that was used: the id of a key, ``jwt``, ``local`` (no key required), ``terminal`` (the terminal
            of ``serve``) or ``host`` (code in the host's process).
        approval_key: id of the approval key; empty if none was required.
        call_hash: hash of the call that the approver was shown.
        scope: what the approved access holds for: this call only, the session, or the principal.
        grant_id: id of the `Grant` that records the access; empty if the scope is ``call``.
    """

    question_id: str
    decision: Decision
    text: str = ""
    by: str = ""
    at: float = 0.0
    on_behalf_of: str = ""
    via: str = ""
    approval_key: str = ""
    call_hash: str = ""
    scope: GrantScope = "call"
    grant_id: str = ""


class Receipt(Value, frozen=True, kw_only=True):
    """Proof that a sent message is durable.

    Parameters:
        session: key of the session.
        seq: number of the message's ``message.accepted`` event.
        message_id: id of the message.
        disposition: what the session did with the message on arrival; later changes are reported as events.
        cursor: position just before the message's first event, for ``events(after=…)``.
        run_id: id of the run that took the message (``started``), or else of the run that was active when the message
            arrived; None if there was neither.
    """

    session: str
    seq: int
    message_id: str
    disposition: Disposition
    cursor: str
    run_id: str | None = None


class Usage(Value, frozen=True, kw_only=True):
    """Usage of a run. ``cost_usd`` is estimated by the model layer; it is 0 if the price is unknown."""

    steps: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of this usage and `other`."""
        return Usage(
            steps=self.steps + other.steps,
            tool_calls=self.tool_calls + other.tool_calls,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


class Settlement(Value, frozen=True, kw_only=True):
    """The current outcome of a message. ``state`` is ``accepted`` or ``taken`` until the message is settled.

    Parameters:
        message_id: id of the message.
        state: state of the message.
        run_id: id of the run that took the message; None if no run took it.
        text: the run's answer, complete or partial.
        cause: why the run was interrupted; None if it was not.
        error: the agent's error in one line; None if the agent did not fail.
    """

    message_id: str
    state: MessageState
    run_id: str | None = None
    text: str = ""
    cause: Cause | None = None
    error: str | None = None


class AgentState(Value, frozen=True, kw_only=True):
    """Agent state that a completed run keeps for the session's next run.

    Parameters:
        by: name of the owner of the state. Only the owner's newest state is read.
        body: the opaque state, set only when it is written to the store. Entries that are read back omit the body;
            `Store.kept` returns it.
        n: number of the entry under which the store keeps the state; 0 until the state is stored. An entry that
            replaces other entries of the same session may refer to the state of one of them.
    """

    by: str
    body: str = ""
    n: int = 0


class Entry(Value, frozen=True, kw_only=True):
    """One entry of a transcript.

    Parameters:
        n: number of the entry in its session, from 1 and never reused; 0 until the store assigns the number.
        role: kind of the entry. Each ``tool_call`` is paired with a ``tool_result`` of the same ``call_id``; a
            ``summary`` replaces earlier entries.
        content: the text, or the JSON of a call's arguments or result.
        run_id: id of the run that wrote the entry; None if no run wrote it.
        message_id: id of the message of a ``user`` entry.
        call_id, name: id of the call and name of the tool, for a ``tool_call`` or ``tool_result``.
        partial: whether the run ended before the text was complete.
        status: status of a ``tool_result``; ``interrupted`` marks a call that was interrupted and has no result.
        attachments: attachments of a ``user`` entry.
        agent_state: agent state that a completed run keeps for the session's next run. The state is hidden from
            readers, and is removed and restored with the run's entries.
        ended_by: why the run did not complete, as a kind of `Cause` or ``failure``; set only on the run's last entry.
            The model sees the reason in a note, so that the model does not carry out an interrupted request later.
    """

    n: int = 0
    role: Literal["user", "assistant", "tool_call", "tool_result", "summary"]
    content: str
    run_id: str | None = None
    message_id: str | None = None
    call_id: str | None = None
    name: str | None = None
    partial: bool = False
    status: Literal["ok", "error", "interrupted"] = "ok"
    attachments: tuple[Attachment, ...] = ()
    agent_state: AgentState | None = msgspec.field(default=None, name="kept")
    ended_by: EndedBy | None = None


class MailboxItem(Value, frozen=True, kw_only=True):
    """A queued message, with its target run and the time at which it is due (0 if it may be taken at once)."""

    message: Message
    due_at: float = 0.0
    target_run_id: str | None = None


class RunView(Value, frozen=True, kw_only=True):
    """The current state of a run.

    Parameters:
        run_id: id of the run, the same for all attempts.
        agent: name of the agent.
        state: state of the run.
        attempt: 1, plus one for each restart after a crash.
        messages: ids of the messages that the run took.
        started_at, ended_at: start and end of the run, in seconds since the epoch; `ended_at` is None until the run
            ends.
        cause: why the run was interrupted; None if it was not.
        error: the agent's error in one line; None if the agent did not fail.
        text: the run's answer, complete or partial.
        receipt: stop receipt of the run's scope; None if no receipt was recorded.
        usage: usage of the run.
        questions: the run's open questions; empty unless the run is suspended.
    """

    run_id: str
    agent: str
    state: RunState
    attempt: int = 1
    messages: tuple[str, ...] = ()
    started_at: float = 0.0
    ended_at: float | None = None
    cause: Cause | None = None
    error: str | None = None
    text: str = ""
    receipt: StopReceipt | None = None
    usage: Usage = Usage()
    questions: tuple[Question, ...] = ()


class SessionView(Value, frozen=True, kw_only=True):
    """The current state of a session.

    ``seq`` is the number of the session's newest event; ``waiting`` is the number of queued messages.
    ``workspace_pool`` names the pool of hosts that have the session's files; None if any host may run the session.
    """

    key: str
    principal: str
    number: int
    agent: str
    state: Literal["idle", "running", "suspended", "stopping", "deleted"]
    seq: int
    waiting: int
    run_id: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    workspace_pool: str | None = None


class SessionStop(Value, frozen=True, kw_only=True):
    """The result of stopping a session: the stop receipt and the withdrawn messages."""

    session: str
    receipt: StopReceipt
    withdrawn: tuple[Message, ...] = ()


class SessionExport(Value, frozen=True, kw_only=True):
    """A portable copy of a session's history: the transcript, and the attachments to which the transcript refers.

    Parameters:
        format: version of the export format.
        key, agent: key and agent of the source session.
        exported_at: time of the export, in seconds since the epoch.
        entries: entries of the transcript, in order.
        attachments: bytes of each attachment, by digest; encoded as base64 in JSON.
    """

    format: Literal[1] = 1
    key: str
    agent: str
    exported_at: float = 0.0
    entries: tuple[Entry, ...] = ()
    attachments: dict[str, bytes] = msgspec.field(default_factory=dict)


class TreeNode(Value, frozen=True, kw_only=True):
    """A node of the task tree: a scope, task, thread or process, and its children.

    ``processes`` is the number of live processes of a program, its descendants included; 0 for other nodes. One tree
    counts at most 200 processes; programs beyond that have too low a number, or 0.
    """

    kind: Literal["host", "session", "run", "scope", "task", "thread", "process"]
    name: str
    state: str = ""
    age_s: float = 0.0
    pid: int | None = None
    processes: int = 0
    children: tuple[TreeNode, ...] = ()
