"""Runs on a store of a million sessions: how long they take at a steady rate, and how long the write-ahead log gets."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from benchmarks.disk import sync_latency_s
from benchmarks.large_store import make_store
from benchmarks.rows import Row, print_rows
from holdfast import Host, Run, Settings, agent
from holdfast.errors import StorageError
from holdfast.storage.backend import Reads
from holdfast.storage.sql.reads import SqlReads
from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.storage.sqlite.database import SqliteDatabase

__all__ = ["rows"]

SESSIONS = 1_000_000
EVENTS = 10_000_000
RATE = 1_000
WARM_S, SECONDS, LOG_S = 5, 30, 600
_SETTINGS = Settings(principal_runs=100_000, principal_sessions=10**8, principal_stored_bytes=10**13)
_COLLECT_AFTER = (10_000, 20, 20)
"""As under ``holdfast serve``: Python's default collects all that a library's user has, for 30 ms every few seconds."""


@agent
async def noop(run: Run) -> str:
    """Answer at once."""
    return "ok"


def _old() -> Callable[[int], str]:
    choose = random.Random(time.time_ns())
    return lambda _: f"s{choose.randrange(1, SESSIONS + 1):08}"


def _fresh() -> Callable[[int], str]:
    tag = time.time_ns()
    return lambda number: f"{tag}-{number}"


async def _open_loop(host: Host, key: Callable[[int], str], seconds: float) -> list[float]:
    """Seconds of runs that come at their own pace, whether earlier ones are done or not."""
    clock = time.monotonic
    taken: list[float] = []

    async def one(due: float, key: str) -> None:
        await host.session(key, principal="p0").ask("x")
        taken.append(clock() - due)

    start = clock() + 0.01
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds * RATE)):
            due = start + number / RATE
            if due > clock():
                await asyncio.sleep(due - clock())
            elif number % 32 == 0:
                await asyncio.sleep(0)  # late: the others need the loop too
            group.create_task(one(due, key(number)))
    return taken


async def _paced(path: Path, sessions: str, key: Callable[[int], str]) -> Row:
    async with Host(noop, store=f"sqlite:///{path}", settings=_SETTINGS) as host:
        await _open_loop(host, key, WARM_S)
        times = sorted(await _open_loop(host, key, SECONDS))
    scheduled = "; with real-time priority" if os.sched_getscheduler(0) == os.SCHED_FIFO else ""
    p50, p99, p999 = (times[int(len(times) * part)] * 1e3 for part in (0.5, 0.99, 0.999))
    return Row(
        name=f"durable run, {RATE:,}/s on {sessions} sessions, {SESSIONS:,} stored, p99",
        value=p99,
        unit="ms",
        target="<= 15",
        met=p99 <= 15,
        note=f"open loop, {SECONDS} s; p50 {p50:.1f}, p99.9 {p999:.1f} ms; fdatasync {sync_latency_s() * 1e3:.2f} ms"
        + scheduled,
    )


def _endless(reads: Reads, stopping: threading.Event) -> None:
    if stopping.is_set():
        return
    assert isinstance(reads, SqlReads)
    assert isinstance(reads._database, SqliteDatabase)
    connection = reads._database._connection
    connection.set_progress_handler(stopping.is_set, 100_000)
    connection.execute(
        "WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g) SELECT count(*) FROM g, session"
    ).fetchone()


async def _log(path: Path) -> Row:
    """The longest log beside a reader that begins its endless read again whenever the store ends it."""
    longest = ended = 0
    stopping = threading.Event()

    async def read(backend: SqliteBackend) -> None:
        nonlocal ended
        while not stopping.is_set():
            try:
                await backend.read(lambda reads: _endless(reads, stopping))
            except StorageError:
                ended += 1

    async def watch() -> None:
        nonlocal longest
        while True:
            longest = max(longest, os.stat(f"{path}-wal").st_size)
            await asyncio.sleep(0.05)

    async with Host(noop, store=f"sqlite:///{path}", settings=_SETTINGS) as host:
        backend = host.store.backend
        assert isinstance(backend, SqliteBackend)
        watcher = asyncio.create_task(watch())
        reader = asyncio.create_task(read(backend))
        began = time.monotonic()
        answered = len(await _open_loop(host, _fresh(), LOG_S))
        took_s = time.monotonic() - began
        stopping.set()
        await reader
        watcher.cancel()
    return Row(
        name=f"the write-ahead log, {RATE:,} runs/s beside an endless read",
        value=longest / 2**20,
        unit="MB",
        target="<= 256",
        met=longest <= 256 * 2**20,
        note=f"the longest within {took_s:.0f} s, {answered:,} runs; {ended} reads ended",
    )


async def _rows(path: Path) -> list[Row]:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    return [await _paced(path, "old", _old()), await _paced(path, "new", _fresh()), await _log(path)]


def rows() -> list[Row]:
    """All rows of this benchmark."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        path = Path(folder) / "large.db"
        make_store(path, sessions=SESSIONS, events=EVENTS)
        return uvloop.run(_rows(path))


if __name__ == "__main__":
    print_rows(rows())
