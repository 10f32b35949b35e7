"""Snapshots of readers. A checkpoint may end them, because a snapshot prevents reuse of the write-ahead log.

SQLite reuses the log from its beginning only when all of it was copied into the database and no reader uses it
(https://sqlite.org/wal.html, "Avoiding Excessively Large WAL Files"). Without limits, one endless read, or short reads
that always overlap, would let the log grow without bound. So if the log is too long, a checkpoint interrupts all reads,
and new ones wait until the log is copied. An interrupted read restarts on a new snapshot. It has returned nothing yet,
so nothing is lost or repeated.

Each time a read restarts, the limit of the log doubles for it. A read that is interrupted at ``_LONGEST_LOG`` pages
fails.
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
"""Interval at which interrupts are repeated, because one that hits between two statements of a read has no effect."""


class Snapshots:
    """The running reads of one store. Callable from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[sqlite3.Connection, int] = {}
        self._held_back = False

    def read(self, connection: sqlite3.Connection, query: Callable[[], _T]) -> _T:
        """Run `query`, which reads over `connection`, and restart it whenever a checkpoint ends its snapshot.

        Raises:
            StorageError: if the log reaches the read's limit during each attempt.
        """
        log_limit = READS_END_AT
        while True:
            with self._changed:
                while self._held_back:
                    self._changed.wait()
                self._running[connection] = log_limit
            try:
                return query()
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_INTERRUPT:
                    raise
                if log_limit >= _LONGEST_LOG:
                    raise StorageError(
                        "the read was interrupted several times, because it kept the write-ahead log from being reused",
                        hint="read less at a time, or retry when the server is less busy",
                    ) from error
                log_limit *= 2
            finally:
                with self._changed:
                    del self._running[connection]
                    if self._held_back:
                        self._changed.notify_all()

    def end(self, log_pages: int) -> bool:
        """End all snapshots and hold new reads back until `resume`. If this fails, return False and hold nothing back.

        It fails if a read's limit of the log is above `log_pages`, or if a read does not end within a second.
        """
        with self._changed:
            if any(log_limit > log_pages for log_limit in self._running.values()):
                return False
            self._held_back = True
            for _ in range(_INTERRUPTIONS):
                for connection in self._running:
                    connection.interrupt()
                if not self._running:
                    return True
                self._changed.wait(_INTERRUPT_EVERY_S)
            self._admit_reads()
            return False

    def resume(self) -> None:
        """Start the reads that were held back."""
        with self._changed:
            self._admit_reads()

    def _admit_reads(self) -> None:
        self._held_back = False
        self._changed.notify_all()
