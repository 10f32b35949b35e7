"""One host per file, and clear errors for files and disks that cannot work."""

import asyncio
import gc
import os
import pathlib
import sqlite3
import subprocess
import sys
import tempfile
import weakref
from contextlib import asynccontextmanager

import pytest

from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    MailboxFull,
    StorageError,
    StoreCorrupt,
    StoreFull,
    StoreLocked,
)
from holdfast.protocol.messages import Attachment, Question
from holdfast.storage import SqliteStore, open_store
from holdfast.storage.port import RunCommit, Send
from holdfast.storage.sqlite import SCHEMA_VERSION

OPEN = """
import asyncio, os, sys
from holdfast.errors import HoldfastError
from holdfast.storage import SqliteStore

if "as-nobody" in sys.argv:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)

async def main():
    store = SqliteStore(sys.argv[1])
    try:
        await store.open(node_id="n_child", at=1.0)
    except HoldfastError as error:
        print(type(error).__name__, error)
        return
    print("opened", flush=True)
    if "hold" in sys.argv:
        sys.stdin.readline()
    await store.close()

asyncio.run(main())
"""


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(30):
            return await coroutine

    return asyncio.run(bounded())


@asynccontextmanager
async def opened(path):
    store = SqliteStore(str(path))
    await store.open(node_id="n", at=1.0)
    try:
        yield store
    finally:
        await store.close()


def message(n, *, key="k", content="hello", mailbox_limit=100):
    return Send(
        principal="p",
        key=key,
        agent=None,
        default_agent="demo",
        message_id=f"m{n}",
        content=content,
        policy="queue",
        at=float(n),
        run_id=f"r{n}",
        mailbox_limit=mailbox_limit,
    )


