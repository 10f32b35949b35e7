"""A host in this process: what a no-op run costs, what an idle session keeps, a stop under load, and start-up times."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from benchmarks.bench_store import bare_loop_s
from benchmarks.disk import sync_latency_s
from benchmarks.rows import Row, print_rows
from holdfast import Host, Run, Settings, agent
from holdfast.runtime.process_host import process_host

__all__ = ["rows"]

SESSIONS = 50
RUNS = 10_000
IDLE = 10_000
STOPS = 100
TALKERS = 4
STARTS = 7


@agent
async def noop(run: Run) -> str:
    """Answer at once."""
    return "ok"


@agent
async def chatter(run: Run) -> None:
    """Talk without a pause until interrupted."""
    while True:
        await run.emit("chunk ")
        await asyncio.sleep(0)


def _listen(run: Run) -> None:
    run.interrupt.sleep_blocking(1000)


STUBBORN = """\
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
os.write(1, b".")
time.sleep(1000)
"""
"""Makes 8 processes: each round doubles them; the forked half left its session and its parent."""


@agent
async def busy(run: Run) -> None:
    """100 tasks, 10 cooperative threads and a tree of 8 processes that ignore SIGTERM, setsid and double-fork."""
    process = await run.process([sys.executable, "-S", "-c", STUBBORN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readexactly(8)
    for _ in range(100):
        _ = run.spawn(asyncio.sleep, 1000)
    for _ in range(10):
        _ = run.spawn(_listen, run)
    while sum(member.thread is not None for member in run.scope.members()) < 10:
        await asyncio.sleep(0.001)
    await run.emit("busy")
    await asyncio.sleep(1000)


@contextlib.asynccontextmanager
async def hosted(store: str) -> AsyncIterator[Host]:
    """A host with these agents."""
    async with Host(
        noop, agents=[chatter, busy], store=store, settings=Settings(drain_timeout_s=0.1, grace_s=0.2)
    ) as host:
        yield host


async def _run_s(host: Host, runs: int) -> tuple[float, float]:
    """Seconds for a run, over 50 sessions at once: by the clock, and of CPU."""

    async def one(number: int) -> None:
        session = host.session(f"s{number}")
        for _ in range(runs // SESSIONS):
            await session.ask("x")

    await asyncio.gather(*(one(number) for number in range(SESSIONS)))
    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number) for number in range(SESSIONS)))
    return (time.perf_counter() - began) / runs, (time.process_time() - cpu_began) / runs


async def _runs(folder: str) -> list[Row]:
    in_memory = []
    for _ in range(3):
        async with hosted("memory://") as host:
            in_memory.append(await _run_s(host, RUNS))
    memory_clock_s, memory_s = (min(times) for times in zip(*in_memory, strict=True))
    durable, bare = [], []
    for turn in range(3):
        bare.append(bare_loop_s())
        async with hosted(f"sqlite:///{folder}/runs{turn}.db") as host:
            durable.append(await _run_s(host, RUNS))
    sync_s = sync_latency_s()
    sqlite_s, floor = statistics.median(clock_s for clock_s, _ in durable), 1 / statistics.median(bare)
    durable_cpu_s = min(cpu_s for _, cpu_s in durable)
    ratio = statistics.median(b / clock_s for b, (clock_s, _) in zip(bare, durable, strict=True))
    return [
        Row(
            name="no-op run in process, memory store",
            value=memory_s * 1e6,
            unit="µs",
            target="<= 50",
            met=memory_s <= 50e-6,
            note=f"CPU time, best of 3; {memory_clock_s * 1e6:.0f} µs by the clock; {SESSIONS} sessions",
        ),
        Row(
            name="no-op runs in process, SQLite FULL, 50 sessions",
            value=1 / sqlite_s,
            unit="/s",
            note=f"fdatasync {sync_s * 1000:.2f} ms",
        ),
        Row(
            name="no-op run in process, SQLite FULL",
            value=durable_cpu_s * 1e6,
            unit="µs",
            target="<= 80",
            met=durable_cpu_s <= 80e-6,
            note=f"CPU time of both threads, best of 3; {SESSIONS} sessions; fdatasync {sync_s * 1000:.2f} ms",
        ),
        Row(
            name="… against a bare group-commit loop of the same rows",
            value=ratio,
            unit="x",
            target=">= 0.5",
            met=ratio >= 0.5,
            note=f"the loop alone: {floor:,.0f}/s; fdatasync {sync_s * 1000:.2f} ms",
        ),
    ]


async def _saturated(folder: str) -> Row:
    """Runs of another session while unpaced streams keep the loop busy."""
    taken = []
    async with hosted(f"sqlite:///{folder}/busy.db") as host:
        for number in range(TALKERS):
            await host.session(f"talker{number}").send("x", agent="chatter")
        await asyncio.sleep(0.5)
        other = host.session("other")
        for _ in range(200):
            began = time.perf_counter()
            await other.ask("x")
            taken.append(time.perf_counter() - began)
        for number in range(TALKERS):
            await host.session(f"talker{number}").interrupt("enough", grace_s=0)
    p99_ms = statistics.quantiles(taken, n=100, method="inclusive")[98] * 1000
    return Row(
        name="a durable run beside 4 unpaced streams, p99",
        value=p99_ms,
        unit="ms",
        target="<= 50",
        met=p99_ms <= 50,
        note=f"p50 {statistics.median(taken) * 1000:.1f} ms, fdatasync {sync_latency_s() * 1000:.2f} ms",
    )


async def _stop_of_a_run() -> list[Row]:
    taken = []
    async with hosted("memory://") as host:
        for number in range(STOPS):
            session = host.session(f"stop{number}", agent="busy")
            sent = await session.send("x")
            async for event in session.events(after=sent.cursor):
                if event.kind == "text.delta":
                    break
            began = time.perf_counter()
            receipt = await session.interrupt("bench", grace_s=0)
            taken.append((time.perf_counter() - began) * 1000)
            assert receipt.outcome == "gone", receipt
    p99 = statistics.quantiles(taken, n=100, method="inclusive")[98]
    name = "stop of a run: 100 tasks, 10 threads, a tree of 8 hostile processes"
    return [
        Row(name=f"{name}, p50", value=statistics.median(taken), unit="ms"),
        Row(name=f"{name}, p99", value=p99, unit="ms", target="<= 50", met=p99 <= 50, note=f"{STOPS} stops, no grace"),
    ]


async def _idle() -> list[Row]:
    async with Host(noop, store="memory://", settings=Settings(evict_after_s=3600)) as host:
        views = []
        for number in range(IDLE):
            await host.session(f"session-{number}").ask("x")
            views.append((number + 1, f"session-{number}"))
        host.maintenance.evict(idle_for_s=0)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number, key in views:
            host.directory.load(session=number, number=number, principal="local", key=key, seq=5)
        live = (tracemalloc.get_traced_memory()[0] - before) / IDLE
        host.maintenance.evict(idle_for_s=0)
        gc.collect()
        evicted = (tracemalloc.get_traced_memory()[0] - before) / IDLE
        tracemalloc.stop()
    return [
        Row(name="a live idle session", value=live, unit="B", target="<= 500", met=live <= 500),
        Row(name="an evicted session", value=round(max(0.0, evicted), 1), unit="B", target="<= 0", met=evicted < 1),
    ]


def _start_s(*argv: str) -> float:
    """The time of a process from start to exit, the best of some, in seconds."""
    taken = []
    for _ in range(STARTS):
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return min(taken)


def _starts() -> list[Row]:
    bare_s = _start_s(sys.executable, "-c", "pass")
    import_ms = (_start_s(sys.executable, "-c", "import holdfast") - bare_s) * 1000
    help_ms = _start_s(str(Path(sys.executable).parent / "holdfast"), "--help") * 1000
    return [
        Row(
            name="import holdfast, above a bare interpreter",
            value=import_ms,
            unit="ms",
            target="<= 100",
            met=import_ms <= 100,
            note=f"bare {bare_s * 1000:.0f} ms; best of {STARTS}",
        ),
        Row(
            name="holdfast --help",
            value=help_ms,
            unit="ms",
            target="<= 200",
            met=help_ms <= 200,
            note=f"best of {STARTS}",
        ),
    ]


def rows() -> list[Row]:
    """All figures of this module."""
    process_host().start()
    found: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found += runner.run(_runs(folder))
        found.append(runner.run(_saturated(folder)))
        found += runner.run(_stop_of_a_run())
        found += runner.run(_idle())
    return found + _starts()


if __name__ == "__main__":
    print_rows(rows())
