"""The wire protocols that the model server speaks: how each reads a request, what it objects to, and how it answers.

Both refuse what their providers refuse: a call without its result, a result without its call, ids and names in letters
that are not allowed, arguments that are no object, and text blocks with nothing in them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

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

__all__ = ["AnthropicWire", "OpenAIWire", "Wire"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ANTHROPIC_ID = re.compile(r"[a-zA-Z0-9_-]+")
_OPENAI_ID_LENGTH = 40
_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls", "refused": "content_filter", "other": "stop"}
_STOP = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "refused": "refusal", "other": "end_turn"}


class Wire(Protocol):
    """One answer in one protocol. Made for each request.

    Parameters:
        body: the request's JSON object.
        number: makes the ids of the answer differ from those of others.
    """

    def __init__(self, body: dict[str, Any], number: int) -> None: ...

    def objection(self) -> str | None:
        """Why the provider would refuse the request with status 400, or None."""
        ...

    def request(self) -> ModelRequest:
        """The request in our words."""
        ...

    def start(self) -> bytes:
        """What comes before the first part."""
        ...

    def part(self, part: Part) -> bytes:
        """A part of the answer; of an `EndPart`, all that ends the answer in order."""
        ...

    def broken(self, message: str) -> bytes:
        """An error inside a stream that had begun well."""
        ...

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """The key that came with the request."""
        ...

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """The body of an answer with an error status."""
        ...


class OpenAIWire:
    """``POST /v1/chat/completions`` with ``stream``."""

    def __init__(self, body: dict[str, Any], number: int) -> None:
        self._body = body
        self._id = f"chatcmpl-{number}"
        self._number = number
        self._calls = 0

    def objection(self) -> str | None:
        """See `Wire.objection`."""
        if self._body.get("stream") is not True:
            return "this server answers in streams only: send 'stream': true"
        if not self._body.get("messages"):
            return "messages is empty"
        try:
            return next(_openai_objections(self._body), None)
        except (AttributeError, KeyError, TypeError) as error:
            return f"a message does not have the form of the API: {error!r}"

    def request(self) -> ModelRequest:
        """See `Wire.request`."""
        messages: list[ModelMessage] = []
        instructions: list[str] = []
        names: dict[str, str] = {}
        for message in self._body["messages"]:
            role, content = message["role"], message.get("content")
            if role in ("system", "developer"):
                instructions.append(_text_of(content))
            elif role == "user":
                messages.append(UserMessage(content=_text_of(content), attachments=tuple(_openai_files(content))))
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
                messages.append(AssistantMessage(text=_text_of(content), calls=calls))
            else:
                call_id = message["tool_call_id"]
                messages.append(ToolMessage(call_id=call_id, name=names[call_id], content=_text_of(content)))
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
        """See `Wire.start`."""
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        """See `Wire.part`."""
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
        arguments = _arguments_text(part)
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
            yield _data({**self._frame(), "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def broken(self, message: str) -> bytes:
        """See `Wire.broken`."""
        return b"data: " + self.error(500, message) + b"\n\n"

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """See `Wire.key_of`."""
        return headers.get("authorization", "").removeprefix("Bearer ") or None

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """See `Wire.error`."""
        kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
        codes = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"error": {"message": message, "type": kind, "code": codes.get(status)}})

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": self._body.get("model", ""),
        }

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None) -> bytes:
        return _data({**self._frame(), "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _openai_objections(body: dict[str, Any]) -> Iterator[str]:
    for tool in body.get("tools") or ():
        if not _NAME.fullmatch(tool["function"]["name"]):
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
                yield from (f"messages[{n}]: {text}" for text in _openai_call_objections(call))
            open_calls = {call["id"] for call in calls}
            if len(open_calls) < len(calls):
                yield f"messages[{n}]: two tool calls have the same id"
        elif role not in ("system", "developer", "user"):
            yield f"messages[{n}]: there is no role {role!r}"
        elif not message.get("content"):
            yield f"messages[{n}]: content is empty"
    if open_calls:
        yield f"tool_call_ids without a tool message: {sorted(open_calls)}"


def _openai_call_objections(call: dict[str, Any]) -> Iterator[str]:
    if not 1 <= len(call["id"]) <= _OPENAI_ID_LENGTH:
        yield f"the id {call['id']!r} is not 1 to {_OPENAI_ID_LENGTH} characters long"
    if not _NAME.fullmatch(call["function"]["name"]):
        yield f"the name {call['function']['name']!r} has characters that are not allowed"
    try:
        arguments = msgspec.json.decode(call["function"]["arguments"])
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        yield f"the arguments of {call['function']['name']!r} are not a JSON object"


class AnthropicWire:
    """``POST /v1/messages`` with ``stream``."""

    def __init__(self, body: dict[str, Any], number: int) -> None:
        self._body = body
        self._number = number
        self._index = -1
        self._open = ""
        self._calls = 0

    def objection(self) -> str | None:
        """See `Wire.objection`."""
        if self._body.get("stream") is not True:
            return "this server answers in streams only: send 'stream': true"
        if not isinstance(self._body.get("max_tokens"), int):
            return "max_tokens: Field required"
        try:
            return next(_anthropic_objections(self._body), None)
        except (AttributeError, KeyError, TypeError) as error:
            return f"a message does not have the form of the API: {error!r}"

    def request(self) -> ModelRequest:
        """See `Wire.request`."""
        messages: list[ModelMessage] = []
        names: dict[str, str] = {}
        for message in self._body["messages"]:
            blocks = _blocks(message)
            text = "".join(block["text"] for block in blocks if block["type"] == "text")
            if message["role"] == "assistant":
                calls = tuple(
                    ToolCall(call_id=block["id"], name=block["name"], arguments=block["input"])
                    for block in blocks
                    if block["type"] == "tool_use"
                )
                names.update((call.call_id, call.name) for call in calls)
                messages.append(AssistantMessage(text=text, calls=calls))
                continue
            for block in blocks:
                if block["type"] == "tool_result":
                    call_id = block["tool_use_id"]
                    messages.append(
                        ToolMessage(
                            call_id=call_id,
                            name=names[call_id],
                            content=_text_of(block.get("content")),
                            status="error" if block.get("is_error") else "ok",
                        )
                    )
            files = tuple(
                _attachment(block["source"]["media_type"], block["source"]["data"])
                for block in blocks
                if block["type"] in ("image", "document") and block["source"]["type"] == "base64"
            )
            if text or files:
                messages.append(UserMessage(content=text, attachments=files))
        tools = tuple(
            ToolSpec(name=tool["name"], description=tool.get("description", ""), parameters=tool["input_schema"])
            for tool in self._body.get("tools") or ()
        )
        return ModelRequest(messages=tuple(messages), instructions=_text_of(self._body.get("system")), tools=tools)

    def start(self) -> bytes:
        """See `Wire.start`."""
        message = {
            "id": f"msg_{self._number}",
            "type": "message",
            "role": "assistant",
            "model": self._body.get("model", ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return _event("message_start", {"message": message})

    def part(self, part: Part) -> bytes:
        """See `Wire.part`."""
        match part:
            case TextPart():
                return self._delta("text", {"text": ""}, {"type": "text_delta", "text": part.text})
            case ReasoningPart():
                empty = {"thinking": "", "signature": ""}
                return self._delta("thinking", empty, {"type": "thinking_delta", "thinking": part.text})
            case CallPart():
                return b"".join(self._call(part))
            case EndPart():
                return self._end(part)

    def _delta(self, kind: str, empty: dict[str, Any], delta: dict[str, Any]) -> bytes:
        before = b"" if self._open == kind else self._close() + self._begin(kind, empty)
        return before + _event("content_block_delta", {"index": self._index, "delta": delta})

    def _begin(self, kind: str, content: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        block = {"index": self._index, "content_block": {"type": kind, **content}}
        return _event("content_block_start", block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": f"signed-{self._number}-{self._index}"}
            signed = _event("content_block_delta", {"index": self._index, "delta": delta})
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._index})

    def _call(self, part: CallPart) -> Iterator[bytes]:
        yield self._close()
        call_id = part.provider_id or f"toolu_{self._number}_{self._calls}"
        self._calls += 1
        yield self._begin("tool_use", {"id": call_id, "name": part.name, "input": {}})
        arguments = _arguments_text(part)
        half = (len(arguments) + 1) // 2
        for piece in (arguments[:half], arguments[half:]):
            delta = {"type": "input_json_delta", "partial_json": piece}
            yield _event("content_block_delta", {"index": self._index, "delta": delta})
        yield self._close()

    def _end(self, part: EndPart) -> bytes:
        reason = "calls" if part.reason == "stop" and self._calls else part.reason
        usage = {"input_tokens": part.usage.input_tokens, "output_tokens": part.usage.output_tokens}
        delta = {"stop_reason": _STOP[reason], "stop_sequence": None}
        return self._close() + _event("message_delta", {"delta": delta, "usage": usage}) + _event("message_stop", {})

    def broken(self, message: str) -> bytes:
        """See `Wire.broken`."""
        return b"event: error\ndata: " + self.error(529, message) + b"\n\n"

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """See `Wire.key_of`."""
        return headers.get("x-api-key") or None

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """See `Wire.error`."""
        kinds = {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
            529: "overloaded_error",
        }
        kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _anthropic_objections(body: dict[str, Any]) -> Iterator[str]:
    messages = body["messages"]
    if not messages or messages[0]["role"] != "user" or messages[-1]["role"] != "user":
        yield "messages: the first and the last message are the user's"
    open_calls: set[str] = set()
    for n, message in enumerate(messages):
        blocks = _blocks(message)
        if not blocks:
            yield f"messages.{n}: content is empty"
        answered = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if set(answered) != open_calls or len(answered) != len(open_calls):
            yield f"messages.{n}: tool_use {sorted(open_calls)} must be answered right here, not {sorted(answered)}"
        if any(block["type"] != "tool_result" for block in blocks[: len(answered)]):
            yield f"messages.{n}: tool_result blocks come first"
        calls = [block for block in blocks if block["type"] == "tool_use"]
        open_calls = {block["id"] for block in calls}
        if len(open_calls) < len(calls):
            yield f"messages.{n}: tool_use ids must be unique"
        for block in blocks:
            yield from (f"messages.{n}: {text}" for text in _anthropic_block_objections(block))
    if open_calls:
        yield f"tool_use ids without tool_result: {sorted(open_calls)}"


def _anthropic_block_objections(block: dict[str, Any]) -> Iterator[str]:
    kind = block["type"]
    if kind == "text" and not block["text"].strip():
        yield "text content blocks must contain non-whitespace text"
    if kind == "thinking" and not block.get("signature"):
        yield "thinking blocks need their signature"
    if kind == "tool_use":
        if not _ANTHROPIC_ID.fullmatch(block["id"]):
            yield f"tool_use.id {block['id']!r} has characters that are not allowed"
        if not _NAME.fullmatch(block["name"]):
            yield f"tool_use.name {block['name']!r} has characters that are not allowed"
        if not isinstance(block["input"], dict):
            yield "tool_use.input: Input should be a valid dictionary"


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(block["text"] for block in content if block["type"] == "text")
    return content or ""


def _openai_files(content: Any) -> Iterator[Attachment]:
    for block in content if isinstance(content, list) else ():
        if block["type"] == "image_url":
            head, _, data = block["image_url"]["url"].partition(";base64,")
            yield _attachment(head.removeprefix("data:"), data)
        elif block["type"] == "input_audio":
            yield _attachment(f"audio/{block['input_audio']['format']}", block["input_audio"]["data"])
        elif block["type"] == "file":
            head, _, data = block["file"]["file_data"].partition(";base64,")
            yield _attachment(head.removeprefix("data:"), data)


def _attachment(media_type: str, data: str) -> Attachment:
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error:
        content = data.encode()
    return Attachment(digest=hashlib.sha256(content).hexdigest(), media_type=media_type, size_bytes=len(content))


def _arguments_text(part: CallPart) -> str:
    return part.arguments if isinstance(part.arguments, str) else msgspec.json.encode(part.arguments).decode()


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + _data({"type": kind, **value})
