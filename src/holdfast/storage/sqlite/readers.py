"""Reader threads of a SQLite store, each with its own connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from holdfast.clock import system_clock
from holdfast.storage.backend import Reads
from holdfast.storage.sql.reads import SqlReads
from holdfast.storage.sqlite import errors
from holdfast.storage.sqlite.database import SqliteDatabase, connect
from holdfast.storage.sqlite.private_file import set_journal_aside
from holdfast.storage.sqlite.snapshots import Snapshots
from holdfast.storage.sqlite.writer import call_loop, fail, succeed

__all__ = ["Readers"]

_T = TypeVar("_T")

_READS_TOGETHER: Final = 32
_LONG_READ_S: Final = 0.001
"""Threshold for long reads. A long read may be large, so its result is delivered at once, without further reads."""


class Readers:
    """Reader threads, each with its own connection. A thread delivers results of short reads to the loop in batches."""

    def __init__(self, path: str, count: int, snapshots: Snapshots) -> None:
        self._path = path
        self._snapshots = snapshots
        self._loop = asyncio.get_running_loop()
        self._requests: SimpleQueue[tuple[Callable[[Reads], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._ended: list[asyncio.Future[None]] = [self._loop.create_future() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(ended,), name=f"holdfast-reader-{n}", daemon=True)
            for n, ended in enumerate(self._ended, 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, query: Callable[[Reads], _T]) -> asyncio.Future[_T]:
        """Return a future for the result or error of `query`."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self._requests.put((query, future))
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
                    query, future = request
                    began = system_clock.monotonic()
                    try:
                        if connection is None:
                            set_journal_aside(self._path)
                            connection = connect(self._path)
                            connection.execute("PRAGMA query_only = ON")
                            connection.execute("PRAGMA cache_size = -4096")
                        reads = SqlReads(SqliteDatabase(connection))
                        answers.append((future, self._snapshots.read(connection, partial(query, reads)), None))
                    except Exception as error:
                        answers.append((future, None, errors.translate(error, self._path)))
                    if len(answers) == _READS_TOGETHER or system_clock.monotonic() - began > _LONG_READ_S:
                        break
                    try:
                        request = requests.get_nowait()
                    except Empty:
                        break
                else:
                    ending = True
                if answers:
                    del query, future  # free the result before waiting for the next request
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
