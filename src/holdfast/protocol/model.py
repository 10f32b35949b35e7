"""Model requests and answers in provider-neutral form; the model layer maps them to each provider.

`conversation` turns any transcript into valid messages, in which the results of all calls directly follow the calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, assert_never

import msgspec

from holdfast.protocol.messages import Attachment, Usage, Value

if TYPE_CHECKING:
    from holdfast.protocol.messages import EndedBy, Entry

__all__ = [
    "ENDED_BY",
    "ENDED_NOTES",
    "NO_RESULT",
    "AssistantMessage",
    "CallPart",
    "EndPart",
    "ModelMessage",
    "ModelRequest",
    "Part",
    "ReasoningPart",
    "TextPart",
    "ToolCall",
    "ToolMessage",
    "ToolSpec",
    "UserMessage",
    "conversation",
    "ended_note",
    "read_arguments",
    "tool_name",
    "with_user",
]


class ToolCall(Value, frozen=True, kw_only=True):
    """A call requested by a model.

    Parameters:
        call_id: id assigned by the agent loop, the same in every attempt. The model layer maps the id to characters
            that the provider allows.
        name: name of the tool.
        arguments: the decoded JSON object, or the model's raw text if it is not a JSON object.
    """

    call_id: str
    name: str
    arguments: dict[str, Any] | str


class UserMessage(Value, frozen=True, kw_only=True, tag="user"):
    """A user's message."""

    content: str
    attachments: tuple[Attachment, ...] = ()


class AssistantMessage(Value, frozen=True, kw_only=True, tag="assistant"):
    """The model's text and calls.

    ``state`` is the opaque data described in `StepFinished`. ``partial`` is set if the message was cut off.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    state: Any = None
    partial: bool = False


class ToolMessage(Value, frozen=True, kw_only=True, tag="tool"):
    """The result of one call."""

    call_id: str
    name: str
    content: str
    status: Literal["ok", "error", "interrupted"] = "ok"


ModelMessage = UserMessage | AssistantMessage | ToolMessage


class ToolSpec(Value, frozen=True, kw_only=True):
    """The description of a tool for a model. ``parameters`` is a JSON Schema of type ``object``."""

    name: str
    description: str
    parameters: dict[str, Any]


class ModelRequest(Value, frozen=True, kw_only=True):
    """One request to a model.

    Parameters:
        messages: valid messages, as returned by `conversation`, oldest first.
        instructions: the system prompt.
        tools: tools that the model may call.
        settings: settings for the model layer, such as ``temperature`` and ``max_tokens``, named as in pydantic-ai.
    """

    messages: tuple[ModelMessage, ...]
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class TextPart(Value, frozen=True, kw_only=True, tag="text"):
    """A piece of the answer."""

    text: str


class ReasoningPart(Value, frozen=True, kw_only=True, tag="reasoning"):
    """A piece of the model's reasoning."""

    text: str


class CallPart(Value, frozen=True, kw_only=True, tag="call"):
    """A complete call. ``arguments`` is either the JSON text that the model wrote or the decoded object."""

    name: str
    arguments: dict[str, Any] | str
    provider_id: str = ""


class EndPart(Value, frozen=True, kw_only=True, tag="end"):
    """The last part of every complete answer. ``state`` is the opaque data described in `StepFinished`."""

    usage: Usage = Usage()
    reason: Literal["stop", "length", "calls", "refused", "other"] = "stop"
    model: str = ""
    state: Any = None


Part = TextPart | ReasoningPart | CallPart | EndPart


SUMMARY = "What was said before, in short:\n\n"
BEGINNING = "(The conversation begins here.)"
NOTHING = "(nothing)"
NO_RESULT = "interrupted: this call has no result"
ENDED_BY: dict[EndedBy, str] = {
    "user": "interrupted by the user",
    "stop": "stopped by the user",
    "message": "interrupted by the user's next message",
    "rollback": "taken back by the user",
    "parent": "interrupted",
    "deadline": "out of time",
    "budget": "out of budget",
    "disconnect": "interrupted: the user's connection ended",
    "shutdown": "interrupted: the server shut down",
    "lease_lost": "interrupted: the server lost the session",
    "crash": "interrupted: the server crashed",
    "failure": "failed with an error",
}
"""Reasons why a run ended, worded for the model, which sees them in later runs."""

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")


def tool_name(name: str) -> str:
    """Return a tool name without characters that a provider may reject, because a model may request any name."""
    return _NOT_IN_A_NAME.sub("_", name)[:64] or "unnamed"


