"""Checkpoints of the write-ahead log in a separate thread, so that commits do not wait for writes to the database file.

Four steps keep the log short:

1. About every ``_PIECE`` pages, the thread copies the new part of the log into the database, over its own connection.
   This blocks neither the writer nor the readers (https://sqlite.org/wal.html, "Checkpointing"). Then it syncs the
   database. SQLite itself does so only once all of the log is copied, which would be within the pause below.
2. SQLite reuses the log from its beginning once all of it is copied. With a busy writer, the thread never gets there,
   because the log grows while the thread copies. So from ``_REUSE_AT`` pages on, the last few pages are copied between
   two transactions: by the thread, or, if a transaction is open, by the writer after its commit.
3. Reads that keep the log from being reused are ended at `READS_END_AT` pages (`holdfast.storage.sqlite.snapshots`).
4. If the thread is late or fails, SQLite copies the log within the first commit that makes it too long
   (``wal_autocheckpoint``).

Invariants:

- A commit is durable in the log before any of this concerns it, so an error or a kill here loses nothing. Errors of
  checkpoints are dropped: the next checkpoint tries again, and a full disk is reported by the writer.
- The writer holds ``_transaction`` during each transaction, and the thread holds it while it copies the last pages. The
  writer waits for the thread only then. The thread holds no other lock at that time.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Final

from holdfast import failpoints
from holdfast.storage.sqlite.snapshots import READS_END_AT, Snapshots

__all__ = ["Checkpoints"]

_log = logging.getLogger("holdfast.storage")

_PIECE: Final = 500
"""Approximate number of pages per copy. Commits wait for the disk while it syncs a copy: 2,000 pages double the 99th
percentile of a run. Smaller copies cost more in total: a page that changes often is copied more often, and each copy
waits for the disk."""
_REUSE_AT: Final = 4_000
_FEW: Final = 128
_PIECES_TOGETHER: Final = 4
"""Maximum number of consecutive copies that reduce the rest to a few pages, to be copied between transactions."""
_FIRST_AFTER: Final = 500
_AT_MOST_AFTER: Final = 4_000
"""Maximum number of changed rows after which a checkpoint is requested. The ratio of rows to pages is that of the last
copy. A copy at most halves the number, because the number of pages written since the last copy is an estimate."""
_WARN_AT: Final = 32_000

_POINTS: Final = {
    point: failpoints.register(f"sqlite.checkpoint.{point}")
    for point in ("before_piece", "after_piece", "before_last", "after_last")
}


class Checkpoints:
    """Copies the log into the database regularly. The writer's thread calls the public methods.

    Parameters:
        connect: callback that opens a connection to the database.
        snapshots: the reads that keep the log from being reused.
        sync: callback that syncs the file of the database to disk; it may raise `OSError`.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], snapshots: Snapshots, sync: Callable[[], None]
    ) -> None:
        self._connect = connect
        self._sync = sync
        self._snapshots = snapshots
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._requested = False
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._transaction = threading.Lock()
        self._in_transaction = False
        self._last_wanted = False
        self._changes = 0
        self._copied_changes = 0
        self._pages = 0
        self._all_copied = False
        self._after = _FIRST_AFTER
        self._end_reads_at = READS_END_AT

    def open(self) -> None:
        """Start the thread. The database must be in WAL mode."""
        self._connection = self._connect()
        self._thread = threading.Thread(target=self._run, name="holdfast-checkpoints", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Announce a transaction; wait if the thread is copying the last few pages of the log."""
        self._transaction.acquire()
        self._in_transaction = True

    def committed(self, connection: sqlite3.Connection) -> None:
        """End a transaction that was committed over this connection, and request a checkpoint after enough changes."""
        self._changes = connection.total_changes
        if self._last_wanted:
            with suppress(sqlite3.Error):
                self._copy_last(connection)
        self.rolled_back()
        if self._changes - self._copied_changes >= self._after and not self._requested:
            self._requested = True
            self._requests.put(True)

    def rolled_back(self) -> None:
        """End a transaction, if one was announced."""
        if self._in_transaction:
            self._in_transaction = False
            self._transaction.release()

    def close(self) -> None:
        """End the thread. A running checkpoint is interrupted, which loses no data."""
        self.rolled_back()
        if self._thread is None or self._connection is None:
            return
        self._closing = True
        self._requests.put(False)
        with suppress(sqlite3.Error):
            self._connection.interrupt()
        self._thread.join()

    def _run(self) -> None:
        assert self._connection is not None
        with closing(self._connection) as connection:
            while self._requests.get():
                self._serve(connection)

    def _serve(self, connection: sqlite3.Connection) -> None:
        with suppress(sqlite3.Error, OSError):
            self._copy(connection)
        self._requested = False

    def _copy(self, connection: sqlite3.Connection) -> None:
        pages, copied = self._copy_piece(connection)
        if pages < _REUSE_AT or self._closing:
            return
        if copied == pages:
            self._reuse(connection)
        elif pages >= self._end_reads_at and self._snapshots.end(pages):
            try:
                pages, copied = self._copy_piece(connection)
                if copied == pages:
                    self._reuse(connection)
                else:
                    self._report(pages)
            finally:
                self._snapshots.resume()

    def _reuse(self, connection: sqlite3.Connection) -> None:
        """Copy the rest of the log, so that the next commit reuses the log from its beginning."""
        self._end_reads_at = READS_END_AT
        for _ in range(_PIECES_TOGETHER):
            if self._uncopied() <= _FEW or self._closing:
                break
            self._copy_piece(connection)
        if self._all_copied:
            return
        self._last_wanted = True
        with self._transaction:
            if self._last_wanted:
                self._copy_last(connection)

    def _uncopied(self) -> int:
        """Estimate how many pages were committed since the last copy."""
        return (self._changes - self._copied_changes) * _PIECE // self._after

    def _report(self, pages: int) -> None:
        """Report a reader in another program, and end reads later from now on, because this has no effect on it."""
        self._end_reads_at = 2 * pages
        if pages >= _WARN_AT:
            _log.warning(
                "another program reads the store, whose write-ahead log has grown to %d MB",
                pages // 256,
            )

    def _copy_last(self, connection: sqlite3.Connection) -> None:
        self._last_wanted = False
        failpoints.hit(_POINTS["before_last"])
        self._checkpoint(connection, last=True)
        failpoints.hit(_POINTS["after_last"])

    def _copy_piece(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Copy as much as the readers allow; return the length of the log, and the copied part of it, in pages."""
        failpoints.hit(_POINTS["before_piece"])
        lengths = self._checkpoint(connection)
        self._sync()
        failpoints.hit(_POINTS["after_piece"])
        return lengths

    def _checkpoint(self, connection: sqlite3.Connection, *, last: bool = False) -> tuple[int, int]:
        changes = self._changes
        _, pages, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if pages >= 0:  # no other checkpoint is running
            changed = changes - self._copied_changes
            used_again = self._all_copied or pages < self._pages
            written = pages if used_again else pages - self._pages
            if changed and written >= _FEW:
                self._after = min(max(1, self._after // 2, changed * _PIECE // written), _AT_MOST_AFTER)
            # What a transaction wrote meanwhile is in the log too, and not in these lengths.
            alone = changes == self._changes and (last or not self._in_transaction)
            self._copied_changes, self._pages, self._all_copied = changes, pages, pages == copied and alone
        return pages, copied
