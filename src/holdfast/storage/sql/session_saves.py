"""Session rows collected for the next flush, by the columns that have changed.

A flush writes each row once: whole, or only the columns that an append, a start or an end of a run changes. A row that
has changed in more than one way is written whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.columns import LIVE_COLUMN, live_run, new_columns, state_columns
from holdfast.storage.sql.database import LARGE_BYTES, Database

__all__ = ["Seen", "SessionSaves", "seen_of"]

Seen = tuple[int, int, str | None]
"""Fence, next seq and run id of a session's row."""


class SessionSaves:
    """The collected rows. A row belongs to at most one of the dictionaries, whose keys are the ids of the rows."""

    __slots__ = ("appended", "changed", "ended", "new", "started")

    def __init__(self) -> None:
        self.new: dict[int, SessionRow] = {}
        self.changed: dict[int, SessionRow] = {}
        self.started: dict[int, SessionRow] = {}
        self.ended: dict[int, SessionRow] = {}
        self.appended: dict[int, SessionRow] = {}

    def __contains__(self, session: int) -> bool:
        return (
            session in self.changed
            or session in self.appended
            or session in self.started
            or session in self.ended
            or session in self.new
        )

    def rows(self) -> Iterator[SessionRow]:
        """Yield all collected rows."""
        return chain.from_iterable(
            rows.values() for rows in (self.new, self.changed, self.started, self.ended, self.appended)
        )

    def clear(self) -> None:
        """Drop all collected rows."""
        for rows in (self.new, self.changed, self.started, self.ended, self.appended):
            rows.clear()

    def save(self, row: SessionRow) -> None:
        """Collect a row of which any column may have changed."""
        session = row.session
        if session not in self.new:
            for narrow in (self.started, self.ended, self.appended):
                narrow.pop(session, None)
            self.changed[session] = row

    def save_append(self, row: SessionRow) -> None:
        """Collect a row of which an append has changed only the columns of ``save_appends``."""
        if row.session in self.started or row.session in self.ended:
            self.save(row)
        elif row.session not in self.new and row.session not in self.changed:
            self.appended[row.session] = row

    def save_start(self, row: SessionRow) -> None:
        """Collect a row of which the start of a run has changed only the columns of ``save_starts``."""
        if row.session in self.appended or row.session in self.ended:
            self.save(row)
        elif row.session not in self.new and row.session not in self.changed:
            self.started[row.session] = row

    def save_end(self, row: SessionRow) -> None:
        """Collect a row of which the end of a run has changed only the columns of ``save_ends``."""
        session = row.session
        if session in self.started:
            self.save(row)
        elif session not in self.new and session not in self.changed:
            self.appended.pop(session, None)  # the end writes these columns too
            self.ended[session] = row

    def stored(self) -> list[int]:
        """Return the sessions of the collected rows that are in the database already, in the order of their numbers."""
        return sorted((*self.changed, *self.started, *self.ended, *self.appended))

    def write_new(self, database: Database) -> None:
        """Write the rows of new sessions, which stay collected."""
        if self.new:
            rows = [new_columns(row) for row in self.new.values()]
            database.write_rows("add_sessions", rows, large=_are_large(rows))

    def write_stored(self, database: Database, seen: Mapping[int, Seen]) -> None:
        """Write the rows of all other sessions, which stay collected.

        The transaction fails with `SessionChanged` if a stored row has changed since it was read.

        Parameters:
            seen: `seen_of` each stored row when it was read.
        """
        rows: list[tuple[Any, ...]]
        if self.changed:
            rows = [(session, *seen[session], *state_columns(row)) for session, row in self.changed.items()]
            database.write_rows("save_sessions", rows, large=_are_large(rows), exact=True)
        if self.started:
            rows = [(session, *seen[session], *_start_columns(row)) for session, row in self.started.items()]
            database.write_rows("save_starts", rows, exact=True)
        if self.ended:
            rows = [(session, *seen[session], *_end_columns(row)) for session, row in self.ended.items()]
            database.write_rows("save_ends", rows, exact=True)
        if self.appended:
            rows = [
                (session, *seen[session], row.next_seq, row.append_nth, row.append_seq)
                for session, row in self.appended.items()
            ]
            database.write_rows("save_appends", rows, exact=True)


def seen_of(row: SessionRow) -> Seen:
    """Return the columns of a row by which a write recognizes that the row has changed since it was read."""
    return row.fence, row.next_seq, row.run_id


def _start_columns(row: SessionRow) -> tuple[object, ...]:
    return row.agent, row.updated_at, row.next_seq, row.fence, row.holder, row.run_id, live_run(row)


def _end_columns(row: SessionRow) -> tuple[object, ...]:
    return row.updated_at, row.next_seq, row.next_n, row.last_run_id, row.history_id


def _are_large(rows: Iterable[tuple[Any, ...]]) -> bool:
    """Return whether session rows exceed `LARGE_BYTES` in total, which is possible because they contain questions."""
    return sum([len(row[LIVE_COLUMN] or b"") for row in rows]) > LARGE_BYTES
