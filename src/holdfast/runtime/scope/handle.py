"""Members of a scope: their snapshots, their handles, and the interface that handles need from their owner.

A handle uses its scope only through `ScopeOwner`, and a stop uses members only through `Handle`. Each kind of member
defines how it is asked to stop, forced and abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from holdfast.clock import system_clock
from holdfast.errors import Interrupted
from holdfast.protocol.stopping import Abandoned, Cause
from holdfast.runtime.interrupt.interrupt import Interrupt
from holdfast.runtime.scope.cancel_claim import CancelClaim

if TYPE_CHECKING:
    from holdfast.runtime.interrupt.interrupt import Registration
    from holdfast.runtime.processes.tree import TreeResult
    from holdfast.runtime.thread_pool import ThreadPool

__all__ = ["Handle", "LivenessCheck", "Member", "MemberKind", "ScopeOwner", "unowned", "wake"]

T = TypeVar("T")

MemberKind = Literal["task", "thread", "process", "scope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A snapshot of one member of a scope.

    Parameters:
        kind: task, thread, process or scope.
        name: display name.
        started_at: start time on the monotonic clock, in seconds; 0 if unknown.
        state: ``starting``, ``running``, ``stopping``, ``unowned`` for a thread that foreign code started by itself, or
            ``abandoned`` for a member that a stop gave up and that still runs.
        pid: pid of a process.
        thread: name of the thread that runs it, if any.
        adopted: whether foreign code started it in the scope.
    """

    kind: MemberKind
    name: str
    started_at: float
    state: str
    pid: int | None = None
    thread: str | None = None
    adopted: bool = False


class LivenessCheck(Protocol):
    """A thread, or a call that runs on one."""

    def is_alive(self) -> bool:
        """Whether it has begun and not ended. Callable from any thread."""
        ...


class ScopeOwner(Protocol):
    """Interface that a handle needs from the scope that owns it.

    Call its methods on the scope's loop, unless they are documented as callable from any thread.
    """

    name: str
    interrupt: Interrupt
    gate: threading.RLock
    """Lock held while members enter and leave, and while a handle creates its own interrupt."""
    loop: asyncio.AbstractEventLoop | None
    owner: str
    sharer: str

    @property
    def threads(self) -> ThreadPool:
        """Pool for its calls."""
        ...

    def open_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that it was opened on. Raises `ScopeClosed` if it was not opened."""
        ...

    def on_loop(self, fn: Callable[..., object], *values: Any) -> None:
        """Run ``fn`` on the scope's loop: at once if called there, otherwise soon. Callable from any thread."""
        ...

    def adopt(self, member: Handle[Any], /) -> bool:
        """Add something that foreign code starts; False if it is too late even for cleanup. Callable from any
        thread."""
        ...

    def admits(self, member: Handle[Any], /) -> bool:
        """Return whether an added member may start."""
        ...

    def ask_late(self, member: Handle[Any], /) -> None:
        """Ask a member that started while the scope was being interrupted to stop."""
        ...

    def leave_behind(self, member: Handle[Any], /) -> None:
        """Stop waiting for this member; it ends with the scope."""
        ...

    def discard(self, member: Handle[Any], error: BaseException | None, /) -> None:
        """Remove a member that has ended; never raises."""
        ...

    def make_task(
        self, coroutine: Coroutine[Any, Any, T], name: str, context: contextvars.Context, /
    ) -> asyncio.Task[T]:
        """Create the task of a member."""
        ...

    def make_own_task(self, coroutine: Coroutine[Any, Any, T], name: str, /) -> asyncio.Task[T]:
        """Create a task for the scope itself, which no stop cancels. The caller keeps a reference."""
        ...

    @property
    def grace_left_s(self) -> float:
        """Remaining grace period of the running stop; 0 without one."""
        ...

    @property
    def asked_at_ticks(self) -> float:
        """Start of the running stop, in clock ticks since boot; 0 without one."""
        ...

    def report_unproven(self, result: TreeResult, /) -> None:
        """Record a process tree that could not be proven dead, for the receipt."""
        ...


