"""Storage of sessions, mailboxes, logs and transcripts: one store over a backend in memory or in SQLite."""

from __future__ import annotations

from holdfast.errors import ConfigurationError
from holdfast.storage.memory import MemoryStore
from holdfast.storage.sqlite import SqliteStore
from holdfast.storage.store import Store

__all__ = ["MemoryStore", "SqliteStore", "open_store"]


def open_store(url: str) -> Store:
    """Return the store for a URL. The caller must ``open()`` the store.

    Parameters:
        url: ``memory://``, ``sqlite:///relative.db`` or ``sqlite:////absolute.db``.

    Raises:
        ConfigurationError: if the URL has none of these forms.
    """
    if url == "memory://":
        return MemoryStore()
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteStore(url.removeprefix("sqlite:///"))
    hint = "use sqlite:///file.db or memory://" if "://" in url or not url else f"use sqlite:///{url} or memory://"
    raise ConfigurationError(f"unknown store {url!r}", hint=hint)
