"""Group commit for an SQL database: the single writer thread of a node, and its event loop side.

How a write works:

1. `Writer.submit` puts the write into a buffer on the loop's side and returns a future.
2. Once no batch is in flight, up to ``_BATCH_LIMIT`` buffered writes are passed to the thread as one batch, which is
   written in one transaction with one sync to disk.
3. One callback in the loop sends the next batch, and resolves the futures of the written batch in order.

Invariants:

- A write's future is resolved only after its transaction is durable, whether or not its caller still waits.
- An action that refuses its write (raises a `HoldfastError`) has changed nothing, so the rest of the batch continues.
- After any other error, the whole batch is rolled back, and the connection decides what happens next. Usually the
  writes are retried one by one, each in a separate transaction, so that only the faulty write fails.
- Between batches, the thread merges small rows of events, in steps with a transaction each, so a batch waits for at
  most one step. If a step fails, its pass ends and leaves the rows as they are.
- If this error handling itself fails, the thread ends, and all waiting and all future writes fail.
- A loop that never idles would keep the GIL from the thread: each of the thread's calls into SQLite releases the GIL
  and may then wait up to 5 ms to reacquire it. So if a batch takes long, the loop yields the GIL: it blocks until the
  thread has prepared the batch, for at most 2 ms at a time. While the disk syncs, the loop sleeps for a few
  microseconds at a time, so that the thread can report the result. An idle loop has nothing else to do in this time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.backend import Tables
from holdfast.storage.sql.tables import SqlTables

__all__ = ["DatabaseConnection", "FailureStep", "Write", "Writer", "call_loop", "fail", "succeed"]

_T = TypeVar("_T")

_BATCH_LIMIT: Final = 512
_BUFFER_LIMIT: Final = 65_536
SLOW_BATCH_S: Final = 0.001
GIL_YIELD_S: Final = 0.002
GIL_NAP_S: Final = 20e-6
GIL_YIELD_EVERY_S: Final = 0.001
"""Interval between GIL yields. Loop timers here use at least 1 ms, because loops round shorter delays to zero."""


class Write(NamedTuple):
    """A pending write: the name of the store's method (``verb``), the action to run, and the future to resolve."""

    verb: str
    action: Callable[[Tables], Any]
    future: asyncio.Future[Any]


FailureStep = Literal["retry", "split", "fail"]
"""Next step after a failed transaction: retry the whole batch, retry its writes one by one, or fail all its writes. A
single write that would be split fails."""
_Outcome = tuple[Any, BaseException | None]
"""The result of a write, and the error that it failed with."""


class DatabaseConnection(Protocol):
    """Database side of the writer. Only the writer's thread calls its methods."""

    def open(self) -> SqlTables:
        """Open the database for writing. If this fails, `Writer.open` raises the translated error."""
        ...

    def begin(self, verbs: Sequence[str]) -> None:
        """Begin a transaction for writes of these verbs."""
        ...

    def commit(self) -> None:
        """Make the transaction durable."""
        ...

    def roll_back(self) -> None:
        """Roll the transaction back, if one is open."""
        ...

    def after_failure(self, error: Exception, attempt: int, writes: int) -> FailureStep:
        """Decide what to do with a batch whose transaction failed and was rolled back; may block before a retry.

        Parameters:
            error: the error that the transaction failed with.
            attempt: number of times that this batch was tried, from 1.
            writes: number of writes in the batch.
        """
        ...

    def translate(self, error: Exception) -> Exception:
        """Translate a database error to the error that callers get."""
        ...

    def passing(self, point: str, verbs: Sequence[str]) -> None:
        """Report that writes of these verbs have reached a point.

        The point is ``before_write``, ``before_commit`` or ``after_commit``.
        """
        ...

    def close(self) -> None:
        """Close the database."""
        ...


