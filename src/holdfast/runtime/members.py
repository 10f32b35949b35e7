"""What a scope owns: the handles of its tasks and threads, its body, and the context that says where code runs.

Invariants
- A member is entered in its scope before what it stands for can be seen by anybody, and leaves it once it is done.
- Of the enclosures of one task (its handle, then the bodies of the scopes it entered, outermost first) at most one
  owes the task a native cancellation at a time: the outermost one that was triggered delivers, and an inner one that
  has delivered before hands its cancellation on when it is left.
- Native cancellation is delivered on the loop's thread only, between steps: never to a task that runs at that moment.
  So a delivered cancellation always arrives at an await of the body, and none is left pending when the body ends.
- What is delivered is counted, and exactly that count is taken back when the body is left.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from holdfast.errors import Interrupted
from holdfast.protocol.stopping import Abandoned, Cause
from holdfast.runtime.carried import Carried
from holdfast.runtime.interrupt import Interrupt
from holdfast.runtime.shield import shielded_by

if TYPE_CHECKING:
    from holdfast.runtime.interrupt import Registration
    from holdfast.runtime.scope import Scope
    from holdfast.runtime.threads import Call

__all__ = ["Body", "Enclosure", "Handle", "Member", "MemberKind", "TaskHandle", "ThreadHandle", "current_place"]

T = TypeVar("T")

_RESUMED_S = 0.05
"""How often to look whether a generator is iterated further, in seconds."""

MemberKind = Literal["task", "thread", "process", "scope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A snapshot of one thing that a scope owns.

    Parameters:
        kind: task, thread, process or scope.
        name: its name.
        started_at: when it was started, on the monotonic clock, in seconds; 0 when that is not known.
        state: ``starting``, ``running``, ``stopping``, or ``unowned`` for a thread that foreign code started by itself.
        pid: of a process.
        thread: the name of the thread that runs it, where one does.
        adopted: whether foreign code started it inside the scope.
    """

    kind: MemberKind
    name: str
    started_at: float
    state: str
    pid: int | None = None
    thread: str | None = None
    adopted: bool = False


class Enclosure:
    """One claim on a task: the handle it was started with, or the body of a scope that it entered."""

    __slots__ = ("cancels", "inner", "live", "outer", "scope", "task")

    def __init__(self, scope: Scope, task: asyncio.Task[Any] | None, outer: Enclosure | None) -> None:
        self.scope = scope
        self.task = task
        self.outer = outer
        self.inner: Enclosure | None = None
        self.cancels = 0
        self.live = True

    @property
    def due(self) -> bool:
        """Whether this enclosure wants its task cancelled."""
        return self.live and self.scope.interrupt.triggered

    def deliver(self) -> None:
        """Cancel the task natively, once, unless another enclosure of it does or has done so."""
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
        """Cancel the task again: it swallowed what was delivered and the grace is over."""
        task = self.task
        if not self.live or task is None or task.done():
            return
        inner = self.inner
        while inner is not None:
            if not inner.live:
                return
            inner = inner.inner
        shield = shielded_by(task, self.started_in)
        if shield is not None:
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

    @property
    def started_in(self) -> contextvars.Context | None:
        """The context that the task was started in, where it is known."""
        return None


class Body(Enclosure):
    """The body of ``async with scope``, in the task that entered it."""

    __slots__ = ("cancelling_before", "generator", "name")

    def __init__(self, scope: Scope, task: asyncio.Task[Any], outer: Enclosure | None) -> None:
        super().__init__(scope, task, outer)
        self.name = task.get_name()
        self.generator: FrameType | None = None
        self.cancelling_before = task.cancelling()
        if outer is not None:
            outer.inner = self

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if self.generator is not None and rests_at_yield(self.generator):
            # The task is in the code that iterates over the generator, which is not ours to cancel.
            task.get_loop().call_later(_RESUMED_S, self.deliver, context=contextvars.Context())
            return
        super()._cancel(task)

    def leave(self) -> None:
        """The body has ended: nothing is delivered to it any more."""
        self.live = False
        self.generator = None

    def settle(self) -> bool:
        """Take back what was delivered, at the very end; True if a cancellation that is not ours is left."""
        task = self.task
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
        return task.cancelling() > self.cancelling_before

    def abandoned(self) -> Abandoned:
        """Names the body that did not end."""
        return Abandoned(kind="task", name=self.name, stack=task_stack(self.task))


current_place: Carried[Enclosure] = Carried("holdfast_place")


