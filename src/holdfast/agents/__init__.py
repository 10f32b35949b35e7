"""Agents, their tools, and the handle of an active run."""

from holdfast.agents.agent import Agent, AgentLike, agent, as_agent
from holdfast.agents.compose import BranchResult, Part, branch, parallel, periodic, route, sequence, supervised
from holdfast.agents.model import Model
from holdfast.agents.model_lookup import find_model
from holdfast.agents.run import Call, Run
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import Home, Tool, Toolset, tool
from holdfast.protocol.loop import AgentLimits
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage

__all__ = [
    "Agent",
    "AgentLike",
    "AgentLimits",
    "BranchResult",
    "Call",
    "CallPart",
    "Home",
    "Model",
    "ModelRequest",
    "Part",
    "Run",
    "ScriptedModel",
    "Tool",
    "ToolMessage",
    "Toolset",
    "UserMessage",
    "agent",
    "as_agent",
    "branch",
    "find_model",
    "parallel",
    "periodic",
    "route",
    "sequence",
    "supervised",
    "tool",
]
