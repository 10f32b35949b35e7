"""A server that asks for a password gets it on every connection of a store, and nothing shows it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import psycopg
import pytest

from holdfast.errors import HoldfastError
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.postgres.inspection import inspect_database
from holdfast.storage.values import Send

PASSWORD = f"p@ss/{secrets.token_hex(8)}"
QUOTED = PASSWORD.replace("@", "%40").replace("/", "%2F")


@pytest.fixture
def url(own_postgres: PostgresServer) -> str:
    """A database whose owner has a password, on a server that asks for it; with ``{}`` for the password."""
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        connection.execute("SET password_encryption = 'scram-sha-256'")
        connection.execute(f"CREATE ROLE app LOGIN PASSWORD '{PASSWORD}'")
        connection.execute("CREATE DATABASE app OWNER app")
        rules = own_postgres.folder / "data" / "pg_hba.conf"
        rules.write_text(f"local app app scram-sha-256\n{rules.read_text()}")
        connection.execute("SELECT pg_reload_conf()")
    return f"postgresql://app:{{}}@/app?host={own_postgres.folder}"


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 40))


def test_a_store_gives_its_password_on_all_its_connections(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        one, two = (PostgresStore(url.format(QUOTED), lease_s=2.0) for _ in range(2))
        await one.open(node_id="n1", at=1.0)
        await two.open(node_id="n2", at=1.0)
        assert one.cluster is not None and two.cluster is not None
        heard = asyncio.Event()
        two.cluster.signals.listen(lambda _: heard.set(), lambda _: None)
        while two.cluster.signals.problem is not None:
            await asyncio.sleep(0.005)
        for store in (one, two):
            renewed: list[float] = []
            assert store.cluster is not None
            store.cluster.watch_lease(renewed.append)
            while len(renewed) < 2:
                await asyncio.sleep(0.005)
        sent = await one.send(
            Send(
                principal="p",
                key="k",
                agent=None,
                default_agent="a",
                message_id="m",
                content="x",
                policy="queue",
                at=2.0,
            )
        )
        await heard.wait()
        assert [item.message.message_id for item in await two.mailbox(sent.session)] == ["m"]
        await two.close()
        await one.close()

    with caplog.at_level(logging.DEBUG):
        run(main)
    assert PASSWORD not in caplog.text and QUOTED not in caplog.text
    seen = inspect_database(url.format(QUOTED))
    assert seen.sessions == 1
    assert PASSWORD not in repr(seen) and QUOTED not in repr(seen)


def test_a_password_is_read_from_a_file_at_each_connection(url: str, own_postgres: PostgresServer) -> None:
    """After the password was changed in the server and in the file, new connections use the new one."""
    file = own_postgres.folder / "passfile"

    def give(password: str) -> None:
        with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
            connection.execute(f"ALTER ROLE app PASSWORD '{password}'")
        file.write_text(f"*:*:app:app:{password}\n")
        file.chmod(0o600)

    async def main() -> None:
        for password in ("first", "second"):
            give(password)
            store = PostgresStore(f"{url.replace(':{}', '')}&passfile={file}", lease_s=2.0)
            await store.open(node_id=password, at=1.0)
            await store.close()
        file.unlink()
        with pytest.raises(HoldfastError, match="password"):
            await store.open(node_id="third", at=1.0)

    run(main)


@pytest.mark.parametrize("given", ["wrong-one", ""])
def test_a_wrong_password_is_refused_and_not_shown(url: str, given: str) -> None:
    async def main() -> None:
        store = PostgresStore(url.format(given))
        with pytest.raises(HoldfastError, match="password") as caught:
            await store.open(node_id="n1", at=1.0)
        assert "wrong-one" not in str(caught.value) and "wrong-one" not in caught.value.hint
        await store.close()

    run(main)
