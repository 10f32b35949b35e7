"""Report R3 as models: a chat gateway that guards its sessions with a table, as reported and as it was fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["SETUP_AWAITS", "Agent", "ReportedGateway", "SentinelGateway"]

Agent = Callable[[str], Awaitable[None]]

SETUP_AWAITS = 10
"""Hooks, image and voice enrichment, history compression: so many awaits lie between a message and its agent."""


class ReportedGateway:
    """The guard looks in the table; the entry is written after the set-up, when the agent object exists.

    Parameters:
        agent: what a run does.
        cap: how many messages may wait.
    """

    def __init__(self, agent: Agent, *, cap: int = 100) -> None:
        self.agent = agent
        self.cap = cap
        self.running: asyncio.Task[None] | None = None
        self.waiting: list[str] = []
        self.handlers: set[asyncio.Task[None]] = set()

    async def send(self, text: str) -> bool:
        """True: the user is told that the message is started or queued."""
        if self.running is not None:
            return self.enqueue(text)
        self.begin(text)
        return True

    def enqueue(self, text: str) -> bool:
        """At the cap the message is dropped; the user is told "queued" all the same."""
        if len(self.waiting) < self.cap:
            self.waiting.append(text)
        return True

    def begin(self, text: str) -> asyncio.Task[None]:
        handler = asyncio.create_task(self.handle(text), name=f"handler of {text!r}")
        self.handlers.add(handler)
        return handler

    async def handle(self, text: str) -> None:
        try:
            for _ in range(SETUP_AWAITS):
                await asyncio.sleep(0)
            self.running = asyncio.current_task()
            await self.agent(text)
        finally:
            self.running = None
            if self.waiting:
                self.begin(self.waiting.pop(0))

    async def stop(self) -> None:
        """The command /stop: ends the agent, and clears only the head of the queue."""
        if self.waiting:
            self.waiting.pop(0)
        if self.running is not None:
            self.running.cancel()

    async def settle(self) -> None:
        """Until nothing runs and nothing waits."""
        while pending := [handler for handler in self.handlers if not handler.done()]:
            await asyncio.wait(pending)


class SentinelGateway(ReportedGateway):
    """The fix: a sentinel is entered before the set-up. What it still misses stands at each place."""

    def __init__(self, agent: Agent, *, cap: int = 100) -> None:
        super().__init__(agent, cap=cap)
        self.setting_up = False

    async def send(self, text: str) -> bool:
        if self.running is None:
            self.setting_up = True
            self.running = self.begin(text)
            return True
        if self.setting_up:
            # There is no agent object yet that could be steered: the one pending slot is written over.
            self.waiting[:1] = [text]
            return True
        return self.enqueue(text)

    async def handle(self, text: str) -> None:
        try:
            for _ in range(SETUP_AWAITS):
                await asyncio.sleep(0)
            self.setting_up = False
            await self.agent(text)
        finally:
            # Whoever's slot it is by now.
            self.running = None
            if self.waiting:
                self.setting_up = True
                self.running = self.begin(self.waiting.pop(0))

    async def stop(self) -> None:
        """As before, and the slot is freed at once, while the old handler still has its end to run."""
        await super().stop()
        self.running = None
