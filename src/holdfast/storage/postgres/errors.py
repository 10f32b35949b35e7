"""Translation of PostgreSQL's errors to Holdfast's. No error shows the password of the database's URL."""

from __future__ import annotations

from typing import Final

import psycopg

from holdfast.errors import (
    HoldfastError,
    StorageError,
    StoreCorrupt,
    StoreFull,
    StoreReadOnly,
    StoreUnreachable,
)
from holdfast.storage.sql.database import SessionChanged

__all__ = ["NodeEnded", "TransactionLost", "is_conflict", "is_ended", "is_lost", "translate"]


class NodeEnded(Exception):
    """Another node ended this node's epoch, because its lease was over. The transaction was rolled back."""


class TransactionLost(Exception):
    """The connection was lost, and the transaction was not committed."""


_ENDED: Final = "2201F"
"""SQLSTATE of a square root of a negative number, which the statement ``begin_batch`` computes for an ended node."""
_CONFLICTS: Final = ("22012", "23505", "40001", "40P01", "55P03")
"""SQLSTATEs after which a transaction is done again: a row was changed (the division by zero of an exact statement) or
added concurrently, the transaction was not serializable or was chosen to end a deadlock, or a lock was not free."""


def is_lost(error: BaseException) -> bool:
    """Return whether the connection was lost."""
    if isinstance(error, TransactionLost):
        return True
    if isinstance(error, psycopg.errors.AdminShutdown | psycopg.errors.CrashShutdown | psycopg.errors.CannotConnectNow):
        return True
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and error.sqlstate is None


def is_ended(error: BaseException) -> bool:
    """Return whether the transaction failed because this node's epoch was ended."""
    return isinstance(error, NodeEnded) or (isinstance(error, psycopg.Error) and error.sqlstate == _ENDED)


def is_conflict(error: BaseException) -> bool:
    """Return whether the transaction lost a race, and may succeed if it is done again."""
    if isinstance(error, SessionChanged):
        return True
    return isinstance(error, psycopg.Error) and error.sqlstate in _CONFLICTS


def translate(error: Exception, shown: str) -> Exception:
    """Return Holdfast's error for an error of psycopg or of this package; return any other error unchanged.

    Parameters:
        shown: the database's URL without its password.
    """
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, SessionChanged):
        return StorageError("a session was changed concurrently; nothing was written", hint="retry")
    if isinstance(error, NodeEnded):
        return StorageError("the lease of this node has ended; nothing was written", hint="retry")
    if isinstance(error, TransactionLost):
        return _caused(StoreUnreachable(f"the connection to {shown} was lost; nothing was written"), error)
    if not isinstance(error, psycopg.Error):
        return error
    return _caused(_of_state(error, shown), error)


def _of_state(error: psycopg.Error, shown: str) -> HoldfastError:
    said = _first_line(error)
    match error.sqlstate:
        case state if state in _CONFLICTS:
            return StorageError(f"{shown}: too many concurrent changes: {said}; nothing was written", hint="retry")
        case "25006":
            return StoreReadOnly(
                f"{shown} is read-only", hint="name the primary, or end the read-only mode of the database"
            )
        case "42501":
            return StoreReadOnly(f"{shown}: {said}", hint="grant the user the right to create and write the tables")
        case "53100":
            return StoreFull(f"the disk of {shown} is full; nothing was written")
        case "53300":
            return _out_of_connections(said, shown)
        case "57014":
            return StorageError(f"{shown}: {said}; nothing was written", hint="retry when the database is less busy")
        case "42P01" | "42703":
            return StoreCorrupt(f"{shown}: {said}", hint="restore a backup, or name another database with --store")
    if _is_out_of_connections(said):
        return _out_of_connections(said, shown)
    if is_lost(error) or (error.sqlstate or "").startswith(("08", "28", "57P", "3D")):
        return StoreUnreachable(f"{shown}: {said}")
    return StorageError(f"{shown}: {said}; nothing was written")


def _is_out_of_connections(said: str) -> bool:
    """Return whether a server refused a connection for this reason; libpq then tells no SQLSTATE."""
    return "too many connections" in said or "too many clients" in said or "remaining connection slots" in said


def _out_of_connections(said: str, shown: str) -> HoldfastError:
    return StoreUnreachable(
        f"{shown} is out of connections: {said}", hint="raise PostgreSQL's max_connections, or use pgbouncer"
    )


def _first_line(error: psycopg.Error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _caused(error: HoldfastError, cause: Exception) -> HoldfastError:
    error.__cause__ = cause
    return error
