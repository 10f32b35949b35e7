"""A confined script of a user cannot become an admin by a rollback journal beside the store.

SQLite plays a journal back before it looks at the log: who can write one there decides what the store says.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Client, Host
from holdfast.errors import HoldfastError
from holdfast.server import KeyRing
from holdfast.storage import SqliteStore
from holdfast.storage.backend import Reads
from holdfast.storage.sqlite.backend import _READERS
from tests.cli.processes import served

_MAGIC = bytes.fromhex("d9d505f920a163d7")
_SECTOR = 512


def forged_journal(database: Path, wanted: Path) -> bytes:
    """A journal that, played back, turns `database` into `wanted`: a page for each, as SQLite writes them itself."""
    data = wanted.read_bytes()
    size = struct.unpack(">H", data[16:18])[0]
    size = 65536 if size == 1 else size
    pages = len(data) // size
    nonce = random.Random(7).getrandbits(32)
    header = _MAGIC + struct.pack(">IIIII", pages, nonce, pages, _SECTOR, size)
    journal = header.ljust(_SECTOR, b"\0")
    for number in range(pages):
        page = data[number * size : (number + 1) * size]
        checksum = nonce + sum(page[at] for at in range(size - 200, 0, -200))
        journal += struct.pack(">I", number + 1) + page + struct.pack(">I", checksum & 0xFFFFFFFF)
    assert database.stat().st_size > 0
    return journal


def with_forged_key(path: Path) -> tuple[Path, str]:
    """A copy of the store in which the attacker has an admin key, and that key."""
    copy = path.with_name("wanted.db")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copyfile(path, copy)

    async def forge() -> str:
        store = SqliteStore(str(copy))
        await store.open(node_id="n_1", at=0.0)
        try:
            for record in await store.keys():
                await store.revoke_key(record.key_id, at=1.0)
            return (await KeyRing(store).create(principal="mallory", role="admin", label=""))[1]
        finally:
            await store.close()

    return copy, asyncio.run(forge())


def own_key(path: Path) -> str:
    async def make() -> str:
        store = SqliteStore(str(path))
        await store.open(node_id="n_0", at=0.0)
        try:
            return (await KeyRing(store).create(principal="root", role="admin", label=""))[1]
        finally:
            await store.close()

    return asyncio.run(make())


def played_by_sqlite(path: Path, journal: bytes) -> bytes:
    """What the database is after SQLite opened a copy of it with that journal beside it."""
    copy = path.with_name("played.db")
    shutil.copyfile(path, copy)
    copy.with_name("played.db-journal").write_bytes(journal)
    with closing(sqlite3.connect(copy)) as database:
        database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return copy.read_bytes()


def write_journal(path: Path, journal: bytes) -> None:
    path.with_name(f"{path.name}-journal").write_bytes(journal)


def link_journal(path: Path, journal: bytes) -> None:
    path.with_name("elsewhere").write_bytes(journal)
    path.with_name(f"{path.name}-journal").symlink_to("elsewhere")


def hard_link_journal(path: Path, journal: bytes) -> None:
    path.with_name("elsewhere").write_bytes(journal)
    os.link(path.with_name("elsewhere"), path.with_name(f"{path.name}-journal"))


def name_super_journal(path: Path, journal: bytes) -> None:
    """A journal that is part of a transaction over several files; it is hot while the one that it names is there."""
    name = os.fsencode(path.with_name("super-journal"))
    path.with_name("super-journal").write_bytes(os.fsencode(f"{path}-journal") + b"\0")
    sums = struct.pack(">II", len(name), sum(name)) + _MAGIC
    lock_page = struct.pack(">I", (0x40000000 // 4096) + 1)
    path.with_name(f"{path.name}-journal").write_bytes(journal + lock_page + name + sums)


@pytest.mark.parametrize("plant", [write_journal, link_journal, hard_link_journal, name_super_journal])
def test_a_forged_key_is_refused_and_the_own_one_is_good(tmp_path: Path, plant: Callable[[Path, bytes], None]) -> None:
    path = tmp_path / "x.db"
    own = own_key(path)
    wanted, forged = with_forged_key(path)
    journal = forged_journal(path, wanted)
    assert played_by_sqlite(path, journal) == wanted.read_bytes(), "it is one that SQLite takes"
    plant(path, journal)

    async def answers(url: str) -> tuple[bool, bool]:
        found = []
        for key in (own, forged):
            async with Client(url, key=key) as client:
                try:
                    await client.request("GET", "/v1/keys")
                except HoldfastError as error:
                    assert error.code == "unauthenticated"
                    found.append(False)
                else:
                    found.append(True)
        return found[0], found[1]

    with served(tmp_path, "--store", "sqlite:///x.db") as server:
        assert asyncio.run(answers(server.url)) == (True, False)
        assert server.end() == 0
    assert not os.path.lexists(tmp_path / "x.db-journal")
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_journal_that_appears_while_a_host_is_up_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    own_key(path)
    wanted, _ = with_forged_key(path)
    journal = forged_journal(path, wanted)

    async def echo(run: object) -> str:
        return "done"

    async def main() -> None:
        async with Host(echo, store=f"sqlite:///{path}") as host:
            write_journal(path, journal)
            await host.session("s").ask("go")
            principals = {record.principal for record in await host.store.keys()}
            assert principals == {"root"}
        async with Host(echo, store=f"sqlite:///{path}") as host:
            assert {record.principal for record in await host.store.keys()} == {"root"}

    asyncio.run(main())


def test_readers_that_connect_after_a_journal_appeared_read_on(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    own_key(path)
    wanted, _ = with_forged_key(path)
    journal = forged_journal(path, wanted)

    async def main() -> None:
        store = SqliteStore(str(path))
        await store.open(node_id="n_2", at=0.0)
        try:
            every_reader = threading.Barrier(_READERS)

            def principals(reads: Reads) -> set[str]:
                every_reader.wait(30)  # each query has a thread, and thus a connection, of its own
                return {record.principal for record in reads.keys()}  # noqa: SIM118 - a query

            write_journal(path, journal)
            found = await asyncio.gather(*(store._read(principals) for _ in range(_READERS)))
            assert found == [{"root"}] * _READERS
        finally:
            await store.close()

    asyncio.run(main())
