"""Inspect a graph before it is hosted: its kind, its input, and whether it can be hosted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from holdfast.errors import ConfigurationError

__all__ = ["OpenedGraph", "check_field", "open_graph"]

_MESSAGES = "messages"


class OpenedGraph(NamedTuple):
    """A graph that can be hosted.

    Parameters:
        graph: the compiled graph. Do not use the graph's checkpointer.
        name: the graph's name.
        takes_messages: whether the graph's input has a list of messages under ``messages``.
        breaks: whether the graph, or a graph inside it, was compiled to stop before or after some nodes.
        inputs, outputs: field names of the graph's input and output; None if the input or output has no fields.
    """

    graph: Any
    name: str
    takes_messages: bool
    breaks: bool
    inputs: frozenset[str] | None
    outputs: frozenset[str] | None


def open_graph(graph: object, *, mapped: bool, config: Mapping[str, Any] | None) -> OpenedGraph:
    """Return the graph to host.

    Parameters:
        mapped: whether the caller defines how to build the graph's input.

    Raises:
        ConfigurationError: if `graph` is not a graph or cannot be hosted, or if `config` is invalid.
    """
    if isinstance(graph, StateGraph):
        try:
            graph = graph.compile()
        except ValueError as error:
            raise ConfigurationError(
                f"the graph does not compile: {error}", hint="check that it has an entry point: add_edge(START, …)"
            ) from error
    if not isinstance(graph, Pregel):
        raise ConfigurationError(
            f"a {type(graph).__name__} is not a graph",
            hint="pass a compiled graph, a StateGraph or an @entrypoint; graphs on other servers are not supported",
        )
    saver = graph.checkpointer
    if saver not in (None, True, False) and type(saver) is not InMemorySaver:
        raise ConfigurationError(
            f"the graph has its own checkpointer, a {type(saver).__name__}, so its state would be in two places",
            hint="compile the graph without a checkpointer; its state is stored with the session's transcript",
        )
    limit = (config or {}).get("recursion_limit")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(f"recursion_limit is {limit!r}; it must be a number of supersteps, 1 or more")
    inputs = _fields(graph, "input_schema")
    takes_messages = _MESSAGES in (inputs or ()) and _MESSAGES in graph.channels
    if inputs is not None and not mapped and not takes_messages:
        raise ConfigurationError(
            "the graph's input has no messages, so graph_agent() needs to know how to build it",
            hint=f"pass the name of a text field or a function of the run as input=; {_named(inputs)}",
        )
    name = graph.get_name()
    return OpenedGraph(
        graph=graph,
        name="graph" if name == "LangGraph" else name,
        takes_messages=takes_messages,
        breaks=any(map(_breaks, (graph, *(inner for _, inner in graph.get_subgraphs(recurse=True))))),
        inputs=inputs,
        outputs=_fields(graph, "output_schema"),
    )


def check_field(what: str, name: object, fields: frozenset[str] | None) -> None:
    """Raise `ConfigurationError` if `name` is a str that does not name one of the fields."""
    if isinstance(name, str) and (fields is None or name not in fields):
        raise ConfigurationError(f"the graph's {what} has no field {name!r}", hint=_named(fields))


def _breaks(graph: object) -> bool:
    return isinstance(graph, Pregel) and bool(graph.interrupt_before_nodes or graph.interrupt_after_nodes)


def _named(fields: frozenset[str] | None) -> str:
    return "it has no fields: pass a function" if fields is None else f"its fields are {', '.join(sorted(fields))}"


def _fields(graph: Pregel[Any, Any, Any, Any], schema: str) -> frozenset[str] | None:
    """Return the fields of the graph's input or output; None unless it is a `StateGraph`."""
    builder = getattr(graph, "builder", None)
    if not isinstance(builder, StateGraph):
        return None
    return frozenset(builder.schemas.get(getattr(builder, schema), ()))
