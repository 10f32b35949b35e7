"""Wire protocol of Anthropic's Messages API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

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
    event_lines,
    first_objection,
    text_of,
)

__all__ = ["MessagesWire"]

_ID = re.compile(r"[a-zA-Z0-9_-]+")
_STOP = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "refused": "refusal", "other": "end_turn"}


class MessagesWire:
    """Wire format of ``POST /v1/messages`` with a streamed answer."""

    def __init__(self, body: dict[str, Any], number: int) -> None:
        self._body = body
        self._number = number
        self._index = -1
        self._open = ""
        self._calls = 0

    def objection(self) -> str | None:
        """See `WireFormat.objection`."""
        return first_objection(self._body, _objections)

    def request(self) -> ModelRequest:
        """See `WireFormat.request`."""
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
                            content=text_of(block.get("content")),
                            status="error" if block.get("is_error") else "ok",
                        )
                    )
            files = tuple(
                attachment_of(block["source"]["media_type"], block["source"]["data"])
                for block in blocks
                if block["type"] in ("image", "document") and block["source"]["type"] == "base64"
            )
            if text or files:
                messages.append(UserMessage(content=text, attachments=files))
        tools = tuple(
            ToolSpec(name=tool["name"], description=tool.get("description", ""), parameters=tool["input_schema"])
            for tool in self._body.get("tools") or ()
        )
        return ModelRequest(messages=tuple(messages), instructions=text_of(self._body.get("system")), tools=tools)

    def start(self) -> bytes:
        """See `WireFormat.start`."""
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
        return event_lines("message_start", {"message": message})

    def part(self, part: Part) -> bytes:
        """See `WireFormat.part`."""
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
        return before + event_lines("content_block_delta", {"index": self._index, "delta": delta})

    def _begin(self, kind: str, content: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        block = {"index": self._index, "content_block": {"type": kind, **content}}
        return event_lines("content_block_start", block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": f"signed-{self._number}-{self._index}"}
            signed = event_lines("content_block_delta", {"index": self._index, "delta": delta})
        self._open = ""
        return signed + event_lines("content_block_stop", {"index": self._index})

    def _call(self, part: CallPart) -> Iterator[bytes]:
        yield self._close()
        call_id = part.provider_id or f"toolu_{self._number}_{self._calls}"
        self._calls += 1
        yield self._begin("tool_use", {"id": call_id, "name": part.name, "input": {}})
        arguments = arguments_text(part)
        half = (len(arguments) + 1) // 2
        for piece in (arguments[:half], arguments[half:]):
            delta = {"type": "input_json_delta", "partial_json": piece}
            yield event_lines("content_block_delta", {"index": self._index, "delta": delta})
        yield self._close()

    def _end(self, part: EndPart) -> bytes:
        reason = "calls" if part.reason == "stop" and self._calls else part.reason
        usage = {"input_tokens": part.usage.input_tokens, "output_tokens": part.usage.output_tokens}
        delta = {"stop_reason": _STOP[reason], "stop_sequence": None}
        return (
            self._close()
            + event_lines("message_delta", {"delta": delta, "usage": usage})
            + event_lines("message_stop", {})
        )

    def broken(self, message: str) -> bytes:
        """See `WireFormat.broken`."""
        return b"event: error\ndata: " + self.error(529, message) + b"\n\n"

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """See `WireFormat.key_of`."""
        return headers.get("x-api-key") or None

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """See `WireFormat.error`."""
        kinds = {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
            529: "overloaded_error",
        }
        kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _objections(body: dict[str, Any]) -> Iterator[str]:
    if not isinstance(body.get("max_tokens"), int):
        yield "max_tokens: Field required"
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
            yield from (f"messages.{n}: {text}" for text in _block_objections(block))
    if open_calls:
        yield f"tool_use ids without tool_result: {sorted(open_calls)}"


def _block_objections(block: dict[str, Any]) -> Iterator[str]:
    kind = block["type"]
    if kind == "text" and not block["text"].strip():
        yield "text content blocks must contain non-whitespace text"
    if kind == "thinking" and not block.get("signature"):
        yield "thinking blocks need their signature"
    if kind == "tool_use":
        if not _ID.fullmatch(block["id"]):
            yield f"tool_use.id {block['id']!r} has characters that are not allowed"
        if not NAME.fullmatch(block["name"]):
            yield f"tool_use.name {block['name']!r} has characters that are not allowed"
        if not isinstance(block["input"], dict):
            yield "tool_use.input: Input should be a valid dictionary"


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
