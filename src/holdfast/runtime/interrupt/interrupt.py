"""Cooperative interruption: a one-way latch with a cause, seen by every task, thread and child of a scope.

Invariants
- The first cause wins and never changes: `dict.setdefault` on the latch is the compare-and-set.
- Register, then check again: a waiter first registers itself, then checks the latch, then parks. `trigger` first sets
  the latch, then wakes all registered waiters. So no wakeup is lost between check and park.
- `trigger` latches all descendants before it wakes any waiter, so woken code finds every descendant triggered.
- `trigger` takes no lock; each container is changed only by single atomic operations. `trigger` is therefore safe in a
  signal handler, in `__del__`, and while any other method of the same interrupt is running.
- A parent references its children weakly, and a child references its parents strongly. So an unused child is freed by
  reference counting alone, and every ancestor stays alive while a descendant is in use.
"""

from __future__ import annotations

import asyncio
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import cast

from holdfast.clock import system_clock
from holdfast.errors import Interrupted
from holdfast.protocol.stopping import Cause, CauseKind
from holdfast.runtime.interrupt.dispatch import (
    CHUNK,
    FdLatch,
    FutureGroup,
    Loop,
    Registration,
    Timer,
    WakeBatch,
    start_timer,
    wake_few,
)
from holdfast.runtime.interrupt.scoped_var import GeneratorValue, ScopedVar
from holdfast.runtime.interrupt.shield import Shield

__all__ = [
    "Interrupt",
    "InterruptStatistics",
    "Registration",
    "check_interrupt",
    "current_interrupt",
    "is_interrupted",
    "use",
]

_CAUSE = "cause"
_FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptStatistics:
    """A snapshot of an interrupt's waiters and dependents.

    Parameters:
        triggered: whether the interrupt was triggered.
        waiting_tasks: number of tasks in `wait` or `sleep`, on all loops.
        waiting_threads: number of threads in `wait_blocking` or `sleep_blocking`.
        callbacks: number of `on_trigger` registrations that have neither run nor been closed.
        children: number of children still in use.
    """

    triggered: bool
    waiting_tasks: int
    waiting_threads: int
    callbacks: int
    children: int


