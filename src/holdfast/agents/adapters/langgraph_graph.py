"""Looks at what is given as a graph: what it is, what its input is, and whether it can be hosted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from holdfast.errors import ConfigurationError

__all__ = ["Opened", "open_graph"]

_MESSAGES = "messages"
_START = "__start__"


class Opened(NamedTuple):
    """A graph that can be hosted.

    Parameters:
        graph: compiled, without a checkpointer.
        name: its own name.
        takes_messages: its input has a list of messages under ``messages``.
        breaks: it was compiled to stop before or after some of its nodes, or a graph inside of it was.
    """

    graph: Any
    name: str
    takes_messages: bool
    breaks: bool


def open_graph(graph: object, *, mapped: bool, config: Mapping[str, Any] | None) -> Opened:
    """The graph to host.

    Parameters:
        mapped: whether the caller says how its input is made.

    Raises:
        ConfigurationError: no graph, or one that cannot be hosted as it is.
    """
    if isinstance(graph, StateGraph):
        try:
            graph = graph.compile()
        except ValueError as error:
            raise ConfigurationError(
                f"the graph cannot be compiled: {error}", hint="give it an entry: add_edge(START, …)"
            ) from error
    if not isinstance(graph, Pregel):
        raise ConfigurationError(
            f"a {type(graph).__name__} is no graph",
            hint="give a compiled graph, a StateGraph or an @entrypoint; a graph on another server has no state here",
        )
    saver = graph.checkpointer
    if saver not in (None, True, False) and type(saver) is not InMemorySaver:
        raise ConfigurationError(
            f"the graph has a checkpointer of its own, a {type(saver).__name__}: its state would be in two places",
            hint="compile it without one: here its state is stored with the session's transcript",
        )
    limit = (config or {}).get("recursion_limit")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(f"recursion_limit is {limit!r}; it is a number of supersteps, 1 or more")
    takes_messages = _takes_messages(graph)
    if (
        not mapped
        and not takes_messages
        and isinstance(graph.builder if hasattr(graph, "builder") else None, StateGraph)
    ):
        raise ConfigurationError(
            "the graph's input has no messages, so it has to be said how it is made of a message",
            hint='give graph_agent(input="<its text field>"), or a function of the run: input=lambda run: {…}',
        )
    name = graph.get_name()
    return Opened(
        graph=graph.copy({"checkpointer": None}),
        name="graph" if name == "LangGraph" else name,
        takes_messages=takes_messages,
        breaks=any(
            one.interrupt_before_nodes or one.interrupt_after_nodes
            for one in (graph, *(inner for _, inner in graph.get_subgraphs(recurse=True)))
        ),
    )


def _takes_messages(graph: Pregel[Any, Any, Any, Any]) -> bool:
    """Whether its input is a dict with ``messages``, which are joined with those before."""
    builder = getattr(graph, "builder", None)
    if not isinstance(builder, StateGraph) or _MESSAGES not in graph.channels:
        return False
    return _MESSAGES in builder.schemas.get(builder.input_schema, {})
