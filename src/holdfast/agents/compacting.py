"""Sums up what was said before, with the agent's model, when it is too much for one request.

What was before the run is summed up when the run begins, and stays so: the summary takes its place in the transcript.
What the run itself says and does is summed up for its next requests only; its own entries are written as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.agents.model import opened
from holdfast.agents.results import cut
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
    from holdfast.agents.agent import Agent
    from holdfast.protocol.messages import Entry

__all__ = ["context_limit", "divided", "estimated_tokens", "split", "summary_of", "with_summary"]

INSTRUCTIONS = """\
You sum up a conversation between a person and an assistant, so that the assistant can go on with your summary in place
of it. Keep what the person wants, what was decided and why, names, numbers, paths and addresses as they are, what was
tried and came of it, and what is still to be done. Leave out greetings and repetition. Write plain text."""
WANTED = "What the person asked for last:\n\n"
BYTES_PER_TOKEN = 4
MESSAGE_TOKENS = 8
LONGEST_RESULT_BYTES = 2000
KEPT = 2
"""Messages of a person, with what followed them, that stay as they are where there is room for them."""


def estimated_tokens(messages: Sequence[ModelMessage]) -> int:
    """About how many tokens the messages take in a request."""
    return sum(MESSAGE_TOKENS + _size(message) // BYTES_PER_TOKEN for message in messages)


def _size(message: ModelMessage) -> int:
    if isinstance(message, AssistantMessage):
        return len(message.text) + sum(len(msgspec.json.encode(call.arguments)) for call in message.calls)
    return len(message.content)


def context_limit(agent: Agent) -> int | None:
    """From how many tokens on an agent with a model sums up; None: never."""
    if agent.limits.context_tokens is not None:
        return agent.limits.context_tokens
    model = agent.model
    assert model is not None
    assert not isinstance(model, str)
    return None if model.context_tokens is None else model.context_tokens * 3 // 4


def split(entries: Sequence[Entry], *, keep: int = KEPT) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """What is summed up, and what stays: the last `keep` messages of a person and what followed them."""
    if keep < 1:
        return entries, ()
    heads = [at for at, entry in enumerate(entries) if entry.role == "user"]
    at = heads[-keep] if len(heads) >= keep else 0
    return entries[:at], entries[at:]


def divided(messages: Sequence[ModelMessage]) -> tuple[Sequence[ModelMessage], Sequence[ModelMessage]]:
    """What a run's next requests can do without, and what they need as it is: the last answer and its results."""
    at = max((at for at, message in enumerate(messages) if isinstance(message, AssistantMessage)), default=0)
    return messages[:at], messages[at:]


def with_summary(
    summary: str, old: Sequence[ModelMessage], rest: Sequence[ModelMessage], *, limit: int
) -> list[ModelMessage]:
    """The messages of a run that goes on with a summary of the old ones; what the person wants stays as it was said."""
    asked = next((message for message in reversed(old) if isinstance(message, UserMessage)), UserMessage(content=""))
    wanted = cut(asked.content.rpartition(WANTED)[2], limit * BYTES_PER_TOKEN // 4)
    return [
        UserMessage(content=f"{SUMMARY}{summary}\n\n{WANTED}{wanted}", attachments=asked.attachments),
        *_cut_results(rest, limit * BYTES_PER_TOKEN // 2),
    ]


def _cut_results(messages: Sequence[ModelMessage], room: int) -> list[ModelMessage]:
    """The messages, with results that take no more than so many bytes in all."""
    results = sum(isinstance(message, ToolMessage) for message in messages)
    each = room // max(1, results)
    return [
        msgspec.structs.replace(message, content=cut(message.content, each))
        if isinstance(message, ToolMessage)
        else message
        for message in messages
    ]


async def summary_of(
    agent: Agent, messages: Sequence[ModelMessage], *, run_id: str = "", step: int = 0
) -> StepFinished:
    """One request for a summary of the messages, as that step of the run. Raises `ModelFailed`."""
    model = agent.model
    assert model is not None
    assert not isinstance(model, str)
    told = "\n\n".join(map(_line, messages))
    limit = context_limit(agent)
    if limit is not None:
        told = cut(told, limit * BYTES_PER_TOKEN)
    pieces: list[str] = []
    end: EndPart | None = None
    async with opened(model, ModelRequest(messages=(UserMessage(content=told),), instructions=INSTRUCTIONS)) as parts:
        async for part in parts:
            if isinstance(part, TextPart):
                pieces.append(part.text)
            elif isinstance(part, EndPart):
                end = part
                break
    text = "".join(pieces).strip()
    if end is None or not text:
        raise ModelFailed("the model gave no summary of the conversation", retry_after_s=0.0)
    return StepFinished(run_id=run_id, step=step, text=text, usage=end.usage, model=end.model)


def _line(message: ModelMessage) -> str:
    match message:
        case UserMessage(content=content):
            return f"Person: {content}"
        case ToolMessage(name=name, content=content):
            return f"Result of {name}: {cut(content, LONGEST_RESULT_BYTES)}"
        case AssistantMessage(text=text, calls=calls):
            asked = [f"calls {call.name} with {msgspec.json.encode(call.arguments).decode()}" for call in calls]
            return "Assistant: " + "; ".join([*([text] if text else []), *asked])
