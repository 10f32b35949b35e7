# ruff: noqa: D102 - `DatabaseConnection` documents its methods
"""The connection that writes to a SQLite file: it locks the file, creates or migrates its schema, and commits."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from holdfast import failpoints
from holdfast.errors import ConfigurationError, StoreCorrupt
from holdfast.storage.sql import statements
from holdfast.storage.sql.database_use import ExclusiveUse
from holdfast.storage.sql.tables import SqlTables
from holdfast.storage.sql.writer import FailureStep
from holdfast.storage.sqlite import errors
from holdfast.storage.sqlite.checkpoints import Checkpoints
from holdfast.storage.sqlite.database import SqliteDatabase, connect
from holdfast.storage.sqlite.filelock import FileLock
from holdfast.storage.sqlite.migration import copy_before_migration, move_kept, set_landmarks
from holdfast.storage.sqlite.private_file import (
    create_private_file,
    prepare_folder,
    refuse_other_content,
    set_journal_aside,
)
from holdfast.storage.sqlite.snapshots import Snapshots

__all__ = ["SCHEMA_VERSION", "WriteConnection"]

_log = logging.getLogger("holdfast.storage")

SCHEMA_VERSION: Final = 8
_APPLICATION_ID: Final = 0x484F4C44
_OLDEST_SQLITE: Final = (3, 35, 0)

_sync_data: Final = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync

_VERBS: Final = (
    "open",
    "send",
    "claim",
    "append",
    "commit_run",
    "interrupt",
    "stop_session",
    "withdraw",
    "delete_session",
    "steer",
    "suspend",
    "answer",
    "park",
    "edit_history",
    "add_attachment",
    "put_schedule",
    "pause_schedule",
    "delete_schedule",
    "fire_schedule",
    "revoke_grant",
    "rescue",
    "restart",
    "merge",
    "prune",
    "add_key",
    "revoke_key",
)
_POINTS: Final = ("before_write", "between_writes", "before_commit", "after_commit")
_FAILPOINTS: Final = {
    (verb, point): failpoints.register(f"sqlite.{verb}.{point}") for verb in _VERBS for point in _POINTS
}


def _passing(point: str, names: Sequence[str]) -> None:
    if failpoints.armed() is not None:
        for verb in dict.fromkeys(names):
            failpoints.hit(_FAILPOINTS[verb, point])


def _identity(path: str) -> tuple[int, int]:
    """Return the device and inode of the file `path`; (0, 0) if the file does not exist."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


class WriteConnection:
    """Connection of the writer thread (see `holdfast.storage.sql.writer.DatabaseConnection`).

    Parameters:
        path: path of the database file.
        node_id: id of the node that opens the file.
        at: current time, in seconds since the epoch.
        snapshots: the reads of the same file, in this process.
    """

    def __init__(self, path: str, *, node_id: str, at: float, snapshots: Snapshots) -> None:
        self._path = path
        self._lock = FileLock(path + "-lock")
        self._node_id = node_id
        self._at = at
        self._connection: sqlite3.Connection | None = None
        self._checkpoints = Checkpoints(lambda: connect(path), snapshots, sync=self._sync)
        self._descriptor = -1  # closing it drops the locks of all connections to the file in this process (POSIX)
        self._file = (0, 0)
        self._verbs: Sequence[str] = ()

    def open(self) -> SqlTables:
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise ConfigurationError(
                f"this Python has SQLite {sqlite3.sqlite_version}, which is too old",
                hint=f"use a Python with SQLite {'.'.join(map(str, _OLDEST_SQLITE))} or newer",
            )
        prepare_folder(os.path.dirname(self._path))
        self._lock.acquire(check=lambda: refuse_other_content(self._path))
        create_private_file(self._path)
        set_journal_aside(self._path)
        self._descriptor = os.open(self._path, os.O_RDONLY)
        self._connection = connection = connect(self._path)
        version = self._check(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        self._file = _identity(self._path)
        connection.execute("PRAGMA journal_size_limit = 67108864")
        database = SqliteDatabase(connection)
        if 0 < version < SCHEMA_VERSION:
            copy = copy_before_migration(connection, self._path, version)
            _log.warning("migrating %s to a newer schema; the older Holdfast can open the copy %s", self._path, copy)
        self.begin(("open",))
        _passing("before_write", self._verbs)
        blocks = [f"migrate_{older}" for older in range(version, SCHEMA_VERSION)] if version else ["schema"]
        for block in blocks:
            for statement in statements.block(block).split(";\n"):
                connection.execute(statement)
        if 0 < version < 4:
            move_kept(database)
        if 0 < version < 6:
            set_landmarks(database)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        _passing("between_writes", self._verbs)
        epoch = database.query("add_node", self._node_id, self._at)[0][0]
        sequence = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'session'").fetchone()
        _passing("before_commit", self._verbs)
        self.commit()
        _passing("after_commit", self._verbs)
        self._checkpoints.open()
        return SqlTables(
            database,
            epoch=epoch,
            sharing=ExclusiveUse(database, last_number=sequence[0] if sequence else 0),
            between=lambda: _passing("between_writes", self._verbs),
        )

    def _check(self, connection: sqlite3.Connection) -> int:
        """Check that the file is a supported store, and return its schema version; 0 for a new file."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables == 0:
            return 0
        if application != _APPLICATION_ID:
            raise StoreCorrupt(f"{self._path} is a database, but not a Holdfast store; nothing was changed")
        if version > SCHEMA_VERSION:
            raise ConfigurationError(
                f"{self._path} has schema version {version}, but this Holdfast supports up to {SCHEMA_VERSION}",
                hint="upgrade Holdfast, or name another file with --store",
            )
        return int(version)

    def begin(self, verbs: Sequence[str]) -> None:
        self._verbs = verbs
        assert self._connection is not None
        if _identity(self._path) != self._file:  # data written to an unlinked file is lost with the process
            raise StoreCorrupt(
                f"{self._path} was moved, deleted or replaced while it was open; nothing was written",
                hint="put the file back where it was, or restart the host with the file that is there now",
            )
        self._checkpoints.begin()
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        assert self._connection is not None
        self._connection.execute("COMMIT")
        self._checkpoints.committed(self._connection)

    def roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            # Callers get the original error; a transaction that stays open makes the next one fail.
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
        self._checkpoints.rolled_back()

    def after_failure(self, error: Exception, attempt: int, writes: int) -> FailureStep:
        return "split"

    def translate(self, error: Exception) -> Exception:
        return errors.translate(error, self._path)

    def passing(self, point: str, verbs: Sequence[str]) -> None:
        _passing(point, verbs)

    def _sync(self) -> None:
        _sync_data(self._descriptor)

    def close(self) -> None:
        self._checkpoints.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._lock.release()