class Handle(Enclosure, Generic[T]):
    """What ``Scope.spawn`` returns: await it for the result.

    Awaiting is safe from any task on any loop; cancelling the waiter does not cancel the member. A member that was
    interrupted or cancelled raises `Interrupted` in whoever awaits it.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_done",
        "_error",
        "_interrupt",
        "_registration",
        "_result",
        "_waiters",
        "adopted",
        "depth",
        "name",
        "started_at",
    )

    kind: MemberKind = "task"

    def __init__(self, scope: Scope, name: str, *, adopted: bool = False, depth: int = 0) -> None:
        # Flat, without super(): one is made for each task.
        self.scope = scope
        self.task = None
        self.outer = None
        self.inner = None
        self.cancels = 0
        self.live = True
        self.name = name
        self.adopted = adopted
        self.depth = depth
        self.started_at = time.monotonic()
        self._context: contextvars.Context | None = None
        self._interrupt: Interrupt | None = None
        self._registration: Registration | None = None
        self._done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}

    def __repr__(self) -> str:
        state = "done" if self._done else "running"
        return f"<Handle {self.kind} {self.name!r} of {self.scope.name!r} {state}>"

    @property
    def due(self) -> bool:
        """Whether this member shall end."""
        own = self._interrupt
        return self.live and (self.scope.interrupt.triggered or (own is not None and own.triggered))

    @property
    def started_in(self) -> contextvars.Context | None:
        """The context that it was started in."""
        return self._context

    @property
    def interrupt(self) -> Interrupt:
        """Interrupts this member alone; a child of its scope's interrupt, made when first asked for."""
        if self._interrupt is None:
            self._interrupt = self.scope.interrupt.child(name=self.name)
            self._watch(self._interrupt)
        return self._interrupt

    def _watch(self, interrupt: Interrupt) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        """Whether it has ended, or was abandoned."""
        return self._done

    def result(self) -> T:
        """What it returned; raises what it raised.

        Raises:
            Interrupted: it was interrupted, cancelled or abandoned.
            asyncio.InvalidStateError: it is not done.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.name!r} is not done; await the handle")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever there is no error

    def exception(self) -> BaseException | None:
        """What it raised, or None.

        Raises:
            asyncio.InvalidStateError: it is not done.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.name!r} is not done; await the handle")
        return self._error

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[future] = None
            try:
                if not self._done:
                    yield from future
            finally:
                self._waiters.pop(future, None)
        return self.result()

    def _settle(self, result: T | None, error: BaseException | None) -> bool:
        """Record the end and wake who awaits it; False if it had ended before."""
        if self._done:
            return False
        self._result = result
        self._error = error
        self._done = True
        self.live = False
        self._context = None
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._waiters:
            wake(list(self._waiters))
        return True

    def _stopped(self, reason: str) -> Interrupted:
        """The error of a member that ended without a result."""
        own = self._interrupt
        cause = (own.cause if own is not None else None) or self.scope.interrupt.cause
        return Interrupted(cause or Cause(kind="stop", reason=reason, origin=self.name, at=time.time()))

    def _ask(self) -> None:
        """The scope was interrupted: tell the member."""
        raise NotImplementedError

    def _press(self) -> None:
        """The grace is over and the member is still there: tell it again."""
        raise NotImplementedError

    def _force(self) -> None:
        """The grace is over: do at once what needs no consent."""

    def _abandon(self) -> Abandoned | None:
        """Give the member up; what it still returns does not count."""
        raise NotImplementedError

    def _snapshot(self) -> Member:
        raise NotImplementedError


class TaskHandle(Handle[T]):
    """A member that is a task on the scope's loop."""

    __slots__ = ("_coroutine",)

    def __init__(
        self,
        scope: Scope,
        name: str,
        coroutine: Coroutine[Any, Any, T] | None,
        *,
        adopted: bool = False,
        depth: int = 0,
    ) -> None:
        super().__init__(scope, name, adopted=adopted, depth=depth)
        self._coroutine = coroutine

    def _start(self) -> None:
        """Make the task. On the scope's loop, after the member was entered."""
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
        if self.due:
            self.scope._tell(self)

    def _on_done(self, task: asyncio.Task[T]) -> None:
        self.task = None
        if self.adopted:
            # Its owner is foreign code: the task keeps its result and error, and nobody awaits this handle.
            self._settle(None, None)
            self.scope._discard(self, None)
            return
        if task.cancelled():
            self._finish(None, self._stopped("its task was cancelled"))
            return
        error = task.exception()
        self._finish(None if error is not None else task.result(), error)

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

    def _ask(self) -> None:
        self.deliver()

    def _press(self) -> None:
        self.redeliver()

    def _abandon(self) -> Abandoned:
        stack = task_stack(self.task)
        self._settle(None, self._stopped("it did not end and was abandoned"))
        return Abandoned(kind="task", name=self.name, stack=stack)

    def _snapshot(self) -> Member:
        state = "starting" if self.task is None else "stopping" if self.cancels else "running"
        return Member(kind="task", name=self.name, started_at=self.started_at, state=state, adopted=self.adopted)


