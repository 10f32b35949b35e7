"""Report R4 as a model: a base agent with states, an output queue, a memory and a handler for messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

__all__ = ["BaseAgent", "State"]

State = Literal["idle", "running", "thinking"]


class BaseAgent:
    """The base agent of the report, fault by fault.

    Parameters:
        think: makes the answer to a request.
    """

    def __init__(self, think: Callable[[str], Awaitable[str]]) -> None:
        self.think = think
        self.state: State = "idle"
        self.memory: list[str] = []
        self.output: asyncio.Queue[str] = asyncio.Queue()
        self.finished = asyncio.Event()

    @asynccontextmanager
    async def in_state(self, state: State) -> AsyncIterator[None]:
        """Restores what was there before, over whatever came meanwhile."""
        before = self.state
        self.state = state
        try:
            yield
        finally:
            self.state = before

    async def add_message(self, text: str) -> None:
        """Appended from many sides, with the store's await between reading and writing."""
        memory = list(self.memory)
        await asyncio.sleep(0)
        memory.append(text)
        self.memory = memory

    async def run(self, request: str) -> str:
        """Looks whether it is idle, and says that it runs only after an await. Who comes too late loses the request."""
        if self.state != "idle":
            raise RuntimeError("the agent is busy")
        await self.add_message(request)
        async with self.in_state("running"):
            async with self.in_state("thinking"):
                answer = await self.think(request)
            for word in answer.split():
                await self.output.put(word)
            self.finished.set()
        await self.add_message(answer)
        return answer

    async def stream(self) -> AsyncIterator[str]:
        """Decides by `empty()`, then waits for an item without a deadline."""
        while not (self.finished.is_set() and self.output.empty()):
            yield await self.output.get()

    async def on_message(self, sender: str, text: str) -> str:
        """From another agent: waits for the run, however long it takes."""
        return await self.run(f"{sender}: {text}")
