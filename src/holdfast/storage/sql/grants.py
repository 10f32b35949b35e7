# ruff: noqa: D102 - `GrantTable` documents its methods
"""The grants of a store in SQL. Grants are few and rarely change, so they are neither cached nor collected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.protocol.events import encode_json
from holdfast.protocol.messages import Grant
from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.columns import decode_grant
from holdfast.storage.sql.database import Database

__all__ = ["SqlGrants"]


class _CountingTables(Protocol):
    """The tables that count a principal's stored bytes."""

    def grow(self, principal: str, amount: int) -> None: ...
    def drop(self, principal: str, name: str, *parameters: object) -> int: ...


class SqlGrants:
    """Implementation of `holdfast.storage.backend.GrantTable` in SQL.

    Parameters:
        tables: tables that count the stored bytes.
        database: database that runs the statements.
        between: callback for failpoints, called between the writes of a transaction.
    """

    def __init__(self, tables: _CountingTables, database: Database, between: Callable[[], None]) -> None:
        self._tables = tables
        self._database = database
        self._between = between

    def add(self, session: int, grant: Grant) -> None:
        body = encode_json(grant)
        self._database.write("add_grant", grant.grant_id, grant.principal, session, grant.at, body)
        self._tables.grow(grant.principal, len(body))
        self._between()

    def count(self, principal: str) -> int:
        return int(self._database.query("count_grants", principal)[0][0])

    def find(self, principal: str, grant_id: str) -> Grant | None:
        rows = self._database.query("grant", principal, grant_id)
        return decode_grant(rows[0][0]) if rows else None

    def drop(self, grant: Grant) -> None:
        self._tables.drop(grant.principal, "drop_grant", grant.principal, grant.grant_id)
        self._between()

    def drop_all_of(self, row: SessionRow) -> None:
        if self._tables.drop(row.principal, "drop_grants_of_session", row.principal, row.session):
            self._between()
