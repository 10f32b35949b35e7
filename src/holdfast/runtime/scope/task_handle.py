"""Tasks as members of a scope: spawned tasks, whose errors interrupt the scope, and adopted tasks of foreign code."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from types import CoroutineType
from typing import Any, TypeVar, cast

from holdfast.protocol.stopping import Abandoned, Cause
from holdfast.runtime.interrupt.interrupt import Interrupt, Registration
from holdfast.runtime.scope.cancel_claim import CancelClaim, current_claim, task_stack
from holdfast.runtime.scope.handle import Handle, Member, ScopeOwner

__all__ = ["TaskHandle", "without_exit"]

T = TypeVar("T")


def without_exit(coroutine: CoroutineType[Any, Any, T]) -> CoroutineType[Any, Any, T]:
    """Wrap a coroutine of foreign code so that a `SystemExit` fails the task and does not end the loop.

    If the wrapper never starts, the caller must close ``coroutine``.
    """
    guarded = cast("CoroutineType[Any, Any, T]", _guarded(coroutine))
    guarded.__name__, guarded.__qualname__ = coroutine.__name__, coroutine.__qualname__
    return guarded


async def _guarded(coroutine: CoroutineType[Any, Any, T]) -> T:
    try:
        return await coroutine
    except SystemExit as left:
        raise RuntimeError(f"{coroutine.__qualname__} called sys.exit({left.code!r})") from left


class TaskHandle(Handle[T]):
    """A member that is a task on the scope's loop."""

    __slots__ = ("_coroutine", "_starter")

    def __init__(
        self,
        owner: ScopeOwner,
        name: str,
        coroutine: Coroutine[Any, Any, T] | None,
        scope: object = None,
        *,
        adopted: bool = False,
        starter: CancelClaim | None = None,
    ) -> None:
        super().__init__(owner, name, adopted, scope)
        self._coroutine = coroutine
        self._starter = None if starter is None else weakref.ref(starter)

    def starter(self) -> CancelClaim | None:
        """Return the claim inside which an adopted task was started; None if unknown or freed."""
        return None if self._starter is None else self._starter()

    def start(self) -> None:
        """Create the task. Call this on the scope's loop, after the member was added to the scope."""
        coroutine, self._coroutine = self._coroutine, None
        assert coroutine is not None
        if not self.owner.admits(self):
            coroutine.close()
            self._finish(None, self.stop_error("its scope was stopped before it began"))
            return
        assert self.started_in is not None
        try:
            task = self.owner.make_task(coroutine, self.name, self.started_in)
        except BaseException as error:
            coroutine.close()
            self._finish(None, error)
            raise
        self.attach(task)

    def attach(self, task: asyncio.Task[T], guarded: Coroutine[Any, Any, T] | None = None) -> None:
        """Watch the task until it is done. Call this on the scope's loop.

        Parameters:
            task: task to watch, which may already be done.
            guarded: coroutine of foreign code, if the task runs that coroutine in the wrapper of `without_exit`.
        """
        self._coroutine = guarded
        self.task = task
        if task.done():
            self._on_done(task)
            return
        task.add_done_callback(self._on_done, context=self.started_in)
        if self.owner.interrupt.triggered and not self.adopted:
            self.owner.ask_late(self)

    def _on_done(self, task: asyncio.Task[T]) -> None:
        self.task = None
        if self.adopted:
            # Foreign code owns it: the task keeps its result and error, and this handle has no waiter.
            coroutine, self._coroutine = self._coroutine, None
            if coroutine is not None:
                coroutine.close()  # no-op unless the task was cancelled before its first step
            self.settle(None, None)
            self.owner.discard(self, None)
            return
        if task.cancelled():
            self._finish(None, self.stop_error("its task was cancelled"))
            return
        error = task.exception()
        if self.settle(None if error is not None else task.result(), error, self.owner.loop):
            self.owner.discard(self, error)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if self.settle(result, error):
            self.owner.discard(self, error)

    def listen_to(self, interrupt: Interrupt) -> Registration | None:
        """Make ``interrupt`` the task's current interrupt, and cancel the task when the interrupt is triggered."""
        context = self.started_in
        if context is None:
            return None
        try:
            context.run(interrupt.make_current)
        except RuntimeError:
            # The member itself asks: its context is the current one.
            if current_claim.get() is self:
                interrupt.make_current()
        return interrupt.on_trigger(self._own_interrupt, loop=self.owner.loop)

    def _own_interrupt(self, _: Cause) -> None:
        self.deliver()

    def _take_name(self) -> None:
        """Use the name that foreign code gave the task, which is set only after the task was created."""
        if self.adopted and self.task is not None and not self.task.get_name().startswith("Task-"):
            self.name = self.task.get_name()

    def ask(self) -> None:
        """Cancel the task, once."""
        self._take_name()
        self.deliver()

    def ask_again(self) -> None:
        """Cancel the task again."""
        self.redeliver()

    def abandon(self) -> Abandoned:
        """Abandon the task, ignore its later result, and return a record of the task."""
        self._take_name()
        stack = task_stack(self.task)[0 if self._coroutine is None else 1 :]  # without Holdfast's own wrapper frame
        self.settle(None, self.stop_error("it did not end and was abandoned"))
        return Abandoned(kind="task", name=self.name, stack=stack)

    def snapshot(self) -> Member:
        """Return a snapshot of the member."""
        self._take_name()
        state = "starting" if self.task is None else "stopping" if self.cancels else "running"
        return Member(kind="task", name=self.name, started_at=self.started_at, state=state, adopted=self.adopted)
