"""Translation of SQLite's errors to Holdfast's."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import tempfile
from typing import Final

from holdfast.errors import HoldfastError, StorageError, StoreCorrupt, StoreFull, StoreLocked, StoreReadOnly
from holdfast.storage.sql.database import SessionChanged

__all__ = ["translate"]

_TRIED_BYTES: Final = 65_536


def translate(error: Exception, path: str) -> Exception:
    """Return Holdfast's error for an error of SQLite or `SessionChanged`; return any other error unchanged."""
    if isinstance(error, SessionChanged):
        return StorageError("a session was changed concurrently; nothing was written", hint="retry")
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", 0) or 0
    match code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return _caused(StoreFull(f"the disk of {path} is full; nothing was written"), error)
        case sqlite3.SQLITE_IOERR:
            return _caused(_of_disk(error, path), error)
        case sqlite3.SQLITE_READONLY:
            return _caused(StoreReadOnly(f"{path} is not writable"), error)
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return _caused(StoreReadOnly(f"{path}: open failed: {error}"), error)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return _caused(StoreCorrupt(f"{path} is damaged or is not a database: {error}"), error)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return _caused(StoreLocked(f"another program holds a lock on {path}"), error)
        case _:
            return _caused(StorageError(f"{path}: {error}; nothing was written"), error)


def _caused(error: HoldfastError, cause: Exception) -> HoldfastError:
    error.__cause__ = cause
    return error


def _of_disk(error: sqlite3.Error, path: str) -> StorageError:
    """Return Holdfast's error for an I/O error. SQLite does not report the errno, so a test write determines it."""
    match _write_errno(path):
        case 0:
            return StorageError(f"{path}: {error}; nothing was written")
        case errno.ENOSPC:
            return StoreFull(f"the disk of {path} is full; nothing was written")
        case errno.EDQUOT | errno.EFBIG as number:
            return StoreFull(f"no space left in {path}: {os.strerror(number)}; nothing was written")
        case errno.EROFS | errno.EACCES | errno.EPERM as number:
            return StoreReadOnly(f"{path} is not writable: {os.strerror(number)}")
        case number:
            return StorageError(f"{path}: {os.strerror(number)}; nothing was written")


def _write_errno(path: str) -> int:
    """Return the errno with which a test write beside the store fails, or a limit would make it fail; 0 on success."""
    folder = os.path.dirname(path)
    try:
        if os.statvfs(folder).f_bavail == 0:
            return errno.ENOSPC
        largest = max(os.stat(file).st_size for file in (path, path + "-wal") if os.path.exists(file))
        if largest + _TRIED_BYTES > resource.getrlimit(resource.RLIMIT_FSIZE)[0] >= 0:
            return errno.EFBIG
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        return error.errno or 0
    return 0
