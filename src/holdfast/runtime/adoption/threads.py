"""Track the threads that foreign code uses in a scope: executor threads, anyio's worker threads, plain threads.

Invariants
- A call that foreign code submits to its own executor, or to anyio's worker threads, is a member of the scope in whose
  context it was submitted, until it has ended. The call runs unchanged: no context is added, and its result or error
  goes to the foreign code. A call that no thread has started is cancelled when the scope stops.
- The threads of such a pool belong to no scope; only the submitted calls do. Any other ``threading.Thread`` started in
  a scope is recorded, and reported as unowned while it lives.
- Threads, calls and programs that such a call or thread starts belong to the same scope, although no context carries
  the scope; see `starting_scope`.
- Outside scopes, everything runs unchanged, at the cost of one context variable lookup per start.
- A forked child is outside all scopes: the loops belong to the parent process, and a lock may be held forever in the
  child.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import ScopeClosed
from holdfast.protocol.stopping import Abandoned
from holdfast.runtime.adoption.executor_internals import is_executor_thread
from holdfast.runtime.adoption.processes import leave_thread
from holdfast.runtime.interrupt.interrupt import Interrupt
from holdfast.runtime.scope.cancel_claim import current_claim
from holdfast.runtime.scope.handle import Handle, Member, MemberKind
from holdfast.runtime.scope.scope import Scope, current_scope
from holdfast.runtime.scope.state import ScopeState
from holdfast.runtime.thread_pool import any_abandoned, call_of_thread, thread_stack

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["ForeignCall", "call_name", "home_of_thread", "linger", "starting_scope", "watch_threads"]

# Threads of the runtime, and those in which asyncio waits for programs, which end with the programs.
_OURS = ("holdfast-", "asyncio-waitpid-")
_ANYIO = "anyio._backends._asyncio"


class ForeignCall(Handle[None]):
    """A member that is a call on a thread of foreign code."""

    __slots__ = ("cancel_unbegun", "thread")

    kind: MemberKind = "thread"

    def __init__(self, scope: Scope, name: str) -> None:
        super().__init__(scope.core, name, adopted=True, scope=scope)
        self.thread: threading.Thread | None = None
        self.cancel_unbegun: Callable[[], object] | None = None
        """Withdraws the call if no thread has begun it."""

    def enter(self) -> None:
        """Join the scope as a member.

        Raises:
            ScopeClosed: the scope no longer accepts calls, not even for cleanup.
        """
        if not self.owner.adopt(self):
            raise ScopeClosed(f"scope {self.owner.name!r} is closed and cannot start a thread for {self.name!r}")

    def run(self, fn: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Run the call, on its thread."""
        self.thread = thread = threading.current_thread()
        before = _homes.get(thread)
        _homes[thread] = cast(Scope, self.scope)
        try:
            return fn(*values, **options)
        finally:
            leave_thread()
            self.thread = None
            if before is None:
                _homes.pop(thread, None)  # missing in a forked child that returns
            else:
                _homes[thread] = before

    def end(self, _: object = None) -> None:
        """Record that the call has ended or will never start. Callable from any thread."""
        self.owner.on_loop(self._finish)

    def _finish(self) -> None:
        if self.settle(None, None):
            self.owner.discard(self, None)
        self.cancel_unbegun = None

    def listen_to(self, interrupt: Interrupt) -> None:
        """Do nothing, because foreign code does not use the interrupt."""

    def ask(self) -> None:
        """Withdraw the call if no thread has started it."""
        if self.thread is None and self.cancel_unbegun is not None:
            self.cancel_unbegun()

    def ask_again(self) -> None:
        """Do the same as `ask`."""
        self.ask()

    def is_alive(self) -> bool:
        """Whether a thread runs the call. Callable from any thread."""
        return self.thread is not None

    def running(self) -> ForeignCall | None:
        """Return this call while a thread runs it, else None."""
        return self if self.is_alive() else None

    def abandon(self) -> Abandoned:
        """Abandon the call; its thread belongs to foreign code."""
        thread = self.thread
        self.settle(None, None)
        return Abandoned(kind="thread", name=self.name, stack=() if thread is None else thread_stack(thread))

    def snapshot(self) -> Member:
        """Return a snapshot of the member."""
        thread = self.thread
        state = "starting" if thread is None else "stopping" if self.due else "running"
        return Member(
            kind="thread",
            name=self.name,
            started_at=self.started_at,
            state=state,
            thread=None if thread is None else thread.name,
            adopted=True,
        )


def call_name(fn: Callable[..., object]) -> str:
    """Return the name of a function; for a partial function, that of the wrapped function."""
    while isinstance(fn, functools.partial):
        # asyncio.to_thread makes partial(context.run, fn, …).
        carried = fn.args[0] if fn.args and getattr(fn.func, "__name__", "") == "run" else fn.func
        fn = carried if callable(carried) else fn.func
    return str(getattr(fn, "__qualname__", type(fn).__name__))


