"""Requests, runs, stops and connections leave no cycles behind: the garbage collector has nothing to look for."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.live import Live, served

OURS = ("holdfast", "uvicorn")
TIMES = 20


@contextmanager
def uncollected() -> Iterator[Counter[str]]:
    """What becomes garbage inside, and only the collector could free: the names of our types, filled in at the end."""
    left: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left.update(type(found).__qualname__ for found in gc.garbage if type(found).__module__.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def runs(live: Live) -> None:
    for _ in range(TIMES):
        assert (await live.post("s", query="?wait=5", agent="echo")).json()["status"] == "completed"


async def stops(live: Live) -> None:
    for _ in range(TIMES):
        await live.begun("s")
        answer = await live.http.post("/v1/sessions/s/interrupt", json={})
        assert answer.json()["outcome"] == "gone"


async def connections(live: Live) -> None:
    address, _, port = live.url.removeprefix("http://").rpartition(":")
    for _ in range(TIMES):
        reader, writer = await asyncio.open_connection(address, int(port))
        writer.write(b"GET /v1/sessions HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    await live.post("s", query="?wait=5", agent="echo")


@pytest.mark.parametrize("what", [runs, stops, connections])
def test_nothing_is_left_for_the_collector(what):
    async def scenario(live: Live) -> None:
        await what(live)  # what is made once is there
        with uncollected() as left:
            await what(live)
        assert sum(left.values()) < TIMES, left

    served(scenario)
