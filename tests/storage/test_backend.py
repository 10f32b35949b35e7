"""A new kind of store needs only a backend: this one keeps the tables in memory, behind a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from holdfast.errors import StorageError, StoreLocked
from holdfast.storage.backend import Backend, Counters, Reads, Tables
from holdfast.storage.memory.reads import MemoryReads
from holdfast.storage.memory.tables import MemoryTables
from holdfast.storage.port import Store, StoreHealth
from holdfast.testing.suites.store import STORE_CHECKS, run_store_check

T = TypeVar("T")


class ThreadBackend:
    """Tables that only one thread touches, as a database's client does."""

    engine = "thread"
    cluster = None
    path = ""
    version = "1"

    def __init__(self) -> None:
        self._tables = MemoryTables()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def counters(self) -> Counters:
        return self._tables.counters

    async def open(self, *, node_id: str, at: float) -> None:
        if self._thread is not None:
            raise StoreLocked("it is open")
        self._thread = ThreadPoolExecutor(1)
        self._tables.epoch += 1

    async def close(self) -> None:
        if self._thread is not None:
            thread = self._thread
            await self._submit(lambda: None)
            self._thread = None
            thread.shutdown()

    def health(self) -> StoreHealth:
        return StoreHealth()

    def write(self, verb: str, action: Callable[[Tables], T]) -> asyncio.Future[T]:
        def transact() -> T:
            result = action(self._tables)
            self._tables.counters.commits += 1
            return result

        return self._submit(transact)

    def read(self, query: Callable[[Reads], T]) -> asyncio.Future[T]:
        return self._submit(lambda: query(MemoryReads(self._tables)))

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._thread is None:
            future.set_exception(StorageError("the store is not open"))
        else:
            self._thread.submit(call).add_done_callback(lambda done: loop.call_soon_threadsafe(settle, future, done))
        return future


def settle(future: asyncio.Future[T], done: Future[T]) -> None:
    if future.done():  # its caller has gone
        return
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_a_store_over_a_third_backend_keeps_every_rule(check):
    backend: Backend = ThreadBackend()
    run_store_check(check, lambda: Store(backend))
