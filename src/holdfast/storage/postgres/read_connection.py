# ruff: noqa: D102 - `ReadConnection` documents its methods
"""A connection that reads a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import psycopg

from holdfast.storage.backend import Reads
from holdfast.storage.postgres import errors
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.connection import connect
from holdfast.storage.postgres.database import PostgresDatabase
from holdfast.storage.postgres.node_reads import NodeReads

__all__ = ["PostgresReadConnection"]

_T = TypeVar("_T")


class PostgresReadConnection:
    """See `holdfast.storage.sql.readers.ReadConnection`.

    A read whose connection is lost runs once more on a new one. It has returned nothing yet, so nothing is repeated.

    Parameters:
        address: the database.
    """

    def __init__(self, address: PostgresAddress) -> None:
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None

    def read(self, query: Callable[[Reads], _T]) -> _T:
        try:
            if self._connection is not None:
                try:
                    return query(NodeReads(PostgresDatabase(self._connection)))
                except psycopg.Error as error:
                    if not errors.is_lost(error):
                        raise
                    self.close()
            self._connection = connect(self._address)
            return query(NodeReads(PostgresDatabase(self._connection)))
        except psycopg.Error as error:
            if errors.is_lost(error):
                self.close()
            raise errors.translate(error, self._address.shown) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
