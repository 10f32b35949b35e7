"""Adoption of tasks and executor calls that foreign code starts in a scope with plain asyncio.

`install` also enables `holdfast.runtime.adoption.threads` and `holdfast.runtime.adoption.processes`.

Invariants
- Adoption is installed per loop; tasks and calls outside any scope are started exactly as before.
- Tasks and executor calls become members of the scope in whose context they were started. Their results and errors
  belong to the foreign code that started them: an error does not interrupt the scope.
- During the grace period of a stop, cleanup code may still start tasks and calls. After the grace period, new tasks are
  cancelled before they begin, and new calls are refused.
- If ``sys.exit()`` is called in such a task or call, only that task or call ends, with an error that names it. The
  loop, which other code shares, continues. `KeyboardInterrupt` (Ctrl-C) comes from the user and propagates.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import CoroutineType
from typing import Any, TypeVar, cast

from holdfast.errors import ScopeClosed
from holdfast.runtime import thread_pool as threads_module
from holdfast.runtime.adoption import processes as adoption_processes
from holdfast.runtime.adoption.executor_internals import default_executor
from holdfast.runtime.adoption.threads import (
    call_name,
    home_of_thread,
    linger,
    starting_scope,
    watch_threads,
)
from holdfast.runtime.processes.fork_signals import watch_forks
from holdfast.runtime.scope.cancel_claim import current_claim, inside
from holdfast.runtime.scope.scope import Scope, current_scope
from holdfast.runtime.scope.state import ScopeState
from holdfast.runtime.scope.task_handle import TaskHandle, without_exit
from holdfast.runtime.scope.thread_handle import ThreadHandle
from holdfast.runtime.thread_pool import ThreadPool, shared_threads

__all__ = ["PoolExecutor", "Restorer", "TaskAdopter", "install"]

T = TypeVar("T")

_log = logging.getLogger("holdfast.runtime")


class TaskAdopter:
    """A task factory: each task started in the context of a scope becomes a member of that scope.

    Parameters:
        previous: previous task factory of the loop, if any.
    """

    def __init__(self, previous: Callable[..., Any] | None) -> None:
        self.previous = previous

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Future[T]:
        """Create the task; called by the loop."""
        context: contextvars.Context | None = options.get("context")
        place = current_claim.get() if context is None else current_claim.get_in(context)
        owner = None if place is None else cast(ScopeState, place.owner)
        if owner is None or owner.loop is not loop:
            return self._make(loop, coroutine, options)
        assert place is not None
        if asyncio._get_running_loop() is not loop:
            coroutine.close()
            raise RuntimeError(
                f"a task of scope {owner.name!r} was started outside the thread of its loop; use scope.spawn()"
            )
        name = str(options.get("name") or getattr(coroutine, "__qualname__", "task"))
        handle: TaskHandle[T] = TaskHandle(owner, name, None, adopted=True, starter=place, scope=place.scope)
        if context is None:
            options["context"] = context = contextvars.copy_context()
            context.run(current_claim.variable.set, handle)
        # A context that was passed in may be shared by several tasks or be the current one: leave it unchanged.
        handle.started_in = context
        adopted = owner.adopt(handle)
        work = coroutine
        guarded = None
        if adopted and isinstance(coroutine, CoroutineType):
            guarded = coroutine
            work = without_exit(coroutine)
        try:
            task = self._make(loop, work, options)
        except BaseException:
            if work is not coroutine:
                work.close()
            owner.discard(handle, None)
            raise
        if adopted:
            handle.attach(task, guarded)
        else:
            task.cancel()
            _log.warning(
                "cancelled task %r before it began: its scope %r has ended; "
                "start tasks shared between scopes inside 'with detached():'",
                name,
                owner.name,
            )
        return task

    def start_owned(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T],
        name: str,
        context: contextvars.Context,
    ) -> asyncio.Task[T]:
        """Create a task that already belongs to a scope."""
        if self.previous is None:
            return asyncio.Task(coroutine, loop=loop, name=name, context=context)
        return self._make(loop, coroutine, {"name": name, "context": context})

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], options: dict[str, Any]
    ) -> asyncio.Task[T]:
        if self.previous is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        task: asyncio.Task[T] = self.previous(loop, coroutine, **options)
        return task


class PoolExecutor(ThreadPoolExecutor):
    """Default executor of a loop, whose calls run in the caller's context and belong to the caller's scope.

    The executor starts no threads of ``concurrent.futures``, so the interpreter does not wait for its threads at exit.

    Parameters:
        pool: thread pool for calls outside any scope; None uses the pool shared by the process.
    """

    def __init__(self, pool: ThreadPool | None = None) -> None:
        super().__init__(max_workers=1)
        self.pool = shared_threads() if pool is None else pool

    def submit(self, fn: Callable[..., T], /, *values: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Run ``fn`` on a thread.

        Raises:
            ScopeClosed: the current scope no longer accepts calls, not even for cleanup.
            LimitExceeded: the pool is full.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        scope = current_scope()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*values, **kwargs)
            except SystemExit as left:
                # Awaiting it would end the loop, and with it the work of other scopes.
                error = RuntimeError(f"{name} called sys.exit({left.code!r})")
                error.__cause__ = left
                future.set_exception(left if scope is None else error)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        name = call_name(fn)
        if scope is None or scope.core.loop is None:
            self.pool.submit(call, on_done=_ignore, name=name)
            return future
        core = scope.core
        handle = _AdoptedCall(scope, name, future)
        handle.started_in = inside(handle, scope.interrupt)
        if not core.adopt(handle):
            raise ScopeClosed(f"scope {scope.name!r} is {scope.state} and cannot start a thread for {name!r}")
        try:
            handle.start(call, (), {})
        except BaseException:
            core.on_loop(core.discard, handle, None)
            raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing, because the pool outlives the loop and its threads are daemons."""


