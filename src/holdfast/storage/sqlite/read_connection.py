# ruff: noqa: D102 - `ReadConnection` documents its methods
"""A connection that reads a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from holdfast.storage.backend import Reads
from holdfast.storage.sql.reads import SqlReads
from holdfast.storage.sqlite import errors
from holdfast.storage.sqlite.database import SqliteDatabase, connect
from holdfast.storage.sqlite.private_file import set_journal_aside
from holdfast.storage.sqlite.snapshots import Snapshots

__all__ = ["SqliteReadConnection"]

_T = TypeVar("_T")


class SqliteReadConnection:
    """See `holdfast.storage.sql.readers.ReadConnection`.

    Parameters:
        path: path of the database file.
        snapshots: the reads of the same file, in this process.
    """

    def __init__(self, path: str, snapshots: Snapshots) -> None:
        self._path = path
        self._snapshots = snapshots
        self._connection: sqlite3.Connection | None = None

    def read(self, query: Callable[[Reads], _T]) -> _T:
        try:
            if self._connection is None:
                set_journal_aside(self._path)
                self._connection = connect(self._path)
                self._connection.execute("PRAGMA query_only = ON")
                self._connection.execute("PRAGMA cache_size = -4096")
            reads = SqlReads(SqliteDatabase(self._connection))
            return self._snapshots.read(self._connection, partial(query, reads))
        except sqlite3.Error as error:
            raise errors.translate(error, self._path) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
