"""Hosts go on with a standby of the database that was promoted, and miss nothing that was accepted."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import StoreUnreachable
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore

done: Counter[str] = Counter()


@holdfast.agent(replayable=True)
async def worker(run: holdfast.Run) -> str:
    done[run.text] += 1
    if run.text == "long":
        await run.interrupt.wait()
    return f"did {run.text}"


@pytest.fixture
def standby(own_postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A standby of the server, which has everything that the server has committed."""
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        server = PostgresServer(Path(name), standby_of=own_postgres)
        server.start()
        own_postgres.wait_for_standby()
        try:
            yield server
        finally:
            server.stop()


def test_hosts_go_on_with_a_promoted_standby(own_postgres: PostgresServer, standby: PostgresServer) -> None:
    url = f"postgresql://holdfast@/postgres?host={own_postgres.folder},{standby.folder}"
    url += "&target_session_attrs=read-write"

    def host() -> holdfast.Host:
        settings = Settings(cluster_poll_s=0.1, grace_s=1.0)
        return holdfast.Host(worker, store=PostgresStore(url, lease_s=10.0), settings=settings)

    async def main() -> None:
        done.clear()
        async with host() as one, host() as two:
            accepted = [await one.session(f"s{n}").send(f"m{n}") for n in range(20)]
            running = await two.session("long").send("long")
            while not done["long"]:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(own_postgres.stop, at_once=True)
            late = asyncio.ensure_future(one.session("late").send("late", idempotency_key="k"))
            await asyncio.to_thread(standby.promote)
            try:
                receipt = await late
            except StoreUnreachable:  # the reply of the commit was lost with the primary: repeat it
                receipt = await one.session("late").send("late", idempotency_key="k")
            assert (await two.session("late").wait(receipt.message_id)).text == "did late"
            for n, message in enumerate(accepted):
                assert (await two.session(f"s{n}").wait(message.message_id)).text == f"did m{n}"
            assert (await one.session("long").interrupt("enough")).outcome == "gone"
            assert (await one.session("long").wait(running.message_id)).state == "interrupted"
            assert set(done.values()) == {1}, "no run was repeated: no lease was over"

    asyncio.run(asyncio.wait_for(main(), 60))
