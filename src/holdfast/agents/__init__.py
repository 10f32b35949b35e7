"""Agents, their tools, and the handle of an active run."""

from holdfast.agents.agent import Agent, AgentLike, agent, as_agent
from holdfast.agents.compose import BranchResult, BranchSpec, branch, parallel, periodic, route, sequence, supervised
from holdfast.agents.model import Model
from holdfast.agents.model_lookup import find_model
from holdfast.agents.run import Call, Run
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import Tool, Toolset, ToolsetContext, tool
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage

__all__ = [
    "Agent",
    "AgentLike",
    "AgentLimits",
    "BranchResult",
    "BranchSpec",
    "Call",
    "CallPart",
    "Model",
    "ModelRequest",
    "Run",
    "ScriptedModel",
    "Tool",
    "ToolMessage",
    "Toolset",
    "ToolsetContext",
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
