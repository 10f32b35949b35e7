"""Wire protocol of OpenAI's Responses API."""

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
from holdfast.testing.model_server.wires.chat import bearer, openai_error
from holdfast.testing.model_server.wires.wire import (
    NAME,
    arguments_text,
    attachment_of,
    event_lines,
    first_objection,
    text_of,
)

__all__ = ["ResponsesWire"]

_ID_LENGTH = 64


_CUT_BY = {"length": "max_output_tokens", "refused": "content_filter"}


class ResponsesWire:
    """Wire format of ``POST /v1/responses`` with a streamed answer."""

    def __init__(self, body: dict[str, Any], number: int) -> None:
        self._body = body
        self._number = number
        self._sent = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def objection(self) -> str | None:
        """See `WireFormat.objection`."""
        return first_objection(self._body, _objections)

    def request(self) -> ModelRequest:
        """See `WireFormat.request`."""
        messages: list[ModelMessage] = []
        instructions = [self._body.get("instructions") or ""]
        names: dict[str, str] = {}
        for item in _items(self._body):
            kind = item.get("type", "message")
            if kind == "function_call":
                arguments = msgspec.json.decode(item["arguments"])
                call = ToolCall(call_id=item["call_id"], name=item["name"], arguments=arguments)
                names[call.call_id] = call.name
                said = messages.pop() if messages and isinstance(messages[-1], AssistantMessage) else None
                text, calls = (said.text, said.calls) if isinstance(said, AssistantMessage) else ("", ())
                messages.append(AssistantMessage(text=text, calls=(*calls, call)))
            elif kind == "function_call_output":
                call_id = item["call_id"]
                messages.append(ToolMessage(call_id=call_id, name=names[call_id], content=_text(item["output"])))
            elif kind == "message" and item["role"] == "user":
                messages.append(UserMessage(content=_text(item["content"]), attachments=tuple(_files(item["content"]))))
            elif kind == "message" and item["role"] == "assistant":
                messages.append(AssistantMessage(text=_text(item["content"])))
            elif kind == "message":
                instructions.append(_text(item["content"]))
        tools = tuple(
            ToolSpec(
                name=tool["name"], description=tool.get("description") or "", parameters=tool.get("parameters") or {}
            )
            for tool in self._body.get("tools") or ()
        )
        told = "\n\n".join(text for text in instructions if text)
        return ModelRequest(messages=tuple(messages), instructions=told, tools=tools)

    def start(self) -> bytes:
        """See `WireFormat.start`."""
        return self._event("response.created", response=self._response("in_progress"))

    def part(self, part: Part) -> bytes:
        """See `WireFormat.part`."""
        match part:
            case TextPart():
                return b"".join(self._say(part.text))
            case ReasoningPart():
                return b"".join(self._think(part.text))
            case CallPart():
                return b"".join(self._call(part))
            case EndPart():
                return self._close() + self._end(part)

    def _say(self, text: str) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != "message":
            yield self._begin({"type": "message", "role": "assistant", "status": "in_progress", "content": []}, "msg")
            empty = {"type": "output_text", "text": "", "annotations": []}
            yield self._event("response.content_part.added", content_index=0, part=empty, **self._place())
        self._text += text
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[], **self._place())

    def _think(self, text: str) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != "reasoning":
            yield self._begin({"type": "reasoning", "summary": []}, "rs")
            empty = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", summary_index=0, part=empty, **self._place())
        self._text += text
        yield self._event("response.reasoning_summary_text.delta", summary_index=0, delta=text, **self._place())

    def _call(self, part: CallPart) -> Iterator[bytes]:
        call_id = part.provider_id or f"call_{self._number}_{len(self._output)}"
        item = {
            "type": "function_call",
            "call_id": call_id,
            "name": part.name,
            "arguments": "",
            "status": "in_progress",
        }
        yield self._begin(item, "fc")
        arguments = arguments_text(part)
        half = (len(arguments) + 1) // 2
        for piece in (arguments[:half], arguments[half:]):
            self._text += piece
            yield self._event("response.function_call_arguments.delta", delta=piece, **self._place())
        yield self._event("response.function_call_arguments.done", arguments=arguments, **self._place())
        yield self._close()

    def _begin(self, item: dict[str, Any], kind: str) -> bytes:
        closed = self._close()
        self._open = {"id": f"{kind}_{self._number}_{len(self._output)}", **item}
        self._text = ""
        return closed + self._event("response.output_item.added", output_index=len(self._output), item=self._open)

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        if item["type"] == "message":
            item = {**item, "content": [{"type": "output_text", "text": self._text, "annotations": []}]}
        elif item["type"] == "reasoning":
            summary = [{"type": "summary_text", "text": self._text}]
            item = {**item, "summary": summary, "encrypted_content": f"sealed-{item['id']}"}
        else:
            item = {**item, "arguments": self._text}
        done = {**item, "status": "completed"}
        ended = self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._open = None
        return ended

    def _end(self, part: EndPart) -> bytes:
        why = _CUT_BY.get(part.reason)
        if why is not None:
            cut = {**self._response("incomplete", part), "incomplete_details": {"reason": why}}
            return self._event("response.incomplete", response=cut)
        return self._event("response.completed", response=self._response("completed", part))

    def broken(self, message: str) -> bytes:
        """See `WireFormat.broken`."""
        return self._event("error", message=message, code="server_error", param=None)

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """See `WireFormat.key_of`."""
        return bearer(headers)

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """See `WireFormat.error`."""
        return openai_error(status, message)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _response(self, status: str, part: EndPart | None = None) -> dict[str, Any]:
        response: dict[str, Any] = {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": 1_700_000_000,
            "status": status,
            "model": self._body.get("model", ""),
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        if part is not None:
            used = part.usage
            response["usage"] = {
                "input_tokens": used.input_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used.input_tokens + used.output_tokens,
            }
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event_lines(kind, {"sequence_number": self._sent - 1, **fields})


def _items(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def _objections(body: dict[str, Any]) -> Iterator[str]:
    if not body.get("input"):
        yield "input is empty"
    for tool in body.get("tools") or ():
        if not NAME.fullmatch(tool["name"]):
            yield f"the tool name {tool['name']!r} has characters that are not allowed"
    open_calls: set[str] = set()
    taken: set[str] = set()
    for n, item in enumerate(items := _items(body)):
        kind = item.get("type", "message")
        if kind == "function_call_output":
            if item["call_id"] not in open_calls:
                yield f"input[{n}]: No tool call found for function call output with call_id {item['call_id']}"
            open_calls.discard(item["call_id"])
        elif kind == "function_call":
            yield from (f"input[{n}]: {text}" for text in _call_objections(item, taken))
            open_calls.add(item["call_id"])
            taken.add(item["call_id"])
        elif kind == "reasoning":
            following = items[n + 1] if n + 1 < len(items) else {}
            if following.get("type") not in ("message", "function_call", "reasoning") or "id" not in following:
                yield f"input[{n}]: reasoning was provided without its required following item"
            if not item.get("encrypted_content"):
                yield f"input[{n}]: reasoning without its encrypted content is not found"
        elif not item.get("content"):
            yield f"input[{n}]: content is empty"
        elif open_calls and item["role"] == "user":
            yield f"input[{n}]: No tool output found for function calls {sorted(open_calls)}"
    if open_calls:
        yield f"No tool output found for function calls {sorted(open_calls)}"


def _call_objections(item: dict[str, Any], taken: set[str]) -> Iterator[str]:
    if not 1 <= len(item["call_id"]) <= _ID_LENGTH or item["call_id"] in taken:
        yield f"the call_id {item['call_id']!r} is taken, or is not 1 to {_ID_LENGTH} characters long"
    if not NAME.fullmatch(item["name"]):
        yield f"the name {item['name']!r} has characters that are not allowed"
    try:
        arguments = msgspec.json.decode(item["arguments"])
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        yield f"the arguments of {item['name']!r} are not a JSON object"


def _text(content: Any) -> str:
    if isinstance(content, list):
        kinds = ("input_text", "output_text", "text")
        return "".join(block["text"] for block in content if block["type"] in kinds)
    return text_of(content)


def _files(content: Any) -> Iterator[Attachment]:
    for block in content if isinstance(content, list) else ():
        data = {"input_image": "image_url", "input_file": "file_data"}.get(block["type"])
        if data is not None:
            head, _, encoded = block[data].partition(";base64,")
            yield attachment_of(head.removeprefix("data:"), encoded)
