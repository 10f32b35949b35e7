"""Agents as Holdfast sees them, their tools, and the handle that a running one works with."""

from holdfast.agents.agent import Agent, AgentLike, agent, as_agent
from holdfast.agents.model import Model, find_model
from holdfast.agents.run import Call, Run
from holdfast.agents.tool import Home, Tool, Toolset, tool

__all__ = [
    "Agent",
    "AgentLike",
    "Call",
    "Home",
    "Model",
    "Run",
    "Tool",
    "Toolset",
    "agent",
    "as_agent",
    "find_model",
    "tool",
]
