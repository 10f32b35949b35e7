"""LangGraph graphs as agents: a session is a thread of the graph, and its `interrupt()` asks a person through the run.

Invariants
- The state of a session's graph lies in the transcript, with the entries of the run that made it: it comes with that
  run's commit and goes with its entries. There is no second store that could say something else.
- Only a run that completes changes the state. Of any other the next run sees what the transcript has of it.
- What the nodes do between two questions is one call that is not idempotent, unless the graph is said to be: a crash
  in it ends the run. A run that only waits for people leaves the memory and goes on in a later attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent
from holdfast.errors import ConfigurationError, MissingExtra, RunClosed

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from holdfast.agents.run import Run
    from holdfast.protocol.messages import Answer, Question

__all__ = ["GraphAgent", "current_run", "graph_agent"]

STATE_LIMIT_BYTES = 4_000_000

_current: ContextVar[Run | None] = ContextVar("holdfast_graph_run", default=None)


def current_run() -> Run:
    """The run that the calling node belongs to; from async nodes and from sync ones in their thread.

    Raises `RunClosed` outside of a graph's run. The same `Run` is in ``config["configurable"]["run"]``.
    """
    run = _current.get()
    if run is None:
        raise RunClosed("no graph runs here", hint="call current_run() in a node of a graph that graph_agent() hosts")
    return run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphAgent:
    """How a graph is run. Made by `graph_agent`, whose parameters say what each field is; calling it does a run's work.

    Parameters:
        graph: compiled. Each run works with a copy that has a checkpointer of the run's.
        takes_messages: its input is a list of messages under ``messages``.
        breaks: it may stop at breakpoints.
        inputs: the fields of its input, where it has fields.
    """

    name: str
    graph: Any
    takes_messages: bool
    breaks: bool
    inputs: frozenset[str] | None
    input: str | Callable[[Run], Any] | None = None
    answer: str | Callable[[Any], str] | None = None
    speakers: Collection[str] | None = None
    ask: Callable[[Any], str | Question] | None = None
    resume: Callable[[Answer, Any], Any] | None = None
    config: RunnableConfig | None = None
    context: Any = None
    idempotent: bool = False
    state_limit_bytes: int = STATE_LIMIT_BYTES

    async def __call__(self, run: Run) -> None:
        """Do the work of one run."""
        from holdfast.agents.adapters.langgraph_run import GraphRun

        token = _current.set(run)
        try:
            await GraphRun(self, run).work()
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
    """An agent of a LangGraph graph. The graph itself stays as it is.

    Parameters:
        graph: a compiled graph, a `StateGraph`, or an ``@entrypoint`` of the functional API.
        name: how messages name the agent; default: the graph's name.
        description: one line, for people and for models that may delegate to it.
        input: makes the graph's input of the run (sync or async), or the name of the input's one text field. Default:
            the run's messages, for graphs with ``messages``; its text, for entrypoints.
        answer: makes the run's answer of the graph's output, or the name of its field. With it nothing else is said.
            Default: what the models in the nodes say, as they say it; the output, where none says anything.
        speakers: the nodes whose messages are said; default: all. (LangGraph's tag ``nostream`` is heeded too.)
        ask: makes the question of what a node gives to ``interrupt()``; default: text as it is, else its JSON, and
            approvals for LangChain's requests for review.
        resume: makes what ``interrupt()`` returns of the answer and of the value that was asked with; default: the
            answer's text (None if nobody answered in time), True or False for an approval.
        config: joined with the run's own: ``recursion_limit``, ``tags``, ``callbacks``, more ``configurable``.
        context: the graph's runtime context, or a function of the run that makes it.
        idempotent: its nodes may be run again after a crash: all their effects go through `Run.call`.
        state_limit_bytes: how much of state the graph may keep for a session's next run, as it is stored.

    Raises:
        ConfigurationError: it is no graph, it has no such field, or it brings a store for its checkpoints.
        MissingExtra: LangGraph is not installed.
    """
    try:
        from holdfast.agents.adapters.langgraph_graph import check_field, open_graph
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("langgraph", "langchain_core"):
            raise
        raise MissingExtra("a LangGraph graph", extra="langgraph") from None
    if config is not None and not isinstance(config, Mapping):
        raise ConfigurationError(f"config is a {type(config).__name__}; it is a RunnableConfig, a dict")
    opened = open_graph(graph, mapped=input is not None, config=config)
    check_field("input", input, opened.inputs)
    check_field("output", answer, opened.outputs)
    named = name or opened.name
    work = GraphAgent(
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
    return Agent(name=named, work=work, replayable=True, description=description)
