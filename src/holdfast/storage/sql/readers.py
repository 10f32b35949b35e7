"""Reader threads of an SQL store, each with its own connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from holdfast.clock import system_clock
from holdfast.storage.backend import Reads
from holdfast.storage.sql.writer import call_loop, fail, succeed

__all__ = ["ReadConnection", "Readers"]

_T = TypeVar("_T")

_READS_TOGETHER: Final = 32
_LONG_READ_S: Final = 0.001
"""Threshold for long reads. A long read may be large, so its result is delivered at once, without further reads."""


class ReadConnection(Protocol):
    """Database side of a reader thread. Only that thread calls its methods."""

    def read(self, query: Callable[[Reads], _T]) -> _T:
        """Connect if necessary, and run a query. Raises the error that callers get."""
        ...

    def close(self) -> None:
        """Close the connection, if there is one."""
        ...


class Readers:
    """Reader threads, each with its own connection. A thread delivers results of short reads to the loop in batches.

    Parameters:
        connections: one connection for each thread.
    """

    def __init__(self, *connections: ReadConnection) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: SimpleQueue[tuple[Callable[[Reads], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._ended: list[asyncio.Future[None]] = [self._loop.create_future() for _ in connections]
        self._threads = [
            threading.Thread(target=self._run, args=(connection, ended), name=f"holdfast-reader-{n}", daemon=True)
            for n, (connection, ended) in enumerate(zip(connections, self._ended, strict=True), 1)
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

    def _run(self, connection: ReadConnection, ended: asyncio.Future[None]) -> None:
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
                        answers.append((future, connection.read(query), None))
                    except Exception as error:
                        answers.append((future, None, error))
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
            connection.close()
            call_loop(self._loop, succeed, ended, None)


def _answer(answers: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    for future, result, error in answers:
        if error is None:
            succeed(future, result)
        else:
            fail(future, error)
