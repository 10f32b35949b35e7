"""A checkpoint ends the readers' snapshots; a read that was ended runs again, whole."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage.sqlite import snapshots as module
from holdfast.storage.sqlite.snapshots import READS_END_AT, Snapshots

ENDLESS = "WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g) SELECT count(*) FROM g"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None, check_same_thread=False)) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE row (n INTEGER PRIMARY KEY)")
        made.executemany("INSERT INTO row VALUES (?)", [(n,) for n in range(100)])
        yield made


def end_until(snapshots: Snapshots, thread: threading.Thread, log_pages: int) -> None:
    """End the reads whenever there are any, until the thread is done."""
    while thread.is_alive():
        if snapshots.end(log_pages):
            snapshots.resume()
        thread.join(0.001)


def test_a_read_that_is_ended_in_the_middle_returns_each_row_once(connection: sqlite3.Connection) -> None:
    snapshots = Snapshots()
    attempts: list[int] = []
    results: list[list[int]] = []

    def query() -> list[int]:
        attempts.append(1)
        rows = []
        for (n,) in connection.execute("SELECT n FROM row ORDER BY n"):
            rows.append(n)
            if n == 50 and len(attempts) <= 2:
                connection.execute(ENDLESS).fetchall()
        return rows

    thread = threading.Thread(target=lambda: results.append(snapshots.read(connection, query)))
    thread.start()
    while thread.is_alive():
        if snapshots.end(2 * READS_END_AT):
            snapshots.resume()
        thread.join(0.001)
    assert results == [list(range(100))]
    assert len(attempts) == 3


def test_a_read_that_never_finishes_fails_after_some_attempts(connection: sqlite3.Connection) -> None:
    snapshots = Snapshots()
    problems: list[Exception] = []

    def read() -> None:
        try:
            snapshots.read(connection, lambda: connection.execute(ENDLESS).fetchall())
        except StorageError as error:
            problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    end_until(snapshots, thread, module._LONGEST_LOG)
    (problem,) = problems
    assert "several times" in str(problem)
    assert snapshots.read(connection, lambda: connection.execute("SELECT count(*) FROM row").fetchone()) == (100,)


def test_each_attempt_may_let_the_log_grow_further(connection: sqlite3.Connection) -> None:
    snapshots = Snapshots()
    patience: list[int] = []

    def query() -> None:
        patience.append(snapshots._running[connection])
        assert not snapshots.end(patience[-1] - 1), "it may go on"
        error = sqlite3.OperationalError("interrupted")
        error.sqlite_errorcode = sqlite3.SQLITE_INTERRUPT
        raise error

    with pytest.raises(StorageError):
        snapshots.read(connection, query)
    assert patience == [8_000, 16_000, 32_000]


def test_reads_that_begin_meanwhile_wait(connection: sqlite3.Connection) -> None:
    snapshots = Snapshots()
    assert snapshots.end(READS_END_AT)
    done: list[object] = []
    thread = threading.Thread(
        target=lambda: done.append(snapshots.read(connection, connection.execute("SELECT 1").fetchone))
    )
    thread.start()
    thread.join(0.05)
    assert not done
    snapshots.resume()
    thread.join(60)
    assert done == [(1,)]


def test_a_read_that_ignores_interrupts_is_left_alone(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INTERRUPTIONS", 3)
    snapshots = Snapshots()
    begun, go_on = threading.Event(), threading.Event()

    def query() -> None:
        begun.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=lambda: snapshots.read(connection, query))
    thread.start()
    assert begun.wait(60)
    assert not snapshots.end(READS_END_AT)
    with closing(sqlite3.connect(":memory:")) as other:
        assert snapshots.read(other, lambda: 5) == 5, "the others go on"
    go_on.set()
    thread.join(60)


def test_other_errors_are_passed_on(connection: sqlite3.Connection) -> None:
    snapshots = Snapshots()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        snapshots.read(connection, lambda: connection.execute("SELECT * FROM nowhere"))
    assert snapshots.end(READS_END_AT), "and nothing is left of the read"
