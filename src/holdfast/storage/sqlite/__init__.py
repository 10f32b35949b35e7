"""The store in one SQLite file."""

from __future__ import annotations

from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.storage.sqlite.write_connection import SCHEMA_VERSION
from holdfast.storage.store import Store

__all__ = ["SCHEMA_VERSION", "SqliteBackend", "SqliteStore"]


class SqliteStore(Store):
    """A `Store` in one SQLite file.

    Parameters:
        path: path of the file, which is created if it does not exist. SQLite and the host's lock add files whose names
            end in ``-wal``, ``-shm`` and ``-lock``.
    """

    backend: SqliteBackend

    def __init__(self, path: str) -> None:
        super().__init__(SqliteBackend(path))
