"""Members of a scope: snapshots of members, handles, and the interface that handles need from the owning scope.

A handle uses its scope only through `ScopeOwner`, and a stop uses members only through `Handle`. Each subclass of
`Handle` defines how its kind of member is asked to stop, is forced to end and is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
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
        kind: kind of the member: ``task``, ``thread``, ``process`` or ``scope``.
        name: display name.
        started_at: start time on the monotonic clock, in seconds; 0 if unknown.
        state: ``starting``, ``running``, ``stopping``, ``unowned`` for a thread that foreign code started by itself, or
            ``abandoned`` for a member that a stop abandoned and that still runs.
        pid: process id, if the member is a process.
        thread: name of the thread that runs the member, if any.
        adopted: whether foreign code started the member in the scope.
        count_processes: for a program, a function that returns the current number of its processes, its descendants
            included, and stops counting at the given limit; otherwise None. Callable from any thread.
    """

    kind: MemberKind
    name: str
    started_at: float
    state: str
    pid: int | None = None
    thread: str | None = None
    adopted: bool = False
    count_processes: Callable[[int], int] | None = field(default=None, compare=False, repr=False)


class LivenessCheck(Protocol):
    """A thread, or a call that runs on a thread."""

    def is_alive(self) -> bool:
        """Return whether the thread or call has begun and not yet ended. Callable from any thread."""
        ...


class ScopeOwner(Protocol):
    """Interface that a handle needs from the scope that owns it.

    Call a method on the scope's loop, unless its description allows calls from any thread.
    """

    name: str
    interrupt: Interrupt
    gate: threading.RLock
    """Lock held while a member is added, while the scope's phase changes, and while a handle creates its own interrupt.

    Members that have ended are removed on the loop, without the lock.
    """
    loop: asyncio.AbstractEventLoop | None
    owner: str
    sharer: str

    @property
    def threads(self) -> ThreadPool:
        """Thread pool that runs the scope's calls."""
        ...

    def open_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that the scope was opened on. Raises `ScopeClosed` if the scope was not opened."""
        ...

    def on_loop(self, fn: Callable[..., object], *values: Any) -> None:
        """Run ``fn`` on the scope's loop: at once if called on that loop, otherwise soon. Callable from any thread."""
        ...

    def adopt(self, member: Handle[Any], /) -> bool:
        """Add a member that foreign code starts; return False if the grace period or the scope has ended.

        Callable from any thread.
        """
        ...

    def admits(self, member: Handle[Any], /) -> bool:
        """Return whether a member that was added may start now."""
        ...

    def ask_late(self, member: Handle[Any], /) -> None:
        """Ask a member to stop, because the scope was interrupted while the member was starting."""
        ...

    def leave_behind(self, member: Handle[Any], /) -> None:
        """Do not wait for this member any longer; the member is stopped when the scope ends."""
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
        """Create a task for the scope itself, which no stop cancels. The caller must keep a reference to the task."""
        ...

    @property
    def grace_left_s(self) -> float:
        """Remaining grace period of the running stop, in seconds; 0 if no stop is running."""
        ...

    @property
    def asked_at_ticks(self) -> float:
        """Start of the running stop, in clock ticks since boot; 0 if no stop is running."""
        ...

    def report_unproven(self, result: TreeResult, /) -> None:
        """Record, for the receipt, the result of a process tree that could not be proven dead."""
        ...


