"""The owner of tasks, threads, processes and child scopes: what is started in a scope ends with it.

Invariants
- A member is entered under the scope's gate before what it stands for exists, while the scope is open; a stop and the
  close go through the same gate. So every member is either seen by the stop or refused, never lost between them.
- The gate is held for a few instructions, never across an await, user code or the trigger of an interrupt.
- All other state is changed on the scope's loop only. Foreign threads hand over with `call_soon_threadsafe`.
- A scope that was interrupted is stopped by its `Stopping`, which nobody can cancel and which ends by its deadline.
- A scope is closed once, after its body and its members have ended or were abandoned; closed means that nothing that
  survivors emit, return or record counts any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CoroutineType, TracebackType
from typing import Any, Final, Literal, TypeVar, overload

from holdfast.errors import Interrupted, ScopeClosed
from holdfast.protocol.stopping import Cause, CauseKind, StopReceipt
from holdfast.runtime.carried import Entered
from holdfast.runtime.interrupt import Interrupt, Registration, current, current_interrupt, use
from holdfast.runtime.members import (
    Body,
    Handle,
    Member,
    TaskHandle,
    ThreadHandle,
    current_place,
    inside,
    unowned,
    wake,
)
from holdfast.runtime.owned_processes import ProcessHandle
from holdfast.runtime.processes import Process, ProcessHost, Stream, TreeResult, process_host
from holdfast.runtime.stopping import Stopping
from holdfast.runtime.threads import ThreadPool, shared_threads

__all__ = ["Closer", "Scope", "ScopeStatistics", "current_scope", "detached"]

T = TypeVar("T")

ScopeState = Literal["open", "stopping", "closed"]


class _Current:
    """Stands for the scope that the code runs in."""


CURRENT: Final = _Current()


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
    """Something to close when the grace is over; made by `Scope.add_closer`. ``close()`` takes it back."""

    __slots__ = ("_closers", "_fn", "_loop")

    def __init__(self, closers: dict[Closer, None], fn: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._closers = closers
        self._fn = fn
        self._loop = loop

    def close(self) -> None:
        """Take it back: it does not run any more. From any thread."""
        self._closers.pop(self, None)

    def run(self) -> None:
        """Run it; its error is reported to the loop's exception handler, so that the others run too."""
        try:
            self._fn()
        except Exception as error:
            self._loop.call_exception_handler({"message": f"closer {self._fn!r} raised", "exception": error})


