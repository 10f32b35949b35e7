"""How cost grows: with the sessions stored, with the length of a transcript, and with the number of streams.

Stores of 1 k, 100 k and 1 M sessions, with ten events each, are made by `benchmarks.large_store`. Requests are
measured at servers on all of them in turns. Each figure is stated at the largest size, with the exponent of its growth:
the slope of the line of least squares through the logarithms. What only goes down an index has at most the exponent of
a logarithm over these sizes, 0.1. The stores take 20 GB while they are measured, in the folder for temporary files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from benchmarks.bench_chunks import ROOT, Server, Shape, bare_server, compare, holdfast_server
from benchmarks.large_store import LONG, SPAN_S, make_store
from benchmarks.load import load, request
from benchmarks.rows import Row, growth_rows, print_rows
from holdfast import Host, Run, agent
from holdfast.protocol.stopping import Cause
from holdfast.storage import SqliteStore
from holdfast.storage.port import Send

__all__ = ["migrated", "rows", "started"]

SIZES = (1_000, 100_000, 1_000_000)
EVENTS_A_SESSION = 10
ENTRIES = (1_000, 10_000, 100_000)
PAGE = 1_000
STREAMS = (1, 100, 1000)
CHUNKS_PER_S = 5_000
ROUNDS = 5
LOGARITHM = 0.1
"""The exponent of a logarithm over `SIZES`: log 1,000,000 is twice log 1,000."""
MOST_MS = 5.0
SCHEMA_5 = ROOT / "tests" / "storage" / "fixtures" / "schema_5.sql"

Points = list[tuple[float, float]]


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _paths(middle: float) -> dict[str, str]:
    return {
        "list of 100 sessions": "/v1/sessions?all=true&limit=100",
        "list of 100 sessions, a page in the middle": f"/v1/sessions?all=true&limit=100&before={middle!r}-1",
        "statistics, `/v1/server`": "/v1/server",
        "status page, `/`": "/",
    }


async def _listed(server: Server, path: str) -> int:
    """The number of sessions that a list has."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    writer.write(request("GET", path))
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    writer.close()
    return len(json.loads(body)["sessions"])


async def _request_ms(server: Server, path: str) -> tuple[float, float]:
    """CPU time of the server for a request, and the median of the answer's latency, in ms."""
    payload = [request("GET", path)]
    await load(server.port, payload, 0.1)
    cpu_s = server.cpu_s()
    _, latencies = await load(server.port, payload, 0.4)
    return (server.cpu_s() - cpu_s) / len(latencies) * 1e3, statistics.median(latencies) * 1e3


async def _requests(servers: Sequence[Server], paths: dict[str, str]) -> dict[str, list[list[tuple[float, float]]]]:
    """For each path and server the figures of all rounds."""
    for server in servers:
        assert [await _listed(server, path) for path in paths.values() if "limit=100" in path] == [100, 100]
    found: dict[str, list[list[tuple[float, float]]]] = {name: [[] for _ in servers] for name in paths}
    for _ in range(ROUNDS):
        for name, path in paths.items():
            for server, figures in zip(servers, found[name], strict=True):
                figures.append(await _request_ms(server, path))
    return found


