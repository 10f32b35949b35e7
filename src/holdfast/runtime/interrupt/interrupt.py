"""Cooperative interruption: a one-way latch with a cause, seen by every task, thread and child of a scope.

Invariants
- The first cause wins and never changes: `dict.setdefault` on the latch is the compare-and-set.
- Register, then check again: a waiter first registers itself, then checks the latch, then parks. `trigger` first sets
  the latch, then wakes all registered waiters. So no wakeup is lost between check and park.
- A trigger latches the whole tree below it before it wakes anything: woken code finds every descendant triggered.
- `trigger` takes no lock; each container changes by single atomic operations. It is therefore safe in a signal handler,
  in `__del__` and on top of any other method of the same interrupt.
- A parent holds its children weakly, a child holds its parents strongly: finished children vanish by reference count
  alone, and every ancestor stays alive while a descendant is in use.
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
        triggered: whether it was triggered.
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

    All methods are callable from any thread; the coroutines on any event loop.

    Parameters:
        name: `origin` of the causes that this interrupt creates.
        parent: when the parent is triggered, so is this one, with a cause of kind ``parent``.
        deadline_s: trigger with kind ``deadline`` after this many seconds, by the clock of the running loop, or by the
            monotonic clock if no loop runs. The deadline is cancelled when the interrupt is freed.
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
        """Whether it was triggered. Never reverts."""
        return bool(self._latch)

    @property
    def cause(self) -> Cause | None:
        """Why it was triggered, or None. Never changes once set."""
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
        """Trigger this interrupt and all below it. Return at once; True only for the caller whose cause was recorded.

        Callable from any thread, loop, signal handler, callback or `__del__`.

        Parameters:
            reason: free text for people.
            kind: kind of the cause.
            message_id: message that caused it, if any.
            cause: cause to use instead of the three above.
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
        """Raise `Interrupted` if it was triggered."""
        if self._latch:
            raise Interrupted(self._latch[_CAUSE][0])

    async def wait(self) -> Cause:
        """Wait until it is triggered, and return the cause. Never raises `Interrupted`."""
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
        """Sleep for `delay_s` seconds; raise `Interrupted` as soon as it is triggered, or if it already was."""
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
        """Block this thread until it is triggered, and return the cause; None after `timeout_s` seconds.

        Do not call it on the thread of a running event loop: it would block that loop.
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
        """Block this thread for `delay_s` seconds; raise `Interrupted` as soon as it is triggered."""
        self.wait_blocking(delay_s)
        self.check()

    def fileno(self) -> int:
        """Return a file descriptor that is readable once it is triggered, for `select` and `poll`. Always the same one.

        It is opened on first use, and closed by `close_fd` or when the interrupt is freed. Only watch it: reading from
        it would consume the byte that makes it readable.
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
        """Close the descriptor of `fileno`, if any. A later `fileno` opens a new one."""
        gate = self._gates.pop(_FILE, None)
        if isinstance(gate, FdLatch):
            gate.close()

    def on_trigger(self, fn: Callable[[Cause], object], *, loop: Loop | None = None) -> Registration:
        """Call `fn(cause)` once when it is triggered; soon, if it already was.

        `fn` runs in a copy of the caller's context: on `loop`, else on the running loop, else on the dispatcher thread;
        never inside `trigger`. An `Exception` that it raises is passed to the loop's exception handler or logged. A
        callback whose loop is closed does not run.

        Close the registration when you no longer need the callback.
        """
        registration = Registration(self, fn, loop or asyncio._get_running_loop())
        self.callbacks[registration] = None
        if self._latch:
            hops = WakeBatch()
            hops.add_registration(registration)
            hops.schedule()
        return registration

    def child(self, *, name: str = "", deadline_s: float | None = None) -> Interrupt:
        """Create an interrupt that is triggered with this one, but not vice versa.

        This interrupt references the child only weakly: the child is freed when you drop it.

        Parameters:
            name: as in `Interrupt`.
            deadline_s: as in `Interrupt`.
        """
        return Interrupt(name=name, parent=self, deadline_s=deadline_s)

    def linked(self, *others: Interrupt, name: str = "") -> Interrupt:
        """Create a child that is triggered by any of `others` as well as by this one."""
        child = Interrupt(name=name, parent=self)
        for other in others:
            child.follow(other)
        return child

    def statistics(self) -> InterruptStatistics:
        """Return a snapshot of its waiters and dependents."""
        return InterruptStatistics(
            triggered=bool(self._latch),
            waiting_tasks=sum(map(len, self._tasks.copy().values())),
            waiting_threads=sum(key is not _FILE for key in self._gates.copy()),
            callbacks=len(self.callbacks),
            children=len(self._children),
        )

    def shield(self, timeout_s: float | None = None) -> Shield[Interrupt]:
        """``async with interrupt.shield(timeout_s=2):`` protects awaits in the block from a scope's cancellation.

        The cancellation arrives when the block ends, `timeout_s` seconds after it was entered, or when the grace period
        of the stop is over, whichever is first. See `Shield`.
        """
        return Shield(self, Interrupt(name=f"shield of {self.name}"), current, timeout_s)

    def make_current(self) -> Token[Interrupt | GeneratorValue[Interrupt] | None]:
        """Make it the current interrupt of a context that was created for it. Elsewhere, prefer `use`."""
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
        """Become a child of ``parent`` as well."""
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
    """Context manager: ``with use(interrupt):`` makes it current for the body and for everything that the body starts
    or calls. None hides the surrounding interrupt.

    In a generator it is current only while the generator runs, not for the code that iterates over it.
    """

    __slots__ = ("_entered", "_interrupt")

    def __init__(self, interrupt: Interrupt | None) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> Interrupt | None:
        self._entered = current.enter(self._interrupt)
        return self._interrupt

    def __exit__(self, *exc_info: object) -> None:
        self._entered.leave()
