# ruff: noqa: D102 - the port documents the verbs
"""The store in one SQLite file: durable on one machine, for one host at a time.

- All writes go through one thread (`holdfast.storage.writer`) as group commits, WAL, ``synchronous=FULL``.
- Reads have their own threads and connections and see what is committed, so also everything already answered.
- A lock on ``<file>-lock`` refuses a second host, in another process or in this one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from holdfast import failpoints
from holdfast.clock import system_clock
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    StorageError,
    StoreCorrupt,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
)
from holdfast.protocol.events import Stored
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    MailboxItem,
    Question,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import ScheduleView
from holdfast.protocol.stopping import Cause
from holdfast.storage import scheduling, sql, verbs
from holdfast.storage.checkpoints import Checkpoints
from holdfast.storage.filelock import FileLock
from holdfast.storage.migrating import copy_before_migration, move_kept
from holdfast.storage.port import (
    ALL_BYTES,
    ALL_ENTRIES,
    Answered,
    Appended,
    Claim,
    Committed,
    DueQuestion,
    DueSchedule,
    Edited,
    EditHistory,
    Fire,
    Fired,
    Interrupt,
    Interrupted,
    KeyRecord,
    Lease,
    NotReady,
    Parked,
    PutSchedule,
    Ready,
    RunCommit,
    Send,
    SendResult,
    Steered,
    Stopped,
    StoreInfo,
)
from holdfast.storage.private_file import create_private_file, prepare_folder, set_journal_aside, store_path
from holdfast.storage.records import mailbox_items
from holdfast.storage.sql_reads import SqlReads
from holdfast.storage.sql_rows import LARGE_BYTES
from holdfast.storage.tables import SessionChanged, SqlTables
from holdfast.storage.writer import Writer, call_loop, fail, succeed

__all__ = ["SCHEMA_VERSION", "SqliteStore"]

_T = TypeVar("_T")

_log = logging.getLogger("holdfast.storage")

SCHEMA_VERSION: Final = 5
_APPLICATION_ID: Final = 0x484F4C44
_OLDEST_SQLITE: Final = (3, 35, 0)
_READERS: Final = 2
_READS_TOGETHER: Final = 32
_LONG_READ_S: Final = 0.001
"""A read slower than this may be large: its result is returned at once and not held in memory for others."""
_ROWS_TOGETHER: Final = 64
_PIECE_BYTES: Final = 1 << 20
_TRIED_BYTES: Final = 65_536
_STATEMENTS_KEPT: Final = 8 * _ROWS_TOGETHER

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
    "rescue",
    "restart",
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


class _SqliteDatabase:
    """See `holdfast.storage.sql_rows.Database`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def query(self, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql.block(name), parameters).fetchall()

    def rows(self, name: str, *parameters: object) -> Generator[tuple[Any, ...]]:
        cursor = self._connection.execute(sql.block(name), parameters)
        try:
            yield from cursor
        finally:
            cursor.close()

    def write(self, name: str, *parameters: object) -> int:
        written = self._connection.execute(sql.block(name), parameters).rowcount
        if _size(parameters) > LARGE_BYTES:
            self._unbind(sql.block(name), len(parameters))
        return written

    def write_rows(self, name: str, rows: Sequence[tuple[object, ...]], *, large: bool) -> int:
        # One long statement instead of many short ones: each costs the thread the GIL.
        if not large and len(rows) <= _ROWS_TOGETHER:
            return self._connection.execute(sql.many(name, len(rows)), tuple(chain.from_iterable(rows))).rowcount
        written = 0
        for some, size in _parts(rows):
            text = sql.many(name, len(some))
            flat = tuple(chain.from_iterable(some))
            written += self._connection.execute(text, flat).rowcount
            if size > LARGE_BYTES:
                self._unbind(text, len(flat))
        return written

    def write_large(self, name: str, *parameters: object, value: bytes | bytearray) -> None:
        # Binding it to a statement would copy it while holding the GIL.
        head, _, tail = sql.block(name).rpartition("?")
        row = self._connection.execute(f"{head}zeroblob(?){tail}", (*parameters, len(value))).lastrowid
        assert row is not None
        view = memoryview(value)
        with self._connection.blobopen(*sql.last_column(name), row) as blob:
            for start in range(0, len(view), _PIECE_BYTES):
                blob.write(view[start : start + _PIECE_BYTES])

    def read_large(self, name: str, *parameters: object, start: int, size: int) -> bytes | None:
        table, column = sql.last_column(name)
        row_of = sql.block(name).replace(column, "rowid", 1)
        with closing(self._connection.execute(row_of, parameters)) as rows:
            for (row,) in rows:
                with self._connection.blobopen(table, column, row, readonly=True) as blob:
                    blob.seek(min(start, len(blob)))
                    return blob.read(size)
        return None

    def _unbind(self, text: str, parameters: int) -> None:
        """Free the last parameters of a cached statement, which keeps a copy of them.

        SQLite's module has no call for that, but nulls replace them; a row of nulls is refused, or matches no other.
        """
        with suppress(sqlite3.IntegrityError):
            self._connection.execute(text, (None,) * parameters)


