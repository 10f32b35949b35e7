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
    "AgentState",
    "Answer",
    "Attachment",
    "Decision",
    "Disposition",
    "EndedBy",
    "Entry",
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
EndedBy = CauseKind | Literal["failure"]
HistoryEdit = Literal["undo", "retry", "compact", "branch", "import"]


def check_text(text: str) -> None:
    """Raise `InvalidRequest` for text that UTF-8 does not allow."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate at character {error.start}, which UTF-8 does not allow",
            hint="decode the source bytes with errors='replace'",
        ) from None


def check_seconds(**times: object) -> None:
    """Raise `InvalidRequest` for a time that is not a finite number of at least 0; None means the default."""
    for name, value in times.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise InvalidRequest(f"{name} is {value!r}; it must be a number of seconds, 0 or more")


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of the wire values: frozen, keyword-only; JSON omits fields at their default."""


class Attachment(Value, frozen=True, kw_only=True):
    """A file, image or sound that belongs to a message; the store keeps its bytes by hash.

    Parameters:
        digest: SHA-256 of the bytes, 64 hexadecimal digits.
        media_type: such as ``image/png``.
        name: a file name for people, without folders.
        size_bytes: size, in bytes.
    """

    digest: str
    media_type: str
    name: str = ""
    size_bytes: int = 0


class Message(Value, frozen=True, kw_only=True):
    """One input to a session.

    Parameters:
        message_id: its id.
        seq: the number of its ``message.accepted`` event.
        content: the text.
        policy: what to do if a run is already active.
        accepted_at: seconds since the epoch.
        attachments: its attachments.
    """

    message_id: str
    seq: int
    content: str
    policy: Policy = "queue"
    accepted_at: float = 0.0
    attachments: tuple[Attachment, ...] = ()


class Question(Value, frozen=True, kw_only=True):
    """The question of a suspended run: approve a call (``approval``), or give an answer in text (``question``).

    Parameters:
        question_id: the same in every attempt of the run; for an approval, the id of the call.
        kind: approval or question.
        text: the text shown to people.
        tool, arguments: the tool and arguments of the call that needs approval.
        asked_at: seconds since the epoch.
        due_at: when it expires; 0 until the store sets it.
        call_hash: the hash of the call that needs approval (`holdfast.protocol.call_hash`). An approval contains the
            same hash, so that it is valid only for the call that was shown. Empty for a ``question``.
    """

    question_id: str
    kind: Literal["approval", "question"]
    text: str = ""
    tool: str | None = None
    arguments: Any = None
    asked_at: float = 0.0
    due_at: float = 0.0
    call_hash: str = ""


