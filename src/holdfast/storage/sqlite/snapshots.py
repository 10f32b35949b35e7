"""Snapshots of the readers, which a checkpoint may end: a snapshot keeps the write-ahead log from being reused.

SQLite reuses the log from its beginning only when all of it is in the database and no reader uses it
(https://sqlite.org/wal.html, "Avoiding Excessively Large WAL Files"). Without limits, one endless read, or short reads
that always overlap, would let the log grow for ever. So if the log is too long, a checkpoint interrupts the reads, and
holds new ones back until the log is copied. An interrupted read runs again from its beginning, on a new snapshot. It
has returned nothing yet, so nothing is lost or doubled.

Each time a read runs again, it may let the log grow to twice the length. A read that is interrupted at
``_LONGEST_LOG`` pages fails.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from holdfast.errors import StorageError

__all__ = ["READS_END_AT", "Snapshots"]

_T = TypeVar("_T")

READS_END_AT: Final = 8_000
"""Length of the log, in pages of 4 KiB, at which the first reads are interrupted."""
_LONGEST_LOG: Final = 32_000
_INTERRUPTIONS: Final = 200
_INTERRUPT_EVERY_S: Final = 0.005
"""An interrupt has no effect between two statements of a read, so it is repeated."""


class Snapshots:
    """The running reads of one store. Callable from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[sqlite3.Connection, int] = {}
        self._held_back = False

    def read(self, connection: sqlite3.Connection, query: Callable[[], _T]) -> _T:
        """Run `query`, which reads over `connection`, and run it again whenever its snapshot is ended.

        Raises:
            StorageError: if the read takes longer than a full log of writes, on every attempt.
        """
        patience = READS_END_AT
        while True:
            with self._changed:
                while self._held_back:
                    self._changed.wait()
                self._running[connection] = patience
            try:
                return query()
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_INTERRUPT:
                    raise
                if patience >= _LONGEST_LOG:
                    raise StorageError(
                        "the read was ended several times, because it kept the write-ahead log from being reused",
                        hint="read less at a time, or retry when fewer runs end",
                    ) from error
                patience *= 2
            finally:
                with self._changed:
                    del self._running[connection]
                    if self._held_back:
                        self._changed.notify_all()

    def end(self, log_pages: int) -> bool:
        """End all snapshots and hold new reads back until `resume`. Return False if reads continue.

        Reads continue if one of them may let the log grow beyond `log_pages`, or does not end within a second.
        """
        with self._changed:
            if any(patience > log_pages for patience in self._running.values()):
                return False
            self._held_back = True
            for _ in range(_INTERRUPTIONS):
                for connection in self._running:
                    connection.interrupt()
                if not self._running:
                    return True
                self._changed.wait(_INTERRUPT_EVERY_S)
            self._let_on()
            return False

    def resume(self) -> None:
        """Let the reads that were held back begin."""
        with self._changed:
            self._let_on()

    def _let_on(self) -> None:
        self._held_back = False
        self._changed.notify_all()
