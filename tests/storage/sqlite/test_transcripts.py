"""Pages of transcripts while the transcript changes."""

import asyncio
import sqlite3
from contextlib import closing

from holdfast.protocol.messages import Entry
from holdfast.storage import SqliteStore
from holdfast.storage.port import EditHistory, RunCommit, Send
from holdfast.storage.sql.transcripts import read_entries
from holdfast.storage.sqlite.database import SqliteDatabase


async def make_entries(store, runs):
    """End this many runs with 64 entries each, and return the whole transcript."""
    for run_id in runs:
        sent = await store.send(
            Send(
                principal="p", key="k", agent=None, default_agent="demo", message_id=f"m_{run_id}", content="x",
                policy="queue", at=100.0, run_id=run_id,
            )
        )  # fmt: skip
        entries = [Entry(role="user", content=f"{n}") for n in range(64)]
        await store.commit_run(RunCommit(lease=sent.claim.lease, status="completed", at=101.0, entries=entries))
    return await store.transcript(1)


def test_a_page_is_of_one_transcript_even_if_another_one_replaces_it_meanwhile(tmp_path):
    """The statements of a read see the state of their own moment."""
    path = tmp_path / "store.db"

    async def main():
        store = SqliteStore(str(path))
        await store.open(node_id="n", at=100.0)
        before = await make_entries(store, ["r1", "r2", "r3"])
        summary = [Entry(role="summary", content="all")]
        await store.edit_history(
            EditHistory(principal="p", key="k", edit="compact", at=102.0, entries=summary, agent="demo")
        )
        await make_entries(store, ["r4", "r5"])
        with closing(sqlite3.connect(path)) as connection:
            page = read_entries(SqliteDatabase(connection), 1, "r3", after=100, limit=50)
        assert page == [entry for entry in before if entry.n > 100][:50]
        await store.close()

    asyncio.run(main())


def test_an_empty_page_beside_a_landmark_ends(tmp_path):
    async def main():
        store = SqliteStore(str(tmp_path / "store.db"))
        await store.open(node_id="n", at=100.0)
        entries = await make_entries(store, ["r1", "r2"])
        async with asyncio.timeout(20):
            assert await store.transcript(1, after=entries[63].n, limit=0) == ()
        await store.close()

    asyncio.run(main())


def test_a_new_transcript_leaves_no_landmark_of_an_empty_one(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        store = SqliteStore(str(path))
        await store.open(node_id="n", at=100.0)

        async def edit(kind, entries=()):
            await store.edit_history(
                EditHistory(principal="p", key="k", edit=kind, at=102.0, entries=entries, agent="demo")
            )

        await edit("import")
        await make_entries(store, ["r1"])
        await edit("undo")  # the import, whose last entry has the number 0, is the newest piece again
        await edit("compact", [Entry(role="summary", content="all")])
        await store.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT last_n, piece FROM landmark").fetchall() == []

    asyncio.run(main())
