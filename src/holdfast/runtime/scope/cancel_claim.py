"""Claims of scopes on a task: each records the scope that code runs in, and cancels the task natively for that scope.

Invariants
- A task can have several claims: the claim of its handle, then the claims of the bodies of scopes that the task
  entered, outermost first. At any time, at most one claim has a native cancellation to deliver. The outermost triggered
  claim delivers it; an inner claim that has already delivered a cancellation passes it on when the body is left.
- Native cancellation (``task.cancel()``) is delivered on the loop's thread only, between steps, never to a task that is
  running. So the cancellation always arrives at an await of the body, and none is left pending when the body ends.
- Deliveries are counted, and exactly as many cancellations are taken back (``Task.uncancel``) when the body is left.
- A task inside a shield is cancelled when the shield ends. Code that iterates over a generator is not cancelled for a
  scope that the generator entered.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import opcode
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from holdfast.protocol.stopping import Abandoned
from holdfast.runtime.interrupt.interrupt import Interrupt, current, use
from holdfast.runtime.interrupt.scoped_var import ScopedVar
from holdfast.runtime.interrupt.shield import shielded_by

__all__ = ["BodyClaim", "CancelClaim", "Interruptible", "current_claim", "detached", "inside", "task_stack"]

_RESUME = opcode.opmap["RESUME"]
_RESUMED_S = 0.05
"""Interval at which to check whether a generator is running again, in seconds."""


class Interruptible(Protocol):
    """Interface that a claim needs from its owner."""

    interrupt: Interrupt


class CancelClaim:
    """One claim on a task: the handle that the task was started with, or the body of a scope that the task entered.

    Parameters:
        owner: owner of the claim; the task must be cancelled when the owner's interrupt is triggered.
        task: task to cancel; None if the task is not yet created.
        outer: claim that encloses this one, if any.
        scope: scope of the code inside the claim; None if no code runs inside.
    """

    __slots__ = ("__weakref__", "cancels", "inner", "live", "outer", "owner", "scope", "started_in", "task")

    def __init__(
        self, owner: Interruptible, task: asyncio.Task[Any] | None, outer: CancelClaim | None, scope: object = None
    ) -> None:
        self.owner = owner
        self.scope = scope
        self.task = task
        self.outer = outer
        self.inner: CancelClaim | None = None
        self.cancels = 0
        self.live = True
        self.started_in: contextvars.Context | None = None
        """Context that the task was started in, if known."""

    @property
    def due(self) -> bool:
        """Whether this claim requires that the task be cancelled."""
        return self.live and self.owner.interrupt.triggered

    def deliver(self) -> None:
        """Cancel the task natively, once, unless another claim on the task does so or has done so."""
        task = self.task
        if self.cancels or not self.live or task is None or task.done():
            return
        outer = self.outer
        while outer is not None:
            if outer.due:
                return
            outer = outer.outer
        inner = self.inner
        while inner is not None:
            if inner.cancels:
                return
            inner = inner.inner
        self._cancel(task)

    def redeliver(self) -> None:
        """Cancel the task again, because it has not ended within the grace period; end its shields first."""
        task = self.task
        if not self.live or task is None or task.done():
            return
        inner = self.inner
        while inner is not None:
            if not inner.live:
                return
            inner = inner.inner
        while (shield := shielded_by(task, self.started_in)) is not None:
            shield.expire()
        self._cancel(task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        loop = task.get_loop()
        shield = shielded_by(task, self.started_in)
        if shield is not None:
            shield.hold(self.deliver)
        elif asyncio.current_task(loop) is task:
            loop.call_soon(self.deliver, context=contextvars.Context())
        else:
            self.cancels += 1
            task.cancel()


class BodyClaim(CancelClaim):
    """Claim of a scope's body (``async with scope``) on the task that entered the scope."""

    __slots__ = ("cancelling_before", "generator", "name")

    def __init__(
        self, owner: Interruptible, task: asyncio.Task[Any], outer: CancelClaim | None, scope: object = None
    ) -> None:
        super().__init__(owner, task, outer, scope)
        self.name = task.get_name()
        self.generator: FrameType | None = None
        self.cancelling_before = task.cancelling()
        if outer is not None:
            outer.inner = self

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if self.generator is not None and rests_at_yield(self.generator):
            # The task runs code that iterates over the generator; that code is not ours to cancel.
            task.get_loop().call_later(_RESUMED_S, self.deliver, context=contextvars.Context())
            return
        super()._cancel(task)

    def leave(self) -> None:
        """Mark the body as ended, so that it gets no more cancellations."""
        self.live = False
        self.generator = None

    def settle(self, error: BaseException | None) -> bool:
        """Take back the cancellations that this claim delivered; return True if another cancellation remains.

        If a task is cancelled twice at once, only one ``CancelledError`` is raised in it. If this claim delivered one
        of the cancellations, or if ``error`` is a ``CancelledError``, ``Task.cancelling()`` shows whether there was
        another. Otherwise the count is ignored: up to Python 3.12, a failed ``TaskGroup`` leaves the count too high by
        one.
        """
        task = self.task
        delivered = bool(self.cancels)
        assert task is not None
        outer = self.outer
        if outer is not None:
            outer.inner = self.inner
        if self.cancels:
            heir = outer
            while heir is not None and not (heir.due and not heir.cancels):
                heir = heir.outer
            if heir is not None:
                heir.cancels += self.cancels
            else:
                for _ in range(self.cancels):
                    task.uncancel()
            self.cancels = 0
        return (delivered or isinstance(error, asyncio.CancelledError)) and task.cancelling() > self.cancelling_before

    def abandoned(self) -> Abandoned:
        """Return a record of the body that did not end."""
        return Abandoned(kind="task", name=self.name, stack=task_stack(self.task))


