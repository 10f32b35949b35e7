"""Structured concurrency: a scope owns tasks, threads, processes and child scopes, and all of them end with the scope.

When a scope is interrupted, a `Stopping` stops the scope. The `Stopping` cannot be cancelled, and ends soon after its
deadline at the latest. `state` has the invariants of members, and `cancel_claim` those of native cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, overload

from holdfast.errors import Interrupted, InvalidRequest, ScopeClosed
from holdfast.protocol.stopping import Cause, CauseKind, StopReceipt
from holdfast.runtime.interrupt.interrupt import Interrupt, current, current_interrupt
from holdfast.runtime.interrupt.scoped_var import ScopedToken
from holdfast.runtime.scope.abandoned import AbandonedMember
from holdfast.runtime.scope.cancel_claim import BodyClaim, current_claim, inside
from holdfast.runtime.scope.closers import Closer
from holdfast.runtime.scope.deadline import Deadline
from holdfast.runtime.scope.handle import Handle, Member
from holdfast.runtime.scope.program_start import start_program
from holdfast.runtime.scope.state import Phase, ScopeState, ScopeStatistics
from holdfast.runtime.scope.stop import Stopping
from holdfast.runtime.scope.stop_times import check_times
from holdfast.runtime.scope.task_handle import TaskHandle
from holdfast.runtime.scope.thread_handle import ThreadHandle
from holdfast.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from holdfast.runtime.process_host import Process, ProcessHost, Stream
    from holdfast.runtime.processes.program_cgroup import CgroupSpec
    from holdfast.runtime.scope.isolated_call import Output
    from holdfast.runtime.walls.spec import WallSpec

__all__ = ["Scope", "current_scope"]

T = TypeVar("T")


class _Current:
    """Marker for the scope that the code runs in."""


CURRENT: Final = _Current()


class Scope:
    """Owner of the tasks, threads, processes and child scopes that are started in it.

    When the block of ``async with Scope("name") as scope`` ends, the scope waits for all spawned work, as a task group
    does. The first error of a member interrupts the scope and is raised; several are raised as an exception group. When
    the scope is interrupted, the body is cancelled natively, once, the members are stopped, and `Interrupted` raised.

    A scope that must outlive a block is opened with ``open()``, and later ended with ``await stop()`` or ``join()``.

    Parameters:
        name: display name for receipts, causes and the task tree.
        parent: scope that owns this one; by default, the scope that the code runs in. None creates a scope without an
            owner.
        deadline_s: number of seconds after opening at which the scope is interrupted; None sets no deadline.
        grace_s: grace period in seconds for members to clean up after an interrupt; None uses the parent's, or 5
            without a parent. A stop of this scope can lengthen or shorten the grace period; a stop of the parent can
            only shorten it.
        abandon_after_s: time in seconds from the end of the grace period until members are abandoned; None uses the
            parent's, or 2 without a parent.
        detached: whether the scope is independent of the scope and the interrupt that the code runs in.
        threads: thread pool for ``on="thread"``; None uses the parent's, or the shared pool of this Python process.
        processes: host that starts programs; None uses the parent's, or the shared host of this Python process.
        owner: key under which abandoned threads are counted; None uses the parent's.
        sharer: key for fair sharing of threads: scopes with different keys take turns. None uses the parent's.

    Raises:
        InvalidRequest: a time is invalid, for example nan.

    A scope belongs to the loop on which it was opened. `spawn`, `stop`, `members` and `add_closer` are callable from
    any thread or loop.
    """

    __slots__ = ("__weakref__", "_deadline_s", "_entered", "_processes", "core", "interrupt", "name", "parent")

    def __init__(
        self,
        name: str = "scope",
        *,
        parent: Scope | _Current | None = CURRENT,
        deadline_s: float | None = None,
        grace_s: float | None = None,
        abandon_after_s: float | None = None,
        detached: bool = False,
        threads: ThreadPool | None = None,
        processes: ProcessHost | None = None,
        owner: str | None = None,
        sharer: str | None = None,
    ) -> None:
        check_times(deadline_s, grace_s, abandon_after_s)
        nearest: Interrupt | None = None
        if detached:
            parent = None
        elif isinstance(parent, _Current):
            parent = current_scope()
            nearest = current_interrupt()
        above = nearest if parent is None else parent.interrupt
        if above is None or nearest is None or nearest is above:
            interrupt = Interrupt(name=name, parent=above)
        else:
            # The interrupt of one handle, or one made current manually, is nearer than the scope's.
            interrupt = above.linked(nearest, name=name)
        core = ScopeState(
            name,
            None if parent is None else parent.core,
            interrupt,
            grace_s,
            abandon_after_s,
            threads,
            owner,
            sharer,
            Stopping,
        )
        self.core: ScopeState = core
        """State that the scope shares with its handles and its stop."""
        self.name = name
        self.parent: Scope | None = parent
        self.interrupt: Interrupt = interrupt
        self._deadline_s = deadline_s
        inherited = None if parent is None else parent._processes
        self._processes: ProcessHost | None = inherited if processes is None else processes
        self._entered: tuple[ScopedToken[Any], ...] = ()

    def __repr__(self) -> str:
        core = self.core
        return f"<Scope {self.name!r} {core.phase}, {len(core.members) + len(core.adopted)} members>"

    @property
    def state(self) -> Phase:
        """Phase of the scope: ``open``, ``stopping`` or ``closed``."""
        return self.core.phase

    @property
    def closed(self) -> bool:
        """Whether the scope has ended. Output, results and records that survivors produce later are ignored."""
        return self.core.phase == "closed"

    @property
    def grace_s(self) -> float:
        """Default grace period of a stop, in seconds."""
        return self.core.times.own[0]

    @property
    def abandon_after_s(self) -> float:
        """Default time after the grace period until members are abandoned, in seconds."""
        return self.core.times.own[1]

    @property
    def owner(self) -> str:
        """Key under which abandoned threads are counted."""
        return self.core.owner

    @property
    def sharer(self) -> str:
        """Key for fair sharing of threads."""
        return self.core.sharer

    @property
    def errors(self) -> list[BaseException]:
        """Errors of the scope's body and members."""
        return self.core.errors

    @property
    def receipt(self) -> StopReceipt | None:
        """Receipt of the scope's stop; None until a stop has ended."""
        return self.core.receipt

    @property
    def quarantined(self) -> bool:
        """Whether members survived the scope's stop, or may have survived it; the receipt names them."""
        return self.receipt is not None and self.receipt.outcome != "gone"

    @property
    def ended_by(self) -> Literal["members", "failure", "interrupt"] | None:
        """Why the scope ended; None while it is open.

        ``members``: all members ended by themselves. ``failure``: the body or a member raised an error. ``interrupt``:
        the scope was interrupted.
        """
        core = self.core
        if core.failed:
            return "failure"
        if core.ended_by_itself:
            return "members"
        if self.interrupt.triggered:
            return "interrupt"
        return "members" if core.closed else None

    def members(self) -> tuple[Member, ...]:
        """Return snapshots of the scope's current members."""
        return self.core.snapshots()

    @property
    def has_members(self) -> bool:
        """Whether the scope has any members now."""
        return self.core.has_members

    def leftovers(self) -> tuple[AbandonedMember, ...]:
        """Return the members that still run after they were abandoned; the receipts of their stops name them, too."""
        return self.core.living_leftovers()

    def statistics(self) -> ScopeStatistics:
        """Return a snapshot of the scope."""
        return self.core.statistics()

    def add_closer(self, fn: Callable[[], object]) -> Closer:
        """Register ``fn`` to be called after the grace period of a stop, to free a resource on which members block.

        For example, ``fn`` can shut down a socket or close a stream. ``fn`` runs on the scope's loop and must not
        block. To remove ``fn``, call ``close()`` on the returned object.
        """
        return self.core.add_closer(fn)

    def children(self) -> tuple[Scope, ...]:
        """Return the child scopes that this scope owns now."""
        return tuple(scope for scope in self.core.members.copy().values() if isinstance(scope, Scope))

    def open(self) -> Scope:
        """Bind the scope to the running loop and to its parent; return the scope.

        Raises:
            Interrupted: the scope or one of its ancestors was already interrupted.
            ScopeClosed: the parent accepts no new members.
            RuntimeError: the scope was already opened, or no loop is running.
        """
        self.core.open(self)
        if self._deadline_s is not None:
            self.core.deadline = Deadline(self._deadline_s, self.interrupt, asyncio.get_running_loop())
        return self

    async def __aenter__(self) -> Scope:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a scope can only be entered inside a task; call open() instead")
        self.open()
        outer = current_claim.get()
        if isinstance(outer, TaskHandle) and outer.task is None and not outer.done():
            # An eager task: it runs before its creator has a reference to it.
            outer.task = task
        while outer is not None and (outer.task is not task or not outer.live):
            outer = outer.outer
        self.core.body = body = BodyClaim(self.core, task, outer, self)
        place = current_claim.enter(body)
        body.generator = place.frame
        self._entered = (place, current.enter(self.interrupt))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core = self.core
        body = core.body
        assert body is not None
        for entered in reversed(self._entered):
            entered.leave()
        body.leave()
        if error is not None:
            self._body_failed(error)
        cancelled = await self._end()
        if body.settle(error) and cancelled is None:
            cancelled = asyncio.CancelledError()
        core.body = None
        if isinstance(error, (GeneratorExit, KeyboardInterrupt, SystemExit)):
            return
        if cancelled is not None:
            if isinstance(error, asyncio.CancelledError):
                return
            raise cancelled from core.failure()
        if core.failed:
            failure = core.failure()
            if failure is error:
                return
            assert failure is not None
            raise failure
        if isinstance(error, Interrupted) and error.cause is self.interrupt.cause:
            return
        cause = core.interrupted_by()
        if cause is not None:
            raise Interrupted(cause) from core.failure()

    def _body_failed(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.interrupt.trigger("the task that entered it was cancelled", kind="stop")
        elif isinstance(error, GeneratorExit):
            self.interrupt.trigger("the generator that entered it was closed", kind="stop")
        elif isinstance(error, Interrupted):
            self.interrupt.trigger(cause=error.cause)
        else:
            self.core.fail(error, "the body")

    async def join(self) -> None:
        """Wait until all members have ended by themselves, then close the scope.

        Raises:
            Interrupted: the scope was interrupted.
            Exception: a member raised this error; if several members raised errors, they are in an exception group.
        """
        core = self.core
        core.open_loop()
        cancelled = await self._end()
        if cancelled is not None:
            raise cancelled
        failure = core.failure()
        if core.failed and failure is not None:
            raise failure
        cause = core.interrupted_by()
        if cause is not None:
            raise Interrupted(cause) from failure

    def close_when_done(self, fn: Callable[[], object]) -> None:
        """Close the scope once its members have ended or were stopped, then call ``fn`` on the scope's loop.

        Use this method if the scope's owner is not a task and therefore cannot await `join`. When ``fn`` is called,
        ``closed``, ``errors`` and ``receipt`` have their final values. Call this method on the scope's loop only.
        """
        core = self.core
        core.on_closed = fn
        core.is_leaving = True
        core.close_if_empty()

    async def _end(self) -> asyncio.CancelledError | None:
        """Wait until the scope is closed; return the first cancellation that the waiting task received meanwhile."""
        core = self.core
        core.is_leaving = True
        cancelled: asyncio.CancelledError | None = None
        if self.interrupt.triggered:
            core.begin_stop()
        else:
            core.close_if_empty()
        while not core.is_over:
            try:
                await core.wait_closed()
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
                self.interrupt.trigger("the task that waits for it was cancelled", kind="stop")
                core.begin_stop()
        return cancelled

    async def stop(
        self,
        reason: str = "",
        *,
        kind: CauseKind = "stop",
        grace_s: float | None = None,
        abandon_after_s: float | None = None,
        cause: Cause | None = None,
    ) -> StopReceipt:
        """Interrupt the scope, end what is left by force after the grace period, and return a receipt of the outcome.

        You can call this method any number of times, from any loop; all calls return the same receipt. The first call
        may set times that are shorter or longer than the scope's own; later calls can only shorten these times. Inner
        scopes are stopped within the same times, but not longer than the times that they were created with. The stop
        ends after ``grace_s + abandon_after_s``, even if members still run. If the loop was blocked at the end of the
        grace period, ``abandon_after_s`` counts from the moment at which the loop runs again. If the caller is
        cancelled, the stop continues.

        Parameters:
            reason, kind: human-readable reason, and kind of the cause.
            grace_s: grace period for cleanup, in seconds; None uses the scope's.
            abandon_after_s: time in seconds from the end of the grace period until survivors are abandoned; None uses
                the scope's.
            cause: cause to record; if given, ``reason`` and ``kind`` are ignored.

        Raises:
            InvalidRequest: a time is invalid, for example nan.
            Interrupted: the method was called from inside the scope, which cannot wait for its own end. After the stop,
                the receipt is in ``scope.receipt``.
        """
        check_times(None, grace_s, abandon_after_s)
        core = self.core
        if core.is_over:
            return core.late_receipt(reason, kind, cause)
        times = core.request_times(grace_s, abandon_after_s)
        self.interrupt.trigger(reason, kind=kind, cause=cause)
        core.listen()
        core.stop_in(times)
        if self.is_around_caller():
            self.interrupt.check()
        await core.wait_closed()
        return core.late_receipt(reason, kind, cause)

    @contextlib.contextmanager
    def hold_deadline(self) -> Iterator[None]:
        """``with scope.hold_deadline():`` pauses the scope's own deadline, for example while waiting for a person.

        After the block, the deadline continues with the time that remained; overlapping or nested blocks count as one.
        Deadlines of enclosing scopes and of children keep running. If the scope has no deadline, this does nothing.

        Raises:
            RuntimeError: the method was not called on the loop that the scope was opened on.
        """
        loop = asyncio._get_running_loop()
        if loop is None or loop is not self.core.loop:
            raise RuntimeError(f"hold_deadline() was called outside the loop of scope {self.name!r}; call it there")
        deadline = self.core.deadline
        if deadline is None:
            yield
            return
        deadline.pause()
        try:
            yield
        finally:
            deadline.resume()

    def request_stop(self, cause: Cause, *, grace_s: float | None = None, abandon_after_s: float | None = None) -> None:
        """Request a stop of the scope, and return without waiting for the stop to end.

        Callable from any thread, including from inside the scope. To be notified of the end, use `close_when_done`.

        Parameters:
            cause: cause of the stop.
            grace_s, abandon_after_s: times in seconds, as for `stop`; None uses the scope's.
        """
        check_times(None, grace_s, abandon_after_s)
        times = self.core.request_times(grace_s, abandon_after_s)
        self.interrupt.trigger(cause=cause)
        self.core.stop_in(times)

    def is_around_caller(self) -> bool:
        """Return whether the calling code runs in this scope or in one of its descendants."""
        scope: Scope | None = current_scope()
        while scope is not None and scope is not self:
            scope = scope.parent
        return scope is self and not self.closed

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
        self, work: Callable[..., T], /, *values: Any, on: Literal["thread"], name: str | None = None
    ) -> Handle[T]: ...
    @overload
    def spawn(
        self,
        work: Callable[..., T],
        /,
        *values: Any,
        on: Literal["process"],
        name: str | None = None,
        output: Output | None = None,
    ) -> Handle[T]: ...
    def spawn(
        self,
        work: Coroutine[Any, Any, Any] | Callable[..., Any],
        /,
        *values: Any,
        on: Literal["loop", "thread", "process"] = "loop",
        name: str | None = None,
        output: Output | None = None,
    ) -> Handle[Any]:
        """Start work that the scope owns, and return its handle. Callable from any thread.

        The work runs in a copy of the caller's context. If a member raises an error, the scope is interrupted. If a
        member is cancelled or interrupted, the scope continues, and awaiting the handle raises `Interrupted`. A task
        that is cancelled before its first step never runs, not even its ``finally``.

        Parameters:
            work: coroutine or coroutine function; for ``thread`` and ``process``, a function.
            values: arguments of the function.
            on: where the work runs. ``process`` is a separate Python process that imports the function's module and can
                be killed at any time; arguments and result are pickled (see `holdfast.runtime.scope.isolated_call`).
            name: display name; None uses the name of the function.
            output: callback for a ``process``, called on the scope's loop with the output that the function prints.
                The callback's result is awaited before more output is read; an error of the callback ends the call.
                None writes the output to standard error.

        Raises:
            ScopeClosed: the scope is stopping, closed or not yet open.
        """
        launch = _LAUNCHERS.get(on)
        if launch is None:
            raise InvalidRequest(f"unknown value on={on!r}; choose loop, thread or process")
        label = name or getattr(work, "__qualname__", None) or type(work).__name__
        return launch(self, work, values, label, output)

    def _spawn_task(self, work: Any, values: tuple[Any, ...], name: str, output: Output | None = None) -> Handle[Any]:
        if isinstance(work, CoroutineType):
            coroutine = work
        else:
            assert callable(work)
            coroutine = work(*values)
            if not isinstance(coroutine, Coroutine):
                raise TypeError(f"{name!r} is not a coroutine function; use on='thread' for a blocking function")
        core = self.core
        handle: TaskHandle[Any] = TaskHandle(core, name, coroutine, self)
        handle.started_in = inside(handle, self.interrupt)
        try:
            core.enter(handle)
        except ScopeClosed:
            coroutine.close()
            raise
        if asyncio._get_running_loop() is core.loop:
            handle.start()
        else:
            core.on_loop(handle.start)
        return handle

    def _spawn_thread(self, work: Any, values: tuple[Any, ...], name: str, output: Output | None = None) -> Handle[Any]:
        if not callable(work):
            raise TypeError("on='thread' takes a function, not a coroutine; omit on= or pass the function")
        core = self.core
        handle: ThreadHandle[Any] = ThreadHandle(core, name, scope=self)
        handle.started_in = inside(handle, self.interrupt)
        core.enter(handle)
        try:
            handle.start(work, values, {})
        except BaseException:
            core.on_loop(core.discard, handle, None)
            raise
        return handle

    def _spawn_process(self, work: Any, values: tuple[Any, ...], name: str, output: Output | None) -> Handle[Any]:
        from holdfast.runtime.scope.isolated_call import run_isolated

        if not callable(work):
            raise TypeError("on='process' takes a function, not a coroutine; omit on= or pass the function")
        return self._spawn_task(run_isolated(self.core, self.process_host, work, values, name, output), (), name)

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
        wall: WallSpec | None = None,
        pass_fds: Sequence[int] = (),
        confirm: Callable[[], bool] | None = None,
        cgroup: CgroupSpec | None = None,
    ) -> Process:
        """Start a program; the scope owns the program and all its descendants.

        The parameters have the same meaning as those of `ProcessHost.spawn`. The scope waits for the program to end;
        descendants that outlive the program end with the scope. A stop of the scope sends SIGTERM to the whole process
        tree, and SIGKILL when the grace period is over.

        Raises:
            ScopeClosed: the scope is stopping, closed or not yet open.
            OSError, ValueError: the program failed to start; see `ProcessHost.spawn`.
        """
        options: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "cwd": cwd, "env": env}
        options |= {"wall": wall, "pass_fds": pass_fds, "confirm": confirm, "cgroup": cgroup}
        return await start_program(self.core, self.process_host, argv, name=name, **options)

    @property
    def threads(self) -> ThreadPool:
        """Thread pool for ``on="thread"``: the scope's own, its parent's, or the shared pool of this process."""
        return self.core.threads

    @property
    def process_host(self) -> ProcessHost:
        """Host that starts programs: the scope's own, its parent's, or the shared host of this process."""
        if self._processes is None:
            from holdfast.runtime.process_host import process_host

            self._processes = process_host()
        return self._processes

    def child(self, name: str, *, deadline_s: float | None = None, grace_s: float | None = None) -> Scope:
        """Create a scope that this scope owns; enter it with ``async with`` or call its ``open()``."""
        return Scope(name, parent=self, deadline_s=deadline_s, grace_s=grace_s)


_LAUNCHERS: Final[dict[str, Callable[[Scope, Any, tuple[Any, ...], str, Output | None], Handle[Any]]]] = {
    "loop": Scope._spawn_task,
    "thread": Scope._spawn_thread,
    "process": Scope._spawn_process,
}


def current_scope() -> Scope | None:
    """Return the scope that this code runs in, or None outside any scope."""
    place = current_claim.get()
    return cast("Scope | None", place.scope) if place is not None else None
