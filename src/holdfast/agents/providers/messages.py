"""Convert between our messages and pydantic-ai's.

Our messages identify calls by our ids. In a request, a call has the id that the provider gave it, if the step's
``state`` contains that id. Otherwise, the call's id is a hash of our id. The hash is the same in every request, and has
nine characters, a form that every provider accepts.

In later requests, a provider needs more of an answer than its text and calls: signatures, the provider's ids, and
reasoning. A step's ``state`` holds these additional data, and refers to the step's text and calls instead of repeating
them. A state that no longer matches the text and calls is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)

from holdfast.protocol import model as ours
from holdfast.protocol.messages import Attachment

__all__ = ["state_of", "to_provider"]

_OUTCOMES: Mapping[str, Any] = {"ok": "success", "error": "failed", "interrupted": "interrupted"}
_ID_LENGTH = 9
_PLAIN = ("text", "tool-call")


def to_provider(request: ours.ModelRequest, attachments: Mapping[str, bytes]) -> list[ModelMessage]:
    """Convert the messages of a request to pydantic-ai's messages.

    Parameters:
        attachments: bytes of the attachments, by digest; attachments that are missing here are described in text.
    """
    history = _History(attachments)
    for message in request.messages:
        match message:
            case ours.UserMessage():
                history.say(message)
            case ours.AssistantMessage():
                history.answer(message)
            case ours.ToolMessage():
                history.give(message)
    messages = history.messages
    if request.instructions:
        last = next((m for m in reversed(messages) if isinstance(m, ModelRequest)), None)
        if last is not None:
            last.instructions = request.instructions
    return messages


class _History:
    def __init__(self, attachments: Mapping[str, bytes]) -> None:
        self.messages: list[ModelMessage] = []
        self._attachments = attachments
        self._ids: dict[str, str] = {}
        self._taken: set[str] = set()

    def say(self, message: ours.UserMessage) -> None:
        content: list[UserContent] = [message.content] if message.content.strip() else []
        content += [self._file(attachment) for attachment in message.attachments]
        self._add(UserPromptPart(content=content or "(an empty message)"))

    def give(self, message: ours.ToolMessage) -> None:
        self._add(
            ToolReturnPart(
                tool_name=message.name,
                content=message.content,
                tool_call_id=self._ids.get(message.call_id, message.call_id),
                outcome=_OUTCOMES[message.status],
            )
        )

    def answer(self, message: ours.AssistantMessage) -> None:
        response = _with_state(message) or ModelResponse(parts=list(_plain_parts(message)))
        calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
        for call, part in zip(message.calls, calls, strict=True):
            part.tool_call_id = self._ids[call.call_id] = self._id_for(call.call_id, part.tool_call_id)
        if response.parts:
            self.messages.append(response)

    def _id_for(self, call_id: str, given: str) -> str:
        """Return the provider's id if this request does not use that id yet, else an id derived from our id."""
        found, n = given, 0
        while not found or found in self._taken:
            found = hashlib.sha256(f"{call_id}/{n}".encode()).hexdigest()[:_ID_LENGTH]
            n += 1
        self._taken.add(found)
        return found

    def _add(self, part: ModelRequestPart) -> None:
        if self.messages and isinstance(last := self.messages[-1], ModelRequest):
            last.parts = [*last.parts, part]
        else:
            self.messages.append(ModelRequest(parts=[part]))

    def _file(self, attachment: Attachment) -> UserContent:
        content = self._attachments.get(attachment.digest)
        if content is None:
            name = attachment.name or attachment.digest[:12]
            return f"[attachment {name!r}: {attachment.media_type}, {attachment.size_bytes} bytes; it cannot be shown]"
        return BinaryContent(data=content, media_type=attachment.media_type)


def _plain_parts(message: ours.AssistantMessage) -> Iterator[ModelResponsePart]:
    if message.text.strip():
        yield TextPart(content=message.text)
    for call in message.calls:
        yield ToolCallPart(tool_name=call.name, args=call.arguments, tool_call_id="")


# ── state for the provider ───────────────────────────────────────────────────────────────────────────────────────────


def state_of(response: ModelResponse) -> Any:
    """Return the data, in JSON types, that later requests need besides the answer's text and calls; None if they need
    no such data."""
    [dumped] = ModelMessagesTypeAdapter.dump_python([response], mode="json")
    parts = [_without_content(part) for part in dumped["parts"]]
    if all(part["part_kind"] in _PLAIN and len(part) == 2 for part in parts):
        return None
    kept = {name: dumped[name] for name in ("provider_name", "provider_url", "model_name") if dumped.get(name)}
    for name in ("provider_response_id", "canonical_system"):
        if dumped.get(name):
            kept[name] = dumped[name]
    return {**kept, "parts": parts}


def _without_content(part: dict[str, Any]) -> dict[str, Any]:
    """Return the part without data that the step has. Text is replaced by its length; calls lose name and arguments."""
    kept = {name: value for name, value in part.items() if value is not None}
    if part["part_kind"] == "text":
        kept["content"] = len(part["content"])
    elif part["part_kind"] == "tool-call":
        kept = {name: value for name, value in kept.items() if name not in ("tool_name", "args")}
    return kept


def _with_state(message: ours.AssistantMessage) -> ModelResponse | None:
    """Return the answer as the provider sent it, or None if the message has no state or no longer matches its state."""
    if not isinstance(message.state, dict):
        return None
    parts = []
    at = 0
    calls = iter(message.calls)
    for part in message.state["parts"]:
        if part["part_kind"] == "text":
            if message.text:  # blank text was dropped; no provider needs it back
                parts.append({**part, "content": message.text[at : at + part["content"]]})
                at += part["content"]
        elif part["part_kind"] == "tool-call":
            call = next(calls, None)
            if call is None:
                return None
            parts.append({**part, "tool_name": call.name, "args": call.arguments})
        else:
            parts.append(part)
    if at != len(message.text) or next(calls, None) is not None:
        return None
    [response] = ModelMessagesTypeAdapter.validate_python([{**message.state, "kind": "response", "parts": parts}])
    assert isinstance(response, ModelResponse)
    return response


def calls_of(response: ModelResponse) -> Sequence[ours.CallPart]:
    """Return the calls of an answer, in order, with the provider's ids."""
    return [
        ours.CallPart(name=part.tool_name, arguments=_read_arguments(part.args), provider_id=part.tool_call_id)
        for part in response.parts
        if isinstance(part, ToolCallPart)
    ]


def _read_arguments(arguments: Any) -> dict[str, Any] | str:
    if not isinstance(arguments, str):
        return dict(arguments or {})
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return arguments