class _AdoptedCall(ThreadHandle[None]):
    """A call of foreign code, whose future is cancelled if the call is withdrawn before it begins."""

    __slots__ = ("_future",)

    def __init__(self, scope: Scope, name: str, future: concurrent.futures.Future[Any]) -> None:
        super().__init__(scope.core, name, adopted=True, scope=scope)
        self._future = future

    def on_withdrawn(self) -> None:
        """Cancel the future."""
        self._future.cancel()
        self._future.set_running_or_notify_cancel()


def _ignore(result: object, error: BaseException | None) -> None:
    """Do nothing: the call has put both into its future."""


class Restorer:
    """Undoes an `install`; can be used as a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def restore(self) -> None:
        """Restore the loop's previous task factory and executor, and stop adoption. Idempotent."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Restorer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()


def install(loop: asyncio.AbstractEventLoop, *, threads: ThreadPool | None = None, sealed: bool = True) -> Restorer:
    """Adopt, from now on, all tasks, calls, threads and programs that foreign code starts on ``loop`` in a scope.

    Parameters:
        loop: loop to watch; its task factory and default executor are replaced.
        threads: thread pool of the default executor; None uses the pool shared by the process.
        sealed: whether to make the tags of programs indelible, permanently for this process; only the value for the
            first watched loop counts. See `holdfast.runtime.processes.seal` for the cost to an unprivileged user.
    """
    global _sealing
    factory = loop.get_task_factory()
    adopter = TaskAdopter(factory)
    executor = default_executor(loop)
    loop.set_task_factory(cast(Any, adopter))
    loop.set_default_executor(PoolExecutor(threads))
    watch_threads(1)
    watch_forks()
    programs = 0 if getattr(loop, "virtual", False) else 1  # the explorer's loops have no programs
    _sealing = sealed if not _watching else _sealing
    _watch_processes(programs)

    def undo() -> None:
        if cast(Any, loop.get_task_factory()) is adopter:
            loop.set_task_factory(factory)
        if isinstance(executor, ThreadPoolExecutor):
            loop.set_default_executor(executor)
        _watch_processes(-programs)
        watch_threads(-1)

    return Restorer(undo)


_watching = 0
_sealing = True
_process_adoption: adoption_processes.Restorer | None = None


def _scope_for_program() -> ScopeState | None:
    """Return the scope that owns a program started here.

    Raises:
        ScopeClosed: the scope has ended. Otherwise a pool would replace its killed processes forever.
    """
    scope = starting_scope()
    if scope is not None and scope.closed:
        raise ScopeClosed(
            f"scope {scope.name!r} is closed and cannot start programs",
            hint="start programs shared between scopes inside 'with detached():'",
        )
    return None if scope is None else scope.core


def _watch_processes(step: int) -> None:
    """Adopt programs process-wide while any loop is watched."""
    global _watching, _process_adoption
    _watching += step
    if _watching and _process_adoption is None:
        threads_module.on_leave = adoption_processes.leave_thread
        _process_adoption = adoption_processes.install(
            _scope_for_program, sealed=_sealing, home=home_of_thread, lingers=linger
        )
    elif not _watching and _process_adoption is not None:
        _process_adoption.restore()
        threads_module.on_leave = None
        _process_adoption = None
