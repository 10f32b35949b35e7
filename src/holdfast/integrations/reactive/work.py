"""The work on a stream's item: a function in a task or a thread, or an agent as a child of a run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent
from holdfast.agents.journal import CallPath, current_call_path
from holdfast.agents.placement import name_of, placement_of
from holdfast.errors import ConfigurationError
from holdfast.integrations.reactive.subscription import Work

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.runtime import Scope

__all__ = ["ItemText", "branching", "label_of", "text_of", "work_on"]

ItemText = Callable[[Any], str]
"""A function that builds the text for an agent or a session from an item."""


def text_of(item: Any) -> str:
    """Return a text item unchanged. Raises `TypeError` for any other item."""
    if not isinstance(item, str):
        raise TypeError(f"an item is a {type(item).__name__}, but agents need text; pass a function as text=")
    return item


def label_of(target: Agent | Callable[..., Any]) -> str:
    """Return the display name of an agent or a function."""
    return target.name if isinstance(target, Agent) else name_of(target)


def work_on(target: Agent | Callable[[Any], Any], run: Run | None, text: ItemText) -> Work:
    """Return the async function that runs `target` on one item.

    Parameters:
        target: an agent, an async function, or a sync function, which runs in a thread.
        run: parent run for an agent; None if no run owns the bridge.
        text: function that builds an agent's request from an item.

    Raises:
        ConfigurationError: if `target` is an agent without a `run`, or if `target` is not callable.
    """
    if isinstance(target, Agent):
        if run is None:
            raise ConfigurationError(
                f"the agent {target.name!r} needs a parent run, and this bridge has none",
                hint="in an agent, use ReactiveBridge(run); elsewhere, send the items to sessions with bridge.ask",
            )
        agent = target

        async def delegate(_: Scope, __: int, item: Any) -> str:
            return await run.delegate(agent, text(item))

        return delegate
    if not callable(target):
        raise ConfigurationError(f"{target!r} is not callable", hint="pass a function of the item, or an agent")
    function = target
    if placement_of(function) == "loop":

        def on_loop(_: Scope, __: int, item: Any) -> Awaitable[Any]:
            result: Awaitable[Any] = function(item)
            return result

        return on_loop

    async def in_thread(scope: Scope, _: int, item: Any) -> Any:
        result = await scope.spawn(functools.partial(_attempt, function, item), on="thread", name=name_of(function))
        if isinstance(result, _Raised):
            raise result.error
        return result

    return in_thread


class _Raised:
    """An error raised in a thread, which must not end the scope."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        result = function(item)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(f"{name_of(function)} runs in a thread and returned a coroutine; make it an 'async def'")
        return result
    except StopIteration as error:  # it would end the awaiting coroutine
        return _Raised(RuntimeError(f"{name_of(function)} raised {error!r}"))
    except SystemExit as left:
        return _Raised(RuntimeError(f"{name_of(function)} called sys.exit({left.code!r})"))
    except Exception as error:
        return _Raised(error)


def branching(work: Work, run: Run) -> Work:
    """Return a function that runs `work` on each item as a branch of the run, with the same ids in every attempt."""
    base = run.context.next_id()

    async def branch(scope: Scope, index: int, item: Any) -> Any:
        current_call_path.set(CallPath(f"{base}.{index + 1}"))
        run.context.activity.add()
        try:
            return await work(scope, index, item)
        finally:
            run.context.activity.remove()

    return branch
