"""LangGraph graphs as agents: a session is a thread of the graph, and `interrupt()` asks a person through the run.

Invariants
- The state of a session's graph is stored in the transcript, with the last entry of the run that produced the state. It
  is committed, undone and rolled back with that run's entries; a compaction that removes that entry moves the state to
  the summary. So the state and the transcript cannot disagree.
- Only a completed run changes the state. If a run does not complete, the next run sees the transcript of that run, but
  not the graph state that the run had reached.
- The work of the nodes between two questions is one call. The call is idempotent only if the graph is declared
  idempotent; otherwise, a crash during the call ends the run. A run that waits only for people is unloaded, and resumes
  in a later attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent
from holdfast.errors import ConfigurationError, MissingExtra, RunClosed
from holdfast.integrations.langgraph.hosted_graph import STATE_LIMIT_BYTES, GraphAgent

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from holdfast.agents.run import Run
    from holdfast.protocol.messages import Answer, Question

__all__ = ["current_run", "graph_agent"]

_current: ContextVar[Run | None] = ContextVar("holdfast_graph_run", default=None)


def current_run() -> Run:
    """Return the run of the calling node. In a sync node, call this function only on the thread that runs the node.

    The same `Run` is in ``config["configurable"]["run"]``.

    Raises:
        RunClosed: if called outside a run of a hosted graph.
    """
    run = _current.get()
    if run is None:
        raise RunClosed("no active graph run", hint="call current_run() in a node of a graph hosted by graph_agent()")
    return run


@dataclass(frozen=True, slots=True, eq=False)
class _GraphWork:
    """The work of an agent that `graph_agent` made: run the graph once."""

    graph: GraphAgent

    async def __call__(self, run: Run) -> None:
        from holdfast.integrations.langgraph.run import GraphRun

        token = _current.set(run)
        try:
            await GraphRun(self.graph, run).work()
        finally:
            _current.reset(token)


def graph_agent(
    graph: Any,
    *,
    name: str | None = None,
    description: str = "",
    input: str | Callable[[Run], Any] | None = None,
    answer: str | Callable[[Any], str] | None = None,
    speakers: Collection[str] | None = None,
    ask: Callable[[Any], str | Question] | None = None,
    resume: Callable[[Answer, Any], Any] | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    idempotent: bool = False,
    state_limit_bytes: int = STATE_LIMIT_BYTES,
) -> Agent:
    """Return an agent that runs a LangGraph graph. The graph itself is not changed.

    Parameters:
        graph: a compiled graph, a `StateGraph`, or an ``@entrypoint`` of the functional API.
        name: name by which messages address the agent; None means the graph's name.
        description: one-line description of the agent, for people and for models that may delegate to the agent.
        input: sync or async function that is called with the run and returns the graph's input, or the name of the
            input field that gets the run's text. If None, a graph with ``messages`` gets the run's messages, and an
            entrypoint gets the run's text.
        answer: function that is called with the graph's output and returns the run's answer, or the name of the output
            field that has the answer. The run then emits nothing else. If None, the run emits the output of the models
            in the nodes as the output is streamed or, if the models emit nothing, the graph's output.
        speakers: nodes whose messages are emitted; None means all nodes. LangGraph does not stream the output of models
            with the tag ``nostream``.
        ask: function that is called with the value that a node passed to ``interrupt()`` and returns the question. If
            None, a text becomes the question, LangChain's review requests become approvals, and other values become
            questions in JSON.
        resume: function that is called with the answer and the original value, and returns the result of
            ``interrupt()``. If None, the result is the answer's text, or None if the question expired. For an approval,
            the result is True or False; for a LangChain review request, it is the decision in LangChain's format.
        config: LangGraph configuration that is merged with the run's own configuration, such as ``recursion_limit``,
            ``tags``, ``callbacks`` and more ``configurable`` values.
        context: the graph's runtime context, or a function that builds the context from the run.
        idempotent: whether nodes may be repeated after a crash, because all their effects go through `Run.call`.
        state_limit_bytes: maximum size of a stored state of the graph, in bytes.

    Raises:
        ConfigurationError: if `graph` is not a graph or has its own checkpointer, if `input` or `answer` names an
            unknown field, or if `config` is invalid.
        MissingExtra: if LangGraph is not installed.
    """
    try:
        from holdfast.integrations.langgraph.inspection import check_field, open_graph
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("langgraph", "langchain_core"):
            raise
        raise MissingExtra("a LangGraph graph", extra="langgraph") from None
    if config is not None and not isinstance(config, Mapping):
        raise ConfigurationError(f"config is a {type(config).__name__}; it must be a RunnableConfig, a dict")
    opened = open_graph(graph, mapped=input is not None, config=config)
    check_field("input", input, opened.inputs)
    check_field("output", answer, opened.outputs)
    named = name or opened.name
    hosted = GraphAgent(
        name=named,
        graph=opened.graph,
        takes_messages=opened.takes_messages and input is None,
        breaks=opened.breaks,
        inputs=opened.inputs,
        input=input,
        answer=answer,
        speakers=speakers,
        ask=ask,
        resume=resume,
        config=config,
        context=context,
        idempotent=idempotent,
        state_limit_bytes=state_limit_bytes,
    )
    return Agent(name=named, work=_GraphWork(hosted), replayable=True, description=description)
