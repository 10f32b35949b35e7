"""Keeps the delivery of a stop away from a short stretch of clean-up or commit work, for a bounded time.

How a scope works with it: before it cancels a task natively it asks `shielded_by`; if there is a shield it gives it the
delivery to hold. When its grace is over it ends the shield with `expire` and delivers whatever it likes.

Invariants
- A shield protects for one stretch of time: from its entry until its block ends, its time is over, or it is expired.
  Inner shields end no later than the outer ones.
- Each delivery that it holds is made exactly once, when it stops to protect.
- It holds back only what a scope delivers. A foreign ``task.cancel()`` passes through it.
- All of it lives on one loop's thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from holdfast.protocol.stopping import Cause
from holdfast.runtime.carried import Carried, Entered
from holdfast.runtime.interrupt import Interrupt, Registration, current

__all__ = ["Shield", "shielded_by"]


class Shield:
    """``async with interrupt.shield(timeout_s=2):`` lets the body, and the tasks that it starts, finish.

    Inside, the current interrupt is the shield's own: `check_interrupt` and the waits of current code pass until the
    shield has ended by its time or by the end of the grace, while the interrupt itself was triggered.

    Parameters:
        interrupt: the interrupt whose delivery is held back.
        timeout_s: how long from the entry, in seconds; None for as long as the grace of the stop lasts.
    """

    __slots__ = (
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

    def __init__(self, interrupt: Interrupt, timeout_s: float | None) -> None:
        self._interrupt = interrupt
        self._timeout_s = timeout_s
        self._held: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.open = False

    async def __aenter__(self) -> Interrupt:
        """Start to protect. Returns the shield's own interrupt, triggered when it must not protect any longer."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a shield protects a task; enter it in one")
        self._loop = task.get_loop()
        self._task = task
        self._outer = _carried.get()
        self._until = float("inf") if self._timeout_s is None else self._loop.time() + self._timeout_s
        if self._outer is not None and self._outer.open:
            self._until = min(self._until, self._outer._until)
        self._inner = Interrupt(name=f"shield of {self._interrupt.name}")
        self._entered: tuple[Entered[Any], ...] = (current.enter(self._inner), _carried.enter(self))
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
        """Keep `deliver` back; call it once, on the loop, when this shield protects no longer. It must be open."""
        self._held.append(deliver)
        self._arm()

    def expire(self) -> None:
        """Stop to protect, and deliver what was held. Does nothing the second time."""
        if not self.open:
            return
        self.open = False
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inner._follow(self._interrupt)
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def _arm(self, _: Cause | None = None) -> None:
        """The interrupt was triggered: from now on the time counts."""
        if not self.open or self._timer is not None or self._until == float("inf"):
            return
        self._timer = self._loop.call_at(self._until, self.expire, context=contextvars.Context())


_carried: Carried[Shield] = Carried("holdfast_shield")
_by_task: weakref.WeakKeyDictionary[asyncio.Task[Any], Shield] = weakref.WeakKeyDictionary()


def shielded_by(task: asyncio.Task[Any], context: contextvars.Context | None = None) -> Shield | None:
    """The shield that protects `task` now, or None. On the task's loop.

    Parameters:
        task: the task to be cancelled.
        context: the one it was started in, where it is known: it says whether it was started inside a shield.
    """
    shield = _by_task.get(task)
    if shield is None and context is not None:
        shield = _carried.get_in(context)
    while shield is not None and not shield.open:
        shield = shield._outer
    return shield
