# ruff: noqa: D102 - `Sharing` documents its methods
"""Whether and how several nodes write the tables of a store in SQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.database import Database
from holdfast.storage.values import RequestKind

__all__ = ["ExclusiveUse", "Sharing"]


class Sharing(Protocol):
    """Behavior of tables that depends on whether other nodes may write the same database."""

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may write the database. A cached row is then trusted only while this node holds it."""
        ...

    def new_session_number(self) -> int:
        """Return a session number that was never used before."""
        ...

    def lock(self, sessions: Sequence[int]) -> None:
        """Lock the rows of sessions that the transaction is about to write."""
        ...

    def added(self, session: int, first_seq: int, last_seq: int, pack: bytes) -> None:
        """Note events that the transaction adds, so that other nodes hear of them."""
        ...

    def wrote(self, rows: Iterable[SessionRow], epoch: int) -> None:
        """Note session rows that the transaction writes, so that other nodes hear of them; `epoch` is the current one.

        Called only if the database `is_shared`.
        """
        ...

    def orphans(self, epoch: int) -> Sequence[int]:
        """Return the sessions with a run that an epoch holds which has ended; `epoch` is the current one."""
        ...

    def ask(self, session: int, kind: RequestKind, body: bytes, epoch: int) -> Sequence[int]:
        """Ask the other nodes that have a part of a session to do something (see `Tables.ask_others`).

        Parameters:
            epoch: the current one.
        """
        ...


class ExclusiveUse:
    """The `Sharing` of a database that one node has for itself.

    Parameters:
        database: database that runs the statements.
        last_number: highest session number ever used.
    """

    is_shared = False

    def __init__(self, database: Database, *, last_number: int) -> None:
        self._database = database
        self._last_number = last_number

    def new_session_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def lock(self, sessions: Sequence[int]) -> None:
        """Do nothing, because no other node writes."""

    def added(self, session: int, first_seq: int, last_seq: int, pack: bytes) -> None:
        """Do nothing, because other nodes do not exist."""

    def wrote(self, rows: Iterable[SessionRow], epoch: int) -> None:
        """Do nothing, because other nodes do not exist."""

    def orphans(self, epoch: int) -> Sequence[int]:
        return [session for (session,) in self._database.query("orphans", epoch)]

    def ask(self, session: int, kind: RequestKind, body: bytes, epoch: int) -> Sequence[int]:
        return ()
