"""What goes to a model and what comes back, in our words; the model layer maps it to each provider's.

`conversation` makes valid messages of a transcript, whatever became of its calls: every call is followed by its one
result before anything else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.protocol.messages import Attachment, Usage, Value

if TYPE_CHECKING:
    from holdfast.protocol.messages import Entry

__all__ = [
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
]


class ToolCall(Value, frozen=True, kw_only=True):
    """A call that a model asks for.

    Parameters:
        call_id: ours, the same in every attempt; the model layer shows it to the provider in letters it allows.
        name: the tool's.
        arguments: a JSON object; text where the model's JSON was broken.
    """

    call_id: str
    name: str
    arguments: dict[str, Any] | str


class UserMessage(Value, frozen=True, kw_only=True, tag="user"):
    """What a person said."""

    content: str
    attachments: tuple[Attachment, ...] = ()


class AssistantMessage(Value, frozen=True, kw_only=True, tag="assistant"):
    """What the model said and asked for. ``state`` as in `StepFinished`; ``partial`` when it was cut off."""

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
    """A tool as a model sees it. ``parameters`` is a JSON Schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ModelRequest(Value, frozen=True, kw_only=True):
    """One request to a model.

    Parameters:
        messages: oldest first; valid as `conversation` makes them.
        instructions: the system prompt.
        tools: what it may call.
        settings: for the model layer, such as ``temperature`` and ``max_tokens``; in pydantic-ai's names.
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
    """A whole call. ``arguments`` is the JSON as the model wrote it, or the object."""

    name: str
    arguments: dict[str, Any] | str
    provider_id: str = ""


class EndPart(Value, frozen=True, kw_only=True, tag="end"):
    """The last part of every answer that is whole. ``state`` as in `StepFinished`."""

    usage: Usage = Usage()
    reason: Literal["stop", "length", "calls", "refused", "other"] = "stop"
    model: str = ""
    state: Any = None


Part = TextPart | ReasoningPart | CallPart | EndPart


def conversation(entries: Sequence[Entry]) -> tuple[ModelMessage, ...]:
    """The messages of a transcript. A call without a result gets one that says so; a stray result is left out."""
    raise NotImplementedError
