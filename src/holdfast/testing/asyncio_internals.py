"""The private names of asyncio that a virtual loop and the leak detector need, each behind a public one.

A virtual loop has its own ready queue, its own timers and its own clock. asyncio offers no public way to replace them,
so the loop derives from `asyncio.BaseEventLoop`, and its steps from `asyncio.TimerHandle`.

`PRIVATE_NAMES` lists the names, which were checked on CPython 3.11.
``tests/testing/test_stdlib_internals.py`` fails on Python versions that lack any of these names.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import runners
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, TypeAlias, cast

__all__ = [
    "PRIVATE_NAMES",
    "BareLoop",
    "Cancel",
    "LoopTimer",
    "StepHandle",
    "awaited_future",
    "cancelling_all_tasks_with",
    "expect_pending",
    "is_result_unretrieved",
    "run_handle",
]

PRIVATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "asyncio.BaseEventLoop": (
        "_asyncgen_finalizer_hook",
        "_asyncgen_firstiter_hook",
        "_asyncgens",
        "_check_closed",
        "_process_events",
        "_run_once",
        "_thread_id",
        "_timer_handle_cancelled",
        "_write_to_self",
    ),
    "asyncio.Handle": (
        "_args", "_callback", "_cancelled", "_context", "_loop", "_repr", "_run", "_source_traceback",
    ),
    "asyncio.Task": ("_fut_waiter", "_log_destroy_pending", "_log_traceback"),
    "asyncio.TimerHandle": ("_scheduled", "_when"),
    "asyncio.runners": ("_cancel_all_tasks",),
}  # fmt: skip
"""The private names, by the module or class that owns them."""

Cancel: TypeAlias = Callable[[asyncio.AbstractEventLoop], None]
"""A function that cancels the unfinished tasks of a loop and waits until they have ended."""

_Handle = cast(Any, asyncio.Handle)
_TimerHandle = cast(Any, asyncio.TimerHandle)

run_handle: Final[Callable[[asyncio.Handle], None]] = _Handle._run
"""Run a handle's callback in the handle's context."""


class LoopTimer(asyncio.TimerHandle):
    """An asyncio timer; ``is_scheduled`` is true from the time the timer is set until it is due."""

    __slots__ = ()

    is_scheduled: Any = _TimerHandle._scheduled


class StepHandle(LoopTimer):
    """A handle without asyncio's debug support, for a loop that creates a handle for each step.

    Parameters:
        when: the time at which the handle fires if it is a timer.
        callback, args, loop, context: the same as for `asyncio.TimerHandle`.
        actor: the actor that takes this step.
    """

    __slots__ = ("actor", "born", "since")

    loop: Any = _Handle._loop
    run: Callable[[], None] = _Handle._run

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
        actor: Any,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = False
        self.actor = actor
        self.born = 0
        self.since = when

    def cancel(self) -> None:
        """Cancel the handle as asyncio does, and notify the loop, whether or not the handle is a timer."""
        if not self._cancelled:
            if self._scheduled:
                self.loop.on_timer_cancelled(self)
            else:
                self.on_cancel()
            self._cancelled = True
            self._callback = _nothing
            self._args = ()

    def on_cancel(self) -> None:
        """Notify the loop. Called once, when a handle other than a scheduled timer is cancelled."""
        raise NotImplementedError


class BareLoop(asyncio.BaseEventLoop):
    """asyncio's base loop without a selector; a subclass supplies the ready queue and the timers."""

    check_open: Callable[[], None] = cast(Any, asyncio.BaseEventLoop)._check_closed
    """Raise `RuntimeError` if the loop is closed."""

    def run_step(self) -> None:
        """Run one handle, or advance the time if no handle is ready."""
        raise NotImplementedError

    def on_timer_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Note that a scheduled timer was cancelled."""
        raise NotImplementedError

    def on_wakeup(self) -> None:
        """Note that another thread has woken the loop."""
        raise NotImplementedError

    @property
    def has_generators(self) -> bool:
        """Whether any async generator that was started on this loop is still open."""
        return bool(self._asyncgens)  # type: ignore[attr-defined]

    def run_until(self, begin: Callable[[], None], is_finished: Callable[[], bool], thread: int) -> None:
        """As this thread's running loop, call ``begin()``, then run steps until ``is_finished()`` returns true."""
        this: Any = self
        self.check_open()
        hooks = sys.get_asyncgen_hooks()
        this._thread_id = thread
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=this._asyncgen_firstiter_hook, finalizer=this._asyncgen_finalizer_hook)
        run_step = self.run_step
        try:
            begin()
            while not is_finished():
                run_step()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)
            this._thread_id = None

    def _run_once(self) -> None:
        self.run_step()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.on_timer_cancelled(handle)

    def _write_to_self(self) -> None:
        self.on_wakeup()

    def _process_events(self, event_list: object) -> None:
        """Do nothing: this loop has no selector."""


def is_result_unretrieved(future: asyncio.Future[Any]) -> bool:
    """Whether a future failed and its error was never retrieved."""
    return bool(future._log_traceback)


def expect_pending(task: asyncio.Task[Any]) -> None:
    """Suppress asyncio's log message for a task that is destroyed while it is pending."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def awaited_future(task: asyncio.Task[Any]) -> object:
    """Return the future that a task waits for, or None if the task is not waiting."""
    return getattr(task, "_fut_waiter", None)


@contextmanager
def cancelling_all_tasks_with(cancel: Callable[[Cancel, asyncio.AbstractEventLoop], None]) -> Iterator[None]:
    """Replace the function that `asyncio.run` and `asyncio.Runner` use to cancel unfinished tasks.

    Parameters:
        cancel: the replacement; called with asyncio's own function and the loop.
    """
    module = cast(Any, runners)
    plain = module._cancel_all_tasks
    module._cancel_all_tasks = partial(cancel, plain)
    try:
        yield
    finally:
        module._cancel_all_tasks = plain


def _nothing() -> None:
    """Do nothing: the callback of a cancelled handle, so that it keeps nothing alive."""
