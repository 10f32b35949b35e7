"""Reads, start and pruning of a store do not depend on how much it holds: no statement scans, no page walks a chain."""

import asyncio
import pathlib
import random
import re
import sqlite3
from contextlib import closing
from importlib.resources import files

import msgspec
import pytest

from benchmarks.large_store import LONG, make_store
from holdfast import failpoints
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import Entry
from holdfast.protocol.stopping import Cause
from holdfast.storage import SqliteStore
from holdfast.storage.port import EditHistory, RunCommit, Send
from holdfast.storage.sql import active_sessions, statements
from holdfast.storage.sqlite.database import SqliteDatabase
from tests.storage.audit import audit, audit_file

SCHEMA_5 = pathlib.Path(__file__).parents[1] / "fixtures" / "schema_5.sql"
NAMES = re.findall(
    r"^-- name: (\w+)$", files("holdfast.storage.sql").joinpath("statements.sql").read_text("utf-8"), re.MULTILINE
)
ALL_ROWS = {"keys", "run_pieces", "edit_pieces", "long_transcripts", "most_stored", "schedules", "due_schedules"}
"""Statements that read whole tables: API keys, schedules and principals, and what only migrations run."""
SORTED = {"due_schedules", "schedules_of_principal", "schedules_of_session", "pieces_within", "ended_runs"} | {
    "sessions",
    "sessions_of_principal",
    "grants_of_principal",
    "grants_of_session",
}
"""Statements that sort what they read: it is one session's or one principal's, or a page and the rest of a second."""


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


async def begin(path):
    store = SqliteStore(str(path))
    await store.open(node_id="n", at=100.0)
    return store


@pytest.fixture
def grown(tmp_path):
    path = tmp_path / "grown.db"
    make_store(path, sessions=300, events=3000, entries=400, principals=3, ended_at=1e6)
    return path


def plan(connection, sql):
    rows = connection.execute("EXPLAIN QUERY PLAN " + sql, (None,) * sql.count("?")).fetchall()
    return [detail for *_, detail in rows]


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if name not in ALL_ROWS and "[[" not in statements.block(name)],
)
def test_no_statement_scans_a_table(grown, name):
    with closing(sqlite3.connect(grown)) as connection:
        steps = plan(connection, statements.block(name))
    tables = r"(session|message|event|run|edit|kept|landmark|attachment|attachment_use|access_grant|stored|total)"
    for step in steps:
        assert not re.match(rf"SCAN {tables}\b(?! USING (COVERING )?INDEX session_)", step), steps
        assert "TEMP B-TREE FOR ORDER BY" not in step or name in SORTED, steps


def test_the_lists_and_the_start_use_their_indexes(grown):
    with closing(sqlite3.connect(grown)) as connection:
        used = {
            "sessions": "session_listed (listed_at>? AND listed_at<?)",
            "sessions_of_principal": "session_of_principal (principal=? AND listed_at>? AND listed_at<?)",
            "orphans": "SEARCH session USING INTEGER PRIMARY KEY",
            "ready": "session_ready",
            "tombstones": "session_deleted",
            "sessions_with_events": "session_events",
            "messages_with_keys": "message_key",
            "old_attachments": "attachment_age",
        }
        for name, index in used.items():
            assert any(index in step for step in plan(connection, statements.block(name))), name


def test_pages_of_sessions_hold_each_once(grown):
    async def main():
        store = await begin(grown)
        for principal, count in ((None, 301), ("p1", 100)):
            seen, before = [], None
            while page := await store.sessions(principal=principal, limit=7, before=before):
                seen += [view.number for view in page]
                before = page[-1].updated_at, page[-1].number
            assert len(seen) == len(set(seen)) == count
        await store.close()

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_lists_are_in_the_order_of_the_last_change_within_a_second_too(tmp_path, seed):
    chance = random.Random(seed)

    async def pages(store, principal, limit):
        found, before = [], None
        while page := await store.sessions(principal=principal, limit=limit, before=before):
            found += page
            before = page[-1].updated_at, page[-1].number
        return found

    async def main():
        store = await begin(tmp_path / "listed.db")
        changed: dict[str, float] = {}
        numbers: dict[str, int] = {}
        at = 1000.0
        for nth in range(150):
            at += chance.choice([0.0, 0.0, 0.01, 0.3, 2.5, -0.4, -5.0])  # the clock may be set back
            key = f"k{chance.randrange(25)}"
            sent = await store.send(msgspec.structs.replace(send(key, f"m_{nth}", f"p{int(key[1:]) % 2}"), at=at))
            if sent.claim is not None:
                await store.commit_run(RunCommit(lease=sent.claim.lease, status="completed", at=at))
                numbers[key] = sent.claim.lease.session
            changed[key] = at
            if nth == 75:
                await store.close()
                store = await begin(tmp_path / "listed.db")
            if nth % 10 == 9:
                order = sorted(changed, key=lambda key: (changed[key], numbers[key]), reverse=True)
                for limit in (1, 4, 100):
                    assert [view.key for view in await pages(store, None, limit)] == order
                    odd = [view.key for view in await pages(store, "p1", limit)]
                    assert odd == [key for key in order if int(key[1:]) % 2]
        for before, count in (((1e308, 1), len(changed)), ((-1e308, 1), 0)):
            assert len(await store.sessions(principal=None, limit=100, before=before)) == count
        await store.close()

    run(main())


