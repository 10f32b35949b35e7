"""What branches cost: `Run.parallel` and `Run.map` of functions, and a parallel agent of agents, against a task group.

Run it: ``python -m benchmarks.bench_compose``.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

from benchmarks.rows import Row, print_rows, ratio_row
from holdfast import Agent, Host, Run, Settings, agent, parallel

__all__ = ["rows"]

BRANCHES = 1_000
ROUNDS = 30
MANY = 10_000


async def _noop() -> None: ...


async def _waits() -> None:
    await asyncio.sleep(0)


async def _waits_of(item: int) -> None:
    await asyncio.sleep(0)


async def _noop_of(item: int) -> None: ...


@agent
async def _nothing(run: Run) -> None: ...


async def _group(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(BRANCHES):
            group.create_task(work())


async def _best_s(work: Callable[[], Awaitable[Any]], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        best = min(best, time.perf_counter() - began)
    return best


def _measured(found: dict[str, float]) -> Agent:
    """An agent that measures, inside of its run."""
    shape = parallel(*[_nothing] * BRANCHES, name="thousand")

    async def work(run: Run) -> None:
        found["functions"] = await _best_s(lambda: run.parallel(*[_noop] * BRANCHES), ROUNDS)
        found["map"] = await _best_s(lambda: run.map(_noop_of, range(BRANCHES), concurrency=BRANCHES), ROUNDS)
        found["map 100"] = await _best_s(lambda: run.map(_noop_of, range(BRANCHES), concurrency=100), ROUNDS)
        found["waits"] = await _best_s(lambda: run.parallel(*[_waits] * BRANCHES), ROUNDS)
        found["map waits"] = await _best_s(lambda: run.map(_waits_of, range(BRANCHES), concurrency=100), ROUNDS)
        found["many"] = await _best_s(lambda: run.map(_noop_of, range(MANY), concurrency=100), 3)
        found["agents"] = await _best_s(lambda: run.delegate(shape, "go"), ROUNDS // 3)

    return agent(name="measured")(work)


async def _costs(loop: str) -> list[Row]:
    found: dict[str, float] = {}
    bare = await _best_s(lambda: _group(_noop), ROUNDS)
    bare_waits = await _best_s(lambda: _group(_waits), ROUNDS)
    async with Host(_measured(found), store="memory://", settings=Settings(run_timeout_s=600)) as host:
        await host.session("s").ask("go")
    each = 1e6 / BRANCHES
    return [
        Row(name=f"task of a task group, {loop}", value=bare * each, unit="us"),
        Row(name=f"branch of run.parallel, a function, {loop}", value=found["functions"] * each, unit="us"),
        ratio_row(
            f"run.parallel of {BRANCHES:,} no-ops against the group, {loop}", found["functions"] / bare, at_most=2
        ),
        ratio_row(f"run.map of {BRANCHES:,} no-ops, all at once, {loop}", found["map"] / bare, at_most=2),
        ratio_row(f"run.map of {BRANCHES:,} no-ops, 100 at a time, {loop}", found["map 100"] / bare, at_most=2),
        Row(
            name=f"run.parallel of {BRANCHES:,} that wait once against the group, {loop}",
            value=found["waits"] / bare_waits,
            unit="x",
            note="each has a task of its own that the scope owns",
        ),
        Row(
            name=f"run.map of {BRANCHES:,} that wait once, 100 at a time, {loop}",
            value=found["map waits"] / bare_waits,
            unit="x",
        ),
        Row(
            name=f"item of run.map, {MANY:,} items, 100 at a time, {loop}", value=found["many"] / MANY * 1e6, unit="us"
        ),
        Row(
            name=f"branch of holdfast.parallel, an agent, {loop}",
            value=found["agents"] * each,
            unit="us",
            target="<= 15",
            met=found["agents"] * each <= 15,
            note="a child run: its scope, its own text, two events in the log",
        ),
        Row(name=f"the same against the group, {loop}", value=found["agents"] / bare, unit="x"),
    ]


def rows() -> list[Row]:
    """All figures."""
    found = asyncio.run(_costs("asyncio"))
    gc.collect()
    gc.freeze()  # what the first host left is not looked through again and again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found += runner.run(_costs("uvloop"))
    return found


if __name__ == "__main__":
    print_rows(rows())
