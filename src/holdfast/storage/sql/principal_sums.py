"""Sums of each principal: stored bytes and number of sessions, cached and written once per transaction."""

from __future__ import annotations

from holdfast.storage.sql.database import Database

__all__ = ["PrincipalSums"]

_KEPT = 2048
"""Maximum number of principals whose sums are cached between transactions."""


class PrincipalSums:
    """The table ``stored``, and the number of all sessions in ``total``.

    Parameters:
        database: database that runs the statements.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sessions: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._grown: dict[str, int] = {}
        self._created: dict[str, int] = {}
        """Sessions of each principal created since the last flush, minus those deleted."""

    def sessions(self, principal: str) -> int:
        """Return the number of the principal's sessions."""
        count = self._sessions.get(principal)
        if count is None:
            rows = self._database.query("live_sessions", principal)
            count = self._sessions[principal] = int(rows[0][0]) if rows else 0
        return count + self._created.get(principal, 0)

    def stored_bytes(self, principal: str) -> int:
        """Return the size of the principal's rows, in bytes."""
        stored = self._bytes.get(principal)
        if stored is None:
            rows = self._database.query("stored_bytes", principal)
            stored = self._bytes[principal] = int(rows[0][0]) if rows else 0
        return stored + self._grown.get(principal, 0)

    def grow(self, principal: str, amount: int) -> None:
        """Add `amount` to the principal's stored bytes."""
        self._grown[principal] = self._grown.get(principal, 0) + amount

    def count(self, principal: str, sessions: int) -> None:
        """Add `sessions` to the number of the principal's sessions."""
        self._created[principal] = self._created.get(principal, 0) + sessions
        self.grow(principal, 0)

    def flush(self) -> None:
        """Write what was added."""
        if not self._grown:
            return
        created = self._created
        # In one order, so that two nodes cannot wait for each other.
        rows = [(principal, amount, created.get(principal, 0)) for principal, amount in sorted(self._grown.items())]
        self._database.write_rows("add_stored", rows)
        for principal, amount, sessions in rows:
            if principal in self._bytes:
                self._bytes[principal] += amount
            if principal in self._sessions:
                self._sessions[principal] += sessions
        self._grown.clear()
        if created:
            self._database.write_rows("add_total", [(sum(created.values()),)])
            created.clear()

    def trim(self) -> None:
        """Drop cached sums, if there are too many."""
        if max(len(self._sessions), len(self._bytes)) > _KEPT:
            self.forget_cached()

    def forget_cached(self) -> None:
        """Drop cached sums, but keep what was added since the last flush."""
        self._sessions.clear()
        self._bytes.clear()

    def forget(self) -> None:
        """Drop all sums, after a rollback."""
        self.forget_cached()
        self._grown.clear()
        self._created.clear()
