"""The writer and its file when something goes wrong at the worst moment."""

import asyncio
import errno
import os

import pytest

from holdfast.errors import StorageError, StoreFull, StoreLocked
from holdfast.storage import SqliteStore
from holdfast.storage.sql.writer import Writer
from holdfast.storage.sqlite.filelock import FileLock
from tests.storage.sqlite.test_writer import FakeConnection


def run(scenario):
    async def main():
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(main())


def test_a_thread_that_fails_tells_all_who_wait_and_all_who_come():
    class Failing(FakeConnection):
        def roll_back(self):
            raise MemoryError("nothing left to say it with")

    def fails(tables):
        raise ValueError("odd")

    async def main():
        connection = Failing()
        subject = Writer(connection, name="test-writer")
        await subject.open()
        connection.gate.clear()
        first = subject.submit("good", lambda tables: 1)
        while not connection.committing.is_set():
            await asyncio.sleep(0)
        bad = subject.submit("bad", fails)
        with_it = subject.submit("good", lambda tables: 1)
        connection.gate.set()
        assert await first == 1
        for future in (bad, with_it):
            with pytest.raises(StorageError, match="writer"):
                await future
        with pytest.raises(StorageError, match="writer"):
            await subject.submit("late", lambda tables: 1)
        await subject.close()
        assert connection.closed

    run(main)


def test_a_close_that_is_cancelled_still_gives_the_file_back(tmp_path):
    async def main():
        path = str(tmp_path / "store.db")
        store = SqliteStore(path)
        await store.open(node_id="n", at=1.0)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await store.close()
        again = SqliteStore(path)
        await again.open(node_id="n", at=2.0)
        await again.close()

    run(main)


def test_a_lock_file_that_cannot_be_written_is_let_go(tmp_path, monkeypatch):
    path = str(tmp_path / "store.db-lock")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    descriptors = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreFull, match="full"):
            FileLock(path).acquire()
    assert len(os.listdir("/dev/fd")) == descriptors
    lock = FileLock(path)
    lock.acquire()
    with pytest.raises(StoreLocked):
        FileLock(path).acquire()
    lock.release()


def test_two_stores_in_one_process_do_not_disturb_each_other(tmp_path):
    async def main():
        stores = [SqliteStore(str(tmp_path / f"{n}.db")) for n in range(2)]
        for store in stores:
            await store.open(node_id="n", at=1.0)
        await stores[0].close()
        assert await stores[1].sessions(principal=None, limit=10) == ()
        await stores[1].close()

    run(main)
