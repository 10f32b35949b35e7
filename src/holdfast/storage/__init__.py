"""Storage of sessions, mailboxes, logs and transcripts: the interface and its stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.storage.memory import MemoryStore
from holdfast.storage.sqlite import SqliteStore

if TYPE_CHECKING:
    from holdfast.storage.port import Store

__all__ = ["MemoryStore", "SqliteStore", "open_store"]


def open_store(url: str) -> Store:
    """Return the store for a URL; the caller must ``open()`` it.

    Parameters:
        url: ``memory://``, ``sqlite:///relative.db`` or ``sqlite:////absolute.db``.

    Raises:
        ConfigurationError: unknown kind of URL.
    """
    if url == "memory://":
        return MemoryStore()
    if url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        return SqliteStore(url.removeprefix("sqlite:///"))
    raise ConfigurationError(f"unknown store {url!r}", hint="use sqlite:///file.db or memory://")
