"""State of a scope: its members, its phase and its closing.

`Scope` adds the methods that enter a scope and spawn work, and passes in the class of the stop, which this module uses
only through `RunningStop`. Handles use the state only through `ScopeOwner`.

Invariants
- While the scope is open, a member that it starts is added under the gate, a lock, before its task, thread or process
  is created. A stop and the close take the same lock, so every member is either seen by the stop or refused.
- The gate is held for a few instructions, never across an await, user code or the trigger of an interrupt.
- All other state is changed on the scope's loop only; other threads use `call_soon_threadsafe`.
- The scope closes once, after the body and all members have ended or were abandoned. Later output is ignored.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from holdfast.clock import system_clock
from holdfast.errors import Interrupted, ScopeClosed, format_error
from holdfast.protocol.stopping import Cause, CauseKind, StopReceipt
from holdfast.runtime.interrupt.interrupt import Interrupt, Registration
from holdfast.runtime.scope.abandoned import AbandonedMember
from holdfast.runtime.scope.closers import Closer, Closers
from holdfast.runtime.scope.handle import Handle, Member, unowned, wake
from holdfast.runtime.scope.process_handle import ForeignHandle, boot_ticks
from holdfast.runtime.scope.stop_times import StopTimes, Times
from holdfast.runtime.thread_pool import ThreadPool, shared_threads

if TYPE_CHECKING:
    from holdfast.runtime.processes.foreign_process import ForeignProcess
    from holdfast.runtime.processes.tree import TreeResult
    from holdfast.runtime.scope.cancel_claim import BodyClaim
    from holdfast.runtime.scope.deadline import Deadline
    from holdfast.runtime.scope.stop_port import RunningStop

__all__ = ["Phase", "ScopeState", "ScopeStatistics", "StartOwned"]

T = TypeVar("T")

Phase = Literal["open", "stopping", "closed"]


class StartOwned(Protocol):
    """Interface of ``start_owned``, a method of task factories that adopt tasks; creates a task that a scope owns."""

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T],
        name: str,
        context: contextvars.Context,
        /,
    ) -> asyncio.Task[T]:
        """Create the task."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeStatistics:
    """A snapshot of a scope: its state and the number of its members by kind.

    ``tasks``, ``threads``, ``processes`` and ``scopes`` include adopted members and unowned threads.
    """

    state: Phase
    tasks: int
    threads: int
    processes: int
    scopes: int
    adopted: int
    unowned: int


