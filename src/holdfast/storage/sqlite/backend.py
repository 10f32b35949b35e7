# ruff: noqa: D102 - `Backend` documents its methods
"""The backend in one SQLite file: durable on one machine, for one host at a time.

- One thread performs all writes as group commits (`holdfast.storage.sql.writer`), in WAL mode with
  ``synchronous=FULL``.
- Reads use separate threads and connections. A read sees all data committed before it starts, including every write
  that was acknowledged. A read may run several times (`holdfast.storage.sqlite.snapshots`).
- A lock on ``<file>-lock`` keeps a second host, in this process or another, from opening the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any, Final, TypeVar

from holdfast.errors import StorageError, StoreLocked
from holdfast.storage.backend import Counters, Reads, Tables
from holdfast.storage.sql.readers import Readers
from holdfast.storage.sql.tables import SqlTables
from holdfast.storage.sql.writer import Writer
from holdfast.storage.sqlite.private_file import store_path
from holdfast.storage.sqlite.read_connection import SqliteReadConnection
from holdfast.storage.sqlite.snapshots import Snapshots
from holdfast.storage.sqlite.write_connection import SCHEMA_VERSION, WriteConnection
from holdfast.storage.values import StoreHealth

__all__ = ["SqliteBackend"]

_T = TypeVar("_T")

_READERS: Final = 2


class SqliteBackend:
    """A `holdfast.storage.backend.Backend` in one SQLite file.

    Parameters:
        path: path of the file, which is created if it does not exist. SQLite and the host's lock add files whose names
            end in ``-wal``, ``-shm`` and ``-lock``.
    """

    engine = "sqlite"
    cluster = None
    version = f"{SCHEMA_VERSION} (SQLite {sqlite3.sqlite_version})"

    def __init__(self, path: str) -> None:
        self.path = store_path(path)
        self.counters = Counters()
        self.tables: SqlTables | None = None
        self.writer: Writer | None = None
        self._readers: Readers | None = None

    async def open(self, *, node_id: str, at: float) -> None:
        if self.writer is not None:
            raise StoreLocked(f"{self.path} is already open")
        snapshots = Snapshots()
        connection = WriteConnection(self.path, node_id=node_id, at=at, snapshots=snapshots)
        writer = Writer(connection, name="holdfast-writer")
        try:
            self.tables = await writer.open()
        except BaseException:
            await writer.close()
            raise
        self.counters = self.tables.counters
        self.writer = writer
        self._readers = Readers(*(SqliteReadConnection(self.path, snapshots) for _ in range(_READERS)))

    async def close(self) -> None:
        writer, self.writer = self.writer, None
        readers, self._readers = self._readers, None
        if writer is not None and readers is not None:
            try:
                await readers.close()
            finally:
                await writer.close()

    def health(self) -> StoreHealth:
        return StoreHealth()

    def write(self, verb: str, action: Callable[[Tables], _T]) -> asyncio.Future[_T]:
        writer = self.writer
        return _not_open() if writer is None else writer.submit(verb, action)

    def read(self, query: Callable[[Reads], _T]) -> asyncio.Future[_T]:
        readers = self._readers
        return _not_open() if readers is None else readers.submit(query)


def _not_open() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(StorageError("the store is not open"))
    return future
