"""FIFO wait queue for tasks that compete for a scarce resource.

Invariants:

- An item is never handed to a waiting task directly. Instead, the item is *promised* to the task, and the task is woken
  and takes the item. Until then the item stays in its place, so if the task is cancelled before it resumes, the item is
  not lost and the order does not change.
- If a task is cancelled or interrupted, its promise is revoked and the item is promised to the next waiter.
- All methods run on one event loop; the only await is the wait itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt.interrupt import Interrupt, current_interrupt

__all__ = ["WaitQueue", "Waiter", "release", "wait_for_release"]

Waiter = asyncio.Future[None]


def release(waiter: Waiter, _: Cause | None = None) -> None:
    """Release the task that waits on this future. Does nothing if the task was already released."""
    if not waiter.done():
        waiter.set_result(None)


async def wait_for_release(waiter: Waiter) -> None:
    """Wait until the waiter is released.

    Raises:
        Interrupted: the current interrupt is triggered, even if the waiter was released as well.
    """
    interrupt: Interrupt | None = current_interrupt()
    if interrupt is None:
        await waiter
        return
    with interrupt.on_trigger(partial(release, waiter)):
        await waiter
    interrupt.check()


class WaitQueue:
    """FIFO queue of waiters, with a set of the waiters that have not yet taken their promised item."""

    __slots__ = ("promised", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Waiter, None] = {}
        self.promised: set[Waiter] = set()

    def promise(self) -> bool:
        """Promise an item to the first waiter; return False if the queue is empty."""
        for waiter in self.waiting:
            self.promise_to(waiter)
            return True
        return False

    def promise_to(self, waiter: Waiter) -> None:
        """Promise an item to this waiter. If the waiting task is being cancelled, it passes the promise on."""
        del self.waiting[waiter]
        self.promised.add(waiter)
        release(waiter)

    def redeem(self, waiter: Waiter) -> bool:
        """Use up the waiter's promise; return False if the waiter has no promise or the promise was revoked."""
        if waiter in self.promised:
            self.promised.discard(waiter)
            return True
        self.waiting.pop(waiter, None)
        return False

    def take_back(self) -> None:
        """Revoke all promises, because the items were removed. Tasks that held a promise check the queue again."""
        self.promised.clear()

    def release_all(self) -> None:
        """Wake all waiters without a promise, so that they check the queue again."""
        for waiter in self.waiting:
            release(waiter)
        self.waiting.clear()

    async def wait(self, waiter: Waiter, pass_on: Callable[[], None]) -> bool:
        """Wait at the end of the queue; return True if an item was promised, or False if the caller must check again.

        Parameters:
            waiter: new future of the running loop.
            pass_on: callback that promises the item to another waiter; called if the task is cancelled or interrupted
                while it holds a promise.

        Raises:
            Interrupted: the current interrupt was triggered; the promise, if any, was passed on.
        """
        self.waiting[waiter] = None
        try:
            await wait_for_release(waiter)
        except BaseException:
            if self.redeem(waiter):
                pass_on()
            raise
        return self.redeem(waiter)
