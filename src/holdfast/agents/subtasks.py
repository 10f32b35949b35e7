"""Subtasks of a run: work that `Run.spawn` starts, and that the run waits for when the agent has ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import CallPath
from holdfast.agents.placement import Placement, name_of, placed, placement_of

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.runtime import Handle

__all__ = ["join_subtasks", "spawn_subtask"]


def spawn_subtask(
    context: RunContext,
    work: Callable[..., Any] | Coroutine[Any, Any, Any],
    args: tuple[Any, ...],
    on: Placement | None,
    name: str | None,
) -> Handle[Any]:
    """Start a function or a coroutine; see `Run.spawn`."""
    if isinstance(work, CoroutineType):
        return _spawn_coroutine(context, work, args, on, name)
    context.check_open()
    if not callable(work):
        raise TypeError(f"spawn() takes a function or a coroutine, not {type(work).__name__}")
    where: Placement = on or placement_of(work)
    label = name or name_of(work)
    bound = functools.partial(work, *args)
    counted = int(where != "process")
    context.activity.add(counted)  # before it begins: an eager task may have ended when `spawn` returns

    def count_off() -> None:
        """Count the subtask off once, on the run's loop. The handle also calls this, in case the task never began."""
        nonlocal counted
        left, counted = counted, 0
        context.activity.remove(left)

    on_end = count_off if where == "loop" else functools.partial(context.call_on_loop, count_off)
    try:
        handle: Handle[Any] = context.scope.spawn(
            placed(bound, CallPath(context.next_id()), where, on_end), on=where, name=label
        )
    except BaseException:
        count_off()
        raise
    handle.when_done(count_off)
    context.subtasks.append(handle)
    return handle


def _spawn_coroutine(
    context: RunContext, work: Coroutine[Any, Any, Any], args: tuple[Any, ...], on: Placement | None, name: str | None
) -> Handle[Any]:
    async def awaited() -> Any:
        return await work

    try:
        if args or on not in (None, "loop"):
            raise TypeError(
                "spawn() runs a coroutine only on the loop and without arguments; pass the function instead"
            )
        handle = spawn_subtask(context, awaited, (), None, name or getattr(work, "__name__", "coroutine"))
    except BaseException:
        work.close()
        raise
    handle.when_done(work.close)  # if it was stopped before it began
    return handle


async def join_subtasks(context: RunContext) -> None:
    """Wait for each subtask that has not ended, in the order in which they started, and raise the first error."""
    for handle in context.subtasks:
        if not handle.done():
            await handle
