"""A host on a SQLite file whose run is interrupted before its first word: the program that the crash test kills.

Usage: python -m tests.host.interrupted_host <database>
"""

from __future__ import annotations

import asyncio
import math
import sys

from holdfast import Agent, Host, Settings
from holdfast.agents.scripted import Pause, ScriptedModel

DELETE = "delete all my files"


async def main(database: str) -> None:
    """Send, interrupt, end; or, where an earlier one was killed, only start, which ends its run."""
    agent = Agent(name="agent", model=ScriptedModel([[Pause(math.inf), "never"]]))
    async with Host(agent, store=f"sqlite:///{database}", settings=Settings(grace_s=0.2, drain_timeout_s=0.2)) as host:
        session = host.session("s")
        receipt = await session.send(DELETE, idempotency_key="once")
        async for event in session.events(after=receipt.cursor):
            if event.kind in ("step.started", "message.settled"):
                break
        await session.interrupt("enough")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
