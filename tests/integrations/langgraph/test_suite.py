"""Graphs keep Holdfast's promises: the conformance suite of agents on a graph of one node."""

from __future__ import annotations

import inspect

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from holdfast.agents import Agent
from holdfast.integrations.langgraph import graph_agent
from holdfast.testing import AGENT_CHECKS, AgentSubject, run_agent_check
from holdfast.testing.suites.agent import AgentCheck
from holdfast.testing.suites.agent_driver import Step


def stepping(step: Step) -> Agent:
    def plain_node(state: MessagesState) -> MessagesState:
        return {"messages": [AIMessage(step(str(state["messages"][-1].content)))]}

    async def node(state: MessagesState) -> MessagesState:
        return {"messages": [AIMessage(await step(str(state["messages"][-1].content)))]}

    builder = StateGraph(MessagesState)
    builder.add_node("step", node if inspect.iscoroutinefunction(step) else plain_node)
    builder.add_edge(START, "step")
    return graph_agent(builder, name="stepping")


def recalling() -> Agent:
    async def node(state: MessagesState) -> MessagesState:
        return {"messages": [AIMessage(" ".join(str(message.content) for message in state["messages"][:-1]))]}

    builder = StateGraph(MessagesState)
    builder.add_node("recall", node)
    builder.add_edge(START, "recall")
    return graph_agent(builder, name="stepping")


SUBJECT = AgentSubject(make=stepping, recall=recalling)


@pytest.mark.parametrize("check", AGENT_CHECKS, ids=lambda check: check.__name__)
def test_a_graph_conforms(check: AgentCheck) -> None:
    run_agent_check(check, SUBJECT)
