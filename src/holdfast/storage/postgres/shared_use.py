# ruff: noqa: D102 - `Sharing` documents its methods
"""How the nodes share the database: locks, session numbers, and the runs of nodes whose leases have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.storage.cluster import CommittedEvents, SignalKind
from holdfast.storage.postgres.database import PostgresDatabase, statement
from holdfast.storage.rows import NOBODY, SessionRow, ready_since
from holdfast.storage.values import RequestKind

__all__ = ["SharedUse"]

_NUMBERS: Final = 32
"""Session numbers that are taken from the sequence at once."""


class SharedUse:
    """The `holdfast.storage.sql.database_use.Sharing` of a PostgreSQL database.

    Parameters:
        database: database that runs the statements.
    """

    is_shared = True

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._numbers: list[int] = []
        self._has_locks = False
        self.hints: dict[SignalKind, dict[int, int]] = {}
        """The signals to send to the other nodes once the transaction is committed."""
        self.commits: list[CommittedEvents] = []
        """The events to send to the other nodes then."""

    def begin(self) -> None:
        """Begin a transaction, which has no locks yet."""
        self._has_locks = False
        self.hints = {}
        self.commits = []

    def added(self, session: int, first_seq: int, last_seq: int, pack: bytes) -> None:
        if first_seq == 1:
            self.hints.setdefault("created", {})[session] = 0
        self.commits.append(CommittedEvents(session, last_seq, pack))

    def wrote(self, rows: Iterable[SessionRow], epoch: int) -> None:
        for row in rows:
            self._hint("changed", row)
            if row.run_id is not None and row.holder not in (NOBODY, epoch):
                self._hint("interrupt", row)
            elif ready_since(row) is not None:
                self._hint("ready", row)

    def _hint(self, kind: SignalKind, row: SessionRow) -> None:
        self.hints.setdefault(kind, {})[row.session] = row.next_seq - 1

    def new_session_number(self) -> int:
        if not self._numbers:
            self._numbers = [number for (number,) in self._database.query("session_numbers", _NUMBERS)]
            self._numbers.reverse()
        return self._numbers.pop()

    def lock(self, sessions: Sequence[int]) -> None:
        name = "lock_more_sessions" if self._has_locks else "lock_sessions"
        self._has_locks = True
        self._database.execute(statement(name), (list(sessions),))

    def ask(self, session: int, kind: RequestKind, body: bytes, epoch: int) -> Sequence[int]:
        if kind == "stop":
            self.lock((session,))  # background work that is being noted (`PostgresCluster.note_background`) is seen
            found = self._database.query("parts_elsewhere", session, epoch)
        else:
            found = self._database.query("living_parts_elsewhere", session, session, epoch)
        epochs = [other for (other,) in found]
        if not epochs:
            return ()
        if kind == "stop":
            self._database.query("drop_background_of_ended", session)
        self.hints.setdefault("request", {})[session] = 0
        return [request_id for (request_id,) in self._database.query("ask_nodes", session, kind, body, epochs)]

    def orphans(self, epoch: int) -> Sequence[int]:
        """End the nodes whose leases are over, and return the sessions that they held.

        The transaction that ends them must give each of these sessions a new fence: from its commit on, all their later
        transactions fail.
        """
        database = self._database
        overdue = [ended for (ended,) in database.query("overdue_nodes", epoch)]
        if not overdue:
            return ()
        database.execute(statement("end_nodes"), (overdue,))
        database.execute(statement("cut_writers"), (overdue,))
        database.execute(statement("end_writers"), (overdue,))
        held = [session for (session,) in database.query("held_sessions", overdue)]
        for name in ("drop_active", "drop_writers", "drop_requests_of"):
            database.execute(statement(name), (overdue,))
        database.execute(statement("drop_nodes"))
        return held
