"""What a reaper per program costs, and how fast a hostile process tree is gone."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row, print_rows
from holdfast.runtime.adoption.processes import install, kill_trees
from holdfast.runtime.process_host import DEVNULL, PIPE, ProcessHost
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.foreign_process import ForeignProcess

_TREE = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in range(7):
    if os.fork() == 0:
        if number % 2:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.close(1)
        time.sleep(1000)
os.write(1, b"up\n")
time.sleep(1000)
"""
TREE = [os.path.realpath(sys.executable), "-I", "-S", "-c", _TREE]
PROCESSES = 8


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def spawn_times(host: ProcessHost, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from the start of ``/bin/true`` to its exit status, under a reaper and bare, in turns."""
    reaped, bare = [], []
    for _ in range(rounds):
        at = time.perf_counter()
        process = await host.spawn(["/bin/true"], stdout=DEVNULL)
        await process.wait()
        reaped.append(time.perf_counter() - at)
        await process.wait_gone()
        at = time.perf_counter()
        plain = await asyncio.create_subprocess_exec("/bin/true", stdout=DEVNULL)
        await plain.wait()
        bare.append(time.perf_counter() - at)
    return reaped, bare


async def kill_times(host: ProcessHost, rounds: int) -> list[float]:
    """Seconds that killing a tree of eight takes which ignores TERM, leaves its session and forks twice."""
    taken = []
    for _ in range(rounds):
        process = await host.spawn(TREE, stdout=PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        at = time.perf_counter()
        result = await process.kill_tree()
        taken.append(time.perf_counter() - at)
        assert result.outcome == "gone"
        assert len(result.killed) >= PROCESSES
    return taken


class _Place:
    def __init__(self) -> None:
        self.members: list[ForeignProcess] = []

    def adopt_process(self, process: ForeignProcess) -> bool:
        self.members.append(process)
        return True


here: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("here", default=None)


@contextlib.contextmanager
def inside() -> Iterator[_Place]:
    """Run in a new scope's place."""
    place = _Place()
    token = here.set(place)
    try:
        yield place
    finally:
        here.reset(token)


async def foreign_kill_times(rounds: int) -> list[float]:
    """As `kill_times`, for a tree that foreign code started by itself."""
    taken = []
    for _ in range(rounds):
        with inside() as place:
            started = await asyncio.create_subprocess_exec(*TREE, stdout=PIPE)
        assert started.stdout is not None
        await started.stdout.readline()
        at = time.perf_counter()
        result = await kill_trees(place.members)
        taken.append(time.perf_counter() - at)
        assert result.outcome == "gone", result
        await started.wait()
    return taken


def foreign_start_times(rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of ``subprocess.Popen`` inside a scope and outside of any."""
    scoped, outside = [], []
    for _ in range(rounds):
        at = time.perf_counter()
        with inside():
            started = subprocess.Popen(["/bin/true"])
        scoped.append(time.perf_counter() - at)
        started.wait()
        at = time.perf_counter()
        started = subprocess.Popen(["/bin/true"])
        outside.append(time.perf_counter() - at)
        started.wait()
    return scoped, outside


def memory_kb(pid: int) -> int:
    """The proportional share of memory of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


async def reaper_memory_kb(host: ProcessHost, count: int) -> float:
    """The proportional memory of one of ``count`` reapers."""
    held = [await host.spawn(["sleep", "1000"]) for _ in range(count)]
    reapers = [stat.parent for one in held if (stat := procfs.read_stat(one.pid)) is not None]
    total = sum(map(memory_kb, reapers))
    for one in held:
        await one.kill_tree()
    return total / count


def rows(rounds: int = 200) -> list[Row]:
    """Measure all; needs Linux."""
    host = ProcessHost()
    at = time.perf_counter()
    host.run_blocking(["/bin/true"])
    first = time.perf_counter() - at
    reaped, bare = asyncio.run(spawn_times(host, rounds))
    killed = asyncio.run(kill_times(host, rounds))
    memory = asyncio.run(reaper_memory_kb(host, 20))
    with install(here.get, host):
        foreign = asyncio.run(foreign_kill_times(rounds))
        scoped, outside = foreign_start_times(rounds)
    host.close()
    p50, p99 = percentile(killed, 0.5) * 1000, percentile(killed, 0.99) * 1000
    foreign_p99 = percentile(foreign, 0.99) * 1000
    return [
        Row(
            name="start to exit of /bin/true under a reaper",
            value=percentile(reaped, 0.5) * 1000,
            unit="ms",
            note=f"p50; bare create_subprocess_exec {percentile(bare, 0.5) * 1000:.2f} ms",
        ),
        Row(
            name="first program, with the zygote's start",
            value=first * 1000,
            unit="ms",
        ),
        Row(
            name=f"kill of a hostile tree of {PROCESSES}",
            value=p99,
            unit="ms",
            target="<= 50",
            met=p99 <= 50,
            note=f"p99 of {rounds}; p50 {p50:.1f} ms",
        ),
        Row(
            name="the same, started by foreign code",
            value=foreign_p99,
            unit="ms",
            target="<= 50",
            met=foreign_p99 <= 50,
            note=f"p99 of {rounds}; p50 {percentile(foreign, 0.5) * 1000:.1f} ms",
        ),
        Row(
            name="Popen inside a scope against outside",
            value=percentile(scoped, 0.5) / percentile(outside, 0.5),
            unit="x",
            note=f"p50 {percentile(scoped, 0.5) * 1e6:.0f} us",
        ),
        Row(name="memory of a reaper", value=memory, unit="KB", note="proportional share, 20 at a time"),
    ]


if __name__ == "__main__":
    print_rows(rows())
