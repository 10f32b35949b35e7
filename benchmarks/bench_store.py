"""How fast the stores are: against bare loops that write the same rows, and with the event loop saturated."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.disk import sync_latency_s
from benchmarks.rows import Row, print_rows
from holdfast import ids
from holdfast.protocol.events import TextDelta, encode_event
from holdfast.protocol.messages import Entry
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.port import Appended, Claim, RunCommit, Send, Store
from holdfast.storage.sql import statements

SESSIONS = 50


def request_of(key: str) -> Send:
    """A message to a session."""
    return Send(
        principal="p",
        key=key,
        agent=None,
        default_agent="demo",
        message_id=ids.message_id(),
        content="hello",
        policy="queue",
        at=time.time(),
        run_id=ids.run_id(),
    )


async def _cycle(store: Store, key: str) -> None:
    result = await store.send(request_of(key))
    assert result.claim is not None
    entries = [Entry(role="user", content="hello"), Entry(role="assistant", content="hi")]
    lease = result.claim.lease
    await store.commit_run(RunCommit(lease=lease, status="completed", at=time.time(), text="hi", entries=entries))


async def _cycles(store: Store, *, sessions: int, runs: int) -> tuple[float, float]:
    """Seconds and CPU seconds per run, with one task for each session."""

    async def one(key: str, count: int) -> None:
        for _ in range(count):
            await _cycle(store, key)

    await asyncio.gather(*(one(f"k{n}", 2) for n in range(sessions)))
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one(f"k{n}", runs // sessions) for n in range(sessions)))
    done = runs // sessions * sessions
    return (time.perf_counter() - start) / done, (time.process_time() - cpu) / done


def _on_disk(measure: Callable[[SqliteStore], Coroutine[Any, Any, Any]]) -> Any:
    async def main(path: str) -> Any:
        store = SqliteStore(path)
        await store.open(node_id="n", at=time.time())
        try:
            return await measure(store)
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(main(os.path.join(folder, "bench.db")))


def bare_loop_s(batches: int = 400) -> float:
    """Seconds per run of a loop that does nothing but write the rows of a run, for all sessions in one commit."""
    sessions = range(1, SESSIONS + 1)
    live = b'{"agent":"demo","attempt":1,"started_at":1790000000.123456,"started_seq":2,"messages":["%b"]}'
    work = []
    for n in range(batches):
        seq = n * 4 + 1
        begin: dict[str, list[Any]] = {"save_starts": [], "add_plain_messages": [], "add_events": []}
        end: dict[str, list[Any]] = {"save_ends": [], "add_events": [], "add_runs": []}
        for s in sessions:
            m, r = ids.message_id(), ids.run_id()
            run = live % m.encode()
            begin["save_starts"] += (s, n, seq, None, "demo", 1.5, seq + 2, n + 1, 1, r, run)
            begin["add_plain_messages"] += (s, m, seq, 1.5, seq, 0.0, r, b"m" * 130)
            begin["add_events"] += (s, seq + 1, seq, r, 1.5, seq, b"e" * 300)
            end["save_ends"] += (s, n + 1, seq + 2, r, 1.5, seq + 4, n + 2, r, r)
            end["add_events"] += (s, seq + 3, seq + 2, r, 1.5, seq, b"e" * 340)
            end["add_runs"] += (r, s, r, None, n, seq, seq, seq, n, b"v" * 230, b"t" * 90, r, 0, 0)
        work.append((begin, end))
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(os.path.join(folder, "bare.db"), isolation_level=None, cached_statements=256)
        connection.executescript(statements.block("schema"))
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 4000"):
            connection.execute(f"PRAGMA {pragma}")
        for s in sessions:
            connection.execute(
                "INSERT INTO session (session, principal, key, created_at, events_since, listed_at, agent, updated_at,"
                " next_seq, next_n, fence, holder, append_nth, append_seq, sweep, waiting, due_at)"
                " VALUES (?, 'p', ?, 1.0, 1, 1.0, 'demo', 1.0, 1, 1, 0, 0, 0, 0, 0, 0, 0.0)",
                (s, f"k{s}"),
            )
        start = time.perf_counter()
        for batch in work:
            for part in batch:
                connection.execute("BEGIN IMMEDIATE")
                for name, values in part.items():
                    written = connection.execute(statements.many(name, SESSIONS), values).rowcount
                    assert written == SESSIONS
                connection.execute("COMMIT")
        elapsed = time.perf_counter() - start
        connection.close()
    return elapsed / (batches * SESSIONS)


def memory_rows(runs: int = 20_000) -> list[Row]:
    """A run in the memory store: send and commit."""

    async def main() -> tuple[float, float]:
        store = MemoryStore()
        await store.open(node_id="n", at=time.time())
        return await _cycles(store, sessions=SESSIONS, runs=runs)

    elapsed, cpu = min(asyncio.run(main()) for _ in range(3))
    return [
        Row(
            name="memory store, send + commit of a run",
            value=cpu * 1e6,
            unit="us",
            target="<= 25",
            met=cpu <= 25e-6,
            note=f"CPU time, best of 3, {runs} runs over {SESSIONS} sessions; {elapsed * 1e6:.0f} us by the clock",
        )
    ]


def sqlite_rows(runs: int = 20_000) -> list[Row]:
    """Runs per second on SQLite, against the bare loop; taken in turns, because disks change their mind."""
    sync = sync_latency_s()
    ours, bare, cpus = [], [], []
    for _ in range(3):
        bare.append(bare_loop_s())
        elapsed, cpu = _on_disk(lambda store: _cycles(store, sessions=SESSIONS, runs=runs))
        ours.append(elapsed)
        cpus.append(cpu)
    ratio = statistics.median(b / o for b, o in zip(bare, ours, strict=True))
    single, _ = _on_disk(lambda store: _cycles(store, sessions=1, runs=1_000))
    at = f"fdatasync {sync * 1e6:.0f} us"
    best = min(ours)
    return [
        Row(name="fdatasync of the disk, 8 KiB append", value=sync * 1e6, unit="us", note="median"),
        Row(
            name=f"SQLite FULL, {SESSIONS} sessions / bare group-commit loop",
            value=ratio,
            unit="x",
            target=">= 0.5",
            met=ratio >= 0.5,
            note=f"{1 / best:.0f} runs/s against {1 / min(bare):.0f}, {min(cpus) * 1e6:.0f} us CPU a run, {at}",
        ),
        Row(
            name="SQLite FULL, 1 session",
            value=1 / single,
            unit="runs/s",
            note=f"two durable commits a run, {at}",
        ),
    ]


async def _open_loop(store: Store, *, rate: float, runs: int) -> list[float]:
    """How long runs take that come at their own pace, whether earlier ones are done or not."""
    loop = asyncio.get_running_loop()
    times = []

    async def one(due: float, key: str) -> None:
        await _cycle(store, key)
        times.append(loop.time() - due)

    start = loop.time() + 0.01
    async with asyncio.TaskGroup() as group:
        for n in range(runs):
            due = start + n / rate
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            group.create_task(one(due, f"o{n}"))
    return times


def open_loop_rows(rate: float = 2_000.0, runs: int = 6_000) -> list[Row]:
    """Callers that wait for it flatter group commit; these do not. Each run has a session of its own."""
    times = sorted(_on_disk(lambda store: _open_loop(store, rate=rate, runs=runs)))
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    return [
        Row(
            name=f"SQLite FULL, {rate:.0f} runs/s on new sessions, p99",
            value=p99 * 1e3,
            unit="ms",
            note=f"open loop, p50 {p50 * 1e3:.1f} ms, fdatasync {sync_latency_s() * 1e6:.0f} us",
        )
    ]


async def _beside_streams(store: Store, *, streams: int, seconds: float) -> tuple[list[float], float]:
    """How long runs of one session take beside streams that never pause, and the chunks per second of those."""
    stopping = False
    chunks = 0

    async def stream(claim: Claim) -> None:
        nonlocal chunks
        waiting: list[tuple[str, bytes]] = []
        written: asyncio.Future[Appended] | None = None
        while not stopping:
            waiting.append(encode_event(TextDelta(run_id=claim.lease.run_id, text="token ", at=1.0)))
            chunks += 1
            if written is None or written.done():
                written = store.append(claim.lease, waiting)
                waiting = []
            elif len(waiting) >= 256:
                await asyncio.wait([written])
            await asyncio.sleep(0)

    claims = [(await store.send(request_of(f"s{n}"))).claim for n in range(streams)]
    tasks = [asyncio.create_task(stream(claim)) for claim in claims if claim is not None]
    await asyncio.sleep(0.2)
    times = []
    before, start = chunks, time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        await _cycle(store, "other")
        times.append(time.perf_counter() - began)
    rate = (chunks - before) / (time.perf_counter() - start)
    stopping = True
    await asyncio.gather(*tasks)
    return times, rate


def starvation_rows(seconds: float = 5.0) -> list[Row]:
    """A run beside four streams that saturate the loop: the writer thread must get through."""
    times, rate = _on_disk(lambda store: _beside_streams(store, streams=4, seconds=seconds))
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    at = f"fdatasync {sync_latency_s() * 1e6:.0f} us"
    return [
        Row(
            name="a run beside 4 unpaced streams, p99",
            value=p99 * 1e3,
            unit="ms",
            target="<= 50",
            met=p99 <= 0.05,
            note=f"p50 {p50 * 1e3:.1f} ms, {len(times)} runs, {rate:.0f} stored chunks/s meanwhile, {at}",
        ),
        Row(
            name="chunks stored by 4 unpaced streams",
            value=rate,
            unit="1/s",
            target=">= 30000",
            met=rate >= 30_000,
            note=f"during the runs above, {at}",
        ),
    ]


_PIECES = 400


def _written_bytes() -> int:
    """Bytes that this process has passed to writing system calls so far (Linux)."""
    return int(Path("/proc/self/io").read_text("ascii").split("wchar: ")[1].split()[0])


async def _streamed(store: Store, *, streams: int) -> tuple[float, float]:
    """Bytes at rest and bytes written for one 2 kB answer, of answers streamed at once in an append for each piece."""
    claims = [sent.claim for n in range(streams) if (sent := await store.send(request_of(f"s{n}"))).claim is not None]
    chosen = random.Random(1)  # of words, so that the text compresses as prose does
    words = Path(__file__).read_text("utf-8").split()
    text = " ".join([chosen.choice(words) for _ in range(2000)])[: 5 * _PIECES]
    at = 1.7e9
    stored, written = await store.stored_bytes("p"), _written_bytes()
    for piece in range(_PIECES):
        at += 0.02 + chosen.random() * 0.002
        part = text[5 * piece : 5 * piece + 5]
        await asyncio.gather(
            *[
                store.append(
                    claim.lease, [encode_event(TextDelta(run_id=claim.lease.run_id, text=part, at=at))], nth=piece + 1
                )
                for claim in claims
            ]
        )
    entries = [Entry(role="assistant", content=text)]
    for claim in claims:
        await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=2e9, text=text, entries=entries))
    rest = await store.stored_bytes("p") - stored
    return rest / streams, (_written_bytes() - written) / streams


def chunk_rows(streams: int = 20) -> list[Row]:
    """The disk that a streamed answer takes, and what is written for it."""
    rest, written = _on_disk(lambda store: _streamed(store, streams=streams))
    note = f"an answer of 2 kB in {_PIECES} pieces, an append for each, {streams} at once"
    return [
        Row(
            name="streamed answer, rows at rest", value=rest / 1e3, unit="kB", target="<= 8", met=rest <= 8e3, note=note
        ),
        Row(name="streamed answer, written to disk", value=written / 1e3, unit="kB", note=note),
    ]


def rows() -> list[Row]:
    """All rows of this benchmark."""
    return [*memory_rows(), *sqlite_rows(), *open_loop_rows(), *starvation_rows(), *chunk_rows()]


if __name__ == "__main__":
    print_rows(rows())
