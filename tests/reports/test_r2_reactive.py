"""Report R2, point by point, on the reactive bridge: one test for each thing that counts as right there.

The scenarios, the suite, the benchmark and the coverage that the report asks for are run in
`tests.integrations.reactive.test_suites`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import reactivex
from reactivex import Subject
from reactivex import operators as ops
from reactivex.scheduler import ThreadPoolScheduler

from holdfast.errors import RunInterrupted, ScopeClosed
from holdfast.integrations.reactive import ReactiveBridge
from holdfast.runtime import current_scope
from holdfast.testing import ScheduleFailure, explore
from tests.integrations.reactive.watching import Busy, Watcher, gone, soon
from tests.reports.models_r2 import Bridge

ITEMS = 400
THREADS = 8


class Payload:
    """Something that an item carries."""


def push(subject: Subject[Any], count: int = ITEMS) -> list[threading.Thread]:
    """8 threads that push."""

    def some() -> None:
        for _ in range(count // THREADS):
            subject.on_next(Payload())

    threads = [threading.Thread(target=some) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


async def until_over(threads: list[threading.Thread]) -> None:
    await soon(lambda: not any(thread.is_alive() for thread in threads))


def test_a_task_is_tracked_before_anybody_can_see_it() -> None:
    async def main() -> None:
        untracked: list[Any] = []
        bridge = ReactiveBridge(concurrency=20).open()

        async def work(_: Payload) -> None:
            # The very first step of the task, on a loop that starts tasks at once if it can.
            scope = current_scope()
            assert scope is not None
            tasks = [member for member in scope.members() if member.kind == "task"]
            if not tasks or scope.parent is not bridge.scope or bridge.statistics().in_flight < 1:
                untracked.append(scope)

        subject: Subject[Payload] = Subject()
        subject.pipe(bridge.each(work)).subscribe()
        threads = push(subject)
        await until_over(threads)
        await bridge.drain()
        assert untracked == []
        assert bridge.statistics().done == ITEMS
        gone(bridge)

    asyncio.run(main())
    explore_births()


def explore_births() -> None:
    """The same, whatever the order, with tasks that begin inside of the call that makes them."""

    async def test() -> None:
        subject: Subject[int] = Subject()
        seen: list[int] = []

        async def work(item: int) -> None:
            scope = current_scope()
            assert scope is not None
            seen.append(scope.statistics().tasks)
            await asyncio.sleep(0)

        async with ReactiveBridge(concurrency=3) as bridge:
            subject.pipe(bridge.each(work)).subscribe()
            for item in range(4):
                subject.on_next(item)
                await asyncio.sleep(0)
            subject.on_completed()
        assert len(seen) == 4
        assert min(seen) >= 1

    explore(test, schedules=100, tasks="eager")
    explore(test, schedules=100)


def test_discarding_a_task_cannot_raise_while_others_are_added_and_all_are_ended() -> None:
    async def main() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        for _ in range(3):
            subject: Subject[Payload] = Subject()
            bridge = ReactiveBridge(concurrency=50, grace_s=2).open()
            watcher = Watcher()
            subject.pipe(bridge.each(Busy(turns=2))).subscribe(watcher)
            threads = push(subject)
            await soon(lambda bridge=bridge: bridge.statistics().done > 20)  # type: ignore[misc]
            cleaners = [threading.Thread(target=bridge.cleanup) for _ in range(3)]
            for cleaner in cleaners:
                cleaner.start()
            await until_over(threads + cleaners)
            gone(bridge)
            assert watcher.breaches == []
        assert errors == []

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_clean_up_covers_what_arrives_meanwhile(kind: str) -> None:
    async def main() -> None:
        subject: Subject[Payload] = Subject()
        busy, watcher, late = Busy(wait_s=1000), Watcher(), Watcher()
        bridge = ReactiveBridge(concurrency=20, grace_s=2).open()
        subject.pipe(bridge.each(busy)).subscribe(watcher)
        threads = push(subject)
        await soon(lambda: busy.alive == 20)
        if kind == "async":
            assert (await bridge.aclose()).outcome == "gone"
        else:
            cleaner = threading.Thread(target=bridge.cleanup)
            cleaner.start()
            await until_over([cleaner])
        await until_over(threads)
        gone(bridge)
        assert busy.alive == 0
        assert isinstance(watcher.error, RunInterrupted)
        subject.pipe(bridge.each(busy)).subscribe(late)
        assert isinstance(late.error, ScopeClosed)

    asyncio.run(main())


def test_the_bridge_of_the_report_does_not() -> None:
    async def test() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        busy = Busy(turns=5)
        subject: Subject[int] = Subject()
        subject.subscribe(lambda item: bridge.on_message(lambda: busy(item)))

        async def stream() -> None:
            for item in range(3):
                subject.on_next(item)
                await asyncio.sleep(0)

        source = asyncio.create_task(stream())
        await asyncio.sleep(0)
        await bridge.cleanup()
        await source
        assert busy.alive == 0

    with pytest.raises(ScheduleFailure):
        explore(test)


def test_no_reference_is_kept_after_completion_under_load() -> None:
    async def main() -> None:
        alive: weakref.WeakSet[Payload] = weakref.WeakSet()
        pool = ThreadPoolScheduler(2)
        async with ReactiveBridge(concurrency=50, buffer=100) as bridge:

            async def work(payload: Payload) -> Payload:
                alive.add(payload)
                await asyncio.sleep(0)
                return payload

            numbers = reactivex.from_iterable(range(5 * ITEMS))
            made = numbers.pipe(ops.subscribe_on(pool), ops.map(lambda _: Payload()))
            assert await bridge.collect(made.pipe(bridge.each(work), ops.count())) == [5 * ITEMS]
            gc.collect()
            assert len(alive) == 0  # while the bridge is open
            assert bridge.scope.members() == ()
        pool.executor.shutdown()

    asyncio.run(main())