def _size(values: Iterable[object]) -> int:
    return sum([len(value) for value in values if isinstance(value, bytes | str)])


def _parts(rows: Sequence[tuple[object, ...]]) -> Iterator[tuple[list[tuple[object, ...]], int]]:
    """Yield the rows in lists of limited length and size, each with its size."""
    some: list[tuple[object, ...]] = []
    size = 0
    for row in rows:
        some.append(row)
        size += _size(row)
        if len(some) == _ROWS_TOGETHER or size > LARGE_BYTES:
            yield some, size
            some, size = [], 0
    if some:
        yield some, size


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS_KEPT, timeout=5.0
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
    except BaseException:
        connection.close()
        raise
    return connection


def translate(error: Exception, path: str) -> Exception:
    """Return Holdfast's error for one of SQLite's."""
    if isinstance(error, SessionChanged):
        return StorageError("a session was changed concurrently; nothing was written", hint="retry")
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", 0) or 0
    match code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return _caused(StoreFull(f"the disk of {path} is full; nothing was written"), error)
        case sqlite3.SQLITE_IOERR:
            return _caused(_of_disk(error, path), error)
        case sqlite3.SQLITE_READONLY:
            return _caused(StoreReadOnly(f"{path} is not writable"), error)
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return _caused(StoreReadOnly(f"{path}: open failed: {error}"), error)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return _caused(StoreCorrupt(f"{path} is damaged or is not a database: {error}"), error)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return _caused(StoreLocked(f"another program holds a lock on {path}"), error)
        case _:
            return _caused(StorageError(f"{path}: {error}; nothing was written"), error)


def _caused(error: HoldfastError, cause: Exception) -> HoldfastError:
    error.__cause__ = cause
    return error


def _of_disk(error: sqlite3.Error, path: str) -> StorageError:
    """Return the error for a disk error; SQLite does not report which it was, so try it out."""
    match _write_errno(path):
        case 0:
            return StorageError(f"{path}: {error}; nothing was written")
        case errno.ENOSPC:
            return StoreFull(f"the disk of {path} is full; nothing was written")
        case errno.EDQUOT | errno.EFBIG as number:
            return StoreFull(f"no space left in {path}: {os.strerror(number)}; nothing was written")
        case errno.EROFS | errno.EACCES | errno.EPERM as number:
            return StoreReadOnly(f"{path} is not writable: {os.strerror(number)}")
        case number:
            return StorageError(f"{path}: {os.strerror(number)}; nothing was written")


def _write_errno(path: str) -> int:
    """Write beside the file, and return the errno of the failure, or 0."""
    folder = os.path.dirname(path)
    try:
        if os.statvfs(folder).f_bavail == 0:
            return errno.ENOSPC
        largest = max(os.stat(file).st_size for file in (path, path + "-wal") if os.path.exists(file))
        if largest + _TRIED_BYTES > resource.getrlimit(resource.RLIMIT_FSIZE)[0] >= 0:
            return errno.EFBIG
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        return error.errno or 0
    return 0


