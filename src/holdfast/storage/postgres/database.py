# ruff: noqa: D102 - `Database` documents its methods
"""Execution of the named statements on a connection to PostgreSQL.

A connection that writes is in pipeline mode: statements without a result are sent together with the next query, or with
the commit. So a transaction on sessions whose rows are cached is one round trip. An exact statement (see
`Database.write_rows`) checks by itself how many rows it wrote: it divides by zero if the number is wrong, so that the
commit behind it in the pipeline has no effect.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

import psycopg

from holdfast.storage.sql import statements

__all__ = ["PostgresDatabase", "statement"]

_ROWS_TOGETHER: Final = 64
_PAGE: Final = 64
"""Maximum number of event rows that are fetched at once."""
_OF_NODE: Final = frozenset(
    (
        "active",
        "add_total",
        "held_runs",
        "mark_active",
        "mark_background",
        "save_stop",
        "unmark_active",
        "unmark_background",
    )
)
"""Statements on rows of this node: their first parameter is its epoch."""
_blocks: Final = statements.Blocks("holdfast.storage.postgres", "statements.sql")


def _text(name: str, rows: int) -> str:
    """Return the text of a block: PostgreSQL's own if it has one, else the shared one."""
    blocks = _blocks if name in _blocks else statements.SHARED
    return statements.for_postgres(blocks.many(name, rows))


@cache
def statement(name: str, rows: int = 1) -> str:
    """Return the statement `name` for psycopg, with its ``[[row]]`` repeated."""
    return _text(name, rows)


@cache
def _exact(name: str, rows: int) -> str:
    text = _text(name, rows)
    returning = "" if text.startswith("SELECT") else " RETURNING 1"
    return f"WITH written AS ({text}{returning}) SELECT 1 / (count(*) = {rows})::int FROM written"


@cache
def _counted(name: str) -> str:
    return f"WITH written AS ({_text(name, 1)} RETURNING 1) SELECT count(*) FROM written"


class PostgresDatabase:
    """See `holdfast.storage.sql.database.Database`.

    Parameters:
        connection: connection in pipeline mode, or one that only reads.
        epoch: epoch of this node; 0 if the connection only reads.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, epoch: int = 0) -> None:
        self.connection = connection
        self.epoch = epoch

    def query(self, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.execute(statement(name), self._of_node(name, parameters)).fetchall()

    def _of_node(self, name: str, parameters: tuple[object, ...]) -> tuple[object, ...]:
        return (self.epoch, *parameters) if name in _OF_NODE else parameters

    def execute(self, text: str, parameters: Sequence[object] = ()) -> psycopg.Cursor[tuple[Any, ...]]:
        """Execute a statement, or send it later if the connection is in pipeline mode; return its cursor."""
        return self.connection.execute(text, parameters, binary=True)

    def rows(self, name: str, *parameters: object) -> Generator[tuple[Any, ...]]:
        match name, parameters:
            case "events_after", (session, int(after), int(limit)):
                yield from self._events_after(session, after, limit)
            case "pieces_within", (newest, session, int(limit_bytes), _, _):
                ((size,),) = self.query("transcript_bytes", newest, session, session, session)
                if size > limit_bytes:
                    yield 0, None
                else:
                    yield from self.query(name, *parameters)
            case _:
                yield from self.query(name, *parameters)

    def _events_after(self, session: object, after: int, limit: int) -> Iterator[tuple[Any, ...]]:
        """Yield rows of events, read a page at a time, because a caller may want only the first."""
        while limit > 0:
            page = self.query("events_after", session, after, min(limit, _PAGE))
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1][0]
            limit -= len(page)

    def write(self, name: str, *parameters: object) -> int:
        ((written,),) = self.execute(_counted(name), self._of_node(name, parameters)).fetchall()
        return int(written)

    def write_rows(
        self, name: str, rows: Sequence[tuple[object, ...]], *, large: bool = False, exact: bool = False
    ) -> None:
        if name in _OF_NODE:
            rows = [(self.epoch, *row) for row in rows]
        start = 0
        while start < len(rows):
            # Powers of two, so that there are few statements to prepare.
            count = 1 << (min(len(rows) - start, _ROWS_TOGETHER).bit_length() - 1)
            text = (_exact if exact else statement)(name, count)
            self.execute(text, tuple(chain.from_iterable(rows[start : start + count])))
            start += count

    def write_large(self, name: str, *parameters: object, value: bytes | bytearray) -> None:
        self.execute(statement(name), (*parameters, bytes(value)))

    def read_large(self, name: str, *parameters: object, start: int, size: int) -> bytes | None:
        _, column = statements.last_column(name)
        text = statement(name).replace(column, f"substring({column} FROM %s::int FOR %s::int)", 1)
        for (part,) in self.execute(text, (start + 1, size, *parameters)).fetchall():
            return bytes(part)
        return None