def _request_rows(stores: dict[int, Path], middle: float) -> list[Row]:
    """Rows of requests; `middle` is when half of the sessions had had their last change."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(holdfast_server(ROOT, str(store.parent.parent))) for store in stores.values()]
        found = asyncio.run(_requests(servers, _paths(middle)))
    made = []
    for name, at_servers in found.items():
        cpu_ms = [statistics.median(cpu for cpu, _ in figures) for figures in at_servers]
        clock_ms = statistics.median(clock for _, clock in at_servers[-1])
        made += growth_rows(
            name,
            list(zip(stores, cpu_ms, strict=True)),
            unit="ms",
            of="sessions",
            at_most=MOST_MS,
            exponent_at_most=LOGARITHM,
            note=f"CPU of the server; {clock_ms:.2f} ms by the clock; median of {ROUNDS} turns",
        )
    return made


# ── The store, in process ────────────────────────────────────────────────────────────────────────────────────────────


async def _cpu_ms(act: Callable[[int], Awaitable[object]], times: int) -> tuple[float, float]:
    """CPU time of this process, and time by the clock, for one act; medians of `ROUNDS` rounds, in ms."""
    spent, clock = [], []
    for turn in range(ROUNDS):
        cpu_s, began = time.process_time(), time.perf_counter()
        for nth in range(times):
            await act(turn * times + nth)
        spent.append((time.process_time() - cpu_s) / times * 1e3)
        clock.append((time.perf_counter() - began) / times * 1e3)
    return statistics.median(spent), statistics.median(clock)


async def _new_session_ms(store: SqliteStore) -> tuple[float, float]:
    """CPU and clock, in ms, of a message to a new session of the principal that just deleted a session: medians."""
    spent, clock = [], []
    for nth in range(20 * ROUNDS):
        now = time.time()
        await store.delete_session("p0", f"s{nth + 1:08}", at=now, cause=Cause(kind="user", reason="bench", at=now))
        send = Send(
            principal="p0", key=f"new{nth}-{now}", agent=None, default_agent="demo", message_id=f"m_{nth}{now}",
            content="x", policy="queue", at=now, session_limit=10**9,
        )  # fmt: skip
        cpu_s, began = time.process_time(), time.perf_counter()
        await store.send(send)
        spent.append((time.process_time() - cpu_s) * 1e3)
        clock.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent), statistics.median(clock)


async def _store_ms(path: Path) -> dict[str, tuple[float, float]]:
    store = SqliteStore(str(path))
    await store.open(node_id="n_bench", at=time.time())
    found = {
        "`store.info()`": await _cpu_ms(lambda nth: store.info(), 100),
        "first new session after a deletion": await _new_session_ms(store),
    }
    await store.close()
    return found


def _store_rows(stores: dict[int, Path]) -> list[Row]:
    found = [asyncio.run(_store_ms(path)) for path in stores.values()]
    made = []
    for name in found[0]:
        made += growth_rows(
            name,
            [(size, figures[name][0]) for size, figures in zip(stores, found, strict=True)],
            unit="ms",
            of="sessions",
            at_most=MOST_MS,
            exponent_at_most=LOGARITHM,
            note=f"CPU in process; {found[-1][name][1]:.2f} ms by the clock; median",
        )
    return made


def _doctor_s(path: Path) -> float:
    """CPU time of ``holdfast doctor``, in seconds."""
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "doctor", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--store", f"sqlite:///{path}"], cwd=path.parent, stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _doctor_rows(stores: dict[int, Path]) -> list[Row]:
    rounds = [[_doctor_s(path) for path in stores.values()] for _ in range(ROUNDS)]
    points = list(zip(stores, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    note = f"the whole program, with the start of Python; median of {ROUNDS} turns"
    return growth_rows("CPU of `doctor`", points, unit="s", of="sessions", exponent_at_most=LOGARITHM, note=note)


# ── Start ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@agent
async def silent(run: Run) -> None:
    """Do nothing."""


def _peak_mb() -> float:
    """The most memory that this process had, in MB."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def started(path: str) -> dict[str, float]:
    """Start a host on a store, run something, and let it prune: time of the start and peaks of memory."""

    async def main() -> dict[str, float]:
        cpu_s, began = time.process_time(), time.perf_counter()
        async with Host(silent, store=f"sqlite:///{path}") as host:
            found = {
                "clock_s": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu_s,
            }
            await host.session("new").send("x")
            await asyncio.sleep(1.0)
            return found | {"peak_mb": _peak_mb()}

    return asyncio.run(main())


