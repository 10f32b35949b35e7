"""A pgbouncer in transaction mode in front of the database: the store works, and signals take the direct way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.settings import Settings
from tests.storage.postgres.pooler import needs_pgbouncer, pgbouncer

pytestmark = needs_pgbouncer


@pytest.fixture
def pooled_url(postgres_url: str) -> Iterator[str]:
    """The address of the database behind a pgbouncer that keeps no prepared statements."""
    name = postgres_url.partition("@/")[2].partition("?")[0]
    with pgbouncer(Path(postgres_url.partition("host=")[2]), name) as folder:
        yield f"postgresql://holdfast@/{name}?host={folder}&prepared_statements=off"


async def echo(run: holdfast.Run) -> str:
    return f"echo {run.text}"


async def talk(url: str, settings: Settings) -> tuple[int, bool]:
    """Talk to two hosts in turns; return how many signals the second received, and whether it still could."""
    async with (
        holdfast.Host(echo, store=url, settings=settings) as one,
        holdfast.Host(echo, store=url, settings=settings) as two,
    ):
        for n in range(30):
            host = one if n % 2 else two
            assert await host.session(f"s{n % 3}").ask(str(n)) == f"echo {n}"
        cluster = two.store.cluster
        assert cluster is not None
        while cluster.signals.problem == "not connected yet":
            await asyncio.sleep(0.01)
        works = cluster.signals.problem is None
        while works and cluster.signals.received == 0:
            await one.session("s0").ask("x")
        return cluster.signals.received, works


def test_two_hosts_work_behind_a_pgbouncer_and_signal_each_other_directly(pooled_url: str, postgres_url: str) -> None:
    settings = Settings(store_direct=postgres_url, cluster_poll_s=0.2)
    received, works = asyncio.run(asyncio.wait_for(talk(pooled_url, settings), 60))
    assert works
    assert received > 0


def test_two_hosts_work_behind_a_pgbouncer_without_signals(pooled_url: str) -> None:
    received, works = asyncio.run(asyncio.wait_for(talk(f"{pooled_url}&signals=off", Settings(cluster_poll_s=0.1)), 60))
    assert not works
    assert received == 0
