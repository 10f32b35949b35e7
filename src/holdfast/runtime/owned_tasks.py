"""Tasks as members of a scope: spawned ones, whose errors reach it, and adopted ones, which foreign code owns."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from holdfast.protocol.stopping import Abandoned, Cause
from holdfast.runtime.enclosure import Enclosure, current_place, task_stack
from holdfast.runtime.interrupt import Interrupt
from holdfast.runtime.members import Handle, Member

if TYPE_CHECKING:
    from holdfast.runtime.membership import Membership

__all__ = ["TaskHandle", "without_exit"]

T = TypeVar("T")


def without_exit(coroutine: CoroutineType[Any, Any, T]) -> CoroutineType[Any, Any, T]:
    """Wrap a coroutine of foreign code so that `SystemExit` becomes an error of the task and does not end the loop.

    If the wrapper never begins, the caller must close ``coroutine``.
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
        scope: Membership,
        name: str,
        coroutine: Coroutine[Any, Any, T] | None,
        *,
        adopted: bool = False,
        starter: Enclosure | None = None,
    ) -> None:
        super().__init__(scope, name, adopted)
        self._coroutine = coroutine
        self._starter = None if starter is None else weakref.ref(starter)

    def starter(self) -> Enclosure | None:
        """Return where an adopted task was started, if that still exists."""
        return None if self._starter is None else self._starter()

    def _start(self) -> None:
        """Create the task. On the scope's loop, after the member was entered."""
        coroutine, self._coroutine = self._coroutine, None
        assert coroutine is not None
        if not self.scope._admits(self):
            coroutine.close()
            self._finish(None, self._stopped("its scope was stopped before it began"))
            return
        assert self._context is not None
        try:
            task = self.scope._make_task(coroutine, self.name, self._context)
        except BaseException as error:
            coroutine.close()
            self._finish(None, error)
            raise
        self._attach(task)

    def _attach(self, task: asyncio.Task[T]) -> None:
        self.task = task
        if task.done():
            self._on_done(task)
            return
        task.add_done_callback(self._on_done, context=self._context)
        if self.scope.interrupt.triggered and not self.adopted:
            self.scope._tell(self)

    def _on_done(self, task: asyncio.Task[T]) -> None:
        self.task = None
        if self.adopted:
            # Foreign code owns it: the task keeps its result and error, and this handle has no waiter.
            coroutine, self._coroutine = self._coroutine, None
            if coroutine is not None:
                coroutine.close()  # no-op unless the task was cancelled before its first step
            self._settle(None, None)
            self.scope._discard(self, None)
            return
        if task.cancelled():
            self._finish(None, self._stopped("its task was cancelled"))
            return
        error = task.exception()
        if self._settle(None if error is not None else task.result(), error, self.scope._loop):
            self.scope._discard(self, error)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if self._settle(result, error):
            self.scope._discard(self, error)

    def _watch(self, interrupt: Interrupt) -> None:
        context = self._context
        if context is None:
            return
        try:
            context.run(interrupt.make_current)
        except RuntimeError:
            # The member itself asks: its context is the current one.
            if current_place.get() is self:
                interrupt.make_current()
        self._registration = interrupt.on_trigger(self._own_interrupt, loop=self.scope._loop)

    def _own_interrupt(self, _: Cause) -> None:
        self.deliver()

    def _take_name(self) -> None:
        """Take over the name that foreign code gives its task, which is set after the task was created."""
        if self.adopted and self.task is not None and not self.task.get_name().startswith("Task-"):
            self.name = self.task.get_name()

    def _ask(self) -> None:
        self._take_name()
        self.deliver()

    def _press(self) -> None:
        self.redeliver()

    def _abandon(self) -> Abandoned:
        self._take_name()
        stack = task_stack(self.task)[0 if self._coroutine is None else 1 :]  # without Holdfast's own wrapper frame
        self._settle(None, self._stopped("it did not end and was abandoned"))
        return Abandoned(kind="task", name=self.name, stack=stack)

    def _snapshot(self) -> Member:
        self._take_name()
        state = "starting" if self.task is None else "stopping" if self.cancels else "running"
        return Member(kind="task", name=self.name, started_at=self.started_at, state=state, adopted=self.adopted)
