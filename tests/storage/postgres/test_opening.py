"""A node opens a database: it creates the tables once, and says clearly why it cannot."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    StoreCorrupt,
    StoreReadOnly,
    StoreUnreachable,
    format_error,
)
from holdfast.storage import open_store
from holdfast.storage.port import Send
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.postgres.schema import SCHEMA_VERSION


@contextmanager
def database(url, name, settings=""):
    """A new database on the server of `url`."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        try:
            if settings:
                connection.execute(f"ALTER DATABASE {name} SET {settings}")
            start, _, query = url.partition("?")
            yield f"{start.rpartition('/')[0]}/{name}?{query}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def opened(store, use=None):
    try:
        await store.open(node_id="n", at=1.0)
        return await use(store) if use else await store.info()
    finally:
        await store.close()


def message(n):
    return Send(
        principal="p", key="k", agent=None, default_agent="a", message_id=f"m{n}", content="x", policy="queue", at=1.0,
        run_id=f"r{n}",
    )  # fmt: skip


def refused(store, kind):
    with pytest.raises(kind) as caught:
        asyncio.run(opened(store))
    return caught.value


def test_nodes_that_start_at_once_create_the_tables_once(postgres_database):
    for attempt in range(3):
        with database(postgres_database, f"fresh_{attempt}") as url, ThreadPoolExecutor(5) as pool:
            infos = list(pool.map(lambda _: asyncio.run(opened(PostgresStore(url))), range(5), timeout=60))
            assert [info.version.partition(" ")[0] for info in infos] == [str(SCHEMA_VERSION)] * 5


def test_text_is_ordered_by_bytes_whatever_the_database_prefers(postgres_url):
    asyncio.run(opened(PostgresStore(postgres_url)))
    with psycopg.connect(postgres_url) as connection:
        others = connection.execute(
            "SELECT attrelid::regclass::text, attname FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class "
            "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace) AND attnum > 0 "
            "AND atttypid = 'text'::regtype AND attcollation <> '\"C\"'::regcollation"
        ).fetchall()
    assert others == []


def test_an_empty_database_of_another_program_is_not_touched(postgres_database):
    with database(postgres_database, "others") as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE session (a int)")
        refused(PostgresStore(url), StoreCorrupt)
        with psycopg.connect(url, autocommit=True) as connection:
            assert connection.execute("SELECT to_regclass('holdfast_schema')").fetchone() == (None,)


def test_newer_tables_are_used_only_if_they_allow_it(postgres_database):
    with database(postgres_database, "newer") as url:
        asyncio.run(opened(PostgresStore(url)))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("UPDATE holdfast_schema SET version = version + 1")
            asyncio.run(opened(PostgresStore(url)))
            connection.execute("UPDATE holdfast_schema SET usable_from = version")
        error = refused(PostgresStore(url), ConfigurationError)
        versions = f"schema version {SCHEMA_VERSION + 1}, but this Holdfast supports up to {SCHEMA_VERSION}"
        assert versions in error.message


def test_an_old_server_is_refused(postgres_url, monkeypatch):
    monkeypatch.setattr("holdfast.storage.postgres.schema._OLDEST_SERVER", 990_000)
    assert "too old" in refused(PostgresStore(postgres_url), ConfigurationError).message


def test_a_read_only_database_is_refused(postgres_database):
    with database(postgres_database, "frozen", "default_transaction_read_only = on") as url:
        refused(PostgresStore(url), StoreReadOnly)


def test_a_database_that_becomes_read_only_refuses_each_write_and_answers_reads(postgres_database):
    async def use(store):
        claim = (await store.send(message(0))).claim
        with psycopg.connect(store.backend.address.conninfo, autocommit=True) as connection:
            name = connection.info.dbname
            connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE application_name = 'holdfast' AND datname = current_database()"
            )
        answers = await asyncio.gather(*(store.send(message(n)) for n in range(1, 6)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreReadOnly}
        assert await store.mailbox(claim.lease.session) == ()

    with database(postgres_database, "freezing") as url:
        asyncio.run(opened(PostgresStore(url), use))


def test_a_server_without_free_connections_is_named_so(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS narrow")
        connection.execute("CREATE ROLE narrow LOGIN CONNECTION LIMIT 0")
        error = refused(PostgresStore(postgres_url.replace("holdfast@", "narrow@", 1)), StoreUnreachable)
        assert "too many connections" in error.message
        connection.execute("DROP ROLE narrow")


PASSWORD = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/db",
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/db?connect_timeout=1&application_name=x",
        f"postgresql://u@127.0.0.1:1/db?password={PASSWORD}",
        f"postgresql://u:{PASSWORD}@127.0.0.1:port/db",
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/db?no_such={PASSWORD}",
        f"postgresql://u:{PASSWORD}/x@127.0.0.1:1/db",
        f"postgresql://u:a@{PASSWORD}@127.0.0.1:1/db",
        f"postgresql://u:{PASSWORD}%zz@127.0.0.1:1/db",
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/db?prepared_statements={PASSWORD}",
    ],
)
def test_no_error_shows_the_password(url):
    async def use():
        await opened(open_store(url))

    with pytest.raises(HoldfastError) as caught:
        asyncio.run(use())
    error: BaseException | None = caught.value
    while error is not None:
        assert PASSWORD not in f"{error} {error!r} {format_error(error)}"
        error = error.__cause__ or error.__context__
    with pytest.MonkeyPatch.context():
        try:
            store = open_store(url)
        except ConfigurationError:
            return
        assert PASSWORD not in f"{store.backend.path} {vars(store.backend)!r} {vars(store)!r}"
