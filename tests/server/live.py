"""A real server on a free port of this machine, in the loop of the test, and the agents that it hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from holdfast import Host, Run, Settings
from holdfast.host import DrainReport
from holdfast.server import App, Running, bind, serve_until
from holdfast.storage.port import Store

JSON = {"content-type": "application/json"}


async def echo(run: Run) -> str:
    """Say what it heard."""
    return f"echo {run.text}"


async def endless(run: Run) -> None:
    """Say a word, then wait until it is interrupted."""
    await run.emit("waiting")
    await run.interrupt.wait()


async def counting(run: Run) -> None:
    """Emit as many numbers as it is asked for."""
    for number in range(int(run.text)):
        await run.emit(f"{number} ")


async def failing(run: Run) -> None:
    """Raise."""
    raise RuntimeError("it broke")


GUARD_S = 90.0
"""A scenario that takes longer hangs; a busy machine only makes it slow."""
EVERYBODY = {"public_agents": ("*",)}
"""Keys without a list of agents may name all, as most tests have several."""

AGENTS = (echo, endless, counting, failing)


@dataclass
class Live:
    """A server that answers: its address, its parts, and a plain HTTP client for it."""

    url: str
    host: Host
    app: App
    http: httpx2.AsyncClient
    asked: asyncio.Future[str]
    ended: asyncio.Task[DrainReport]

    async def end(self) -> DrainReport:
        """Shut the server down as a signal would."""
        if not self.asked.done():
            self.asked.set_result("the test ends it")
        return await self.ended

    async def post(self, key: str, content: str = "hi", *, query: str = "", **fields: Any) -> httpx2.Response:
        """Send a message."""
        return await self.http.post(f"/v1/sessions/{key}/messages{query}", json={"content": content, **fields})

    async def post_as(self, key: str, headers: dict[str, str]) -> httpx2.Response:
        """Send a message with these headers."""
        return await self.http.post(f"/v1/sessions/{key}/messages", json={"content": "hi"}, headers=headers)

    async def begun(self, key: str) -> dict[str, Any]:
        """Start an endless run, and return its receipt once it has begun."""
        receipt: dict[str, Any] = (await self.post(key, "go", agent="endless")).json()
        async for event in self.host.session(key).events(after=receipt["cursor"]):
            if event.kind == "text.delta":
                break
        return receipt


@asynccontextmanager
async def live(
    *agents: Any, store: str | Store = "memory://", headers: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Live]:
    """A server with `agents` (by default those of this module) and settings that suit tests."""
    chosen = Settings(
        **{
            "port": 0,
            "drain_timeout_s": 0.2,
            "grace_s": 0.2,
            "abandon_after_s": 0.2,
            "head_timeout_s": GUARD_S,
            "body_timeout_s": GUARD_S,
            "public_agents": ("*",),
            **settings,
        }
    )
    host = Host(agents=agents or AGENTS, store=store, settings=chosen)
    loop = asyncio.get_running_loop()
    started: asyncio.Future[Running] = loop.create_future()
    asked: asyncio.Future[str] = loop.create_future()
    ended = asyncio.create_task(
        serve_until(asked, host, bind(chosen), ready=started.set_result, note=lambda text: None)
    )
    waiting: set[asyncio.Future[Any]] = {ended, started}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not started.done():
        await ended
    running = started.result()
    async with httpx2.AsyncClient(base_url=running.url, headers=headers, timeout=GUARD_S, trust_env=False) as http:
        server = Live(running.url, host, running.app, http, asked, ended)
        try:
            yield server
        finally:
            await server.end()


class Stopwatch:
    """Time since its start, without the time for which a busy machine did not run this loop's thread. Of one loop."""

    _LOOK_S = 0.01

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._looked = self._loop.time()
        self._worked = time.thread_time()
        self._kept_s = 0.0
        self._look()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return self._looked - self._began - self._kept_s

    def _look(self) -> None:
        now, worked = self._loop.time(), time.thread_time()
        self._kept_s += max(0.0, now - self._looked - self._LOOK_S - (worked - self._worked))
        self._looked, self._worked = now, worked
        self._loop.call_later(self._LOOK_S, self._look)


def served(scenario: Callable[[Live], Coroutine[Any, Any, None]], *agents: Any, **options: Any) -> None:
    """Run the scenario against a server; afterwards another session must still be served."""

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*agents, **options) as server:
            await scenario(server)
            if not server.asked.done():
                await server.host.session("another", principal="other").ask("hello")
            await server.end()
            statistics = server.host.statistics()
            assert statistics.event_subscribers == 0
            assert server.app.context.streams.open == 0
            assert {number for number, count in statistics.promises.items() if count.broken} == set()

    asyncio.run(main())
