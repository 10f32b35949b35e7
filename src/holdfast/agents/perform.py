"""Run an agent: call its function with a `Run`, or run the model loop; then join the remaining subtasks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import current_call_path
from holdfast.agents.model_loop import work_with_model
from holdfast.agents.output import NotText
from holdfast.agents.placement import no_exit
from holdfast.agents.run import Call, Run
from holdfast.agents.subtasks import join_subtasks
from holdfast.user_code import defined_at

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent, AgentWork
    from holdfast.agents.context import RunContext

__all__ = ["perform"]


async def perform(context: RunContext) -> None:
    """Run the context's agent in the current task, then wait for the subtasks that the agent did not await.

    Raises the agent's errors, `NotText` if the agent's result is not text, and `RuntimeError` if the agent raises
    `SystemExit`.
    """
    current_call_path.set(context.call_path)
    agent, run = context.agent, Run(context)
    try:
        if agent.work is None:
            await work_with_model(context, functools.partial(Call, run))
        else:
            await _call_agent(agent, agent.work, run)
    except SystemExit as left:
        raise no_exit(f"agent {agent.name}", left) from left
    await join_subtasks(context)


async def _call_agent(agent: Agent, work: AgentWork, run: Run) -> None:
    """Call the agent's function, and emit the text that it returns or yields."""
    if agent.in_thread:
        result = await run.scope.spawn(_call_in_thread, agent, work, run, on="thread", name=agent.name)
    else:
        result = work(run)
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, str) or not isinstance(result, AsyncIterator):  # `str` first: the check is faster
        await _emit(agent, run, result)
        return
    async with aclosing(result) if isinstance(result, AsyncGenerator) else nullcontext():
        async for part in result:
            await _emit(agent, run, part)


def _call_in_thread(agent: Agent, work: AgentWork, run: Run) -> Any:
    try:
        result = work(run)
        if isinstance(result, Iterator):
            for part in result:
                run.interrupt.check()
                if isinstance(part, str):
                    _ = run.emit(part)
                elif part is not None:
                    return part
            return None
    except SystemExit as left:
        raise no_exit(f"agent {agent.name}", left) from left
    except KeyboardInterrupt as error:  # not Ctrl-C, which only the main thread gets; it would end the host
        raise RuntimeError(f"agent {agent.name} raised KeyboardInterrupt") from error
    return result


async def _emit(agent: Agent, run: Run, part: Any) -> None:
    if isinstance(part, str):
        if part:
            await run.emit(part)
    elif part is not None:
        what = f"{type(part).__name__} {part!r}" if isinstance(part, (int, float)) else type(part).__name__
        where = defined_at(agent.work)
        raise NotText(
            f"agent {agent.name!r}{f' ({where})' if where else ''} returned or yielded {what}; "
            "return or yield text (str), or None"
        )
