"""`Agent`: a name, and a function of a `Run` or a model with tools. Data only; `holdfast.agents.perform` runs it.

The function is async, an async generator, or sync (it runs in a thread).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from holdfast.agents.compaction import context_limit, summary_of
from holdfast.agents.model import Model
from holdfast.agents.model_lookup import find_model
from holdfast.agents.tool import Tool, Toolset, as_tool
from holdfast.errors import ConfigurationError, NotSupported
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.model import conversation

if TYPE_CHECKING:
    from holdfast.protocol.messages import Entry

__all__ = ["Agent", "AgentLike", "AgentWork", "ToolLike", "agent", "as_agent"]

AgentWork: TypeAlias = "Callable[[Any], Any]"
"""A function of a `Run`. The parameter has no type here: `Run` depends on agents, so agents must not depend on
`Run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent that a host can run: a function of its `Run`, or a model with tools and the built-in loop.

    Parameters:
        name: the name by which messages address it.
        work: a function of the `Run`. It may return text or None, yield text, or emit text through the run. None for an
            agent with a model.
        replayable: whether all its effects go through `Run.call`, so that its run can resume after a crash. An agent
            with a model always counts as replayable.
        description: one-line description, for people and for models that may delegate to it.
        model: a `Model`, or the name of one for `find_model`, in place of `work`.
        instructions: the system prompt.
        tools: functions, `Tool` and `Toolset` objects, and agents, to which the model may delegate.
        limits: budgets and deadlines of a run.
        settings: for the model layer, such as ``temperature``.
        parts: agents that its work delegates to; the host also starts their toolsets.

    Raises:
        ConfigurationError: neither work nor a model, or both; an invalid model or tool.
    """

    name: str
    work: AgentWork | None = None
    replayable: bool = False
    description: str = ""
    model: Model | str | None = None
    instructions: str = ""
    tools: Sequence[ToolLike] = ()
    limits: AgentLimits = field(default_factory=AgentLimits)
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    parts: Sequence[Agent] = ()
    in_thread: bool = field(init=False, repr=False, compare=False, default=False)
    """Whether `work` is a sync function, which runs in a thread."""

    def __post_init__(self) -> None:
        if (self.model is None) is (self.work is None):
            has = "neither work nor a model" if self.model is None else "work and a model"
            raise ConfigurationError(f"the agent {self.name!r} has {has}", hint="pass either work or a model")
        if self.model is None:
            object.__setattr__(self, "in_thread", not _is_async(self.work))
            return
        if isinstance(self.model, str):
            object.__setattr__(self, "model", find_model(self.model))
        known = tuple(thing if isinstance(thing, (Toolset, Tool, Agent)) else as_tool(thing) for thing in self.tools)
        object.__setattr__(self, "tools", known)
        object.__setattr__(self, "replayable", True)

    @property
    def toolsets(self) -> tuple[Toolset, ...]:
        """The toolsets of the agent and of the agents it may delegate to, each once, including models that are
        toolsets."""
        found: list[Toolset] = []
        for thing in (self.model, *self.tools, *self.parts):
            for toolset in (thing,) if isinstance(thing, Toolset) else getattr(thing, "toolsets", ()):
                if not any(toolset is known for known in found):
                    found.append(toolset)
        return tuple(found)

    @property
    def unwalled(self) -> bool:
        """Whether programs that a model starts run with the rights of the host's user."""
        return any(toolset.unwalled for toolset in self.toolsets)

    @property
    def executes(self) -> bool:
        """Whether a model may execute commands on this machine."""
        return any(toolset.executes for toolset in self.toolsets)

    async def summarise(self, entries: Sequence[Entry]) -> str:
        """Return a summary of the entries, by the agent's model.

        Raises:
            NotSupported: the agent has no model.
            ModelFailed: the model failed.
        """
        if self.model is None:
            raise NotSupported(f"the agent {self.name!r} has no model to summarize a history with")
        assert not isinstance(self.model, str)
        limit = context_limit(self.model, self.limits)
        return (await summary_of(self.model, conversation(entries), limit=limit)).text


def _is_async(work: AgentWork | None) -> bool:
    """Return whether calling `work` only creates a coroutine or an async generator."""
    target = work if inspect.isroutine(work) or isinstance(work, functools.partial) else type(work).__call__
    return inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target)


ToolLike: TypeAlias = "Tool | Toolset | Agent | Callable[..., Any]"
AgentLike: TypeAlias = "Agent | AgentWork"


@overload
def agent(work: AgentWork, /) -> Agent: ...
@overload
def agent(
    *, name: str | None = None, replayable: bool = False, description: str | None = None
) -> Callable[[AgentWork], Agent]: ...
def agent(
    work: AgentWork | None = None,
    /,
    *,
    name: str | None = None,
    replayable: bool = False,
    description: str | None = None,
) -> Agent | Callable[[AgentWork], Agent]:
    """Make an `Agent` from a function; usable with and without arguments.

    Parameters:
        name: default: the function's name.
        replayable: see `Agent`.
        description: default: the first line of the function's docstring.
    """

    def make(work: AgentWork) -> Agent:
        doc = inspect.getdoc(work) if inspect.isroutine(work) else None
        return Agent(
            name=name or str(getattr(work, "__name__", type(work).__name__)),
            work=work,
            replayable=replayable,
            description=description if description is not None else (doc or "").partition("\n")[0],
        )

    return make if work is None else make(work)


def as_agent(thing: object) -> Agent:
    """Return an `Agent` unchanged, or make one from a function of a run. Raises `ConfigurationError` otherwise."""
    if isinstance(thing, Agent):
        return thing
    if not callable(thing) or inspect.isclass(thing):
        raise ConfigurationError(
            f"{thing!r} is not an agent",
            hint="an agent is an async function, an async generator or a function that takes one argument, the run",
        )
    try:
        inspect.signature(thing).bind(None)
    except TypeError as error:
        raise ConfigurationError(
            f"{thing!r} cannot be called with one argument, the run ({error})",
            hint="write it as: async def agent(run): ...",
        ) from None
    except ValueError:
        pass  # some C functions have no signature; an unsuitable one fails when called
    return agent(thing)