class Handle(CancelClaim, Generic[T]):
    """Handle of a member, returned by ``Scope.spawn``: await the handle to get the member's result.

    A handle can be awaited by any task on any loop. Cancelling the awaiting task does not cancel the member. If the
    member was interrupted or cancelled, awaiting the handle raises `Interrupted`.

    The methods from `stop_error` onwards are called only by the scope and its stop.
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
    processes_ended: int = 0
    """Number of processes that ended with the member."""
    was_killed: bool = False
    """Whether processes of the member had to be killed."""
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
    def is_descendant(self) -> bool:
        """Whether the member lost its parent, a program of the scope, to the stop: no program of its own."""
        return False

    @property
    def due(self) -> bool:
        """Whether this member should end."""
        own = self._interrupt
        return self.live and (self.owner.interrupt.triggered or (own is not None and own.triggered))

    @property
    def interrupt(self) -> Interrupt:
        """Interrupt of this member alone: a child of the scope's interrupt, created on first use."""
        if self._interrupt is None:
            with self.owner.gate:
                if self._interrupt is None:
                    interrupt = Interrupt(name=self.name, parent=self.owner.interrupt)
                    self._registration = self.listen_to(interrupt)
                    self._interrupt = interrupt
        return self._interrupt

    def listen_to(self, interrupt: Interrupt) -> Registration | None:
        """Make the member respond to its own interrupt; return the registration to close when the member ends."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return whether the member has ended or was abandoned."""
        return self._done

    def result(self) -> T:
        """Return the member's result, or raise the member's error.

        Raises:
            Interrupted: the member was interrupted, cancelled or abandoned.
            asyncio.InvalidStateError: the member has not ended.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.name!r} is not done; await the handle")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set whenever there is no error

    def exception(self) -> BaseException | None:
        """Return the exception that `result` would raise, or None if the member ended without an error.

        Raises:
            asyncio.InvalidStateError: the member has not ended.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.name!r} is not done; await the handle")
        return self._error

    def when_done(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` once on the scope's loop, soon after the member has ended or was abandoned.

        ``fn`` is called even if the member never started, and runs outside any scope. Callable from any thread.
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
        """Record the member's end and wake all waiters; return False if the end was already recorded.

        Parameters:
            result: result of the member.
            error: error of the member; None if it ended without an error.
            here: running loop, if known.
        """
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
        """Return an `Interrupted` for a member that ended without a result; ``reason`` is used if no cause is known."""
        own = self._interrupt
        cause = (own.cause if own is not None else None) or self.owner.interrupt.cause
        return Interrupted(cause or Cause(kind="stop", reason=reason, origin=self.name, at=system_clock.now()))

    def starter(self) -> CancelClaim | None:
        """Return the claim inside which foreign code started the member; None if unknown or freed."""
        return None

    def ask(self) -> None:
        """Ask the member to stop, because the scope was interrupted."""
        raise NotImplementedError

    def ask_again(self) -> None:
        """Ask the member to stop a second time, because it has not ended within the grace period."""
        raise NotImplementedError

    def overdue(self, grace: str) -> str:
        """Return in words why the member had to be forced, after a grace period such as ``5 s``."""
        return f"still running {grace} after the stop began"

    def force(self) -> None:
        """End the member by force, because the grace period is over. By default, this does nothing."""

    def running(self) -> asyncio.Task[T] | LivenessCheck | None:
        """Return the task or thread that runs the member now, if any."""
        return self.task

    def end_if_over(self) -> bool:
        """Record the end of a member whose work is over but whose end the loop has not yet noticed.

        Return whether the member was in this state. Call this method on the scope's loop only.
        """
        return False

    def abandon(self) -> Abandoned | None:
        """Abandon the member, and ignore its later result.

        Return a record of the abandoned member, or None if `unproven` reports it instead.
        """
        raise NotImplementedError

    def unproven(self) -> TreeResult | None:
        """Return the known state of an abandoned member's processes; None if the member has no processes."""
        return None

    def snapshot(self) -> Member:
        """Return a snapshot of the member. Callable from any thread."""
        raise NotImplementedError


def unowned(thread: threading.Thread) -> Member:
    """Return a snapshot of a thread that foreign code started in a scope and that the scope does not own."""
    return Member(kind="thread", name=thread.name, started_at=0.0, state="unowned", thread=thread.name, adopted=True)


def wake(futures: Iterable[asyncio.Future[None]], here: asyncio.AbstractEventLoop | None = None) -> None:
    """Resolve each future on its own loop, which wakes the task that waits for it.

    All futures of a loop are resolved in one iteration of it: if each were resolved by a call of its own, this thread
    could pause between two of them, and a task could end many iterations of its loop before another one is woken.

    Parameters:
        futures: futures to resolve.
        here: running loop, if known.
    """
    here = here or asyncio._get_running_loop()
    elsewhere: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in futures:
        loop = future.get_loop()
        if loop is not here:
            elsewhere.setdefault(loop, []).append(future)
        elif not future.done():
            future.set_result(None)
    for loop, waiting in elsewhere.items():
        with contextlib.suppress(RuntimeError):  # that loop is closed and has no waiters any more
            loop.call_soon_threadsafe(_release, waiting)


def _release(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
