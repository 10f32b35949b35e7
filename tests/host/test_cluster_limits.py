"""Limits of what a principal stores hold for all hosts together, up to what they write within a second.

A host checks them against a sum that is at most `LAG_S` old (`docs/explanation/storage.md`).
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.errors import LimitExceeded, QuotaExceeded
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore
from tests.host.test_cluster import run

LAG_S = 1.0
CONTENT = "x" * 10_000
PAUSE_S = 0.05
"""Between two messages of a host. Both together reach a limit after more than `LAG_S`, and one alone much later."""
LIMITS = {"sessions": 60, "bytes": 1_500_000}


@holdfast.agent
async def quick(run: holdfast.Run) -> None:
    """Ends at once."""


@asynccontextmanager
async def two_hosts(url: str, limited: str) -> AsyncIterator[list[holdfast.Host]]:
    """Two hosts that limit the number of a principal's sessions, or the bytes that it stores."""
    name = "principal_sessions" if limited == "sessions" else "principal_stored_bytes"
    chosen: dict[str, Any] = {name: LIMITS[limited]}
    settings = Settings(cluster_poll_s=60.0, drain_timeout_s=0.2, grace_s=1.0, **chosen)

    def host() -> holdfast.Host:
        return holdfast.Host(agents=[quick], store=PostgresStore(url, lease_s=20.0), settings=settings)

    async with host() as one, host() as two:
        yield [one, two]


class Sums:
    """What the principal has stored, as the database has it."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], limited: str) -> None:
        self._connection = connection
        self._column = limited
        self.read_at: list[float] = []
        self.values: list[int] = []

    async def read(self) -> int:
        """The sum now; it is noted, with the time at which it was known."""
        query = f"SELECT {self._column} FROM stored WHERE principal = 'local'"
        row = await (await self._connection.execute(query)).fetchone()
        self.read_at.append(time.monotonic())
        self.values.append(row[0] if row is not None else 0)
        return self.values[-1]

    def known_at(self, at: float) -> int:
        """The newest sum that was known before this time."""
        n = bisect_left(self.read_at, at)
        return self.values[n - 1] if n else 0


@asynccontextmanager
async def sums(url: str, limited: str) -> AsyncIterator[Sums]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        yield Sums(connection, limited)


async def fill(host: holdfast.Host, name: str, *, pause_s: float = 0.0) -> list[float]:
    """Send to new sessions until the host refuses it; when it began to send those messages that were accepted."""
    began_at: list[float] = []
    while True:
        began = time.monotonic()
        try:
            await host.session(f"{name}-{len(began_at)}").send(CONTENT)
        except (LimitExceeded, QuotaExceeded):
            return began_at
        began_at.append(began)
        await asyncio.sleep(pause_s)


async def idle(host: holdfast.Host) -> None:
    while host.live:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("limited", ["sessions", "bytes"])
def test_what_one_host_has_stored_counts_at_the_other_a_second_later(postgres_url: str, limited: str) -> None:
    async def main() -> None:
        async with two_hosts(postgres_url, limited) as (one, two), sums(postgres_url, limited) as stored:
            await two.session("first").send("it knows a small sum")
            sent = await fill(one, "one")
            assert len(sent) > 10
            await idle(one)
            total = await stored.read()
            assert total == LIMITS["sessions"] if limited == "sessions" else total > LIMITS["bytes"] - 2 * len(CONTENT)
            await asyncio.sleep(LAG_S)
            assert await fill(two, "two") == []
            assert await stored.read() == total, "what is refused stores nothing"
            for n in range(2):
                await one.session(f"one-{n}").delete()
            await asyncio.sleep(LAG_S)
            assert await fill(two, "again"), "what is deleted at one host is free at the other"

    run(main)


@pytest.mark.parametrize("limited", ["sessions", "bytes"])
def test_hosts_that_write_at_once_exceed_a_limit_by_what_they_write_in_a_second(
    postgres_url: str, limited: str
) -> None:
    async def main() -> None:
        async with two_hosts(postgres_url, limited) as (one, two), sums(postgres_url, limited) as stored:
            filling = asyncio.gather(fill(one, "one", pause_s=PAUSE_S), fill(two, "two", pause_s=PAUSE_S))
            while not filling.done():
                await stored.read()
                await asyncio.sleep(0.01)
            more = 1 if limited == "sessions" else len(CONTENT)
            for began_at in filling.result():
                assert len(began_at) > 5
                for began in began_at:
                    assert stored.known_at(began - LAG_S) + more <= LIMITS[limited]
            await asyncio.gather(idle(one), idle(two))
            total = await stored.read()
            assert total >= LIMITS[limited] - more
            await asyncio.sleep(LAG_S)
            assert [await fill(host, "late") for host in (one, two)] == [[], []]
            assert await stored.read() == total

    run(main)