class Answer(Value, frozen=True, kw_only=True):
    """A person's decision, or ``expired`` if there was none in time.

    Parameters:
        question_id: the question.
        decision: ``approved`` and ``denied`` for approvals, ``answered`` for questions; ``expired`` for both.
        text: the answer, or the reason of a denial.
        by: the principal who answered: the owner of the credential, even when acting for the session's owner.
        at: seconds since the epoch.
        on_behalf_of: the principal that `by` acted for, if different; else empty.
        via: the credential: the id of a key, ``jwt``, ``local`` (no key required), ``terminal`` (of ``serve``) or
            ``host`` (code in the host's process).
        approval_key: the id of the approval key, if one was required; else empty.
        call_hash: the hash of the call that was shown to the approver.
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


class Receipt(Value, frozen=True, kw_only=True):
    """Proof that a sent message is durable.

    Parameters:
        session: the session's key.
        seq: the number of the message's ``message.accepted`` event.
        message_id: the message's id.
        disposition: the decision at arrival; later changes are events.
        cursor: position just before the message's first event; pass it to ``events(after=…)``.
        run_id: the run that took it (``started``), or its target run.
    """

    session: str
    seq: int
    message_id: str
    disposition: Disposition
    cursor: str
    run_id: str | None = None


class Usage(Value, frozen=True, kw_only=True):
    """Usage of a run. ``cost_usd`` is the model layer's estimate, 0 if the price is unknown."""

    steps: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of both."""
        return Usage(
            steps=self.steps + other.steps,
            tool_calls=self.tool_calls + other.tool_calls,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


class Settlement(Value, frozen=True, kw_only=True):
    """The current outcome of a message. ``state`` is ``accepted`` or ``taken`` until it settles.

    Parameters:
        message_id: the message.
        state: its state.
        run_id: the run that took it.
        text: the run's answer, complete or partial.
        cause: why the run was interrupted.
        error: the agent's error, one line.
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
        by: the owner of the state; only its newest state is read.
        body: the opaque state, set only on the way into the store. Entries read back omit it; `Store.kept` returns it.
        n: the number of the entry under which the store keeps the state; 0 until it is stored. An entry that replaces
            others in the same session may carry over their state.
    """

    by: str
    body: str = ""
    n: int = 0


class Entry(Value, frozen=True, kw_only=True):
    """One entry of a transcript.

    Parameters:
        n: the entry's number in the transcript, from 1.
        role: the author. Each ``tool_call`` is paired with a ``tool_result`` of the same ``call_id``; a ``summary``
            replaces earlier entries.
        content: the text, or the JSON of the arguments or the result.
        run_id: the run that wrote the entry.
        message_id: the id of the message, for a ``user`` entry.
        call_id, name: the call's id and the tool's name, for a ``tool_call`` or ``tool_result``.
        partial: whether the run was interrupted before the text was complete.
        status: the status of a ``tool_result``; ``interrupted`` marks a call without its own result.
        attachments: the attachments of a ``user`` entry.
        agent_state: agent state that a completed run keeps for the session's next run; hidden from readers. It is
            removed and restored with the run's entries.
        ended_by: on the last entry of a run that did not complete: the reason, a kind of `Cause` or ``failure``.
            The model reads it as a note, so that it does not carry out an interrupted request later.
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
    """A queued message, with its target run and its earliest start."""

    message: Message
    due_at: float = 0.0
    target_run_id: str | None = None


class RunView(Value, frozen=True, kw_only=True):
    """The current state of a run.

    Parameters:
        run_id: its id, the same for all attempts.
        agent: the agent's name.
        state: its state.
        attempt: 1, plus one for each restart after a crash.
        messages: ids of the messages it took.
        started_at, ended_at: seconds since the epoch.
        cause: the cause of an interrupt.
        error: the agent's error, one line.
        text: the answer, complete or partial.
        receipt: the receipt of its stop.
        questions: its open questions, while suspended.
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
    """The current state of a session. ``seq`` is its newest event, ``waiting`` the number of queued messages."""

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


class SessionStop(Value, frozen=True, kw_only=True):
    """The result of a session's stop: the stop receipt, and the withdrawn messages."""

    session: str
    receipt: StopReceipt
    withdrawn: tuple[Message, ...] = ()


class SessionExport(Value, frozen=True, kw_only=True):
    """A portable copy of a session's history: its transcript and the attachments it refers to.

    Parameters:
        format: version of this format.
        key, agent: the key and agent of the source session.
        exported_at: seconds since the epoch.
        entries: the transcript, in order.
        attachments: the bytes by digest; base64 in JSON.
    """

    format: Literal[1] = 1
    key: str
    agent: str
    exported_at: float = 0.0
    entries: tuple[Entry, ...] = ()
    attachments: dict[str, bytes] = msgspec.field(default_factory=dict)


class TreeNode(Value, frozen=True, kw_only=True):
    """A node of the task tree: a scope, task, thread or process, and its children."""

    kind: Literal["host", "session", "run", "scope", "task", "thread", "process"]
    name: str
    state: str = ""
    age_s: float = 0.0
    pid: int | None = None
    children: tuple[TreeNode, ...] = ()
