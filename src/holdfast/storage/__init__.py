"""Storage of sessions, mailboxes, logs and transcripts: one store over a backend in memory, SQLite or PostgreSQL."""

from __future__ import annotations

from holdfast.errors import ConfigurationError, MissingExtra
from holdfast.storage.memory import MemoryStore
from holdfast.storage.sqlite import SqliteStore
from holdfast.storage.store import Store
from holdfast.store_url import shown_store

__all__ = ["MemoryStore", "SqliteStore", "open_store"]


def open_store(
    url: str, *, lease_s: float = 10.0, direct: str = "", workspace_pool: str | None = None, nats: str = ""
) -> Store:
    """Return the store for a URL. The caller must ``open()`` the store.

    Parameters:
        url: ``memory://``, ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or
            ``postgresql://user:password@host/database``.
        lease_s: PostgreSQL: duration of the host's lease, after which other hosts may take over its runs.
        direct: PostgreSQL: URL for signals, which bypasses a pgbouncer; empty: `url`.
        workspace_pool: PostgreSQL: name of the pool of hosts that share this host's workspaces; None declares no pool.
        nats: PostgreSQL: URLs of NATS servers to exchange signals over; empty: over PostgreSQL.

    Raises:
        ConfigurationError: if the URL has none of these forms.
        MissingExtra: if the packages for PostgreSQL are not installed.
    """
    if url == "memory://":
        return MemoryStore()
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteStore(url.removeprefix("sqlite:///"))
    if url.startswith(("postgresql://", "postgres://")):
        return _open_postgres(url, lease_s, direct, workspace_pool, nats)
    shown = shown_store(url)
    hint = "use sqlite:///file.db or memory://" if "://" in url or not url else f"use sqlite:///{shown} or memory://"
    raise ConfigurationError(f"unknown store {shown!r}", hint=hint)


def _open_postgres(url: str, lease_s: float, direct: str, workspace_pool: str | None, nats: str) -> Store:
    try:
        from holdfast.storage.postgres import PostgresStore
    except ImportError as error:
        raise MissingExtra("the PostgreSQL store", extra="postgres") from error
    return PostgresStore(url, lease_s=lease_s, direct=direct, workspace_pool=workspace_pool, nats=nats)
