"""The explorer: how many schedules a second of a small model, of a host with two runs, and by each chooser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeAlias

from benchmarks.rows import Row, print_rows
from holdfast import Host, Run
from holdfast.runtime import Interrupt
from holdfast.testing import ExplorationReport, VirtualClock, explore

__all__ = ["rows"]

Chosen: TypeAlias = Literal["random", "pct"]
Tasks: TypeAlias = Literal["ordinary", "eager"]

ROUNDS = 5
SCHEDULES = 4_000
HOSTED = 300
TARGET = 8_000
"""Schedules a second of a small model, on one core."""


async def locked() -> None:
    """Two tasks and a lock: about eight steps."""
    total = 0
    lock = asyncio.Lock()

    async def add() -> None:
        nonlocal total
        async with lock:
            seen = total
            await asyncio.sleep(0)
            total = seen + 1

    async with asyncio.TaskGroup() as group:
        group.create_task(add())
        group.create_task(add())
    assert total == 2


async def interrupted() -> None:
    """Two tasks that wait for one interrupt."""
    stop = Interrupt()
    async with asyncio.TaskGroup() as group:
        group.create_task(stop.wait())
        group.create_task(stop.wait())
        stop.trigger("now")


async def hosted() -> None:
    """A host, and a message that interrupts the run of the first one."""

    async def agent(run: Run) -> None:
        await run.emit(run.text)
        await asyncio.sleep(1)

    async with Host(agent, store="memory://", clock=VirtualClock()) as host:
        session = host.session("a")
        await session.send("one")
        receipt = await session.send("two", policy="interrupt")
        await session.wait(receipt.message_id)


def _speed(
    test: Callable[[], Coroutine[Any, Any, object]],
    chooser: Chosen,
    schedules: int,
    tasks: Tasks = "ordinary",
) -> tuple[float, ExplorationReport]:
    """Schedules in a second of CPU time, the best of some rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        began = time.process_time()
        report = explore(test, chooser=chooser, schedules=schedules, tasks=tasks)
        best = max(best, report.schedules / (time.process_time() - began))
    return best, report


def rows() -> list[Row]:
    """All figures of this module."""
    found = []
    models: tuple[tuple[str, Callable[[], Coroutine[Any, Any, object]], Chosen, Tasks], ...] = (
        ("two tasks and a lock, random", locked, "random", "ordinary"),
        ("… pct", locked, "pct", "ordinary"),
        ("… eager tasks", locked, "random", "eager"),
        ("two waiters of an interrupt, random", interrupted, "random", "ordinary"),
        ("… pct, eager tasks", interrupted, "pct", "eager"),
    )
    for name, test, chooser, tasks in models:
        speed, report = _speed(test, chooser, SCHEDULES, tasks)
        note = f"CPU time, {report.steps / report.schedules:.1f} steps a schedule, {report.distinct} different ones"
        found.append(Row(name=name, value=speed, unit="/s", target=f">= {TARGET:,}", met=speed >= TARGET, note=note))
    speed, report = _speed(hosted, "random", HOSTED)
    note = f"CPU time, {report.steps / report.schedules:.0f} steps a schedule; {report.states:,} states in {HOSTED}"
    found.append(Row(name="a host whose run is interrupted by a message", value=speed, unit="/s", note=note))
    return found


if __name__ == "__main__":
    print_rows(rows())
