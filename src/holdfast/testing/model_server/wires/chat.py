"""Wire protocol of OpenAI's Chat Completions API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from holdfast.protocol.messages import Attachment
from holdfast.protocol.model import (
    AssistantMessage,
    CallPart,
    EndPart,
    ModelMessage,
    ModelRequest,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from holdfast.testing.model_server.wires.wire import (
    NAME,
    arguments_text,
    attachment_of,
    data_line,
    first_objection,
    text_of,
)

__all__ = ["ChatWire", "bearer", "openai_error"]

_ID_LENGTH = 40
_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls", "refused": "content_filter", "other": "stop"}


class ChatWire:
    """Wire format of ``POST /v1/chat/completions`` with a streamed answer."""

    def __init__(self, body: dict[str, Any], number: int) -> None:
        self._body = body
        self._id = f"chatcmpl-{number}"
        self._number = number
        self._calls = 0

    def objection(self) -> str | None:
        """See `WireFormat.objection`."""
        return first_objection(self._body, _objections)

    def request(self) -> ModelRequest:
        """See `WireFormat.request`."""
        messages: list[ModelMessage] = []
        instructions: list[str] = []
        names: dict[str, str] = {}
        for message in self._body["messages"]:
            role, content = message["role"], message.get("content")
            if role in ("system", "developer"):
                instructions.append(text_of(content))
            elif role == "user":
                messages.append(UserMessage(content=text_of(content), attachments=tuple(_files(content))))
            elif role == "assistant":
                calls = tuple(
                    ToolCall(
                        call_id=call["id"],
                        name=call["function"]["name"],
                        arguments=msgspec.json.decode(call["function"]["arguments"]),
                    )
                    for call in message.get("tool_calls") or ()
                )
                names.update((call.call_id, call.name) for call in calls)
                messages.append(AssistantMessage(text=text_of(content), calls=calls))
            else:
                call_id = message["tool_call_id"]
                messages.append(ToolMessage(call_id=call_id, name=names[call_id], content=text_of(content)))
        tools = tuple(
            ToolSpec(
                name=tool["function"]["name"],
                description=tool["function"].get("description", ""),
                parameters=tool["function"].get("parameters", {}),
            )
            for tool in self._body.get("tools") or ()
        )
        return ModelRequest(messages=tuple(messages), instructions="\n\n".join(instructions), tools=tools)

    def start(self) -> bytes:
        """See `WireFormat.start`."""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        """See `WireFormat.part`."""
        match part:
            case TextPart():
                return self._chunk({"content": part.text})
            case ReasoningPart():
                return self._chunk({"reasoning_content": part.text})
            case CallPart():
                return b"".join(self._call(part))
            case EndPart():
                return b"".join(self._end(part))

    def _call(self, part: CallPart) -> Iterator[bytes]:
        index = self._calls
        self._calls += 1
        named = {"index": index, "id": part.provider_id or f"call_{self._number}_{index}", "type": "function"}
        yield self._chunk({"tool_calls": [{**named, "function": {"name": part.name, "arguments": ""}}]})
        arguments = arguments_text(part)
        half = (len(arguments) + 1) // 2
        for piece in (arguments[:half], arguments[half:]):
            if piece:
                yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})

    def _end(self, part: EndPart) -> Iterator[bytes]:
        reason = "calls" if part.reason == "stop" and self._calls else part.reason
        yield self._chunk({}, finish=_FINISH[reason])
        if (self._body.get("stream_options") or {}).get("include_usage"):
            used = part.usage
            usage = {
                "prompt_tokens": used.input_tokens,
                "completion_tokens": used.output_tokens,
                "total_tokens": used.input_tokens + used.output_tokens,
            }
            yield data_line({**self._frame(), "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def broken(self, message: str) -> bytes:
        """See `WireFormat.broken`."""
        return b"data: " + self.error(500, message) + b"\n\n"

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """See `WireFormat.key_of`."""
        return bearer(headers)

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """See `WireFormat.error`."""
        return openai_error(status, message)

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": self._body.get("model", ""),
        }

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None) -> bytes:
        return data_line({**self._frame(), "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the API key in the ``Authorization`` header, or None if it is missing."""
    return headers.get("authorization", "").removeprefix("Bearer ") or None


def openai_error(status: int, message: str) -> bytes:
    """Return the response body that OpenAI's APIs send with an error status."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
    codes = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": codes.get(status)}})


def _objections(body: dict[str, Any]) -> Iterator[str]:
    if not body.get("messages"):
        yield "messages is empty"
    for tool in body.get("tools") or ():
        if not NAME.fullmatch(tool["function"]["name"]):
            yield f"the tool name {tool['function']['name']!r} has characters that are not allowed"
    open_calls: set[str] = set()
    for n, message in enumerate(body["messages"]):
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in open_calls:
                yield f"messages[{n}]: a tool message must follow the tool_calls that it answers"
            open_calls.discard(message["tool_call_id"])
            continue
        if open_calls:
            yield f"messages[{n}]: tool_call_ids without a tool message before it: {sorted(open_calls)}"
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            if not calls and not message.get("content"):
                yield f"messages[{n}]: an assistant message needs content or tool_calls"
            for call in calls:
                yield from (f"messages[{n}]: {text}" for text in _call_objections(call))
            open_calls = {call["id"] for call in calls}
            if len(open_calls) < len(calls):
                yield f"messages[{n}]: two tool calls have the same id"
        elif role not in ("system", "developer", "user"):
            yield f"messages[{n}]: unknown role {role!r}"
        elif not message.get("content"):
            yield f"messages[{n}]: content is empty"
    if open_calls:
        yield f"tool_call_ids without a tool message: {sorted(open_calls)}"


def _call_objections(call: dict[str, Any]) -> Iterator[str]:
    if not 1 <= len(call["id"]) <= _ID_LENGTH:
        yield f"the id {call['id']!r} is not 1 to {_ID_LENGTH} characters long"
    if not NAME.fullmatch(call["function"]["name"]):
        yield f"the name {call['function']['name']!r} has characters that are not allowed"
    try:
        arguments = msgspec.json.decode(call["function"]["arguments"])
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        yield f"the arguments of {call['function']['name']!r} are not a JSON object"


def _files(content: Any) -> Iterator[Attachment]:
    for block in content if isinstance(content, list) else ():
        if block["type"] == "image_url":
            head, _, data = block["image_url"]["url"].partition(";base64,")
            yield attachment_of(head.removeprefix("data:"), data)
        elif block["type"] == "input_audio":
            yield attachment_of(f"audio/{block['input_audio']['format']}", block["input_audio"]["data"])
        elif block["type"] == "file":
            head, _, data = block["file"]["file_data"].partition(";base64,")
            yield attachment_of(head.removeprefix("data:"), data)
