"""The table ``active``, in which the next start finds the runs that a killed host held.

A session is added in the transaction that gives its run a holder. It is not removed when the run ends, so the next run
of a busy session does not write this table. Instead, each added session removes up to two others whose runs no longer
have a holder. So the table has about `_KEPT` sessions, or up to twice the highest number of concurrent runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.storage.sql.database import Database

__all__ = ["ActiveSessions"]

_KEPT: Final = 500


class ActiveSessions:
    """The table ``active``, with a copy in memory.

    Parameters:
        database: database that runs the statements.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._marked: dict[int, None] | None = None
        """The sessions in the table, in the order of their checks for removal; None until the table is read."""

    def forget(self) -> None:
        """Drop the copy in memory, after a rollback."""
        self._marked = None

    def add(self, sessions: Sequence[int]) -> None:
        """Add sessions, whose rows must be written already, and remove some sessions whose runs have no holder."""
        marked = self._marked
        if marked is None:
            marked = self._marked = {session: None for (session,) in self._database.query("active")}
        new = [session for session in sessions if session not in marked]
        if not new:
            return
        self._database.write_rows("mark_active", [(session,) for session in new])
        marked.update(dict.fromkeys(new))
        for _ in range(min(2 * len(new), len(marked) - _KEPT)):
            oldest = next(iter(marked))
            del marked[oldest]
            if self._database.write("unmark_active", oldest) == 0:
                marked[oldest] = None  # its run is active: check it again last
