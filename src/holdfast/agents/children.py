"""A child: an agent that runs inside of another one's run, in its scope, its journal and its budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.agents.results import told_briefly
from holdfast.errors import AgentCycle, Interrupted, LimitExceeded, RunFailed, RunInterrupted
from holdfast.protocol.events import ChildFinished, ChildStarted
from holdfast.protocol.messages import Attachment, Message
from holdfast.runtime.line import release

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.agents.journal import Branch
    from holdfast.agents.run import Run
    from holdfast.protocol.stopping import Cause
    from holdfast.runtime import Handle, Scope

__all__ = ["Child", "ChildTask", "check_chain", "leave_off", "past_end", "run_child"]

_PARTLY_LIMIT = 2000
_LOGGED = 10
"""Errors of one child that are logged, of those that its parts raised together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildTask:
    """What a child is asked, and how it stands to its parent.

    Parameters:
        agent: does it.
        text: what it is asked.
        branch: its place in the program; the path is its id.
        name: what it is called in the tree and in causes; default: the agent's name.
        deadline_s: it is interrupted after so many seconds.
        attachments: what comes with the text.
        inherits: it sees the session's history as its parent does.
        aloud: what it says is said by its parent too, as it comes.
    """

    agent: Agent
    text: str
    branch: Branch
    name: str = ""
    deadline_s: float | None = None
    attachments: tuple[Attachment, ...] = ()
    inherits: bool = False
    aloud: bool = False

    @property
    def label(self) -> str:
        """What people call it."""
        return self.name or self.agent.name


def check_chain(parent: Run, task: ChildTask) -> None:
    """Refuse what can have no end.

    Raises:
        AgentCycle: it is asked what it is being asked already, further up.
        LimitExceeded: children nested too deep.
    """
    if parent._depth_left < 1:
        raise LimitExceeded(
            f"agents are nested too deep: {_chain(parent, task)}",
            hint="a child may not go on delegating for ever: do it here",
        )
    above: Run | None = parent
    while above is not None:
        if _same(above.agent, task.agent) and above.text == task.text:
            raise AgentCycle(
                f"the agent {task.agent.name!r} is asked what it is being asked already: {_chain(parent, task)}"
            )
        above = above._parent


def _chain(parent: Run, task: ChildTask) -> str:
    """Who asked whom, for people."""
    names = [task.agent.name]
    above: Run | None = parent
    while above is not None:
        names.append(above.agent.name)
        above = above._parent
    return " ▸ ".join(reversed(names))


def _same(one: Agent, other: Agent) -> bool:
    return one is other or (one.name == other.name and one.work is other.work and one.model is other.model)


def past_end(parent: Run, task: ChildTask) -> ChildFinished | None:
    """How the child ended in an earlier attempt, if that stands; it is not run again then."""
    past = parent._journal.outcome(task.branch.path, task.agent.name)
    if past is not None:
        parent._journal.replayed += 1
        parent._charge(parent._journal.used_inside(task.branch.path))
    return past


def leave_off(parent: Run, task: ChildTask, cause: Cause) -> ChildFinished | None:
    """End a child that an earlier attempt began and that is not gone on with; None if there was none."""
    if not parent._journal.left_open(task.branch.path):
        return None
    finished = ChildFinished(
        run_id=parent.run_id,
        child_id=task.branch.path,
        status="interrupted",
        error=_told(task, cause),
        cause=cause,
        at=parent.now(),
    )
    parent._write(finished)
    parent._journal.child_ended(finished)
    return finished


def _told(task: ChildTask, cause: Cause) -> str:
    return f"child {task.label} was interrupted ({cause.kind}): {cause.reason}"


async def run_child(parent: Run, task: ChildTask) -> str:
    """Run a child once there is room for it, and return its answer. Raises as `Run.delegate` does."""
    await _room(parent)
    try:
        return await _run(parent, task)
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