class ScopeState:
    """Members of a scope and its phase: the state that `Scope`, its handles and its stop share.

    Parameters:
        name, grace_s, abandon_after_s, threads, owner, sharer: parameters with the same meaning as those of `Scope`.
        parent: state of the scope that owns this one; None if no scope owns it.
        interrupt: interrupt of the scope.
        new_stop: callable that creates the stop of this scope.
    """

    __slots__ = (
        "__weakref__",
        "_closers",
        "_new_stop",
        "_registration",
        "_threads",
        "_unowned",
        "_waiters",
        "adopted",
        "body",
        "deadline",
        "ended_by_itself",
        "errors",
        "failed",
        "gate",
        "interrupt",
        "is_leaving",
        "is_over",
        "leftovers",
        "loop",
        "members",
        "name",
        "on_closed",
        "opened_at",
        "opened_ticks",
        "owner",
        "parent",
        "phase",
        "receipt",
        "sharer",
        "stopping",
        "survived",
        "times",
        "unproven_trees",
    )

    kind: Literal["scope"] = "scope"
    """Kind of the scope as a member of its parent."""

    def __init__(
        self,
        name: str,
        parent: ScopeState | None,
        interrupt: Interrupt,
        grace_s: float | None,
        abandon_after_s: float | None,
        threads: ThreadPool | None,
        owner: str | None,
        sharer: str | None,
        new_stop: Callable[[ScopeState], RunningStop],
    ) -> None:
        self.name = name
        self.parent = parent
        self.interrupt = interrupt
        self.times: StopTimes = StopTimes(grace_s, abandon_after_s, None if parent is None else parent.times)
        self.owner: str = owner if owner is not None else parent.owner if parent is not None else ""
        self.sharer: str = sharer if sharer is not None else parent.sharer if parent is not None else ""
        self.receipt: StopReceipt | None = None
        self.errors: list[BaseException] = []
        self.phase: Phase = "open"
        self.gate = threading.RLock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.opened_at = 0.0
        self.opened_ticks = 0.0
        self.members: dict[Handle[Any] | ScopeState, object] = {}
        """Members that the scope waits for. The value for a child's state is the child's `Scope`."""
        self.adopted: dict[Handle[Any], None] = {}
        """Members that the scope does not wait for, but stops when it ends."""
        self.survived: list[StopReceipt] = []
        """Receipts of child scopes that ended with survivors before any stop of this scope."""
        self.unproven_trees: tuple[TreeResult, ...] = ()
        """Results of process trees that could not be proven dead before any stop of this scope."""
        self.leftovers: list[AbandonedMember] = []
        self.body: BodyClaim | None = None
        self.deadline: Deadline | None = None
        self._closers: Closers | None = None
        self._registration: Registration | None = None
        self.is_leaving = False
        """Whether the scope closes when its last member has ended."""
        self.is_over = False
        self.failed = False
        self.ended_by_itself = False
        self.on_closed: Callable[[], object] | None = None
        self.stopping: RunningStop | None = None
        self._new_stop = new_stop
        self._threads: ThreadPool | None = (
            threads if threads is not None else parent._threads if parent is not None else None
        )
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._unowned: weakref.WeakSet[threading.Thread] | None = None

    @property
    def closed(self) -> bool:
        """Whether the scope has ended. Output, results and records that survivors produce later are ignored."""
        return self.phase == "closed"

    def snapshots(self) -> tuple[Member, ...]:
        """Return snapshots of the current members and of unowned threads."""
        owned = [member.snapshot() for member in (*self.members.copy(), *self.adopted.copy())]
        return (*owned, *map(unowned, self.unowned_threads()))

    @property
    def has_members(self) -> bool:
        """Whether `snapshots` returns any members."""
        return bool(self.members or self.adopted or (self._unowned is not None and self.unowned_threads()))

    def living_leftovers(self) -> tuple[AbandonedMember, ...]:
        """Return the members that still run after a stop of this scope or of a descendant abandoned them."""
        return tuple(leftover for leftover in self.leftovers if leftover.is_alive)

    def statistics(self) -> ScopeStatistics:
        """Return a snapshot of the scope."""
        kinds = [member.kind for member in self.snapshots()]
        return ScopeStatistics(
            state=self.phase,
            tasks=kinds.count("task"),
            threads=kinds.count("thread"),
            processes=kinds.count("process"),
            scopes=kinds.count("scope"),
            adopted=len(self.adopted),
            unowned=len(self.unowned_threads()),
        )

    def add_closer(self, fn: Callable[[], object]) -> Closer:
        """Call ``fn`` after the grace period; see `Scope.add_closer`."""
        closers = self._closers
        if closers is None:
            with self.gate:
                closers = self._closers = self._closers or Closers()
        closer = closers.add(fn, self.open_loop())
        stopping = self.stopping
        too_late = self.phase == "closed" or (stopping is not None and stopping.phase != "grace")
        if too_late and closers.take(closer):
            self.on_loop(closer.run)
        return closer

    def take_closers(self) -> list[Closer]:
        """Remove and return all closers, which the caller must run."""
        return [] if self._closers is None else self._closers.take_all()

    # -- open and close

    def open(self, scope: object) -> None:
        """Bind ``scope`` to the running loop and to its parent.

        Raises:
            Interrupted: the scope or one of its ancestors was already interrupted.
            ScopeClosed: the parent accepts no new members.
            RuntimeError: the scope was already opened, or no loop is running.
        """
        if self.loop is not None:
            raise RuntimeError(f"scope {self.name!r} is already open; create a new one")
        loop = asyncio.get_running_loop()
        self.interrupt.check()
        parent = self.parent
        if parent is not None:
            with parent.gate:
                parent.check_open()
                parent.members[self] = scope
        self.loop = loop
        self.opened_at = time.monotonic()
        self.opened_ticks = boot_ticks()
        self._registration = self.interrupt.on_trigger(self._on_interrupt, loop=loop)

    async def wait_closed(self) -> None:
        """Wait until the scope has closed. Callable from any loop."""
        while not self.is_over:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[future] = None
            try:
                if not self.is_over:
                    await future
            finally:
                self._waiters.pop(future, None)

    def late_receipt(self, reason: str, kind: CauseKind, cause: Cause | None) -> StopReceipt:
        """Return the receipt of a closed scope; if the scope ended without a stop, create an empty receipt."""
        with self.gate:
            if self.receipt is None:
                why = self.interrupt.cause or cause
                why = why or Cause(kind=kind, reason=reason, origin=self.name, at=system_clock.now())
                self.receipt = StopReceipt(scope=self.name, cause=why)
            return self.receipt

    # -- errors

    def fail(self, error: BaseException, name: str) -> None:
        """Record the error of a member or of the body, and interrupt the scope."""
        if not any(known is error for known in self.errors):  # the body awaited the member that raised
            self.errors.append(error)
        if self.interrupt.trigger(f"{name} failed: {format_error(error)}", kind="stop"):
            self.failed = True

    def failure(self) -> BaseException | None:
        """Return the recorded error, if any; if there are several errors, return an exception group."""
        if len(self.errors) > 1:
            return BaseExceptionGroup(f"several errors in scope {self.name!r}", self.errors)
        return self.errors[0] if self.errors else None

    def interrupted_by(self) -> Cause | None:
        """Return the cause of the scope's interrupt; None if it was not interrupted or had already ended by itself."""
        return self.interrupt.cause if not self.ended_by_itself else None

    # -- members

    def enter(self, member: Handle[Any]) -> None:
        """Add a member before its task, thread or process is created. Callable from any thread.

        Raises:
            ScopeClosed: the scope is stopping, closed or not yet open.
        """
        with self.gate:
            if self.phase != "open" or self.loop is None:
                self.check_open()
            self.members[member] = None

    def check_open(self) -> None:
        """Raise `ScopeClosed` if the scope accepts no new members. The caller holds the gate."""
        if self.loop is None:
            raise ScopeClosed(f"scope {self.name!r} is not open", hint="use 'async with' or open() first")
        if self.phase != "open":
            raise ScopeClosed(
                f"scope {self.name!r} is {self.phase} and starts no new work", hint="start the work in an open scope"
            )

    def admits(self, member: Handle[Any]) -> bool:
        """Return whether a member that was added may start now. Call this on the loop only."""
        return member in self.members and not self.interrupt.triggered

    def leave_behind(self, member: Handle[Any]) -> None:
        """Do not wait for this member any longer; it is stopped when the scope ends. Call this on the loop only."""
        with self.gate:
            if self.members.pop(member, member) is not member:
                self.adopted[member] = None
        self.close_if_empty()

    @property
    def grace_left_s(self) -> float:
        """Remaining grace period of the running stop, in seconds; 0 if no stop is running."""
        return 0.0 if self.stopping is None else self.stopping.grace_left_s

    @property
    def asked_at_ticks(self) -> float:
        """Start of the running stop, in clock ticks since boot; 0 if no stop is running."""
        return 0.0 if self.stopping is None else self.stopping.asked_at_ticks

    def report_unproven(self, result: TreeResult) -> None:
        """Record, for the receipt, the result of a process tree that could not be proven dead.

        Call this on the loop only.
        """
        if self.stopping is not None:
            self.stopping.report_unproven(result)
        else:
            self.unproven_trees += (result,)

    def make_own_task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Create a task for the scope itself, which no stop cancels. On the loop only; the caller keeps the task."""
        return self.make_task(coroutine, name, contextvars.Context())

    def ask_late(self, member: Handle[Any]) -> None:
        """Ask a member to stop, because the scope was interrupted while the member was starting."""
        if self.stopping is not None:
            member.ask()

    def discard(self, member: Handle[Any], error: BaseException | None) -> None:
        """Remove a member that has ended. On the loop only; never raises."""
        if self.stopping is None and self.interrupt.triggered and not self.open_loop().is_closed():
            self.begin_stop()  # its callback comes later, and the stop's receipt counts this member too
        if self.members.pop(member, member) is member and self.adopted.pop(member, member) is member:
            return
        if self.stopping is not None:
            self.stopping.member_ended(member)
        elif error is None and not self.is_leaving:
            return
        if error is not None and not isinstance(error, (Interrupted, asyncio.CancelledError)):
            self.fail(error, repr(member.name))
        self.close_if_empty()

    def leave_over(self, *leftovers: AbandonedMember) -> None:
        """Record members that a stop abandoned. Call this on the loop only."""
        if leftovers:
            self.leftovers = [*self.living_leftovers(), *leftovers]

    def child_closed(self, child: ScopeState) -> None:
        """Remove a child scope that has closed, and take over its abandoned members. Call this on the loop only."""
        if child.leftovers:
            self.leave_over(*child.living_leftovers())
        if self.members.pop(child, child) is child:
            return
        if child.receipt is not None:
            if self.stopping is not None:
                self.stopping.take_over(child.receipt)
            elif child.receipt.outcome != "gone":
                self.survived.append(child.receipt)
        self.close_if_empty()

    def give_up_member(self, member: Handle[Any] | ScopeState) -> None:
        """Forget a member that a stop abandons. On the loop only."""
        self.members.pop(member, None)
        if isinstance(member, Handle):
            self.adopted.pop(member, None)

    def handles(self) -> list[Handle[Any]]:
        """Return all members except child scopes."""
        own = [member for member in self.members.copy() if isinstance(member, Handle)]
        return own + list(self.adopted.copy())

    def children(self) -> list[ScopeState]:
        """Return the states of the child scopes that have not closed."""
        return [member for member in self.members.copy() if isinstance(member, ScopeState)]

    def height(self) -> int:
        """Return the height of the tree of scopes below this scope, which itself counts as 1."""
        return 1 + max((child.height() for child in self.children()), default=0)

    def snapshot(self) -> Member:
        """Return a snapshot of the scope as a member of its parent."""
        state = "running" if self.phase == "open" else "stopping"
        return Member(kind="scope", name=self.name, started_at=self.opened_at, state=state)

    def adopt(self, member: Handle[Any]) -> bool:
        """Add a member that foreign code starts; return False if the grace period or the scope has ended."""
        with self.gate:
            stopping = self.stopping
            if self.loop is None or self.phase == "closed" or (stopping is not None and stopping.phase != "grace"):
                return False
            self.adopted[member] = None
            return True

    def adopt_process(self, process: ForeignProcess, /) -> bool:
        """Adopt a program that foreign code started; return False if the grace period or the scope has ended.

        Callable from any thread.
        """
        handle = ForeignHandle(self, process)
        if not self.adopt(handle):
            return False
        handle.attend()
        return True

    # -- the stop

    def _on_interrupt(self, _: Cause) -> None:
        self.begin_stop()

    def listen(self) -> None:
        """Bind the scope to the running loop if the scope was not opened, so that it can be stopped."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            self._registration = self.interrupt.on_trigger(self._on_interrupt, loop=self.loop)

    def request_times(self, grace_s: float | None, abandon_after_s: float | None) -> Times | None:
        """Return the times of a stop; None if neither time is given. Callable from any thread, before the trigger."""
        times = self.times.complete(grace_s, abandon_after_s)
        if times is not None and not self.interrupt.triggered:
            self.times.give(times)
        return times

    def stop_in(self, times: Times | None) -> None:
        """Stop within the times that `request_times` returned. Callable from any thread, after the trigger."""
        if times is None:
            self.on_loop(self.begin_stop)
        else:
            self.on_loop(self.stop_here, *times)

    def begin_stop(self) -> None:
        """Start a stop, unless one is running. On the loop only."""
        if self.stopping is None:
            self.stop_here(*self._stop_times())
        else:
            self.stopping.finish_if_empty()

    def _stop_times(self) -> Times:
        """Return the times of a stop that begins now."""
        parent = self.parent
        return self.times.first(None if parent is None or not parent.interrupt.triggered else parent._stop_times())

    def stop_with_parent(self, grace_s: float, abandon_after_s: float) -> None:
        """Stop within the parent's remaining time. On the loop only."""
        self.stop_here(*self.times.limited((grace_s, abandon_after_s)))

    def stop_here(self, grace_s: float, abandon_after_s: float) -> None:
        """Start a stop, or shorten the running one. On the loop only."""
        if self.phase == "closed":
            return
        stopping = self.stopping
        if stopping is None:
            with self.gate:
                self.phase = "stopping"
            self.stopping = stopping = self._new_stop(self)
            stopping.begin(grace_s, abandon_after_s)
        # Members may end while they are asked, and the scope with them; the rest then does nothing.
        stopping.shorten(grace_s, abandon_after_s)
        stopping.finish_if_empty()

    def give_up(self, tasks_too: bool = False) -> None:
        """Abandon the remaining members, because the deadline of the parent's stop has passed.

        Tasks are abandoned soon after the other members, or at once if ``tasks_too`` is set.
        """
        self.stop_here(0.0, 0.0)
        if self.stopping is not None:
            self.stopping.give_up()
        if self.stopping is not None and tasks_too:
            self.stopping.give_up_tasks()

    def close_if_empty(self) -> None:
        """Close the scope if `is_leaving` is set and it waits for no members; a running stop closes the scope."""
        if self.stopping is not None:
            self.stopping.finish_if_empty()
        elif self.is_leaving and not self.members and not self.interrupt.triggered:
            if self.adopted or self.survived or self.unproven_trees or self.unowned_threads():
                # What foreign code left behind ends with the scope, or is named in the receipt.
                self.ended_by_itself = self.interrupt.trigger("the scope has ended", kind="stop")
            elif self.shut():
                self.finish()

    def is_empty(self) -> bool:
        """Return whether the scope has neither members nor a live body. New members may still be added."""
        return not (self.members or self.adopted or (self.body is not None and self.body.live))

    def shut(self, *, by_force: bool = False) -> bool:
        """Refuse new members if the scope is empty or if ``by_force`` is set; return whether the scope is closed."""
        with self.gate:
            body = self.body
            left = self.members or self.adopted or (body is not None and body.live)
            if left and not by_force:
                return False
            self.phase = "closed"
            return True

    def note_unowned(self, thread: threading.Thread) -> None:
        """Record a thread that foreign code starts in the scope. Callable from any thread."""
        with self.gate:
            if self._unowned is None:
                self._unowned = weakref.WeakSet()
            self._unowned.add(thread)

    def unowned_threads(self) -> list[threading.Thread]:
        """Return living threads that foreign code started in the scope."""
        if self._unowned is None:
            return []
        with self.gate:  # the set must not be iterated while another thread adds to it
            threads = list(self._unowned)
        return [thread for thread in threads if thread.is_alive()]

    def finish(self) -> None:
        """Record the end of the scope and notify all waiters. Call this on the loop only, after `shut`."""
        stopping, self.stopping = self.stopping, None
        if stopping is not None:
            self.receipt = stopping.receipt
        else:
            self.ended_by_itself = True  # any later interrupt is too late
        self.is_over = True
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self._closers = None
        if self._waiters:
            wake(list(self._waiters))
        if self.on_closed is not None:
            try:
                self.open_loop().call_soon(self.on_closed, context=contextvars.Context())
            except RuntimeError:
                pass  # the loop was closed before the last member ended
            self.on_closed = None
        if self.parent is not None:
            self.parent.on_loop(self.parent.child_closed, self)

    # -- loop, tasks and threads

    def open_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that the scope was opened on. Raises `ScopeClosed` if the scope was not opened."""
        if self.loop is None:
            raise ScopeClosed(f"scope {self.name!r} is not open", hint="use 'async with' or open() first")
        return self.loop

    def on_loop(self, fn: Callable[..., object], *values: Any) -> None:
        """Run ``fn`` on the scope's loop: at once if called on that loop, otherwise soon. Callable from any thread."""
        loop = self.open_loop()
        if asyncio._get_running_loop() is not loop:
            try:
                loop.call_soon_threadsafe(fn, *values, context=contextvars.Context())
            except RuntimeError:
                # The loop is closed, so no other code uses the scope any more.
                pass
            else:
                return
        fn(*values)

    @property
    def threads(self) -> ThreadPool:
        """Pool for calls on threads."""
        if self._threads is None:
            self._threads = shared_threads()
        return self._threads

    def make_task(self, coroutine: Coroutine[Any, Any, T], name: str, context: contextvars.Context) -> asyncio.Task[T]:
        """Create the task of a member. On the loop only."""
        loop = self.open_loop()
        start_owned: StartOwned | None = getattr(loop.get_task_factory(), "start_owned", None)
        if start_owned is not None:
            return start_owned(loop, coroutine, name, context)
        return loop.create_task(coroutine, name=name, context=context)
