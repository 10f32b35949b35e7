"""While the database does not answer, nothing is accepted, clients are told when to retry, and readiness is red."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.storage.postgres import PostgresStore
from tests.server.live import live


def test_an_outage_is_a_503_with_retry_after_and_readiness_follows_it(own_postgres: PostgresServer) -> None:
    async def main(database: PostgresServer) -> None:
        loop = asyncio.get_running_loop()

        async def until(status: int, path: str) -> Any:
            while (answer := await server.http.get(path)).status_code != status:
                await asyncio.sleep(0.02)
            return answer

        async with live(store=PostgresStore(database.url(), lease_s=4.0)) as server:
            assert (await server.http.get("/readyz")).status_code == 200
            assert (await server.post("bob", query="?wait=30")).status_code == 200
            await loop.run_in_executor(None, lambda: database.stop(at_once=True))
            refused = await server.post("bob")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unreachable")
            assert int(refused.headers["retry-after"]) > 0
            red = await until(503, "/readyz")
            assert red.json() == {"status": "store_unreachable"}
            assert int(red.headers["retry-after"]) > 0
            assert (await server.http.get("/healthz")).status_code == 200
            await loop.run_in_executor(None, database.start)
            await until(200, "/readyz")
            assert (await server.post("bob", query="?wait=30")).status_code == 200
            assert len((await server.http.get("/v1/sessions/bob/transcript")).json()["entries"]) == 4

    asyncio.run(asyncio.wait_for(main(own_postgres), 100))


FAULTS = {
    "a disk without space": (
        "CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'could not extend file' USING ERRCODE = '53100'; END $$;"
        "CREATE TRIGGER fault BEFORE INSERT ON message EXECUTE FUNCTION fault()",
        "DROP TRIGGER fault ON message; DROP FUNCTION fault",
        (503, "store_full"),
    ),
    "a database that becomes read-only": (
        "ALTER SYSTEM SET default_transaction_read_only = on",
        "ALTER SYSTEM SET default_transaction_read_only = off",
        (503, "store_read_only"),
    ),
    "a database without a free connection": (
        "ALTER ROLE app CONNECTION LIMIT 0",
        "ALTER ROLE app CONNECTION LIMIT -1",
        (503, "store_unreachable"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_database_refuses_messages_and_makes_readiness_red_until_it_is_over(
    name: str, own_postgres: PostgresServer
) -> None:
    begin, end, expected = FAULTS[name]

    async def main(database: PostgresServer) -> None:
        async def until(status: int) -> Any:
            while (answer := await server.http.get("/readyz")).status_code != status:
                await asyncio.sleep(0.02)
            return answer

        url = database.url("faults").replace("holdfast@", "app:do-not-print-me@", 1)
        async with live(store=PostgresStore(url, lease_s=4.0)) as server:
            assert (await server.post("bob", query="?wait=30")).status_code == 200
            await asyncio.to_thread(change_in, begin, cut="LIMIT" in begin)
            while (await server.post("carol")).status_code < 400:
                pass  # the database's processes read a setting some time after it was changed
            refused = await server.post("bob")
            assert (refused.status_code, refused.json()["error"]["code"]) == expected
            assert int(refused.headers["retry-after"]) > 0
            red = await until(503)
            assert int(red.headers["retry-after"]) > 0
            assert "do-not-print-me" not in f"{refused.text} {red.text} {server.host.store.health()}"
            assert "do-not-print-me" not in repr(server.host.incidents.__dict__)
            await asyncio.to_thread(change_in, end, cut=False)
            await until(200)
            assert (await server.post("bob", query="?wait=30")).status_code == 200
            assert len((await server.http.get("/v1/sessions/bob/transcript")).json()["entries"]) == 4

    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE app LOGIN")
        connection.execute("CREATE DATABASE faults OWNER app")

    def change_in(statements: str, *, cut: bool) -> None:
        with psycopg.connect(own_postgres.url("faults"), autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(statements)
            connection.execute("SELECT pg_reload_conf()")
            if cut:
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")

    asyncio.run(asyncio.wait_for(main(own_postgres), 100))
