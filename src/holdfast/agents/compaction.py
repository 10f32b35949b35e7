"""Summarize a conversation that is too long for one request, with the agent's model.

The history before the run is summarized when the run starts, and the summary permanently replaces that history in the
transcript. The run's own messages are summarized only for its next requests; the run's entries in the transcript do not
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.agents.model import opened
from holdfast.agents.results import truncate
from holdfast.errors import ModelFailed
from holdfast.protocol.events import StepFinished
from holdfast.protocol.model import (
    SUMMARY,
    AssistantMessage,
    EndPart,
    ModelMessage,
    ModelRequest,
    TextPart,
    ToolMessage,
    UserMessage,
)

if TYPE_CHECKING:
    from holdfast.agents.model import Model
    from holdfast.protocol.agent_loop import AgentLimits
    from holdfast.protocol.messages import Entry

__all__ = ["apply_summary", "context_limit", "estimated_tokens", "split", "split_for_summary", "summary_of"]

INSTRUCTIONS = """\
You summarize a conversation between a person and an assistant, so that the assistant can continue with your summary in
its place. Keep what the person wants, what was decided and why, names, numbers, paths and addresses as they are, what
was tried and its results, and what is still to be done. Leave out greetings and repetition. Write plain text."""
WANTED = "What the person asked for last:\n\n"
BYTES_PER_TOKEN = 4
MESSAGE_TOKENS = 8
LONGEST_RESULT_BYTES = 2000
KEPT = 2
"""Number of recent user messages that are not summarized, nor are later entries, if all fit into half the limit."""


def estimated_tokens(messages: Sequence[ModelMessage]) -> int:
    """Estimate how many tokens the messages use in a request."""
    return sum(MESSAGE_TOKENS + _size(message) // BYTES_PER_TOKEN for message in messages)


def _size(message: ModelMessage) -> int:
    if isinstance(message, AssistantMessage):
        return len(message.text) + sum(len(msgspec.json.encode(call.arguments)) for call in message.calls)
    return len(message.content)


def context_limit(model: Model, limits: AgentLimits) -> int | None:
    """Return the number of tokens above which a conversation is summarized, or None if it is never summarized."""
    if limits.context_tokens is not None:
        return limits.context_tokens
    return None if model.context_tokens is None else model.context_tokens * 3 // 4


def split(entries: Sequence[Entry], *, keep: int = KEPT) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Split the entries into those to summarize and those to keep. The last `keep` user messages and all entries after
    the first of these are kept."""
    if keep < 1:
        return entries, ()
    heads = [at for at, entry in enumerate(entries) if entry.role == "user"]
    at = heads[-keep] if len(heads) >= keep else 0
    return entries[:at], entries[at:]


def split_for_summary(messages: Sequence[ModelMessage]) -> tuple[Sequence[ModelMessage], Sequence[ModelMessage]]:
    """Split the messages into those to summarize and those that the next request needs.

    The next request needs the model's last answer and the results of its calls.
    """
    at = max((at for at, message in enumerate(messages) if isinstance(message, AssistantMessage)), default=0)
    return messages[:at], messages[at:]


def apply_summary(
    summary: str, old: Sequence[ModelMessage], rest: Sequence[ModelMessage], *, limit: int
) -> list[ModelMessage]:
    """Return a run's messages with the old messages replaced by a summary, which also quotes the last user message.

    The quoted message and the results in `rest` are truncated to fit into `limit` tokens.
    """
    asked = next((message for message in reversed(old) if isinstance(message, UserMessage)), UserMessage(content=""))
    wanted = truncate(asked.content.rpartition(WANTED)[2], limit * BYTES_PER_TOKEN // 4)
    return [
        UserMessage(content=f"{SUMMARY}{summary}\n\n{WANTED}{wanted}", attachments=asked.attachments),
        *_cut_results(rest, limit * BYTES_PER_TOKEN // 2),
    ]


def _cut_results(messages: Sequence[ModelMessage], room: int) -> list[ModelMessage]:
    """Return the messages, with their results truncated to `room` bytes in total."""
    results = sum(isinstance(message, ToolMessage) for message in messages)
    each = room // max(1, results)
    return [
        msgspec.structs.replace(message, content=truncate(message.content, each))
        if isinstance(message, ToolMessage)
        else message
        for message in messages
    ]


async def summary_of(
    model: Model, messages: Sequence[ModelMessage], *, limit: int | None, run_id: str = "", step: int = 0
) -> StepFinished:
    """Request a summary of the messages from the model; return it as step `step` of the run. Raises `ModelFailed`.

    Parameters:
        limit: estimated number of tokens to which the messages are truncated; None means no limit.
    """
    text = "\n\n".join(map(_line, messages))
    if limit is not None:
        text = truncate(text, limit * BYTES_PER_TOKEN)
    pieces: list[str] = []
    end: EndPart | None = None
    async with opened(model, ModelRequest(messages=(UserMessage(content=text),), instructions=INSTRUCTIONS)) as parts:
        async for part in parts:
            if isinstance(part, TextPart):
                pieces.append(part.text)
            elif isinstance(part, EndPart):
                end = part
                break
    summary = "".join(pieces).strip()
    if end is None or not summary:
        raise ModelFailed("the model returned no summary of the conversation", retry_after_s=0.0)
    return StepFinished(run_id=run_id, step=step, text=summary, usage=end.usage, model=end.model)


def _line(message: ModelMessage) -> str:
    match message:
        case UserMessage(content=content):
            return f"Person: {content}"
        case ToolMessage(name=name, content=content):
            return f"Result of {name}: {truncate(content, LONGEST_RESULT_BYTES)}"
        case AssistantMessage(text=text, calls=calls):
            asked = [f"calls {call.name} with {msgspec.json.encode(call.arguments).decode()}" for call in calls]
            return "Assistant: " + "; ".join([*([text] if text else []), *asked])
