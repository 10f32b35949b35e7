"""A flush writes few columns of most sessions. Whatever it writes, the stored row then equals the row in memory."""

import asyncio
from contextlib import suppress

import pytest

from holdfast.errors import SessionBusy
from holdfast.storage import SqliteStore
from holdfast.storage.port import RunCommit, Send
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.postgres.database import PostgresDatabase
from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.columns import state_columns
from holdfast.storage.sql.session_saves import SessionSaves
from holdfast.storage.sql.tables import SqlTables
from holdfast.testing.suites.store import STORE_CHECKS, run_store_check

COLUMNS = (
    "agent, updated_at, next_seq, next_n, fence, holder, run_id, run, append_nth, append_seq, sweep, last_run_id,"
    " history_id, waiting, ready_since, due_at, question_due, deleted_at, workspace_pool"
)


@pytest.fixture
def compared(monkeypatch):
    """After each flush, compare every session in memory with its row; return the names of the statements written."""
    flush = SqlTables.flush
    names: list[str] = []

    def checked(self):
        before = self._database
        saves = self._saves
        names.extend(name for name in ("new", "changed", "started", "ended", "appended") if getattr(saves, name))
        flush(self)
        for session, row in self._rows.items():
            select = f"SELECT {COLUMNS} FROM session WHERE session = "
            if isinstance(before, PostgresDatabase):
                stored = before.execute(select + "%s", (session,))
            else:
                stored = before._connection.execute(select + "?", (session,))
            assert stored.fetchall() == [state_columns(row)]

    monkeypatch.setattr(SqlTables, "flush", checked)
    return names


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_each_flush_stores_the_whole_row(check, tmp_path, compared):
    run_store_check(check, lambda: SqliteStore(str(tmp_path / "store.db")))


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_each_flush_stores_the_whole_row_in_postgres(check, postgres_url, compared):
    run_store_check(check, lambda: PostgresStore(postgres_url))


def send_to(number, *, room=True, **fields):
    return Send(
        principal="p",
        key="s",
        agent=fields.pop("agent", None),
        default_agent="a",
        message_id=f"m{number}",
        content="x",
        policy=fields.pop("policy", "queue"),
        at=float(number),
        run_id=f"r{number}" if room else None,
        **fields,
    )


def test_ordinary_run_writes_the_narrow_rows(tmp_path, compared):
    async def main():
        store = SqliteStore(str(tmp_path / "store.db"))
        await store.open(node_id="n", at=0.0)
        for number in range(1, 4):
            sent = await store.send(send_to(number, agent=f"agent{number}"))
            assert sent.claim is not None
            await store.commit_run(
                RunCommit(lease=sent.claim.lease, status="completed", at=number + 0.5, text="y", events=[])
            )
        await store.close()

    asyncio.run(main())
    assert compared == ["new", "ended", "started", "ended", "started", "ended"]


def row(session):
    return SessionRow(session=session, principal="p", key=f"s{session}", agent="a", created_at=0.0, updated_at=0.0)


KINDS = ("save", "save_start", "save_end", "save_append")


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_row_changed_in_two_ways_is_written_whole(first, second):
    saves, changed = SessionSaves(), row(1)
    getattr(saves, first)(changed)
    getattr(saves, second)(changed)
    collected = [name for name in ("new", "changed", "started", "ended", "appended") if 1 in getattr(saves, name)]
    if first == second != "save":
        assert collected == [{"save_start": "started", "save_end": "ended", "save_append": "appended"}[first]]
    elif (first, second) == ("save_append", "save_end"):  # the end writes all columns of an append
        assert collected == ["ended"]
    else:
        assert collected == ["changed"]


@pytest.mark.parametrize("kind", KINDS)
def test_new_row_is_written_once(kind):
    saves, new = SessionSaves(), row(1)
    saves.new[1] = new
    getattr(saves, kind)(new)
    assert 1 in saves
    assert not (saves.changed or saves.started or saves.ended or saves.appended)


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("policy", ["queue", "steer", "collect", "interrupt", "rollback", "reject"])
def test_message_that_starts_a_run_stores_the_whole_row(policy, earlier, tmp_path, compared):
    async def main():
        store = SqliteStore(str(tmp_path / "store.db"))
        await store.open(node_id="n", at=0.0)
        sent = await store.send(send_to(1))
        assert sent.claim is not None
        await store.commit_run(RunCommit(lease=sent.claim.lease, status="completed", at=1.5, text="y", events=[]))
        if earlier:
            await store.send(send_to(2, room=False))
        with suppress(SessionBusy):
            await store.send(send_to(3, policy=policy, quiet_s=5.0))
        await store.close()

    asyncio.run(main())