class Interrupt:
    """A one-way latch with a cause: once triggered, it stays triggered.

    All methods are callable from any thread, and the coroutine methods from any event loop.

    Parameters:
        name: `origin` of the causes that this interrupt creates.
        parent: interrupt that, when triggered, also triggers this one, with a cause of kind ``parent``.
        deadline_s: number of seconds after which the interrupt is triggered with kind ``deadline``; None sets no
            deadline. The time is measured by the clock of the running loop, or by the monotonic clock if no loop runs.
            The deadline is cancelled when the interrupt is freed.
    """

    __slots__ = ("__weakref__", "_children", "_gates", "_latch", "_parents", "_tasks", "_timer", "callbacks", "name")

    def __init__(self, *, name: str = "", parent: Interrupt | None = None, deadline_s: float | None = None) -> None:
        self.name = name
        self._latch: dict[str, tuple[Cause]] = {}
        self._tasks: dict[Loop, FutureGroup] = {}
        self._gates: dict[LockType | str, LockType | FdLatch] = {}
        self.callbacks: dict[Registration, None] = {}
        """Callbacks that have neither run nor been closed."""
        self._children: set[weakref.ref[Interrupt]] = set()
        self._parents: tuple[Interrupt, ...] = ()
        self._timer: Timer | None = None
        if parent is not None:
            self.follow(parent)
        if deadline_s is not None and not self._latch:
            self._timer = start_timer(deadline_s, self)

    def __repr__(self) -> str:
        cause = self.cause
        state = "waiting" if cause is None else f"triggered by {cause.kind}"
        return f"<Interrupt {self.name!r} {state}>"

    @property
    def triggered(self) -> bool:
        """Whether the interrupt was triggered. Once True, it stays True."""
        return bool(self._latch)

    @property
    def cause(self) -> Cause | None:
        """Why the interrupt was triggered; None if it was not. Never changes once set."""
        entry = self._latch.get(_CAUSE)
        return None if entry is None else entry[0]

    def trigger(
        self,
        reason: str = "",
        *,
        kind: CauseKind = "user",
        message_id: str | None = None,
        cause: Cause | None = None,
    ) -> bool:
        """Trigger this interrupt and all its descendants; return True if this call's cause was recorded.

        Does not block. Callable from any thread, loop, signal handler, callback or `__del__`. If the interrupt was
        already triggered, the call has no effect and returns False.

        Parameters:
            reason: human-readable reason.
            kind: kind of the cause.
            message_id: id of the message that caused the interrupt, if any.
            cause: cause to record; if given, ``reason``, ``kind`` and ``message_id`` are ignored.
        """
        if self._latch:
            return False
        if cause is None:
            cause = Cause(kind=kind, reason=str(reason), origin=self.name, at=system_clock.now(), message_id=message_id)
        entry = (cause,)
        try:
            if self._latch.setdefault(_CAUSE, entry) is not entry:
                return False
            self._spread(cause)
        except BaseException:
            # Only a signal handler that raises gets here. No waiter may be missed because of it.
            if self._latch.get(_CAUSE) is entry:
                self._spread(cause)
            raise
        return True

    def check(self) -> None:
        """Raise `Interrupted` if this interrupt was triggered."""
        if self._latch:
            raise Interrupted(self._latch[_CAUSE][0])

    async def wait(self) -> Cause:
        """Wait until this interrupt is triggered, and return the cause. Never raises `Interrupted`."""
        if not self._latch:
            loop = asyncio.get_running_loop()
            group, future = self._enter(loop)
            try:
                if not self._latch:
                    # The trigger has already removed every waiter it wakes here.
                    await future
                else:
                    self._leave(loop, group, future)
            except BaseException:
                self._leave(loop, group, future)
                raise
        return self._latch[_CAUSE][0]

    async def sleep(self, delay_s: float) -> None:
        """Sleep for `delay_s` seconds; raise `Interrupted` as soon as this interrupt is triggered."""
        self.check()
        if delay_s <= 0:
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            group, future = self._enter(loop)
            timer = loop.call_later(delay_s, _release, future)
            try:
                if not self._latch:
                    await future
            finally:
                timer.cancel()
                self._leave(loop, group, future)
        self.check()

    def wait_blocking(self, timeout_s: float | None = None) -> Cause | None:
        """Block this thread until the interrupt is triggered; return the cause, or None after `timeout_s` seconds.

        Do not call this method on the thread of a running event loop, because it blocks the loop.
        """
        if not self._latch:
            gate = allocate_lock()
            gate.acquire()
            self._gates[gate] = gate
            try:
                if not self._latch:
                    gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            finally:
                self._gates.pop(gate, None)
        return self.cause

    def sleep_blocking(self, delay_s: float) -> None:
        """Block this thread for `delay_s` seconds; raise `Interrupted` as soon as the interrupt is triggered."""
        self.wait_blocking(delay_s)
        self.check()

    def fileno(self) -> int:
        """Return a file descriptor, for `select` and `poll`, that becomes readable when the interrupt is triggered.

        The descriptor is opened by the first call, returned by all later calls, and closed by `close_fd` or when the
        interrupt is freed. Do not read from the descriptor: that would consume the byte that makes it readable.
        """
        gate = self._gates.get(_FILE)
        if gate is None:
            fresh = FdLatch()
            gate = self._gates.setdefault(_FILE, fresh)
            if gate is not fresh:
                fresh.close()
            if self._latch:
                gate.release()
        assert isinstance(gate, FdLatch)
        return gate.fd

    def close_fd(self) -> None:
        """Close the descriptor that `fileno` opened, if any. The next call of `fileno` opens a new descriptor."""
        gate = self._gates.pop(_FILE, None)
        if isinstance(gate, FdLatch):
            gate.close()

    def on_trigger(self, fn: Callable[[Cause], object], *, loop: Loop | None = None) -> Registration:
        """Call `fn(cause)` once when the interrupt is triggered, or soon if it was already triggered.

        `fn` runs in a copy of the caller's context, on `loop`. If `loop` is not given, `fn` runs on the loop that is
        running now or, if no loop is running, on the dispatcher thread. `trigger` never calls `fn` directly. If `fn`
        raises an `Exception`, the exception is passed to the loop's exception handler or logged. If the loop is closed,
        `fn` does not run.

        Close the returned registration when you no longer need the callback.
        """
        registration = Registration(self, fn, loop or asyncio._get_running_loop())
        self.callbacks[registration] = None
        if self._latch:
            hops = WakeBatch()
            hops.add_registration(registration)
            hops.schedule()
        return registration

    def child(self, *, name: str = "", deadline_s: float | None = None) -> Interrupt:
        """Create a child: an interrupt that is triggered when this interrupt is triggered, but not vice versa.

        This interrupt holds only a weak reference to the child, so the child is freed when you drop it.

        Parameters:
            name: `origin` of the causes that the child creates.
            deadline_s: number of seconds after which the child is triggered; None sets no deadline.
        """
        return Interrupt(name=name, parent=self, deadline_s=deadline_s)

    def linked(self, *others: Interrupt, name: str = "") -> Interrupt:
        """Create an interrupt that is triggered when this interrupt or any of `others` is triggered."""
        child = Interrupt(name=name, parent=self)
        for other in others:
            child.follow(other)
        return child

    def statistics(self) -> InterruptStatistics:
        """Return a snapshot of the interrupt's waiters and dependents."""
        return InterruptStatistics(
            triggered=bool(self._latch),
            waiting_tasks=sum(map(len, self._tasks.copy().values())),
            waiting_threads=sum(key is not _FILE for key in self._gates.copy()),
            callbacks=len(self.callbacks),
            children=len(self._children),
        )

    def shield(self, timeout_s: float | None = None) -> Shield[Interrupt]:
        """``async with interrupt.shield(timeout_s=2):`` protects awaits in the block from a scope's cancellation.

        The cancellation is delivered when the block ends, `timeout_s` seconds after the block was entered, or when the
        grace period of the stop is over, whichever comes first. See `Shield`.
        """
        return Shield(self, Interrupt(name=f"shield of {self.name}"), current, timeout_s)

    def make_current(self) -> Token[Interrupt | GeneratorValue[Interrupt] | None]:
        """Make this interrupt current in a context that was created for this purpose. Otherwise, prefer `use`."""
        return current.variable.set(self)

    def _enter(self, loop: Loop) -> tuple[FutureGroup, asyncio.Future[None]]:
        future: asyncio.Future[None] = loop.create_future()
        group = self._tasks.setdefault(loop, {})
        group[future] = None
        return group, future

    def _leave(self, loop: Loop, group: FutureGroup, future: asyncio.Future[None]) -> None:
        group.pop(future, None)
        # Until the trigger, only this loop's thread adds or removes its groups: this check-then-act cannot race.
        if not group and self._tasks.get(loop) is group:
            self._tasks.pop(loop, None)

    def follow(self, parent: Interrupt) -> None:
        """Add ``parent`` to the interrupts that trigger this one."""
        self._parents = (*self._parents, parent)
        parent._children.add(weakref.ref(self, parent._children.discard))
        cause = parent.cause
        if cause is not None:
            self.trigger(cause=_inherited(cause, parent))

    def _spread(self, cause: Cause) -> None:
        """Latch all descendants, then wake all waiters. Idempotent."""
        if self._children or self.callbacks or self._gates or self._timer is not None:
            self._spread_far(cause)
            return
        for loop, group in self._tasks.copy().items():
            if len(group) > CHUNK:
                self._spread_far(cause)
                return
            wake_few(loop, group)
        self._tasks.clear()

    def _spread_far(self, cause: Cause) -> None:
        reached = [self, *self._latch_below(cause)]
        hops = WakeBatch()
        for interrupt in reached:
            interrupt._wake(hops)
        hops.schedule()
        for interrupt in reached:
            interrupt._tasks.clear()

    def _latch_below(self, cause: Cause) -> list[Interrupt]:
        reached: list[Interrupt] = []
        edge: list[tuple[Interrupt, Cause]] = [(self, cause)]
        while edge:
            parent, parent_cause = edge.pop()
            if not parent._children:
                continue
            entry = (_inherited(parent_cause, parent),)
            for reference in parent._children.copy():
                child = reference()
                if child is None:
                    continue
                child_cause = child._latch.setdefault(_CAUSE, entry)[0]
                if child_cause.parent is parent_cause:
                    reached.append(child)
                    edge.append((child, child_cause))
        return reached

    def _wake(self, hops: WakeBatch) -> None:
        if self._gates:
            for gate in self._gates.copy().values():
                try:
                    gate.release()
                except RuntimeError:
                    # It is open already: another thread was here first.
                    continue
        if self._tasks:
            for loop, group in self._tasks.copy().items():
                hops.add_group(loop, group)
        if self.callbacks:
            for registration in self.callbacks.copy():
                hops.add_registration(registration)
        if self._timer is not None:
            self._timer.cancel()


