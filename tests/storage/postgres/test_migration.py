"""Older tables are migrated when a node opens them, while nodes of the older version are still at work."""

import asyncio
import pathlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from holdfast.storage.port import RunCommit
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.postgres.schema import SCHEMA_VERSION
from tests.storage.postgres.test_opening import database, opened
from tests.storage.postgres.test_races import end_lease, message, run

VERSION_1 = (pathlib.Path(__file__).parents[1] / "fixtures" / "postgres_1.sql").read_text("utf-8")

COLUMNS = """
SELECT table_name, column_name, data_type, is_nullable, column_default, collation_name FROM information_schema.columns
WHERE table_schema = 'public' ORDER BY table_name, column_name
"""
INDEXES = "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY indexdef"
OLD_SESSION = """
INSERT INTO session (session, principal, key, created_at, events_since, listed_at, agent, updated_at, next_seq, next_n,
    fence, holder, run_id, run, append_nth, append_seq, sweep, last_run_id, history_id, waiting, ready_since, due_at,
    question_due, deleted_at)
VALUES (77, 'p', 'by the old node', 1, NULL, 1, 'demo', 1, 1, 1, 0, 0, NULL, NULL, 0, 0, 0, NULL, NULL, 0, NULL, 0,
    NULL, NULL)
"""
"""What a node of version 1 runs to create a session."""


@contextmanager
def old_store(url, name):
    with database(url, name) as own:
        with psycopg.connect(own, autocommit=True) as connection:
            connection.execute(VERSION_1)
        yield own


def tables(url):
    with psycopg.connect(url) as connection:
        versions = connection.execute("SELECT version, usable_from FROM holdfast_schema").fetchall()
        return connection.execute(COLUMNS).fetchall(), connection.execute(INDEXES).fetchall(), versions


def test_migrated_tables_are_those_that_a_new_database_gets(postgres_database):
    with old_store(postgres_database, "old_tables") as url, database(postgres_database, "new_tables") as fresh:
        for one in (url, fresh):
            asyncio.run(opened(PostgresStore(one)))
        assert tables(url) == tables(fresh)


def test_nodes_that_start_at_once_migrate_the_tables_once(postgres_database):
    with old_store(postgres_database, "old_at_once") as url, ThreadPoolExecutor(4) as pool:
        infos = list(pool.map(lambda _: asyncio.run(opened(PostgresStore(url))), range(4), timeout=60))
        assert [info.version.partition(" ")[0] for info in infos] == [str(SCHEMA_VERSION)] * 4


def test_sessions_and_runs_of_an_older_node_go_on(postgres_database):
    async def main():
        with old_store(postgres_database, "old_rows") as url:
            store: Any = PostgresStore(url, workspace_pool="a")
            await store.open(node_id="new", at=9.0)
            try:
                assert await store.cluster.other_nodes() == ("old",)
                first = (await store.send(message(10, key="ended"))).claim
                assert [view.text for view in await store.runs(first.lease.session, limit=9)][1:] == ["done"]
                assert (await store.send(message(11, key="busy"))).disposition == "queued"
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute(OLD_SESSION)
                assert (await store.send(message(12, key="by the old node"))).session == 77
                assert await store.rescue(at=10.0) == (), "the older node lives"
                end_lease(url, 1)
                (rescued,) = await store.rescue(at=11.0)
                assert (rescued.lease.run_id, rescued.attempt, rescued.workspace_pool) == ("r3", 2, None)
                await store.use_workspace(rescued.lease)
                commit = RunCommit(lease=rescued.lease, status="completed", at=12.0, next_run_id="r13")
                following = (await store.commit_run(commit)).claim
                assert [m.message_id for m in following.messages] == ["m4"]
                assert following.workspace_pool == "a"
            finally:
                await store.close()

    run(main)
