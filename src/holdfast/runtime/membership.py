"""The members of a scope: how they enter and leave, and how the scope closes after the last one.

`Scope` adds how it is opened, entered, filled and stopped.

Invariants
- A member is entered under the gate before its task, thread or process exists, while the scope is open. A stop and the
  close pass the same gate, so every member is either seen by the stop or refused, never lost in between.
- The gate is held for a few instructions, never across an await, user code or the trigger of an interrupt.
- All other state changes on the scope's loop only. Foreign threads hand over with `call_soon_threadsafe`.
- The scope closes once, after the body and all members have ended or were abandoned. From then on, nothing that
  survivors emit, return or record counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from holdfast.errors import Interrupted, ScopeClosed, told
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.runtime.interrupt import Interrupt, Registration
from holdfast.runtime.leftovers import Leftover
from holdfast.runtime.members import Handle, Member, unowned, wake
from holdfast.runtime.stopping import Stopping
from holdfast.runtime.threads import ThreadPool, shared_threads

if TYPE_CHECKING:
    from holdfast.runtime.enclosure import Body
    from holdfast.runtime.processes import TreeResult

__all__ = ["Closer", "Membership", "ScopeState", "ScopeStatistics"]

T = TypeVar("T")

ScopeState = Literal["open", "stopping", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeStatistics:
    """A snapshot of a scope: its state and how many members of each kind it has, adopted and unowned ones included."""

    state: ScopeState
    tasks: int
    threads: int
    processes: int
    scopes: int
    adopted: int
    unowned: int


class Closer:
    """Callback that frees resources after the grace period; created by `Scope.add_closer`. ``close()`` removes it."""

    __slots__ = ("_closers", "_fn", "_loop")

    def __init__(self, closers: dict[Closer, None], fn: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._closers = closers
        self._fn = fn
        self._loop = loop

    def close(self) -> None:
        """Remove the callback; it does not run any more. Callable from any thread."""
        self._closers.pop(self, None)

    def run(self) -> None:
        """Run it; report its error to the loop's exception handler, so that the others run too."""
        try:
            self._fn()
        except Exception as error:
            self._loop.call_exception_handler({"message": f"closer {self._fn!r} raised", "exception": error})


