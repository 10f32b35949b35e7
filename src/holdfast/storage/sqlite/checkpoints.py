"""Checkpoints of the write-ahead log in a separate thread, so that commits do not wait for long checkpoints.

If a commit finds the log too long (``wal_autocheckpoint``), SQLite copies the log into the database within that commit,
which then takes as long as the copy. This thread copies the log earlier, a small part at a time, over a separate
connection, and blocks neither the writer nor the readers. SQLite's own limit stays in place: when a commit reaches the
limit, little is left to copy. Even if this thread is late or fails, the log does not grow longer than it would without
the thread. A passive checkpoint takes no lock that a commit needs (https://sqlite.org/wal.html, "Checkpointing").
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Final

__all__ = ["Checkpoints"]

_PAGES: Final = 1000
"""Target number of log pages per checkpoint. A checkpoint copies a page once, even if many commits wrote the page.
Smaller checkpoints would cost more in total, because each checkpoint waits for the disk."""
_FIRST_AFTER: Final = 50
_AT_MOST_AFTER: Final = 1000


class Checkpoints:
    """Copies the log into the database regularly. The writer's thread calls `open`, `committed` and `close`.

    Parameters:
        connect: callback that opens a connection to the database.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._requested = False
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._commits = 0
        self._after = _FIRST_AFTER

    def open(self) -> None:
        """Start the thread. The database must be in WAL mode."""
        self._connection = self._connect()
        self._thread = threading.Thread(target=self._run, name="holdfast-checkpoints", daemon=True)
        self._thread.start()

    def committed(self) -> None:
        """Count a commit, and request a checkpoint after enough commits."""
        self._commits += 1
        if self._commits >= self._after and not self._requested:
            self._commits = 0
            self._requested = True
            self._requests.put(True)

    def close(self) -> None:
        """End the thread. A running checkpoint is interrupted, which loses no data."""
        if self._thread is None or self._connection is None:
            return
        self._requests.put(False)
        with suppress(sqlite3.Error):
            self._connection.interrupt()
        self._thread.join()

    def _run(self) -> None:
        assert self._connection is not None
        in_log = 0
        with closing(self._connection) as connection:
            while self._requests.get():
                with suppress(sqlite3.Error):  # such as a full disk: the writer hits it too, and reports it
                    _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    written = max(1, pages - in_log if pages >= in_log else pages)
                    in_log = pages
                    self._after = min(max(1, self._after * _PAGES // written), _AT_MOST_AFTER)
                self._requested = False
