"""A host whose store is a PostgreSQL database: it works as on SQLite, and gives up its runs before its lease ends."""

import asyncio
import time

import psycopg
import pytest

import holdfast
from holdfast.errors import StorageError
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore


async def echo(run: holdfast.Run) -> str:
    return f"you said {run.text}"


@holdfast.agent(replayable=True)
async def patient(run: holdfast.Run) -> str:
    await run.interrupt.wait()
    return "never"


def drop_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'holdfast'"
        )


def test_messages_are_answered_also_across_lost_connections(postgres_url: str) -> None:
    async def main() -> None:
        async with holdfast.Host(echo, store=postgres_url) as host:
            for n in range(3):
                assert await host.session("alice").ask(f"{n}") == f"you said {n}"
                drop_connections(postgres_url)
            answers = await asyncio.gather(*(host.session(f"s{n}").ask("hello") for n in range(20)))
            assert answers == ["you said hello"] * 20
        async with holdfast.Host(echo, store=postgres_url) as host:
            assert len(await host.session("alice").transcript()) == 6

    asyncio.run(asyncio.wait_for(main(), 60))


@holdfast.agent(replayable=True)
async def stubborn(run: holdfast.Run) -> None:
    try:
        await run.interrupt.wait()
    finally:
        await asyncio.shield(asyncio.sleep(60))


@pytest.mark.parametrize("agent", [patient, stubborn], ids=["obeys", "ignores the stop"])
def test_runs_are_stopped_before_a_lease_ends_that_cannot_be_renewed(
    own_postgres: PostgresServer, agent: holdfast.Agent
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = PostgresStore(own_postgres.url(), lease_s=3.0)
        settings = Settings(drain_timeout_s=0.1, grace_s=0.1, abandon_after_s=0.1)
        async with holdfast.Host(agent, store=store, settings=settings) as host:
            receipt = await host.session("alice").send("wait")
            (run,) = host.live.values()
            await loop.run_in_executor(None, lambda: own_postgres.stop(at_once=True))
            stopped = asyncio.ensure_future(run.follow())
            refused = asyncio.ensure_future(host.session("bob").send("not accepted"))
            async with asyncio.timeout(20):
                while not run.scope.closed:
                    await asyncio.sleep(0.01)
            assert time.monotonic() < store.health().lease_ends_at, "nobody has taken the run over yet"
            assert store.health().problem is not None
            assert "lease_lost" in [incident.kind for incident in host.incidents.newest]
            with pytest.raises(StorageError):
                await refused
            await loop.run_in_executor(None, own_postgres.start)
            await stopped
            settled = await host.session("alice").message(receipt.message_id)
            assert (settled.state, settled.cause.kind if settled.cause else None) == ("interrupted", "lease_lost")
            assert (await host.session("bob").send("accepted again")).disposition == "started"

    asyncio.run(asyncio.wait_for(main(), 100))