def _in_child(function: Callable[[str], object], path: Path) -> dict[str, float]:
    program = (
        f"import json, sys; from benchmarks.bench_growth import {function.__name__} as measure\n"
        "print(json.dumps(measure(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _start_rows(stores: dict[int, Path]) -> list[Row]:
    rounds = [[_in_child(started, path) for path in stores.values()] for _ in range(ROUNDS)]

    def points(name: str) -> Points:
        return [
            (size, statistics.median(figures[name] for figures in found))
            for size, found in zip(stores, zip(*rounds, strict=True), strict=True)
        ]

    note = (
        f"by the clock, of which CPU {points('cpu_s')[-1][1] * 1e3:.1f} ms; the file in the cache; median of {ROUNDS}"
    )
    return [
        *growth_rows(
            "start of a host",
            points("clock_s"),
            unit="s",
            of="sessions",
            at_most=0.5,
            exponent_at_most=LOGARITHM,
            note=note,
        ),
        *growth_rows(
            "peak memory of a host that started",
            points("peak_mb"),
            unit="MB",
            of="sessions",
            at_most=60,
            exponent_at_most=LOGARITHM,
            note=f"resident, with its first run and a second of maintenance; median of {ROUNDS}",
        ),
    ]


# ── Transcripts ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _page_ms(path: Path, entries: int) -> tuple[float, float]:
    """CPU time and time by the clock of a page of a transcript, in ms: the mean of all its pages."""
    store = SqliteStore(str(path))
    await store.open(node_id="n_bench", at=time.time())
    found = await store.find_session("p0", LONG)
    assert found is not None
    pages = entries // PAGE

    async def whole(_: int) -> None:
        after = count = 0
        while page := await store.transcript(found[0], after=after, limit=PAGE):
            after, count = page[-1].n, count + len(page)
        assert count == entries

    cpu_ms, clock_ms = await _cpu_ms(whole, 1)
    await store.close()
    return cpu_ms / pages, clock_ms / pages


def _transcript_rows(folder: Path) -> list[Row]:
    points: Points = []
    for entries in ENTRIES:
        path = folder / f"transcript-{entries}.db"
        make_store(path, sessions=100, events=1000, entries=entries)
        cpu_ms, clock_ms = asyncio.run(_page_ms(path, entries))
        points.append((entries, cpu_ms))
    pages = ENTRIES[-1] // PAGE
    whole_s = cpu_ms * pages / 1e3
    return [
        *growth_rows(
            f"page of {PAGE:,} entries of a transcript",
            points,
            unit="ms",
            of="entries",
            exponent_at_most=LOGARITHM,
            note=f"CPU, mean of all pages; median of {ROUNDS}",
        ),
        Row(
            name=f"all {pages} pages of a transcript of {ENTRIES[-1]:,} entries",
            value=whole_s,
            unit="s",
            target="<= 0.3",
            met=whole_s <= 0.3,
            note=f"CPU; {clock_ms * pages / 1e3:.2f} s by the clock; median of {ROUNDS}",
        ),
    ]


# ── Migration ────────────────────────────────────────────────────────────────────────────────────────────────────────


def migrated(path: str) -> dict[str, float]:
    """Open a store of version 5, and read its old rows: times of the migration, and the share of rows that are there.

    Each row of events, messages and runs is compared with its original in the copy that the migration made, all
    sessions are listed, and the log and the transcript of each tenth session are read.
    """

    async def main() -> dict[str, float]:
        store = SqliteStore(path)
        cpu_s, began = time.process_time(), time.perf_counter()
        await store.open(node_id="n_bench", at=time.time())
        found = {
            "clock_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu_s,
            "peak_mb": _peak_mb(),
        }
        sessions, before = set(), None
        while page := await store.sessions(principal=None, limit=1000, before=before):
            sessions |= {view.key for view in page}
            before = page[-1].updated_at, page[-1].number
        read = 0
        for key in sorted(sessions)[::10]:
            there = await store.find_session("p0", key)
            assert there is not None
            events = await store.read_events(there[0], after=0, limit=100)
            entries = await store.transcript(there[0])
            read += len(events) == EVENTS_A_SESSION and [entry.role for entry in entries] == ["user", "assistant"] * 2
        await store.close()
        return found | {"sessions": len(sessions), "read": read}

    figures = asyncio.run(main())
    same, whole = _compare_rows(path, f"{path}.version-5")
    return figures | {"same": same, "rows": whole}


def _compare_rows(path: str, original: str) -> tuple[int, int]:
    """How many rows are as they were, and how many there were."""
    same = whole = 0
    with contextlib.closing(sqlite3.connect(path)) as new, contextlib.closing(sqlite3.connect(original)) as old:
        for table in ("message", "event", "run"):
            columns = ", ".join(name for _, name, *_ in old.execute(f"PRAGMA table_info({table})"))
            keys = "run_id" if table == "run" else "1, 2"
            select = f"SELECT {columns} FROM {table} ORDER BY {keys}"
            for one, other in zip_longest(old.execute(select), new.execute(select)):
                whole += 1
                same += one == other
    return same, whole


def _migration_rows(folder: Path, sizes: Sequence[int]) -> list[Row]:
    found = []
    for size in sizes:
        path = folder / "old.db"
        make_store(path, sessions=size, events=size * EVENTS_A_SESSION, schema=SCHEMA_5)
        found.append(_in_child(migrated, path))
        for file in folder.glob("old.db*"):
            file.unlink()
    last = found[-1]
    points = [(size, figures["cpu_s"]) for size, figures in zip(sizes, found, strict=True)]
    asked = sum(figures["rows"] + size + len(range(0, size, 10)) for size, figures in zip(sizes, found, strict=True))
    answered = sum(figures["same"] + figures["sessions"] + figures["read"] for figures in found)
    return [
        *growth_rows(
            "migration from version 5",
            points,
            unit="s",
            of="sessions",
            note=f"CPU; {last['clock_s']:.0f} s by the clock, with the copy of the file; peak {last['peak_mb']:.0f} MB",
        ),
        Row(
            name="old rows that are there and readable after these migrations",
            value=answered / asked,
            unit="",
            target=">= 1",
            met=answered == asked,
            note=f"{answered:,} of {asked:,}: rows of messages, events and runs compared, sessions listed, "
            "log and transcript of each tenth read",
        ),
    ]


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _stream_rows(folder: Path) -> list[Row]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stored: Points = []
    bare: Points = []
    for streams in STREAMS:
        shape = Shape(f"{streams} streams", streams, 1, CHUNKS_PER_S // streams, 0.0)
        served = folder / f"streams-{streams}"
        served.mkdir()
        with bare_server(str(served)) as floor, holdfast_server(ROOT, str(served)) as server:
            bare_us, (stored_us,) = asyncio.run(compare(floor, [server], shape, ROUNDS))
        stored.append((streams, statistics.median(stored_us)))
        bare.append((streams, statistics.median(bare_us)))
    note = f"CPU of the server, {CHUNKS_PER_S:,} chunks a second in all, one reader each; median of {ROUNDS} turns"
    return [
        *growth_rows("chunk stored and read", stored, unit="µs", of="streams", note=note),
        *growth_rows("chunk of a bare ASGI stream", bare, unit="µs", of="streams", note=note),
    ]


def rows(sizes: Sequence[int] = SIZES) -> list[Row]:
    """All figures of this module; needs Linux."""
    with tempfile.TemporaryDirectory(prefix="holdfast-growth-") as name:
        folder = Path(name)
        streams = _stream_rows(folder)
        transcripts = _transcript_rows(folder)
        stores: dict[int, Path] = {}
        now = time.time()
        took_s: list[float] = []
        for size in sizes:
            stores[size] = folder / str(size) / ".holdfast" / "holdfast.db"
            stores[size].parent.mkdir(mode=0o700, parents=True)
            began = time.perf_counter()
            make_store(stores[size], sessions=size, events=size * EVENTS_A_SESSION, ended_at=now)
            stores[size].chmod(0o600)
            took_s.append(time.perf_counter() - began)
        measured = [
            *_request_rows(stores, now - SPAN_S / 4),
            *_store_rows(stores),
            *_doctor_rows(stores),
            *_start_rows(stores),
        ]
        size_mb = stores[sizes[-1]].stat().st_size / 1e6
        made = Row(
            name=f"making the store of {sizes[-1]:,} sessions and {sizes[-1] * EVENTS_A_SESSION:,} events",
            value=took_s[-1],
            unit="s",
            note=f"by the clock; {size_mb:,.0f} MB",
        )
        for store in stores.values():
            shutil.rmtree(store.parent.parent)
        return [*measured, *transcripts, made, *_migration_rows(folder, sizes), *streams]


if __name__ == "__main__":
    print_rows(rows())
