"""Content of the files that ``holdfast init`` writes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FILES"]

_AGENT = '''"""An agent with one tool. A script stands in for the model, so that the agent needs no key."""

from holdfast import Agent, CallPart, ScriptedModel, tool
from holdfast.agents import ModelRequest, UserMessage


@tool
def count_words(text: str) -> str:
    """Count the words of a text.

    Parameters:
        text: the text.
    """
    return f"{len(text.split())} words"


def script(request: ModelRequest) -> CallPart | str:
    """Call the tool for each message, then answer with the tool's result."""
    newest = request.messages[-1]
    if isinstance(newest, UserMessage):
        return CallPart(name="count_words", arguments={"text": newest.content})
    return f"Your message has {newest.content}."


agent = Agent(
    name="agent",
    # A real model: model="openai:gpt-5" (pip install 'holdfast-agents[models]', export OPENAI_API_KEY=…)
    model=ScriptedModel(script, keep_requests=0),
    instructions="Count the words of each message with the tool.",
    tools=[count_words],
)
'''

_TEST = '''"""Run with: python -m pytest -q"""

import pytest
from holdfast import Host

from agent import agent


@pytest.mark.explore(schedules=20)
async def test_two_messages_at_once_are_both_answered() -> None:
    async with Host(agent, store="memory://") as host:
        session = host.session("anna")
        first = await session.send("one two three")
        second = await session.send("four five")
        answers = [(await session.wait(one.message_id)).text for one in (first, second)]
    assert answers == ["Your message has 3 words.", "Your message has 2 words."]
'''

_SETTINGS = """# Settings of 'holdfast serve' in this folder.
agent = "agent:agent"
"""

_PYTEST = """# The tests of this folder, also below a folder with a pytest configuration of its own.
[pytest]
"""

_IGNORED = """.holdfast/
.venv/
__pycache__/
.pytest_cache/
"""

FILES: Mapping[str, str] = {
    "agent.py": _AGENT,
    "test_agent.py": _TEST,
    "pytest.ini": _PYTEST,
    "holdfast.toml": _SETTINGS,
    ".gitignore": _IGNORED,
}
"""Content of each file, by name."""
