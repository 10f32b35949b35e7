"""A child: an agent that runs inside another agent's run, with its own scope and limits, but its parent's journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.agents.context import RunContext
from holdfast.agents.results import summarize_error
from holdfast.errors import AgentCycle, Interrupted, LimitExceeded, RunFailed, RunInterrupted
from holdfast.protocol.events import ChildFinished, ChildStarted
from holdfast.protocol.messages import Attachment, Message
from holdfast.runtime.queues.wait_queue import release

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.agents.journal import CallPath
    from holdfast.protocol.stopping import Cause
    from holdfast.runtime import Handle, Scope

__all__ = ["Child", "ChildTask", "cancel_stale_child", "check_delegation_cycle", "delegate", "recorded_outcome"]

_PARTIAL_ANSWER_LIMIT = 2000
_LOGGED = 10
"""Maximum number of errors logged for one child when several of its tasks raised."""


class ChildTask(msgspec.Struct, frozen=True, kw_only=True):
    """A child's agent and request, and its relation to its parent.

    Parameters:
        agent: agent that the child runs.
        text: request for the child.
        branch: call path of the child, which is also the child's id.
        name: display name in the task tree and in causes; if empty, the agent's name is used.
        deadline_s: seconds after which the child is interrupted; None sets no deadline.
        attachments: attachments of the request.
        inherits_history: whether the child sees the session history that its parent sees.
        streams_to_parent: whether the parent also emits the child's text as the text arrives.
    """

    agent: Agent
    text: str
    branch: CallPath
    name: str = ""
    deadline_s: float | None = None
    attachments: tuple[Attachment, ...] = ()
    inherits_history: bool = False
    streams_to_parent: bool = False

    @property
    def label(self) -> str:
        """The display name of the child."""
        return self.name or self.agent.name


def check_delegation_cycle(parent: RunContext, task: ChildTask) -> None:
    """Raise an error if the task would create a delegation cycle or exceed the maximum nesting depth.

    Raises:
        AgentCycle: if `parent` or a run above it is already handling the same request with the same agent.
        LimitExceeded: if the child would exceed the maximum nesting depth.
    """
    if parent.depth_left < 1:
        raise LimitExceeded(
            f"agents are nested too deep: {_chain(parent, task)}",
            hint="let the parent agent do the task itself, or raise the depth limit",
        )
    above: RunContext | None = parent
    while above is not None:
        if _same(above.agent, task.agent) and above.text == task.text:
            raise AgentCycle(
                f"delegation cycle: agent {task.agent.name!r} is already handling this request: {_chain(parent, task)}"
            )
        above = above.parent


def _chain(parent: RunContext, task: ChildTask) -> str:
    """Return the names of the agents from the top-level run down to the task, for error messages."""
    names = [task.agent.name]
    above: RunContext | None = parent
    while above is not None:
        names.append(above.agent.name)
        above = above.parent
    return " ▸ ".join(reversed(names))


def _same(one: Agent, other: Agent) -> bool:
    return one is other or (one.name == other.name and one.work is other.work and one.model is other.model)


def recorded_outcome(parent: RunContext, task: ChildTask) -> ChildFinished | None:
    """Return the child's final outcome if an earlier attempt recorded it, so that the child does not run again."""
    past = parent.journal.outcome(task.branch.path, task.agent.name)
    if past is not None:
        parent.journal.replayed += 1
        parent.charge(parent.journal.used_inside(task.branch.path))
    return past


def cancel_stale_child(parent: RunContext, task: ChildTask, cause: Cause) -> ChildFinished | None:
    """Record the interruption of a child that an earlier attempt left open and that this attempt does not resume.

    Return the child's outcome, or None if no earlier attempt left the child open.
    """
    if not parent.journal.left_open(task.branch.path):
        return None
    finished = ChildFinished(
        run_id=parent.run_id,
        child_id=task.branch.path,
        status="interrupted",
        error=_interrupted(task, cause),
        cause=cause,
        at=parent.now(),
    )
    parent.write(finished)
    parent.journal.child_ended(finished)
    return finished


def _interrupted(task: ChildTask, cause: Cause) -> str:
    return f"child {task.label} was interrupted ({cause.kind}): {cause.reason}"


async def delegate(parent: RunContext, task: ChildTask) -> str:
    """Run a child, or use its recorded outcome, and return the child's answer. Raises the errors of `Run.delegate`."""
    check_delegation_cycle(parent, task)
    past = recorded_outcome(parent, task)
    if past is None:
        return await _run_child(parent, task)
    if past.status == "completed":
        return past.text
    ending = RunFailed if past.status == "failed" else RunInterrupted
    raise ending(past.error or f"child {task.agent.name} {past.status}")


