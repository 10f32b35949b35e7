"""Sums up what was said before, with the agent's model, when it is too much for one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.agents.model import opened
from holdfast.agents.results import cut
from holdfast.errors import ModelFailed
from holdfast.protocol.events import StepFinished
from holdfast.protocol.model import EndPart, ModelRequest, TextPart, UserMessage

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.protocol.messages import Entry

__all__ = ["context_limit", "estimated_tokens", "split", "summary_of"]

INSTRUCTIONS = """\
You sum up a conversation between a person and an assistant, so that the assistant can go on with your summary in place
of it. Keep what the person wants, what was decided and why, names, numbers, paths and addresses as they are, what was
tried and came of it, and what is still to be done. Leave out greetings and repetition. Write plain text."""
LABELS = {
    "user": "Person",
    "assistant": "Assistant",
    "tool_call": "Assistant calls",
    "tool_result": "Result of",
    "summary": "Summary of what was before",
}
BYTES_PER_TOKEN = 4
ENTRY_TOKENS = 8
LONGEST_RESULT_BYTES = 2000
KEPT = 2
"""Messages of a person, with what followed them, that stay as they are where there is room for them."""


def estimated_tokens(entries: Sequence[Entry]) -> int:
    """About how many tokens the entries take in a request."""
    return sum(ENTRY_TOKENS + len(entry.content) // BYTES_PER_TOKEN for entry in entries)


def context_limit(agent: Agent) -> int | None:
    """From how many tokens of history on an agent with a model sums it up; None: never."""
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


async def summary_of(agent: Agent, entries: Sequence[Entry], *, run_id: str = "") -> StepFinished:
    """One request for a summary, as the step 0 of that run. Raises `ModelFailed`."""
    model = agent.model
    assert model is not None
    assert not isinstance(model, str)
    told = "\n\n".join(map(_line, entries))
    limit = context_limit(agent)
    if limit is not None:
        told = cut(told, limit * BYTES_PER_TOKEN)
    request = ModelRequest(messages=(UserMessage(content=told),), instructions=INSTRUCTIONS)
    said: list[str] = []
    end: EndPart | None = None
    async with opened(model, request) as parts:
        async for part in parts:
            if isinstance(part, TextPart):
                said.append(part.text)
            elif isinstance(part, EndPart):
                end = part
                break
    text = "".join(said).strip()
    if end is None or not text:
        raise ModelFailed("the model gave no summary of the conversation", retry_after_s=0.0)
    return StepFinished(run_id=run_id, step=0, text=text, usage=end.usage, model=end.model)


def _line(entry: Entry) -> str:
    content = cut(entry.content, LONGEST_RESULT_BYTES) if entry.role == "tool_result" else entry.content
    return f"{LABELS[entry.role]}{f' {entry.name}' if entry.name else ''}: {content}"