def _identity(path: str) -> tuple[int, int]:
    """Return the identity of the file with this name; (0, 0) for a missing one."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


class _WritingConnection:
    """Connection of the writer thread (see `holdfast.storage.writer.Connection`)."""

    def __init__(self, path: str, *, node_id: str, at: float) -> None:
        self._path = path
        self._lock = FileLock(path + "-lock")
        self._node_id = node_id
        self._at = at
        self._connection: sqlite3.Connection | None = None
        self._checkpoints = Checkpoints(lambda: _connect(path))
        self._file = (0, 0)
        self._verbs: Sequence[str] = ()

    def open(self) -> SqlTables:
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise ConfigurationError(
                f"this Python has SQLite {sqlite3.sqlite_version}, which is too old",
                hint=f"use a Python with SQLite {'.'.join(map(str, _OLDEST_SQLITE))} or newer",
            )
        prepare_folder(os.path.dirname(self._path))
        self._lock.acquire()
        create_private_file(self._path)
        set_journal_aside(self._path)
        self._connection = connection = _connect(self._path)
        version = self._check(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        self._file = _identity(self._path)
        connection.execute("PRAGMA journal_size_limit = 67108864")
        database = _SqliteDatabase(connection)
        if 0 < version < SCHEMA_VERSION:
            copy = copy_before_migration(connection, self._path, version)
            _log.warning("migrating %s to a newer schema; the older Holdfast can open the copy %s", self._path, copy)
        self.begin(("open",))
        _passing("before_write", self._verbs)
        blocks = [f"migrate_{older}" for older in range(version, SCHEMA_VERSION)] if version else ["schema"]
        for block in blocks:
            for statement in sql.block(block).split(";\n"):
                connection.execute(statement)
        if 0 < version < 4:
            move_kept(database)
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
            last_number=sequence[0] if sequence else 0,
            between=lambda: _passing("between_writes", self._verbs),
        )

    def _check(self, connection: sqlite3.Connection) -> int:
        """Return the schema version: 0 for a new file."""
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
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        assert self._connection is not None
        self._connection.execute("COMMIT")
        self._checkpoints.committed()

    def roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            # Callers get the original error; a transaction that stays open makes the next one fail.
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def translate(self, error: Exception) -> Exception:
        return translate(error, self._path)

    def passing(self, point: str, verbs: Sequence[str]) -> None:
        _passing(point, verbs)

    def close(self) -> None:
        self._checkpoints.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lock.release()


class _Readers:
    """Reader threads with a connection each; results that are ready together are returned in one call."""

    def __init__(self, path: str, count: int) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._requests: SimpleQueue[tuple[Callable[[SqlReads], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._ended: list[asyncio.Future[None]] = [self._loop.create_future() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(ended,), name=f"holdfast-reader-{n}", daemon=True)
            for n, ended in enumerate(self._ended, 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Callable[[SqlReads], _T]) -> asyncio.Future[_T]:
        """Return a future for the result or error of `read`."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self._requests.put((read, future))
        return future

    async def close(self) -> None:
        """Answer pending requests, then end the threads."""
        for _ in self._threads:
            self._requests.put(None)
        await asyncio.shield(asyncio.wait(self._ended))
        for thread in self._threads:
            thread.join()  # they have nothing left to do

    def _run(self, ended: asyncio.Future[None]) -> None:
        connection = None
        requests = self._requests
        ending = False
        try:
            while not ending:
                request = requests.get()
                answers: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
                while request is not None:
                    read, future = request
                    began = system_clock.monotonic()
                    try:
                        if connection is None:
                            connection = _connect(self._path)
                            connection.execute("PRAGMA query_only = ON")
                            connection.execute("PRAGMA cache_size = -4096")
                        answers.append((future, read(SqlReads(_SqliteDatabase(connection))), None))
                    except Exception as error:
                        answers.append((future, None, translate(error, self._path)))
                    if len(answers) == _READS_TOGETHER or system_clock.monotonic() - began > _LONG_READ_S:
                        break
                    try:
                        request = requests.get_nowait()
                    except Empty:
                        break
                else:
                    ending = True
                if answers:
                    del read, future  # free the result before waiting for the next request
                    if not call_loop(self._loop, _answer, answers):
                        ending = True
                request = None
                del answers
        finally:
            if connection is not None:
                connection.close()
            call_loop(self._loop, succeed, ended, None)


