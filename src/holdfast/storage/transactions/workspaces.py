"""The transaction that ties a session to the nodes that have its files."""

from __future__ import annotations

from holdfast.storage.backend import Tables
from holdfast.storage.transactions.session_log import require_lease
from holdfast.storage.values import Appended, Lease

__all__ = ["use_workspace"]


def use_workspace(tables: Tables, lease: Lease) -> Appended:
    """See `Store.use_workspace`."""
    row = require_lease(tables, lease)
    if tables.workspace_pool is not None and row.workspace_pool is None:
        row.workspace_pool = tables.workspace_pool
        tables.save(row)
    return Appended(events=())
