"""Convert between transcripts and LangChain's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from holdfast.protocol import model as ours
from holdfast.protocol.events import encode_json, plain
from holdfast.protocol.messages import Entry, Message, Usage
from holdfast.protocol.model import conversation

__all__ = ["as_json", "asked", "messages_of", "readable", "reasoning_of", "text_of", "usage_of"]


def asked(messages: Sequence[Message]) -> list[BaseMessage]:
    """Return the messages that a run took, as input for a graph."""
    return [HumanMessage(content=message.content, id=message.message_id) for message in messages]


def messages_of(entries: Sequence[Entry]) -> list[BaseMessage]:
    """Convert a transcript to LangChain messages in which each call is followed by its result."""
    made: list[BaseMessage] = []
    for message in conversation(entries):
        match message:
            case ours.UserMessage(content=content):
                made.append(HumanMessage(content=content))
            case ours.AssistantMessage(text=text, calls=calls):
                made.append(AIMessage(content=text, tool_calls=[_call(call) for call in calls]))
            case ours.ToolMessage(call_id=call_id, name=name, content=content, status=status):
                result = "success" if status == "ok" else "error"
                made.append(ToolMessage(content=content, tool_call_id=call_id, name=name, status=result))
    return made


def _call(call: ours.ToolCall) -> Any:
    arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
    return {"name": call.name, "args": arguments, "id": call.call_id, "type": "tool_call"}


def text_of(message: BaseMessage) -> str:
    """Return the text of a message or of a chunk."""
    content = message.content
    return content if isinstance(content, str) else "".join(_pieces(content, "text", "text"))


def reasoning_of(message: BaseMessage) -> str:
    """Return the model's reasoning in a message or a chunk."""
    content = message.content
    if not isinstance(content, str):
        return "".join((*_pieces(content, "reasoning", "reasoning"), *_pieces(content, "thinking", "thinking")))
    said = message.additional_kwargs.get("reasoning_content")
    return said if isinstance(said, str) else ""


def _pieces(content: Sequence[str | dict[Any, Any]], kind: str, field: str) -> Iterator[str]:
    for block in content:
        if isinstance(block, str):
            if kind == "text":
                yield block
        elif block.get("type") == kind and isinstance(said := block.get(field), str):
            yield said


def usage_of(message: AIMessage) -> Usage:
    """Return the usage that the message reports, or zero usage if it reports none."""
    used = message.usage_metadata
    return Usage() if used is None else Usage(input_tokens=used["input_tokens"], output_tokens=used["output_tokens"])


def as_json(value: Any) -> str:
    """Return the value as JSON, or as plain text if JSON cannot represent the value."""
    try:
        return encode_json(value).decode()
    except (TypeError, ValueError, RecursionError):
        return plain(str(value))


def readable(value: Any) -> Any:
    """Return the value after a round trip through JSON, or as plain text if JSON cannot represent the value."""
    try:
        return msgspec.json.decode(encode_json(value))
    except (TypeError, ValueError, RecursionError):
        return plain(str(value))
