"""Structured concurrency: a scope owns tasks, threads, processes and child scopes, and they end with it.

An interrupted scope is stopped by its `Stopping`, which no code can cancel and which ends by its deadline. See
`membership` for the invariants of members, and `enclosure` for those of native cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, overload

from holdfast.clock import system_clock
from holdfast.errors import Interrupted, InvalidRequest, ScopeClosed
from holdfast.protocol.stopping import Cause, CauseKind, StopReceipt
from holdfast.runtime.carried import Entered
from holdfast.runtime.enclosure import Body, current_place, inside
from holdfast.runtime.interrupt import Interrupt, current, current_interrupt, use
from holdfast.runtime.members import Handle
from holdfast.runtime.membership import Closer, Membership, ScopeStatistics
from holdfast.runtime.owned_processes import ForeignHandle, ProcessHandle, boot_ticks
from holdfast.runtime.owned_tasks import TaskHandle
from holdfast.runtime.owned_threads import ThreadHandle
from holdfast.runtime.threads import ThreadPool

if TYPE_CHECKING:
    from holdfast.runtime.adoption_processes import ForeignProcess
    from holdfast.runtime.isolated import Output
    from holdfast.runtime.processes import Process, ProcessHost, Stream

__all__ = ["Closer", "Scope", "ScopeStatistics", "current_scope", "detached"]

T = TypeVar("T")

GRACE_S = 5.0
KILL_AFTER_S = 2.0


class _Current:
    """Marker for the scope that the code runs in."""


CURRENT: Final = _Current()


class Scope(Membership):
    """Owns everything that is started in it, and stops all of it.

    At its end, ``async with Scope("name") as scope`` waits for what was spawned, as a task group does. The first
    error of a member interrupts the scope and is raised (several errors as an exception group). When the scope is
    interrupted, its body is cancelled natively, once, its members are stopped, and `Interrupted` is raised.

    Owners that outlive a block call ``scope.open()`` and later ``await scope.stop()`` or ``await scope.join()``.

    Parameters:
        name: display name for receipts, causes and the task tree.
        parent: scope that owns this one; default: the scope that the code runs in. None: independent.
        deadline_s: interrupt the scope this many seconds after it was opened.
        grace_s: grace period for members to clean up after an interrupt, in seconds.
        kill_after_s: time after the grace period until members are abandoned, in seconds.
        detached: make the scope independent of the scope and interrupt that the code runs in.
        threads: pool for ``on="thread"``; default: the parent's, or the one shared by the process.
        processes: starts programs; default: the parent's, or the one of this process.
        owner: key under which abandoned threads are counted; default: the parent's.
        sharer: key for fair sharing of threads: scopes with different keys take turns. Default: the parent's.

    Raises:
        InvalidRequest: an invalid time, such as nan.

    A scope belongs to the loop on which it was opened. `spawn`, `stop`, `members` and `add_closer` are callable from
    any thread or loop.
    """

    __slots__ = ("_entered", "_processes")

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
        sharer: str | None = None,
    ) -> None:
        _check_times(deadline_s, grace_s, kill_after_s)
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
        super().__init__(
            name,
            parent=parent,
            interrupt=interrupt,
            deadline_s=deadline_s,
            grace_s=grace_s if grace_s is not None else parent.grace_s if parent is not None else GRACE_S,
            kill_after_s=(
                kill_after_s
                if kill_after_s is not None
                else parent.kill_after_s
                if parent is not None
                else KILL_AFTER_S
            ),
            threads=threads if threads is not None else parent._pool if parent is not None else None,
            owner=owner if owner is not None else parent.owner if parent is not None else "",
            sharer=sharer if sharer is not None else parent.sharer if parent is not None else "",
        )
        self.parent: Scope | None = parent
        self._processes: ProcessHost | None = (
            processes if processes is not None else parent._processes if parent is not None else None
        )
        self._entered: tuple[Entered[Any], ...] = ()

    def children(self) -> tuple[Scope, ...]:
        """Return the scopes that this one owns now."""
        return tuple(member for member in self._members.copy() if isinstance(member, Scope))

    def open(self) -> Scope:
        """Bind the scope to the running loop and to its parent; return itself.

        Raises:
            Interrupted: the scope or one of its parents was already interrupted.
            ScopeClosed: its parent takes no new members.
            RuntimeError: it was already opened, or no loop is running.
        """
        if self._loop is not None:
            raise RuntimeError(f"scope {self.name!r} is already open; create a new one")
        loop = asyncio.get_running_loop()
        self.interrupt.check()
        parent = self.parent
        if parent is not None:
            with parent._gate:
                parent._check_open()
                parent._members[self] = None
        self._loop = loop
        self._opened_at = time.monotonic()
        self._opened_ticks = boot_ticks()
        self._registration = self.interrupt.on_trigger(self._on_interrupt, loop=loop)
        if self._deadline_s is not None:
            self._run_deadline(self._deadline_s)
        return self

    async def __aenter__(self) -> Scope:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a scope can only be entered in a task")
        self.open()
        outer = current_place.get()
        if isinstance(outer, TaskHandle) and outer.task is None and not outer.done():
            # An eager task: it runs before its creator has a reference to it.
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
        if body.settle(error) and cancelled is None:
            cancelled = asyncio.CancelledError()
        self._body = None
        if isinstance(error, (GeneratorExit, KeyboardInterrupt, SystemExit)):
            return
        if cancelled is not None:
            if isinstance(error, asyncio.CancelledError):
                return
            raise cancelled from self._failure()
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

    async def join(self) -> None:
        """Wait until everything spawned has ended by itself, then close the scope.

        Raises:
            Interrupted: the scope was interrupted.
            Exception: raised by a member; several as an exception group.
        """
        self._loop_here()
        cancelled = await self._end()
        if cancelled is not None:
            raise cancelled
        failure = self._failure()
        if self._failed and failure is not None:
            raise failure
        cause = self._interrupted_by()
        if cause is not None:
            raise Interrupted(cause) from failure

    def close_when_done(self, fn: Callable[[], object]) -> None:
        """Close the scope once its members have ended, by themselves or stopped; for owners that are not tasks.

        ``fn`` is then called on the scope's loop; by then, ``closed``, ``errors`` and ``receipt`` have their final
        values. Call this on the loop only.
        """
        self._on_closed = fn
        self._leaving = True
        self._look()

    async def _end(self) -> asyncio.CancelledError | None:
        """Wait until the scope is closed; return the first cancellation that the waiting task received meanwhile."""
        self._leaving = True
        cancelled: asyncio.CancelledError | None = None
        if self.interrupt.triggered:
            self._stop_here(self.grace_s, self.kill_after_s)
        else:
            self._look()
        while not self._over:
            try:
                await self._until_closed()
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
                self.interrupt.trigger("the task that waits for it was cancelled", kind="stop")
                self._stop_here(self.grace_s, self.kill_after_s)
        return cancelled

    async def _until_closed(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = None
        try:
            if not self._over:
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
        """Interrupt the scope, wait for the grace period, force what is left, and return a receipt of the outcome.

        You can call it any number of times, from any loop; all callers get the same receipt. If a stop is already
        running, a shorter grace shortens it. It ends after ``grace_s + kill_after_s`` whatever the members do. If the
        loop was blocked at the end of the grace period, ``kill_after_s`` counts from when it runs again. If the caller
        is cancelled, the stop continues.

        Parameters:
            reason: free text for people.
            kind: kind of the cause.
            grace_s: grace period for cleanup, in seconds; default: the scope's.
            kill_after_s: time after the grace period until survivors are abandoned, in seconds; default: the scope's.
            cause: cause to use instead of reason and kind.

        Raises:
            Interrupted: when called from inside the scope, which cannot wait for itself; ``scope.receipt`` has the
                receipt later.
        """
        if self._over:
            return self._late_receipt(reason, kind, cause)
        self.interrupt.trigger(reason, kind=kind, cause=cause)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._registration = self.interrupt.on_trigger(self._on_interrupt, loop=self._loop)
        grace = self.grace_s if grace_s is None else grace_s
        kill_after = self.kill_after_s if kill_after_s is None else kill_after_s
        if self.is_around_caller():
            self._on_loop(self._stop_here, grace, kill_after)
            self.interrupt.check()
        self._on_loop(self._stop_here, grace, kill_after)
        while not self._over:
            await self._until_closed()
        return self._late_receipt(reason, kind, cause)

    def _late_receipt(self, reason: str, kind: CauseKind, cause: Cause | None) -> StopReceipt:
        """Return the receipt of a closed scope; if it had ended by itself, create one that reports nothing to stop."""
        with self._gate:
            if self.receipt is None:
                why = self.interrupt.cause or cause
                why = why or Cause(kind=kind, reason=reason, origin=self.name, at=system_clock.now())
                self.receipt = StopReceipt(scope=self.name, cause=why)
            return self.receipt

    @contextlib.contextmanager
    def hold_deadline(self) -> Iterator[None]:
        """``with scope.hold_deadline():`` pauses the scope's own deadline, for example while it waits for a person.

        After the block, the remaining time continues to run; overlapping or nested blocks count as one. Deadlines of
        enclosing scopes and of children keep running. Without a deadline this does nothing.

        Raises:
            RuntimeError: not called on the loop that the scope was opened on.
        """
        loop = asyncio._get_running_loop()
        if loop is None or loop is not self._loop:
            raise RuntimeError(f"hold_deadline() of scope {self.name!r} called outside the loop that it was opened on")
        self._holds += 1
        if self._holds == 1 and self._deadline is not None:
            self._deadline.cancel()
            self._held_at = loop.time()
        try:
            yield
        finally:
            self._holds -= 1
            if self._holds == 0 and self._deadline is not None:
                self._run_deadline(self._deadline_at - self._held_at)

    def request_stop(self, cause: Cause, *, grace_s: float | None = None, kill_after_s: float | None = None) -> None:
        """Start a stop without waiting for it. Callable from any thread and from inside; see `close_when_done`."""
        self.interrupt.trigger(cause=cause)
        grace = self.grace_s if grace_s is None else grace_s
        self._on_loop(self._stop_here, grace, self.kill_after_s if kill_after_s is None else kill_after_s)

    def is_around_caller(self) -> bool:
        """Return whether the calling code runs in this scope, or in one inside it."""
        scope: Scope | None = current_scope()
        while scope is not None and scope is not self:
            scope = scope.parent
        return scope is self and self._state != "closed"

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
        """Start work that the scope owns; callable from any thread. Its context is a copy of the caller's.

        A member that raises interrupts the scope. One that ends cancelled or interrupted does not; its handle reports
        it. A task that is cancelled before its first step never runs at all, not even its ``finally``.

        Parameters:
            work: coroutine or coroutine function; for ``thread`` and ``process``, a function.
            values: arguments for a function.
            on: where it runs. A ``process`` is another Python that imports the function's module. It can be killed
                whatever it does; its arguments and result are pickled; see `holdfast.runtime.isolated`.
            name: display name; default: the name of the function.
            output: for a ``process``: called on the scope's loop with what the function prints. Its result is awaited
                before more is read; an error it raises ends the call. Default: output goes to standard error.

        Raises:
            ScopeClosed: the scope is stopping, closed or not yet open.
        """
        label = name or getattr(work, "__qualname__", None) or type(work).__name__
        if on == "thread":
            if not callable(work):
                raise TypeError("on='thread' takes a function, not a coroutine; omit on= or pass the function")
            return self._spawn_thread(work, values, label)
        if on == "process":
            from holdfast.runtime.isolated import run_isolated

            if not callable(work):
                raise TypeError("on='process' takes a function, not a coroutine; omit on= or pass the function")
            work = run_isolated(self, work, values, label, output)
        if isinstance(work, CoroutineType):
            coroutine = work
        else:
            assert callable(work)
            coroutine = work(*values)
            if not isinstance(coroutine, Coroutine):
                raise TypeError(f"{label!r} is not a coroutine function; use on='thread' for a blocking function")
        handle: TaskHandle[Any] = TaskHandle(self, label, coroutine)
        handle._context = inside(handle, self.interrupt)
        try:
            self._enter(handle)
        except ScopeClosed:
            coroutine.close()
            raise
        if asyncio._get_running_loop() is self._loop:
            handle._start()
        else:
            self._on_loop(handle._start)
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
        """Start a program that the scope owns, with all its descendants; parameters as in `ProcessHost.spawn`.

        The scope waits for the program to end; descendants that outlive the program end with the scope. A stop sends
        SIGTERM to the whole tree and kills it when the grace period is over.

        Raises:
            ScopeClosed: the scope is stopping, closed or not yet open.
            OSError, ValueError: the program failed to start, as in `ProcessHost.spawn`.
        """
        handle = ProcessHandle(self, name or " ".join(map(os.fsdecode, argv[:1])))
        self._enter(handle)
        try:
            process = await self.process_host.spawn(
                argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, name=name, on_cut=handle._on_cut
            )
            await handle._take(process)
        except BaseException:
            if not handle.cut:  # otherwise it is discarded once nothing of the start is left
                self._on_loop(self._discard, handle, None)
            raise
        return process

    @property
    def process_host(self) -> ProcessHost:
        """Starter of its programs: its own, its parent's, or the one of this process."""
        if self._processes is None:
            from holdfast.runtime.processes import process_host

            self._processes = process_host()
        return self._processes

    def adopt_process(self, process: ForeignProcess, /) -> bool:
        """Adopt a program that foreign code started in the scope; False if it is too late. Callable from any thread."""
        handle = ForeignHandle(self, process)
        if not self._adopt(handle):
            return False
        handle._attend()
        return True

    def child(self, name: str, *, deadline_s: float | None = None, grace_s: float | None = None) -> Scope:
        """Create a scope that this one owns; use it with ``async with`` or ``open()``."""
        return Scope(name, parent=self, deadline_s=deadline_s, grace_s=grace_s)


def _check_times(deadline_s: object, grace_s: object, kill_after_s: object) -> None:
    """Raise `InvalidRequest` for an invalid time. A deadline may already be over, or infinite."""
    if deadline_s is not None and (not isinstance(deadline_s, (int, float)) or math.isnan(deadline_s)):
        raise InvalidRequest(f"deadline_s is {deadline_s!r}; use a number of seconds, or None for no deadline")
    for name, value in (("grace_s", grace_s), ("kill_after_s", kill_after_s)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise InvalidRequest(f"{name} is {value!r}; use a number of seconds, 0 or more")


def current_scope() -> Scope | None:
    """Return the scope that this code runs in, or None outside any scope."""
    place = current_place.get()
    return cast(Scope, place.scope) if place is not None else None


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Start what is started in the body outside any scope and interrupt: for shared resources."""
    place = current_place.enter(None)
    try:
        with use(None):
            yield
    finally:
        place.leave()
