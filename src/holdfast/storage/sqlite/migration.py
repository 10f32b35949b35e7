"""Migration steps in addition to the ``migrate_…`` statements: copying the database first, and moving rows."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from typing import Any

import msgspec

from holdfast.storage.sql.database import Database
from holdfast.storage.sql.transcripts import SPACING, rebuild_landmarks
from holdfast.storage.sqlite.private_file import create_private_file, sync_folder

__all__ = ["copy_before_migration", "move_kept", "set_landmarks"]


def copy_before_migration(connection: sqlite3.Connection, path: str, version: int) -> str:
    """Copy the database to ``<path>.version-<version>``, and return the path of the copy.

    The Holdfast version that wrote the database can open the copy. The copy gets this name only when it is complete,
    and replaces the copy of an earlier attempt.

    Parameters:
        connection: connection to the database, outside any transaction.
        path: path of the database.
        version: schema version of the database.

    Raises:
        StoreReadOnly, ConfigurationError: if `create_private_file` cannot create the copy.
        sqlite3.Error: if copying fails, for example because the disk is full. The database is unchanged.
    """
    target = f"{path}.version-{version}"
    part = f"{target}-part"
    with suppress(FileNotFoundError):
        os.unlink(part)
    create_private_file(part)
    try:
        with closing(sqlite3.connect(part)) as copy:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    sync_folder(os.path.dirname(path))
    return target


_KEPT = b'"kept":"'  # in a text, the second quote would be escaped


def move_kept(database: Database) -> None:
    """Migrate to version 4: move the text of agent states from transcript entries to a separate table."""
    for kind in ("run", "edit"):
        for session, piece in database.query(f"{kind}_pieces"):
            ((*_, body),) = database.query(f"{kind}_piece", session, piece)
            if _KEPT in body:
                lines = [_without_kept(database, session, line) for line in body.split(b"\n")]
                database.write(f"save_{kind}_piece", b"\n".join(lines), session, piece)


def _without_kept(database: Database, session: int, line: bytes) -> bytes:
    if _KEPT not in line:
        return line
    entry: dict[str, Any] = msgspec.json.decode(line)
    kept = entry["kept"]
    database.write_rows("add_kept", [(session, entry["n"], kept.encode())], large=True)
    entry["kept"] = {"by": kept.partition("\n")[0], "n": entry["n"]}
    return msgspec.json.encode(entry)


def set_landmarks(database: Database) -> None:
    """Migrate to version 6: add the landmarks of long transcripts."""
    with closing(database.rows("long_transcripts", SPACING)) as rows:  # there may be millions
        for session, newest in rows:
            rebuild_landmarks(database, session, newest)