def test_a_start_after_a_kill_finds_each_run_and_looks_at_few_sessions(tmp_path, monkeypatch):
    """Red when a session leaves the table ``active`` while its run has a holder, or enters it too late."""
    monkeypatch.setattr(active_sessions, "_KEPT", 3)
    chance = random.Random(1)

    async def check(running, nth):
        copy = tmp_path / f"killed{nth}.db"
        with closing(sqlite3.connect(tmp_path / "held.db")) as connection, closing(sqlite3.connect(copy)) as killed:
            ((marked,),) = connection.execute("SELECT count(*) FROM active").fetchall()
            connection.backup(killed)
        assert marked <= 2 * 9, "twice as many as ever ran at a time"
        store = await begin(copy)
        assert {claim.lease.session for claim in await store.rescue(at=2e6)} == set(running)
        assert await store.rescue(at=2e6) == ()
        await store.close()

    async def main():
        store = await begin(tmp_path / "held.db")
        running: dict[int, object] = {}
        for nth in range(200):
            idle = len(running) < 2 or (len(running) < 9 and chance.random() < 0.5)
            if idle:
                sent = await store.send(send(f"k{nth}" if nth % 3 else f"k{nth % 9}", f"m_{nth}"))
                if sent.claim is not None:
                    running[sent.claim.lease.session] = sent.claim.lease
            else:
                session = chance.choice(list(running))
                lost = chance.random() < 0.1
                if lost:
                    with failpoints.arm("sqlite.commit_run.before_commit", error=OSError("now")):
                        with pytest.raises((HoldfastError, OSError)):
                            await end(store, running[session])
                else:
                    await end(store, running.pop(session))
            if nth % 10 == 9:
                await check(running, nth)
        await store.close()

    async def end(store, lease):
        await store.commit_run(RunCommit(lease=lease, status="completed", at=1e6))

    run(main())


def test_the_counts_of_sessions_follow_creation_deletion_and_restart(grown):
    async def main():
        for nth in range(2):
            store = await begin(grown)
            assert (await store.info()).sessions == 301 + nth
            for key in ("a", "b"):
                await store.send(send(f"{key}{nth}", f"m_{key}{nth}"))
            await store.delete_session("p1", f"b{nth}", cause=Cause(kind="user", reason="", at=2e6), at=2e6)
            assert (await store.info()).sessions == 302 + nth
            await store.close()
        with closing(sqlite3.connect(grown)) as connection:
            rows = connection.execute(
                "SELECT stored.principal, stored.sessions, (SELECT count(*) FROM session"
                " WHERE session.principal = stored.principal AND deleted_at IS NULL) FROM stored"
            ).fetchall()
        assert [counted for _, counted, _ in rows] == [there for *_, there in rows]

    run(main())


def send(key, message_id, principal="p1"):
    return Send(
        principal=principal, key=key, agent=None, default_agent="demo", message_id=message_id, content="x",
        policy="queue", at=1e6, run_id=f"r_{message_id}",
    )  # fmt: skip


async def check_pages(store, session):
    """Each page of a transcript is a part of the whole."""
    whole = await store.transcript(session)
    for after in sorted({0, *(entry.n for entry in whole[::37]), *(entry.n for entry in whole[-3:])}):
        rest = [entry for entry in whole if entry.n > after]
        for limit, limit_bytes in ((1, 2**62), (50, 2**62), (1000, 10**9), (70, 2000)):
            found = list(await store.transcript(session, after=after, limit=limit, limit_bytes=limit_bytes))
            assert found == rest[: len(found)]
            assert limit_bytes == 2000 or len(found) == min(limit, len(rest))
            assert found or not rest
    return len(whole)


