"""The tools of an agent as one run has them: by name, with its toolsets' tools and its children among them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.agents.agent import Agent
from holdfast.agents.tool import Tool, Toolset, as_tool
from holdfast.errors import ConfigurationError
from holdfast.protocol.model import tool_name

if TYPE_CHECKING:
    from holdfast.agents.run import Call

__all__ = ["delegate_tool", "toolbox"]


def toolbox(agent: Agent) -> dict[str, Tool]:
    """All tools of the agent by name. Raises `ConfigurationError` where two have the same one."""
    tools: dict[str, Tool] = {}
    for thing in agent.tools:
        if isinstance(thing, Agent):
            found = [delegate_tool(thing)]
        else:
            found = list(thing.tools()) if isinstance(thing, Toolset) else [as_tool(thing)]
        for tool in found:
            if tool.name in tools:
                raise ConfigurationError(
                    f"the agent {agent.name!r} has two tools of the name {tool.name!r}",
                    hint="give one of them another name",
                )
            tools[tool.name] = tool
    return tools


def delegate_tool(agent: Agent) -> Tool:
    """A tool that hands a task to a child agent and returns its answer."""

    async def delegate(call: Call, task: str) -> str:
        return await call.run.delegate(agent, task)

    return Tool(
        name=tool_name(agent.name),
        description=agent.description or f"Hands a task to the agent {agent.name!r} and returns its answer.",
        parameters={
            "type": "object",
            "properties": {
                "task": {"type": "string", "description": "All it needs to know: it sees nothing else of this."}
            },
            "required": ["task"],
            "additionalProperties": False,
        },
        work=delegate,
        timeout_s=math.inf,  # the child has bounds of its own, and the run's deadline is around it
        idempotent=agent.replayable,  # what it does is in the journal by itself
    )
