"""What a scope costs: a supervised task against a bare one, a nested scope, and how long a stop takes.

Run it: ``python -m benchmarks.bench_scope``.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.rows import Row, print_rows, ratio_row
from holdfast.runtime.interrupt.interrupt import current_interrupt
from holdfast.runtime.process_host import process_host
from holdfast.runtime.scope.scope import Scope

__all__ = ["rows"]

TASKS = 200
ROUNDS = 200
STOPS = 60
TASKS_PER_STOP = 100
THREADS_PER_STOP = 10
PROGRAMS_PER_STOP = 8
GRACE_S = 0.2


async def _noop() -> None: ...


async def _bare() -> None:
    for _ in range(TASKS):
        await asyncio.create_task(_noop())


async def _group() -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(TASKS):
            await group.create_task(_noop())


async def _supervised() -> None:
    async with Scope("bench", parent=None) as scope:
        for _ in range(TASKS):
            handle = scope.spawn(_noop())
            assert not handle.interrupt.triggered
            await handle


async def _nested() -> None:
    async with Scope("bench", parent=None) as scope:
        for _ in range(TASKS):
            async with scope.child("step"):
                pass


async def _each_us(*works: Callable[[], Awaitable[None]]) -> list[float]:
    """Microseconds for one of ``TASKS`` of each kind, the best of some rounds; the kinds take turns."""
    best = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for index, work in enumerate(works):
            began = time.perf_counter()
            await work()
            best[index] = min(best[index], time.perf_counter() - began)
    return [one / TASKS * 1e6 for one in best]


async def _costs(loop: str) -> list[Row]:
    bare, group, supervised, nested = await _each_us(_bare, _group, _supervised, _nested)
    return [
        Row(name=f"bare task, {loop}", value=bare, unit="us"),
        Row(name=f"task of a task group, {loop}", value=group, unit="us"),
        Row(name=f"supervised task with its own interrupt, {loop}", value=supervised, unit="us"),
        ratio_row(f"supervised against bare, {loop}", supervised / bare, at_most=3),
        Row(name=f"nested scope, entered and left, {loop}", value=nested, unit="us"),
    ]


def _listen() -> None:
    interrupt = current_interrupt()
    assert interrupt is not None
    interrupt.wait_blocking()


async def _stops(*, programs: int, grace_s: float = 0.0) -> list[float]:
    """Milliseconds of each stop of a scope with tasks, threads and programs that ignore SIGTERM."""
    taken = []
    for _ in range(STOPS):
        scope = Scope("bench", parent=None, grace_s=grace_s).open()
        for _ in range(TASKS_PER_STOP):
            scope.spawn(asyncio.sleep(1000))
        for _ in range(THREADS_PER_STOP):
            scope.spawn(_listen, on="thread")
        for _ in range(programs):
            await scope.process(["sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000"])
        while sum(member.thread is not None for member in scope.members()) < THREADS_PER_STOP:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        began = time.perf_counter()
        receipt = await scope.stop()
        taken.append((time.perf_counter() - began) * 1e3)
        assert receipt.outcome == "gone"
    return taken


def rows() -> list[Row]:
    """All figures."""
    process_host().start()
    found = asyncio.run(_costs("asyncio"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found += runner.run(_costs("uvloop"))
        for programs, grace_s, target_ms in (
            (0, 0.0, 10.0),
            (PROGRAMS_PER_STOP, 0.0, 50.0),
            (PROGRAMS_PER_STOP, GRACE_S, GRACE_S * 1e3 + 50.0),
        ):
            taken = runner.run(_stops(programs=programs, grace_s=grace_s))
            name = f"stop of {TASKS_PER_STOP} tasks, {THREADS_PER_STOP} threads, {programs} hostile programs"
            name += f", grace {grace_s * 1e3:g} ms" if grace_s else ""
            p99 = statistics.quantiles(taken, n=100, method="inclusive")[98]
            found += [
                Row(name=f"{name}, p50", value=statistics.median(taken), unit="ms"),
                Row(name=f"{name}, p99", value=p99, unit="ms", target=f"<= {target_ms:g}", met=p99 <= target_ms),
            ]
    return found


if __name__ == "__main__":
    print_rows(rows())