class Membership:
    """Members of a scope and how it ends: the part of `Scope` that its members and its stop use.

    Parameters:
        name, grace_s, kill_after_s, deadline_s, threads, owner, sharer: as in `Scope`.
        parent: owner of this one.
        interrupt: asks the members to end.
    """

    __slots__ = (
        "__weakref__",
        "_adopted",
        "_body",
        "_closers",
        "_deadline",
        "_deadline_at",
        "_deadline_s",
        "_ended_by_itself",
        "_failed",
        "_gate",
        "_held_at",
        "_holds",
        "_leaving",
        "_leftovers",
        "_loop",
        "_members",
        "_on_closed",
        "_opened_at",
        "_opened_ticks",
        "_over",
        "_pool",
        "_registration",
        "_state",
        "_stopping",
        "_survived",
        "_unowned",
        "_unproven_trees",
        "_waiters",
        "errors",
        "grace_s",
        "interrupt",
        "kill_after_s",
        "name",
        "owner",
        "parent",
        "receipt",
        "sharer",
    )

    def __init__(
        self,
        name: str,
        *,
        parent: Membership | None,
        interrupt: Interrupt,
        deadline_s: float | None,
        grace_s: float,
        kill_after_s: float,
        threads: ThreadPool | None,
        owner: str,
        sharer: str,
    ) -> None:
        self.name = name
        self.parent = parent
        self.interrupt = interrupt
        self.grace_s = grace_s
        self.kill_after_s = kill_after_s
        self.owner = owner
        self.sharer = sharer
        self.receipt: StopReceipt | None = None
        self.errors: list[BaseException] = []
        self._deadline_s = deadline_s
        self._pool = threads
        self._state: ScopeState = "open"
        self._gate = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened_at = 0.0
        self._opened_ticks = 0.0
        self._members: dict[Handle[Any] | Membership, None] = {}
        self._adopted: dict[Handle[Any], None] = {}
        self._unowned: weakref.WeakSet[threading.Thread] | None = None
        self._survived: list[StopReceipt] = []
        self._unproven_trees: tuple[TreeResult, ...] = ()
        """Results of programs that ended before any stop."""
        self._leftovers: list[Leftover] = []
        self._closers: dict[Closer, None] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._body: Body | None = None
        self._leaving = False
        self._over = False
        self._failed = False
        self._ended_by_itself = False
        self._on_closed: Callable[[], object] | None = None
        self._registration: Registration | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_at = 0.0
        self._held_at = 0.0
        self._holds = 0
        self._stopping: Stopping | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._state}, {len(self._members) + len(self._adopted)} members>"

    @property
    def state(self) -> ScopeState:
        """``open``, ``stopping`` or ``closed``."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether it has ended: later output, results and records of survivors do not count."""
        return self._state == "closed"

    @property
    def quarantined(self) -> bool:
        """Whether it ended with survivors; its receipt names them."""
        return self.receipt is not None and self.receipt.outcome != "gone"

    @property
    def ended_by(self) -> Literal["members", "failure", "interrupt"] | None:
        """Cause of its end: all members ended, a member raised, or an interrupt. None while it is open."""
        if self._failed:
            return "failure"
        if self._ended_by_itself:
            return "members"
        if self.interrupt.triggered:
            return "interrupt"
        return "members" if self._state == "closed" else None

    def members(self) -> tuple[Member, ...]:
        """Return a snapshot of what the scope owns now."""
        owned = [member._snapshot() for member in (*self._members.copy(), *self._adopted.copy())]
        return (*owned, *map(unowned, self._unowned_threads()))

    def leftovers(self) -> tuple[Leftover, ...]:
        """Return what stops of this scope and its descendants abandoned and still runs; receipts name the same."""
        return tuple(leftover for leftover in self._leftovers if leftover.lives)

    def statistics(self) -> ScopeStatistics:
        """Return a snapshot of the scope."""
        kinds = [member.kind for member in self.members()]
        return ScopeStatistics(
            state=self._state,
            tasks=kinds.count("task"),
            threads=kinds.count("thread"),
            processes=kinds.count("process"),
            scopes=kinds.count("scope"),
            adopted=len(self._adopted),
            unowned=len(self._unowned_threads()),
        )

    def add_closer(self, fn: Callable[[], object]) -> Closer:
        """Call ``fn`` after the grace period, to free what members block on: shut down a socket, close a stream.

        It runs on the scope's loop and must not block. ``close()`` of the returned object removes it.
        """
        closer = Closer(self._closers, fn, self._loop_here())
        self._closers[closer] = None
        stopping = self._stopping
        too_late = self._state == "closed" or (stopping is not None and stopping.phase != "grace")
        if too_late and self._closers.pop(closer, 0) is None:
            self._on_loop(closer.run)
        return closer

    def _fail(self, error: BaseException, name: str) -> None:
        """Record the error of a member or of the body."""
        if not any(known is error for known in self.errors):  # the body awaited the member that raised
            self.errors.append(error)
        if self.interrupt.trigger(f"{name} failed: {told(error)}", kind="stop"):
            self._failed = True

    def _failure(self) -> BaseException | None:
        if len(self.errors) > 1:
            return BaseExceptionGroup(f"several errors in scope {self.name!r}", self.errors)
        return self.errors[0] if self.errors else None

    def _interrupted_by(self) -> Cause | None:
        return self.interrupt.cause if not self._ended_by_itself else None

    def _enter(self, member: Handle[Any]) -> None:
        with self._gate:
            if self._state != "open" or self._loop is None:
                self._check_open()
            self._members[member] = None

    def _check_open(self) -> None:
        if self._loop is None:
            raise ScopeClosed(f"scope {self.name!r} is not open", hint="use 'async with' or open() first")
        if self._state != "open":
            raise ScopeClosed(
                f"scope {self.name!r} is {self._state} and starts no new work", hint="start it in an open scope"
            )

    def _admits(self, member: Handle[Any]) -> bool:
        """Whether a member that was entered may begin. On the loop only."""
        return member in self._members and not self.interrupt.triggered

    def _leave_behind(self, member: Handle[Any]) -> None:
        """Stop waiting for this member; it ends with the scope. On the loop only."""
        with self._gate:
            if self._members.pop(member, member) is not member:
                self._adopted[member] = None
        self._look()

    def _grace_left(self) -> float:
        return 0.0 if self._stopping is None else self._stopping.grace_left_s

    def _asked_at_ticks(self) -> float:
        return 0.0 if self._stopping is None else self._stopping.asked_at_ticks

    def _unproven(self, result: TreeResult) -> None:
        if self._stopping is not None:
            self._stopping.unproven(result)
        else:
            self._unproven_trees += (result,)

    def _make_own_task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Create a task of the scope's own, which no stop cancels. On the loop only; the caller keeps a reference."""
        return self._make_task(coroutine, name, contextvars.Context())

    def _tell(self, member: Handle[Any]) -> None:
        """Ask a member that started while the scope was being interrupted."""
        if self._stopping is not None:
            member._ask()

    def _discard(self, member: Handle[Any], error: BaseException | None) -> None:
        """Remove a member that has ended. On the loop only; never raises."""
        if self._members.pop(member, member) is member and self._adopted.pop(member, member) is member:
            return
        if self._stopping is not None:
            self._stopping.left(member.kind, member.name, member)
        elif error is None and not self._leaving:
            return
        if error is not None and not isinstance(error, (Interrupted, asyncio.CancelledError)):
            self._fail(error, repr(member.name))
        self._look()

    def _leave_over(self, *leftovers: Leftover) -> None:
        """Record what a stop abandoned. On the loop only."""
        if leftovers:
            self._leftovers = [*self.leftovers(), *leftovers]

    def _child_closed(self, child: Membership) -> None:
        self._leave_over(*child.leftovers())
        if self._members.pop(child, child) is child:
            return
        if child.receipt is not None:
            if self._stopping is not None:
                self._stopping.take_over(child.receipt)
            elif child.quarantined:
                self._survived.append(child.receipt)
        self._look()

    def _handles(self) -> list[Handle[Any]]:
        own = [member for member in self._members.copy() if isinstance(member, Handle)]
        return own + list(self._adopted.copy())

    def _children(self) -> list[Membership]:
        return [member for member in self._members.copy() if isinstance(member, Membership)]

    def _height(self) -> int:
        """Return the depth of the tree of scopes, this one included."""
        return 1 + max((child._height() for child in self._children()), default=0)

    def _take_closers(self) -> list[Closer]:
        taken = []
        while self._closers:
            closer, _ = self._closers.popitem()
            taken.append(closer)
        return taken

    @property
    def kind(self) -> Literal["scope"]:
        """Kind of member that it is for its parent."""
        return "scope"

    def _snapshot(self) -> Member:
        state = "running" if self._state == "open" else "stopping"
        return Member(kind="scope", name=self.name, started_at=self._opened_at, state=state)

    def _adopt(self, member: Handle[Any]) -> bool:
        """Enter what foreign code starts in the scope; False if it is too late even for cleanup."""
        with self._gate:
            stopping = self._stopping
            if self._loop is None or self._state == "closed" or (stopping is not None and stopping.phase != "grace"):
                return False
            self._adopted[member] = None
            return True

    def _on_interrupt(self, _: Cause) -> None:
        self._stop_here(self.grace_s, self.kill_after_s)

    def _run_deadline(self, left_s: float) -> None:
        """Set the deadline to ``left_s`` seconds from now. On the loop only."""
        loop = self._loop_here()
        self._deadline_at = loop.time() + left_s
        self._deadline = loop.call_at(self._deadline_at, self._on_deadline, context=contextvars.Context())

    def _on_deadline(self) -> None:
        self.interrupt.trigger(f"deadline of {self._deadline_s:g} s exceeded", kind="deadline")

    def _stop_here(self, grace_s: float, kill_after_s: float) -> None:
        if self._state == "closed":
            return
        stopping = self._stopping
        if stopping is None:
            with self._gate:
                self._state = "stopping"
            self._stopping = stopping = Stopping(self)
            stopping.begin(grace_s, kill_after_s)
        # Members may end while they are asked, and the scope with them; the rest then does nothing.
        stopping.tighten(grace_s, kill_after_s)
        stopping.look()

    def _give_up(self, tasks_too: bool = False) -> None:
        """Give up, because the parent's time is over."""
        self._stop_here(0.0, 0.0)
        if self._stopping is not None:
            self._stopping._give_up()
        if self._stopping is not None and tasks_too:
            self._stopping._give_up_tasks()

    def _look(self) -> None:
        """After something has left, close the scope if it waited for nothing else."""
        if self._stopping is not None:
            self._stopping.look()
        elif self._leaving and not self._members and not self.interrupt.triggered:
            if self._adopted or self._survived or self._unproven_trees or self._unowned_threads():
                # What foreign code left behind ends with the scope, or is named in the receipt.
                self._ended_by_itself = self.interrupt.trigger("the scope has ended", kind="stop")
            elif self._shut():
                self._closed()

    def _is_empty(self) -> bool:
        """Whether it has no members or live body. More may still enter."""
        return not (self._members or self._adopted or (self._body is not None and self._body.live))

    def _shut(self, *, by_force: bool = False) -> bool:
        """Close the gate for good if nothing is left inside, or by force."""
        with self._gate:
            body = self._body
            left = self._members or self._adopted or (body is not None and body.live)
            if left and not by_force:
                return False
            self._state = "closed"
            return True

    def _note_unowned(self, thread: threading.Thread) -> None:
        """Note a thread that foreign code starts in the scope by itself. Callable from any thread."""
        with self._gate:
            if self._unowned is None:
                self._unowned = weakref.WeakSet()
            self._unowned.add(thread)

    def _unowned_threads(self) -> list[threading.Thread]:
        """Return living threads that foreign code started in the scope by itself."""
        if self._unowned is None:
            return []
        with self._gate:  # the set must not be iterated while another thread adds to it
            threads = list(self._unowned)
        return [thread for thread in threads if thread.is_alive()]

    def _closed(self) -> None:
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            self.receipt = stopping.receipt
        else:
            self._ended_by_itself = True  # any later interrupt is too late
        self._over = True
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._closers.clear()
        wake(list(self._waiters))
        if self._on_closed is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before the last member ended
                self._loop_here().call_soon(self._on_closed, context=contextvars.Context())
            self._on_closed = None
        if self.parent is not None:
            self.parent._on_loop(self.parent._child_closed, self)

    def _loop_here(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ScopeClosed(f"scope {self.name!r} is not open", hint="use 'async with' or open() first")
        return self._loop

    def _on_loop(self, fn: Callable[..., object], *values: Any) -> None:
        """Run ``fn`` on the scope's loop: at once if called there, otherwise soon."""
        loop = self._loop_here()
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
    def max_threads(self) -> int:
        """The maximum number of concurrent calls in the scope's threads; further ones wait."""
        return self._threads.max_threads

    @property
    def _threads(self) -> ThreadPool:
        if self._pool is None:
            self._pool = shared_threads()
        return self._pool

    def _make_task(self, coroutine: Coroutine[Any, Any, T], name: str, context: contextvars.Context) -> asyncio.Task[T]:
        loop = self._loop_here()
        factory = loop.get_task_factory()
        start_owned = None if factory is None else getattr(factory, "start_owned", None)
        if start_owned is not None:
            task: asyncio.Task[T] = start_owned(loop, coroutine, name, context)
            return task
        return loop.create_task(coroutine, name=name, context=context)
