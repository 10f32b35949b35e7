"""A child: an agent that runs inside of another one's run, in its scope, its journal and its budget."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from holdfast.agents.results import told_briefly
from holdfast.errors import Interrupted, RunFailed, RunInterrupted
from holdfast.protocol.events import ChildFinished, ChildStarted
from holdfast.protocol.messages import Message
from holdfast.runtime.line import release

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.agents.journal import Branch
    from holdfast.agents.run import Run

__all__ = ["run_child"]

_PARTLY_LIMIT = 2000


async def run_child(parent: Run, agent: Agent, text: str, branch: Branch, timeout_s: float | None) -> str:
    """Run a child once there is room for it, and return its answer. Raises as `Run.delegate` does."""
    await _room(parent)
    try:
        return await _run(parent, agent, text, branch, timeout_s)
    finally:
        parent._children -= 1
        waiting, parent._for_room = parent._for_room, []
        for waiter in waiting:  # all of them: one that is being interrupted would not pass it on
            release(waiter)


async def _room(parent: Run) -> None:
    """Wait while as many children are at work as the parent's limits allow."""
    while parent.agent.model is not None and parent._children >= parent.agent.limits.children:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parent._for_room.append(waiter)
        await waiter
    parent._children += 1


async def _run(parent: Run, agent: Agent, text: str, branch: Branch, timeout_s: float | None) -> str:
    around = parent._around()
    scope = around.child(agent.name, deadline_s=timeout_s)
    child = type(parent)(
        run_id=branch.path,
        root_id=parent.root_id,
        agent=agent,
        principal=parent.principal,
        session_key=parent.session_key,
        messages=(Message(message_id=branch.path, seq=0, content=text),),
        attempt=parent.attempt,
        scope=scope,
        recorder=parent._recorder,
        journal=parent._journal,
        surroundings=parent._surroundings,
        limits=parent._limits,
        branch=branch,
        parent=parent,
    )
    parent._write(
        ChildStarted(run_id=parent.run_id, child_id=branch.path, agent=agent.name, text=text, at=parent.now())
    )
    status: Literal["completed", "failed", "interrupted"] = "interrupted"
    error: str | None = None
    try:
        async with scope:
            await scope.spawn(child.work(), name=agent.name)
        status = "completed"
    except Interrupted as interrupted:
        if around.interrupt.triggered:
            raise
        cause = interrupted.cause
        error = f"child {agent.name} was interrupted ({cause.kind}): {cause.reason}"
        raise RunInterrupted(error, hint=_partly(child)) from None
    except Exception as problem:
        status, error = "failed", f"child {agent.name} failed: {told_briefly(problem)}"
        raise RunFailed(error, hint=_partly(child)) from problem
    finally:
        child.close()
        if not parent._closed:
            finished = ChildFinished(
                run_id=parent.run_id,
                child_id=branch.path,
                status=status,
                text=child.transcript.text,
                error=error,
                at=parent.now(),
            )
            parent._write(finished)
            parent._journal.child_ended(finished)
    return child.transcript.text


def _partly(child: Run) -> str:
    """What a child said before it ended early, for whoever asked it."""
    text = child.transcript.text
    return f"it had said: {text[-_PARTLY_LIMIT:]}" if text else ""
