"""The store in a PostgreSQL database. Importing it requires the extra ``postgres``."""

from __future__ import annotations

from holdfast.storage.postgres.backend import LEASE_S, PostgresBackend
from holdfast.storage.store import Store

__all__ = ["LEASE_S", "PostgresBackend", "PostgresStore"]


class PostgresStore(Store):
    """A `Store` in a PostgreSQL database, which any number of nodes may use at the same time.

    Parameters:
        url: ``postgresql://user:password@host:5432/database``. Parameters after a ``?`` are libpq's, and
            ``prepared_statements=off`` for a pgbouncer that does not keep prepared statements.
        lease_s: duration of the node's lease, after which other nodes may take over its runs.
        direct: URL for signals, which bypasses a pgbouncer; empty: `url`.
        workspace_pool: name of the pool of nodes that share this node's workspaces; None declares no pool.
        nats: comma-separated URLs of NATS servers (``nats://…`` or ``tls://…``) to exchange signals over; empty for
            PostgreSQL itself. All nodes must use the same.
    """

    backend: PostgresBackend

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = LEASE_S,
        direct: str = "",
        workspace_pool: str | None = None,
        nats: str = "",
    ) -> None:
        super().__init__(PostgresBackend(url, lease_s=lease_s, direct=direct, workspace_pool=workspace_pool, nats=nats))
