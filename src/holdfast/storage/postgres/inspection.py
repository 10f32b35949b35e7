"""A look at a database from outside, without opening its store: for ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg

from holdfast.clock import system_clock
from holdfast.storage.cluster import WAITED_LONG_S
from holdfast.storage.postgres import errors
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.connection import connect
from holdfast.storage.postgres.database import statement
from holdfast.storage.postgres.schema import check_server, known_version

__all__ = ["Inspection", "inspect_database"]

TABLES: Final = (
    "active", "api_key", "attachment", "attachment_use", "background", "edit", "event", "kept", "landmark", "message",
    "node", "node_request", "run", "schedule", "session", "stop_result", "stored", "total", "writer",
)  # fmt: skip
"""The tables whose sizes are shown."""
_POOLS: Final = 2
"""First schema version with workspace pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Description of a database.

    Parameters:
        shown: URL of the database for display.
        server_version: version of PostgreSQL.
        schema_version: version of the tables; 0 before the first start of a host.
        sizes: size of each table with its indexes, in bytes, the largest first.
        nodes: ids of the nodes that have a lease.
        sessions: number of sessions.
        awaiting_pool: how many sessions wait for a host of each ``workspace_pool`` that no host declares.
        awaiting_agent: how many runs have waited for a minute or longer for a host with their agent and a free slot, by
            the agent's name and version.
    """

    shown: str
    server_version: str
    schema_version: int
    sizes: tuple[tuple[str, int], ...] = ()
    nodes: tuple[str, ...] = ()
    sessions: int = 0
    awaiting_pool: tuple[tuple[str, int], ...] = ()
    awaiting_agent: tuple[tuple[str, str, int], ...] = ()


def inspect_database(url: str) -> Inspection:
    """Look at the database. It blocks.

    Raises:
        StorageError, ConfigurationError: as `Store.open` does.
    """
    address = PostgresAddress.parse(url)
    try:
        with connect(address) as connection:
            server_version = check_server(connection, address.shown)
            ((exists, _),) = connection.execute(statement("schema_exists")).fetchall()
            version = known_version(connection, address.shown) if exists else 0
            if not version:
                return Inspection(shown=address.shown, server_version=server_version, schema_version=0)
            sizes = connection.execute(statement("table_sizes"), (list(TABLES),)).fetchall()
            nodes = connection.execute(statement("other_nodes"), (0,)).fetchall()
            ((sessions,),) = connection.execute(statement("all_live_sessions"), ()).fetchall()
            awaiting_pool, awaiting_agent = [], []
            if version >= _POOLS:
                awaiting_pool = connection.execute(statement("sessions_without_pool")).fetchall()
                before = system_clock.now() - WAITED_LONG_S
                awaiting_agent = connection.execute(statement("waiting_runs"), (before,)).fetchall()
    except psycopg.Error as error:
        raise errors.translate(error, address.shown) from error
    return Inspection(
        shown=address.shown,
        server_version=server_version,
        schema_version=version,
        sizes=tuple(sizes),
        nodes=tuple(node_id for _, node_id, _, _ in nodes),
        sessions=sessions,
        awaiting_pool=tuple(awaiting_pool),
        awaiting_agent=tuple(awaiting_agent),
    )