async def _run(parent: Run, task: ChildTask) -> str:
    child = Child(parent, task, parent._around())
    try:
        async with child.scope:
            await child.begin()
    except BaseException as problem:
        finished, _ = child.ended()
        if finished.error is not None and isinstance(problem, (Interrupted, Exception)):
            if finished.status == "failed":
                raise RunFailed(finished.error, hint=child.partly) from problem
            raise RunInterrupted(finished.error, hint=child.partly) from None
        if finished.status == "completed" and not child.around.interrupt.triggered:
            return finished.text  # its deadline came when it had ended
        raise
    return child.ended()[0].text


class Child:
    """A child at work. Its owner tells it once how it ended, when its scope has closed.

    Parameters:
        around: the scope that owns the child's.
    """

    __slots__ = ("around", "handle", "parent", "run", "scope", "task")

    def __init__(self, parent: Run, task: ChildTask, around: Scope) -> None:
        self.parent = parent
        self.task = task
        self.around = around
        self.scope = around.child(task.label, deadline_s=task.deadline_s)
        path = task.branch.path
        self.handle: Handle[None] | None = None
        self.run: Run = type(parent)(
            run_id=path,
            root_id=parent.root_id,
            agent=task.agent,
            principal=parent.principal,
            session_key=parent.session_key,
            session_id=parent.session_id,
            messages=(Message(message_id=path, seq=0, content=task.text, attachments=task.attachments),),
            attempt=parent.attempt,
            scope=self.scope,
            recorder=parent._recorder,
            journal=parent._journal,
            surroundings=parent._surroundings,
            limits=parent._limits,
            branch=task.branch,
            parent=parent,
            inherits=task.inherits,
            aloud=task.aloud,
        )
        parent._write(
            ChildStarted(
                run_id=parent.run_id,
                child_id=path,
                agent=task.agent.name,
                text=task.text,
                name=task.name if task.name != task.agent.name else "",
                at=parent.now(),
            )
        )

    def begin(self) -> Handle[None]:
        """Begin the work, in the open scope."""
        self.handle = self.scope.spawn(self.run.work(), name=self.task.label)
        return self.handle

    def start(self, on_closed: Callable[[], object]) -> None:
        """Open the scope and begin; ``on_closed`` is called soon after nothing of it is left.

        Raises:
            Interrupted, ScopeClosed: the scope around it is being stopped.
        """
        self.scope.open()
        self.begin()
        self.scope.close_when_done(on_closed)

    def ended(self) -> tuple[ChildFinished, BaseException | None]:
        """Write down how it ended, now that its scope has closed; and the error that it raised, if it did."""
        scope, handle = self.scope, self.handle
        if scope.ended_by == "failure":
            problem = scope.errors[0]
            return self._finish("failed", f"child {self.task.label} failed: {told_briefly(problem)}", None), problem
        error = handle.exception() if handle is not None and handle.done() else None
        if (
            handle is not None
            and handle.done()
            and error is None
            and (scope.ended_by == "members" or not handle.cancels)
        ):
            return self._finish("completed", None, None), None  # perhaps before its interrupt reached it
        cause = scope.interrupt.cause or (error.cause if isinstance(error, Interrupted) else None)
        if cause is None or self.around.interrupt.triggered:
            return self._finish("interrupted", None, None), None  # in a later attempt it goes on
        return self._finish("interrupted", _told(self.task, cause), cause), None

    def _finish(
        self, status: Literal["completed", "failed", "interrupted"], error: str | None, cause: Cause | None
    ) -> ChildFinished:
        parent = self.parent
        self._log_failures()
        self.run.close()
        finished = ChildFinished(
            run_id=parent.run_id,
            child_id=self.task.branch.path,
            status=status,
            text=self.run.transcript.text,
            error=error,
            cause=cause,
            at=parent.now(),
        )
        if not parent._closed:
            parent._write(finished)
            parent._journal.child_ended(finished)
        return finished

    def _log_failures(self) -> None:
        handle = self.handle
        raised = handle.exception() if handle is not None and handle.done() else None
        for error in (*self.scope.errors[:_LOGGED], *(() if raised is None else (raised,))):
            self.run._log_failure(f"child {self.task.label!r} failed", error)

    @property
    def partly(self) -> str:
        """What it said before it ended early, for whoever asked it."""
        text = self.run.transcript.text
        return f"it had said: {text[-_PARTLY_LIMIT:]}" if text else ""
