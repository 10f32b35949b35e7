"""Tasks that wait in line for something of which there is not enough for all.

Invariants:

- Nothing is handed to a task that waits: it is *promised* one, is woken, and takes it itself. What was promised stays
  in its place meanwhile, so nothing is lost and no order changes when the task goes away before it resumes.
- Who goes away with a promise gives it back, and its queue promises it to the next in line.
- All of this happens on one event loop; no step of it awaits but the wait itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt import Interrupt, current_interrupt

__all__ = ["Line", "Waiter", "release", "wait_for_release"]

Waiter = asyncio.Future[None]


def release(waiter: Waiter, _: Cause | None = None) -> None:
    """Let the task go that waits for it. Does nothing when it was let go before."""
    if not waiter.done():
        waiter.set_result(None)


async def wait_for_release(waiter: Waiter) -> None:
    """Wait until somebody releases the waiter.

    Raises:
        Interrupted: the current interrupt is triggered, whether or not the waiter was released as well.
    """
    interrupt: Interrupt | None = current_interrupt()
    if interrupt is None:
        await waiter
        return
    with interrupt.on_trigger(partial(release, waiter)):
        await waiter
    interrupt.check()


class Line:
    """Who waits, in order, and who was promised something and has not taken it yet."""

    __slots__ = ("promised", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Waiter, None] = {}
        self.promised: set[Waiter] = set()

    def promise(self) -> bool:
        """Promise one to the first in line; False when nobody waits."""
        for waiter in self.waiting:
            self.promise_to(waiter)
            return True
        return False

    def promise_to(self, waiter: Waiter) -> None:
        """Promise one to this waiter. One that is just being cancelled gives it back when it resumes."""
        del self.waiting[waiter]
        self.promised.add(waiter)
        release(waiter)

    def redeem(self, waiter: Waiter) -> bool:
        """The waiter takes what it was promised; False when it was not, or when the promise was taken back."""
        if waiter in self.promised:
            self.promised.discard(waiter)
            return True
        self.waiting.pop(waiter, None)
        return False

    def take_back(self) -> None:
        """Take all promises back: there is nothing left. Whoever had one looks again."""
        self.promised.clear()

    def release_all(self) -> None:
        """Let everybody look again, without a promise."""
        for waiter in self.waiting:
            release(waiter)
        self.waiting.clear()

    async def wait(self, waiter: Waiter, pass_on: Callable[[], None]) -> bool:
        """Wait at the end of the line; True with a promise, False when it is time to look again.

        Parameters:
            waiter: a new future of the running loop.
            pass_on: called when the task goes away with a promise.

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
