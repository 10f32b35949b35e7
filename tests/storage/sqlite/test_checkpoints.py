"""The log is copied into the database beside the writer, stays short, and whatever becomes of that nothing is lost."""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.errors import StorageError
from holdfast.storage.sqlite import checkpoints as module
from holdfast.storage.sqlite import snapshots as of_reads
from holdfast.storage.sqlite.checkpoints import Checkpoints
from holdfast.storage.sqlite.snapshots import Snapshots
from holdfast.storage.sqlite.write_connection import WriteConnection

PAGE_BYTES = 4096
POINTS = [name for name in failpoints.names() if name.startswith("sqlite.checkpoint.")]


def connect(path: Path, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0, factory=kind)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA synchronous = OFF")
    return connection


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of the log, divided by ten."""
    monkeypatch.setattr(module, "READS_END_AT", 800)
    monkeypatch.setattr(module, "_REUSE_AT", 200)
    monkeypatch.setattr(module, "_WARN_AT", 3_200)
    monkeypatch.setattr(of_reads, "READS_END_AT", 800)
    monkeypatch.setattr(of_reads, "_LONGEST_LOG", 3_200)


class Database:
    """A file with a log, its writer, and the checkpoints of it, which run when the test says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = connect(path)
        self.writer.execute("PRAGMA journal_mode = WAL")
        self.writer.execute("CREATE TABLE page (body)")
        self.snapshots = Snapshots()
        self.busy = False
        self.problem: Exception | None = None
        self.checkpoints = Checkpoints(self._watched, self.snapshots, sync=self._sync)
        self.lengths: list[int] = []
        self.synced: list[tuple[int, bool]] = []
        self.sync_problem: OSError | None = None
        self.committed = 0
        self.longest = 0

    def _sync(self) -> None:
        self.synced.append((len(self.lengths), self.checkpoints._transaction.locked()))
        if self.sync_problem is not None:
            raise self.sync_problem

    def _watched(self) -> sqlite3.Connection:
        database = self

        class Watched(sqlite3.Connection):
            def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
                if "wal_checkpoint" in sql and database.problem is not None:
                    raise database.problem
                busy = database.busy and "wal_checkpoint" in sql and not database.checkpoints._transaction.locked()
                if busy:  # a transaction that is open before the checkpoint, and committed after it
                    database.begin()
                found = super().execute(sql, *values)
                if "wal_checkpoint" in sql:
                    database.lengths.append(database.committed)
                if busy:
                    database.end(4)
                return found

        return connect(self.path, Watched)

    def commit(self, rows: int = 4) -> None:
        """Commit so many rows, each of which has a page of its own."""
        self.begin()
        self.end(rows)

    def begin(self) -> None:
        """Begin a transaction."""
        self.checkpoints.begin()
        self.writer.execute("BEGIN IMMEDIATE")

    def end(self, rows: int) -> None:
        """Commit the transaction, with so many rows."""
        self.writer.executemany("INSERT INTO page VALUES (?)", [(b"x" * (PAGE_BYTES - 500),)] * rows)
        self.writer.execute("COMMIT")
        self.checkpoints.committed(self.writer)
        self.committed += rows
        self.longest = max(self.longest, self.path.with_name(self.path.name + "-wal").stat().st_size // PAGE_BYTES)

    def check(self) -> None:
        """Nothing is lost, as far as a new connection sees."""
        with closing(connect(self.path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("SELECT count(*) FROM page").fetchone() == (self.committed,)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "x.db")
    try:
        yield made
    finally:
        made.checkpoints.close()
        made.writer.close()


@contextmanager
def stepped(database: Database) -> Iterator[Callable[[], int]]:
    """The checkpoints without their thread: each call does what is requested, and counts it."""
    checkpoints = database.checkpoints
    with closing(database._watched()) as connection:

        def step() -> int:
            done = 0
            while not checkpoints._requests.empty():
                checkpoints._requests.get()
                checkpoints._serve(connection)
                done += 1
            return done

        yield step


def test_the_log_is_copied_in_pieces(database: Database) -> None:
    with stepped(database) as step:
        pieces = []
        for number in range(3_000):
            database.commit()
            if step():
                pieces.append(number)
    assert database.path.stat().st_size >= (12_000 - 2 * module._PIECE) * PAGE_BYTES
    gaps = [(late - early) * 4 for early, late in itertools.pairwise(pieces[1:])]
    assert all(module._PIECE // 4 <= gap <= 2 * module._PIECE for gap in gaps), "pages between two checkpoints"
    database.check()


def test_the_log_stays_short_beside_a_writer_that_commits_during_each_checkpoint(database: Database) -> None:
    with stepped(database) as step:
        database.busy = True
        for _ in range(1_500):
            database.commit()
            step()
    assert database.committed > 6_000
    assert database.longest <= module._REUSE_AT + 4 * module._PIECE
    database.check()


@pytest.mark.parametrize("busy", [False, True])
def test_no_piece_is_much_smaller_than_the_others(database: Database, busy: bool) -> None:
    """Each costs a wait for the disk. The last pages, and what is copied until they are few, come each time."""
    with stepped(database) as step:
        database.busy = busy
        for _ in range(3_000):
            database.commit()
            step()
    most = (database.committed // module._REUSE_AT + 1) * 3 + database.committed // (module._PIECE // 2)
    assert len(database.lengths) <= most
    database.check()


def test_the_disk_is_awaited_after_each_piece_and_not_between_two_transactions(database: Database) -> None:
    with stepped(database) as step:
        database.busy = True
        for _ in range(1_500):
            database.commit()
            step()
    pieces, paused = zip(*database.synced, strict=True)
    last = len(database.lengths) - len(pieces)
    assert 0 < last <= database.committed // module._REUSE_AT + 1, (
        "copies of the last pages, after a sync of the others"
    )
    assert not any(paused)


def test_an_error_of_the_disk_after_a_piece_is_dropped(database: Database) -> None:
    database.sync_problem = OSError("input/output error")
    with stepped(database) as step:
        for _ in range(1_000):
            database.commit()
            step()
    assert database.synced
    database.check()


def test_a_writer_in_a_transaction_copies_the_last_pages_itself(database: Database) -> None:
    """The thread waits for the transaction; the writer must not wait for the thread."""
    with stepped(database) as step:
        while database.longest < module._REUSE_AT + 200:
            database.commit()
        database.commit()
        assert database.checkpoints._requested
        database.checkpoints.begin()
        thread = threading.Thread(target=step)
        thread.start()
        while not database.checkpoints._last_wanted:
            thread.join(0.001)
        database.writer.execute("INSERT INTO page VALUES (1)")
        database.checkpoints.committed(database.writer)
        database.committed += 1
        thread.join(30)
        assert not thread.is_alive()
        size = database.path.with_name("x.db-wal").stat().st_size
        database.commit()
        assert database.path.with_name("x.db-wal").stat().st_size == size, "the log is used from its beginning again"
    database.check()


def endless(connection: sqlite3.Connection, ended: list[int]) -> Callable[[], object]:
    """A read that never finishes, on one snapshot; notes when it is ended."""

    def query() -> object:
        rows = connection.execute(
            "WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g) SELECT count(*) FROM g, page"
        )
        return rows.fetchone()

    def noting() -> object:
        try:
            return query()
        except sqlite3.OperationalError:
            ended.append(1)
            raise

    return noting


@pytest.mark.usefixtures("small")
def test_the_log_stays_short_beside_reads_that_never_finish(database: Database) -> None:
    """Each ended read is followed by another one; the pages and the ends are counted, no time is."""
    ended: list[int] = []
    over = threading.Event()
    database.commit()

    def read() -> None:
        with closing(connect(database.path)) as connection:
            while not over.is_set():
                with pytest.raises(StorageError, match="was interrupted"):
                    database.snapshots.read(connection, endless(connection, ended))

    thread = threading.Thread(target=read)
    thread.start()
    with stepped(database) as step:
        for _ in range(300):
            database.commit(100)
            step()
        over.set()
        while thread.is_alive():
            database.snapshots.end(1_000_000)
            database.snapshots.resume()
            thread.join(0.001)
    assert len(ended) >= 3, "ended three times before the read fails"
    assert database.longest <= of_reads._LONGEST_LOG + 4 * module._PIECE, "of 30,000 pages that were written"
    database.check()


@pytest.mark.usefixtures("small")
def test_a_reader_of_another_program_is_reported_and_blocks_nobody(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(connect(database.path)) as other, stepped(database) as step:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM page").fetchall()
        for _ in range(100):
            database.commit(100)
            step()
        assert [record.message for record in caplog.records if "another program" in record.message]
        assert len(caplog.records) <= 3, "once for each doubling"
        assert not database.snapshots._held_back
        other.execute("COMMIT")
        size = database.longest
        while step() == 0:
            database.commit(100)
        database.commit(100)
        for _ in range(50):
            database.commit(100)
            step()
        assert database.longest <= size + 4 * module._PIECE, "the log is used from its beginning again"
    database.check()


def test_a_checkpoint_that_fails_is_tried_again(database: Database) -> None:
    with stepped(database) as step:
        database.problem = sqlite3.OperationalError("database or disk is full")
        for _ in range(600):
            database.commit()
            step()
        before = database.path.stat().st_size
        database.problem = None
        database.commit()
        assert step() == 1
        assert database.path.stat().st_size >= before + 2_000 * PAGE_BYTES
    database.check()


@pytest.mark.parametrize("point", POINTS)
def test_an_error_at_any_point_of_a_checkpoint_loses_nothing(database: Database, point: str) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    with stepped(database) as step:
        with failpoints.arm(point, error=full):
            for _ in range(1_000):
                database.commit()
                step()
        database.commit()
        assert not database.checkpoints._in_transaction
        assert database.longest <= module._REUSE_AT + 8 * module._PIECE
    database.check()


def test_an_error_while_the_writer_copies_the_last_pages_does_not_fail_its_commit(database: Database) -> None:
    database.checkpoints._last_wanted = True
    with failpoints.arm("sqlite.checkpoint.before_last", error=sqlite3.OperationalError("disk I/O error")):
        database.commit()
    database.commit()
    database.check()


@pytest.mark.parametrize("point", POINTS)
def test_closing_within_a_checkpoint_ends_the_thread(database: Database, point: str) -> None:
    there, go_on = threading.Event(), threading.Event()

    def passed(name: str) -> None:
        if name == point and threading.current_thread().name == "holdfast-checkpoints":
            there.set()
            assert go_on.wait(60)

    database.commit(module._REUSE_AT + 200)
    database.busy = True  # else nothing is left to copy between two transactions
    with failpoints.attend(passed):
        database.checkpoints.open()
        database.checkpoints._requests.put(True)
        assert there.wait(60)
        closing_thread = threading.Thread(target=database.checkpoints.close)
        closing_thread.start()
        while not database.checkpoints._closing:
            closing_thread.join(0.001)
        go_on.set()
        closing_thread.join(60)
        assert not closing_thread.is_alive()
    assert "holdfast-checkpoints" not in [thread.name for thread in threading.enumerate()]
    database.checkpoints.close()
    database.check()


def test_closing_after_a_transaction_that_never_ended_ends_the_thread(database: Database) -> None:
    """As when the writer fails: the thread may wait for the transaction."""
    database.checkpoints.open()
    database.checkpoints.begin()
    database.checkpoints._requests.put(True)
    database.checkpoints.close()
    assert "holdfast-checkpoints" not in [thread.name for thread in threading.enumerate()]


def test_syncs_drop_no_lock_of_the_open_store(tmp_path: Path) -> None:
    """Closing any descriptor of the file would. Then the last connection of another program deletes the log."""
    path = tmp_path / "x.db"
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM session').fetchone()"
    connection = WriteConnection(str(path), node_id="n", at=1.0, snapshots=Snapshots())
    connection.open()
    try:
        connection._sync()
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
        assert path.with_name("x.db-wal").exists()
    finally:
        connection.close()