class Scope:
    """Owns everything that is started in it, and stops all of it.

    ``async with Scope("name") as scope`` waits at its end for what was spawned, as a task group does: the first error
    of a member interrupts the scope and is raised (several as an exception group). When the scope is interrupted its
    body is cancelled natively, once; its members are stopped, and `Interrupted` is raised.

    Owners that outlive a block use ``scope.open()`` and end it with ``await scope.stop()`` or ``await scope.join()``.

    Parameters:
        name: for people: receipts, causes, the task tree.
        parent: the scope that owns this one; by default the scope that the code runs in. None: independent.
        deadline_s: interrupt the scope this many seconds after it was opened.
        grace_s: how long members may clean up after an interrupt, in seconds.
        kill_after_s: how long members are pressed after the grace before they are abandoned, in seconds.
        detached: independent of the scope and the interrupt that the code runs in.
        threads: the pool for ``on="thread"``; by default the parent's, or the one shared by the process.
        processes: starts programs; by default the parent's, or the one of this process.
        owner: the key under which abandoned threads are counted; by default the parent's.

    A scope belongs to the loop on which it was opened. `spawn`, `stop`, `members`, `add_closer` may be called from
    any thread or loop.
    """

    def __init__(
        self,
        name: str = "scope",
        *,
        parent: Scope | _Current | None = CURRENT,
        deadline_s: float | None = None,
        grace_s: float | None = None,
        kill_after_s: float | None = None,
        detached: bool = False,
        threads: ThreadPool | None = None,
        processes: ProcessHost | None = None,
        owner: str | None = None,
    ) -> None:
        above: Interrupt | None = None
        if detached:
            parent = None
        elif isinstance(parent, _Current):
            parent = current_scope()
            above = current_interrupt() if parent is None else None
        if parent is not None:
            above = parent.interrupt
        self.name = name
        self.parent: Scope | None = parent
        self.interrupt: Interrupt = Interrupt(name=name, parent=above)
        self.grace_s: float = grace_s if grace_s is not None else parent.grace_s if parent is not None else 5.0
        self.kill_after_s: float = (
            kill_after_s if kill_after_s is not None else parent.kill_after_s if parent is not None else 2.0
        )
        self.owner: str = owner if owner is not None else parent.owner if parent is not None else ""
        self.receipt: StopReceipt | None = None
        self.errors: list[BaseException] = []
        self._survived: list[StopReceipt] = []
        self._unowned: weakref.WeakSet[threading.Thread] | None = None
        self._pool: ThreadPool | None = threads if threads is not None else parent._pool if parent is not None else None
        self._processes: ProcessHost | None = (
            processes if processes is not None else parent._processes if parent is not None else None
        )
        self._deadline_s = deadline_s
        self._state: ScopeState = "open"
        self._gate = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._members: dict[Handle[Any] | Scope, None] = {}
        self._adopted: dict[Handle[Any], None] = {}
        self._closers: dict[Closer, None] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._body: Body | None = None
        self._leaving = False
        self._on_closed: Callable[[], object] | None = None
        self._failed = False
        self._ended_by_itself = False
        self._opened_at = 0.0
        self._registration: Registration | None = None
        self._stopping: Stopping | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._entered: tuple[Entered[Any], ...] = ()

    def __repr__(self) -> str:
        return f"<Scope {self.name!r} {self._state}, {len(self._members) + len(self._adopted)} members>"

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ScopeState:
        """``open``, ``stopping`` or ``closed``."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether it has ended: what survivors still emit, return or record does not count."""
        return self._state == "closed"

    @property
    def quarantined(self) -> bool:
        """Whether it ended with survivors; they are named in its receipt."""
        return self.receipt is not None and self.receipt.outcome != "gone"

    @property
    def ended_by(self) -> Literal["members", "failure", "interrupt"] | None:
        """What ended it: its members, all of them; a member that raised; or an interrupt. None while it is open."""
        if self._failed:
            return "failure"
        if self._ended_by_itself:
            return "members"
        if self.interrupt.triggered:
            return "interrupt"
        return "members" if self._state == "closed" else None

    def members(self) -> tuple[Member, ...]:
        """A snapshot of what the scope owns now."""
        owned = [member._snapshot() for member in (*self._members.copy(), *self._adopted.copy())]
        return (*owned, *map(unowned, self._unowned_threads()))

    def children(self) -> tuple[Scope, ...]:
        """The scopes that this one owns now."""
        return tuple(self._children())

    def statistics(self) -> ScopeStatistics:
        """A snapshot of the scope."""
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

    # -- life -------------------------------------------------------------------------------------------------------

    def open(self) -> Scope:
        """Bind the scope to the running loop and to its parent; returns itself.

        Raises:
            Interrupted: the scope was interrupted before, itself or from above.
            ScopeClosed: its parent takes no new members.
            RuntimeError: it was opened before, or no loop is running.
        """
        if self._loop is not None:
            raise RuntimeError(f"scope {self.name!r} was opened before; make a new one")
        loop = asyncio.get_running_loop()
        self.interrupt.check()
        parent = self.parent
        if parent is not None:
            with parent._gate:
                parent._check_open()
                parent._members[self] = None
        self._loop = loop
        self._opened_at = time.monotonic()
        self._registration = self.interrupt.on_trigger(self._on_interrupt, loop=loop)
        if self._deadline_s is not None:
            self._deadline = loop.call_later(self._deadline_s, self._on_deadline, context=contextvars.Context())
        return self

    async def __aenter__(self) -> Scope:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a scope can only be entered in a task")
        self.open()
        outer = current_place.get()
        if isinstance(outer, TaskHandle) and outer.task is None and not outer.done():
            # An eager task: it runs before whoever made it has it.
            outer.task = task
        while outer is not None and (outer.task is not task or not outer.live):
            outer = outer.outer
        self._body = Body(self, task, outer)
        place = current_place.enter(self._body)
        self._body.generator = place.frame
        self._entered = (place, current.enter(self.interrupt))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        body = self._body
        assert body is not None
        for entered in reversed(self._entered):
            entered.leave()
        body.leave()
        if error is not None:
            self._body_failed(error)
        cancelled = await self._end()
        cancelled = body.settle() or cancelled
        self._body = None
        if isinstance(error, (GeneratorExit, KeyboardInterrupt, SystemExit)):
            return
        if cancelled:
            if isinstance(error, asyncio.CancelledError):
                return
            raise asyncio.CancelledError from self._failure()
        if self._failed:
            failure = self._failure()
            if failure is error:
                return
            assert failure is not None
            raise failure
        if isinstance(error, Interrupted) and error.cause is self.interrupt.cause:
            return
        cause = self._interrupted_by()
        if cause is not None:
            raise Interrupted(cause) from self._failure()

    def _body_failed(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.interrupt.trigger("the task that entered it was cancelled", kind="stop")
        elif isinstance(error, GeneratorExit):
            self.interrupt.trigger("the generator that entered it was closed", kind="stop")
        elif isinstance(error, Interrupted):
            self.interrupt.trigger(cause=error.cause)
        else:
            self._fail(error, "the body")

    def _fail(self, error: BaseException, name: str) -> None:
        """A member or the body raised."""
        self.errors.append(error)
        if self.interrupt.trigger(f"{name} failed: {type(error).__name__}: {error}", kind="stop"):
            self._failed = True

    def _failure(self) -> BaseException | None:
        if len(self.errors) > 1:
            return BaseExceptionGroup(f"several errors in scope {self.name!r}", self.errors)
        return self.errors[0] if self.errors else None

    async def join(self) -> None:
        """Wait until what was spawned has ended by itself, then close the scope.

        Raises:
            Interrupted: the scope was interrupted.
            Exception: what a member raised; several as an exception group.
        """
        self._loop_here()
        if await self._end():
            raise asyncio.CancelledError
        failure = self._failure()
        if self._failed and failure is not None:
            raise failure
        cause = self._interrupted_by()
        if cause is not None:
            raise Interrupted(cause) from failure

    def close_when_done(self, fn: Callable[[], object]) -> None:
        """For owners that are no task: close the scope once its members have ended, by themselves or stopped.

        ``fn`` is called on the scope's loop then, when ``closed``, ``errors`` and ``receipt`` have their last values.
        Call this on the loop only.
        """
        self._on_closed = fn
        self._leaving = True
        self._look()

    def _interrupted_by(self) -> Cause | None:
        return self.interrupt.cause if not self._ended_by_itself else None

    async def _end(self) -> bool:
        """Wait until the scope is closed; True if the waiting task was cancelled meanwhile."""
        self._leaving = True
        cancelled = False
        if self.interrupt.triggered:
            self._stop_here(self.grace_s, self.kill_after_s)
        else:
            self._look()
        while self._state != "closed":
            try:
                await self._until_closed()
            except asyncio.CancelledError:
                cancelled = True
                self.interrupt.trigger("the task that waits for it was cancelled", kind="stop")
                self._stop_here(self.grace_s, self.kill_after_s)
        return cancelled

    async def _until_closed(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = None
        try:
            if self._state != "closed":
                await future
        finally:
            self._waiters.pop(future, None)

    async def stop(
        self,
        reason: str = "",
        *,
        kind: CauseKind = "stop",
        grace_s: float | None = None,
        kill_after_s: float | None = None,
        cause: Cause | None = None,
    ) -> StopReceipt:
        """Interrupt the scope, wait for the grace, press what is left, and answer what became of everything.

        It may be called any number of times, from any loop; all callers get the same receipt. A shorter grace than
        that of a stop under way shortens it. It ends after ``grace_s + kill_after_s`` whatever the members do. When
        the caller is cancelled the stop goes on.

        Parameters:
            reason: free text for people.
            kind: the class of the cause.
            grace_s: time to clean up, in seconds; default: the scope's.
            kill_after_s: time after the grace until survivors are abandoned, in seconds; default: the scope's.
            cause: a ready-made cause, in place of reason and kind.

        Raises:
            Interrupted: when called from inside the scope, which cannot wait for itself; ``scope.receipt`` has the
                receipt later.
        """
        self.interrupt.trigger(reason, kind=kind, cause=cause)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._registration = self.interrupt.on_trigger(self._on_interrupt, loop=self._loop)
        grace = self.grace_s if grace_s is None else grace_s
        kill_after = self.kill_after_s if kill_after_s is None else kill_after_s
        if self._is_around_caller():
            self._on_loop(self._stop_here, grace, kill_after)
            self.interrupt.check()
        self._on_loop(self._stop_here, grace, kill_after)
        while self._state != "closed":
            await self._until_closed()
        assert self.receipt is not None
        return self.receipt

    def request_stop(self, cause: Cause, *, grace_s: float | None = None, kill_after_s: float | None = None) -> None:
        """Begin what `stop` does, without waiting for it. From any thread, also from inside; see `close_when_done`."""
        self.interrupt.trigger(cause=cause)
        grace = self.grace_s if grace_s is None else grace_s
        self._on_loop(self._stop_here, grace, self.kill_after_s if kill_after_s is None else kill_after_s)

    def _is_around_caller(self) -> bool:
        scope = current_scope()
        while scope is not None and scope is not self:
            scope = scope.parent
        return scope is self and self._state != "closed"

    # -- members ----------------------------------------------------------------------------------------------------

    @overload
    def spawn(self, work: Coroutine[Any, Any, T], /, *, name: str | None = None) -> Handle[T]: ...
    @overload
    def spawn(
        self,
        work: Callable[..., Coroutine[Any, Any, T]],
        /,
        *values: Any,
        on: Literal["loop"] = "loop",
        name: str | None = None,
    ) -> Handle[T]: ...
    @overload
    def spawn(
        self, work: Callable[..., T], /, *values: Any, on: Literal["thread", "process"], name: str | None = None
    ) -> Handle[T]: ...
    def spawn(
        self,
        work: Coroutine[Any, Any, Any] | Callable[..., Any],
        /,
        *values: Any,
        on: Literal["loop", "thread", "process"] = "loop",
        name: str | None = None,
    ) -> Handle[Any]:
        """Start something that the scope owns; from any thread. Its context is a copy of the caller's.

        A member that raises interrupts the scope. One that ends cancelled or interrupted does not; its handle says so.
        A task that is cancelled before its first step never runs at all, not even its ``finally``.

        Parameters:
            work: a coroutine, a coroutine function, or for ``thread`` a function.
            values: arguments for a function.
            on: where it runs.
            name: for people; default: the name of the function.

        Raises:
            ScopeClosed: the scope is stopping or closed, or was not opened.
        """
        label = name or getattr(work, "__qualname__", None) or type(work).__name__
        if on == "thread":
            if not callable(work):
                raise TypeError("a thread runs a function, not a coroutine; leave out on=, or pass the function")
            return self._spawn_thread(work, values, label)
        if isinstance(work, CoroutineType):
            coroutine = work
        else:
            assert callable(work)
            coroutine = work(*values)
            if not isinstance(coroutine, Coroutine):
                raise TypeError(f"{label!r} is no coroutine function; use on='thread' for a blocking function")
        handle: TaskHandle[Any] = TaskHandle(self, label, coroutine)
        handle._context = inside(handle, self.interrupt)
        try:
            self._enter(handle)
        except ScopeClosed:
            coroutine.close()
            raise
        try:
            self._on_loop(handle._start)
        except BaseException:
            self._members.pop(handle, None)
            raise
        return handle

    def _spawn_thread(self, fn: Callable[..., T], values: tuple[Any, ...], name: str) -> Handle[T]:
        handle: ThreadHandle[T] = ThreadHandle(self, name)
        handle._context = inside(handle, self.interrupt)
        self._enter(handle)
        try:
            handle._start(fn, values, {})
        except BaseException:
            self._on_loop(self._discard, handle, None)
            raise
        return handle

    async def process(
        self,
        argv: Sequence[str | bytes | os.PathLike[str]],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: str | bytes | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Process:
        """Start a program that the scope owns, with everything that it starts; parameters as in `ProcessHost.spawn`.

        The scope waits for the program to end; what it leaves running ends with the scope. A stop sends SIGTERM to the
        whole tree, and kills it when the grace is over.

        Raises:
            ScopeClosed: the scope is stopping or closed, or was not opened.
            OSError: the program cannot be started.
        """
        if self._processes is None:
            self._processes = process_host()
        handle = ProcessHandle(self, name or os.fsdecode(argv[0]))
        self._enter(handle)
        try:
            process = await self._processes.spawn(
                argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, name=name
            )
            await handle._take(process)
        except BaseException:
            self._on_loop(self._discard, handle, None)
            raise
        return process

    def child(self, name: str, *, deadline_s: float | None = None, grace_s: float | None = None) -> Scope:
        """A new scope that this one owns; use it with ``async with`` or ``open()``."""
        return Scope(name, parent=self, deadline_s=deadline_s, grace_s=grace_s)

    def add_closer(self, fn: Callable[[], object]) -> Closer:
        """Call ``fn`` when the grace is over, to free what members block on: shut down a socket, close a stream.

        It runs on the scope's loop and must not block. ``close()`` of what is returned takes it back.
        """
        closer = Closer(self._closers, fn, self._loop_here())
        self._closers[closer] = None
        stopping = self._stopping
        too_late = self._state == "closed" or (stopping is not None and stopping.phase != "grace")
        if too_late and self._closers.pop(closer, 0) is None:
            self._on_loop(closer.run)
        return closer

    def _enter(self, member: Handle[Any]) -> None:
        with self._gate:
            self._check_open()
            self._members[member] = None

    def _check_open(self) -> None:
        if self._loop is None:
            raise ScopeClosed(f"scope {self.name!r} is not open", hint="use 'async with' or open() first")
        if self._state != "open":
            raise ScopeClosed(
                f"scope {self.name!r} is {self._state} and starts nothing new", hint="start it in a scope that is open"
            )

    def _admits(self, member: Handle[Any]) -> bool:
        """Whether a member that was entered may begin. On the loop."""
        return member in self._members and not self.interrupt.triggered

    def _leave_behind(self, member: Handle[Any]) -> None:
        """Nobody waits for this member any more; it ends with the scope. On the loop."""
        with self._gate:
            if self._members.pop(member, member) is not member:
                self._adopted[member] = None
        self._look()

    def _grace_left(self) -> float:
        return 0.0 if self._stopping is None else self._stopping.grace_left_s

    def _unproven(self, result: TreeResult) -> None:
        if self._stopping is not None:
            self._stopping.unproven(result)

    def _make_own_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of the scope's own, which no stop cancels. On the loop; the caller keeps it."""
        return self._make_task(coroutine, name, contextvars.Context())

    def _tell(self, member: Handle[Any]) -> None:
        """A member came to be while the scope was being interrupted."""
        if self._stopping is not None:
            member._ask()

    def _discard(self, member: Handle[Any], error: BaseException | None) -> None:
        """A member has ended. On the loop; cannot raise."""
        if self._members.pop(member, member) is member and self._adopted.pop(member, member) is member:
            return
        if self._stopping is not None:
            self._stopping.left(member.kind, member.name, member)
        elif error is None and not self._leaving:
            return
        if error is not None and not isinstance(error, (Interrupted, asyncio.CancelledError)):
            self._fail(error, repr(member.name))
        self._look()

    def _child_closed(self, child: Scope) -> None:
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

    def _children(self) -> list[Scope]:
        return [member for member in self._members.copy() if isinstance(member, Scope)]

    def _take_closers(self) -> list[Closer]:
        taken = []
        while self._closers:
            closer, _ = self._closers.popitem()
            taken.append(closer)
        return taken

    @property
    def kind(self) -> Literal["scope"]:
        """What it is as a member of its parent."""
        return "scope"

    def _snapshot(self) -> Member:
        state = "running" if self._state == "open" else "stopping"
        return Member(kind="scope", name=self.name, started_at=self._opened_at, state=state)

    def _adopt(self, member: Handle[Any]) -> bool:
        """Enter what foreign code starts inside the scope; False when it comes too late even for clean-up."""
        with self._gate:
            stopping = self._stopping
            if self._loop is None or self._state == "closed" or (stopping is not None and stopping.phase != "grace"):
                return False
            self._adopted[member] = None
            return True

    # -- ending, on the loop ----------------------------------------------------------------------------------------

    def _on_interrupt(self, _: Cause) -> None:
        self._stop_here(self.grace_s, self.kill_after_s)

    def _on_deadline(self) -> None:
        self.interrupt.trigger(f"the deadline of {self._deadline_s:g} s is over", kind="deadline")

    def _stop_here(self, grace_s: float, kill_after_s: float) -> None:
        if self._state == "closed":
            return
        if self._stopping is None:
            with self._gate:
                self._state = "stopping"
            self._stopping = Stopping(self)
            self._stopping.begin(grace_s, kill_after_s)
        self._stopping.tighten(grace_s, kill_after_s)
        self._stopping.look()

    def _give_up(self) -> None:
        """The parent's time is over, so this scope's is."""
        self._stop_here(0.0, 0.0)
        if self._stopping is not None:
            self._stopping._give_up()

    def _look(self) -> None:
        """Something has left: close the scope if that was the last thing it waited for."""
        if self._stopping is not None:
            self._stopping.look()
        elif self._leaving and not self._members and not self.interrupt.triggered:
            if self._adopted or self._survived or self._unowned_threads():
                # What foreign code left behind does not outlive the scope, or is named.
                self._ended_by_itself = self.interrupt.trigger("the scope has ended", kind="stop")
            elif self._shut():
                self._closed()

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
        """Foreign code starts a thread inside the scope by itself. From any thread."""
        with self._gate:
            if self._unowned is None:
                self._unowned = weakref.WeakSet()
            self._unowned.add(thread)

    def _unowned_threads(self) -> list[threading.Thread]:
        """Living threads that foreign code started inside the scope by itself."""
        return [thread for thread in list(self._unowned) if thread.is_alive()] if self._unowned else []

    def _closed(self) -> None:
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            self.receipt = stopping.receipt
        if self._registration is not None:
            self._registration.close()
        if self._deadline is not None:
            self._deadline.cancel()
        self._closers.clear()
        wake(list(self._waiters))
        if self._on_closed is not None:
            self._loop_here().call_soon(self._on_closed, context=contextvars.Context())
            self._on_closed = None
        if self.parent is not None:
            self.parent._on_loop(self.parent._child_closed, self)

    def _loop_here(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ScopeClosed(f"scope {self.name!r} is not open", hint="use 'async with' or open() first")
        return self._loop

    def _on_loop(self, fn: Callable[..., object], *values: Any) -> None:
        """Run ``fn`` on the scope's loop: at once if this is it, else soon."""
        loop = self._loop_here()
        if asyncio._get_running_loop() is not loop:
            try:
                loop.call_soon_threadsafe(fn, *values, context=contextvars.Context())
            except RuntimeError:
                # The loop is closed, so nobody else touches the scope any more.
                pass
            else:
                return
        fn(*values)

    @property
    def _threads(self) -> ThreadPool:
        if self._pool is None:
            self._pool = shared_threads()
        return self._pool

    def _make_task(self, coroutine: Coroutine[Any, Any, T], name: str, context: contextvars.Context) -> asyncio.Task[T]:
        loop = self._loop_here()
        start_owned = getattr(loop.get_task_factory(), "start_owned", None)
        if start_owned is not None:
            task: asyncio.Task[T] = start_owned(loop, coroutine, name, context)
            return task
        return loop.create_task(coroutine, name=name, context=context)


def current_scope() -> Scope | None:
    """The scope that this code runs in, or None outside any."""
    place = current_place.get()
    return None if place is None else place.scope


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """What is started in the body starts outside any scope and interrupt: for things that are shared."""
    place = current_place.enter(None)
    try:
        with use(None):
            yield
    finally:
        place.leave()
