"""The table ``active``, where the next start finds the runs that a killed host held.

A session enters the table in the transaction that gives its run a holder. It does not leave it when the run ends: the
next run of a busy session then writes nothing here. Instead, each session that enters lets up to two others leave that
have no such run any more. So the table holds about `_KEPT` sessions, or twice as many as ever had a run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.storage.sql.database import Database

__all__ = ["ActiveSessions"]

_KEPT: Final = 500


class ActiveSessions:
    """The sessions in the table ``active``, of which the writer keeps a copy.

    Parameters:
        database: database that runs the statements.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._marked: dict[int, None] | None = None
        """The sessions in the table, in the order in which they are looked at; None until it is read."""

    def forget(self) -> None:
        """Drop the copy, after the transaction was rolled back."""
        self._marked = None

    def add(self, sessions: Sequence[int]) -> None:
        """Add those sessions, whose rows are written, and remove some without a run that has a holder."""
        marked = self._marked
        if marked is None:
            marked = self._marked = {session: None for (session,) in self._database.query("active")}
        new = [session for session in sessions if session not in marked]
        if not new:
            return
        self._database.write_rows("mark_active", [(session,) for session in new], large=False)
        marked.update(dict.fromkeys(new))
        for _ in range(min(2 * len(new), len(marked) - _KEPT)):
            oldest = next(iter(marked))
            del marked[oldest]
            if self._database.write("unmark_active", oldest) == 0:
                marked[oldest] = None  # its run is active: it goes to the end
