"""The message rules of OpenAI and Anthropic, as their references state them, for tests: what would be answered 400."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from holdfast.protocol.model import AssistantMessage, ModelMessage, ToolMessage, UserMessage

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_openai(messages: Sequence[ModelMessage]) -> None:
    """Chat Completions: each assistant message with calls is followed by exactly one tool message for each of them."""
    open_ids: list[str] = []
    seen: set[str] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.call_id in open_ids, f"a tool message answers no open call: {message}"
            open_ids.remove(message.call_id)
            assert message.content
            continue
        assert not open_ids, f"calls without a result before {message}"
        if isinstance(message, AssistantMessage):
            assert message.text or message.calls, "an assistant message has text or calls"
            for call in message.calls:
                assert call.call_id
                assert call.call_id not in seen
                seen.add(call.call_id)
                assert NAME.fullmatch(call.name), call.name
            open_ids = [call.call_id for call in message.calls]
        else:
            assert message.content or message.attachments
    assert not open_ids, "calls without a result at the end"
    assert isinstance(messages[-1], (UserMessage, ToolMessage)), "a request ends with a user's or a tool's message"


def check_anthropic(messages: Sequence[ModelMessage]) -> None:
    """Messages: turns alternate, the user begins; tool results come first in the very next user turn; no empty text."""
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        role = "assistant" if isinstance(message, AssistantMessage) else "user"
        blocks = _blocks(message)
        if turns and turns[-1][0] == role == "user" and not isinstance(message, ToolMessage):
            # The user's own words after tool results are one turn with them; two messages of the user would be joined.
            assert turns[-1][1][-1]["type"] == "tool_result", "two user messages in a row"
            turns[-1][1].extend(blocks)
        elif turns and turns[-1][0] == role == "user" and turns[-1][1][-1]["type"] == "tool_result":
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    assert turns[0][0] == "user", "the first message is a user's"
    for (role, _), (after, _) in itertools.pairwise(turns):
        assert role != after, "roles alternate"
    for at, (role, blocks) in enumerate(turns):
        assert blocks, "a message is never empty"
        assert all(b["type"] != "text" or b["text"].strip() for b in blocks), "text blocks are never blank"
        uses = [b["id"] for b in blocks if b["type"] == "tool_use"]
        if role == "assistant" and uses:
            following = turns[at + 1][1]
            results = [b["id"] for b in following[: len(uses)] if b["type"] == "tool_result"]
            assert sorted(results) == sorted(uses), "each tool_use has its tool_result at the start of the next turn"
        answers = [b for b in blocks if b["type"] == "tool_result"]
        if answers:
            before = {b.get("id") for b in turns[at - 1][1] if b["type"] == "tool_use"}
            assert {b["id"] for b in answers} == before, "tool_results answer the turn before"
            assert len(answers) == len(before)
    assert turns[-1][0] == "user"


def _blocks(message: ModelMessage) -> list[dict[str, Any]]:
    match message:
        case UserMessage(content=content, attachments=attachments):
            return [{"type": "text", "text": content}] * bool(content) + [{"type": "image"} for _ in attachments]
        case ToolMessage(call_id=call_id):
            return [{"type": "tool_result", "id": call_id}]
        case AssistantMessage(text=text, calls=calls):
            said = [{"type": "text", "text": text}] if text else []
            return said + [{"type": "tool_use", "id": call.call_id, "name": call.name} for call in calls]


def check_request(messages: Sequence[ModelMessage]) -> None:
    """A request with these messages is valid for both."""
    check_openai(messages)
    check_anthropic(messages)
