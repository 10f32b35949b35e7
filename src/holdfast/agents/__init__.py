"""Agents as Holdfast sees them, and the handle that a running one works with."""

from holdfast.agents.agent import Agent, AgentLike, agent, as_agent
from holdfast.agents.run import Run

__all__ = ["Agent", "AgentLike", "Run", "agent", "as_agent"]
