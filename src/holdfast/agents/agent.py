"""What an agent is: a name and a function of a `Run`, async, an async generator, or sync (it gets a thread)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from holdfast.agents.model import Model, find_model
from holdfast.agents.placing import no_exit
from holdfast.agents.tool import Tool, Toolset, as_tool
from holdfast.errors import ConfigurationError, NotSupported
from holdfast.protocol.loop import AgentLimits
from holdfast.protocol.model import conversation

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.protocol.messages import Entry

__all__ = ["Agent", "AgentLike", "ToolLike", "agent", "as_agent", "perform"]

AgentWork: TypeAlias = "Callable[[Run], Any]"


async def _with_model(run: Run) -> None:
    """The work of an agent that has a model."""
    from holdfast.agents.loop import work_with_model

    await work_with_model(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent that a host can run: a function of its `Run`, or a model with tools, for which the loop is built in.

    Parameters:
        name: how messages name it.
        work: takes the `Run`. It may return text or None, yield text, or use the run.
        replayable: all its effects go through `Run.call`, so that after a crash its run may go on. An agent with a
            model always is.
        description: one line for people, and for models that may delegate to it.
        model: a `Model`, or the name of one as `find_model` takes it. Then there is no `work`.
        instructions: the system prompt.
        tools: functions, `Tool` and `Toolset` objects, and agents, to which the model may delegate.
        limits: budgets and deadlines of a run.
        settings: for the model layer, such as ``temperature``.
        parts: agents that its work delegates to: the host makes their toolsets ready too.

    Raises:
        ConfigurationError: neither work nor a model, or both; a model or a tool that cannot be.
    """

    name: str
    work: AgentWork = _with_model
    replayable: bool = False
    description: str = ""
    model: Model | str | None = None
    instructions: str = ""
    tools: Sequence[ToolLike] = ()
    limits: AgentLimits = field(default_factory=AgentLimits)
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    parts: Sequence[Agent] = ()

    def __post_init__(self) -> None:
        if (self.model is None) is (self.work is _with_model):
            raise ConfigurationError(
                f"the agent {self.name!r} has {'no work and no model' if self.model is None else 'work and a model'}",
                hint="give it one of them",
            )
        if self.model is None:
            return
        if isinstance(self.model, str):
            object.__setattr__(self, "model", find_model(self.model))
        known = tuple(thing if isinstance(thing, (Toolset, Tool, Agent)) else as_tool(thing) for thing in self.tools)
        object.__setattr__(self, "tools", known)
        object.__setattr__(self, "replayable", True)

    @property
    def toolsets(self) -> tuple[Toolset, ...]:
        """The toolsets of the agent and of those it may delegate to, each once; its model where that is one."""
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
        """Whether it may do on this machine what a model says."""
        return any(toolset.executes for toolset in self.toolsets)

    async def summarise(self, entries: Sequence[Entry]) -> str:
        """What was said, in short, by the agent's model.

        Raises:
            NotSupported: the agent has no model.
            ModelFailed: the model failed.
        """
        if self.model is None:
            raise NotSupported(f"the agent {self.name!r} has no model that could sum up a history")
        from holdfast.agents.compacting import summary_of

        return (await summary_of(self, conversation(entries))).text


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
    """Make an `Agent` of a function; usable with and without arguments.

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
    """The agent that `thing` is. Raises `ConfigurationError` for what cannot be one."""
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
        pass  # no signature to be had, as of some C functions: calling it will tell
    return agent(thing)


async def perform(definition: Agent, run: Run) -> None:
    """Do the agent's work in the current task; what it returns or yields is emitted.

    Raises whatever the agent raises, `TypeError` for a result that is no text, and `RuntimeError` for a `SystemExit`.
    """
    try:
        await _perform(definition, run)
    except SystemExit as left:
        raise no_exit(f"agent {definition.name}", left) from left


async def _perform(definition: Agent, run: Run) -> None:
    work = definition.work
    target = work if inspect.isroutine(work) or isinstance(work, functools.partial) else type(work).__call__
    if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        result = work(run)
    else:
        result = await run.scope.spawn(_perform_sync, definition, run, on="thread", name=definition.name)
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        async with aclosing(result) if isinstance(result, AsyncGenerator) else nullcontext():
            async for part in result:
                await _emit(definition, run, part)
    else:
        await _emit(definition, run, result)


def _perform_sync(definition: Agent, run: Run) -> Any:
    try:
        result = definition.work(run)
        if isinstance(result, Iterator):
            for part in result:
                run.interrupt.check()
                if isinstance(part, str):
                    _ = run.emit(part)
                elif part is not None:
                    return part
            return None
    except SystemExit as left:
        raise no_exit(f"agent {definition.name}", left) from left
    except KeyboardInterrupt as error:  # Ctrl-C comes to the main thread only; on the loop it would end the host
        raise RuntimeError(f"agent {definition.name} raised KeyboardInterrupt") from error
    return result


async def _emit(definition: Agent, run: Run, part: Any) -> None:
    if isinstance(part, str):
        if part:
            await run.emit(part)
    elif part is not None:
        raise TypeError(
            f"agent {definition.name!r} gave a {type(part).__name__}; an agent returns or yields text (str) or None"
        )
