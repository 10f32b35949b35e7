"""What goes in and out of a session: messages, receipts, settlements, transcript entries and views.

All are frozen values that encode to JSON as they are; HTTP, CLI and Python share them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.protocol.stopping import Cause, CauseKind, StopReceipt

__all__ = [
    "Answer",
    "Attachment",
    "Decision",
    "Disposition",
    "EndedBy",
    "Entry",
    "HistoryEdit",
    "KeptState",
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
    """Raise `InvalidRequest` for text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate at character {error.start}, which UTF-8 cannot hold",
            hint="decode the bytes it came from with errors='replace'",
        ) from None


def check_seconds(**times: object) -> None:
    """Raise `InvalidRequest` for a time that is not a finite number of at least 0; None stands for a default."""
    for name, value in times.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise InvalidRequest(f"{name} is {value!r}; it is a number of seconds, 0 or more")


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of the values on the wire: frozen, by keyword; fields at their default are left out of the JSON."""


class Attachment(Value, frozen=True, kw_only=True):
    """A file, image or sound that belongs to a message; its bytes lie in the store, found by their hash.

    Parameters:
        digest: SHA-256 of the bytes, 64 hexadecimal digits.
        media_type: such as ``image/png``.
        name: a file name for people, without folders.
        size_bytes: how many bytes.
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
        policy: what it does when a run is on.
        accepted_at: seconds since the epoch.
        attachments: what belongs to it.
    """

    message_id: str
    seq: int
    content: str
    policy: Policy = "queue"
    accepted_at: float = 0.0
    attachments: tuple[Attachment, ...] = ()


class Question(Value, frozen=True, kw_only=True):
    """What a suspended run waits for: leave to make a call (``approval``), or an answer in words (``question``).

    Parameters:
        question_id: the same in every attempt of the run; for an approval it is the id of the call.
        kind: what is asked for.
        text: for people.
        tool, arguments: of the call that needs approval.
        asked_at: seconds since the epoch.
        due_at: the time from which it counts as ``expired``; 0 while the store has not set it.
        call_hash: of the call that needs approval, as `holdfast.protocol.call_hash` makes it; an approval repeats it,
            so that it counts for the call that was shown and for no other. Empty for a question in words.
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
    """What a person decided, or ``expired`` when nobody did in time.

    Parameters:
        question_id: the question.
        decision: ``approved`` and ``denied`` for approvals, ``answered`` for questions; ``expired`` for both.
        text: the answer, or the reason of a denial.
        by: the principal who answered: the owner of the credential, also where it acted for the session's owner.
        at: seconds since the epoch.
        on_behalf_of: the principal that it was given for, where that is another one than `by`; else empty.
        via: what it came with: the id of a key, ``jwt``, ``local`` (no key is needed), ``terminal`` (of ``serve``) or
            ``host`` (code in the host's process).
        approval_key: the id of the approval key that an approval came with, where one is needed; else empty.
        call_hash: of the call that was shown to whoever approved it.
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
    """The answer to a send: the message is durable.

    Parameters:
        session: the session's key.
        seq: the number of the message's ``message.accepted`` event.
        message_id: the message's id.
        disposition: what was decided; what becomes of the message is an event.
        cursor: position just before the message's first event; give it to ``events(after=…)``.
        run_id: the run that took it (``started``) or that it is aimed at.
    """

    session: str
    seq: int
    message_id: str
    disposition: Disposition
    cursor: str
    run_id: str | None = None


class Usage(Value, frozen=True, kw_only=True):
    """What a run used. ``cost_usd`` is what the model layer reckons, 0 where it knows no price."""

    steps: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(
            steps=self.steps + other.steps,
            tool_calls=self.tool_calls + other.tool_calls,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


class Settlement(Value, frozen=True, kw_only=True):
    """What became of a message. ``state`` is ``accepted`` or ``taken`` while it is open.

    Parameters:
        message_id: the message.
        state: its state.
        run_id: the run that took it.
        text: the run's answer, whole or partial.
        cause: why the run was interrupted.
        error: the agent's error, one line.
    """

    message_id: str
    state: MessageState
    run_id: str | None = None
    text: str = ""
    cause: Cause | None = None
    error: str | None = None


class KeptState(Value, frozen=True, kw_only=True):
    """What the agent of a completed run keeps for the session's next one.

    Parameters:
        by: who keeps it; only the newest of the same is read.
        body: the state, opaque, on its way into the store. Entries that were read have it not: `Store.kept` gives it.
        n: where the store has it, the number of the entry it came with; 0 on its way in. An entry that takes the place
            of others in the same session may carry on what they kept.
    """

    by: str
    body: str = ""
    n: int = 0


class Entry(Value, frozen=True, kw_only=True):
    """One entry of a transcript.

    Parameters:
        n: its number in the transcript, from 1.
        role: who speaks. ``tool_call`` and ``tool_result`` come in pairs with one ``call_id``; ``summary`` stands for
            what was before it.
        content: the text, or the JSON of arguments or result.
        run_id: the run that wrote it.
        message_id: for ``user``, the message.
        call_id, name: for tool entries.
        partial: the run was interrupted before the text was whole.
        status: of a ``tool_result``; ``interrupted`` stands for a call that has no result of its own.
        attachments: of a ``user`` entry.
        kept: what the agent of a completed run keeps for the session's next one; not shown to readers. It goes and
            comes with the run's entries.
        ended_by: on the last entry of a run that did not complete: what ended it, a kind of `Cause` or ``failure``.
            The model reads it as a note, so that it does not carry out later what was interrupted.
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
    kept: KeptState | None = None
    ended_by: EndedBy | None = None


class MailboxItem(Value, frozen=True, kw_only=True):
    """A message that waits, with the run it is aimed at and the time before which it is not taken."""

    message: Message
    due_at: float = 0.0
    target_run_id: str | None = None


class RunView(Value, frozen=True, kw_only=True):
    """A run as it stands.

    Parameters:
        run_id: its id, the same over all attempts.
        agent: the agent's name.
        state: its state.
        attempt: 1, and one more for each restart after a crash.
        messages: ids of the messages it took.
        started_at, ended_at: seconds since the epoch.
        cause: of an interrupt.
        error: the agent's error, one line.
        text: the answer, whole or partial.
        receipt: of its stop.
        questions: what it waits for, while it is suspended.
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
    """A session as it stands. ``seq`` is its newest event, ``waiting`` the messages in its mailbox."""

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
    """The answer to a session's stop: the receipt of its activation, and the messages that were withdrawn."""

    session: str
    receipt: StopReceipt
    withdrawn: tuple[Message, ...] = ()


class SessionExport(Value, frozen=True, kw_only=True):
    """A session's history for another place: its transcript and the attachments that it names.

    Parameters:
        format: the version of this form.
        key, agent: of the session it was taken from.
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
    """One branch or leaf of the task tree: a scope, task, thread or process, and what is below it."""

    kind: Literal["host", "session", "run", "scope", "task", "thread", "process"]
    name: str
    state: str = ""
    age_s: float = 0.0
    pid: int | None = None
    children: tuple[TreeNode, ...] = ()
