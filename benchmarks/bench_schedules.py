"""Schedules on a host in this process: what 100,000 of them cost while nothing is due, and how fast they fire."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.rows import Row, print_rows
from holdfast import Host, Run, Settings, agent
from holdfast.protocol.schedules import ScheduleSpec
from holdfast.runtime.process_host import process_host
from holdfast.storage.port import PutSchedule

__all__ = ["rows"]

SCHEDULES = 100_000
PRINCIPALS = 100
AT_ONCE = 5000
IDLE_S = 31.0
"""Long enough for the clock to be looked at."""


@agent
async def noop(run: Run) -> str:
    """Answer at once."""
    return "ok"


async def _put(host: Host, count: int, *, every_s: float, delay_s: float) -> float:
    """Put so many schedules, each for a session of its own; how long it took."""
    began = time.perf_counter()
    for start in range(0, count, 1000):
        putting = [
            host.store.put_schedule(
                PutSchedule(
                    principal=f"p{n % PRINCIPALS}",
                    schedule_id=f"s{n}",
                    spec=ScheduleSpec(session=f"k{n}", text="tick", every_s=every_s, initial_delay_s=delay_s),
                    at=host.now(),
                    limit=count,
                )
            )
            for n in range(start, min(count, start + 1000))
        ]
        await asyncio.wait(putting)
    return time.perf_counter() - began


async def _idle(name: str, store: str) -> list[Row]:
    settings = Settings(store=store)
    async with Host(noop, settings=settings) as host:
        put_s = await _put(host, SCHEDULES, every_s=86400.0, delay_s=86400.0)
    gc.collect()
    async with Host(noop, settings=settings, store=host.store if store == "memory://" else None) as host:
        await asyncio.sleep(2.0)  # what a start does is done
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        share = (time.process_time() - cpu) / (time.perf_counter() - began) * 100
    note = f"over {IDLE_S:g} s; of the whole process; putting them took {put_s:.1f} s"
    row = Row(
        name=f"{SCHEDULES:,} schedules, nothing due ({name})",
        value=share,
        unit="%",
        target="<= 1",
        met=share <= 1.0,
        note=note,
    )
    return [row]


async def _firing(name: str, store: str) -> list[Row]:
    """Put a first one far away, then many that are due at the same moment."""
    settings = Settings(store=store, max_runs=10_000, principal_runs=10_000)
    async with Host(noop, settings=settings) as host:
        await _put(host, AT_ONCE, every_s=3600.0, delay_s=0.0)
        began = time.perf_counter()
        await host.schedule("trigger", "tick", every_s=3600.0, initial_delay_s=0.0, principal="last")
        while host.statistics().counts.get("runs_completed", 0) <= AT_ONCE:
            await asyncio.sleep(0.01)
        rate = AT_ONCE / (time.perf_counter() - began)
    return [
        Row(
            name=f"ticks of {AT_ONCE:,} schedules at once ({name})",
            value=rate,
            unit="/s",
            note="each with its run, to the end",
        )
    ]


def rows() -> list[Row]:
    """All figures of this module."""
    process_host().start()
    found: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for name, store in (("memory", "memory://"), ("SQLite", f"sqlite:///{folder}/idle.db")):
            found += runner.run(_idle(name, store))
        for name, store in (("memory", "memory://"), ("SQLite", f"sqlite:///{folder}/firing.db")):
            found += runner.run(_firing(name, store))
    return found


if __name__ == "__main__":
    print_rows(rows())