def child(path, *arguments):
    return subprocess.run(
        [sys.executable, "-c", OPEN, str(path), *arguments], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_a_second_host_in_the_same_process_is_refused(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        async with opened(path) as store:
            with pytest.raises(StoreLocked, match=str(os.getpid())):
                await SqliteStore(str(path)).open(node_id="n2", at=2.0)
            (tmp_path / "other").symlink_to(path)
            with pytest.raises(StoreLocked):
                await SqliteStore(str(tmp_path / "other")).open(node_id="n2", at=2.0)
            await store.send(message(1))
            assert "StoreLocked" in child(path), "and the refused ones did not take the lock away"
        async with opened(path):
            pass

    run(main())


def test_a_second_host_in_another_process_is_refused_by_pid(tmp_path):
    path = tmp_path / "store.db"
    with subprocess.Popen(
        [sys.executable, "-c", OPEN, str(path), "hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "opened\n"

        async def main():
            with pytest.raises(StoreLocked, match=f"process {holder.pid}"):
                await SqliteStore(str(path)).open(node_id="n", at=1.0)

        run(main())
        holder.kill()
        holder.wait(timeout=10)

    async def after():
        async with opened(path) as store:
            await store.send(message(1))

    run(after())


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "store.db"
    code = """
import asyncio, os, signal, sys
from holdfast.storage import SqliteStore
async def main():
    await SqliteStore(sys.argv[1]).open(node_id="n", at=1.0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(1)
        os.read(0, 1)
        os._exit(0)
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    read, write = os.pipe()
    try:
        host = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(path)], stdin=read, stdout=subprocess.PIPE, timeout=30
        )
        os.kill(int(host.stdout), 0)  # the forked child is there and holds what it inherited

        async def main():
            async with opened(path) as store:
                await store.send(message(1))

        run(main())
    finally:
        os.close(write)
        os.close(read)


def test_what_is_not_a_store_is_refused_and_left_alone(tmp_path):
    text = tmp_path / "text.db"
    text.write_bytes(b"these are my notes, not a database at all\n" * 100)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    for path in (text, foreign):
        before = path.read_bytes()

        async def main(path=path):
            with pytest.raises(StoreCorrupt, match=path.name):
                await SqliteStore(str(path)).open(node_id="n", at=1.0)

        run(main())
        assert path.read_bytes() == before
    assert not (tmp_path / "text.db-lock").exists(), "nothing is left beside a file that is not ours"


@pytest.mark.parametrize("path", ["/etc/passwd", "folder"])
def test_a_file_or_folder_that_cannot_be_a_store_gets_nothing_beside_it(tmp_path, path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / path

    async def main():
        with pytest.raises((StoreCorrupt, ConfigurationError), match=path.name) as refusal:
            await SqliteStore(str(path)).open(node_id="n", at=1.0)
        assert "--store" in refusal.value.hint

    run(main())
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]
    assert not pathlib.Path(f"{path}-lock").exists()


def test_a_refused_second_host_keeps_the_locks_of_the_first(tmp_path):
    """POSIX drops a process's locks on a file when it closes any descriptor of that file."""
    path = tmp_path / "store.db"

    async def main():
        async with opened(path):
            with pytest.raises(StoreLocked):
                await SqliteStore(str(path)).open(node_id="other", at=1.0)
            locks = pathlib.Path("/proc/locks").read_text()
            assert f":{path.stat().st_ino} " in locks, "SQLite's own lock on the database"

    run(main())


def test_a_damaged_file_is_named_and_not_half_read(tmp_path):
    path = tmp_path / "store.db"

    async def fill():
        async with opened(path) as store:
            for n in range(200):
                await store.send(message(n, key=f"k{n}", content="x" * 500))

    run(fill())
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)

    async def main():
        with pytest.raises(StoreCorrupt):
            async with opened(path) as store:
                await store.send(message(1000, key="k7"))

    run(main())


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        async with opened(path):
            pass

    run(main())
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()

    async def again():
        with pytest.raises(ConfigurationError, match="upgrade Holdfast"):
            await SqliteStore(str(path)).open(node_id="n", at=1.0)

    run(again())


def test_an_sqlite_that_is_too_old_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 26, 0))

    async def main():
        with pytest.raises(ConfigurationError, match="too old"):
            await SqliteStore(str(tmp_path / "store.db")).open(node_id="n", at=1.0)

    run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_and_unknown_urls_are_named(tmp_path):
    async def main():
        with pytest.raises(ConfigurationError, match="nowhere"):
            await SqliteStore(str(tmp_path / "nowhere" / "store.db")).open(node_id="n", at=1.0)

    run(main())
    for url in ("", "store.db", "sqlite://", "sqlite:///", "postgres://x#y", "mysql://x", "memory://x"):
        with pytest.raises(ConfigurationError):
            open_store(url)
    assert isinstance(open_store(f"sqlite:///{tmp_path}/x.db"), SqliteStore)


@pytest.fixture
def public_folder():
    """A folder whose parents everybody may search."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_read_only_store_says_so(public_folder, what):
    path = public_folder / "store.db"

    async def main():
        async with opened(path):
            pass

    run(main())
    if what == "file":
        path.chmod(0o444)
        (public_folder / "store.db-lock").chmod(0o666)
    else:
        (public_folder / "store.db-lock").unlink()
        public_folder.chmod(0o555)
    # Root may write anything, so it asks as somebody else.
    asked = child(path, "as-nobody") if os.geteuid() == 0 else child(path)
    assert asked.startswith("StoreReadOnly"), asked
    public_folder.chmod(0o755)


async def fill_up(store, start):
    """Send until the disk is full; how many were accepted."""
    n = start
    while True:
        try:
            await store.send(message(n, key=f"k{n}", content="x" * 2000))
        except StoreFull:
            return n - start
        n += 1


def test_a_full_disk_loses_nothing_and_works_again_with_space(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        async with opened(path) as store:
            database = store.backend.writer._connection._connection
            claim = (await store.send(message(0, key="first"))).claim
            database.execute("PRAGMA max_page_count = 64")
            accepted = await fill_up(store, 1)
            assert accepted > 5
            answers = await asyncio.gather(
                *(store.send(message(1000 + n, key=f"x{n}", content="x" * 9000)) for n in range(10)),
                return_exceptions=True,
            )
            assert all(isinstance(answer, StoreFull) for answer in answers)
            with pytest.raises(StoreFull, match="disk"):
                await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0, text="x" * 50_000))
            for n in range(1, accepted + 1):
                assert (await store.find_session("p", f"k{n}"))[1].state == "running"
            assert await store.find_session("p", f"k{accepted + 1}") is None
            assert await store.find_session("p", "x1") is None
            assert len(await store.read_events(claim.lease.session, after=0, limit=10)) == 2
            database.execute("PRAGMA max_page_count = 100000")
            done = await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0, text="x" * 50_000))
            assert [event.seq for event in done.events] == [3, 4]
            assert (await store.send(message(2000, key="x1"))).disposition == "started"

    run(main())


def test_an_error_stays_with_the_write_that_has_it(tmp_path):
    async def main():
        async with opened(tmp_path / "store.db") as store:
            claim = (await store.send(message(0))).claim
            writes = [store.send(message(n, key=f"k{n}")) for n in range(1, 10)]
            broken = store.append(claim.lease, [("text.delta", 7)])
            unkeyed = store.send(message(99, key="k99\ud800"))
            used = store.send(message(0))
            writes += [store.append(claim.lease, [("text.delta", b'{"n":%d}' % n)]) for n in range(5)]
            for failing in (broken, unkeyed, used):
                with pytest.raises(Exception, match=r"."):
                    await failing
            assert isinstance(used.exception(), StorageError)
            for write in writes:
                await write
            events = await store.read_events(claim.lease.session, after=0, limit=100)
            assert [event.seq for event in events] == list(range(1, 8))

    run(main())


@pytest.mark.parametrize("written", ["append", "end", "question"])
def test_a_row_changed_from_outside_is_never_overwritten(tmp_path, written):
    path = tmp_path / "store.db"

    async def main():
        async with opened(path) as store:
            claim = (await store.send(message(0))).claim
            with sqlite3.connect(path) as other:
                other.execute("UPDATE session SET fence = fence + 1")
            other.close()
            with pytest.raises(HoldfastError):
                if written == "append":
                    await store.append(claim.lease, [("text.delta", b"{}")])
                elif written == "question":
                    await store.suspend(claim.lease, Question(question_id="q", kind="question", asked_at=1.0))
                else:
                    await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0))
            assert len(await store.read_events(claim.lease.session, after=0, limit=9)) == 2
            assert (await store.send(message(1))).disposition == "queued"

    run(main())


def test_the_kept_sessions_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.storage.sql.tables._KEPT_SESSIONS", 8)

    async def main():
        async with opened(tmp_path / "store.db") as store:
            claims = {}
            for n in range(50):
                claims[n] = (await store.send(message(n, key=f"k{n}"))).claim
                assert len(store.backend.tables._rows) <= 8
            await store.send(message(99, key="k3"))
            done = await store.commit_run(
                RunCommit(lease=claims[3].lease, status="completed", at=9.0, next_run_id="r_next")
            )
            assert done.claim.messages[0].message_id == "m99"

    run(main())


def test_contents_that_wait_are_not_kept_in_memory(tmp_path):
    async def main():
        async with opened(tmp_path / "store.db") as store:
            for key in ("a", "b"):
                for n in range(6):
                    await store.send(message(n, key=key, content=str(n) * 3000))
            kept = [mail for row in store.backend.tables._rows.values() for mail in (*row.waiting, *row.taken)]
            assert len(kept) == 12
            assert sum(len(mail.message.content) for mail in kept) <= 2 * 4096
            assert {mail.size for mail in kept} == {3000}

    run(main())


def test_kept_sessions_have_a_bounded_number_of_messages(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.storage.sql.tables._KEPT_MAILS", 10)

    async def main():
        async with opened(tmp_path / "store.db") as store:
            for n in range(8):
                for key in ("a", "b", "c"):
                    await store.send(message(n, key=key))
                    rows = store.backend.tables._rows.values()
                    assert sum(len(row.waiting) + len(row.taken) for row in rows) <= 10

    run(main())


def test_statements_do_not_keep_what_they_wrote_and_nulls_write_nothing(tmp_path):
    async def main():
        async with opened(tmp_path / "store.db") as store:
            sent = await store.send(message(1, content="x" * 1_000_000))
            await store.append(sent.claim.lease, [("text.delta", b'"%b"' % (b"y" * 1_000_000))])
            await store.add_attachment(
                "p", Attachment(digest="d", media_type="a/b", size_bytes=10**6), bytes(10**6), at=1.0, limit_bytes=10**9
            )
        connection = sqlite3.connect(tmp_path / "store.db")
        for table, rows in (("session", 1), ("message", 1), ("event", 3), ("attachment", 1)):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (rows,)
        connection.close()

    run(main())


def test_a_refused_message_is_gone_without_the_collector(tmp_path):
    class Weak(str):
        pass

    async def main():
        async with opened(tmp_path / "store.db") as store:
            content = Weak("x" * 1000)
            gone = weakref.ref(content)
            await store.send(message(1))
            gc.disable()
            try:
                with pytest.raises(MailboxFull):
                    await store.send(message(2, content=content, mailbox_limit=0))
                del content
                await store.send(message(3))  # the writer has another batch in its hands now
                assert gone() is None
            finally:
                gc.enable()

    run(main())


def test_pruning_goes_through_all_sessions_in_small_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.storage.sql.pruner._SESSIONS", 7)

    async def main():
        async with opened(tmp_path / "store.db") as store:
            for n in range(30):
                claim = (await store.send(message(n, key=f"k{n}"))).claim
                await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=40.0))
            commits = (await store.info()).commits
            assert await store.prune(events_before=99.0, tombstones_before=0.0, idempotency_before=0.0) == 60
            assert (await store.info()).commits - commits == 5
            for session in range(1, 31):
                assert await store.oldest_seq(session) == 5

    run(main())


def test_a_file_that_was_moved_away_takes_no_writes_until_it_is_back(tmp_path):
    async def main():
        path = tmp_path / "store.db"
        async with opened(path) as store:
            await store.send(message(1))
            path.rename(tmp_path / "elsewhere.db")
            for n in (2, 3):
                with pytest.raises(StoreCorrupt, match="moved, deleted or replaced"):
                    await store.send(message(n))
            path.write_bytes(b"")
            with pytest.raises(StoreCorrupt, match="moved, deleted or replaced"):
                await store.send(message(4))
            (tmp_path / "elsewhere.db").rename(path)
            assert (await store.send(message(5))).seq == 3

    run(main())