class ThreadHandle(Handle[T]):
    """A member that is a call on a thread."""

    __slots__ = ("call",)

    kind: MemberKind = "thread"

    def __init__(self, scope: Scope, name: str, *, adopted: bool = False) -> None:
        super().__init__(scope, name, adopted=adopted)
        self.call: Call | None = None

    def _start(self, fn: Callable[..., T], values: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the call to the pool. From any thread, after the member was entered."""
        scope = self.scope
        assert self._context is not None
        self._context.run(self.interrupt.make_current)
        self.call = scope._threads.submit(
            fn,
            *values,
            kwargs=kwargs,
            context=self._context,
            on_done=self._on_done,
            name=self.name,
            owner=scope.owner,
        )
        if self._done:
            self.call = None
        elif self.due:
            self.scope._on_loop(self._ask)

    def _on_done(self, result: T | None, error: BaseException | None) -> None:
        """The call ended, on its thread."""
        self.scope._on_loop(self._finish, result, error)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = self._stopped("its call was cancelled")
        if self._settle(result, error):
            self.scope._discard(self, None if self.adopted else error)
            self.call = None

    def _watch(self, interrupt: Interrupt) -> None:
        """A thread looks at its interrupt itself."""

    def _ask(self) -> None:
        call = self.call
        if call is not None and call.cancel():
            self._finish(None, self._stopped("its scope was stopped before it began"))

    def _press(self) -> None:
        self._ask()

    def _abandon(self) -> Abandoned:
        call = self.call
        stack: tuple[str, ...] = ()
        if call is not None:
            stack = call.stack()
            call.abandon()
        self._settle(None, self._stopped("it did not end and was abandoned"))
        return Abandoned(kind="thread", name=self.name, stack=stack)

    def _snapshot(self) -> Member:
        thread = self.call.thread if self.call is not None else None
        state = "starting" if thread is None else "stopping" if self.due else "running"
        return Member(
            kind="thread",
            name=self.name,
            started_at=self.started_at,
            state=state,
            thread=None if thread is None else thread.name,
            adopted=self.adopted,
        )


def unowned(thread: threading.Thread) -> Member:
    """A thread that foreign code started inside a scope by itself: it is known, but not owned."""
    return Member(kind="thread", name=thread.name, started_at=0.0, state="unowned", thread=thread.name, adopted=True)


def wake(futures: list[asyncio.Future[None]]) -> None:
    """Let those go that wait on these futures, on whatever loop each lives."""
    here = asyncio._get_running_loop()
    for future in futures:
        loop = future.get_loop()
        if loop is here:
            _release(future)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(_release, future)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def task_stack(task: asyncio.Task[Any] | None) -> tuple[str, ...]:
    """Where a suspended task stands, outermost frame first."""
    if task is None:
        return ()
    lines = []
    for frame in task.get_stack():
        entry = traceback.extract_stack(frame, limit=1)[0]
        lines.append(f"{entry.filename}:{entry.lineno} in {entry.name}")
    return tuple(lines)


def rests_at_yield(generator: FrameType) -> bool:
    """Whether a generator waits for being iterated further, rather than for something that it awaits."""
    if generator.f_back is not None:
        return False
    # What it resumes with is the instruction after the one it rests at: RESUME 1 after a yield, 3 after an await.
    return generator.f_code.co_code[generator.f_lasti + 3] & 3 == 1


def inside(place: Enclosure, interrupt: Interrupt) -> contextvars.Context:
    """A copy of the current context in which code runs at ``place``."""
    context = contextvars.copy_context()
    context.run(_enter, place, interrupt)
    return context


def _enter(place: Enclosure, interrupt: Interrupt) -> None:
    current_place.variable.set(place)
    interrupt.make_current()
