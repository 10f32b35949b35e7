"""Errors of the store."""

from __future__ import annotations

from holdfast.errors.base import HoldfastError

__all__ = [
    "StaleFence",
    "StorageError",
    "StoreCorrupt",
    "StoreFull",
    "StoreLocked",
    "StoreReadOnly",
    "StoreUnreachable",
]


class StorageError(HoldfastError):
    """The store operation failed; nothing was written."""

    code = "storage_error"
    retry_after_s = 5.0
    default_hint = "retry; if the error persists, check the store's disk and the host's incidents"


class StaleFence(StorageError):
    """The run no longer holds the session; nothing was written."""

    code = "stale_fence"
    default_hint = "read the session again: it may have been taken over by another run or host, or purged"


class StoreFull(StorageError):
    """The disk is full; nothing was written."""

    code = "store_full"
    default_hint = "free some space on the store's disk; no accepted message is lost"


class StoreReadOnly(StorageError):
    """The store is not writable."""

    code = "store_read_only"
    default_hint = "check the owner and mode of the database file and its folder"


class StoreCorrupt(StorageError):
    """The database file is damaged or is not a Holdfast store."""

    code = "store_corrupt"
    default_hint = "move the file aside and restore a backup, or name another file with --store"


class StoreLocked(StorageError):
    """Another host has this store open."""

    code = "store_locked"
    default_hint = "talk to the host that has it open: holdfast chat, holdfast ask; or open another store: --store sqlite:///other.db"


class StoreUnreachable(StorageError):
    """The database of the store does not accept connections."""

    code = "store_unreachable"
    default_hint = "check that the database runs and is reachable; the host continues as soon as it answers"
