# ruff: noqa: D102 - `Database` documents its methods
"""Connections to a SQLite file that run the named statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import Any, Final

from holdfast.storage.sql import statements
from holdfast.storage.sql.database import LARGE_BYTES, SessionChanged

__all__ = ["SqliteDatabase", "connect"]

_ROWS_TOGETHER: Final = 64
_PIECE_BYTES: Final = 1 << 20
_STATEMENTS_KEPT: Final = 8 * _ROWS_TOGETHER

# Without an adapter, ``sqlite3`` looks up ``__adapt__`` for each such parameter, then formats an error and drops it,
# which takes a tenth of the writer's time. These adapters return the value unchanged.
sqlite3.register_adapter(bytes, bytes.__bytes__)
sqlite3.register_adapter(type(None), dict[None, None]().get)


class SqliteDatabase:
    """See `holdfast.storage.sql.database.Database`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def query(self, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statements.block(name), parameters).fetchall()

    def rows(self, name: str, *parameters: object) -> Generator[tuple[Any, ...]]:
        cursor = self._connection.execute(statements.block(name), parameters)
        try:
            yield from cursor
        finally:
            cursor.close()

    def write(self, name: str, *parameters: object) -> int:
        written = self._connection.execute(statements.block(name), parameters).rowcount
        if _size(parameters) > LARGE_BYTES:
            self._unbind(statements.block(name), len(parameters))
        return written

    def write_rows(
        self, name: str, rows: Sequence[tuple[object, ...]], *, large: bool = False, exact: bool = False
    ) -> None:
        written = self._write_rows(name, rows, large=large)
        if exact and written != len(rows):
            raise SessionChanged

    def _write_rows(self, name: str, rows: Sequence[tuple[object, ...]], *, large: bool) -> int:
        # One long statement instead of many short ones: each costs the thread the GIL.
        if not large and len(rows) <= _ROWS_TOGETHER:
            return self._connection.execute(statements.many(name, len(rows)), tuple(chain.from_iterable(rows))).rowcount
        written = 0
        for some, size in _parts(rows):
            text = statements.many(name, len(some))
            flat = tuple(chain.from_iterable(some))
            written += self._connection.execute(text, flat).rowcount
            if size > LARGE_BYTES:
                self._unbind(text, len(flat))
        return written

    def write_large(self, name: str, *parameters: object, value: bytes | bytearray) -> None:
        # Binding it to a statement would copy it while holding the GIL.
        head, _, tail = statements.block(name).rpartition("?")
        row = self._connection.execute(f"{head}zeroblob(?){tail}", (*parameters, len(value))).lastrowid
        assert row is not None
        view = memoryview(value)
        with self._connection.blobopen(*statements.last_column(name), row) as blob:
            for start in range(0, len(view), _PIECE_BYTES):
                blob.write(view[start : start + _PIECE_BYTES])

    def read_large(self, name: str, *parameters: object, start: int, size: int) -> bytes | None:
        table, column = statements.last_column(name)
        row_of = statements.block(name).replace(column, "rowid", 1)
        with closing(self._connection.execute(row_of, parameters)) as rows:
            for (row,) in rows:
                with self._connection.blobopen(table, column, row, readonly=True) as blob:
                    blob.seek(min(start, len(blob)))
                    return blob.read(size)
        return None

    def _unbind(self, text: str, parameters: int) -> None:
        """Free the parameters that a cached statement keeps from its last execution.

        The ``sqlite3`` module has no call for this, so the statement is executed with nulls, which has no effect: the
        database refuses to insert a row of nulls, and an update with nulls matches no row.
        """
        with suppress(sqlite3.IntegrityError):
            self._connection.execute(text, (None,) * parameters)


def _size(values: Iterable[object]) -> int:
    return sum([len(value) for value in values if isinstance(value, bytes | str)])


def _parts(rows: Sequence[tuple[object, ...]]) -> Iterator[tuple[list[tuple[object, ...]], int]]:
    """Yield the rows in lists of limited length and size, and the size of each list in bytes."""
    some: list[tuple[object, ...]] = []
    size = 0
    for row in rows:
        some.append(row)
        size += _size(row)
        if len(some) == _ROWS_TOGETHER or size > LARGE_BYTES:
            yield some, size
            some, size = [], 0
    if some:
        yield some, size


def connect(path: str) -> sqlite3.Connection:
    """Open the SQLite file at `path` with the settings of a durable store."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS_KEPT, timeout=5.0
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA wal_autocheckpoint = 16000")
    except BaseException:
        connection.close()
        raise
    return connection