class Writer:
    """Group commit of writes to one database, as described in the module.

    Parameters:
        connection: connection to the database, used only by the writer thread.
        name: name of the writer thread.
    """

    def __init__(self, connection: DatabaseConnection, *, name: str) -> None:
        self._connection = connection
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._batches: SimpleQueue[list[Write] | None] = SimpleQueue()
        self._buffer: deque[Write] = deque()
        self._in_flight = False
        self._broken: StorageError | None = None
        self._sent_at = 0.0
        self._watching = False
        self._preparing = threading.Lock()  # the loop takes it for each batch, the thread releases it before the sync
        self._unprepared = False  # whether the thread must still release it; the loop holds it for a moment too
        self._scheduled = False
        self._closing = False
        self._ended: asyncio.Future[None] | None = None
        self.gil_yields = 0

    async def open(self) -> SqlTables:
        """Start the thread and open the database in it. Raises the translated errors of `DatabaseConnection.open`."""
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[SqlTables] = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, opened, self._ended), name=self._name, daemon=True
        )
        self._thread.start()
        return await asyncio.shield(opened)

    def submit(self, verb: str, action: Callable[[Tables], _T]) -> asyncio.Future[_T]:
        """Submit a write to the thread; cancelling the returned future does not undo the write.

        The future fails with the `HoldfastError` of a refused write, a database error translated by
        `DatabaseConnection.translate`, or a `StorageError` if the store is closed, too many writes wait or the thread
        has failed. Nothing is raised directly, because callbacks write too.
        """
        loop = self._loop
        future: asyncio.Future[_T] = (loop or asyncio.get_running_loop()).create_future()
        if loop is None or self._closing:
            future.set_exception(StorageError("the store is closed"))
            return future
        if self._broken is not None:
            future.set_exception(self._broken)
            return future
        if len(self._buffer) >= _BUFFER_LIMIT:
            future.set_exception(StorageError(f"{_BUFFER_LIMIT} writes wait for the disk", hint="retry later"))
            return future
        self._buffer.append(Write(verb, action, future))
        if not self._in_flight and not self._scheduled:
            # At the end of this turn of the loop, so that writes of other tasks in the same turn join the batch.
            self._scheduled = True
            loop.call_soon(self._send_off)
        return future

    async def close(self) -> None:
        """Write everything submitted, then close the database and end the thread, even if the caller is cancelled."""
        thread, ended = self._thread, self._ended
        if thread is None or ended is None:
            return
        if not self._closing:
            self._closing = True
            if not (self._in_flight or self._buffer):
                self._batches.put(None)
        await asyncio.shield(ended)
        thread.join()  # it has nothing left to do

    def _send_off(self) -> None:
        self._scheduled = False
        if self._in_flight or not self._buffer:
            return
        buffer = self._buffer
        if len(buffer) <= _BATCH_LIMIT:
            batch = list(buffer)
            buffer.clear()
        else:
            batch = [buffer.popleft() for _ in range(_BATCH_LIMIT)]
        self._in_flight = True
        assert self._loop is not None
        self._sent_at = self._loop.time()
        self._preparing.acquire()  # free, because no batch is in flight
        self._unprepared = True
        self._batches.put(batch)
        if not self._watching:
            self._watching = True
            self._loop.call_later(SLOW_BATCH_S, self._yield_gil)

    def _yield_gil(self) -> None:
        """Yield the GIL to the thread for a moment, repeatedly while a batch takes long."""
        loop = self._loop
        assert loop is not None
        if not self._in_flight:
            self._watching = False
            return
        if loop.time() < self._sent_at + SLOW_BATCH_S:
            loop.call_later(SLOW_BATCH_S, self._yield_gil)
            return
        self.gil_yields += 1
        if self._preparing.acquire(timeout=GIL_YIELD_S):
            self._preparing.release()
            time.sleep(GIL_NAP_S)  # noqa: TID251 - it is there to block the loop, for less than a tenth of a millisecond
        loop.call_later(GIL_YIELD_EVERY_S, self._yield_gil)

    def _break(self, batch: list[Write], error: BaseException) -> None:
        """Fail all waiting writes, because the thread has failed with this batch."""
        self._broken = StorageError(
            f"the store's writer has failed and accepts no more writes: {type(error).__name__}: {error}",
            hint="restart the host; all writes acknowledged before this error are stored",
        )
        self._broken.__cause__ = error
        self._in_flight = False
        for write in (*batch, *self._buffer):
            fail(write.future, self._broken)
        self._buffer.clear()

    def _deliver(self, batch: list[Write], outcomes: list[_Outcome]) -> None:
        self._in_flight = False
        if self._buffer:
            self._send_off()
        for write, (result, error) in zip(batch, outcomes, strict=True):
            if error is None:
                succeed(write.future, result)
            else:
                fail(write.future, error)
        if self._closing and not self._in_flight:
            self._batches.put(None)

    def _run(
        self, loop: asyncio.AbstractEventLoop, opened: asyncio.Future[SqlTables], ended: asyncio.Future[None]
    ) -> None:
        connection = self._connection
        try:
            tables = connection.open()
        except Exception as error:
            connection.close()
            call_loop(loop, fail, opened, connection.translate(error))
        else:
            call_loop(loop, succeed, opened, tables)
            self._serve(loop, tables)
            connection.close()
        call_loop(loop, succeed, ended, None)

    def _serve(self, loop: asyncio.AbstractEventLoop, tables: SqlTables) -> None:
        while True:
            batch = self._batches.get()
            if batch is None:
                with suppress(Exception):  # the rows stay as they are
                    while self._merge_step(loop, tables):
                        pass
                break
            try:
                outcomes = self._write(tables, batch)
            except BaseException as error:
                call_loop(loop, self._break, batch, error)
                break
            self._prepared()
            if not call_loop(loop, self._deliver, batch, outcomes):
                break
            try:
                while tables.merger.is_due and self._merge_step(loop, tables) and self._batches.empty():
                    pass
            except BaseException as error:
                call_loop(loop, self._break, self._batches.get() or [], error)
                break

    def _merge_step(self, loop: asyncio.AbstractEventLoop, tables: SqlTables) -> bool:
        """Do a step of merging events in a transaction; return whether rows to merge remain. A failed pass ends."""
        step = Write("merge", lambda _: tables.merger.step(), loop.create_future())
        ((remain, _),) = self._write(tables, [step])
        return bool(remain)

    def _prepared(self) -> None:
        if self._unprepared:
            self._unprepared = False
            self._preparing.release()

    def _write(self, tables: SqlTables, batch: list[Write], attempt: int = 1) -> list[_Outcome]:
        connection = self._connection
        counters = tables.counters
        before = (counters.commits, counters.stale_writes_refused, counters.duplicates_prevented)
        verbs = [write.verb for write in batch]
        outcomes: list[_Outcome] = []
        try:
            connection.begin(verbs)
            for write in batch:
                try:
                    connection.passing("before_write", (write.verb,))
                    outcomes.append((write.action(tables), None))
                    counters.commits += 1
                except HoldfastError as refusal:
                    # The frames it passed through hold it too, and with it the whole batch, until a garbage collection.
                    outcomes.append((None, refusal.with_traceback(None)))
            tables.finish()
            connection.passing("before_commit", verbs)
            self._prepared()
            connection.commit()
        except Exception as error:
            connection.roll_back()
            tables.forget()
            counters.commits, counters.stale_writes_refused, counters.duplicates_prevented = before
            step = connection.after_failure(error, attempt, len(batch))
            if step == "retry":
                return self._write(tables, batch, attempt + 1)
            if step == "fail" or len(batch) == 1:
                return [(None, connection.translate(error))] * len(batch)
            return [outcome for write in batch for outcome in self._write(tables, [write])]
        counters.batches += 1
        tables.trim()
        try:
            connection.passing("after_commit", verbs)
        except Exception as error:
            return [(None, connection.translate(error))] * len(batch)
        return outcomes


def call_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> bool:
    """Call into the loop from the thread; return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        return False
    return True


def succeed(future: asyncio.Future[_T], result: _T) -> None:
    """Set a future's result, unless the future is already done (for example, cancelled)."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set a future's error, unless the future is already done (for example, cancelled)."""
    if not future.done():
        future.set_exception(error)
