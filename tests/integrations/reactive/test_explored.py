"""The bridge under many schedules: subscribe, push, complete, dispose, clean up and drain in any order.

Whatever the order: the rules of Rx hold, every item is accounted for, and nothing is left when the bridge has closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from reactivex import Subject

from holdfast.errors import Interrupted, ScopeClosed
from holdfast.integrations.reactive import ReactiveBridge
from holdfast.testing import ScheduleFailure, explore
from tests.integrations.reactive.watching import Busy, Watcher, accounted, gone
from tests.reports.models_r2 import Bridge

ITEMS = 4


def everywhere(test: Callable[[], Coroutine[Any, Any, None]], schedules: int = 150) -> None:
    explore(test, schedules=schedules)
    explore(test, schedules=schedules, chooser="pct")
    explore(test, schedules=schedules // 2, tasks="eager")


async def settled(bridge: ReactiveBridge, busy: Busy, watcher: Watcher) -> None:
    await asyncio.sleep(1)  # all the rest, in virtual time
    gone(bridge)
    assert busy.alive == 0
    assert busy.begun == busy.ended
    assert watcher.breaches == []


async def push(subject: Subject[int]) -> None:
    for item in range(ITEMS):
        await asyncio.sleep(0)
        subject.on_next(item)
    await asyncio.sleep(0)
    subject.on_completed()


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_pushed_comes_out_once(ordered: bool) -> None:
    async def test() -> None:
        busy, watcher = Busy(turns=2), Watcher()
        subject: Subject[int] = Subject()
        async with ReactiveBridge(concurrency=2, ordered=ordered) as bridge:
            subject.pipe(bridge.each(busy)).subscribe(watcher)
            pushing = asyncio.create_task(push(subject))
        await pushing
        await settled(bridge, busy, watcher)
        assert watcher.completed
        assert (watcher.values if ordered else sorted(watcher.values)) == list(range(ITEMS))
        assert busy.most <= 2
        assert bridge.statistics().done == ITEMS

    everywhere(test)


def test_a_subscription_that_is_disposed_at_any_moment_leaves_nothing() -> None:
    async def test() -> None:
        busy, watcher = Busy(turns=2), Watcher()
        subject: Subject[int] = Subject()
        bridge = ReactiveBridge(concurrency=2).open()
        subscription = subject.pipe(bridge.each(busy)).subscribe(watcher)

        async def dispose() -> None:
            await asyncio.sleep(0)
            watcher.disposed = not watcher.ended
            subscription.dispose()

        async with asyncio.TaskGroup() as group:
            group.create_task(push(subject))
            group.create_task(dispose())
        await bridge.scope.join()
        await settled(bridge, busy, watcher)
        assert watcher.disposed or watcher.completed
        assert not subject.observers

    everywhere(test)


@pytest.mark.parametrize("way", ["aclose", "cleanup", "drain", "interrupt"])
def test_a_bridge_that_ends_at_any_moment_takes_everything_along(way: str) -> None:
    async def test() -> None:
        busy, watcher = Busy(turns=2), Watcher()
        subject: Subject[int] = Subject()
        bridge = ReactiveBridge(concurrency=2).open()
        late = Watcher()

        async def subscribe() -> None:
            await asyncio.sleep(0)
            subject.pipe(bridge.each(busy)).subscribe(watcher)
            await asyncio.sleep(0)
            subject.pipe(bridge.each(busy)).subscribe(late)

        async def end() -> None:
            await asyncio.sleep(0)
            if way == "aclose":
                assert (await bridge.aclose("test")).outcome == "gone"
            elif way == "drain":
                assert (await bridge.drain()).outcome == "gone"
            elif way == "cleanup":
                bridge.cleanup("test")
            else:
                bridge.scope.interrupt.trigger("test")

        async with asyncio.TaskGroup() as group:
            group.create_task(push(subject))
            group.create_task(subscribe())
            group.create_task(end())
        await settled(bridge, busy, watcher)
        assert late.breaches == []
        for one in (watcher, late):
            assert one.ended
        if way == "drain":
            assert bridge.statistics().interrupted == 0
            for one in (watcher, late):
                assert one.completed or isinstance(one.error, ScopeClosed)

    everywhere(test)


def test_an_owner_that_is_interrupted_at_any_moment_takes_the_bridge_along() -> None:
    async def test() -> None:
        busy, watcher = Busy(turns=2), Watcher()
        subject: Subject[int] = Subject()
        bridges: list[ReactiveBridge] = []
        pushing = asyncio.create_task(push(subject))

        async def owner() -> None:
            async with ReactiveBridge(concurrency=2) as bridge:
                bridges.append(bridge)
                subject.pipe(bridge.each(busy)).subscribe(watcher)
                await bridge.collect(subject.pipe(bridge.each(busy)))

        from holdfast.runtime import Scope

        scope = Scope("owner", parent=None).open()
        scope.spawn(owner)
        await asyncio.sleep(0)
        receipt = await scope.stop("test")
        assert receipt.outcome == "gone"
        await pushing
        for bridge in bridges:
            await settled(bridge, busy, watcher)

    everywhere(test)


def test_an_item_that_fails_at_any_moment_ends_its_stream_alone() -> None:
    async def test() -> None:
        busy, first, second = Busy(turns=2), Watcher(), Watcher()
        subject: Subject[int] = Subject()

        async def fragile(item: int) -> int:
            await asyncio.sleep(0)
            if item == 1:
                raise ValueError(item)
            return int(await busy(item))

        async with ReactiveBridge(concurrency=2) as bridge:
            subject.pipe(bridge.each(fragile)).subscribe(first)
            subject.pipe(bridge.each(busy)).subscribe(second)
            await push(subject)
        await settled(bridge, busy, first)
        assert isinstance(first.error, ValueError)
        assert second.completed
        assert sorted(second.values) == list(range(ITEMS))

    everywhere(test)


def test_a_feedback_from_the_observer_is_one_stream_among_others() -> None:
    async def test() -> None:
        busy, watcher = Busy(), Watcher()
        subject: Subject[int] = Subject()
        async with ReactiveBridge(concurrency=2) as bridge:

            def again(value: int) -> None:
                if value < 3:
                    subject.on_next(value + 1)
                else:
                    subject.on_completed()

            results = subject.pipe(bridge.each(busy))
            results.subscribe(again)
            results.subscribe(watcher)
            subject.on_next(0)
        await settled(bridge, busy, watcher)
        assert sorted(watcher.values) == [0, 1, 2, 3]

    everywhere(test)


# The same properties on the bridge of the report


def test_the_explorer_sees_the_bridge_of_the_report_lose_what_arrives_during_clean_up() -> None:
    async def test() -> None:
        subject: Subject[int] = Subject()
        bridge = Bridge(asyncio.get_running_loop())
        busy = Busy(turns=3)
        subject.subscribe(lambda item: bridge.on_message(lambda: busy(item)))
        pushing = asyncio.create_task(push(subject))
        await asyncio.sleep(0)
        await bridge.cleanup()
        assert busy.alive == 0
        await pushing
        assert not bridge.tasks

    with pytest.raises(ScheduleFailure):
        explore(test)


def test_a_statistic_taken_at_any_moment_adds_up() -> None:
    async def test() -> None:
        busy, watcher = Busy(turns=2), Watcher()
        subject: Subject[int] = Subject()
        bridge = ReactiveBridge(concurrency=2, buffer=1, overflow="drop").open()
        subscription = subject.pipe(bridge.each(busy)).subscribe(watcher)

        async def look() -> None:
            for _ in range(6):
                accounted(bridge.statistics(), over=False)
                await asyncio.sleep(0)
            subscription.dispose()

        async with asyncio.TaskGroup() as group:
            group.create_task(push(subject))
            group.create_task(look())
        try:
            await bridge.scope.join()
        except Interrupted:
            raise AssertionError("nobody interrupted the bridge") from None
        await settled(bridge, busy, watcher)

    everywhere(test)
