"""What the reactive bridge costs: items through its operator against bare asyncio tasks.

Run it: ``python -m benchmarks.bench_reactive``.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import reactivex
from reactivex import Subject

from benchmarks.rows import Row, print_rows
from holdfast.integrations.reactive import ReactiveBridge

__all__ = ["bare", "bridged", "rows"]

ITEMS = 10_000
CONCURRENCY = 100
ROUNDS = 9
THREADS = 8
AT_LEAST = 0.8


async def work(item: int) -> int:
    """What is done with an item: as little as work that waits can do."""
    await asyncio.sleep(0)
    return item


async def bare(items: int = ITEMS) -> int:
    """A task for each item, and a semaphore: as one does it by hand, with nobody to own what an error leaves behind."""
    gate = asyncio.Semaphore(CONCURRENCY)
    count = 0

    async def one(item: int) -> None:
        nonlocal count
        async with gate:
            await work(item)
        count += 1

    await asyncio.gather(*[asyncio.create_task(one(item)) for item in range(items)])
    return count


async def chained(items: int = ITEMS) -> int:
    """The least that bare tasks can do: a task that ends starts the next."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    numbers = iter(range(items))
    tasks: set[asyncio.Task[int]] = set()
    count = 0

    def start() -> None:
        for number in numbers:
            task = loop.create_task(work(number))
            tasks.add(task)
            task.add_done_callback(ended)
            return

    def ended(task: asyncio.Task[int]) -> None:
        nonlocal count
        tasks.discard(task)
        count += 1
        start()
        if count == items:
            over.set_result(None)

    for _ in range(CONCURRENCY):
        start()
    await over
    return count


async def bridged(items: int = ITEMS, *, ordered: bool = False) -> int:
    """The same through the bridge."""
    count = 0

    def told(_: int) -> None:
        nonlocal count
        count += 1

    async with ReactiveBridge(concurrency=CONCURRENCY, buffer=items, ordered=ordered) as bridge:
        reactivex.from_iterable(range(items)).pipe(bridge.each(work)).subscribe(told)
    return count


async def bridged_in_order() -> int:
    """The same, with the results in order."""
    return await bridged(ordered=True)


async def from_threads() -> int:
    """Items of 8 threads, which are held back by a buffer of a hundred."""
    count = 0

    def told(_: int) -> None:
        nonlocal count
        count += 1

    subject: Subject[int] = Subject()

    def push() -> None:
        for number in range(ITEMS // THREADS):
            subject.on_next(number)

    async with ReactiveBridge(concurrency=CONCURRENCY, buffer=CONCURRENCY) as bridge:
        subject.pipe(bridge.each(work)).subscribe(told)
        threads = [threading.Thread(target=push) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.001)
        await bridge.drain()
    return count


def _seconds(*ways: Callable[[], Coroutine[Any, Any, int]]) -> list[list[float]]:
    """How long each way takes, some times; they take turns."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, found in zip(ways, taken, strict=True):
            gc.collect()
            began = time.perf_counter()
            assert asyncio.run(way()) == ITEMS
            found.append(time.perf_counter() - began)
    return taken


def rows() -> list[Row]:
    """All figures."""
    by_hand, least, operator, ordered, threads = _seconds(bare, chained, bridged, bridged_in_order, from_threads)
    share = statistics.median(one / other for one, other in zip(by_hand, operator, strict=True))
    share_of_least = statistics.median(one / other for one, other in zip(least, operator, strict=True))
    what = f"{ITEMS:,} items, {CONCURRENCY} at a time"
    return [
        Row(name=f"bare tasks behind a semaphore, {what}", value=ITEMS / min(by_hand), unit="1/s"),
        Row(name=f"bare tasks, each starting the next, {what}", value=ITEMS / min(least), unit="1/s"),
        Row(name=f"the bridge, {what}", value=ITEMS / min(operator), unit="1/s"),
        Row(name=f"the bridge in order, {what}", value=ITEMS / min(ordered), unit="1/s"),
        Row(name=f"the bridge, fed by {THREADS} threads that it holds back", value=ITEMS / min(threads), unit="1/s"),
        Row(
            name="throughput of the bridge against bare tasks behind a semaphore",
            value=share,
            unit="x",
            target=f">= {AT_LEAST:g}",
            met=share >= AT_LEAST,
            note=f"median of {ROUNDS} pairs",
        ),
        Row(
            name="throughput of the bridge against bare tasks, each starting the next",
            value=share_of_least,
            unit="x",
            note="they have no stream on either side, no owner, and no account",
        ),
    ]


if __name__ == "__main__":
    print_rows(rows())
