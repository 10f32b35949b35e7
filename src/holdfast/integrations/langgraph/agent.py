"""LangGraph graphs as agents: a session is a thread of the graph, and its `interrupt()` asks a person through the run.

Invariants
- The state of a session's graph is stored in the transcript, with the entries of the run that produced it: it is
  committed and removed with them. No second store can disagree.
- Only a completed run changes the state. After any other run, the next one sees only its transcript.
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
    """Return the run of the calling node; works in async nodes, and in sync nodes on their own thread.

    Raises `RunClosed` outside a graph's run. The same `Run` is in ``config["configurable"]["run"]``.
    """
    run = _current.get()
    if run is None:
        raise RunClosed("no active graph run", hint="call current_run() in a node of a graph hosted by graph_agent()")
    return run


@dataclass(frozen=True, slots=True, eq=False)
class _GraphWork:
    """The work of the agent: runs the graph once."""

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
        name: the name by which messages address the agent; default: the graph's name.
        description: one-line description, for people and for models that may delegate to it.
        input: builds the graph's input from the run (sync or async), or names the input's only text field. Default:
            the run's messages, for graphs with ``messages``; its text, for entrypoints.
        answer: builds the run's answer from the graph's output, or names its field. The run then emits nothing else.
            Default: the output of the models in the nodes, as it is streamed; without any, the graph's output.
        speakers: the nodes whose messages are emitted; default: all. (LangGraph's tag ``nostream`` is respected too.)
        ask: builds the question from a node's ``interrupt()`` value; default: text unchanged, other values as JSON, and
            approvals for LangChain's review requests.
        resume: builds the result of ``interrupt()`` from the answer and the original value; default: the answer's text
            (None if it expired), True or False for an approval.
        config: merged with the run's own: ``recursion_limit``, ``tags``, ``callbacks``, more ``configurable``.
        context: the graph's runtime context, or a function that builds it from the run.
        idempotent: whether nodes may be repeated after a crash, because all their effects go through `Run.call`.
        state_limit_bytes: size limit of the stored state that the graph keeps for a session's next run.

    Raises:
        ConfigurationError: not a graph, an unknown field, or a graph with its own checkpoint store.
        MissingExtra: LangGraph is not installed.
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
