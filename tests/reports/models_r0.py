"""Report R0 as a model: an interrupt that wakes one waiter of many, and the agent's work that hangs on it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

__all__ = ["Latch", "NotifyOne", "System", "graph", "parallel", "periodic", "runner", "stream"]


class Latch(Protocol):
    """What the reported interrupt and the shipped one have in common."""

    def trigger(self) -> object:
        """Ask everybody to stop."""
        ...

    def check(self) -> None:
        """Raise when it was triggered."""
        ...

    async def wait(self) -> object:
        """Return once it is triggered."""
        ...


class Stopped(Exception):  # noqa: N818
    """What the model raises where Holdfast raises `Interrupted`."""


class NotifyOne:
    """The reported form: sets a flag and wakes one; who waits looks at the flag, and parks without looking again.

    As in the original a wake-up that meets nobody is kept for the next one who parks.
    """

    def __init__(self) -> None:
        self.triggered = False
        self._permit = False
        self._parked: deque[asyncio.Future[None]] = deque()

    def trigger(self) -> None:
        """Set the flag, then notify one."""
        self.triggered = True
        while self._parked:
            future = self._parked.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._permit = True

    def check(self) -> None:
        """Raise when the flag is set."""
        if self.triggered:
            raise Stopped

    def reset(self) -> None:
        """What the loops of the reported system do once they saw the flag: for all who share it."""
        self.triggered = False

    async def wait(self) -> None:
        """Look at the flag, then park."""
        if self.triggered:
            return
        # The first poll of the notification comes later than the look at the flag.
        await asyncio.sleep(0)
        if self._permit:
            self._permit = False
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parked.append(future)
        await future


class System:
    """An agent at work: counts the model calls that are made after the person has left."""

    def __init__(self, interrupt: Latch) -> None:
        self.interrupt = interrupt
        self.left = False
        self.ended: list[str] = []
        self.zombie_calls = 0

    async def call_model(self, delay_s: float = 1.0) -> None:
        """One call. A step may be under way when the person leaves; beginning another one is what must not be."""
        if self.left:
            self.zombie_calls += 1
        await asyncio.sleep(delay_s)

    async def until_interrupted(self, work: Awaitable[object]) -> bool:
        """Run `work` beside the wait for the interrupt; False when the interrupt came first, and `work` is gone."""
        task = asyncio.ensure_future(work)
        wait = asyncio.ensure_future(self.interrupt.wait())
        try:
            await asyncio.wait([task, wait], return_when=asyncio.FIRST_COMPLETED)
            return not wait.done()
        finally:
            task.cancel()
            wait.cancel()
            await asyncio.gather(task, wait, return_exceptions=True)


async def runner(system: System) -> None:
    """The agent's main loop."""
    while await system.until_interrupted(system.call_model()):
        pass
    system.ended.append("runner")


async def periodic(system: System) -> None:
    """Runs at intervals, and sleeps in between."""
    while await system.until_interrupted(asyncio.sleep(3)) and await system.until_interrupted(system.call_model()):
        pass
    system.ended.append("periodic")


async def stream(system: System) -> None:
    """A background stream: produces until it is told to stop."""
    parts: asyncio.Queue[int] = asyncio.Queue(1)

    async def produce() -> None:
        number = 0
        while True:
            await parts.put(number)
            number += 1

    async def consume() -> None:
        while True:
            await parts.get()
            await system.call_model(0.5)

    await system.until_interrupted(asyncio.gather(produce(), consume()))
    system.ended.append("stream")


async def parallel(system: System) -> None:
    """Three agents side by side; each waits by itself."""

    async def branch(name: str) -> None:
        while await system.until_interrupted(system.call_model()):
            pass
        system.ended.append(name)

    await asyncio.gather(*(branch(f"branch {n}") for n in range(3)))


async def graph(system: System) -> None:
    """A state graph that goes round: one node after the other, two of them at once."""

    async def think() -> None:
        await system.call_model(0.35)
        await system.call_model(0.35)

    async def node() -> bool:
        return await system.until_interrupted(think())

    while await node():
        if not all(await asyncio.gather(node(), node())):
            break
    system.ended.append("graph")


ALL: tuple[Callable[[System], Awaitable[None]], ...] = (runner, periodic, stream, parallel, graph)