def _inherited(cause: Cause, parent: Interrupt) -> Cause:
    return Cause(
        kind="parent",
        reason=cause.reason,
        origin=parent.name,
        at=cause.at,
        parent=cause,
        message_id=cause.message_id,
    )


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _InGenerator(GeneratorValue[Interrupt]):
    """Lets `check_interrupt` read the latch without checking the type of the context's value."""

    __slots__ = ()

    @property
    def _latch(self) -> dict[str, tuple[Cause]]:
        interrupt = self.value()
        return interrupt._latch if interrupt is not None else {}


current: ScopedVar[Interrupt] = ScopedVar("holdfast_interrupt", _InGenerator)
_visible = cast(ContextVar[Interrupt | _InGenerator | None], current.variable)


def current_interrupt() -> Interrupt | None:
    """Return the interrupt of the scope that this code runs in, or None outside any scope."""
    return current.get()


def is_interrupted() -> bool:
    """Whether the scope that this code runs in was interrupted."""
    interrupt = current.get()
    return interrupt is not None and interrupt.triggered


def check_interrupt() -> None:
    """Raise `Interrupted` if the scope that this code runs in was interrupted."""
    value = _visible.get()
    if value is not None and value._latch:
        raise Interrupted(value._latch[_CAUSE][0])


class use:
    """Context manager that makes an interrupt current: ``with use(interrupt):``.

    The interrupt is current for the body and for everything that the body starts or calls. ``use(None)`` hides the
    surrounding interrupt. If a generator uses this context manager, the interrupt is current only while the generator
    runs, not for the code that iterates over the generator.
    """

    __slots__ = ("_entered", "_interrupt")

    def __init__(self, interrupt: Interrupt | None) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> Interrupt | None:
        self._entered = current.enter(self._interrupt)
        return self._interrupt

    def __exit__(self, *exc_info: object) -> None:
        self._entered.leave()
