"""The runs of a principal are limited on all hosts of a database together."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from tests.host.test_cluster import hosts, run, url

__all__ = ["url"]

LIMIT = 4
now: list[str] = []
"""Sessions whose runs are active."""


@pytest.fixture(autouse=True)
def nothing_runs() -> None:
    now.clear()


@holdfast.agent(replayable=True)
async def waiter(run: holdfast.Run) -> str:
    now.append(run.session_key)
    try:
        await run.interrupt.wait()
    finally:
        now.remove(run.session_key)
    return "over"


async def active(count: int) -> None:
    """Wait until so many runs are active."""
    while len(now) != count:
        await asyncio.sleep(0.005)


def test_the_hosts_together_keep_the_limit_and_use_it_all(url: str) -> None:
    async def main() -> None:
        async with hosts(url, 2, agents=[waiter], principal_runs=LIMIT) as (one, two):
            for host in (one, two):  # the first one has not polled since the second one came
                watch = host.parts.cluster_watch
                assert watch is not None
                await watch.share_limits()
            sent = [await one.session(f"s{n}").send("go") for n in range(2 * LIMIT)]
            assert [receipt.disposition for receipt in sent].count("started") == LIMIT // 2
            await active(LIMIT)
            assert (len(one.live), len(two.live)) == (LIMIT // 2, LIMIT // 2)
            other = await one.session("bobs", principal="bob").send("go")
            assert other.disposition == "started", "the limit is that of a principal"
            await active(LIMIT + 1)
            for left in range(2 * LIMIT - 1, LIMIT - 1, -1):  # each end makes room for one that waits
                await one.session(next(key for key in now if key != "bobs")).interrupt("enough")
                await active(min(left, LIMIT) + 1)

    run(main)


def test_a_host_that_stays_alone_has_the_whole_limit(postgres_url: str) -> None:
    async def main() -> None:
        url = f"{postgres_url}&signals=off"  # then hosts poll often
        async with hosts(url, 1, agents=[waiter], principal_runs=LIMIT) as (one,):
            async with hosts(url, 1, agents=[waiter], principal_runs=LIMIT):
                watch = one.parts.cluster_watch
                assert watch is not None
                await watch.share_limits()
                for n in range(LIMIT):
                    await one.session(f"s{n}").send("go")
                assert one.admission.principal_runs == LIMIT // 2
                await active(LIMIT)
            while one.admission.principal_runs != LIMIT:
                await asyncio.sleep(0.005)
            await active(LIMIT)
            assert len(one.live) == LIMIT, "what the other host handed over goes on here"

    run(main)


def test_each_host_has_at_least_one_run(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url, 2, agents=[waiter], principal_runs=1) as (one, two):
            for host in (one, two):
                watch = host.parts.cluster_watch
                assert watch is not None
                await watch.share_limits()
                assert host.admission.principal_runs == 1

    run(main)
