"""The tools of an agent in one run, by name: its functions, the tools of its toolsets, and its child agents."""

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
    """Return all tools of the agent by name. Raises `ConfigurationError` if two tools have the same name."""
    tools: dict[str, Tool] = {}
    for thing in agent.tools:
        if isinstance(thing, Agent):
            found = [delegate_tool(thing)]
        else:
            found = list(thing.tools()) if isinstance(thing, Toolset) else [as_tool(thing)]
        for tool in found:
            if tool.name in tools:
                raise ConfigurationError(
                    f"the agent {agent.name!r} has two tools named {tool.name!r}",
                    hint="rename one of them",
                )
            tools[tool.name] = tool
    return tools


def delegate_tool(agent: Agent) -> Tool:
    """Return a tool that delegates a task to a child agent and returns its answer."""

    async def delegate(call: Call, task: str) -> str:
        return await call.run.delegate(agent, task)

    return Tool(
        name=tool_name(agent.name),
        description=agent.description or f"Delegate a task to the agent {agent.name!r} and return its answer.",
        parameters={
            "type": "object",
            "properties": {
                "task": {
                    "type": "string",
                    "description": "Everything it needs to know: it sees nothing else.",
                }
            },
            "required": ["task"],
            "additionalProperties": False,
        },
        work=delegate,
        timeout_s=math.inf,  # the child has its own limits, and the run's deadline applies
        idempotent=agent.replayable,  # its own calls are in the journal
    )