def test_pages_of_a_transcript_are_right_through_undo_and_compaction(grown):
    async def main():
        store = await begin(grown)
        session, _ = await store.find_session("p0", LONG)
        nth = 0

        async def more(runs, *, whole=False):
            nonlocal nth
            for _ in range(runs):
                nth += 1
                claim = (await store.send(send(LONG, f"m_{nth}", "p0"))).claim
                entries = [Entry(role="user", content=f"{nth}"), Entry(role="assistant", content="x" * (nth % 9000))]
                await store.commit_run(
                    RunCommit(lease=claim.lease, status="completed", at=1e6, entries=entries, replaces_history=whole)
                )

        async def edit(kind, *contents):
            entries = [Entry(role="summary", content=content) for content in contents]
            await store.edit_history(
                EditHistory(principal="p0", key=LONG, edit=kind, at=1e6, entries=entries, agent="demo")
            )

        assert await check_pages(store, session) == 400
        for _ in range(40):
            await edit("undo")
        assert await check_pages(store, session) == 320
        await more(60)
        assert await check_pages(store, session) == 440
        await edit("compact", "all", "of it")
        await more(70)
        assert await check_pages(store, session) == 142
        await more(1, whole=True)
        await more(40)
        assert await check_pages(store, session) == 82
        for _ in range(41):
            await edit("undo")
        assert await check_pages(store, session) == 142
        for _ in range(71):
            await edit("undo")
        assert await check_pages(store, session) == 440
        await store.close()

    run(main())


def test_the_migration_holds_the_transcripts_to_mark_one_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "old.db"
    make_store(path, sessions=300, events=3000, entries=400, principals=3, ended_at=1e6, schema=SCHEMA_5)
    query = SqliteDatabase.query

    def checked(self, name, *parameters):
        assert name != "long_transcripts", "a list of what may be millions"
        return query(self, name, *parameters)

    monkeypatch.setattr(SqliteDatabase, "query", checked)
    run(begin_and_close(path))
    audit_file(path)


async def begin_and_close(path):
    await (await begin(path)).close()


def test_a_page_reads_few_pieces(grown, monkeypatch):
    """Before landmarks, the first page of this transcript read all 200 pieces."""
    with closing(sqlite3.connect(grown)) as connection:
        found = connection.execute("SELECT session, history_id FROM session WHERE key = ?", (LONG,))
        ((session, newest),) = found.fetchall()
        marked = connection.execute(statements.block("landmark"), (session, 50, session, newest))
        ((last_n, piece),) = marked.fetchall()
        assert last_n < 50 + 64
        rows = connection.execute(statements.block("pieces"), (9, piece, session, 9, session, 0)).fetchall()
    assert len(rows) == last_n // 2


def test_a_store_of_version_5_is_migrated_whole_or_not_at_all(tmp_path):
    path = tmp_path / "old.db"
    make_store(path, sessions=300, events=3000, entries=400, principals=3, ended_at=1e6, schema=SCHEMA_5)

    async def main():
        for point in ("before_write", "between_writes", "before_commit"):
            with failpoints.arm(f"sqlite.open.{point}", error=OSError("now")):
                with pytest.raises((HoldfastError, OSError)):
                    await begin(path)
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("PRAGMA user_version").fetchone() == (5,)
                assert connection.execute("SELECT name FROM sqlite_schema WHERE name = 'landmark'").fetchall() == []
        store = await begin(path)
        await audit(store)
        audit_file(path)
        assert (await store.info()).sessions == 301
        session, _ = await store.find_session("p0", LONG)
        assert await check_pages(store, session) == 400
        assert await store.prune(events_before=2e6, tombstones_before=0.0, idempotency_before=2e6) == 2 * 800 + 800
        assert await store.prune(events_before=2e6, tombstones_before=0.0, idempotency_before=2e6) == 0
        await store.send(send("s00000001", "m_again"))
        assert await store.prune(events_before=2e6, tombstones_before=0.0, idempotency_before=2e6) == 0, (
            "its run is live"
        )
        await store.close()

    run(main())
