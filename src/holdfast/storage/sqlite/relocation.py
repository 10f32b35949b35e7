"""Moving a store's file, with its side files, to another folder; a kill at any instant leaves a complete store.

The order of the steps guarantees this property. First, the log is written back into the database and removed, so that
the database is one file. Then the side files are copied, which changes nothing yet. The rename of the database is the
decisive step: until the rename, the old store is complete; after the rename, the new store is. Finally, the remaining
files of the old store are removed. If a call is interrupted, a second call completes the move. Both stores are locked
throughout, so no host can have either of them open.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from contextlib import ExitStack, suppress
from typing import Final

from holdfast import failpoints
from holdfast.errors import ConfigurationError, StorageError, StoreCorrupt, StoreLocked, StoreReadOnly
from holdfast.storage.sqlite.filelock import FileLock
from holdfast.storage.sqlite.private_file import (
    prepare_folder,
    refuse_foreign_files,
    set_journal_aside,
    store_path,
    sync_folder,
)

__all__ = ["relocate_store"]

_APPLICATION_ID: Final = 0x484F4C44
_COPIED = ("-token", ".d")
_DROPPED = ("-wal", "-shm", "-token", ".d", "-lock")
_STEPS: Final = {
    step: failpoints.register(f"relocation.{step}") for step in ("written_back", "copied", "renamed", "cleared")
}


def relocate_store(old: str, new: str) -> bool:
    """Move the store at path `old` to path `new`.

    Return False if an earlier call had already moved the store and only leftovers were removed.

    Raises:
        StoreLocked: if a host or another program has one of the stores open.
        ConfigurationError: if neither or both of the stores exist, if `old` is not a regular file or belongs to another
            user, if the folder of `new` is unusable, or if a log or journal already exists beside `new`.
        StoreCorrupt: if `old` is not a Holdfast store or is damaged.
        StoreReadOnly: if a file cannot be copied, moved or removed.
        StorageError: if SQLite cannot write the log back.
    """
    old, new = os.path.abspath(old), store_path(new)
    if os.path.lexists(old) and not stat.S_ISREG(os.lstat(old).st_mode):
        raise ConfigurationError(f"{old} is not a regular file", hint="move its target manually")
    if not os.path.exists(old) and not os.path.exists(new):
        raise ConfigurationError(f"no store to move: neither {old} nor {new} exists")
    prepare_folder(os.path.dirname(new))
    with ExitStack() as held:
        for path in (old, new):
            lock = FileLock(f"{path}-lock")
            lock.acquire()
            held.callback(lock.release)
        try:
            return _relocate(old, new)
        except OSError as error:
            raise StoreReadOnly(
                f"{error.filename or old}: move failed: {os.strerror(error.errno or 0)}",
                hint="nothing is lost; fix the problem, then run the same command again",
            ) from error


def _relocate(old: str, new: str) -> bool:
    moves = os.path.exists(old)
    if moves and os.path.exists(new):
        raise ConfigurationError(f"{old} and {new} both exist", hint="move the one you do not need to another folder")
    if moves:
        _refuse_strange_log(new)
        refuse_foreign_files(old)
        set_journal_aside(old)
        _write_back(old)
        failpoints.hit(_STEPS["written_back"])
        for suffix in _COPIED:
            _copy(old + suffix, new + suffix)
        failpoints.hit(_STEPS["copied"])
        os.chmod(old, 0o600)
        os.rename(old, new)
        for folder in {os.path.dirname(old), os.path.dirname(new)}:
            sync_folder(folder)
        failpoints.hit(_STEPS["renamed"])
    for suffix in _DROPPED:
        _remove(old + suffix)
    failpoints.hit(_STEPS["cleared"])
    return moves


def _refuse_strange_log(new: str) -> None:
    """Refuse a log or journal that already exists beside `new`: SQLite would replay it into the moved store."""
    for suffix in ("-wal", "-shm", "-journal"):
        if os.path.lexists(new + suffix):
            raise ConfigurationError(
                f"{new}{suffix} already exists and belongs to another store; nothing was changed",
                hint="move that file away, then run the same command again",
            )


def _write_back(path: str) -> None:
    """Write the log back into the database and remove the log, so that the database is one file."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=1.0)
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION_ID:
                raise StoreCorrupt(f"{path} is not a Holdfast store; nothing was changed")
            (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        raise StorageError(f"{path}: move failed: {error}; nothing was changed") from error
    except sqlite3.DatabaseError as error:
        raise StoreCorrupt(f"{path} is damaged or is not a database: {error}; nothing was changed") from error
    if busy or os.path.exists(f"{path}-wal"):
        raise StoreLocked(f"another program has {path} open; nothing was changed")


def _copy(source: str, target: str) -> None:
    """Copy a side file or folder, replacing the copy of an earlier attempt."""
    _remove(target)
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True)
    elif os.path.isfile(source):
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
