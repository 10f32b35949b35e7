# ruff: noqa: D102 - `Backend` documents its methods
"""The backend that keeps its rows in dictionaries.

Each action runs in one step of the event loop, so no other code runs between the action's checks and its changes.
Accepted data lives as long as the backend object. The backend may be closed and opened again, which begins a new epoch;
the data does not outlive the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import StorageError, StoreLocked
from holdfast.storage.backend import Counters, Reads, Tables
from holdfast.storage.memory.reads import MemoryReads
from holdfast.storage.memory.tables import MemoryTables
from holdfast.storage.values import StoreHealth

__all__ = ["MemoryBackend"]

_T = TypeVar("_T")


class MemoryBackend:
    """A `holdfast.storage.backend.Backend` in memory.

    Parameters:
        yielding: whether a separate task runs the writes one after another, like the writer of a real store, so that
            other tasks run in between. Tests use this to explore interleavings.
    """

    engine = "memory"
    path = ""
    version = "1"
    cluster = None

    def __init__(self, *, yielding: bool = False) -> None:
        self.tables = MemoryTables()
        self._yielding = yielding
        self.is_open = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._wakeup: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def counters(self) -> Counters:
        return self.tables.counters

    async def open(self, *, node_id: str, at: float) -> None:
        if self.is_open:
            raise StoreLocked("this memory store is already open")
        self.is_open = True
        self.tables.epoch += 1
        if self._yielding:
            self._closing = False
            self._writer = asyncio.get_running_loop().create_task(self._write_in_turn())

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._closing = True
            self._wake_writer()
            await writer
        self.is_open = False

    def health(self) -> StoreHealth:
        return StoreHealth()

    def write(self, verb: str, action: Callable[[Tables], _T]) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        if self._writer is None:
            self._run(action, future)
        else:
            self._waiting.append(lambda: self._run(action, future))
            self._wake_writer()
        return future

    async def read(self, query: Callable[[Reads], _T]) -> _T:
        if self._yielding:
            await asyncio.sleep(0)
        if not self.is_open:
            raise StorageError("the store is not open")
        return query(MemoryReads(self.tables))

    def _wake_writer(self) -> None:
        """Wake the writer of a yielding backend."""
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _write_in_turn(self) -> None:
        """Run the submitted writes of a yielding backend until the backend is closing and all writes are done."""
        while True:
            while self._waiting:
                self._waiting.popleft()()
                await asyncio.sleep(0)
            if self._closing:
                return
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup

    def _run(self, action: Callable[[Tables], _T], future: asyncio.Future[_T]) -> None:
        try:
            if not self.is_open:
                raise StorageError("the store is not open")
            result = action(self.tables)
            self.tables.counters.commits += 1
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)
