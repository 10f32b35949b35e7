# ruff: noqa: D102 - `GrantTable` documents its methods
"""The grants of a store as dictionaries."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import StorageError
from holdfast.protocol.events import encode_json
from holdfast.protocol.messages import Grant
from holdfast.storage.rows import SessionRow

__all__ = ["MemoryGrants"]


class MemoryGrants:
    """Implementation of `holdfast.storage.backend.GrantTable`.

    Parameters:
        grow: function that counts a principal's stored bytes.
    """

    def __init__(self, grow: Callable[[str, int], None]) -> None:
        self._grow = grow
        self._rows: dict[str, dict[str, tuple[int, Grant]]] = {}
        """The grants of each principal by id, with the number of the session that has the access, or 0."""

    def of(self, principal: str, session: int | None) -> tuple[Grant, ...]:
        """Return grants as `holdfast.storage.backend.Reads.grants` does."""
        rows = self._rows.get(principal, {}).values()
        found = [grant for number, grant in rows if session is None or number in (0, session)]
        return tuple(sorted(found, key=lambda grant: (grant.at, grant.grant_id)))

    def add(self, session: int, grant: Grant) -> None:
        rows = self._rows.setdefault(grant.principal, {})
        if grant.grant_id in rows:
            raise StorageError(f"grant {grant.grant_id!r} already exists")
        rows[grant.grant_id] = session, grant
        self._grow(grant.principal, len(encode_json(grant)))

    def count(self, principal: str) -> int:
        return len(self._rows.get(principal, ()))

    def find(self, principal: str, grant_id: str) -> Grant | None:
        found = self._rows.get(principal, {}).get(grant_id)
        return None if found is None else found[1]

    def drop(self, grant: Grant) -> None:
        rows = self._rows[grant.principal]
        del rows[grant.grant_id]
        if not rows:
            del self._rows[grant.principal]
        self._grow(grant.principal, -len(encode_json(grant)))

    def drop_all_of(self, row: SessionRow) -> None:
        for number, grant in tuple(self._rows.get(row.principal, {}).values()):
            if number == row.session:
                self.drop(grant)
