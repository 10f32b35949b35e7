"""`Agent`, the data that defines an agent; `holdfast.agents.perform` runs agents.

An agent has a name and either a function of a `Run` or a model with tools. The function may be an async function, an
async generator function or a sync function; a sync function runs in a thread.
"""

from __future__ import annotations

import functools
import inspect
import re
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
"""A function of a `Run`. The parameter is typed as `Any`, because the module of `Run` depends on this module."""

_VERSION = re.compile(r"[A-Za-z0-9._-]{0,64}")
_USE_FUNCTION = "an agent is a function that takes one argument, the run: async def agent(run): …"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent that a host can run: either a function of a `Run`, or a model with tools that the built-in loop calls.

    Parameters:
        name: name by which messages address the agent.
        work: function that receives the `Run`. The function may return text or None, yield text, or emit text through
            the run. `work` must be None for an agent with a model.
        replayable: whether all effects of `work` go through `Run.call`, so that a run of the agent can resume after a
            crash. An agent with a model always counts as replayable.
        version: version of the code of a replayable agent, such as ``"2"``; at most 64 letters, digits, ``.``, ``_``
            and ``-``. Of several hosts, only those whose agent has the same version continue a run. Empty means that
            any host with an agent of that name may continue it.
        description: one-line description of the agent, for people and for models that may delegate to the agent.
        model: model that the agent uses instead of `work`; a `Model`, or a name that `find_model` accepts.
        instructions: system prompt of an agent with a model.
        tools: functions, `Tool` objects and `Toolset` objects that the model may call, and agents to which the model
            may delegate.
        limits: budgets and deadlines of each run of the agent.
        settings: settings for the model layer, such as ``temperature``.
        parts: agents to which `work` delegates; the host also starts the toolsets of these agents.

    Raises:
        ConfigurationError: if neither or both of `work` and `model` are given, or if the version, the model or a tool
            is invalid.
    """

    name: str
    work: AgentWork | None = None
    replayable: bool = False
    version: str = ""
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
        if not _VERSION.fullmatch(self.version):
            raise ConfigurationError(
                f"the agent {self.name!r} has the version {self.version!r}",
                hint="use at most 64 letters, digits, '.', '_' and '-', such as \"2\" or \"2026-11-29\"",
            )
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
        """The distinct toolsets of this agent and of the agents to which it may delegate, including models that are
        toolsets."""
        found: list[Toolset] = []
        for thing in (self.model, *self.tools, *self.parts):
            for toolset in (thing,) if isinstance(thing, Toolset) else getattr(thing, "toolsets", ()):
                if not any(toolset is known for known in found):
                    found.append(toolset)
        return tuple(found)

    @property
    def unwalled(self) -> bool:
        """Whether programs that the agent's tools start run with the rights of the host's user."""
        return any(toolset.unwalled for toolset in self.toolsets)

    @property
    def programs(self) -> bool:
        """Whether tools of the agent or its child agents run programs that a model chooses, behind a wall or not."""
        return any(toolset.programs or toolset.unwalled for toolset in self.toolsets)

    @property
    def executes(self) -> bool:
        """Whether a model may execute commands on this machine."""
        return any(toolset.executes for toolset in self.toolsets)

    async def summarise(self, entries: Sequence[Entry]) -> str:
        """Summarize the entries with the agent's model and return the summary.

        Raises:
            NotSupported: if the agent has no model.
            ModelFailed: if the model fails.
        """
        if self.model is None:
            raise NotSupported(f"the agent {self.name!r} has no model, so it cannot summarize a history")
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
    *, name: str | None = None, replayable: bool = False, version: str = "", description: str | None = None
) -> Callable[[AgentWork], Agent]: ...
def agent(
    work: AgentWork | None = None,
    /,
    *,
    name: str | None = None,
    replayable: bool = False,
    version: str = "",
    description: str | None = None,
) -> Agent | Callable[[AgentWork], Agent]:
    """Make an `Agent` from a function. This decorator may be used with or without arguments.

    Parameters:
        name: name of the agent; None means the function's name.
        replayable: whether all effects of the function go through `Run.call`; see `Agent`.
        version: version of the function's code; see `Agent`.
        description: one-line description of the agent; None means the first line of the function's docstring.
    """

    def make(work: AgentWork) -> Agent:
        doc = inspect.getdoc(work) if inspect.isroutine(work) else None
        return Agent(
            name=name or str(getattr(work, "__name__", type(work).__name__)),
            work=work,
            replayable=replayable,
            version=version,
            description=description if description is not None else (doc or "").partition("\n")[0],
        )

    return make if work is None else make(work)


def as_agent(thing: object) -> Agent:
    """Return an `Agent` unchanged, or make an agent from a function that takes a run.

    Raises:
        ConfigurationError: if `thing` is neither an `Agent` nor such a function.
    """
    if isinstance(thing, Agent):
        return thing
    if inspect.isclass(thing):
        raise ConfigurationError(
            f"the class {thing.__name__} is not an agent", hint=f"make an instance: agent = {thing.__name__}()"
        )
    if not callable(thing):
        raise ConfigurationError(f"a value of type {type(thing).__name__} is not an agent", hint=_USE_FUNCTION)
    try:
        inspect.signature(thing).bind(None)
    except TypeError as error:
        name = getattr(thing, "__name__", type(thing).__name__)
        raise ConfigurationError(
            f"{name} cannot be called with one argument, the run: {error}", hint=_USE_FUNCTION
        ) from None
    except ValueError:
        pass  # some C functions have no signature; an unsuitable one fails when called
    return agent(thing)