class Handle(CancelClaim, Generic[T]):
    """Result of ``Scope.spawn``: await it for the member's result.

    You can await it from any task on any loop; cancelling the waiter does not cancel the member. If the member was
    interrupted or cancelled, awaiting it raises `Interrupted`.

    The methods after `stop_error` are for the scope and its stop.
    """

    __slots__ = (
        "_done",
        "_error",
        "_interrupt",
        "_registration",
        "_result",
        "_waiters",
        "adopted",
        "name",
        "started_at",
    )

    kind: MemberKind = "task"
    is_foreign_program: ClassVar[bool] = False
    owner: ScopeOwner

    def __init__(self, owner: ScopeOwner, name: str, adopted: bool = False, scope: object = None) -> None:
        # Flat, without super(): one is created per task.
        self.owner = owner
        self.scope = scope
        self.task = None
        self.outer = None
        self.inner = None
        self.cancels = 0
        self.live = True
        self.name = name
        self.adopted = adopted
        self.started_at = time.monotonic()
        self.started_in = None
        self._interrupt: Interrupt | None = None
        self._registration: Registration | None = None
        self._done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}

    def __repr__(self) -> str:
        state = "done" if self._done else "running"
        return f"<Handle {self.kind} {self.name!r} of {self.owner.name!r} {state}>"

    @property
    def due(self) -> bool:
        """Whether this member should end."""
        own = self._interrupt
        return self.live and (self.owner.interrupt.triggered or (own is not None and own.triggered))

    @property
    def interrupt(self) -> Interrupt:
        """Interrupt of this member alone; a child of its scope's interrupt, created on first use."""
        if self._interrupt is None:
            with self.owner.gate:
                if self._interrupt is None:
                    interrupt = Interrupt(name=self.name, parent=self.owner.interrupt)
                    self._registration = self.listen_to(interrupt)
                    self._interrupt = interrupt
        return self._interrupt

    def listen_to(self, interrupt: Interrupt) -> Registration | None:
        """Make the member notice its own interrupt; return the registration to close at its end, if any."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether it has ended or was abandoned."""
        return self._done

    def result(self) -> T:
        """Return its result, or raise its error.

        Raises:
            Interrupted: it was interrupted, cancelled or abandoned.
            asyncio.InvalidStateError: it has not ended.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.name!r} is not done; await the handle")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever there is no error

    def exception(self) -> BaseException | None:
        """Return the exception it raised, or None.

        Raises:
            asyncio.InvalidStateError: it has not ended.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.name!r} is not done; await the handle")
        return self._error

    def when_done(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` once on the scope's loop, soon after the member has ended or was abandoned, even if it never
        started. Callable from any thread; ``fn`` runs outside any scope.
        """
        self.owner.on_loop(self._notify_when_done, fn)

    def _notify_when_done(self, fn: Callable[[], object]) -> None:
        future: asyncio.Future[None] = self.owner.open_loop().create_future()
        future.add_done_callback(lambda _: fn(), context=contextvars.Context())
        self._waiters[future] = None
        if self._done:
            wake((future,))

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

    def settle(
        self, result: T | None, error: BaseException | None, here: asyncio.AbstractEventLoop | None = None
    ) -> bool:
        """Record the end and wake all waiters; False if it had already ended. ``here``: the running loop, if known."""
        if self._done:
            return False
        self._result = result
        self._error = error
        self._done = True
        self.live = False
        self.started_in = None
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._waiters:
            wake(self._waiters.copy(), here)
        return True

    def stop_error(self, reason: str) -> Interrupted:
        """Return the error of a member that ended without a result."""
        own = self._interrupt
        cause = (own.cause if own is not None else None) or self.owner.interrupt.cause
        return Interrupted(cause or Cause(kind="stop", reason=reason, origin=self.name, at=system_clock.now()))

    def starter(self) -> CancelClaim | None:
        """Return the claim inside which foreign code started it, if known and still in existence."""
        return None

    def ask(self) -> None:
        """Ask the member to stop: the scope was interrupted."""
        raise NotImplementedError

    def ask_again(self) -> None:
        """Ask the member to stop again: the grace period is over and the member is still there."""
        raise NotImplementedError

    def force(self) -> None:
        """End the member by force, because the grace period is over. Does nothing for a kind that cannot be forced."""

    def running(self) -> asyncio.Task[T] | LivenessCheck | None:
        """Return the task or thread that runs it now."""
        return self.task

    def end_if_over(self) -> bool:
        """End now if the work is over but the loop has not been notified yet; return whether that was so. On the loop
        only."""
        return False

    def abandon(self) -> Abandoned | None:
        """Abandon the member; its later result does not count. Return its record; None if `unproven` reports it."""
        raise NotImplementedError

    def unproven(self) -> TreeResult | None:
        """Return what is known about the processes of an abandoned member; None if it has none."""
        return None

    def snapshot(self) -> Member:
        """Return a snapshot of the member. Callable from any thread."""
        raise NotImplementedError


def unowned(thread: threading.Thread) -> Member:
    """Return a member for a thread that foreign code started in a scope: known, but not owned."""
    return Member(kind="thread", name=thread.name, started_at=0.0, state="unowned", thread=thread.name, adopted=True)


def wake(futures: Iterable[asyncio.Future[None]], here: asyncio.AbstractEventLoop | None = None) -> None:
    """Release the waiters of these futures, each on its own loop. ``here``: the running loop, if known."""
    here = here or asyncio._get_running_loop()
    for future in futures:
        loop = future.get_loop()
        if loop is here:
            if not future.done():
                future.set_result(None)
        else:
            with contextlib.suppress(RuntimeError):  # that loop is closed and has no waiters any more
                loop.call_soon_threadsafe(_release, future)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
