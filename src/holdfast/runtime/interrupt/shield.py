"""Protect a short piece of cleanup or commit work from a scope's cancellation, for a bounded time.

Before a scope cancels a task natively, it calls `shielded_by`; if there is a shield, the shield holds the delivery.
When the grace period is over, the scope ends the shield with `expire` and delivers.

Invariants
- A shield protects once: from its entry until its block ends, its timeout passes, or `expire` is called.
  Inner shields end no later than outer ones.
- Each delivery that it holds is made exactly once, when protection ends.
- It holds back only deliveries of scopes. A foreign ``task.cancel()`` passes through it.
- Everything runs on one loop's thread.
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
        """Call ``fn`` once when it is triggered."""
        ...

    def follow(self, parent: Any, /) -> None:
        """Become a child of ``parent`` as well."""
        ...


S = TypeVar("S", bound=Shieldable)


class Shield(Generic[S]):
    """``async with interrupt.shield(timeout_s=2):`` lets the body, and the tasks that it starts, finish.

    Inside, the current interrupt is the shield's own: `check_interrupt` and waits do not notice the outer interrupt
    until the shield has ended by its timeout or by the end of the grace period.

    Parameters:
        interrupt: interrupt whose delivery is held back.
        inner: the shield's own interrupt.
        current: variable that holds the current interrupt.
        timeout_s: maximum duration from the entry, in seconds; None: until the stop's grace period ends.
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
            raise RuntimeError("a shield protects a task; enter it in one")
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
        """Hold `deliver` back; call it once, on the loop, when protection ends. The shield must be open."""
        self._held.append(deliver)
        self._arm()

    def expire(self) -> None:
        """End protection, and make the held deliveries. Idempotent."""
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
        """Start the timer, because a delivery is held or the interrupt was triggered."""
        if not self.open or self._timer is not None or self._until == float("inf"):
            return
        self._timer = self._loop.call_at(self._until, self.expire, context=contextvars.Context())


_carried: ScopedVar[Shield[Any]] = ScopedVar("holdfast_shield")
_by_task: weakref.WeakKeyDictionary[asyncio.Task[Any], Shield[Any]] = weakref.WeakKeyDictionary()


def shielded_by(task: asyncio.Task[Any], context: contextvars.Context | None = None) -> Shield[Any] | None:
    """Return the shield that protects `task` now, or None. Call it on the task's loop only.

    Parameters:
        task: task to be cancelled.
        context: context in which the task was started, if known; used to find a shield that it was started inside.
    """
    shield = _by_task.get(task)
    if shield is None and context is not None:
        shield = _carried.get_in(context)
    while shield is not None and not shield.open:
        shield = shield._outer
    return shield