def conversation(entries: Sequence[Entry]) -> tuple[ModelMessage, ...]:
    """Return the messages of a transcript for a model.

    A call without a result gets the result `NO_RESULT`, and a result without a call is dropped. If a run did not
    complete, its assistant turn ends with a note (`ended_note`), so that the run's request is not merged with the next
    request and the model does not carry it out.

    The first message is a user message, user and assistant messages alternate, and each assistant message with calls is
    followed by the results of exactly these calls. No message is empty.
    """
    results = {e.call_id: e for e in reversed(entries) if e.role == "tool_result"}
    messages: list[ModelMessage] = []
    seen: set[str] = set()
    text, partial, answered = "", False, False
    calls: list[ToolCall] = []

    def close() -> None:
        nonlocal text, partial, answered
        if text.strip() or calls:
            _add(messages, AssistantMessage(text=text if text.strip() else "", calls=tuple(calls), partial=partial))
            messages.extend(_result_of(call, results.get(call.call_id)) for call in calls)
        text, partial, answered = "", False, False
        calls.clear()

    run_id, answered_run = None, False
    for entry in entries:
        if entry.run_id != run_id:
            run_id, answered_run = entry.run_id, False
        answered_run = answered_run or entry.role not in ("user", "summary")
        match entry.role:
            case "user" | "summary":
                close()
                said = SUMMARY + entry.content if entry.role == "summary" else entry.content
                _add(messages, UserMessage(content=said, attachments=entry.attachments))
            case "assistant":
                if calls:
                    close()
                text = f"{text}\n\n{entry.content}" if text else entry.content
                partial = entry.partial
            case "tool_call":
                if answered:
                    close()
                call_id = entry.call_id or ""
                if call_id and call_id not in seen:
                    seen.add(call_id)
                    name = tool_name(entry.name or "")
                    calls.append(ToolCall(call_id=call_id, name=name, arguments=read_arguments(entry.content)))
            case "tool_result":
                answered = bool(calls)
            case _:
                assert_never(entry.role)
        if entry.ended_by is not None:
            note = ended_note(entry.ended_by, answered=answered_run)
            if calls:
                close()
            text, partial = f"{text}\n\n{note}" if text else note, True
    close()
    return tuple(messages)


def ended_note(ended_by: EndedBy, *, answered: bool) -> str:
    """Return a note that informs the model that the run did not complete and its request is not to be carried out.

    Parameters:
        ended_by: reason why the run ended.
        answered: whether the run produced any output or calls.
    """
    where = "before this was finished" if answered else "before this was answered"
    if ended_by == "message":
        return f"[{ENDED_BY[ended_by]} {where}; go by that message]"
    return f"[{ENDED_BY[ended_by]} {where}; not to be carried out unless it is asked for again]"


ENDED_NOTES: Final = frozenset(ended_note(reason, answered=given) for reason in ENDED_BY for given in (True, False))
"""All notes of `ended_note`. Such a note is a message by itself if the run produced nothing after its last calls."""


def read_arguments(text: str) -> dict[str, Any] | str:
    """Decode the arguments of a call. Return the text unchanged if it is not a JSON object.

    Empty text and ``null`` are decoded as an empty object.
    """
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) else text


def with_user(messages: Sequence[ModelMessage], message: UserMessage) -> list[ModelMessage]:
    """Return `messages` with a user message added. If `messages` are valid, the result is valid, too."""
    added = list(messages)
    _add(added, message)
    return added


def _add(messages: list[ModelMessage], message: UserMessage | AssistantMessage) -> None:
    """Add a message so that user and assistant messages alternate and no message is empty."""
    last = messages[-1] if messages else None
    if isinstance(message, UserMessage):
        if isinstance(last, UserMessage):
            said = "\n\n".join(text for text in (last.content, message.content) if text != NOTHING and text.strip())
            messages[-1] = UserMessage(content=said or NOTHING, attachments=last.attachments + message.attachments)
            return
        if not message.content.strip() and not message.attachments:
            message = UserMessage(content=NOTHING, attachments=message.attachments)
    elif last is None:
        messages.append(UserMessage(content=BEGINNING))
    messages.append(message)


def _result_of(call: ToolCall, result: Entry | None) -> ToolMessage:
    if result is None:
        return ToolMessage(call_id=call.call_id, name=call.name, content=NO_RESULT, status="interrupted")
    return ToolMessage(call_id=call.call_id, name=call.name, content=result.content or NOTHING, status=result.status)
