"""A file of an older schema opens with all its data, and a crash on the way leaves it as it was.

``version_1.sql`` and ``version_3.sql`` are dumps of files that Holdfast wrote when its schema had that version; in the
second, the log is pruned, and what agents keep stands in the transcript.
"""

import asyncio
import json
import pathlib
import resource
import sqlite3
from contextlib import closing

import pytest

from holdfast import failpoints
from holdfast.errors import ConfigurationError, HoldfastError, StoreFull
from holdfast.protocol.messages import AgentState
from holdfast.storage import SqliteStore
from holdfast.storage.port import Claim, EditHistory, RunCommit, Send
from holdfast.storage.sqlite import SCHEMA_VERSION
from tests.storage.audit import audit, recover

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
OLD = (FIXTURES / "version_1.sql").read_text("utf-8")
WITH_STATES = (FIXTURES / "version_3.sql").read_text("utf-8")


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(30):
            return await coroutine

    return asyncio.run(bounded())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD)
    return path


@pytest.fixture
def with_states(tmp_path):
    path = tmp_path / "with_states.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WITH_STATES)
    return path


def shape(path):
    """The tables with their columns, and the indexes."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        columns = {
            table: sorted(
                row[1:] for row in connection.execute(f"SELECT 0, name, type, pk FROM pragma_table_info('{table}')")
            )
            for (table,) in tables
        }
        indexes = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL")
        return columns, dict(indexes.fetchall()), connection.execute("PRAGMA user_version").fetchone()


async def begin(path):
    store = SqliteStore(str(path))
    await store.open(node_id="n", at=100.0)
    return store


def send(key, message_id, **more):
    return Send(
        principal="p", key=key, agent=None, default_agent="demo", message_id=message_id, content="x", policy="queue",
        at=101.0, run_id=f"r_{message_id}", **more,
    )  # fmt: skip


async def number(store, key):
    return (await store.find_session("p", key))[0]


async def contents(store, key):
    return [entry.content for entry in await store.transcript(await number(store, key))]


def dump(path):
    """All of a database, as text, and the version of its schema."""
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump()), connection.execute("PRAGMA user_version").fetchone()


def pieces(path):
    """All pieces of transcripts, decoded."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT session, run_id, entries FROM run WHERE entries IS NOT NULL"
            " UNION ALL SELECT session, edit_id, entries FROM edit WHERE entries IS NOT NULL"
        ).fetchall()
    return {(session, piece): [json.loads(line) for line in entries.split(b"\n")] for session, piece, entries in rows}


def test_an_old_file_has_the_shape_of_a_new_one_once_it_was_opened(path, with_states, tmp_path):
    async def main():
        for file in (path, with_states, tmp_path / "new.db"):
            await (await begin(file)).close()

    run(main())
    assert shape(path) == shape(with_states) == shape(tmp_path / "new.db")


def test_what_agents_kept_moves_out_of_the_transcript_whole(with_states):
    before = pieces(with_states)
    kept = {
        (session, entry["n"]): entry["kept"]
        for (session, _), entries in before.items()
        for entry in entries
        if "kept" in entry
    }
    assert len(kept) == 10
    assert any('"kept":"' in entry["content"] for entries in before.values() for entry in entries)

    async def main():
        for _ in range(2):
            store = await begin(with_states)
            await audit(store)
            for view in await store.sessions(principal=None, limit=9):
                for entry in await store.transcript(view.number):
                    body = kept.get((view.number, entry.n), "")
                    assert await store.kept(view.number, entry.n) == body
                    assert entry.agent_state == (AgentState(by="langgraph 1 counting", n=entry.n) if body else None)
            await store.close()

    run(main())
    for entries in before.values():
        for entry in entries:
            if "kept" in entry:
                entry["kept"] = {"by": "langgraph 1 counting", "n": entry["n"]}
    assert pieces(with_states) == before
    with closing(sqlite3.connect(with_states)) as connection:
        rows = connection.execute("SELECT session, n, body FROM kept").fetchall()
    assert {(session, n): body.decode() for session, n, body in rows} == kept, "also of what was undone"