current_claim: ScopedVar[CancelClaim] = ScopedVar("holdfast_place")


def rests_at_yield(generator: FrameType) -> bool:
    """Return whether a suspended generator is suspended at a yield, rather than at an await."""
    if generator.f_back is not None:
        return False
    # It resumes at RESUME, whose lowest bits are 1 after a yield and 3 after an await. From Python 3.13 on, it rests
    # at that instruction; before, at the preceding one.
    code, at = generator.f_code.co_code, generator.f_lasti
    return code[at + 1 if code[at] == _RESUME else at + 3] & 3 == 1


_set_claim = current_claim.variable.set
_set_interrupt = current.variable.set


def inside(place: CancelClaim, interrupt: Interrupt) -> contextvars.Context:
    """Return a copy of the current context in which ``place`` is the current claim and ``interrupt`` is current."""
    context = contextvars.copy_context()
    context.run(_enter, place, interrupt)
    return context


def _enter(place: CancelClaim, interrupt: Interrupt) -> None:
    _set_claim(place)
    _set_interrupt(interrupt)


def task_stack(task: asyncio.Task[Any] | None) -> tuple[str, ...]:
    """Return the stack of a suspended task, outermost call first.

    The stack includes all awaited coroutines, which ``Task.get_stack`` omits.
    """
    stack: list[str] = []
    awaited: object = None if task is None or task.done() else task.get_coro()
    while awaited is not None:
        frame = (
            getattr(awaited, "cr_frame", None)
            or getattr(awaited, "ag_frame", None)
            or getattr(awaited, "gi_frame", None)
        )
        if frame is not None:
            entry = traceback.extract_stack(frame, limit=1)[0]
            stack.append(f"{entry.filename}:{entry.lineno} in {entry.name}")
        awaited = (
            getattr(awaited, "cr_await", None)
            or getattr(awaited, "ag_await", None)
            or getattr(awaited, "gi_yieldfrom", None)
        )
    return tuple(stack)


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """``with detached():`` runs its body outside any scope and interrupt.

    Use it to start work that several scopes share.
    """
    place = current_claim.enter(None)
    try:
        with use(None):
            yield
    finally:
        place.leave()