_homes: weakref.WeakKeyDictionary[threading.Thread, Scope] = weakref.WeakKeyDictionary()


def starting_scope() -> Scope | None:
    """Return the scope that owns work started here; None in ``with detached()`` and outside any scope.

    This is the current scope, or else the scope in which foreign code started this thread or submitted the call that
    the thread runs.
    """
    scope = current_scope()
    if scope is not None or current_claim.variable in contextvars.copy_context():
        return scope
    return _homes.get(threading.current_thread())


def home_of_thread(native_id: int) -> ScopeState | None:
    """Return the state of the scope that the thread with this native id works for; None if it works for no scope."""
    for thread, scope in _homes_now():
        if thread.native_id == native_id:
            return scope.core
    call = call_of_thread(native_id)
    place = None if call is None else current_claim.get_in(call.context)
    return None if place is None else cast(ScopeState, place.owner)


def _homes_now() -> list[tuple[threading.Thread, Scope]]:
    """Return threads and their scopes; retry if other threads change the weak dictionary meanwhile."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(_homes.items())


def linger() -> bool:
    """Whether threads of ended scopes still run."""
    return any_abandoned() or any(thread.is_alive() and scope.closed for thread, scope in _homes_now())


def _leave_scopes() -> None:
    """Forget all scopes in a forked child; `ScopedVar` clears its context."""
    global _homes
    _homes = weakref.WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_scopes)

_plain_start = threading.Thread.start
_plain_submit = ThreadPoolExecutor.submit
_anyio_plain: Any = None
_watching = 0


def _start(thread: threading.Thread) -> None:
    scope = starting_scope()
    if scope is not None and not _of_a_pool(thread):
        _homes[thread] = scope
        scope.core.note_unowned(thread)
    _plain_start(thread)


def _of_a_pool(thread: threading.Thread) -> bool:
    if type(thread).__module__ == _ANYIO:
        _watch_anyio()
        return True
    return is_executor_thread(thread) or thread.name.startswith(_OURS)


def _submit(executor: ThreadPoolExecutor, fn: Callable[..., Any], /, *values: Any, **options: Any) -> Future[Any]:
    scope = starting_scope()
    if scope is None or scope.core.loop is None:
        return _plain_submit(executor, fn, *values, **options)
    call = ForeignCall(scope, call_name(fn))
    call.enter()
    try:
        future = _plain_submit(executor, call.run, fn, *values, **options)
    except BaseException:
        call.end()
        raise
    call.cancel_unbegun = future.cancel
    future.add_done_callback(call.end)
    return future


async def _run_in_anyio(
    backend: Any, fn: Callable[..., Any], values: tuple[Any, ...], *rest: Any, **options: Any
) -> Any:
    scope = starting_scope()
    if scope is None or scope.core.loop is None:
        return await _anyio_plain(backend, fn, values, *rest, **options)
    call = ForeignCall(scope, call_name(fn))
    call.enter()
    begun: list[bool] = []

    def run() -> Any:
        begun.append(True)
        try:
            return call.run(fn, *values)
        finally:
            call.end()

    try:
        return await _anyio_plain(backend, run, (), *rest, **options)
    finally:
        if not begun:
            call.end()


def _watch_anyio() -> None:
    """Watch anyio once it has been imported."""
    global _anyio_plain
    module = sys.modules.get(_ANYIO)
    if module is not None and _anyio_plain is None:
        backend = module.AsyncIOBackend
        _anyio_plain = backend.__dict__["run_sync_in_worker_thread"].__func__
        backend.run_sync_in_worker_thread = classmethod(_run_in_anyio)


def watch_threads(step: int) -> None:
    """Add ``step``, 1 or -1, to the number of watchers; start watching at the first one, stop after the last one.

    Watching continues if threads of ended scopes still run when the last watcher leaves.
    """
    global _watching, _anyio_plain
    before, _watching = _watching, _watching + step
    if _watching and not before:
        threading.Thread.start = _start  # type: ignore[assignment,method-assign]
        ThreadPoolExecutor.submit = _submit  # type: ignore[assignment,method-assign]
        _watch_anyio()
    elif before and not _watching and not linger():
        if threading.Thread.start is _start:
            threading.Thread.start = _plain_start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = _plain_submit  # type: ignore[method-assign]
        if _anyio_plain is not None:
            with contextlib.suppress(KeyError):
                sys.modules[_ANYIO].AsyncIOBackend.run_sync_in_worker_thread = classmethod(_anyio_plain)
            _anyio_plain = None
