"""FIFO wait queue for tasks that compete for a scarce resource.

Invariants:

- Nothing is handed to a waiting task directly. It is *promised* an item, woken, and takes it itself. Meanwhile the item
  stays in place, so nothing is lost and the order does not change if the task is cancelled before it resumes.
- A task that is cancelled or interrupted gives its promise back, and its queue promises the item to the next waiter.
- All of this happens on one event loop; the only await is the wait itself.
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
    """Release the task that waits on this future. Does nothing if it was already released."""
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
    """Waiters in order, including those that have not yet taken a promised item."""

    __slots__ = ("promised", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Waiter, None] = {}
        self.promised: set[Waiter] = set()

    def promise(self) -> bool:
        """Promise an item to the first waiter; False if the queue is empty."""
        for waiter in self.waiting:
            self.promise_to(waiter)
            return True
        return False

    def promise_to(self, waiter: Waiter) -> None:
        """Promise an item to this waiter. If it is being cancelled, it gives the promise back when it resumes."""
        del self.waiting[waiter]
        self.promised.add(waiter)
        release(waiter)

    def redeem(self, waiter: Waiter) -> bool:
        """Take the promised item; False without a promise or after it was revoked."""
        if waiter in self.promised:
            self.promised.discard(waiter)
            return True
        self.waiting.pop(waiter, None)
        return False

    def take_back(self) -> None:
        """Revoke all promises, because the items are gone. Their holders check again."""
        self.promised.clear()

    def release_all(self) -> None:
        """Make all waiters check again, without a promise."""
        for waiter in self.waiting:
            release(waiter)
        self.waiting.clear()

    async def wait(self, waiter: Waiter, pass_on: Callable[[], None]) -> bool:
        """Wait at the end of the queue; return True with a promise, False when it is time to check again.

        Parameters:
            waiter: new future of the running loop.
            pass_on: called if the task is cancelled or interrupted while it has a promise.

        Raises:
            Interrupted: the current interrupt was triggered; a promise was passed on.
        """
        self.waiting[waiter] = None
        try:
            await wait_for_release(waiter)
        except BaseException:
            if self.redeem(waiter):
                pass_on()
            raise
        return self.redeem(waiter)
