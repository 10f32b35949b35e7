"""Protect a short piece of cleanup or commit work from a scope's cancellation, for a bounded time.

Before a scope cancels a task natively, it calls `shielded_by`. If a shield protects the task, the scope passes the
cancellation to the shield, which holds it back. When the grace period is over, the scope ends the shield with `expire`
and cancels the task.

Invariants
- A shield is used once: it protects from its entry until its block ends, its timeout passes, or `expire` is called.
  Inner shields end no later than outer shields.
- Each cancellation that a shield holds back is delivered exactly once, when protection ends.
- A shield holds back only cancellations of scopes, not a ``task.cancel()`` that other code calls.
- All code of a shield runs on the thread of its task's loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt.dispatch import Loop, Registration
from holdfast.runtime.interrupt.scoped_var import ScopedToken, ScopedVar

__all__ = ["Shield", "Shieldable", "shielded_by"]


class Shieldable(Protocol):
    """Interface that a shield needs from an interrupt."""

    def on_trigger(self, fn: Callable[[Cause], object], *, loop: Loop | None) -> Registration:
        """Call ``fn`` once when the interrupt is triggered."""
        ...

    def follow(self, parent: Any, /) -> None:
        """Add ``parent`` to the interrupts that trigger this one."""
        ...


S = TypeVar("S", bound=Shieldable)


class Shield(Generic[S]):
    """``async with interrupt.shield(timeout_s=2):`` lets the body, and the tasks that it starts, finish.

    In the body, the shield's own interrupt is the current interrupt. So `check_interrupt` and waits do not notice the
    outer interrupt until the shield's timeout or the grace period of the stop has passed.

    Parameters:
        interrupt: interrupt that the body is shielded from.
        inner: interrupt of the shield itself.
        current: variable that holds the current interrupt.
        timeout_s: maximum duration in seconds from the entry; None protects the body until the stop's grace period
            ends.
    """

    __slots__ = (
        "_current",
        "_entered",
        "_held",
        "_inner",
        "_interrupt",
        "_loop",
        "_outer",
        "_registration",
        "_task",
        "_timeout_s",
        "_timer",
        "_until",
        "open",
    )

    def __init__(self, interrupt: S, inner: S, current: ScopedVar[S], timeout_s: float | None) -> None:
        self._interrupt = interrupt
        self._inner = inner
        self._current = current
        self._timeout_s = timeout_s
        self._held: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.open = False

    async def __aenter__(self) -> S:
        """Start protection. Return the shield's own interrupt, which is triggered when protection ends."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a shield can only be entered inside a task")
        self._loop = task.get_loop()
        self._task = task
        self._outer = _carried.get()
        self._until = float("inf") if self._timeout_s is None else self._loop.time() + self._timeout_s
        if self._outer is not None and self._outer.open:
            self._until = min(self._until, self._outer._until)
        self._entered: tuple[ScopedToken[Any], ...] = (self._current.enter(self._inner), _carried.enter(self))
        self.open = True
        _by_task[task] = self
        self._registration: Registration | None = self._interrupt.on_trigger(self._arm, loop=self._loop)
        return self._inner

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for entered in reversed(self._entered):
            entered.leave()
        if self._outer is None:
            _by_task.pop(self._task, None)
        else:
            _by_task[self._task] = self._outer
        self.expire()

    def hold(self, deliver: Callable[[], object]) -> None:
        """Call `deliver` once, on the loop, when protection ends. The shield must be open."""
        self._held.append(deliver)
        self._arm()

    def expire(self) -> None:
        """End protection, and deliver the cancellations that were held back. Idempotent."""
        if not self.open:
            return
        self.open = False
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inner.follow(self._interrupt)
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def _arm(self, _: Cause | None = None) -> None:
        """Start the timer, because a cancellation is held back or the interrupt was triggered."""
        if not self.open or self._timer is not None or self._until == float("inf"):
            return
        self._timer = self._loop.call_at(self._until, self.expire, context=contextvars.Context())


_carried: ScopedVar[Shield[Any]] = ScopedVar("holdfast_shield")
_by_task: weakref.WeakKeyDictionary[asyncio.Task[Any], Shield[Any]] = weakref.WeakKeyDictionary()


def shielded_by(task: asyncio.Task[Any], context: contextvars.Context | None = None) -> Shield[Any] | None:
    """Return the shield that protects `task` now, if any. Call this on the task's loop only.

    Parameters:
        task: task to be cancelled.
        context: context in which the task was started, if known; used to find a shield around the start of the task.
    """
    shield = _by_task.get(task)
    if shield is None and context is not None:
        shield = _carried.get_in(context)
    while shield is not None and not shield.open:
        shield = shield._outer
    return shield