async def _run_child(parent: RunContext, task: ChildTask) -> str:
    """Wait until the parent's limits allow another active child, run it, and return its answer."""
    await _child_slot(parent)
    try:
        return await _run(parent, task)
    finally:
        parent.active_children -= 1
        waiting, parent.child_waiters = parent.child_waiters, []
        for waiter in waiting:  # wake all: one that is being interrupted would not pass the slot on
            release(waiter)


async def _child_slot(parent: RunContext) -> None:
    """Wait until the parent's limits allow another active child, and count the child as active."""
    while parent.agent.model is not None and parent.active_children >= parent.agent.limits.children:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parent.child_waiters.append(waiter)
        await waiter
    parent.active_children += 1


async def _run(parent: RunContext, task: ChildTask) -> str:
    child = Child(parent, task, parent.innermost_scope())
    try:
        async with child.scope:
            await child.begin()
    except BaseException as problem:
        finished, _ = child.ended()
        if finished.error is not None and isinstance(problem, (Interrupted, Exception)):
            if finished.status == "failed":
                raise RunFailed(finished.error, hint=child.partial_answer) from problem
            raise RunInterrupted(finished.error, hint=child.partial_answer) from None
        if finished.status == "completed" and not child.around.interrupt.triggered:
            return finished.text  # the deadline expired after it had ended
        raise
    return child.ended()[0].text


class Child:
    """An active child. The child's owner calls `ended` once, after the child's scope has closed.

    Parameters:
        parent: context of the parent run.
        task: agent and request of the child.
        around: scope that owns the child's scope.
    """

    __slots__ = ("around", "context", "handle", "parent", "scope", "task")

    def __init__(self, parent: RunContext, task: ChildTask, around: Scope) -> None:
        self.parent = parent
        self.task = task
        self.around = around
        self.scope = around.child(task.label, deadline_s=task.deadline_s)
        path = task.branch.path
        self.handle: Handle[None] | None = None
        self.context = RunContext(  # positional: keywords would cost a microsecond
            path,
            parent.root_id,
            task.agent,
            parent.principal,
            parent.session_key,
            parent.session_id,
            (Message(message_id=path, seq=0, content=task.text, attachments=task.attachments),),
            parent.attempt,
            self.scope,
            parent.recorder,
            parent.journal,
            parent.host,
            parent.limits,
            task.branch,
            parent.perform,
            parent,
            task.inherits_history,
            task.streams_to_parent,
        )
        parent.write(
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
        """Start the agent in the child's scope, which must be open."""
        self.handle = self.scope.spawn(self.context.perform(self.context), name=self.task.label)
        return self.handle

    def start(self, on_closed: Callable[[], object]) -> None:
        """Open the child's scope and start the agent; ``on_closed`` is called soon after the scope has closed.

        Raises:
            Interrupted, ScopeClosed: if the scope around the child's scope is being stopped.
        """
        self.scope.open()
        self.begin()
        self.scope.close_when_done(on_closed)

    def ended(self) -> tuple[ChildFinished, BaseException | None]:
        """Record and return the child's outcome, with the child's error, if any. Call it after the scope has closed."""
        scope, handle = self.scope, self.handle
        if scope.ended_by == "failure":
            problem = scope.errors[0]
            return self._finish("failed", f"child {self.task.label} failed: {summarize_error(problem)}", None), problem
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
            return self._finish("interrupted", None, None), None  # a later attempt resumes it
        return self._finish("interrupted", _interrupted(self.task, cause), cause), None

    def _finish(
        self, status: Literal["completed", "failed", "interrupted"], error: str | None, cause: Cause | None
    ) -> ChildFinished:
        parent = self.parent
        self._log_failures()
        self.context.close()
        finished = ChildFinished(
            run_id=parent.run_id,
            child_id=self.task.branch.path,
            status=status,
            text=self.context.transcript.text,
            error=error,
            cause=cause,
            at=parent.now(),
        )
        if not parent.closed:
            parent.write(finished)
            parent.journal.child_ended(finished)
        return finished

    def _log_failures(self) -> None:
        handle = self.handle
        raised = handle.exception() if handle is not None and handle.done() else None
        errors = self.scope.errors
        if raised is not None:
            errors = [*errors[:_LOGGED], raised]
        for error in errors[: _LOGGED + 1]:
            self.context.log_failure(f"child {self.task.label!r} failed", error)

    @property
    def partial_answer(self) -> str:
        """The last part of the text that the child emitted before it failed, for the hint of the child's error."""
        text = self.context.transcript.text
        return f"its output so far: {text[-_PARTIAL_ANSWER_LIMIT:]}" if text else ""