def test_an_old_file_keeps_its_data_and_goes_on(path):
    async def main():
        store = await begin(path)
        await audit(store)
        assert await contents(store, "idle") == ["one", "two", "three"]
        assert await contents(store, "busy") == ["four"]
        assert await contents(store, "empty") == []
        assert len(await store.runs(await number(store, "idle"))) == 4
        settled = await store.settlement(await number(store, "idle"), "m1")
        assert (settled.state, settled.text) == ("completed", "onetwo")
        again = await store.send(send("idle", "m_again", idempotency_key="once", body_hash=b"h"))
        assert (again.disposition, again.message_id) == ("duplicate", "m1")
        assert [ready.key for ready in await store.ready(limit=9)] == ["waits"]
        rescued = {claim.key: claim for claim in await store.rescue(at=102.0)}
        assert set(rescued) == {"busy", "gone"}
        assert rescued["busy"].interrupt.reason == "enough"
        done = await store.commit_run(RunCommit(lease=rescued["busy"].lease, status="interrupted", at=103.0))
        assert done.waiting == 1
        assert (await store.keys())[0].digest == b"\0\xff"
        claim = await store.claim(await number(store, "waits"), run_id="r_waits", at=104.0)
        assert isinstance(claim, Claim)
        assert [message.message_id for message in claim.messages] == ["m9"]
        await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=105.0))
        await store.commit_run(RunCommit(lease=rescued["gone"].lease, status="interrupted", at=105.0))
        undo = EditHistory(principal="p", key="idle", edit="undo", at=105.0)
        assert [entry.content for entry in (await store.edit_history(undo)).removed] == ["three"]
        assert [entry.content for entry in (await store.edit_history(undo)).removed] == ["one", "two"]
        assert await contents(store, "idle") == []
        await audit(store)
        await recover(store, at=200.0)
        await audit(store)
        await store.close()

    run(main())


def test_a_store_is_copied_before_its_migration_and_only_then(path, tmp_path):
    before = dump(path)
    copy = tmp_path / "old.db.version-1"
    copy.write_text("left by an attempt before")

    async def main():
        for _ in range(2):
            await (await begin(path)).close()

    run(main())
    assert dump(copy) == before
    assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in tmp_path.glob("*version*")) == [copy.name]
    copied = copy.read_bytes()
    run(main())
    assert copy.read_bytes() == copied, "the second opening has nothing to migrate"


def test_without_room_for_the_copy_nothing_is_migrated(path, tmp_path):
    before = dump(path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size - 4096, limit[1]))
    try:
        with pytest.raises(StoreFull):
            run(begin(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert dump(path) == before
    assert list(tmp_path.glob("*version*")) == []


def test_a_store_of_a_newer_holdfast_is_refused_with_what_to_do(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigurationError, match=r"schema version \d+, but this Holdfast supports up to") as refused:
        run(begin(path))
    assert "upgrade Holdfast" in refused.value.hint


@pytest.mark.parametrize("point", ["before_write", "between_writes", "before_commit"])
def test_a_migration_that_breaks_off_has_changed_nothing(path, with_states, point):
    before = shape(path)
    states = shape(with_states), pieces(with_states)

    async def main():
        with failpoints.arm(f"sqlite.open.{point}", error=OSError("now")), pytest.raises((HoldfastError, OSError)):
            await begin(with_states)
        assert (shape(with_states), pieces(with_states)) == states
        with failpoints.arm(f"sqlite.open.{point}", error=OSError("now")), pytest.raises((HoldfastError, OSError)):
            await begin(path)
        assert shape(path) == before
        store = await begin(path)
        assert await contents(store, "idle") == ["one", "two", "three"]
        await store.close()

    run(main())
