"""How soon a provider sees that its request was stopped: from the interrupt to the closed connection at the server."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from unittest import mock

from benchmarks.rows import Row, print_rows
from holdfast import Agent, Host, Settings
from holdfast.testing.model_server import ModelServer, Reply

__all__ = ["rows"]

MODELS = ("openai:gpt-test", "openai-responses:gpt-test", "anthropic:claude-test")
WAITS = {
    "the headers": (Reply(headers_s=math.inf), 0),
    "the next piece": (Reply(text="some words and then none", fault="stall", after=2), 2),
}
ROUNDS = 40
CLOSED_MS = 50.0


async def closed_after_s(model: str, reply: Reply, pieces: int) -> list[float]:
    """How long the server waited for the close, each time."""
    loop = asyncio.get_running_loop()
    took = []
    settings = Settings(grace_s=0.5, abandon_after_s=0.5, drain_timeout_s=0.5)
    async with ModelServer(lambda _: reply) as server:
        with mock.patch.dict(os.environ, server.environment):
            async with Host(Agent(name="agent", model=model), store="memory://", settings=settings) as host:
                session = host.session("alice")
                for number in range(ROUNDS):
                    await session.send("go")
                    exchange = await server.requests(number + 1)
                    await exchange.until(pieces=pieces)
                    asked_at = loop.time()
                    await session.interrupt("enough")
                    await exchange.until(ended=True)
                    took.append(exchange.ended_at - asked_at)
    return took


def rows() -> list[Row]:
    """The figures of the models."""
    found = []
    for model in MODELS:
        for wait, (reply, pieces) in WAITS.items():
            took = asyncio.run(closed_after_s(model, reply, pieces))
            median_ms = statistics.median(took) * 1000
            found.append(
                Row(
                    name=f"stop to close seen, {model.partition(':')[0]}, waiting for {wait}",
                    value=median_ms,
                    unit="ms",
                    target=f"<= {CLOSED_MS:g}",
                    met=median_ms <= CLOSED_MS,
                    note=f"median of {ROUNDS}, longest {max(took) * 1000:.1f}",
                )
            )
    return found


if __name__ == "__main__":
    print_rows(rows())
