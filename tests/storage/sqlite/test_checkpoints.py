"""The log is copied into the database beside the writer, in parts, and whatever becomes of that nothing is lost."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage.sqlite.checkpoints import Checkpoints

PAGE_BYTES = 4096


def connect(path: Path, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0, factory=kind)


@contextmanager
def writer(path: Path) -> Iterator[Callable[[int], None]]:
    """Commits so many pages at once; SQLite itself copies none of them."""
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("CREATE TABLE page (body)")

        def commit(pages: int) -> None:
            connection.execute("INSERT INTO page VALUES (zeroblob(?))", (pages * PAGE_BYTES,))

        yield commit


class Watched(sqlite3.Connection):
    """A connection that tells of its checkpoints, and can hold one up or fail it."""

    copied = threading.Semaphore(0)
    problem: Exception | None = None

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in sql and self.problem is not None:
            type(self).copied.release()
            raise self.problem
        found = super().execute(sql, *values)
        if "wal_checkpoint" in sql:
            type(self).copied.release()
        return found


@pytest.fixture
def watched() -> type[Watched]:
    class Fresh(Watched):
        copied = threading.Semaphore(0)

    return Fresh


def opened(path: Path, kind: type[Watched]) -> Checkpoints:
    checkpoints = Checkpoints(
        lambda: sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=kind)
    )
    checkpoints.open()
    return checkpoints


def commits_until_copied(
    commit: Callable[[int], None], pages: int, checkpoints: Checkpoints, watched: type[Watched]
) -> int:
    """Commit so many pages each time, until the log is copied; how many commits it took."""
    for number in range(1, 2000):
        commit(pages)
        checkpoints.committed()
        while checkpoints._requested:
            if watched.copied.acquire(timeout=0.01):
                return number
        if watched.copied.acquire(blocking=False):
            return number
    raise AssertionError("nothing was copied")


def test_the_log_is_copied_while_the_writer_goes_on(tmp_path: Path, watched: type[Watched]) -> None:
    path = tmp_path / "x.db"
    with writer(path) as commit:
        checkpoints = opened(path, watched)
        commits = commits_until_copied(commit, 4, checkpoints, watched)
        assert path.stat().st_size >= commits * 4 * PAGE_BYTES
        checkpoints.close()


def test_large_commits_are_copied_sooner_and_small_ones_later(tmp_path: Path, watched: type[Watched]) -> None:
    with writer(tmp_path / "x.db") as commit:
        checkpoints = opened(tmp_path / "x.db", watched)
        commits_until_copied(commit, 100, checkpoints, watched)  # as many as a new one waits for
        assert commits_until_copied(commit, 100, checkpoints, watched) <= 10
        commits_until_copied(commit, 1, checkpoints, watched)
        assert commits_until_copied(commit, 1, checkpoints, watched) >= 50
        checkpoints.close()


def test_a_checkpoint_that_fails_is_tried_again(tmp_path: Path, watched: type[Watched]) -> None:
    path = tmp_path / "x.db"
    with writer(path) as commit:
        checkpoints = opened(path, watched)
        watched.problem = sqlite3.OperationalError("database or disk is full")
        commits = commits_until_copied(commit, 4, checkpoints, watched)
        assert path.stat().st_size < commits * 4 * PAGE_BYTES
        watched.problem = None
        commits += commits_until_copied(commit, 4, checkpoints, watched)
        assert path.stat().st_size >= commits * 4 * PAGE_BYTES
        checkpoints.close()


def test_closing_ends_the_thread_and_its_connection(tmp_path: Path, watched: type[Watched]) -> None:
    path = tmp_path / "x.db"
    with writer(path) as commit:
        checkpoints = opened(path, watched)
        commit(2000)
        for _ in range(50):
            checkpoints.committed()
        checkpoints.close()
        assert "holdfast-checkpoints" not in [thread.name for thread in threading.enumerate()]
        checkpoints.close()
    with closing(connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT sum(length(body)) FROM page").fetchone() == (2000 * PAGE_BYTES,)
