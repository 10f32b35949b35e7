"""The database of several hosts restarts as after a crash, or ends the connections on which they notify each other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import holdfast
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore

LEASE_S = 10.0
LIMIT_S = 60.0
done: list[str] = []


@holdfast.agent
async def worker(run: holdfast.Run) -> str:
    done.append(run.text)
    if run.text == "wait":
        await run.interrupt.wait()
    for _ in range(50 if run.text == "long" else 0):
        await run.emit("x")
        await asyncio.sleep(0.02)
    return f"did {run.text}"


@pytest.fixture
def server(own_postgres: PostgresServer) -> PostgresServer:
    done.clear()
    return own_postgres


@asynccontextmanager
async def two_hosts(server: PostgresServer, poll_s: float) -> AsyncIterator[tuple[holdfast.Host, holdfast.Host]]:
    def host() -> holdfast.Host:
        store = PostgresStore(server.url(), lease_s=LEASE_S)
        return holdfast.Host(agents=[worker], store=store, settings=Settings(cluster_poll_s=poll_s))

    async with host() as one, host() as two:
        await heard(one, two)
        yield one, two


async def heard(*hosts: holdfast.Host) -> None:
    """Wait until the hosts exchange signals."""
    for host in hosts:
        cluster = host.store.cluster
        assert cluster is not None
        while cluster.signals.problem is not None:
            await asyncio.sleep(0.01)


def test_a_crash_of_the_database_loses_no_message_and_interrupts_no_run(server: PostgresServer) -> None:
    async def main() -> None:
        async with two_hosts(server, 0.2) as (one, two):
            running = asyncio.ensure_future(one.session("alice").ask("long"))
            while not done:
                await asyncio.sleep(0.005)
            waiting = await two.session("alice").send("after it")
            assert waiting.disposition == "queued"
            await asyncio.to_thread(server.crash)
            assert (await running).endswith("xdid long")
            settled = await two.session("alice").wait(waiting.message_id)
            assert (settled.state, settled.text) == ("completed", "did after it")
            assert await two.session("bob").ask("hello") == "did hello"
            await heard(one, two)
            assert done == ["long", "after it", "hello"]
            for host in (one, two):
                assert not host.statistics().counts.get("runs_lost")
                assert not any(promise.broken for promise in host.statistics().promises.values())

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_host_whose_listener_is_ended_finds_everything_by_polling_and_listens_again(server: PostgresServer) -> None:
    async def main() -> None:
        async with two_hosts(server, 0.2) as (one, two):
            await one.session("alice").send("wait")
            assert await asyncio.to_thread(server.cut_listeners) == 2
            receipt = await two.session("alice").interrupt("enough")
            assert (receipt.outcome, receipt.proof) == ("gone", "observed")
            assert await two.session("alice").ask("again") == "did again"
            await heard(one, two)
            cluster = two.store.cluster
            assert cluster is not None
            before = cluster.signals.received
            await one.session("carol").ask("hello")
            while cluster.signals.received == before:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