def _answer(answers: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    for future, result, error in answers:
        if error is None:
            succeed(future, result)
        else:
            fail(future, error)


class SqliteStore:
    """A `Store` in one SQLite file.

    Parameters:
        path: path of the file; created if missing. Beside it are ``-wal``, ``-shm`` and ``-lock``.
    """

    def __init__(self, path: str) -> None:
        self._path = store_path(path)
        self._writer: Writer | None = None
        self._readers: _Readers | None = None
        self._tables: SqlTables | None = None

    async def open(self, *, node_id: str, at: float) -> None:
        if self._writer is not None:
            raise StoreLocked(f"{self._path} is already open")
        writer = Writer(_WritingConnection(self._path, node_id=node_id, at=at), name="holdfast-writer")
        try:
            self._tables = await writer.open()
        except BaseException:
            await writer.close()
            raise
        self._writer = writer
        self._readers = _Readers(self._path, _READERS)

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        readers, self._readers = self._readers, None
        if writer is not None and readers is not None:
            try:
                await readers.close()
            finally:
                await writer.close()

    def _write(self, verb: str, action: Callable[[SqlTables], _T]) -> asyncio.Future[_T]:
        if self._writer is None:
            future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
            future.set_exception(StorageError("the store is not open"))
            return future
        return self._writer.submit(verb, action)

    async def _read(self, read: Callable[[SqlReads], _T]) -> _T:
        if self._readers is None:
            raise StorageError("the store is not open")
        return await self._readers.submit(read)

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return self._write("send", lambda tables: verbs.send(tables, request))

    def claim(self, session: int, *, run_id: str, at: float) -> asyncio.Future[Claim | NotReady]:
        return self._write("claim", lambda tables: verbs.claim(tables, session, run_id, at))

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        return self._write("append", lambda tables: verbs.append(tables, lease, events, nth, stored_limit))

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        return self._write("commit_run", lambda tables: verbs.commit_run(tables, commit))

    def interrupt(self, request: Interrupt) -> asyncio.Future[Interrupted]:
        return self._write("interrupt", lambda tables: verbs.interrupt(tables, request))

    def stop_session(self, request: Interrupt) -> asyncio.Future[Stopped]:
        return self._write("stop_session", lambda tables: verbs.stop_session(tables, request))

    def withdraw(
        self, principal: str, key: str, message_id: str, *, at: float
    ) -> asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]:
        return self._write("withdraw", lambda tables: verbs.withdraw(tables, principal, key, message_id, at))

    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        return self._write("delete_session", lambda tables: verbs.delete_session(tables, principal, key, at, cause))

    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        return self._write("steer", lambda tables: verbs.steer(tables, lease, step, at))

    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        return self._write("suspend", lambda tables: verbs.suspend(tables, lease, question))

    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        return self._write("answer", lambda tables: verbs.answer(tables, principal, key, answer))

    def park(self, lease: Lease, *, at: float) -> asyncio.Future[Parked]:
        return self._write("park", lambda tables: verbs.park(tables, lease, at))

    async def questions(self, session: int) -> Sequence[Question]:
        return await self._read(lambda reads: reads.questions(session))

    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        return await self._read(lambda reads: reads.due_questions(before=before, limit=limit))

    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        return self._write("edit_history", lambda tables: verbs.edit_history(tables, request))

    def add_attachment(
        self,
        principal: str,
        attachment: Attachment,
        body: bytes | bytearray,
        *,
        at: float,
        limit_bytes: int,
        stored_limit: int = ALL_BYTES,
    ) -> asyncio.Future[Attachment]:
        return self._write(
            "add_attachment",
            lambda tables: verbs.add_attachment(tables, principal, attachment, body, at, limit_bytes, stored_limit),
        )

    async def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        return await self._read(lambda reads: reads.attachment_about(principal, digest))

    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        return await self._read(lambda reads: reads.attachment(principal, digest))

    async def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        return await self._read(lambda reads: reads.attachment_part(principal, digest, start=start, size=size))

    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        return self._write("put_schedule", lambda tables: scheduling.put_schedule(tables, request))

    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        return self._write(
            "pause_schedule", lambda tables: scheduling.pause_schedule(tables, principal, schedule_id, paused, at)
        )

    def delete_schedule(self, principal: str, schedule_id: str) -> asyncio.Future[ScheduleView]:
        return self._write("delete_schedule", lambda tables: scheduling.delete_schedule(tables, principal, schedule_id))

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        return self._write("fire_schedule", lambda tables: scheduling.fire_schedule(tables, request))

    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        return await self._read(lambda reads: reads.due_schedules(now=now, limit=limit))

    async def next_schedule(self) -> float | None:
        return await self._read(lambda reads: reads.next_schedule())

    async def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        return await self._read(lambda reads: reads.schedule(principal, schedule_id))

    async def schedules(
        self, *, principal: str | None, limit: int, session: str | None = None
    ) -> Sequence[ScheduleView]:
        return await self._read(lambda reads: reads.schedules(principal=principal, session=session, limit=limit))

    async def rescue(self, *, at: float) -> Sequence[Claim]:
        return await self._write("rescue", lambda tables: verbs.rescue(tables, at))

    def restart(self, lease: Lease, *, at: float, discard_from: int | None = None) -> asyncio.Future[Appended]:
        return self._write("restart", lambda tables: verbs.restart(tables, lease, at, discard_from))

    async def ready(self, *, limit: int) -> Sequence[Ready]:
        return await self._read(lambda reads: reads.ready(limit=limit))

    async def stored_bytes(self, principal: str) -> int:
        return await self._read(lambda reads: reads.stored_bytes(principal))

    async def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        return await self._read(lambda reads: reads.most_stored(limit=limit))

    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        return await self._read(lambda reads: reads.events(session, after=after, limit=limit, limit_bytes=limit_bytes))

    async def oldest_seq(self, session: int) -> int:
        return await self._read(lambda reads: reads.oldest_seq(session))

    async def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        return await self._read(lambda reads: reads.run_events(session, run_id))

    async def transcript(
        self, session: int, *, after: int = 0, limit: int = ALL_ENTRIES, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Entry]:
        return await self._read(
            lambda reads: reads.transcript(session, after=after, limit=limit, limit_bytes=limit_bytes)
        )

    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        return await self._read(lambda reads: reads.transcript_within(session, limit_bytes=limit_bytes))

    async def kept(self, session: int, n: int) -> str:
        return await self._read(lambda reads: reads.kept(session, n))

    async def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        return await self._read(lambda reads: reads.find_session(principal, key))

    async def sessions(
        self, *, principal: str | None, limit: int, before: float | None = None
    ) -> Sequence[SessionView]:
        return await self._read(lambda reads: reads.sessions(principal=principal, limit=limit, before=before))

    async def mailbox(self, session: int) -> Sequence[MailboxItem]:
        return await self._read(lambda reads: mailbox_items(reads.mailbox(session)))

    async def settlement(self, session: int, message_id: str) -> Settlement | None:
        return await self._read(lambda reads: reads.settlement(session, message_id))

    async def run(self, session: int, run_id: str) -> RunView | None:
        return await self._read(lambda reads: reads.run(session, run_id))

    async def runs(self, session: int, *, limit: int = 100) -> Sequence[RunView]:
        return await self._read(lambda reads: reads.runs(session, limit=limit))

    async def prune(
        self,
        *,
        events_before: float,
        tombstones_before: float,
        idempotency_before: float,
        attachments_before: float = 0.0,
    ) -> int:
        def some(tables: SqlTables, *, after: int) -> tuple[int, int | None]:
            return tables.prune(
                events_before=events_before,
                tombstones_before=tombstones_before,
                idempotency_before=idempotency_before,
                attachments_before=attachments_before,
                after=after,
            )

        total, after = 0, 0
        while True:  # in small transactions, so that others get their turn
            dropped, upto = await self._write("prune", partial(some, after=after))
            total += dropped
            if upto is None:
                return total
            after = upto

    async def add_key(self, record: KeyRecord) -> None:
        await self._write("add_key", lambda tables: tables.add_key(record))

    async def keys(self) -> Sequence[KeyRecord]:
        return await self._read(lambda reads: reads.keys())

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        return await self._write("revoke_key", lambda tables: tables.revoke_key(key_id, at))

    async def info(self) -> StoreInfo:
        live = await self._read(lambda reads: reads.live_sessions())
        assert self._tables is not None
        counters = self._tables.counters
        return StoreInfo(
            engine="sqlite",
            path=self._path,
            version=f"{SCHEMA_VERSION} (SQLite {sqlite3.sqlite_version})",
            commits=counters.commits,
            batches=counters.batches,
            sessions=live,
            stale_writes_refused=counters.stale_writes_refused,
            duplicates_prevented=counters.duplicates_prevented,
        )
