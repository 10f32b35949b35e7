"""The schema of the database: it is checked, created and migrated when a node opens the store.

Nodes that start at the same time wait for each other on a lock of the table ``holdfast_schema``; the first creates or
migrates the tables in one transaction, and the others find them. During a rolling upgrade, an older Holdfast uses
newer tables if they allow it (``usable_from``).
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from holdfast.errors import ConfigurationError, StoreCorrupt, StoreReadOnly, StoreUnreachable
from holdfast.storage.postgres.database import statement
from holdfast.storage.sql import statements

__all__ = ["SCHEMA_VERSION", "check_server", "known_version", "prepare_schema"]

SCHEMA_VERSION: Final = 2
_USABLE_FROM: Final = 1
"""Oldest schema version that a Holdfast may know and still use tables of `SCHEMA_VERSION`."""
_OLDEST_SERVER: Final = 150_000
_OLDEST_SERVER_NAME: Final = "15"
_ATTEMPTS: Final = 10

_Connection = psycopg.Connection[Any]


def check_server(connection: _Connection, shown: str) -> str:
    """Check the version and mode of the server, and return its version.

    Raises:
        ConfigurationError: if the server is too old.
        StoreReadOnly: if it is a standby or read-only.
    """
    ((number, version, read_only),) = connection.execute(statement("server")).fetchall()
    if number < _OLDEST_SERVER:
        raise ConfigurationError(
            f"{shown} is PostgreSQL {version}, which is too old",
            hint=f"use PostgreSQL {_OLDEST_SERVER_NAME} or newer",
        )
    if read_only:
        raise StoreReadOnly(f"{shown} is read-only", hint="name the primary, or end the read-only mode of the database")
    return str(version).partition(" ")[0]


def prepare_schema(connection: _Connection, shown: str) -> None:
    """Create or migrate the tables if necessary.

    Parameters:
        connection: connection outside of a transaction, not in pipeline mode.
        shown: URL of the database for display.

    Raises:
        ConfigurationError: if the tables are of a newer version that this Holdfast cannot use.
        StoreCorrupt: if the database has tables of another program under our names.
    """
    for _ in range(_ATTEMPTS):
        if _is_ready(connection, shown):
            return
        try:
            _create(connection, shown)
        except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject):
            continue  # another node created the table holdfast_schema at this moment
        except psycopg.errors.DeadlockDetected:
            continue
    raise StoreUnreachable(f"other nodes are migrating {shown}", hint="start this node again")


def _is_ready(connection: _Connection, shown: str) -> bool:
    ((exists, taken),) = connection.execute(statement("schema_exists")).fetchall()
    if not exists:
        if taken:
            raise StoreCorrupt(
                f"{shown} has a table named session, but is not a Holdfast store; nothing was changed",
                hint="name a database of its own with --store",
            )
        return False
    return known_version(connection, shown) == SCHEMA_VERSION


def known_version(connection: _Connection, shown: str) -> int:
    """Return the version of the tables, at most `SCHEMA_VERSION`; 0 if they were not created yet.

    Raises:
        ConfigurationError: if this Holdfast is too old for the tables.
    """
    for version, usable_from in connection.execute(statement("schema_version")).fetchall():
        if usable_from > SCHEMA_VERSION:
            raise ConfigurationError(
                f"{shown} has schema version {version}, but this Holdfast supports up to {SCHEMA_VERSION}",
                hint="upgrade Holdfast, or name another database with --store",
            )
        return min(int(version), SCHEMA_VERSION)
    return 0


def _create(connection: _Connection, shown: str) -> None:
    connection.execute(statement("schema_table"))
    with connection.transaction():
        connection.execute(statement("lock_schema"))
        version = known_version(connection, shown)
        if version == SCHEMA_VERSION:
            return
        if version:
            texts = [statement("migrate_postgres_1")]
        else:
            texts = [statements.for_postgres(statements.block("schema")), statement("postgres_tables")]
        for text in (*texts, statement("tables_of_version_2")):
            for one in text.split(";\n"):
                connection.execute(one)
        versions = (SCHEMA_VERSION, _USABLE_FROM)
        connection.execute(statement("set_schema_version"), (*versions, *versions))
